"""Pictures whose names are in any script, or hold dollars."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from pretrain.compare.figures import new_figure, save

NAME = "训练 обучение"  # the usual font lacks the first word


def picture(path: Path, name: str = NAME) -> tuple[bytes, Figure]:
    """A name wherever a picture has one; drawing it warns of nothing."""
    figure = new_figure(4, 3)
    panel = figure.subplots()
    panel.plot([0, 1], label=name)
    panel.set_title(name, weight="bold")
    panel.set_yticks([0.0, 1.0], [name, "plain"])
    panel.legend()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(figure, path)
    return path.read_bytes(), figure


def test_a_name_that_the_font_lacks_is_drawn_without_a_warning(tmp_path: Path):
    data, _ = picture(tmp_path / "boxes.png")
    assert data.startswith(b"\x89PNG")


def test_dollars_in_a_name_are_no_formula_and_powers_on_an_axis_are(tmp_path: Path):
    _, figure = picture(tmp_path / "dollars.png", "a $x_$ b")
    [panel] = figure.axes
    panel.set_xscale("log")
    save(figure, tmp_path / "powers.png")
    powers = [text for text in panel.get_xticklabels() if "$" in text.get_text()]
    assert powers and all(text.get_parse_math() for text in powers)


def test_other_warnings_are_passed_on(tmp_path: Path):
    figure = new_figure(4, 3)
    figure.draw = lambda renderer: warnings.warn("something else", UserWarning, stacklevel=1)
    with pytest.warns(UserWarning, match="something else"):
        save(figure, tmp_path / "any.png")
