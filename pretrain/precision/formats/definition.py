"""What a precision is: everything that the rest of the program asks about one, with the answers that most of them share.

Each precision is one file beside this one, which ends with its object; `settings` lists them. Nothing here imports torch
before a quantizer is needed. docs/precision.md ("How a linear computes") says which operand is quantized along which axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pretrain.precision.quantizers import E4M3, E5M2, Grid, Quantized

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["input", "weight", "grad_output"]  # of a tensor that a product quantizes
# The axis of a product's sum, seen from one operand [rows, features]: `rows` are tokens, or the out_features of a weight.
Along = Literal["features", "rows"]

# The resolved settings of a precision: an attribute for each key of `fp8_config`, None for options that it does not take.
OptionValues = Any

# (x [rows, features], scale of delayed scaling or None, amax of x if known or None) -> codes whose last dimension is the sum's.
Quantize = Callable[["Tensor", "Tensor | None", "Tensor | None"], Quantized]


class Given(NamedTuple):
    """What a format's quantizer is given beside x."""

    grid: Grid  # of the codes
    square: bool  # blocks are squares
    scale: Tensor | None  # of delayed scaling
    amax: Tensor | None  # of x, where it is known
    # random numbers of x's shape to round by, FP32 in [0, 1); None: to nearest
    uniform: Tensor | None


@dataclass(frozen=True)
class Scaling:
    """Which values of an operand share a scale, and which scales are allowed; the audit compares operands with this.

    `least`: the share of the format's maximum that the largest code reaches under a scale that fits. A scale rounded to a power
    of two can halve it; a scale from the past promises nothing."""

    kind: Literal["FP32", "power of two", "E4M3"]
    least: float
    # values along the axis of the sum that share a scale; None: the whole tensor has one
    block: int | None = None
    square: bool = False  # as many rows share it too

    def __str__(self) -> str:
        return f"in blocks of {self.block}" if self.block else "tensor-scaled"


PLAIN_FORWARD = "_bf16_forward"  # what a phase with `forward: bf16` adds to a precision's name
HOPPER = (9, 0)
BLACKWELL = (10, 0)  # the compute capability from which on FP8 products read operands as they lie


