"""The PNG of a run: any can be drawn in its precision's colour; and what smooths curves, in the page as well."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.image import imread

from pretrain.compare.figures import colour_of, moving_mean, picture_of_run, window_of
from tests.pretrain.compare.made_runs import trained

LOSSES = {
    "one step": [3.0],
    "no finite loss": [None, None, None],
    "a flat line": [2.0] * 300,
    "a gap": [11.0, None, *np.linspace(8, 2, 500).tolist()],
    "lost at its end": [3.0, 2.0, None],
}


def colours_in(picture: bytes) -> set[str]:
    pixels = np.rint(255 * imread(io.BytesIO(picture))[..., :3]).astype(int).reshape(-1, 3)
    return {"#" + "".join(f"{part:02X}" for part in pixel) for pixel in np.unique(pixels, axis=0)}


@pytest.mark.parametrize("losses", LOSSES.values(), ids=LOSSES)
def test_any_run_can_be_drawn_in_its_precisions_colour(losses, tmp_path):
    run = trained(tmp_path / "cost $2^4$ and $x", losses, "precision=nvfp4", held_out=len(losses) > 1)
    assert colour_of("nvfp4") in colours_in(picture_of_run(run)) or losses[0] is None


@given(losses=st.lists(st.floats(-1e3, 1e3) | st.just(float("nan")), max_size=50), half=st.integers(0, 30))
def test_the_moving_mean_is_the_mean_of_the_finite_values_around(losses, half):
    values = np.array(losses, dtype=np.float64)
    means = moving_mean(values, 2 * half + 1)
    for i in range(len(values)):
        around = values[max(0, i - half) : i + half + 1]
        around = around[np.isfinite(around)]
        assert np.isnan(means[i]) if not len(around) else means[i] == pytest.approx(around.mean(), abs=1e-8)


@given(steps=st.integers(1, 5000))
def test_smoothing_takes_a_fiftieth_of_a_run_and_as_many_steps_before_as_after(steps):
    assert window_of(steps) % 2 == 1 and abs(window_of(steps) - steps / 50) <= 1.5
