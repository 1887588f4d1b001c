"""Low-precision products on Transformer Engine, by direct calls of its quantizers and its GEMM.

A te.Linear in a model would store the weight itself and would write a pickled "extra state" into
every state_dict. So the te.Linear of a Gemm is created on the meta device and is not a submodule of
the model. This te.Linear stores the quantizers, histories and scales of the Gemm and never
computes.

Transformer Engine is imported when it is first needed, because the import takes seconds and fails
on a machine without a GPU driver.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from foundation.errors import InputError, one_line
from pretrain.precision import cublaslt, grouped
from pretrain.precision.delayed_state import PLACES, PREFIX
from pretrain.precision.formats.definition import QuantizedPrecision, Role
from pretrain.precision.gemm import Gemm, GemmEngine, GemmKind, Saved
from pretrain.precision.observed import NO_CONTEXT, watched
from pretrain.precision.settings import ActivePrecision

# Map each direction to the key of its histories and scales in Transformer Engine's fp8_meta. The
# directions are the same as in `delayed_state.PLACES` and in checkpoints.
TE_DIRECTIONS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
# Map each product to its layout, see `cublaslt.multiply`, and to its name in Transformer Engine's
# recipes.
TE_GEMMS = {"forward": ("TN", "fprop"), "dgrad": ("NN", "dgrad"), "wgrad": ("NT", "wgrad")}
# Prefixes of the environment variables that change the codes or scales of Transformer Engine.
NUMBERS_CHANGED_BY = (
    # Defaults of recipes.
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_FP8_BLOCK_SCALING",
    "NVTE_FP8_CURRENT_SCALING",
    "NVTE_NVFP4_",
    # Quantizers of MXFP8 in CuTe DSL instead of CUDA.
    "NVTE_ENABLE_CUTEDSL",
    # A module that replaces all kernels.
    "NVTE_PLUGIN",
    # Scales of delayed scaling by torch.compile, whose division is not exact.
    "NVTE_UNFUSED_FP8_UPDATE",
    # Approximate reciprocals in the quantizer of NVFP4, and no rounding to BF16 after the Hadamard
    # transform.
    "NVTE_USE_FAST_MATH",
)
# The key of fp8_meta that maps to the position of the scales for recomputing a layer.
_STASH = "global_fp8_buffer_pos_fwd_recompute"
# Modules of Transformer Engine, and of FlashAttention-4.
LIBRARY = "transformer_engine.pytorch"
FLASH_ATTENTION = "flash_attn.cute"


def unmet_need() -> str | None:
    """Return the requirement of Transformer Engine that this process does not meet, or None.

    The requirement is a noun phrase that completes the sentence "the precision needs ...".
    """
    if not torch.cuda.is_available():
        return "a CUDA device"
    try:
        library()
    # These exceptions mean that the library is not installed, or that it was built for another
    # version of torch, CUDA or Python.
    except (ImportError, OSError, RuntimeError) as error:
        return f"Transformer Engine, installed as in docs/quick_start.md ({one_line(error)})"
    return None


def unmet_need_of(precision: QuantizedPrecision) -> str | None:
    """Return the reason why Transformer Engine cannot compute `precision` here, or None.

    The reason is a requirement that this process does not meet, as a noun phrase, see `unmet_need`.
    `precision` is one that a release of Transformer Engine offers. Raise InputError if an
    environment variable changes the numbers that Transformer Engine computes. Its import reads most
    of these variables.
    """
    if variables := sorted(name for name in os.environ if name.startswith(NUMBERS_CHANGED_BY)):
        raise InputError(
            f"{', '.join(variables)}: these environment variables would change the numbers that "
            "Transformer Engine computes for `precision`; unset them"
        )
    if need := unmet_need():
        return need
    available, reason = getattr(library(), precision.te_available)(return_reason=True)
    return None if available else f"a GPU and CUDA that Transformer Engine supports: {reason}"


def build_te_recipe(precision: QuantizedPrecision) -> Any:
    """Return the `transformer_engine.common.recipe` object for `precision`.

    The options of the precision have the values of its settings. All other options of the recipe
    keep Transformer Engine's defaults. Raise InputError if the installed version ignores an option.
    """
    te = importlib.import_module("transformer_engine.common.recipe")
    options = {key: getattr(precision.settings, key) for key in precision.options}
    if "fp8_format" in options:
        options["fp8_format"] = te.Format[precision.settings.fp8_format]
    te_recipe = getattr(te, precision.te_recipe)(**options)
    if dropped := [key for key, value in options.items() if getattr(te_recipe, key, None) != value]:
        raise InputError(
            f"`fp8_config.{dropped[0]}`: the installed Transformer Engine lacks this option; "
            "install the version in requirements-cuda.txt"
        )
    return te_recipe


def split_accumulator(te_recipe: Any, product: str) -> bool:
    """Return True if `product` (fprop, dgrad or wgrad) is summed in full FP32 precision.

    If False, the tensor cores sum the product with less precision, which is faster. The recipe
    determines the value. If the recipe does not, only dgrad and wgrad are summed in full precision.
    """
    setting = getattr(te_recipe, f"fp8_gemm_{product}", None)
    return product != "fprop" if setting is None else setting.use_split_accumulator


class TransformerEngineGemm(Gemm):
    """The products of one linear layer on Transformer Engine.

    A te.Linear on the meta device provides the quantizers. Methods must be called inside of the
    engine's `forward` context, or in backward. Each operand is used in two products, and its
    quantizer writes the layouts for both in one call. Grouped products of experts use torch's
    grouped FP8 kernel, because Transformer Engine launches one kernel per expert.
    """

    def __init__(
        self, engine: TransformerEngine, name: str, members: Sequence[str], linear: Any
    ) -> None:
        """Create the Gemm of the layer `name`.

        `linear` is a te.Linear on the meta device with the quantizers. See `Gemm` for `members`.
        """
        super().__init__(name, members)
        self.engine = engine
        self.linear = linear

    @property
    def supports_fused_loss(self) -> bool:
        """Return True if a fused softmax kernel may quantize the gradient of the LM head's output.

        The kernel then writes the gradient as an operand of the head's backward products.
        """
        return not self.linear.use_bias and self.engine.precision.fuses_head_on(
            torch.cuda.get_device_capability()
        )

    def begin(self, x: Tensor) -> None:
        self.linear.prepare_forward(x)
        # The first two quantizers of forward are those of the input and the weight. The first one
        # of backward is that of the output's gradient.
        forward, backward = (self.linear.quantizers[key] for key in TE_DIRECTIONS.values())
        for quantizer in (*forward[:2], backward[0]):
            # With this flag, the quantizer returns the plain storage of a quantized tensor instead
            # of a subclass of Tensor, which autograd would track.
            quantizer.internal = True
        # Let the quantizers write scales in the order that products read, see `quantize`. The flag
        # of the weight's quantizer depends on the weight.
        for quantizer in (forward[0], backward[0]):
            quantizer.optimize_for_gemm = True

    def end(self) -> None:
        self.linear.end_forward()

    def quantizer(self, role: Role, *, both: bool) -> Any:
        """Return the quantizer of an operand.

        The quantizer writes the row-wise form, for the product that sums along the features. With
        `both`, it also writes the column-wise form, for the product that sums along the rows.
        """
        direction, slot = PLACES[role]
        quantizer = self.linear.quantizers[TE_DIRECTIONS[direction]][slot]
        quantizer.set_usage(rowwise=True, columnwise=both)
        return quantizer

    def overwrite_weight(self, matrix: Tensor) -> None:
        self.quantize("weight", matrix, out=self.weight)

    def quantize(self, role: Role, x: Tensor, *, both: bool = True, out: Any | None = None) -> Any:
        """Return x as an operand, see `Gemm.quantize`. `out` is an operand that is overwritten."""
        if role == "weight" and x.dim() > 2:
            x = x.flatten(0, -2)  # the weights of all experts are quantized as one matrix
        x = x.contiguous()  # the weight of a Conv1D is a transposed view
        quantizer = self.quantizer(role, both=both)
        if role == "weight":
            # Blackwell's products read scales in a special order. If the quantizer writes the
            # scales in this order, the products need not reorder them.
            quantizer.optimize_for_gemm = self.linear._enable_weight_preswizzle(quantizer, x)
        if out is None:
            return quantizer(x)
        import transformer_engine_torch as tex

        return tex.quantize(x, quantizer, out, None)

    @staticmethod
    def codes(operand: Any) -> Tensor:
        codes, _ = operand.get_data_tensors()
        return codes

    def matmul(
        self,
        kind: GemmKind,
        left: Any,
        right: Any,
        dtype: torch.dtype | None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        ends: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return a product, see `Gemm.matmul`.

        `out`, a tensor of dtype `dtype`, may be given for dgrad and wgrad. The product is then
        written to it.
        """
        if kind == "dgrad":
            # dgrad reads the column-wise form of the weight.
            right.update_usage(columnwise_usage=True)
        if ends is not None:
            return self._grouped_matmul(kind, left, right, dtype, ends)
        if kind != "forward":
            return self._general_gemm(kind, left, right, out_dtype=dtype, out=out)
        if dtype == torch.bfloat16:  # cublasLt's products are BF16
            fast = not split_accumulator(self.engine.te_recipe, "fprop")
            with watched(self.members, kind):
                y = cublaslt.multiply(
                    right, left, fast_accumulation=fast, bias=bias, residual=residual
                )
            if y is not None:
                return y
        y = self._general_gemm(kind, left, right, out_dtype=dtype, bias=bias)
        return y if residual is None else y.add_(residual)

    def accumulate(
        self,
        total: Tensor,
        left: Any,
        right: Any,
        *,
        overwrite: bool = False,
        ends: Tensor | None = None,
    ) -> None:
        if ends is not None:
            return super().accumulate(total, left, right, overwrite=overwrite, ends=ends)
        # The gradient sum of a Conv1D is a transposed view. Add the transposed gradient to the
        # transpose of the sum, which is contiguous.
        swapped = not total.is_contiguous()
        if swapped:
            left, right, total = right, left, total.t()
        options = {"out": total, "out_dtype": total.dtype, "accumulate": not overwrite}
        self._general_gemm("wgrad", left, right, swapped=swapped, **options)

    def _general_gemm(
        self, kind: GemmKind, left: Any, right: Any, *, swapped: bool = False, **options: Any
    ) -> Tensor:
        """Call Transformer Engine's GEMM and return the product.

        Transformer Engine expects `right` before `left`, because cuBLAS stores matrices column by
        column. `swapped` is the same as in `watched`.
        """
        layout, product = TE_GEMMS[kind]
        options |= {"layout": layout, "grad": kind != "forward"}
        options["use_split_accumulator"] = split_accumulator(self.engine.te_recipe, product)
        with watched(self.members, kind, swapped=swapped):
            return library().cpp_extensions.general_gemm(right, left, **options)[0]

    def _grouped_matmul(
        self, kind: GemmKind, left: Any, right: Any, dtype: torch.dtype | None, ends: Tensor
    ) -> Tensor:
        """Return a grouped product of E4M3 operands, computed by torch's grouped FP8 kernel.

        The kernel expects one scale per row, so the tensor's scale is repeated for all rows. The
        kernel writes BF16, which is the dtype of the result if `dtype` is None.
        """
        experts = len(ends)
        a = _e4m3(left, transposed=kind == "wgrad")
        # b is [experts, k, n], contiguous along k, or [k, n] in wgrad. The kernel reads a scale for
        # each row of a and each column of b. In wgrad, each expert has its own scales.
        b = grouped.right_for_kernel(kind, _e4m3(right, transposed=kind != "forward"), experts)
        if kind == "wgrad":
            scale_sizes: Any = len(a) * experts, b.shape[1] * experts
        else:
            scale_sizes = len(a), (experts, b.shape[2])
        scale_a = left.get_metadata()["fp8_scale_inv"].expand(scale_sizes[0]).contiguous()
        scale_b = right.get_metadata()["fp8_scale_inv"].expand(scale_sizes[1]).contiguous()
        # Sum in the tensor cores alone (fast accumulation), in backward too. With partial sums in
        # FP32 registers, the kernel runs out of registers for small experts and has a third of the
        # speed. Partial sums in FP32 would avoid an error that is smaller than the error of
        # rounding the result to BF16 (docs/studies/log.md).
        with watched(self.members, kind):
            y = torch._scaled_grouped_mm(
                a, b, scale_a, scale_b, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        return y if dtype is None else y.to(dtype)

    @staticmethod
    def save(*operands: Any) -> Saved:
        te = library()
        for operand in operands:
            if isinstance(operand, te.QuantizedTensorStorage):
                _, columnwise = operand.get_data_tensors()
                # Drop the row-wise form if there is also a column-wise form, which backward reads.
                if columnwise is not None:
                    operand.update_usage(rowwise_usage=False)
        return te.prepare_for_saving(*operands)

    @staticmethod
    def restore(tensors: Sequence[Tensor | None], rest: Any) -> list[Any]:
        return list(library().restore_from_saved(rest, list(tensors)))

    @staticmethod
    def claim_first_in_forward() -> bool:
        """Return True in the first call of a forward, see `Gemm.claim_first_in_forward`."""
        manager = library().quantization.FP8GlobalStateManager
        if not manager.is_fp8_enabled():
            return False
        if library().distributed.in_fp8_activation_recompute_phase():
            # Backward is recomputing a layer. Read the flag without resetting it.
            return manager.quantization_state.is_first_fp8_module
        # This call also resets the flag, so that the next call returns False.
        return manager.is_first_fp8_module()

    @staticmethod
    def finish_backward() -> None:
        library().quantization.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)


