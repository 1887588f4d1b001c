"""The LM head as the loss: hidden states and labels in, the sum of cross-entropies out, without ever holding all logits.

The loss is a SUM over the tokens whose label is not -100, an FP32 scalar; the caller divides by the step's valid tokens over all
microbatches and ranks. Labels are already shifted: `labels[i]` is what token i is to predict. A penalty on distributions that are
not sharp is added in training, where one is set.

The logits of one microbatch (32,768 tokens x 151,936 words in bf16) are 9 GiB, so tokens are taken a chunk at a time. Gradients
are computed on the way forward, while a chunk's logits exist: three products a chunk, where recomputing the logits in backward
would take four. What is kept for backward is the size of the hidden states and of the weight. Softmax is in FP32, and the
weight's gradient is summed over chunks in FP32.

`loss.kind: cce` leaves all of it to the cut-cross-entropy package (Wijmans et al., arXiv:2411.09009), whose kernel never writes
the logits: less memory still, and it may skip gradient blocks that are too small to count.

Else three things multiply: torch; a low-precision product, as of any linear; and one that has the softmax write its gradient in
the format of the next products (pretrain.model.loss.fp8_head).
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import PretrainedConfig

from foundation.errors import InputError
from packing.arrow import IGNORE
from pretrain.precision.gemm import Gemm
from pretrain.precision.product import LinearPass, LinearState, PrecisionContext, summing_where
from pretrain.precision.searched import add_product_, linear
from pretrain.settings.recipe import LossSettings, PenaltyKind

# Of the sum of losses, by what the head multiplies: hidden states, in their dtype; weight [vocabulary, hidden] and bias, where
# there is one, in FP32, which add up over the chunks.
Gradients = tuple[Tensor, Tensor, Tensor | None]
# of the loss in plain torch, in FP32: 16 MiB, some three times over, whatever the chunk
LOGITS_AT_ONCE = 2**22

# What some architectures do to their logits after the head, and the value that does nothing. Only the head is replaced, so their
# loss would be another model's.
_LOGIT_CHANGES = dict.fromkeys(
    ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
)
_LOGIT_CHANGES |= dict.fromkeys(("logit_scale", "logits_scaling", "lm_head_multiplier"), 1.0)


def check(config: PretrainedConfig, settings: LossSettings) -> None:
    """Refuse what would train wrongly, or cannot run here. Raises InputError."""
    if settings.kind == "cce" and not (
        torch.cuda.is_available() and importlib.util.find_spec("cut_cross_entropy")
    ):
        raise InputError(
            "`loss.kind: cce` needs a CUDA device and cut-cross-entropy (requirements-cuda.txt); set it to chunked"
        )
    for key, neutral in _LOGIT_CHANGES.items():
        if (value := getattr(config, key, None)) not in (None, neutral):
            raise InputError(
                f"model: no loss here computes {key}: {value}; name another, or from scratch set it to {json.dumps(neutral)}"
            )


class LossHead(nn.Linear):
    """A model's LM head that turns hidden states and labels into the loss; called without labels it is the head it replaced. It
    computes in the hidden states' dtype, or in the low precision whose turn it is; the weight may have another."""

    state: LinearState
    settings: LossSettings
    chunk: int  # tokens whose logits exist at once
    penalty: Penalty | None
    _parts: Tensor | None = None  # FP32 [2], see `take_parts`

    @classmethod
    def replacing(
        cls,
        linear: nn.Linear,
        settings: LossSettings,
        context: PrecisionContext | None = None,
        name: str = "lm_head",
    ) -> LossHead:
        """Return a head on the same Parameters, so a weight tied to the embedding stays tied.

        `name` is the head's in its model. No engine of `context` computes the head yet.
        """
        if settings.kind == "cce" and linear.bias is not None:
            raise InputError(
                "`loss.kind: cce` takes no bias, and this model's head has one; set it to chunked"
            )
        head = cls(
            linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta"
        )
        head.weight, head.bias = linear.weight, linear.bias
        head.settings, head.chunk = settings, settings.tokens_at_once
        head.state = LinearState(name, context or PrecisionContext(None, linear.weight.dtype))
        head.penalty = (
            Penalty(settings.penalty, settings.penalty_weight) if settings.penalty else None
        )
        return head.train(linear.training)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Hidden states [..., hidden] to logits [..., vocabulary]; with labels [...] int64, to the sum of losses, FP32: in
        training of what is trained, in evaluation of the cross-entropies.

        Where the weight has a `main_grad` (FP32 or BF16, of its shape), backward adds the gradient to that and returns none."""
        if labels is None:
            return F.linear(hidden, *in_dtype(hidden.dtype, self.weight, self.bias))
        low, hidden, labels, operands = (
            self.state.low,
            hidden.flatten(0, -2),
            labels.flatten(),
            (self.weight, self.bias),
        )
        if self.settings.kind == "cce":
            return cut_cross_entropy(hidden, self.weight.to(hidden.dtype), labels)
        if torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (hidden, *operands)
        ):
            trained, parts = ChunkedLoss.apply(hidden, *operands, labels, self, low)
        else:
            dtype = self.state.context.compute_dtype if low else hidden.dtype
            operands = in_dtype(dtype, *operands)

            def losses(rows: slice) -> Tensor:
                logits = (self.state if low else F.linear)(hidden[rows], *operands)
                return token_losses(logits, labels[rows], self.penalty, with_gradient=False)

            trained, parts = self.add_up(losses, labels, low)
        if self.penalty is None:
            return trained
        self._parts = parts if self._parts is None else self._parts + parts
        return trained if self.training else parts[0]

    def add_up(
        self, losses: Callable[[slice], Tensor], labels: Tensor, low: Gemm | None
    ) -> tuple[Tensor, Tensor]:
        """The sum that is trained, FP32, and what it is made of, FP32 [1 or 2]: the sum of cross-entropies and, where there are
        any, of penalties without their weight. `losses`: FP32 [n] of the tokens of a chunk, or [2, n] with penalties under them.
        """
        all_losses = torch.empty(
            2 if self.penalty else 1, len(labels), dtype=torch.float32, device=labels.device
        )
        for rows in chunks(len(labels), self.chunk, low_precision=low is not None):
            all_losses[:, rows] = losses(rows)
        # In FP64: a hundred thousand FP32 losses are summed in no time, and their order no longer shows.
        parts = all_losses.sum(dim=1, dtype=torch.float64)
        trained = parts[0] + self.penalty.weight * parts[1] if self.penalty else parts[0]
        return trained.float(), parts.float()

    def take_parts(self) -> Tensor | None:
        """The sums of cross-entropies and of penalties (not multiplied by their weight) since this was last called, FP32 [2].
        None where there was no forward, or there is no penalty."""
        parts, self._parts = self._parts, None
        return parts


def cut_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The sum of losses, FP32, from operands of one dtype."""
    from cut_cross_entropy import linear_cross_entropy  # brings Triton, which takes a while

    # the kernel takes no empty batch; it reads the labels back from the device anyway
    if not (labels != IGNORE).any():
        return (hidden.sum() * 0 + weight.sum() * 0).float()
    return linear_cross_entropy(
        hidden, weight, labels, ignore_index=IGNORE, reduction="sum"
    ).float()


