"""The Hugging Face model, built from a hub, a folder or a config."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from foundation.errors import InputError
from foundation.reading import one_line
from packing.settings import HUB_NAME
from pretrain.model.attention import backends as attention
from pretrain.model.distributed import from_all_ranks, refused_together
from pretrain.model.loss.head import check as check_loss
from pretrain.settings.config import SOURCE, flatten
from pretrain.settings.recipe import LossSettings, ModelSettings

# What transformers and torch raise for values that they did not expect, in a config or in a file of weights, read or written: an
# architecture checks its numbers in its own way, or not at all and fails where it first uses them.
WRONG_VALUES = (
    *(ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError, AssertionError, OSError, ImportError),
    *(StrictDataclassError, SafetensorError),
)
# Kept by the config classes under another name, so that they are no attribute of a fresh config.
_RENAMED_KEYS = {"rope_theta", "torch_dtype", "dtype"}
# What a config.json may say otherwise without another model: paths, what a run decides by itself, what a caller gets, and what is
# a classifier's.
_NOT_OF_THE_MODEL = {"_name_or_path", "_commit_hash", "auto_map", "dtype", "torch_dtype", "transformers_version"}
_NOT_OF_THE_MODEL |= {"attn_implementation", "_attn_implementation"}
_NOT_OF_THE_MODEL |= {"use_cache", "return_dict", "output_attentions", "output_hidden_states", *attention.DROPOUTS}
_NOT_OF_THE_MODEL |= {"architectures", "id2label", "label2id", "problem_type"}


# ── Its configuration ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def load_config(settings: ModelSettings) -> PretrainedConfig:
    """The model's configuration, from `source` with `config` laid over it, or from `config` alone. InputError for an unknown
    source, model type or key (transformers would keep the last silently), and for values that the configuration class refuses.

    Attention's dropout, which packed attention does not compute, is 0 unless `config` asks for it; see `dropout_notice`.
    """
    config = _config_of(settings)
    for key in attention.DROPOUTS:
        if getattr(config, key, None) and key not in (settings.config or {}):
            setattr(config, key, 0.0)
    return config


def dropout_notice(settings: ModelSettings) -> str | None:
    """Names the dropout that `load_config` has left out; None where there was none."""
    config, given = _config_of(settings), settings.config or {}
    left_out = [f"{key} {value:g}" for key in attention.DROPOUTS if key not in given and (value := getattr(config, key, None))]
    if not left_out:
        return None
    return f"model: {type(config).__name__} has {', '.join(left_out)}; packed attention computes none, so it is 0 in this run"


def source_config(settings: ModelSettings) -> dict[str, Any]:
    """The config.json of `source` as an identity has it: {"model.source.rms_norm_eps": 1e-6}. As the file has it, and not as a
    version of transformers completes it. Empty without a source. InputError where there is none."""
    if settings.source is None:
        return {}
    _check_source(settings)
    try:
        values, _ = PretrainedConfig.get_config_dict(str(settings.repository), revision=settings.revision)
    except WRONG_VALUES as error:
        raise _unreadable(settings, error) from None
    return {f"{SOURCE}{key}": value for key, value in flatten(values).items() if _NOT_OF_THE_MODEL.isdisjoint(key.split("."))}


def _config_of(settings: ModelSettings) -> PretrainedConfig:
    changes = dict(settings.config or {})
    config = _config_of_type(str(changes.pop("model_type"))) if settings.source is None else _config_of_source(settings)
    known = set(dir(config)) | _RENAMED_KEYS
    for key in changes:
        if key not in known and not (key == "head_dim" and _reads_head_dim(config)):
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean `{near[0]}`?" if near else ""
            raise InputError(f"`model.config.{key}`: {type(config).__name__} has no such key{hint}")
    # Rebuilt rather than assigned to: config classes derive keys from each other (head_dim, layer_types) as they are built.
    try:
        return type(config).from_dict({**config.to_dict(), **changes} if settings.source else changes)
    except WRONG_VALUES as error:
        raise InputError(f"`model.config`: {type(config).__name__} does not take these values: {why_refused(error)}") from None


def _reads_head_dim(config: PretrainedConfig) -> bool:
    """Whether its layers take their heads' width from `head_dim` where it is there, though its class does not list that key."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return model is not None and 'getattr(config, "head_dim"' in inspect.getsource(inspect.getmodule(model))


def _config_of_type(model_type: str) -> PretrainedConfig:
    if model_type not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model_type, CONFIG_MAPPING, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "qwen3, llama, qwen2 and gpt2 are some that it knows"
        raise InputError(f"`model.config.model_type`: transformers has no model type {model_type!r}; {hint}")
    try:
        return AutoConfig.for_model(model_type)
    except WRONG_VALUES as error:  # as of one that is made of others
        raise InputError(f"`model.config.model_type`: {model_type!r}: {why_refused(error)}; name another") from None


def _check_source(settings: ModelSettings) -> None:
    """InputError where it is neither a folder with a config.json, nor a name of the hub."""
    source, folder = str(settings.repository), Path(str(settings.repository))
    if not (folder / "config.json").is_file() and (folder.exists() or not HUB_NAME.fullmatch(source)):
        raise InputError(
            f"`model.source`: {source} is no folder with a config.json; name a folder that holds a model, or a model on the hub"
        )


def _config_of_source(settings: ModelSettings) -> PretrainedConfig:
    _check_source(settings)
    try:
        return AutoConfig.from_pretrained(str(settings.repository), revision=settings.revision, trust_remote_code=False)
    except WRONG_VALUES as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"`model.source`: {settings.source} brings code of its own, which is never run; name a model of transformers' own"
            ) from None
        raise _unreadable(settings, error) from None


