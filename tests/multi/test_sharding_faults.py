"""Faults of sharded runs are found by the checks in docs/developers/faults.md, on two ranks.

`python -m tests.pretrain.verify.mutations` tries them in all precisions.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from pretrain.precision.settings import PRECISIONS
from tests.multi.test_broken_ranks import printed_by_ranks
from tests.pretrain.verify.mutations import MARKS, named, read_lists
from tests.pretrain.verify.sharding_faults import FAULTS, find_faults

# The tool has two layers.
of_one_layer = partial(find_faults, layers=1)


@pytest.mark.long
@pytest.mark.multi
def test_faults_of_gathers_and_reductions_are_found() -> None:
    begin, end = MARKS["cpu"]
    page = (Path(__file__).parents[2] / "docs/developers/faults.md").read_text(encoding="utf-8")
    table = read_lists(page.split(begin)[1].split(end)[0], list(PRECISIONS))
    found, _ = printed_by_ranks(of_one_layer, "fsdp2", ["delayed"])
    assert found.pop("nothing") == {"delayed": []}
    assert found.keys() == {fault.what for fault in FAULTS}
    for what, checks in found.items():
        assert named(checks["delayed"]) == table[what, "delayed"], what


@pytest.mark.multi
def test_gradients_that_are_reduced_in_bf16_are_found_in_bf16_runs() -> None:
    found, _ = printed_by_ranks(of_one_layer, "zero", ["bf16"])
    assert found.pop("nothing") == {"bf16": []}
    assert all(checks["bf16"] for checks in found.values())
