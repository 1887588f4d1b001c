"""The `data` section of a training recipe: where tokens come from and how they are packed."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from foundation.settings import FilePath, PathText, PositiveCount, Seed, Settings, Share, TextOrPath

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # what can be a repository on the Hugging Face hub; else it is a path
Positions = Literal["restart", "continue"]
SOURCE_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*$")
# The keys of each kind of record, of which a source has one. `text` has a default, so any other that is said counts before it.
_KINDS = (("input_ids", "labels", "document_lengths"), ("prompt", "response"), ("messages",), ("text",))
_CHAT = ("train_on", "chat_template")  # of both kinds of chat
_PLACE = ("format", "subset", "split", "revision")  # of the one place that `source` names

# The settings that are used only to prepare packs from a source.
_FOR_PREPARING = (
    *("format", "subset", "split", "revision", "streaming", "text", "on_bad_line", "processes"),
    *("messages", "prompt", "response", "train_on", "chat_template", "input_ids", "labels", "document_lengths"),
    *("packing", "positions", "add_bos", "add_eos", "shuffle", "seed"),
)


class SourceSettings(Settings):
    """Which documents, and what a record of them is."""

    source: PathText | None = None  # file, folder or Hugging Face dataset name; null: `packs` exist
    format: Literal["auto", "jsonl", "parquet", "text", "dataset"] = "auto"  # auto: by the files' suffixes
    subset: str | None = None  # Hugging Face datasets: the config's name
    split: str = "train"  # Hugging Face datasets
    revision: str | None = None  # Hugging Face datasets: branch, tag or commit of the hub's repository; null: its newest
    # A special token that a text spells out, such as `<|endoftext|>`, becomes that token's id, as is Hugging Face's default.
    text: str = "text"  # a column, or a template over columns: `"{title}\n\n{body}"`.
    # A chat instead of `text`: written out by a chat template, which puts in what BOS and EOS it wants:
    messages: str | None = None  # a chat instead of `text`: column with a list of {role, content}
    prompt: str | None = None  # with `response`, a chat of two messages: a column, or a template over columns, for each
    response: str | None = None  # what answers `prompt`
    train_on: Literal["response", "all"] = "response"  # of a chat: the loss is that of the assistant's tokens, or of all
    chat_template: TextOrPath | None = None  # of a chat: a Jinja file, or the template itself; null: the tokenizer's own

    # Tokens instead of `text`, as they are, of a source that is tokenized already:
    input_ids: str | None = None  # tokens instead of `text`: column with a record's ids, of the tokenizer that `tokenizer` names
    labels: str | None = None  # column with the same ids and -100 where there is no loss; null: every token is trained on
    document_lengths: str | None = None  # column with the lengths of a record's documents; null: a record is one

    @property
    def is_chat(self) -> bool:
        return self.messages is not None or self.prompt is not None

    @property
    def masks(self) -> bool:
        """Whether some tokens have no loss because of what the source says of them."""
        return (self.is_chat and self.train_on == "response") or self.labels is not None

    @property
    def kind(self) -> tuple[str, ...] | None:
        """The keys of the kind of record that is said here; None where none is. A run's config.yaml says `text` beside any other
        kind."""
        said = (kind for kind in _KINDS if any(getattr(self, key) is not None for key in self.model_fields_set & set(kind)))
        return next(said, None)

    @model_validator(mode="after")
    def _one_kind_of_record(self) -> SourceSettings:
        if len(kinds := [keys[0] for kind in reversed(_KINDS) if (keys := self.changed(kind))]) > 1:
            raise ValueError(f"`{kinds[0]}` and `{kinds[1]}` are both set; a record is one thing: leave one of them out")
        return self

    def incomplete(self) -> tuple[str, str] | None:
        """A key that needs another one, which is not set, and what is wrong; None where all is there."""
        if (self.prompt is None) != (self.response is None):
            given, lacking = ("prompt", "response") if self.response is None else ("response", "prompt")
            return given, f"`{given}` is set but `{lacking}` is not; a chat of two messages needs both"
        if self.input_ids is None and (idle := self.changed(("labels", "document_lengths"))):
            return idle[0], f"`{idle[0]}`: for sources that are tokenized; set `input_ids`, or leave it out"
        return None

    def changed(self, names: tuple[str, ...]) -> list[str]:
        """Returns which of the settings `names` are not at their defaults."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]


class NamedSource(SourceSettings):
    """One of several sources."""

    # The folder of its packs and its name in figures; null: the last part of `source`, without suffixes.
    name: Annotated[str, Field(pattern=SOURCE_NAME.pattern)] | None = None

    @model_validator(mode="after")
    def _has_a_name(self) -> NamedSource:
        if self.name is None and self.source is None:
            raise ValueError("a source needs `source`, or the `name` of packs that exist")
        return self


class WeightedSource(NamedSource):
    """One of several sources to train on."""

    weight: float = Field(gt=0, le=1)  # its share of the tokens; those of all sources add up to 1


