"""Cross-entropy from hidden states and the LM head's weight, without ever holding all logits.

The logits of one microbatch (32,768 tokens x 151,936 words in bf16) are 9 GiB, and a plain loss keeps two or three copies of
them. Here the head computes the loss itself, a chunk of tokens at a time, and evaluation takes the same path: what fits in
training fits there.

Every loss is a SUM over the tokens whose label is not -100, an FP32 scalar; the caller divides by the step's valid tokens over
all microbatches and ranks. Labels are already shifted: `labels[i]` is what token i is to predict.

* `chunked`: ours, any device. Softmax in FP32; the head's weight gradient is summed over chunks in FP32.
* `cce`: the cut-cross-entropy package, CUDA only. Less memory still; it may skip gradient blocks too small to count.
* `reference`: torch's cross_entropy on all logits in FP32. For comparison.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from transformers import PretrainedConfig

from packing.errors import InputError
from pretrain.settings import LossSettings

IGNORE = -100
# What some architectures do to their logits after the head. Only the head is replaced, so their loss would be another model's.
LOGIT_TRANSFORMS = (
    "final_logit_softcapping",
    "logits_soft_cap",
    "output_logit_soft_cap",
    "logit_scale",
    "logits_scaling",
    "lm_head_multiplier",
)


def check(config: PretrainedConfig, settings: LossSettings, device_type: str) -> None:
    """Refuse what would train wrongly or cannot run here. Raises InputError."""
    for key in LOGIT_TRANSFORMS:
        if getattr(config, key, None) not in (None, 0, 1):
            raise InputError(
                f"model: {config.model_type} changes its logits ({key}: {getattr(config, key)}), which no loss here does"
            )
    if settings.kind != "cce":
        return
    remedy = "set loss.kind: chunked"
    if importlib.util.find_spec("cut_cross_entropy") is None:  # an extra of requirements-cuda.txt
        raise InputError(f"loss.kind: cce needs the cut-cross-entropy package: pip install cut-cross-entropy, or {remedy}")
    if device_type != "cuda":
        raise InputError(f"loss.kind: cce needs a CUDA device and this run is on {device_type}; {remedy}")


# (x [n, hidden], weight, bias, later_call) -> logits [n, vocabulary]; later_call: not the first chunk of this forward
Multiply = Callable[..., Tensor]


class LowPrecisionHead(Protocol):
    """The head's product where the precision's scope has it (pretrain.precision.convert)."""

    @property
    def engaged(self) -> bool:
        """Whether a low-precision forward is under way; evaluation multiplies as every other head does."""

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, later_call: bool = False) -> Tensor: ...


class LossHead(nn.Linear):
    """A model's LM head that turns hidden states and labels into the loss; called without labels it is the head it replaced.

    It computes in the autocast dtype where autocast is on, else in the hidden states' dtype; the weight may have another.
    """

    settings: LossSettings
    low_precision: LowPrecisionHead | None = None  # set where the precision's scope has the head

    @classmethod
    def replacing(cls, linear: nn.Linear, settings: LossSettings) -> LossHead:
        """A head on the very same Parameters, so a weight tied to the embedding stays tied."""
        if settings.kind == "cce" and linear.bias is not None:
            raise InputError("loss.kind: cce takes no bias and this model's head has one; set loss.kind: chunked")
        head = cls(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        head.weight, head.bias, head.settings = linear.weight, linear.bias, settings
        return head.train(linear.training)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Hidden states [..., hidden] to logits [..., vocabulary]; with labels [...] int64, to the sum of losses, FP32."""
        if labels is None:
            return F.linear(hidden, *_as(hidden.dtype, self.weight, self.bias))
        multiply = self.low_precision.multiply if self.low_precision and self.low_precision.engaged else None
        hidden, labels = hidden.flatten(0, -2), labels.flatten()
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            hidden = hidden.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            if self.settings.kind == "chunked":
                return chunked_cross_entropy(hidden, self.weight, self.bias, labels, self.settings.chunk, multiply)
            if self.settings.kind == "cce":
                return cut_cross_entropy(hidden, self.weight, labels)
            return reference_cross_entropy(hidden, self.weight, self.bias, labels, multiply)

    def describe(self) -> dict[str, Any]:
        """What computes the loss, for the audit."""
        if self.settings.kind == "cce":
            skipped_below = inspect.signature(_cce()).parameters["filter_eps"].default
            return {"kind": "cce", "options": cut_cross_entropy_options(), "gradient_filter": skipped_below}
        if self.settings.kind == "reference":
            return {"kind": "reference", "softmax": "fp32", "logits": "all at once"}
        in_product = self.weight.is_cuda and products_sum_in_fp32()
        return {
            "kind": "chunked",
            "chunk": self.settings.chunk,
            "softmax": "fp32, compiled" if self.weight.is_cuda else "fp32",
            "weight_gradient": "fp32, summed by the products" if in_product else "fp32, sum of each chunk's product",
        }

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, loss={self.settings.kind}"


