#!/usr/bin/env bash
# Start the training processes of one node with accelerate launch. cluster/train.sbatch runs this
# script once on each node with srun.
set -euo pipefail
# Give each started command its own process group. SLURM sends SIGUSR1 to the group of this script,
# and the signal would kill accelerate launch.
set -m

if [[ -z "${VIRTUAL_ENV:-}" && -f .venv/bin/activate ]]; then
    # shellcheck disable=SC1091
    source .venv/bin/activate
fi
processes="${PROCESSES_PER_NODE:-${SLURM_GPUS_ON_NODE:-}}"
: "${processes:?no GPU is allocated: set PROCESSES_PER_NODE to the number of processes per node}"
read -r -a options <<<"${LAUNCH_OPTIONS:-}"

accelerate launch --quiet --config_file "$CONFIG" \
    --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" --num_processes "$((SLURM_NNODES * processes))" \
    --main_process_ip "$MAIN_PROCESS_IP" --main_process_port "$MAIN_PROCESS_PORT" --same_network \
    "${options[@]}" train_accelerate.py "$RECIPE" "$@" &
launcher=$!
# Forward SIGUSR1 to the training processes only. They finish the step and save.
trap 'pkill -USR1 -P "$launcher" -f train_accelerate.py || true' USR1
trap 'kill -TERM -- "-$launcher" || true' TERM

code=0
wait "$launcher" || code=$?
while kill -0 "$launcher" 2>/dev/null; do # a signal interrupts `wait`
    code=0
    wait "$launcher" || code=$?
done
exit "$code"
