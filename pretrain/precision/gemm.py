"""The matrix products of a linear layer, and the engines that compute them.

A linear layer has three products, called its GEMMs:

    forward  y  = x w^T + b     x [tokens, in], w [out, in]    sums along the features of x and w
    dgrad    dx = dy w          dy [tokens, out]    sums along the features of dy and the rows of w
    wgrad    dw = dy^T x        dw [out, in]                   sums along the rows of dy and x

A training spends most of its time in these products. Tensor cores multiply FP8 numbers twice as
fast as BF16 numbers, and FP4 numbers up to four times as fast. So the operands of each product are
rounded to such a format, while the sums stay in FP32 and the weight itself stays in FP32 or BF16.
A few bits can represent only values of similar magnitude. So an operand is divided by a scale that
maps its largest magnitude to the largest number of the format. There is one scale for the tensor
or for each block of values.

    operand     products         rounded                     number format in FP8
    x           forward, wgrad   in forward                  E4M3
    w           forward, dgrad   once a step, then cached    E4M3
    dy          dgrad, wgrad     in backward                 E5M2 or E4M3

Each operand is used in two products, which sum along different axes. A block must lie along the
axis of the sum, because the kernel multiplies by the scale once per block. So an operand with
blocks is quantized twice, along its features and along its rows, unless its blocks are squares.
Gradients have a wider range of magnitudes than activations, so they may have E5M2, with more bits
for the exponent. docs/evidence.md has a table of all formats.

In wgrad, dw is added to the attribute `main_grad` of the weight, if the weight has it.

A `Gemm` computes the three products of one layer in one precision. A `GemmEngine` creates the Gemms
of a model and stores the state that they share. Both classes have two implementations, one for
Transformer Engine and one for the emulation. `TorchGemm` multiplies without quantization and needs
no engine. The autograd functions in `pretrain.precision.product` call the Gemms.

All experts of a mixture are treated as one layer with the weight [experts, out, in]. Their products
are grouped by expert (`pretrain.precision.grouped`). The argument `ends` contains the index at
which the rows of each expert end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pretrain.precision import cublaslt, grouped
from pretrain.precision.formats.definition import Role
from pretrain.precision.observed import NO_CONTEXT, watched
from pretrain.precision.settings import ActivePrecision

GemmKind = Literal["forward", "dgrad", "wgrad"]
Operand = Any  # a Tensor, an emulated operand, or a quantized tensor of Transformer Engine
# The result of `Gemm.save`: the tensors that autograd saves, and all other data that `Gemm.restore`
# needs to build the operands again.
Saved = tuple[Sequence[Tensor | None], Any]


class Gemm(ABC):
    """The three products of one linear layer, or of several layers with stacked weights."""

    # False if the operands stay unquantized.
    quantizes: bool = True
    # The number of rows of each expert in a grouped product must be a multiple of this.
    row_multiple: int = grouped.ROW_MULTIPLE

    def __init__(self, name: str, members: Sequence[str] = ()) -> None:
        """Create the products of the layer `name`.

        A checkpoint stores the layer's histories under this name. `members` are the names of the
        layers whose weights are stacked. By default, the only member is the layer `name`.
        """
        self.name = name
        self.members = members or (name,)
        # The quantized weight of the first microbatch, which the next microbatches of the step use.
        self.weight: Operand | None = None
        # True if CUDA graphs read the cached weight at a fixed address. A newly quantized weight
        # then overwrites the cached one.
        self.overwrites_weight = False

    def begin(self, x: Tensor) -> None:  # noqa: B027, an optional hook
        """Prepare a forward pass over `x` [tokens, in]. Called before the first `quantize`."""

    def end(self) -> None:  # noqa: B027, an optional hook
        """Finish a forward pass. Called after the forward product."""

    @abstractmethod
    def quantize(self, role: Role, x: Tensor, *, both: bool = True) -> Operand:
        """Return x [rows, features] as an operand.

        Each operand is a factor of two products: one sums along its features, the other one along
        its rows. With `both`, the returned operand can be used in both products. Without `both`, it
        can be used only in the product that sums along the features.
        """

    def quantizer(self, role: Role, *, both: bool) -> Any | None:
        """Return Transformer Engine's quantizer, for kernels that write quantized operands.

        Return None if only `quantize` can create operands. See `quantize` for the arguments.
        """
        return None

    def weight_operand(
        self, matrix: Callable[[], Tensor], *, refresh: bool, differentiable: bool
    ) -> Operand:
        """Return the quantized weight.

        matrix: function that returns the weight [out, in]. It is called only if the weight must be
            quantized.
        refresh: quantize the weight even if a quantized weight is cached. It is set in the first
            microbatch of a step.
        differentiable: True if a backward can follow. If False, the weight is always quantized, and
            the cache is neither used nor modified.
        """
        if not differentiable:
            return self.quantize("weight", matrix(), both=False)
        if refresh and self.overwrites_weight and self.weight is not None:
            self.overwrite_weight(matrix())
        elif refresh or self.weight is None:
            # Free the cached weight before the next one is created. Memory may not suffice for two
            # copies of the largest weight.
            self.weight = None
            self.weight = self.quantize("weight", matrix())
        return self.weight

    def drop_weight(self) -> None:
        """Drop the cached weight, unless CUDA graphs read it at a fixed address.

        A weight that CUDA graphs read is overwritten by the first microbatch of the next step.
        """
        if not self.overwrites_weight:
            self.weight = None

    def overwrite_weight(self, matrix: Tensor) -> None:
        """Quantize the weight `matrix` [out, in] into the memory of the cached weight."""
        self.weight.copy_(matrix)  # type: ignore[union-attr]  # a cast weight of `TorchGemm`

    @abstractmethod
    def matmul(
        self,
        kind: GemmKind,
        left: Operand,
        right: Operand,
        dtype: torch.dtype | None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        ends: Tensor | None = None,
    ) -> Tensor:
        """Return the product `kind` of two operands, summed in FP32 and rounded to `dtype`.

        left, right: the factors in the formulas at the top of this file, in the same order.
        bias: the bias [out] of a forward product. It is added before the result is rounded.
        residual: the residual [tokens, out] of a forward product. It is not modified. The kernel
            determines whether the residual is added before or after the result is rounded.
        ends: the end of each expert's rows, int32 [experts]. With `ends`, the product is grouped,
            and `dtype` may be None: the result then has the dtype that the kernel writes.
        """

    def accumulate(
        self,
        total: Tensor,
        left: Operand,
        right: Operand,
        *,
        overwrite: bool = False,
        ends: Tensor | None = None,
    ) -> None:
        """Add the weight's gradient left^T right to `total` [out, in], which is FP32 or BF16.

        With `overwrite`, store the gradient in `total` instead. `ends` is the same as in `matmul`.
        """
        dtype = torch.float32 if ends is None else None
        add_to(total, self.matmul("wgrad", left, right, dtype, ends=ends), overwrite=overwrite)

    @staticmethod
    def codes(operand: Operand) -> Tensor:
        """Return the codes that the forward product reads, so that two operands can be compared."""
        return operand

    @staticmethod
    def save(*operands: Operand) -> Saved:
        """Split operands into the tensors that autograd saves and the rest that `restore` needs.

        An engine may drop what only the forward product reads. So after `restore`, an input can be
        used only in the product of the weight's gradient.
        """
        return operands, None

    @staticmethod
    def restore(tensors: Sequence[Tensor | None], rest: Any) -> Sequence[Operand]:
        """Build operands again from the two results of `save`: the saved tensors and the rest."""
        return tensors

    @staticmethod
    def claim_first_in_forward() -> bool:
        """Return True if this Gemm must call `finish_backward` after its backward.

        This is the Gemm that runs first in the forward of the model. In backward it runs last, so
        all gradients have been quantized. Each Gemm must call this method once in a forward,
        because only the first call in a forward returns True. A class whose `finish_backward` does
        nothing always returns False.
        """
        return False

    @staticmethod  # noqa: B027, an optional hook
    def finish_backward() -> None:
        """Update the histories of delayed scaling after all gradients have been quantized."""


class TorchGemm(Gemm):
    """The products of unquantized operands, computed in their dtype by torch or cublasLt."""

    quantizes = False

    def quantize(self, role: Role, x: Tensor, *, both: bool = True) -> Tensor:
        """Return x unquantized. On a GPU, an input or a gradient is made contiguous for cublasLt.

        A weight that is a transposed view is not copied.
        """
        return x.contiguous() if x.is_cuda and role != "weight" else x

    def matmul(
        self,
        kind: GemmKind,
        left: Tensor,
        right: Tensor,
        dtype: torch.dtype | None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        ends: Tensor | None = None,
    ) -> Tensor:
        with watched(self.members, kind):
            if ends is not None:
                return grouped.matmul(kind, left, right, ends).to(dtype or left.dtype)
            if kind == "forward":
                return cublaslt.linear(left, right, bias, residual)
            if kind == "wgrad":
                return (left.t() @ right).to(dtype)
            dx = cublaslt.multiply(right, left, layout="NN")
            # `dx` is None if cublasLt does not support this product.
            return (left @ right if dx is None else dx).to(dtype)

    def accumulate(
        self,
        total: Tensor,
        left: Tensor,
        right: Tensor,
        *,
        overwrite: bool = False,
        ends: Tensor | None = None,
    ) -> None:
        if ends is None:
            with watched(self.members, "wgrad"):
                cublaslt.add_product_(total, left.t(), right, overwrite=overwrite)
        else:
            super().accumulate(total, left, right, overwrite=overwrite, ends=ends)


def add_to(total: Tensor, gradient: Tensor, *, overwrite: bool) -> None:
    """Add `gradient` to `total` in the dtype of `total`, or overwrite `total` with it."""
    total.copy_(gradient) if overwrite else total.add_(gradient)


def checkpointed(
    function: Callable[..., Any],
    *args: Any,
    again: Callable[[], AbstractContextManager[None]],
) -> Any:
    """Return function(*args). Backward recomputes the function in the context `again()`."""
    # The first context is for the forward, and the second one for the recomputation.
    return checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (NO_CONTEXT, again())
    )


class GemmEngine(ABC):
    """The Gemms of one model in one precision, with the histories and scales that they share."""

    def __init__(self, active: ActivePrecision, device: torch.device) -> None:
        self.precision = active.quantized_precision
        self.device = device
        self.gemms: dict[str, Any] = {}  # map the name of each linear layer to its Gemm

    def gemm(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        members: Sequence[str] = (),
    ) -> Gemm:
        """Return the Gemm of the layer `name`. The first call creates it.

        See `Gemm.__init__` for `members`.
        """
        if name not in self.gemms:
            self.gemms[name] = self._make(name, in_features, out_features, bias, members)
        return self.gemms[name]

    @abstractmethod
    def _make(
        self, name: str, in_features: int, out_features: int, bias: bool, members: Sequence[str]
    ) -> Gemm:
        """Create and return a Gemm. With delayed scaling, also create its histories and scales."""

    @abstractmethod
    def forward(self) -> AbstractContextManager[Any]:
        """Return a context for a low-precision forward of the model.

        With delayed scaling, the scales are updated when the context is left.
        """

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        again: Callable[[], AbstractContextManager[None]],
    ) -> Any:
        """Return function(*args). Backward recomputes the function in the context `again()`.

        The recomputation uses the same scales and random numbers as the first computation.
        """
        return checkpointed(function, *args, again=again)

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return a dict that maps names to the tensors that a checkpoint must store.

        They are the tensors of the engine itself, not copies. The dict is empty without delayed
        scaling.
        """

    def reset(self) -> None:
        """Reset amax histories to zero and scales to one, and drop cached weights."""
        for name, tensor in self.state().items():
            tensor.fill_(1.0 if name.endswith("scale") else 0.0)
        for gemm in self.gemms.values():
            gemm.drop_weight()

    @abstractmethod
    def describe(self) -> str:
        """Return a text for the audit: the library that multiplies, and its version."""
