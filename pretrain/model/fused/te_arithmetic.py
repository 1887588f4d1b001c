"""The arithmetic of fused layers in low precision on Transformer Engine: its quantizers, norms and matrix products, called one by
one.

Its LayerNormLinear and LayerNormMLP fuse less: they add the residual's gradient in a kernel of its own, write the gradient of
SwiGLU in BF16 before they quantize it, and sum gradients of biases that do not exist. Imported only where Transformer Engine is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformer_engine_torch as tex
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.distributed import in_fp8_activation_recompute_phase
from transformer_engine.pytorch.quantization import FP8GlobalStateManager
from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage, prepare_for_saving, restore_from_func_ctx

from pretrain.model.fused import activation
from pretrain.model.fused.arithmetic import Arithmetic, Norm, Operand, StackedProduct, StackedWeight
from pretrain.precision import products
from pretrain.precision.formats.definition import Role
from pretrain.precision.linear import Backend, PrecisionContext
from pretrain.precision.transformer_engine import split_accumulator

_BF16 = tex.DType.kBFloat16
_WEIGHT = "weight"  # the quantized copy's place in its holder, which the backend empties when it forgets what it keeps


class TEStackedProduct(StackedProduct):
    """In BF16, where its turn is no low precision's, it is a `StackedProduct`."""

    holder: nn.Module | None = None  # the te.Linear that has the quantizers of the backend that computes now, None in BF16

    def __init__(
        self, name: str, members: tuple[str, ...], weights: StackedWeight, arithmetic: Arithmetic, low_by: Sequence[Backend]
    ) -> None:
        super().__init__(name, members, weights, arithmetic)
        self.computed_low_by = tuple(low_by)
        self._holders = {
            backend: backend.product(name, weights.in_features, weights.out_features, bias=False).linear for backend in low_by
        }

    def begin(self, x: Tensor) -> None:
        context = self._arithmetic.context
        self.holder = self._holders.get(context.backend)
        self.low_precision = self.holder is not None and context.low_precision
        if self.low_precision:
            self.holder.prepare_forward(x)
            forward, backward = (self.holder.quantizers[key] for key in ("scaling_fwd", "scaling_bwd"))
            for quantizer in (*forward[:2], backward[0]):
                quantizer.internal = True  # bare storage in place of tensors that autograd could see
            for quantizer in (forward[0], backward[0]):
                quantizer.optimize_for_gemm = True

    def input_quantizer(self) -> Any | None:
        """Returns the quantizer of this product's input, None in BF16: for the weight's gradient too, if there will be one."""
        if not self.low_precision:
            return None
        quantizer = self.holder.quantizers["scaling_fwd"][0]
        quantizer.set_usage(rowwise=True, columnwise=self._arithmetic.differentiable)
        return quantizer

    def operand(self, x: Tensor) -> Operand:
        self.show("input", x)
        quantizer = self.input_quantizer()
        return x if quantizer is None else quantizer(x)

    def adds(self, x: Operand) -> bool:
        return super().adds(x) and not self.results_watched  # whoever looks at results is to see the product alone

    def forward(self, x: Operand, residual: Tensor | None = None) -> Tensor:
        if not self.low_precision:
            return super().forward(x, residual)
        weight = self._weight(refresh=self._arithmetic.context.first_microbatch or not self._arithmetic.differentiable)
        y, bias, added = None, self.weights.bias(torch.bfloat16), (None if self.results_watched else residual)
        if bias is None:
            fast = not split_accumulator(self._arithmetic.context.backend.te_recipe, "fprop")
            y = products.multiply(weight, x, fast_accumulation=fast, residual=added)
        if y is None:
            y, added = self._multiply("fprop", weight, x, layout="TN", bias=bias), None
        self.show_result("forward", y, bias)
        self.holder.end_forward()
        return y if added is residual else y.add_(residual)  # where the product has not

    def gradient_quantizer(self) -> Any | None:
        """Returns the quantizer of this product's output gradient, None in BF16."""
        if not self.low_precision:
            return None
        quantizer = self.holder.quantizers["scaling_bwd"][0]
        quantizer.set_usage(rowwise=True, columnwise=True)
        return quantizer

    def gradient_operand(self, dy: Tensor) -> Operand:
        self.show("grad_output", dy)
        quantizer = self.gradient_quantizer()
        return dy.contiguous() if quantizer is None else quantizer(dy.contiguous())

    def input_gradient(self, dy: Operand) -> Tensor:
        if not self.low_precision:
            return super().input_gradient(dy)
        weight = self._weight(refresh=False)
        weight.update_usage(columnwise_usage=True)
        # In FP8 the first algorithm is as fast as any, or the only one (docs/performance.md).
        dx = self._multiply("dgrad", weight, dy, layout="NN", grad=True)
        self.show_result("dgrad", dx)
        return dx

    def weight_gradients(self, dy: Operand, x: Operand) -> list[Tensor | None]:
        if not self.low_precision:
            return super().weight_gradients(dy, x)
        main_gradient = self.weights.main_gradient
        if main_gradient is None:
            gradient = self._multiply("wgrad", x, dy, layout="NT", grad=True)
            self.show_result("wgrad", gradient)
            return self.weights.weight_gradients(gradient)
        before = main_gradient.clone() if self.results_watched else None
        into = {"out": main_gradient, "out_dtype": main_gradient.dtype, "accumulate": True}
        self._multiply("wgrad", x, dy, layout="NT", grad=True, **into)
        if before is not None:
            self.show_result("wgrad", main_gradient - before)
        return [None] * len(self.weights.weights)

    def show(self, role: Role, tensor: Tensor) -> None:
        """Shows an operand to whoever looks at operands: the statistics of a step."""
        if self.low_precision:
            self._arithmetic.context.show(self.name, role, tensor, self)

    def show_result(self, gemm: str, result: Tensor, bias: Tensor | None = None) -> None:
        """Shows a result to whoever looks at what products give: parity."""
        self._arithmetic.context.show_result(self.name, gemm, result, bias)

    @property
    def results_watched(self) -> bool:
        return self.low_precision and bool(self._arithmetic.context.result_observers)

    @property
    def watched(self) -> bool:
        return self.low_precision and bool(self._arithmetic.context.observers)

    def _weight(self, *, refresh: bool) -> QuantizedTensorStorage:
        """[out, in] as the products take it: quantized once a step, kept for the microbatches that follow."""
        kept = self.holder._fp8_workspaces
        if not refresh and _WEIGHT in kept:
            return kept[_WEIGHT]
        weight, differentiable = self.weights.matrix(torch.bfloat16), self._arithmetic.differentiable
        self.show("weight", weight)
        quantizer = self.holder.quantizers["scaling_fwd"][1]
        quantizer.set_usage(rowwise=True, columnwise=differentiable)
        # Blackwell's products read scales in an order of their own, which is made here once or else in every product.
        quantizer.optimize_for_gemm = self.holder._enable_weight_preswizzle(quantizer, weight)
        if not differentiable:  # evaluation neither uses nor replaces the copy that training made
            return quantizer(weight)
        kept.pop(_WEIGHT, None)
        kept[_WEIGHT] = quantizer(weight)
        return kept[_WEIGHT]

    def _multiply(
        self, gemm: str, left: Operand, right: Operand, *, out_dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> Any:
        """Multiplies with the operands in TE's order: cuBLAS counts columns first, so what multiplies from the left is named
        second."""
        split = split_accumulator(self._arithmetic.context.backend.te_recipe, gemm)
        return general_gemm(left, right, out_dtype=out_dtype, use_split_accumulator=split, **options)[0]


class TransformerEngineArithmetic(Arithmetic):
    """Products in the precision of the context's backend, or in BF16. All norms are Transformer Engine's, which write the format
    of the product after them and add the residual's gradient in backward."""

    def __init__(self, context: PrecisionContext) -> None:
        super().__init__(context, by_kernels=True)

    def product(
        self, name: str, members: tuple[str, ...], weights: StackedWeight, *, low_precision: Sequence[Backend] = ()
    ) -> TEStackedProduct:
        return TEStackedProduct(name, members, weights, self, low_precision)

    def norm(
        self, x: Tensor, norm: Norm, product: TEStackedProduct, residual: Tensor | None = None
    ) -> tuple[Operand, tuple[Tensor, ...]]:
        if residual is not None:
            x.add_(residual)
        weight = self._weight_of(norm)
        if product.watched:
            product.show("input", tex.rmsnorm_fwd(x, weight, norm.eps, None, None, _BF16, 0, False)[0])
        y, _, rstd = tex.rmsnorm_fwd(x, weight, norm.eps, None, product.input_quantizer(), _BF16, 0, False)
        return y, (rstd,)

    def norm_backward(
        self, dy: Tensor, x: Tensor, statistics: Sequence[Tensor], norm: Norm, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        weight = self._weight_of(norm)
        if residual is None:
            return tex.rmsnorm_bwd(dy, x, *statistics, weight, 0, False)
        return tex.rmsnorm_bwd_add(dy, x, residual, *statistics, weight, 0, False)

    def activate(self, hidden: Tensor, gate_up: TEStackedProduct, down: TEStackedProduct) -> tuple[Operand, Operand | None]:
        if not down.low_precision:
            return super().activate(hidden, gate_up, down)
        quantizer = down.input_quantizer()
        if down.watched:
            down.show("input", tex.swiglu(hidden, None))
        if gate_up.low_precision and activation.takes(hidden, quantizer):
            return activation.swiglu(hidden, quantizer)
        activated = tex.swiglu(hidden, quantizer)
        return activated, activated

    def activate_backward(
        self, d_activated: Tensor, hidden: Tensor, kept: Operand, gate_up: TEStackedProduct, down: TEStackedProduct
    ) -> tuple[Operand, Operand, list[Tensor]]:
        if not down.low_precision:
            return super().activate_backward(d_activated, hidden, kept, gate_up, down)
        biases, quantizers = [], (gate_up.gradient_quantizer(), down.input_quantizer())
        if gate_up.watched or gate_up.weights.biases:  # who looks at the gradient, or sums it, wants it unquantized
            in_bf16 = tex.dswiglu(d_activated, hidden, None)
            gate_up.show("grad_output", in_bf16)
            biases = gate_up.weights.bias_gradients(in_bf16)
        if gate_up.low_precision and activation.takes(hidden, quantizers[1]):
            return *activation.swiglu_backward(d_activated, hidden, *quantizers, kept), biases
        return tex.dswiglu(d_activated.contiguous(), hidden, quantizers[0]), kept, biases

    def is_first_in_forward(self) -> bool:
        if not FP8GlobalStateManager.is_fp8_enabled():
            return False
        state = FP8GlobalStateManager.quantization_state
        before, first = state.is_first_fp8_module, FP8GlobalStateManager.is_first_fp8_module()
        if in_fp8_activation_recompute_phase():  # the answer was given in forward, and is asked for again
            state.is_first_fp8_module = before
        return first

    def finish_backward(self) -> None:
        """Delayed scaling moves its backward histories on: all gradients of this microbatch have been seen."""
        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)

    def save(self, ctx: FunctionCtx, *operands: Operand) -> None:
        if not self.differentiable:  # nothing was quantized for a weight's gradient, and nobody will ask for it
            return
        for operand in operands:
            if isinstance(operand, QuantizedTensorStorage):
                operand.update_usage(rowwise_usage=False)
        tensors, ctx.tensor_objects = prepare_for_saving(*operands)
        ctx.save_for_backward(*tensors)

    def saved(self, ctx: FunctionCtx) -> list[Operand]:
        return list(restore_from_func_ctx(ctx))
