"""`deterministic: true`: what it turns on, what it refuses, and what it says. Bits that repeat on a GPU: tests/gpu."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from foundation.errors import InputError
from pretrain.model.attention import backends as attention
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import wrap_layers
from pretrain.run import determinism
from pretrain.settings.recipe import ModelSettings


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What is set for a whole process is taken back."""
    fills, workspace = torch.utils.deterministic.fill_uninitialized_memory, os.environ.pop(determinism.WORKSPACE, None)
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills
    os.environ.pop(determinism.WORKSPACE, None)
    if workspace is not None:
        os.environ[determinism.WORKSPACE] = workspace


def write_by_index() -> torch.Tensor:
    """An operation that has no deterministic form, on a CPU neither."""
    return torch.zeros(3).put_(torch.tensor([1]), torch.ones(1))


@pytest.mark.parametrize("workspace", [":16:8", ":4096:8", ":4096:2:16:8", ""])
def test_a_workspace_of_the_users_is_kept_or_refused(workspace: str) -> None:
    environment = {determinism.WORKSPACE: workspace}
    if workspace in determinism.WORKSPACES:
        determinism.begin(environment)
        assert environment == {determinism.WORKSPACE: workspace}
        return
    with pytest.raises(InputError, match=rf"CUBLAS_WORKSPACE_CONFIG={workspace} and `deterministic: true` contradict"):
        determinism.begin(environment)
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_form_is_one_message_and_other_errors_stay() -> None:
    determinism.begin({})
    says = r"`deterministic: true`: torch's put_ has no deterministic form .*`deterministic: false`"
    with pytest.raises(InputError, match=says), determinism.explaining():
        write_by_index()
    with pytest.raises(RuntimeError, match="something else"), determinism.explaining():
        raise RuntimeError("something else")


@pytest.mark.parametrize("repeats", [False, True])
def test_a_compiled_norm_has_a_graph_for_each_number_of_tokens_where_bits_are_to_repeat(
    repeats: bool, build_model: Callable[..., PackedLanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One graph for all would cut its sums as the first number of tokens that this process saw suggests."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    packed, settings = build_model("qwen3"), ModelSettings(config={"model_type": "qwen3"})
    if repeats:
        determinism.begin({})
    wrap_layers(packed, settings, cast_to=None, compile_layers=True)
    norm: nn.Module = packed.hf.base_model.norm
    torch.compiler.reset()
    counters.clear()
    for tokens in (4, 8, 16):
        norm(torch.ones(1, tokens, norm.weight.shape[0]))
    assert counters["stats"]["unique_graphs"] == (3 if repeats else 1)
    torch.compiler.reset()


# ── The launcher ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("batch.microbatch=auto", r"`batch.microbatch: auto` takes .*one of 1, 2, 4, 8\. `--plan deterministic=false` says"),
        ("loss.kind=cce", r"`loss.kind: cce` adds its gradients up in the order .*set `loss.kind: chunked`$"),
    ],
)
def test_what_cannot_repeat_is_refused(argument: str, says: str, train_here: Callable[..., Any]) -> None:
    assert re.search(says, train_here("deterministic=true", argument).refusal)


def test_a_model_that_needs_what_cannot_repeat_is_refused_before_the_first_step(
    train_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = attention.document_mask
    monkeypatch.setattr(attention, "document_mask", lambda *of: (write_by_index(), mask(*of))[1])
    finished = train_here("deterministic=true")
    assert finished.refusal.startswith("`deterministic: true`: torch's put_ has no deterministic form on this device")
    assert not (finished.run_dir / "metrics.jsonl").exists()
