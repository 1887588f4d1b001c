"""Read the configuration of a Hugging Face model, build the model, and export it to a folder.

A model is loaded from the Hugging Face hub or from a folder, or it is built from a configuration
alone. transformers can load the exported folder.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from foundation.errors import InputError, as_input_error
from foundation.files import by_umask, new_folder
from foundation.overrides import overridden
from foundation.progress import advance
from foundation.settings import flatten
from pretrain.model import attention, routing
from pretrain.model.distributed import from_all_ranks, refused_together
from pretrain.model.loss.head import check as check_loss
from pretrain.precision.grouped import check_experts
from pretrain.precision.layouts import stored_weights
from pretrain.settings.config import SOURCE
from pretrain.settings.recipe import LossSettings, ModelSettings

# Keys that must be 1 or more. transformers builds some models with 0 or with a negative value.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "n_inner",
    "ffn_dim",
    "moe_intermediate_size",
)
# Files that some exports contain and others do not.
_OPTIONAL_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|generation_config\.json|chat_template\.jinja"
)
# Names of RoPE parameters in transformers 4, by the layers that they describe, and the new names.
_OLD_ROPE_KEYS = {
    "full_attention": {
        "rope_theta": "rope_theta",
        "rotary_emb_base": "rope_theta",
        "global_rope_theta": "rope_theta",
        "partial_rotary_factor": "partial_rotary_factor",
        "rotary_pct": "partial_rotary_factor",
    },
    "sliding_attention": {"rope_local_base_freq": "rope_theta", "local_rope_theta": "rope_theta"},
}
# RoPE parameters that transformers 4 writes beside `rope_scaling`.
_TOP_LEVEL_ROPE = ("rope_theta", "partial_rotary_factor")
# RoPE scaling that transformers 4 accepts for some model types only with `type` instead of
# `rope_type`, and without further keys.
_STRICT_SCALING = {
    "olmo": {"rope_type", "factor"},
    "olmo2": {"rope_type", "factor"},
    "phi3": {"rope_type", "short_factor", "long_factor"},
}
# Keys of tokenizer_config.json that describe the loading of the tokenizer in this process.
_NOT_OF_THE_TOKENIZER = ("backend", "is_local", "local_files_only")
# Names of buffers that older versions of transformers saved. Newer versions compute these buffers.
_OLD_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attn\.masked_bias)$")
# Exceptions that transformers and torch raise for unexpected values. Some architectures check the
# values of their configuration, and others fail when they first use a value.
_as_input_error = partial(
    as_input_error,
    (
        ValueError,
        TypeError,
        RuntimeError,
        ArithmeticError,
        LookupError,
        AttributeError,
        AssertionError,
        OSError,
        ImportError,
        StrictDataclassError,
        SafetensorError,
    ),
)
_SET_SOURCE = (
    "set `model.source` to the folder of a model, for example to the `final` folder of a run"
)
_ANOTHER_SOURCE = (
    "either download the source again, or change `model.config` so that the model has exactly the "
    "parameters of the source. If names differ in a prefix, such as `_orig_mod.` of torch.compile "
    "or `module.` of DDP, remove it from the names in the file"
)
# Keys of a config.json that may differ although the model is the same: paths, versions, settings of
# the run, flags that select outputs, and keys of classifiers.
_NOT_OF_THE_MODEL = {
    "_name_or_path",
    "_commit_hash",
    "auto_map",
    "architectures",
    "transformers_version",
    "dtype",
    "torch_dtype",
    "attn_implementation",
    "_attn_implementation",
    "attention_dropout",
    "attn_pdrop",
    "use_cache",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "num_labels",
    "id2label",
    "label2id",
    "problem_type",
}

# The progress bar of transformers would be written to log files too.
transformers_logging.disable_progress_bar()


# ── The configuration ──


def load_config(settings: ModelSettings) -> PretrainedConfig:
    """Return the model configuration that the settings `source` and `config` describe.

    With a source, the configuration has the values of the source's config.json, except for the keys
    in `config`, which replace them. Without a source, it has the values in `config`, and defaults
    for all other keys. Raise InputError for an unknown source, model type or key, for a key without
    effect, and for values that the configuration class rejects. transformers itself would accept
    unknown keys without a message.
    """
    kind, stored, changes = _read(settings)
    values = _rebased(kind, stored, changes) | changes if changes else stored
    vocabulary = values.get("vocab_size")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        default = getattr(kind, key, None)
        # The default of the class may be an id of a larger vocabulary.
        if isinstance(default, int) and isinstance(vocabulary, int) and default >= vocabulary:
            values = {key: None} | values
    for key in (kind.attribute_map.get(size, size) for size in _SIZES):
        if isinstance(values.get(key), int) and values[key] < 1:
            raise InputError(f"`model.config.{key}: {values[key]}` is below 1; set it to 1 or more")
    with _as_input_error(f"`model.config`: {kind.__name__} does not accept these values"):
        config = kind.from_dict(copy.deepcopy(values) | {"model_type": kind.model_type})
    for key in changes:
        if not _has_effect(kind, values, key, over_source=bool(stored)):
            near = _nearest(key, {*config_values(kind, {}), *kind.attribute_map} - {key})
            raise InputError(
                f"`model.config.{key}: {values[key]}` has no effect: {kind.__name__} has no such "
                "key, or reads the value from other keys, such as `rope_parameters` or "
                f"`layer_types`{near}"
            )
    if "router_aux_loss_coef" in changes and not getattr(config, "output_router_logits", None):
        raise InputError(
            "`model.config.router_aux_loss_coef` requires the router loss; set "
            "`model.config.output_router_logits: true`"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    is_changed = not changes.keys().isdisjoint(("rope_parameters", "rope_scaling"))
    if is_changed and rope.get("rope_type") == "default" and "factor" in rope:
        raise InputError(
            f"`model.config`: `factor: {rope['factor']}` has no effect with "
            "`rope_type: default`; either set another `rope_type`, such as linear, or remove it"
        )
    return config


def _read(settings: ModelSettings) -> tuple[type[PretrainedConfig], dict[str, Any], dict[str, Any]]:
    """Return the configuration class, the values of `source`, and the changes in `config`.

    Values and changes are dicts that map each key to its value. Keys with several names get the
    name that the configuration class uses. If a key is set under two names, the last one counts.
    Raise InputError for an unknown source or model type, or if `config` contradicts the source.
    """
    changes = copy.deepcopy(settings.config or {})
    stored: dict[str, Any] = {}
    if settings.source is None:
        name = str(changes.pop("model_type"))
        if name not in CONFIG_MAPPING:
            raise InputError(
                f"`model.config.model_type`: transformers has no model type {name!r}"
                f"{_nearest(name, CONFIG_MAPPING)}"
            )
        kind = CONFIG_MAPPING[name]
    else:
        stored = _stored_config(settings)
        if not stored:
            raise InputError(
                f"`model.source`: {settings.source}: the source has no config.json; {_SET_SOURCE}"
            )
        if "auto_map" in stored and stored.get("model_type") not in CONFIG_MAPPING:
            raise InputError(
                f"`model.source`: {settings.source} requires Python code that is stored with the "
                "model, but such code is never run here; choose another model"
            )
        # Quantized weights are dequantized when they are loaded.
        stored = _without("quantization_config", stored)
        with _as_input_error(
            f"`model.source`: {settings.source}: transformers rejects its config.json"
        ):
            loaded = AutoConfig.from_pretrained(
                str(settings.repository), revision=settings.revision, trust_remote_code=False
            )
        kind = type(loaded)
    model_type = changes.pop("model_type", kind.model_type)
    if model_type != kind.model_type:
        raise InputError(
            f"`model.config.model_type: {model_type}` contradicts `model.source`, which has the "
            f"model type {kind.model_type}; remove either `model.config.model_type` or "
            "`model.source`"
        )
    names = kind.attribute_map | {"torch_dtype": "dtype"}
    stored, changes = (
        {names.get(key, key): value for key, value in values.items()}
        for values in (stored, changes)
    )
    return kind, stored, changes


def _rebased(
    kind: type[PretrainedConfig],
    stored: dict[str, Any],
    changes: dict[str, Any],
) -> dict[str, Any]:
    """Return a copy of `stored` without derived values, so that `changes` can take effect.

    The result describes the same configuration as `stored`. transformers 5 writes derived values
    into config.json. If `changes` has a key from which transformers derives another value, the
    stored value would replace the newly derived value. Therefore lists that transformers computes
    from other keys, such as `layer_types`, are dropped. `rope_parameters` is replaced by the keys
    that older versions of transformers wrote instead, such as `rope_theta`. But if `changes`
    contains `rope_parameters`, only the older key `rope_scaling` is dropped, and `rope_parameters`
    is kept.
    """
    base = dict(stored)
    if "rope_parameters" in changes:
        base.pop("rope_scaling", None)
    elif isinstance(rope := stored.get("rope_parameters"), dict):
        top_level = {key: rope[key] for key in _TOP_LEVEL_ROPE if key in rope}
        scaling = {key: value for key, value in rope.items() if key not in top_level}
        unfolded = _without("rope_parameters", base) | top_level | {"rope_scaling": scaling}
        if _is_same(kind, stored, unfolded):
            base = unfolded
    for key in [key for key, value in base.items() if isinstance(value, list)]:
        if _is_same(kind, stored, _without(key, base)):
            del base[key]
    return base


def config_values(kind: type[PretrainedConfig], values: dict[str, Any]) -> dict[str, Any]:
    """Return all public values of a configuration of class `kind` that is made from `values`.

    Return an empty dict if the class rejects the values. Warnings of transformers are hidden.

    A configuration stores unknown keys too. See `_is_same`.
    """
    quiet = overridden(logging.getLogger("transformers"), handlers=[logging.NullHandler()])
    with (
        suppress(InputError),
        _as_input_error(kind.__name__),
        quiet,
        warnings.catch_warnings(action="ignore"),
    ):
        made = kind.from_dict(copy.deepcopy(values)).to_dict()
        return {key: value for key, value in made.items() if not key.startswith("_")}
    return {}


def _without(key: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def _is_same(kind: type[PretrainedConfig], values: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if `other` describes the same configuration as `values`.

    `other` may have additional unknown keys, which a configuration stores.
    """
    return config_values(kind, values).items() <= config_values(kind, other).items()


