"""Faults of products on Transformer Engine, in its linears and in fused layers; they register themselves with `faults.FAULTS`.

Importable where Transformer Engine is. Those that change an operand change it as it reaches the product and back again after it:
codes along the rows and their scales in forward, along the columns (or transposed) where backward multiplies.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from foundation.attributes import holding
from pretrain.model.fused.arithmetic import Arithmetic
from pretrain.model.fused.stacked import StackedProduct
from pretrain.precision import searched
from pretrain.precision.transformer_engine import TransformerEngineProduct
from tests.pretrain.verify.faults import Patch, fault
from tests.pretrain.verify.small_runs import SmallRun

ROWS = ("_rowwise_data", "_data"), ("_rowwise_scale_inv", "_scale_inv")
COLUMNS = ("_columnwise_data", "_transpose"), ("_columnwise_scale_inv", "_scale_inv")
# A product by its layout in cuBLAS's order, and how its left and its right factor are read. The weight, or the input, is left.
GEMMS = {"forward": ("TN", ROWS, ROWS), "dgrad": ("NN", COLUMNS, ROWS), "wgrad": ("NT", COLUMNS, COLUMNS)}

Change = Callable[[Tensor], Tensor]


def on_te(run: SmallRun) -> bool:
    return run.active.backend == "transformer_engine"


def delayed_on_te(run: SmallRun) -> bool:
    return on_te(run) and run.active.precision.keeps_history


def blocks_on_te(run: SmallRun) -> bool:
    return on_te(run) and run.active.precision.block_scaled


def fused_on_te(run: SmallRun) -> bool:
    return on_te(run) and run.packed.fused is not None


def held_otherwise(operand: Any, names: tuple[str, ...], change: Change | None) -> AbstractContextManager[None]:
    """While entered, the first of the attributes that `operand` has is changed."""
    name = next((each for each in names if getattr(operand, each, None) is not None), None)
    if change is None or name is None:
        return nullcontext()
    return holding(operand, **{name: change(getattr(operand, name))})


def changing_gemms(patch: Patch, gemm: str, side: int, codes: Change | None = None, scales: Change | None = None) -> None:
    """Of the model's low-precision products of one kind, the left (0) or right (1) operand."""
    layout, *read = GEMMS[gemm]
    extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
    for module, name in ((extensions, "general_gemm"), (searched, "multiply")):
        patch.setattr(module, name, _changed(getattr(module, name), layout, side, read[side], codes, scales))


def _changed(
    multiply: Callable[..., Any], wanted: str, side: int, names: tuple[Any, Any], codes: Change | None, scales: Change | None
) -> Callable[..., Any]:
    def changed(left: Any, right: Any, *args: Any, layout: str = "TN", **options: Any) -> Any:
        with ExitStack() as changes:
            if layout == wanted:
                for attribute, change in zip(names, (codes, scales), strict=True):
                    changes.enter_context(held_otherwise((left, right)[side], attribute, change))
            return multiply(left, right, *args, layout=layout, **options)

    return changed


@fault("the transposed weight has the wrong rows, in hardware", on_te)
def te_transposed_of_the_wrong_rows(run: SmallRun, patch: Patch) -> None:
    changing_gemms(patch, "dgrad", 0, codes=lambda codes: codes.roll(1, -1))


@fault("the transposed input has the wrong tokens, in hardware", on_te)
def te_input_of_the_wrong_tokens(run: SmallRun, patch: Patch) -> None:
    changing_gemms(patch, "wgrad", 0, codes=lambda codes: codes.roll(1, -1))


@fault("the gradient of the input is a quarter too large, in hardware", on_te)
def te_dgrad_too_large(run: SmallRun, patch: Patch) -> None:
    changing_gemms(patch, "dgrad", 1, scales=lambda scales: scales * 1.25)


@fault("a weight's gradient is that of every second token, doubled, in hardware", on_te)
def te_half_of_the_tokens(run: SmallRun, patch: Patch) -> None:
    def every_second(codes: Tensor) -> Tensor:
        halved = codes.clone()
        halved[..., 1::2] = 0
        return halved

    changing_gemms(patch, "wgrad", 1, codes=every_second, scales=lambda scales: scales * 2)


@fault("codes of the input have a mantissa bit less, in hardware", on_te)
def te_bit_less(run: SmallRun, patch: Patch) -> None:
    changing_gemms(patch, "forward", 1, codes=lambda codes: codes & 0xFE)