class ValidationSettings(SourceSettings):
    """What to evaluate on: a source, another split of the one that is trained on, or several sources."""

    # Several in place of `source`, each evaluated by itself too: its loss is `held_out_loss/NAME`.
    sources: tuple[NamedSource, ...] | None = None

    @model_validator(mode="after")
    def _sources_say_it_all(self) -> ValidationSettings:
        if self.sources is None:
            return self
        if not self.sources:
            raise ValueError("`sources` is empty; name some, or one `source`")
        if beside := self.changed(tuple(SourceSettings.model_fields)):  # a run's config.yaml says every key
            raise ValueError(f"`sources` and `{beside[0]}` are both set; put `{beside[0]}` into each source, or leave it out")
        return self


class StreamingSettings(Settings):
    """Packs that are made while the run trains, of more text than the disk holds."""

    disk_gb: float = Field(20.0, gt=0)  # GB (10^9 bytes) that packs take on the disk of each machine, at most
    # Tokens that are packed, and their packs shuffled, together: a part. Each of several sources has its share of them.
    window: PositiveCount = 2**26
    repeat: bool = False  # at the end of the text begin it again; false: a run that needs more ends there, and says so


class DataSettings(SourceSettings):
    """Settings that say where tokens come from and how they are packed.

    `packs` alone reads packs that exist (Arrow, MDS, token .bin). With `source` and `tokenizer` they are prepared into `packs` on
    first use. `tokenizer` without `source` names the one that existing packs were made with, to read prompts and to export.
    """

    packs: FilePath  # folder of packs (Arrow, MDS) or token .bin file; where packs are prepared if `source` is set
    length: PositiveCount = 4096  # tokens of a pack
    held_out: Share = 0.0  # share set apart for evaluation: of documents where packs are prepared, else of packs
    mask_boundaries: bool = True  # no loss where the last token of a document would predict the first of the next
    # token .bin only: the id that ends a document; null: a pack is one document
    end_token: int | None = Field(None, ge=0, lt=2**32)

    # Several sources in place of `source`, each with keys from `source` to `document_lengths` of its own. What it leaves open is
    # as for all, but for keys of another kind of record than its own. Its packs are prepared into `packs`/name.
    sources: tuple[WeightedSource, ...] | None = None
    # What to evaluate on in place of `held_out`: a `source` of its own, or another `split` of the same, with the keys up to
    # `document_lengths`; or several `sources`, each with a `name`, whose losses also stand apart. What it leaves open is as in
    # `data`; but `format`, `subset`, `split` and `revision` belong to `data.source`, and another source has its own. Its packs
    # are prepared into a folder beside `packs`, with `-validation` behind its name.
    validation: ValidationSettings | None = None
    # true: a Hugging Face dataset is read without a download first, and all packs are made before the run. A mapping, of any
    # source: packs are made while the run trains, on a bounded disk.
    streaming: bool | StreamingSettings = False
    tokenizer: PathText | None = None  # hub name, folder, or tokenizer.json
    # truncate: documents one after another, cut where a pack is full; best_fit: whole documents where they fit, little is cut.
    packing: Literal["truncate", "best_fit"] = "truncate"
    positions: Positions = "restart"  # of a cut document's rest: from 0, or on from where it was cut
    add_bos: bool = False  # a BOS token before each text
    add_eos: bool = True  # an EOS token after each text; chats and tokens have their own
    shuffle: bool = True  # pack documents in an order drawn from `seed`, not in the source's
    seed: Seed = 42  # decides the documents' order and which are held out; runs with several seeds of their own share packs
    on_bad_line: Literal["error", "skip"] = "error"  # a record that cannot be read: stop, or leave it out and count it
    processes: PositiveCount | None = None  # that tokenise; null: one a core, and half as many while a run trains

    @property
    def stream(self) -> StreamingSettings | None:
        """How packs are made while the run trains; None where all are made before."""
        return self.streaming if isinstance(self.streaming, StreamingSettings) else None

    @property
    def prepares(self) -> bool:
        """Whether something is to be prepared before packs can be opened."""
        validates = self.validation is not None
        return self.source is not None or validates or any(each.source is not None for each in self.sources or ())

    def of(self, own: SourceSettings) -> SourceSettings:
        """All that a source has which says `own`: a key that this leaves open is as for all. A kind of record of its own
        displaces the keys of any other kind, and what is no chat has none of a chat's keys. Where `source` is set, `_PLACE`
        belongs to it, and another source has its own."""
        values = {key: getattr(own if key in own.model_fields_set else self, key) for key in SourceSettings.model_fields}
        values["source"] = own.source
        if own.source is None and not isinstance(own, NamedSource):  # of `validation`, where a named one means packs that exist
            values["source"] = self.source
        if self.source not in (None, values["source"]):
            values |= {key: getattr(own, key) for key in _PLACE}
        if own.kind is not None:
            values |= {key: getattr(own, key) for kind in _KINDS if kind != own.kind for key in kind}
        if values["messages"] is None and values["prompt"] is None:
            values |= {key: getattr(own, key) for key in _CHAT}
        return SourceSettings.model_construct(**values)

    @property
    def _beside(self) -> list[tuple[str, SourceSettings]]:
        """Each of `sources` and of `validation` for which packs are prepared, as it is written, by what a message calls it."""
        named = [("sources", each) for each in self.sources or ()]
        if self.validation is not None and self.validation.sources is None:
            named.append(("validation", self.validation))
        elif self.validation is not None:
            named += [("validation.sources", each) for each in self.validation.sources]
        return [
            (f"`{key}` ({own.name or own.source})" if isinstance(own, NamedSource) else f"`{key}`", own)
            for key, own in named
            if self.of(own).source is not None
        ]

    def in_full(self) -> dict[str, Any]:
        """Returns the settings as plain values, with all that each source has: what it leaves open is written out as well, since
        a default that is written is a value like any other when it is read. Read again, they make the same packs."""

        def whole(own: SourceSettings) -> dict[str, Any]:
            part, said = self.of(own), own.model_dump(mode="json")
            return said if part.source is None else said | part.model_dump(mode="json")  # packs that exist are read as they are

        full = self.model_dump(mode="json")
        if self.sources:
            full["sources"] = [whole(each) for each in self.sources]
        if self.validation is not None:
            several = self.validation.sources
            full["validation"] |= {"sources": [whole(each) for each in several]} if several else whole(self.validation)
        return full

    @property
    def without_effect(self) -> list[str]:
        """The keys that are set for all sources, and that none has: each says another value, or is of another kind."""
        parts = [self.of(own) for _, own in self._beside]
        if self.source is not None:
            parts.append(self.of(ValidationSettings()))
        keys = self.changed(tuple(SourceSettings.model_fields)) if parts else []
        return [key for key in keys if all(getattr(part, key) != getattr(self, key) for part in parts)]

    @model_validator(mode="after")
    def _every_setting_is_used(self) -> DataSettings:
        if self.source is None and not self.prepares:
            if unused := self.changed(_FOR_PREPARING):
                raise ValueError(
                    f"`{'`, `'.join(unused)}`: for preparing packs, but no `source` is set; packs that exist stay as they are"
                )
        elif self.source is not None and not self.source:
            raise ValueError("`source` is empty; name a file, folder or dataset, or leave it out to read packs that exist")
        elif self.tokenizer is None:
            raise ValueError("`source` is set but `tokenizer` is not; preparing packs needs both")
        elif self.end_token is not None:
            raise ValueError("`end_token` is for token .bin files; packs that are prepared from a `source` know their documents")
        return self

    @model_validator(mode="after")
    def _sources_are_whole(self) -> DataSettings:
        if self.sources is None:
            return self
        if self.stream and (made := [each.name for each in self.sources if each.source is None]):
            raise ValueError(f"`sources`: {made[0]} names no `source`; with `streaming` packs are made of text, not of packs")
        if self.source is not None:
            raise ValueError("`source` and `sources` are both set; name one source, or several with weights")
        if not self.sources:
            raise ValueError("`sources` is empty; name some, or one `source`")
        if abs((total := sum(each.weight for each in self.sources)) - 1) > 1e-6:
            raise ValueError(
                f"`sources`: the weights add up to {total:.6g}; they are shares of the tokens: make them add up to 1"
            )
        return self

    @model_validator(mode="after")
    def _validates_on_one_thing(self) -> DataSettings:
        if self.validation is None:
            return self
        if self.held_out:
            raise ValueError("`held_out` and `validation` are both set; evaluate on a share of the text, or on other text")
        if self.validation.source is None and self.source is None and self.validation.sources is None:
            raise ValueError("`validation` names no `source`; name one, as there is no single `source` to take another split of")
        if not self.validation.model_fields_set:
            raise ValueError("`validation` is empty; name a `source`, or a `split` of the same one")
        return self

    @model_validator(mode="after")
    def _records_are_whole(self) -> DataSettings:
        """Checks the keys that say what a record holds; last of all, as what each source has is known only where the other keys
        are right."""
        parts = [(where, self.of(own)) for where, own in self._beside]
        for where, part in parts:
            if part.source == "":
                raise ValueError(f"{where}: `source` is empty; name a file, folder or dataset")
            if lacks := part.incomplete():
                raise ValueError(f"{where}: {lacks[1]}")
            if not part.is_chat and (unused := part.changed(_CHAT)):
                raise ValueError(f"{where}: {_for_chats(unused[0])}")
        if (lacks := self.incomplete()) and (self.source or not any(getattr(part, lacks[0]) for _, part in parts)):
            raise ValueError(lacks[1])
        records = [*([self] if self.source is not None or not parts else []), *(part for _, part in parts)]
        if not any(each.is_chat for each in (self, *records)) and (unused := self.changed(_CHAT)):
            raise ValueError(_for_chats(unused[0]))
        if self.add_bos and any(each.is_chat for each in records):
            raise ValueError("`add_bos`: the chat template puts in the BOS token that it wants; leave it out")
        if self.add_bos and any(each.input_ids is not None for each in records):
            raise ValueError("`add_bos`: tokens are taken as they are; leave it out")
        return self


def _for_chats(key: str) -> str:
    return f"`{key}`: for chats; set `messages`, or `prompt` and `response`, or leave it out"
