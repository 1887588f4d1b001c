"""The `data` section of a training recipe: where tokens come from and how they are packed."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from foundation.settings import FilePath, PathText, PositiveCount, Settings, Share

# Names of repositories on the Hugging Face hub. Any other name is a path.
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SOURCE_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*$")
_RECORD = ("messages", "input_ids", "labels", "text")  # keys that decide the kind of a record


def split_revision(name: str) -> tuple[str, str | None]:
    """Return name and revision of a hub repository, written as `name@revision`.

    The revision is None if `name` has none, or is a path that exists.
    """
    repository, _, revision = name.partition("@")
    if not revision or os.path.exists(name):
        return name, None
    return repository, revision


class SourceSettings(Settings):
    """A source of documents, and the kind of its records."""

    # File, folder or Hugging Face dataset, as `name` or `name@revision` (branch, tag or commit);
    # null: `packs` exist.
    source: Annotated[PathText, Field(min_length=1)] | None = None
    subset: str | None = None  # Hugging Face datasets: the config's name
    split: str = "train"  # Hugging Face datasets
    # A column, or a template over columns: `"{title}\n\n{body}"`. An EOS token follows each
    # document. A special token in the text, such as `<|endoftext|>`, becomes the id of that token,
    # as is Hugging Face's default.
    text: str = "text"
    # A chat instead of `text`: the column with a list of {role, content}, or a list of two, prompt
    # and response, each a column or a template over columns. Only the assistant's tokens have a
    # loss.
    messages: str | tuple[str, ...] | None = None
    # Template of chats: chatml, a Jinja file, the name of one of the tokenizer's templates, or the
    # template itself; null: the tokenizer's template, or its template named default.
    chat_template: PathText | None = None

    # Tokens instead of `text`: the column with the ids of a record, made with `tokenizer`.
    input_ids: str | None = None
    # Column with the same ids, or -100 for a token without a loss; null: `labels`, if the source
    # has this column. docs/data.md lists other columns that are read.
    labels: str | None = None

    @property
    def masks(self) -> bool:
        """True if the source decides which tokens have a loss."""
        return self.messages is not None or self.labels is not None

    def changed(self, names: tuple[str, ...]) -> list[str]:
        """Return the names of settings that do not have their default value."""
        return [
            name for name in names if getattr(self, name) != type(self).model_fields[name].default
        ]

    @model_validator(mode="after")
    def _one_kind_of_record(self) -> SourceSettings:
        kinds = self.changed(("input_ids", "messages", "text"))
        if len(kinds) > 1:
            raise ValueError(
                f"`{kinds[0]}` and `{kinds[1]}` are both set; a record is one thing: "
                "leave one of them out"
            )
        if isinstance(self.messages, tuple) and len(self.messages) != 2:
            raise ValueError(
                f"`messages` lists {len(self.messages)}; "
                "name one column, or two: [prompt, response]"
            )
        if self.labels is not None and self.input_ids is None:
            raise ValueError(
                "`labels`: for sources that are tokenized; set `input_ids`, or leave it out"
            )
        return self


class WeightedSource(SourceSettings):
    """One of several sources to train on."""

    # Name of the folder of its packs, and in metrics; null: the last part of `source` without
    # suffixes.
    name: Annotated[str, Field(pattern=SOURCE_NAME.pattern)] | None = None
    weight: float = Field(gt=0)  # share of the tokens, relative to the weights of other sources


class StreamingSettings(Settings):
    """Packs that are made while the run trains. When the text ends, it is read again."""

    disk_gb: float = Field(20.0, gt=0)  # largest size of all packs on the disk, in GB (10^9 bytes)
    # Tokens of a part. Each part is packed and shuffled separately. Several sources share the
    # tokens by weight.
    window: PositiveCount = 2**26


class DataSettings(SourceSettings):
    """Where tokens come from, and how they are packed.

    `packs` alone reads packs that exist (Arrow, MDS, token .bin). With `source` and `tokenizer`,
    packs are prepared on first use. `tokenizer` without `source` names the tokenizer of existing
    packs, to read prompts and to export.
    """

    # Folder of packs (Arrow, MDS), or a token .bin file. With `source`, packs are prepared there.
    packs: FilePath
    length: PositiveCount = 4096  # tokens of a pack
    # Share held out for evaluation: of the documents if packs are prepared, else of the packs.
    held_out: Share = 0.0
    # true: the first token of a document is no label, since another document would predict it.
    mask_boundaries: bool = True

    # Several sources instead of `source`, each with its own keys from `source` to `labels`. Other
    # keys are taken from `data`, except keys of another kind of record. The packs of a source are
    # in `packs`/name.
    sources: Annotated[tuple[WeightedSource, ...], Field(min_length=1)] | None = None
    # Text to evaluate on instead of `held_out`: another `source`, or another `split` of the same
    # one, with the keys up to `labels`. Other keys are taken from `data`, but not `subset` and
    # `split` for another source. Its packs are beside `packs`, in a folder with `-validation` at
    # the end of its name.
    validation: SourceSettings | None = None
    # true: a Hugging Face dataset is read without a download, and all packs are made before the
    # run. A mapping, for any source: packs are made while the run trains, on a bounded disk.
    streaming: bool | StreamingSettings = False
    # Hub name, folder, or tokenizer.json. Its EOS token ends the documents of a token .bin file,
    # and of MDS packs without columns that mark documents. Without a tokenizer, each of their packs
    # is one document.
    tokenizer: PathText | None = None
    # truncate: documents follow one another and are cut where a pack is full; best_fit: only
    # documents longer than a pack are cut.
    packing: Literal["truncate", "best_fit"] = "truncate"
    # If a record cannot be read: stop, or skip the record and count it.
    on_bad_line: Literal["error", "skip"] = "error"

    @property
    def stream(self) -> StreamingSettings | None:
        """Settings of packs that are made while the run trains, or None if all are made before."""
        return self.streaming if isinstance(self.streaming, StreamingSettings) else None

    @property
    def streamed(self) -> StreamingSettings:
        """The value of `stream`, for packs that are made while the run trains."""
        assert self.stream is not None
        return self.stream

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each training source in the tokens."""
        return tuple(source.weight for source in self.sources) if self.sources else (1.0,)

    @property
    def prepares(self) -> bool:
        """True if packs must be prepared before they can be opened."""
        sources = (self, *(self.sources or ()))
        return self.validation is not None or any(part.source is not None for part in sources)

    @model_validator(mode="before")
    @classmethod
    def _fill_sources(cls, values: Any) -> Any:
        """Give each source, and `validation`, the keys of `data` that it does not have."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        validation = values.get("validation")
        if isinstance(values.get("sources"), (list, tuple)):
            filled["sources"] = [_filled(values, source) for source in values["sources"]]
        if isinstance(validation, dict):
            same = {"source": values.get("source")} if validation.get("source") is None else {}
            filled["validation"] = _filled(values, validation | same)
        return filled

    @field_validator("sources")
    @classmethod
    def _normalise_weights(
        cls, sources: tuple[WeightedSource, ...] | None
    ) -> tuple[WeightedSource, ...] | None:
        total = sum(source.weight for source in sources or ())
        # Weights that are shares keep their bits.
        if sources is None or abs(total - 1) < 1e-9:
            return sources
        return tuple(
            source.model_copy(update={"weight": source.weight / total}) for source in sources
        )

    @model_validator(mode="after")
    def _sources_are_whole(self) -> DataSettings:
        if self.source is not None and self.sources is not None:
            raise ValueError(
                "`source` and `sources` are both set; name one source, or several with weights"
            )
        if self.prepares and self.tokenizer is None:
            raise ValueError("`source` is set but `tokenizer` is not; preparing packs needs both")
        if self.validation is not None and self.held_out:
            raise ValueError(
                "`held_out` and `validation` are both set; evaluate on a share of the text, "
                "or on other text"
            )
        if self.validation is not None:
            for source in self.sources or (self,):
                if _share_rows(source, self.validation):
                    raise ValueError(
                        f"`validation`: {self.validation.source} is also trained on, as "
                        f"{source.source} is read; name another file or split, or set `held_out` "
                        "instead"
                    )
        return self


def _share_rows(one: SourceSettings, other: SourceSettings) -> bool:
    """Return whether two sources are the same, or a file or folder and one inside it.

    The folders inside a dataset of `save_to_disk` are its splits.
    """
    first, second = (Path(os.path.realpath(str(source.source))) for source in (one, other))
    if first == second:
        return (one.subset, one.split) == (other.subset, other.split)
    is_inside = first in second.parents or second in first.parents
    outer = min(first, second, key=lambda path: len(path.parts))
    return is_inside and outer.is_dir() and not (outer / "dataset_dict.json").exists()


def _filled(data: dict[str, Any], source: Any) -> Any:
    """Return the keys of a source, completed by keys of the `data` section.

    A source with a kind of record takes no key of another kind. `subset` and `split` belong to the
    source of `data` alone.
    """
    if not isinstance(source, dict) or source.get("source") is None:  # Its packs exist.
        return source
    keys = {key for key in SourceSettings.model_fields if key in data and key != "source"}
    if data.get("source") not in (None, source["source"]):
        keys -= {"subset", "split"}
    if any(source.get(key) is not None for key in _RECORD):
        keys -= {*_RECORD}
        if not source.get("messages"):
            keys.discard("chat_template")
    return {key: data[key] for key in keys} | source


# The settings that decide the tokens of a source, and their place in packs.
TOKEN_KEYS = (*SourceSettings.model_fields, "tokenizer", "on_bad_line")
LAYOUT_KEYS = ("length", "packing", "held_out")


def describe_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return `name: before -> now` for every key whose value differs."""
    names = dict.fromkeys([*before, *now])
    return "; ".join(
        f"{name}: {before.get(name)} -> {now.get(name)}"
        for name in names
        if before.get(name) != now.get(name)
    )
