"""Low-precision products on Transformer Engine: its quantizers and its GEMM, called one by one.

A te.Linear wants to own its weight, and to write a pickled "extra state" into every state_dict. Here one is built on the meta
device, outside of the model's module tree: it holds a product's quantizers, histories and scales, and never computes.

The library is imported when it is first needed: it takes seconds, and cannot be imported without a GPU's driver.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import InputError
from foundation.reading import one_line
from pretrain.precision import searched
from pretrain.precision.delayed_state import PLACES
from pretrain.precision.formats.definition import OptionValues, QuantizedPrecision, Role
from pretrain.precision.grouped import Grouped
from pretrain.precision.observed import watched
from pretrain.precision.product import Backend, Gemm, Product
from pretrain.precision.settings import ActivePrecision

# A direction's state as checkpoints and `delayed_state.PLACES` call it -> Transformer Engine's name of it.
TE_DIRECTIONS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
# layout, and the recipe's name
TE_GEMMS = {"forward": ("TN", "fprop"), "dgrad": ("NN", "dgrad"), "wgrad": ("NT", "wgrad")}
# What the names of variables begin with that change the defaults of Transformer Engine's recipes.
DEFAULTS_CHANGED_BY = (
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_FP8_BLOCK_SCALING",
    "NVTE_FP8_CURRENT_SCALING",
    "NVTE_NVFP4_",
)
_STASH = "global_fp8_buffer_pos_fwd_recompute"


def missing() -> str | None:
    """What this process would need for Transformer Engine, worded to follow "needs"; None: nothing more."""
    if not torch.cuda.is_available():
        return "a CUDA device"
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine, which is not installed (docs/b200.md says how)"
    try:
        library()
    # a library that was built for another torch, CUDA or Python
    except (ImportError, OSError, RuntimeError) as error:
        return f"a Transformer Engine that can be imported ({one_line(error)})"
    return None


def unavailable_because(precision: QuantizedPrecision) -> str | None:
    """What this process would need to run `precision` on it, worded as `missing`; None: nothing more."""
    if precision.te_available is None:
        return precision.hardware.missing(None)
    if need := missing():
        return need
    available, reason = getattr(library(), precision.te_available)(return_reason=True)
    return None if available else f"what Transformer Engine misses here: {reason}"


def build_te_recipe(precision: QuantizedPrecision, settings: OptionValues) -> Any:
    """The `transformer_engine.common.recipe` object of `precision`: Transformer Engine's defaults, and the settings' options.

    Raises InputError where variables would change the defaults, and for an option that the installed version drops."""
    if variables := sorted(name for name in os.environ if name.startswith(DEFAULTS_CHANGED_BY)):
        raise InputError(
            f"{', '.join(variables)}: Transformer Engine would compute otherwise than `precision` says; unset it"
        )
    te = importlib.import_module("transformer_engine.common.recipe")
    options = {key: getattr(settings, key) for key in precision.options}
    if "fp8_format" in options:
        options["fp8_format"] = te.Format[settings.fp8_format]
    te_recipe = getattr(te, precision.te_recipe)(**options)
    if dropped := [key for key, value in options.items() if getattr(te_recipe, key, None) != value]:
        raise InputError(
            f"`fp8_config.{dropped[0]}`: the installed Transformer Engine lacks it; install the version of requirements-cuda.txt"
        )
    return te_recipe


def split_accumulator(te_recipe: Any, product: str) -> bool:
    """Whether `product` (fprop, dgrad, wgrad) adds up in full precision: as the recipe says, else for gradients."""
    wanted = getattr(te_recipe, f"fp8_gemm_{product}", None)
    return product != "fprop" if wanted is None else wanted.use_split_accumulator


class TransformerEngineProduct(Product):
    """Multiplies by the quantizers of a te.Linear, which has no weight, and Transformer Engine's GEMM; inside the backend's
    `forward`, and in backward. One quantization writes an operand for both of its products."""

    def __init__(self, name: str, linear: nn.Module, backend: TransformerEngineBackend) -> None:
        super().__init__(name)
        self.linear, self.backend = linear, backend

    @property
    def supports_fused_loss(self) -> bool:
        return not self.linear.use_bias and self.backend.precision.fuses_head_on(
            torch.cuda.get_device_capability()
        )

    def begin(self, x: Tensor) -> None:
        self.linear.prepare_forward(x)
        forward, backward = (self.linear.quantizers[key] for key in TE_DIRECTIONS.values())
        for quantizer in (*forward[:2], backward[0]):
            quantizer.internal = True  # bare storage in place of tensors that autograd could see
        for quantizer in (forward[0], backward[0]):
            quantizer.optimize_for_gemm = True

    def end(self) -> None:
        self.linear.end_forward()

    def quantizer(self, role: Role, *, both: bool) -> Any:
        """Transformer Engine's quantizer of an operand: for products along features, and along rows too if `both`."""
        direction, slot = PLACES[role]
        quantizer = self.linear.quantizers[TE_DIRECTIONS[direction]][slot]
        quantizer.set_usage(rowwise=True, columnwise=both)
        return quantizer

    def operand(self, role: Role, x: Tensor, *, both: bool = True) -> Any:
        # Conv1D's weight is a transpose
        x, quantizer = x.contiguous(), self.quantizer(role, both=both)
        if role == "weight":
            # Blackwell's products read scales in an order of their own, which is made here once or else in every product.
            quantizer.optimize_for_gemm = self.linear._enable_weight_preswizzle(quantizer, x)
        return quantizer(x)

    @staticmethod
    def codes(operand: Any) -> Tensor:
        one_scale = isinstance(operand, library().Float8TensorStorage)
        return operand._data if one_scale else operand._rowwise_data

    def multiply(
        self,
        gemm: Gemm,
        left: Any,
        right: Any,
        dtype: torch.dtype,
        *added: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """`out` takes a gradient, in its dtype."""
        bias, residual = (*added, None, None)[:2]
        if gemm == "dgrad":
            right.update_usage(columnwise_usage=True)
        if gemm != "forward":
            return self._gemm(gemm, left, right, out_dtype=dtype, out=out)
        if bias is None and dtype == torch.bfloat16:
            fast = not split_accumulator(self.backend.te_recipe, "fprop")
            with watched(self.members, gemm):
                y = searched.multiply(right, left, fast_accumulation=fast, residual=residual)
            if y is not None:
                return y
        y = self._gemm(gemm, left, right, out_dtype=dtype, bias=bias)
        return y if residual is None else y.add_(residual)

    def accumulate(self, total: Tensor, left: Any, right: Any, *, overwrite: bool = False) -> None:
        # Conv1D's is a transpose, which the library's product does not add to
        if not total.is_contiguous():
            return super().accumulate(total, left, right, overwrite=overwrite)
        self._gemm("wgrad", left, right, out=total, out_dtype=total.dtype, accumulate=not overwrite)

    def _gemm(self, gemm: Gemm, left: Any, right: Any, **options: Any) -> Tensor:
        """cuBLAS counts columns first, so Transformer Engine names what multiplies from the left second."""
        layout, product = TE_GEMMS[gemm]
        options |= {"layout": layout, "grad": gemm != "forward"}
        split = split_accumulator(self.backend.te_recipe, product)
        with watched(self.members, gemm):
            return library().cpp_extensions.general_gemm(
                right, left, use_split_accumulator=split, **options
            )[0]

    @staticmethod
    def save(*operands: Any) -> tuple[Sequence[Tensor | None], Any]:
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
        before, first = state.is_first_fp8_module, manager.is_first_fp8_module()
        if library().distributed.in_fp8_activation_recompute_phase():
            # the answer was given in forward, and is asked for again
            state.is_first_fp8_module = before
        return first

    @staticmethod
    def finish_backward() -> None:
        library().quantization.FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=False)


