"""Schedules of precisions: valid ones, their labels, and the precision of every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from pretrain.launch.environment import with_precision
from pretrain.precision.product import PrecisionContext
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.precision.selection import make_engines
from pretrain.precision.settings import is_quantized, label, phases_of
from pretrain.settings.config import load_recipe, resolved, run_dir_of
from pretrain.settings.recipe import Recipe
from tests.pretrain.conftest import active_in

NVFP4 = active_in("nvfp4")
DELAYED = active_in("delayed")
BF16 = active_in("bf16", "torch")
MINIMAL = {"name": "r", "weights": "fp32", "model": {"source": "m"}, "train": {"steps": 100}}
MINIMAL |= {"data": {"packs": "p", "length": 32}}


@pytest.mark.parametrize("last", ["{use: bf16}", "{use: bf16, until: null}"])
def test_a_schedule_has_a_label_and_a_folder(last: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    recipe = load_recipe(path, [f"precision=[{{until: 0.8, use: nvfp4}}, {last}]"])
    for precision in (recipe.precision, resolved(recipe)["precision"]):
        assert phases_of(precision) == [(0.8, "nvfp4"), (None, "bf16")]
        assert label(precision) == "nvfp4 to 80 %, then bf16"
    assert run_dir_of(recipe) == Path("runs/r-nvfp4-to-0.8-then-bf16-fp32")
    assert is_quantized(recipe.precision) and not is_quantized("bf16") and not is_quantized(None)


# ── The precision of a step ────────────────────────────────────────────────────────────


@given(data=st.data())
def test_a_schedule_agrees_with_a_list_of_the_steps(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    precisions = [data.draw(st.sampled_from([NVFP4, DELAYED, BF16])) for _ in lengths]
    steps = sum(lengths)
    listed = [
        active for length, active in zip(lengths, precisions, strict=True) for _ in range(length)
    ]
    ends = [sum(lengths[:number]) for number in range(1, len(lengths))]
    phases = list(zip([*ends, None], precisions, strict=True))
    schedule = PrecisionSchedule(phases, steps)
    assert [schedule.at(step) for step in range(1, steps + 1)] == listed
    assert schedule.at(steps + 1) == listed[-1], "a finished run stays in its last precision"
    assert schedule.precisions == list(dict.fromkeys(listed))
    spans = schedule.spans
    assert [spans[0][0], spans[-1][1]] == [1, steps]
    assert [first for first, *_ in spans[1:]] == [last + 1 for _, last, _ in spans[:-1]]
    assert schedule.changes == (len(spans) > 1)


def test_a_longer_horizon_moves_shares_and_not_steps() -> None:
    phases = [(0.206, NVFP4), (50, DELAYED), (None, BF16)]
    for steps, ends in ((100, [21, 50, 100]), (200, [41, 50, 200])):
        assert [last for _, last, _ in PrecisionSchedule(phases, steps).spans] == ends


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((0.8, 50), "phase 2 of 3 would begin after step 80 and end after step 50"),
        ((100,), "phase 1 of 2 would begin after step 0 and end after step 100"),
        ((0.001,), "phase 1 of 2 would begin after step 0 and end after step 0"),
    ],
)
def test_a_phase_without_a_step_is_rejected(ends: tuple[float, ...], words: str) -> None:
    schedule = PrecisionSchedule([*((end, NVFP4) for end in ends), (None, BF16)], 100)
    with pytest.raises(InputError, match=f"`precision`: {words}"):
        schedule.at(1)


def test_the_current_precision_determines_the_engine_of_products() -> None:
    engines = make_engines([NVFP4, DELAYED, BF16], torch.device("cpu"))
    context = PrecisionContext(torch.bfloat16, engines, DELAYED)
    for active in (NVFP4, DELAYED, BF16):
        with context.using(active):
            assert context.current is active and context.engine is engines.get(active.name)
        assert context.engine is engines["delayed"]
    context.current = BF16
    assert context.engine is None


# ── Options ────────────────────────────────────────────────────────────────────────────


def options_of(phases: list[str], environment: dict[str, str], **fp8_config: Any) -> dict[str, Any]:
    """Return the resolved `fp8_config` of a schedule of two phases."""
    precision = [{"until": 0.5, "use": phases[0]}, {"use": phases[1]}]
    recipe = Recipe.model_validate(MINIMAL | {"precision": precision, "fp8_config": fp8_config})
    return with_precision(recipe, environment).fp8_config.model_dump()


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        (["delayed", "bf16"], {"margin": 2, "amax_history_len": 4, "fp8_format": "HYBRID"}),
        (["mxfp8", "delayed"], {"margin": None, "amax_history_len": 4, "fp8_format": None}),
    ],
)
def test_one_low_precision_of_a_schedule_gets_options_of_the_file(
    phases: list[str], expected: dict[str, Any]
) -> None:
    environment = {"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_RECIPE": "delayed"}
    environment |= {"ACCELERATE_FP8_MARGIN": "2"}
    options = options_of(phases, environment, amax_history_len=4)
    assert expected.items() <= options.items()


def test_an_option_that_no_phase_takes_is_rejected() -> None:
    with pytest.raises(InputError, match=r"disable_rht: True.* `precision: delayed` contradict"):
        options_of(["delayed", "bf16"], {}, disable_rht=True)
