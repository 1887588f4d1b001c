"""A model's folder as transformers writes it: weights, configuration and tokenizer, there as a whole or not at all."""

from __future__ import annotations

import copy
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from foundation.attributes import holding
from foundation.errors import InputError
from foundation.files import fsync, fsync_tree
from foundation.progress import advance
from pretrain.model.attention import backends as attention
from pretrain.model.huggingface import WRONG_VALUES, named_tensors, why_refused, without_bars

EXPORTED_BYTES = 5 * 10**9  # of one file of weights, unless one tensor is larger; the hub's own custom
# What an export writes beside what every export writes: names that may come and go between two.
_OF_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|generation_config\.json|chat_template\.jinja")
_log = logging.getLogger(__name__)


def export(
    hf: PreTrainedModel,
    read: Callable[[str], Tensor],
    tokenizer: Any | None,
    folder: Path,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a folder that AutoModelForCausalLM (and AutoTokenizer, with `tokenizer`) loads; it appears whole or not at all.

    `read` gives the tensors of `named_tensors(hf)` by name, whole and in the dtype that they have there, on any device; `hf` may
    be on the meta device. They are read as they are written, at most EXPORTED_BYTES at a time. `beside`: further files by name.
    An export that lies in `folder` is replaced; where anything else lies in it, it is kept whole as `<name>.replaced-<n>`.
    """
    writing = folder.with_name(f".{folder.name}.writing")
    try:
        shutil.rmtree(writing, ignore_errors=True)  # of an export that was killed
        writing.mkdir(parents=True)
        _save_configs(hf, writing)
        _write_weights(hf, read, writing)
        _save_tokenizer(tokenizer, writing)
        for name, content in beside.items():
            (writing / name).write_bytes(content)
        mode = (writing / "config.json").stat().st_mode & 0o777  # as the umask has it; safetensors ignores that for its files
        for file in writing.glob("*.safetensors"):
            file.chmod(mode)
        fsync_tree(writing)
        _put_in_place(writing, folder)
    except WRONG_VALUES as error:  # whatever it is: what was trained is saved, and a traceback would not say so
        shutil.rmtree(writing, ignore_errors=True)
        raise InputError(
            f"{folder}: the trained model cannot be written: {why_refused(error)}. The checkpoints hold it; run again"
        ) from None


def _put_in_place(writing: Path, folder: Path) -> None:
    """Rename `writing`, which is complete, to `folder`; an older export goes, anything else is kept under another name."""
    previous = folder.with_name(f".{folder.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        exported = {file.name for file in writing.iterdir()}
        lying_there = set(os.listdir(folder)) if folder.is_dir() else {folder.name}
        if not all(name in exported or _OF_WEIGHTS.fullmatch(name) for name in lying_there):
            names = (folder.with_name(f"{folder.name}.replaced-{number}") for number in itertools.count(1))
            previous = next(name for name in names if not name.exists())
            _log.warning("%s holds what no export has written, and is kept as %s", folder, previous.name)
        os.replace(folder, previous)
    os.replace(writing, folder)
    fsync(folder.parent)
    shutil.rmtree(folder.with_name(f".{folder.name}.previous"), ignore_errors=True)


def check_export(hf: PreTrainedModel, tokenizer: Any | None) -> None:
    """InputError where transformers refuses to write what an export has beside the weights, so that this is known before anything
    is trained: it is written to a temporary folder. A model on the meta device is enough."""
    config, key = copy.deepcopy(hf.config), "model.config"  # a copy, as writing changes it
    if getattr(config, "output_attentions", False):
        raise InputError("`model.config.output_attentions`: packed attention hands out no attention weights; set it to false")
    config._attn_implementation = attention.packed_sdpa.__name__  # to transformers, one packed attention is as another
    try:
        with tempfile.TemporaryDirectory(prefix="export-") as folder, holding(hf, config=config):
            _save_configs(hf, Path(folder))
            key = "data.tokenizer"
            _save_tokenizer(tokenizer, Path(folder))
    except OSError:  # of a temporary folder that is full or read-only, which says nothing of the run's
        return
    except WRONG_VALUES as error:
        raise InputError(
            f"`{key}`: the trained model could not be written with it, as transformers refuses: {why_refused(error)}; change it"
        ) from None


def _save_configs(hf: PreTrainedModel, folder: Path) -> None:
    """Into `folder` what transformers writes of a model, but for the weights: its configurations, and code that came with it."""
    with without_bars():
        hf.save_pretrained(folder, state_dict={})


def _save_tokenizer(tokenizer: Any | None, folder: Path) -> None:
    if tokenizer is None:
        return
    try:
        tokenizer.save_pretrained(folder)
    except BaseException as error:
        if type(error) is not Exception:  # the library below turns every OSError, also a full disk, into one of no class
            raise
        raise OSError(str(error)) from None


def _write_weights(hf: PreTrainedModel, read: Callable[[str], Tensor], folder: Path) -> None:
    """The tensors of `hf` in safetensors files in `folder`, with an index where there are several."""
    left_out = set(hf._keys_to_ignore_on_save or ())
    tensors = {name: each for name, each in named_tensors(hf).items() if name not in left_out}
    held = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in tensors.items()}  # whole, if sharded
    stored = revert_weight_conversion(hf, dict(held))
    if {name: each.shape for name, each in stored.items()} != {name: each.shape for name, each in held.items()}:
        # Some architectures are stored otherwise than they are held, their experts one by one: all is read for that.
        held = revert_weight_conversion(hf, {name: read(name).cpu() for name in held})
        read = held.__getitem__
    split = split_torch_state_dict_into_shards(held, filename_pattern="model{suffix}.safetensors", max_shard_size=EXPORTED_BYTES)
    for file, names in split.filename_to_tensors.items():
        save_file({name: read(name).contiguous() for name in names}, folder / file, metadata={"format": "pt"})
        advance(len(names), of="tensors")
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
