"""Write a model to a folder that transformers 4 and 5 can load."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from foundation.files import by_umask, new_folder
from foundation.progress import advance
from pretrain.model.configuration import (
    config_values,
    explaining_transformers,
    has_reaction,
    is_same,
    without_key,
)

# Files that some exports contain and others do not.
_OPTIONAL_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|generation_config\.json|chat_template\.jinja"
)
# Map the names of RoPE parameters in transformers 4 to the new names. The first names describe all
# layers, or those with full attention, and the second names the layers with sliding attention.
_OLD_ROPE_KEYS = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "global_rope_theta": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
    "rotary_pct": "partial_rotary_factor",
}
_OLD_SLIDING_KEYS = {"rope_local_base_freq": "rope_theta", "local_rope_theta": "rope_theta"}
# RoPE scaling that transformers 4 accepts for some model types only with `type` instead of
# `rope_type`, and without further keys.
_STRICT_SCALING = {
    "olmo": {"rope_type", "factor"},
    "olmo2": {"rope_type", "factor"},
    "phi3": {"rope_type", "short_factor", "long_factor"},
}
# Keys of tokenizer_config.json that describe the loading of the tokenizer in this process.
_NOT_OF_THE_TOKENIZER = ("backend", "is_local", "local_files_only")


def write_model(
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
        explaining_transformers(
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
            write_tokenizer(tokenizer, writing)
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
    old = _renamed(values, {name: key for name, key in names.items() if name not in of_class})
    if values.get("rope_parameters"):
        old |= _old_rope_keys(kind, values)
    return old


def _renamed(values: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return `values` under their old names. `names` maps each old name to the key in `values`."""
    return {name: values[key] for name, key in names.items() if key in values}


def _old_rope_keys(kind: type[PretrainedConfig], values: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters as keys that transformers 4 reads.

    Return {} if these keys cannot describe the parameters of all layers. `values` is the content of
    config.json.
    """
    rope = values["rope_parameters"]
    # In most models, all layers have the same parameters.
    full = rope.get("full_attention", rope) or {}
    sliding = rope.get("sliding_attention", rope) or {}
    rope_keys = _renamed(full, _OLD_ROPE_KEYS) | _renamed(sliding, _OLD_SLIDING_KEYS)
    scaling = {key: value for key, value in full.items() if key not in rope_keys}
    # Published files have null if the embedding is not scaled.
    rope_keys["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    new_values = {key: value for key, value in values.items() if key not in rope_keys}
    old_rope = {
        key: value for key, value in rope_keys.items() if _reads(kind, new_values, key, value)
    }
    # A class whose layers have different parameters may apply an old key to all of them.
    if not is_same(kind, new_values, new_values | old_rope):
        return {}
    strict = _STRICT_SCALING.get(kind.model_type)
    if scaling.keys() - {"type", "original_max_position_embeddings"} == strict:
        old_rope["rope_scaling"] = {
            key.removeprefix("rope_"): scaling[key] for key in sorted(strict)
        }
    return old_rope


def _reads(kind: type[PretrainedConfig], values: dict[str, Any], key: str, value: Any) -> bool:
    """Return True if the configuration class reads a RoPE parameter from `key`.

    The class either removes a key that it reads, or derives `rope_parameters` from the key.
    `values` is the content of config.json without old keys.
    """
    is_removed = key not in config_values(kind, values | {key: value})
    return is_removed or has_reaction(kind, without_key("rope_parameters", values), key)


def write_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a tokenizer to a folder. Transformers 4 and 5 load the same tokenizer from it."""
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
