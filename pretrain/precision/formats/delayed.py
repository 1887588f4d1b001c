"""FP8 with delayed scaling: a scale for the whole tensor, from the largest values of past microbatches (`delayed_state`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from foundation.settings import Count, PositiveCount
from pretrain.precision.formats.current import Current
from pretrain.precision.formats.definition import (
    FAST_ACCUMULATION,
    FP8_FORMAT,
    Option,
    OptionValues,
    Quantize,
    Role,
    Scaling,
)


class Delayed(Current):
    name = "delayed"
    order = 20
    colour = "#D55E00"
    description = "FP8 products; a scale a tensor, from the largest values of past microbatches"
    accelerate_name = "fp8"
    fallback_rank = 0
    options: Mapping[str, Option] = {
        "fp8_format": FP8_FORMAT,
        "margin": Option(Count, 0, "each one halves the scale, for room above the largest value seen"),
        "amax_history_len": Option(PositiveCount, 1024, "microbatches whose largest values are remembered"),
        "amax_compute_algo": Option(Literal["max", "most_recent"], "max", "which of them makes the scale"),
        "fast_accumulation": FAST_ACCUMULATION,
    }
    keeps_history = True

    def along_features(self, settings: OptionValues, role: Role) -> Quantize:
        from pretrain.precision.quantizers import tensor

        grid = self.grid(settings, role)
        return lambda x, scale, amax: tensor.quantize(x, scale, grid)

    def scaling(self, settings: OptionValues, role: Role) -> Scaling:
        return Scaling("FP32", 0.0)

    def te_recipe(self, te: Any, settings: OptionValues) -> tuple[type, dict[str, Any], dict[str, Any]]:
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
        return te.DelayedScaling, arguments, in_full

    def against_overflow(self, settings: OptionValues) -> str:
        return (
            f"a larger `fp8_config.margin` (now {settings.margin}) leaves room above the largest value seen; `precision=current` "
            f"scales by the values themselves; {super().against_overflow(settings)}"
        )

    def against_underflow(self, settings: OptionValues) -> str:
        finer = "`precision=block` or `precision=mxfp8`, with a scale for each block,"
        if settings.margin:
            return f"A smaller `fp8_config.margin` (now {settings.margin}) leaves small values more room; {finer} most"
        return (
            f"If a shorter `fp8_config.amax_history_len` (now {settings.amax_history_len}) does not help, because one large "
            f"value is old, {finer} does"
        )

    def against_saturation(self, settings: OptionValues) -> tuple[float, str]:
        """Only delayed scales can be too large for a tensor, and one value in a thousand says that it has outgrown them."""
        longer = "`fp8_config.amax_compute_algo: max`, " if settings.amax_compute_algo == "most_recent" else ""
        return 1e-3, (
            f"Delayed scales lag behind values that grow: {longer}a larger `fp8_config.margin` (now {settings.margin}), or "
            "`precision=current`"
        )


PRECISION = Delayed()
