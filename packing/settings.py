"""The `data` section of a training recipe: where tokens come from and how they are packed."""

from __future__ import annotations

import os
import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from foundation.settings import FilePath, PathText, PositiveCount, Settings, Share

# what can be a repository on the Hugging Face hub; else it is a path
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
SOURCE_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*$")
_RECORD = ("messages", "input_ids", "labels", "text")  # the keys that say what a record holds


def split_revision(name: str) -> tuple[str, str | None]:
    """`name@revision` of a hub repository as its two parts; None where no revision is named, as by a path that exists."""
    repository, _, revision = name.partition("@")
    return (repository, revision) if revision and not os.path.exists(name) else (name, None)


class SourceSettings(Settings):
    """Which documents, and what a record of them is."""

    # File, folder or Hugging Face dataset, as `name` or `name@revision` (branch, tag or commit); null: `packs` exist.
    source: Annotated[PathText, Field(min_length=1)] | None = None
    subset: str | None = None  # Hugging Face datasets: the config's name
    split: str = "train"  # Hugging Face datasets
    # a column, or a template over columns: `"{title}\n\n{body}"`. An EOS token follows each text. A
    # special token that a text spells out, such as `<|endoftext|>`, becomes that token's id, as is
    # Hugging Face's default.
    text: str = "text"
    # A chat instead of `text`, of whose tokens the assistant's have a loss: the column with a list of {role, content}, or a list
    # of two, prompt and response, each a column or a template over columns.
    messages: str | tuple[str, ...] | None = None
    # Of a chat: chatml, a Jinja file, the name of one of the tokenizer's templates, or the template
    # itself; null: the tokenizer's own, of several the one named default.
    chat_template: PathText | None = None

    # Tokens instead of `text`, as they are, of a source that is tokenized already:
    # tokens instead of `text`: column with a record's ids, of the tokenizer that `tokenizer` names
    input_ids: str | None = None
    # Column with the same ids and -100 where there is no loss; null: `labels`, if the source has
    # such a column. docs/data.md lists the columns that are read beside it.
    labels: str | None = None

    @property
    def masks(self) -> bool:
        """Whether some tokens have no loss because of what the source says of them."""
        return self.messages is not None or self.labels is not None

    def changed(self, names: tuple[str, ...]) -> list[str]:
        """Returns which of the settings `names` are not at their defaults."""
        return [
            name for name in names if getattr(self, name) != type(self).model_fields[name].default
        ]

    @model_validator(mode="after")
    def _one_kind_of_record(self) -> SourceSettings:
        if len(kinds := self.changed(("input_ids", "messages", "text"))) > 1:
            raise ValueError(
                f"`{kinds[0]}` and `{kinds[1]}` are both set; a record is one thing: leave one of them out"
            )
        if isinstance(self.messages, tuple) and len(self.messages) != 2:
            raise ValueError(
                f"`messages` lists {len(self.messages)}; name one column, or two: [prompt, response]"
            )
        if self.labels is not None and self.input_ids is None:
            raise ValueError(
                "`labels`: for sources that are tokenized; set `input_ids`, or leave it out"
            )
        return self


class WeightedSource(SourceSettings):
    """One of several sources to train on."""

    # The folder of its packs and its name in figures; null: the last part of `source`, without suffixes.
    name: Annotated[str, Field(pattern=SOURCE_NAME.pattern)] | None = None
    weight: float = Field(gt=0)  # its share of the tokens, relative to the other sources' weights


class StreamingSettings(Settings):
    """Packs that are made while the run trains, of more text than the disk holds. At the end of the text it begins again."""

    # GB (10^9 bytes) that packs take on the disk of each machine, at most
    disk_gb: float = Field(20.0, gt=0)
    # Tokens of a part, which is packed and shuffled by itself. Several sources share them by weight.
    window: PositiveCount = 2**26


