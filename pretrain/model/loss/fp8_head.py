"""The LM head on Transformer Engine's FP8 products, forward and backward at once, chunk by chunk.

Here the softmax writes the logits' gradient as FP8 operands, which te.Linear would quantize and transpose from BF16, and the
product of the weight's gradient adds up in FP32 by itself. The gradient's rows have a scale a token, by which what the hidden
states get is multiplied afterwards. The rest is te.Linear's: its quantizers with their scales and histories, its copy of the
quantized weight, its GEMM, called where the audit looks on.

For one scale a tensor (delayed and current scaling) on GPUs up to Hopper, whose FP8 products read both operands along the inner
dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from packing.arrow import IGNORE
from pretrain.model.loss.softmax_kernel import quantized_softmax_gradient, softmax_loss
from pretrain.precision.observed import fp8_format
from pretrain.precision.product import Multiplication, PrecisionContext
from pretrain.precision.transformer_engine import TransformerEngineProduct

_BF16 = torch.bfloat16


@contextmanager
def fused_head(
    product: TransformerEngineProduct, weight: Tensor, context: PrecisionContext
) -> Iterator[Callable[..., Tensor]]:
    """`product` as the LM head with its loss, around the chunks of one forward with gradients, inside of the backend's `forward`.
    Each is computed by what is yielded, called as that of `head._differentiating`.

    weight [vocabulary, hidden] FP32 or BF16, quantized in the step's first microbatch. The observers of `context` see each
    operand in BF16, as it stands before it is quantized, and what the first chunk's products give.
    """

    def matrix() -> Tensor:
        return weight.detach().to(_BF16)

    call = Multiplication(product, context, refresh=context.first_microbatch)
    # all that is asked of the input is its dtype and device
    product.begin(torch.empty(0, dtype=_BF16, device=weight.device))
    try:
        alone = product.is_first_in_forward()
        quantized = product.weight_operand(matrix, refresh=call.refresh, differentiable=True)
        call.show_weight(quantized, matrix)
        yield partial(chunk_loss, call, quantized)
    finally:
        product.end()
    if alone and product.backend.precision.keeps_history:
        # Histories of backward move on in the backward of a forward's first module. With nothing before it, that is this one.
        product.finish_backward()


def chunk_loss(
    call: Multiplication,
    weight: Any,
    hidden: Tensor,
    labels: Tensor,
    gradients: tuple[Tensor, Tensor, None],
    *,
    first: bool,
) -> Tensor:
    """`weight`: quantized, both layouts. No bias: a head that has one is not fused."""

    def show_result(gemm: str, result: Tensor) -> None:
        if first:
            call.show_result(gemm, result)

    product, (d_hidden, d_weight, _) = call.product, gradients
    x = call.operand("input", hidden.to(_BF16))
    logits = product.multiply("forward", x, weight, _BF16)
    show_result("forward", logits)
    quantizer, te = product.quantizer("grad_output", both=True), product.backend.te
    # Delayed scaling's scale is the quantizer's, and the chunk's amax goes where its history begins.
    delayed = product.backend.precision.keeps_history
    amax = quantizer.amax if delayed else torch.zeros(1, dtype=torch.float32, device=logits.device)
    scale = quantizer.scale if delayed else None
    losses, codes = quantized_softmax_gradient(
        logits, labels, IGNORE, fp8_format(te, quantizer.dtype)[0], amax, scale
    )
    if call.seen_by.observers:
        # the logits have been used, and take the gradient in BF16
        softmax_loss(logits, labels, IGNORE, with_gradient=True)
        call.show("grad_output", logits)
    del logits

    def operand(rows: Tensor | None, columns: Tensor | None, scale_inv: Tensor) -> Any:
        options = {"fp8_scale_inv": scale_inv, "fp8_dtype": quantizer.dtype, "fake_dtype": _BF16}
        return te.Float8TensorStorage(data=rows, data_transpose=columns, **options)

    by_rows = operand(codes.rows, None, torch.ones_like(codes.scale_inv))
    product.multiply("dgrad", by_rows, weight, d_hidden.dtype, out=d_hidden)
    d_hidden.mul_(codes.rows_scale_inv[:, None])
    show_result("dgrad", d_hidden)
    product.accumulate(d_weight, operand(None, codes.columns, codes.scale_inv), x, overwrite=first)
    show_result("wgrad", d_weight)
    return losses
