"""Cross-entropy from hidden states and the LM head's weight, a chunk of tokens at a time.

The logits of one microbatch (32,768 tokens x 151,936 words in bf16) are 9 GiB, and a plain loss keeps two or three copies of
them. Here no more than a chunk of them exists at once.

The gradients are computed on the way forward, while a chunk's logits exist: three products a chunk, as many as any way of
computing them, where recomputing the logits in backward would take four. What is kept for backward is the size of the hidden
states and of the weight, whatever the vocabulary and the number of tokens.

What a chunk is computed with is a `ChunkLoss`. There are three: plain products; a low-precision product that is differentiated
like any other; and one that has the softmax write its gradient in the format of the next products (pretrain.model.loss.fp8_head).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.model.loss.softmax import softmax_gradient_, token_losses


@dataclass
class HeadGradients:
    """Of the sum of losses, by what the head multiplies; None: not needed. The hidden states' are in their dtype, each chunk
    writes its own rows. Those of weight [vocabulary, hidden] and bias add up over the chunks, in FP32."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def begun(cls, hidden: Tensor, weight: Tensor, bias: Tensor | None, needed: Sequence[bool]) -> HeadGradients:
        """Room for them. The first chunk overwrites the weight's, which saves writing zeros and reading them.

        It is allocated for each microbatch and gone before the layers' backward begins, whose workspace takes its place: kept
        from one to the next, 1.2 GB for a vocabulary of 151,936, it would save no time and stand beside that at the peak.
        """
        return cls(
            torch.empty_like(hidden) if needed[0] else None,
            torch.empty_like(weight, dtype=torch.float32) if needed[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if needed[2] else None,
        )

    def of(self, rows: slice) -> HeadGradients:
        """As a chunk of these tokens sees them."""
        return self if self.hidden is None else replace(self, hidden=self.hidden[rows])


class ChunkLoss(Protocol):
    """What computes a chunk: losses [n] FP32 from hidden states [n, hidden] and labels [n], and its part of `gradients`.

    `first`: of the forward; it overwrites the weight's sum, which holds nothing yet.
    """

    def __call__(self, hidden: Tensor, labels: Tensor, gradients: HeadGradients, *, first: bool) -> Tensor: ...


class LowPrecisionHead(Protocol):
    """The head's product where the precision's scope has it (pretrain.precision.linear)."""

    @property
    def active(self) -> bool:
        """Whether a low-precision forward is under way; evaluation multiplies as every other head does."""

    @property
    def fuses(self) -> bool:
        """Whether it has a `fused`, which a head with a bias has not."""

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, later_call: bool = False) -> Tensor:
        """x [n, hidden] -> logits [n, vocabulary], differentiable; `later_call`: not the first chunk of this forward."""

    def fused(self, weight: Tensor) -> AbstractContextManager[ChunkLoss]:
        """Entered around a forward that computes gradients; without a graph of its own."""


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    chunk: int,
    low_precision: LowPrecisionHead | None = None,
) -> Tensor:
    """Hidden states [T, hidden], weight [vocabulary, hidden], labels [T] -> the sum of losses, FP32.

    Where the weight has a `main_grad` (FP32 or BF16, of its shape), backward adds the gradient to that and returns none.
    """
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, weight, bias)):
        return ChunkedCrossEntropy.apply(hidden, weight, bias, labels, chunk, low_precision)
    losses = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
    multiply = low_precision.multiply if low_precision else _plain_product
    working = in_dtype(hidden.dtype, weight, bias)
    for rows in chunks(len(hidden), chunk, low_precision=low_precision is not None):
        losses[rows] = token_losses(multiply(hidden[rows], *working, rows.start > 0), labels[rows])
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
        low_precision: LowPrecisionHead | None,
    ) -> Tensor:
        gradients = HeadGradients.begun(hidden, weight, bias, ctx.needs_input_grad[:3])
        losses = torch.empty(labels.shape, dtype=torch.float32, device=labels.device)
        with _chunk_loss(hidden.dtype, weight, bias, low_precision) as chunk_loss:
            for rows in chunks(len(hidden), chunk, low_precision=low_precision is not None):
                losses[rows] = chunk_loss(hidden[rows], labels[rows], gradients.of(rows), first=rows.start == 0)
        ctx.gradients, ctx.weight = gradients, weight
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return _sum(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, scale: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss was differentiated twice, but the first backward scales its gradients in place")
        gradients, ctx.gradients = ctx.gradients, None
        main = getattr(ctx.weight, "main_grad", None)
        if main is not None and gradients.weight is not None:
            main.addcmul_(gradients.weight, scale.reshape(1))  # reads both once; the scale stays on the device
            gradients.weight = None
        found = (gradients.hidden, gradients.weight, gradients.bias)
        scaled = (None if g is None else _scale(g, scale, dtype) for g, dtype in zip(found, ctx.dtypes, strict=True))
        return *scaled, None, None, None


def _chunk_loss(
    dtype: torch.dtype, weight: Tensor, bias: Tensor | None, low_precision: LowPrecisionHead | None
) -> AbstractContextManager[ChunkLoss]:
    if low_precision and low_precision.fuses:
        return low_precision.fused(weight)
    working = in_dtype(dtype, weight, bias)
    if low_precision:
        return nullcontext(functools.partial(_differentiated_chunk, low_precision.multiply, *working))
    return nullcontext(functools.partial(_plain_chunk, *working))


def _plain_product(hidden: Tensor, weight: Tensor, bias: Tensor | None, later_call: bool) -> Tensor:
    return F.linear(hidden, weight, bias)


def _plain_chunk(
    weight: Tensor, bias: Tensor | None, hidden: Tensor, labels: Tensor, gradients: HeadGradients, *, first: bool
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    losses = softmax_gradient_(logits, labels)
    if gradients.hidden is not None:
        torch.mm(logits, weight, out=gradients.hidden)
    if gradients.weight is not None:
        add_product_(gradients.weight, logits.t(), hidden, overwrite=first)
    if gradients.bias is not None:
        gradients.bias += logits.sum(dim=0, dtype=torch.float32)
    return losses


def _differentiated_chunk(
    multiply: Callable[..., Tensor],
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    labels: Tensor,
    gradients: HeadGradients,
    *,
    first: bool,
) -> Tensor:
    """By a product that brings its own backward.

    It keeps its quantized operands and nothing of the logits, so these may be overwritten: as `data`, whose versions autograd
    does not count. Transformer Engine returns a view, and a view that has been written to cannot be differentiated.
    """
    leaves = [None if t is None else t.detach().requires_grad_() for t in (hidden, weight, bias)]
    with torch.enable_grad():
        logits = multiply(*leaves, not first)
    losses = softmax_gradient_(logits.data, labels)
    found = torch.autograd.grad(logits, [leaf for leaf in leaves if leaf is not None], logits.data)
    if gradients.hidden is not None:
        gradients.hidden.copy_(found[0])
    if gradients.weight is not None:
        gradients.weight.copy_(found[1]) if first else gradients.weight.add_(found[1])
    if gradients.bias is not None:
        gradients.bias += found[2]
    return losses


def chunks(tokens: int, chunk: int, *, low_precision: bool = False) -> Iterator[slice]:
    """Rows of at most `chunk` tokens, as even as they divide, so that no product is a small one.

    Low-precision products take tokens in blocks of 16 to 128, of which a whole microbatch is a multiple; so are then its chunks.
    """
    size = math.ceil(tokens / math.ceil(tokens / chunk))
    if low_precision:
        block = math.gcd(tokens, 128)
        size = math.ceil(size / block) * block
    return (slice(start, min(start + size, tokens)) for start in range(0, tokens, size))


def add_product_(total: Tensor, left: Tensor, right: Tensor, *, overwrite: bool = False) -> None:
    """total += left @ right in FP32, in one product where it can write FP32 from BF16 factors.

    `overwrite` leaves out what `total` held, be it NaN.
    """
    beta = 0 if overwrite else 1
    if left.dtype == total.dtype:
        total.addmm_(left, right, beta=beta)
    elif total.is_cuda and products_sum_in_fp32():
        torch.addmm(total, left, right, beta=beta, out_dtype=torch.float32, out=total)
    elif overwrite:
        total.copy_(left @ right)
    else:
        total += left @ right


@functools.cache
def products_sum_in_fp32() -> bool:
    """Whether this torch and GPU add a product of BF16 matrices to an FP32 one, and write one over what was there: tried, as no
    version number tells."""
    total = torch.full((16, 16), math.nan, device="cuda")
    factor = torch.ones(16, 16, device="cuda", dtype=torch.bfloat16)
    try:
        for beta in (0, 1):
            torch.addmm(total, factor, factor, beta=beta, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError, NotImplementedError):
        return False
    return bool((total == 32).all())


def in_dtype(dtype: torch.dtype, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
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
