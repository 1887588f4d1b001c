"""The interface through which products show their operands, weights and results.

`PrecisionContext.probes` has the active probes of a model. The passes of
`pretrain.precision.product` call them. A probe sees the values that a product is meant to compute
with. The operands that the kernels of torch, Transformer Engine and cublasLt really receive are
observed in another way (`pretrain.precision.observed`).
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from pretrain.precision.formats.definition import Role
from pretrain.precision.gemm import Gemm, GemmKind, Operand


class Probe:
    """Observer of the products of one model. A subclass overrides the methods that it needs.

    An argument `values` or `matrix` is a function that returns a tensor. Some operands
    exist only in quantized form, and the function then computes the unquantized values again. So a
    probe should call it only if it needs the values.
    """

    # True if `result` is overridden. Each product then computes its result separately: it does not
    # add a residual or the earlier gradient sum in the kernel.
    observes_results: bool = False

    def operand(
        self, name: str, role: Role, values: Callable[[], Tensor], ends: Tensor | None, /
    ) -> None:
        """Observe an operand of a low-precision product before it is quantized.

        name: the name of the product's Gemm.
        role: the role of the operand. A weight is observed when it is quantized.
        values: returns the unquantized operand [rows, features].
        ends: the end of each expert's rows, int32 [experts], or None if there are no experts.
        """

    def weight(self, gemm: Gemm, operand: Operand, matrix: Callable[[], Tensor], /) -> None:
        """Observe the weight that a forward product multiplies. It may be unquantized.

        operand: the weight as an operand of `gemm`, possibly from the cache.
        matrix: returns the present unquantized weight [out, in]. Under FSDP2, it may be called
            only in the microbatch that has quantized the weight.
        """

    def result(
        self, name: str, kind: GemmKind, result: Tensor, bias: Tensor | None, ends: Tensor | None, /
    ) -> None:
        """Observe the result of a low-precision product, which includes the `bias` if it has one.

        `name` and `ends` are the same as in `operand`.
        """
