"""The comparison with plain transformers on weights that predict their text, whose loss and gradients are next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from packing.arrow import IGNORE, Pack
from pretrain.model.gradients import gradient_of
from pretrain.model.packed import forward_backward
from pretrain.optimizer.adamw import clear_gradients
from pretrain.verify.parity import other_labels
from tests.pretrain.verify.faults import FAULTS
from tests.pretrain.verify.small_runs import VOCABULARY, SmallRun, build_run, on_a, rehearse, step_of

SHARPER = 2.0  # times the head's weights: as long training would do it
STEPS, RATE = 30, 3e-3


def learnable(pack: Pack) -> Pack:
    """The same documents of a text in which each token says the next: they go round in a circle of the vocabulary's half."""
    circle = np.random.default_rng(5).permutation(VOCABULARY)[: VOCABULARY // 2]
    places = np.arange(len(pack.input_ids))
    begins = np.cumsum([0, *pack.lengths])
    document = np.searchsorted(begins, places, side="right")
    return replace(pack, input_ids=circle[(places + 7 * document) % len(circle)].astype(np.uint32))


def of_learnable_text(accelerator: Accelerator, precision: str, **options: object) -> SmallRun:
    run = build_run(accelerator, precision, "llama", **options)
    run.packs = [learnable(pack) for pack in run.packs]
    run.step = step_of(run.packs, 2)
    return run


@pytest.fixture(scope="module")
def learnt() -> dict[str, Tensor]:
    """Weights trained in FP32 by torch's Adam until they predict the text, and sharper."""
    with on_a("cpu") as accelerator:
        run = of_learnable_text(accelerator, "fp32")
        weights = dict(run.packed.hf.named_parameters())
        adam = torch.optim.Adam(weights.values(), lr=RATE)
        for _ in range(STEPS):
            clear_gradients(run.optimizer, run.model)
            forward_backward(run.model, run.step, accelerator)
            for parameter in weights.values():
                parameter.grad = gradient_of(parameter).clone()
            adam.step()
        trained = {name: parameter.detach().clone() for name, parameter in weights.items()}
    return trained | {"lm_head.weight": SHARPER * trained["lm_head.weight"]}


@pytest.fixture
def trained(accelerator: Accelerator, learnt: dict[str, Tensor]) -> Callable[..., SmallRun]:
    """A small run with these weights, whose loss on its text is next to nothing."""

    def build(precision: str, **options: object) -> SmallRun:
        run = of_learnable_text(accelerator, precision, **options)
        with torch.no_grad():
            for name, parameter in run.packed.hf.named_parameters():
                parameter.copy_(learnt[name])
        if run.packed.context.state():
            run.packed.context.backend.reset()
            rehearse(run)
        assert forward_backward(run.model, run.step, accelerator).item() < 1e-4
        clear_gradients(run.optimizer, run.model)
        return run

    return build


@pytest.mark.parametrize(
    ("precision", "options"),
    [("fp32", {}), ("bf16", {"fused": True}), ("delayed", {"scope": "linear+head"}), ("nvfp4", {})],
)
def test_a_sound_run_passes_with_weights_whose_loss_is_next_to_nothing(
    precision: str, options: dict, trained: Callable[..., SmallRun]
) -> None:
    """As a fresh one does: with as much to spare."""
    parity = trained(precision, **options).parity()
    assert parity.failures == []
    assert parity.tensors[0].excess < 0.8


@pytest.mark.parametrize(
    ("what", "precision"),
    [
        ("documents of a pack see each other", "bf16"),
        ("labels are shifted twice", "fp32"),
        ("one weight's gradient is a quarter too large", "fp32"),
        ("values are truncated, not rounded", "current"),
        ("the gradients' scales are never updated", "delayed"),
    ],
)
def test_a_fault_is_caught_with_weights_whose_loss_is_next_to_nothing(
    what: str, precision: str, trained: Callable[..., SmallRun]
) -> None:
    run, fault = trained(precision), next(each for each in FAULTS if each.what == what)
    assert fault.applies(run)
    with fault.entered(run):
        assert run.parity().failures


@given(st.lists(st.integers(-1, 2**31 - 2), min_size=1, max_size=20), st.integers(0, 2**31 - 2))
def test_other_labels_are_in_the_vocabulary_and_never_the_texts_own(labels: list[int], more: int) -> None:
    vocabulary = max(*labels, 0, 1) + 1 + min(more, 2**31 - 2 - max(*labels, 0, 1))
    own = torch.tensor([IGNORE if label < 0 else label for label in labels])
    others = other_labels(own, vocabulary)
    trained = own != IGNORE
    assert ((others == IGNORE) == ~trained).all() and (others[trained] != own[trained]).all()
    assert (others[trained] >= 0).all() and (others[trained] < vocabulary).all()
    assert len(others.unique()) == len(own.unique()), "as many different ones"
