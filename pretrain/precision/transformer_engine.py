"""Products on Transformer Engine: its quantizers and its GEMM, called one by one.

A te.Linear would own its weight and write a pickled "extra state" into every state_dict. So a
te.Linear here is built on the meta device, outside of the model's module tree. It holds the
quantizers, histories and scales of a Gemm and never computes.

The library is imported when it is first needed. The import takes seconds, and fails without the
driver of a GPU.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from foundation.errors import InputError
from foundation.reading import one_line
from pretrain.precision import searched
from pretrain.precision.delayed_state import PLACES
from pretrain.precision.formats.definition import OptionValues, QuantizedPrecision, Role
from pretrain.precision.gemm import Gemm, GemmEngine, GemmKind, Saved
from pretrain.precision.observed import NO_CONTEXT, watched
from pretrain.precision.settings import ActivePrecision

# Direction, as in checkpoints and `delayed_state.PLACES` -> Transformer Engine's name of its state.
TE_DIRECTIONS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
# Product -> layout, and the product's name in recipes.
TE_GEMMS = {"forward": ("TN", "fprop"), "dgrad": ("NN", "dgrad"), "wgrad": ("NT", "wgrad")}
# Prefixes of environment variables that change the defaults of Transformer Engine's recipes.
DEFAULTS_CHANGED_BY = (
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_FP8_BLOCK_SCALING",
    "NVTE_FP8_CURRENT_SCALING",
    "NVTE_NVFP4_",
)
# Key in fp8_meta: where the scales are stored that recomputing a layer will use.
_STASH = "global_fp8_buffer_pos_fwd_recompute"


def missing() -> str | None:
    """Return what this process lacks for Transformer Engine, or None.

    The text follows "needs" in a sentence.
    """
    if not torch.cuda.is_available():
        return "a CUDA device"
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine, which is not installed (docs/b200.md says how)"
    try:
        library()
    # The installed library was built for another torch, CUDA or Python.
    except (ImportError, OSError, RuntimeError) as error:
        return f"a Transformer Engine that can be imported ({one_line(error)})"
    return None


def unavailable_because(precision: QuantizedPrecision) -> str | None:
    """Return what this process lacks for `precision` on Transformer Engine, as `missing` does."""
    if not precision.te_available:
        return precision.hardware.missing(None)
    if need := missing():
        return need
    available, reason = getattr(library(), precision.te_available)(return_reason=True)
    return None if available else f"what Transformer Engine misses here: {reason}"


def build_te_recipe(precision: QuantizedPrecision, settings: OptionValues) -> Any:
    """Return the `transformer_engine.common.recipe` object of `precision` with its settings.

    Other options keep Transformer Engine's defaults. Raise InputError if an environment variable
    changes these defaults, or if the installed version drops an option.
    """
    if variables := sorted(name for name in os.environ if name.startswith(DEFAULTS_CHANGED_BY)):
        raise InputError(
            f"{', '.join(variables)}: Transformer Engine would compute otherwise than `precision` "
            "says; unset it"
        )
    te = importlib.import_module("transformer_engine.common.recipe")
    options = {key: getattr(settings, key) for key in precision.options}
    if "fp8_format" in options:
        options["fp8_format"] = te.Format[settings.fp8_format]
    te_recipe = getattr(te, precision.te_recipe)(**options)
    if dropped := [key for key, value in options.items() if getattr(te_recipe, key, None) != value]:
        raise InputError(
            f"`fp8_config.{dropped[0]}`: the installed Transformer Engine lacks it; install the "
            "version of requirements-cuda.txt"
        )
    return te_recipe


def split_accumulator(te_recipe: Any, product: str) -> bool:
    """Return whether `product` (fprop, dgrad, wgrad) is summed in full precision.

    The recipe decides. By default, gradients are.
    """
    setting = getattr(te_recipe, f"fp8_gemm_{product}", None)
    return product != "fprop" if setting is None else setting.use_split_accumulator


class TransformerEngineGemm(Gemm):
    """The products of one linear layer, by the quantizers of a te.Linear without a weight.

    It computes inside of the engine's `forward` context, and in backward. One quantization writes
    an operand for both of its products. The products of experts are torch's grouped product in FP8,
    because the library's own is one launch an expert.
    """

    def __init__(
        self, engine: TransformerEngine, name: str, members: Sequence[str], linear: Any
    ) -> None:
        """Create the Gemm of the layer `name`. `linear`: a te.Linear with its quantizers."""
        super().__init__(name, members)
        self.engine = engine
        self.linear = linear

    @property
    def supports_fused_loss(self) -> bool:
        return not self.linear.use_bias and self.engine.precision.fuses_head_on(
            torch.cuda.get_device_capability()
        )

    def begin(self, x: Tensor) -> None:
        self.linear.prepare_forward(x)
        forward, backward = (self.linear.quantizers[key] for key in TE_DIRECTIONS.values())
        for quantizer in (*forward[:2], backward[0]):
            # Write plain storage, not a tensor that autograd would see.
            quantizer.internal = True
        for quantizer in (forward[0], backward[0]):
            quantizer.optimize_for_gemm = True

    def end(self) -> None:
        self.linear.end_forward()

    def quantizer(self, role: Role, *, both: bool) -> Any:
        """Return an operand's quantizer, for sums along its features, and its rows if `both`."""
        direction, slot = PLACES[role]
        quantizer = self.linear.quantizers[TE_DIRECTIONS[direction]][slot]
        quantizer.set_usage(rowwise=True, columnwise=both)
        return quantizer

    def quantize(self, role: Role, x: Tensor, *, both: bool = True) -> Any:
        if role == "weight" and x.dim() > 2:
            x = x.flatten(0, -2)  # experts' weights are one matrix
        x = x.contiguous()  # the weight of a Conv1D is a transpose
        quantizer = self.quantizer(role, both=both)
        if role == "weight":
            # Blackwell's products read scales in another order. A quantizer writes this order once;
            # else every product has to make it.
            quantizer.optimize_for_gemm = self.linear._enable_weight_preswizzle(quantizer, x)
        return quantizer(x)

    @staticmethod
    def codes(operand: Any) -> Tensor:
        has_one_scale = isinstance(operand, library().Float8TensorStorage)
        return operand._data if has_one_scale else operand._rowwise_data

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
        """See `Gemm.matmul`. `out` of dtype `dtype` receives a gradient."""
        if kind == "dgrad":
            right.update_usage(columnwise_usage=True)
        if ends is not None:
            return self._grouped_matmul(kind, left, right, dtype, ends)
        if kind != "forward":
            return self._general_gemm(kind, left, right, out_dtype=dtype, out=out)
        if bias is None and dtype == torch.bfloat16:
            fast = not split_accumulator(self.engine.te_recipe, "fprop")
            with watched(self.members, kind):
                y = searched.multiply(right, left, fast_accumulation=fast, residual=residual)
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
        # The library's GEMM cannot add to the sum of a Conv1D, which is a transpose.
        if ends is None and total.is_contiguous():
            self._general_gemm(
                "wgrad", left, right, out=total, out_dtype=total.dtype, accumulate=not overwrite
            )
        else:
            super().accumulate(total, left, right, overwrite=overwrite, ends=ends)

    def _general_gemm(self, kind: GemmKind, left: Any, right: Any, **options: Any) -> Tensor:
        """Call Transformer Engine's GEMM, which counts columns first and so names `right` first."""
        layout, product = TE_GEMMS[kind]
        options |= {"layout": layout, "grad": kind != "forward"}
        options["use_split_accumulator"] = split_accumulator(self.engine.te_recipe, product)
        with watched(self.members, kind):
            return library().cpp_extensions.general_gemm(right, left, **options)[0]

    def _grouped_matmul(
        self, kind: GemmKind, left: Any, right: Any, dtype: torch.dtype | None, ends: Tensor
    ) -> Tensor:
        """Multiply E4M3 codes with torch's grouped product, whose kernel writes BF16.

        The kernel takes a scale for each row. All rows have the scale of the tensor.
        """
        experts = len(ends)
        a = _e4m3(left, transposed=kind == "wgrad")
        b = _e4m3(right, transposed=kind != "forward")
        if kind == "wgrad":
            b = b.t()
            scale_sizes: Any = len(a) * experts, b.shape[1] * experts
        else:
            # b becomes [experts, k, n], contiguous along k.
            by_expert = b.unflatten(0 if kind == "forward" else 1, (experts, -1))
            b = by_expert.mT if kind == "forward" else by_expert.permute(1, 2, 0)
            scale_sizes = len(a), (experts, b.shape[2])
        scale_a = left._scale_inv.expand(scale_sizes[0]).contiguous()
        scale_b = right._scale_inv.expand(scale_sizes[1]).contiguous()
        # Sums stay in the tensor cores, in gradients too. Adding them up outside spills registers
        # where experts are small, at a third of the speed. It would save less than what rounding to
        # BF16 costs (docs/log.md).
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
                operand.update_usage(rowwise_usage=False)
        return te.prepare_for_saving(*operands)

    @staticmethod
    def restore(tensors: Sequence[Tensor | None], rest: Any) -> list[Any]:
        return list(library().restore_from_saved(rest, list(tensors)))

    @staticmethod
    def is_first_in_forward() -> bool:
        manager = library().quantization.FP8GlobalStateManager
        if not manager.is_fp8_enabled():
            return False
        state = manager.quantization_state
        before = state.is_first_fp8_module
        is_first = manager.is_first_fp8_module()
        if library().distributed.in_fp8_activation_recompute_phase():
            # A recomputed layer asks again, and the answer was given in forward.
            state.is_first_fp8_module = before
        return is_first

    @staticmethod
    def finish_backward() -> None:
        library().quantization.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)


