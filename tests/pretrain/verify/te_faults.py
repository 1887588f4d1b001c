"""Faults of Transformer Engine's products, in linears and in fused layers.

Importing this module registers them with `faults.FAULTS`. It can be imported only if Transformer
Engine is installed. A fault of an operand changes the operand before the product and restores it
afterwards. Forward reads the codes and scales along rows, backward those along columns or the
transposed ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import Tensor
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from foundation.overrides import overridden
from pretrain.model.fused import arithmetic
from pretrain.model.fused.arithmetic import StackedPass
from pretrain.precision import cublaslt
from tests.pretrain.verify.faults import Make, Patch, fault, faults_in, patching
from tests.pretrain.verify.small_runs import SmallRun

Change = Callable[[Tensor], Tensor]

ROWS = ("_rowwise_data", "_data"), ("_rowwise_scale_inv", "_scale_inv")
COLUMNS = ("_columnwise_data", "_transpose"), ("_columnwise_scale_inv", "_scale_inv")
# Products by their layout in cuBLAS's order, with the attributes of their left and right factors.
# The left factor is the weight in forward and dgrad and the input in wgrad.
GEMMS = {
    "forward": ("TN", ROWS, ROWS),
    "dgrad": ("NN", COLUMNS, ROWS),
    "wgrad": ("NT", COLUMNS, COLUMNS),
}


def on_te(run: SmallRun) -> bool:
    return run.active.engine == "transformer_engine"


def delayed_on_te(run: SmallRun) -> bool:
    return on_te(run) and run.active.precision.keeps_history


def blocks_on_te(run: SmallRun) -> bool:
    return on_te(run) and run.active.precision.block_scaled


def fused_on_te(run: SmallRun) -> bool:
    return on_te(run) and bool(run.packed.fused.layers)


def with_changed(
    operand: Any, names: tuple[str, ...], change: Change | None
) -> AbstractContextManager[None]:
    """Change the first existing attribute of `names` while the context is entered."""
    name = next(
        (candidate for candidate in names if getattr(operand, candidate, None) is not None), None
    )
    if change is None or name is None:
        return nullcontext()
    return overridden(operand, **{name: change(getattr(operand, name))})


def changing_gemms(
    gemm: str, side: int, codes: Change | None = None, scales: Change | None = None
) -> Make:
    """Return a fault that changes one operand of the low-precision products of one kind.

    `side` is 0 for the left and 1 for the right operand. `codes` and `scales` change its tensors.
    """
    faulty_layout, *factors = GEMMS[gemm]

    def changed(multiply: Callable[..., Any]) -> Callable[..., Any]:
        def multiply_changed(
            left: Any, right: Any, *args: Any, layout: str = "TN", **options: Any
        ) -> Any:
            with ExitStack() as changes:
                if layout == faulty_layout:
                    for attribute, change in zip(factors[side], (codes, scales), strict=True):
                        changes.enter_context(with_changed((left, right)[side], attribute, change))
                return multiply(left, right, *args, layout=layout, **options)

        return multiply_changed

    def make(run: SmallRun, patch: Patch) -> None:
        extensions = importlib.import_module("transformer_engine.pytorch.cpp_extensions")
        for module, name in ((extensions, "general_gemm"), (cublaslt, "multiply")):
            patch.setattr(module, name, changed(getattr(module, name)))

    return make


def rolled(values: Tensor) -> Tensor:
    return values.roll(1, -1)


def every_second(codes: Tensor) -> Tensor:
    halved = codes.clone()
    halved[..., 1::2] = 0
    return halved


def without_last_bit(codes: Tensor) -> Tensor:
    return codes & 0xFE


fault("the rows of the transposed weight are shifted, in hardware", on_te)(
    changing_gemms("dgrad", 0, codes=rolled)
)
fault("the tokens of the transposed input are shifted, in hardware", on_te)(
    changing_gemms("wgrad", 0, codes=rolled)
)
fault("the input's gradient is 25 % too large, in hardware", on_te)(
    changing_gemms("dgrad", 1, scales=lambda scales: scales * 1.25)
)
fault("a weight's gradient uses every second token, doubled, in hardware", on_te)(
    changing_gemms("wgrad", 1, codes=every_second, scales=lambda scales: scales * 2)
)
fault("codes of the input have one mantissa bit too few, in hardware", on_te)(
    changing_gemms("forward", 1, codes=without_last_bit)
)
fault("codes of the gradient have one mantissa bit too few, in hardware", on_te)(
    changing_gemms("dgrad", 1, codes=without_last_bit)
)
fault("a block is decoded with its neighbour's scale, in hardware", blocks_on_te)(
    changing_gemms("forward", 1, scales=rolled)
)
fault("the gradient's blocks are decoded with their neighbours' scales, in hardware", blocks_on_te)(
    changing_gemms("dgrad", 1, scales=rolled)
)
fault("an operand is decoded with half of its scale, in hardware", on_te)(
    changing_gemms("forward", 0, scales=lambda scales: scales / 2)
)


@fault("gradients use E4M3 instead of E5M2, or E5M2 instead of E4M3, in hardware", on_te)
def te_another_format(run: SmallRun, patch: Patch) -> None:
    dtypes = importlib.import_module("transformer_engine_torch").DType
    e4m3, e5m2 = dtypes.kFloat8E4M3, dtypes.kFloat8E5M2
    for gemm in run.packed.context.engine.gemms.values():
        quantizer = gemm.linear.quantizers["scaling_bwd"][0]
        patch.setattr(quantizer, "dtype", e4m3 if quantizer.dtype == e5m2 else e5m2)


def updating(update: Callable[[bool], None]) -> Make:
    """Return a fault that replaces the update of delayed scales.

    `update` is called at the end of every forward (True) and backward (False).
    """
    replacement = classmethod(lambda cls, forward=True: update(forward))
    return lambda run, patch: patch.setattr(
        FP8GlobalStateManager, "reduce_and_update_fp8_tensors", replacement
    )


reduce_and_update = FP8GlobalStateManager.reduce_and_update_fp8_tensors
fault("a scale is never updated, in hardware", delayed_on_te)(updating(lambda forward: None))
fault("the gradients' scales are never updated, in hardware", delayed_on_te)(
    updating(lambda forward: reduce_and_update(forward=True) if forward else None)
)


faults_in(arithmetic, fused_on_te)("""
a fused norm ignores its weight
- return tex.rmsnorm_fwd(x, weight, *options)
+ return tex.rmsnorm_fwd(x, torch.full_like(weight, 1.5), *options)
a fused norm's backward drops the residual's gradient
- dx, *gradients = tex.rmsnorm_bwd_add(dy, x, residual, rstd, weight, *options)
+ dx, *gradients = tex.rmsnorm_bwd_add(dy, x, 0 * residual, rstd, weight, *options)
""")


@fault("a fused activation loses the up projection's gradient", fused_on_te)
@patching(StackedPass, "add_weight_gradient")
def te_half_of_the_activation(
    run: SmallRun, real: Callable[..., None], stacked: StackedPass, dy: Any, x: Any
) -> None:
    real(stacked, dy, x)
    main = stacked.stack.main_gradient
    if len(stacked.stack.members) == 2:
        main[len(main) // 2 :].zero_()
