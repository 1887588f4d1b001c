"""The pictures of runs and of packs that a test makes in its own process, and of runs in a forked one: blank, as drawing takes
longer than such a run, or than packing a few documents. So are those of reports in tests that ask for `blank_curves`.

tests/pretrain/compare/test_report.py draws, and every run in a process of its own does; tests/multi/test_topologies.py looks.
Lengths are drawn by tests/packing/test_statistics.py, by whatever asks for `lengths_drawn`, and in processes of their own.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

import numpy as np

from foundation.files import WRITTEN_BY, save_file
from pretrain.metrics.run_record import RunRecord

ONE_PIXEL = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC")


def plot_losses(runs: Sequence[RunRecord], path: Path, *, asked_for: bool = False) -> None:
    save_file(path, ONE_PIXEL + WRITTEN_BY.encode(), asked_for=asked_for)


def draw_lengths(lengths: np.ndarray, pack_length: int, path: Path) -> None:
    """Behind the picture a digest of what would be drawn: pictures of other lengths have other bytes, equal ones the same."""
    path.write_bytes(ONE_PIXEL + sha256(lengths.tobytes() + b"%d" % pack_length).digest())
