"""The LM head as the loss: hidden states and labels in, the sum of cross-entropies out, without ever holding all logits.

Every loss is a SUM over the tokens whose label is not -100, an FP32 scalar; the caller divides by the step's valid tokens over
all microbatches and ranks. Labels are already shifted: `labels[i]` is what token i is to predict.

A penalty on distributions that are not sharp (pretrain.model.loss.penalty) is added in training, where one is set.

* `chunked`: ours, any device. Softmax in FP32; the head's weight gradient is summed over chunks in FP32.
* `cce`: the cut-cross-entropy package, CUDA only. Less memory still; it may skip gradient blocks too small to count.

The logits of one microbatch (32,768 tokens x 151,936 words in bf16) are 9 GiB, so the chunked loss takes the tokens a chunk at a
time. It computes the gradients on the way forward, while those logits exist: three products a chunk, where recomputing the logits
in backward would take four. What is kept for backward is the size of the hidden states and of the weight.

A chunk is computed by a `ChunkLoss`. There are three: torch's products; a low-precision product that is differentiated like any
other; and one that has the softmax write its gradient in the format of the next products (pretrain.model.loss.fp8_head).
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import PretrainedConfig

from foundation.errors import InputError
from packing.arrow import IGNORE
from pretrain.model.loss.penalty import Penalty
from pretrain.precision import searched
from pretrain.precision.product import LinearCall, PrecisionContext, Product, TakesTurns, add_product_, summing_where
from pretrain.settings.recipe import LossSettings

LogitGradient = Callable[[Tensor, Tensor], Tensor]  # as `softmax_gradient_` and `Penalty.gradient_`
# Of the sum of losses, by what the head multiplies: hidden states, in their dtype; weight [vocabulary, hidden] and bias, in FP32,
# which add up over the chunks. None: not needed.
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
# (hidden [n, hidden], labels [n], gradients, *, first) -> losses [n] FP32, or [2, n] with penalties under them. The `first` chunk
# of a forward overwrites the weight's sum, which holds nothing yet.
ChunkLoss = Callable[..., Tensor]
LOSS_SCOPE = "loss"  # what a profile calls the part of the forward that is the head's

# What some architectures do to their logits after the head. Only the head is replaced, so their loss would be another model's.
LOGIT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
LOGIT_FACTORS = ("logit_scale", "logits_scaling", "lm_head_multiplier")


def check(config: PretrainedConfig, settings: LossSettings, device_type: str) -> None:
    """Refuse what would train wrongly or cannot run here. Raises InputError."""
    for key, neutral in {**dict.fromkeys(LOGIT_CAPS), **dict.fromkeys(LOGIT_FACTORS, 1.0)}.items():
        if (value := getattr(config, key, None)) not in (None, neutral):  # a cap of 1 is a cap; a factor of 1 is none
            raise InputError(
                f"model: {config.model_type} changes its logits ({key}: {value}), which no loss here does; name another model. "
                f"From scratch, `model.config.{key}: {json.dumps(neutral)}` does too"
            )
    if getattr(config, "output_router_logits", None):
        raise InputError(
            "`model.config.output_router_logits: true` adds a loss that balances experts, which no loss here has; set it to false"
        )
    if settings.top_k is not None and settings.top_k >= (vocabulary := config.get_text_config().vocab_size):
        raise InputError(
            f"`loss.top_k: {settings.top_k}`: all {vocabulary} probabilities sum to 1; set it to {vocabulary - 1} at most"
        )
    if settings.kind == "cce":
        if importlib.util.find_spec("cut_cross_entropy") is None:  # an extra of requirements-cuda.txt
            raise InputError("loss.kind: cce needs pip install cut-cross-entropy, or set loss.kind: chunked")
        if device_type != "cuda":
            raise InputError(f"loss.kind: cce needs a CUDA device and this run is on {device_type}; set loss.kind: chunked")


class LossHead(nn.Linear):
    """A model's LM head that turns hidden states and labels into the loss; called without labels it is the head it replaced. It
    computes in the hidden states' dtype; the weight may have another."""

    settings: LossSettings
    low_precision: LowPrecisionHead | None = None  # set where the precision's scope has the head
    _parts: Tensor | None = None  # FP32 [2], see `take_parts`

    @classmethod
    def replacing(cls, linear: nn.Linear, settings: LossSettings) -> LossHead:
        """A head on the very same Parameters, so a weight tied to the embedding stays tied."""
        if settings.kind == "cce" and linear.bias is not None:
            raise InputError("loss.kind: cce takes no bias and this model's head has one; set loss.kind: chunked")
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias, head.settings = linear.weight, linear.bias, settings
        return head.train(linear.training)

    @property
    def penalty(self) -> Penalty | None:
        chosen = self.settings
        return Penalty(chosen.penalty, chosen.penalty_weight, chosen.top_k or 1) if chosen.penalty else None

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Hidden states [..., hidden] to logits [..., vocabulary]; with labels [...] int64, to the sum of losses, FP32: in
        training of what is trained, in evaluation of the cross-entropies."""
        if labels is None:
            return F.linear(hidden, *in_dtype(hidden.dtype, self.weight, self.bias))
        # Evaluation, outside of a low-precision forward, multiplies as every other head does.
        low_precision = self.low_now if self.low_now and self.low_now.context.low_precision else None
        hidden, labels, penalty = hidden.flatten(0, -2), labels.flatten(), self.penalty
        if self.settings.kind == "cce":
            return cut_cross_entropy(hidden, self.weight, labels)
        head, at_once = (hidden, self.weight, self.bias, labels), self.settings.tokens_at_once
        trained, parts = chunked_loss(*head, at_once, low_precision, penalty)
        if penalty is None:
            return trained
        self._parts = parts if self._parts is None else self._parts + parts
        return trained if self.training else parts[0]

    @property
    def low_now(self) -> LowPrecisionHead | None:
        """The head's products in the precision whose turn it is; None where that leaves the head in BF16."""
        return self.low_precision if self.low_precision is not None and self.low_precision.is_low else None

    def take_parts(self) -> Tensor | None:
        """The sums of cross-entropies and of penalties (not multiplied by their weight) since this was last called, FP32 [2].
        None where there was no forward, or there is no penalty."""
        parts, self._parts = self._parts, None
        return parts

    def describe(self) -> dict[str, Any]:
        """What computes the loss, for the audit."""
        penalty = self.penalty
        if self.settings.kind == "cce":
            return {"kind": "cce", "options": cut_cross_entropy_options()}
        softmax = "Triton kernel" if self.weight.is_cuda and not penalty else "torch"
        if self.low_now is not None and self.low_now.supports_fused_loss and not penalty:
            softmax = "Triton kernels that write the gradient as fp8 operands"
        described = {"kind": "chunked", "chunk": self.settings.tokens_at_once, "softmax": f"fp32, {softmax}"}
        return described | ({"penalty": asdict(penalty)} if penalty else {})


