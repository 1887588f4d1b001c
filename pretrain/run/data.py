"""Open the packs of a run, prepare missing packs, and check that packs and model fit together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

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
from packing.order import evenly, mixture_of, sampled
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.store import open_packs, unprepared
from packing.stream import StreamedPacks

# `check_tokens` reads at most this number of evenly spaced packs from a source. With 4,096
# tokens per pack, these packs have 1 GiB of token ids. Reading the packs takes less than a second,
# because the files are in the page cache after their hashes were checked.
_SCANNED_PACKS = 2**16


@dataclass(frozen=True)
class Data:
    """The training packs and the held-out packs of a run. They are read from the disk when needed.

    train: the training packs.
    held_out: the held-out packs, or None if no packs are held out.
    """

    train: Packs
    held_out: Packs | None

    @property
    def tokenizer(self) -> dict[str, Any]:
        """Return the description of the tokenizer that the packs were prepared with.

        The possible keys are name, fingerprint, vocab_size, bos_id, eos_id and pad_id. Each of them
        may be missing.
        """
        return self.train.tokenizer or {}

    def find_file(self, name: str) -> Path | None:
        """Return the path of the file `name` in the folder of the packs, or None if it is missing.

        With several sources, return the path for the first source that has the file. The folder of
        the packs has the file tokenizer.json, and the chat template if the documents are chats.
        """
        files = [packs.path / name for packs in self.train.by_source.values()]
        return next(filter(Path.is_file, files), None)

    @property
    def squared_length_per_token(self) -> float:
        """Return the sum of the squared document lengths, divided by the number of tokens.

        Lengths are in tokens. The cost of attention is proportional to this number. It is estimated
        from sampled packs of each source.
        """
        means = [
            np.mean([sum_of_squares(pack.lengths) for pack in sampled(packs)])
            for packs in self.train.by_source.values()
        ]
        weights = mixture_of(self.readable).shares_of_packs()
        return float(np.average(means, weights=weights)) / self.train.length

    @cached_property
    def has_masks(self) -> bool:
        """Return True if at least one source has packs with a mask of the tokens to train on."""
        return any(packs[0].trained is not None for packs in self.train.by_source.values())

    @property
    def stream(self) -> StreamedPacks | None:
        """Return the training packs if they are streamed (made while the run trains), else None."""
        return self.train if isinstance(self.train, StreamedPacks) else None

    @property
    def readable(self) -> Packs:
        """Return training packs that can be read at any time.

        If the packs were prepared before the run, all training packs are returned. For a stream,
        the packs of its first part are returned. This part is not deleted while the run trains.
        """
        return self.train if self.stream is None else self.stream.first_parts

    def one_pack(self, index: int, vocab_size: int) -> Microbatch:
        """Return a microbatch of one training pack.

        index: the index of the pack, modulo the number of packs.
        vocab_size: the size of the model's vocabulary. Raises InputError for a larger token id.
        """
        packs = self.readable
        return build_microbatch(
            [read_pack(packs, index % len(packs), vocab_size)], mask_boundaries=True
        )

    def trial_batch(self, packs: int) -> Microbatch:
        """Return a microbatch for a memory trial, with the document lengths of training packs.

        packs: the number of packs. If there are fewer training packs, they are repeated.

        All token ids are 0, because the values of ids do not change the memory that is needed.
        """
        readable = self.readable
        tokens = np.zeros(self.train.length, dtype=np.uint32)
        return build_microbatch(
            [Pack(tokens, readable[index % len(readable)].lengths) for index in range(packs)],
            mask_boundaries=True,
        )


def open_data(settings: DataSettings, *, is_main_process: bool) -> Data:
    """Open the packs at `data.packs`. Prepare missing packs first if `data` sets their source.

    All processes may call this function at the same time. One process prepares the packs while the
    others wait for its lock. Then the other processes find the packs, or raise the same InputError.
    For a stream, only the first part is prepared here.
    """
    if settings.prepares:
        prepare(settings, progress=is_main_process)
    return Data(open_packs(settings, "train"), open_packs(settings, "held_out"))


def require_prepared(settings: DataSettings, recipe: Path) -> None:
    """Raise InputError if `open_data` would have to prepare packs.

    recipe: the file of the recipe, for the message.
    """
    missing = unprepared(settings)
    if missing and settings.prepares:
        raise InputError(
            f"`data.packs`: {missing[0]} is not prepared; either run `python -m pretrain prepare "
            f"{recipe}`, or use `python -m pretrain plan {recipe}`, which needs no packs"
        )


def check_tokens(data: Data, vocab_size: int, fingerprint: str | None) -> None:
    """Raise InputError if packs contain token ids that the model does not have.

    vocab_size: the number of token embeddings of the model.
    fingerprint: the fingerprint of the model's own tokenizer, or None if it is not known.

    The packs are read if the vocabulary of their tokenizer may be larger than `vocab_size`. At most
    65,536 evenly spaced packs of each source are read and checked. All other packs are checked when
    batches are made from them.
    """
    packed = data.tokenizer.get("fingerprint")
    if fingerprint and packed and packed != fingerprint:
        raise InputError(
            f"{data.train.path}: the packs were made with another tokenizer than the model's; "
            "prepare the packs with the model's tokenizer (`data.tokenizer`)"
        )
    for split in filter(None, (data.train, data.held_out)):
        for packs in split.by_source.values():
            recorded = packs.tokenizer or {}
            if recorded.get("vocab_size", math.inf) > vocab_size:
                for index in evenly(len(packs), _SCANNED_PACKS):
                    # Raise InputError if a token id is not below `vocab_size`.
                    read_pack(packs, index, vocab_size)


def evaluated_packs(packs: Packs | None, limit: int | None) -> dict[str, tuple[Packs, int]]:
    """Map the name of each source to (packs, number of packs that are evaluated).

    packs: the held-out packs of all sources.
    limit: the number of packs that an evaluation reads from all sources together
        (`evaluate.packs`), or None for all packs. The same share of packs is read from every
        source, but at least one pack.
    """
    if packs is None:
        return {}
    # The held-out split may be empty. Then avoid a division by zero below.
    total = sum(map(len, packs.by_source.values())) or 1
    evaluated = {}
    for name, source in packs.by_source.items():
        count = len(source)
        if limit is not None:
            count = min(count, max(1, round(limit * count / total)))
        evaluated[name] = (source, count)
    return evaluated


def check_labels(data: Data, settings: DataSettings, evaluated: int | None) -> None:
    """Raise InputError if a source has no label to train on or to evaluate on.

    evaluated: the number of held-out packs that an evaluation reads (`evaluate.packs`), or None for
        all packs.

    Without labels the loss of the source would be 0. The first token of a pack is never a label.
    With `data.mask_boundaries`, the first token of each document is not a label either.
    """
    for kind_of_pack, split, limit in (
        ("training pack", data.train, None),
        ("held-out pack", data.held_out, evaluated),
    ):
        for packs, count in evaluated_packs(split, limit).values():
            labels = (
                count_valid_tokens(packs[index], settings.mask_boundaries) for index in range(count)
            )
            if count and not any(labels):
                raise InputError(
                    f"{packs.path}: no token in the first {plural(count, kind_of_pack)} has a "
                    "loss, because every token either is masked or is the first token of a "
                    "document or pack; either prepare longer packs (`data.length`), or prepare "
                    "packs in which fewer tokens are masked, or, for held-out packs, raise "
                    "`evaluate.packs`"
                )
