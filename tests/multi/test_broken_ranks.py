"""Parity over two processes: silent where they train together, and not where one of them is lost."""

from __future__ import annotations

import pytest

from tests.multi.broken_ranks import start

pytestmark = pytest.mark.multi


def test_what_is_lost_between_two_processes_is_found() -> None:
    """Under DDP and with histories that both share; `tests.pretrain.verify.mutations` tries FSDP2 and every precision."""
    found = start("ddp", "delayed")
    assert found.pop("nothing") == {"delayed": []}
    assert len(found) == 2 and all(failures for precisions in found.values() for failures in precisions.values())
