"""The registry: every entry says what the rest asks of it, and a mistyped name gets the nearest."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml

from foundation.errors import InputError
from pretrain.metrics.peaks import PeakDtype
from pretrain.precision import registry as recipes
from pretrain.precision.registry import PRECISIONS, Hardware
from pretrain.precision.settings import OPTIONS, LowPrecisionSettings

CONFIGS = Path(__file__).parents[3] / "accelerate_configs"
QUANTIZED = [name for name, recipe in PRECISIONS.items() if recipe.quantized]


def test_every_recipe_and_weight_dtype_is_one_of_torch_s() -> None:
    names = [recipe.compute_dtype for recipe in PRECISIONS.values()] + list(recipes.WEIGHT_DTYPES.values())
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in names)
    assert all(name == recipe.name for name, recipe in PRECISIONS.items())
    assert {recipe.peak for recipe in PRECISIONS.values()} <= set(get_args(PeakDtype))


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_default_of_a_recipe_is_a_value_that_its_key_can_have(name: str) -> None:
    options = PRECISIONS[name].options
    assert set(options) <= set(OPTIONS)
    defaults = {key: option.default for key, option in options.items()}
    assert LowPrecisionSettings.model_validate(defaults).contradictions(PRECISIONS[name]) == []
    assert all(PRECISIONS[name].takes(key, value) for key, value in defaults.items())


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_quantized_recipe_has_an_accelerate_configuration_that_states_its_options(name: str) -> None:
    written = [yaml.safe_load(path.read_text()).get("fp8_config", {}) for path in CONFIGS.glob("*.yaml")]
    (ours,) = [fp8_config for fp8_config in written if fp8_config.get("recipe") == name]
    expected = LowPrecisionSettings().resolved(name).model_dump()
    assert {key: ours.get(key) for key in expected} == expected


def test_a_key_of_fp8_config_belongs_to_all_recipes_or_is_taken_by_one() -> None:
    general = {"backend", "scope", "on_unsupported", "keep_bf16_layers", "use_autocast_during_eval"}
    assert set(LowPrecisionSettings.model_fields) == general | set(OPTIONS)


def test_tolerances_widen_as_the_formats_narrow() -> None:
    order = [PRECISIONS[name].tolerance for name in ("fp32", "bf16", "delayed", "nvfp4")]
    assert [t.loss for t in order] == sorted(t.loss for t in order)
    assert [t.gradient_norm for t in order] == sorted(t.gradient_norm for t in order)
    assert [t.cosine for t in order] == sorted((t.cosine for t in order), reverse=True)


A100, L40S, H200, B200, RTX_5090 = (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)
HAVE = {
    "delayed": {L40S, H200, B200, RTX_5090},
    "current": {L40S, H200, B200, RTX_5090},
    "block": {H200, B200, RTX_5090},
    "mxfp8": {B200},  # not all of its products exist for consumer Blackwell
    "nvfp4": {B200, RTX_5090},
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_recipe_runs_on_the_gpus_that_transformer_engine_supports_it_on(name: str) -> None:
    hardware = PRECISIONS[name].hardware
    gpus = (A100, L40S, H200, B200, RTX_5090)
    assert {gpu for gpu in gpus if hardware.lacking(gpu, (13, 0)) is None} == HAVE[name]
    assert "a GPU of compute capability" in hardware.lacking(None, None)


def test_what_a_device_lacks_is_said_in_words() -> None:
    assert PRECISIONS["nvfp4"].hardware.lacking(H200, (13, 0)) == "a GPU of compute capability 10.0 or higher (B200, GB200)"
    assert "10.0 or higher and below 12.0" in PRECISIONS["mxfp8"].hardware.lacking(RTX_5090, (13, 0))
    hopper = Hardware((9, 0), "H100", cuda=(12, 9))
    assert hopper.lacking(H200, (12, 8)) == "CUDA 12.9 or newer, and this torch is built for 12.8"
    assert hopper.lacking(H200, None) == "CUDA 12.9 or newer, and this torch is built for none"
    assert hopper.lacking(H200, (12, 9)) is None and hopper.lacking(H200, (13, 0)) is None


def test_a_recipe_is_found_by_name_and_a_mistyped_one_gets_the_nearest() -> None:
    assert recipes.find("bf16", "here").compute_dtype == "bfloat16"
    with pytest.raises(
        InputError, match=r"accelerate configuration: unknown precision 'bf61'; did you mean 'bf16'\? known: fp32"
    ):
        recipes.find("bf61", "accelerate configuration")
    with pytest.raises(InputError, match=r"`precision`: unknown precision 'posit'; known: fp32, bf16, delayed, "):
        recipes.find("posit", "`precision`")
