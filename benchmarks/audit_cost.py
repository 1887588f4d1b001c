"""What it costs to audit a step once more, as every statistics step is: a microbatch with it and without.

    python -m benchmarks.audit_cost --device cuda --precisions delayed,current,block --out benchmarks/results/h200_audit_cost.json
    python -m benchmarks.audit_cost --device cpu --precisions delayed,block,nvfp4 --out benchmarks/results/cpu_audit_cost.json

On CUDA it is Qwen3-1.7B's shape with fused layers on Transformer Engine, on a CPU a small emulated model. Microbatches with and
without take turns, and the medians are compared. A run audits one microbatch in `log.fp8_statistics` steps (100), so its share of
a run is the difference over the time of 100 steps, here of as many microbatches as `--microbatches` says.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.device_time import elapsed
from benchmarks.machine import measured_on, write
from packing.arrow import Pack
from packing.batch import build_microbatch
from pretrain.model import huggingface as model
from pretrain.model.fused.layers import choose_arithmetic
from pretrain.model.gradients import attach_main_gradients, clear_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.wrapping import convert, fuse
from pretrain.precision.linear import PrecisionContext
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.scope import decide
from pretrain.precision.selection import make_backend
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.run.assembly import EXAMINED_AGAIN
from pretrain.run.trial import QWEN3_1_7B
from pretrain.settings.recipe import LossSettings, ModelSettings
from pretrain.verify import audit

SHAPES: dict[str, dict[str, Any]] = {
    "cuda": QWEN3_1_7B,
    "cpu": {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "head_dim": 64}
    | {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096},
}
PACKS = {"cuda": (8, 4096), "cpu": (4, 512)}
STATISTICS_STEPS = 100


class Trained:
    """A model in low precision and a microbatch of it."""

    def __init__(self, precision: str, device: torch.device) -> None:
        emulated = device.type == "cpu"
        settings = LowPrecisionSettings(scope="linear+head").resolved(precision)
        backend = "emulation" if emulated else "transformer_engine"
        self.active = ActivePrecision(precision, PRECISIONS[precision], backend, settings)
        attention = "packed_sdpa" if emulated else "packed_cudnn"
        config = {"model_type": "qwen3", "tie_word_embeddings": True} | SHAPES[device.type]
        chosen = ModelSettings(config=config)
        loaded = model.load_config(chosen)
        hf = model.build(chosen, loaded, weights=torch.bfloat16, seed=1, device=device, backend=attention)
        self.packed = PackedLanguageModel(hf, attention, LossSettings()).train()
        layers = decoder_layers(hf)
        decisions = decide(hf, list(layers.values()), self.active)
        self.context = self.packed.context = PrecisionContext(make_backend(self.active, device), torch.bfloat16)
        arithmetic, _ = choose_arithmetic("auto", self.active, device.type, self.context)
        if arithmetic:
            self.packed.fused = fuse(layers, {self.context.backend: decisions}, arithmetic)
        convert(hf, decisions, self.context, self.packed.fused)
        attach_main_gradients(self.packed, torch.float32, self.packed.fused.stacks if self.packed.fused else ())
        packs, length = PACKS[device.type]
        draw = np.random.default_rng(0)
        tokens = [draw.integers(config["vocab_size"], size=length).astype(np.uint32) for _ in range(packs)]
        cut = np.array([length // 4, length - length // 4], dtype=np.int32)
        self.inputs = inputs_of(build_microbatch([Pack(each, cut) for each in tokens], mask_boundaries=True), device)
        self.scale = 1 / (packs * length)
        for _ in range(3):
            self.microbatch()
        self.entries = audit.observe(self.packed, lambda: self.packed(**self.inputs) * self.scale, self.active, decisions)

    def microbatch(self) -> None:
        (self.packed(**self.inputs) * self.scale).backward()
        clear_main_gradients(self.packed.parameters())

    def audited(self) -> None:
        with (
            audit.confirming(self.packed, self.active, self.entries, step=100, most=EXAMINED_AGAIN),
            audit.confirming_histories(self.context, self.active) if self.active.precision.keeps_history else nullcontext(),
        ):
            self.microbatch()


def measure(precision: str, device: torch.device, rounds: int, microbatches: int) -> dict[str, float]:
    trained = Trained(precision, device)
    trained.audited()
    pairs = [(elapsed(trained.microbatch, device), elapsed(trained.audited, device)) for _ in range(rounds)]
    plain, audited = (statistics.median(each) for each in zip(*pairs, strict=True))
    added = audited - plain
    share = added / (STATISTICS_STEPS * microbatches * plain)
    return {"microbatch_ms": 1e3 * plain, "audited_ms": 1e3 * audited, "added_ms": 1e3 * added, "share_of_a_run": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(SHAPES), required=True)
    parser.add_argument("--precisions", default="delayed,current,block")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--microbatches", type=int, default=1, help="in a step; one is the least that a step can have")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    found = {
        precision: measure(precision, device, arguments.rounds, arguments.microbatches)
        for precision in arguments.precisions.split(",")
    }
    report = {
        **measured_on(),
        "statistics_steps": STATISTICS_STEPS,
        "precisions": found,
    }
    write(arguments.out, report)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