def _e4m3(operand: Any, *, transposed: bool) -> Tensor:
    """Return the E4M3 codes of a Float8Tensor.

    With `transposed`, return the codes of its transpose, which is stored separately.
    """
    return operand.get_data_tensors()[transposed].view(torch.float8_e4m3fn)


class TransformerEngine(GemmEngine):
    """The Gemms of one model on Transformer Engine."""

    def __init__(self, active: ActivePrecision, device: torch.device) -> None:
        """Create the engine. Raise InputError if `build_te_recipe` raises it."""
        super().__init__(active, device)
        self.te = library()
        self.te_recipe = build_te_recipe(self.precision)

    def _make(
        self, name: str, in_features: int, out_features: int, bias: bool, members: Sequence[str]
    ) -> TransformerEngineGemm:
        linear = self.te.Linear(
            in_features,
            out_features,
            bias=bias,
            params_dtype=torch.bfloat16,
            device="meta",
            name=name,
        )
        # Disable gradients. If gradients are enabled when the autocast exits, Transformer Engine
        # updates the amax histories of all layers.
        with torch.cuda.device(self.device), torch.no_grad(), self._autocast():
            linear.init_fp8_metadata()
        return TransformerEngineGemm(self, name, members, linear)

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._autocast():
            yield
        if self.precision.keeps_history and not torch.is_grad_enabled():
            # Clear the amaxes of a forward without gradients. Otherwise they would enter the
            # histories together with those of the next training forward.
            for gemm in self.gemms.values():
                gemm.linear.fp8_meta["scaling_fwd"].amax_history[0].zero_()

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        again: Callable[[], AbstractContextManager[None]],
    ) -> Any:
        @contextmanager
        def recomputing() -> Iterator[None]:
            # Enclose the autocast of te.checkpoint in a disabled autocast. Otherwise the autocast
            # of te.checkpoint would be the outermost one in backward, and leaving it would reduce
            # amaxes over all ranks after each recomputed layer.
            with again(), self._autocast(enabled=False):
                yield

        return self.te.checkpoint(
            functools.partial(function, *args),
            use_reentrant=False,
            context_fn=lambda: (NO_CONTEXT, recomputing()),
        )

    def state(self) -> dict[str, Tensor]:
        """Return the histories and scales. Names and shapes are as in `DelayedState.state`."""
        if not self.precision.keeps_history:
            return {}
        tensors = {}
        for name, gemm in self.gemms.items():
            for direction, te_direction in TE_DIRECTIONS.items():
                meta = gemm.linear.fp8_meta[te_direction]
                tensors[f"{PREFIX}{name}/{direction}/amax_history"] = meta.amax_history
                tensors[f"{PREFIX}{name}/{direction}/scale"] = meta.scale
        return tensors

    def reset(self) -> None:
        super().reset()
        manager = self.te.quantization.FP8GlobalStateManager
        stashes = manager.quantization_state.fp8_tensors_recompute_buffer
        for gemm in self.gemms.values():
            # Drop the scales that a failed step stored for a recomputation that never ran. The next
            # recomputation would use them in place of the scales of its own forward.
            if _STASH in gemm.linear.fp8_meta:
                stashes[gemm.linear.fp8_meta[_STASH]].clear()

    def describe(self) -> str:
        version = importlib.metadata.version("transformer_engine")
        return f"Transformer Engine {version}, {type(self.te_recipe).__name__}"

    def _autocast(self, *, enabled: bool = True) -> AbstractContextManager[Any]:
        # No reduction group is passed, so amaxes are reduced over all ranks.
        return self.te.autocast(enabled=enabled, recipe=self.te_recipe)


def library() -> ModuleType:
    """Import and return `transformer_engine.pytorch`, without FlashAttention-4.

    Transformer Engine's attention, which this project does not use, imports FlashAttention-4 if it
    is installed. This import takes seconds and uses CUDA, so that CUDA would not work in a fork.
    """
    if LIBRARY not in sys.modules:
        # An entry of None in sys.modules makes an import fail.
        sys.modules.setdefault(FLASH_ATTENTION, None)  # type: ignore[arg-type]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "FlashAttention 4 is installed but")
                warnings.filterwarnings("ignore", "Detected a Jax installation but")
                importlib.import_module(LIBRARY)
        finally:
            if sys.modules[FLASH_ATTENTION] is None:
                del sys.modules[FLASH_ATTENTION]
    return sys.modules[LIBRARY]
