"""What packs.json says of the packs beside it: their format, the settings and tokenizer that made them, and every file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from foundation.errors import InputError
from foundation.integrity import InnerName, Size, hash_of
from foundation.reading import load_object
from foundation.settings import first_mistake

Split = Literal["train", "held_out"]

MANIFEST = "packs.json"
FIRST = "first"  # in the folder of a stream: packs that are kept, to look at and to evaluate on
VERSION = 1
MASKED_VERSION = 2  # packs with a column more, `trained`: programs that do not know it would train on every token
MOST_LENGTH = 2**31 - 1  # tokens of a pack: Arrow counts the values of a fixed list in 32 bits
REMEDY = "prepare the packs again, or fetch them again if they were copied"


class WrittenFile(BaseModel):
    name: InnerName
    bytes: Size
    sha256: str


class WrittenSplit(BaseModel):
    packs: Size
    fingerprint: str
    files: list[WrittenFile]


class KnownTokenizer(BaseModel):
    name: str | None = None
    fingerprint: str | None = None
    vocab_size: Size | None = None
    bos_id: Size | None = None
    eos_id: Size | None = None
    pad_id: Size | None = None


class LengthStatistics(BaseModel):
    median: float
    longest: Size


class Statistics(BaseModel):
    """The figures of packs that `prepare` made; whoever imports packs knows only some of them."""

    documents: Size = 0
    tokens: Size = 0
    packs: Size = 0
    fill: float = 0.0
    cut_documents: Size = 0
    held_out_documents: Size = 0
    held_out_packs: Size = 0
    trained_tokens: Size | None = None  # None: all
    held_out_tail: Size | None = None  # tokens at the end of the only document
    skipped_lines: Size = 0
    first_skipped: str | None = None
    empty_documents: Size = 0
    lengths: LengthStatistics = LengthStatistics(median=0.0, longest=0)
    source_bytes: Size | None = None


class PackManifest(BaseModel):
    """What packs.json must hold, as far as it is read; what it holds beyond that is somebody else's."""

    version: int
    length: Annotated[int, Field(gt=0, le=MOST_LENGTH)]
    tokenizer: KnownTokenizer | None
    settings: dict[str, Any]
    statistics: Statistics
    splits: Annotated[dict[Split, WrittenSplit], Field(min_length=1)]
    files: list[WrittenFile]


def holds_packs(folder: Path) -> bool:
    """Returns whether packs lie in `folder`, as far as names tell. Text may be called packs.json, too, and so may a source be."""
    return (folder / MANIFEST).is_file() and (folder / "dataset_dict.json").is_file()


def read_manifest(path: Path) -> dict[str, Any]:
    """The content of packs.json; InputError where it cannot be used."""
    file = path / MANIFEST
    remedy = REMEDY if holds_packs(path) else f"{REMEDY}; if it is text, name the folder of packs that were prepared from it"
    manifest = load_object(file, remedy)
    if not {"version", "length", "tokenizer", "splits", "files"} <= manifest.keys():
        raise InputError(f"{file}: not a manifest of packs; {remedy}")
    if manifest.pop("checksum", None) != hash_of(manifest):
        raise InputError(f"{file}: damaged or edited: its checksum does not fit its content; {REMEDY}")
    if manifest["version"] not in (VERSION, MASKED_VERSION):
        known = f"{VERSION} and {MASKED_VERSION}"
        raise InputError(f"{file}: format version {manifest['version']}, this program reads {known}; prepare the packs again")
    try:
        PackManifest.model_validate(manifest, strict=True)
    except ValidationError as error:
        raise InputError(f"{file}: not a manifest of packs: {first_mistake(error)}; {REMEDY}") from None
    return manifest
