"""Penalties on distributions that are not sharp: of the probabilities p that the head gives each token's successor.

| `loss.penalty` | of a token | |
| --- | --- | --- |
| `non_max_sum` | 1 - max p | what all but the likeliest word have |
| `neg_max_prob` | -max p | the same but for a constant, so with the same gradient |
| `top_k_mass` | 1 - the sum of the k largest p | |
| `neg_entropy` | -sum p log p | nats; the entropy itself, which is to become small, whatever the name says |

What is trained is cross-entropy + weight x penalty, both over the tokens that have a label. A gradient with respect to the logits
is p (1 + weight S) - weight p [in the k largest] - [label], S their sum; or p (1 - weight (log p + H)) - [label], H the entropy.
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
    """`top_k`: how many of the largest probabilities; only `top_k_mass` has more than one."""

    kind: PenaltyKind
    weight: float
    top_k: int = 1

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
            if self.kind == "neg_entropy":
                penalties = torch.special.entr(log_p.exp()).sum(dim=-1)
            else:
                penalties = self._from_mass(log_p.topk(self.top_k, dim=-1).values.exp().sum(dim=-1))
            both[1, rows] = penalties.masked_fill_(labels[rows] == IGNORE, 0)
        return both

    def _overwrite(self, scores: Tensor, labels: Tensor) -> Tensor:
        ignored = labels == IGNORE
        counted, targets = (~ignored)[:, None].float(), labels.masked_fill(ignored, 0)[:, None]
        target_scores, maximum = scores.gather(1, targets), scores.amax(dim=-1, keepdim=True)
        sharpest = None if self.kind == "neg_entropy" else scores.topk(self.top_k, dim=-1).indices
        shifted = scores.sub_(maximum)
        p = shifted.exp() if sharpest is None else shifted.exp_()
        total = p.sum(dim=-1, keepdim=True)
        log_total = total.log()
        p.mul_(total.reciprocal_().mul_(counted))
        if sharpest is None:
            # log p + H is a score minus their mean: where all p are alike, no digits are lost.
            mean = (p * shifted).sum(dim=-1, keepdim=True)
            penalty = log_total - mean
            shifted.sub_(mean).mul_(p).mul_(-self.weight).add_(p)
        else:
            largest = p.gather(1, sharpest)
            mass = largest.sum(dim=-1, keepdim=True)
            penalty = self._from_mass(mass)
            p.mul_(1 + self.weight * mass).scatter_add_(1, sharpest, largest.mul_(-self.weight))
        scores.scatter_add_(1, targets, -counted)
        cross_entropy = log_total + maximum - target_scores
        return torch.cat([cross_entropy, penalty], dim=1).masked_fill_(ignored[:, None], 0).t()

    def _from_mass(self, mass: Tensor) -> Tensor:
        return -mass if self.kind == "neg_max_prob" else 1 - mass


def _rows(logits: Tensor) -> Iterator[slice]:
    """Splits the rows of `logits` into parts of LOGITS_AT_ONCE logits at most, one row at least."""
    size = max(1, LOGITS_AT_ONCE // logits.shape[1])
    return (slice(start, start + size) for start in range(0, len(logits), size))