def _e4m3(operand: Any, *, transposed: bool) -> Tensor:
    """Return the codes of a Float8Tensor, or of its transpose, which is stored separately."""
    return (operand._transpose if transposed else operand._data).view(torch.float8_e4m3fn)


class TransformerEngine(GemmEngine):
    """The Gemms of one model on Transformer Engine."""

    def __init__(self, active: ActivePrecision, device: torch.device) -> None:
        """Raise InputError if the installed Transformer Engine lacks the precision's recipe."""
        super().__init__()
        self.te = library()
        self.precision = active.quantized_precision
        self.te_recipe = build_te_recipe(self.precision, active.settings)
        self._device = device

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
        # Disable gradients: an autocast that ends with gradients enabled advances all histories.
        with torch.cuda.device(self._device), torch.no_grad(), self._autocast():
            linear.init_fp8_metadata()
        return TransformerEngineGemm(self, name, members, linear)

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._autocast():
            yield
        if self.precision.keeps_history and not torch.is_grad_enabled():
            # Drop the amaxes of a forward without gradients, or the next training forward would
            # take them for its own.
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
            # A disabled autocast around te.checkpoint's own one. That would be the outermost
            # autocast in backward, and would end each recomputed layer with a reduction over all
            # ranks.
            with again(), self._autocast(enabled=False):
                yield

        return self.te.checkpoint(
            functools.partial(function, *args),
            use_reentrant=False,
            context_fn=lambda: (NO_CONTEXT, recomputing()),
        )

    def state(self) -> dict[str, Tensor]:
        """Return the same names, shapes and slots as `DelayedState.state`."""
        if not self.precision.keeps_history:
            return {}
        return {
            f"fp8/{name}/{direction}/{key}": getattr(gemm.linear.fp8_meta[te_direction], key)
            for name, gemm in self.gemms.items()
            for direction, te_direction in TE_DIRECTIONS.items()
            for key in ("amax_history", "scale")
        }

    def reset(self) -> None:
        super().reset()
        manager = self.te.quantization.FP8GlobalStateManager
        stashes = manager.quantization_state.fp8_tensors_recompute_buffer
        for gemm in self.gemms.values():
            # Drop scales stored for a recomputation that never ran, because its step failed. The
            # next recomputation would take them for its own.
            if _STASH in gemm.linear.fp8_meta:
                stashes[gemm.linear.fp8_meta[_STASH]].clear()

    def describe(self) -> str:
        version = importlib.metadata.version("transformer_engine")
        return f"Transformer Engine {version}, {type(self.te_recipe).__name__}"

    def _autocast(self, *, enabled: bool = True) -> AbstractContextManager[Any]:
        # Without a reduction group, all ranks reduce their amaxes.
        return self.te.autocast(enabled=enabled, recipe=self.te_recipe)


def library() -> ModuleType:
    """Import and return `transformer_engine.pytorch`."""
    import transformer_engine.pytorch as te

    return te
