"""The registry of compute precisions: one entry a recipe, which says all that the rest of the program asks about it.

A recipe says how the matrix products of the model run. Weights are another matter (`weights:` in the recipe file): FP32 weights
under `bf16` are cast to BF16 working copies at each use, BF16 weights are used as they are. The quantized recipes work on top of
that: their products take BF16 operands and round them further.

To add a recipe is to add an entry here, its arithmetic under `quantizers/`, and a file under `accelerate_configs/`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from foundation.errors import InputError


@dataclass(frozen=True)
class Option:
    """A key of `fp8_config` that a recipe takes: what it is when nobody sets it, and, if not every value will do, which do."""

    default: Any
    allowed: tuple[Any, ...] | None = None  # None: whatever the key may hold


@dataclass(frozen=True)
class Hardware:
    """The GPUs whose tensor cores multiply in a recipe's format, by CUDA compute capability."""

    capability: tuple[int, int]  # the least
    examples: str
    below: tuple[int, int] | None = None  # capabilities from here on are not supported by the kernels yet
    cuda: tuple[int, int] | None = None  # the least CUDA version that torch must be built for

    def lacking(self, capability: tuple[int, int] | None, cuda: tuple[int, int] | None) -> str | None:
        """What a device of `capability` (None: no GPU), driven by `cuda`, lacks; None if it has all it needs."""
        if capability is None or capability < self.capability or (self.below and capability >= self.below):
            below = f" and below {_dotted(self.below)}" if self.below else ""
            return f"a GPU of compute capability {_dotted(self.capability)} or higher{below} ({self.examples})"
        if self.cuda and (cuda is None or cuda < self.cuda):
            return f"CUDA {_dotted(self.cuda)} or newer, and this torch is built for {_dotted(cuda) if cuda else 'none'}"
        return None


@dataclass(frozen=True)
class Tolerance:
    """How far step 0 of a healthy run may be from a plain FP32 path: what `parity: true` holds it against."""

    loss: float  # difference of the mean loss, in nats
    gradient_norm: float  # relative difference of the norm over all parameters
    cosine: float  # the least, over parameters, between the two gradients


@dataclass(frozen=True)
class Precision:
    """One way to compute.

    `compute_dtype` names the torch dtype of activations and, but for the quantized recipes, of products; `peak` the column of
    the device's peak table that its matrix products are held against. `multiple_of`: both features of a linear and the number of
    tokens must be multiples of it. `options`: the keys of `fp8_config` that it takes, beside those that every quantized recipe
    does.
    """

    name: str
    compute_dtype: str
    peak: str
    description: str
    tolerance: Tolerance
    multiple_of: int = 1
    options: Mapping[str, Option] = field(default_factory=dict, hash=False)
    hardware: Hardware | None = None  # for its kernels; None: any device computes it, and nothing is quantized

    @property
    def quantized(self) -> bool:
        return self.hardware is not None

    def takes(self, key: str, value: Any) -> bool:
        """Whether `value` may be set for the option `key` of `fp8_config`."""
        option = self.options.get(key)
        return option is not None and (option.allowed is None or value in option.allowed)

    def describe_options(self) -> str:
        """What it takes, to end a message with: "`block` takes fp8_format (E4M3), use_f32_scales"."""
        texts = [f"{key} ({' or '.join(option.allowed)})" if option.allowed else key for key, option in self.options.items()]
        return f"`{self.name}` takes {', '.join(texts) or 'no such option'}"


_FP8 = Hardware((8, 9), "L40S, H100, H200, B200")
# Measured at the start of 28 layers from scratch, where rounding adds up most (benchmarks/results/h200_parity_*.json): FP8 is at
# worst 0.022 nats off, 4 % of the norm and at a cosine of 0.86; NVFP4 0.028, 13 % and 0.13. What is broken is far beyond.
_FP8_TOLERANCE = Tolerance(loss=0.05, gradient_norm=0.1, cosine=0.75)
# Scales from the past cut what is larger now: 18 % of the norm at the start, with the history of one pack.
_DELAYED_TOLERANCE = Tolerance(loss=0.05, gradient_norm=0.3, cosine=0.75)
_HYBRID_OR_E4M3 = ("HYBRID", "E4M3")

