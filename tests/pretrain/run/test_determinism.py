"""`deterministic: true` compiles a graph per input shape.

Bit-identical repetitions on a GPU are tested in tests/gpu.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from pretrain.model.distributed import compute_in_a_fixed_order
from pretrain.model.wrapping import wrap_layers
from pretrain.settings.recipe import ModelSettings
from tests.pretrain.small_models import build_model


@pytest.mark.nightly
@pytest.mark.parametrize("repeats", [False, True])
def test_a_deterministic_norm_has_a_graph_per_number_of_tokens(
    repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shared graph would split its sums for the number of tokens that comes first."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    packed = build_model("qwen3")
    settings = ModelSettings(config={"model_type": "qwen3"})
    torch.compiler.reset()
    counters.clear()
    try:
        if repeats:
            compute_in_a_fixed_order()
        wrap_layers(packed, settings, cast_to=None, compile_layers=True)
        norm = packed.hf.base_model.norm
        for tokens in (4, 8, 16):
            norm(torch.ones(1, tokens, norm.weight.shape[0]))
        assert counters["stats"]["unique_graphs"] == (3 if repeats else 1)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.compiler.reset()
