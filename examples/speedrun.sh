#!/usr/bin/env bash
# Train GPT-2 with 124 million parameters in FP8 on one H100 or H200, and serve the model.
#
#   make gpu && .venv/bin/pip install 'transformers[serving]'
#   bash examples/speedrun.sh
#
# The dataset is one of the 14 files (2 GB) of FineWeb-Edu's sample of 10 billion tokens. Settings
# after the command override those of the recipe. To train on your own text and tokenizer:
#
#   TEXT=my.jsonl bash examples/speedrun.sh data.tokenizer=my_tokenizer
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH

prompt=${PROMPT:-The most important thing about plants is}
run=${RUN:-runs/speedrun}
file=sample/10BT/000_00000.parquet
if [ -z "${TEXT:-}" ]; then
    TEXT=data/fineweb-edu/$file
    hf download HuggingFaceFW/fineweb-edu $file --repo-type dataset --local-dir data/fineweb-edu
fi

# `train` packs the text first. One epoch of 0.7 billion tokens is short, so a step has half the
# tokens of the recipe's step, and the learning rate is higher.
python -m pretrain train recipes/gpt2_fineweb_edu.yaml \
    --config fp8_delayed fp8_config.scope=linear+head run_dir=$run \
    data.source="$TEXT" data.subset=null data.packs=packs/speedrun train.epochs=1 \
    batch.tokens=262144 optimizer.learning_rate=1.0e-3 schedule.warmup=200 "$@"

# Serve the model with OpenAI's API, and request one completion.
transformers serve $run/final --port 8765 >$run/server.log 2>&1 &
server=$!
trap 'kill $server' EXIT
until curl -sf localhost:8765/health >/dev/null; do
    kill -0 $server  # fails and ends the script if the server has exited
    sleep 1
done
curl -s localhost:8765/v1/completions -H 'Content-Type: application/json' \
    -d "{\"model\": \"$run/final\", \"prompt\": \"$prompt\", \"max_tokens\": 32}"
echo
