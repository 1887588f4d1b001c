"""The comparison with plain transformers on weights that predict their text, whose loss and gradients are next to nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from packing.arrow import Pack
from pretrain.model.gradients import gradient_of
from pretrain.model.packed import forward_backward
from pretrain.optimizer.adamw import clear_gradients
from tests.pretrain.conftest import on_a
from tests.pretrain.verify.faults import FAULTS
from tests.pretrain.verify.small_runs import VOCABULARY, SmallRun, build_run, rehearse, step_of

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


@pytest.mark.parametrize(
    ("precision", "options", "faults"),
    [
        ("fp32", {}, ["labels are shifted twice", "one weight's gradient is a quarter too large"]),
        ("bf16", {"fused": True}, ["documents of a pack see each other"]),
        ("delayed", {"scope": "linear+head"}, ["the gradients' scales are never updated"]),
        ("nvfp4", {}, []),
    ],
)
def test_weights_whose_loss_is_next_to_nothing_pass_and_their_faults_are_caught(
    precision: str,
    options: dict,
    faults: list[str],
    accelerator: Accelerator,
    learnt: dict[str, Tensor],
) -> None:
    """As fresh ones do: with as much to spare."""
    run = of_learnable_text(accelerator, precision, **options)
    with torch.no_grad():
        for name, parameter in run.packed.hf.named_parameters():
            parameter.copy_(learnt[name])
    if run.packed.context.state():
        run.packed.context.backend.reset()
        rehearse(run)
    assert forward_backward(run.model, run.step, accelerator).item() < 1e-4
    clear_gradients(run.optimizer, run.model)
    parity = run.parity()
    assert parity.failures == [] and parity.tensors[0].excess < 0.8
    for fault in FAULTS:
        if fault.what in faults:
            assert fault.applies(run)
            with fault.entered(run):
                assert run.parity().failures, fault.what
