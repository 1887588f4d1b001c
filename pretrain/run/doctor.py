"""Which precision works on this machine, on what, and how fast for one layer: `python -m pretrain doctor`.

    python -m pretrain doctor                                   a row for each precision
    python -m pretrain doctor --recipe recipes/my_model.yaml    for the layers of that model

Libraries say that a device has a precision, and then its product fails: so a layer is trained in it, beside the same one in FP32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from foundation.command import CommandParser, number
from foundation.errors import InputError
from foundation.tables import UNKNOWN, on_screen
from foundation.units import three_digits
from packing.arrow import Pack
from packing.batch import build_microbatch
from pretrain.metrics.flops import Shape
from pretrain.metrics.run_folder import describe_environment
from pretrain.model import huggingface as model
from pretrain.model.attention import backends as attention
from pretrain.model.attention.operator import Heads
from pretrain.model.gradients import attach_main_gradients, clear_main_gradients, gradient_of
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.wrapping import choose_arithmetic, convert, fuse, not_fused_because, wrap_layers
from pretrain.precision.linear import PrecisionContext
from pretrain.precision.scope import check_shapes, decide
from pretrain.precision.selection import make_backend, missing_on
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import LossSettings, ModelSettings

ROOT = Path(__file__).resolve().parents[2]
QWEN3_1_7B = {
    **{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 32768},
    **{"rope_theta": 1e6, "tie_word_embeddings": True},
}
SMALL = QWEN3_1_7B | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
VOCABULARY = 256  # embedding and head are not what is tried
COMPARED = 256  # tokens of a pack, at most, that are compared with FP32
MOST_ERROR = 0.75  # of a gradient's norm; FP8 is usually 0.10 to 0.15 off, FP4 0.40 to 0.50
REHEARSALS = 4  # of delayed scaling, whose first scales are one
SECONDS = 300  # for one precision
HEADER = ("precision", "computes on", "ms", "tokens/s", "off FP32", "why not on hardware")


@dataclass(frozen=True)
class LayerSetup:
    """What is tried: a layer of this model, on this device."""

    device: torch.device
    settings: ModelSettings
    length: int  # tokens of a pack
    tokens: int  # of a timed forward and backward, at least

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> LayerSetup:
        gpu = torch.cuda.is_available() and not arguments.cpu
        recipe = load_recipe(arguments.recipe) if arguments.recipe else None
        settings = recipe.model if recipe else ModelSettings(config=QWEN3_1_7B if gpu else SMALL)
        length = recipe.data.length if recipe else 4096 if gpu else 128
        device = torch.device("cuda", 0) if gpu else torch.device("cpu")
        return cls(device, settings, length, arguments.tokens or max(length, 8192 if gpu else 256))

    @cached_property
    def hf(self) -> PreTrainedModel:
        """The whole model, on the meta device."""
        return model.build_on_meta(model.load_config(self.settings))

    def describe(self) -> str:
        shape = Shape.of(self.hf)
        heads = f"{shape.heads} query and {shape.kv_heads} KV heads of {shape.head_dim}"
        layer = f"{type(self.hf).__name__}, hidden {shape.hidden}, feed-forward {shape.feed_forward}, {heads}"
        return f"one layer of {layer}; {self.tokens:,} tokens in packs of {self.length:,}"


def main(arguments: list[str]) -> int:
    """Print the table; the status is 1 where a precision works neither on hardware nor emulated."""
    parser = CommandParser("python -m pretrain doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, help="whose layers are tried; default: Qwen3-1.7B's on a GPU, small ones on a CPU")
    parser.add_argument("--tokens", type=number(1, whole=True), help="of a timed forward and backward, at least: in whole packs")
    parser.add_argument("--precisions", type=lambda text: text.split(","), metavar="A,B", help="only these")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, although there is a GPU")
    parser.add_argument("--try", nargs=2, dest="only", metavar=("PRECISION", "BACKEND"), help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if unknown := [name for name in parsed.precisions or () if name not in PRECISIONS]:
        raise InputError(f"--precisions: no {', '.join(unknown)} among {', '.join(PRECISIONS)}")
    setup = LayerSetup.of(parsed)
    if parsed.only:
        print(json.dumps(try_precision(setup, *parsed.only)))
        return 0
    environment, missing = describe_environment({}), missing_on(setup.device.type)
    packages = environment["packages"]
    named = ", ".join(f"{name} {packages[name]}" for name in ("torch", "transformer-engine") if name in packages)
    device = ", ".join(dict.fromkeys(environment["gpus"])) if setup.device.type == "cuda" else "CPU"
    print(f"{device}; {named}, CUDA {environment['cuda']}\n{setup.describe()}\n")
    rows = []
    for name in dict.fromkeys(parsed.precisions or PRECISIONS):
        quantized = PRECISIONS[name].quantized
        rows.append(_row(name, missing(PRECISIONS[name]) if quantized else None, arguments))
        print(f"{name}: {rows[-1][1]}", file=sys.stderr, flush=True)
    print(on_screen(HEADER, rows, names=2))
    return int(any(row[1] == "nothing" for row in rows))


def _row(name: str, lacks: str | None, arguments: Sequence[str]) -> tuple[str, ...]:
    """A precision on hardware where that works, else emulated. Each in a process of its own, which an error of CUDA's ends."""
    reasons = [lacks] if lacks else []
    backends = ["torch"] if not PRECISIONS[name].quantized else ["emulation"] if lacks else ["transformer_engine", "emulation"]
    for backend in backends:
        command = [sys.executable, "-m", "pretrain", "doctor", *arguments, "--try", name, backend]
        try:
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
            if ended.returncode == 0:
                result = json.loads(ended.stdout.splitlines()[-1])
                ms, rate = (three_digits(result["ms"]), f"{result['rate']:,.0f}") if "ms" in result else (UNKNOWN, UNKNOWN)
                return name, backend, ms, rate, f"{result['error']:.1%}", "; ".join(reasons)
            last = (ended.stderr.strip().splitlines() or [f"status {ended.returncode}"])[-1]
        except subprocess.TimeoutExpired:
            last = f"took longer than {SECONDS} s"
        reasons.append(f"{backend} fails: {last}")
    return name, "nothing", UNKNOWN, UNKNOWN, UNKNOWN, "; ".join(reasons)


