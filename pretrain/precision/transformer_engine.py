"""Low-precision products on Transformer Engine: its te.Linear as arithmetic, on parameters that are not its own.

te.Linear wants to own its weight, and to write a pickled "extra state" into every state_dict. Here it is built on the meta
device, outside of the model's module tree, and lent the Hugging Face parameter for the length of a call.

The library is imported when it is first needed: it takes seconds, and cannot be imported without a GPU's driver.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import noop_context_fn

from foundation.attributes import holding
from foundation.errors import InputError
from foundation.reading import one_line
from pretrain.precision.formats.definition import OptionValues, QuantizedPrecision
from pretrain.precision.linear import NormFunction, NormKind
from pretrain.precision.observation import ProductObserver
from pretrain.precision.settings import ActivePrecision

OLDEST = (2, 20)  # the first whose recipes have every field that is set here
# A direction's state as checkpoints and `delayed_state.PLACES` call it -> Transformer Engine's name of it.
TE_DIRECTIONS = {"forward": "scaling_fwd", "backward": "scaling_bwd"}
_MISSING = object()
_STASH = "global_fp8_buffer_pos_fwd_recompute"


def missing() -> str | None:
    """What this process would need for Transformer Engine, worded to follow "needs"; None: nothing more."""
    if not torch.cuda.is_available():
        return "a CUDA device"
    if importlib.util.find_spec("transformer_engine") is None:
        return "Transformer Engine, which is not installed (docs/requirements.md says how)"
    try:
        library()
    except (ImportError, OSError, RuntimeError) as error:  # a library that was built for another torch, CUDA or Python
        return f"a Transformer Engine that can be imported ({one_line(error)})"
    if tuple(map(int, _version().split(".")[:2])) < OLDEST:
        return f"Transformer Engine {'.'.join(map(str, OLDEST))} or newer, and this is {_version()}"
    return None


def unavailable_because(precision: QuantizedPrecision) -> str | None:
    """The same for running `precision` on it."""
    if precision.te_available is None:
        return precision.hardware.missing(None, None)
    if need := missing():
        return need
    available, reason = getattr(library(), precision.te_available)(return_reason=True)
    return None if available else f"what Transformer Engine misses here: {reason}"


def build_te_recipe(precision: QuantizedPrecision, settings: OptionValues) -> Any:
    """The `transformer_engine.common.recipe` object of `precision`, with nothing in it that was not asked for.

    Transformer Engine takes defaults from NVTE_* variables when it is imported, drops keyword arguments that it does not know,
    and with `Float8BlockScaling(use_f32_scales=True)` scales are powers of two all the same. So every attribute is set here, then
    read back. Raises InputError for an option that only the emulation has, and where the installed version differs.
    """
    if emulation := precision.needs_emulation(settings):
        raise InputError(f"`precision: {precision.name}` needs {emulation}; set `fp8_config.backend: emulation`")
    te = importlib.import_module("transformer_engine.common.recipe")
    kind, arguments, attributes = precision.te_recipe(te, settings)
    # Attention has its own kernels here, and backward multiplies what forward quantized.
    arguments |= {"fp8_dpa": False, "fp8_mha": False, "backward_override": None}
    unknown = {field.name for field in dataclasses.fields(kind)} - set(arguments)
    te_recipe = kind(**arguments)
    for name, value in attributes.items():
        setattr(te_recipe, name, value)
    lost = {name for name, value in (arguments | attributes).items() if getattr(te_recipe, name, _MISSING) != value}
    if unknown or lost:
        differences = ", ".join(sorted(unknown | lost))
        raise InputError(
            f"precision {precision.name!r}: the installed Transformer Engine's {kind.__name__} is not the one this launcher was "
            f"written for (it differs in {differences}), and might round otherwise than asked; install the version of "
            "requirements-cuda.txt"
        )
    return te_recipe


def split_accumulator(te_recipe: Any, product: str) -> bool:
    """Whether `product` (fprop, dgrad, wgrad) adds up in full: what the recipe says, and where it says nothing, gradients."""
    wanted = getattr(te_recipe, f"fp8_gemm_{product}", None)
    return product != "fprop" if wanted is None else wanted.use_split_accumulator


@dataclass(eq=False)
class TransformerEngineProduct:
    """y = x w^T + b by a te.Linear that is lent weight and bias; a `LinearProduct`, inside of the backend's `forward` only."""

    name: str
    linear: nn.Module
    backend: TransformerEngineBackend

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, *, first_microbatch: bool) -> Tensor:
        # Without gradients the weight is quantized for this call alone: evaluation neither uses nor replaces training's copy.
        cached = first_microbatch if torch.is_grad_enabled() else None
        observer = self.backend.observer
        with observer.during((self.name,)) if observer else nullcontext(), _lent(self.linear, weight, bias):
            y = self.linear(x, is_first_microbatch=cached)
        if observer:
            observer.watch_backward(self.name, y)
        return y

    @property
    def supports_fused_loss(self) -> bool:
        """Whether the softmax of the LM head can write its gradient as this product's operand: where FP8 products take one scale
        a tensor and operands along the inner dimension, and without a bias."""
        return not self.linear.use_bias and self.backend.precision.fuses_head_on(torch.cuda.get_device_capability())


