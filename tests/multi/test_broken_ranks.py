"""Test parity over two ranks: it passes correct training and reports a rank that is lost."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from foundation.overrides import overridden
from pretrain.metrics.health import TrainingHalted
from pretrain.model.distributed import complete_topology
from pretrain.model.gradients import local_part
from tests.pretrain.verify import faults, sharding_faults
from tests.pretrain.verify.patched_faults import after_update
from tests.pretrain.verify.small_runs import SmallRun, build_run
from tests.ranks import print_found, printed_by_ranks

Fault = Callable[[SmallRun, pytest.MonkeyPatch], object]


def gradient_of_a_rank_lost(run: SmallRun, patch: pytest.MonkeyPatch) -> None:
    if run.accelerator.process_index == 1:
        change_loss(run, lambda loss: loss.detach() + loss * 0)


def averaged_over_ranks(run: SmallRun, patch: pytest.MonkeyPatch) -> None:
    """Average gradients over ranks, as DDP and FSDP2 do with an unscaled loss."""
    change_loss(
        run, lambda loss: loss.detach() + (loss - loss.detach()) / run.accelerator.num_processes
    )


def change_loss(run: SmallRun, change: Callable[[Tensor], Tensor]) -> None:
    run.packed.register_forward_hook(lambda module, args, loss: change(loss))


def weight_of_a_rank_stands_still(run: SmallRun, patch: pytest.MonkeyPatch) -> None:
    weight = local_part(next(iter(run.model.parameters())).data)
    before = weight.clone()
    if run.accelerator.process_index == 1:
        after_update(run, patch, lambda _: weight.copy_(before))


NOTHING: dict[str, Fault] = {"nothing": lambda run, patch: None}
FAULTS = NOTHING | {
    "a rank's gradient is lost": gradient_of_a_rank_lost,
    "the loss is averaged over ranks": averaged_over_ranks,
}
# Faults of the update in tests/pretrain/verify that a topology could hide.
OF_UPDATES = {
    "ddp": (
        "the last microbatch of a step is dropped",
        "gradients are accumulated in BF16, not in FP32",
        "a tenth of each gradient remains after a step",
    ),
    "zero": (
        "the norm is not clipped",
        "the second moment is not corrected for bias",
        "an exact weight's low bits are dropped",
        "moments are BF16, not FP32",
    ),
    "fsdp2": (
        "one weight is never updated",
        "the weights of norms decay",
        "a weight's cached copy is stale in every second step",
        "FP32 gradient sums are rounded to BF16",
        "gradients are not cleared after a step",
    ),
}


def inject(
    faults: dict[str, Fault], check: Callable[[SmallRun], object], precision: str, **options: Any
) -> None:
    """Print the result of `check` in this rank, for each fault."""
    accelerator = Accelerator(mixed_precision="no")
    complete_topology(accelerator, 1)
    found = {}
    histories: list[Tensor] = []
    for what, make in faults.items():
        run = build_run(accelerator, precision, layers=1, histories=histories, **options)
        histories = histories or run.packed.context.copied_state()
        with pytest.MonkeyPatch.context() as patch:
            make(run, patch)
            found[what] = check(run)
    print_found(accelerator, found)


def failures_of_parity(run: SmallRun) -> list[str]:
    """Return what parity reports, and the weights that it has not restored."""
    weights = {name: local_part(weight).clone() for name, weight in run.model.named_parameters()}
    failures = run.parity().failures
    for name, weight in run.model.named_parameters():
        if not torch.equal(local_part(weight), weights[name]):
            failures.append(f"{name} is not as before")
    return failures


def halt_of_training(run: SmallRun) -> str:
    try:
        run.train()
    except TrainingHalted as halt:
        return str(halt)
    return ""


def find_faults() -> None:
    inject(FAULTS, failures_of_parity, sys.argv[1])


def find_faults_of_updates() -> None:
    made = NOTHING | {"a rank's weight stands still": weight_of_a_rank_stands_still}
    made |= {fault.what: fault.make for fault in faults.FAULTS if fault.what in sys.argv}
    inject(made, halt_of_training, "delayed", weights="bf16_exact")


def start(topology: str, precision: str) -> dict[str, dict[str, list[str]]]:
    """Return the failures that parity reports, by fault and precision."""
    found = printed_by_ranks(find_faults, topology, [precision])[0]
    return {what: {precision: failures} for what, failures in found.items()}


@pytest.mark.multi
def test_what_is_lost_between_two_processes_is_found() -> None:
    """`tests.pretrain.verify.mutations` covers FSDP2 and every precision."""
    failures_of = start("ddp", "delayed")
    assert failures_of.pop("nothing") == {"delayed": []}
    assert len(failures_of) == 2 and all(failures["delayed"] for failures in failures_of.values())


def find_faults_of_shards() -> None:
    few = [fault for fault in sharding_faults.FAULTS if re.search("early|BF16|before", fault.what)]
    with overridden(sharding_faults, FAULTS=few):
        sharding_faults.find_faults(layers=1)


@pytest.mark.multi
@pytest.mark.parametrize(
    ("topology", "precision"),
    [("fsdp2", "delayed"), pytest.param("zero", "bf16", marks=pytest.mark.nightly)],
)
def test_early_frees_and_rounded_gradients_are_found(topology: str, precision: str) -> None:
    """`tests.pretrain.verify.mutations` covers all faults of shards in every precision."""
    found, _ = printed_by_ranks(find_faults_of_shards, topology, [precision])
    assert found.pop("nothing") == {precision: []}
    assert found and all(checks[precision] for checks in found.values())


@pytest.mark.multi
@pytest.mark.parametrize(
    "topology",
    [
        "fsdp2",
        pytest.param("ddp", marks=pytest.mark.nightly),
        pytest.param("zero", marks=pytest.mark.nightly),
    ],
)
def test_a_wrong_update_of_one_rank_stops_both(topology: str) -> None:
    names = OF_UPDATES[topology]
    messages_by_rank = printed_by_ranks(find_faults_of_updates, topology, names)
    for messages in messages_by_rank:
        assert len(messages) == 2 + len(names)
        assert messages.pop("nothing") == ""
        assert all(messages.values())
    still = [messages["a rank's weight stands still"] for messages in messages_by_rank]
    assert sorted("another process" in message for message in still) == [False, True]
    assert any("weights of 1 of" in message for message in still)
