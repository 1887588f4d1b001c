"""Transformer Engine without a GPU: its recipe objects, and the reason why it is unavailable.

Recipes are built by Transformer Engine's own file. Tests of its kernels are in tests/gpu.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from foundation.errors import InputError
from pretrain.precision.settings import PRECISIONS, LowPrecisionSettings, configured
from pretrain.precision.transformer_engine import build_te_recipe, unmet_need_of
from tests.pretrain.conftest import ON_TE

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
        changed = text.replace(*replacement) if replacement else text
        exec(compile(changed, source, "exec"), module.__dict__)
        return module

    return install


def configured_as(name: str, **options: Any) -> Any:
    return configured(name, LowPrecisionSettings(**options))


@pytest.mark.parametrize("name", ON_TE)
def test_without_options_te_recipes_have_te_defaults(te_recipes: Install, name: str) -> None:
    default = getattr(te_recipes(), PRECISIONS[name].te_recipe)()
    recipe = build_te_recipe(configured_as(name))
    assert type(recipe) is type(default) and repr(recipe) == repr(default)
    used, defaults = ({k: repr(v) for k, v in vars(made).items()} for made in (recipe, default))
    assert used == defaults


# Files of Transformer Engine that compute our products, and variables that they read without an
# effect on codes and scales.
READ = ("common/__init__.py", "common/recipe", "common/CuTeDSL", "pytorch/cpp_extensions")
READ += ("pytorch/jit.py", "pytorch/module/base.py", "pytorch/module/linear.py")
READ += ("pytorch/quantization.py", "pytorch/tensor", "pytorch/utils.py")
WITHOUT_EFFECT = {
    "NVTE_CUDA_INCLUDE_DIR",  # headers of runtime-compiled kernels
    "NVTE_EXT_MARGIN_SM",  # number of multiprocessors of a product, which may change its sum order
    "NVTE_GROUPED_LINEAR_SINGLE_PARAM",  # modules that are not used
    "NVTE_NVTX_ENABLED",  # names in profiles
    "NVTE_RELEASE_BUILD",  # installation
    "NVTE_TORCH_COMPILE",  # functions that only NVTE_UNFUSED_FP8_UPDATE calls
}


def test_every_variable_that_changes_codes_or_scales_is_refused(
    references: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = references / "transformer_engine"
    files = [file for name in READ for file in [library / name, *library.glob(f"{name}/**/*.py")]]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    pattern = r"(?:getenv|environ)[^\n]{,8}[\"'](NVTE_\w+)"
    variables = {name for text in texts for name in re.findall(pattern, text)}
    assert variables >= WITHOUT_EFFECT
    # Variables of compiled code: csrc/quantizer.cpp.
    variables |= {"NVTE_USE_FAST_MATH", "NVTE_NVFP4_4OVER6_ERR_USE_FAST_MATH"}
    for variable in variables - WITHOUT_EFFECT:
        with monkeypatch.context() as patch:
            patch.setenv(variable, "1")
            with pytest.raises(InputError, match=f"^{variable}: .* unset them$"):
                unmet_need_of(PRECISIONS["nvfp4"])


OF_DELAYED = {"margin": 2, "amax_history_len": 7, "amax_compute_algo": "most_recent"}
POWERS_OF_TWO = {f"{key}.power_2_scale": True for key in FP8_QUANTIZATION}
SQUARES = {"fp4_quant_fwd_weight.fp4_2d_quantization": True}
WITHOUT_RHT = dict(zip(NVFP4_GRADIENTS, (False, True), strict=True))
TO_NEAREST = dict(zip(NVFP4_GRADIENTS, (True, False), strict=True))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("delayed", OF_DELAYED | {"fp8_format": "E4M3"}, OF_DELAYED | {"fp8_format.name": "E4M3"}),
        ("current", {}, {f"{key}.power_2_scale": False for key in FP8_QUANTIZATION}),
        ("block", {}, POWERS_OF_TWO | {"use_f32_scales": False}),
        ("mxfp8", {"fp8_format": "HYBRID"}, {"fp8_format.name": "HYBRID"}),
        ("mxfp8", {}, {"enable_2d_quantization": False}),
        ("nvfp4", {}, SQUARES | {"row_scaled_activation": False, "nvfp4_4over6": "none"}),
        ("nvfp4", {"disable_rht": True}, WITHOUT_RHT),
        ("nvfp4", {"disable_stochastic_rounding": True}, TO_NEAREST),
        *((name, {}, {"backward_override": None}) for name in ON_TE if name != "delayed"),
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
    assert unmet_need_of(PRECISIONS[name]) == "a CUDA device"
    assert {module for module in sys.modules if module.startswith("transformer_engine")} == loaded
