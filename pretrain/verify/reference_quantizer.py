"""Reference quantizers in NumPy, and the comparison of the training's quantizers with them.

The quantizers of training and the reference quantizers share no code. Training computes codes from
the bits of its operands. A reference quantizer searches for the nearest values in a list of all
values of the format. docs/developers/faults.md lists the faults that the comparison finds.
"""

from __future__ import annotations

import functools
import math
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from pretrain.observe.product_check import Compared, ProductCheck, worst_first
from pretrain.precision.formats.definition import Along, OptionValues, Role, Scaling
from pretrain.precision.settings import ActivePrecision

Array = np.ndarray

# Map the name of each format to its non-negative finite values in ascending order, FP64. The next
# bytes after 0x7E in E4M3 and after 0x7B in E5M2 encode NaN or infinity.
CODES: dict[str, Array] = {
    "E4M3": torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy(),
    "E5M2": torch.arange(0x7C, dtype=torch.uint8).view(torch.float8_e5m2).double().numpy(),
    "E2M1": np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),
}
# Diagonal of the sign matrix of the random Hadamard transform. The signs are Transformer Engine's.
SIGNS = np.array([1 if sign == "+" else -1 for sign in "+++-+------+-+--"])
# Orthogonal 16 x 16 matrix of the random Hadamard transform, before the multiplication by SIGNS.
SYMMETRIC = functools.reduce(np.kron, [np.array([[1, 1], [1, -1]])] * 4) / 4
HADAMARD = torch.from_numpy(SIGNS[:, None] * SYMMETRIC).float()
# Largest number of columns of an operand that are compared, a multiple of the block sizes of all
# formats.
COLUMNS = 1024
# Share of codes that may differ from the reference quantizer's codes. A saturated block changes
# few codes.
TOLERATED_SHARE = 2.0**-11
# The same share after a Hadamard transform, whose summands a GPU adds in another order than the
# reference.
TOLERATED_SHARE_OF_TRANSFORMED = 2.0**-8


def compare_codes(check: ProductCheck, active: ActivePrecision) -> list[Compared]:
    """Compare the codes of some operands with the codes of the reference quantizers.

    For each role and each number of features, one operand is quantized along both axes. Return the
    comparisons, the worst one first. Draws random numbers.

    Args:
        check: Check that has sampled the operands of a microbatch.
        active: Precision of the microbatch.
    """
    # Map (role, number of features) to the name of the linear and a sample of its operand.
    operands: dict[tuple[Role, int], tuple[str, Any]] = {}
    for (name, role), (samples, *_) in check.samples.items():
        sample = samples.get("features")
        # An operand of zeros would show no fault.
        if sample and sample.values.any():
            operands.setdefault((role, sample.values.shape[1]), (name, sample))
    compared = []
    for (role, _), (name, sample) in operands.items():
        for along in get_args(Along):
            share = differing_share(active, role, along, sample.values[:, :COLUMNS], sample.scale)
            tolerated = TOLERATED_SHARE
            if is_transformed(active.settings, role, along):
                tolerated = TOLERATED_SHARE_OF_TRANSFORMED
            compared.append(Compared.of(f"{name} {role} along {along}", share, share / tolerated))
    return worst_first(compared)


def differing_share(
    active: ActivePrecision, role: Role, along: Along, x: Tensor, scale: Tensor | None
) -> float:
    """Return the share of values that training's quantizer and the reference quantize differently.

    Both quantizers use the same random numbers. Return NaN if a value of `x` is not finite.

    Args:
        active: Precision whose quantizer is compared.
        role: Role of the operand in the product.
        along: Axis of the product's sum.
        x: Operand [rows, features].
        scale: Scale of delayed scaling, or None in other precisions.
    """
    if not x.isfinite().all():
        return math.nan
    precision = active.quantized_precision
    quantize = precision.quantizer(role, along)
    amax = None  # the quantizer computes the amax of `x`
    torch.manual_seed(0)
    dequantized = quantize(x, scale, amax).dequantize().float().cpu()
    # The quantizer and the reference return the axis of the product's sum last. With "rows", their
    # results are [features, rows].
    summed_last = x if along == "features" else x.t()
    uniform = None
    # The options `disable_...` are None, and not False, in precisions that do not have the option.
    if active.settings.disable_stochastic_rounding is False and role == "grad_output":
        torch.manual_seed(0)
        uniform = torch.rand_like(summed_last, dtype=torch.float32).cpu().numpy()
    if is_transformed(active.settings, role, along):
        summed_last = _hadamard(summed_last)
    values = summed_last.float().cpu().numpy()
    reference = quantize_dequantize(
        values,
        precision.scaling(role),
        precision.grid(role).name,
        scale=None if scale is None else scale.item(),
        uniform=uniform,
    )
    return (dequantized.numpy() != reference).mean().item()


def is_transformed(settings: OptionValues, role: Role, along: Along) -> bool:
    """Return True if an operand has a Hadamard transform before it is quantized along an axis."""
    return settings.disable_rht is False and role != "weight" and along == "rows"


