"""Opens packs on disk, whatever their format (Arrow, MDS or token .bin), checks them, and sets held-out packs apart."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import numpy as np

from foundation.errors import InputError
from packing.arrow import ArrowPacks, Pack, Packs, checked_index
from packing.manifest import FIRST, MANIFEST, Split, holds_packs, read_manifest
from packing.mds import INDEX, MDSPacks, read_index
from packing.mixture import MixedPacks
from packing.order import splitmix64
from packing.parts import stream_parts, training_parts, validation_parts
from packing.settings import DataSettings
from packing.stream import StreamedPacks
from packing.token_bin import TokenBin

_HELD_OUT_NAMES = ("held_out", "val", "validation", "test")  # what other writers call the split
_MAKE = "set `data.source` and `data.tokenizer` to prepare packs from text, or point `data.packs` to packs that exist"


def open_packs(settings: DataSettings, split: Split) -> Packs | None:
    """The packs at `settings.packs`, whatever their format; None where `split` is held_out and there is none.

    Where the data has no held-out split of its own, the share `settings.held_out` of the training packs is set apart, the same
    packs every time. (A document that was cut between packs may then have a part on either side; `prepare` holds out whole ones.)

    Of several sources (`data.sources`) they are a `MixedPacks`; where there is `data.validation`, that is what is held out. Of a
    stream (`data.streaming`) they are `StreamedPacks`, and what is held out is of its first part, which has to be there.

    Raises InputError where there are no packs, where they are damaged, and where their length is not `settings.length`.
    """
    if settings.validation is not None:
        if split == "held_out":
            return open_packs(validation_parts(settings)[""], "train")
        settings = settings.model_copy(update={"validation": None})
    if settings.stream:
        return StreamedPacks(settings) if split == "train" else _held_out_of_stream(settings)
    if parts := training_parts(settings):
        opened = {name: open_packs(part, split) for name, part in parts.items()}
        weights = dict(zip(parts, (each.weight for each in settings.sources), strict=True))
        found = {name: packs for name, packs in opened.items() if packs is not None}
        return MixedPacks(settings.packs, found, weights) if found else None
    return _open_store(settings, split)


def _held_out_of_stream(settings: DataSettings) -> Packs | None:
    """Returns what the first part of a stream, or of each of its sources, has set apart."""
    folders = {name: part.packs / FIRST for name, part in stream_parts(settings).items()}
    found = {name: ArrowPacks(path, "held_out") for name, path in folders.items() if "held_out" in read_manifest(path)["splits"]}
    if not found:
        return None
    if not settings.sources:
        return next(iter(found.values()))
    return MixedPacks(settings.packs, found, {name: each.weight for name, each in zip(folders, settings.sources, strict=False)})


def _open_store(settings: DataSettings, split: Split) -> Packs | None:
    """The packs of one source; of those without a held-out split a share of the training packs, if one is set apart."""
    openers = _find_splits(settings.packs, settings)
    if settings.end_token is not None and openers["train"].func is not TokenBin:
        raise InputError(f"{settings.packs}: `data.end_token` is for token .bin files; these know their documents: leave it out")
    carved = "held_out" not in openers and settings.held_out > 0.0
    if split not in openers and not carved:
        return None
    packs = openers["train" if carved else split]()
    if packs.length != settings.length:
        has = f"packs of {packs.length} tokens, but `data.length` is {settings.length}"
        raise InputError(f"{packs.path}: {has}; set it to fit, or prepare other packs")
    return carve(packs, settings.held_out, split) if carved else packs


def with_own_held_out(settings: DataSettings) -> list[Path]:
    """The packs that exist with a held-out split of their own, which `settings.held_out` leaves as it is, unless they were
    prepared with this share, and which `settings.validation` takes the place of."""
    parts = [part for part in training_parts(settings).values() or [settings] if part.source is None]
    if settings.validation is None:
        parts = [part for part in parts if part.held_out and not _was_held_out(part)]
    return [part.packs for part in parts if "held_out" in _find_splits(part.packs, part)]


def _was_held_out(settings: DataSettings) -> bool:
    """Returns whether the packs say that they were prepared with `settings.held_out`."""
    made = read_manifest(settings.packs)["settings"] if (settings.packs / MANIFEST).is_file() else {}
    return made.get("held_out") == settings.held_out


def check_model(packs: Packs, vocab_size: int, tokenizer_fingerprint: str | None = None) -> None:
    """InputError where a model of `vocab_size` embeddings, with the tokenizer of this fingerprint if given, cannot use `packs`.

    Packs that do not record their tokenizer pass; their token ids are checked as batches are made.
    """
    tokenizer = packs.tokenizer or {}
    name, size, fingerprint = (tokenizer.get(key) for key in ("name", "vocab_size", "fingerprint"))
    if tokenizer_fingerprint and fingerprint and fingerprint != tokenizer_fingerprint:
        raise InputError(
            f"{packs.path}: made with another tokenizer ({name or 'unnamed'}, {fingerprint[:12]}) than the model's "
            f"({tokenizer_fingerprint[:12]}); prepare the packs with the model's tokenizer (`data.tokenizer`)"
        )
    if size is not None and size > vocab_size:
        raise InputError(
            f"{packs.path}: made with a vocabulary of {size} tokens ({name or 'unnamed'}), the model has {vocab_size}; "
            "prepare the packs with the model's tokenizer (`data.tokenizer`), or choose a model with a larger vocabulary"
        )


def carve(packs: Packs, share: float, split: Split) -> Packs:
    """The training or held-out part of `packs`; the packs whose indices have the smallest hashes are held out."""
    count = max(1, round(share * len(packs)))
    if count >= len(packs):
        raise InputError(
            f"{packs.path}: {len(packs)} packs cannot give up a share of {share} (`data.held_out`) and leave some to train on; "
            "set `data.held_out` to 0 or take more text"
        )
    chosen = np.zeros(len(packs), bool)
    chosen[np.argpartition(splitmix64(np.arange(len(packs), dtype=np.uint64)), count - 1)[:count]] = True
    return PartOfPacks(packs, np.flatnonzero(chosen if split == "held_out" else ~chosen))


class PartOfPacks:
    """Some packs of a larger store, in its order."""

    def __init__(self, packs: Packs, indices: np.ndarray) -> None:
        self._packs = packs
        self._indices = indices
        self.path = packs.path
        self.length = packs.length
        self.tokenizer = packs.tokenizer
        self.fingerprint = hashlib.sha256(packs.fingerprint.encode() + indices.astype("<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Pack:
        return self._packs[int(self._indices[checked_index(index, len(self))])]

    def lengths(self, index: int) -> np.ndarray:
        return self._packs.lengths(int(self._indices[checked_index(index, len(self))]))

    def trained(self, index: int) -> np.ndarray | None:
        return self._packs.trained(int(self._indices[checked_index(index, len(self))]))

    def verify(self) -> None:
        self._packs.verify()


def _find_splits(path: Path, settings: DataSettings) -> dict[Split, partial[Packs]]:
    """Returns how to open each split that the data at `path` has of its own; raises InputError where there is none to train
    on."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder (`data.packs`); {_MAKE}")
    if (path / MANIFEST).is_file():
        return {split: partial(ArrowPacks, path, split) for split in read_manifest(path)["splits"]}
    if mds := find_mds(path):
        return {split: partial(MDSPacks, folders, path, settings.length) for split, folders in mds.items()}
    if bins := _find_token_bins(path):
        return {split: partial(TokenBin, file, settings.length, settings.end_token) for split, file in bins.items()}
    if holds_packs(path.parent):
        raise InputError(f"{path}: one part of the packs in {path.parent}; point `data.packs` to that folder")
    if several := sorted(each.name for each in path.glob("*") if holds_packs(each)):
        raise InputError(
            f"{path}: holds the packs of several sources: {', '.join(several)}; name one, as in {path / several[0]}, or all "
            "of them in `data.sources`"
        )
    if path.is_dir() and not any(path.iterdir()):
        raise InputError(f"{path}: an empty folder (`data.packs`); {_MAKE}")
    raise InputError(f"{path}: holds no packs: no {MANIFEST} (Arrow), no {INDEX} (MDS), no train.bin; {_MAKE}")