class ScaledGroupedProduct(Grouped, TransformerEngineProduct):
    """Quantizes the operands of all experts by one call of Transformer Engine's kernel, and multiplies them by torch's grouped
    product: the library's own is a launch an expert. That takes a scale for each row, which is the tensor's one each time."""

    def multiply(
        self, gemm: Gemm, left: Any, right: Any, dtype: torch.dtype | None = None, bias: None = None
    ) -> Tensor:
        experts, by_rows = len(self.ends), gemm == "wgrad"
        if gemm == "dgrad":
            right.update_usage(columnwise_usage=True)
        a, b = _e4m3(left, transposed=by_rows), _e4m3(right, transposed=gemm != "forward")
        if by_rows:
            b, scales = b.t(), (len(a) * experts, len(b) * experts)
        else:  # [experts, k, n], where k lies in one piece
            b = (
                b.unflatten(0, (experts, -1)).mT
                if gemm == "forward"
                else b.unflatten(1, (experts, -1)).permute(1, 2, 0)
            )
            scales = (len(a), (experts, b.shape[2]))
        of_a, of_b = (
            x._scale_inv.expand(size).contiguous()
            for x, size in zip((left, right), scales, strict=True)
        )
        # Sums stay in the tensor cores, in gradients too. To add them up outside spills registers where experts are small, at a
        # third of the speed; what it would save is less than what rounding to BF16 costs (docs/log.md).
        with watched(self.members, gemm):
            y = torch._scaled_grouped_mm(
                a, b, of_a, of_b, offs=self.ends, out_dtype=torch.bfloat16, use_fast_accum=True
            )
        return y if dtype is None else y.to(dtype)


