"""Read the configuration of a Hugging Face model, build it, and write it as a folder.

A model comes from a hub, from a folder, or from a configuration alone. The written folder can be
loaded by transformers.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
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
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging as transformers_logging

from foundation.errors import InputError
from foundation.files import by_umask, fsync, fsync_tree
from foundation.overrides import overridden
from foundation.progress import advance
from foundation.reading import refusing
from pretrain.model import attention, routing
from pretrain.model.distributed import from_all_ranks, refused_together
from pretrain.model.loss.head import check as check_loss
from pretrain.precision.grouped import check_experts
from pretrain.settings.config import SOURCE, flatten
from pretrain.settings.recipe import LossSettings, ModelSettings

# Keys of classifiers.
_OF_CLASSIFIERS = ("num_labels", "id2label", "label2id", "problem_type")
# Files of an export that another export may lack.
_OPTIONAL_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|generation_config\.json|chat_template\.jinja"
)
# Buffers in files of older versions. Models compute them.
_OLD_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|attn\.masked_bias)$")
# Errors of transformers and torch for unexpected values. Some architectures check their values, and
# others fail at the first use.
_refusing = partial(
    refusing,
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
# Keys of a config.json that may differ in the same model: paths, versions, settings of the run,
# outputs, and keys of classifiers.
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
    *_OF_CLASSIFIERS,
}

transformers_logging.disable_progress_bar()  # it would be written to log files too


# ── The configuration ──


def load_config(settings: ModelSettings) -> PretrainedConfig:
    """Return the configuration of `source` with the changes of `config`, or of `config` alone.

    Raise InputError for an unknown source, model type or key, for a key without effect, and for
    values that the configuration class rejects. transformers would store unknown keys silently.
    """
    kind, stored, changes = _read(settings)
    values = _rebased(kind, stored, changes) | changes if changes else stored
    with _refusing(f"`model.config`: {kind.__name__} does not take these values"):
        config = kind.from_dict(copy.deepcopy(values) | {"model_type": kind.model_type})
    for key in changes:
        _check_effect(config, values, key, over_source=bool(stored))
    _check_rotary_entries(config, changes)
    if "router_aux_loss_coef" in changes:
        coefficient = changes["router_aux_loss_coef"]
        is_trained = getattr(config, "output_router_logits", None)
        if not (is_trained and 0 <= coefficient < math.inf):
            raise InputError(
                f"`model.config.router_aux_loss_coef: {coefficient}`: set a number of 0.0 or more, "
                "and `model.config.output_router_logits: true`"
            )
    return config


def kept_from_source(settings: ModelSettings) -> list[str]:
    """Describe values of the source's config.json that `config` would change if it could.

    They would follow from changed keys if the file did not list them, such as `head_dim` under
    another `hidden_size`. Return one line, or none.
    """
    if settings.source is None or not settings.config:
        return []
    kind, stored, changes = _read(settings)
    base = _rebased(kind, stored, changes)
    file = config_values(kind, base)
    changed = config_values(kind, base | changes)
    kept = [
        f"{key}: {changed[key]}"
        for key in sorted((base.keys() & changed.keys()) - changes.keys())
        if config_values(kind, _without(key, base | changes)).get(key) not in (None, changed[key])
        and config_values(kind, _without(key, base)) == file
    ]
    if not kept:
        return []
    return [f"kept from `model.source`, though they follow from changed keys: {', '.join(kept)}"]


def _read(settings: ModelSettings) -> tuple[type[PretrainedConfig], dict[str, Any], dict[str, Any]]:
    """Return the configuration class, the values of the source, and the changes of `config`.

    Values and changes have the class's names of keys. Raise InputError for an unknown source or
    type.
    """
    changes = copy.deepcopy(settings.config or {})
    stored: dict[str, Any] = {}
    if settings.source is None:
        name = str(changes.pop("model_type"))
        if name not in CONFIG_MAPPING:
            raise InputError(
                f"`model.config.model_type`: transformers has no {name!r}"
                f"{_nearest(name, CONFIG_MAPPING)}"
            )
        kind = CONFIG_MAPPING[name]
    else:
        stored = _stored_config(settings)
        if not stored:
            raise InputError(
                f"`model.source`: {settings.source}: has no config.json; name a model's folder, as "
                "a run's `final`"
            )
        if "auto_map" in stored and stored.get("model_type") not in CONFIG_MAPPING:
            raise InputError(
                f"`model.source`: {settings.source} brings code of its own, which is never run; "
                "name another model"
            )
        with _refusing(f"`model.source`: {settings.source}: its config.json is not understood"):
            loaded = AutoConfig.from_pretrained(
                str(settings.repository), revision=settings.revision, trust_remote_code=False
            )
        kind = type(loaded)
    model_type = changes.pop("model_type", kind.model_type)
    if model_type != kind.model_type:
        raise InputError(
            f"`model.config.model_type: {model_type}`: `model.source` is a {kind.model_type}; "
            "leave one of them out"
        )
    names = kind.attribute_map | {"torch_dtype": "dtype"}
    for key in changes:
        if names.get(key, key) in changes.keys() - {key}:
            raise InputError(
                f"`model.config.{key}` is another name of `model.config.{names[key]}`; leave one "
                "out"
            )
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
    """Return values that make the configuration of `stored`, and over which `changes` take effect.

    transformers 5 writes derived values into config.json. Lists that follow from other keys, such
    as `layer_types`, are dropped. `rope_parameters` is replaced by the keys of older files, unless
    `changes` sets it. Then `rope_scaling` of an older file is dropped.
    """
    file = config_values(kind, stored)
    base = dict(stored)
    if "rope_parameters" in changes:
        base.pop("rope_scaling", None)
    elif isinstance(rope := stored.get("rope_parameters"), dict):
        apart = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
        scaling = {key: value for key, value in rope.items() if key not in apart}
        unfolded = _without("rope_parameters", base) | apart | {"rope_scaling": scaling}
        if file.items() <= config_values(kind, unfolded).items():
            base = unfolded
    for key in [key for key, value in base.items() if isinstance(value, list)]:
        if file.items() <= config_values(kind, _without(key, base)).items():
            del base[key]
    return base


def config_values(kind: type[PretrainedConfig], values: dict[str, Any]) -> dict[str, Any]:
    """Return the public values of the configuration that `values` make, none if they are rejected.

    A configuration stores unknown keys too. Two of them are therefore compared by the values of the
    first, with `<=`. Warnings of transformers are not logged.
    """
    quiet = overridden(logging.getLogger("transformers"), handlers=[logging.NullHandler()])
    with suppress(InputError), _refusing(kind.__name__), quiet:
        made = kind.from_dict(copy.deepcopy(values)).to_dict()
        return {key: value for key, value in made.items() if not key.startswith("_")}
    return {}


def _without(key: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def _check_effect(
    config: PretrainedConfig, values: dict[str, Any], key: str, *, over_source: bool
) -> None:
    """Raise InputError if the class of `config` has no `key`, or if it has no effect.

    Without a source, a key of the class may lack an effect: published files have nulls in place of
    defaults, and keys that a switch beside them turns off.

    Args:
        config: The configuration that `values` make.
        values: Values by key.
        key: One of the keys.
        over_source: `key` changes a value of a source.
    """
    kind = type(config)
    without = config_values(kind, _without(key, values))
    accepted = not without or not without.items() <= config_values(kind, values).items()
    if key in without:
        # A dict is completed by the class, so it need not be equal.
        is_kept = without[key] == values[key] or isinstance(values[key], dict)
        accepted = accepted or is_kept or not over_source
    elif not accepted:
        accepted = _reacts(kind, _without(key, values), key) or _model_reads(key, config)
    is_private = key.startswith("_") or callable(getattr(kind, key, None))
    is_public = not is_private and key not in _OF_CLASSIFIERS
    if is_public and accepted:
        return
    if is_public and (key in without or _reacts(kind, {}, key)):
        raise InputError(
            f"`model.config.{key}: {values[key]}` has no effect: {kind.__name__} sets it itself, or"
            " takes it from other keys, such as `rope_parameters` and `layer_types`, which "
            "transformers 5 writes into a source's config.json; set those"
        )
    near = _nearest(key, {*without, *kind.attribute_map} - {key})
    raise InputError(f"`model.config.{key}`: {kind.__name__} has no such key{near}")


def _reacts(kind: type[PretrainedConfig], values: dict[str, Any], key: str) -> bool:
    """Return whether some value of `key` changes another key of the configuration of `values`."""
    without = config_values(kind, values)
    tried = (0, 1, 2, {"rope_type": "default", "rope_theta": 2.0})
    made = (config_values(kind, values | {key: value}) for value in tried)
    return any(changed and not without.items() <= changed.items() for changed in made)


def _model_reads(key: str, config: PretrainedConfig) -> bool:
    """Return True if a module of the model reads `key`, though its configuration does not list it.

    The layers of qwen3_moe read `head_dim`, for example.
    """
    return re.search(rf'\bconfig(\.|, "){re.escape(key)}\b', _model_code(config)) is not None


def _model_code(config: PretrainedConfig) -> str:
    """Return the code of all classes of the model's modules.

    Classes of other models in the same file, such as classifiers and image encoders, are not in it,
    nor are the base classes of all models.
    """
    classes: set[type] = set()
    with suppress(InputError):  # a misspelt key is named before shapes that do not fit
        for module in build_on_meta(copy.deepcopy(config)).modules():
            classes.update(type(module).__mro__)
    of_model = [kind for kind in classes if kind.__module__.startswith("transformers.models.")]
    return "".join(map(inspect.getsource, of_model))


def _check_rotary_entries(config: PretrainedConfig, changes: dict[str, Any]) -> None:
    """Raise InputError if an entry of `rope_parameters` that `changes` set is not read."""
    given = {part for key in flatten(changes) for part in key.split(".")}
    rope = getattr(config, "rope_parameters", None) or {}
    # One dict, or a dict for each type of layer.
    for parameters in (rope, *rope.values()):
        if not isinstance(parameters, dict):
            continue
        entries = given & parameters.keys() - {"rope_type", "type", "rope_theta"}
        entries -= {key for key, value in parameters.items() if isinstance(value, dict)}
        code = _model_code(config) if entries else ""
        kind = parameters.get("rope_type")
        if kind in ROPE_INIT_FUNCTIONS:
            code += inspect.getsource(ROPE_INIT_FUNCTIONS[kind])
        for entry in sorted(entries):
            if f'"{entry}"' not in code:
                raise InputError(
                    f"`model.config`: `{entry}: {parameters[entry]}` has no effect on the rotary "
                    f"embedding of {type(config).__name__} with `rope_type: {kind}`; remove it"
                )


def source_config(settings: ModelSettings) -> dict[str, Any]:
    """Return the config.json of `source` as an identity has it.

    Example: {"model.source.rms_norm_eps": 1e-6}. The values are those of the file, because another
    version of transformers may complete them differently. Return an empty dictionary without a
    source. Raise InputError if the source is missing.
    """
    if settings.source is None:
        return {}
    values = flatten(_stored_config(settings))
    return {
        f"{SOURCE}{key}": value
        for key, value in values.items()
        if _NOT_OF_THE_MODEL.isdisjoint(key.split("."))
    }


def _stored_config(settings: ModelSettings) -> dict[str, Any]:
    with _refusing(f"`model.source`: {settings.source!r} is no model's folder, nor one on the hub"):
        return PretrainedConfig.get_config_dict(
            str(settings.repository), revision=settings.revision
        )[0]


def _nearest(word: str, words: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean `{near[0]}`?" if near else ""


def check_architecture(model: PreTrainedModel, length: int, loss: LossSettings) -> None:
    """Raise InputError for a model that would be computed differently from transformers.

    `model` may be on the meta device. `length` is the pack length.
    """
    name = type(model).__name__
    config: Any = model.config.get_text_config()
    is_encoder = any(getattr(module, "is_causal", None) is False for module in model.modules())
    if model.config.is_encoder_decoder or is_encoder:
        raise InputError(
            f"`model`: in {name}, tokens see those after them; name a causal language model"
        )
    heads = getattr(config, "num_attention_heads", None)
    kv = getattr(config, "num_key_value_heads", None)
    if heads and kv and heads % kv:
        raise InputError(
            f"`model.config`: `num_attention_heads: {heads}` must be a multiple of "
            f"`num_key_value_heads: {kv}`"
        )
    for parameter_name, parameter in model.named_parameters():
        if not parameter.numel():
            raise InputError(
                f"`model.config`: {parameter_name} would hold nothing; take sizes and numbers of 1 "
                "or more"
            )
    if model.base_model is model:
        raise InputError(
            f"`model`: {name} does not say which of its modules is its base model; name another "
            "model"
        )
    supported = (model.base_model, model.get_output_embeddings())
    unsupported = [key for key, child in model.named_children() if child not in supported]
    if unsupported:
        raise InputError(
            f"`model`: {name} has other modules than a base model and an output embedding: "
            f"{', '.join(unsupported)}; name another model"
        )
    attention.check(model, length)
    if getattr(model.config, "output_router_logits", None):
        routing.check(model)
    if is_mixture(model):
        check_experts(model)
    check_loss(model.config, loss)


# ── The model ──


def build_on_meta(config: PretrainedConfig) -> PreTrainedModel:
    """Return the model on the meta device, without memory for its weights.

    Its shapes are used for planning and FLOPs. Raise InputError if they are impossible.
    """
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"`model`: {config.model_type} is no causal language model; name another")
    problem = f"{type(config).__name__} makes no causal language model with these settings"
    with _refusing(f"`model`: {problem}"), torch.device("meta"):
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
    """Return the model with weights of dtype `weights` on `device` and the attention `backend`.

    From scratch, weights are drawn in FP32 from `seed` and then rounded, so FP32 and BF16 runs
    start from the same draw. Every process draws the same weights.
    """
    attention.admit_packed_sdpa(config)
    options: dict[str, Any] = {"attn_implementation": backend, "trust_remote_code": False}
    if settings.weights_source is None:
        torch.manual_seed(seed)
        with device:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
        # Not model.to(): rotary frequencies are buffers, and BF16 frequencies misplace tokens.
        round_weights(model, weights)
        return model
    remedy = "fetch it again, or take out what `model.config` changes about its shape"
    source = f"`model.source`: {settings.source}"
    with _refusing(f"{source}: weights cannot be loaded", remedy):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(settings.repository),
            config=config,
            revision=settings.revision,
            dtype=weights,
            output_loading_info=True,
            **options,
        )
        quantized = _quantized_weight(settings)
    model, loading = loaded
    if quantized:
        raise InputError(
            f"{source}: holds quantized weights ({quantized}), whose scales are not applied; name "
            "the weights in BF16 or FP32"
        )
    # transformers draws missing weights at random, and each process draws others.
    if missing := sorted(loading["missing_keys"]):
        raise InputError(
            f"{source}: has no weights for {len(missing)} of the model's parameters, {missing[0]} "
            f"among them; {remedy}"
        )
    surplus = sorted(name for name in loading["unexpected_keys"] if not _OLD_BUFFERS.search(name))
    if surplus:
        raise InputError(
            f"{source}: {len(surplus)} of its weights have no place in the model, {surplus[0]} "
            f"among them; {_making_room(settings, config, surplus) or remedy}"
        )
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise InputError(f"{source}: {name} holds NaN or infinity; name other weights")
    expected = dict(build_on_meta(config).named_parameters())
    # transformers unties two parameters if the file holds both, with different values.
    if untied := sorted(dict(model.named_parameters()).keys() - expected.keys()):
        raise InputError(
            f"{source}: {untied[0]} has values of its own, though the configuration ties it; set "
            "`model.config.tie_word_embeddings: false`",
        )
    # transformers forgets these flags when it loads weights.
    for name, parameter in expected.items():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    return model.to(device)


def _quantized_weight(settings: ModelSettings) -> str | None:
    """Return the name and the dtype of a weight that `weights_source` stores quantized, or None.

    transformers converts integers and FP8 codes as if they were values.
    """
    folder = str(settings.repository)
    if not os.path.isdir(folder):
        # The files are in the cache by now.
        folder = snapshot_download(folder, revision=settings.revision, local_files_only=True)
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            for name in names:
                dtype = tensors.get_slice(name).get_dtype()
                if dtype == "I8" or dtype.startswith("F8"):
                    return f"{name} in {dtype}"
    return None


def _making_room(
    settings: ModelSettings,
    config: PretrainedConfig,
    weights: list[str],
) -> str | None:
    """Return the text "set `model.config.<key>`" for a key that gives the model all of `weights`.

    The key is a switch or the number of layers. Return None if no such key does.
    """
    layers = [int(number) for number in re.findall(r"\.(\d+)\.", " ".join(weights))]
    changes: dict[str, Any] = {"num_hidden_layers": max(layers, default=0) + 1}
    changes |= {
        key: not value for key, value in config.to_dict().items() if isinstance(value, bool)
    }
    for key, value in changes.items():
        with suppress(InputError):
            changed = {"config": (settings.config or {}) | {key: value}}
            larger = build_on_meta(load_config(settings.model_copy(update=changed)))
            if {*weights} <= larger.state_dict().keys():
                return f"set `model.config.{key}: {json.dumps(value)}`"
    return None


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
    """Return the model under FSDP2, and on the first rank the values of its parameters by name.

    The parameters are on the meta device in dtype `weights`, and the buffers are real. The values
    are those of `build`, in dtype `kept` and in host memory. `part_from_first` distributes them.
    Collective. Raise InputError on all ranks if the first rank cannot build the model.
    """
    attention.admit_packed_sdpa(config)
    reads = settings.weights_source is not None
    # Random weights depend on the device that draws them.
    device = torch.device("cpu") if reads else accelerator.device

    def built() -> PreTrainedModel | None:
        if not accelerator.is_main_process:
            return None
        model = build(settings, config, weights=kept, seed=seed, device=device, backend=backend)
        return model.cpu()

    full = refused_together(built)
    with accelerator.device, init_empty_weights(include_buffers=False):
        hf = AutoModelForCausalLM.from_config(
            config, dtype=kept if reads else torch.float32, attn_implementation=backend
        )
    hf.tie_weights()
    round_weights(hf, weights)
    buffers = dict(full.named_buffers()) if full else {}
    for name, buffer in hf.named_buffers():
        if full:
            buffer.copy_(buffers[name])
        torch.distributed.broadcast(buffer, src=0)
    hf.generation_config = from_all_ranks(full and full.generation_config)[0]
    parameters = full.named_parameters() if full else ()
    return hf, {name: parameter.data.to(kept) for name, parameter in parameters}


def round_weights(hf: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Round the parameters to `dtype` in place, and return their earlier values by name.

    The earlier values are the masters that remainders are computed from.
    """
    masters = {name: parameter.data for name, parameter in hf.named_parameters()}
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype)
    return masters


