"""`deterministic: true`: what it turns on, what it refuses, and what it says. Bits that repeat on a GPU: tests/gpu."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from foundation.errors import InputError
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import wrap_layers
from pretrain.run.command_line import WORKSPACE, compute_in_a_fixed_order
from pretrain.settings.recipe import ModelSettings


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What is set for a whole process is taken back."""
    fills, workspace = torch.utils.deterministic.fill_uninitialized_memory, os.environ.pop(WORKSPACE, None)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    os.environ.pop(WORKSPACE, None)
    if workspace is not None:
        os.environ[WORKSPACE] = workspace


def write_by_index() -> torch.Tensor:
    """An operation that has no deterministic form, on a CPU neither."""
    return torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))


def test_a_workspace_without_a_fixed_order_is_refused() -> None:
    environment = {WORKSPACE: ":16:8"}
    compute_in_a_fixed_order(environment)
    assert environment == {WORKSPACE: ":16:8"}
    with pytest.raises(InputError, match=rf"{WORKSPACE}=:4096:2:16:8 and `deterministic: true` contradict"):
        compute_in_a_fixed_order({WORKSPACE: ":4096:2:16:8"})


@pytest.mark.parametrize("repeats", [False, True])
def test_a_compiled_norm_has_a_graph_for_each_number_of_tokens_where_bits_are_to_repeat(
    repeats: bool, build_model: Callable[..., PackedLanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for all would cut its sums as the first number of tokens that this process saw suggests."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    packed, settings = build_model("qwen3"), ModelSettings(config={"model_type": "qwen3"})
    if repeats:
        compute_in_a_fixed_order({})
    wrap_layers(packed, settings, cast_to=None, compile_layers=True)
    norm: nn.Module = packed.hf.base_model.norm
    torch.compiler.reset()
    counters.clear()
    for tokens in (4, 8, 16):
        norm(torch.ones(1, tokens, norm.weight.shape[0]))
    assert counters["stats"]["unique_graphs"] == (3 if repeats else 1)
    torch.compiler.reset()


def test_a_model_that_needs_what_cannot_repeat_is_refused_before_the_first_step(
    train_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = PackedLanguageModel.forward
    monkeypatch.setattr(PackedLanguageModel, "forward", lambda *of, **options: (write_by_index(), forward(*of, **options))[1])
    finished = train_here("deterministic=true")
    assert finished.refusal.startswith("`deterministic: true`: torch's put_ has no deterministic form on this device")
    assert not (finished.run_dir / "metrics.jsonl").exists()
