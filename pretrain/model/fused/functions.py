"""The differentiable pieces of a fused layer: each does in one autograd node what autograd would otherwise do in many.

What is gained: a norm's output is written once, in the format of the product that reads it; the residual's gradient is added
where the norm's is computed; weight gradients go straight to where a step's gradients add up; queries and keys, cheap to make
again from what their product left, are not kept for backward.

The parameters are arguments only so that autograd, and through it DistributedDataParallel and FSDP2, knows of them: the products
look them up themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from pretrain.model import attention_cudnn
from pretrain.model.fused.arithmetic import Activation, Arithmetic, Norm, StackedProduct
from pretrain.model.fused.heads import HeadNorms, Heads
from pretrain.model.fused.rotary import rotate, rotate_backward

Gradients = tuple[Tensor | None, ...]


class NormProduct(torch.autograd.Function):
    """x [tokens, hidden] -> norm(x) w^T + b [tokens, out], and x itself, for the residual.

    Handing x on is what lets backward have both of its gradients at once, and add them in the norm's own kernel.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, arithmetic: Arithmetic, norm: Norm, product: StackedProduct, x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        product.begin(x)
        ctx.opens_forward = arithmetic.opens_forward()
        normed, statistics = arithmetic.norm(x, norm, product)
        y = product.forward(normed)
        product.end()
        ctx.pieces = (arithmetic, norm, product)
        ctx.set_materialize_grads(False)
        arithmetic.save(ctx, x, normed, *statistics)
        return y, x

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor, residual: Tensor | None) -> Gradients:
        arithmetic, norm, product = ctx.pieces
        x, normed, *statistics = arithmetic.saved(ctx)
        bias_gradients = product.weights.bias_gradients(dy)
        dy = product.gradient_operand(dy)
        d_normed = product.input_gradient(dy)
        weight_gradients = product.weight_gradients(dy, normed)
        dx, norm_gradients = arithmetic.norm_backward(d_normed, x, statistics, norm, residual)
        if ctx.opens_forward:
            arithmetic.close_backward()
        return None, None, None, dx, *norm_gradients, *weight_gradients, *bias_gradients


class ProductAdd(torch.autograd.Function):
    """x [tokens, in], residual [tokens, out] -> residual + x w^T + b."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, arithmetic: Arithmetic, product: StackedProduct, x: Tensor, residual: Tensor, *parameters: Tensor
    ) -> Tensor:
        product.begin(x)
        operand = product.operand(x)
        y = product.forward(operand)
        product.end()
        ctx.pieces = (arithmetic, product)
        arithmetic.save(ctx, operand)
        return y.add_(residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> Gradients:
        arithmetic, product = ctx.pieces
        (operand,) = arithmetic.saved(ctx)
        bias_gradients = product.weights.bias_gradients(dy)
        quantized = product.gradient_operand(dy)
        dx = product.input_gradient(quantized)
        return None, None, dx, dy, *product.weight_gradients(quantized, operand), *bias_gradients


class NormMLPAdd(torch.autograd.Function):
    """x [tokens, hidden] -> x + activation(norm(x) below^T + b) above^T + c."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        arithmetic: Arithmetic,
        norm: Norm,
        below: StackedProduct,
        activation: Activation,
        above: StackedProduct,
        x: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        below.begin(x)
        normed, statistics = arithmetic.norm(x, norm, below)
        hidden = below.forward(normed)
        below.end()
        above.begin(hidden)
        activated, kept = arithmetic.activate(hidden, activation, above)
        y = above.forward(activated)
        above.end()
        ctx.pieces = (arithmetic, norm, below, activation, above)
        arithmetic.save(ctx, x, normed, hidden, kept, *statistics)
        return y.add_(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dy: Tensor) -> Gradients:
        arithmetic, norm, below, activation, above = ctx.pieces
        x, normed, hidden, kept, *statistics = arithmetic.saved(ctx)
        above_bias = above.weights.bias_gradients(dy)
        quantized = above.gradient_operand(dy)
        d_activated = above.input_gradient(quantized)
        d_hidden, activated, below_bias = arithmetic.activate_backward(d_activated, hidden, activation, kept, below, above)
        del d_activated, hidden, kept
        above_weights = above.weight_gradients(quantized, activated)
        del quantized, activated
        d_normed = below.input_gradient(d_hidden)
        below_weights = below.weight_gradients(d_hidden, normed)
        dx, norm_gradients = arithmetic.norm_backward(d_normed, x, statistics, norm, residual=dy)
        return (None,) * 5 + (dx, *norm_gradients, *below_weights, *below_bias, *above_weights, *above_bias)


