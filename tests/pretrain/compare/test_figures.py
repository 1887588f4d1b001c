"""Pictures whose names are in scripts that the usual font lacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

from pretrain.compare.figures import new_figure, save

NAME = "训练 обучение"  # of which the usual font has the second word


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """A font of this name and with these characters, each a filled square; no other font of this machine has Chinese."""
    monkeypatch.setattr(
        fontManager, "ttflist", [each for each in fontManager.ttflist if each.name.startswith(("DejaVu", "Last"))]
    )

    def installed(name: str, characters: str) -> None:
        pen = TTGlyphPen(None)
        pen.moveTo((0, 0))
        for corner in ((0, 1000), (1000, 1000), (1000, 0)):
            pen.lineTo(corner)
        pen.closePath()
        names = [".notdef", *(f"uni{ord(each):04X}" for each in characters)]
        font = FontBuilder(1000)
        font.setupGlyphOrder(names)
        font.setupCharacterMap(dict(zip(map(ord, characters), names[1:], strict=True)))
        font.setupGlyf(dict.fromkeys(names, pen.glyph()))
        font.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
        font.setupHorizontalHeader(ascent=1000, descent=0)
        font.setupOS2()
        font.setupPost()
        font.setupNameTable({"familyName": name, "styleName": "Regular"})
        font.save(path := tmp_path / f"{name}.ttf")
        fontManager.addfont(path)

    return installed


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


def families(figure: Figure) -> set[tuple[str, ...]]:
    [panel] = figure.axes
    texts = [panel.title, *panel.get_yticklabels(), *panel.get_legend().get_texts()]
    return {tuple(text.get_fontfamily()) for text in texts}


def test_a_name_that_no_font_has_is_drawn_without_a_warning(install: Callable[[str, str], None], tmp_path: Path):
    data, figure = picture(tmp_path / "boxes.png")
    assert data.startswith(b"\x89PNG") and families(figure) == {("sans-serif",)}


def test_a_name_is_drawn_in_the_fonts_that_have_it(install: Callable[[str, str], None], tmp_path: Path):
    boxes, _ = picture(tmp_path / "boxes.png")
    install("Half", "训")
    install("Whole", "训练")
    found, figure = picture(tmp_path / "found.png")
    assert families(figure) == {("sans-serif", "Whole")} and found != boxes
    install("Tamil", "ப")
    _, figure = picture(tmp_path / "both.png", f"{NAME} ப")
    assert families(figure) == {("sans-serif", "Whole", "Tamil")}


def test_a_font_file_that_has_gone_is_passed_over(install: Callable[[str, str], None], tmp_path: Path):
    install("Gone", "训练")
    (tmp_path / "Gone.ttf").unlink()
    install("There", "训练")
    assert families(picture(tmp_path / "there.png")[1]) == {("sans-serif", "There")}


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