class DataSettings(SourceSettings):
    """Settings that say where tokens come from and how they are packed.

    `packs` alone reads packs that exist (Arrow, MDS, token .bin). With `source` and `tokenizer` they are prepared into `packs` on
    first use. `tokenizer` without `source` names the one that existing packs were made with, to read prompts and to export.
    """

    # folder of packs (Arrow, MDS) or token .bin file; where packs are prepared if `source` is set
    packs: FilePath
    length: PositiveCount = 4096  # tokens of a pack
    # share set apart for evaluation: of documents where packs are prepared, else of packs
    held_out: Share = 0.0
    # no loss where the last token of a document would predict the first of the next
    mask_boundaries: bool = True

    # Several sources in place of `source`, each with its own keys from `source` to `labels`. Keys that it leaves out are taken
    # from `data`, except those of another kind of record. Its packs are prepared into `packs`/name.
    sources: Annotated[tuple[WeightedSource, ...], Field(min_length=1)] | None = None
    # What to evaluate on in place of `held_out`: a `source` of its own, or another `split` of the same, with the keys up to
    # `labels`. Keys that it leaves out are those of `data`; `subset` and `split` are not, for another source. Its packs are in a
    # folder beside `packs`, with `-validation` behind its name.
    validation: SourceSettings | None = None
    # true: a Hugging Face dataset is read without a download first, and all packs are made before the run. A mapping, of any
    # source: packs are made while the run trains, on a bounded disk.
    streaming: bool | StreamingSettings = False
    # Hub name, folder, or tokenizer.json. Its EOS token ends the documents of a token .bin, and of
    # MDS without columns that say what a document is. Without a tokenizer, each of their packs is
    # one document.
    tokenizer: PathText | None = None
    # truncate: documents one after another, cut where a pack is full; best_fit: whole documents where they fit, little is cut.
    packing: Literal["truncate", "best_fit"] = "truncate"
    # a record that cannot be read: stop, or leave it out and count it
    on_bad_line: Literal["error", "skip"] = "error"

    @property
    def stream(self) -> StreamingSettings | None:
        """How packs are made while the run trains; None where all are made before."""
        return self.streaming if isinstance(self.streaming, StreamingSettings) else None

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of the tokens that each source has which is trained on."""
        return tuple(each.weight for each in self.sources) if self.sources else (1.0,)

    @property
    def prepares(self) -> bool:
        """Whether something is to be prepared before packs can be opened."""
        return self.validation is not None or any(
            each.source is not None for each in (self, *(self.sources or ()))
        )

    @model_validator(mode="before")
    @classmethod
    def _fill_sources(cls, values: Any) -> Any:
        """Gives each source, and `validation`, the keys of `data` that it leaves open."""
        if not isinstance(values, dict):
            return values
        filled, validation = dict(values), values.get("validation")
        if isinstance(values.get("sources"), (list, tuple)):
            filled["sources"] = [_filled(values, own) for own in values["sources"]]
        if isinstance(validation, dict):
            same = {"source": values.get("source")} if validation.get("source") is None else {}
            filled["validation"] = _filled(values, validation | same)
        return filled

    @field_validator("sources")
    @classmethod
    def _normalise_weights(
        cls, sources: tuple[WeightedSource, ...] | None
    ) -> tuple[WeightedSource, ...] | None:
        total = sum(each.weight for each in sources or ())
        # shares already: to the bit as they are written
        if sources is None or abs(total - 1) < 1e-9:
            return sources
        return tuple(each.model_copy(update={"weight": each.weight / total}) for each in sources)

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
                "`held_out` and `validation` are both set; evaluate on a share of the text, or on other text"
            )
        if self.validation is not None and _rows_of(self.validation) in map(
            _rows_of, self.sources or (self,)
        ):
            also = f"`validation`: {self.validation.source} is also trained on"
            raise ValueError(f"{also}; name another file or split, or set `held_out` instead")
        return self


def _rows_of(source: SourceSettings) -> tuple[str | None, ...]:
    return os.path.realpath(str(source.source)), source.subset, source.split


def _filled(common: dict[str, Any], own: Any) -> Any:
    """`own` keys of a source, and those of `common` that it leaves open. Its own kind of record displaces any other kind, and
    `subset` and `split` belong to `common`'s source alone."""
    if not isinstance(own, dict) or own.get("source") is None:  # packs that exist
        return own
    keys = {key for key in SourceSettings.model_fields if key in common and key != "source"}
    if common.get("source") not in (None, own["source"]):
        keys -= {"subset", "split"}
    if any(own.get(key) is not None for key in _RECORD):
        keys -= {*_RECORD, *(() if own.get("messages") else ("chat_template",))}
    return {key: common[key] for key in keys} | own
