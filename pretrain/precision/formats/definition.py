"""The definition of a precision: a class with all properties of a precision and their defaults.

The other files in this folder define the precisions. `pretrain.precision.settings` lists all of
them. This file imports torch only when a quantizer is created. docs/developers/extending.md has
a table of the axis along which each operand is quantized.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pretrain.precision.quantizers import E4M3, E5M2, Grid, Quantized

if TYPE_CHECKING:
    from torch import Tensor

# The role of an operand in the products of a linear layer.
Role = Literal["input", "weight", "grad_output"]
# The axis of an operand [rows, features] along which a product sums. The rows of an activation or
# gradient are its tokens. The rows of a weight are its out_features.
Along = Literal["features", "rows"]

# The settings of a precision: a `LowPrecisionSettings` as its method `resolved` returns it. Options
# that the precision does not accept are None.
OptionValues = Any

# A function that quantizes x [rows, features]. Its arguments are x, the scale of delayed scaling or
# None, and the amax of x or None. The product sums along the last axis of the result.
Quantize = Callable[["Tensor", "Tensor | None", "Tensor | None"], Quantized]


@dataclass(frozen=True)
class Scaling:
    """Size of an operand's blocks, and format of their scales."""

    # Format to which scales are rounded.
    kind: Literal["FP32", "power of two", "E4M3"]
    # The number of values along the contraction dimension that share a scale. None: all values of
    # the tensor share one scale.
    block: int | None = None
    # True if `block` rows share the scale too, so that a block is a square.
    square: bool = False

    def __str__(self) -> str:
        return f"in blocks of {self.block}" if self.block else "tensor-scaled"


# Compute capabilities. FP8 products of Blackwell accept both layouts of an operand, row by row and
# column by column. FP8 products of Hopper accept only one.
HOPPER = (9, 0)
BLACKWELL = (10, 0)


@dataclass(frozen=True)
class Hardware:
    """The GPUs that a precision supports, as a range of CUDA compute capabilities."""

    # The lowest supported capability. None if no GPU is supported.
    capability: tuple[int, int] | None
    # The names of supported GPUs.
    examples: str = ""
    # The lowest capability above the range. The kernels do not support it. None: no upper limit.
    below: tuple[int, int] | None = None
    # The requirement that no GPU meets, if no GPU is supported.
    missing: str = ""

    def unmet_need(self, capability: tuple[int, int] | None) -> str | None:
        """Return the requirement that a device does not meet, or None if the device is supported.

        The requirement is a noun phrase that completes the sentence "the precision needs ...".
        `capability` is the CUDA compute capability of the device, or None if the device is no GPU.
        Transformer Engine itself checks further requirements, such as the CUDA version.
        """
        if self.capability is None:
            return self.missing
        if (
            capability is None
            or capability < self.capability
            or (self.below and capability >= self.below)
        ):
            end = " and below {}.{}".format(*self.below) if self.below else ""
            least = "{}.{}".format(*self.capability)
            return f"a GPU of compute capability {least} or higher{end} ({self.examples})"
        return None


@dataclass(frozen=True)
class StepCosts:
    """Costs of a training step in a precision, by which `lab.speed.speed` predicts its time."""

    # Share of the dense peak that long GEMMs sustain. `benchmarks/planner_fit.py` fits it to
    # measured steps, so it makes up for errors of the other constants.
    share: float
    # Bytes that a token moves in forward and backward of a layer for each value of its hidden
    # width, of the MLP's width, and of queries, keys and values. They are read off profiles of
    # steps with fused layers (benchmarks/results/speed/*_profile*.md).
    hidden: int
    mlp: int
    qkv: int
    # Factor of these bytes if layers are not fused.
    unfused: float = 2.4
    # Speed of the grouped GEMMs of experts, as a share of the speed of other GEMMs.
    grouped: float = 0.67
    # Compute capability from which other kernels, which were not measured, compute the GEMMs.
    below: tuple[int, int] = (99, 0)
    # Number of parameters from which steps were measured or published.
    least_parameters: int = 50_000_000


