"""One chunk of the loss: its losses and gradients, and the softmax of its logits (in torch; a GPU has a kernel for it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from packing.arrow import IGNORE


@dataclass
class HeadGradients:
    """Gradients of the sum of losses, by what the head multiplies; None: not needed. The hidden states' are in their dtype, and
    each chunk writes its own rows. Those of weight [vocabulary, hidden] and bias add up over the chunks, in FP32."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def allocate(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> HeadGradients:
        """Memory for them; the weight's is not filled, as the first chunk overwrites it. Allocated for each microbatch: kept from
        one to the next it would save no time, and stand beside the workspace of the layers' backward at the peak."""
        return cls(
            torch.empty_like(hidden) if needed[0] else None,
            torch.empty_like(weight, dtype=torch.float32) if needed[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if needed[2] else None,
        )

    def of(self, rows: slice) -> HeadGradients:
        """Returns the gradients as a chunk of these tokens sees them."""
        return self if self.hidden is None else replace(self, hidden=self.hidden[rows])


# (hidden [n, hidden], labels [n], gradients, *, first) -> losses [n] FP32, or [2, n] with penalties under them, and its part of
# `gradients`. `first` of the forward overwrites the weight's sum, which holds nothing yet.
ChunkLoss = Callable[..., Tensor]


def softmax_gradient_(logits: Tensor, labels: Tensor) -> Tensor:
    """Overwrite logits [n, vocabulary] with softmax - one_hot(label), the losses' gradient; return the losses [n], FP32.

    labels [n] int64. Both are zero where the label is ignored and the logits are finite. Softmax and sums are FP32 whatever the
    logits are, and the gradient is rounded once, to their dtype.
    """
    if logits.is_cuda:
        from pretrain.model.loss import softmax_kernel

        return softmax_kernel.softmax_gradient_(logits, labels, IGNORE)
    ignored = labels == IGNORE
    targets = labels.masked_fill(ignored, 0)[:, None]
    scores = logits.float()  # FP32 logits themselves: then nothing of their size is made
    target_scores, maximum = scores.gather(1, targets), scores.amax(dim=-1, keepdim=True)
    total = scores.sub_(maximum).exp_().sum(dim=-1, keepdim=True)
    losses = (total.log() + maximum - target_scores)[:, 0].masked_fill_(ignored, 0)
    gradient = scores.mul_(total.reciprocal_().masked_fill_(ignored[:, None], 0))
    # Before anything is rounded: 1 taken from a BF16 probability would lose what a well-predicted token still has to learn.
    gradient.scatter_add_(1, targets, -(~ignored)[:, None].float())
    if gradient is not logits:
        logits.copy_(gradient)
    return losses


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses [n] FP32 from logits [n, vocabulary] and labels [n], zero where ignored, for evaluation."""
    if logits.is_cuda:
        from pretrain.model.loss import softmax_kernel

        return softmax_kernel.token_losses(logits, labels, IGNORE)
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="none")
