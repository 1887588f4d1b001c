"""A precision recipe as Transformer Engine's recipe object, with nothing in it that was not asked for.

Transformer Engine takes the defaults of its recipes from NVTE_* variables when it is imported, drops keyword arguments that it
does not know, and keeps some of what its quantizers read outside of the constructor's reach: with
`Float8BlockScaling(use_f32_scales=True)` scales are powers of two all the same. So every attribute is set here, then read back.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from foundation.errors import InputError
from pretrain.precision.settings import LowPrecisionSettings

Attributes = dict[str, Any]
_MISSING = object()


def te_recipe(recipe_name: str, settings: LowPrecisionSettings) -> Any:
    """The `transformer_engine.common.recipe` object of a quantized recipe; `settings` are resolved for it.

    Raises InputError for an option that only the emulation has, and where the installed Transformer Engine does not take a recipe
    as it is written here.
    """
    te = importlib.import_module("transformer_engine.common.recipe")
    kind, arguments, quantization = _WANTED[recipe_name](te, settings)
    unknown = {field.name for field in dataclasses.fields(kind)} - set(arguments)
    recipe = kind(**arguments)
    for name, value in quantization.items():
        setattr(recipe, name, value)
    asked = arguments | quantization
    lost = {name for name, value in asked.items() if getattr(recipe, name, _MISSING) != value}
    if unknown or lost:
        differences = ", ".join(sorted(unknown | lost))
        raise InputError(
            f"precision {recipe_name!r}: the installed Transformer Engine's {kind.__name__} is not the one this launcher was "
            f"written for (it differs in {differences}), and might round otherwise than asked; install the version of "
            "requirements-cuda.txt"
        )
    return recipe


def split_accumulator(recipe: Any, product: str) -> bool:
    """Whether `product` (fprop, dgrad, wgrad) adds up its partial sums in full under `recipe`, as te.Linear's does: what the
    recipe says, and where it says nothing, gradients alone."""
    wanted = getattr(recipe, f"fp8_gemm_{product}", None)
    return product != "fprop" if wanted is None else wanted.use_split_accumulator


def _delayed(te: Any, settings: LowPrecisionSettings) -> tuple[type, Attributes, Attributes]:
    arguments = {
        "margin": settings.margin,
        "fp8_format": te.Format[settings.fp8_format],
        "amax_history_len": settings.amax_history_len,
        "amax_compute_algo": settings.amax_compute_algo,
        "scaling_factor_compute_algo": None,
        "reduce_amax": True,  # over all ranks: every rank quantizes the same weight, and must do so with the same scale
    }
    # What its products ask every recipe for, and this one has by no field.
    in_full = {} if settings.fast_accumulation else {"fp8_gemm_fprop": te.MMParams(use_split_accumulator=True)}
    return te.DelayedScaling, arguments | _NO_MORE, in_full


def _current(te: Any, settings: LowPrecisionSettings) -> tuple[type, Attributes, Attributes]:
    arguments = {
        "use_power_2_scales": settings.use_power_2_scales,
        "fp8_format": te.Format[settings.fp8_format],
        # Tensor cores add FP8 products up in fewer bits than FP32 unless the accumulator is split; the forward may do without.
        "fp8_gemm_fprop": te.MMParams(use_split_accumulator=not settings.fast_accumulation),
        "fp8_gemm_dgrad": te.MMParams(use_split_accumulator=True),
        "fp8_gemm_wgrad": te.MMParams(use_split_accumulator=True),
    }
    return te.Float8CurrentScaling, arguments | _NO_MORE, _fp8_quantization(te, power_of_two=settings.use_power_2_scales)


def _block(te: Any, settings: LowPrecisionSettings) -> tuple[type, Attributes, Attributes]:
    arguments = {
        "use_f32_scales": settings.use_f32_scales,
        "fp8_format": te.Format[settings.fp8_format],
        "x_block_scaling_dim": 1,
        "w_block_scaling_dim": 2,
        "grad_block_scaling_dim": 1,
        "fp8_gemm_fprop": te.MMParams(use_split_accumulator=True),
        "fp8_gemm_dgrad": te.MMParams(use_split_accumulator=True),
        "fp8_gemm_wgrad": te.MMParams(use_split_accumulator=True),
    }
    return te.Float8BlockScaling, arguments | _NO_MORE, _fp8_quantization(te, power_of_two=not settings.use_f32_scales)


def _mxfp8(te: Any, settings: LowPrecisionSettings) -> tuple[type, Attributes, Attributes]:
    if settings.scale_rounding != "rceil":
        raise InputError(
            f"fp8_config.scale_rounding: {settings.scale_rounding} exists in emulation only, the hardware rounds scales up; set "
            "fp8_config.backend: emulation"
        )
    arguments = {
        "margin": 0,
        "fp8_format": te.Format[settings.fp8_format],
        "enable_2d_quantization": settings.enable_2d_quantization,
    }
    return te.MXFP8BlockScaling, arguments | _NO_MORE, {}


def _nvfp4(te: Any, settings: LowPrecisionSettings) -> tuple[type, Attributes, Attributes]:
    arguments = {
        "disable_rht": settings.disable_rht,
        "disable_stochastic_rounding": settings.disable_stochastic_rounding,
        "disable_2d_quantization": settings.disable_2d_quantization,
        "row_scaled_activation": False,
        "nvfp4_4over6": "none",
        "nvfp4_4over6_e4m3_use_256": "all",
        "nvfp4_4over6_err_mode": "MAE",
        "fp4_format": te.Format.E2M1,
        "fp8_format": te.Format.E4M3,
    }
    rotated = {"random_hadamard_transform": not settings.disable_rht}
    rounded = {"stochastic_rounding": not settings.disable_stochastic_rounding}
    quantization = {
        "fp4_quant_fwd_inp": _quantization(te, **rotated),
        "fp4_quant_fwd_weight": _quantization(te, fp4_2d_quantization=not settings.disable_2d_quantization),
        "fp4_quant_bwd_grad": _quantization(te, **rotated, **rounded),
    }
    return te.NVFP4BlockScaling, arguments | _NO_MORE, quantization


def _fp8_quantization(te: Any, *, power_of_two: bool) -> Attributes:
    quantization = _quantization(te, power_2_scale=power_of_two)
    return {f"fp8_quant_{operand}": quantization for operand in ("fwd_inp", "fwd_weight", "bwd_grad")}


def _quantization(te: Any, **chosen: bool) -> Any:
    plain = {"power_2_scale": False, "amax_epsilon": 0.0, "random_hadamard_transform": False}
    return te.QParams(**plain | {"stochastic_rounding": False, "fp4_2d_quantization": False} | chosen)


# Attention has its own kernels here, and backward multiplies what forward quantized.
_NO_MORE = {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}

_Wanted = Callable[[Any, LowPrecisionSettings], tuple[type, Attributes, Attributes]]
_WANTED: dict[str, _Wanted] = {"delayed": _delayed, "current": _current, "block": _block, "mxfp8": _mxfp8, "nvfp4": _nvfp4}
