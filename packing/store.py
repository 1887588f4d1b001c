"""Opens packs on disk, whatever their format (Arrow, MDS or token .bin), of each of the sources that `data` names, and sets
held-out packs apart."""

from __future__ import annotations

import hashlib
from functools import partial
from pathlib import Path

import numpy as np

from foundation.errors import InputError
from packing.arrow import FIRST, MANIFEST, ArrowPacks, Packs, PacksOfOthers, Split, checked_index, read_manifest
from packing.mds import INDEX, MDSPacks
from packing.order import MixedPacks, splitmix64
from packing.settings import SOURCE_NAME, DataSettings, SourceSettings
from packing.stream import StreamedPacks
from packing.token_bin import TokenBin

_HELD_OUT_NAMES = ("held_out", "val", "validation", "test")  # what other writers call the split
_MAKE = "set `data.source` and `data.tokenizer` to prepare packs from text, or point `data.packs` to packs that exist"
_OF_EXISTING = ("packs", "length", "held_out", "mask_boundaries", "tokenizer", "end_token")  # what packs without a source have


def training_parts(settings: DataSettings) -> dict[str, DataSettings]:
    """The settings of each source that is trained on, by name: of several their own, or else the last part of `source`, without
    suffixes; "" where there is one only. Of a stream each has its share of the window, so that their parts last equally long."""
    if not settings.sources:
        return {"": settings.model_copy(update={"validation": None})}
    parts: dict[str, DataSettings] = {}
    for each in settings.sources:
        name = each.name or Path(str(each.source)).name.split(".")[0]
        if not SOURCE_NAME.match(name):
            raise InputError(f"data.sources: {each.source}: gives no name for its packs and figures; set its `name`")
        if name in parts:
            raise InputError(f"data.sources: two are called {name}; give each a `name` of its own")
        parts[name] = _part(settings, each, settings.packs / name)
        if stream := parts[name].stream:
            window = max(settings.length, round(stream.window * each.weight))
            parts[name] = parts[name].model_copy(update={"streaming": stream.model_copy(update={"window": window})})
    return parts


def validation_part(settings: DataSettings) -> DataSettings | None:
    """The settings of `data.validation`. Its packs lie beside those that are trained on, and its documents in their source's
    order."""
    if settings.validation is None:
        return None
    packs = settings.packs.absolute().with_name(f"{settings.packs.absolute().name}-validation")
    part = _part(settings.model_copy(update={"held_out": 0.0}), settings.validation, packs)
    if part.stream:  # what is evaluated on is packed before the run; a dataset of the hub without a download
        part = part.model_copy(update={"streaming": not Path(str(part.source)).exists()})
    part._in_source_order = True
    return part


def _part(settings: DataSettings, own: SourceSettings, packs: Path) -> DataSettings:
    """`settings` with the source that `own` names, and packs of its own."""
    values = {key: getattr(own, key) for key in SourceSettings.model_fields}
    made = settings.model_copy(update={**values, "sources": None, "validation": None, "packs": packs}).model_dump()
    if own.source is None:
        made = {key: made[key] for key in _OF_EXISTING}
    return DataSettings.model_validate(made)


def text_parts(settings: DataSettings) -> list[DataSettings]:
    """The settings of all text that packs are to be made of."""
    parts = [*training_parts(settings).values(), *filter(None, [validation_part(settings)])]
    return [part for part in parts if part.source is not None]


def folder_of(part: DataSettings) -> Path:
    """Returns the folder with the packs of a part: of a stream, its first part."""
    return part.packs / FIRST if part.stream else part.packs


def is_there(folder: Path) -> bool:
    """Returns whether packs are in `folder`, as far as names tell. An empty one is a place for packs to come."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def unprepared(settings: DataSettings) -> list[Path]:
    """The folders of packs that are not there yet, as far as names tell, those of `data.validation` among them."""
    parts = [*training_parts(settings).values(), validation_part(settings)]
    return [folder for folder in (folder_of(part) for part in parts if part) if not is_there(folder)]


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
    opened = {name: packs for name, part in parts.items() if (packs := _open_source(part, split)) is not None}
    return MixedPacks(settings.packs, opened, dict(zip(parts, settings.shares, strict=True))) if opened else None


def _open_source(settings: DataSettings, split: Split) -> Packs | None:
    """The packs of one source; of those without a held-out split a share of the training packs, if one is set apart."""
    openers = find_splits(folder_of(settings), settings.length, settings.end_token)
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


class PartOfPacks(PacksOfOthers):
    """Some packs of a larger store, in its order."""

    def __init__(self, packs: Packs, indices: np.ndarray) -> None:
        self._packs, self._indices = packs, indices
        self.path, self.length, self.tokenizer = packs.path, packs.length, packs.tokenizer
        self.fingerprint = hashlib.sha256(packs.fingerprint.encode() + indices.astype("<i8").tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self._indices)

    def locate(self, index: int) -> tuple[Packs, int]:
        return self._packs, int(self._indices[checked_index(index, len(self))])


def find_splits(path: Path, length: int | None, end_token: int | None = None) -> dict[Split, partial[Packs]]:
    """Returns how to open each split that the data at `path` has of its own; InputError where there is none to train on. `length`
    and `end_token` are for formats that do not say them."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder (`data.packs`); {_MAKE}")
    if (path / MANIFEST).is_file():
        return {split: partial(ArrowPacks, path, split) for split in read_manifest(path)["splits"]}
    if mds := _find_mds(path):
        return {split: partial(MDSPacks, folders, path, length) for split, folders in mds.items()}
    if bins := _find_token_bins(path):
        return {split: partial(TokenBin, file, length, end_token) for split, file in bins.items()}
    several = "; those of several sources are named by `data.sources`" if any(path.glob(f"*/{MANIFEST}")) else ""
    raise InputError(f"{path}: holds no packs: no {MANIFEST} (Arrow), no {INDEX} (MDS), no train.bin{several}; {_MAKE}")


def _find_mds(path: Path) -> dict[Split, list[Path]]:
    """MDS folders by split: `train` and `val` in the folder, else the folder itself or its parts to train on; may be empty."""
    train = _mds_parts(path / "train")
    folders = train or _mds_parts(path)
    held_out = next(filter(None, (_mds_parts(path / name) for name in _HELD_OUT_NAMES)), None) if train else None
    return ({"train": folders} if folders else {}) | ({"held_out": held_out} if held_out else {})


def _mds_parts(path: Path) -> list[Path]:
    """`path` if it has an index, else those of its folders that have one, without splits to hold out."""
    parts = [path] if (path / INDEX).exists() else sorted(index.parent for index in path.glob(f"*/{INDEX}"))
    if splits := [part.name for part in parts if part != path and part.name in _HELD_OUT_NAMES]:
        raise InputError(
            f"{path}: {splits[0]} is a split's name, and there is no `train` beside it; name a folder in `data.packs`"
        )
    return parts


def _find_token_bins(path: Path) -> dict[Split, Path]:
    """Token files by split: train.bin with val.bin, the only .bin of a folder, or the file that `path` is."""
    bins = {file.stem: file for file in ([path] if path.suffix == ".bin" and path.is_file() else path.glob("*.bin"))}
    train = bins.get("train") or (next(iter(bins.values())) if len(bins) == 1 else None)
    if bins and train is None:
        raise InputError(
            f"{path}: holds {', '.join(sorted(bins))}.bin, and none is called train; name one of them in `data.packs`"
        )
    held_out = next((bins[name] for name in _HELD_OUT_NAMES if name in bins and bins[name] != train), None)
    return ({"train": train} if train else {}) | ({"held_out": held_out} if held_out else {})
