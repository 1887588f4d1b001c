"""Open training packs and held-out packs in any format (Arrow, MDS, token .bin)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Literal, overload

import numpy as np

from foundation.errors import InputError
from foundation.storage import address_of, fetch, is_address
from packing.arrow import (
    FIRST,
    MANIFEST,
    ArrowPacks,
    Pack,
    Packs,
    Split,
    checked_index,
    read_manifest,
)
from packing.mds import INDEX, MDSPacks
from packing.order import MixedPacks, splitmix64
from packing.settings import SOURCE_NAME, DataSettings, files_of
from packing.stream import StreamedPacks
from packing.token_bin import TokenBin
from packing.tokenizer import load_tokenizer

# Suffixes of token files.
_TOKEN_FILES = (".bin", ".npy")
# Usual names of the held-out split.
_HELD_OUT_NAMES = ("held_out", "val", "validation", "test")
_DEFAULT_LENGTH: int = DataSettings.model_fields["length"].default
_MAKE = (
    "either make packs with `python -m pretrain prepare`, which needs `data.source` and "
    "`data.tokenizer`, or set `data.packs` to packs that exist"
)


# ── The sources of the data section ───────────────────────────────────────────────────────────────


def training_sources(settings: DataSettings) -> dict[str, DataSettings]:
    """Map the name of each training source to the settings of the source.

    The name is the setting `name`, or the last part of `source` without suffixes. A single source
    has the name "". In a stream, each source gets its share of `data.streaming.window`, the number
    of tokens in a part. So the parts of all sources last for the same number of steps.
    """
    if not settings.sources:
        return {"": settings}
    sources: dict[str, DataSettings] = {}
    for source in settings.sources:
        name = source.name or Path(str(source.source)).name.split(".")[0]
        if not SOURCE_NAME.match(name) or name in sources:
            raise InputError(
                f"data.sources: {source.source}: the name of this source is not valid or not "
                "unique; set its `name`"
            )
        streaming = settings.streaming
        if stream := settings.stream:
            window = round(stream.window * source.weight)
            streaming = stream.model_copy(update={"window": max(settings.length, window)})
        sources[name] = settings.for_source(source, settings.packs / name, streaming=streaming)
    return sources


def validation_source(settings: DataSettings) -> DataSettings | None:
    """Return the settings of `data.validation`, or None if it is not set.

    The packs are in a folder beside `data.packs`.
    """
    validation = settings.validation
    if validation is None:
        return None
    # The name of the current folder is only in its absolute path.
    folder = settings.packs if settings.packs.name else settings.packs.absolute()
    packs = Path(f"{folder}-validation")
    streaming = settings.streaming
    # Only training text can be a stream. If it is a stream, read a validation dataset of the hub
    # without a download (`streaming: true`), and read files as usual (`streaming: false`).
    if settings.stream:
        name = str(validation.source)
        streaming = not (Path(name).exists() or files_of(name) or is_address(name))
    return settings.for_source(validation, packs, held_out=0.0, streaming=streaming)


def all_sources(settings: DataSettings) -> list[DataSettings]:
    """Return the settings of each training source, then of `data.validation` if it is set."""
    return list(filter(None, [*training_sources(settings).values(), validation_source(settings)]))


def folder_of(source: DataSettings) -> Path:
    """Return the folder with the packs of a source.

    If the source is a stream, return the folder with the packs from the beginning of the stream.
    """
    return source.packs / FIRST if source.stream else source.packs


def is_occupied(folder: Path) -> bool:
    """Return True if `folder` exists and is not empty.

    An empty folder is treated as absent, because complete packs replace it. The current folder and
    a mount point cannot be replaced.
    """
    return folder.exists() and (
        not folder.is_dir()
        or any(folder.iterdir())
        or folder.samefile(".")
        or folder.resolve().is_mount()
    )


def unprepared(settings: DataSettings) -> list[Path]:
    """Return the folders of training and validation packs that do not exist yet."""
    return [folder for folder in map(folder_of, all_sources(settings)) if not is_occupied(folder)]


def notes_of(packs: Packs) -> list[str]:
    """Return lines about training packs for the user."""
    return [note for source in packs.by_source.values() for note in source.notes]


# ── Opening ───────────────────────────────────────────────────────────────────────────────────────


@overload
def open_packs(settings: DataSettings, split: Literal["train"]) -> Packs: ...


@overload
def open_packs(settings: DataSettings, split: Split) -> Packs | None: ...


def open_packs(settings: DataSettings, split: Split) -> Packs | None:
    """Return the packs of a split in any format, or None if there are no held-out packs.

    Several sources are returned as `MixedPacks`, and a stream as `StreamedPacks`.

    The held-out packs come from `data.validation`. If `data.validation` is not set, they are the
    held-out split of the packs. A stream has its held-out split in the first part. If the packs
    have no held-out split, the share `settings.held_out` of the training packs is held out, and
    every run holds out the same packs. In this case, a document that was cut between packs may have
    pieces in both splits. (`prepare` holds out complete documents.)

    Raises InputError if there are no packs, if the packs are damaged, or if their length is not
    `settings.length`.
    """
    if split == "held_out" and (validation := validation_source(settings)):
        return open_packs(validation, "train")
    sources = training_sources(settings)
    if settings.stream and split == "train":
        return StreamedPacks(settings, sources)
    if not settings.sources:
        return _open_source(sources[""], split)
    opened = {
        name: packs
        for name, source in sources.items()
        if (packs := _open_source(source, split)) is not None
    }
    if not opened:
        return None
    return MixedPacks(settings.packs, opened, dict(zip(sources, settings.shares, strict=True)))


def _open_source(settings: DataSettings, split: Split) -> Packs | None:
    """Return the packs of one source, or None if the source has no packs of this split."""
    openers = find_splits(
        folder_of(settings), settings.length, settings.tokenizer, settings.token_dtype
    )
    # Packs that were made elsewhere may have only one split.
    must_split = "held_out" not in openers and settings.held_out > 0.0 and not settings.stream
    if split not in openers and not must_split:
        return None
    packs = openers["train" if must_split else split]()
    if packs.length != settings.length:
        raise InputError(
            f"{packs.path}: each pack has {packs.length} tokens, but `data.length` is "
            f"{settings.length}; either set data.length={packs.length}, or prepare other packs"
        )
    return split_by_hash(packs, settings.held_out, split) if must_split else packs


def split_by_hash(packs: Packs, share: float, split: Split) -> Packs:
    """Return the packs of a split, for packs that were prepared without a held-out split.

    `share` of the packs are held out: the packs whose indices have the smallest hashes. Raises
    InputError if no pack would be left for training.
    """
    held_out_packs = max(1, round(share * len(packs)))
    if held_out_packs >= len(packs):
        raise InputError(
            f"{packs.path}: holding out {share} of {len(packs)} packs leaves none to train on; "
            "set data.held_out to 0"
        )
    hashes = splitmix64(np.arange(len(packs), dtype=np.uint64))
    # The first `held_out_packs` of these indices have the smallest hashes.
    indices = np.argpartition(hashes, held_out_packs - 1)
    if split == "held_out":
        indices = indices[:held_out_packs]
    else:
        indices = indices[held_out_packs:]
    return SelectedPacks(packs, np.sort(indices))


class SelectedPacks(Packs):
    """Subset of other packs, in the same order."""

    def __init__(self, packs: Packs, indices: np.ndarray) -> None:
        self._packs = packs
        self._indices = indices
        self.path = packs.path
        self.length = packs.length
        self.tokenizer = packs.tokenizer
        self.notes = packs.notes
        self.fingerprint = hashlib.sha256(
            packs.fingerprint.encode() + indices.astype("<i8").tobytes()
        ).hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Pack:
        return self._packs[int(self._indices[checked_index(index, len(self))])]


def find_splits(
    path: Path, length: int | None, tokenizer: str | None = None, token_dtype: str | None = None
) -> dict[Split, Callable[[], Packs]]:
    """Map each split of the packs at `path` to a function that opens the split.

    `length` is the length of a pack, for formats that do not record it. If `length` is None, MDS
    packs have the length of their first sample, and packs of a token file have the default of
    `data.length`. If packs do not mark where documents end, each EOS token of `tokenizer` ends or
    begins a document (see `starts_of_documents`). `token_dtype` is the dtype of token files that do
    not record it. Raises InputError if there are no training packs.
    """
    address = address_of(path)
    if is_address(address):
        # Copy the packs from object storage to `path`.
        fetch(address)
    if not path.exists():
        raise InputError(f"{path}: no such file or folder (`data.packs`); {_MAKE}")
    if (path / MANIFEST).is_file():
        return {split: partial(ArrowPacks, path, split) for split in read_manifest(path)["splits"]}

    def first_of(*names: str) -> Callable[[], Packs] | None:
        """Return a function that opens the first packs with one of these names, or None."""
        for name, suffix in product(names, ("", *_TOKEN_FILES)):
            candidate = path / f"{name}{suffix}"
            if candidate.suffix in _TOKEN_FILES and candidate.is_file():
                end_token = load_tokenizer(tokenizer).special.get("eos") if tokenizer else None
                width = length or _DEFAULT_LENGTH
                return partial(TokenBin, candidate, width, end_token, token_dtype)
            if folders := _mds_folders(candidate):
                return partial(MDSPacks, folders, path, length, tokenizer)
        return None

    if train := first_of("train"):
        held_out = first_of(*_HELD_OUT_NAMES)
        return {"train": train, "held_out": held_out} if held_out else {"train": train}
    if train := first_of(""):
        return {"train": train}
    raise InputError(
        f"{path}: the path has no packs: no {MANIFEST} (Arrow), no {INDEX} (MDS), no train.bin, "
        "and no train.npy (tokens). To read a token file with another "
        "name, set data.packs to this file, which must end in .bin or .npy. To read several .bin "
        "or .npy files of a folder, name each in data.sources, as {name: x_train_000001.bin, "
        f"weight: 1}}; {_MAKE}"
    )


def _mds_folders(path: Path) -> list[Path]:
    """Return `path` if it is a folder of MDS shards, or else such folders in it for training."""
    if (path / INDEX).is_file():
        return [path]
    folders = sorted(index.parent for index in path.glob(f"*/{INDEX}"))
    return [folder for folder in folders if folder.name not in _HELD_OUT_NAMES]