# Defaults are Transformer Engine's own, so that a recipe's name means the same here as there.
PRECISIONS = {
    recipe.name: recipe
    for recipe in (
        Precision(
            "fp32",
            "float32",
            "fp32",
            "FP32 products; the reference every other recipe is compared with",
            Tolerance(loss=1e-4, gradient_norm=1e-3, cosine=0.9999),
        ),
        Precision(
            "bf16",
            "bfloat16",
            "bf16",
            "BF16 products with FP32 accumulation",
            Tolerance(loss=0.01, gradient_norm=0.02, cosine=0.99),
        ),
        Precision(
            "delayed",
            "bfloat16",
            "fp8",
            "FP8 products; a scale a tensor, from the largest values of past microbatches",
            _DELAYED_TOLERANCE,
            multiple_of=16,
            options={
                "fp8_format": Option("HYBRID", _HYBRID_OR_E4M3),
                "margin": Option(0),
                "amax_history_len": Option(1024),
                "amax_compute_algo": Option("max"),
                "fast_accumulation": Option(True),
            },
            hardware=_FP8,
        ),
        Precision(
            "current",
            "bfloat16",
            "fp8",
            "FP8 products; a scale a tensor, from its own largest value",
            _FP8_TOLERANCE,
            multiple_of=16,
            options={
                "fp8_format": Option("HYBRID", _HYBRID_OR_E4M3),
                "use_power_2_scales": Option(False),
                "fast_accumulation": Option(True),
            },
            hardware=_FP8,
        ),
        Precision(
            "block",
            "bfloat16",
            "fp8",
            "FP8 E4M3 products; a scale for 1x128 values of activations and gradients, for 128x128 of weights",
            _FP8_TOLERANCE,
            multiple_of=128,
            options={"fp8_format": Option("E4M3", ("E4M3",)), "use_f32_scales": Option(False)},
            hardware=Hardware((9, 0), "H100, H200, B200", cuda=(12, 9)),
        ),
        Precision(
            "mxfp8",
            "bfloat16",
            "fp8",
            "FP8 products; a power-of-two scale for every 32 values (OCP Microscaling)",
            _FP8_TOLERANCE,
            multiple_of=32,
            options={
                "fp8_format": Option("E4M3", _HYBRID_OR_E4M3),
                "enable_2d_quantization": Option(False),
                "scale_rounding": Option("rceil"),
            },
            hardware=Hardware((10, 0), "B200, GB200", below=(12, 0)),
        ),
        Precision(
            "nvfp4",
            "bfloat16",
            "fp4",
            "FP4 products; an E4M3 scale for every 16 values under a scale a tensor",
            Tolerance(loss=0.2, gradient_norm=0.3, cosine=0.05),
            multiple_of=16,
            options={
                "disable_rht": Option(False),
                "disable_stochastic_rounding": Option(False),
                "disable_2d_quantization": Option(False),
            },
            hardware=Hardware((10, 0), "B200, GB200"),
        ),
    )
}

# `weights:` of a recipe file, and the torch dtype that parameters are kept in.
WEIGHT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "bf16_exact": "bfloat16"}


def find(name: str, origin: str) -> Precision:
    """The recipe called `name`; InputError that names `origin` and the nearest known recipe."""
    if name in PRECISIONS:
        return PRECISIONS[name]
    raise InputError(f"{origin}: {unknown(name)}")


def unknown(name: str) -> str:
    """What to say of a `name` that is no recipe's."""
    near = difflib.get_close_matches(name, PRECISIONS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown precision {name!r}; {hint}known: {', '.join(PRECISIONS)}"


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