def _has_effect(
    kind: type[PretrainedConfig], values: dict[str, Any], key: str, *, over_source: bool
) -> bool:
    """Return False if the configuration class has no `key`, or if `key` has no effect.

    Without a source, every key that the class has is accepted, even a key without effect, because
    published config.json files contain keys without effect. For example, a file may set a key to
    null instead of its default, or another key of the file may turn this key off.

    Args:
        kind: The configuration class.
        values: Map each key of the configuration to its value.
        key: The key of `values` to check.
        over_source: True if the model has a source, whose values `key` changes.
    """
    value = values[key]
    remaining = _without(key, values)
    without = config_values(kind, remaining)
    if key.startswith("_"):
        return False
    # The layers of many models read `head_dim`, although their configurations lack it.
    if not without or key == "head_dim":
        return True
    if key not in without:
        return _reacts(kind, remaining, key, value)
    # The class adds missing entries to a dict, so the dict in the configuration may differ from the
    # dict in `values`.
    is_kept = without[key] == value or isinstance(value, dict)
    return not over_source or is_kept or not _is_same(kind, remaining, values)


def _reacts(kind: type[PretrainedConfig], values: dict[str, Any], key: str, *first: Any) -> bool:
    """Return True if another key of the configuration made from `values` depends on `key`.

    The function sets `key` to a few different values, one after the other. `first` are tried first.
    """
    for value in (*first, 0, 1, 2, {"rope_type": "default", "rope_theta": 2.0}):
        changed = values | {key: value}
        if config_values(kind, changed) and not _is_same(kind, values, changed):
            return True
    return False