class ChunkedLoss(torch.autograd.Function):
    """The loss and, with it, its gradients; backward only scales them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: LossHead,
        low: Gemm | None,
    ) -> tuple[Tensor, Tensor]:
        # Allocated for each microbatch: kept from one to the next they would save no time, and stand beside the workspace of the
        # layers' backward at the peak. The weight's is not filled, as the first chunk overwrites it.
        d_hidden, d_weight = torch.empty_like(hidden), torch.empty_like(weight, dtype=torch.float32)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        with _differentiating(head, low, hidden.dtype) as of_chunk:

            def losses(rows: slice) -> Tensor:
                return of_chunk(
                    hidden[rows],
                    labels[rows],
                    (d_hidden[rows], d_weight, d_bias),
                    first=rows.start == 0,
                )

            trained, parts = head.add_up(losses, labels, low)
        ctx.gradients, ctx.weight = (d_hidden, d_weight, d_bias), weight
        ctx.dtypes = (hidden.dtype, weight.dtype, weight.dtype)
        ctx.mark_non_differentiable(parts)
        return trained, parts

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (d_hidden, d_weight, d_bias), ctx.gradients = ctx.gradients, None
        main = getattr(ctx.weight, "main_grad", None)
        if main is not None:
            # reads both once; the scale stays on the device
            main.addcmul_(d_weight, scale.reshape(1))
            d_weight = None
        gradients = zip((d_hidden, d_weight, d_bias), ctx.dtypes, strict=True)
        return (
            *(None if each is None else _scale(each, scale, dtype) for each, dtype in gradients),
            None,
            None,
            None,
        )


def _differentiating(
    head: LossHead, low: Gemm | None, dtype: torch.dtype
) -> AbstractContextManager[Callable[..., Tensor]]:
    """What computes the chunks of one training forward: a function that returns the losses of a chunk of tokens, with its part of
    the gradients written. The `first` chunk overwrites the weight's sum, which holds nothing yet. `dtype`: of hidden states."""
    context = head.state.context
    if low and low.supports_fused_loss and not (context.backend.forward_in_bf16 or head.penalty):
        from pretrain.model.loss.fp8_head import fused_head  # brings Triton, which takes a while

        return fused_head(low, head.weight, context)
    weight, bias = in_dtype(context.compute_dtype if low else dtype, head.weight, head.bias)

    def chunk_loss(hidden: Tensor, labels: Tensor, gradients: Gradients, *, first: bool) -> Tensor:
        d_hidden, d_weight, d_bias = gradients
        if low:
            linear_pass = LinearPass(
                low, context, refresh=context.first_microbatch and first, differentiable=True
            )
            logits, saved = linear_pass.forward(hidden.to(weight.dtype), weight, bias)
        else:
            logits = linear(hidden, weight, bias)
        losses = token_losses(logits, labels, head.penalty, with_gradient=True)
        if low:
            d_hidden.copy_(linear_pass.backward(logits, saved, d_weight, overwrite=first)[0])
        else:
            torch.mm(logits, weight, out=d_hidden)
            add_product_(d_weight, logits.t(), hidden, overwrite=first)
        if d_bias is not None:
            d_bias += logits.sum(dim=0, dtype=torch.float32)
        return losses

    return nullcontext(chunk_loss)


