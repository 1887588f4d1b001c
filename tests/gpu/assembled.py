"""Models on the GPU in one precision, as training assembles them, and their training."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from packing.arrow import Pack
from pretrain.model.packed import PackedLanguageModel
from pretrain.precision.settings import PRECISIONS, ActivePrecision
from pretrain.settings.recipe import LossSettings
from tests.gpu.conftest import needs
from tests.pretrain.conftest import active_everywhere
from tests.pretrain.model.fused import fused_models
from tests.pretrain.model.fused.fused_models import ARCHITECTURES, losses_and_gradients

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
    attention: str = "packed_varlen",
    keep: tuple[str, ...] = (),
    scope: str = "linear",
    **options: Any,
) -> PackedLanguageModel:
    """Build a model of the architecture `name` in the precision `recipe`, with FP32 gradients.

    `options` are those of `fused_models.assemble`.
    """
    loss = LossSettings(chunk=256)
    active = active_of(recipe, keep, scope)
    return fused_models.assemble(
        larger(name), active, device="cuda", backend=attention, loss=loss, **options
    )


def active_of(recipe: str, keep: tuple[str, ...] = (), scope: str = "linear") -> ActivePrecision:
    engine = "transformer_engine" if PRECISIONS[needs(recipe)].quantized else "torch"
    return active_everywhere(recipe, engine, keep, scope)


def pack_of(documents: int, length: int, draw: np.random.Generator) -> Pack:
    """Return a pack of random tokens whose documents have random lengths."""
    cuts = np.sort(draw.choice(np.arange(1, length), documents - 1, replace=False))
    lengths = np.diff([0, *cuts, length]).astype(np.int32)
    return Pack(draw.integers(256, size=length).astype(np.uint32), lengths)
