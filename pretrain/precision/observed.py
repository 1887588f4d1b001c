"""What the matrix products of a model really multiply, seen from underneath: the operands as they reach the kernel.

A module may carry the right name and multiply in BF16 all the same. So `watched` says around a call which product it is, and
what is multiplied inside is seen where it is multiplied: torch's products underneath autograd, Transformer Engine's at the one
function of its extension that multiplies, and those that cublasLt computes.

Emulated operands, and FP8 operands of Transformer Engine, are held against their format as well: every value is a code times its
scale, every scale a fit one. That is asked of a `sample` of whole blocks. Nothing waits for the device until `faults` is read.

Every so many steps, on one microbatch, `OperandStatistics` quantize such a sample of each operand once more, as its product along
features takes it. They always round to nearest: a random number drawn here would change the run.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foundation.overrides import overridden
from pretrain.precision.delayed_state import of_operand
from pretrain.precision.formats.definition import Along, QuantizedPrecision, Role, Scaling
from pretrain.precision.quantizers import E4M3, E5M2, Grid, Quantized
from pretrain.precision.quantizers.tensor import FP32_MANTISSA_BITS, round_to_grid
from pretrain.precision.settings import ActivePrecision

# The left and the right operand of a linear's products: x w^T, g w and g^T x.
OPERANDS: dict[str, tuple[Role, Role]] = {
    "forward": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}
# The axis that each product's sum runs along, seen from its left and its right operand.
ALONG: dict[str, tuple[Along, Along]] = {
    "forward": ("features", "features"),
    "dgrad": ("features", "rows"),
    "wgrad": ("rows", "rows"),
}

# Products of torch, and where their two factors stand: what addmm adds the product to is no factor, and may be an FP32 sum.
_aten = torch.ops.aten
FACTORS = dict.fromkeys((_aten.mm, _aten.bmm, _aten.linear, _aten._grouped_mm), slice(0, 2))
FACTORS |= dict.fromkeys((_aten.addmm, _aten.addmm_, _aten.baddbmm), slice(1, 3))

SAMPLED_VALUES = 2**15  # of an operand, at most, in whole blocks
PIECE = 128  # values that are looked at together where the whole tensor has one scale
SMALLEST_SCALE = 2.0**-100  # below it, a code times its scale leaves the exponents that FP32 has
ROUNDING = 2.0**-20  # a code times an FP32 scale was rounded to FP32, and is divided by it again
# by Transformer Engine's names
_FP8 = {"kFloat8E4M3": (torch.float8_e4m3fn, E4M3), "kFloat8E5M2": (torch.float8_e5m2, E5M2)}


# ── A sample of an operand ──────────────────────────────────────────────────────────────────────────────────────────────────────


def sample(
    matrix: Tensor, scales: Tensor | None, scaling: Scaling, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Some blocks of `matrix` [rows, k], k the axis of the sum, of any dtype and strides: their values [n, values]; the scale of
    each, FP32 [n]; and the row in which it begins, int64 [n]. `scales` FP32: [rows or rows / block, k / block], or the scalar of
    a tensor with one scale. Where there are none, or not as many as blocks, the scale is 0, which fits no value."""
    size = scaling.block or math.gcd(matrix.shape[1], PIECE)
    high = size if scaling.square else 1
    # [down, across, high, size]
    blocks = matrix.unflatten(1, (-1, size)).unflatten(0, (-1, high)).transpose(1, 2)
    down, across = blocks.shape[:2]
    most = max(SAMPLED_VALUES // (high * size), 1)
    if down * across > most:
        chosen = torch.randint(down * across, (most,), generator=generator, device=matrix.device)
    else:
        chosen = torch.arange(down * across, device=matrix.device)
    places = chosen // across, chosen % across
    if scales is not None and scales.dim() == 0 and scaling.block is None:
        scale = scales.float().expand(len(chosen))
    elif scales is not None and scales.shape == (down, across):
        scale = scales[places]
    else:
        scale = torch.zeros(len(chosen), device=matrix.device)
    return blocks[places].flatten(1), scale, places[0] * high


def generators(seed: int) -> Callable[[torch.device], torch.Generator]:
    """A function from a device to its generator: a number drawn from torch's own would change the run."""
    return functools.cache(lambda device: torch.Generator(device).manual_seed(seed))


# ── Whether operands are what their format says ─────────────────────────────────────────────────────────────────────────────────


def examine(
    codes: Tensor, scale: Tensor, grid: Grid, scaling: Scaling, largest: Tensor | None = None
) -> Tensor:
    """Counts blocks and bad blocks, FP64 [2], of `codes` FP32 [n, values], values divided by their `scale` FP32 [n]. A block is
    bad if one of its values is no code of `grid`, or if its scale is none of the format or too large for its values.

    `largest`: the largest code of the whole operand, where one scale serves all of it. Blocks that hold NaN or infinities, and
    those with tiny scales, are left alone.
    """
    foreign = (
        (round_to_grid(codes, grid) - codes).abs() > ROUNDING * codes.abs()
    ) & codes.isfinite()
    amax = codes.abs().amax(1)
    judged = scale.isfinite() & (scale.abs() >= SMALLEST_SCALE) & amax.isfinite()
    # a scale of zero, as NVFP4 has them, makes every value zero
    worthless = (scale == 0) & (codes != 0).any(1)
    foreign = (foreign.any(1) & judged) | worthless

    unfit = ~_is_scale(scale, scaling) & scale.isfinite()
    if largest is not None:
        amax = largest.expand_as(amax)
        judged = judged & largest.isfinite()
    least = torch.full_like(amax, scaling.least * grid.maximum)
    # a subnormal scale may be half of what was wanted, or a third too small
    if scaling.kind == "E4M3":
        least = torch.where(scale < 2.0**E4M3.min_exponent, 0.75 * least, least)
    loose = judged & (amax > 0) & (amax < least)
    return torch.stack([torch.ones_like(foreign), foreign | unfit | loose]).sum(
        1, dtype=torch.float64
    )


def _is_scale(scale: Tensor, scaling: Scaling) -> Tensor:
    if scaling.kind == "E4M3":
        return (scale >= 0) & (round_to_grid(scale, E4M3) == scale)
    if scaling.kind == "FP32":
        return scale > 0
    bits = scale.view(torch.int32)
    mantissa = bits & ((1 << FP32_MANTISSA_BITS) - 1)
    # the last is 2^-127
    return (bits > 0) & ((mantissa == 0) | (bits == 1 << (FP32_MANTISSA_BITS - 1)))


# ── Which products there are ────────────────────────────────────────────────────────────────────────────────────────────────────


class ObservedProduct(NamedTuple):
    """One product of a linear: `gemm` is forward, dgrad or wgrad; `left` and `right` say what its operands were."""

    gemm: str
    left: str
    right: str


# Of an emulated operand, beside its values: the scales of its blocks as `sample` takes them, and the scale of the tensor.
Scales = tuple[Tensor | None, Tensor | None]


class _Call(NamedTuple):
    """A product that is under way."""

    names: Sequence[str]
    gemm: str
    scales: Sequence[Scales] | None  # of an emulated product's operands


class ProductObserver:
    """Notes the products of each linear in the order they run, in `products` by name; a recomputed forward is noted twice."""

    current: ClassVar[ProductObserver | None] = None  # the one that looks on now

    def __init__(
        self, active: ActivePrecision | None, seed: int = 0, examined: Set[str] | None = None
    ) -> None:
        """`active`: what low-precision operands are held against; None: only their kinds are noted. `seed` picks the blocks.
        `examined`: the linears whose operands are held against it, where not all are."""
        self.products: dict[str, list[ObservedProduct]] = {}
        self._active = active if active and active.precision.quantized else None
        self._examined = examined
        # a stack, as recomputation nests forwards in the backward of a product
        self._calls: list[_Call] = []
        self._findings: list[tuple[_Call, Role, Grid, Tensor]] = []  # with the figures of `examine`
        self._generator = generators(seed)

    @contextmanager
    def looking_on(self) -> Iterator[None]:
        """While entered, what is `watched` is seen, and every GEMM of Transformer Engine in it."""

        def gemm(
            left: Any,
            transposes_left: bool,
            right: Any,
            transposes_right: bool,
            *rest: Any,
            **options: Any,
        ) -> Any:
            see(left, right, ("T" if transposes_left else "N") + ("T" if transposes_right else "N"))
            return generic_gemm(left, transposes_left, right, transposes_right, *rest, **options)

        extension = sys.modules.get("transformer_engine_torch")
        generic_gemm = extension and extension.generic_gemm
        with (
            overridden(ProductObserver, current=self),
            overridden(extension, generic_gemm=gemm) if extension else nullcontext(),
        ):
            yield

    @contextmanager
    def during(
        self, names: Sequence[str], gemm: str, scales: Sequence[Scales] | None = None
    ) -> Iterator[None]:
        """See `watched`; decorates functions too. Products of torch are looked at in here alone: a dispatch mode around a whole
        step would keep it from being compiled."""
        self._calls.append(_Call(names, gemm, scales))
        try:
            with _TorchProducts():
                yield
        finally:
            self._calls.pop()

    def faults(self) -> dict[str, list[str]]:
        """What is wrong with operands, by the linear's name; waits for the device, once."""
        faults: dict[str, list[str]] = {}
        all_figures = (
            torch.stack([figures for *_, figures in self._findings]).tolist()
            if self._findings
            else []
        )
        for (call, role, grid, _), (blocks, wrong) in zip(self._findings, all_figures, strict=True):
            for name in call.names if wrong else ():
                fault = f"{wrong:.0f} of {blocks:.0f} blocks are no {grid.name} codes under a scale that fits them"
                faults.setdefault(name, []).append(f"{call.gemm} {role}: {fault}")
        return faults

    @torch.no_grad()
    def torch_product(self, left: Tensor, right: Tensor) -> None:
        """left [m, k] times right [k, n], or [experts, k, n], as the kernel gets them."""
        call = self._calls[-1]
        if call.scales is None or self._active is None:
            self._note(call, dtype_name(left.dtype), dtype_name(right.dtype))
            return
        precision, settings, roles = (
            self._active.precision,
            self._active.settings,
            OPERANDS[call.gemm],
        )
        self._note(call, *(precision.operand_kind(settings, role) for role in roles))
        if not self._examines(call):
            return
        for role, matrix, (of_blocks, of_tensor) in zip(
            roles, (left, right.mT.flatten(0, -2)), call.scales, strict=True
        ):
            scaling, largest = precision.scaling(role), None
            values, scale, _ = sample(
                matrix,
                of_blocks if scaling.block else of_tensor,
                scaling,
                self._generator(matrix.device),
            )
            codes = values.float()
            if scaling.block:
                codes = torch.where(scale[:, None] == 0, codes, codes / scale[:, None])
            else:  # the scale is not in the values
                largest = torch.linalg.vector_norm(matrix, math.inf).float()
            grid = precision.grid(settings, role)
            self._findings.append((call, role, grid, examine(codes, scale, grid, scaling, largest)))

    @torch.no_grad()
    def scaled_product(self, *factors: tuple[Tensor, Tensor]) -> None:
        """The factors of torch's grouped product in FP8, codes with the axis of the sum last, and their scales, which are as many
        as there are rows and all alike where a tensor has one."""
        call, grids = self._calls[-1], {dtype: grid for dtype, grid in _FP8.values()}
        self._note(
            call, *(f"{grids[codes.dtype].name.lower()} tensor-scaled" for codes, _ in factors)
        )
        if self._active is None or not self._examines(call):
            return
        for role, (codes, scales) in zip(OPERANDS[call.gemm], factors, strict=True):
            scaling, grid, scale = (
                self._active.precision.scaling(role),
                grids[codes.dtype],
                scales.flatten()[0],
            )
            codes = codes.flatten(0, -2).view(torch.uint8)
            largest = (codes & 0x7F).amax().reshape(1).view(factors[0][0].dtype).float().reshape(())
            values, of_blocks, _ = sample(codes, scale, scaling, self._generator(codes.device))
            figures = examine(
                values.view(factors[0][0].dtype).float(), of_blocks, grid, scaling, largest
            )
            figures[1] += (scales != scale).sum()
            self._findings.append((call, role, grid, figures))

    @torch.no_grad()
    def library_product(self, *operands: tuple[Any, bool]) -> None:
        """The left and the right operand of a GEMM, each with whether it is read by rows."""
        if not self._calls:
            return
        call, te = self._calls[-1], sys.modules.get("transformer_engine.pytorch")
        self._note(call, *(operand_kind(te, operand) for operand, _ in operands))
        if te and self._active is not None and self._examines(call):
            for role, (operand, by_rows) in zip(OPERANDS[call.gemm], operands, strict=True):
                self._examine_te(te, call, role, operand, by_rows)

    def _examine_te(
        self, te: ModuleType, call: _Call, role: Role, operand: Any, by_rows: bool
    ) -> None:
        """The scales of FP8 operands against their codes; any byte is a code. MXFP8's and NVFP4's scales lie in an order of the
        kernel's own, and are left to the library."""
        largest = None
        if isinstance(operand, te.Float8TensorStorage):
            # On GPUs whose products read operands either way there are no transposes.
            transposed = None if by_rows or operand._transpose_invalid else operand._transpose
            data, scales = (
                operand._data if transposed is None else transposed,
                operand._scale_inv.reshape(()),
            )
            codes = data.reshape(-1, data.shape[-1])
        elif isinstance(operand, te.Float8BlockwiseQTensorStorage):
            data = operand._rowwise_data if by_rows else operand._columnwise_data
            scales = operand._rowwise_scale_inv if by_rows else operand._columnwise_scale_inv
            codes = data.reshape(-1, data.shape[-1]) if by_rows else data.reshape(data.shape[0], -1)
            down = -(-codes.shape[0] // 128) if operand._is_2D_scaled else codes.shape[0]
            scales = scales if operand._is_2D_scaled else scales.t()
            scales = scales[:down, : -(-codes.shape[1] // 128)]  # they are padded
        else:
            return
        dtype, grid = fp8_format(te, operand._fp8_dtype)
        if scales.dim() == 0:  # magnitudes of codes order as their bits do
            largest = (
                (data.view(torch.uint8) & 0x7F).amax().reshape(1).view(dtype).float().reshape(())
            )
        scaling = self._active.precision.scaling(role)
        values, scale, _ = sample(
            codes.view(torch.uint8), scales, scaling, self._generator(data.device)
        )
        self._findings.append(
            (call, role, grid, examine(values.view(dtype).float(), scale, grid, scaling, largest))
        )

    def _note(self, call: _Call, left: str, right: str) -> None:
        for name in call.names:
            self.products.setdefault(name, []).append(ObservedProduct(call.gemm, left, right))

    def _examines(self, call: _Call) -> bool:
        return self._examined is None or not self._examined.isdisjoint(call.names)


def watched(
    names: Sequence[str], gemm: str, scales: Sequence[Scales] | None = None
) -> AbstractContextManager[None]:
    """Put this around a product: what is multiplied inside is `gemm` of the linears called `names`, for whoever looks on.
    `scales`: of an emulated product's operands."""
    observer = ProductObserver.current
    return observer.during(names, gemm, scales) if observer else nullcontext()


def see(left: Any, right: Any, layout: str) -> None:
    """A product of a library, its operands named as `searched.multiply` does, for whoever looks on."""
    if observer := ProductObserver.current:
        # cuBLAS counts columns first, so libraries name the operands the other way round.
        observer.library_product((right, layout[1] == "N"), (left, layout[0] == "T"))


class _TorchProducts(TorchDispatchMode):
    """While entered, tells whoever looks on of each product of two matrices."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if factors := FACTORS.get(function.overloadpacket):
            ProductObserver.current.torch_product(*args[factors])
        elif function.overloadpacket is _aten._scaled_grouped_mm:
            left, right, of_left, of_right = args[:4]
            ProductObserver.current.scaled_product((left, of_left), (right.mT, of_right))
        return function(*args, **(kwargs or {}))


def operand_kind(te: ModuleType | None, operand: Any) -> str:
    """The number format and the scaling of a GEMM's operand, such as "e4m3 tensor-scaled"; of an unquantized tensor its dtype."""
    if te is None or not isinstance(operand, te.QuantizedTensorStorage):
        return dtype_name(operand.dtype)
    in_blocks = {
        te.NVFP4TensorStorage: 16,
        te.MXFP8TensorStorage: 32,
        te.Float8BlockwiseQTensorStorage: 128,
    }
    size = next((size for kind, size in in_blocks.items() if isinstance(operand, kind)), None)
    values = "e2m1" if size == 16 else fp8_format(te, operand._fp8_dtype)[1].name.lower()
    return f"{values} in blocks of {size}" if size else f"{values} tensor-scaled"


def fp8_format(te: ModuleType, dtype: Any) -> tuple[torch.dtype, Grid]:
    """torch's and our own name of one of Transformer Engine's FP8 types."""
    return _FP8[te.DType.cast(dtype).name]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ── What a step loses to low precision ──────────────────────────────────────────────────────────────────────────────────────────


class OperandStatistics:
    """An observer of a PrecisionContext for one microbatch, forward and backward: the first of a step, which alone quantizes
    weights. It changes nothing that training can see. docs/verification.md ("Statistics and health") has the keys of `records`.
    """

    def __init__(
        self,
        active: ActivePrecision,
        state: Mapping[str, Tensor],
        groups: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`active`: a quantized precision. `state`: the context's, where delayed scales are. `groups`: its, of experts' rows."""
        self.precision: QuantizedPrecision = active.precision
        to_nearest = (
            {"disable_stochastic_rounding": True}
            if "disable_stochastic_rounding" in self.precision.options
            else {}
        )
        self.settings = active.settings.model_copy(update=to_nearest)
        # A layer that is recomputed uses the scales of its forward, although by then the backend's state has newer ones.
        self._state = {name: tensor.clone() for name, tensor in state.items()}
        self._groups = {} if groups is None else groups  # live: a forward says where its rows end
        self._figures: dict[tuple[str, Role], list[Tensor]] = defaultdict(list)
        self._of_experts: dict[tuple[str, Role], Tensor] = {}
        self._generator = generators(0)

    @torch.no_grad()
    def __call__(self, name: str, role: Role, x: Tensor) -> None:
        """Measure x [rows, features]. Further calls for an operand add up: the LM head takes its tokens in chunks."""
        # a maximum of magnitudes that makes no copy of x
        amax = torch.linalg.vector_norm(x, math.inf).float()
        scale = (
            of_operand(self._state, name, role, "scale") if self.precision.keeps_history else None
        )
        scaling = self.precision.scaling(role)
        blocks, _, places = sample(x, None, scaling, self._generator(x.device))
        rows = blocks.reshape(-1, scaling.block or blocks.shape[1])
        quantized = self.precision.along_features(self.settings, role)(rows, scale, amax)
        self._figures[name, role].append(measure(rows.float(), quantized, amax))
        if (ends := self._groups.get(name)) is not None:
            expert = (
                places // (len(x) // len(ends))
                if role == "weight"
                else torch.searchsorted(ends.long(), places, right=True)
            )
            counts = (
                torch.stack(nonzero_and_lost(rows, quantized))
                .reshape(2, len(blocks), -1)
                .sum(2)
                .double()
            )
            of_experts = counts @ F.one_hot(expert, len(ends)).double()
            self._of_experts[name, role] = self._of_experts.get((name, role), 0) + of_experts

    def records(self) -> list[dict[str, Any]]:
        """One object an operand, in the order in which they were first seen; waits for the device, once."""
        of_parts = [torch.stack(parts) for parts in self._figures.values()]
        figures = [torch.cat([parts[:, :1].amax(0), parts[:, 1:].sum(0)]) for parts in of_parts]
        records = []
        for (name, role), row in zip(
            self._figures, torch.stack(figures).tolist() if figures else (), strict=True
        ):
            amax, log2_scale, scaled, nonzero, underflow, finite, saturation = row
            record = {
                "layer": name,
                "operand": role,
                "amax": amax,
                "scale": math.exp2(log2_scale / scaled) if scaled else None,
            }
            record |= {
                "underflow": underflow / max(nonzero, 1),
                "saturation": saturation / max(finite, 1),
            }
            if (counts := self._of_experts.get((name, role))) is not None:
                record["underflow_of_experts"] = [
                    lost / of if of else None for of, lost in counts.t().tolist()
                ]
            records.append(record)
        return records


def nonzero_and_lost(x: Tensor, quantized: Quantized) -> tuple[Tensor, Tensor]:
    """Which values of `x` are not zero, and which of these become zero where it is `quantized`: both bool, of its shape."""
    nonzero = x.abs() > 0  # not-a-number is neither
    return nonzero, nonzero & (quantized.operand == 0)


def measure(x: Tensor, quantized: Quantized, amax: Tensor) -> Tensor:
    """Figures of x [rows, features] FP32, which was quantized to `quantized`, an FP64 vector on its device: `amax` of the whole
    operand, the sum of log2(scale), and how many values are not zero and have a scale, are not zero, become zero, are finite, are
    too large for the format."""
    magnitude, decode, grid = (
        x.abs(),
        (quantized.block_scale * quantized.tensor_scale).expand_as(x),
        quantized.grid,
    )
    # not-a-number is not finite either
    (nonzero, lost), finite = nonzero_and_lost(x, quantized), magnitude < math.inf
    # an NVFP4 block's scale can be zero: then its values are lost, whatever their codes
    scaled = nonzero & (decode > 0)
    # The largest magnitude that rounding still gives the largest code: half a step above it.
    largest_held = (
        grid.maximum + 2.0 ** (math.floor(math.log2(grid.maximum)) - grid.mantissa_bits) / 2
    )
    counts = (
        -decode.double().log2().where(scaled, 0).sum(),
        scaled.sum(),
        nonzero.sum(),
        lost.sum(),
        finite.sum(),
        (finite & scaled & (magnitude > largest_held * decode)).sum(),
    )
    return torch.stack([figure.double() for figure in (amax, *counts)])


def summary(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
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