def source_config(settings: ModelSettings) -> dict[str, Any]:
    """Return a dict from dotted keys to the values of the source's config.json.

    The dict identifies the model that a run trains. Example: {"model.source.rms_norm_eps": 1e-6}.
    Only values of the file are returned, because the defaults for missing values depend on the
    version of transformers. Keys that do not describe the model, such as paths and versions, are
    omitted. Return an empty dictionary if the model has no source. Raise InputError if the source
    does not exist.
    """
    if settings.source is None:
        return {}
    return {
        f"{SOURCE}{key}": value
        for key, value in flatten(_stored_config(settings)).items()
        if _NOT_OF_THE_MODEL.isdisjoint(key.split("."))
    }


def _stored_config(settings: ModelSettings) -> dict[str, Any]:
    what = (
        f"`model.source`: {settings.source!r} is neither the folder of a model nor a model on the "
        "Hugging Face hub"
    )
    with _as_input_error(what, _SET_SOURCE):
        return PretrainedConfig.get_config_dict(
            str(settings.repository), revision=settings.revision
        )[0]


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def check_architecture(model: PreTrainedModel, length: int, loss: LossSettings) -> None:
    """Raise InputError if this project would compute the model differently from transformers.

    `model` may be on the meta device. `length` is the pack length in tokens.
    """
    supported = (model.base_model, model.get_output_embeddings())
    unsupported = [key for key, child in model.named_children() if child not in supported]
    if unsupported:
        raise InputError(
            f"`model`: {type(model).__name__} has modules besides the base model and the output "
            f"embedding: {', '.join(unsupported)}; choose another model"
        )
    attention.check(model, length)
    if getattr(model.config, "output_router_logits", None):
        routing.check(model)
    check_experts(model)
    check_loss(model.config, loss)