@fault("codes of the gradient have a mantissa bit less, in hardware", on_te)
def te_bit_less_of_gradients(run: SmallRun, patch: Patch) -> None:
    changing_gemms(patch, "dgrad", 1, codes=lambda codes: codes & 0xFE)


@fault("a block is decoded by its neighbour's scale, in hardware", blocks_on_te)
def te_neighbours_scale(run: SmallRun, patch: Patch) -> None:
    changing_gemms(patch, "forward", 1, scales=lambda scales: scales.roll(1, -1))


@fault("the gradient's blocks are decoded by their neighbours' scales, in hardware", blocks_on_te)
def te_neighbours_scale_of_gradients(run: SmallRun, patch: Patch) -> None:
    changing_gemms(patch, "dgrad", 1, scales=lambda scales: scales.roll(1, -1))


@fault("an operand is decoded by half of its scale, in hardware", on_te)
def te_half_of_the_scale(run: SmallRun, patch: Patch) -> None:
    changing_gemms(patch, "forward", 0, scales=lambda scales: scales / 2)


@fault("E4M3 in place of E5M2, or E5M2 in place of E4M3, for gradients in hardware", on_te)
def te_another_format(run: SmallRun, patch: Patch) -> None:
    dtypes = importlib.import_module("transformer_engine_torch").DType
    e4m3, e5m2 = dtypes.kFloat8E4M3, dtypes.kFloat8E5M2
    for product in run.packed.context.backend._products.values():
        quantizer = product.linear.quantizers["scaling_bwd"][0]
        patch.setattr(quantizer, "dtype", e4m3 if quantizer.dtype == e5m2 else e5m2)


@fault("a weight's quantized copy is that of an earlier step", on_te)
def te_stale_copy(run: SmallRun, patch: Patch) -> None:
    quantize, made = TransformerEngineProduct._weight, set()

    def once(product: TransformerEngineProduct, matrix: Any, *, refresh: bool, differentiable: bool) -> Any:
        first = product.name not in made
        made.add(product.name)
        return quantize(product, matrix, refresh=first, differentiable=differentiable)

    patch.setattr(TransformerEngineProduct, "_weight", once)


@fault("a scale is never updated, in hardware", delayed_on_te)
def te_scale_never_updated(run: SmallRun, patch: Patch) -> None:
    patch.setattr(FP8GlobalStateManager, "reduce_and_update_fp8_tensors", classmethod(lambda cls, forward=True: None))


@fault("the gradients' scales are never updated, in hardware", delayed_on_te)
def te_backward_never_updated(run: SmallRun, patch: Patch) -> None:
    update = FP8GlobalStateManager.reduce_and_update_fp8_tensors

    def forward_only(cls: type, forward: bool = True) -> None:
        if forward:
            update(forward=True)

    patch.setattr(FP8GlobalStateManager, "reduce_and_update_fp8_tensors", classmethod(forward_only))


@fault("a fused norm leaves its weight out", fused_on_te)
def te_norm_without_weight(run: SmallRun, patch: Patch) -> None:
    real = Arithmetic.norm

    def bare(self: Any, x: Tensor, norm: Any, *rest: Any) -> Any:
        with torch.no_grad():
            weight = norm.weight
            before = weight.detach().clone()
            weight.fill_(1.5)
            try:
                return real(self, x, norm, *rest)
            finally:
                weight.copy_(before)

    patch.setattr(Arithmetic, "norm", bare)


@fault("a fused norm's backward drops the residual's gradient", fused_on_te)
def te_residual_lost(run: SmallRun, patch: Patch) -> None:
    real = Arithmetic.norm_backward

    def without(self: Any, dy: Tensor, x: Tensor, statistics: Any, norm: Any, residual: Tensor | None) -> Any:
        return real(self, dy, x, statistics, norm, None)

    patch.setattr(Arithmetic, "norm_backward", without)


@fault("a fused activation's gradient is that of the gate alone", fused_on_te)
def te_half_of_the_activation(run: SmallRun, patch: Patch) -> None:
    real = StackedProduct.weight_gradients

    def gate_only(product: Any, dy: Any, x: Any) -> Any:
        found = real(product, dy, x)
        if len(product.members) == 2 and product.weights.main_gradient is not None:
            main = product.weights.main_gradient
            main[len(main) // 2 :].zero_()
        return found

    patch.setattr(StackedProduct, "weight_gradients", gate_only)