class TransformerEngineBackend:
    """A model's products on Transformer Engine; a `Backend`."""

    def __init__(self, active: ActivePrecision, device: torch.device) -> None:
        """Raises InputError where the installed Transformer Engine does not take the precision's recipe as asked."""
        self.te = library()
        self.precision: QuantizedPrecision = active.precision
        self.te_recipe = build_te_recipe(active.precision, active.settings)
        self._device = device
        self._products: dict[str, TransformerEngineProduct] = {}
        self.observer: ProductObserver | None = None

    def product(self, name: str, in_features: int, out_features: int, *, bias: bool) -> TransformerEngineProduct:
        linear = self.te.Linear(in_features, out_features, bias=bias, params_dtype=torch.bfloat16, device="meta", name=name)
        # Without gradients, because an autocast that ends with gradients enabled advances the histories of all products.
        with torch.cuda.device(self._device), torch.no_grad(), self._autocast():
            linear.init_fp8_metadata()
        self._products[name] = TransformerEngineProduct(name, linear, self)
        return self._products[name]

    def norm(self, kind: NormKind, size: int, eps: float) -> NormFunction:
        make = {"rms": self.te.RMSNorm, "layer": self.te.LayerNorm}[kind]
        norm = make(size, eps=eps, zero_centered_gamma=False, dtype=torch.bfloat16, device="meta")

        def normalize(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if kind == "layer" and bias is None:
                bias = torch.zeros_like(weight, requires_grad=False)
            parameters = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
            norm._parameters.update(parameters)
            y = norm(x)
            # Unlike te.Linear, the norm looks its weight up again in backward; detached, it keeps no graph alive until then.
            norm._parameters.update({key: value.detach() for key, value in parameters.items()})
            return y

        return normalize

    @contextmanager
    def forward(self) -> Iterator[None]:
        with self._autocast():
            yield
        if self.precision.keeps_history and not torch.is_grad_enabled():
            # A forward without gradients leaves no trace: the next training forward would take these for its own.
            for product in self._products.values():
                product.linear.fp8_meta["scaling_fwd"].amax_history[0].zero_()

    def checkpoint(
        self, function: Callable[..., Any], *args: Any, context_fn: Callable[[], Any] = noop_context_fn, **kwargs: Any
    ) -> Any:
        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            now, then = context_fn()
            return now, self._recomputation(then)

        return self.te.checkpoint(functools.partial(function, *args, **kwargs), use_reentrant=False, context_fn=contexts)

    def state(self) -> dict[str, Tensor]:
        """Returns what `DelayedState.state` does: the same names, shapes and slots."""
        if not self.precision.keeps_history:
            return {}
        return {
            f"fp8/{name}/{direction}/{key}": getattr(product.linear.fp8_meta[theirs], key)
            for name, product in self._products.items()
            for direction, theirs in TE_DIRECTIONS.items()
            for key in ("amax_history", "scale")
        }

    def state_storage(self) -> list[Tensor]:
        return list(self.state().values())

    def reset(self) -> None:
        for name, tensor in self.state().items():
            tensor.fill_(1.0 if name.endswith("scale") else 0.0)
        stashes = self.te.quantization.FP8GlobalStateManager.quantization_state.fp8_tensors_recompute_buffer
        for product in self._products.values():
            product.linear._fp8_workspaces.clear()
            # Scales put aside for a recomputation that a failed step never came to; the next one would take them for its own.
            if _STASH in product.linear.fp8_meta:
                stashes[product.linear.fp8_meta[_STASH]].clear()

    def describe(self) -> str:
        return f"Transformer Engine {_version()}, {type(self.te_recipe).__name__}"

    @contextmanager
    def observing(self, observer: ProductObserver) -> Iterator[None]:
        with observer.installed(self.te), holding(self, observer=observer):
            yield

    def _autocast(self, *, enabled: bool = True) -> AbstractContextManager[Any]:
        return self.te.autocast(enabled=enabled, recipe=self.te_recipe)  # no reduction group means the default one, all ranks

    @contextmanager
    def _recomputation(self, entered: AbstractContextManager[Any]) -> Iterator[None]:
        """Goes around te.checkpoint's own autocast, which in backward is the outermost one and would end with a reduction over
        all ranks, once for each layer that is recomputed. Another autocast around it, itself disabled, spares that."""
        with entered, self._autocast(enabled=False):
            yield


@contextmanager
def _lent(linear: nn.Module, weight: Tensor, bias: Tensor | None) -> Iterator[None]:
    """`linear` with these for parameters. torch.func.functional_call does the same for a quarter more of the host's time."""
    own = dict(linear._parameters)
    linear._parameters["weight"] = weight
    if bias is not None:
        linear._parameters["bias"] = bias
    try:
        yield
    finally:
        linear._parameters.update(own)


def library() -> ModuleType:
    import transformer_engine.pytorch as te

    return te


def _version() -> str:
    return importlib.metadata.version("transformer_engine")
