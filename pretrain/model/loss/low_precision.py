"""The LM head's product in low precision: the head stays where it is, and tied, and only its products change."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from pretrain.model.loss.chunked import ChunkLoss
from pretrain.precision.context import PrecisionContext
from pretrain.precision.product import LinearProduct, Role


@dataclass(frozen=True)
class LowPrecisionHeadProduct:
    """The LM head's product, for `LossHead.low_precision`: the head stays where it is, and tied, and only its products change."""

    name: str
    product: LinearProduct
    context: PrecisionContext

    @property
    def active(self) -> bool:
        return self.context.low_precision

    @property
    def fuses(self) -> bool:
        """Whether the softmax can write its gradient as this product's operand; every product can `multiply`."""
        return getattr(self.product, "fuses_head", False)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, later_call: bool = False) -> Tensor:
        """x [n, hidden] -> logits [n, vocabulary], for a chunk of the tokens."""
        return self.context.multiply(self.name, self.product, x, weight, bias, later_call=later_call)

    def fused(self, weight: Tensor) -> AbstractContextManager[ChunkLoss]:
        """Entered around the chunks of one training forward, whose observers see what those of `multiply` see."""
        from pretrain.model.loss.fp8_head import fused_head  # brings Triton, which takes a while

        show = self._show if self.context.observers else None
        return fused_head(self.product, weight, first_microbatch=self.context.first_microbatch, show=show)

    def _show(self, role: Role, tensor: Tensor) -> None:
        for observer in self.context.observers:
            observer(self.name, role, tensor.detach(), self.product)
