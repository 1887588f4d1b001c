"""`python -m pretrain sample`: how a trained model continues a text. From a run folder, of which the newest checkpoint, from one
of its checkpoints, or from a folder that transformers loads, such as a run's `final/`.

On a GPU where there is one, with transformers' own attention, in the dtype that the weights are stored in.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from foundation.command import CommandParser, number
from foundation.errors import InputError
from foundation.reading import one_line, unusable_text
from foundation.settings import MOST
from pretrain.checkpoint.folders import step_folders
from pretrain.metrics.console import Console
from pretrain.run.evaluate import sample, seed_of_prompt
from pretrain.run.export import SavedModel, tokenizer_of

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="python -m pretrain sample", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="a run folder, a step-* in it, or a folder of a model")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="a text to continue; '' begins one")
    parser.add_argument("--tokens", type=number(1, whole=True), default=64, help="the most tokens of a continuation; default 64")
    parser.add_argument("--temperature", type=number(0, 100), default=0.8, help="default 0.8; 0: always the likeliest token")
    likeliest = "of the likeliest tokens with this probability; default 0.95"
    parser.add_argument("--top-p", type=number(most=1), default=0.95, help=likeliest)
    own = "default 42; each prompt has a seed of its own, made from it"
    parser.add_argument("--seed", type=number(0, MOST, whole=True), default=42, help=own)
    asked = parser.parse_intermixed_args(arguments)
    for prompt in asked.prompts:
        if unusable := unusable_text(prompt):
            raise InputError(f"PROMPT {prompt!a}: {unusable}; write it in UTF-8")
    hf, tokenizer = load(asked.folder)
    hf.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    console = Console(0)
    for index, prompt in enumerate(asked.prompts):
        how = {"tokens": asked.tokens, "temperature": asked.temperature, "top_p": asked.top_p}
        console.sample(prompt, sample(hf, tokenizer, prompt, seed=seed_of_prompt(asked.seed, index), **how))
    return 0


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer at `folder`. InputError where there is none, or a checkpoint is damaged."""
    transformers_logging.disable_progress_bar()
    if (folder / "config.json").is_file():
        return _exported(folder)
    if not (folder / "checkpoints").is_dir() and not (folder / "state.json").is_file():
        raise InputError(f"{folder}: is no run folder, no checkpoint, and no folder of a model with a config.json; name one")
    if not step_folders(folder / "checkpoints") and (folder / "final" / "config.json").is_file():
        return _exported(folder / "final")
    saved = SavedModel.open(folder)
    tokenizer, why = tokenizer_of(saved.recipe, saved.run_dir)
    if tokenizer is None:
        raise InputError(
            f"{folder}: its prompts cannot be read: {why}; set `data.tokenizer` in {saved.run_dir / 'config.yaml'}, or sample "
            "from a folder that has one, such as the run's final/"
        )
    tensors = {name: saved.read(name) for name in saved.weights.names()}
    hf = type(saved.hf).from_pretrained(None, config=saved.hf.config, state_dict=tensors, dtype=saved.hf.dtype)
    hf.generation_config = saved.hf.generation_config
    return hf, tokenizer


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _exported(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    if not _has_tokenizer(folder):  # transformers would make one that knows no word
        raise InputError(
            f"{folder}: holds a model without a tokenizer, so prompts cannot be read; put its tokenizer's files there"
        )
    try:
        hf = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=False)
        return hf, AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InputError(f"{folder}: no model can be read from it: {one_line(error)}") from None
