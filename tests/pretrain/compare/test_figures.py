"""The PNGs of runs: any run can be drawn, names are drawn as they are, and colours are the precisions'."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from pretrain.compare.appearance import colour_of
from pretrain.compare.figures import plot_losses, plot_seeds
from pretrain.compare.report import Report
from pretrain.metrics.run_record import read_run
from tests.pretrain.compare.made_runs import make_run, note, trained

LOSSES = {
    "one step": [3.0],
    "no finite loss": [None, None, None],
    "a flat line": [2.0] * 300,
    "a gap": [11.0, None, *np.linspace(8, 2, 500).tolist()],
}


def colours_in(picture: Path) -> set[str]:
    pixels = np.rint(255 * imread(picture)[..., :3]).astype(int).reshape(-1, 3)
    return {"#" + "".join(f"{part:02X}" for part in pixel) for pixel in np.unique(pixels, axis=0)}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_any_run_can_be_drawn_alone_and_beside_another(losses, tmp_path):
    run = trained(tmp_path / "run", losses, "precision=nvfp4", held_out=len(losses) > 1)
    other = trained(tmp_path / "other", (4.0, 3.0, 2.0))
    plot_losses([run], tmp_path / "new" / "loss.png")
    plot_losses([other, run], tmp_path / "both.png")
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["loss.png"]
    assert colour_of("bf16") in colours_in(tmp_path / "both.png")
    assert colour_of("nvfp4") in colours_in(tmp_path / "new" / "loss.png") or losses[0] is None


def test_names_are_drawn_as_they_are_without_a_warning_and_a_broken_run_sets_no_scale(tmp_path):
    paths = [make_run(tmp_path / name, (4.0, 3.0, 2.0)) for name in ("cost $2^4$ and $x", "日本語")]
    cut = make_run(tmp_path / "cut", (4.0, 9e9))
    note(cut, halted="step 2: it diverged")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = Report.over([trained(tmp_path / "base"), *map(read_run, [*paths, cut])])
        report.write(tmp_path / "x.png", None, None)
    assert imread(tmp_path / "x.png").std() > 0.05


def test_differences_over_seeds_are_drawn_in_the_colour_of_their_precision(tmp_path):
    runs = [
        trained(tmp_path / f"{precision}-seed{seed}", [3.0 + seed / 100] * 4, f"seed={seed}", f"precision={precision}")
        for precision in ("bf16", "delayed")
        for seed in (1, 2, 3)
    ]
    plot_seeds(Report.over(runs).by_seeds, tmp_path / "seeds.png")
    assert colour_of("delayed") in colours_in(tmp_path / "seeds.png")
