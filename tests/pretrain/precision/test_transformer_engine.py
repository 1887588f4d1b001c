"""Transformer Engine without a GPU: its recipe objects, and the reason why it is unavailable.

Recipes are built by Transformer Engine's own file. Tests of its kernels are in tests/gpu.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from foundation.errors import InputError
from pretrain.precision.settings import PRECISIONS, LowPrecisionSettings, configured
from pretrain.precision.transformer_engine import build_te_recipe, unavailable_because

ON_TE = [
    name for name, precision in PRECISIONS.items() if precision.quantized and precision.te_available
]
NVFP4_GRADIENTS = (
    "fp4_quant_bwd_grad.random_hadamard_transform",
    "fp4_quant_bwd_grad.stochastic_rounding",
)
FP8_QUANTIZATION = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")

Install = Callable[..., ModuleType]


@pytest.fixture
def te_recipes(monkeypatch: pytest.MonkeyPatch, references: Path) -> Install:
    """Return a function that installs Transformer Engine's recipe module.

    Arguments of the function are passed to `str.replace`, which changes the module's source.
    """

    def install(*replacement: str) -> ModuleType:
        source = references / "transformer_engine" / "common" / "recipe" / "__init__.py"
        module = ModuleType("transformer_engine.common.recipe")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        text = source.read_text(encoding="utf-8")
        exec(
            compile(text.replace(*replacement) if replacement else text, source, "exec"),
            module.__dict__,
        )
        return module

    return install


def configured_as(name: str, **options: Any) -> Any:
    return configured(name, LowPrecisionSettings(**options))


@pytest.mark.parametrize("name", ON_TE)
def test_without_options_te_recipes_have_te_defaults(te_recipes: Install, name: str) -> None:
    default = getattr(te_recipes(), PRECISIONS[name].te_recipe)()
    recipe = build_te_recipe(configured_as(name))
    assert type(recipe) is type(default) and repr(recipe) == repr(default)
    assert {key: repr(value) for key, value in vars(recipe).items()} == {
        key: repr(value) for key, value in vars(default).items()
    }


@pytest.mark.parametrize(
    "variable",
    ["NVTE_BACKWARD_OVERRIDE", "NVTE_NVFP4_DISABLE_RHT", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"],
)
def test_a_variable_that_changes_the_defaults_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(InputError, match=variable):
        build_te_recipe(configured_as("nvfp4"))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "delayed",
            {
                "fp8_format": "E4M3",
                "margin": 2,
                "amax_history_len": 7,
                "amax_compute_algo": "most_recent",
            },
            {
                "fp8_format.name": "E4M3",
                "margin": 2,
                "amax_history_len": 7,
                "amax_compute_algo": "most_recent",
            },
        ),
        ("current", {}, {f"{key}.power_2_scale": False for key in FP8_QUANTIZATION}),
        (
            "block",
            {},
            {f"{key}.power_2_scale": True for key in FP8_QUANTIZATION} | {"use_f32_scales": False},
        ),
        (
            "block",
            {"use_f32_scales": True},
            {f"{key}.power_2_scale": False for key in FP8_QUANTIZATION} | {"use_f32_scales": True},
        ),
        (
            "mxfp8",
            {"fp8_format": "HYBRID"},
            {"fp8_format.name": "HYBRID", "enable_2d_quantization": False},
        ),
        (
            "nvfp4",
            {},
            {
                "fp4_quant_fwd_weight.fp4_2d_quantization": True,
                "row_scaled_activation": False,
                "nvfp4_4over6": "none",
            },
        ),
        ("nvfp4", {"disable_rht": True}, dict(zip(NVFP4_GRADIENTS, (False, True), strict=True))),
        (
            "nvfp4",
            {"disable_stochastic_rounding": True},
            dict(zip(NVFP4_GRADIENTS, (True, False), strict=True)),
        ),
        *(
            (name, {}, {"backward_override": None})
            for name in ("current", "block", "mxfp8", "nvfp4")
        ),
    ],
)
def test_an_option_reaches_the_quantizers(
    te_recipes: Install, name: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    te_recipes()
    recipe = build_te_recipe(configured_as(name, **options))
    for path, value in expected.items():
        assert operator.attrgetter(path)(recipe) == value, path


def test_an_option_that_the_installed_version_drops_is_named(te_recipes: Install) -> None:
    te_recipes("amax_history_len", "amax_history_length")
    with pytest.raises(InputError, match=r"fp8_config.amax_history_len"):
        build_te_recipe(configured_as("delayed", amax_history_len=4))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("name", ON_TE)
def test_without_a_gpu_the_library_is_not_imported(name: str) -> None:
    loaded = {module for module in sys.modules if module.startswith("transformer_engine")}
    assert unavailable_because(PRECISIONS[name]) == "a CUDA device"
    assert {module for module in sys.modules if module.startswith("transformer_engine")} == loaded
