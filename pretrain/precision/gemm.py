"""The matrix products of a linear layer, and the engines that compute them.

A linear layer has three products, called its GEMMs:

    forward  y  = x w^T + b     x [tokens, in], w [out, in]
    dgrad    dx = dy w          dy [tokens, out]
    wgrad    dw = dy^T x        added to the FP32 sum of the weight's gradients, if there is one

A `Gemm` computes the three products of one layer in one precision. A `GemmEngine` makes the Gemms
of a model and holds the state that they share. Transformer Engine and the emulation implement both;
`TorchGemm` multiplies without quantization and needs no engine. `pretrain.precision.product` calls
Gemms from autograd.

The experts of a mixture are one layer with the weight [experts, out, in]: their products are
grouped by expert (`pretrain.precision.grouped`), and `ends` says where the rows of each expert end.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pretrain.precision import grouped, searched
from pretrain.precision.formats.definition import Role
from pretrain.precision.observed import NO_CONTEXT, watched

GemmKind = Literal["forward", "dgrad", "wgrad"]
Operand = Any  # a Tensor, an emulated operand, or a quantized tensor of Transformer Engine
# Tensors that autograd saves, and the rest that `Gemm.restore` needs to build the operands again.
Saved = tuple[Sequence[Tensor | None], Any]


class Gemm(ABC):
    """The three products of one linear layer, or of several layers with stacked weights."""

    quantizes: bool = True
    # In grouped products the number of rows of each expert must be a multiple of this.
    row_multiple: int = grouped.ROW_MULTIPLE

    def __init__(self, name: str, members: Sequence[str] = ()) -> None:
        """Create the products of the layer `name`, which has its histories in a checkpoint.

        `members`: the layers whose weights are stacked, by default the layer `name` alone.
        """
        self.name = name
        self.members = members or (name,)
        # The quantized weight, cached for the later microbatches of a step.
        self.weight: Operand | None = None

    @property
    def supports_fused_loss(self) -> bool:
        """Return whether the softmax may write the gradient of the head's output as an operand."""
        return False

    def begin(self, x: Tensor) -> None:  # noqa: B027, an optional hook
        """Prepare a forward pass over `x` [tokens, in]. Called before the first `quantize`."""

    def end(self) -> None:  # noqa: B027, an optional hook
        """Finish a forward pass. Called after the forward product."""

    @abstractmethod
    def quantize(self, role: Role, x: Tensor, *, both: bool = True) -> Operand:
        """Return x [rows, features] as an operand of its two products.

        Without `both`, the operand serves the product that sums along the features alone.
        """

    def quantizer(self, role: Role, *, both: bool) -> Any | None:
        """Return the library's quantizer, for a kernel that writes a quantized operand itself.

        Return None if only `quantize` can make the operand.
        """
        return None

    def weight_operand(
        self, matrix: Callable[[], Tensor], *, refresh: bool, differentiable: bool
    ) -> Operand:
        """Return the cached weight, or quantize `matrix()` [out, in] if `refresh` or not cached.

        `refresh` is set in the first microbatch of a step. Passes that are not `differentiable`
        quantize the weight anew and leave the cache alone.
        """
        if not differentiable:
            return self.quantize("weight", matrix(), both=False)
        if refresh or self.weight is None:
            # Free the old weight first. Two of the largest weights may not fit into memory.
            self.weight = None
            self.weight = self.quantize("weight", matrix())
        return self.weight

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
        """Return a product in `dtype`, summed in FP32. `left` and `right` stand as in the formulas.

        A forward product adds `bias` [out] before it rounds, and `residual` [tokens, out] before or
        after. `residual` is not modified. With `ends`, int32 [experts], the product is grouped;
        then `dtype` may be None for the dtype that the kernel writes.
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
        """Add the weight's gradient to `total` [out, in], FP32 or BF16, or overwrite `total`."""
        dtype = torch.float32 if ends is None else None
        add_to(total, self.matmul("wgrad", left, right, dtype, ends=ends), overwrite=overwrite)

    @staticmethod
    def codes(operand: Operand) -> Tensor:
        """Return the values that the forward product reads, to compare two operands."""
        return operand

    @staticmethod
    def save(*operands: Operand) -> Saved:
        """Split operands into tensors for autograd to save and the rest that `restore` needs.

        A saved input serves the weight's gradient only.
        """
        return operands, None

    @staticmethod
    def restore(tensors: Sequence[Tensor | None], rest: Any) -> Sequence[Operand]:
        """Return the operands that `save` was given."""
        return tensors

    @staticmethod
    def is_first_in_forward() -> bool:
        """Return True for the first Gemm of a model's forward. Each Gemm asks once a forward.

        Backward reaches the first Gemm last, which then calls `finish_backward`.
        """
        return False

    @staticmethod  # noqa: B027, an optional hook
    def finish_backward() -> None:
        """Update the histories of delayed scaling: all gradients have been quantized."""


