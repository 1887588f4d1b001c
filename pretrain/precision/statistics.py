"""What low precision does to each operand of a step: its range, its scale, and the share of it that is lost at either end.

Every so many steps, on one microbatch, each operand is quantized once more beside the product, by our own quantizers, and
compared with what it was (docs/precision.md, "Statistics and health"). Only delayed scaling's scale is asked of the backend.

* Each operand is measured as the product along its features takes it, not once more along tokens.
* Rounding is to nearest here even where gradients are rounded stochastically: a random number drawn here would change the run.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pretrain.precision.delayed_state import of_operand
from pretrain.precision.formats.definition import QuantizedPrecision, Role
from pretrain.precision.linear import Backend, PrecisionContext
from pretrain.precision.product import Product
from pretrain.precision.quantizers.grid import Grid, Quantized
from pretrain.precision.settings import ActivePrecision

SLICE_VALUES = 2**24  # quantized at once: a run that fills its memory must not end because it was watched
SLICE_ROWS = 128  # slices begin at multiples of this, where the rows of every format's blocks begin too

# What is kept of an operand: one FP64 vector on its device. Merging two takes the larger of the maxima and adds the sums; minima
# are kept negated.
MAXIMA = ("amax", "-tensor_scale", "scale_max", "-scale_min")
SUMS = ("log2_scale", "scaled", "nonzero", "underflow", "finite", "saturation")

Record = Mapping[str, Any]


class OperandStatistics:
    """An observer of a PrecisionContext. What it finds stays on the device, without a wait, until `records` reads it all at once.

    It quantizes in eager kernels: every so many steps that costs less than compiling for each shape would.
    """

    def __init__(self, active: ActivePrecision, backend: Backend) -> None:
        """`active`: a quantized precision. `backend`: the one that computes it."""
        self.precision: QuantizedPrecision = active.precision
        to_nearest = {"disable_stochastic_rounding": True} if "disable_stochastic_rounding" in self.precision.options else {}
        self.settings = active.settings.model_copy(update=to_nearest)
        self.backend = backend
        self._figures: dict[tuple[str, Role], Tensor] = {}
        self._scales: dict[tuple[str, Role], Tensor] = {}
        self._state: dict[str, Tensor] = {}

    @contextmanager
    def watching(self, context: PrecisionContext) -> Iterator[None]:
        """Measure every operand of the forward and backward inside, afresh. Changes nothing that training can see.

        Of a step's microbatches the first is the one to look at: weights are quantized in no other, and the scale that delayed
        scaling has for them later is already the next step's.
        """
        self._figures, self._scales, self._state = {}, {}, self.backend.state()
        context.observers.append(self)
        try:
            yield
        finally:
            context.observers.remove(self)

    @torch.no_grad()
    def __call__(self, name: str, role: Role, x: Tensor, product: Product) -> None:
        """Measure x [rows, features]. A further call for the same operand adds to what is known: the LM head takes its tokens in
        chunks, gradient checkpointing computes a layer twice."""
        figures = self._measure(name, role, x)
        known = self._figures.get((name, role))
        self._figures[name, role] = figures if known is None else merge(known, figures)

    def records(self) -> list[dict[str, Any]]:
        """One object an operand, in the order in which they were first seen; waits for the device, once.

        docs/precision.md ("Statistics and health") has its keys. Where an operand has only zeros, the scales of blocks are None.
        """
        if not self._figures:
            return []
        table = torch.stack(list(self._figures.values())).tolist()
        rows = (dict(zip(MAXIMA + SUMS, values, strict=True)) for values in table)
        return [
            {"layer": name, "operand": role, **_record(row, self.precision)}
            for (name, role), row in zip(self._figures, rows, strict=True)
        ]

    def _measure(self, name: str, role: Role, x: Tensor) -> Tensor:
        amax = torch.linalg.vector_norm(x, math.inf).float()  # a maximum of magnitudes that makes no copy of x
        scale = self._scale_in_force(name, role) if self.precision.keeps_history else None
        quantize = self.precision.quantizer(self.settings, role, "features")
        slices = x.split(max(SLICE_VALUES // x.shape[1] // SLICE_ROWS, 1) * SLICE_ROWS)
        return functools.reduce(merge, (measure(rows.float(), quantize(rows, scale, amax)) for rows in slices))

    def _scale_in_force(self, name: str, role: Role) -> Tensor:
        """The delayed scale that the operand is quantized by. Read at the first call: a layer that is recomputed uses the scales
        of its forward, although by then the backend's state has newer ones."""
        if (name, role) not in self._scales:
            self._scales[name, role] = of_operand(self._state, name, role, "scale").clone()
        return self._scales[name, role]


def measure(x: Tensor, quantized: Quantized) -> Tensor:
    """The figures (MAXIMA, then SUMS) of x [rows, features] FP32, which was quantized to `quantized`; FP64, on x's device."""
    magnitude, decode = x.abs(), quantized.block_scale * quantized.tensor_scale
    nonzero, finite = magnitude > 0, magnitude < math.inf  # NaN is neither
    scaled = nonzero & (decode > 0)  # an NVFP4 block's scale can be zero: then its values are lost, whatever their codes
    encode = decode.reciprocal()
    if encode.dim():
        largest, smallest = encode.where(scaled, -math.inf).amax(), encode.where(scaled, math.inf).amin()
        log2_scale = encode.log2().where(scaled, 0).sum(dtype=torch.float64)
    else:
        largest, smallest, log2_scale = encode, encode, encode.log2() * scaled.sum()
    maxima = (magnitude.amax(), -quantized.tensor_scale.reciprocal(), largest, -smallest)
    sums = (
        log2_scale,
        scaled.sum(),
        nonzero.sum(),
        (nonzero & (quantized.operand == 0)).sum(),
        finite.sum(),
        (finite & scaled & (magnitude > largest_held(quantized.grid) * decode)).sum(),
    )
    return torch.stack([figure.double() for figure in maxima + sums])


def merge(one: Tensor, other: Tensor) -> Tensor:
    """The figures of two parts of an operand, as if it had been measured whole."""
    split = len(MAXIMA)
    return torch.cat([torch.maximum(one[:split], other[:split]), one[split:] + other[split:]])


def largest_held(grid: Grid) -> float:
    """The largest magnitude that rounding would still give the largest code: half a step above it. To count what lies between
    the two would call the largest value of every second NVFP4 block saturated."""
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


def _record(row: Mapping[str, float], precision: QuantizedPrecision) -> dict[str, float | None]:
    """Scales and shares of one operand, from its row of figures."""
    tensor_scale = -row["-tensor_scale"]
    if not precision.block_scaled:
        scales = {"scale": tensor_scale}
    elif row["scaled"]:
        mean = math.exp2(row["log2_scale"] / row["scaled"])
        scales = {"scale": mean, "scale_min": -row["-scale_min"], "scale_max": row["scale_max"]}
    else:
        scales = dict.fromkeys(("scale", "scale_min", "scale_max"))
    if precision.block_scaled and precision.tensor_scaled:
        scales["tensor_scale"] = tensor_scale if row["scaled"] else None
    return {
        "amax": row["amax"],
        **scales,
        "underflow": row["underflow"] / max(row["nonzero"], 1),
        "saturation": row["saturation"] / max(row["finite"], 1),
    }
