"""The packs of a run: open them, prepare missing ones first, and check them against the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

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
# Token ids of 1 GiB at 4,096 a pack. Scanning them takes under a second, because opening the packs
# has just hashed the same files.
_SCANNED_PACKS = 2**16


@dataclass(frozen=True)
class Data:
    """The packs that a run reads while it trains. They are open and checked, but not in memory."""

    train: Packs
    held_out: Packs | None

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Return the tokenizer's description, as the packs record it.

        The keys are name, fingerprint, vocab_size, bos_id, eos_id and pad_id, or some of these.
        """
        return self.train.tokenizer or {}

    def beside(self, name: str) -> Path | None:
        """Return the file `name` in the folder of the packs, or None if no folder has it.

        The packs come with tokenizer.json, and packs of chats with the chat template.
        """
        files = [packs.path / name for packs in parts_of(self.train)]
        return next((file for file in files if file.is_file()), None)

    @property
    def mean_squared(self) -> float:
        """Return the attention cost of a token, estimated from evenly spaced packs of each source.

        It is the mean over packs of the sum of squared document lengths divided by the pack length.
        """
        means = [
            np.mean([sum_of_squares(packs[i].lengths) for i in evenly(len(packs), _SAMPLED_PACKS)])
            for packs in parts_of(self.train)
        ]
        readable = self._readable
        weights = readable.mixture().share_of_packs if isinstance(readable, MixedPacks) else None
        return float(np.average(means, weights=weights)) / self.train.length

    @cached_property
    def has_masks(self) -> bool:
        """Return whether the packs record which of their tokens are labels."""
        return any(packs[0].trained is not None for packs in parts_of(self.train))

    @property
    def stream(self) -> StreamedPacks | None:
        """Return the training packs if they are made while the run trains, else None."""
        return self.train if isinstance(self.train, StreamedPacks) else None

    @property
    def _readable(self) -> Packs:
        """Return training packs that can be read at any time.

        These are all packs, or the first part of a stream, which stays on the disk.
        """
        if self.stream is None:
            return self.train
        return MixedPacks(self.stream.path, self.stream.samples, self.stream.weights)

    def one_pack(self, index: int, vocab_size: int) -> Microbatch:
        """Return a microbatch of one training pack. Its index wraps around behind the last pack."""
        packs = self._readable
        return build_microbatch(
            [read_pack(packs, index % len(packs), vocab_size)], mask_boundaries=True
        )

    def trial_batch(self, packs: int) -> Microbatch:
        """Return a microbatch for a trial of memory: the documents of the first `packs` packs.

        All token ids are 0, because ids change neither dtypes nor memory. Packs repeat if there
        are fewer.
        """
        readable = self._readable
        tokens = np.zeros(self.train.length, dtype=np.uint32)
        return build_microbatch(
            [Pack(tokens, readable[index % len(readable)].lengths) for index in range(packs)],
            mask_boundaries=True,
        )


def parts_of(packs: Packs | None) -> list[Packs]:
    """Return the packs of each source. A stream returns the part of each that stays on the disk."""
    if isinstance(packs, StreamedPacks):
        return list(packs.samples.values())
    if isinstance(packs, MixedPacks):
        return list(packs.parts.values())
    return [] if packs is None else [packs]


def open_data(settings: DataSettings, *, is_main_process: bool) -> Data:
    """Open the packs at `data.packs`. Prepare them first if they are missing and have a source.

    Every process may call this. Preparing takes a lock, and the second process finds the work
    done, or the same mistake. Only the first part of a stream is made here.
    """
    if settings.prepares:
        prepare(settings, progress=is_main_process)
    return Data(cast(Packs, open_packs(settings, "train")), open_packs(settings, "held_out"))


def most_positions(config: PretrainedConfig) -> int | None:
    """Return the largest number of positions that a document may have, or None for any number.

    The limit is the number of position embeddings. With rotary embeddings it is the length beyond
    which the model rotates all documents of a batch differently.
    """
    text = config.get_text_config()
    if getattr(text, "rope_parameters", None):
        return longest_rotated(text)
    return getattr(text, "max_position_embeddings", None)


def check_tokens(
    data: Data, vocab_size: int, fingerprint: str | None, most: int | None = None
) -> None:
    """Raise InputError if the model cannot read tokens or positions of the packs.

    vocab_size: the number of the model's embeddings.
    fingerprint: of the model's own tokenizer, or None if it is not known.
    most: the largest number of positions of a document.

    Packs are read if they do not record their vocabulary, or if positions are limited: at most
    65,536 evenly spaced packs. The rest is checked as batches are made.
    """
    check_model(data.train, vocab_size, fingerprint)
    for packs in [*parts_of(data.train), *parts_of(data.held_out)]:
        if most or "vocab_size" not in (packs.tokenizer or {}):
            first = range(min(len(packs), _SAMPLED_PACKS))
            for index in sorted({*first, *evenly(len(packs), _SCANNED_PACKS)}):
                read_pack(packs, index, vocab_size, most)


def packs_evaluated(part: int, held_out: int, limit: int | None) -> int:
    """Return how many packs of one source an evaluation reads.

    part: the number of held-out packs of the source.
    held_out: the number of held-out packs of all sources.
    limit: the number of packs that an evaluation reads, or None for all. Every source gives the
        same share of its packs, and at least one.
    """
    return part if limit is None else min(part, max(1, round(limit * part / held_out)))


def check_labels(data: Data, settings: DataSettings, evaluated: int | None = None) -> None:
    """Raise InputError if a source has no label to train or to evaluate on.

    Its loss would be 0. The first token of a pack is never a label. With `data.mask_boundaries`
    the first token of a document is none either. `evaluated` is the number of held-out packs that
    an evaluation reads, or None for all.
    """
    for use, split, limit in (
        ("trained on", data.train, None),
        ("held out", data.held_out, evaluated),
    ):
        parts = parts_of(split)
        for packs in filter(len, parts):
            count = packs_evaluated(len(packs), sum(map(len, parts)), limit)
            labels = (
                count_valid_tokens(
                    pack.lengths, pack.trained, mask_boundaries=settings.mask_boundaries
                )
                for pack in map(packs.__getitem__, range(count))
            )
            if not any(labels):
                raise InputError(
                    f"{packs.path}: no token {use} in the first {plural(count, 'pack')} has a "
                    "loss: each is masked, or the first of a document or pack; prepare longer "
                    "packs (`data.length`) or other labels, or raise `evaluate.packs`"
                )
