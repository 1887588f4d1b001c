"""Write a model to a folder that transformers can load."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from foundation.files import apply_umask, new_folder
from foundation.progress import advance
from pretrain.model.configuration import explaining_transformers, is_same, rope_in_old_keys

# Files that some exports contain and others do not.
_OPTIONAL_FILES = re.compile(
    r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|generation_config\.json|chat_template\.jinja"
)


def write_model(
    hf: PreTrainedModel,
    tensors: Iterable[tuple[str, Tensor]],
    tokenizer: Any | None,
    folder: Path,
    further_files: Mapping[str, bytes],
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
        further_files: Map the names of further files to their content.
    """
    with (
        explaining_transformers(
            f"{folder}: the model cannot be written",
            "the checkpoints of the run have the model, so run the command again",
        ),
        new_folder(folder, replace=True) as new,
    ):
        weights = {}
        for name, tensor in tensors:
            weights[name] = tensor.cpu()
            advance()
        # This call writes the configurations too.
        hf.save_pretrained(new, state_dict=weights, max_shard_size="5GB")
        config_file = new / "config.json"
        config = json.loads(config_file.read_text(encoding="utf-8"))
        config |= keys_of_other_programs(hf.config)
        config_file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
        for name, content in further_files.items():
            (new / name).write_bytes(content)
        for file in new.glob("*.safetensors"):
            apply_umask(file)
        # Only a folder with nothing but an export is replaced. An error here keeps the old folder,
        # and `explaining_transformers` re-raises the ValueError as InputError.
        if folder.exists():
            for name in set(os.listdir(folder)) - set(os.listdir(new)):
                if not _OPTIONAL_FILES.fullmatch(name):
                    raise ValueError(
                        f"the folder has {name}, but no export writes it (move it away)"
                    )


def keys_of_other_programs(config: PretrainedConfig) -> dict[str, Any]:
    """Return additional keys for config.json, which mlx-lm and the converter of llama.cpp read.

    transformers 5 renamed these keys, but still reads them. Return {} if transformers 5 would read
    another configuration with these keys than without them.
    """
    # Content of config.json, as transformers 5 writes it.
    values = config.to_diff_dict()
    if config.model_type == "gpt2":
        return {"n_ctx": values["n_positions"]}
    rope = values.get("rope_parameters")
    if not rope:
        return {}
    # In most models, all layers have the same parameters.
    keys = rope_in_old_keys(rope.get("full_attention", rope))
    # Published files have null if the embedding is not scaled.
    if keys["rope_scaling"] == {"rope_type": "default"}:
        keys["rope_scaling"] = None
    if "sliding_attention" in rope:
        keys["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    return keys if is_same(type(config), values, values | keys) else {}