@dataclass(frozen=True, eq=False, kw_only=True)
class Precision:
    """A precision without quantization, and the base class of precisions with quantization."""

    quantized: ClassVar[bool] = False

    name: str
    description: str
    # The dtype of activations. Without quantization it is also the dtype of the operands.
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    # None if no steps were measured.
    costs: StepCosts | None = None
    # in_features, out_features and the number of tokens must be multiples of this.
    multiple_of: int = 1
    # True if CUDA graphs may contain the products. tests/gpu/test_same_bits_gpu.py tests this.
    in_graphs: bool = False
    # Map each option of `fp8_config` that the precision accepts to its default.
    options: Mapping[str, Any] = field(default_factory=dict)
    # The settings of a run, see `with_options`. None in the definition of a precision.
    settings: OptionValues = None

    def with_options(self, settings: OptionValues) -> Self:
        """Return the precision with `settings`, which must be resolved for this precision."""
        return replace(self, settings=settings)

    @property
    def number_bytes(self) -> int:
        """The number of bytes of one value in `compute_dtype`."""
        return {"float32": 4, "bfloat16": 2}[self.compute_dtype]

    @property
    def operand_bytes(self) -> float:
        """The number of bytes of one value of an operand that backward needs."""
        return self.number_bytes

    @property
    def block_scaled(self) -> bool:
        """Return True if each block has a scale."""
        return False

    def layouts_on(self, capability: tuple[int, int] | None) -> int:
        """Return the number of layouts of a quantized operand that a device stores.

        It is 0 without quantization. `capability` is the CUDA compute capability of the device.
        """
        return 0


