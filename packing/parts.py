"""The parts of `data`: one source or several, and text to validate on, each with settings and packs of its own."""

from __future__ import annotations

from pathlib import Path

from foundation.errors import InputError
from packing.arrow import MANIFEST
from packing.settings import SOURCE_NAME, DataSettings, SourceSettings
from packing.sources import DatasetSource, FileSource, open_source

VALIDATION = "validation"
_PLACE = ("source", "format", "subset", "split", "revision")  # which documents; another source has its own
# How they are read:
_RECORD = ("text", "messages", "prompt", "response", "train_on", "chat_template", "input_ids", "labels", "document_lengths")


def training_parts(settings: DataSettings) -> dict[str, DataSettings]:
    """The settings of each of `data.sources`, by name; empty where there is one source only."""
    return {
        name: _part(settings, source, settings.packs / name)
        for name, source in zip(source_names(settings), settings.sources or (), strict=True)
    }


def source_names(settings: DataSettings) -> list[str]:
    """The name of each of `data.sources`: its own, or else the last part of its source without suffixes."""
    names = [each.name or Path(str(each.source)).name.split(".")[0] for each in settings.sources or ()]
    if nameless := [each.source for each, name in zip(settings.sources or (), names, strict=True) if not SOURCE_NAME.match(name)]:
        raise InputError(f"data.sources: {nameless[0]}: gives no name for its packs and figures; set its `name`")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"data.sources: two are called {twice[0]}; give each a `name` of its own")
    return names


def validation_part(settings: DataSettings) -> DataSettings | None:
    """The settings of `data.validation`; None where there is none. Its packs lie beside those that are trained on."""
    if settings.validation is None:
        return None
    packs = settings.packs.absolute()
    part = _part(settings, settings.validation, packs.with_name(f"{packs.name}-{VALIDATION}"))
    return part.model_copy(update={"held_out": 0.0, "shuffle": False})


def prepared(settings: DataSettings) -> bool:
    """Whether the packs of every part are there, as far as names tell."""
    validation = validation_part(settings)
    training = [part.packs for part in training_parts(settings).values()] or [settings.packs]
    return all(packs.exists() for packs in [*training, *([validation.packs] if validation else [])])


def _part(settings: DataSettings, own: SourceSettings, packs: Path) -> DataSettings:
    """`settings` with what `own` says; what that leaves open is as for all. Where it names a source, all of `_PLACE` is its own,
    and where it says how a record is read, all of `_RECORD`."""
    given = own.model_fields_set
    keys = set(given)
    keys |= set(_PLACE) if "source" in given else set()
    keys |= set(_RECORD) if given & set(_RECORD) else set()
    values = {key: getattr(own, key) for key in keys & set(SourceSettings.model_fields)}
    made = settings.model_copy(update={**values, "sources": None, "validation": None, "packs": packs}).model_dump()
    if made["source"] is None:  # packs that exist
        made = {key: made[key] for key in ("packs", "length", "held_out", "mask_boundaries", "tokenizer")}
    return DataSettings.model_validate(made)


def check_parts(settings: DataSettings) -> None:
    """InputError where a part cannot be read, or text is to be trained and validated on; before any pack is made."""
    training = training_parts(settings) or {"": settings}
    if settings.sources and (settings.packs / MANIFEST).exists():
        raise InputError(
            f"{settings.packs}: holds the packs of one source, and `data.sources` names {len(training)}; name another folder in "
            "data.packs"
        )
    validation = validation_part(settings)
    opened = [(name, _source_of(part)) for name, part in training.items()]
    held = _source_of(validation) if validation else None
    for name, source in opened:
        if source and held and (shared := _shared(source, held)):
            where = f"data.sources ({name})" if name else "data.source"
            raise InputError(
                f"data.validation: {shared} is also trained on ({where}), so its loss says nothing of unseen text; name another "
                "file or split, or set data.held_out instead"
            )


def _source_of(part: DataSettings) -> FileSource | DatasetSource | None:
    """None where packs are there, and have travelled without it."""
    try:
        return open_source(part) if part.source is not None else None
    except InputError:
        if part.packs.exists():
            return None
        raise


def _shared(one: FileSource | DatasetSource, other: FileSource | DatasetSource) -> str | None:
    """What both sources would read; None for nothing, as far as names tell."""
    if isinstance(one, FileSource) and isinstance(other, FileSource):
        both = {path.resolve() for path in one.paths} & {path.resolve() for path in other.paths}
        return str(min(both)) if both else None
    if isinstance(one, DatasetSource) and isinstance(other, DatasetSource) and one.place == other.place:
        return other.description
    return None
