"""What low precision does to each operand of a step: its range, its scale, and the share of it that is lost at either end.

Every so many steps, on one microbatch, a sample of each operand (pretrain.precision.observed) is quantized once more beside the
product, by the precision's own quantizer. So shares and the scales of blocks are those of 32,768 values at most; amax and the
scale of a tensor are exact.

* An operand is measured as the product along its features takes it, not once more along tokens.
* Rounding is to nearest here even where gradients are rounded stochastically: a random number drawn here would change the run.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from foundation.attributes import holding
from pretrain.precision.delayed_state import of_operand
from pretrain.precision.formats.definition import QuantizedPrecision, Role
from pretrain.precision.observed import generators, sample
from pretrain.precision.product import Backend, PrecisionContext
from pretrain.precision.quantizers import Grid, Quantized
from pretrain.precision.settings import ActivePrecision

Record = Mapping[str, Any]


class OperandStatistics:
    """An observer of a PrecisionContext. docs/verification.md ("Statistics and health") has the keys of its `records`."""

    def __init__(self, active: ActivePrecision, backend: Backend) -> None:
        """`active`: a quantized precision. `backend`: the one that computes it; only delayed scales are asked of it."""
        self.precision: QuantizedPrecision = active.precision
        to_nearest = {"disable_stochastic_rounding": True} if "disable_stochastic_rounding" in self.precision.options else {}
        self.settings = active.settings.model_copy(update=to_nearest)
        self.backend = backend
        self._figures: dict[tuple[str, Role], list[Tensor]] = {}

    @contextmanager
    def watching(self, context: PrecisionContext) -> Iterator[None]:
        """Measure every operand of the forward and backward inside, afresh: of a step's first microbatch, which alone quantizes
        weights. Changes nothing that training can see."""
        self._figures, self._generator = defaultdict(list), generators(0)
        # A layer that is recomputed uses the scales of its forward, although by then the backend's state has newer ones.
        self._state = {name: tensor.clone() for name, tensor in self.backend.state().items()}
        with holding(context, observers=[*context.observers, self]):
            yield

    @torch.no_grad()
    def __call__(self, name: str, role: Role, x: Tensor) -> None:
        """Measure x [rows, features]. Further calls for an operand add up: the LM head takes its tokens in chunks."""
        amax = torch.linalg.vector_norm(x, math.inf).float()  # a maximum of magnitudes that makes no copy of x
        scale = of_operand(self._state, name, role, "scale") if self.precision.keeps_history else None
        scaling = self.precision.scaling(role)
        blocks, _ = sample(x, None, scaling, self._generator(x.device))
        rows = blocks.reshape(-1, scaling.block or blocks.shape[1])
        quantized = self.precision.along_features(self.settings, role)(rows, scale, amax)
        self._figures[name, role].append(measure(rows.float(), quantized, amax))

    def records(self) -> list[dict[str, Any]]:
        """One object an operand, in the order in which they were first seen; waits for the device, once."""
        figures = torch.stack([each for parts in self._figures.values() for each in parts]).tolist() if self._figures else []
        rows = iter(figures)
        return [
            {"layer": name, "operand": role, **_record([next(rows) for _ in parts])}
            for (name, role), parts in self._figures.items()
        ]


def measure(x: Tensor, quantized: Quantized, amax: Tensor) -> Tensor:
    """Figures of x [rows, features] FP32, which was quantized to `quantized`, an FP64 vector on its device: `amax` of the whole
    operand, the sum of log2(scale), and how many values are not zero and have a scale, are not zero, become zero, are finite, are
    too large for the format."""
    magnitude, decode = x.abs(), (quantized.block_scale * quantized.tensor_scale).expand_as(x)
    nonzero, finite = magnitude > 0, magnitude < math.inf  # NaN is neither
    scaled = nonzero & (decode > 0)  # an NVFP4 block's scale can be zero: then its values are lost, whatever their codes
    counts = (
        -decode.double().log2().where(scaled, 0).sum(),
        scaled.sum(),
        nonzero.sum(),
        (nonzero & (quantized.operand == 0)).sum(),
        finite.sum(),
        (finite & scaled & (magnitude > largest_held(quantized.grid) * decode)).sum(),
    )
    return torch.stack([figure.double() for figure in (amax, *counts)])


def largest_held(grid: Grid) -> float:
    """The largest magnitude that rounding would still give the largest code: half a step above it."""
    step = 2.0 ** (math.floor(math.log2(grid.maximum)) - grid.mantissa_bits)
    return grid.maximum + step / 2


def summary(records: Sequence[Record]) -> dict[str, float]:
    """The step's part in `metrics.jsonl`, from its `records`: geometric means of the scales of operands that are not all zeros,
    and the worst operand's shares."""
    result = {}
    for key, roles in (("fp8/fwd_scale", ("input", "weight")), ("fp8/bwd_scale", ("grad_output",))):
        scales = [r["scale"] for r in records if r["operand"] in roles and r["scale"] and r["amax"]]
        if scales:
            result[key] = math.exp2(math.fsum(map(math.log2, scales)) / len(scales))
    for key in ("underflow", "saturation"):
        result[f"fp8/{key}"] = max((r[key] for r in records), default=0.0)
    return result


def _record(parts: Sequence[Sequence[float]]) -> dict[str, float | None]:
    """Range, scale and shares of one operand, from the figures of its parts."""
    amax, *sums = zip(*parts, strict=True)
    log2_scale, scaled, nonzero, underflow, finite, saturation = map(math.fsum, sums)
    return {
        "amax": max(amax, key=lambda each: (math.isnan(each), each)),
        "scale": math.exp2(log2_scale / scaled) if scaled else None,
        "underflow": underflow / max(nonzero, 1),
        "saturation": saturation / max(finite, 1),
    }
