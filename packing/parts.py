"""The parts of `data`: one source or several, and text to validate on, each with settings and packs of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from foundation.errors import InputError
from packing.manifest import FIRST
from packing.settings import SOURCE_NAME, DataSettings, SourceSettings

VALIDATION = "validation"
_OF_EXISTING = ("packs", "length", "held_out", "mask_boundaries", "tokenizer", "end_token")


def training_parts(settings: DataSettings) -> dict[str, DataSettings]:
    """The settings of each of `data.sources`, by name: their own, or else the last part of `source`, without suffixes; empty
    where there is one source only."""
    parts: dict[str, DataSettings] = {}
    for each in settings.sources or ():
        name = each.name or Path(str(each.source)).name.split(".")[0]
        if not SOURCE_NAME.match(name):
            raise InputError(f"data.sources: {each.source}: gives no name for its packs and figures; set its `name`")
        if name in parts:
            raise InputError(f"data.sources: two are called {name}; give each a `name` of its own")
        parts[name] = _part(settings, each, settings.packs / name)
    return parts


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


def validation_parts(settings: DataSettings) -> dict[str, DataSettings]:
    """The settings of `data.validation`, by the name ""; empty where there is none. Its packs lie beside those that are trained
    on, and its documents in their source's order."""
    validation = settings.validation
    if validation is None:
        return {}
    packs = settings.packs.absolute().with_name(f"{settings.packs.absolute().name}-{VALIDATION}")
    part = _part(settings.model_copy(update={"held_out": 0.0}), validation, packs)
    if part.stream:  # what is evaluated on is packed before the run; a dataset of the hub without a download
        part = part.model_copy(update={"streaming": not Path(str(part.source)).exists()})
    part._in_source_order = True
    return {"": part}


def _part(settings: DataSettings, own: SourceSettings, packs: Path) -> DataSettings:
    """`settings` with the source that `own` names, and packs of its own."""
    values = {key: getattr(own, key) for key in SourceSettings.model_fields}
    made = settings.model_copy(update={**values, "sources": None, "validation": None, "packs": packs}).model_dump()
    if own.source is None:
        made = {key: made[key] for key in _OF_EXISTING}
    return DataSettings.model_validate(made)


def by_key(parts: Mapping[str, DataSettings], of: str = "data") -> dict[str, DataSettings]:
    """`parts`, by their names as above, by what a message calls the source of each. of: `data` or `data.validation`."""
    alone = "data.source" if of == "data" else of
    return {f"{of}.sources ({name})" if name else alone: part for name, part in parts.items()}


@contextmanager
def naming(key: str) -> Iterator[None]:
    """A block in which messages about `data.source` name `key`, which the part at work comes from."""
    try:
        yield
    except InputError as error:
        message = str(error)
        error.args = (f"{key}: {message.removeprefix('data.source: ')}" if message.startswith("data.source: ") else message,)
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