def reference_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, multiply: Multiply | None = None
) -> Tensor:
    weight, bias = _as(hidden.dtype, weight, bias)
    logits = multiply(hidden, weight, bias) if multiply else F.linear(hidden, weight, bias)
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


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


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int, multiply: Multiply | None = None
) -> Tensor:
    """Hidden states [T, hidden], weight [vocabulary, hidden], labels [T] -> the sum of losses, FP32.

    The gradients are computed on the way forward, while a chunk's logits exist: three products a chunk, as many as any way of
    computing them, where recomputing the logits in backward would take four. What is kept for backward is the size of the hidden
    states and of the weight, whatever the vocabulary and the number of tokens. `multiply`: the head's low-precision product.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        return ChunkedCrossEntropy.apply(hidden, weight, bias, labels, chunk, multiply)
    losses = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
    token_losses = _kernel(token_losses_only, hidden.device.type)
    weight, bias = _as(hidden.dtype, weight, bias)
    for rows in _chunks(len(hidden), chunk, low_precision=multiply is not None):
        logits = multiply(hidden[rows], weight, bias, rows.start > 0) if multiply else F.linear(hidden[rows], weight, bias)
        losses[rows] = token_losses(logits, labels[rows])
    return _sum(losses)


class ChunkedCrossEntropy(torch.autograd.Function):
    """The loss and, with it, its gradients; backward only scales them."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        multiply: Multiply | None = None,
    ) -> Tensor:
        gradients = _HeadGradients.zeros(hidden, weight, bias, ctx.needs_input_grad[:3])
        working = _as(hidden.dtype, weight, bias)
        losses = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
        softmax_gradient = _kernel(fused_softmax_gradient_ if hidden.is_cuda else softmax_gradient_, hidden.device.type)

        for rows in _chunks(len(hidden), chunk, low_precision=multiply is not None):
            if multiply:
                logits, differentiate = _low_precision_logits(multiply, hidden[rows], *working, later_call=rows.start > 0)
            else:
                logits, differentiate = F.linear(hidden[rows], *working), None
            losses[rows] = softmax_gradient(logits, labels[rows])  # which overwrites the logits with their gradient
            if differentiate:
                gradients.add(rows, *differentiate(logits))
            else:
                gradients.add_products(rows, logits, hidden[rows], working[0])
            del logits, differentiate  # or they would live on beside the next chunk's
        ctx.gradients = (gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return _sum(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, scale: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss was differentiated twice, but the first backward scales its gradients in place")
        gradients, ctx.gradients = ctx.gradients, None
        scaled = (None if g is None else _scale(g, scale, dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True))
        return *scaled, None, None, None


@dataclass
class _HeadGradients:
    """Sums over the chunks, in FP32 except the hidden states', of which each chunk has its own rows; None: not needed."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def zeros(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> _HeadGradients:
        return cls(
            torch.empty_like(hidden) if needed[0] else None,
            torch.zeros_like(weight, dtype=torch.float32) if needed[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if needed[2] else None,
        )

    def add_products(self, rows: slice, logits_gradient: Tensor, hidden: Tensor, weight: Tensor) -> None:
        if self.hidden is not None:
            torch.mm(logits_gradient, weight, out=self.hidden[rows])
        if self.weight is not None:
            add_product_(self.weight, logits_gradient.t(), hidden)
        if self.bias is not None:
            self.bias += logits_gradient.sum(dim=0, dtype=torch.float32)

    def add(self, rows: slice, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        if self.hidden is not None:
            self.hidden[rows] = hidden
        if self.weight is not None:
            self.weight += weight
        if self.bias is not None:
            self.bias += bias


def _low_precision_logits(
    multiply: Multiply, hidden: Tensor, weight: Tensor, bias: Tensor | None, *, later_call: bool
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]]:
    """Logits whose backward is the low-precision product's own, and the function from their gradient to the operands'.

    The product keeps its quantized operands and nothing of the logits, so these may be overwritten: as `data`, whose versions
    autograd does not count. Transformer Engine returns a view, and a view that has been written to cannot be differentiated.
    """
    leaves = [None if t is None else t.detach().requires_grad_() for t in (hidden, weight, bias)]
    with torch.enable_grad():
        logits = multiply(*leaves, later_call)

    def differentiate(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        needed = [leaf for leaf in leaves if leaf is not None]
        found = torch.autograd.grad(logits, needed, gradient)
        return found[0], found[1], found[2] if bias is not None else None

    return logits.data, differentiate


def softmax_gradient_(logits: Tensor, labels: Tensor) -> Tensor:
    """Overwrite logits [n, vocabulary] with softmax - one_hot(label), the losses' gradient; return the losses [n], FP32.

    Both are zero where the label is ignored.
    """
    ignored = labels == IGNORE
    targets = labels.masked_fill(ignored, 0)[:, None]
    scores = logits.float()  # FP32 logits themselves: then nothing of their size is made
    target_scores, maximum = scores.gather(1, targets), scores.amax(dim=-1, keepdim=True)
    total = scores.sub_(maximum).exp_().sum(dim=-1, keepdim=True)
    losses = (total.log() + maximum - target_scores)[:, 0].masked_fill_(ignored, 0)
    gradient = scores.mul_(total.reciprocal_().masked_fill_(ignored[:, None], 0))
    gradient.scatter_add_(1, targets, -(~ignored)[:, None].float())
    if gradient is not logits:
        logits.copy_(gradient)
    return losses


def fused_softmax_gradient_(logits: Tensor, labels: Tensor) -> Tensor:
    """The same, written for the compiler: two reads of the logits and one write, FP32 in registers, no second buffer.

    The label is found by comparing column numbers, which costs nothing inside the kernel; a scatter would end the fusion, and
    subtracting 1 from a probability already rounded to BF16 would lose what a well-predicted token still has to learn.
    """
    ignored = labels == IGNORE
    scores = logits.float()
    maximum = scores.amax(dim=-1, keepdim=True)
    log_total = maximum + (scores - maximum).exp().sum(dim=-1, keepdim=True).log()
    target_scores = scores.gather(1, labels.masked_fill(ignored, 0)[:, None])
    losses = (log_total - target_scores)[:, 0].masked_fill(ignored, 0)
    is_target = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    gradient = (scores - log_total).exp() - is_target.float()  # exponentials used twice would be stored, and in FP32
    logits.copy_(gradient.masked_fill(ignored[:, None], 0))
    return losses


def token_losses_only(logits: Tensor, labels: Tensor) -> Tensor:
    """Losses [n] FP32 from logits [n, vocabulary], zero where ignored, for evaluation."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="none")


@functools.cache
def _kernel(function: Callable[[Tensor, Tensor], Tensor], device_type: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Compiled on CUDA, once a process; a CPU gains little from it and would wait for a C++ compiler."""
    return torch.compile(function, fullgraph=True) if device_type == "cuda" else function


def _chunks(tokens: int, chunk: int, *, low_precision: bool = False) -> Iterator[slice]:
    """Rows of at most `chunk` tokens, as even as they divide: two shapes at most, for the compiler's sake.

    Low-precision products take tokens in blocks of 16 to 128, of which a whole microbatch is a multiple; so are then its chunks.
    """
    size = math.ceil(tokens / math.ceil(tokens / chunk))
    if low_precision:
        block = math.gcd(tokens, 128)
        size = math.ceil(size / block) * block
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right in FP32, in one product where it can write FP32 from BF16 factors."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and products_sum_in_fp32():
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left @ right


@functools.cache
def products_sum_in_fp32() -> bool:
    """Whether this torch and GPU add a product of BF16 matrices to an FP32 one: tried, as no version number tells."""
    total = torch.ones(16, 16, device="cuda")
    factor = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return bool((total == 17).all())


def _as(dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The head in the dtype of its products: one copy a call where the parameters are FP32 and the products BF16."""
    return weight.to(dtype), None if bias is None else bias.to(dtype)


def _scale(gradient: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """gradient x scale in `dtype`, in place where that is its own.

    A scale of one dimension keeps the product in FP32; a scale of none would first be rounded to the gradient's BF16, and with
    it every gradient of the step, by the same factor.
    """
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, scale.reshape(1), out=out)


def _sum(losses: Tensor) -> Tensor:
    """In FP64: a hundred thousand FP32 losses are summed in no time, and their order no longer shows."""
    return losses.sum(dtype=torch.float64).float()
