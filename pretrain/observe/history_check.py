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
from pretrain.precision.delayed_state import state_of_operand
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
def watching_histories(
    context: PrecisionContext, active: ActivePrecision, wrong: list[str]
) -> Iterator[None]:
    """Context manager that checks the amax histories and scales of delayed scaling.

    The `with` statement must contain one microbatch. This microbatch must add one entry to each
    history: the largest magnitude of the operand over all ranks. The scale must be computed from
    the history by the rule of delayed scaling. Operands of zeros are not checked, and nothing is
    checked if the precision has no histories. All ranks must call this function.

    wrong: list of wrong operands. When the `with` statement ends, the name and the role of each
        operand with a wrong history or scale are appended.
    """
    before = {name: tensor.clone() for name, tensor in context.state().items()}
    if not before:
        yield
        return
    probe = _Amaxes()
    with context.probing(probe):
        yield
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
        return torch.stack([state_of_operand(state, name, role, key) for name in names], -1)

    history = stacked(after, "amax_history")
    scale = stacked(after, "scale")
    settings = active.settings
    # A history of length 1 stores no amax. Then the scale is computed from the observed amax.
    stores_amaxes = len(history) > 1
    recorded = history[-1] if stores_amaxes else amax
    expected_history, expected_scale = delayed_scaling(
        stacked(before, "amax_history"),
        recorded,
        stacked(before, "scale"),
        active.quantized_precision.grid(role).maximum,
        settings,
    )
    scale_tolerance = SCALE_TOLERANCE if stores_amaxes else AMAX_TOLERANCE
    is_right = torch.isclose(recorded, amax, rtol=AMAX_TOLERANCE, atol=0)
    is_right &= torch.isclose(scale, expected_scale, rtol=scale_tolerance, atol=0)
    is_right &= len(history) == settings.amax_history_len
    if stores_amaxes:
        is_right &= (history == expected_history).all(0)
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
