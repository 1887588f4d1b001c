"""Test the wrappers of a model's forwards, and their order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import Wrapper, fuse, wrappers_of
from pretrain.settings.recipe import ModelSettings
from tests.pretrain.model.test_routing import KINDS, MIXTURE
from tests.pretrain.small_models import build_model

UNITS = ("embed_tokens", "layers.0", "layers.1", "norm")
CASTS = "casting_parameters"
RECOMPUTES = "recomputed_in_backward"


def wrappers_by_unit(
    packed: PackedLanguageModel,
    recompute: str | int = "none",
    cast_to: torch.dtype | None = torch.bfloat16,
    *,
    compile_layers: bool = True,
) -> list[list[Wrapper]]:
    """Return the wrappers of each unit, from the innermost to the outermost."""
    settings = ModelSettings(source="none", gradient_checkpointing=recompute)
    wrappers = wrappers_of(packed, settings, cast_to=cast_to, compile_layers=compile_layers)
    return [wrappers[packed.hf.base_model.get_submodule(name)] for name in UNITS]


@pytest.mark.parametrize(
    ("kind", "options", "layer", "norm"),
    [
        # A graph has the casts of a layer, but not those of a norm.
        ("plain", {}, [CASTS, "compiled", RECOMPUTES], ["compiled", CASTS]),
        # The casts of a layer with graph breaks are not compiled.
        ("mixture", {}, ["compiled", CASTS, RECOMPUTES], ["compiled", CASTS]),
        ("fused", {}, ["casting_unfused", RECOMPUTES], ["replaced", CASTS]),
        ("fused", {"compile_layers": False}, ["casting_unfused", RECOMPUTES], [CASTS]),
    ],
)
def test_wrappers_have_an_order(
    kind: str, options: dict[str, Any], layer: list[str], norm: list[str]
) -> None:
    mixture = ("qwen3_moe", MIXTURE | KINDS["qwen3_moe"])
    name, changes = mixture if kind == "mixture" else ("qwen3", {})
    packed = build_model(name, **changes)
    if kind == "fused":
        packed.fused = fuse(decoder_layers(packed.hf), {}, Arithmetic(packed.context))
    before = [module.__dict__.get("forward") for module in packed.modules()]
    by_unit = wrappers_by_unit(packed, "full", **options)
    names = [[wrapper.func.__name__ for wrapper in wrappers] for wrappers in by_unit]
    assert names == [["casting_output"], layer, layer, norm]
    assert [module.__dict__.get("forward") for module in packed.modules()] == before


@pytest.mark.parametrize("is_reproducible", [False, True])
def test_a_graph_of_a_norm_is_dynamic_unless_runs_are_deterministic(
    is_reproducible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_reproducible)
    _, (layer,), _, (norm,) = wrappers_by_unit(build_model(), cast_to=None)
    assert norm.keywords["dynamic"] != is_reproducible
    assert not layer.keywords["dynamic"]


def test_only_the_chosen_layers_are_recomputed() -> None:
    packed = build_model()
    _, *layers, _ = wrappers_by_unit(packed, 2, cast_to=None, compile_layers=False)
    settings = ModelSettings(source="none", gradient_checkpointing=2)
    assert [len(layer) for layer in layers] == [int(settings.recomputes(n)) for n in range(2)]
    assert sum(map(len, layers)) == 1
