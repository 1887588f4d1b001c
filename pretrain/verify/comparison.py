"""Losses and gradients of two passes beside each other, tensor by tensor, with what each may be off.

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

from pretrain.verify.probe import SHOWN
from pretrain.verify.reference_model import whole

NORM_RATIO = 2.0  # by which the quantized gradient's norm may be off the unquantized one's; healthy FP4 stays within 1.3
# Below this share of the whole gradient's norm a gradient is zero on paper (a key's bias where keys are not rotated), and what is
# there is rounding noise without a direction. Only one thing is asked: has the measured side made something of nothing?
NEGLIGIBLE = 1e-6
TOTAL = "all of them together"
# How many times its measure a tensor may be off, and its norm: the median of healthy tensors is at 1.
LEEWAY = 2.0
FEW_VALUES = 9.0  # a scalar's draw may be this many times smaller than usual, one of n values n times less often
# Tokens that BF16's rounding may send to other experts by chance, though it sent none where it was measured, and how much of such
# a token's part in all other gradients changes with it. With four one of 48 small models that were right was stopped.
ROUTED_ELSEWHERE, CHANGED_BESIDE = 6, 1 / 3

Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True)
class Distance:
    """Norms of a tensor's gradient on the measured side and on the reference's and of their difference, its number of values, and
    the scalar product of both sides."""

    measured: float
    reference: float
    apart: float
    values: int = 1
    product: float = 0.0

    @property
    def error(self) -> float:
        """The norm of the difference, relative to the reference's."""
        return self.apart / self.reference if self.reference else math.inf if self.apart else 0.0

    @property
    def cosine(self) -> float | None:
        """The cosine between both sides; None where one of them is zero."""
        norms = self.measured * self.reference
        return self.product / norms if norms else None


def distances(measured: Gradients, reference: Gradients) -> dict[str, Distance]:
    """Returns how far apart each gradient is, by name. Collective where gradients are sharded. A parameter that only one side
    has, such as a head that came untied, counts as zero on the other."""
    names = [*reference, *(name for name in measured if name not in reference)]
    found = {name: _figures(measured.get(name), reference.get(name)) for name in names}
    present = {name: figures for name, figures in found.items() if figures is not None}
    numbers = torch.stack(list(present.values())).tolist() if present else []  # the device is waited for once
    of_name = {
        name: Distance(*norms, _either(measured.get(name), reference.get(name)).numel(), product)
        for name, (*norms, product) in zip(present, numbers, strict=True)
    }
    return {name: of_name.get(name, Distance(0.0, 0.0, 0.0)) for name in names}


def _either(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one


def _figures(measured: Tensor | None, reference: Tensor | None) -> Tensor | None:
    """[4]: the norms of both and of their difference, and their product, in FP64: a cosine is read at its sixth digit."""
    a, b = (None if gradient is None else whole(gradient).float() for gradient in (measured, reference))
    a, b = (torch.zeros_like(b) if a is None and b is not None else a, torch.zeros_like(a) if b is None and a is not None else b)
    if a is None:
        return None
    norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for each in (a, b, a - b)]
    return torch.stack([*norms, (a.double() * b).sum()])


def total_norm(found: Mapping[str, Distance], side: str = "reference") -> float:
    return math.sqrt(sum(getattr(each, side) ** 2 for each in found.values()))


def with_total(found: Mapping[str, Distance]) -> list[tuple[str, Distance]]:
    """Adds to the tensors an entry for all of them as one."""
    norms = (total_norm(found, side) for side in ("measured", "reference", "apart"))
    together = Distance(*norms, *(sum(getattr(each, key) for each in found.values()) for key in ("values", "product")))
    return [*found.items(), (TOTAL, together)]


def typical_error(found: Mapping[str, Distance]) -> float:
    """The median relative error of the tensors whose gradient is not negligible."""
    least = NEGLIGIBLE * total_norm(found)
    return median([each.error for each in found.values() if each.reference > least] or [0.0])


@dataclass(frozen=True)
class TensorParity:
    """One tensor's gradient: its error and what is tolerated, both relative to the reference's norm, and more for people."""

    name: str
    error: float
    tolerated: float
    cosine: float | None
    norm_ratio: float | None  # measured over reference; None where the reference is negligible
    share: float  # of the whole reference gradient's norm

    @property
    def excess(self) -> float:
        """How many times over what is tolerated it is; above 1 is a mismatch. Not-a-number is the worst."""
        excess = self.error / self.tolerated if self.error else 0.0
        return excess if math.isfinite(excess) else math.inf

    def cells(self) -> tuple[str, ...]:
        cosine, ratio = ("-" if each is None else f"{each:.5f}" for each in (self.cosine, self.norm_ratio))
        return self.name, f"{self.error:.2e}", f"{self.tolerated:.2e}", cosine, ratio, f"{self.share:.1e}"


