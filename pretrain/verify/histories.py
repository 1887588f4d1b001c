"""Delayed scaling's histories beside the operands that they are made of: a microbatch moves each one on by what it multiplied."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pretrain.precision.delayed_state import PLACES, of_operand
from pretrain.precision.formats.definition import Role
from pretrain.precision.product import PrecisionContext, Product
from pretrain.precision.quantizers.tensor import update_scale
from pretrain.precision.settings import ActivePrecision

NOTED = 2.0**-6  # relative: an amax may be that of a norm's output before it is rounded to BF16
OF_THE_RULE = 2.0**-20  # relative: a scale divides by what the library may multiply by


class HistoryWatch:
    """Watches one microbatch of `context`, with `see` among its observers, and what becomes of histories and scales."""

    def __init__(self, context: PrecisionContext, active: ActivePrecision) -> None:
        self._context, self._active = context, active
        self._before = {name: tensor.clone() for name, tensor in context.state().items()}
        self._amaxes: dict[tuple[str, Role], Tensor] = {}

    def see(self, name: str, role: Role, operand: Tensor, _: Product) -> None:
        amax, seen = operand.abs().amax().float(), self._amaxes.get((name, role))
        self._amaxes[name, role] = amax if seen is None else torch.maximum(seen, amax)

    def wrong(self) -> list[str]:
        """The operands whose history did not move on by one entry, the largest value of all ranks, or whose scale is not what the
        rule makes of its history. Of zeros it must stay as it was. Collective."""
        wrong = []
        for role in PLACES:
            if names := sorted(name for name, of_role in self._amaxes if of_role == role):
                is_wrong = self._is_wrong(names, role).tolist()
                wrong += [f"{name} ({role})" for name, each in zip(names, is_wrong, strict=True) if each]
        return wrong

    def _is_wrong(self, names: list[str], role: Role) -> Tensor:
        """A bool for each of `names`."""
        amax = torch.stack([self._amaxes[name, role] for name in names])
        if dist.is_initialized():
            dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        (old_history, old_scale), (history, scale) = (
            [torch.stack([of_operand(state, name, role, key) for name in names], -1) for key in ("amax_history", "scale")]
            for state in (self._before, self._context.state())
        )
        settings = self._active.settings
        rule = (self._active.precision.grid(settings, role).maximum, settings.margin, settings.amax_compute_algo)
        right_history, right_scale = update_scale(torch.cat([history[-1:], old_history[1:]]), old_scale, *rule)
        moved = (history == right_history).all(0) & torch.isclose(history[-1], amax, rtol=NOTED, atol=0)
        moved &= torch.isclose(scale, right_scale, rtol=OF_THE_RULE, atol=0)
        stayed = (history == old_history).all(0) & (scale == old_scale)
        # An overflow is left to the health check (a NaN is no amax). Of a history of one microbatch nothing is left to look at.
        judged = history.isfinite().all(0) & amax.isfinite() & (len(history) > 1)
        never_moved = history[0] != 0
        return (judged & ~torch.where(amax > 0, moved, stayed)) | never_moved