def _e4m3(operand: Any, *, transposed: bool) -> Tensor:
    """The codes of a Float8Tensor [rows, features], or of its transpose, which has memory of its own."""
    return (operand._transpose if transposed else operand._data).view(torch.float8_e4m3fn)


class TransformerEngineBackend(Backend):
    """A model's products on Transformer Engine."""

    def __init__(self, active: ActivePrecision, device: torch.device) -> None:
        """Raises InputError where the installed Transformer Engine does not take the precision's recipe as asked."""
        self.te = library()
        self.precision: QuantizedPrecision = active.precision
        self.te_recipe = build_te_recipe(active.precision, active.settings)
        self._device = device
        self.products: list[TransformerEngineProduct] = []

    def product(
        self, name: str, in_features: int, out_features: int, *, bias: bool, grouped: bool = False
    ) -> TransformerEngineProduct:
        linear = self.te.Linear(
            in_features,
            out_features,
            bias=bias,
            params_dtype=torch.bfloat16,
            device="meta",
            name=name,
        )
        # Without gradients, because an autocast that ends with gradients enabled advances the histories of all products.
        with torch.cuda.device(self._device), torch.no_grad(), self._autocast():
            linear.init_fp8_metadata()
        self.products.append(
            (ScaledGroupedProduct if grouped else TransformerEngineProduct)(name, linear, self)
        )
        return self.products[-1]

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._autocast():
            yield
        if self.precision.keeps_history and not torch.is_grad_enabled():
            # A forward without gradients leaves no trace: the next training forward would take these for its own.
            for product in self.products:
                product.linear.fp8_meta["scaling_fwd"].amax_history[0].zero_()

    def checkpoint(
        self,
        function: Callable[..., Any],
        *args: Any,
        again: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Any:
        @contextmanager
        def recomputing() -> Iterator[None]:
            # A disabled autocast around te.checkpoint's own, which in backward would be the outermost one, and end each
            # recomputed layer with a reduction over all ranks.
            with again(), self._autocast(enabled=False):
                yield

        return self.te.checkpoint(
            functools.partial(function, *args),
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), recomputing()),
        )

    def state(self) -> dict[str, Tensor]:
        """The same names, shapes and slots as `DelayedState.state`."""
        if not self.precision.keeps_history:
            return {}
        return {
            f"fp8/{product.name}/{direction}/{key}": getattr(product.linear.fp8_meta[theirs], key)
            for product in self.products
            for direction, theirs in TE_DIRECTIONS.items()
            for key in ("amax_history", "scale")
        }

    def reset(self) -> None:
        super().reset()
        stashes = self.te.quantization.FP8GlobalStateManager.quantization_state.fp8_tensors_recompute_buffer
        for product in self.products:
            # Scales put aside for a recomputation that a failed step never came to; the next one would take them for its own.
            if _STASH in product.linear.fp8_meta:
                stashes[product.linear.fp8_meta[_STASH]].clear()

    def describe(self) -> str:
        return f"Transformer Engine {importlib.metadata.version('transformer_engine')}, {type(self.te_recipe).__name__}"

    def _autocast(self, *, enabled: bool = True) -> AbstractContextManager[Any]:
        # no reduction group means the default one, all ranks
        return self.te.autocast(enabled=enabled, recipe=self.te_recipe)


def library() -> ModuleType:
    import transformer_engine.pytorch as te

    return te