class TorchGemm(Gemm):
    """Products of unquantized operands in their dtype, by torch or cublasLt."""

    quantizes = False

    def quantize(self, role: Role, x: Tensor, *, both: bool = True) -> Tensor:
        """Return x itself, contiguous on a GPU. A weight may stay a transposed view."""
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
                return searched.linear(left, right, bias, residual)
            if kind == "wgrad":
                return (left.t() @ right).to(dtype)
            dx = searched.multiply(right, left, layout="NN")
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
                searched.add_product_(total, left.t(), right, overwrite=overwrite)
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
    """Return function(*args), which backward computes again in the context `again()`."""
    return checkpoint(
        function, *args, use_reentrant=False, context_fn=lambda: (NO_CONTEXT, again())
    )


class GemmEngine(ABC):
    """The Gemms of one model in one precision, with the histories and scales that they share."""

    # Forward products multiply BF16 operands, and backward quantized ones, in a phase with
    # `forward: bf16`. Loss and activations then equal the BF16 model's, while two of three products
    # are as fast as before. At the end of a training this recovers most of what
    # NVFP4 costs (arXiv:2509.25149, appendix D).
    forward_in_bf16: bool = False

    def __init__(self) -> None:
        self.gemms: dict[str, Any] = {}  # the Gemms by the name of the linear layer

    def with_bf16_forward(self) -> Self:
        """Return an engine with the same Gemms, histories and scales and forwards in BF16."""
        engine = copy.copy(self)
        engine.forward_in_bf16 = True
        return engine

    def gemm(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        members: Sequence[str] = (),
    ) -> Gemm:
        """Return the Gemm of the layer `name`, made by the first call. `members`: see `Gemm`."""
        if name not in self.gemms:
            self.gemms[name] = self._make(name, in_features, out_features, bias, members)
        return self.gemms[name]

    @abstractmethod
    def _make(
        self, name: str, in_features: int, out_features: int, bias: bool, members: Sequence[str]
    ) -> Gemm:
        """Return a new Gemm, with its own histories and scales if the precision keeps them."""

    @abstractmethod
    def forward(self) -> AbstractContextManager[Any]:
        """Return a context for a low-precision forward of the model.

        Under delayed scaling, the scales are updated when the context is left.
        """

    @abstractmethod
    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        again: Callable[[], AbstractContextManager[None]],
    ) -> Any:
        """Return function(*args), which is computed again in backward, in the context `again()`.

        The second time uses the scales and random numbers of the first time.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors to store in a checkpoint, live. Only delayed scaling has any."""

    def reset(self) -> None:
        """Reset amax histories to zero and scales to one, and drop cached weights."""
        for name, tensor in self.state().items():
            tensor.fill_(1.0 if name.endswith("scale") else 0.0)
        for gemm in self.gemms.values():
            gemm.weight = None

    @abstractmethod
    def describe(self) -> str:
        """Return the library and its version, for the audit."""
