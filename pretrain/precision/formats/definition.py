"""The definition of a precision: all its properties, with the defaults that most precisions share.

Each precision is one file in this folder. `pretrain.precision.settings` lists them. This file
imports torch only when a quantizer is made. docs/precision.md ("How a linear computes") has a table
of the axis along which each operand is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from pretrain.precision.quantizers import E4M3, E5M2, Grid, Quantized

if TYPE_CHECKING:
    from torch import Tensor

Role = Literal["input", "weight", "grad_output"]  # of an operand in a linear layer's products
# The axis of an operand [rows, features] that a product sums along. `rows` are the tokens of an
# activation and the out_features of a weight.
Along = Literal["features", "rows"]

# The resolved settings of a precision: an attribute for each key of `fp8_config`, None for an
# option that the precision does not take.
OptionValues = Any

# (x [rows, features], scale of delayed scaling or None, amax of x or None) -> codes, with the axis
# of the sum last.
Quantize = Callable[["Tensor", "Tensor | None", "Tensor | None"], Quantized]


class Given(NamedTuple):
    """Arguments of a format's quantizer, beside x."""

    grid: Grid  # of the codes
    square: bool  # blocks are squares
    scale: Any  # a Tensor with delayed scaling, else None
    amax: Tensor | None  # of x, if already computed
    # Random numbers in [0, 1) for stochastic rounding, FP32, of x's shape. None: round to nearest.
    uniform: Tensor | None


@dataclass(frozen=True)
class Scaling:
    """The values of an operand that share a scale, and the allowed scales. The audit checks both.

    `least`: the smallest share of the format's maximum that the largest code may have. A scale that
    is rounded to a power of two can halve the code. A scale from past microbatches guarantees
    nothing.
    """

    kind: Literal["FP32", "power of two", "E4M3"]
    least: float
    # The number of values along the axis of the sum that share a scale. None: one scale a tensor.
    block: int | None = None
    square: bool = False  # `block` rows share the scale too

    def __str__(self) -> str:
        return f"in blocks of {self.block}" if self.block else "tensor-scaled"


PLAIN_FORWARD = "_bf16_forward"  # suffix of a precision's name in a phase with `forward: bf16`
HOPPER = (9, 0)
BLACKWELL = (10, 0)  # from this compute capability on, FP8 products read both layouts of operands


@dataclass(frozen=True)
class Hardware:
    """The GPUs whose tensor cores multiply in a format, by CUDA compute capability."""

    # The lowest supported one. None: no GPU is supported, for the reason in `examples`.
    capability: tuple[int, int] | None
    examples: str
    # The kernels do not support this capability and higher ones yet.
    below: tuple[int, int] | None = None

    def missing(self, capability: tuple[int, int] | None) -> str | None:
        """Return the requirement that a device of `capability` (None: no GPU) misses, or None.

        Transformer Engine itself reports other requirements, such as a CUDA version.
        """
        if self.capability is None:
            return f"emulation, because {self.examples}"
        if (
            capability is None
            or capability < self.capability
            or (self.below and capability >= self.below)
        ):
            end = " and below {}.{}".format(*self.below) if self.below else ""
            least = "{}.{}".format(*self.capability)
            return f"a GPU of compute capability {least} or higher{end} ({self.examples})"
        return None


