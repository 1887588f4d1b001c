"""Transformer Engine without a GPU: which recipe object it gets, lent parameters, whose GEMM is whose, and why it is unavailable.

Recipes are built by Transformer Engine's own file. What needs its kernels is in tests/gpu.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from foundation.errors import InputError
from pretrain.precision.settings import PRECISIONS, LowPrecisionSettings
from pretrain.precision.transformer_engine import build_te_recipe, unavailable_because

CLASSES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "block": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
ON_TE = [name for name, precision in PRECISIONS.items() if precision.quantized and precision.te_available]
# Each turns a default of Transformer Engine's recipes into its opposite.
ADVERSE = {
    "NVTE_BACKWARD_OVERRIDE": "dequantized",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
    "NVTE_NVFP4_DISABLE_RHT": "1",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1",
    "NVTE_NVFP4_4OVER6": "weights",
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": "none",
    "NVTE_NVFP4_4OVER6_ERR_MODE": "MSE",
}
NVFP4_GRADIENTS = ("fp4_quant_bwd_grad.random_hadamard_transform", "fp4_quant_bwd_grad.stochastic_rounding")
FP8_QUANTIZATION = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")

Install = Callable[..., ModuleType]


@pytest.fixture
def te_recipes(monkeypatch: pytest.MonkeyPatch, references: Path) -> Install:
    """Puts Transformer Engine's recipe module where it is imported from, imported under `environ`, its text `changed`."""

    def install(environ: dict[str, str] | None = None, changed: tuple[str, str] | None = None) -> ModuleType:
        for key in ADVERSE:
            monkeypatch.delenv(key, raising=False)
        for key, value in (environ or {}).items():
            monkeypatch.setenv(key, value)
        source = references / "transformer_engine" / "common" / "recipe" / "__init__.py"
        module = ModuleType("transformer_engine.common.recipe")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        text = source.read_text(encoding="utf-8")
        if changed:
            assert changed[0] in text
            text = text.replace(*changed)
        exec(compile(text, source, "exec"), module.__dict__)
        return module

    return install


def resolved(name: str, **options: Any) -> LowPrecisionSettings:
    return LowPrecisionSettings(**options).resolved(name)


@pytest.mark.parametrize("environ", [{}, ADVERSE], ids=["no variables set", "variables set"])
@pytest.mark.parametrize("name", ON_TE)
def test_without_options_te_recipes_are_its_defaults_whatever_the_environment_says(
    te_recipes: Install, name: str, environ: dict[str, str]
) -> None:
    default = getattr(te_recipes(), CLASSES[name])()
    ours = (te_recipes(environ), build_te_recipe(PRECISIONS[name], resolved(name)))[1]
    assert type(ours).__name__ == CLASSES[name]
    assert repr(ours) == repr(default)
    assert {key: repr(value) for key, value in vars(ours).items() if key not in ("_cached_repr", *FP8_QUANTIZATION)} == {
        key: repr(value) for key, value in vars(default).items() if key != "_cached_repr"
    }


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        (
            "delayed",
            {"fp8_format": "E4M3", "margin": 2, "amax_history_len": 7, "amax_compute_algo": "most_recent"},
            {"fp8_format.name": "E4M3", "margin": 2, "amax_history_len": 7, "amax_compute_algo": "most_recent"},
        ),
        ("current", {}, {f"{key}.power_2_scale": False for key in FP8_QUANTIZATION}),
        ("block", {}, {f"{key}.power_2_scale": True for key in FP8_QUANTIZATION} | {"use_f32_scales": False}),
        ("mxfp8", {"fp8_format": "HYBRID"}, {"fp8_format.name": "HYBRID", "enable_2d_quantization": False}),
        ("nvfp4", {"disable_rht": True}, dict(zip(NVFP4_GRADIENTS, (False, True), strict=True))),
        ("nvfp4", {"disable_stochastic_rounding": True}, dict(zip(NVFP4_GRADIENTS, (True, False), strict=True))),
    ],
)
def test_an_option_reaches_what_the_quantizers_read(
    te_recipes: Install, name: str, options: dict[str, Any], expected: dict[str, Any]
) -> None:
    te_recipes(ADVERSE)
    recipe = build_te_recipe(PRECISIONS[name], resolved(name, **options))
    for path, value in expected.items():
        found: Any = recipe
        for part in path.split("."):
            found = getattr(found, part)
        assert found == value, path


@pytest.mark.parametrize(
    ("name", "changed", "named"),
    [
        ("block", ("use_f32_scales", "use_fp32_scales"), "use_f32_scales, use_fp32_scales"),  # renamed: dropped without a word
        ("current", ("    fp8_dpa: bool", "    rounds_to_zero: bool = True\n    fp8_dpa: bool"), "rounds_to_zero"),  # new
        ("nvfp4", ("row_scaled_activation", "row_scaled_input"), "row_scaled_activation, row_scaled_input"),
    ],
)
def test_a_transformer_engine_with_other_recipe_fields_is_refused_by_their_names(
    te_recipes: Install, name: str, changed: tuple[str, str], named: str
) -> None:
    te_recipes(changed=changed)
    with pytest.raises(InputError, match=rf"differs in {named}\)"):
        build_te_recipe(PRECISIONS[name], resolved(name))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("name", ON_TE)
def test_without_a_gpu_the_reason_is_the_gpu_and_the_library_is_not_touched(name: str) -> None:
    loaded = {module for module in sys.modules if module.startswith("transformer_engine")}
    assert unavailable_because(PRECISIONS[name]) == "a CUDA device"
    assert {module for module in sys.modules if module.startswith("transformer_engine")} == loaded
