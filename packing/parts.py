"""The parts of `data`: one source or several, and text to validate on, each with settings and packs of its own."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

from foundation.errors import InputError
from packing.manifest import FIRST, holds_packs
from packing.settings import SOURCE_NAME, DataSettings, SourceSettings, WeightedSource
from packing.sources import DatasetSource, FileSource, SourceAbsent, open_source

VALIDATION = "validation"
_SLICE = re.compile(r"(?P<name>[^\[\]()]+)(?P<slice>\[(?P<begin>-?\d+%?)?:(?P<end>-?\d+%?)?\](\(\w+\))?)?")  # of `datasets`


def training_parts(settings: DataSettings) -> dict[str, DataSettings]:
    """The settings of each of `data.sources`, by name; empty where there is one source only."""
    return {
        name: _part(settings, source, settings.packs / name)
        for name, source in zip(source_names(settings), settings.sources or (), strict=True)
    }


def stream_parts(settings: DataSettings) -> dict[str, DataSettings]:
    """The settings of each source that is packed while the run trains, by name, "" where there is one only. Each of several has
    its share of the window, so that their parts last equally long."""
    parts = training_parts(settings)
    if not parts:
        return {"": settings.model_copy(update={"validation": None})}
    made = {}
    for (name, part), source in zip(parts.items(), settings.sources, strict=True):
        window = max(settings.length, round(settings.stream.window * source.weight))
        made[name] = part.model_copy(update={"streaming": settings.stream.model_copy(update={"window": window})})
    return made


def source_names(settings: DataSettings, key: str = "data.sources") -> list[str]:
    """The name of each of `data.sources`: its own, or else the last part of its source without suffixes."""
    names = [each.name or Path(str(each.source)).name.split(".")[0] for each in settings.sources or ()]
    if nameless := [each.source for each, name in zip(settings.sources or (), names, strict=True) if not SOURCE_NAME.match(name)]:
        raise InputError(f"{key}: {nameless[0]}: gives no name for its packs and figures; set its `name`")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{key}: two are called {twice[0]}; give each a `name` of its own")
    return names


def validation_part(settings: DataSettings) -> DataSettings | None:
    """The settings of `data.validation`, all of its sources; None where there is none. Its packs lie beside those that are
    trained on."""
    if settings.validation is None:
        return None
    packs = settings.packs.absolute().with_name(f"{settings.packs.absolute().name}-{VALIDATION}")
    if several := settings.validation.sources:
        # Their weights mean nothing: each is evaluated whole, or by an equally large part.
        weighted = [WeightedSource(**settings.of(each).model_dump(), name=each.name, weight=1 / len(several)) for each in several]
        part = settings.model_copy(update={"packs": packs, "source": None, "sources": tuple(weighted), "validation": None})
        source_names(part, "data.validation.sources")  # which says of those that they cannot be told apart
    else:
        part = _part(settings, settings.validation, packs)
    # What is evaluated on is packed before the run: whole, and of a hub's dataset without a download.
    streaming = part.stream is not None and any(not Path(str(each.source)).exists() for each in several or [part])
    changed = {"streaming": streaming} if part.stream else {}
    return part.model_copy(update={"held_out": 0.0, "shuffle": False, **changed})


def validation_parts(settings: DataSettings) -> dict[str, DataSettings]:
    """The settings of each source of `data.validation`, by name, "" where there is one only; empty where there is none."""
    validation = validation_part(settings)
    return {} if validation is None else training_parts(validation) or {"": validation}


def by_key(parts: Mapping[str, DataSettings], of: str = "data") -> dict[str, DataSettings]:
    """`parts`, by their names as above, by what a message calls the source of each. of: `data` or `data.validation`."""
    alone = "data.source" if of == "data" else of
    return {f"{of}.sources ({name})" if name else alone: part for name, part in parts.items()}


@contextmanager
def said_of(key: str) -> Iterator[None]:
    """A block in which what is said of `data.source` is said of `key` instead, which names the part that is looked at."""
    try:
        yield
    except InputError as error:
        said = str(error)
        error.args = (f"{key}: {said.removeprefix('data.source: ')}" if said.startswith("data.source: ") else said,)
        raise


def folder_of(part: DataSettings) -> Path:
    """Returns the folder with the packs of a part: of a stream, those that are kept of its beginning."""
    return part.packs / FIRST if part.stream else part.packs


def is_there(folder: Path) -> bool:
    """Returns whether packs are in `folder`, as far as names tell. An empty one is a place for packs to come."""
    return folder.exists() and not (folder.is_dir() and not any(folder.iterdir()))


def unprepared(settings: DataSettings) -> dict[str, list[Path]]:
    """The folders of packs that are not there yet, as far as names tell: of what is trained on (`data.packs`), and of
    `data.validation`."""
    training = list(training_parts(settings).values()) or [settings]
    parts = {"data.packs": training, "data.validation": list(validation_parts(settings).values())}
    missing = {key: [folder for folder in map(folder_of, some) if not is_there(folder)] for key, some in parts.items()}
    return {key: folders for key, folders in missing.items() if folders}


def _part(settings: DataSettings, own: SourceSettings, packs: Path) -> DataSettings:
    """`settings` with what a source has that says `own`, and packs of its own."""
    values = settings.of(own).model_dump()
    made = settings.model_copy(update={**values, "sources": None, "validation": None, "packs": packs}).model_dump()
    if made["source"] is None:  # packs that exist
        made = {key: made[key] for key in ("packs", "length", "held_out", "mask_boundaries", "tokenizer", "end_token")}
    return DataSettings.model_validate(made)


def check_parts(settings: DataSettings, *, elsewhere: bool = False) -> list[str]:
    """InputError where a part cannot be read, or text is to be trained and validated on; before any pack is made. Returns what
    is not checked, a line for each.

    `elsewhere`: text that is not here may be on the machine that trains, and is then one of these.
    """
    training = training_parts(settings) or {"": settings}
    if settings.sources and holds_packs(settings.packs):
        raise InputError(
            f"{settings.packs}: holds the packs of one source, and `data.sources` names {len(training)}; name another folder in "
            "data.packs"
        )
    absent: list[str] | None = [] if elsewhere else None
    opened = [(key, _source_of(part, key, absent)) for key, part in by_key(training).items()]
    validation = by_key(validation_parts(settings), "data.validation")
    held_out = [(key, _source_of(part, key, absent)) for key, part in validation.items()]
    for (key, source), part in zip(held_out, validation.values(), strict=True):
        if source is not None and not is_there(folder_of(part)):
            _check_format(settings, part, source, key)
    for (where, source), (held_where, held) in product(opened, held_out):
        if source and held and (shared := _shared(source, held)):
            raise InputError(
                f"{held_where}: {shared} is also trained on ({where}), so its loss says nothing of unseen text; name another "
                "file or split, or set data.held_out instead"
            )
    notes = [f"{said}; what is said of it is not checked" for said in absent or ()]
    pairs = zip(opened, training.values(), strict=True)
    alone = [str(part.packs) for (_, source), part in pairs if source is None and is_there(folder_of(part))]
    if alone and any(source for _, source in held_out):
        packs = " and ".join(alone)
        notes.append(f"`data.validation`: whether it is also trained on is not checked, as the text of {packs} is not known here")
    return notes


def _check_format(settings: DataSettings, part: DataSettings, source: FileSource | DatasetSource, key: str) -> None:
    """InputError where text to validate on would be read as files of another kind than `data.format` says of `data.source`, and
    nobody has said so: it may have been meant for both."""
    named = [own for own in (settings.validation, *(settings.validation.sources or ())) if own.source == part.source]
    if settings.source is None or part.format == settings.format or any("format" in own.model_fields_set for own in named):
        return
    kind = "jsonl" if isinstance(source, FileSource) and source.kind == "json" else getattr(source, "kind", settings.format)
    if settings.format in ("jsonl", "parquet", "text") and kind != settings.format:
        raise InputError(
            f"{key}: {part.source} is read as {kind}, and `data.format: {settings.format}` belongs to data.source; set `format` "
            f"beside it, to `{settings.format}`, or to `auto` for {kind}"
        )


def _source_of(part: DataSettings, key: str, absent: list[str] | None) -> FileSource | DatasetSource | None:
    """None where packs are there, and have travelled without it. `key`: what names it, for what is wrong with it. `absent`: takes
    what is to be said of one that is not here, which is an error where this is None."""
    if part.source is None:
        return None
    try:
        with suppress(InputError) if is_there(folder_of(part)) else said_of(key):
            return open_source(part)
    except SourceAbsent as error:
        if absent is None:
            raise
        absent.append(str(error))
    return None


def _shared(one: FileSource | DatasetSource, other: FileSource | DatasetSource) -> str | None:
    """Returns what both sources would read; None for nothing, as far as names tell."""
    if isinstance(one, FileSource) and isinstance(other, FileSource):
        mine = {(stat.st_dev, stat.st_ino) for stat in map(Path.stat, one.paths)}  # whatever links lead there
        both = [path for path in other.paths if ((stat := path.stat()).st_dev, stat.st_ino) in mine]
        return str(min(both)) if both else None
    if isinstance(one, DatasetSource) and isinstance(other, DatasetSource):
        (place, split), (its_place, its_split) = _rows_of(one), _rows_of(other)
        return other.description if place == its_place and _overlap(split, its_split) else None
    return None


def _rows_of(source: DatasetSource) -> tuple[tuple[str, str], str]:
    """The dataset, whatever its revision, and the split. A saved one is a folder, which has no other splits."""
    settings, folder = source.settings, Path(source.name)
    if (folder / "dataset_dict.json").is_file():
        folder /= settings.split
    saved = (folder / "state.json").is_file()
    name = str(folder.resolve()) if folder.exists() else source.name
    return (name, "default" if saved else settings.subset or "default"), "all" if saved else settings.split


def _overlap(one: str, other: str) -> bool:
    """Returns whether two splits, such as `train[:5%]+test`, have rows in common for certain."""
    pairs = [(_SLICE.fullmatch(a.strip()), _SLICE.fullmatch(b.strip())) for a in one.split("+") for b in other.split("+")]
    return any(a and b and _slices_overlap(a, b) for a, b in pairs)


def _slices_overlap(one: re.Match[str], other: re.Match[str]) -> bool:
    if one["name"] != other["name"] and "all" not in (one["name"], other["name"]):
        return False
    if not one["slice"] or not other["slice"]:
        return True
    ends = [each[key] for each in (one, other) for key in ("begin", "end") if each[key]]
    if any(each.startswith("-") for each in ends) or len({each.endswith("%") for each in ends}) > 1:
        return False  # which rows these are depends on how many there are
    begins = [int((each["begin"] or "0").rstrip("%")) for each in (one, other)]
    stops = [int(each["end"].rstrip("%")) if each["end"] else math.inf for each in (one, other)]
    return max(begins) < min(stops)
