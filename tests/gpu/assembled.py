"""Models on the GPU in one precision, as training assembles them, and their training."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from packing.arrow import Pack
from pretrain.model import huggingface as model
from pretrain.model.gradients import attach_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import choose_arithmetic, convert, fuse, wrap_layers
from pretrain.precision.product import PrecisionContext
from pretrain.precision.scope import decide
from pretrain.precision.selection import make_engines
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import LossSettings, ModelSettings
from tests.gpu.conftest import needs
from tests.pretrain.conftest import to_nearest
from tests.pretrain.model.fused.fused_models import ARCHITECTURES, build, losses_and_gradients

# Quantized precisions that Transformer Engine computes on some GPU.
ON_TE = [
    name for name, precision in PRECISIONS.items() if precision.quantized and precision.te_available
]
LENGTH = 256
LARGER = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
train = partial(losses_and_gradients, steps=2, packs=4, device="cuda", length=LENGTH)


def larger(name: str) -> dict[str, Any]:
    """Return the architecture's config with sizes that every precision supports."""
    config = ARCHITECTURES[name]
    if config["model_type"] == "gpt2":
        return config | {"n_embd": 512, "n_inner": 1024, "n_head": 8, "vocab_size": 256}
    heads = {"head_dim": 64} if "head_dim" in config else {}
    return config | LARGER | heads | {"vocab_size": 256}


def assemble(
    name: str,
    recipe: str,
    *,
    fused: bool,
    weights: torch.dtype = torch.bfloat16,
    attention: str = "packed_varlen",
    recompute: bool = False,
    keep: tuple[str, ...] = (),
    scope: str = "linear",
) -> PackedLanguageModel:
    """Build a model with FP32 gradients in one precision.

    Args:
        name: Name of the architecture.
        recipe: Name of the precision.
        fused: Whether layers are fused.
        weights: Dtype in which weights are stored.
        attention: Name of the attention implementation.
        recompute: Whether layers are recomputed in backward.
        keep: Patterns of linears that stay in BF16.
        scope: `linear` or `linear+head`.
    """
    config = larger(name)
    hf = build(config, torch.float32, "cuda", attention)
    model.round_weights(hf, weights)
    active = active_of(recipe, keep, scope)
    layers = decoder_layers(hf)
    decisions = decide(hf, list(layers.values()), active) if active.precision.quantized else {}
    engines = make_engines([active], torch.device("cuda"))
    context = PrecisionContext(torch.bfloat16, engines, active)
    packed = PackedLanguageModel(hf, attention, LossSettings(chunk=256), context).train()
    if fused:
        arithmetic = choose_arithmetic(active, "cuda", context)
        packed.fused = fuse(layers, {active.name: decisions}, arithmetic)
        assert not packed.fused.left_out
    convert(hf, decisions, context, packed.fused)
    attach_main_gradients(packed, torch.float32, packed.fused.stacks if fused else ())
    settings = ModelSettings(config=config, gradient_checkpointing="full" if recompute else "none")
    cast_to = torch.bfloat16 if weights == torch.float32 else None
    wrap_layers(packed, settings, cast_to=cast_to, compile_layers=False)
    return packed


def active_of(recipe: str, keep: tuple[str, ...] = (), scope: str = "linear") -> ActivePrecision:
    """Return the precision in Transformer Engine with `settings_of`."""
    engine = "transformer_engine" if PRECISIONS[needs(recipe)].quantized else "torch"
    precision = PRECISIONS[recipe].with_options(settings_of(recipe, keep, scope))
    return ActivePrecision(recipe, precision, engine)


def settings_of(
    recipe: str, keep: tuple[str, ...] = (), scope: str = "linear"
) -> LowPrecisionSettings:
    """Return settings that quantize every layer and round to nearest."""
    return LowPrecisionSettings(
        keep_bf16=keep, scope=scope, keep_bf16_layers={"last": 0}, **to_nearest(recipe)
    ).resolved(recipe)


def pack_of(documents: int, length: int, draw: np.random.Generator) -> Pack:
    """Return a pack of random tokens whose documents have random lengths."""
    cuts = np.sort(draw.choice(np.arange(1, length), documents - 1, replace=False))
    lengths = np.diff([0, *cuts, length]).astype(np.int32)
    return Pack(draw.integers(256, size=length).astype(np.uint32), lengths)
