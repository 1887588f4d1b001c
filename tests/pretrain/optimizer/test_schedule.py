"""Learning rate schedules compared with those of torch and transformers."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from transformers import get_wsd_schedule

from foundation.errors import InputError
from pretrain.optimizer import schedule
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import ScheduleSettings
from tests.conftest import ROOT

RATE = 2.0e-5


def rates(settings: ScheduleSettings, total: int) -> list[float]:
    return [schedule.learning_rate(step, settings, RATE, total) for step in range(total)]


def run(scheduler: LRScheduler, total: int) -> list[float]:
    """Return the learning rates of `total` steps."""
    seen = []
    for _ in range(total):
        seen.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return seen


def sgd() -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=RATE)


@pytest.mark.parametrize(
    ("shape", "begins"),
    [
        ({"kind": "wsd", "decay": 0.2}, 80),
        ({"kind": "wsd", "decay": 0.0}, None),
        ({"kind": "constant"}, None),
    ],
)
def test_the_rate_falls_after_the_first_step_of_the_decay(shape, begins):
    settings = ScheduleSettings(warmup=10, **shape)
    assert schedule.decay_begins(settings, 100) == begins
    seen = rates(settings, 100)
    falls = next((step for step in range(1, 100) if seen[step] < seen[step - 1]), None)
    assert falls == (None if begins is None else begins + 1), (
        "the first step of the decay still has the peak rate"
    )


@pytest.mark.parametrize("shape", ["linear", "cosine", "1-sqrt"])
def test_wsd_after_warmup_is_that_of_transformers(shape: str) -> None:
    phases = {"num_warmup_steps": 10, "num_decay_steps": 20, "num_training_steps": 100}
    reference = get_wsd_schedule(sgd(), **phases, decay_type=shape, min_lr_ratio=0.1)
    settings = ScheduleSettings(warmup=10, decay=0.2, decay_shape=shape, min_lr_ratio=0.1)
    assert rates(settings, 100)[10:] == pytest.approx(run(reference, 100)[10:])
    assert f"{shape} decay 20" in schedule.describe(settings, RATE, 100)


def test_the_malaysian_recipe_decays_as_its_reference() -> None:
    """The reference uses the default of `decay_type`."""
    recipe = load_recipe(ROOT / "recipes/small_malaysian_lm.yaml")
    total = recipe.train.steps
    reference = get_wsd_schedule(sgd(), 100, int(total * 0.2), num_training_steps=total)
    expected = run(reference, total)
    assert recipe.optimizer.learning_rate == RATE
    assert rates(recipe.schedule, total)[100:] == pytest.approx(expected[100:])


def test_cosine_and_its_warmup_are_those_of_torch() -> None:
    optimizer = sgd()
    warmup = LinearLR(optimizer, start_factor=1 / 10, total_iters=9)
    cosine = CosineAnnealingLR(optimizer, T_max=90, eta_min=0.1 * RATE)
    expected = run(SequentialLR(optimizer, [warmup, cosine], milestones=[10]), 100)
    settings = ScheduleSettings(kind="cosine", warmup=10, min_lr_ratio=0.1)
    assert rates(settings, 100) == pytest.approx(expected)


shapes = st.builds(
    ScheduleSettings,
    kind=st.sampled_from(["wsd", "cosine", "linear", "constant"]),
    warmup=st.integers(0, 60),
    decay=st.floats(0, 1),
    decay_shape=st.sampled_from(["linear", "cosine", "1-sqrt"]),
    min_lr_ratio=st.floats(0, 1),
)


@given(settings=shapes, total=st.integers(1, 120))
def test_rates_are_positive_and_rise_only_during_warmup(settings, total):
    try:
        schedule.check(settings, total)
    except InputError:
        assume(False)
    seen = rates(settings, total)
    warm = max(settings.warmup, 1)
    assert all(0 < rate <= RATE for rate in seen)
    assert seen[:warm] == sorted(seen[:warm])
    assert seen[warm - 1 :] == sorted(seen[warm - 1 :], reverse=True)
    assert seen[warm - 1] == pytest.approx(RATE)
    assert min(seen[warm - 1 :]) >= RATE * settings.min_lr_ratio * (1 - 1e-12)


@pytest.mark.parametrize(
    ("settings", "total", "words"),
    [
        ({"kind": "cosine", "warmup": 101}, 100, r"schedule\.warmup: 101.*100"),
        ({"kind": "cosine", "warmup": 2}, 1, "run of 1 step;"),
        ({"warmup": 81, "decay": 0.2}, 100, r"\.warmup: 81.*\.decay: 0\.2.*100 steps"),
        ({"warmup": 80, "decay": 0.2}, 100, None),
    ],
)
def test_warmup_and_decay_that_do_not_fit_are_rejected(settings, total, words):
    with pytest.raises(InputError, match=words) if words else nullcontext():
        schedule.check(ScheduleSettings(**settings), total)


@given(
    steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    decay=st.floats(0.0, 1.0),
    kind=st.sampled_from(["wsd", "cosine"]),
)
def test_a_schedule_fits_every_length_on_the_command_line(steps, warmup, decay, kind):
    given = [f"schedule={{kind: {kind}, warmup: {warmup}, decay: {decay}}}", f"train.steps={steps}"]
    recipe = load_recipe(ROOT / "recipes/smoke.yaml", given)
    fitted, notices = schedule.fit_to_command_line(recipe, given, steps)
    schedule.check(fitted.schedule, steps)
    before = schedule.decay_steps(recipe.schedule, steps)
    after_warmup = max(before, 1)
    if warmup + after_warmup <= steps:
        assert (fitted, notices) == (recipe, [])
        return
    assert len(notices) == 1
    after = schedule.decay_steps(fitted.schedule, steps)
    assert fitted.schedule.warmup < steps, "the rate does not end during the warm-up"
    assert fitted.schedule.warmup + max(after, 1) == steps, "no step is between the phases"
    assert fitted.schedule.warmup == warmup * steps // (warmup + after_warmup)


@pytest.mark.parametrize(("warmup", "kept"), [(3, True), (4, True), (5, False), (60, False)])
@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_a_warmup_on_the_command_line_stays_if_it_fits(warmup: int, kept: bool, kind: str) -> None:
    given = ["train.steps=5", f"schedule.warmup={warmup}", f"schedule.kind={kind}"]
    recipe = load_recipe(ROOT / "recipes/smoke.yaml", given)
    fitted, _ = schedule.fit_to_command_line(recipe, given, 5)
    schedule.check(fitted.schedule, 5)
    assert (fitted.schedule.warmup == warmup) == kept
    assert 0 < fitted.schedule.warmup < 5


def test_a_schedule_fits_a_length_in_epochs() -> None:
    given = ["train.epochs=0.01"]
    recipe = load_recipe(ROOT / "recipes/smoke.yaml", given)
    fitted, (notice,) = schedule.fit_to_command_line(recipe, given, 7)
    schedule.check(fitted.schedule, 7)
    assert re.match(r"the schedule is shortened to wsd: .* = 7 steps", notice)


def test_a_schedule_that_does_not_fit_its_file_stays() -> None:
    given = ["schedule.warmup=701"]
    recipe = load_recipe(ROOT / "recipes/smoke.yaml", given)
    assert schedule.fit_to_command_line(recipe, given, recipe.train.steps) == (recipe, [])
    tokens = [*given, f"train.tokens={3 * recipe.batch.tokens}"]
    fitted, notices = schedule.fit_to_command_line(
        load_recipe(ROOT / "recipes/smoke.yaml", tokens), tokens, 3
    )
    assert fitted.schedule.warmup <= 3
    assert "3 steps" in notices[0]
