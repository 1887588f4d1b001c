"""What low-precision arithmetic is to the rest of the program: products and norms made by a backend, one backend a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from pretrain.precision.definition import Role

PREFIX = "fp8/"  # of the names that `Backend.state` gives, which stand beside the optimizer's in a checkpoint
Show = Callable[[Role, Tensor], None]  # a tensor to whoever is watching
NormFunction = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class ObservedProduct(NamedTuple):
    """One product of a linear: `gemm` is forward, dgrad or wgrad; `left` and `right` say what its operands were."""

    gemm: str
    left: str
    right: str


class LinearProduct(Protocol):
    """y = x w^T + b with operands in low precision, in forward and in backward."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, first_microbatch: bool) -> Tensor:
        """x [tokens, in], weight [out, in], bias [out], all BF16 -> [tokens, out] BF16, differentiable in each.

        `first_microbatch` quantizes the weight and keeps the result; later microbatches of a step use what was kept.
        """


class Backend(Protocol):
    """What computes one model's low-precision products; made once a model."""

    name: Literal["transformer_engine", "emulation"]

    def product(self, name: str, in_features: int, out_features: int, *, bias: bool) -> LinearProduct:
        """The product of the linear called `name`, with a state of its own where the recipe keeps one."""

    def norm(self, kind: Literal["rms", "layer"], size: int, eps: float) -> NormFunction:
        """(x, weight, bias or None) -> the norm of x over its last dimension."""

    def forward(self) -> AbstractContextManager[Any]:
        """Entered around each low-precision forward of the whole model."""

    def checkpoint(self, function: Callable[..., Any], *args: Any, context_fn: Callable[[], Any], **kwargs: Any) -> Any:
        """Run `function` now and again in backward, in the same precision and with the same scales."""

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold, live, as plain tensors; empty where every scale comes from the tensor it scales."""

    def reset(self) -> None:
        """Forget history and cached weights, as before the first forward."""

    def observed_products(self) -> AbstractContextManager[dict[str, list[ObservedProduct]]]:
        """Collects, while entered, what each product really multiplies in forward and backward, by the linear's name."""

    def describe(self) -> str:
        """Library and version, for the audit."""
