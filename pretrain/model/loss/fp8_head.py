"""The LM head with its loss in FP8 on Transformer Engine, forward and backward at once, by chunks.

The softmax writes the logits' gradient as FP8 operands. te.Linear would quantize and transpose it
from BF16. The product of the weight's gradient adds up in FP32 by itself. Each row of the logits'
gradient has its own scale, and the gradient of the hidden states is multiplied by these scales
afterwards. All else is as in other layers: the quantizers with their scales and histories, the
cached weight, and the GEMM, where the audit observes it.

This works with one scale a tensor (delayed and current scaling) on GPUs up to Hopper, whose FP8
products read both operands along the inner dimension.
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
from pretrain.precision.gemm import GemmKind
from pretrain.precision.observed import fp8_format
from pretrain.precision.product import LinearPass, PrecisionContext
from pretrain.precision.transformer_engine import TransformerEngineGemm

_BF16 = torch.bfloat16


@contextmanager
def fused_head(
    gemm: TransformerEngineGemm, weight: Tensor, context: PrecisionContext
) -> Iterator[Callable[..., Tensor]]:
    """Yield the function that computes loss and gradients of a chunk of tokens.

    Enter it inside of the engine's `forward` context, around the chunks of one forward. The
    function is called as the one that `head._differentiating` yields. `weight` [vocabulary,
    hidden], FP32 or BF16, is quantized in the step's first microbatch. The observers of `context`
    see each operand in BF16, before it is quantized, and the products of the first chunk.
    """

    def matrix() -> Tensor:
        return weight.detach().to(_BF16)

    head_pass = LinearPass(gemm, context, refresh=context.first_microbatch, differentiable=True)
    # The library reads nothing of the input but its dtype and device.
    gemm.begin(torch.empty(0, dtype=_BF16, device=weight.device))
    try:
        is_first = gemm.is_first_in_forward()
        quantized_weight = gemm.weight_operand(
            matrix, refresh=head_pass.refresh, differentiable=True
        )
        head_pass.show_weight(quantized_weight, matrix)
        yield partial(chunk_loss, gemm, head_pass, quantized_weight)
    finally:
        gemm.end()
    if is_first and gemm.engine.precision.keeps_history:
        # The backward of a forward's first layer updates the histories. Here the head is the first.
        gemm.finish_backward()


def chunk_loss(
    gemm: TransformerEngineGemm,
    head_pass: LinearPass,
    weight: Any,
    hidden: Tensor,
    labels: Tensor,
    gradients: tuple[Tensor, Tensor, None],
    *,
    first: bool,
) -> Tensor:
    """Return the losses of a chunk, and write its gradients.

    `weight` is quantized in both layouts. There is no bias: a head with a bias is not fused.
    """

    def show_result(kind: GemmKind, result: Tensor) -> None:
        if first:
            for observer in head_pass.observed.result_observers:
                observer(gemm.name, kind, result.detach(), None)

    d_hidden, d_weight, _ = gradients
    x = head_pass.quantize("input", hidden.to(_BF16))
    logits = gemm.matmul("forward", x, weight, _BF16)
    show_result("forward", logits)
    quantizer, te = gemm.quantizer("grad_output", both=True), gemm.engine.te
    # Under delayed scaling the quantizer has the scale, and its amax is the start of the history.
    delayed = gemm.engine.precision.keeps_history
    amax = quantizer.amax if delayed else torch.zeros(1, dtype=torch.float32, device=logits.device)
    scale = quantizer.scale if delayed else None
    losses, codes = quantized_softmax_gradient(
        logits, labels, IGNORE, fp8_format(te, quantizer.dtype)[0], amax, scale
    )
    if head_pass.observed.observers:
        # The logits are used up, so their memory takes the gradient in BF16.
        softmax_loss(logits, labels, IGNORE, with_gradient=True)
        head_pass.show("grad_output", logits)
    del logits

    def operand(rows: Tensor | None, columns: Tensor | None, scale_inv: Tensor) -> Any:
        options = {"fp8_scale_inv": scale_inv, "fp8_dtype": quantizer.dtype, "fake_dtype": _BF16}
        return te.Float8TensorStorage(data=rows, data_transpose=columns, **options)

    by_rows = operand(codes.rows, None, torch.ones_like(codes.scale_inv))
    gemm.matmul("dgrad", by_rows, weight, d_hidden.dtype, out=d_hidden)
    d_hidden.mul_(codes.rows_scale_inv[:, None])
    show_result("dgrad", d_hidden)
    gemm.accumulate(d_weight, operand(None, codes.columns, codes.scale_inv), x, overwrite=first)
    show_result("wgrad", d_weight)
    return losses
