"""Check that histories and scales of delayed scaling follow from the operands of a microbatch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from foundation.overrides import overridden
from pretrain.precision.delayed_state import of_operand
from pretrain.precision.formats.definition import Role
from pretrain.precision.product import PrecisionContext
from pretrain.precision.quantizers.tensor import update_scale
from pretrain.precision.settings import ActivePrecision

# Relative tolerance of an amax, which may be that of a norm's output before it is rounded to BF16.
AMAX_TOLERANCE = 2.0**-6
# Relative tolerance of a scale. We divide where the library may multiply by the reciprocal.
SCALE_TOLERANCE = 2.0**-20


@contextmanager
def watching_histories(context: PrecisionContext, active: ActivePrecision) -> Iterator[list[str]]:
    """Observe the operands of one microbatch, and return the list of wrong histories.

    The list is filled when the block ends. A history must have moved on by one entry, the largest
    value of the operand over all ranks, and its scale must follow from it by the rule. An operand of
    zeros changes nothing. Collective. The list stays empty in precisions without histories.
    """
    wrong: list[str] = []
    before = {name: tensor.clone() for name, tensor in context.state().items()}
    if not before:
        yield wrong
        return
    amaxes: dict[Role, dict[str, Tensor]] = defaultdict(dict)

    def see_operand(name: str, role: Role, tensor: Tensor) -> None:
        # A maximum of magnitudes that makes no copy.
        amax = torch.linalg.vector_norm(tensor, math.inf).float()
        amaxes[role][name] = torch.maximum(amax, amaxes[role].get(name, amax))

    with overridden(context, observers=[*context.observers, see_operand]):
        yield wrong
    for role, by_name in sorted(amaxes.items()):  # all ranks need the same order
        wrong += _wrong_histories(role, by_name, before, context.state(), active)


def _wrong_histories(
    role: Role,
    amaxes: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    active: ActivePrecision,
) -> list[str]:
    """Return the operands of `role` whose history or scale is wrong after a microbatch."""
    names = sorted(amaxes)
    amax = torch.stack([amaxes[name] for name in names])
    if dist.is_initialized():
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)

    def stacked(state: Mapping[str, Tensor], key: Literal["amax_history", "scale"]) -> Tensor:
        return torch.stack([of_operand(state, name, role, key) for name in names], -1)

    history = stacked(after, "amax_history")
    scale = stacked(after, "scale")
    settings = active.settings
    expected_history, expected_scale = update_scale(
        torch.cat([history[-1:], stacked(before, "amax_history")[1:]]),
        stacked(before, "scale"),
        active.precision.grid(settings, role).maximum,
        settings.margin,
        settings.amax_compute_algo,
    )
    is_right = (history == expected_history).all(0)
    is_right &= torch.isclose(history[-1], amax, rtol=AMAX_TOLERANCE, atol=0)
    is_right &= torch.isclose(scale, expected_scale, rtol=SCALE_TOLERANCE, atol=0)
    # Overflows are left to the health check, because NaN is no amax. A history of one microbatch
    # keeps nothing that could be checked.
    is_judged = history.isfinite().all(0) & amax.isfinite() & (amax > 0) & (len(history) > 1)
    return [
        f"{name} ({role})"
        for name, is_wrong in zip(names, (is_judged & ~is_right).tolist(), strict=True)
        if is_wrong
    ]
