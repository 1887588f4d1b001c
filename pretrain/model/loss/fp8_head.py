"""The LM head and its loss in FP8 on Transformer Engine, in chunks of tokens.

For each chunk, forward and gradients are computed together. The softmax kernel writes the gradient
of the logits directly as FP8 operands, while te.Linear would quantize and transpose a BF16
gradient. The GEMM of the weight gradient adds its result to the FP32 sum over chunks. Each row of
the logits' gradient has a scale. The GEMM that computes the gradient of the hidden states does not
use these scales, so its result is multiplied by their reciprocals. The quantizers with their scales
and histories, the cached weight, the GEMM and the probes are the same as in other layers.

This head supports precisions with one scale for a tensor (delayed and current scaling), on GPUs up
to Hopper. On these GPUs, both operands of an FP8 product must be contiguous along the dimension
over which the product sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from packing.arrow import IGNORE
from pretrain.model.loss.logit_change import LogitChange
from pretrain.model.loss.softmax_kernel import quantized_softmax_gradient, softmax_loss
from pretrain.precision.observed import fp8_format
from pretrain.precision.product import LinearPass, PrecisionContext, require_not_freed
from pretrain.precision.transformer_engine import TransformerEngineGemm

_BF16 = torch.bfloat16


class HeadPass(LinearPass):
    """Pass of the head, whose gradient of the logits has a scale for each token."""

    gradient_has_row_scales = True


@contextmanager
def fused_head(
    gemm: TransformerEngineGemm, weight: Tensor, context: PrecisionContext, change: LogitChange
) -> Iterator[Callable[..., Tensor]]:
    """Context manager that yields the function `chunk_loss` for one forward of the head.

    Enter it inside of the engine's `forward` context. The yielded function returns the losses of a
    chunk and writes the gradients. `head._chunk_loss` describes its arguments. `weight`
    [vocabulary, hidden], FP32 or BF16, is quantized in the first microbatch of a step. The
    probes of `context` observe each operand and each result. The loss is that of the logits after
    `change`.
    """

    def matrix() -> Tensor:
        """Return the unquantized weight in BF16."""
        return require_not_freed(weight.detach()).to(_BF16)

    head_pass = HeadPass(gemm, context, differentiable=True)
    # Transformer Engine reads only the dtype and the device of this input.
    gemm.begin(torch.empty(0, dtype=_BF16, device=weight.device))
    try:
        is_first = gemm.claim_first_in_forward()
        quantized_weight = gemm.weight_operand(
            matrix, refresh=head_pass.refresh, differentiable=True
        )
        head_pass.show_weight(quantized_weight, matrix)
        yield partial(chunk_loss, gemm, head_pass, quantized_weight, change)
    finally:
        gemm.end()
    if is_first and gemm.engine.precision.keeps_history:
        # The histories of delayed scaling must be updated after the backward of the Gemm that ran
        # first in the forward. Here the Gemm of the head ran first, and the gradients of the head
        # have been computed above.
        gemm.finish_backward()


def chunk_loss(
    gemm: TransformerEngineGemm,
    head_pass: HeadPass,
    weight: Any,
    change: LogitChange,
    hidden: Tensor,
    labels: Tensor,
    d_hidden: Tensor,
    d_weight: Tensor,
    d_bias: None,
    *,
    first: bool,
) -> Tensor:
    """Return the losses of a chunk, FP32 [n], and write its gradients.

    Args:
        gemm: The Gemm of the head.
        head_pass: The current forward of the head.
        weight: Quantized weight, with FP8 codes by rows and transposed.
        change: Change of the logits before the loss.
        hidden: Hidden states of the chunk [n, hidden].
        labels: Labels of the chunk, int64 [n].
        d_hidden: Buffer for the gradient of `hidden`.
        d_weight: FP32 sum of the weight's gradient over chunks.
        d_bias: None, because this function is not used for a head with a bias.
        first: True to overwrite the buffer of the weight's gradient instead of adding to it.
    """
    x = head_pass.quantize("input", hidden.to(_BF16))
    logits = gemm.matmul("forward", x, weight, _BF16)
    head_pass.show_result("forward", logits)
    quantizer, te = gemm.quantizer("grad_output", both=True), gemm.engine.te
    # Under delayed scaling, the quantizer has the scale, and `quantizer.amax` is the first entry of
    # the amax history.
    delayed = gemm.engine.precision.keeps_history
    amax = quantizer.amax if delayed else torch.zeros(1, dtype=torch.float32, device=logits.device)
    scale = quantizer.scale if delayed else None
    fp8, _ = fp8_format(te, quantizer.dtype)
    losses, codes = quantized_softmax_gradient(logits, labels, IGNORE, fp8, amax, scale, change)
    head_pass.show("grad_output", partial(_overwritten_by_gradient, logits, labels, change))
    del logits

    def operand(rows: Tensor | None, columns: Tensor | None, scale_inv: Tensor) -> Any:
        """Return FP8 codes, by rows or transposed, as an operand of Transformer Engine."""
        options = {"fp8_scale_inv": scale_inv, "fp8_dtype": quantizer.dtype, "fake_dtype": _BF16}
        return te.Float8TensorStorage(data=rows, data_transpose=columns, **options)

    # The codes by rows have a scale for each row, which multiplies the row of the product.
    by_rows = operand(codes.rows, None, torch.ones_like(codes.scale_inv))
    gemm.matmul("dgrad", by_rows, weight, d_hidden.dtype, out=d_hidden)
    d_hidden.mul_(codes.rows_scale_inv[:, None])
    head_pass.show_result("dgrad", d_hidden)
    by_columns = operand(None, codes.columns, codes.scale_inv)
    head_pass.weight_gradient(by_columns, x, d_weight, overwrite=first)
    return losses


def _overwritten_by_gradient(logits: Tensor, labels: Tensor, change: LogitChange) -> Tensor:
    """Return `logits`, overwritten by the gradient of the loss in BF16."""
    softmax_loss(logits, labels, IGNORE, change=change, with_gradient=True)
    return logits