def cut_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024 (arXiv:2411.09009)."""
    if not (labels != IGNORE).any():  # its kernels take no empty batch; it reads the labels back from the device anyway
        return (hidden.sum() * 0 + weight.sum() * 0).float()
    options = cut_cross_entropy_options()
    return _cce()(hidden, weight.to(hidden.dtype), labels, ignore_index=IGNORE, reduction="sum", **options).float()


def _cce() -> Callable[..., Tensor]:
    """Imported by the runs that use it: it brings Triton, which takes a third of a second."""
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


@functools.cache
def cut_cross_entropy_options() -> dict[str, bool]:
    """The most exact accumulation that the installed version offers; the release 25.1.1 has none of it."""
    parameters = inspect.signature(_cce()).parameters
    fp32 = {name: True for name in ("accum_e_fp32", "accum_c_fp32") if name in parameters}
    return fp32 or {name: True for name in ("use_kahan",) if name in parameters}


# ── The loss in chunks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def chunked_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    chunk: int,
    low_precision: LowPrecisionHead | None = None,
    penalty: Penalty | None = None,
) -> tuple[Tensor, Tensor]:
    """Hidden states [T, hidden], weight [vocabulary, hidden], labels [T] -> the sum that is trained, FP32, and without a gradient
    what it is made of, FP32 [1 or 2]: the sum of cross-entropies and, where there are any, of penalties without their weight.

    Where the weight has a `main_grad` (FP32 or BF16, of its shape), backward adds the gradient to that and returns none.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        return ChunkedLoss.apply(hidden, weight, bias, labels, chunk, low_precision, penalty)
    losses = _losses_of(labels, penalty)
    working = in_dtype(hidden.dtype, weight, bias)
    of_logits = penalty.losses if penalty else token_losses
    for rows in chunks(len(hidden), chunk, low_precision=low_precision is not None):
        if low_precision:
            logits = low_precision.multiply(hidden[rows], *working, rows.start > 0)
        else:
            logits = F.linear(hidden[rows], *working)
        losses[:, rows] = of_logits(logits, labels[rows])
        del logits  # or they would stand beside those of the next chunk
    return _sums(losses, penalty)


