"""Parity over two processes: silent where they train together, and not where one of them is lost."""

from __future__ import annotations

import pytest

from tests.multi.broken_ranks import start

pytestmark = pytest.mark.multi


@pytest.mark.parametrize("topology", ["ddp", "fsdp2"])
def test_what_is_lost_between_two_processes_is_found_in_every_precision(topology: str) -> None:
    found = start(topology, "bf16", "delayed")
    assert found.pop("nothing") == {"bf16": [], "delayed": []}
    assert len(found) == 2 and all(failures for precisions in found.values() for failures in precisions.values())