# ── In a precision's own process ────────────────────────────────────────────────────────────────────────────────────────────────


def try_precision(setup: LayerSetup, name: str, backend: str) -> dict[str, float]:
    """`error`: the norm of the layer's gradient minus the FP32 layer's, relative; `ms` and `rate` (tokens/s) of a forward and
    backward. InputError where the precision takes no linear of the model, or its gradient is not like FP32's."""
    active = ActivePrecision(name, PRECISIONS[name], backend, LowPrecisionSettings().resolved(name))
    full = next(each for each in PRECISIONS.values() if each.compute_dtype == "float32")
    plain = ActivePrecision(full.name, full, "torch", LowPrecisionSettings().resolved(full.name))
    check_shapes(setup.hf, active)
    trained, exact = build_layer(setup, active), build_layer(setup, plain, attends="packed_sdpa")
    few = microbatch_of(min(setup.length, COMPARED), 2 * COMPARED, active.precision.multiple_of, setup.device)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(REHEARSALS):
            gradient = gradient_of_layer(trained, few)
        error = ((gradient - (reference := gradient_of_layer(exact, few))).norm() / reference.norm()).item()
    if not error <= MOST_ERROR:
        raise InputError(f"precision {name!r}: the gradient of a layer is {error:.0%} off FP32's")
    del exact
    if backend == "emulation" and setup.device.type == "cuda":
        return {"error": error}  # its speed is of no interest, and what it compiles takes minutes
    inputs = microbatch_of(setup.length, setup.tokens, active.precision.multiple_of, setup.device)
    seconds = []
    for _ in range(10 if setup.device.type == "cuda" else 3):
        began = time.perf_counter()
        gradient_of_layer(trained, inputs)[0].item()  # waits for the device
        seconds.append(time.perf_counter() - began)
    median = sorted(seconds)[len(seconds) // 2]
    return {"error": error, "ms": 1e3 * median, "rate": inputs["input_ids"].numel() / median}


def build_layer(setup: LayerSetup, active: ActivePrecision, attends: str | None = None) -> PackedLanguageModel:
    """The model with one layer and a small vocabulary, as a run with default settings puts it together; always the same weights.
    FP32 weights and gradients. `attends`: the attention, None for the fastest."""
    config, shape = model.load_config(setup.settings), Shape.of(setup.hf)
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size = 1, VOCABULARY
    text.layer_types = text.layer_types[:1] if getattr(text, "layer_types", None) else None
    text.bos_token_id = text.eos_token_id = text.pad_token_id = None
    dtype = getattr(torch, active.precision.compute_dtype)
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
    attends = attends or attention.choose("auto", setup.device.type, heads, dtype).name
    attention.register()
    torch.manual_seed(1)
    with setup.device:
        hf = type(setup.hf)._from_config(config, dtype=torch.float32, attn_implementation=attends)
    backend = make_backend(active, setup.device) if active.precision.quantized else None
    context = PrecisionContext(backend, dtype)
    packed = PackedLanguageModel(hf, attends, LossSettings(chunk=2 * VOCABULARY), context).train()
    layers = model.decoder_layers(hf)
    decisions = decide(hf, list(layers.values()), active) if backend else {}
    if not_fused_because("auto", active, setup.device.type, dtype) is None:
        arithmetic, _ = choose_arithmetic("auto", active, setup.device.type, context)
        packed.fused = fuse(layers, {context.backend: decisions}, arithmetic) if arithmetic else None
    convert(hf, decisions, context, packed.fused)
    attach_main_gradients(packed, torch.float32, packed.fused.stacks if packed.fused else ())
    compiled = setup.device.type == "cuda" and not packed.fused and active.precision.quantized
    wrap_layers(packed, setup.settings, cast_to=dtype if dtype != torch.float32 else None, compile_layers=compiled)
    return packed


def microbatch_of(length: int, tokens: int, multiple: int, device: torch.device) -> dict[str, Any]:
    """Two packs or more of three uneven documents each, `tokens` at least and a multiple of `multiple` in all."""
    packs = max(2, -(-tokens // length))
    while packs * length % multiple:
        packs += 1
    draw, third = np.random.default_rng(0), max(1, length // 3)
    lengths = np.diff(sorted({0, min(third, length), min(third + 1, length), length})).astype(np.int32)
    made = [Pack(draw.integers(VOCABULARY, size=length).astype(np.uint32), lengths) for _ in range(packs)]
    return inputs_of(build_microbatch(made, mask_boundaries=True), device)


def gradient_of_layer(packed: PackedLanguageModel, inputs: dict[str, Any]) -> Tensor:
    """The gradient of the mean loss in all parameters, as one FP32 vector."""
    packed.zero_grad(set_to_none=True)
    clear_main_gradients(packed.parameters())
    (packed(**inputs) / inputs["input_ids"].numel()).backward()
    gradients = [gradient_of(parameter) for parameter in packed.hf.parameters()]
    return torch.cat([gradient.detach().float().flatten() for gradient in gradients if gradient is not None])