@dataclass(frozen=True, eq=False, kw_only=True)
class Precision:
    """A precision. This class itself is for precisions without quantization."""

    quantized: ClassVar[bool] = False

    name: str
    description: str
    # The dtype of activations and, without quantization, of products.
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # Column of the devices' peak table (pretrain.metrics.peaks) for its products.
    peak: Literal["fp32", "bf16", "fp8", "fp4"]
    # Both features of a linear layer and the number of tokens must be multiples of this.
    multiple_of: int = 1
    # Forward products are not quantized: a phase with `forward: bf16`.
    plain_forward: bool = False
    # Keys of `fp8_config` that the precision takes -> defaults.
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def use(self) -> str:
        """The name in a recipe, the same with and without `forward: bf16`."""
        return self.name.removesuffix(PLAIN_FORWARD)

    @property
    def number_bytes(self) -> int:
        """Bytes of a number in `compute_dtype`."""
        return {"float32": 4, "bfloat16": 2}[self.compute_dtype]

    def layouts_on(self, capability: tuple[int, int] | None) -> int:
        """Return the number of layouts of a quantized operand that a device holds."""
        return 0


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedPrecision(Precision):
    """A precision with quantized operands. `settings` of all methods are resolved for it."""

    quantized: ClassVar[bool] = True

    hardware: Hardware
    scales: Scaling
    square_weights: bool = False  # a weight's blocks are squares, which serve both of its products
    # Quantizes x [rows, features] in blocks along its features.
    quantize: Callable[[Tensor, Given], Quantized]
    codes: Grid = E4M3  # except of gradients under `fp8_format: HYBRID`
    keeps_history: bool = False  # scales come from earlier steps, and checkpoints store them
    # Class in transformer_engine.common.recipe that takes the options. Empty: emulated only.
    te_recipe: str = ""
    # Function of Transformer Engine that checks whether the device supports the precision.
    te_available: str = ""
    # Bytes of a value with its share of the scales, in one of the two layouts that a step reads.
    operand_bytes: float = 1.0
    weight_bytes: float | None = None  # the same for a weight; None: as other operands
    # Share of the decoder layers, at the model's end, that stay in BF16 by default.
    keeps_last: float = 0.0
    # Share of an operand's values that may become zero before the scales count as unfit.
    underflow_limit: float = 0.05

    @property
    def block_scaled(self) -> bool:
        """Return whether each block has a scale."""
        return self.scales.block is not None

    @property
    def tensor_scaled(self) -> bool:
        """Return whether the tensor has a scale, alone or above the scales of blocks."""
        return self.scales.kind != "power of two"

    def grid(self, settings: OptionValues, role: Role) -> Grid:
        """Return the number format of an operand's codes.

        HYBRID gives gradients a larger range and less precision.
        """
        return E5M2 if role == "grad_output" and settings.fp8_format == "HYBRID" else self.codes

    def scaling(self, role: Role) -> Scaling:
        """Return the scaling of an operand in each of its products."""
        return replace(self.scales, square=self.square_weights and role == "weight")

    def serves_both(self, role: Role) -> bool:
        """Return whether one quantization of an operand serves both of its products."""
        return not self.block_scaled or self.scaling(role).square

    def fuses_head_on(self, capability: tuple[int, int] | None) -> bool:
        """Return whether the softmax can write its gradient as the LM head's operand.

        See pretrain.model.loss.fp8_head. `capability`: the device's, None for Hopper's.
        """
        return not (self.block_scaled or self.plain_forward) and (
            capability is None or capability < BLACKWELL
        )

    def no_groups_on(
        self, capability: tuple[int, int] | None, settings: OptionValues
    ) -> str | None:
        """Return why a mixture's experts stay unquantized on a device, or None.

        torch's grouped product in FP8 takes E4M3 only, with a scale a row. `capability`: the
        device's, None for Hopper's.
        """
        if self.block_scaled or capability not in (None, HOPPER):
            return f"no grouped product for experts in {self.name} on this device"
        if settings.fp8_format == "HYBRID":
            return "the grouped product for experts takes no E5M2: `fp8_config.fp8_format: E4M3`"
        return None

    def layouts_on(self, capability: tuple[int, int] | None) -> int:
        """Return 1 or 2. `capability`: the device's, None for Hopper's.

        If FP8 products read both layouts (Transformer Engine's
        nvte_is_non_tn_fp8_gemm_supported()), an operand with one scale needs no transpose. Scales
        of blocks lie along the sum.
        """
        both_ways = capability is not None and (
            BLACKWELL <= capability < (12, 0) or capability >= (13, 0)
        )
        return 1 if both_ways and not self.block_scaled else 2

    def along_features(self, settings: OptionValues, role: Role) -> Quantize:
        """Return the quantizer of an operand for products that sum along its features."""
        import torch

        # `quantize` takes these modules from the package.
        from pretrain.precision.quantizers import blocks, tensor  # noqa: F401

        quantize = self.quantize
        grid = self.grid(settings, role)
        square = self.scaling(role).square
        stochastic = self.is_stochastic(settings, role)

        def quantized(x: Tensor, scale: Tensor | None, amax: Tensor | None) -> Quantized:
            uniform = torch.rand_like(x, dtype=torch.float32) if stochastic else None
            return quantize(x, Given(grid, square, scale, amax, uniform))

        return quantized

    def transform(self, settings: OptionValues, role: Role) -> Callable[[Tensor], Tensor] | None:
        """Return the transform of x^T before it is quantized along rows, or None."""
        from pretrain.precision.quantizers.blocks import hadamard

        return hadamard if settings.disable_rht is False and role != "weight" else None

    def is_stochastic(self, settings: OptionValues, role: Role) -> bool:
        """Return whether an operand is rounded stochastically.

        Only gradients are, so that the mean of their sum is right. In activations and weights,
        stochastic rounding would add noise to every forward.
        """
        return settings.disable_stochastic_rounding is False and role == "grad_output"

    def quantizer(self, settings: OptionValues, role: Role, along: Along) -> Quantize:
        """Return the quantizer of an operand for products that sum along `along`.

        It is a pure function of tensors. Codes have the axis of the sum last: [rows, features], or
        [features, rows]. Along rows, where x may be transformed, it ignores `amax`. It raises
        RuntimeError if blocks do not divide the axis.
        """
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
        """Return the audit's name of an operand in a product, such as "e4m3 in blocks of 128"."""
        if self.plain_forward and gemm == "forward":
            return self.compute_dtype
        return f"{self.grid(settings, role).name.lower()} {self.scales}"