class ChunkedLoss(torch.autograd.Function):
    """The loss and, with it, its gradients; backward only scales them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        low_precision: LowPrecisionHead | None,
        penalty: Penalty | None,
    ) -> tuple[Tensor, Tensor]:
        # Allocated for each microbatch: kept from one to the next they would save no time, and stand beside the workspace of the
        # layers' backward at the peak. The weight's is not filled, as the first chunk overwrites it.
        wanted = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight = torch.empty_like(weight, dtype=torch.float32) if wanted[1] else None
        d_bias = torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None
        losses = _losses_of(labels, penalty)
        with _chunk_loss(hidden.dtype, weight, bias, low_precision, penalty) as chunk_loss:
            for rows in chunks(len(hidden), chunk, low_precision=low_precision is not None):
                gradients = (None if d_hidden is None else d_hidden[rows], d_weight, d_bias)
                losses[:, rows] = chunk_loss(hidden[rows], labels[rows], gradients, first=rows.start == 0)
        ctx.gradients, ctx.weight = (d_hidden, d_weight, d_bias), weight
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        trained, parts = _sums(losses, penalty)
        ctx.mark_non_differentiable(parts)
        return trained, parts

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss was differentiated twice, but the first backward scales its gradients in place")
        (d_hidden, d_weight, d_bias), ctx.gradients = ctx.gradients, None
        main = getattr(ctx.weight, "main_grad", None)
        if main is not None and d_weight is not None:
            main.addcmul_(d_weight, scale.reshape(1))  # reads both once; the scale stays on the device
            d_weight = None
        gradients = zip((d_hidden, d_weight, d_bias), ctx.dtypes, strict=True)
        return *(None if each is None else _scale(each, scale, dtype) for each, dtype in gradients), None, None, None, None


def _chunk_loss(
    dtype: torch.dtype,
    weight: Tensor,
    bias: Tensor | None,
    low_precision: LowPrecisionHead | None,
    penalty: Penalty | None,
) -> AbstractContextManager[ChunkLoss]:
    """What computes the chunks of one training forward."""
    if low_precision and low_precision.supports_fused_loss and not penalty:
        from pretrain.model.loss.fp8_head import fused_head  # brings Triton, which takes a while

        return fused_head(low_precision.product, weight, low_precision.context)
    computes = low_precision.chunk if low_precision else _torch_chunk
    gradient_ = penalty.gradient_ if penalty else softmax_gradient_
    dtype = low_precision.context.compute_dtype if low_precision else dtype
    return nullcontext(functools.partial(computes, gradient_, *in_dtype(dtype, weight, bias)))


def _torch_chunk(
    gradient_: LogitGradient,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    labels: Tensor,
    gradients: Gradients,
    *,
    first: bool,
) -> Tensor:
    logits = searched.linear(hidden, weight) if hidden.is_cuda and bias is None else F.linear(hidden, weight, bias)
    losses = gradient_(logits, labels)
    d_hidden, d_weight, d_bias = gradients
    if d_hidden is not None:
        torch.mm(logits, weight, out=d_hidden)
    if d_weight is not None:
        add_product_(d_weight, logits.t(), hidden, overwrite=first)
    if d_bias is not None:
        d_bias += logits.sum(dim=0, dtype=torch.float32)
    return losses


class LowPrecisionHead(TakesTurns):
    """The head's product in low precision: the head stays where it is, and tied, and only its products change."""

    def __init__(self, name: str, product: Product, context: PrecisionContext) -> None:
        """`product`: of the context's present backend."""
        self.name, self.context = name, context
        self.products = {context.backend: product}

    @property
    def supports_fused_loss(self) -> bool:
        """Whether the softmax can write its gradient as this product's operand; every product can `multiply`."""
        return getattr(self.product, "supports_fused_loss", False)

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, later_call: bool = False) -> Tensor:
        """x [n, hidden] -> logits [n, vocabulary], for evaluation; `later_call`: not the first chunk of this forward."""
        return self.context.multiply(self.name, self.product, x, weight, bias, later_call=later_call)

    def chunk(
        self,
        gradient_: LogitGradient,
        weight: Tensor,
        bias: Tensor | None,
        hidden: Tensor,
        labels: Tensor,
        gradients: Gradients,
        *,
        first: bool,
    ) -> Tensor:
        """A `ChunkLoss` after its first three arguments, by this product's operands and gemms; the weight's gradient adds up in
        FP32."""
        d_hidden, d_weight, d_bias = gradients
        call = LinearCall(self.product, self.context, refresh=self.context.first_microbatch and first, differentiable=True)
        logits = call.forward(hidden.to(weight.dtype), weight, bias, keeps=d_weight is not None)
        losses = gradient_(logits, labels)
        needs = (d_hidden is not None, d_weight is not None)
        dx, _ = call.backward(logits, needs, torch.float32, d_weight, overwrite=first)
        if dx is not None:
            d_hidden.copy_(dx)
        if d_bias is not None:
            d_bias += logits.sum(dim=0, dtype=torch.float32)
        return losses


