"""Lines through what was measured, and real trials of microbatch sizes on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from foundation.settings import parse
from foundation.tables import UNKNOWN
from pretrain.plan.preflight import Job, prepare_job
from pretrain.run import sizes as module
from pretrain.run.sizes import Line, Size, Sizes, described, draw, measure
from pretrain.settings.recipe import Recipe

PACKS = (1, 2, 4, 8)


def measured(*seconds: float, memory: float | None = 1e9, limit: int | None = None, packs: int = 8) -> Sizes:
    """Memory grows by `memory` bytes a pack on top of as many."""
    found = [Size(size, memory and memory * (1 + size), taken, update=0.5) for size, taken in zip(PACKS, seconds, strict=False)]
    return Sizes(tuple(found), None, limit, length=32, packs=packs, device="CPU", precision="bf16")


@given(st.floats(0, 1e3), st.floats(0.1, 1e3))
def test_a_line_is_found_again_and_foresees_its_largest_size(at_none: float, each: float):
    line = Line.through(PACKS, [at_none + each * packs for packs in PACKS])
    assert (line.at(0), line.at(64)) == pytest.approx((at_none, at_none + 64 * each), rel=1e-6, abs=1e-6 * each)
    assert line.off < 1e-6 and line.foreseen < 1e-6


def test_what_is_no_line_says_how_far_it_is_off():
    line = Line.through(PACKS, [1.0, 2.0, 4.0, 16.0])
    assert line.foreseen == pytest.approx(0.5), "the first three foresee 8"
    assert line.off > 0.1 and "misses the largest by 50.0 %" in line.reliability()
    assert Line.through((1, 2), [1.0, 2.0]).foreseen is None
    assert "cannot be told" in Line.through((1, 2), [1.0, 2.0]).reliability()


def test_sizes_are_extrapolated_as_far_as_memory_goes():
    found = measured(1.0, 2.0, 4.0, limit=20 * 10**9, packs=64)
    assert [(size.packs, size.measured) for size in found.extrapolated()] == [(8, False), (16, False)]
    assert found.largest_that_fits() == 19
    assert found.speed(found.measured[-1]) == pytest.approx(64 * 32 / (16 * 4.0 + 0.5))
    assert list(measured(1.0).extrapolated()) == [], "one size says nothing of others"


@pytest.mark.parametrize(("packs", "beyond"), [(2, []), (4, []), (7, []), (8, [8]), (16, [8, 16]), (1000, [8, 16, 32])])
def test_no_size_is_extrapolated_that_a_step_has_not_the_packs_for(packs: int, beyond: list[int]):
    found = measured(1.0, 2.0, 4.0, limit=50 * 10**9, packs=packs)
    assert [size.packs for size in found.extrapolated()] == beyond
    said = f"hold 49 packs; a step has {packs}" if packs < 49 else "hold 49 packs"
    assert any(note.endswith(said) for note in described(found)[2])


@pytest.mark.parametrize("seconds", [(0.46, 0.3, 0.26, 0.06), (0.5, 0.4), (1.0, 2.0, 0.5)])
def test_nothing_is_extrapolated_where_larger_microbatches_take_no_longer(seconds: tuple[float, ...], tmp_path: Path):
    found = measured(*seconds, limit=50 * 10**9, packs=1000)
    assert list(found.extrapolated()) == []
    _, rows, notes = described(found)
    assert [row[-1] for row in rows] == ["measured"] * len(seconds)
    assert "time does not grow with the packs, as far as was measured" in notes and not any("-" in note for note in notes)
    draw(found, tmp_path / "sizes.png", "small")


def test_without_a_figure_of_memory_there_is_a_table_all_the_same(tmp_path: Path):
    found = measured(1.0, 2.0, 4.0, memory=None, limit=10**9, packs=32)
    assert found.largest_that_fits() is None and len(list(found.extrapolated())) == 3
    _, rows, notes = described(found)
    assert {row[2] for row in rows} == {UNKNOWN} and not any("memory is" in note for note in notes)
    draw(found, tmp_path / "sizes.png", "small")
    assert (tmp_path / "sizes.png").stat().st_size > 1000


@pytest.fixture
def job(small_recipe: dict[str, Any], accelerator: Accelerator) -> Callable[..., Job]:
    def make(**changes: Any) -> Job:
        recipe = parse(Recipe, small_recipe | {"precision": "fp32"} | changes, "test")
        return prepare_job(recipe, accelerator, purpose="elsewhere")

    return make


@pytest.mark.parametrize("prepared", [True, False])
def test_sizes_are_tried_with_packs_and_before_there_are_any(prepared, job, accelerator, small_recipe, monkeypatch):
    data = small_recipe["data"] | ({} if prepared else {"packs": "/no/such"})
    monkeypatch.setattr(module, "REPEATS", 1)
    said: list[str] = []
    found = measure(job(data=data), accelerator, [1, 4], said.append)
    assert [size.packs for size in found.measured] == [1, 4] and len(said) == 2 and found.ended is None
    assert all(size.seconds > 0 and size.update > 0 and size.memory > 10**8 for size in found.measured)
    assert found.limit <= job().plan.devices.memory and (found.length, found.packs) == (32, 8)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_a_size_that_does_not_fit_ends_the_trial(error, job, accelerator, monkeypatch):
    real = module.try_size

    def small_device(assembly: Any, accelerator: Accelerator, job: Job, packs: int) -> Size:
        if packs > 2:
            raise error
        return real(assembly, accelerator, job, packs)

    monkeypatch.setattr(module, "try_size", small_device)
    monkeypatch.setattr(module, "REPEATS", 1)
    found = measure(job(), accelerator, [1, 2, 4, 8], lambda text: None)
    assert [size.packs for size in found.measured] == [1, 2] and found.ended == "4 packs did not fit"
