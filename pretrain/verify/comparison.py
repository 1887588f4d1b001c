"""Two gradients of one model beside each other, tensor by tensor, with what each tensor may be off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from pretrain.verify.reference_model import whole

# Below this share of the whole gradient's norm a gradient is zero on paper (a key's bias where keys are not rotated), and what is
# there is rounding noise without a direction. Only one thing is asked: has the measured side made something of nothing?
NEGLIGIBLE = 1e-6
SHOWN = 10  # rows of a table, the worst ones
TOTAL = "all of them together"

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
    least_ratio: float = 0.0
    largest_ratio: float = math.inf

    @property
    def excess(self) -> float:
        """How many times over what is tolerated it is; above 1 is a mismatch. Not-a-number is the worst."""
        excess = self.error / self.tolerated if self.error else 0.0
        if self.norm_ratio is not None:
            excess = max(excess, self.norm_ratio / self.largest_ratio)
            if self.least_ratio:
                excess = max(excess, self.least_ratio / self.norm_ratio if self.norm_ratio else math.inf)
        return excess if math.isfinite(excess) else math.inf

    def cells(self) -> tuple[str, ...]:
        cosine, ratio = ("-" if each is None else f"{each:.5f}" for each in (self.cosine, self.norm_ratio))
        return self.name, f"{self.error:.2e}", f"{self.tolerated:.2e}", cosine, ratio, f"{self.share:.1e}"


def worst_first(tensors: list[TensorParity]) -> tuple[TensorParity, ...]:
    return tuple(sorted(tensors, key=lambda tensor: tensor.excess, reverse=True))


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
            "worst_tensors": [_plain(asdict(each)) for each in self.tensors[:SHOWN]],
        }


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the figures without infinities, which JSON does not have."""
    return {key: value for key, value in values.items() if not (isinstance(value, float) and math.isinf(value))}


def aligned(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
