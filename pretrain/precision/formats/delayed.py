"""FP8 with delayed scaling: a scale for the whole tensor, from the largest values of past microbatches (`delayed_state`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

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

# E4M3, which operands are in whatever `fp8_format` is, has 2**17.8 from its least number to its maximum. The margin is taken from
# the maximum: by 19 the largest value itself would be less than half of the least number.
MOST_MARGIN = 18
MOST_HISTORY = 2**20  # microbatches: each of them is a row of FP32 numbers, five for every linear


def _at_most(most: int, too_many: str) -> AfterValidator:
    """Refuses a larger number; `too_many` says of what, why, and what is usual."""

    def check(number: int) -> int:
        if number > most:
            raise ValueError(f"{number:,} {too_many}, and {most:,} the most")
        return number

    return AfterValidator(check)


_MARGIN = _at_most(
    MOST_MARGIN, f"halvings of the scale leave no value above zero, as E4M3 has a range of 2**{MOST_MARGIN}; 0 is usual"
)
_HISTORY = _at_most(MOST_HISTORY, "microbatches are more than are kept, five numbers a linear for each; 1,024 is usual")


class Delayed(Current):
    name = "delayed"
    order = 20
    colour = "#D55E00"
    description = "FP8 products; a scale a tensor, from the largest values of past microbatches"
    accelerate_name = "fp8"
    fallback_rank = 0
    options: Mapping[str, Option] = {
        "fp8_format": FP8_FORMAT,
        "margin": Option(
            Annotated[Count, _MARGIN],
            0,
            f"each one halves the scale, for room above the largest value seen; {MOST_MARGIN} at most",
        ),
        "amax_history_len": Option(
            Annotated[PositiveCount, _HISTORY],
            1024,
            f"microbatches whose largest values are remembered; {MOST_HISTORY:,} at most",
        ),
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
        """The scale is the format's maximum over the largest value seen, halved `margin` times. A scale that is too large cuts
        values off, one that is too small makes zeros of them, and the loss does not tell which it was."""
        smaller = ", a smaller one keeps small values from becoming zero" if settings.margin else ""
        return (
            f"a larger `fp8_config.margin` (now {settings.margin}) leaves room above the largest value seen{smaller}; "
            f"`precision=current` scales by the values themselves; {super().against_overflow(settings)}"
        )

    def against_underflow(self, settings: OptionValues) -> str:
        finer = "`precision=block` or `precision=mxfp8`, with a scale for each block,"
        if settings.margin:
            return f"A smaller `fp8_config.margin` (now {settings.margin}) makes fewer small values zero; {finer} fewest"
        return (
            f"If a shorter `fp8_config.amax_history_len` (now {settings.amax_history_len}) does not help, because one large "
            f"value is old, {finer} does"
        )

    def against_saturation(self, settings: OptionValues) -> tuple[float, str]:
        """Returns the share of cut values that calls for advice, and the advice. Only delayed scales can cut a tensor's values,
        and one value in a thousand says that it has outgrown them."""
        longer = "`fp8_config.amax_compute_algo: max`, " if settings.amax_compute_algo == "most_recent" else ""
        return 1e-3, (
            f"Delayed scales lag behind values that grow: {longer}a larger `fp8_config.margin` (now {settings.margin}), or "
            "`precision=current`"
        )


PRECISION = Delayed()
