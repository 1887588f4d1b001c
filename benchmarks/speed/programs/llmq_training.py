"""Train with llmq (package pyllmq), by the calls of its own training script.

    python benchmarks/speed/programs/llmq_training.py bf16 TASK.json MICROBATCH
    python benchmarks/speed/programs/llmq_training.py e4m3 TASK.json MICROBATCH

llmq has Qwen2's layers only, without norms of queries and keys. Its master weights, moments and
gradients are in BF16, with stochastic rounding, as in its published table. Every step prints a line
of JSON with its seconds and its loss.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyllmq

# llmq's own settings of its table, by hidden size and type of the GEMMs. Its recomputation and
# offloading at 7 billion parameters are left out, because an H200 has the memory.
OPTIONS: dict[tuple[int, str], dict[str, Any]] = {
    (1536, "bf16"): {"lmhead_chunks": 4},
    (2048, "bf16"): {"lmhead_chunks": 4},
    (2048, "e4m3"): {"lmhead_chunks": 4},
    (3584, "bf16"): {"lmhead_chunks": 2, "attn_bwd_chunks": 2},
    (3584, "e4m3"): {"lmhead_chunks": 4, "attn_bwd_chunks": 4},
}


def write_tokens(file: Path, vocabulary: int, count: int) -> None:
    """Write frequent and rare tokens in llmq's format."""
    header = np.zeros(256, np.int32)
    header[:2] = np.frombuffer(b"BIN.TOK\n", np.int32)
    # The version, the bytes of a token, the tokens, the vocabulary, and no masks.
    header[2:7] = 2, 4, count, vocabulary, 0
    draws = np.random.default_rng(0).pareto(1.0, count) * 20
    tokens = (draws.astype(np.int64) % (vocabulary - 1936)).astype(np.int32)
    file.write_bytes(header.tobytes() + tokens.tobytes())


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gemms", choices=["bf16", "e4m3"])
    parser.add_argument("task", type=Path)
    parser.add_argument("microbatch", type=int)
    arguments = parser.parse_args()
    task = json.loads(arguments.task.read_text())
    shape = task["config"]
    microbatch = arguments.microbatch
    length = task["length"]
    accumulation = task["sequences"] // microbatch
    config = pyllmq.LLamaConfig(
        architecture="qwen2",
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        vocab_size=shape["vocab_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_key_value_heads"],
        num_hidden_layers=shape["num_hidden_layers"],
        rms_norm_eps=1e-6,
        tie_word_embeddings=shape["tie_word_embeddings"],
        use_qkv_bias=shape["model_type"] == "qwen2",
        dtype="bf16",
    )
    options = pyllmq.LLamaOptions()
    options.matmul_type = arguments.gemms
    options.momentum_type = "bf16"
    options.variance_type = "bf16"
    for name, value in OPTIONS.get((shape["hidden_size"], arguments.gemms), {}).items():
        setattr(options, name, value)
    file = Path(tempfile.mkdtemp()) / "train.bin"
    write_tokens(file, shape["vocab_size"], 2 * length * task["sequences"] + length + 1)
    loader = pyllmq.DataLoader([str(file)], microbatch * length, seed=1)
    trainer = pyllmq.LLMQTrainer(
        ngpu=1,
        config=config,
        options=options,
        batch_size=microbatch,
        seq_len=length,
        grad_accum=accumulation,
        memcpy_all_gather=True,
        memcpy_send_recv=True,
    )
    trainer.init_weights()
    inputs = np.empty((microbatch, length), np.int32)
    targets = np.empty_like(inputs)
    loader.load_batch(inputs, targets)
    for step in range(1, task["steps"] + 1):
        if not loader.has_next(accumulation):
            loader.advance_epoch()
            loader.load_batch(inputs, targets)
        begin = time.perf_counter()
        for _ in range(accumulation):
            trainer.step(inputs, targets)
            if loader.has_next():
                loader.load_batch(inputs, targets)
        result = trainer.update(2e-5, 0.9, 0.95, step, 0.1, 1.0)
        seconds = time.perf_counter() - begin
        print(json.dumps({"seconds": seconds, "loss": float(result["loss"])}), flush=True)
    # Its threads would need seconds to end.
    os._exit(0)


if __name__ == "__main__":
    main()
