"""Observe the operands that matrix products really multiply.

Products of torch are observed underneath autograd, products of Transformer Engine at the one
function of its extension that multiplies, and products of cublasLt where `searched` calls it.

Operands are examined too if they are emulated or FP8 operands of Transformer Engine: each value
must be a code times its scale, and each scale must be one of the format that fits its values. A
sample of whole blocks is examined. The host waits for the device only when `faults` is read.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foundation.overrides import overridden
from pretrain.precision.formats.definition import QuantizedPrecision, Role, Scaling
from pretrain.precision.observed import (
    FP8_FORMATS,
    OPERANDS,
    ProductWatcher,
    Scales,
    dtype_name,
    fp8_format,
)
from pretrain.precision.quantizers import E4M3, Grid
from pretrain.precision.quantizers.tensor import FP32_MANTISSA_BITS, round_to_grid
from pretrain.precision.settings import ActivePrecision

# Products of torch and the positions of their two factors. The tensor that addmm adds the product
# to is no factor, and may be an FP32 sum.
_aten = torch.ops.aten
FACTORS = dict.fromkeys((_aten.mm, _aten.bmm, _aten.linear, _aten._grouped_mm), slice(0, 2))
FACTORS |= dict.fromkeys((_aten.addmm, _aten.addmm_, _aten.baddbmm), slice(1, 3))

SAMPLED_VALUES = 2**15  # of an operand, at most, in whole blocks
PIECE = 128  # values that are sampled together if the whole tensor has one scale
# Below this scale, a code times its scale leaves the exponents of FP32.
SMALLEST_SCALE = 2.0**-100
# A code times an FP32 scale was rounded to FP32, and is divided by the scale again.
ROUNDING = 2.0**-20
MAGNITUDE = 0x7F  # the bits of an FP8 code without its sign


# ── A sample of an operand ────────────────────────────────────────────────────────────────────────


def sample(
    matrix: Tensor, scales: Tensor | None, scaling: Scaling, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Return some blocks of `matrix`.

    matrix: [rows, k] with the axis of the product's sum last, of any dtype and strides.
    scales: FP32 [rows or rows / block, k / block], or a scalar if the tensor has one scale.

    Returns the values of each block [n, values], its scale FP32 [n], and its first row int64 [n].
    Scales are 0, which fits no value, if `scales` is None or has another shape.
    """
    size = scaling.block or math.gcd(matrix.shape[1], PIECE)
    height = size if scaling.square else 1
    # [down, across, height, size]
    blocks = matrix.unflatten(1, (-1, size)).unflatten(0, (-1, height)).transpose(1, 2)
    down, across = blocks.shape[:2]
    most = max(SAMPLED_VALUES // (height * size), 1)
    if down * across > most:
        chosen = torch.randint(down * across, (most,), generator=generator, device=matrix.device)
    else:
        chosen = torch.arange(down * across, device=matrix.device)
    places = (chosen // across, chosen % across)
    if scales is not None and scales.dim() == 0 and scaling.block is None:
        scale = scales.float().expand(len(chosen))
    elif scales is not None and scales.shape == (down, across):
        scale = scales[places]
    else:
        scale = torch.zeros(len(chosen), device=matrix.device)
    return blocks[places].flatten(1), scale, places[0] * height


def generators(seed: int) -> Callable[[torch.device], torch.Generator]:
    """Return a function from a device to its generator.

    Numbers drawn from torch's own generators would change the run.
    """
    return functools.cache(lambda device: torch.Generator(device).manual_seed(seed))


# ── The check of an operand against its format ────────────────────────────────────────────────────


def examine(
    codes: Tensor, scale: Tensor, grid: Grid, scaling: Scaling, largest: Tensor | None = None
) -> Tensor:
    """Count blocks and bad blocks, FP64 [2].

    codes: values divided by their block's scale, FP32 [n, values].
    scale: of each block, FP32 [n].
    largest: the largest code of the whole operand, if it has one scale.

    A block is bad if one of its values is no code of `grid`, or if its scale is none of the format
    or too large for its values. Blocks with NaN or infinities and blocks with tiny scales are not
    judged.
    """
    is_off_grid = (round_to_grid(codes, grid) - codes).abs() > ROUNDING * codes.abs()
    is_foreign = (is_off_grid & codes.isfinite()).any(1)
    amax = codes.abs().amax(1)
    is_judged = scale.isfinite() & (scale.abs() >= SMALLEST_SCALE) & amax.isfinite()
    # NVFP4 has scales of zero, which make every value zero.
    is_lost = (scale == 0) & (codes != 0).any(1)
    is_foreign = (is_foreign & is_judged) | is_lost

    is_unfit = ~_is_scale(scale, scaling) & scale.isfinite()
    if largest is not None:
        amax = largest.expand_as(amax)
        is_judged = is_judged & largest.isfinite()
    least = torch.full_like(amax, scaling.least * grid.maximum)
    if scaling.kind == "E4M3":
        # A subnormal scale may be half as large as required, or a third too small.
        least = torch.where(scale < 2.0**E4M3.min_exponent, 0.75 * least, least)
    is_loose = is_judged & (amax > 0) & (amax < least)
    return torch.stack([torch.ones_like(is_foreign), is_foreign | is_unfit | is_loose]).sum(
        1, dtype=torch.float64
    )


def _is_scale(scale: Tensor, scaling: Scaling) -> Tensor:
    """Return which scales are scales of the format."""
    if scaling.kind == "E4M3":
        return (scale >= 0) & (round_to_grid(scale, E4M3) == scale)
    if scaling.kind == "FP32":
        return scale > 0
    bits = scale.view(torch.int32)
    mantissa = bits & ((1 << FP32_MANTISSA_BITS) - 1)
    smallest = 1 << (FP32_MANTISSA_BITS - 1)  # the bits of 2^-127
    return (bits > 0) & ((mantissa == 0) | (bits == smallest))


# ── Which products there are ──────────────────────────────────────────────────────────────────────


class ObservedProduct(NamedTuple):
    """A product of a linear: forward, dgrad or wgrad, and the kinds of its operands."""

    gemm: str
    left: str
    right: str


class _Call(NamedTuple):
    """A product that is under way."""

    names: Sequence[str]
    gemm: str
    scales: Sequence[Scales] | None  # of the operands of an emulated product


class ProductObserver(ProductWatcher):
    """Record the products of each linear, in order.

    `products` has them by the name of the linear. A recomputed forward is noted twice.
    """

    def __init__(
        self, active: ActivePrecision, seed: int = 0, examined: Set[str] | None = None
    ) -> None:
        """Make an observer.

        active: the precision whose operands are examined if it is quantized.
        seed: draws the blocks that are examined.
        examined: the linears whose operands are examined. None examines all.
        """
        self.products: dict[str, list[ObservedProduct]] = {}
        self._active = active
        self._examined = examined
        # A stack, because recomputation runs forwards inside the backward of a product.
        self._calls: list[_Call] = []
        # Examined operands, and their counts by `examine`.
        self._findings: list[tuple[_Call, Role, Grid, Tensor]] = []
        self._generator = generators(seed)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe `watched` products inside the block, and GEMMs of Transformer Engine in them."""
        extension: Any = sys.modules.get("transformer_engine_torch")
        multiply: Any = getattr(extension, "generic_gemm", None)

        def gemm(
            a: Any, transposes_a: bool, b: Any, transposes_b: bool, *rest: Any, **options: Any
        ) -> Any:
            # cuBLAS stores columns first, so the library names the operands the other way round.
            self.library_product((b, not transposes_b), (a, bool(transposes_a)))
            return multiply(a, transposes_a, b, transposes_b, *rest, **options)

        with ExitStack() as overrides:
            overrides.enter_context(overridden(ProductWatcher, current=self))
            if extension is not None:
                overrides.enter_context(overridden(extension, generic_gemm=gemm))
            yield

    @contextmanager
    def during(
        self, names: Sequence[str], gemm: str, scales: Sequence[Scales] | None = None
    ) -> Iterator[None]:
        """Observe the products inside the block, see `watched`. This decorates functions too.

        Products of torch are observed only here: a dispatch mode around a whole step would keep it
        from being compiled.
        """
        self._calls.append(_Call(names, gemm, scales))
        try:
            with _TorchProducts(self):
                yield
        finally:
            self._calls.pop()

    def faults(self) -> dict[str, list[str]]:
        """Return the faults of operands by the linear's name. Waits for the device once."""
        if not self._findings:
            return {}
        faults: dict[str, list[str]] = {}
        all_counts = torch.stack([counts for *_, counts in self._findings]).tolist()
        for (call, role, grid, _), (blocks, bad) in zip(self._findings, all_counts, strict=True):
            for name in call.names if bad else ():
                faults.setdefault(name, []).append(
                    f"{call.gemm} {role}: {bad:.0f} of {blocks:.0f} blocks are no {grid.name} "
                    "codes under a scale that fits them"
                )
        return faults

    @torch.no_grad()
    def torch_product(self, left: Tensor, right: Tensor) -> None:
        """Observe left [m, k] times right [k, n] or [experts, k, n], as the kernel gets them."""
        call = self._calls[-1]
        precision = self._active.precision
        if call.scales is None or not isinstance(precision, QuantizedPrecision):
            self._note(call, dtype_name(left.dtype), dtype_name(right.dtype))
            return
        settings = self._active.settings
        roles = OPERANDS[call.gemm]
        kinds = [precision.operand_kind(settings, role) for role in roles]
        if not self._note(call, *kinds):
            return
        for role, matrix, (of_blocks, of_tensor) in zip(
            roles, (left, right.mT.flatten(0, -2)), call.scales, strict=True
        ):
            is_block = precision.scaling(role).block is not None
            grid = precision.grid(settings, role)
            self._examine(call, role, matrix, of_blocks if is_block else of_tensor, grid)

    @torch.no_grad()
    def scaled_product(self, *factors: tuple[Tensor, Tensor]) -> None:
        """Observe the factors of torch's grouped product in FP8.

        Each is a pair: codes with the axis of the sum last, and a scale for each row. All scales of
        a tensor with one scale must be the same.
        """
        call = self._calls[-1]
        grids = dict(FP8_FORMATS.values())
        kinds = [f"{grids[codes.dtype].name.lower()} tensor-scaled" for codes, _ in factors]
        if not self._note(call, *kinds):
            return
        for role, (codes, scales) in zip(OPERANDS[call.gemm], factors, strict=True):
            scale = scales.flatten()[0]
            grid = grids[codes.dtype]
            self._examine(call, role, codes.flatten(0, -2), scale, grid, (scales != scale).sum())

    @torch.no_grad()
    def library_product(self, *operands: tuple[Any, bool]) -> None:
        """Observe the operands of a GEMM, each with whether it is read by rows.

        Any byte is an FP8 code, so only scales are examined. Those of MXFP8 and NVFP4 lie in an
        order of the kernel's own, and are not.
        """
        if not self._calls:
            return
        call = self._calls[-1]
        te = sys.modules.get("transformer_engine.pytorch")
        kinds = [operand_kind(te, operand) for operand, _ in operands]
        if not self._note(call, *kinds) or te is None:
            return
        for role, (operand, by_rows) in zip(OPERANDS[call.gemm], operands, strict=True):
            if isinstance(operand, te.Float8TensorStorage):
                codes, scales = _tensor_scaled(operand, by_rows)
            elif isinstance(operand, te.Float8BlockwiseQTensorStorage):
                codes, scales = _block_scaled(operand, by_rows)
            else:
                continue
            dtype, grid = fp8_format(te, operand._fp8_dtype)
            self._examine(call, role, codes.view(dtype), scales, grid)

    def _examine(
        self,
        call: _Call,
        role: Role,
        matrix: Tensor,
        scales: Tensor | None,
        grid: Grid,
        bad: Tensor | int = 0,
    ) -> None:
        """Examine some blocks of an operand.

        matrix: [rows, k]: FP8 codes, emulated values in blocks, or emulated codes under one scale.
        bad: the number of blocks that are known to be bad.
        """
        scaling = cast(QuantizedPrecision, self._active.precision).scaling(role)
        is_fp8 = matrix.dtype.itemsize == 1
        data = matrix.view(torch.uint8) if is_fp8 else matrix
        sampled, scale, _ = sample(data, scales, scaling, self._generator(matrix.device))
        codes = (sampled.view(matrix.dtype) if is_fp8 else sampled).float()
        if scaling.block and not is_fp8:
            codes = torch.where(scale[:, None] == 0, codes, codes / scale[:, None])
        largest = None
        if scaling.block is None and is_fp8:
            # FP8 codes order as their bits do.
            bits = (data & MAGNITUDE).amax().reshape(1)
            largest = bits.view(matrix.dtype).float().reshape(())
        elif scaling.block is None:
            largest = torch.linalg.vector_norm(matrix, math.inf).float()
        counts = examine(codes, scale, grid, scaling, largest)
        counts[1] += bad
        self._findings.append((call, role, grid, counts))

    def _note(self, call: _Call, left: str, right: str) -> bool:
        """Record the kinds of a product's operands. Return whether to examine the operands."""
        for name in call.names:
            self.products.setdefault(name, []).append(ObservedProduct(call.gemm, left, right))
        is_examined = self._examined is None or not self._examined.isdisjoint(call.names)
        return is_examined and self._active.precision.quantized


def _tensor_scaled(operand: Any, by_rows: bool) -> tuple[Tensor, Tensor]:
    """Return codes [rows, k] and the scale of a Transformer Engine tensor with one scale."""
    # GPUs whose products read operands either way have no transposes.
    transposed = None if by_rows or operand._transpose_invalid else operand._transpose
    data = operand._data if transposed is None else transposed
    return data.reshape(-1, data.shape[-1]), operand._scale_inv.reshape(())


def _block_scaled(operand: Any, by_rows: bool) -> tuple[Tensor, Tensor]:
    """Return codes [rows, k] and scales of a Transformer Engine tensor in blocks of 128."""
    is_2d = operand._is_2D_scaled
    data = operand._rowwise_data if by_rows else operand._columnwise_data
    scales = operand._rowwise_scale_inv if by_rows else operand._columnwise_scale_inv
    codes = data.reshape(-1, data.shape[-1]) if by_rows else data.reshape(data.shape[0], -1)
    down = -(-codes.shape[0] // 128) if is_2d else codes.shape[0]
    # Scales are padded.
    return codes, (scales if is_2d else scales.t())[:down, : -(-codes.shape[1] // 128)]


class _TorchProducts(TorchDispatchMode):
    """Show an observer each product of two matrices inside the block."""

    def __init__(self, observer: ProductObserver) -> None:
        super().__init__()
        self._observer = observer

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        factors = FACTORS.get(function.overloadpacket)
        if factors:
            self._observer.torch_product(*args[factors])
        elif function.overloadpacket is _aten._scaled_grouped_mm:
            left, right, left_scales, right_scales = args[:4]
            self._observer.scaled_product((left, left_scales), (right.mT, right_scales))
        return function(*args, **(kwargs or {}))


def operand_kind(te: ModuleType | None, operand: Any) -> str:
    """Return the number format and scaling of an operand, such as "e4m3 tensor-scaled".

    An unquantized tensor has the name of its dtype.
    """
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