def quantize_dequantize(
    values: Array, scaling: Scaling, format_name: str, *, scale: float | None, uniform: Array | None
) -> Array:
    """Quantize values with the reference quantizer, and return the dequantized values, FP32.

    Args:
        values: Operand [rows, k], FP32. The product sums along the last axis. The sizes must be
            multiples of the block.
        scaling: The kind of scale, and the block of values that share a scale.
        format_name: Key of CODES.
        scale: Scale of delayed scaling, or None in other precisions.
        uniform: Random numbers in [0, 1) of the shape of `values`, for stochastic rounding. With
            None, values are rounded to nearest.
    """
    codes = CODES[format_name]
    largest = codes[-1]
    amax = _block_amax(values, scaling)
    tensor_decode = np.float32(1)
    if scaling.kind == "E4M3":
        encode, decode, tensor_decode = _nvfp4_scales(amax)
    elif scaling.kind == "power of two":
        # The decoding scale is the smallest power of two for which the block's largest value
        # divided by the scale does not exceed the format's maximum.
        fraction, exponent = np.frexp(amax.astype(np.float64) / largest)
        decode = np.ldexp(np.float32(1), np.clip(exponent - (fraction == 0.5), -127, 127))
        encode = _reciprocal(decode)
    else:
        # If all values of a block are zero, its encoding scale is 1.
        encode = np.float32(largest) / np.where(amax > 0, amax, np.float32(largest))
        if scale is not None:
            encode = np.asarray(scale, np.float32)
        decode = _reciprocal(encode)
    # Values in a block whose decoding scale is zero may overflow here. Decoding makes them zero.
    with np.errstate(over="ignore"):
        scaled = values * encode
    rounded = _round(scaled, codes, uniform)
    return (rounded * decode).astype(np.float32) * tensor_decode


def _nvfp4_scales(amax: Array) -> tuple[Array, Array, np.float32]:
    """Return the scales of NVFP4: of each block for encoding and decoding, and of the tensor.

    The decoding scales of blocks are E4M3 values. The scale of the tensor decodes the product of
    the largest code and the largest E4M3 value to the largest magnitude in the tensor. The order of
    operations is the same as in Transformer Engine's NVFP4QuantizerRef, because another order would
    give other codes.

    amax: largest magnitude in the block of each value.
    """
    largest = CODES["E2M1"][-1]
    maximum = largest * CODES["E4M3"][-1]
    tensor_amax = amax.max().astype(np.float64)
    # If all values are zero, the encoding scale is 1.
    tensor_encode = np.float32(maximum / tensor_amax if tensor_amax > 0 else 1)
    exact_scale = amax * (tensor_encode * np.float32(1 / largest))
    decode = _round(exact_scale, CODES["E4M3"], None).astype(np.float32)
    encode = _reciprocal(decode * _reciprocal(tensor_encode))
    return encode, decode, np.float32(tensor_amax / maximum)


def _round(scaled: Array, codes: Array, uniform: Array | None) -> Array:
    """Round the values in `scaled` to values in `codes`.

    With `uniform`, values are rounded stochastically. Otherwise they are rounded to nearest, with
    ties to the even code.
    """
    magnitude = np.minimum(np.abs(scaled.astype(np.float64)), codes[-1])
    # The magnitude is above the code with the index `below`, up to and including the next code.
    below = np.searchsorted(codes[1:], magnitude)
    low = codes[below]
    high = codes[below + 1]
    part = (magnitude - low) / (high - low)
    if uniform is None:
        # A tie rounds up if the code `below` is odd.
        goes_up = (part > 0.5) | ((part == 0.5) & (below % 2 == 1))
    else:
        goes_up = uniform < part
    return np.copysign(np.where(goes_up, high, low), scaled)


def _block_amax(values: Array, scaling: Scaling) -> Array:
    """Return the largest magnitude of the values that share a scale, in the shape of `values`.

    Without blocks, all values share a scale.
    """
    rows, columns = values.shape
    height, width = rows, columns
    if scaling.block:
        height = scaling.block if scaling.square else 1
        width = scaling.block
    blocks = np.abs(values).reshape(-1, height, columns // width, width)
    amax = blocks.max((1, 3), keepdims=True)
    return np.broadcast_to(amax, blocks.shape).reshape(values.shape)


def _reciprocal(scale: Array | np.floating) -> Array:
    """Return 1 / scale rounded to FP32. Return FP32's largest number for a scale of zero."""
    smallest = 1 / np.float64(np.finfo(np.float32).max)
    return (1 / np.maximum(scale, smallest)).astype(np.float32)


def _hadamard(x: Tensor) -> Tensor:
    """Multiply each block of 16 values of a row by the orthogonal matrix HADAMARD.

    Products are summed in FP32, and the sums are rounded to the dtype of `x`.
    """
    blocks = x.float().cpu().unflatten(1, (-1, 16))
    return (blocks @ HADAMARD).flatten(1).to(x.dtype)
