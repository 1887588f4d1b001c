"""Read the configuration of a Hugging Face model, and apply the changes of a recipe.

Keys that the configuration class does not have, and keys without effect, are refused.
"""

from __future__ import annotations

import copy
import difflib
import logging
import os
import warnings
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    PretrainedConfig,
)

from foundation.errors import InputError, as_input_error
from foundation.overrides import overridden
from foundation.settings import flatten
from pretrain.model.hybrids.families import FAMILIES
from pretrain.settings.config import SOURCE
from pretrain.settings.recipe import ModelSettings

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
# RoPE parameters that transformers 4 writes beside `rope_scaling`.
_TOP_LEVEL_ROPE = ("rope_theta", "partial_rotary_factor")
# Exceptions that transformers and torch raise for unexpected values. Some architectures check the
# values of their configuration, and others fail when they first use a value.
explaining_transformers = partial(
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


def load_config(settings: ModelSettings) -> PretrainedConfig:
    """Return the model configuration that the settings `source` and `config` describe.

    With a source, the configuration has the values of the source's config.json, except for the keys
    in `config`, which replace them. Without a source, it has the values in `config`, and defaults
    for all other keys. Raise InputError for an unknown source, model type or key, for a key without
    effect, and for values that the configuration class rejects. transformers itself would accept
    unknown keys without a message.
    """
    config_class, stored, changes = _read(settings)
    values = stored
    if changes:
        values = _without_derived_values(config_class, stored, changes) | changes
    vocabulary = values.get("vocab_size")
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        default = getattr(config_class, key, None)
        # The default of the class may be an id of a larger vocabulary.
        if isinstance(default, int) and isinstance(vocabulary, int) and default >= vocabulary:
            values = {key: None} | values
    for key in (config_class.attribute_map.get(size, size) for size in _SIZES):
        if isinstance(values.get(key), int) and values[key] < 1:
            raise InputError(f"`model.config.{key}: {values[key]}` is below 1; set it to 1 or more")
    with explaining_transformers(
        f"`model.config`: {config_class.__name__} does not accept these values"
    ):
        config = config_class.from_dict(
            copy.deepcopy(values) | {"model_type": config_class.model_type}
        )
    _check_effects(config, values, changes, over_source=bool(stored))
    return config


def _check_effects(
    config: PretrainedConfig,
    values: dict[str, Any],
    changes: dict[str, Any],
    *,
    over_source: bool,
) -> None:
    """Raise InputError if a key in `changes` has no effect on `config`.

    Args:
        config: The configuration, made from `values`.
        values: Map each key of the configuration to its value, including the changes.
        changes: Map the keys that the recipe sets to their values.
        over_source: True if the model has a source, whose values the recipe changes.
    """
    config_class = type(config)
    for key in changes:
        if not _is_accepted(config_class, values, key, over_source=over_source):
            known_keys = {*config_values(config_class, {}), *config_class.attribute_map}
            remedy = _suggestion(key, known_keys - {key})
            if key == "num_hidden_layers" and "layer_types" in known_keys:
                # Nemotron-H takes the number of layers from the length of `layer_types`.
                remedy = "; set `layer_types` to a list with the type of each layer"
            raise InputError(
                f"`model.config.{key}: {values[key]}` has no effect: {config_class.__name__} has "
                "no such key, or reads the value from other keys, such as `rope_parameters` or "
                f"`layer_types`{remedy}"
            )
    if "router_aux_loss_coef" in changes and not getattr(config, "output_router_logits", None):
        raise InputError(
            "`model.config.router_aux_loss_coef` has no effect without the router loss; either set "
            "`model.config.output_router_logits: true`, or remove it"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    changes_rope = not changes.keys().isdisjoint(("rope_parameters", "rope_scaling"))
    if changes_rope and rope.get("rope_type") == "default" and "factor" in rope:
        raise InputError(
            f"`model.config`: `factor: {rope['factor']}` has no effect with "
            "`rope_type: default`; either set another `rope_type`, such as linear, or remove it"
        )


def _read(settings: ModelSettings) -> tuple[type[PretrainedConfig], dict[str, Any], dict[str, Any]]:
    """Return the configuration class, the values of `source`, and the changes in `config`.

    Values and changes are dicts that map each key to its value. Keys with several names get the
    name that the configuration class uses. If a key is set under two names, the last one counts.
    Raise InputError for an unknown source or model type, or if `config` contradicts the source.
    """
    changes = copy.deepcopy(settings.config or {})
    stored: dict[str, Any] = {}
    if settings.source is None:
        config_class = _class_of_type(str(changes.pop("model_type")))
    else:
        config_class, stored = _read_source(settings)
        model_type = changes.get("model_type", config_class.model_type)
        if model_type != config_class.model_type:
            raise InputError(
                f"`model.config.model_type: {model_type}` is not the type of `model.source`, which "
                f"is {config_class.model_type}; set only those keys of `model.config` that differ "
                "from the source, or `model.config: null`"
            )
    names = config_class.attribute_map | {"torch_dtype": "dtype"}
    stored, changes = (
        {names.get(key, key): value for key, value in values.items()}
        for values in (stored, changes)
    )
    return config_class, stored, changes


def _class_of_type(model_type: str) -> type[PretrainedConfig]:
    """Return the configuration class of a `model_type`. Raise InputError if it is not supported."""
    if model_type not in CONFIG_MAPPING:
        raise InputError(
            f"`model.config.model_type`: transformers has no model type {model_type!r}"
            f"{_suggestion(model_type, CONFIG_MAPPING)}"
        )
    text = f"{model_type}_text"
    if text in CONFIG_MAPPING and CONFIG_MAPPING[text] in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"`model.config.model_type: {model_type}` reads more than text; set "
            f"`model_type: {text}`"
        )
    return CONFIG_MAPPING[model_type]


def _read_source(settings: ModelSettings) -> tuple[type[PretrainedConfig], dict[str, Any]]:
    """Return the configuration class of `source`, and the values of its config.json.

    Raise InputError if transformers cannot read the source without code of the source.
    """
    stored = _stored_config(settings)
    if not stored:
        raise InputError(
            f"`model.source`: {settings.source}: the source has no config.json; {_SET_SOURCE}"
        )
    model_type = stored.get("model_type")
    if "auto_map" in stored and model_type not in CONFIG_MAPPING:
        raise InputError(
            f"`model.source`: {settings.source} requires Python code that is stored with the "
            "model, but such code is never run here; choose another model"
        )
    with explaining_transformers(
        f"`model.source`: {settings.source}: transformers rejects its config.json"
    ):
        loaded = AutoConfig.from_pretrained(
            str(settings.repository), revision=settings.revision, trust_remote_code=False
        )
    # If the source has a vision part, `loaded` is the configuration of the full model, but `stored`
    # is that of its text model (`_stored_config`).
    config_class = CONFIG_MAPPING[model_type] if model_type in FAMILIES else type(loaded)
    # Quantized weights are dequantized when they are loaded.
    return config_class, without_key("quantization_config", stored)


def _without_derived_values(
    config_class: type[PretrainedConfig],
    stored: dict[str, Any],
    changes: dict[str, Any],
) -> dict[str, Any]:
    """Return a copy of `stored` without derived values, so that `changes` can take effect.

    The result describes the same configuration as `stored`. transformers 5 writes derived values
    into config.json. If transformers derives a value from a key in `changes`, the stored value
    would replace the new one. Therefore lists that transformers computes from other keys, such as
    `layer_types`, are dropped. `rope_parameters` is replaced by the keys that older versions of
    transformers wrote instead, such as `rope_theta`. But if `changes` contains `rope_parameters`,
    only the older key `rope_scaling` is dropped, and `rope_parameters` is kept.
    """
    values = dict(stored)
    if "rope_parameters" in changes:
        values.pop("rope_scaling", None)
    elif isinstance(rope := stored.get("rope_parameters"), dict):
        with_old_keys = without_key("rope_parameters", values) | rope_in_old_keys(rope)
        if is_same(config_class, stored, with_old_keys):
            values = with_old_keys
    for key in [key for key, value in values.items() if isinstance(value, list)]:
        # A list is derived if transformers computes the same list without it.
        if is_same(config_class, stored, without_key(key, values)):
            del values[key]
    return values


def rope_in_old_keys(rope: dict[str, Any]) -> dict[str, Any]:
    """Return RoPE parameters as the keys that transformers 4 wrote instead."""
    top_level = {key: rope[key] for key in _TOP_LEVEL_ROPE if key in rope}
    scaling = {key: value for key, value in rope.items() if key not in top_level}
    return top_level | {"rope_scaling": scaling}


def config_values(config_class: type[PretrainedConfig], values: dict[str, Any]) -> dict[str, Any]:
    """Return all public values of the configuration that the class makes from `values`.

    Unknown keys of `values` are included, because a configuration stores them. Return an empty dict
    if the class rejects the values. Warnings of transformers are hidden.
    """
    quiet = overridden(logging.getLogger("transformers"), handlers=[logging.NullHandler()])
    with (
        suppress(InputError),
        explaining_transformers(config_class.__name__),
        quiet,
        warnings.catch_warnings(action="ignore"),
    ):
        config = config_class.from_dict(copy.deepcopy(values)).to_dict()
        return {key: value for key, value in config.items() if not key.startswith("_")}
    return {}


def without_key(key: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}


def is_same(
    config_class: type[PretrainedConfig], values: dict[str, Any], other: dict[str, Any]
) -> bool:
    """Return True if `other` describes the same configuration as `values`.

    `other` may have additional unknown keys, which a configuration stores.
    """
    return config_values(config_class, values).items() <= config_values(config_class, other).items()


def _is_accepted(
    config_class: type[PretrainedConfig], values: dict[str, Any], key: str, *, over_source: bool
) -> bool:
    """Return False if `key` is refused, because it is private, unknown or without effect.

    A key may repeat its default value. Without a source, every key that the class has is accepted,
    even a key without effect, because published config.json files contain keys without effect. For
    example, a file may set a key to null instead of its default, or another key of the file may
    turn this key off.

    Args:
        config_class: The configuration class.
        values: Map each key of the configuration to its value.
        key: The key of `values` to check.
        over_source: True if the model has a source, whose values `key` changes.
    """
    # Private keys, such as `_attn_implementation`, are set by the launcher.
    if key.startswith("_"):
        return False
    value = values[key]
    remaining = without_key(key, values)
    defaults = config_values(config_class, remaining)
    # A class that rejects a configuration without the key needs the key. The layers of many models
    # read `head_dim`, although their configurations lack it.
    if not defaults or key == "head_dim":
        return True
    if key not in defaults:
        return _other_keys_depend_on(config_class, remaining, key, value)
    if not over_source:
        return True
    # The class adds missing entries to a dict, so its effect is not known.
    if defaults[key] == value or isinstance(value, dict):
        return True
    return not is_same(config_class, remaining, values)


def _other_keys_depend_on(
    config_class: type[PretrainedConfig], values: dict[str, Any], key: str, value: Any
) -> bool:
    """Return True if another key of the configuration made from `values` depends on `key`.

    The function sets `key` to `value` and to a few other values, and looks for a change.
    """
    for trial in (value, 0, 1, 2, {"rope_type": "default", "rope_theta": 2.0}):
        changed = values | {key: trial}
        # If the class rejects a value, `config_values` is empty, and nothing is learned.
        if config_values(config_class, changed) and not is_same(config_class, values, changed):
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
    """Return the values of the source's config.json.

    If the source is a hybrid model with a vision part, return the values of its text model. No
    other model is trained without its vision part.
    """
    what = (
        f"`model.source`: {settings.source!r} is neither the folder of a model nor a model on the "
        "Hugging Face hub"
    )
    with explaining_transformers(what, _SET_SOURCE):
        # transformers would read a config.json itself, but then find no weights.
        if os.path.isfile(str(settings.repository)):
            raise OSError("this is a file")
        stored, _ = PretrainedConfig.get_config_dict(
            str(settings.repository), revision=settings.revision
        )
    text: dict[str, Any] = stored.get("text_config") or {}
    if text.get("model_type") not in FAMILIES:
        return stored
    # The text model ties its head as the whole model does.
    shared = {key: stored[key] for key in ("tie_word_embeddings",) if key in stored}
    return text | shared


def _suggestion(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean ...?" with the most similar of `words`, or "" if none is similar."""
    similar = difflib.get_close_matches(word, words, n=1)
    return f"; did you mean `{similar[0]}`?" if similar else ""
