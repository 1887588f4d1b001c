"""A fault of each kind, caught as the table of docs/faults.md says, beside healthy models that pass.

`python -m tests.pretrain.verify.mutations` makes them all."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate import Accelerator

from pretrain.precision.settings import PRECISIONS
from tests.pretrain.verify.mutations import FAULTS, MARKS, caught_by
from tests.pretrain.verify.small_runs import build_run

# The narrowest formats hide most, so most faults are made in them. Others are in the tests of parity and of the update.
CAUGHT = [
    ("a microbatch's gradient is lost", "mxfp4"),
    ("each quantized weight keeps the gradient of the last microbatch alone", "delayed"),
    ("a square weight's gradient adds up transposed", "nvfp4"),
    ("the labels of a step's third microbatch are shifted twice", "bf16"),
    ("one layer is left out", "fp32"),
    ("a recomputed layer is computed outside of low precision", "delayed"),
    ("the head comes untied from the embedding", "current"),
    ("no scale is updated from the second step on", "delayed"),
    ("values are truncated, not rounded", "current"),
    ("codes have a mantissa bit less", "current"),
    ("from a step's second microbatch on nothing is quantized", "nvfp4"),
    ("a block is decoded by its neighbour's scale", "block"),
    ("one scale a tensor in place of one a block", "mxfp8"),
    ("the Hadamard transform is left out", "nvfp4"),
    ("gradients are rounded to nearest, not by chance", "mxfp4"),
    ("stochastic rounding goes up too often, by 3 % of a quantum", "nvfp4"),
    ("values are rounded a quarter of a quantum down", "delayed"),
    ("ties are rounded away from zero", "mxfp8"),
    ("a block's scale fits only half of its values", "mxfp8"),
    ("a block's scale is half of what fits", "mxfp8"),
    ("the Hadamard transform is made on one side only", "nvfp4"),
    ("the tensor's scale is twice what fits", "delayed"),
    ("no token sees further back than half of a pack", "bf16"),
    ("positions begin again at half of a pack", "bf16"),
    ("the sliding window is ignored", "bf16"),
    ("the sliding window is a key wider", "bf16"),
    ("one token in 64 gets nothing of its experts", "bf16"),
    ("one token in 64 chooses the next experts", "bf16"),
    ("one token in 64 is computed by the next experts", "bf16"),
    ("the penalty's gradient is lost", "mxfp8"),
    ("the head's gradient is that of the label alone", "bf16"),
]
BY_NAME = {fault.what: fault for fault in FAULTS}


@pytest.fixture(scope="module")
def table() -> dict[tuple[str, str], str]:
    """Who catches a fault in a precision, on a CPU."""
    begin, end = MARKS["cpu"]
    page = (Path(__file__).parents[3] / "docs/faults.md").read_text(encoding="utf-8")
    rows = [
        line for line in page.split(begin)[1].split(end)[0].splitlines() if line.startswith("| ")
    ]
    heading, _, *faults = ([cell.strip(" `") for cell in row.strip("|").split("|")] for row in rows)
    return {
        (cells[0], name): cell
        for cells in faults
        for name, cell in zip(heading[1:], cells[1:], strict=True)
    }


@pytest.mark.parametrize(("what", "precision"), CAUGHT)
def test_a_fault_is_caught_by_whom_the_table_names(
    what: str, precision: str, table: dict, accelerator: Accelerator
) -> None:
    fault = BY_NAME[what]
    run = build_run(accelerator, precision, layers=1, **fault.options)
    assert fault.applies(run)
    assert " and ".join(caught_by(run, fault)) == table[what, precision]


@pytest.mark.parametrize(
    ("precision", "kind"), [("nvfp4", "llama"), ("block", "gpt2"), ("delayed", "gemma")]
)
def test_a_model_in_which_nothing_is_broken_passes(
    precision: str, kind: str, accelerator: Accelerator
) -> None:
    parity = build_run(accelerator, precision, kind, layers=1, scope="linear+head").parity()
    assert parity.failures == []
    linears = {"gpt2": 4}.get(kind, 7)
    assert len(parity.products) == 3 * (linears + 1), (
        "forward, dgrad and wgrad of every linear and of the head"
    )


def test_the_table_has_every_fault_and_none_that_nobody_catches(
    table: dict, accelerator: Accelerator
) -> None:
    assert len(BY_NAME) == len(FAULTS) and BY_NAME.keys() <= {what for what, _ in table}
    for name in PRECISIONS:
        run = build_run(accelerator, name, layers=1)
        for fault in FAULTS:
            # other weights are not stored in FP32
            made = "fp32" in fault.weights and fault.applies(run)
            assert table[fault.what, name] != "–" or not made, (fault.what, name)
