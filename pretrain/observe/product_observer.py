"""Observe the matrix products of linears, with the operands that the kernels receive.

Products of torch are observed below autograd, by a dispatch mode. Products of Transformer Engine
are observed at the one function of its C++ extension that computes GEMMs. Products of cublasLt are
observed in pretrain/precision/searched.py, which calls cublasLt.

Emulated operands and FP8 operands of Transformer Engine are also examined: each value must be a
code of the format times the scale of its block, and each scale must be a scale of the format and
fit the values. A sample of whole blocks is stored in the first forward, dgrad and wgrad of a
linear. `faults` examines all samples together, because examining each sample separately would
launch 80 small kernels per operand. The host waits for the device only when `faults` is called.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from foundation.overrides import overridden
from pretrain.precision.formats.definition import QuantizedPrecision, Role, Scaling
from pretrain.precision.observed import (
    FP8_FORMATS,
    OPERANDS,
    ActiveObserver,
    Scales,
    dtype_name,
    fp8_format,
)
from pretrain.precision.quantizers import E4M3, Grid
from pretrain.precision.quantizers.tensor import FP32_MANTISSA_BITS, round_to_grid
from pretrain.precision.settings import ActivePrecision

# Map torch's operations to the positions of the two factors in their arguments. The first argument
# of addmm is not a factor: the product is added to it, and it may be an FP32 sum.
_aten = torch.ops.aten
FACTORS = {
    **dict.fromkeys((_aten.mm, _aten.bmm, _aten.linear, _aten._grouped_mm), slice(0, 2)),
    **dict.fromkeys((_aten.addmm, _aten.addmm_, _aten.baddbmm), slice(1, 3)),
}

# The largest number of values of an operand that are examined. They are sampled in whole blocks.
SAMPLED_VALUES = 2**15
# The number of consecutive values in a sampled block if the whole tensor has one scale.
PIECE = 128
# Blocks with a scale below this number are not judged, because the product of a code and such a
# scale may be too small for FP32.
SMALLEST_SCALE = 2.0**-100
# Relative tolerance of the code of an emulated value. The value is the code times the scale,
# rounded to FP32. The code is recovered by dividing the value by the scale.
ROUNDING = 2.0**-20
# Mask of the bits of an FP8 code without its sign.
MAGNITUDE = 0x7F


# ── A sample of an operand ────────────────────────────────────────────────────────────────────────


def sample(
    matrix: Tensor, scales: Tensor | None, scaling: Scaling, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Sample blocks of values of `matrix` at random, or return all blocks if there are few.

    matrix: the operand [rows, k], of any dtype and strides. The product sums over the last axis.
    scales: the scales of the blocks, FP32 [rows or rows / block, k / block], or a scalar if the
        tensor has one scale.
    scaling: the shape of the format's blocks.
    generator: draws the blocks.

    Returns the values of n sampled blocks [n, values], their scales FP32 [n], and the index of each
    block's first row int64 [n]. If `scales` is None or its shape does not match the blocks, the
    returned scales are 0. Then every sampled block with a nonzero value counts as bad.
    """
    size = scaling.block or math.gcd(matrix.shape[1], PIECE)
    height = size if scaling.square else 1
    # The blocks as [blocks per column, blocks per row, rows of a block, values of a row].
    blocks = matrix.unflatten(1, (-1, size)).unflatten(0, (-1, height)).transpose(1, 2)
    down, across = blocks.shape[:2]
    most = max(SAMPLED_VALUES // (height * size), 1)
    if down * across > most:
        chosen = torch.randint(down * across, (most,), generator=generator, device=matrix.device)
    else:
        chosen = torch.arange(down * across, device=matrix.device)
    places = (chosen // across, chosen % across)
    if scales is not None and scales.dim() == 0 and scaling.block is None:
        scale = scales.float().repeat(len(chosen))
    elif scales is not None and scales.shape == (down, across):
        scale = scales[places]
    else:
        scale = torch.zeros(len(chosen), device=matrix.device)
    return blocks[places].flatten(1), scale, places[0] * height


def generators(seed: int) -> Callable[[torch.device], torch.Generator]:
    """Return a function that maps a device to a random generator.

    For the same device, the function always returns the same generator. Each generator is seeded
    with `seed`. torch's default generators are not used, because drawing from them would change the
    random numbers of the training.
    """
    return functools.cache(lambda device: torch.Generator(device).manual_seed(seed))


# ── The check of an operand against its format ────────────────────────────────────────────────────


def examine(
    codes: Tensor, scale: Tensor, grid: Grid, scaling: Scaling, largest: Tensor | None = None
) -> Tensor:
    """Check blocks of operands. Return a bool tensor [..., n] that is True for each bad block.

    codes: the values of each block divided by the block's scale, FP32 [..., n, values].
    scale: the scale of each block, FP32 [..., n].
    grid: the number format of the codes.
    scaling: the allowed scales.
    largest: the magnitude of the largest code in the whole operand, FP32 [..., 1]. None if the
        largest code of each block is judged instead.

    A block is bad if one of its codes is not a value of `grid`, if its scale is not a scale of the
    format, or if its scale is too large for its values. Blocks with NaN, with infinities or with
    tiny scales are not judged.
    """
    is_off_grid = (round_to_grid(codes, grid) - codes).abs() > ROUNDING * codes.abs()
    is_foreign = (is_off_grid & codes.isfinite()).any(-1)
    amax = codes.abs().amax(-1)
    is_judged = scale.isfinite() & (scale.abs() >= SMALLEST_SCALE) & amax.isfinite()
    # NVFP4 allows scales of zero if all values of the block are zero.
    is_lost = (scale == 0) & (codes != 0).any(-1)
    is_foreign = (is_foreign & is_judged) | is_lost

    is_unfit = ~_is_scale(scale, scaling) & scale.isfinite()
    if largest is not None:
        amax = largest.expand_as(amax)
        is_judged = is_judged & largest.isfinite()
    # The smallest value that the largest code of a block may have.
    least_amax = torch.full_like(amax, scaling.least * grid.maximum)
    if scaling.kind == "E4M3":
        # Subnormal E4M3 scales are rounded with a larger relative error, so the largest code may be
        # smaller.
        least_amax = torch.where(scale < 2.0**E4M3.min_exponent, 0.75 * least_amax, least_amax)
    is_loose = is_judged & (amax > 0) & (amax < least_amax)
    return is_foreign | is_unfit | is_loose


def _is_scale(scale: Tensor, scaling: Scaling) -> Tensor:
    """Return a bool tensor of the shape of `scale`: True for each scale that the format allows."""
    if scaling.kind == "E4M3":
        return (scale >= 0) & (round_to_grid(scale, E4M3) == scale)
    if scaling.kind == "FP32":
        return scale > 0
    # A power of two has no mantissa bit, except for 2^-127, which is subnormal in FP32.
    bits = scale.view(torch.int32)
    mantissa = bits & ((1 << FP32_MANTISSA_BITS) - 1)
    # The bits of 2^-127.
    smallest = 1 << (FP32_MANTISSA_BITS - 1)
    return (bits > 0) & ((mantissa == 0) | (bits == smallest))


# ── The observed products ─────────────────────────────────────────────────────────────────────────


class ObservedProduct(NamedTuple):
    """A product of a linear.

    gemm: "forward", "dgrad" or "wgrad".
    left, right: the kinds of the operands, such as "e4m3 in blocks of 128" or "bfloat16".
    """

    gemm: str
    left: str
    right: str


class _Call(NamedTuple):
    """The arguments of a call of `watched` (pretrain/precision/observed.py)."""

    # The names of the linears. There are several if a product is fused.
    names: Sequence[str]
    gemm: str
    # The scales of both operands of an emulated product, otherwise None.
    scales: Sequence[Scales] | None
    # True if a library computes the transpose of the product.
    swapped: bool


class _Sample(NamedTuple):
    """A sample of the blocks of an operand, which `ProductObserver.faults` examines."""

    call: _Call
    role: Role
    # The number format of the codes.
    grid: Grid
    # The values of each block [n, values], and the scale of each block, FP32 [n]. The values are
    # FP8 codes, or codes in a wider dtype, or the products of codes and block scales.
    values: Tensor
    scale: Tensor
    # The magnitude of the largest code in the whole operand, a scalar. None if it is not judged.
    largest: Tensor | None


class ProductObserver:
    """Record the products of each linear, and examine their operands.

    `products` maps the name of each linear to its products, in the order of execution. The
    forward product of a recomputed layer appears twice.
    """

    def __init__(
        self,
        active: ActivePrecision,
        seed: int = 0,
        examined: Set[str] | None = None,
        microbatches: int = 1,
    ) -> None:
        """Create an observer that observes nothing until `observing` is entered.

        active: the precision that the products compute in. Operands are examined only if this
            precision is quantized.
        seed: the seed of the random choice of blocks that are examined. It also determines the
            microbatch in which each linear is observed.
        examined: the names of the linears whose operands are examined, or None for all linears.
        microbatches: the number of microbatches in the observed step. The linears are spread over
            the microbatches, and each linear is observed in one microbatch.
        """
        self.products: dict[str, list[ObservedProduct]] = {}
        self._active = active
        self._examined = examined
        self._microbatches = microbatches
        # `seed` plus the number of the present microbatch.
        self._microbatch = seed - 1
        # Map each linear, or the first linear of each fused product, to its number. The linears are
        # numbered in the order of their first products.
        self._numbers: dict[str, int] = {}
        # The calls of `watched` whose `with` blocks are running, the innermost last. The blocks are
        # nested if a layer is recomputed inside the backward of another product.
        self._calls: list[_Call] = []
        self._samples: list[_Sample] = []
        self._generator = generators(seed)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe all products inside `watched` blocks during the caller's `with` statement.

        Products of torch, Transformer Engine and cublasLt are observed.
        """
        extension: Any = sys.modules.get("transformer_engine_torch")
        multiply: Any = getattr(extension, "generic_gemm", None)

        def gemm(
            a: Any, transposes_a: bool, b: Any, transposes_b: bool, *rest: Any, **options: Any
        ) -> Any:
            # cuBLAS stores matrices by columns, so Transformer Engine swaps the two operands.
            self.library_product((b, not transposes_b), (a, bool(transposes_a)))
            return multiply(a, transposes_a, b, transposes_b, *rest, **options)

        with ExitStack() as overrides:
            overrides.enter_context(overridden(ActiveObserver, current=self))
            if extension is not None:
                overrides.enter_context(overridden(extension, generic_gemm=gemm))
            yield

    def next_microbatch(self, *_: Any) -> None:
        """Count a microbatch. The method can be used as a forward pre-hook of the model."""
        self._microbatch += 1

    def observes(self, names: Sequence[str]) -> bool:
        """Return whether the linears `names` are observed in the present microbatch."""
        number = self._numbers.setdefault(names[0], len(self._numbers))
        return (self._microbatch - number) % self._microbatches == 0

    @contextmanager
    def during(
        self,
        names: Sequence[str],
        gemm: str,
        scales: Sequence[Scales] | None = None,
        *,
        swapped: bool = False,
    ) -> Iterator[None]:
        """Return a context manager that observes the products of its `with` block.

        The arguments are the same as for `watched`.

        The returned context manager can also decorate a function. Products of torch are observed
        only during the `with` body, because a dispatch mode around a whole step would prevent
        torch.compile from compiling the step.
        """
        self._calls.append(_Call(names, gemm, scales, swapped))
        try:
            with _TorchProducts(self):
                yield
        finally:
            self._calls.pop()

    def faults(self) -> dict[str, list[str]]:
        """Map the name of each linear with bad operands to texts about the faults.

        Waits for the device.
        """
        # The samples of a group have the same shape, dtype and format.
        groups: dict[Any, list[_Sample]] = defaultdict(list)
        for taken in self._samples:
            key = (taken.call.gemm, taken.role, taken.grid, taken.values.shape, taken.values.dtype)
            groups[key].append(taken)
        faults: dict[str, list[str]] = defaultdict(list)
        for group in groups.values():
            counts = _bad_blocks(
                group, self._active.quantized_precision.scaling(group[0].role)
            ).tolist()
            for taken, bad in zip(group, counts, strict=True):
                for name in taken.call.names if bad else ():
                    faults[name].append(
                        f"{taken.call.gemm} {taken.role}: {bad} of {len(taken.values)} blocks "
                        f"are not {taken.grid.name} codes times a scale that fits them"
                    )
        return dict(faults)

    @torch.no_grad()
    def torch_product(self, left: Tensor, right: Tensor) -> None:
        """Observe a product of torch: left [m, k] times right [k, n] or [experts, k, n].

        The dispatch mode calls this method with the tensors that the kernel receives.
        """
        call = self._calls[-1]
        precision = self._active.precision
        if call.scales is None or not isinstance(precision, QuantizedPrecision):
            self._note(call, dtype_name(left.dtype), dtype_name(right.dtype))
            return
        roles = OPERANDS[call.gemm]
        kinds = [precision.operand_kind(role) for role in roles]
        if not self._note(call, *kinds):
            return
        for role, matrix, (of_blocks, of_tensor) in zip(
            roles, (left, right.mT.flatten(0, -2)), call.scales, strict=True
        ):
            scales = of_blocks if precision.block_scaled else of_tensor
            self._take_sample(call, role, matrix, scales, precision.grid(role))

    @torch.no_grad()
    def scaled_product(self, *factors: tuple[Tensor, Tensor]) -> None:
        """Observe a grouped product of torch in FP8.

        factors: two pairs (codes, scales). The last axis of the codes is the axis that the product
            sums over. There is a scale for each row. All scales of a factor must be equal, because
            the precision has one scale per tensor. If they differ, every block counts as bad.
        """
        call = self._calls[-1]
        grids = dict(FP8_FORMATS.values())
        kinds = [f"{grids[codes.dtype].name.lower()} tensor-scaled" for codes, _ in factors]
        if not self._note(call, *kinds):
            return
        for role, (codes, scales) in zip(OPERANDS[call.gemm], factors, strict=True):
            first = scales.flatten()[0]
            # A scale of 0 is never valid. NaN differs from itself.
            scale = torch.where((scales == first).all(), first, 0.0)
            self._take_sample(call, role, codes.flatten(0, -2), scale, grids[codes.dtype])

    @torch.no_grad()
    def library_product(self, *operands: tuple[Any, bool]) -> None:
        """Observe a GEMM of Transformer Engine or cublasLt.

        operands: two pairs (operand, by_rows). `by_rows` is True if the GEMM reads the operand's
            row-wise data, and False if it reads the column-wise (transposed) data.

        The operands are FP8 codes. Every byte is a valid code, so only the scales can be wrong. The
        scales of MXFP8 and NVFP4 are not examined, because they are stored in a layout that only
        the kernels use.
        """
        if not self._calls:
            return
        call = self._calls[-1]
        if call.swapped:
            operands = operands[::-1]
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
            self._take_sample(call, role, codes.view(dtype), scales, grid)

    # Without this decorator, all operations below would pass through the slow dispatch mode.
    @_disable_current_modes()
    def _take_sample(
        self,
        call: _Call,
        role: Role,
        matrix: Tensor,
        scales: Tensor | None,
        grid: Grid,
    ) -> None:
        """Store a sample of the blocks of an operand for `faults`.

        matrix: The operand [rows, k], in one of three forms:
            * codes, if the dtype is FP8,
            * the products of codes and block scales, if an operand with block scales is emulated,
            * codes in a wider dtype, if an operand with one scale is emulated.
        scales: The scales, as `sample` accepts them.
        grid: The number format of the codes.
        """
        scaling = self._active.quantized_precision.scaling(role)
        is_fp8 = matrix.dtype.itemsize == 1
        # View FP8 codes as bytes, because their largest magnitude is found in the bits below.
        data = matrix.view(torch.uint8) if is_fp8 else matrix
        values, scale, _ = sample(data, scales, scaling, self._generator(matrix.device))
        largest = None
        if scaling.block is None and scaling.least and is_fp8:
            # The magnitudes of FP8 codes are ordered like their bits, so take the maximum of bits.
            bits = (data & MAGNITUDE).amax().reshape(1)
            largest = bits.view(matrix.dtype).float().reshape(())
        elif scaling.block is None and scaling.least:
            largest = torch.linalg.vector_norm(matrix, math.inf).float()
        self._samples.append(_Sample(call, role, grid, values.view(matrix.dtype), scale, largest))

    def _note(self, call: _Call, left: str, right: str) -> bool:
        """Record a product with the kinds of its operands.

        Return True if the caller must also examine the operands. Operands are examined once, and
        not again in the other chunks of the LM head or when a layer is recomputed.
        """
        is_new = call.gemm not in [gemm for gemm, *_ in self.products.get(call.names[0], ())]
        for name in call.names:
            self.products.setdefault(name, []).append(ObservedProduct(call.gemm, left, right))
        is_examined = self._examined is None or not self._examined.isdisjoint(call.names)
        return is_new and is_examined and self._active.precision.quantized


def _bad_blocks(samples: Sequence[_Sample], scaling: Scaling) -> Tensor:
    """Return the number of bad blocks of each sample, int64 [samples].

    samples: samples of the same shape and dtype, in the same format.
    scaling: the blocks and the allowed scales.
    """
    codes = torch.stack([taken.values.float() for taken in samples])
    scale = torch.stack([taken.scale for taken in samples])
    if scaling.block and samples[0].values.dtype.itemsize > 1:
        codes = torch.where(scale[..., None] == 0, codes, codes / scale[..., None])
    judged = [taken.largest for taken in samples if taken.largest is not None]
    largest = torch.stack(judged)[:, None] if judged else None
    return examine(codes, scale, samples[0].grid, scaling, largest).sum(1)


def _tensor_scaled(operand: Any, by_rows: bool) -> tuple[Tensor, Tensor]:
    """Return the codes [rows, k] and the scale, a scalar, of a tensor with one scale.

    operand: a quantized tensor of Transformer Engine.
    by_rows: True for the row-wise codes, False for the codes of the transposed matrix.
    """
    # GPUs whose GEMMs accept both layouts store no transposed copy.
    transposed = None if by_rows or operand._transpose_invalid else operand._transpose
    data = operand._data if transposed is None else transposed
    return data.reshape(-1, data.shape[-1]), operand._scale_inv.reshape(())


def _block_scaled(operand: Any, by_rows: bool) -> tuple[Tensor, Tensor]:
    """Return the codes [rows, k] and the scales of a tensor in blocks of 128, for `sample`.

    operand: a quantized tensor of Transformer Engine.
    by_rows: True for the row-wise codes, False for the codes of the transposed matrix.
    """
    is_2d = operand._is_2D_scaled
    data = operand._rowwise_data if by_rows else operand._columnwise_data
    scales = operand._rowwise_scale_inv if by_rows else operand._columnwise_scale_inv
    codes = data.reshape(-1, data.shape[-1]) if by_rows else data.reshape(data.shape[0], -1)
    down = -(-codes.shape[0] // 128) if is_2d else codes.shape[0]
    # Transformer Engine pads the scales. Return only the scales of existing blocks.
    return codes, (scales if is_2d else scales.t())[:down, : -(-codes.shape[1] // 128)]


class _TorchProducts(TorchDispatchMode):
    """Dispatch mode that passes each matrix product of torch to a ProductObserver."""

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

    For an unquantized tensor, return the name of its dtype.

    te: the module transformer_engine.pytorch, or None if it is not imported.
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
