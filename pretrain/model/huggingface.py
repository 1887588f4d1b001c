"""The Hugging Face model: from a hub, a folder or a config; made to take packed batches; exported again as it came.

The model stays a transformers model with its own parameter names. Three things are put around its layers, each as a wrapper of
the layer's forward, innermost first: working copies in the compute dtype, torch.compile, gradient checkpointing. So a recomputed
layer sees the working copies that its forward saw, whatever transformers' own checkpointing does in the installed version.
"""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from foundation.errors import InputError
from foundation.files import fsync, fsync_tree
from packing.batch import Microbatch
from packing.settings import HUB_NAME
from pretrain.model import attention
from pretrain.model.fused.fuse import FusedLayers
from pretrain.model.fused.layers import FusedLayer
from pretrain.model.loss.head import LOSS_SCOPE, LossHead
from pretrain.model.loss.head import check as check_loss
from pretrain.model.working_copies import casting_output, casting_parameters
from pretrain.precision.context import PrecisionContext
from pretrain.precision.linear import LowPrecisionLinear, LowPrecisionNorm
from pretrain.settings.recipe import LossSettings, ModelSettings

# Kept by the config classes under another name, so that they are no attribute of a fresh config.
_RENAMED_KEYS = {"rope_theta", "torch_dtype", "dtype"}


def load_config(settings: ModelSettings) -> PretrainedConfig:
    """The model's configuration, from `source` with `config` laid over it, or from `config` alone.

    Raises InputError for an unknown source, model type or configuration key (transformers would keep the last silently), and for
    values that the configuration class refuses.
    """
    changes = dict(settings.config or {})
    config = _config_of_type(str(changes.pop("model_type"))) if settings.source is None else _config_of_source(settings)
    known = set(dir(config)) | _RENAMED_KEYS
    for key in changes:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise InputError(f"`model.config.{key}`: {type(config).__name__} has no such key{hint}")
    # Rebuilt rather than assigned to: config classes derive keys from each other (head_dim, layer_types) as they are built.
    try:
        return type(config).from_dict({**config.to_dict(), **changes} if settings.source else changes)
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise InputError(f"`model.config`: {type(config).__name__} does not take these values: {_reason(error)}") from None


def _config_of_type(model_type: str) -> PretrainedConfig:
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, CONFIG_MAPPING, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "qwen3, llama, qwen2 and gpt2 are some that it knows"
        raise InputError(f"`model.config.model_type`: transformers has no model type {model_type!r}; {hint}")
    return AutoConfig.for_model(model_type)


def _config_of_source(settings: ModelSettings) -> PretrainedConfig:
    source, folder = str(settings.source), Path(str(settings.source))
    if folder.exists() and not (folder / "config.json").is_file():
        raise InputError(f"`model.source`: {source} is no folder with a config.json; name a folder that holds a model")
    if not folder.exists() and not HUB_NAME.fullmatch(source):
        raise InputError(f"`model.source`: {source}: no such folder; name a folder that holds a model, or a model on the hub")
    try:
        return AutoConfig.from_pretrained(source, revision=settings.revision, trust_remote_code=settings.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"`model.source`: {source} brings code of its own; set `model.trust_remote_code: true` if you trust it"
            ) from None
        raise InputError(f"`model.source`: no model can be read from {source!r}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """A library's error in a line, without the lists of everything it knows."""
    return " ".join(str(error).split())[:300].rstrip(". ")


def check_architecture(model: PreTrainedModel, length: int, loss: LossSettings, device_type: str) -> None:
    """InputError for what would be computed differently from the model's own way; a model on the meta device is enough."""
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise InputError(f"`model`: {name} is an encoder-decoder; name a causal language model")
    if any(getattr(module, "is_causal", None) is False for module in model.modules()):
        raise InputError(f"`model`: in {name}, tokens see those after them; name a causal language model")
    heads, kv_heads = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if heads and kv_heads and heads % kv_heads:
        raise InputError(
            f"`model.config`: `num_attention_heads: {heads}` is not a multiple of `num_key_value_heads: {kv_heads}`; change one"
        )
    between = [key for key, child in model.named_children() if child not in (model.base_model, model.get_output_embeddings())]
    if between:
        raise InputError(f"`model`: {name} computes `{between[0]}` after its layers, which no loss here does; name another model")
    attention.check(model, length)
    check_loss(model.config, loss, device_type)


def build_on_meta(config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model without memory for its weights: shapes for planning and FLOPs. InputError where the shapes are impossible."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    except (ValueError, TypeError, RuntimeError, ArithmeticError) as error:  # each architecture checks its shapes in its own way
        kind = type(config).__name__
        raise InputError(f"`model`: {kind} makes no causal language model with these settings: {_reason(error)}") from None


def build(
    settings: ModelSettings, config: PretrainedConfig, *, weights: torch.dtype, seed: int, device: torch.device, backend: str
) -> PreTrainedModel:
    """The model with weights of dtype `weights` on `device`, attending through the packed `backend`.

    From scratch, weights are drawn in FP32 from `seed` and then rounded, so that FP32 and BF16 runs start from the same draw.
    Every process draws the same.
    """
    attention.register()
    if settings.source is None:
        torch.manual_seed(seed)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=backend)
        round_weights(model, weights)  # not model.to(): rotary frequencies are buffers, and BF16 ones misplace tokens
        return model
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            settings.source,
            config=config,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            dtype=weights,
            attn_implementation=backend,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"`model.source`: {settings.source}: weights cannot be loaded: {_reason(error)}") from None
    if missing := sorted(found["missing_keys"]):  # transformers draws them at random, and each process its own
        raise InputError(
            f"`model.source`: {settings.source}: has no weights for {len(missing)} of the model's parameters, {missing[0]} among "
            "them; fetch it again, or take out what `model.config` changes about its shape"
        )
    return model.to(device)


