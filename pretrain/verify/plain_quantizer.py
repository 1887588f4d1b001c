"""Every format's quantizer once more, as plainly as its definition reads: to hold the products of a run against.

It shares no code with what runs. A format is the table of its values, decoded code by code; rounding is a search in that table;
blocks are what a reshape gives. It is slow, and parity gives it a few rows of each operand only.

The layouts are those of docs/precision.md ("Choosing", "How a linear computes"): blocks of so many values along the axis of the
sum, squares for an operand whose one quantization serves both products, and else one scale for the tensor.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.settings import ActivePrecision

# Bits of the mantissa, the exponent's bias, and how many codes without a sign are finite numbers.
_FORMATS = {"E4M3": (3, 7, 127), "E5M2": (2, 15, 124), "E2M1": (1, 1, 8)}
# The signs of Transformer Engine's random Hadamard transform.
_SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]


@functools.cache
def values_of(name: str) -> tuple[float, ...]:
    """The numbers of a format that are not negative, ascending; the place of each is its code."""
    mantissa_bits, bias, codes = _FORMATS[name]
    found = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        found.append(math.ldexp(fraction, 1 - bias) if exponent == 0 else math.ldexp(1 + fraction, exponent - bias))
    return tuple(found)


@functools.cache
def _table(name: str, device: torch.device) -> Tensor:
    return torch.tensor(values_of(name), device=device)


def nearest(x: Tensor, name: str) -> Tensor:
    """FP32 x to the nearest value of the format; halfway to the even code; beyond the largest to that."""
    table, magnitude = _table(name, x.device), x.abs().contiguous()
    between = (table[1:] + table[:-1]) / 2
    code = torch.bucketize(magnitude, between)
    halfway = magnitude == between[code.clamp(max=len(between) - 1)]
    return table[code + (halfway & (code % 2 == 1))] * x.sign()


def by_chance(x: Tensor, name: str, generator: torch.Generator) -> Tensor:
    """FP32 x to one of the two values around it, in the mean x."""
    table = _table(name, x.device)
    magnitude = x.abs().clamp(max=values_of(name)[-1]).contiguous()
    below = (torch.bucketize(magnitude, table, right=True) - 1).clamp(0, len(table) - 2)
    low, high = table[below], table[below + 1]
    draw = torch.rand(x.shape, device=x.device, generator=generator)
    return torch.where(draw * (high - low) < magnitude - low, high, low) * x.sign()


def transformed(x: Tensor) -> Tensor:
    """x [rows, n], BF16, each 16 values of a row times signs and Sylvester's matrix of order 16, over 4; rounded to BF16."""
    matrix = torch.ones(1, 1)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    matrix = torch.tensor(_SIGNS)[:, None] * matrix / 4
    return (x.float().unflatten(-1, (-1, 16)) @ matrix.to(x.device)).flatten(-2).to(x.dtype)


@dataclass(frozen=True)
class PlainQuantizer:
    """What `active` makes of the operand `role` of a product that sums `along` its features or rows."""

    active: ActivePrecision
    role: Role
    along: Along

    @property
    def stochastic(self) -> bool:
        return self.role == "grad_output" and self.active.settings.disable_stochastic_rounding is False

    @property
    def transforms(self) -> bool:
        return self.along == "rows" and self.role != "weight" and self.active.settings.disable_rht is False

    @property
    def in_squares(self) -> bool:
        precision = self.active.precision
        return precision.block_scaled and precision.serves_both(self.active.settings, self.role)

    def laid_out(self, x: Tensor) -> Tensor:
        """x [rows, features] with the axis of the sum last, transformed where the product takes it so."""
        x = x.t() if self.along == "rows" else x
        return transformed(x.contiguous()) if self.transforms else x

    def __call__(self, x: Tensor, amax: Tensor, scale: Tensor | None, generator: torch.Generator) -> Tensor:
        """Rows of what `laid_out` gave (whole squares of them where these have a scale) -> what the product takes them for, FP32.

        `amax`: of the whole tensor, laid out. `scale`: of delayed scaling, what values are multiplied by.
        """
        precision, settings = self.active.precision, self.active.settings
        name, size = precision.grid(settings, self.role).name, precision.scaling(settings, self.role).block
        largest, wide = values_of(name)[-1], x.float()
        if not precision.block_scaled:
            if scale is None:
                scale = largest / torch.where(amax > 0, amax.float(), largest)
                scale = _floor_to_power_of_two(scale) if settings.use_power_2_scales else scale
            return self._rounded(wide * scale, name, generator) / scale
        rows = size if self.in_squares else 1
        blocks = wide.unflatten(-1, (-1, size)).unflatten(0, (-1, rows))  # [row blocks, rows, blocks, size]
        block_amax = blocks.abs().amax(dim=(1, 3), keepdim=True)
        if precision.tensor_scaled:  # a block's scale is itself a number of eight bits, under one of the tensor
            over = values_of("E4M3")[-1] * largest / amax.float().clamp(min=1e-30)
            inverse = nearest((block_amax / largest * over).clamp(max=values_of("E4M3")[-1]), "E4M3") / over
        elif settings.scale_rounding is not None:  # a power of two
            if settings.scale_rounding == "floor":  # amax down to one, over the largest value down to one
                inverse = _floor_to_power_of_two(block_amax) / 2.0 ** math.floor(math.log2(largest))
            else:  # the least that brings amax into the format
                inverse = 1 / _floor_to_power_of_two(largest / block_amax)
        else:
            factor = largest / block_amax
            factor = factor if settings.use_f32_scales else _floor_to_power_of_two(factor)
            inverse = 1 / factor
        empty = (inverse == 0) | (block_amax == 0)
        inverse = inverse.masked_fill(empty, 1.0)
        values = (self._rounded(blocks / inverse, name, generator) * inverse).masked_fill(empty, 0.0)
        return values.flatten(0, 1).flatten(1)

    def _rounded(self, x: Tensor, name: str, generator: torch.Generator) -> Tensor:
        return by_chance(x, name, generator) if self.stochastic else nearest(x, name)


def _floor_to_power_of_two(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x.contiguous())
    return torch.ldexp(torch.full_like(mantissa, 0.5), exponent)