def find_mds(path: Path) -> dict[Split, list[Path]]:
    """MDS folders by split: `train` and `val` in the folder, else the folder itself or its parts to train on; may be empty."""
    if folders := _mds_parts(path / "train"):
        held_out = next(filter(None, (_mds_parts(path / name) for name in _HELD_OUT_NAMES)), None)
        return {"train": folders} | ({"held_out": held_out} if held_out else {})
    folders = _mds_parts(path)
    return {"train": folders} if folders else {}


def _mds_parts(path: Path) -> list[Path]:
    """`path` if it has an index, else those of its folders that have one; refused where they are datasets or splits instead."""
    if (path / INDEX).exists():
        return [path]
    parts = sorted(index.parent for index in path.glob(f"*/{INDEX}"))
    layouts = {str(shard.layout) for part in parts for shard in read_index(part)}
    splits = [part.name for part in parts if part.name in _HELD_OUT_NAMES]
    if len(layouts) > 1 or splits:
        why = f"and {splits[0]} is a split's name" if splits else "with different columns"
        raise InputError(
            f"{path}: holds the MDS folders {', '.join(part.name for part in parts)}, {why}, so they are not the "
            "parts of one dataset; name one of them in `data.packs`"
        )
    return parts


def _find_token_bins(path: Path) -> dict[Split, Path]:
    """Token files by split: train.bin with val.bin, the only .bin of a folder, or the file that `path` is."""
    if path.is_file():
        return {"train": path} if path.suffix == ".bin" else {}
    bins = {file.stem: file for file in path.glob("*.bin")}
    if "train" in bins:
        held_out = next((bins[name] for name in _HELD_OUT_NAMES if name in bins), None)
        return {"train": bins["train"]} | ({"held_out": held_out} if held_out else {})
    if len(bins) > 1:
        names = ", ".join(sorted(file.name for file in bins.values()))
        raise InputError(f"{path}: holds {names}, and none is called train.bin; name one of them in `data.packs`")
    return {"train": next(iter(bins.values()))} if bins else {}