# ── The model ──


def build_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, which needs no memory for weights.

    The shapes of this model are used to plan memory and to count FLOPs. Raise InputError if the
    configuration has impossible shapes.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"`model`: {config.model_type} is no causal language model; choose another model"
        )
    problem = f"no causal language model can be built from this {type(config).__name__}"
    with _as_input_error(f"`model`: {problem}"), torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )


def build(
    settings: ModelSettings,
    config: PretrainedConfig,
    *,
    weights: torch.dtype,
    seed: int,
    device: torch.device,
    backend: str,
) -> PreTrainedModel:
    """Return the model on `device`, with weights of dtype `weights`.

    The weights are loaded from the source. Without a source of weights, random weights are drawn in
    FP32 with `seed` and then rounded to `weights`. Therefore FP32 and BF16 runs start from the same
    random numbers, and all processes draw the same weights.

    Args:
        settings: Source and changes of the configuration.
        config: Configuration of the model.
        weights: Dtype of the weights.
        seed: Seed of random weights.
        device: Device of the model.
        backend: Name of the attention implementation, such as "packed_varlen".

    Raises:
        InputError: The weights of the source cannot be loaded or do not fit the configuration.
    """
    attention.admit_packed_sdpa(config)
    options: dict[str, Any] = {"attn_implementation": backend, "trust_remote_code": False}
    if settings.weights_source is None:
        torch.manual_seed(seed)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
        # Do not use model.to(), because it would also round buffers. With rotary frequencies in
        # BF16, the positions of tokens would be wrong.
        round_weights(model, weights)
        return model
    source = f"`model.source`: {settings.source}"
    quantized = quantized_weights(str(settings.repository), settings.revision)
    shapes = build_on_meta(config)
    # transformers reads either a source, or the values of a dict by `[...]`.
    repository = None if quantized else str(settings.repository)
    kind: Any = type(shapes)
    with _as_input_error(f"{source}: weights cannot be loaded", _ANOTHER_SOURCE):
        model, loading = kind.from_pretrained(
            repository,
            state_dict=quantized or None,
            config=config,
            revision=settings.revision,
            dtype=weights,
            output_loading_info=True,
            # Weights of other sizes raise InputError below, with the sizes in the message.
            ignore_mismatched_sizes=True,
            **options,
        )
    _check_loaded(source, model, loading)
    expected = dict(shapes.named_parameters())
    # If the file contains different values for two tied parameters, transformers unties them.
    if untied := sorted(dict(model.named_parameters()).keys() - expected.keys()):
        raise InputError(
            f"{source}: the configuration ties {untied[0]} to another parameter, but the file has "
            "different values for both; set `model.config.tie_word_embeddings: false`",
        )
    # transformers does not keep `requires_grad: false` when it loads weights.
    for name, parameter in expected.items():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    if quantized:
        load_generation_config(model, settings)
    return model.to(device)


def _check_loaded(source: str, model: PreTrainedModel, loading: dict[str, Any]) -> None:
    """Raise InputError unless the source has exactly the parameters of the model.

    loading: the second result of `from_pretrained`.
    """
    for name, stored, expected in sorted(loading["mismatched_keys"]):
        remedy = _ANOTHER_SOURCE
        if stored[0] != expected[0] == model.config.get_text_config().vocab_size:
            remedy = f"set `model.config.vocab_size: {stored[0]}`"
        raise InputError(
            f"{source}: {name} has the shape {list(stored)}, but {list(expected)} by the "
            f"configuration; {remedy}"
        )
    # transformers initializes missing weights at random, and differently in each process.
    missing = sorted(loading["missing_keys"])
    surplus = sorted(name for name in loading["unexpected_keys"] if not _OLD_BUFFERS.search(name))
    if missing or surplus:
        missing_example = next(iter(missing), "none")
        surplus_example = next(iter(surplus), "none")
        raise InputError(
            f"{source}: the source has no weights for {len(missing)} of the model's parameters "
            f"({missing_example}), and {len(surplus)} of its weights have no place in the model "
            f"({surplus_example}); {_ANOTHER_SOURCE}"
        )
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InputError(f"{source}: {name} contains NaN or infinity; choose another source")