def round_weights(hf: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Round the parameters to `dtype` in place, and return what they were by name: the masters that a remainder is taken from."""
    masters = {name: parameter.data for name, parameter in hf.named_parameters()}
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype)
    return masters


class PackedLanguageModel(nn.Module):
    """A causal language model that maps a packed microbatch to its summed loss.

    `hf` keeps its parameter names; everything the launcher adds is in wrapped forwards, in the LM head's class and in the modules
    that compute in low precision. `precision`: the context they share, None where the whole model computes in its dtype.
    `fused`: the layers that compute as a few large products, None without any.
    """

    def __init__(self, hf: PreTrainedModel, backend: str, loss: LossSettings) -> None:
        super().__init__()
        self.hf = hf
        self.backend = backend
        self.precision: PrecisionContext | None = None
        self.fused: FusedLayers | None = None
        hf.set_output_embeddings(LossHead.replacing(hf.get_output_embeddings(), loss))

    def forward(self, input_ids: Tensor, position_ids: Tensor, labels: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
        """Summed cross-entropy (FP32 scalar) over the labels that are not -100.

        `input_ids`, `position_ids`, `labels`: [1, T] int64, labels already shifted. `cu_seqlens`: [bucket] int32, 0, the ends of
        the documents, then T. `max_seqlen`: the pack length.
        """
        documents: dict[str, Any] = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        if self.backend == "packed_sdpa":
            documents["document_mask"] = attention.document_mask(cu_seqlens, max_seqlen, input_ids.shape[1])
        with self.precision.forward(training=self.training) if self.precision else nullcontext():
            output = self.hf.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False, **documents)
            with torch.profiler.record_function(LOSS_SCOPE):
                return self.hf.get_output_embeddings()(output.last_hidden_state, labels)

    def begin_microbatch(self, *, first: bool) -> None:
        """Before each microbatch; in the `first` of a step, what is made of the weights is made anew."""
        for shared in (self.precision, self.fused.arithmetic if self.fused else None):
            if shared is not None:
                shared.first_microbatch = first

    # accelerate's FSDP2 preparation asks for these to keep tied weights in one shard group.
    def get_input_embeddings(self) -> nn.Module:
        return self.hf.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.hf.get_output_embeddings()


def inputs_of(batch: Microbatch, device: torch.device) -> dict[str, Any]:
    """What `PackedLanguageModel` takes, on `device`; the copies do not wait.

    The number of document offsets is the one shape that varies. Marked as dynamic, it recompiles nothing.
    """
    tensors = {
        name: getattr(batch, name).to(device, non_blocking=True) for name in ("input_ids", "position_ids", "labels", "cu_seqlens")
    }
    torch._dynamo.mark_dynamic(tensors["cu_seqlens"], 0)
    return {**tensors, "max_seqlen": batch.max_seqlen}


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The transformer layers of `model`, by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}


def wrap_layers(
    hf: PreTrainedModel,
    settings: ModelSettings,
    *,
    cast_to: torch.dtype | None,
    compile_layers: bool,
    precision: PrecisionContext | None = None,
) -> None:
    """Put working copies, compilation and gradient checkpointing around the forward of the model's units.

    `cast_to`: the dtype of the working copies, None where the parameters are in the compute dtype already. A unit is an
    embedding, a decoder layer, or a module of its own such as the final norm; the LM head casts for itself. `precision`: the
    context that a recomputed layer must be recomputed in.
    """
    recompute = settings.gradient_checkpointing
    every = {"none": None, "full": 1}[recompute] if isinstance(recompute, str) else recompute.every
    for unit in _units(hf.base_model):
        if isinstance(unit, nn.Embedding):
            if cast_to is not None:
                unit.forward = casting_output(unit.forward, cast_to)
            continue
        if isinstance(unit.forward, FusedLayer):  # it casts for itself, and what it calls is not for the compiler
            if cast_to is not None:
                unit.forward.unfused = casting_parameters(unit, unit.forward.unfused, cast_to)
            continue
        # A graph ends at each low-precision product and another begins after it. The casts stay outside of these pieces: a graph
        # cannot end inside of the context that swaps the parameters. Outside of a lone norm too, whose graph would leave the
        # rounding of its weight out.
        in_pieces = any(isinstance(module, LowPrecisionLinear | LowPrecisionNorm) for module in unit.modules())
        casts_outside = in_pieces or not isinstance(unit, GradientCheckpointingLayer)
        if compile_layers and casts_outside:
            unit.forward = torch.compile(unit.forward, dynamic=False, fullgraph=not in_pieces)
        if cast_to is not None:
            unit.forward = casting_parameters(unit, unit.forward, cast_to)
        if compile_layers and not casts_outside:
            # Static shapes, except the number of documents, which the batch marks as dynamic: one graph serves all steps and
            # layers.
            unit.forward = torch.compile(unit.forward, fullgraph=True, dynamic=False)
    for index, layer in enumerate(decoder_layers(hf).values()):
        if every is not None and index % every == 0:
            layer.forward = _checkpointed(layer, precision)


def _units(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, GradientCheckpointingLayer | nn.Embedding) or module._parameters:
        yield module
    else:
        for child in module.children():
            yield from _units(child)


def _checkpointed(layer: nn.Module, precision: PrecisionContext | None) -> Any:
    forward = layer.forward
    recompute = precision.checkpoint if precision else partial(checkpoint, use_reentrant=False)

    def forward_recomputed_in_backward(*args: Any, **kwargs: Any) -> Any:
        if not (layer.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        return recompute(partial(forward, **kwargs), *args)

    return forward_recomputed_in_backward


def named_tensors(hf: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters and persistent buffers of `hf`, live, by Hugging Face name; a tied parameter once."""
    buffers = {name: buffer for name, buffer in hf.named_buffers() if name in hf.state_dict()}
    return {**dict(hf.named_parameters()), **buffers}


def export(hf: PreTrainedModel, state_dict: Mapping[str, Tensor], tokenizer: Any | None, folder: Path) -> None:
    """Write a folder that AutoModelForCausalLM (and AutoTokenizer, with `tokenizer`) loads; it appears whole or not at all."""
    writing = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        with _without_progress_bar():
            hf.save_pretrained(writing, state_dict=dict(state_dict))
        if tokenizer is not None:
            tokenizer.save_pretrained(writing)
        for file in writing.iterdir():
            file.chmod(0o644)  # safetensors keeps its files from everybody else, who may be meant to use the model
        fsync_tree(writing)
    except (OSError, SafetensorError, ValueError) as error:  # ValueError: a generation config that transformers will not write
        shutil.rmtree(writing, ignore_errors=True)
        raise InputError(
            f"{folder}: the trained model cannot be written: {error}. The checkpoints hold it; mend this and run again"
        ) from None
    previous = folder.with_name(f".{folder.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        os.replace(folder, previous)
    os.replace(writing, folder)
    fsync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """A bar for the writing of one file would be the only line of a run's output that is drawn over."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
