"""Measure how many values of the operands are lost to quantization. Record the counts, and warn.

A sample of each operand is quantized a second time, as for a product that sums over the operand's
features. The values are rounded to nearest even if training rounds stochastically, because random
numbers drawn here would change the run.

A warning is printed if an operand loses a larger share of its values than is usual in its
precision. The warning names the worst operand and a remedy. Values can be lost in two ways: they
become zero, or they are too large for the format. Each of the two warnings is printed once in a
process, and once more after a rollback. The run continues, because no threshold can show whether a
restart is worth its cost. docs/developers/checks.md lists the limits.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foundation.units import percent
from pretrain.metrics.console import Console
from pretrain.metrics.trackers import JsonlTracker
from pretrain.observe.observers import Observer, Step
from pretrain.observe.product_check import largest_magnitude
from pretrain.precision.delayed_state import state_of_operand
from pretrain.precision.formats.definition import QuantizedPrecision, Role, Scaling
from pretrain.precision.product import LinearPass, PrecisionContext, Probe
from pretrain.precision.quantizers import Quantized

Record = Mapping[str, Any]

# Map each way in which values are lost to two texts for the warning: a description and the
# remedies. The keys are also the keys of the shares of lost values in `OperandStatistics.records`.
LOST_VALUES = {
    "underflow": (
        "becomes zero",
        "`precision=mxfp8`, `fp8_config.fp8_format: HYBRID` for gradients, or layers in BF16 "
        "(`fp8_config.keep_bf16_layers`)",
    ),
    "saturation": (
        "is saturated at the format's maximum",
        "`precision=current`, `fp8_config.amax_compute_algo: max` or a larger `fp8_config.margin`",
    ),
}
# The largest number of values of an operand that are measured. They are sampled in whole blocks.
SAMPLED_VALUES = 2**15
# The number of consecutive values in a sampled block if the whole tensor has one scale.
PIECE = 128


@dataclass(eq=False)
class OperandWatch(Observer):
    """Write the statistics of operands to fp8_statistics.jsonl, and warn of large losses.

    The file has a line for each measured step, with an object for each operand. All ranks measure
    their own operands, because a rank that does not measure would only wait for the ranks that do.
    Only the main process writes.
    """

    context: PrecisionContext
    # The file fp8_statistics.jsonl, which the caller starts and finishes.
    file: JsonlTracker
    console: Console
    # The keys of LOST_VALUES about which this observer has already warned.
    warned: set[str] = field(default_factory=set, init=False)

    def due(self, step: Step) -> bool:
        """Return True if `step` is a statistics step (`Step.measures_operands`)."""
        return step.measures_operands

    @contextmanager
    def first_microbatch(self, step: Step) -> Iterator[None]:
        """Measure the operands of the microbatch that runs in the caller's `with` statement."""
        precision = self.context.current.quantized_precision
        self._statistics = OperandStatistics(precision, self.context.state())
        with self.context.probing(self._statistics):
            yield

    def metrics(self, step: Step) -> dict[str, float]:
        """Write the statistics of the step to the file, and return their summary as metrics.

        Prints a warning if operands lose too many values.
        """
        records = self._statistics.records()
        self.file.log({"step": step.number, "operands": records})
        warning = warning_of(step.number, self._statistics.precision, records, self.warned)
        if warning is not None:
            self.console.warning(warning)
        return summary(records)


def warning_of(
    number: int, precision: QuantizedPrecision, records: Sequence[Record], warned: set[str]
) -> str | None:
    """Return a warning if operands lose more values than is usual in `precision`, else None.

    number: the number of the step.
    records: the result of `OperandStatistics.records`.
    warned: the keys of LOST_VALUES about which the user was already warned. There is no second
        warning about these keys. The keys of the returned warning are added to this set.
    """
    warnings = []
    for key, limit in precision.limits.items():
        above = [record for record in records if record[key] > limit]
        if not above or key in warned:
            continue
        warned.add(key)
        worst = max(above, key=lambda record: record[key])
        description, remedy = LOST_VALUES[key]
        lost = f"{percent(worst[key])} of {worst['layer']}'s {worst['operand']} {description}"
        warnings.append(f"{lost}; {remedy} loses less")
    return f"step {number}: {'; '.join(warnings)}" if warnings else None