@dataclass(frozen=True)
class QuantizedParity:
    """Loss and gradient norm of the quantized path beside the unquantized one's."""

    loss: float
    reference_loss: float
    gradient_norm: float
    reference_norm: float
    least_cosine: float | None  # of a tensor's two gradients

    @property
    def norm_ratio(self) -> float:
        return self.gradient_norm / self.reference_norm if self.reference_norm else 1.0 if not self.gradient_norm else math.inf

    @property
    def failures(self) -> list[str]:
        if math.isfinite(self.loss) and 1 / NORM_RATIO <= self.norm_ratio <= NORM_RATIO:
            return []
        norms = f"{self.gradient_norm:.4g} and {self.reference_norm:.4g}"
        return [f"quantized path and unquantized one: loss {self.loss:.6f} and {self.reference_loss:.6f}, gradient norm {norms}"]


@dataclass(frozen=True)
class Comparison:
    """Losses (nats per token compared) and gradients of two passes. `tensors` begins with the worst."""

    measured: str  # what the sides are called
    reference: str
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
                f"loss of {self.measured} {self.loss:.6f}, of {self.reference} {self.reference_loss:.6f}; tolerated is "
                f"{self.loss_tolerated:.2g} apart"
            )
        wrong = [tensor for tensor in self.tensors if not tensor.excess <= 1]
        if wrong:
            lines.append(
                f"gradients of {len(wrong)} of {len(self.tensors)} tensors: {self.measured} is not {self.reference}, "
                f"{wrong[0].name} worst, {wrong[0].excess:.3g} times what is tolerated"
            )
        return lines

    @property
    def least_cosine(self) -> float | None:
        return min((each.cosine for each in self.tensors if each.cosine is not None), default=None)

    def table(self) -> str:
        """The worst tensors in aligned columns."""
        heading = ("tensor", "error", "tolerated", "cosine", "norm ratio", "share of gradient")
        return aligned([heading, *(tensor.cells() for tensor in self.tensors[:SHOWN])])

    def record(self) -> dict[str, Any]:
        """Returns what audit.json says of it."""
        cosines = [each.cosine for each in self.tensors if each.cosine is not None]
        return {
            "loss": self.loss,
            "reference_loss": self.reference_loss,
            "loss_tolerated": self.loss_tolerated,
            "gradient_norm": self.gradient_norm,
            "reference_norm": self.reference_norm,
            "median_cosine": median(cosines) if cosines else None,
            "least_cosine": self.least_cosine,
            "tensors_compared": len(self.tensors),
            "worst_tensors": [asdict(each) for each in self.tensors[:SHOWN]],
        }


def aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )


class RoundingTolerance:
    """How far BF16 took each tensor: itself, those of its kind in all layers, and the median one. For a tensor of few values, or
    one that is small because much cancels in it, its own draw may be small by chance."""

    def __init__(self, noise: Mapping[str, Distance], resolution: float, tokens: float) -> None:
        """`noise`: of plain transformers in BF16 to itself in FP32, with the total. `resolution`: how coarsely what is judged
        rounds; 1.0 is BF16. `tokens`: that are compared."""
        self._noise, self._resolution = noise, resolution
        # A token that goes elsewhere takes its whole part from one gradient and adds as much to another. FP32 hardly sends any.
        self._routed = math.sqrt(2 * ROUTED_ELSEWHERE / max(tokens, 1)) if resolution == 1.0 else 0.0
        self._mixtures = mixtures_in(noise)
        self._typical = typical_error({name: each for name, each in noise.items() if name != TOTAL})
        squares: dict[str, list[float]] = defaultdict(list)
        for name, each in noise.items():
            if each.reference > NEGLIGIBLE * noise[TOTAL].reference:
                squares[_kind(name)].append(each.error**2)
        self._kinds = {kind: math.sqrt(mean(errors)) for kind, errors in squares.items()}

    def allow(self, name: str, each: Distance) -> TensorParity:
        """`each` of the tensor `name`, with what it may be."""
        own = self._noise.get(name, Distance(0.0, each.reference, 0.0))
        usual = max(self._typical, self._kinds.get(_kind(name), 0.0))
        apart = few(each) * LEEWAY * self._resolution * max(own.apart, usual * each.reference)
        if self._mixtures:
            changed = 1.0 if name.startswith(self._mixtures) else CHANGED_BESIDE
            apart = math.hypot(apart, changed * self._routed * each.reference)
        return _tensor(name, each, apart, self._noise[TOTAL].reference)


def mixtures_in(names: Iterable[str]) -> tuple[str, ...]:
    """What the names of parameters begin with that belong to a mixture of experts: each one's router and experts."""
    found = {name.partition(part)[0] for name in names for part in (".experts.", ".router.") if part in name}
    return tuple(f"{module}." for module in sorted(found))


def few(each: Distance) -> float:
    """Returns the factor by which a tensor of so many values may be off more than its draw: large for a scalar only."""
    return 1 + FEW_VALUES / each.values


def _kind(name: str) -> str:
    """What tensors of one name in all layers share."""
    return re.sub(r"\.\d+\.", ".", name)


def _tensor(name: str, each: Distance, apart: float, total: float) -> TensorParity:
    """`apart`: the norm that the difference may have; `total`: of the whole reference gradient."""
    norm = max(each.reference, NEGLIGIBLE * total) or 1.0
    ratio = None if each.reference <= NEGLIGIBLE * total else each.measured / norm
    return TensorParity(name, each.apart / norm, (apart + NEGLIGIBLE * total) / norm, each.cosine, ratio, norm / (total or 1.0))