class Rotation(torch.autograd.Function):
    """The rows of qkv [tokens, (query + 2 kv) x dim] -> q [tokens, query, dim], k and v [tokens, kv, dim]: normed where the model
    norms them, turned by their positions."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, qkv: Tensor, cos: Tensor, sin: Tensor, heads: Heads, eps: float, *norms: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.heads, ctx.eps = heads, eps
        ctx.save_for_backward(cos, sin, *((qkv, *norms) if norms else ()))
        return rotate(qkv, cos, sin, heads, _head_norms(norms, eps, qkv.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, dq: Tensor, dk: Tensor, dv: Tensor) -> Gradients:
        cos, sin, *rest = ctx.saved_tensors
        qkv, *norms = rest or (None,)
        head_norms = _head_norms(norms, ctx.eps, dq.dtype)
        dqkv, *norm_gradients = rotate_backward(dq, dk, dv, qkv, cos, sin, ctx.heads, head_norms)
        return dqkv, None, None, None, None, *(norm_gradients[: len(norms)])


class RotatedAttention(torch.autograd.Function):
    """`Rotation` and cuDNN's attention in one: qkv -> [tokens, query x dim].

    Where heads are normed, backward needs qkv, and queries, keys and values are made again from it, in a hundredth of a step's
    time: kept beside it, they would be 8 of the 65 KB that a token leaves in a layer of Qwen3-1.7B. Elsewhere they are kept in
    its place.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads: Heads,
        eps: float,
        cu_seqlens: Tensor,
        max_seqlen: int,
        scale: float,
        *norms: Tensor,
    ) -> Tensor:
        q, k, v = rotate(qkv, cos, sin, heads, _head_norms(norms, eps, qkv.dtype))
        keep = any(ctx.needs_input_grad)
        output, kept = attention_cudnn.cudnn_forward(q, k, v, cu_seqlens, max_seqlen, scale, keep=keep)
        ctx.heads, ctx.eps, ctx.norms = heads, eps, len(norms)
        ctx.max_seqlen, ctx.scale = max_seqlen, scale
        ctx.save_for_backward(cos, sin, cu_seqlens, output, *kept, *((qkv, *norms) if norms else (q, k, v)))
        return output.view(len(qkv), -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, d_output: Tensor) -> Gradients:
        cos, sin, cu_seqlens, output, statistics, random_state, *rest = ctx.saved_tensors
        if ctx.norms:
            qkv, *norms = rest
            head_norms = _head_norms(norms, ctx.eps, qkv.dtype)
            q, k, v = rotate(qkv, cos, sin, ctx.heads, head_norms)
        else:
            qkv, head_norms, (q, k, v) = None, None, rest
        dq, dk, dv = attention_cudnn.cudnn_backward(
            d_output.view(output.shape), q, k, v, output, (statistics, random_state), cu_seqlens, ctx.max_seqlen, ctx.scale
        )
        del q, k, v, rest
        dqkv, *norm_gradients = rotate_backward(dq, dk, dv, qkv, cos, sin, ctx.heads, head_norms)
        return dqkv, *(None,) * 7, *norm_gradients[: ctx.norms]


def _head_norms(norms: Sequence[Tensor], eps: float, dtype: torch.dtype) -> HeadNorms | None:
    """In the dtype of activations, as the unfused layer's working copies are: FP32 weights compute what exact BF16 ones do.

    Cast in here and not before: autograd would round the gradients to that dtype on their way back.
    """
    return HeadNorms(*(norm.to(dtype) for norm in norms), eps) if norms else None
