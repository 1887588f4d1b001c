"""Penalties on distributions that are not sharp: of the probabilities p that the head gives each token's successor.

| `loss.penalty` | of a token | |
| --- | --- | --- |
| `non_max_sum` | 1 - max p | what all but the likeliest word have |
| `neg_entropy` | -sum p log p | nats; the entropy itself, which is to become small, whatever the name says |

What is trained is cross-entropy + weight x penalty, both over the tokens that have a label. A gradient with respect to the logits
is p (1 + weight max p) - weight p [the likeliest] - [label]; or p (1 - weight (log p + H)) - [label], H the entropy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from packing.arrow import IGNORE
from pretrain.settings.recipe import PenaltyKind

LOGITS_AT_ONCE = 2**22  # in FP32: 16 MiB, some three times over, whatever the chunk


@dataclass(frozen=True)
class Penalty:
    """What is added to each token's cross-entropy, and by which factor."""

    kind: PenaltyKind
    weight: float

    def gradient_(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Overwrite logits [n, vocabulary] with the gradient of cross-entropy + weight x penalty; return both, [2, n] FP32.

        As `head.softmax_gradient_`: FP32 throughout, rounded once to the logits' dtype, and zero where a label is ignored.
        """
        both = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
        for rows in _rows(logits):
            scores = logits[rows].float()  # FP32 logits themselves
            both[:, rows] = self._overwrite(scores, labels[rows])
            if scores.dtype != logits.dtype:
                logits[rows] = scores
        return both

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropies and penalties, [2, n] FP32, of logits that stay as they are; zero where a label is ignored."""
        both = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
        for rows in _rows(logits):
            scores = logits[rows].float()
            both[0, rows] = F.cross_entropy(scores, labels[rows], ignore_index=IGNORE, reduction="none")
            log_p = scores.log_softmax(dim=-1)
            p = log_p.exp()
            penalties = torch.special.entr(p).sum(dim=-1) if self.kind == "neg_entropy" else 1 - p.amax(dim=-1)
            both[1, rows] = penalties.masked_fill_(labels[rows] == IGNORE, 0)
        return both

    def _overwrite(self, scores: Tensor, labels: Tensor) -> Tensor:
        ignored = labels == IGNORE
        counted, targets = (~ignored)[:, None].float(), labels.masked_fill(ignored, 0)[:, None]
        target_scores, maximum = scores.gather(1, targets), scores.amax(dim=-1, keepdim=True)
        likeliest = None if self.kind == "neg_entropy" else scores.argmax(dim=-1, keepdim=True)
        shifted = scores.sub_(maximum)
        p = shifted.exp() if likeliest is None else shifted.exp_()
        total = p.sum(dim=-1, keepdim=True)
        log_total = total.log()
        p.mul_(total.reciprocal_().mul_(counted))
        if likeliest is None:
            # log p + H is a score minus their mean: where all p are alike, no digits are lost.
            mean = (p * shifted).sum(dim=-1, keepdim=True)
            penalty = log_total - mean
            shifted.sub_(mean).mul_(p).mul_(-self.weight).add_(p)
        else:
            largest = p.gather(1, likeliest)
            penalty = 1 - largest
            p.mul_(1 + self.weight * largest).scatter_add_(1, likeliest, largest.mul(-self.weight))
        scores.scatter_add_(1, targets, -counted)
        cross_entropy = log_total + maximum - target_scores
        return torch.cat([cross_entropy, penalty], dim=1).masked_fill_(ignored[:, None], 0).t()


def _rows(logits: Tensor) -> Iterator[slice]:
    """Splits the rows of `logits` into parts of LOGITS_AT_ONCE logits at most, one row at least."""
    size = max(1, LOGITS_AT_ONCE // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))
