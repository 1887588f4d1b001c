"""The loss of each token from a chunk of logits, and its gradient written over them: in plain torch, on a GPU by a kernel.

Softmax and sums are FP32 whatever the logits are, and the gradient is rounded once, to their dtype. Tokens whose label is IGNORE
have no loss and no gradient, whatever their logits hold.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from packing.batch import IGNORE


def softmax_gradient_(logits: Tensor, labels: Tensor) -> Tensor:
    """Overwrite logits [n, vocabulary] with softmax - one_hot(label), the losses' gradient; return the losses [n], FP32.

    labels [n] int64. Both are zero where the label is ignored.
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