def token_losses(
    logits: Tensor, labels: Tensor, penalty: Penalty | None = None, *, with_gradient: bool
) -> Tensor:
    """Losses [n] FP32 of logits [n, vocabulary] and labels [n], with a `penalty` [2, n], that under them; zero where ignored.
    `with_gradient` overwrites the logits as `Penalty.gradient_` does, for which a GPU has a kernel without a penalty."""
    if penalty is not None:
        return penalty.gradient_(logits, labels)
    if logits.is_cuda:
        from pretrain.model.loss import softmax_kernel

        return softmax_kernel.softmax_loss(logits, labels, IGNORE, with_gradient=with_gradient)
    if with_gradient:
        return Penalty().gradient_(logits, labels)[0]
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="none")


def chunks(tokens: int, chunk: int, *, low_precision: bool = False) -> Iterator[slice]:
    """Rows of at most `chunk` tokens, as even as they divide. Low-precision products take tokens in blocks of 16 to 128, of which
    a whole microbatch is a multiple; so are then its chunks."""
    size = math.ceil(tokens / math.ceil(tokens / chunk))
    if low_precision:
        block = math.gcd(tokens, 128)
        size = math.ceil(size / block) * block
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def in_dtype(
    dtype: torch.dtype, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The head in the dtype of its products: one copy a call where the parameters are FP32 and the products BF16."""
    return summing_where(weight, weight.to(dtype)), None if bias is None else bias.to(dtype)


def _scale(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient x scale in `dtype`, in place where that is its own. A scale of one dimension keeps the product in FP32; one of
    none would first be rounded to the gradient's BF16."""
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, scale.reshape(1), out=out)


# ── The loss in plain torch, and penalties on distributions that are not sharp ──────────────────────────────────────────────────
#
# Of the probabilities p that the head gives each token's successor:
#
#     non_max_sum    1 - max p          what all but the likeliest word have
#     neg_entropy    -sum p log p       nats; the entropy itself, which is to become small, whatever the name says
#
# What is trained is cross-entropy + weight x penalty, both over the tokens that have a label. A gradient with respect to the
# logits is p (1 + weight max p) - weight p [the likeliest] - [label]; or p (1 - weight (log p + H)) - [label], H the entropy.


@dataclass(frozen=True)
class Penalty:
    """What is added to each token's cross-entropy, and by which factor; without a kind nothing."""

    kind: PenaltyKind | None = None
    weight: float = 0.0

    def gradient_(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Overwrite logits [n, vocabulary] with the gradient of cross-entropy + weight x penalty; return both, [2, n] FP32.

        labels [n] int64. All are zero where the label is ignored and the logits are finite. Softmax and sums are FP32 whatever
        the logits are, and the gradient is rounded once, to their dtype.
        """
        both = torch.empty(2, len(logits), dtype=torch.float32, device=logits.device)
        size = max(1, LOGITS_AT_ONCE // logits.shape[1])  # rows
        for rows, of_rows, into in zip(
            logits.split(size), labels.split(size), both.split(size, dim=1), strict=True
        ):
            scores = rows.float()  # FP32 logits themselves
            into.copy_(self._overwrite(scores, of_rows))
            if scores is not rows:
                rows.copy_(scores)
        return both

    def _overwrite(self, scores: Tensor, labels: Tensor) -> Tensor:
        ignored = labels == IGNORE
        counted, targets = (~ignored)[:, None].float(), labels.masked_fill(ignored, 0)[:, None]
        target_scores, maximum = scores.gather(1, targets), scores.amax(dim=-1, keepdim=True)
        likeliest = scores.argmax(dim=-1, keepdim=True) if self.kind == "non_max_sum" else None
        shifted = scores.sub_(maximum)
        p = shifted.exp() if self.kind == "neg_entropy" else shifted.exp_()
        total = p.sum(dim=-1, keepdim=True)
        log_total = total.log()
        p.mul_(total.reciprocal_().mul_(counted))
        penalty = torch.zeros_like(total)
        if self.kind == "neg_entropy":
            # log p + H is a score minus their mean: where all p are alike, no digits are lost.
            mean = (p * shifted).sum(dim=-1, keepdim=True)
            penalty = log_total - mean
            shifted.sub_(mean).mul_(p).mul_(-self.weight).add_(p)
        elif self.kind == "non_max_sum":
            largest = p.gather(1, likeliest)
            penalty = 1 - largest
            p.mul_(1 + self.weight * largest).scatter_add_(1, likeliest, largest.mul(-self.weight))
        # Before anything is rounded: 1 taken from a BF16 probability would lose what a well-predicted token still has to learn.
        scores.scatter_add_(1, targets, -counted)
        cross_entropy = log_total + maximum - target_scores
        return torch.cat([cross_entropy, penalty], dim=1).masked_fill_(ignored[:, None], 0).t()