def is_mixture(model: PreTrainedModel) -> bool:
    """Return whether the model is a mixture of experts."""
    recorded = getattr(model.base_model, "_can_record_outputs", None) or {}
    has_experts = any(name.endswith(".experts") for name, _ in model.named_modules())
    return has_experts or "router_logits" in recorded


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the transformer layers of `model` by name, in order."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer)
    }


def named_tensors(hf: PreTrainedModel) -> dict[str, Tensor]:
    """Return the live parameters and persistent buffers by Hugging Face name, tied ones once."""
    saved = hf.state_dict().keys()
    buffers = {name: buffer for name, buffer in hf.named_buffers() if name in saved}
    return {**dict(hf.named_parameters()), **buffers}


# ── The folder of a model ──


def export(
    hf: PreTrainedModel,
    read: Callable[[str], Tensor],
    tokenizer: Any | None,
    folder: Path,
    beside: Mapping[str, bytes],
) -> None:
    """Write a folder that AutoModelForCausalLM loads, and AutoTokenizer with `tokenizer`.

    The folder is complete or absent, never partial. An existing export in `folder` is replaced.
    Raise InputError if anything else is in it. All tensors are in host memory at once.

    Args:
        hf: The model. It may be on the meta device or sharded.
        read: Function that returns a full tensor of `named_tensors(hf)` by name, in the dtype that
            it has there.
        tokenizer: The tokenizer to write, or None.
        folder: The folder to write.
        beside: Further files by name.
    """
    writing = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)  # left by a killed export
    with (
        _refusing(f"{folder}: the model cannot be written; the checkpoints hold it, so run again"),
        ExitStack() as stack,
    ):
        # A partial export would keep a full disk full.
        stack.callback(shutil.rmtree, writing, ignore_errors=True)
        writing.mkdir(parents=True)
        weights = {}
        for name in named_tensors(hf):
            weights[name] = read(name).cpu()
            advance()
        # Also writes the configurations.
        hf.save_pretrained(writing, state_dict=weights, max_shard_size="5GB")
        if tokenizer is not None:
            tokenizer.save_pretrained(writing)
        for name, content in beside.items():
            (writing / name).write_bytes(content)
        for file in writing.glob("*.safetensors"):
            by_umask(file)
        fsync_tree(writing)
        written = set(os.listdir(writing))
        for name in os.listdir(folder) if folder.exists() else ():
            if name not in written and not _OPTIONAL_FILES.fullmatch(name):
                raise ValueError(f"no export has written {name}, which lies there; move it away")
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(writing, folder)
        fsync(folder.parent)
