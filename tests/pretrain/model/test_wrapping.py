"""Test the wrappers of a model's forwards, and their order."""

from __future__ import annotations

import pytest
import torch

from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import convert, fuse, wrappers_of
from pretrain.settings.recipe import ModelSettings
from tests.pretrain.model.test_routing import KINDS, MIXTURE
from tests.pretrain.small_models import build_model

BF16 = torch.bfloat16
UNITS = {"embed_tokens": "embedding", "layers.0": "layer", "norm": "norm"}


def names_of(
    packed: PackedLanguageModel,
    recompute: str | int = "none",
    cast_to: torch.dtype | None = BF16,
    *,
    compile_layers: bool = True,
) -> dict[str, list[str]]:
    """Return the names of the wrappers of each unit, from the innermost to the outermost."""
    settings = ModelSettings(source="none", gradient_checkpointing=recompute)
    wrappers = wrappers_of(packed, settings, cast_to=cast_to, compile_layers=compile_layers)
    base_model = packed.hf.base_model
    return {
        kind: [wrapper.func.__name__ for wrapper in wrappers[base_model.get_submodule(name)]]
        for name, kind in UNITS.items()
    }


def test_a_graph_contains_the_casts_of_a_layer_but_not_of_a_norm() -> None:
    packed = build_model()
    assert names_of(packed, recompute="full") == {
        "embedding": ["casting_output"],
        "layer": ["casting_parameters", "compiled", "recomputed_in_backward"],
        "norm": ["compiled", "casting_parameters"],
    }
    assert not any("forward" in vars(module) for module in packed.hf.base_model.modules())


def test_casts_of_a_layer_with_graph_breaks_are_not_compiled() -> None:
    packed = build_model("qwen3_moe", **MIXTURE | KINDS["qwen3_moe"])
    convert(packed.hf, {}, packed.context)
    names = names_of(packed, recompute="full")["layer"]
    assert names == ["compiled", "casting_parameters", "recomputed_in_backward"]


@pytest.mark.parametrize("is_reproducible", [False, True])
def test_a_graph_of_a_norm_is_dynamic_unless_runs_are_deterministic(
    is_reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_reproducible)
    packed = build_model()
    settings = ModelSettings(source="none")
    wrappers = wrappers_of(packed, settings, cast_to=None, compile_layers=True)
    (norm,) = wrappers[packed.hf.base_model.norm]
    (layer,) = wrappers[packed.hf.base_model.layers[0]]
    assert norm.keywords["dynamic"] != is_reproducible
    assert not layer.keywords["dynamic"]


def test_fused_layers_are_recomputed_but_not_compiled() -> None:
    packed = build_model()
    packed.fused = fuse(decoder_layers(packed.hf), {}, Arithmetic(packed.context))
    names = names_of(packed, recompute="full")
    assert names["layer"] == ["casting_unfused", "recomputed_in_backward"]
    assert names["norm"] == ["replaced", "casting_parameters"]
    assert names_of(packed, compile_layers=False)["norm"] == ["casting_parameters"]


def test_only_the_chosen_layers_are_recomputed() -> None:
    packed = build_model()
    settings = ModelSettings(source="none", gradient_checkpointing=2)
    wrappers = wrappers_of(packed, settings, cast_to=None, compile_layers=False)
    counts = [len(wrappers[layer]) for layer in decoder_layers(packed.hf).values()]
    assert counts == [int(settings.recomputes(index)) for index in range(2)]
    assert sum(counts) == 1
