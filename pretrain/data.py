"""The packs that a run trains and is evaluated on, and the tokenizer that belongs to them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from packing.batch import Microbatch, build_microbatch
from packing.errors import InputError
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.store import Packs, check_model, open_packs
from packing.tokenizer import load_tokenizer as load_text_tokenizer
from pretrain.settings import ModelSettings

_SAMPLED_PACKS = 1000


@dataclass(frozen=True)
class Data:
    """What is read from disk while training; opened and checked, nothing of it in memory."""

    train: Packs
    held_out: Packs | None

    @property
    def held_out_packs(self) -> int:
        return len(self.held_out) if self.held_out is not None else 0

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary that the packs were tokenized with, where they know it."""
        return (self.train.tokenizer or {}).get("vocab_size")

    @property
    def mean_squared(self) -> float:
        """Mean over packs, sampled evenly, of the sum of squared document lengths divided by the pack's length: what a token's
        attention costs."""
        sampled = range(0, len(self.train), max(1, len(self.train) // _SAMPLED_PACKS))
        squares = [np.square(self.train.lengths(index), dtype=np.float64).sum() for index in sampled]
        return float(np.mean(squares)) / self.train.length

    def trial_batch(self, packs: int) -> Microbatch:
        """A microbatch of the first `packs` packs (in turns where there are fewer), to try the model on."""
        chosen = [self.train[index % len(self.train)] for index in range(packs)]
        return build_microbatch(chosen, mask_boundaries=True)


def open_data(settings: DataSettings, seed: int, *, is_main_process: bool) -> Data:
    """The packs at `data.packs`, prepared first where `data.source` says from what and they are not there yet.

    Every process may call it: preparing takes a lock, and who gets it second finds the work done, or the same mistake.
    """
    if settings.source is not None:
        prepare(settings, seed, progress=is_main_process)
    return Data(open_packs(settings, "train"), open_packs(settings, "held_out"))


def check_data(data: Data, model: ModelSettings, vocab_size: int) -> None:
    """InputError where the packs hold tokens that a model of `vocab_size` embeddings does not have, or means otherwise."""
    fingerprint = None
    if model.source is not None and (Path(model.source) / "tokenizer.json").is_file():
        fingerprint = load_text_tokenizer(model.source).fingerprint
    check_model(data.train, vocab_size, fingerprint)


def load_tokenizer(data: DataSettings, model: ModelSettings, *, needed: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer for samples and for the exported folder: the data's, else the model's.

    None where neither has one; InputError where one is `needed`, or named and unreadable.
    """
    source = data.tokenizer or model.source
    try:
        if source is not None and Path(source).is_file():
            return PreTrainedTokenizerFast(tokenizer_file=source)
        if source is not None:
            return AutoTokenizer.from_pretrained(source, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        if data.tokenizer is not None or needed:
            key = "data.tokenizer" if data.tokenizer else "model.source"
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"`{key}`: no tokenizer can be read from {source!r}: {reason}; set `data.tokenizer`") from None
    if needed:
        raise InputError("`evaluate.samples`: no tokenizer is known to read the prompts with; set `data.tokenizer`")
    return None
