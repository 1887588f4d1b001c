"""The picture of documents' lengths; where nobody looks at it, tests leave it blank (tests/blank_picture.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from packing.statistics import draw_lengths


@pytest.mark.parametrize("lengths", [[1], [7, 7, 7], [1, 100_000]], ids=str)
@pytest.mark.parametrize("pack_length", [1, 7, 4096])
def test_any_lengths_can_be_drawn(lengths: list[int], pack_length: int, tmp_path: Path) -> None:
    draw_lengths(np.array(lengths), pack_length, tmp_path / "lengths.png")
    assert imread(tmp_path / "lengths.png").std() > 0.05