@dataclass(frozen=True)
class Hardware:
    """The GPUs whose tensor cores multiply in a format, by CUDA compute capability."""

    # the least; None: no GPU is supported, and `examples` says why
    capability: tuple[int, int] | None
    examples: str
    # capabilities from here on are not supported by the kernels yet
    below: tuple[int, int] | None = None

    def missing(self, capability: tuple[int, int] | None) -> str | None:
        """What a device of `capability` (None: no GPU) would need; None if it has all. What Transformer Engine needs beside it,
        such as a CUDA version, it says itself."""
        if self.capability is None:
            return f"emulation, because {self.examples}"
        if (
            capability is None
            or capability < self.capability
            or (self.below and capability >= self.below)
        ):
            least, end = (
                ".".join(map(str, version or ())) for version in (self.capability, self.below)
            )
            return f"a GPU of compute capability {least} or higher{end and f' and below {end}'} ({self.examples})"
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class Precision:
    """One way to compute; this class itself for those that quantize nothing."""

    quantized: ClassVar[bool] = False

    name: str
    description: str
    # of activations and, where nothing is quantized, of products
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    peak: str  # the column of the device's peak table (pretrain.metrics.peaks) for its products
    # what both features of a linear and the number of tokens must be multiples of
    multiple_of: int = 1
    # forward products take operands as they are: in a phase with `forward: bf16`
    plain_forward: bool = False
    # of `fp8_config`, those that it takes: with their defaults
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def use(self) -> str:
        """Its name in a recipe, which a phase with `forward: bf16` shares with one without."""
        return self.name.removesuffix(PLAIN_FORWARD)

    @property
    def number_bytes(self) -> int:
        """The bytes of a number in `compute_dtype`."""
        return {"float32": 4, "bfloat16": 2}[self.compute_dtype]

    def layouts_on(self, capability: tuple[int, int] | None) -> int:
        """How many layouts of a quantized operand that two products read a device of this compute capability holds."""
        return 0


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedPrecision(Precision):
    """A precision whose products take quantized operands. `settings` are resolved for it everywhere."""

    quantized: ClassVar[bool] = True

    hardware: Hardware
    scales: Scaling
    square_weights: bool = False  # a weight's blocks are squares, which serve both of its products
    # x [rows, features] to codes whose blocks lie along its features
    quantize: Callable[[Tensor, Given], Quantized]
    codes: Grid = E4M3  # but for gradients under `fp8_format: HYBRID`
    keeps_history: bool = False  # scales come from earlier steps, and a checkpoint holds them
    # the class of transformer_engine.common.recipe that takes its options; None: emulated only
    te_recipe: str | None = None
    # Transformer Engine's function that says whether a device has it
    te_available: str | None = None
    # of a value with its share of the scales, in one layout of the two that a step's products read
    operand_bytes: float = 1.0
    weight_bytes: float | None = None  # the same of a weight; None: as any other operand
    # the share of the decoder layers, those at the model's end, that it leaves in BF16 by default
    keeps_last: float = 0.0
    # the share of an operand's values that become zero from which on its scales do not fit
    underflow_limit: float = 0.05

    @property
    def block_scaled(self) -> bool:
        return self.scales.block is not None

    @property
    def tensor_scaled(self) -> bool:
        """Whether there is a scale for the whole tensor, by itself or above those of the blocks."""
        return self.scales.kind != "power of two"

    def grid(self, settings: OptionValues, role: Role) -> Grid:
        """The number format of an operand's codes. HYBRID gives gradients range in place of precision."""
        return E5M2 if role == "grad_output" and settings.fp8_format == "HYBRID" else self.codes

    def scaling(self, role: Role) -> Scaling:
        """Which values of an operand share a scale in each of its products, and what scales there are."""
        return replace(self.scales, square=self.square_weights and role == "weight")

    def serves_both(self, role: Role) -> bool:
        """Whether the codes of one quantization enter both products of an operand."""
        return not self.block_scaled or self.scaling(role).square

    def fuses_head_on(self, capability: tuple[int, int] | None) -> bool:
        """Whether the softmax can write its gradient as the head's operand (pretrain.model.loss.fp8_head) on a device of this
        compute capability (None: Hopper's)."""
        return not (self.block_scaled or self.plain_forward) and (
            capability is None or capability < BLACKWELL
        )

    def no_groups_on(
        self, capability: tuple[int, int] | None, settings: OptionValues
    ) -> str | None:
        """Why a mixture's experts stay unquantized on a device of this compute capability (None: Hopper's); None: they do not.
        torch's grouped product in FP8 takes a scale a row, and E4M3 alone."""
        if self.block_scaled or capability not in (None, HOPPER):
            return f"no grouped product for experts in {self.name} on this device"
        if settings.fp8_format == "HYBRID":
            return "the grouped product for experts takes no E5M2: `fp8_config.fp8_format: E4M3`"
        return None

    def layouts_on(self, capability: tuple[int, int] | None) -> int:
        """One or two; `capability` None: Hopper's. Where FP8 products read operands either way (Transformer Engine's
        nvte_is_non_tn_fp8_gemm_supported()), an operand with one scale has no transpose. Scales of blocks lie along the sum."""
        both_ways = capability is not None and (
            BLACKWELL <= capability < (12, 0) or capability >= (13, 0)
        )
        return 1 if both_ways and not self.block_scaled else 2

    def along_features(self, settings: OptionValues, role: Role) -> Quantize:
        """The quantizer of an operand in a product that sums along its features."""
        import torch

        from pretrain.precision.quantizers import blocks, tensor  # noqa: F401, as `quantize` takes them from the package

        quantize, stochastic = self.quantize, self.is_stochastic(settings, role)
        grid, square = self.grid(settings, role), self.scaling(role).square

        def quantized(x: Tensor, scale: Tensor | None, amax: Tensor | None) -> Quantized:
            uniform = torch.rand_like(x, dtype=torch.float32) if stochastic else None
            return quantize(x, Given(grid, square, scale, amax, uniform))

        return quantized

    def transform(self, settings: OptionValues, role: Role) -> Callable[[Tensor], Tensor] | None:
        """What is done to x^T before it is quantized along rows; None: nothing."""
        from pretrain.precision.quantizers.blocks import hadamard

        return hadamard if settings.disable_rht is False and role != "weight" else None

    def is_stochastic(self, settings: OptionValues, role: Role) -> bool:
        """Whether an operand is rounded by chance. Only gradients are: their sum stays right on average; to activations and
        weights it would add noise in every forward."""
        return settings.disable_stochastic_rounding is False and role == "grad_output"

    def quantizer(self, settings: OptionValues, role: Role, along: Along) -> Quantize:
        """The quantizer of an operand in a product that sums `along` its features or its rows: a pure function of tensors. `amax`
        is not used along rows, where x may be transformed. Codes come with the axis of the sum last: [rows, features], or
        [features, rows]. Raises RuntimeError where blocks do not divide that axis."""
        quantize = self.along_features(settings, role)
        if along == "features":
            return quantize
        if self.serves_both(role):
            return lambda x, scale, amax: quantize(x, scale, amax).t()
        transform = self.transform(settings, role)
        return lambda x, scale, amax: quantize(
            x.t() if transform is None else transform(x.t()), scale, None
        )

    def operand_kind(self, settings: OptionValues, role: Role, gemm: str | None = None) -> str:
        """What an operand, in one of its products, is called in the audit: "e4m3 in blocks of 128"."""
        if self.plain_forward and gemm == "forward":
            return self.compute_dtype
        return f"{self.grid(settings, role).name.lower()} {self.scales}"
