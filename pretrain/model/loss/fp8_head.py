"""The LM head on Transformer Engine's FP8 products, forward and backward at once, chunk by chunk: a `ChunkLoss`.

Here the softmax writes the logits' gradient as FP8 operands, which te.Linear would quantize and transpose from BF16, and the
product of the weight's gradient adds up in FP32 by itself. The gradient's rows have a scale a token, by which what the hidden
states get is multiplied afterwards. The rest is te.Linear's: its quantizers with their scales and histories, its copy of the
quantized weight, its GEMM, called where the audit looks on.

For one scale a tensor (delayed and current scaling) on GPUs up to Hopper, whose FP8 products read both operands along the inner
dimension.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from packing.arrow import IGNORE
from pretrain.model.loss.chunk import ChunkLoss, HeadGradients, softmax_gradient_
from pretrain.model.loss.softmax_kernel import QuantizedGradient, quantized_softmax_gradient
from pretrain.precision import products
from pretrain.precision.formats.definition import Role
from pretrain.precision.transformer_engine import TransformerEngineBackend, TransformerEngineProduct, split_accumulator

_BF16 = torch.bfloat16
Show = Callable[[Role, Tensor], None]  # a tensor to whoever is watching
ShowResult = Callable[[str, Tensor], None]  # forward, dgrad or wgrad, and what it gave


@contextmanager
def fused_head(
    product: TransformerEngineProduct,
    weight: Tensor,
    *,
    first_microbatch: bool,
    show: Show | None,
    show_result: ShowResult | None,
) -> Iterator[ChunkLoss]:
    """`product` as the LM head with its loss, around the chunks of one forward with gradients, inside of the backend's `forward`.

    weight [vocabulary, hidden] FP32 or BF16, quantized in the step's first microbatch. `show` is called with each operand as it
    stands before it is quantized: its role, and the tensor in BF16. `show_result`: with what the first chunk's products give.
    """
    backend, linear = product.backend, product.linear
    module = importlib.import_module("transformer_engine.pytorch.module.linear")
    watched = backend.observer.during((product.name,)) if backend.observer else nullcontext()
    probe = torch.empty(0, dtype=_BF16, device=weight.device)  # all that is asked of the input is its dtype and device
    with watched, linear.prepare_forward_ctx(probe):
        alone = module.FP8GlobalStateManager.is_first_fp8_module()
        quantized = _quantized_weight(module, linear, weight, first_microbatch=first_microbatch)
        if show:
            show("weight", weight.detach().to(_BF16))
        yield Fp8ChunkLoss(backend, module, linear, quantized, show, show_result)
    if alone and backend.precision.keeps_history:
        # Histories of backward move on in the backward of a forward's first module. With nothing before it, that is this one.
        module.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)


def _quantized_weight(module: ModuleType, linear: nn.Module, weight: Tensor, *, first_microbatch: bool) -> Any:
    """Row-major and transposed, made once a step and kept where te.Linear keeps its own."""
    quantizer = linear.quantizers["scaling_fwd"][module.FP8FwdTensorIdx.GEMM1_WEIGHT]
    quantizer.set_usage(rowwise=True, columnwise=True)
    kept = linear._fp8_workspaces.get("weight")
    refresh = first_microbatch or kept is None
    quantized, made = module.quantize_weight(
        tensor=weight.detach().to(_BF16) if refresh else None,  # FP32 weights are cast when they are quantized and never again
        quantizer=quantizer,
        workspace=kept,
        update_workspace=refresh,
        workspace_dtype=_BF16,
        cache=True,
    )
    if made is not None:
        linear._fp8_workspaces["weight"] = made
    return quantized


@dataclass(frozen=True)
class Fp8ChunkLoss:
    """`weight`: quantized, both layouts."""

    backend: TransformerEngineBackend
    module: ModuleType  # of te.Linear
    linear: nn.Module
    weight: Any
    show: Show | None
    show_result: ShowResult | None

    def __call__(self, hidden: Tensor, labels: Tensor, gradients: HeadGradients, *, first: bool) -> Tensor:
        """See `ChunkLoss`. No bias: a head that has one is not fused."""
        x = hidden.to(_BF16)
        if self.show:
            self.show("input", x)
        quantizer = self.linear.quantizers["scaling_fwd"][self.module.FP8FwdTensorIdx.GEMM1_INPUT]
        quantizer.internal = True  # no tensor that autograd would have to know
        quantizer.set_usage(rowwise=True, columnwise=gradients.weight is not None)
        x = quantizer(x)
        fast = not split_accumulator(self.backend.te_recipe, "fprop")
        logits = products.multiply(self.weight, x, fast_accumulation=fast)
        if logits is None:
            logits, *_ = self._multiply(self.weight, x, "fprop", out_dtype=_BF16)
        watched = self.show_result if first else None
        if watched:
            watched("forward", logits)
        losses, codes = self._softmax_gradient(logits, labels)
        if self.show:
            softmax_gradient_(logits, labels)  # the logits have been used, and take the gradient in BF16
            self.show("grad_output", logits)
        del logits
        if gradients.hidden is not None:
            by_rows = self._operand(codes.rows, None, torch.ones_like(codes.scale_inv))
            self._multiply(self.weight, by_rows, "dgrad", layout="NN", out=gradients.hidden, out_dtype=gradients.hidden.dtype)
            gradients.hidden.mul_(codes.rows_scale_inv[:, None])
            if watched:
                watched("dgrad", gradients.hidden)
        if gradients.weight is not None:
            into = {"out": gradients.weight, "out_dtype": torch.float32, "accumulate": not first}
            self._multiply(x, self._operand(None, codes.columns, codes.scale_inv), "wgrad", layout="NT", **into)
            if watched:
                watched("wgrad", gradients.weight)
        return losses

    def _softmax_gradient(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, QuantizedGradient]:
        """Delayed scaling's scale is the quantizer's, and the chunk's amax goes where its history begins."""
        quantizer = self._gradient_quantizer
        fp8 = products.fp8_dtype(self.backend.te, quantizer.dtype)
        if self.backend.precision.keeps_history:
            return quantized_softmax_gradient(logits, labels, IGNORE, fp8, quantizer.amax, quantizer.scale)
        amax = torch.zeros(1, dtype=torch.float32, device=logits.device)
        power_of_two = quantizer.force_pow_2_scales
        return quantized_softmax_gradient(logits, labels, IGNORE, fp8, amax, None, power_of_two=power_of_two)

    def _operand(self, rows: Tensor | None, columns: Tensor | None, scale_inv: Tensor) -> Any:
        return self.backend.te.Float8TensorStorage(
            data=rows,
            data_transpose=columns,
            fp8_scale_inv=scale_inv,
            fp8_dtype=self._gradient_quantizer.dtype,
            fake_dtype=_BF16,
        )

    @property
    def _gradient_quantizer(self) -> Any:
        return self.linear.quantizers["scaling_bwd"][self.module.FP8BwdTensorIdx.GRAD_OUTPUT1]

    def _multiply(self, left: Any, right: Any, product: str, **options: Any) -> Any:
        """TE's GEMM, looked up at each call, with the accumulators that te.Linear takes for `product`."""
        split = split_accumulator(self.backend.te_recipe, product)
        return self.module.general_gemm(left, right, use_split_accumulator=split, grad=product != "fprop", **options)
