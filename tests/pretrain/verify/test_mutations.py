"""A fault of each kind, caught, beside healthy models that pass. `python -m tests.pretrain.verify.mutations` makes them all."""

from __future__ import annotations

import pytest
from accelerate import Accelerator

from pretrain.precision.settings import PRECISIONS
from tests.pretrain.verify.faults import FAULTS
from tests.pretrain.verify.small_runs import build_run

# The narrowest formats hide most, so most faults are made in them.
CAUGHT = [
    ("documents of a pack see each other", "nvfp4"),
    ("every second boundary between documents is lost", "delayed"),
    ("a microbatch's gradient is lost", "mxfp4"),
    ("a square weight's gradient adds up transposed", "nvfp4"),
    ("the labels of a step's third microbatch are shifted twice", "bf16"),
    ("a weight's copy is that of an earlier step", "mxfp8"),
    ("values are truncated, not rounded", "current"),
    ("a block is decoded by its neighbour's scale", "block"),
    ("one scale a tensor in place of one a block", "mxfp8"),
    ("the Hadamard transform is left out", "nvfp4"),
    ("gradients are rounded to nearest, not by chance", "mxfp4"),
    ("the gradients' scales are never updated", "delayed"),
]
BY_NAME = {fault.what: fault for fault in FAULTS}


@pytest.mark.parametrize(("what", "precision"), CAUGHT)
def test_a_fault_is_caught_by_parity(what: str, precision: str, accelerator: Accelerator) -> None:
    run, fault = build_run(accelerator, precision, recompute=BY_NAME[what].recompute), BY_NAME[what]
    assert fault.applies(run)
    with fault.entered(run):
        assert run.parity().failures


@pytest.mark.parametrize(("precision", "kind"), [("nvfp4", "llama"), ("block", "gpt2"), ("delayed", "gemma")])
def test_a_model_in_which_nothing_is_broken_passes(precision: str, kind: str, accelerator: Accelerator) -> None:
    run = build_run(accelerator, precision, kind, layers=3, scope="linear+head")
    found = run.parity()
    assert found.failures == []
    linears = {"gpt2": 4}.get(kind, 7)
    assert len(found.products) == 3 * (3 * linears + 1), "forward, dgrad and wgrad of every linear and of the head"


def test_there_are_faults_of_every_kind_for_every_precision(accelerator: Accelerator) -> None:
    assert len(BY_NAME) == len(FAULTS) >= 20
    for name, precision in PRECISIONS.items():
        run = build_run(accelerator, name, layers=1)
        assert sum(fault.applies(run) for fault in FAULTS) >= (30 if precision.quantized else 14), name
