"""The LM head and its loss, computed in chunks of tokens so that all logits never exist at once.

The loss is the SUM of the cross-entropies of all tokens whose label is not -100, an FP32 scalar.
The caller divides it by the number of valid tokens of the step, over all microbatches and ranks.
Labels are already shifted: `labels[i]` is the target of token i. In training, a penalty on
next-token distributions that are not sharp can be added.

The logits of one microbatch (32,768 tokens x 151,936 words in BF16) take 9 GiB, so tokens are
processed in chunks. Gradients are computed in forward, while the logits of a chunk exist. This
needs three matrix products for each chunk. If backward recomputed the logits, four products would
be needed. The gradients of the hidden states and of the weight are kept until backward runs.
Softmax is in FP32, and the weight gradient is summed over chunks in FP32.

`loss.kind: cce` uses the cut-cross-entropy package instead (Wijmans et al., arXiv:2411.09009). The
kernel of this package never writes the logits. It takes even less memory, and it may skip gradient
blocks that are too small to matter.

With any other `loss.kind`, the matrix products are computed by torch or in low precision, as in
other linear layers. On some GPUs, the softmax between low-precision products also writes the
gradient of the logits in low precision (`pretrain.model.loss.fp8_head`).
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PretrainedConfig

from foundation.errors import InputError
from packing.arrow import IGNORE
from pretrain.model.loss.logit_change import UNCHANGED, LogitChange
from pretrain.precision.cublaslt import add_product_, linear
from pretrain.precision.gemm import Gemm
from pretrain.precision.product import LinearState, PrecisionContext, SingleWeightPass, in_dtype
from pretrain.precision.transformer_engine import TransformerEngineGemm
from pretrain.settings.recipe import LossSettings, PenaltyKind

# Maximum number of logits that `Penalty.gradient_` converts to FP32 at a time, for any chunk size.
# They take 16 MiB, and the method needs about three tensors of this size.
LOGITS_AT_ONCE = 2**22


def check(config: PretrainedConfig, settings: LossSettings) -> None:
    """Raise InputError if the loss would be wrong for this model or cannot run on this machine."""
    if settings.kind == "cce":
        has_package = importlib.util.find_spec("cut_cross_entropy") is not None
        if not (torch.cuda.is_available() and has_package):
            raise InputError(
                "`loss.kind: cce` needs a CUDA device and the package cut-cross-entropy "
                "(requirements-cuda.txt); set `loss.kind: chunked`"
            )
    change = LogitChange.of(config)
    if settings.kind == "cce" and change != UNCHANGED:
        raise InputError(
            f"`loss.kind: cce` does not compute the loss of {config.model_type}, which scales or "
            "caps its logits; set `loss.kind: chunked`"
        )


class LossHead(nn.Linear):
    """LM head that maps hidden states and labels to the loss.

    Without labels, it returns logits like the head that it replaces. If the current precision
    quantizes the head, the head computes in this precision. Otherwise it computes in the dtype of
    the hidden states, which may differ from the dtype of the weight.
    """

    def __init__(
        self,
        linear: nn.Linear,
        settings: LossSettings,
        context: PrecisionContext | None = None,
        name: str = "lm_head",
        change: LogitChange = UNCHANGED,
    ) -> None:
        """Create the head with the Parameters of `linear`, so that a tied weight stays tied.

        Args:
            linear: The head of the transformers model.
            settings: Settings of the loss and the penalty.
            context: Precision shared by all low-precision modules. `convert` later adds a Gemm to
                the head for each engine that quantizes the head.
            name: Name of the head in the model.
            change: Change of the logits before the loss.
        """
        has_bias = linear.bias is not None
        if settings.kind == "cce" and has_bias:
            raise InputError(
                "`loss.kind: cce` does not support a bias, and this model's head has a bias; set "
                "`loss.kind: chunked`"
            )
        super().__init__(linear.in_features, linear.out_features, bias=has_bias, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.settings = settings
        self.change = change
        self.chunk = settings.tokens_at_once  # maximum number of tokens in a chunk
        self.state = LinearState(name, context or PrecisionContext(linear.weight.dtype))
        self.penalty: Penalty | None = None
        if settings.penalty:
            self.penalty = Penalty(settings.penalty, settings.penalty_weight or 0.0)
        self._parts: Tensor | None = None  # FP32 [2], see `take_parts`
        self.train(linear.training)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the summed loss, an FP32 scalar, or logits [..., vocabulary] without `labels`.

        In training mode, the loss includes the penalty of `loss.penalty`. In evaluation mode, it is
        the cross-entropy, which has no gradient if there is a penalty. In both modes, a head with a
        penalty adds the parts of the loss to the sums of `take_parts`.

        Gradients are computed unless torch disables them. If the weight has a `main_grad` (FP32 or
        BF16), backward adds the weight gradient to this `main_grad` and returns no gradient for the
        weight.

        Args:
            hidden: Hidden states [..., hidden].
            labels: Target of each token, int64 [...], or None.
        """
        # The Gemm of the current precision, or None if the head is not quantized now.
        low = self.state.low
        if labels is None:
            return self._logits(hidden, low)
        hidden = hidden.flatten(0, -2)
        labels = labels.flatten()
        # `cce` supports neither a bias nor a penalty. The constructor refuses a bias, and the
        # checks of the plan refuse a penalty.
        if self.settings.kind == "cce":
            return cut_cross_entropy(hidden, self.weight.to(hidden.dtype), labels)
        if torch.is_grad_enabled():
            trained, parts = ChunkedLoss.apply(hidden, self.weight, self.bias, labels, self, low)
        else:
            trained, parts = self.sum_losses(self._evaluate(hidden, labels, low))
        if self.penalty is None:
            return trained
        self._add_parts(parts)
        cross_entropy = parts[0]
        return trained if self.training else cross_entropy

    def _logits(self, hidden: Tensor, low: Gemm | None) -> Tensor:
        """Return the logits [..., vocabulary], see `forward`. `low` is as in `_evaluate`."""
        if low is None:
            return F.linear(hidden, *in_dtype(hidden.dtype, self.weight, self.bias))
        logits = self.state(hidden.flatten(0, -2), self.weight, self.bias)
        return logits.unflatten(0, hidden.shape[:-1])

    def _evaluate(self, hidden: Tensor, labels: Tensor, low: Gemm | None) -> Tensor:
        """Return the losses as `sum_losses` expects them, without computing gradients.

        `low` is the Gemm of the head, or None if the head is not quantized.
        """
        dtype = self.state.context.compute_dtype if low else hidden.dtype
        weight, bias = in_dtype(dtype, self.weight, self.bias)
        project = self.state if low else F.linear
        losses = self.empty_losses(labels)
        for rows in chunks(len(labels), self.chunk, low_precision=low is not None):
            # No variable holds the logits, so that they are freed before the next chunk's exist.
            losses[:, rows] = token_losses(
                project(hidden[rows], weight, bias),
                labels[rows],
                self.penalty,
                self.change,
                with_gradient=False,
            )
        return losses

    def empty_losses(self, labels: Tensor) -> Tensor:
        """Return memory for the losses of all tokens, see `sum_losses`."""
        return labels.new_empty(2 if self.penalty else 1, len(labels), dtype=torch.float32)

    def sum_losses(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss to minimize, and the parts of this loss.

        Args:
            losses: FP32 [1, tokens] or [2, tokens]. The first row has the cross-entropies. With a
                penalty, the second row has the penalties, not multiplied by their weight.

        Returns:
            The loss to minimize, an FP32 scalar, and the sum of each row, FP32 [1] or [2].
        """
        # Sum in FP64, so that the order of the sum does not matter. This takes little time even for
        # a hundred thousand losses.
        parts = losses.sum(dim=1, dtype=torch.float64)
        trained = parts[0]
        if self.penalty:
            trained = trained + self.penalty.weight * parts[1]
        return trained.float(), parts.float()

    def _add_parts(self, parts: Tensor) -> None:
        """Add the sums of one forward, FP32 [2], to the sums that `take_parts` returns."""
        # The tensor is not replaced, because CUDA graphs write to it.
        self._parts = parts.clone() if self._parts is None else self._parts.add_(parts)

    def take_parts(self) -> Tensor | None:
        """Return the sums of cross-entropies and penalties since the last call, and reset them.

        The result is FP32 [2]. The penalties are not multiplied by their weight. Return None if the
        loss has no penalty, or if there was no forward.
        """
        if self._parts is None:
            return None
        parts = self._parts.clone()
        self._parts.zero_()
        return parts


def cut_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of cross-entropies, FP32, computed by the cut-cross-entropy package.

    `hidden` [tokens, hidden] and `weight` [vocabulary, hidden] have the same dtype.
    """
    # Imported here because it imports Triton, which is slow.
    from cut_cross_entropy import linear_cross_entropy

    # The kernel does not support a batch in which no token has a label. The kernel waits for the
    # labels anyway, so this check costs no additional synchronization with the device.
    if not (labels != IGNORE).any():
        return (hidden.sum() * 0 + weight.sum() * 0).float()
    return linear_cross_entropy(
        hidden, weight, labels, ignore_index=IGNORE, reduction="sum"
    ).float()


class ChunkedLoss(torch.autograd.Function):
    """Autograd function that computes the gradients in forward. Backward only scales gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        head: LossHead,
        low: Gemm | None,
    ) -> tuple[Tensor, Tensor]:
        # Allocate these gradients for each microbatch. Buffers that are kept between microbatches
        # would save no time, and they would occupy memory while the backward of the layers needs
        # the most memory. The weight gradient is not filled with zeros, because the first chunk
        # overwrites it.
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.empty_like(weight, dtype=torch.float32)
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        losses = head.empty_losses(labels)
        with _chunk_loss_of(head, low, hidden.dtype) as chunk_loss:
            for rows in chunks(len(labels), head.chunk, low_precision=low is not None):
                chunk_losses = chunk_loss(
                    hidden[rows],
                    labels[rows],
                    d_hidden[rows],
                    d_weight,
                    d_bias,
                    first=rows.start == 0,
                )
                losses[:, rows] = chunk_losses
        trained, parts = head.sum_losses(losses)
        ctx.gradients = (d_hidden, d_weight, d_bias)
        ctx.inputs = (weight, hidden.dtype)
        ctx.mark_non_differentiable(parts)
        return trained, parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias = ctx.gradients
        ctx.gradients = None
        weight, hidden_dtype = ctx.inputs
        main = getattr(weight, "main_grad", None)
        if main is None:
            d_weight = _scale(d_weight, scale, weight.dtype)
        else:
            # This call reads both tensors only once and does not copy the scale to the host.
            main.addcmul_(d_weight, scale.reshape(1))
            d_weight = None
        d_hidden = _scale(d_hidden, scale, hidden_dtype)
        if d_bias is not None:
            d_bias = _scale(d_bias, scale, weight.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


def _chunk_loss_of(
    head: LossHead, low: Gemm | None, dtype: torch.dtype
) -> AbstractContextManager[Callable[..., Tensor]]:
    """Return a context manager for the chunks of one training forward.

    It yields a function `chunk_loss(hidden, labels, d_hidden, d_weight, d_bias, *, first)`, which
    returns the losses of a chunk and writes its gradients. `_chunk_loss` describes the arguments.
    The fused head in FP8 finishes its pass when the context is left. All other heads have nothing
    to finish.

    Args:
        head: The head whose loss is computed.
        low: Gemm of the head, or None if the head is not quantized.
        dtype: Dtype of the hidden states.
    """
    context = head.state.context
    if isinstance(low, TransformerEngineGemm) and low.supports_fused_loss and head.penalty is None:
        # Imported here because it imports Triton, which is slow.
        from pretrain.model.loss.fp8_head import fused_head

        return fused_head(low, head.weight, context, head.change)
    weight, bias = in_dtype(context.compute_dtype if low else dtype, head.weight, head.bias)
    return nullcontext(partial(_chunk_loss, head, low, weight, bias))


def _chunk_loss(
    head: LossHead,
    low: Gemm | None,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    labels: Tensor,
    d_hidden: Tensor,
    d_weight: Tensor,
    d_bias: Tensor | None,
    *,
    first: bool,
) -> Tensor:
    """Return the losses of a chunk, FP32 [n] or [2, n], and write its gradients.

    Args:
        head: The head whose loss is computed.
        low: Gemm of the head, or None if the head is not quantized.
        weight: Weight [vocabulary, hidden] in the dtype of the products.
        bias: Bias [vocabulary] in the dtype of the products, or None.
        hidden: Hidden states of the chunk [n, hidden].
        labels: Labels of the chunk, int64 [n].
        d_hidden: Buffer for the gradient of `hidden`, in the dtype of `hidden`.
        d_weight: FP32 sum of the weight's gradient over chunks [vocabulary, hidden].
        d_bias: FP32 sum of the bias' gradient over chunks, or None without a bias.
        first: True to overwrite the buffer of the weight's gradient instead of adding to it.
    """
    if low:
        linear_pass = SingleWeightPass(low, head.state.context, differentiable=True, first=first)
        logits, saved = linear_pass.forward(hidden.to(weight.dtype), weight, bias)
    else:
        logits = linear(hidden, weight, bias)
    losses = token_losses(logits, labels, head.penalty, head.change, with_gradient=True)
    # The tensor `logits` now contains the gradient of the logits.
    if low:
        d_hidden.copy_(linear_pass.backward(logits, saved, d_weight, overwrite=first)[0])
    else:
        torch.mm(logits, weight, out=d_hidden)
        add_product_(d_weight, logits.t(), hidden, overwrite=first)
    if d_bias is not None:
        d_bias += logits.sum(dim=0, dtype=torch.float32)
    return losses


def token_losses(
    logits: Tensor,
    labels: Tensor,
    penalty: Penalty | None,
    change: LogitChange,
    *,
    with_gradient: bool,
) -> Tensor:
    """Return the cross-entropy of each token, FP32 [n], or [2, n] with penalties in the second row.

    Losses are zero for tokens whose label is ignored. On a GPU, losses without a penalty are
    computed by a Triton kernel.

    Args:
        logits: Logits of each token, [n, vocabulary].
        labels: Target of each token, int64 [n].
        penalty: Penalty on each token's distribution, or None.
        change: Change of the logits before softmax.
        with_gradient: True to overwrite the logits with the gradient of the loss, as
            `Penalty.gradient_` does. With a penalty, the logits are always overwritten.
    """
    if penalty is not None:
        return penalty.gradient_(logits, labels, change)
    if logits.is_cuda:
        from pretrain.model.loss import softmax_kernel

        return softmax_kernel.softmax_loss(
            logits, labels, IGNORE, change=change, with_gradient=with_gradient
        )
    if with_gradient:
        return Penalty().gradient_(logits, labels, change)[0]
    scores = change(logits.float())
    return F.cross_entropy(scores, labels, ignore_index=IGNORE, reduction="none")


def chunks(tokens: int, chunk: int, *, low_precision: bool = False) -> Iterator[slice]:
    """Return an iterator over slices that split `tokens` tokens into chunks of about equal size.

    A chunk has at most `chunk` tokens, or a few more with `low_precision`. In low-precision
    products, the number of tokens must be a multiple of the block size of the format, which is 16
    to 128. The number of tokens of a microbatch is such a multiple. With `low_precision`, the
    number of tokens of each chunk is such a multiple too.
    """
    size = math.ceil(tokens / math.ceil(tokens / chunk))
    if low_precision:
        block = math.gcd(tokens, 128)
        size = math.ceil(size / block) * block
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def _scale(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * scale in `dtype`. If the gradient has this dtype, it is scaled in place.

    The scale is reshaped to one dimension, so that the product is computed in FP32. torch would
    round a scale without dimensions to the dtype of a BF16 gradient first.
    """
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, scale.reshape(1), out=out)


