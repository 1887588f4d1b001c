#!/usr/bin/env bash
# Install the pinned packages of the other trainers into folders of PEERS, and measure all trainers
# on an idle GPU, after `make gpu`. `make speed-table` starts this script:
#
#   bash benchmarks/speed/programs/measure.sh PEERS FILE.json [OPTIONS OF benchmarks.speed programs]
#
# The packages come without their dependencies, because torch and most others are those of .venv.
# Megatron-Core's wheel has no training script, so three files of its branch core_r0.19.0 are fetched
# from its repository, unless they are in PEERS/Megatron-Core already. PYTHON is the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
peers=$1
out=$2
python=${PYTHON:-.venv/bin/python}
for requirements in benchmarks/speed/programs/packages/*.txt; do
    folder=$peers/$(basename "$requirements" .txt)
    [ -e "$folder/.installed" ] && continue
    "$python" -m pip install --quiet --no-deps --target "$folder" -r "$requirements" &&
        touch "$folder/.installed" || echo "$folder: not installed; its rows will be missing"
done
# Megatron-Core runs `make` for a helper that its wheel contains, but the wheel has no makefile.
datasets=$peers/Megatron-Core/megatron/core/datasets
[ -d "$datasets" ] && printf 'default:\n' >"$datasets/Makefile"
for script in pretrain_gpt.py gpt_builders.py model_provider.py; do
    [ -e "$peers/Megatron-Core/$script" ] && continue
    curl --fail --silent --show-error --output "$peers/Megatron-Core/$script" \
        "https://raw.githubusercontent.com/NVIDIA/Megatron-LM/f8837c04ef6cbef6cdefb8de001aad63178aebbf/$script" ||
        echo "$script: not fetched; Megatron-Core's rows will be missing"
done
mkdir -p "$(dirname "$out")"
exec "$python" -m benchmarks.speed programs --packages "$peers" --out "$out" "${@:3}"
