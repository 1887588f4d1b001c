"""Faults are caught by the checks in docs/developers/faults.md, and correct runs pass.

`python -m tests.pretrain.verify.mutations` tries all faults in all precisions. These tests and
tests/pretrain/observe/test_step_check.py try a third of the faults in one precision.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pretrain.precision.settings import PRECISIONS
from tests.pretrain.verify.mutations import (
    FAULTS,
    MARKS,
    caught_by,
    compact,
    lists,
    named,
    read_lists,
)
from tests.pretrain.verify.small_runs import build_run

# Narrow formats hide faults best.
CAUGHT = [
    ("the labels of a step's third microbatch are shifted twice", "bf16"),
    ("one layer is skipped", "fp32"),
    ("the second norm of a fused layer uses the first norm's weight", "bf16"),
    ("a layer is recomputed outside low precision", "delayed"),
    ("the head comes untied from the embedding", "current"),
    ("no scale is updated from the second step on", "delayed"),
    ("values are truncated, not rounded", "current"),
    ("nothing is quantized from the second microbatch of a step on", "mxfp8"),
    ("a block is decoded with its neighbour's scale", "block"),
    ("gradients are rounded to nearest, not stochastically", "mxfp4"),
    ("stochastic rounding rounds up too often, by 3 % of a quantum", "nvfp4"),
    ("ties are rounded away from zero", "mxfp8"),
    ("the sliding window is one key too wide", "bf16"),
    ("one token in 64 is routed to the next experts", "bf16"),
    ("the penalty's gradient is lost", "bf16"),
    ("the first boundary between documents is lost", "bf16"),
    ("the held-out loss includes the penalty", "bf16"),
    ("amax histories have half of their length", "delayed"),
    ("the input's gradient is halved in later chunks of a quantized head", "mxfp8"),
    ("quantized weights' gradients are 8 % too large in later microbatches", "mxfp8"),
    ("the forward results of the smallest expert are zero", "mxfp8"),
    ("a quantized linear drops its bias", "current"),
    ("a phase has the precision of the phase before it", "block"),
    ("the bias of a quantized linear has no gradient", "delayed"),
    ("the amax histories of weights contain half of the amax", "delayed"),
    ("the amax histories of gradients contain half of the amax", "delayed"),
]
BY_NAME = {fault.what: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], str]:
    """Return the checks that docs/developers/faults.md lists, by fault and precision."""
    begin, end = MARKS["cpu"]
    page = (Path(__file__).parents[3] / "docs/developers/faults.md").read_text(encoding="utf-8")
    return read_lists(page.split(begin)[1].split(end)[0], list(PRECISIONS))


def test_lists_of_faults_are_read_as_they_are_written() -> None:
    names = ["bf16", "delayed", "nvfp4"]
    cells = {
        "one": ["update", "audit", "audit"],
        "two": [None, "both", "both"],
        "three": [None, "both", "both"],
        "four": ["parity"] * 3,
    }
    text = lists([compact(what, found, names) for what, found in cells.items()])
    assert text.count("**low**") == 1
    read = read_lists(text, names)
    for what, found in cells.items():
        assert [read.get((what, name)) for name in names] == found


@pytest.mark.parametrize(("what", "precision"), CAUGHT)
def test_a_fault_is_caught_by_the_checks_of_the_table(what, precision, table, accelerator):
    fault = BY_NAME[what]
    checks = table[what, precision].removesuffix(" (fused)")
    is_fused = checks != table[what, precision]
    run = build_run(accelerator, precision, layers=1, fused=is_fused, **fault.options)
    assert fault.applies(run)
    assert named(caught_by(run, fault)) == checks


def test_the_table_lists_every_fault_of_every_precision(table, accelerator):
    assert len(BY_NAME) == len(FAULTS) and BY_NAME.keys() <= {what for what, _ in table}
    for name in PRECISIONS:
        run = build_run(accelerator, name, layers=1)
        for fault in FAULTS:
            # Faults of weights in BF16 do not apply to this run.
            is_tried = "fp32" in fault.weights and fault.applies(run)
            assert (fault.what, name) in table or not is_tried, (fault.what, name)