@dataclass(frozen=True, eq=False, kw_only=True)
class QuantizedPrecision(Precision):
    """A precision with quantized operands.

    Methods with an argument `role` depend on `settings`, so `with_options` must have set them.
    """

    quantized: ClassVar[bool] = True

    hardware: Hardware
    scales: Scaling
    # True if the blocks of a weight are squares. They are quantized once for both products of the
    # weight.
    square_weights: bool = False
    # Function that quantizes x [rows, features] in blocks along its features. Its keyword arguments
    # are `grid`, the number format of the codes; `square`, which is True if a block is a square;
    # `scale`, the scale of delayed scaling or None; `amax`, the amax of x or None; and `uniform`,
    # random numbers in [0, 1) for stochastic rounding, FP32 in the shape of x, or None.
    quantize: Callable[..., Quantized]
    # The number format of the codes. With `fp8_format: HYBRID`, gradients have E5M2 instead.
    codes: Grid = E4M3
    # True if scales are computed from earlier microbatches, so that checkpoints must store them.
    keeps_history: bool = False
    # The class in transformer_engine.common.recipe that accepts the options. Empty if Transformer
    # Engine does not have the precision.
    te_recipe: str = ""
    # The function of Transformer Engine that checks whether the device supports the precision.
    te_available: str = ""
    # The layout in which servers read weights of this precision: a key of LAYOUTS in
    # pretrain/precision/layouts.py. Empty if no server reads such weights.
    served_as: str = ""
    # Bytes per value of an operand in one layout, including its share of the scales.
    operand_bytes: float = 1.0
    # Bytes per value of a weight in one layout. None: the same as `operand_bytes`.
    weight_bytes: float | None = None
    # By default, this share of the decoder layers stays in BF16, counted from the end of the model.
    keeps_last: float = 0.0
    # A warning is logged if more than this share of an operand's values becomes zero.
    underflow_limit: float = 0.05

    @property
    def limits(self) -> dict[str, float]:
        """Map `underflow` and `saturation` to their limits, as shares of an operand's values.

        A run warns if a share is above its limit. The files of the precisions have the measurements
        behind the limits. With delayed scaling, a few values may saturate, because scales are
        computed from the amaxes of earlier microbatches. In other precisions the limit of
        `saturation` is 1, so a run never warns of it.
        """
        saturation = 1e-3 if self.keeps_history else 1.0
        return {"underflow": self.underflow_limit, "saturation": saturation}

    @property
    def block_scaled(self) -> bool:
        """Return True if each block has a scale."""
        return self.scales.block is not None

    @property
    def tensor_scaled(self) -> bool:
        """Return True if a tensor has a scale, either alone or in addition to scales of blocks."""
        return self.scales.kind == "E4M3" or not self.block_scaled

    def grid(self, role: Role) -> Grid:
        """Return the number format of an operand's codes.

        With `fp8_format: HYBRID` it is E5M2 for gradients, which has a larger range but a lower
        resolution than E4M3.
        """
        is_e5m2 = role == "grad_output" and self.settings.fp8_format == "HYBRID"
        return E5M2 if is_e5m2 else self.codes

    def scaling(self, role: Role) -> Scaling:
        """Return the scaling of an operand. It is the same in both products of the operand."""
        return replace(self.scales, square=self.square_weights and role == "weight")

    def serves_both(self, role: Role) -> bool:
        """Return True if both products of an operand can use the same codes and scales."""
        return not self.block_scaled or self.scaling(role).square

    def fuses_head_on(self, capability: tuple[int, int] | None) -> bool:
        """Return True if a fused softmax kernel can quantize the gradient of the logits.

        pretrain.model.loss.fp8_head contains the kernel. `capability` is the CUDA compute
        capability of the device. None means Hopper.
        """
        return not self.block_scaled and (capability is None or capability < BLACKWELL)

    def no_groups_on(self, capability: tuple[int, int] | None) -> str | None:
        """Return the reason why the experts of a mixture stay unquantized on a device, or None.

        torch's grouped FP8 product supports only E4M3, with one scale per row. `capability` is the
        CUDA compute capability of the device. None means Hopper.
        """
        if self.block_scaled or capability not in (None, HOPPER):
            return f"this device has no grouped product for experts in {self.name}"
        if self.settings.fp8_format == "HYBRID":
            return (
                "the grouped product for experts does not support E5M2; set "
                "`fp8_config.fp8_format: E4M3`"
            )
        return None

    def layouts_on(self, capability: tuple[int, int] | None) -> int:
        """Return the number of layouts of a quantized operand that a device stores: 1 or 2.

        The result is 1 if FP8 products of the device accept both layouts (Transformer Engine's
        nvte_is_non_tn_fp8_gemm_supported()) and the operand has no block scales. Otherwise the
        device must also store the transpose. In a format with blocks, the transpose must be
        quantized separately, because blocks extend along the contraction dimension.

        capability: the CUDA compute capability of the device. None means Hopper.
        """
        both_ways = capability is not None and (
            BLACKWELL <= capability < (12, 0) or capability >= (13, 0)
        )
        return 1 if both_ways and not self.block_scaled else 2

    def along_features(self, role: Role) -> Quantize:
        """Return the quantizer of an operand for the product that sums along its features."""
        import torch

        # `self.quantize` reads these modules as attributes of the package `quantizers`. The files
        # of the precisions cannot import them, because they import torch.
        from pretrain.precision.quantizers import blocks, tensor  # noqa: F401

        quantize = self.quantize
        grid = self.grid(role)
        square = self.scaling(role).square
        stochastic = self.is_stochastic(role)

        def quantized(x: Tensor, scale: Tensor | None, amax: Tensor | None) -> Quantized:
            uniform = torch.rand_like(x, dtype=torch.float32) if stochastic else None
            return quantize(x, grid=grid, square=square, scale=scale, amax=amax, uniform=uniform)

        return quantized

    def transform(self, role: Role) -> Callable[[Tensor], Tensor] | None:
        """Return the function that transforms x^T before x is quantized along its rows, or None.

        The function is the random Hadamard transform. It is applied to both operands of the weight
        gradient's product. None is returned for weights, for precisions without this transform, and
        with `disable_rht`.
        """
        from pretrain.precision.quantizers.blocks import hadamard

        # `disable_rht` is None, and not False, in precisions without the transform.
        return hadamard if self.settings.disable_rht is False and role != "weight" else None

    def is_stochastic(self, role: Role) -> bool:
        """Return True if an operand is rounded stochastically.

        Only gradients are rounded stochastically. Training adds up the gradients of many steps, and
        stochastic rounding preserves the expectation of their sum. Stochastic rounding of
        activations and weights would add noise to every forward.
        """
        # The option is None, and not False, in precisions that always round to the nearest value.
        return self.settings.disable_stochastic_rounding is False and role == "grad_output"

    def quantizer(self, role: Role, along: Along) -> Quantize:
        """Return the quantizer of an operand for the product that sums along `along`.

        See `Quantize` for the arguments of the quantizer. Its result is [rows, features] if `along`
        is "features", and [features, rows] if `along` is "rows". The quantizer raises RuntimeError
        if the axis `along` is not a multiple of the block size.
        """
        quantize = self.along_features(role)
        if along == "features":
            return quantize
        if self.serves_both(role):
            return lambda x, scale, amax: quantize(x, scale, amax).t()
        transform = self.transform(role)

        def quantize_transpose(x: Tensor, scale: Tensor | None, amax: Tensor | None) -> Quantized:
            transposed = x.t() if transform is None else transform(x.t())
            # The transform may change the amax. Formats without it compute the amax again.
            return quantize(transposed, scale, None)

        return quantize_transpose

    def operand_kind(self, role: Role) -> str:
        """Return the text in the audit for an operand, such as "e4m3 in blocks of 128"."""
        return f"{self.grid(role).name.lower()} {self.scales}"
