"""The `data` section of a training recipe: where tokens come from and how they are packed."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from foundation.settings import (
    CopiedPath,
    PathText,
    PositiveCount,
    Settings,
    Share,
    TemplateText,
    at_home,
)
from foundation.storage import address_of, is_address

# Pattern of the names of repositories on the Hugging Face hub. Any other name is a path.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SOURCE_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*$")
# File that a folder of packs has. `packing.arrow` writes it.
MANIFEST = "packs.json"
# First characters of files and folders that are not read as a part of a source.
_HIDDEN = (".", "__pycache__", "lost+found")
# Templates of a prompt and its response.
TemplatePair = Annotated[tuple[TemplateText, ...], Field(min_length=2, max_length=2)]
# Keys that determine the kind of a record.
RECORD = ("messages", "input_ids", "text")


def split_revision(name: str) -> tuple[str, str | None]:
    """Split `name@revision` into the name and the revision of a hub repository.

    The revision is None if `name` has none, or if `name` is an existing path.
    """
    repository, _, revision = name.partition("@")
    if not revision or os.path.exists(name):
        return name, None
    return repository, revision


def files_of(name: str) -> list[Path]:
    """Return the files of a source in order: a file, or all files of a folder or pattern.

    In a pattern, `**` stands for any number of folders. Links to folders are followed. A file that
    can be reached through several folders is returned once. Hidden files, and inner folders of
    packs, do not match. The list is empty if nothing exists. Raises OSError if a folder cannot be
    read.
    """
    paths = [Path(name)]
    parts: list[str] = []
    if os.path.isdir(name):
        parts = ["**", "*"]
    elif not os.path.lexists(name) and glob.has_magic(name):
        paths = [Path()]
        parts = [*Path(name).parts]
        # A `**` stands for folders, so `*` selects the files in them.
        if name.endswith("**"):
            parts.append("*")
    for part in parts:
        step = _folders_below if part == "**" else partial(_matches, part)
        paths = [inner for path in paths if path.is_dir() for inner in step(path)]
    parents = sorted({path.parent for path in paths}, reverse=True)
    # Keep the first path to each real folder: in a dict, a later item replaces an earlier one.
    kept = {*{os.path.realpath(parent): parent for parent in parents}.values()}
    # Return links to missing files too, so that they are reported when they are read.
    files = {path for path in paths if path.is_file() or (path.is_symlink() and not path.exists())}
    return sorted(path for path in files if path.parent in kept)


def _matches(part: str, folder: Path) -> Iterator[Path]:
    """Yield the paths in `folder` whose names match `part`. Hidden names need an exact match."""
    for name in os.listdir(folder) if glob.has_magic(part) else [part]:
        is_hidden = name.startswith(_HIDDEN) and not part.startswith(".")
        if name == part or (fnmatch(name, part) and not is_hidden):
            yield folder / name


def _folders_below(folder: Path) -> Iterator[Path]:
    """Yield `folder` and the folders below it, without hidden folders and folders of packs.

    A real folder is yielded once. Links are followed last, so that a folder beside links to it is
    yielded under its own name.
    """
    visited = set()
    pending = [folder]
    while pending:
        folder = pending.pop()
        real = os.path.realpath(folder)
        if real in visited:
            continue
        visited.add(real)
        yield folder
        inner = [
            path
            for path in folder.iterdir()
            if path.is_dir()
            and not path.name.startswith(_HIDDEN)
            and not os.path.exists(path / MANIFEST)
        ]
        pending += sorted(inner, key=lambda path: (path.is_symlink(), path), reverse=True)


class SourceSettings(Settings):
    """A source of documents, and the kind of its records."""

    REMOVED: ClassVar = {"labels": None}

    source: Annotated[PathText, Field(min_length=1)] | None = None
    """File, folder, pattern such as `my_text/*.txt`, or Hugging Face dataset.

    Files may be in object storage: s3://, gs:// or hf:// (docs/several_gpus.md).
    A dataset is `name` or `name@revision` (branch, tag or commit).
    null: `packs` already exist.
    """

    subset: str | None = None
    """Name of a config of a Hugging Face dataset."""

    split: str = "train"
    """Split of a Hugging Face dataset.

    The files of a split are chosen by a pattern as `source`.
    """

    text: TemplateText = "text"
    r"""Column with a text, or a template with columns, such as `"{title}\n\n{body}"`.

    In a template, `\n` is a line break and `\t` a tab. An EOS token ends each document. A document
    begins with a BOS token only if the template has one: `"<s>{text}"`. A special token in the
    text, such as `<|endoftext|>`, becomes the id of the token, as is the default at Hugging Face.
    """

    messages: TemplateText | TemplatePair | None = None
    """Chats instead of `text`: a column with a list of {role, content}, or [prompt, response].

    Prompt and response are columns with a text, or templates with columns. Only the tokens of the
    assistant's messages have a loss.
    null: chats are recognised by their columns.
    """

    chat_template: Annotated[TemplateText, BeforeValidator(at_home)] | None = None
    """Template of chats: plain, chatml, a Jinja file, or a template itself.

    null: the tokenizer's template.
    """

    input_ids: str | None = None
    """Tokens instead of `text`: a column with the token ids of a record.

    `tokenizer` must be the one that made these ids. docs/data.md lists the columns that mark
    padding, documents and tokens without a loss, such as `labels`.
    """

    def changed(self, names: tuple[str, ...]) -> list[str]:
        """Return the settings in `names` that do not have their default value."""
        return [
            name for name in names if getattr(self, name) != type(self).model_fields[name].default
        ]

    @model_validator(mode="after")
    def _one_kind_of_record(self) -> SourceSettings:
        kinds = self.changed(("input_ids", "messages", "text"))
        if len(kinds) > 1:
            raise ValueError(
                f"`{kinds[0]}` and `{kinds[1]}` are both set, but a record has only one of them; "
                "remove one"
            )
        return self


class WeightedSource(SourceSettings):
    """One of several sources to train on."""

    name: Annotated[str, Field(pattern=SOURCE_NAME.pattern)] | None = None
    """Name of the source in metrics, and of the folder of its packs.

    null: the last part of `source` without suffixes.
    """

    weight: float = Field(gt=0)
    """Share of the tokens, relative to the weights of other sources."""


class StreamingSettings(Settings):
    """Settings of packs that are made while the run trains.

    At the end of the text, reading continues at its beginning.
    """

    disk_gb: float = Field(20.0, gt=0)
    """Largest size of all packs on the disk, in GB (10^9 bytes)."""

    window: PositiveCount = 2**26
    """Number of tokens in a part.

    Each part is packed and shuffled separately. Several sources share this number in proportion to
    their weights.
    """


class DataSettings(SourceSettings):
    """Source of the tokens, and how they are packed.

    With `packs` alone, existing packs are read (Arrow, MDS, token files). With `source` and
    `tokenizer`, packs are prepared on first use. If `tokenizer` is set without `source`, it is
    the tokenizer of existing packs. The run encodes prompts with it and exports it.
    """

    REMOVED: ClassVar = SourceSettings.REMOVED | {"weights_until": None, "on_bad_line": "error"}

    packs: CopiedPath
    """Folder of packs (Arrow, MDS), or a token file (.bin, .npy).

    With `source`, packs are prepared in it. Packs that exist may be in object storage (s3://...).
    """

    length: PositiveCount = 4096
    """Number of tokens in a pack."""

    held_out: Share = 0.0
    """Share of the data that is held out for evaluation.

    It is a share of the documents, or of existing packs.
    """

    mask_boundaries: bool = True
    """Do not use the first token of a document as a label.

    It would be predicted from another document.
    """

    sources: Annotated[tuple[WeightedSource, ...], Field(min_length=1)] | None = None
    """Several sources instead of `source`, each with its own keys from `source` to `input_ids`.

    Keys that a source does not set are taken from `data`, except columns of another kind of record,
    such as chats instead of text. The packs of a source are in the folder `packs`/name.
    """

    validation: SourceSettings | None = None
    """Text for evaluation instead of `held_out`.

    Set another `source`, or another `split` of the same source, with the keys from `source` to
    `input_ids`. Keys that are not set are taken from `data`, except `subset` and `split` if
    `validation` sets another `source`. The packs are in a folder beside `packs`, whose name ends
    with `-validation`.
    """

    streaming: bool | StreamingSettings = False
    """Read the source as a stream.

    true: read a Hugging Face dataset over the network without storing it, and make all packs before
    the run.
    A mapping, for any source: make packs while the run trains, and limit their size on the disk.
    """

    tokenizer: PathText | None = None
    """Hub name, folder, or tokenizer.json.

    In a token file without an index, and in MDS packs without columns that mark documents, each EOS
    token of this tokenizer ends a document, or begins one if the data begin with EOS. If no
    tokenizer is set, each pack of such files is one document.
    """

    token_dtype: Literal["uint16", "uint32", "int64"] | None = None
    """Dtype of the ids in token files that do not record it, such as nanoGPT's `train.bin`.

    int32 is read as uint32.
    null: files have a header, or an index beside them.
    """

    packing: Literal["truncate", "best_fit"] | None = None
    """Arrangement of documents in packs.

    truncate: documents are concatenated and cut where a pack is full.
    best_fit: only documents longer than a pack are cut.
    null: best_fit for chats, truncate for other documents.
    """

    # Keys whose values a source has in common with the `data` section. Empty in the section itself.
    _common: frozenset[str] = PrivateAttr(frozenset())

    @property
    def stream(self) -> StreamingSettings | None:
        """Settings of packs that are made while the run trains, or None if they are made before."""
        return self.streaming if isinstance(self.streaming, StreamingSettings) else None

    @property
    def streamed(self) -> StreamingSettings:
        """The value of `stream`, which must not be None."""
        assert self.stream is not None
        return self.stream

    @property
    def shares(self) -> tuple[float, ...]:
        """Intended share of each training source in the tokens."""
        return tuple(source.weight for source in self.sources) if self.sources else (1.0,)

    @property
    def prepares(self) -> bool:
        """True if a source is set. `packing.prepare` makes missing packs from it."""
        return self.validation is not None or any(
            source.source is not None for source in (self, *(self.sources or ()))
        )

    def for_source(self, source: SourceSettings, packs: Path, **changes: Any) -> DataSettings:
        """Return a copy of the settings for one source, whose packs are in the folder `packs`.

        `changes` maps the names of other settings to their values for this source.
        """
        values = {key: getattr(source, key) for key in SourceSettings.model_fields}
        copy = self.model_copy(update=values | {"sources": None, "packs": packs} | changes)
        copy._common = frozenset(
            key for key, value in values.items() if value == getattr(self, key)
        )
        return copy

    def chosen(self, names: tuple[str, ...]) -> list[str]:
        """Return the settings in `names` that are not defaults and were set for this source.

        The values of the `data` section are excluded. They apply only to the sources that they
        suit.
        """
        return [name for name in self.changed(names) if name not in self._common]

    @model_validator(mode="before")
    @classmethod
    def _fill_sources(cls, values: Any) -> Any:
        """Copy keys of `data` to each source and to `validation` if these do not set the keys."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        validation = values.get("validation")
        if isinstance(values.get("sources"), (list, tuple)):
            filled["sources"] = [_filled(values, source) for source in values["sources"]]
        if isinstance(validation, dict):
            if validation.get("source") is None:
                # Validation on another split of the training source.
                validation = validation | {"source": values.get("source")}
            filled["validation"] = _filled(values, validation)
        return filled

    @field_validator("sources")
    @classmethod
    def _normalise_weights(
        cls, sources: tuple[WeightedSource, ...] | None
    ) -> tuple[WeightedSource, ...] | None:
        total = sum(source.weight for source in sources or ())
        # If the sum of the weights is 1, a division would only add rounding errors.
        if sources is None or abs(total - 1) < 1e-9:
            return sources
        return tuple(
            source.model_copy(update={"weight": source.weight / total}) for source in sources
        )

    @model_validator(mode="after")
    def _reject_contradictions(self) -> DataSettings:
        if self.source is not None and self.sources is not None:
            raise ValueError(
                "`source` and `sources` are both set; either set `source` to one source, or set "
                "`sources` to several sources with weights"
            )
        if self.prepares and self.tokenizer is None:
            raise ValueError(
                "`source` is set but `tokenizer` is not; set both, because packs are prepared from "
                "text with a tokenizer"
            )
        packs = address_of(self.packs)
        if self.prepares and is_address(packs):
            raise ValueError(
                f"`packs`: {packs} is an address, but packs are prepared on this machine; set "
                "`packs` to a folder"
            )
        if self.validation is not None and self.held_out:
            raise ValueError(
                "`held_out` and `validation` are both set; either set `held_out` to evaluate on a "
                "share of the text, or set `validation` to evaluate on other text"
            )
        return self


def _filled(data: dict[str, Any], source: Any) -> Any:
    """Return `source`, with missing keys taken from the `data` section.

    If `source` sets the kind of its records, keys of other kinds are not taken. The keys `subset`
    and `split` are not taken if `data` sets another `source`.
    """
    # Return a source without a key `source` unchanged, because its packs already exist.
    if not isinstance(source, dict) or source.get("source") is None:
        return source
    keys = {key for key in SourceSettings.model_fields if key in data and key != "source"}
    if data.get("source") not in (None, source["source"]):
        keys -= {"subset", "split"}
    if any(source.get(key) is not None for key in RECORD):
        keys -= {*RECORD}
        if not source.get("messages"):
            keys.discard("chat_template")
    return {key: data[key] for key in keys} | source


# TOKEN_KEYS are settings that determine the tokens of a source. LAYOUT_KEYS are settings that
# determine how the tokens are divided into packs.
TOKEN_KEYS = (*SourceSettings.model_fields, "tokenizer")
LAYOUT_KEYS = ("length", "packing", "held_out")


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return `key: before -> now` for each key whose value differs, separated by semicolons."""
    changes = []
    for name in dict.fromkeys([*before, *now]):
        earlier, present = before.get(name), now.get(name)
        if earlier != present:
            changes.append(f"{name}: {earlier} -> {present}")
    return "; ".join(changes)