def softmax_gradient_(logits: Tensor, labels: Tensor) -> Tensor:
    """Overwrite logits [n, vocabulary] with softmax - one_hot(label), the losses' gradient; return the losses [n], FP32.

    labels [n] int64. Both are zero where the label is ignored and the logits are finite. Softmax and sums are FP32 whatever the
    logits are, and the gradient is rounded once, to their dtype. A GPU has a kernel for it.
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


def chunks(tokens: int, chunk: int, *, low_precision: bool = False) -> Iterator[slice]:
    """Rows of at most `chunk` tokens, as even as they divide. Low-precision products take tokens in blocks of 16 to 128, of which
    a whole microbatch is a multiple; so are then its chunks."""
    size = math.ceil(tokens / math.ceil(tokens / chunk))
    if low_precision:
        block = math.gcd(tokens, 128)
        size = math.ceil(size / block) * block
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def in_dtype(dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The head in the dtype of its products: one copy a call where the parameters are FP32 and the products BF16."""
    return summing_where(weight, weight.to(dtype)), None if bias is None else bias.to(dtype)


def _scale(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient x scale in `dtype`, in place where that is its own. A scale of one dimension keeps the product in FP32; one of
    none would first be rounded to the gradient's BF16."""
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, scale.reshape(1), out=out)


def _losses_of(labels: Tensor, penalty: Penalty | None) -> Tensor:
    """Room for the cross-entropy of each token and, below it, its penalty."""
    return torch.empty(2 if penalty else 1, len(labels), dtype=torch.float32, device=labels.device)


def _sums(losses: Tensor, penalty: Penalty | None) -> tuple[Tensor, Tensor]:
    """What is trained, and its parts. In FP64: a hundred thousand FP32 losses are summed in no time, and their order no longer
    shows."""
    parts = losses.sum(dim=1, dtype=torch.float64)
    trained = parts[0] + penalty.weight * parts[1] if penalty else parts[0]
    return trained.float(), parts.float()
