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

from foundation.overrides import overridden
from pretrain.model.fused.arithmetic import Arithmetic, StackedPass
from pretrain.precision import searched
from tests.pretrain.verify.faults import Change, Make, Patch, fault
from tests.pretrain.verify.small_runs import SmallRun

ROWS = ("_rowwise_data", "_data"), ("_rowwise_scale_inv", "_scale_inv")
COLUMNS = ("_columnwise_data", "_transpose"), ("_columnwise_scale_inv", "_scale_inv")
# A product by its layout in cuBLAS's order, and how its left and its right factor are read. The weight, or the input, is left.
GEMMS = {
    "forward": ("TN", ROWS, ROWS),
    "dgrad": ("NN", COLUMNS, ROWS),
    "wgrad": ("NT", COLUMNS, COLUMNS),
}


def on_te(run: SmallRun) -> bool:
    return run.active.backend == "transformer_engine"


def delayed_on_te(run: SmallRun) -> bool:
    return on_te(run) and run.active.precision.keeps_history


def blocks_on_te(run: SmallRun) -> bool:
    return on_te(run) and run.active.precision.block_scaled


def fused_on_te(run: SmallRun) -> bool:
    return on_te(run) and run.packed.fused is not None


def held_otherwise(
    operand: Any, names: tuple[str, ...], change: Change | None
) -> AbstractContextManager[None]:
    """While entered, the first of the attributes that `operand` has is changed."""
    name = next((each for each in names if getattr(operand, each, None) is not None), None)
    if change is None or name is None:
        return nullcontext()
    return overridden(operand, **{name: change(getattr(operand, name))})


def changing_gemms(
    gemm: str, side: int, codes: Change | None = None, scales: Change | None = None
) -> Make:
    """Of the model's low-precision products of one kind, the left (0) or right (1) operand."""
    wanted, *read = GEMMS[gemm]

    def changed(multiply: Callable[..., Any]) -> Callable[..., Any]:
        def multiplied(
            left: Any, right: Any, *args: Any, layout: str = "TN", **options: Any
        ) -> Any:
            with ExitStack() as changes:
                if layout == wanted:
                    for attribute, change in zip(read[side], (codes, scales), strict=True):
                        changes.enter_context(
                            held_otherwise((left, right)[side], attribute, change)
                        )
                return multiply(left, right, *args, layout=layout, **options)

        return multiplied

    def make(run: SmallRun, patch: Patch) -> None:
        extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        for module, name in ((extensions, "general_gemm"), (searched, "multiply")):
            patch.setattr(module, name, changed(getattr(module, name)))

    return make


def rolled(values: Tensor) -> Tensor:
    return values.roll(1, -1)


def every_second(codes: Tensor) -> Tensor:
    halved = codes.clone()
    halved[..., 1::2] = 0
    return halved


def a_bit_less(codes: Tensor) -> Tensor:
    return codes & 0xFE


fault("the transposed weight has the wrong rows, in hardware", on_te)(
    changing_gemms("dgrad", 0, codes=rolled)
)
fault("the transposed input has the wrong tokens, in hardware", on_te)(
    changing_gemms("wgrad", 0, codes=rolled)
)
fault("the gradient of the input is a quarter too large, in hardware", on_te)(
    changing_gemms("dgrad", 1, scales=lambda scales: scales * 1.25)
)
fault("a weight's gradient is that of every second token, doubled, in hardware", on_te)(
    changing_gemms("wgrad", 1, codes=every_second, scales=lambda scales: scales * 2)
)
fault("codes of the input have a mantissa bit less, in hardware", on_te)(
    changing_gemms("forward", 1, codes=a_bit_less)
)
fault("codes of the gradient have a mantissa bit less, in hardware", on_te)(
    changing_gemms("dgrad", 1, codes=a_bit_less)
)
fault("a block is decoded by its neighbour's scale, in hardware", blocks_on_te)(
    changing_gemms("forward", 1, scales=rolled)
)
fault("the gradient's blocks are decoded by their neighbours' scales, in hardware", blocks_on_te)(
    changing_gemms("dgrad", 1, scales=rolled)
)
fault("an operand is decoded by half of its scale, in hardware", on_te)(
    changing_gemms("forward", 0, scales=lambda scales: scales / 2)
)


@fault("E4M3 in place of E5M2, or E5M2 in place of E4M3, for gradients in hardware", on_te)
def te_another_format(run: SmallRun, patch: Patch) -> None:
    dtypes = importlib.import_module("transformer_engine_torch").DType
    e4m3, e5m2 = dtypes.kFloat8E4M3, dtypes.kFloat8E5M2
    for gemm in run.packed.context.backend.gemms.values():
        quantizer = gemm.linear.quantizers["scaling_bwd"][0]
        patch.setattr(quantizer, "dtype", e4m3 if quantizer.dtype == e5m2 else e5m2)


def updating(update: Callable[[bool], None]) -> Make:
    """Scales of all products in another way: `update` is called at the end of each forward (True) and backward."""
    named = classmethod(lambda cls, forward=True: update(forward))
    return lambda run, patch: patch.setattr(
        FP8GlobalStateManager, "reduce_and_update_fp8_tensors", named
    )


reduce_and_update = FP8GlobalStateManager.reduce_and_update_fp8_tensors
fault("a scale is never updated, in hardware", delayed_on_te)(updating(lambda forward: None))
fault("the gradients' scales are never updated, in hardware", delayed_on_te)(
    updating(lambda forward: reduce_and_update(forward=True) if forward else None)
)


@fault("a fused norm leaves its weight out", fused_on_te)
def te_norm_without_weight(run: SmallRun, patch: Patch) -> None:
    def bare(self: Any, x: Tensor, norm: Any, *rest: Any) -> Any:
        with torch.no_grad():
            before = norm.weight.detach().clone()
            norm.weight.fill_(1.5)
            try:
                return real(self, x, norm, *rest)
            finally:
                norm.weight.copy_(before)

    real = Arithmetic.norm
    patch.setattr(Arithmetic, "norm", bare)


@fault("a fused norm's backward drops the residual's gradient", fused_on_te)
def te_residual_lost(run: SmallRun, patch: Patch) -> None:
    real = Arithmetic.norm_backward
    patch.setattr(
        Arithmetic,
        "norm_backward",
        lambda self, dy, x, statistics, norm, residual: real(
            self, dy, x, statistics, norm, 0 * residual
        ),
    )


@fault("a fused activation's gradient is that of the gate alone", fused_on_te)
def te_half_of_the_activation(run: SmallRun, patch: Patch) -> None:
    real = StackedPass.weight_gradients

    def gate_only(stacked: StackedPass, dy: Any, x: Any) -> Any:
        gradients = real(stacked, dy, x)
        main = stacked.stack.main_gradient
        if len(stacked.stack.members) == 2 and main is not None:
            main[len(main) // 2 :].zero_()
        return gradients

    patch.setattr(StackedPass, "weight_gradients", gate_only)
