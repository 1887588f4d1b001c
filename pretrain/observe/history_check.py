"""Check the amax histories and scales of delayed scaling after a microbatch.

The histories must contain the observed amaxes, and the next scales must be computed from these
histories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import compress
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.observe.product_check import largest_magnitude
from pretrain.precision.delayed_state import of_operand
from pretrain.precision.formats.definition import OptionValues, Role
from pretrain.precision.product import LinearPass, PrecisionContext, Probe
from pretrain.precision.settings import ActivePrecision

# Relative tolerance of an amax. A library may compute it from the output of a normalization before
# this output is rounded to BF16.
AMAX_TOLERANCE = 2.0**-6
# Relative tolerance of a scale. Our code divides by the amax, and a library may multiply by the
# reciprocal of the amax instead.
SCALE_TOLERANCE = 2.0**-20


@contextmanager
def watching_histories(context: PrecisionContext, active: ActivePrecision) -> Iterator[list[str]]:
    """Check the amax histories and scales after a microbatch in the caller's `with` statement.

    Yields a list. When the `with` statement ends, the list is filled with the names and roles of
    operands whose history or scale is wrong. The microbatch must add one entry to each history: the
    largest magnitude of the operand over all ranks. The scale must be computed from the history
    by the rule of delayed scaling. Operands of zeros are not checked. The list stays empty if the
    precision has no histories. All ranks must call this function.
    """
    wrong: list[str] = []
    before = {name: tensor.clone() for name, tensor in context.state().items()}
    if not before:
        yield wrong
        return
    probe = _Amaxes()
    with context.probing(probe):
        yield wrong
    # Sort the roles, because all ranks must communicate in the same order.
    for role, by_name in sorted(probe.amaxes.items()):
        wrong += _wrong_histories(role, by_name, before, context.state(), active)


class _Amaxes(Probe):
    """Record the largest magnitude of each operand."""

    def __init__(self) -> None:
        # Map each role to a map from the name of a linear to the amax of its operand.
        self.amaxes: dict[Role, dict[str, Tensor]] = defaultdict(dict)

    def operand(
        self, name: str, role: Role, values: Callable[[], Tensor], call: LinearPass
    ) -> None:
        amax = largest_magnitude(values())
        amaxes = self.amaxes[role]
        amaxes[name] = torch.maximum(amax, amaxes.get(name, amax))


def _wrong_histories(
    role: Role,
    amaxes: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    active: ActivePrecision,
) -> list[str]:
    """Return "NAME (ROLE)" for each linear whose operand `role` has a wrong history or scale.

    amaxes: map the name of each linear to the amax that this rank observed in the microbatch.
    before, after: the state of delayed scaling before and after the microbatch.
    """
    names = sorted(amaxes)
    amax = torch.stack([amaxes[name] for name in names])
    if dist.is_initialized():
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)

    def stacked(state: Mapping[str, Tensor], key: Literal["amax_history", "scale"]) -> Tensor:
        return torch.stack([of_operand(state, name, role, key) for name in names], -1)

    history = stacked(after, "amax_history")
    settings = active.settings
    # A history of length 1 stores no past amax, so there is nothing to compare. The scale is then
    # expected to follow from the observed amax.
    is_short = len(history) == 1
    newest = amax if is_short else history[-1]
    before_history = stacked(before, "amax_history")
    before_scale = stacked(before, "scale")
    maximum = active.quantized_precision.grid(role).maximum
    expected, scale = delayed_scaling(before_history, newest, before_scale, maximum, settings)
    tolerance = AMAX_TOLERANCE if is_short else SCALE_TOLERANCE
    is_right = torch.isclose(newest, amax, rtol=AMAX_TOLERANCE, atol=0)
    is_right &= torch.isclose(stacked(after, "scale"), scale, rtol=tolerance, atol=0)
    is_right &= (history == expected).all(0) | is_short
    is_right &= len(history) == settings.amax_history_len
    # Amaxes that are not finite are not judged, because the health check reports overflows.
    is_judged = history.isfinite().all(0) & amax.isfinite() & (amax > 0)
    is_wrong = is_judged & ~is_right
    return [f"{name} ({role})" for name in compress(names, is_wrong.tolist())]


def delayed_scaling(
    history: Tensor, newest: Tensor, scale: Tensor, maximum: float, settings: OptionValues
) -> tuple[Tensor, Tensor]:
    """Return the history and the scale that delayed scaling has after a microbatch.

    This is a second implementation of the rule, which shares no code with the emulation.

    history: the history before the microbatch, [length, operands]. Row 0 is unused, and the oldest
        amax is in row 1.
    newest: the amaxes of the microbatch, [operands].
    scale: the scales before the microbatch, [operands].
    maximum: the maximum of the format.
    settings: the settings of the precision.
    """
    amaxes = torch.cat([history[1:], newest[None]])
    following = torch.cat([torch.zeros_like(newest)[None], amaxes[1:]])
    amax = newest if settings.amax_compute_algo == "most_recent" else amaxes.amax(0)
    exact_scale = maximum / amax.double() / 2.0 ** (settings.margin or 0)
    following_scale = exact_scale.clamp(max=torch.finfo(torch.float32).max).float()
    return following, following_scale.where(amax.isfinite() & (amax > 0), scale)
