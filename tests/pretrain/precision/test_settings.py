"""`fp8_config`: options belong to recipes, unset ones become the recipe's defaults, and nothing is lost on the way to a file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pretrain.precision.registry import PRECISIONS
from pretrain.precision.settings import OPTIONS, LowPrecisionSettings

VALUES = {
    "fp8_format": ["HYBRID", "E4M3"],
    "margin": [0, 3],
    "amax_history_len": [1, 1024],
    "amax_compute_algo": ["max", "most_recent"],
    "fast_accumulation": [False, True],
    "disable_rht": [False, True],
    "disable_stochastic_rounding": [False, True],
}
GENERAL = {
    "backend": st.sampled_from(["TE", "emulation"]),
    "scope": st.sampled_from(["linear", "linear+head"]),
    "on_unsupported": st.sampled_from(["error", "emulate", "fallback"]),
    "keep_bf16_layers": st.fixed_dictionaries({}, optional={"first": st.integers(0, 3), "last": st.integers(0, 3)}),
    "use_autocast_during_eval": st.booleans(),
}
SETTINGS = st.fixed_dictionaries(
    {}, optional=GENERAL | {key: st.sampled_from([None, *values]) for key, values in VALUES.items()}
).map(LowPrecisionSettings.model_validate)
NAMES = st.sampled_from(sorted(PRECISIONS))


def test_the_options_are_those_that_only_some_recipes_take() -> None:
    assert set(OPTIONS) == set(VALUES)


@given(SETTINGS, NAMES)
def test_resolved_settings_state_every_option_that_the_recipe_takes_and_no_other(settings: LowPrecisionSettings, name: str):
    resolved, taken = settings.resolved(name), PRECISIONS[name].options
    for key in OPTIONS:
        chosen = getattr(settings, key)
        expected = (taken[key].default if chosen is None else chosen) if key in taken else None
        assert getattr(resolved, key) == expected
    assert all(getattr(resolved, key) == getattr(settings, key) for key in GENERAL)
    assert resolved.resolved(name) == resolved
    assert LowPrecisionSettings.model_validate(resolved.model_dump(mode="json")) == resolved


@given(SETTINGS, NAMES)
def test_a_contradiction_is_exactly_what_the_recipe_does_not_take(settings: LowPrecisionSettings, name: str):
    found = settings.contradictions(PRECISIONS[name])
    options = PRECISIONS[name].options
    for key in OPTIONS:
        value = getattr(settings, key)
        fits = value is None or (key in options and (options[key].allowed is None or value in options[key].allowed))
        assert (f"{key}: {value}" in found) != fits
    assert settings.without_options().contradictions(PRECISIONS[name]) == []


@given(SETTINGS)
def test_without_options_the_general_keys_stay_and_only_those_that_were_set_count_as_set(settings: LowPrecisionSettings):
    general = settings.without_options()
    assert general.model_fields_set == settings.model_fields_set - set(OPTIONS)
    assert general.model_dump(exclude=set(OPTIONS)) == settings.model_dump(exclude=set(OPTIONS))
    assert general.options_set == {}


def test_a_block_recipe_takes_one_format_only() -> None:
    assert LowPrecisionSettings(fp8_format="HYBRID").contradictions(PRECISIONS["block"]) == ["fp8_format: HYBRID"]
    assert LowPrecisionSettings(fp8_format="E4M3").contradictions(PRECISIONS["block"]) == []


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"recipe": "mxfp8"}, "in a recipe file `precision` names it"),
        ({"margin": -1}, "margin"),
        ({"margin": True}, "a whole number is wanted"),
        ({"margin": 19}, "19 halvings of the scale leave no value above zero"),
        ({"amax_history_len": 0}, "amax_history_len"),
        ({"amax_history_len": 2**20 + 1}, "1,048,577 microbatches are more than are kept"),
        ({"fp8_format": "E5M2"}, "fp8_format"),
        ({"keep_bf16_layers": {"frist": 1}}, "frist"),
        ({"scope": "everything"}, "scope"),
    ],
)
def test_what_no_recipe_takes_is_refused_by_itself(values: dict, says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        LowPrecisionSettings.model_validate(values)
