"""Opens packs on disk, whatever their format (Arrow, MDS or token .bin), of each of the sources that `data` names, and sets
held-out packs apart."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import numpy as np

from foundation.errors import InputError
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
from packing.order import MixedPacks, splitmix64
from packing.other_formats import INDEX, MDSPacks, TokenBin
from packing.settings import SOURCE_NAME, DataSettings, SourceSettings
from packing.stream import StreamedPacks
from packing.tokenizer import load_tokenizer

_HELD_OUT_NAMES = ("held_out", "val", "validation", "test")  # what other writers call the split
_MAKE = "set `data.source` and `data.tokenizer` to prepare packs from text, or point `data.packs` to packs that exist"


def training_parts(settings: DataSettings) -> dict[str, DataSettings]:
    """The settings of each source that is trained on, by name: their own name, or the last part of `source` without suffixes; ""
    for a single source. In a stream each gets its share of the window, so that parts last equally long."""
    if not settings.sources:
        return {"": settings.model_copy(update={"validation": None})}
    parts: dict[str, DataSettings] = {}
    for each in settings.sources:
        name = each.name or Path(str(each.source)).name.split(".")[0]
        if not SOURCE_NAME.match(name) or name in parts:
            raise InputError(
                f"data.sources: {each.source}: its packs and figures need a `name` of their own; set it"
            )
        parts[name] = _part(settings, each, settings.packs / name)
        if stream := parts[name].stream:
            window = max(settings.length, round(stream.window * each.weight))
            parts[name] = parts[name].model_copy(
                update={"streaming": stream.model_copy(update={"window": window})}
            )
    return parts


def validation_part(settings: DataSettings) -> DataSettings | None:
    """The settings of `data.validation`. Its packs lie beside those that are trained on."""
    if settings.validation is None:
        return None
    packs = settings.packs.absolute().with_name(f"{settings.packs.absolute().name}-validation")
    part = _part(settings.model_copy(update={"held_out": 0.0}), settings.validation, packs)
    # what is evaluated on is packed before the run; a dataset of the hub without a download
    if part.stream:
        part = part.model_copy(update={"streaming": not Path(str(part.source)).exists()})
    return part


def _part(settings: DataSettings, own: SourceSettings, packs: Path) -> DataSettings:
    """`settings` with the source that `own` names, and packs of its own."""
    values = {key: getattr(own, key) for key in SourceSettings.model_fields}
    return settings.model_copy(
        update={**values, "sources": None, "validation": None, "packs": packs}
    )


def all_parts(settings: DataSettings) -> list[DataSettings]:
    """The settings of each source that is trained on, and of `data.validation` where there is one."""
    return [*training_parts(settings).values(), *filter(None, [validation_part(settings)])]


def folder_of(part: DataSettings) -> Path:
    """Returns the folder with the packs of a part: of a stream, its first part."""
    return part.packs / FIRST if part.stream else part.packs


def is_there(folder: Path) -> bool:
    """Returns whether packs are in `folder`, as far as names tell. An empty one is a place for packs to come."""
    return any(folder.iterdir()) if folder.is_dir() else folder.exists()


def unprepared(settings: DataSettings) -> list[Path]:
    """The folders of packs that are not there yet, as far as names tell, those of `data.validation` among them."""
    return [folder for folder in map(folder_of, all_parts(settings)) if not is_there(folder)]


def open_packs(settings: DataSettings, split: Split) -> Packs | None:
    """The packs at `settings.packs`, whatever their format; None where `split` is held_out and there is none.

    Where the data has no held-out split of its own, the share `settings.held_out` of the training packs is set apart, the same
    packs every time. (A document that was cut between packs may then have a part on either side; `prepare` holds out whole ones.)

    Of several sources (`data.sources`) they are a `MixedPacks`; where there is `data.validation`, that is what is held out. Of a
    stream (`data.streaming`) they are `StreamedPacks`, and what is held out is of its first part, which has to be there.

    Raises InputError where there are no packs, where they are damaged, and where their length is not `settings.length`.
    """
    if settings.validation is not None and split == "held_out":
        return open_packs(validation_part(settings), "train")
    parts = training_parts(settings)
    if settings.stream and split == "train":
        return StreamedPacks(settings, parts)
    if not settings.sources:
        return _open_source(parts[""], split)
    opened = {
        name: packs
        for name, part in parts.items()
        if (packs := _open_source(part, split)) is not None
    }
    return (
        MixedPacks(settings.packs, opened, dict(zip(parts, settings.shares, strict=True)))
        if opened
        else None
    )


def _open_source(settings: DataSettings, split: Split) -> Packs | None:
    """The packs of one source; of those without a held-out split a share of the training packs, if one is set apart."""
    openers = find_splits(folder_of(settings), settings.length, settings.tokenizer)
    carved = "held_out" not in openers and settings.held_out > 0.0 and not settings.stream
    if split not in openers and not carved:
        return None
    packs = openers["train" if carved else split]()
    if packs.length != settings.length:
        has = f"packs of {packs.length} tokens, but `data.length` is {settings.length}"
        raise InputError(f"{packs.path}: {has}; set it to fit, or prepare other packs")
    return carve(packs, settings.held_out, split) if carved else packs


def check_model(packs: Packs, vocab_size: int, tokenizer_fingerprint: str | None = None) -> None:
    """InputError where a model of `vocab_size` embeddings, with the tokenizer of this fingerprint if given, cannot use `packs`.

    Packs that do not record their tokenizer pass; their token ids are checked as batches are made.
    """
    tokenizer = packs.tokenizer or {}
    name, size, fingerprint = (tokenizer.get(key) for key in ("name", "vocab_size", "fingerprint"))
    wrong = None
    if tokenizer_fingerprint and fingerprint and fingerprint != tokenizer_fingerprint:
        wrong = f"another tokenizer ({name}, {fingerprint[:12]}) than the model's ({tokenizer_fingerprint[:12]})"
    elif (size or 0) > vocab_size:
        wrong = f"a vocabulary of {size} tokens ({name}), and the model has {vocab_size}"
    if wrong:
        raise InputError(
            f"{packs.path}: made with {wrong}; prepare the packs with the model's tokenizer (`data.tokenizer`)"
        )


def carve(packs: Packs, share: float, split: Split) -> Packs:
    """The training or held-out part of `packs`; the packs whose indices have the smallest hashes are held out."""
    count = max(1, round(share * len(packs)))
    if count >= len(packs):
        raise InputError(
            f"{packs.path}: `data.held_out: {share}` of {len(packs)} packs leaves none to train on; set it to 0"
        )
    chosen = np.zeros(len(packs), bool)
    chosen[
        np.argpartition(splitmix64(np.arange(len(packs), dtype=np.uint64)), count - 1)[:count]
    ] = True
    return PartOfPacks(packs, np.flatnonzero(chosen if split == "held_out" else ~chosen))


class PartOfPacks(Packs):
    """Some packs of a larger store, in its order."""

    def __init__(self, packs: Packs, indices: np.ndarray) -> None:
        self._packs, self._indices = packs, indices
        self.path, self.length, self.tokenizer = packs.path, packs.length, packs.tokenizer
        self.fingerprint = hashlib.sha256(
            packs.fingerprint.encode() + indices.astype("<i8").tobytes()
        ).hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Pack:
        return self._packs[int(self._indices[checked_index(index, len(self))])]


def find_splits(
    path: Path, length: int | None, tokenizer: str | None = None
) -> dict[Split, partial[Packs]]:
    """Returns how to open each split that the data at `path` has of its own; InputError where there is none to train on. `length`
    is for formats that do not say it. So is the `tokenizer`: its EOS token ends a document of packs
    that do not say where one ends."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder (`data.packs`); {_MAKE}")
    if (path / MANIFEST).is_file():
        return {split: partial(ArrowPacks, path, split) for split in read_manifest(path)["splits"]}

    def first_of(*places: Path) -> partial[Packs] | None:
        """How to open the first of `places` that has packs: a token file, an MDS folder, or a folder of such folders."""
        for place in places:
            if place.suffix == ".bin" and place.is_file():
                return partial(
                    TokenBin,
                    place,
                    length,
                    load_tokenizer(tokenizer).special.get("eos") if tokenizer else None,
                )
            inside = sorted(
                index.parent
                for index in place.glob(f"*/{INDEX}")
                if index.parent.name not in _HELD_OUT_NAMES
            )
            if folders := [place] if (place / INDEX).is_file() else inside:
                return partial(MDSPacks, folders, path, length, tokenizer)
        return None

    if train := first_of(path / "train", path / "train.bin"):
        held_out = first_of(
            *(path / f"{name}{suffix}" for name in _HELD_OUT_NAMES for suffix in ("", ".bin"))
        )
        return {"train": train} | ({"held_out": held_out} if held_out else {})
    if alone := first_of(path):
        return {"train": alone}
    several = (
        "; those of several sources are named by `data.sources`"
        if any(path.glob(f"*/{MANIFEST}"))
        else ""
    )
    raise InputError(
        f"{path}: holds no packs: no {MANIFEST} (Arrow), no {INDEX} (MDS), no train.bin{several}; {_MAKE}"
    )