# ── The loss in plain torch, and penalties on distributions that are not sharp ──
#
# Let p be the predicted probabilities of the next token. The two kinds of penalty are
#
#     non_max_sum    1 - max p          the probability of all words except the likeliest word
#     neg_entropy    -sum p log p       the entropy H in nats (not its negative, despite the name)
#
# The loss to minimize is cross-entropy + weight * penalty, summed over the tokens that have a
# label. The gradient of this loss with respect to the logits is
#
#     non_max_sum    p (1 + weight max p) - weight p [likeliest] - [label]
#     neg_entropy    p (1 - weight (log p + H)) - [label]
#
# [likeliest] and [label] are 1 at the likeliest word and at the label, and 0 elsewhere.


@dataclass(frozen=True)
class Penalty:
    """Penalty on the next-token distribution of each token. If `kind` is None, the penalty is zero.

    The loss to minimize is the cross-entropy plus `weight` times the penalty.
    """

    kind: PenaltyKind | None = None
    weight: float = 0.0

    def gradient_(self, logits: Tensor, labels: Tensor, change: LogitChange) -> Tensor:
        """Overwrite the logits with the gradient of cross-entropy + weight * penalty.

        Softmax and sums are in FP32 for any dtype of the logits, and the gradient is rounded once,
        to the dtype of the logits. For tokens whose label is ignored, losses and gradients are zero
        if the logits are finite.

        Args:
            logits: Logits of each token, [n, vocabulary].
            labels: Target of each token, int64 [n].
            change: Change of the logits before softmax.

        Returns:
            Cross-entropies and penalties, FP32 [2, n].
        """
        losses = logits.new_empty(2, len(logits), dtype=torch.float32)
        rows = max(1, LOGITS_AT_ONCE // logits.shape[1])
        for some_logits, some_labels, some_losses in zip(
            logits.split(rows), labels.split(rows), losses.split(rows, dim=1), strict=True
        ):
            # `scores` is `some_logits` if the logits are FP32 and are not changed.
            scores = change(some_logits.float())
            # `_overwrite` overwrites the scores, from which the slopes are computed. Without a cap,
            # the slopes are one number.
            slopes = change.slopes(scores)
            some_losses.copy_(self._overwrite(scores, some_labels))
            if change != UNCHANGED:
                scores.mul_(slopes)
            if scores is not some_logits:
                some_logits.copy_(scores)
        return losses

    def _overwrite(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Overwrite FP32 `scores` with their gradient, and return cross-entropies and penalties.

        The arguments and the result are as in `gradient_`.
        """
        ignored = labels == IGNORE
        counted = (~ignored)[:, None].float()
        targets = labels.masked_fill(ignored, 0)[:, None]
        target_scores = scores.gather(1, targets)
        maximum = scores.amax(dim=-1, keepdim=True)
        likeliest = scores.argmax(dim=-1, keepdim=True) if self.kind == "non_max_sum" else None
        shifted = scores.sub_(maximum)
        # `p` has the memory of `scores`, except with neg_entropy, which needs the scores again.
        p = shifted.exp() if self.kind == "neg_entropy" else shifted.exp_()
        total = p.sum(dim=-1, keepdim=True)
        log_total = total.log()
        # Normalize p, and set it to zero for ignored tokens.
        p.mul_(total.reciprocal_().mul_(counted))
        penalty = torch.zeros_like(total)
        # Each kind leaves the gradient, without the term of the label, in the memory of `scores`.
        if self.kind == "neg_entropy":
            # log p + H equals the score minus the mean of all scores weighted by p. This form loses
            # no digits if all p are almost equal.
            mean = (p * shifted).sum(dim=-1, keepdim=True)
            penalty = log_total - mean
            shifted.sub_(mean).mul_(p).mul_(-self.weight).add_(p)
        elif likeliest is not None:
            largest = p.gather(1, likeliest)
            penalty = 1 - largest
            p.mul_(1 + self.weight * largest).scatter_add_(1, likeliest, largest.mul(-self.weight))
        # Subtract the label in FP32. In BF16, p - 1 would lose the small gradient that a
        # well-predicted token still has.
        scores.scatter_add_(1, targets, -counted)
        cross_entropy = log_total + maximum - target_scores
        return torch.cat([cross_entropy, penalty], dim=1).masked_fill_(ignored[:, None], 0).t()
