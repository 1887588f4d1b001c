"""Parity over two processes: silent where they train together, and not where one of them is lost."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from pretrain.metrics.health import TrainingHalted
from pretrain.model.distributed import complete_topology
from pretrain.model.gradients import local_part
from tests.pretrain.verify import update_faults
from tests.pretrain.verify.small_runs import SmallRun, build_run
from tests.pretrain.verify.update_faults import after_update
from tests.ranks import start_ranks


def gradient_of_a_rank_lost(run: SmallRun) -> None:
    if run.accelerator.process_index == 1:
        change_loss(run, lambda loss: loss.detach() + loss * 0)


def averaged_over_ranks(run: SmallRun) -> None:
    """What DDP and FSDP2 do where the loss is not scaled up by their number."""
    change_loss(
        run, lambda loss: loss.detach() + (loss - loss.detach()) / run.accelerator.num_processes
    )


def change_loss(run: SmallRun, change: Callable[[Tensor], Tensor]) -> None:
    run.packed.register_forward_hook(lambda module, args, loss: change(loss))


def weight_of_a_rank_stands_still(run: SmallRun, patch: pytest.MonkeyPatch) -> None:
    weight = local_part(next(iter(run.model.parameters())).data)
    before = weight.clone()
    after_update(run, patch, lambda _: run.accelerator.process_index == 0 or weight.copy_(before))


FAULTS = {
    "nothing": lambda run: None,
    "a rank's gradient is lost": gradient_of_a_rank_lost,
    "the loss is averaged over ranks": averaged_over_ranks,
}
# Of those in tests/pretrain/verify/update_faults.py, the ones that a topology could hide: each is there in one process too.
OF_UPDATES = {
    "ddp": ("last_microbatch_dropped", "sums_in_bf16", "tenth_stays"),
    "zero": ("not_clipped", "no_bias_correction", "low_bits_dropped", "moments_in_bf16"),
    "fsdp2": (
        "one_weight_never_updated",
        "norms_decay",
        "stale_copy",
        "sums_rounded_to_bf16",
        "not_cleared",
    ),
}
ALWAYS = {
    "nothing": lambda run, patch: None,
    "a rank's weight stands still": weight_of_a_rank_stands_still,
}


def find_faults() -> None:
    """What each process does, and prints."""
    complete_topology(accelerator := Accelerator(mixed_precision="no"))
    found: dict[str, dict[str, list[str]]] = {}
    for precision in sys.argv[1:]:
        for what, make in FAULTS.items():
            run = build_run(accelerator, precision, layers=1)
            make(run)
            weights = {
                name: local_part(each).clone() for name, each in run.model.named_parameters()
            }
            failures = found.setdefault(what, {})[precision] = run.parity().failures
            for name, each in run.model.named_parameters():  # norms had other values in it
                failures += (
                    []
                    if torch.equal(local_part(each), weights[name])
                    else [f"{name} is not as before"]
                )
    os.write(1, f"FOUND {json.dumps(found)}\n".encode())  # whole, though ranks write at once
    accelerator.end_training()


def find_faults_of_updates() -> None:
    complete_topology(accelerator := Accelerator(mixed_precision="no"))
    messages, updates = {}, ALWAYS | {name: getattr(update_faults, name) for name in sys.argv[1:]}
    for what, make in updates.items():
        run = build_run(accelerator, "delayed", layers=1, weights="bf16_exact")
        with pytest.MonkeyPatch.context() as patch:
            make(run, patch)
            try:
                run.train()
                messages[what] = ""
            except TrainingHalted as halt:
                messages[what] = str(halt)
    os.write(1, f"FOUND {json.dumps(messages)}\n".encode())
    accelerator.end_training()


def found_by_two(
    main: Callable[[], None], topology: str, arguments: Sequence[str]
) -> list[dict[str, Any]]:
    """What each of two processes that do `main` has found."""
    with tempfile.TemporaryDirectory() as folder:
        launch = ["--config_file", f"accelerate_configs/{topology}.yaml"]
        status, out, err = start_ranks(arguments, launch, Path(folder), main=main)
    assert status == 0, out + err
    return [
        json.loads(line.removeprefix("FOUND "))
        for line in out.splitlines()
        if line.startswith("FOUND ")
    ]


def start(topology: str, *precisions: str) -> dict[str, dict[str, list[str]]]:
    """By fault and precision, the failures that parity names."""
    return found_by_two(find_faults, topology, precisions)[0]


@pytest.mark.multi
def test_what_is_lost_between_two_processes_is_found() -> None:
    """Under DDP and with histories that both share; `tests.pretrain.verify.mutations` tries FSDP2 and every precision."""
    found = start("ddp", "delayed")
    assert found.pop("nothing") == {"delayed": []}
    assert len(found) == 2 and all(
        failures for precisions in found.values() for failures in precisions.values()
    )


@pytest.mark.multi
@pytest.mark.parametrize("topology", OF_UPDATES)
def test_a_wrong_update_of_one_rank_stops_both(topology: str) -> None:
    each = found_by_two(find_faults_of_updates, topology, OF_UPDATES[topology])
    assert all(
        len(ranks) == len(ALWAYS) + len(OF_UPDATES[topology]) and ranks.pop("nothing") == ""
        for ranks in each
    )
    assert all(message for ranks in each for message in ranks.values())
    of_one = [ranks["a rank's weight stands still"] for ranks in each]
    assert sorted("another process" in line for line in of_one) == [False, True]
    assert any("weights of 1 of" in line for line in of_one)
