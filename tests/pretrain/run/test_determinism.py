"""`deterministic: true`: what a compiled graph serves. Bits that repeat on a GPU: tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from pretrain.model.distributed import compute_in_a_fixed_order
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import wrap_layers
from pretrain.settings.recipe import ModelSettings


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What is set for a whole process is taken back."""
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize("repeats", [False, True])
def test_a_compiled_norm_has_a_graph_for_each_number_of_tokens_where_bits_are_to_repeat(
    repeats: bool, build_model: Callable[..., PackedLanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for all would cut its sums as the first number of tokens that this process saw suggests."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    packed, settings = build_model("qwen3"), ModelSettings(config={"model_type": "qwen3"})
    if repeats:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        compute_in_a_fixed_order()
    wrap_layers(packed, settings, cast_to=None, compile_layers=True)
    norm: nn.Module = packed.hf.base_model.norm
    torch.compiler.reset()
    counters.clear()
    for tokens in (4, 8, 16):
        norm(torch.ones(1, tokens, norm.weight.shape[0]))
    assert counters["stats"]["unique_graphs"] == (3 if repeats else 1)
    torch.compiler.reset()
