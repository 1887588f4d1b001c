"""Measure what low precision does to the operands of a step, record it, and warn.

A sample of each operand is quantized once more, as its product along features takes it. Values are
rounded to nearest: a random number drawn here would change the run.

There is one warning in a process, and again after a rollback, when operands of a precision lose
more than the precision usually does. It names the operand and a remedy. It does not stop the run:
whether much underflow is worth a restart is not for a threshold to decide. docs/verification.md has
the limits and the measurements behind them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from foundation.overrides import overridden
from foundation.units import percent
from pretrain.metrics.console import Console
from pretrain.metrics.trackers import JsonlTracker
from pretrain.observe.observers import Observer, Step
from pretrain.observe.product_observer import generators, sample
from pretrain.precision.delayed_state import of_operand
from pretrain.precision.formats.definition import QuantizedPrecision, Role
from pretrain.precision.model_precision import ModelPrecision
from pretrain.precision.quantizers import Quantized
from pretrain.precision.settings import ActivePrecision

Record = Mapping[str, Any]

# Share of values that scales from earlier steps may cut. Other scales cut none.
LOST_TO_LATE_SCALES = 1e-3
# For each share: the loss, and remedies.
LOSSES = {
    "underflow": (
        "becomes zero",
        "`precision=mxfp8`, `fp8_config.fp8_format: HYBRID` for gradients, or layers in BF16 "
        "(`fp8_config.keep_bf16_layers`)",
    ),
    "saturation": (
        "is cut to the format's maximum",
        "`precision=current`, `fp8_config.amax_compute_algo: max` or a larger `fp8_config.margin`",
    ),
}
# The delayed scale of an operand that no step has quantized yet. The next step has a better one.
NEVER_SCALED = 1.0


@dataclass(eq=False)
class OperandWatch(Observer):
    """Write the statistics of operands to fp8_statistics.jsonl, and warn if they lose too much.

    The file has a line for each step that is due, with an object for each operand. Every rank
    measures, because all of them must take the same time.
    """

    precision: ModelPrecision
    every: int  # `log.fp8_statistics`
    file: JsonlTracker  # open
    console: Console
    # Kinds of loss that were warned about.
    warned: set[str] = field(default_factory=set, init=False)

    def due(self, step: Step) -> bool:
        """Return True in every n-th step, and in the first one of each precision."""
        return step.measures_operands(self.every)

    @contextmanager
    def first_microbatch(self, step: Step) -> Iterator[None]:
        """Measure the operands of the first microbatch."""
        context = self.precision.context
        self._statistics = OperandStatistics(
            self.precision.current.active, context.state(), context.groups
        )
        with overridden(context, observers=[*context.observers, self._statistics]):
            yield

    def metrics(self, step: Step) -> dict[str, float]:
        """Write the line of the step, and return its summary for metrics.jsonl."""
        records = self._statistics.records()
        self.file.log({"step": step.number, "operands": records})
        if step.starts_precision:
            self.warned.clear()
        warning = warning_of(step.number, self._statistics.precision, records, self.warned)
        if warning is not None:
            self.console.warning(warning)
        return summary(records)

    def finish(self) -> None:
        """Close the file."""
        self.file.finish()


def warning_of(
    number: int, precision: QuantizedPrecision, records: Sequence[Record], given: set[str]
) -> str | None:
    """Return a warning about losses that have begun in step `number`, or None.

    given: the kinds of loss that were warned about. New ones are added.
    """
    scales_are_late = precision.keeps_history
    limits = {
        "underflow": precision.underflow_limit,
        "saturation": LOST_TO_LATE_SCALES if scales_are_late else 1.0,
    }
    scaled = [
        record for record in records if not (scales_are_late and record["scale"] == NEVER_SCALED)
    ]
    warnings = []
    for share, limit in limits.items():
        above = [record for record in scaled if record[share] > limit]
        if not above or share in given:
            continue
        given.add(share)
        worst = max(above, key=lambda record: record[share])
        loss, remedy = LOSSES[share]
        warnings.append(
            f"{percent(worst[share])} of {worst['layer']}'s {worst['operand']} {loss} "
            f"({len(above)} of {len(scaled)} operands are above {percent(limit)}); {remedy} "
            "loses less"
        )
    return f"step {number}: {'; '.join(warnings)}" if warnings else None


class OperandStatistics:
    """Statistics of the operands of one microbatch, forward and backward.

    An instance is an observer of a PrecisionContext. The microbatch must be the first of a step,
    which alone quantizes weights. Measuring changes nothing that training can see.
    docs/verification.md ("Statistics and health") has the keys of `records`.
    """

    def __init__(
        self,
        active: ActivePrecision,
        state: Mapping[str, Tensor],
        groups: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Begin the statistics of a microbatch.

        active: a quantized precision.
        state: of the context, with the delayed scales.
        groups: of the context, with the rows of each expert.
        """
        self.precision = cast(QuantizedPrecision, active.precision)
        has_stochastic = "disable_stochastic_rounding" in self.precision.options
        to_nearest = {"disable_stochastic_rounding": True} if has_stochastic else {}
        self.settings = active.settings.model_copy(update=to_nearest)
        # A recomputed layer uses the scales of its forward. By then the backend has newer ones.
        self._state = {name: tensor.clone() for name, tensor in state.items()}
        # Not copied: each forward stores where its rows end.
        self._groups = {} if groups is None else groups
        self._figures: dict[tuple[str, Role], list[Tensor]] = defaultdict(list)
        self._of_experts: dict[tuple[str, Role], Tensor] = {}
        self._generator = generators(0)

    @torch.no_grad()
    def __call__(self, name: str, role: Role, x: Tensor) -> None:
        """Measure an operand [rows, features] of the linear `name`.

        Further calls for the same operand add up: the LM head takes its tokens in chunks.
        """
        # A maximum of magnitudes that makes no copy of x.
        amax = torch.linalg.vector_norm(x, math.inf).float()
        is_late = self.precision.keeps_history
        scale = of_operand(self._state, name, role, "scale") if is_late else None
        scaling = self.precision.scaling(role)
        blocks, _, first_rows = sample(x, None, scaling, self._generator(x.device))
        rows = blocks.reshape(-1, scaling.block or blocks.shape[1])
        quantized = self.precision.along_features(self.settings, role)(rows, scale, amax)
        self._figures[name, role].append(measure(rows.float(), quantized, amax))
        ends = self._groups.get(name)
        if ends is None:
            return
        if role == "weight":
            experts = first_rows // (len(x) // len(ends))
        else:
            experts = torch.searchsorted(ends.long(), first_rows, right=True)
        counts = torch.stack(nonzero_and_lost(rows, quantized)).reshape(2, len(blocks), -1)
        of_experts = counts.sum(2).double() @ F.one_hot(experts, len(ends)).double()
        self._of_experts[name, role] = self._of_experts.get((name, role), 0) + of_experts

    def records(self) -> list[dict[str, Any]]:
        """Return an object for each operand, in the order seen. Waits for the device once."""
        if not self._figures:
            return []
        figures = map(torch.stack, self._figures.values())
        rows = [torch.cat([parts[:, :1].amax(0), parts[:, 1:].sum(0)]) for parts in figures]
        return [
            self._record(name, role, row)
            for (name, role), row in zip(self._figures, torch.stack(rows).tolist(), strict=True)
        ]

    def _record(self, name: str, role: Role, figures: Sequence[float]) -> dict[str, Any]:
        amax, log2_scale, scaled, nonzero, underflow, finite, saturation = figures
        record = {
            "layer": name,
            "operand": role,
            "amax": amax,
            "scale": math.exp2(log2_scale / scaled) if scaled else None,
            "underflow": underflow / max(nonzero, 1),
            "saturation": saturation / max(finite, 1),
        }
        counts = self._of_experts.get((name, role))
        if counts is not None:
            record["underflow_of_experts"] = [
                lost / of_expert if of_expert else None for of_expert, lost in counts.t().tolist()
            ]
        return record