def quantized_weights(
    repository: str, revision: str | None = None, *, local: bool = False
) -> dict[str, Any]:
    """Return the values of a model with quantized weights by name. The dict of others is empty.

    `[...]` reads a value from its file, and dequantizes it.

    repository: a folder, or a name on the Hugging Face hub.
    local: True to use no network.

    Raises InputError if the files do not have the layout that config.json describes.
    """
    options: dict[str, Any] = {"revision": revision, "local_files_only": local}
    with _as_input_error(
        f"`model.source`: {repository}: weights cannot be read",
        "either download the source again, or choose a source with BF16 weights or with a layout "
        "in docs/serving.md",
    ):
        folder = Path(repository)
        if not folder.is_dir():
            folder = Path(
                snapshot_download(
                    repository,
                    allow_patterns=["model.safetensors", "model-*.safetensors"],
                    **options,
                )
            )
        files = [safe_open(file, "pt") for file in sorted(folder.glob("model*.safetensors"))]
        config, _ = PretrainedConfig.get_config_dict(repository, **options)
        return stored_weights(
            ((name, file.get_slice(name)) for file in files for name in file.keys()),  # noqa: SIM118
            config.get("quantization_config"),
        )


def load_generation_config(model: PreTrainedModel, settings: ModelSettings) -> None:
    """Set the generation config of the source, if the source has one."""
    if model.can_generate():
        with suppress(OSError):
            model.generation_config = GenerationConfig.from_pretrained(
                str(settings.repository), revision=settings.revision or "main"
            )


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
    """Return a model for FSDP2 whose parameters have no values, and the values on the first rank.

    The parameters of the model are on the meta device in dtype `weights`, and its buffers are on
    the device of the process. On the first rank, the second result maps the name of each parameter
    to its value, in dtype `kept` and in host memory. These values are from `build`, which only the
    first rank calls. On the other ranks the dict is empty. `part_from_first` distributes the values
    later. All ranks must call this function. Raise InputError on all ranks if the first rank cannot
    build the model.
    """
    attention.admit_packed_sdpa(config)
    has_source = settings.weights_source is not None
    # Draw random weights on the device of the run, because a seed gives different random numbers
    # on another device.
    device = torch.device("cpu") if has_source else accelerator.device
    make = partial(build, settings, config, weights=kept, seed=seed, device=device, backend=backend)
    full = refused_together(lambda: make().cpu() if accelerator.is_main_process else None)
    with accelerator.device, init_empty_weights(include_buffers=False):
        hf = AutoModelForCausalLM.from_config(
            config, dtype=kept if has_source else torch.float32, attn_implementation=backend
        )
    hf.tie_weights()
    round_weights(hf, weights)
    buffers = dict(full.named_buffers()) if full else {}
    for name, buffer in hf.named_buffers():
        if full:
            buffer.copy_(buffers[name])
        torch.distributed.broadcast(buffer, src=0)
    hf.generation_config = from_all_ranks(full.generation_config if full else None)[0]
    parameters = full.named_parameters() if full else ()
    return hf, {name: parameter.data.to(kept) for name, parameter in parameters}