class OperandStatistics(Probe):
    """Statistics of all low-precision operands in forward and backward of one microbatch.

    The microbatch must be the first one of a step, because only the first microbatch quantizes
    weights. The measurement does not change the training. docs/developers/checks.md
    ("Statistics") explains the keys of `records`.
    """

    def __init__(self, precision: QuantizedPrecision, state: Mapping[str, Tensor]) -> None:
        """Create empty statistics before the microbatch runs.

        precision: the precision of the microbatch.
        state: `PrecisionContext.state()`: the histories and scales of delayed scaling, or {}.
        """
        self.precision = precision.with_options(
            precision.settings.model_copy(update={"disable_stochastic_rounding": True})
        )
        # Copy the scales before the forward pass. When backward recomputes a layer, the layer's
        # operands are measured with these scales again. By then the engine has replaced its own
        # scales by the scales of the next microbatch.
        self._state = {name: tensor.clone() for name, tensor in state.items()}
        self._figures: dict[tuple[str, Role], list[Tensor]] = defaultdict(list)
        # Generator on the device of the operands. torch's default generator is not used, because
        # drawing from it would change the random numbers of the training.
        self._generator: torch.Generator | None = None

    @torch.no_grad()
    def operand(
        self, name: str, role: Role, values: Callable[[], Tensor], call: LinearPass
    ) -> None:
        """Measure an operand of the linear `name`, see `Probe.operand`.

        The LM head computes in chunks of tokens, so there are several calls for each of its
        operands. The figures of these calls are added up.
        """
        x = values()
        amax = largest_magnitude(x)
        scale = state_of_operand(self._state, name, role, "scale") if self._state else None
        if self._generator is None:
            self._generator = torch.Generator(x.device).manual_seed(0)
        scaling = self.precision.scaling(role)
        blocks = sample(x, scaling, self._generator)
        # A block takes one row, or as many rows as it has columns if it is square.
        rows = blocks.reshape(-1, scaling.block or blocks.shape[1])
        quantized = self.precision.along_features(role)(rows, scale, amax)
        self._figures[name, role].append(measure(rows.float(), quantized, amax))

    def records(self) -> list[dict[str, Any]]:
        """Return a dict of statistics for each operand that was observed.

        The operands are in the order of their first observation. This method waits for the device
        once.
        """
        rows = []
        for parts in map(torch.stack, self._figures.values()):
            # The first figure of `measure` is an amax, and all others are sums.
            rows.append(torch.cat([parts[:, :1].amax(0), parts[:, 1:].sum(0)]))
        operands = zip(self._figures, torch.stack(rows).tolist(), strict=True)
        return [self._record(name, role, row) for (name, role), row in operands]

    def _record(self, name: str, role: Role, figures: Sequence[float]) -> dict[str, Any]:
        """Return the statistics of an operand from its `figures`, see `measure`."""
        amax, log2_scale, scaled, nonzero, underflowed, finite, saturated = figures
        scale = math.exp2(log2_scale / scaled) if scaled else None
        return {
            "layer": name,
            "operand": role,
            "amax": amax,
            "scale": scale,
            "underflow": underflowed / max(nonzero, 1),
            "saturation": saturated / max(finite, 1),
        }


def sample(x: Tensor, scaling: Scaling, generator: torch.Generator) -> Tensor:
    """Return the values of n blocks [n, values] of `x`: a random sample, or all if there are few.

    x: the operand [rows, features], of any dtype and strides.
    scaling: the shape of the format's blocks.
    generator: draws the blocks.
    """
    size = scaling.block or math.gcd(x.shape[1], PIECE)
    height = size if scaling.square else 1
    # The blocks as [blocks per column, blocks per row, rows of a block, values of a row].
    blocks = x.unflatten(1, (-1, size)).unflatten(0, (-1, height)).transpose(1, 2)
    down, across = blocks.shape[:2]
    most = max(SAMPLED_VALUES // (height * size), 1)
    if down * across > most:
        chosen = torch.randint(down * across, (most,), generator=generator, device=x.device)
    else:
        chosen = torch.arange(down * across, device=x.device)
    return blocks[chosen // across, chosen % across].flatten(1)


def measure(x: Tensor, quantized: Quantized, amax: Tensor) -> Tensor:
    """Return seven figures of a sample of an operand, FP64 [7], on the sample's device.

    x: the sample, FP32 [rows, features].
    quantized: `x` after quantization.
    amax: the largest magnitude in the whole operand, a scalar.

    The figures are:
        1. `amax`,
        2. the sum of log2(scale) over nonzero values whose scale is not zero,
        3. the number of these values,
        4. the number of nonzero values,
        5. the number of nonzero values that become zero,
        6. the number of finite values,
        7. the number of finite values that are too large for the format under their scale.
    """
    magnitude = x.abs()
    decode = (quantized.block_scale * quantized.tensor_scale).expand_as(x)
    grid = quantized.grid
    # The comparisons are False for NaN.
    is_nonzero = magnitude > 0
    is_lost = is_nonzero & (quantized.operand == 0)
    is_finite = magnitude < math.inf
    # The scale of an NVFP4 block can be zero. Then all values of the block become zero, whatever
    # their codes are.
    is_scaled = is_nonzero & (decode > 0)
    # Values up to half a step above the largest code round to the largest code, and are not counted
    # as too large.
    step = 2.0 ** (math.floor(math.log2(grid.maximum)) - grid.mantissa_bits)
    largest_held = grid.maximum + step / 2
    is_saturated = is_finite & is_scaled & (magnitude > largest_held * decode)
    # The figures have the scale that encodes values, which is the reciprocal of `decode`.
    log2_scale = -decode.double().log2().where(is_scaled, 0)
    figures = (log2_scale, is_scaled, is_nonzero, is_lost, is_finite, is_saturated)
    return torch.stack([amax.double(), *(figure.sum().double() for figure in figures)])


def summary(records: Sequence[Record]) -> dict[str, float]:
    """Return the figures of a step for metrics.jsonl.

    records: the result of `OperandStatistics.records`.

    fp8/fwd_scale: the geometric mean of the scales of inputs and weights.
    fp8/bwd_scale: the geometric mean of the scales of output gradients.
    fp8/underflow: the largest share of values that become zero, among all operands.
    fp8/saturation: the largest share of values that are too large, among all operands.

    The scales of operands that contain only zeros are ignored.
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
    for key in LOST_VALUES:
        result[f"fp8/{key}"] = max((record[key] for record in records), default=0.0)
    return result