def nonzero_and_lost(x: Tensor, quantized: Quantized) -> tuple[Tensor, Tensor]:
    """Return which values of `x` are not zero, and which of these become zero: bool, x's shape."""
    is_nonzero = x.abs() > 0  # False for NaN
    return is_nonzero, is_nonzero & (quantized.operand == 0)


def measure(x: Tensor, quantized: Quantized, amax: Tensor) -> Tensor:
    """Return seven figures of x [rows, features] FP32, an FP64 vector on its device.

    quantized: x after quantization.
    amax: of the whole operand.

    The figures are `amax`, the sum of log2(scale), and counts of values: not zero and with a scale,
    not zero, becoming zero, finite, and too large for the format.
    """
    magnitude = x.abs()
    decode = (quantized.block_scale * quantized.tensor_scale).expand_as(x)
    grid = quantized.grid
    is_nonzero, is_lost = nonzero_and_lost(x, quantized)
    is_finite = magnitude < math.inf  # False for NaN
    # The scale of an NVFP4 block can be zero. Then its values are lost, whatever their codes are.
    is_scaled = is_nonzero & (decode > 0)
    # The largest magnitude that rounds to the largest code: half a step above it.
    step = 2.0 ** (math.floor(math.log2(grid.maximum)) - grid.mantissa_bits)
    largest_held = grid.maximum + step / 2
    figures = (
        amax,
        -decode.double().log2().where(is_scaled, 0).sum(),
        is_scaled.sum(),
        is_nonzero.sum(),
        is_lost.sum(),
        is_finite.sum(),
        (is_finite & is_scaled & (magnitude > largest_held * decode)).sum(),
    )
    return torch.stack([figure.double() for figure in figures])


def summary(records: Sequence[Record]) -> dict[str, float]:
    """Return the figures of a step for metrics.jsonl.

    These are geometric means of the scales of operands that are not all zeros, and the largest
    shares of lost values.
    """
    result = {}
    for key, roles in (("fp8/fwd_scale", ("input", "weight")), ("fp8/bwd_scale", ("grad_output",))):
        scales = [
            record["scale"]
            for record in records
            if record["operand"] in roles and record["scale"] and record["amax"]
        ]
        if scales:
            result[key] = math.exp2(math.fsum(map(math.log2, scales)) / len(scales))
    for key in ("underflow", "saturation"):
        result[f"fp8/{key}"] = max((record[key] for record in records), default=0.0)
    return result
