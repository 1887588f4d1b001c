"""The pictures of runs that a test makes in its own process, and of runs in a forked one: blank, as drawing takes
longer than such a run. So are those of reports in tests that ask for `blank_curves`.

tests/pretrain/compare/test_report.py draws, and every run in a process of its own does; tests/multi/test_topologies.py looks.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path

from foundation.files import WRITTEN_BY, save_file
from pretrain.metrics.run_record import RunRecord

ONE_PIXEL = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC")


def plot_losses(runs: Sequence[RunRecord], path: Path) -> None:
    save_file(path, ONE_PIXEL + WRITTEN_BY.encode())
