"""Gradients of two passes beside each other, tensor by tensor, with what each may be off.

A fixed tolerance would fit no model: how far rounding takes a gradient depends on how much cancels in it. So each tensor is held
to how far BF16 took it by itself, and took others of its kind.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import mean, median

import torch
from torch import Tensor

from pretrain.verify.reference_model import whole

# Below this share of the whole gradient's norm a gradient is zero on paper (a key's bias where keys are not rotated), and what is
# there is rounding noise without a direction. Only one thing is asked: has the measured side made something of nothing?
NEGLIGIBLE = 1e-6
TOTAL = "all of them together"
LEEWAY = 2.0  # how many times its measure a tensor may be off: the median of healthy tensors is at 1
FEW_VALUES = 9.0  # a scalar's draw may be this many times smaller than usual, one of n values n times less often
# Tokens that BF16's rounding may send to other experts by chance, though it sent none where it was measured, and how much of such
# a token's part in all other gradients changes with it. With four one of 48 small models that were right was stopped.
ROUTED_ELSEWHERE, CHANGED_BESIDE = 6, 1 / 3

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Distance:
    """Norms of a tensor's gradient on the reference's side, and of its difference to the measured one; the number of values."""

    reference: float
    apart: float
    values: int

    @property
    def error(self) -> float:
        """The norm of the difference, relative to the reference's."""
        return self.apart / self.reference if self.reference else math.inf if self.apart else 0.0


def distances(measured: Gradients, reference: Gradients) -> dict[str, Distance]:
    """How far apart each gradient is, by name, and all as one under TOTAL. Collective where gradients are sharded. A parameter
    that only one side has, such as a head that came untied, counts as zero on the other; one that neither has is left out."""
    norms: list[Tensor] = []
    sizes: dict[str, int] = {}
    for name in dict.fromkeys([*reference, *measured]):
        a, b = (None if each is None else whole(each).float() for each in (measured.get(name), reference.get(name)))
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a
        b = torch.zeros_like(a) if b is None else b
        norms.append(torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in (b, a - b)]))
        sizes[name] = a.numel()
    of_all = torch.stack(norms)
    of_all = torch.cat([of_all, torch.linalg.vector_norm(of_all, dim=0, keepdim=True)]).tolist()  # waits for the device once
    sizes[TOTAL] = sum(sizes.values())
    return {name: Distance(*row, size) for (name, size), row in zip(sizes.items(), of_all, strict=True)}


@dataclass(frozen=True)
class TensorParity:
    """One tensor's gradient: its error and what is tolerated, both relative to the reference's norm."""

    name: str
    error: float
    tolerated: float

    @property
    def excess(self) -> float:
        """How many times over what is tolerated it is; above 1 is a mismatch. Not-a-number is the worst."""
        excess = self.error / self.tolerated if self.error else 0.0
        return excess if math.isfinite(excess) else math.inf


def judge(
    apart: Mapping[str, Distance], noise: Mapping[str, Distance], resolution: float, tokens: float
) -> tuple[TensorParity, ...]:
    """Each tensor, and all as one, with what it may be off; the worst first.

    `noise`: of plain transformers in BF16 to itself in FP32. A tensor may be as far off as BF16 took itself, those of its kind in
    all layers, or the median one: for a tensor of few values, or one that is small because much cancels in it, its own draw may
    be small by chance. `resolution`: how coarsely what is judged rounds; 1.0 is BF16. `tokens`: that are compared.
    """
    total = noise[TOTAL].reference
    negligible = NEGLIGIBLE * total
    known = {name: each for name, each in noise.items() if each.reference > negligible}
    typical = median([each.error for name, each in known.items() if name != TOTAL] or [0.0])
    squares: dict[str, list[float]] = defaultdict(list)
    for name, each in known.items():
        squares[_kind(name)].append(each.error**2)
    # A token that goes elsewhere takes its whole part from one gradient and adds as much to another. FP32 hardly sends any.
    routed = math.sqrt(2 * ROUTED_ELSEWHERE / max(tokens, 1)) if resolution == 1.0 else 0.0
    mixtures = mixtures_in(noise)
    judged = []
    for name, each in apart.items():
        own = noise[name].apart if name in noise else 0.0
        usual = max(typical, math.sqrt(mean(squares.get(_kind(name), [0.0]))))
        few = 1 + FEW_VALUES / each.values  # large for a scalar only
        allowed = few * LEEWAY * resolution * max(own, usual * each.reference)
        if mixtures:
            changed = 1.0 if name.startswith(mixtures) else CHANGED_BESIDE
            allowed = math.hypot(allowed, changed * routed * each.reference)
        norm = max(each.reference, negligible) or 1.0
        judged.append(TensorParity(name, each.apart / norm, (allowed + negligible) / norm))
    return tuple(sorted(judged, key=lambda tensor: tensor.excess, reverse=True))


def mixtures_in(names: Iterable[str]) -> tuple[str, ...]:
    """What the names of parameters begin with that belong to a mixture of experts: each one's router and experts."""
    mixtures = {name.partition(part)[0] for name in names for part in (".experts.", ".router.") if part in name}
    return tuple(f"{module}." for module in sorted(mixtures))


def _kind(name: str) -> str:
    """What tensors of one name in all layers share."""
    return re.sub(r"\.\d+\.", ".", name)
