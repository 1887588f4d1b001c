"""The packs that a run trains on and is evaluated on: opened, prepared first where they may be, and held against the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig

from foundation.errors import InputError
from foundation.units import plural
from packing.arrow import Pack, Packs
from packing.batch import (
    Microbatch,
    build_microbatch,
    count_valid_tokens,
    read_pack,
    sum_of_squares,
)
from packing.order import MixedPacks, evenly
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.store import check_model, open_packs
from packing.stream import StreamedPacks
from pretrain.model.attention import longest_rotated

_SAMPLED_PACKS = 1000
# 1 GiB of token ids at 4,096 a pack: under a second, as opening has just hashed the same files
_SCANNED_PACKS = 2**16


@dataclass(frozen=True)
class Data:
    """What is read from disk while training; opened and checked, nothing of it in memory."""

    train: Packs
    held_out: Packs | None

    @property
    def tokenizer(self) -> dict[str, Any]:
        """What the packs remember of their tokenizer: name, fingerprint, vocab_size, bos_id, eos_id, pad_id, or some of it."""
        return self.train.tokenizer or {}

    def beside(self, name: str) -> Path | None:
        """The file of this name that travels with the packs: tokenizer.json or, of chats, their template."""
        return next(
            (file for packs in parts_of(self.train) if (file := packs.path / name).is_file()), None
        )

    @property
    def mean_squared(self) -> float:
        """Mean over packs, sampled evenly from each source, of the sum of squared document lengths divided by the pack's length:
        what a token's attention costs."""
        means = [
            np.mean(
                [
                    sum_of_squares(packs[index].lengths)
                    for index in evenly(len(packs), _SAMPLED_PACKS)
                ]
            )
            for packs in parts_of(self.train)
        ]
        weights = (
            self._readable.mixture().share_of_packs
            if isinstance(self._readable, MixedPacks)
            else None
        )
        return float(np.average(means, weights=weights)) / self.train.length

    @property
    def has_masks(self) -> bool:
        """Whether packs say which of their tokens are labels."""
        return any(packs[0].trained is not None for packs in parts_of(self.train))

    @property
    def stream(self) -> StreamedPacks | None:
        """The training packs, where they are made while the run trains."""
        return self.train if isinstance(self.train, StreamedPacks) else None

    @property
    def _readable(self) -> Packs:
        """Training packs that can be read at any time: all, or of a stream those of its beginning that are kept."""
        if self.stream is None:
            return self.train
        samples = self.stream.samples
        return (
            MixedPacks(self.stream.path, samples, self.stream.weights)
            if len(samples) > 1
            else next(iter(samples.values()))
        )

    def one_pack(self, index: int, vocab_size: int) -> Microbatch:
        """A microbatch of training pack `index`, from the first again after the last: real text, to observe the model on."""
        packs = self._readable
        return build_microbatch(
            [read_pack(packs, index % len(packs), vocab_size)], mask_boundaries=True
        )

    def trial_batch(self, packs: int) -> Microbatch:
        """A microbatch with the documents of the first `packs` packs (in turns where there are fewer), to try the model on. All
        of its tokens are 0: which ones there are changes neither dtypes nor memory."""
        tokens, known = np.zeros(self.train.length, dtype=np.uint32), self._readable
        chosen = [Pack(tokens, known[index % len(known)].lengths) for index in range(packs)]
        return build_microbatch(chosen, mask_boundaries=True)


def parts_of(packs: Packs | None) -> list[Packs]:
    """The packs of each source, of a stream those that are kept of its beginning; of none where there are none."""
    if packs is None:
        return []
    if isinstance(packs, StreamedPacks):
        return list(packs.samples.values())
    return list(packs.parts.values()) if isinstance(packs, MixedPacks) else [packs]


def open_data(settings: DataSettings, *, is_main_process: bool) -> Data:
    """The packs at `data.packs`, prepared first where `data.source` says from what and they are not there yet. Every process may
    call it: preparing takes a lock, and who gets it second finds the work done, or the same mistake. Of a stream, the first part
    is made here, and the others while the run trains."""
    if settings.prepares:
        prepare(settings, progress=is_main_process)
    return Data(open_packs(settings, "train"), open_packs(settings, "held_out"))


def most_positions(config: PretrainedConfig) -> int | None:
    """The positions for which the model has an embedding, or beyond which it rotates all documents of a batch otherwise. None:
    any number."""
    text = config.get_text_config()
    if getattr(text, "rope_parameters", None):  # there is a rotation for each position
        return longest_rotated(text)
    return getattr(text, "max_position_embeddings", None)


def check_tokens(
    data: Data, vocab_size: int, fingerprint: str | None, most: int | None = None
) -> None:
    """InputError where the packs hold tokens that a model of `vocab_size` embeddings does not have, or means otherwise, and where
    a document goes on beyond its positions.

    `fingerprint`: of the model's own tokenizer, None where that is not known. Packs that do not know their vocabulary are read,
    and all where positions end: 65,536 evenly chosen ones at most. The rest is checked as batches are made.
    """
    check_model(data.train, vocab_size, fingerprint)
    for packs in (part for split in (data.train, data.held_out) for part in parts_of(split)):
        if most or "vocab_size" not in (packs.tokenizer or {}):
            for index in sorted(
                {*range(min(len(packs), _SAMPLED_PACKS)), *evenly(len(packs), _SCANNED_PACKS)}
            ):
                read_pack(packs, index, vocab_size, most)


def packs_evaluated(part: int, held_out: int, limit: int | None) -> int:
    """Returns how many packs of a source, the first of its `part` of all `held_out` ones, an evaluation of `limit` packs takes:
    from each source as large a part of its own. None: all."""
    return part if limit is None else min(part, max(1, round(limit * part / held_out)))


def check_labels(data: Data, settings: DataSettings, evaluated: int | None = None) -> None:
    """InputError where no token that a source trains on, or is evaluated on, is a label: the loss of nothing would be called 0.

    A pack's first token is none, nor is a document's with `data.mask_boundaries`: nothing stands before them to predict them.
    `evaluated`: how many held-out packs an evaluation takes, as `packs_evaluated` has it; None: all.
    """
    for what, split, limit in (
        ("trained on", data.train, None),
        ("held out", data.held_out, evaluated),
    ):
        for packs in filter(len, parts_of(split)):
            count = packs_evaluated(len(packs), len(split), limit)
            labels = partial(count_valid_tokens, mask_boundaries=settings.mask_boundaries)
            if not any(
                labels(pack.lengths, pack.trained) for pack in map(packs.__getitem__, range(count))
            ):
                raise InputError(
                    f"{packs.path}: no token {what} in the first {plural(count, 'pack')} has a loss: each is masked, or the "
                    "first of a document or pack; prepare longer packs (`data.length`) or other labels, or raise `evaluate.packs`"
                )
