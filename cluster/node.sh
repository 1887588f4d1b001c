#!/usr/bin/env bash
# One node's part of a job of cluster/train.sbatch, which srun starts once on each: the processes of that node, by accelerate launch.
set -euo pipefail
set -m # what is started has a process group of its own: SLURM signals this script's, and accelerate launch would die of SIGUSR1

if [[ -z "${VIRTUAL_ENV:-}" && -f .venv/bin/activate ]]; then
    # shellcheck disable=SC1091
    source .venv/bin/activate
fi
here="${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}"
: "${here:?no GPU is allocated, so say how many processes a node runs: PROCESSES_PER_NODE}"
read -r -a options <<<"${LAUNCH_OPTIONS:-}"

accelerate launch --quiet --config_file "$CONFIG" \
    --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" --num_processes "$((SLURM_NNODES * here))" \
    --main_process_ip "$MAIN_PROCESS_IP" --main_process_port "$MAIN_PROCESS_PORT" --same_network \
    "${options[@]}" train_accelerate.py "$RECIPE" "$@" &
launcher=$!
# Time is up: the training processes are told, not their launcher. They finish the step and save.
trap 'pkill -USR1 -P "$launcher" -f train_accelerate.py || true' USR1
trap 'kill -TERM -- "-$launcher" || true' TERM

code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do # a signal has interrupted the wait
    code=0
    wait "$launcher" || code=$?
done
exit "$code"
