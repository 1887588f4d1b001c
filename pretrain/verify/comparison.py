"""Gradients of two passes beside each other, tensor by tensor, with what each may be off.

A fixed tolerance would fit no model: how far rounding takes a gradient depends on how much cancels in it. So each tensor is held
to how far BF16 took it by itself, and took others of its kind.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

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
SHOWN = 10  # the worst of a table

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Distance:
    """Norms of a tensor's gradient on the measured side, on the reference's and of their difference; the scalar product of both
    sides; the number of values."""

    measured: float
    reference: float
    apart: float
    product: float = 0.0
    values: int = 1

    @property
    def error(self) -> float:
        """The norm of the difference, relative to the reference's."""
        return self.apart / self.reference if self.reference else math.inf if self.apart else 0.0

    @property
    def cosine(self) -> float | None:
        """None where one side is zero."""
        norms = self.measured * self.reference
        return self.product / norms if norms else None

    def scaled(self, factor: float) -> Distance:
        """The same of gradients that are `factor` times as large."""
        norms = (factor * norm for norm in (self.measured, self.reference, self.apart))
        return Distance(*norms, factor**2 * self.product, self.values)


def distances(measured: Gradients, reference: Gradients) -> dict[str, Distance]:
    """How far apart each gradient is, by name. Collective where gradients are sharded. A parameter that only one side has, such
    as a head that came untied, counts as zero on the other."""
    figures: dict[str, Tensor] = {}
    sizes: dict[str, int] = {}
    for name in dict.fromkeys([*reference, *measured]):
        a, b = (None if each is None else whole(each).float() for each in (measured.get(name), reference.get(name)))
        if a is None and b is None:
            continue
        a = torch.zeros_like(b) if a is None else a
        b = torch.zeros_like(a) if b is None else b
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in (a, b, a - b)]
        # In FP64, as a cosine is read at its sixth digit.
        figures[name], sizes[name] = torch.stack([*norms, (a.double() * b).sum()]), a.numel()
    numbers = torch.stack(list(figures.values())).tolist() if figures else []  # the device is waited for once
    apart = {name: Distance(*row, sizes[name]) for name, row in zip(figures, numbers, strict=True)}
    return {name: apart.get(name, Distance(0.0, 0.0, 0.0)) for name in dict.fromkeys([*reference, *measured])}


def total_of(apart: Mapping[str, Distance]) -> Distance:
    """All tensors as one."""
    norms = (math.hypot(*(getattr(each, side) for each in apart.values())) for side in ("measured", "reference", "apart"))
    return Distance(*norms, sum(each.product for each in apart.values()), sum(each.values for each in apart.values()))


@dataclass(frozen=True)
class TensorParity:
    """One tensor's gradient: its error and what is tolerated, both relative to the reference's norm."""

    name: str
    error: float
    tolerated: float
    cosine: float | None
    share: float  # of the whole reference gradient's norm

    @property
    def excess(self) -> float:
        """How many times over what is tolerated it is; above 1 is a mismatch. Not-a-number is the worst."""
        excess = self.error / self.tolerated if self.error else 0.0
        return excess if math.isfinite(excess) else math.inf


@dataclass(frozen=True)
class Comparison:
    """Losses (nats per token compared) and gradients of the packed path and of plain transformers. `tensors`: the worst first."""

    loss: float
    reference_loss: float
    loss_tolerated: float
    gradient_norm: float
    reference_norm: float
    tensors: tuple[TensorParity, ...]

    @property
    def failures(self) -> list[str]:
        """A line for each figure that rounding does not explain; not-a-number is never tolerated."""
        lines = []
        if not abs(self.loss - self.reference_loss) <= self.loss_tolerated:
            lines.append(
                f"loss of the packed path {self.loss:.6f}, of plain transformers {self.reference_loss:.6f}; tolerated is "
                f"{self.loss_tolerated:.2g} apart"
            )
        wrong = [tensor for tensor in self.tensors if not tensor.excess <= 1]
        if wrong:
            worst = ", ".join(f"{tensor.name} ({tensor.excess:.3g})" for tensor in wrong[:SHOWN])
            lines.append(
                f"gradients of {len(wrong)} of {len(self.tensors)} tensors: the packed path is not plain transformers; "
                f"how many times over what is tolerated: {worst}"
            )
        return lines

    def record(self) -> dict[str, Any]:
        """What audit.json says of it."""
        cosines = [each.cosine for each in self.tensors if each.cosine is not None]
        return {
            **{key: value for key, value in vars(self).items() if key != "tensors"},
            "median_cosine": median(cosines) if cosines else None,
            "least_cosine": min(cosines, default=None),
            "tensors_compared": len(self.tensors),
            "worst_tensors": [asdict(each) for each in self.tensors[:SHOWN]],
        }


def judge(
    apart: Mapping[str, Distance], noise: Mapping[str, Distance], resolution: float, tokens: float
) -> tuple[TensorParity, ...]:
    """Each tensor, and all as one, with what it may be off; the worst first.

    `noise`: of plain transformers in BF16 to itself in FP32. A tensor may be as far off as BF16 took itself, those of its kind in
    all layers, or the median one: for a tensor of few values, or one that is small because much cancels in it, its own draw may
    be small by chance. `resolution`: how coarsely what is judged rounds; 1.0 is BF16. `tokens`: that are compared.
    """
    total = total_of(noise)
    negligible = NEGLIGIBLE * total.reference
    typical = median([each.error for each in noise.values() if each.reference > negligible] or [0.0])
    squares: dict[str, list[float]] = defaultdict(list)
    for name, each in [*noise.items(), (TOTAL, total)]:
        if each.reference > negligible:
            squares[_kind(name)].append(each.error**2)
    # A token that goes elsewhere takes its whole part from one gradient and adds as much to another. FP32 hardly sends any.
    routed = math.sqrt(2 * ROUTED_ELSEWHERE / max(tokens, 1)) if resolution == 1.0 else 0.0
    mixtures = mixtures_in(noise)
    judged = []
    for name, each in [*apart.items(), (TOTAL, total_of(apart))]:
        own = total if name == TOTAL else noise.get(name, Distance(0.0, each.reference, 0.0))
        usual = max(typical, math.sqrt(mean(squares.get(_kind(name), [0.0]))))
        few = 1 + FEW_VALUES / each.values  # large for a scalar only
        allowed = few * LEEWAY * resolution * max(own.apart, usual * each.reference)
        if mixtures:
            changed = 1.0 if name.startswith(mixtures) else CHANGED_BESIDE
            allowed = math.hypot(allowed, changed * routed * each.reference)
        norm = max(each.reference, negligible) or 1.0
        share = norm / (total.reference or 1.0)
        judged.append(TensorParity(name, each.apart / norm, (allowed + negligible) / norm, each.cosine, share))
    return tuple(sorted(judged, key=lambda tensor: tensor.excess, reverse=True))


def mixtures_in(names: Iterable[str]) -> tuple[str, ...]:
    """What the names of parameters begin with that belong to a mixture of experts: each one's router and experts."""
    mixtures = {name.partition(part)[0] for name in names for part in (".experts.", ".router.") if part in name}
    return tuple(f"{module}." for module in sorted(mixtures))


def _kind(name: str) -> str:
    """What tensors of one name in all layers share."""
    return re.sub(r"\.\d+\.", ".", name)