def round_weights(hf: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Round the parameters to `dtype` in place, and return a dict from names to unrounded values.

    The remainders of exact BF16 weights are computed from the unrounded values.
    """
    masters = {name: parameter.data for name, parameter in hf.named_parameters()}
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype)
    return masters


def is_mixture(model: PreTrainedModel) -> bool:
    """Return True if the model is a mixture of experts."""
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    has_experts = any(name.endswith(".experts") for name, _ in model.named_modules())
    return has_experts or "router_logits" in recorded


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return a dict from the name of each transformer layer of `model` to the layer, in order."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer)
    }


def named_tensors(hf: PreTrainedModel) -> dict[str, Tensor]:
    """Return a dict from Hugging Face names to parameters and persistent buffers, not copied.

    Tied parameters are in the dict once, under their first name.
    """
    saved = hf.state_dict().keys()
    buffers = {name: buffer for name, buffer in hf.named_buffers() if name in saved}
    return {**dict(hf.named_parameters()), **buffers}


# ── The folder of a model ──


def export(
    hf: PreTrainedModel,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Any | None,
    folder: Path,
    beside: Mapping[str, bytes],
) -> None:
    """Write the model to a folder that AutoModelForCausalLM can load.

    If `tokenizer` is given, AutoTokenizer can load the folder too. An existing export in `folder`
    is replaced as a whole, so the folder never has a partial export. Raise InputError if the folder
    has files that are not from an export. All tensors are in host memory at the same time.

    Args:
        hf: The model. It may be on the meta device or sharded.
        tensors: Names and full tensors to write. Without quantization, they have the names and
            dtypes of `named_tensors(hf)`.
        tokenizer: The tokenizer to write, or None.
        folder: The folder to write.
        beside: Map the names of additional files to their content.
    """
    with (
        _as_input_error(
            f"{folder}: the model cannot be written",
            "the checkpoints of the run have the model, so run the command again",
        ),
        new_folder(folder, replace=True) as writing,
    ):
        weights = {}
        for name, tensor in tensors:
            weights[name] = tensor.cpu()
            advance()
        # This call writes the configurations too.
        hf.save_pretrained(writing, state_dict=weights, max_shard_size="5GB")
        file = writing / "config.json"
        config = json.loads(file.read_text(encoding="utf-8")) | old_keys(hf.config)
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            save_tokenizer(tokenizer, writing)
        for name, content in beside.items():
            (writing / name).write_bytes(content)
        for file in writing.glob("*.safetensors"):
            by_umask(file)
        # Only a folder with nothing but an export is replaced.
        written = set(os.listdir(writing))
        for name in os.listdir(folder) if folder.exists() else ():
            if name not in written and not _OPTIONAL_FILES.fullmatch(name):
                raise ValueError(f"the folder has {name}, but no export writes it (move it away)")


def old_keys(config: PretrainedConfig) -> dict[str, Any]:
    """Return additional keys for config.json, which transformers 4 and other programs read.

    transformers 5 renamed keys, but still reads the old names. Older versions ignore the new names
    without a message, and use their defaults.
    """
    kind = type(config)
    # Content of config.json, as transformers 5 writes it.
    values = config.to_diff_dict()
    # llama.cpp and mlx-lm read GPT-2's `n_ctx`, which its class no longer has.
    names = {"torch_dtype": "dtype", "n_ctx": "n_positions"} | kind.attribute_map
    of_class = config_values(kind, {})
    old = {
        name: values[key] for name, key in names.items() if key in values and name not in of_class
    }
    if not (rope := values.get("rope_parameters")):
        return old
    rope_keys = {}
    for layers, old_names in _OLD_ROPE_KEYS.items():
        # In most models, all layers have the same parameters.
        parameters = rope.get(layers, rope) or {}
        rope_keys |= {name: parameters[key] for name, key in old_names.items() if key in parameters}
    parameters = rope.get("full_attention", rope) or {}
    scaling = {key: value for key, value in parameters.items() if key not in rope_keys}
    # Published files have null if the embedding is not scaled.
    rope_keys["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    without_rope = {key: value for key, value in values.items() if key not in rope_keys}
    # The class either removes a key that it reads, or derives `rope_parameters` from the key.
    old_rope = {
        key: value
        for key, value in rope_keys.items()
        if key not in config_values(kind, without_rope | {key: value})
        or _reacts(kind, _without("rope_parameters", without_rope), key)
    }
    # A class whose layers have different parameters may apply an old key to all of them.
    if not _is_same(kind, without_rope, without_rope | old_rope):
        return old
    strict = _STRICT_SCALING.get(kind.model_type)
    if scaling.keys() - {"type", "original_max_position_embeddings"} == strict:
        old_rope["rope_scaling"] = {key.removeprefix("rope_"): scaling[key] for key in strict}
    return old | old_rope


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a tokenizer to a folder, from which transformers 4 and 5 load the same tokenizer."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    config = {key: value for key, value in written.items() if key not in _NOT_OF_THE_TOKENIZER}
    # Name of the class in both versions. Version 5 itself writes TokenizersBackend.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens", [])
    # If this key differs from the pre-tokenizer, version 4 changes the pre-tokenizer.
    pre_tokenizer = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"] or {}
    if "add_prefix_space" in pre_tokenizer:
        config["add_prefix_space"] = pre_tokenizer["add_prefix_space"]
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