def _unreadable(settings: ModelSettings, error: Exception) -> InputError:
    where = "" if Path(str(settings.source)).exists() else f", which is no folder below {Path.cwd()}, so the hub was asked"
    return InputError(f"`model.source`: no model can be read from {str(settings.source)!r}{where}: {why_refused(error)}")


def why_refused(error: Exception) -> str:
    """A library's error in a line, without the lists of everything it knows."""
    return one_line(error, named=isinstance(error, (LookupError, AttributeError, AssertionError))).rstrip(". ")


def check_architecture(model: PreTrainedModel, length: int, loss: LossSettings, device_type: str) -> None:
    """InputError for what would be computed differently from the model's own way; a model on the meta device is enough."""
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder or any(getattr(module, "is_causal", None) is False for module in model.modules()):
        raise InputError(f"`model`: in {name}, tokens see those after them; name a causal language model")
    heads, kv_heads = getattr(config, "num_attention_heads", None), getattr(config, "num_key_value_heads", None)
    if heads and kv_heads and heads % kv_heads:
        raise InputError(
            f"`model.config`: `num_attention_heads: {heads}` is not a multiple of `num_key_value_heads: {kv_heads}`; change one"
        )
    if model.base_model is model:  # what would be called for hidden states
        raise InputError(f"`model`: {name} does not say which of its modules holds its layers; name another model")
    between = [key for key, child in model.named_children() if child not in (model.base_model, model.get_output_embeddings())]
    if between:
        raise InputError(f"`model`: {name} computes `{between[0]}` after its layers, which no loss here does; name another model")
    attention.check(model, length)
    check_loss(model.config, loss, device_type)


# ── The model ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def build_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights: shapes for planning and FLOPs. InputError where the shapes are impossible."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    except WRONG_VALUES as error:
        kind = type(config).__name__
        raise InputError(f"`model`: {kind} makes no causal language model with these settings: {why_refused(error)}") from None


def build(
    settings: ModelSettings, config: PretrainedConfig, *, weights: torch.dtype, seed: int, device: torch.device, backend: str
) -> PreTrainedModel:
    """The model with weights of dtype `weights` on `device`, attending through the packed `backend`.

    From scratch, weights are drawn in FP32 from `seed` and then rounded, so that FP32 and BF16 runs start from the same draw.
    Every process draws the same.
    """
    attention.register()
    options = {"attn_implementation": backend, "trust_remote_code": False}
    if settings.weights_source is None:
        torch.manual_seed(seed)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
        round_weights(model, weights)  # not model.to(): rotary frequencies are buffers, and BF16 ones misplace tokens
        return model
    options |= {"config": config, "revision": settings.revision, "dtype": weights, "output_loading_info": True}
    try:
        with without_bars():
            model, loading = AutoModelForCausalLM.from_pretrained(settings.repository, **options)
    except WRONG_VALUES as error:
        raise InputError(f"`model.source`: {settings.source}: weights cannot be loaded: {why_refused(error)}") from None
    if missing := sorted(loading["missing_keys"]):  # transformers draws them at random, and each process its own
        raise InputError(
            f"`model.source`: {settings.source}: has no weights for {len(missing)} of the model's parameters, {missing[0]} among "
            "them; fetch it again, or take out what `model.config` changes about its shape"
        )
    return model.to(device)


def build_on_first_rank(
    settings: ModelSettings,
    config: PretrainedConfig,
    accelerator: Accelerator,
    *,
    kept: torch.dtype,
    weights: torch.dtype,
    seed: int,
    backend: str,
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The model under FSDP2: with parameters of dtype `weights` on the meta device and buffers on their own, and on the first
    rank, in host memory, what the parameters are to be: what `build` gives them, by name, in `kept`. `part_from_first` hands it
    out. Collective; InputError on all ranks where the first cannot build it."""
    attention.register()
    reads = settings.weights_source is not None
    device = torch.device("cpu") if reads else accelerator.device  # what is drawn depends on the device that draws

    def build_whole() -> PreTrainedModel | None:
        options = {"weights": kept, "seed": seed, "device": device, "backend": backend}
        return build(settings, config, **options).cpu() if accelerator.is_main_process else None

    whole = refused_together(build_whole)
    with accelerator.device, init_empty_weights(include_buffers=False):
        hf = AutoModelForCausalLM.from_config(config, dtype=kept if reads else torch.float32, attn_implementation=backend)
    hf.tie_weights()
    round_weights(hf, weights)
    drawn = dict(whole.named_buffers()) if whole else {}
    for name, buffer in hf.named_buffers():
        if whole:
            buffer.copy_(drawn[name])
        torch.distributed.broadcast(buffer, src=0)
    hf.generation_config = from_all_ranks(whole and whole.generation_config)[0]
    return hf, {name: parameter.data.to(kept) for name, parameter in whole.named_parameters()} if whole else {}


@contextmanager
def without_bars() -> Iterator[None]:
    """Turns off transformers' own bars while entered: they are drawn into log files too."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def round_weights(hf: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Round the parameters to `dtype` in place, and return what they were by name: the masters that a remainder is taken from."""
    masters = {name: parameter.data for name, parameter in hf.named_parameters()}
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype)
    return masters


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The transformer layers of `model`, by name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}


def named_tensors(hf: PreTrainedModel) -> dict[str, Tensor]:
    """The parameters and persistent buffers of `hf`, live, by Hugging Face name; a tied parameter once."""
    buffers = {name: buffer for name, buffer in hf.named_buffers() if name in hf.state_dict()}
    return {**dict(hf.named_parameters()), **buffers}
