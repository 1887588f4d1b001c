"""Reference quantizers in NumPy, and the comparison of the formats' own quantizers with them.

The two share no code. Training computes codes from the bits of its operands. The references search
a list of all values of a format. docs/verification.md says which faults the comparison finds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from foundation.overrides import overridden
from pretrain.observe.product_check import Compared
from pretrain.precision.delayed_state import of_operand
from pretrain.precision.formats.definition import Along, OptionValues, Role, Scaling
from pretrain.precision.product import PrecisionContext
from pretrain.precision.settings import ActivePrecision

Array = np.ndarray

# All non-negative values of a format in order, FP64, by its name. The last FP8 bytes are NaN, and
# infinity under E5M2.
CODES: dict[str, Array] = {
    "E4M3": torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy(),
    "E5M2": torch.arange(0x7C, dtype=torch.uint8).view(torch.float8_e5m2).double().numpy(),
    "E2M1": np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),
}
NVFP4_MAXIMUM = 6.0 * 448.0  # the largest code times the largest block scale
# The diagonal of the random Hadamard transform: Transformer Engine's signs.
SIGNS = np.array([1 if sign == "+" else -1 for sign in "+++-+------+-+--"])
# The orthogonal matrix of the transform.
HADAMARD = SIGNS[:, None] * functools.reduce(np.kron, [np.array([[1, 1], [1, -1]])] * 4) / 4
# Rows and columns of an operand that are compared, at most. Both are multiples of every block.
ROWS = 128
COLUMNS = 1024
# Share of codes that may differ, because a GPU sums the Hadamard transform in another order.
FOREIGN = 2.0**-8


@contextmanager
def watching_quantizers(
    context: PrecisionContext, active: ActivePrecision
) -> Iterator[list[Compared]]:
    """Compare the codes of some operands of one microbatch with the reference's.

    One operand of each role and width is compared. The list is filled when the block ends, the
    worst comparison first. Draws random numbers.
    """
    operands: dict[tuple[Role, int], tuple[str, Tensor]] = {}
    before = {name: tensor.clone() for name, tensor in context.state().items()}
    compared: list[Compared] = []

    def see_operand(name: str, role: Role, tensor: Tensor) -> None:
        part = tensor[-ROWS:, :COLUMNS]
        if (role, tensor.shape[1]) not in operands and part.any():
            operands[role, tensor.shape[1]] = name, part.clone()

    with overridden(context, observers=[*context.observers, see_operand]):
        yield compared
    for (role, _), (name, operand) in operands.items():
        # Only delayed scaling has a state.
        scale = of_operand(before, name, role, "scale") if before else None
        for along in get_args(Along):
            share = foreign_codes(active, role, along, operand, scale)
            compared.append(Compared.of(f"{name} {role} along {along}", share, share / FOREIGN))
    compared.sort(key=lambda comparison: comparison.excess, reverse=True)


def foreign_codes(
    active: ActivePrecision, role: Role, along: Along, x: Tensor, scale: Tensor | None
) -> float:
    """Return the share of values where the precision's quantizer and the reference differ.

    Return NaN if x is not finite. Both quantizers get the same random numbers.

    x: operand [rows, features].
    scale: of delayed scaling.
    """
    precision = active.quantized_precision
    settings: OptionValues = active.settings
    if not x.isfinite().all():
        return math.nan
    torch.manual_seed(0)
    codes = precision.quantizer(settings, role, along)(x, scale, None).dequantize().cpu()
    summed_last = x if along == "features" else x.t()
    uniform = None
    if settings.disable_stochastic_rounding is False and role == "grad_output":
        torch.manual_seed(0)
        uniform = torch.rand_like(summed_last, dtype=torch.float32)
    reference = quantize_dequantize(
        summed_last,
        precision.scaling(role),
        precision.grid(settings, role).name,
        scale=None if scale is None else scale.item(),
        uniform=uniform,
        transform=settings.disable_rht is False and role != "weight" and along == "rows",
    )
    return (codes != reference).float().mean().item()


def quantize_dequantize(
    x: Tensor,
    scaling: Scaling,
    format_name: str,
    *,
    scale: float | None,
    uniform: Tensor | None,
    transform: bool,
) -> Tensor:
    """Return the values that the codes of `x` stand for, FP32 on the CPU.

    x: operand [rows, k] with the axis of the product's sum last. It holds whole blocks.
    scaling: which values share a scale, and the kind of scale.
    format_name: key of CODES.
    scale: scale of delayed scaling, or None.
    uniform: random numbers in [0, 1) of x's shape for stochastic rounding. None rounds to nearest.
    transform: multiply each 16 values by the Hadamard matrix first.
    """
    values = (_hadamard(x) if transform else x).float().cpu().numpy()
    codes = CODES[format_name]
    amax = np.abs(values).max().astype(np.float64)
    tensor_decode = np.float32(1)
    if scaling.kind == "E4M3":
        tensor_decode = np.float32(amax / NVFP4_MAXIMUM)
        encode, decode = _block_scales_of_nvfp4(_block_amax(values, scaling), amax, codes[-1])
    elif scaling.kind == "power of two":
        # The smallest power of two that brings a block's largest value within the format.
        fraction, exponent = np.frexp(_block_amax(values, scaling).astype(np.float64) / codes[-1])
        decode = np.ldexp(np.float32(1), np.clip(exponent - (fraction == 0.5), -127, 127))
        encode = _reciprocal(decode)
    else:
        encode = np.asarray(codes[-1] / amax if scale is None else scale, np.float32)
        decode = _reciprocal(encode)
    with np.errstate(over="ignore"):  # in blocks whose scale is zero, which make every code zero
        scaled = values * encode
    rounded = _round(scaled, codes, uniform)
    return torch.from_numpy((rounded * decode).astype(np.float32) * tensor_decode)


def _round(scaled: Array, codes: Array, uniform: Tensor | None) -> Array:
    """Round to `codes`: to nearest with ties to the even code, or stochastically by `uniform`."""
    magnitude = np.minimum(np.abs(scaled.astype(np.float64)), codes[-1])
    above = np.searchsorted(codes, magnitude)
    below = np.maximum(above - 1, 0)
    gap = np.where(above > below, codes[above] - codes[below], 1.0)
    part = (magnitude - codes[below]) / gap
    goes_up = (part > 0.5) | ((part == 0.5) & (above % 2 == 0))
    if uniform is not None:
        goes_up = uniform.cpu().numpy() < part
    return np.copysign(np.where(goes_up, codes[above], codes[below]), scaled)


def _block_amax(values: Array, scaling: Scaling) -> Array:
    """Return for each value the largest magnitude of its block."""
    size = scaling.block or values.shape[1]
    height = size if scaling.square else 1
    blocks = np.abs(values).reshape(len(values) // height, height, -1, size)
    return np.broadcast_to(blocks.max((1, 3), keepdims=True), blocks.shape).reshape(values.shape)


def _block_scales_of_nvfp4(block_amax: Array, amax: float, maximum: float) -> tuple[Array, Array]:
    """Return the scales that encode and decode each value of a tensor with this `amax`.

    The decoding ones are E4M3 values. The order of operations is that of Transformer Engine's
    NVFP4QuantizerRef: formulas that are equal in algebra pick other codes.
    """
    tensor_encode = np.float32(NVFP4_MAXIMUM / amax)
    exact_scale = block_amax * (tensor_encode * np.float32(1 / maximum))
    block_scale = _round(exact_scale, CODES["E4M3"], None).astype(np.float32)
    return _reciprocal(block_scale * _reciprocal(tensor_encode)), block_scale


def _reciprocal(scale: Array | np.floating) -> Array:
    """Return 1 / scale rounded to FP32, and FP32's largest number for a scale of zero."""
    largest = np.float64(np.finfo(np.float32).max)
    return (1 / np.maximum(scale, 1 / largest)).astype(np.float32)


def _hadamard(x: Tensor) -> Tensor:
    """Multiply each 16 values of a row by the orthogonal matrix.

    Products are summed in FP32 and rounded to the dtype of x.
    """
    blocks = x.float().cpu().unflatten(1, (-1, 16))
    return (blocks @ torch.from_numpy(HADAMARD).float()).flatten(1).to(x.dtype)
