"""A model of which each rank holds its part from the beginning: what `huggingface.build` makes whole, bit for bit.

The model is on the meta device, without memory for weights, its buffers alone are real. Beside it are this process's parts of the
parameters, as FSDP2 shards them: equal runs of rows (torch.chunk).

From scratch, transformers builds and draws one module after the other, the last ones from where the generator stands by then. So
every rank draws everything, in transformers' own order and by its functions. But a module gives its weights up once it is part of
another: they exist one module at a time, and again while transformers draws their values. From a folder, only rows are read.

What cannot be built so is said by `NotInParts`; `huggingface.build` builds it whole.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.initialization import no_init_weights
from transformers.utils import cached_file

from foundation.attributes import holding
from pretrain.model.attention import backends as attention
from pretrain.model.distributed import checksum
from pretrain.settings.recipe import ModelSettings

WEIGHTS = "model.safetensors"
WITNESS_ROWS = 1  # of each tensor, read by all ranks to see that they read the same model


class NotInParts(Exception):
    """Why a model has to be built whole; the text follows "the model was built whole on each process: "."""


@dataclass(frozen=True)
class Part:
    """Which of so many equal runs of rows is this process's."""

    index: int
    of: int

    def rows(self, length: int) -> range:
        """The rows of a tensor of `length` rows; the last processes may have fewer, or none."""
        each = -(-length // self.of)
        return range(min(self.index * each, length), min((self.index + 1) * each, length))

    def take(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy of the rows of `tensor`, in `dtype`."""
        rows = self.rows(len(tensor))
        return tensor.detach()[rows.start : rows.stop].to(dtype, copy=True)


@dataclass(frozen=True)
class InParts:
    """A model on the meta device and this process's rows of its parameters, by name."""

    hf: PreTrainedModel
    parts: dict[str, Tensor]
    witness: dict[str, Tensor]  # small tensors, the same on all ranks if and only if the models are, as far as can be seen


def build_in_parts(
    settings: ModelSettings,
    config: PretrainedConfig,
    part: Part,
    *,
    kept: torch.dtype,
    weights: torch.dtype,
    seed: int,
    device: torch.device,
    backend: str,
) -> InParts:
    """Builds what `huggingface.build` does, with parameters of dtype `weights` and their parts of dtype `kept` on `device`.
    NotInParts where transformers draws or stores weights in a way that does not go by modules and rows."""
    attention.register()
    if settings.weights_source is not None:
        try:
            built = _read(settings, config, part, kept, device, backend)
        except (OSError, ValueError, LookupError, RuntimeError, SafetensorError) as error:
            # If `build` fails as well, it reports the error.
            raise NotInParts(f"its weights cannot be read by rows: {error}") from None
    else:
        torch.manual_seed(seed)
        drawing = _Drawing(part, kept, device)
        with device, drawing.giving_up(), drawing.filling():
            hf = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=backend, trust_remote_code=False
            )
        drawing.give_up(hf)
        if any(parameter not in drawing.parts for parameter in hf.parameters()):
            raise NotInParts(f"{type(hf).__name__} makes parameters in a way of its own")
        witness = {name: drawing.sums[parameter] for name, parameter in hf.named_parameters()}
        built = InParts(hf, {name: drawing.parts[parameter] for name, parameter in hf.named_parameters()}, witness)
    for parameter in built.hf.parameters():
        parameter.data = parameter.data.to(weights)
    return built


class _Drawing:
    """Parameters that are drawn whole, one module at a time, and kept in part."""

    def __init__(self, part: Part | None, kept: torch.dtype, device: torch.device) -> None:
        self.part, self.kept, self.device = part, kept, device  # no part: nothing is kept
        self.parts: dict[nn.Parameter, Tensor] = {}  # by the parameter on the meta device
        self.sums: dict[nn.Parameter, Tensor] = {}  # of all bits of the whole, int64 scalars

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """Takes the memory of its weights, while entered, from each module that becomes part of another."""
        hook = register_module_module_registration_hook(lambda parent, name, module: self.give_up(module))
        try:
            yield
        finally:
            hook.remove()

    def give_up(self, module: nn.Module | None) -> None:
        for owner in module.modules() if module is not None else ():
            for name, parameter in owner._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
                    self._keep(empty, parameter)
                    owner._parameters[name] = empty

    @contextmanager
    def filling(self) -> Iterator[None]:
        """Gives a module, while entered, memory for its own parameters when transformers initialises it."""
        initialize = PreTrainedModel._initialize_weights

        def fill(model: PreTrainedModel, module: nn.Module, *options: Any, **others: Any) -> None:
            if getattr(module, "_is_hf_initialized", False):
                return
            given_up = {name: each for name, each in module._parameters.items() if each is not None and each.is_meta}
            for name, empty in given_up.items():
                whole = torch.full(empty.shape, torch.nan, dtype=empty.dtype, device=self.device)
                module._parameters[name] = nn.Parameter(whole, requires_grad=empty.requires_grad)
            with _NothingOnMeta(type(module).__name__):
                initialize(model, module, *options, **others)
            for name, empty in given_up.items():
                drawn = module._parameters[name]
                missing = drawn.isnan()
                if missing.any() and not missing.all():
                    raise NotInParts(f"transformers draws some values of a {type(module).__name__} only")
                if not missing.any():  # else they are as the module itself made them
                    self._keep(empty, drawn)
                module._parameters[name] = empty

        with holding(PreTrainedModel, _initialize_weights=fill):
            yield

    def _keep(self, empty: nn.Parameter, whole: Tensor) -> None:
        if self.part is None:
            return
        if not whole.dim():
            raise NotInParts("it has a parameter that is a single number")
        self.parts[empty], self.sums[empty] = self.part.take(whole, self.kept), checksum(whole)


class _NothingOnMeta(TorchDispatchMode):
    """NotInParts where a tensor without memory is read or written: values would be lost."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self._module = module

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(each, Tensor) and each.is_meta for each in pytree.tree_leaves((args, kwargs))):
            raise NotInParts(f"transformers draws weights of other modules where it initialises a {self._module}")
        return function(*args, **(kwargs or {}))


def _read(
    settings: ModelSettings, config: PretrainedConfig, part: Part, kept: torch.dtype, device: torch.device, backend: str
) -> InParts:
    source = str(settings.repository)
    if getattr(config, "quantization_config", None) is not None:
        raise NotInParts("it is stored in quantized weights")
    drawing = _Drawing(None, kept, device)
    with torch.device("cpu"), no_init_weights(), drawing.giving_up():
        hf = AutoModelForCausalLM.from_config(config, dtype=kept, attn_implementation=backend)
    drawing.give_up(hf)
    hf.tie_weights()
    names = dict(hf.named_parameters())
    if unlike := _read_otherwise(hf, kept):
        raise NotInParts(unlike)
    for buffer in hf.buffers():
        buffer.data = buffer.data.to(device)
    if hf.can_generate():
        with suppress(OSError):  # a model need not have one
            hf.generation_config = GenerationConfig.from_pretrained(source, revision=settings.revision)
    parts, witness = {}, {}
    with _Files(source, settings.revision) as files:
        stored = set(files.names)
        if missing := sorted(set(names) - stored):
            raise NotInParts(f"its folder has no `{missing[0]}`")
        if twice := sorted((set(hf.state_dict()) - set(names)) & stored):
            raise NotInParts(f"its folder has `{twice[0]}`, which the model shares with another")
        for name, parameter in names.items():
            rows = files.slice(name)
            if tuple(rows.get_shape()) != tuple(parameter.shape) or not parameter.dim():
                raise NotInParts(f"its folder has `{name}` in another shape")
            own = part.rows(len(parameter))
            read = rows[own.start : own.stop] if own else torch.empty(0, *parameter.shape[1:])
            parts[name], witness[name] = read.to(device, kept, copy=True), checksum(rows[:WITNESS_ROWS])
    return InParts(hf.eval(), parts, witness)


def _read_otherwise(hf: PreTrainedModel, kept: torch.dtype) -> str | None:
    """Why transformers would make of a folder's tensors something else than the parameters of the same names."""
    if any(isinstance(each, WeightConverter) for each in get_model_conversion_mapping(hf, add_legacy=False)):
        return f"{type(hf).__name__} is stored otherwise than it is held"
    if kept != torch.float32 and hf._keep_in_fp32_modules_strict:
        return f"{type(hf).__name__} keeps some weights in FP32"
    if set(hf.state_dict()) - set(dict(hf.named_parameters(remove_duplicate=False))):
        return f"{type(hf).__name__} stores more than parameters"
    return None


class _Files(ExitStack):
    """The safetensors files of a folder or of a model on the hub, open."""

    def __init__(self, source: str, revision: str | None) -> None:
        super().__init__()
        find = partial(cached_file, source, revision=revision, _raise_exceptions_for_missing_entries=False)
        if Path(source, "adapter_config.json").exists():
            raise NotInParts("its folder holds an adapter")
        if whole := find(WEIGHTS):
            paths = [whole]
        elif index := find(f"{WEIGHTS}.index.json"):
            paths = [find(name) for name in sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))]
        else:
            raise NotInParts("its folder has no safetensors files")
        self._owners = {}
        for path in paths:
            file = self.enter_context(safe_open(path, framework="pt"))
            self._owners |= dict.fromkeys(file.keys(), file)

    @property
    def names(self) -> list[str]:
        return list(self._owners)

    def slice(self, name: str) -> Any:
        """safetensors' view of a stored tensor: rows are read as they are asked for."""
        return self._owners[name].get_slice(name)
