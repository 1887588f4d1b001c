"""Parity of models that predict their corpus, so that loss and gradients are almost zero."""

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

SHARPER = 2.0  # scale of the head's weights, in place of a longer training
STEPS = 30
RATE = 3e-3


def learnable(pack: Pack) -> Pack:
    """Return a pack with the same documents, whose tokens determine the next token.

    The tokens go round in a circle of half of the vocabulary.
    """
    circle = np.random.default_rng(5).permutation(VOCABULARY)[: VOCABULARY // 2]
    places = np.arange(len(pack.input_ids))
    begins = np.cumsum([0, *pack.lengths])
    document = np.searchsorted(begins, places, side="right")
    return replace(pack, input_ids=circle[(places + 7 * document) % len(circle)].astype(np.uint32))


def build_learnable_run(accelerator: Accelerator, precision: str, **options: object) -> SmallRun:
    """Build a run whose packs are learnable."""
    run = build_run(accelerator, precision, "llama", **options)
    run.packs = [learnable(pack) for pack in run.packs]
    run.step = step_of(run.packs, 2)
    return run


@pytest.fixture(scope="module")
def trained_weights() -> dict[str, Tensor]:
    """Train weights in FP32 with torch's Adam until they predict the corpus.

    The head is scaled up afterwards.
    """
    with on_a("cpu") as accelerator:
        run = build_learnable_run(accelerator, "fp32")
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
        ("fp32", {}, ["labels are shifted twice", "one weight's gradient is 25 % too large"]),
        ("bf16", {"fused": True}, ["documents of a pack attend to each other"]),
        ("delayed", {"scope": "linear+head"}, ["the gradients' scales are never updated"]),
        ("nvfp4", {}, []),
    ],
)
def test_trained_weights_pass_and_their_faults_are_found(
    precision: str,
    options: dict,
    faults: list[str],
    accelerator: Accelerator,
    trained_weights: dict[str, Tensor],
) -> None:
    """Errors of trained weights are as far below the limits as errors of new weights."""
    run = build_learnable_run(accelerator, precision, **options)
    with torch.no_grad():
        for name, parameter in run.packed.hf.named_parameters():
            parameter.copy_(trained_weights[name])
    if run.packed.context.state():
        run.packed.context.engine.reset()
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
