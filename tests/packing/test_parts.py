"""What each of several sources has: its own keys, then those that are set for all; and that a run's settings say it in full."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pydantic import ValidationError

from foundation.errors import InputError
from packing.manifest import FIRST, read_manifest
from packing.packer import prepare_stream
from packing.parts import check_parts, stream_parts, training_parts, unprepared, validation_parts
from packing.prepare import content_settings, prepare
from packing.settings import DataSettings, SourceSettings
from packing.sources import open_source
from packing.store import open_packs

KINDS = {
    "text": {"text": ["text", "{a}", "b"]},
    "messages": {"messages": ["m", "n"]},
    "pair": {"prompt": ["p", "{q}"], "response": ["r", "s"]},
    "tokens": {"input_ids": ["i", "j"], "labels": ["l", None], "document_lengths": ["d", None]},
}
CHAT = {"train_on": ["response", "all"], "chat_template": ["{{ x }}", "t.jinja", None]}
PLACE = {"subset": ["en", "de", None], "split": ["train", "test"], "revision": ["v1", "v2", None]}
PLACE |= {"format": ["auto", "jsonl", "text"]}
DEFAULTS = {key: field.default for key, field in SourceSettings.model_fields.items()}
COMMON = {"packs": Path("packs"), "tokenizer": "t"}


def some_of(draw: st.DrawFn, keys: dict[str, list[Any]]) -> dict[str, Any]:
    return {key: draw(st.sampled_from(values)) for key, values in keys.items() if draw(st.booleans())}


@st.composite
def said(draw: st.DrawFn) -> dict[str, Any]:
    """Keys that a source may say, or `data` for all: any of one kind of record, or none."""
    kind = draw(st.sampled_from([{}, *KINDS.values()]))
    record = some_of(draw, kind) if draw(st.booleans()) else {key: values[0] for key, values in kind.items()}
    return record | some_of(draw, CHAT) | some_of(draw, PLACE)


@st.composite
def sections(draw: st.DrawFn) -> dict[str, Any]:
    """A `data` section with sources, or text to validate on, or both, that is taken."""
    data = draw(said())
    if draw(st.booleans()):
        count = draw(st.integers(1, 3))
        names = draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=count, max_size=count, unique=True))
        data["sources"] = [draw(said()) | {"source": name, "weight": 1 / count} for name in names]
    else:
        data["source"] = "a"
    validation = draw(st.sampled_from(["none", "one", "several"]))
    if validation == "one":
        place = {} if "source" in data and draw(st.booleans()) else {"source": draw(st.sampled_from("ad"))}
        data["validation"] = {"split": "test"} | draw(said()) | place
    elif validation == "several":
        data["validation"] = {"sources": [draw(said()) | {"source": name} for name in "de"]}
    try:
        DataSettings(**COMMON, **data)
    except ValidationError:
        assume(False)
    return data


def expected(data: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """What a source has, by the rules of docs/data.md."""
    kinds = [kind for kind, keys in KINDS.items() if any(own.get(key) is not None for key in keys)]
    own_kind = kinds[-1] if kinds else None  # `text` beside another kind is its default
    found = {"source": own.get("source") or data.get("source")}
    elsewhere = data.get("source") not in (None, found["source"])
    for key in PLACE:
        found[key] = own[key] if key in own else DEFAULTS[key] if elsewhere else data.get(key, DEFAULTS[key])
    for kind, keys in KINDS.items():
        for key in keys:
            inherited = data.get(key, DEFAULTS[key]) if own_kind in (None, kind) else DEFAULTS[key]
            found[key] = own.get(key, inherited)
    is_chat = found["messages"] is not None or found["prompt"] is not None
    return found | {key: own.get(key, data.get(key, DEFAULTS[key])) if is_chat else DEFAULTS[key] for key in CHAT}


def keys_of(part: DataSettings) -> dict[str, Any]:
    return {key: getattr(part, key) for key in DEFAULTS}


@given(sections())
def test_a_source_has_what_it_says_and_of_the_rest_what_is_set_for_all(data: dict[str, Any]) -> None:
    made = DataSettings(**COMMON, **data)
    assert [keys_of(part) for part in training_parts(made).values()] == [expected(data, own) for own in data.get("sources", ())]
    validation = data.get("validation", {})
    several = validation.get("sources", [validation] if validation else [])
    assert [keys_of(part) for part in validation_parts(made).values()] == [expected(data, own) for own in several]


@given(sections())
def test_settings_in_full_are_read_back_to_the_same_sources(data: dict[str, Any]) -> None:
    made = DataSettings(**COMMON, **data)
    again = DataSettings.model_validate(json.loads(json.dumps(made.in_full())))
    assert again.in_full() == made.in_full() and again.without_effect == made.without_effect
    for parts in (training_parts, validation_parts):
        ours, theirs = parts(made), parts(again)
        assert list(ours) == list(theirs)
        assert [part.model_dump() for part in ours.values()] == [part.model_dump() for part in theirs.values()]
    full = made.in_full()
    for section in [*(full["sources"] or ()), *filter(None, [full["validation"]])]:
        assert DEFAULTS.keys() <= section.keys(), "every key is written"


@given(sections())
def test_the_process_that_packs_a_stream_has_the_sources_of_the_run(data: dict[str, Any]) -> None:
    made = DataSettings(**COMMON, **data, streaming={"disk_gb": 1})
    sent = DataSettings.model_validate(json.loads(json.dumps(made.model_dump(mode="json", exclude_unset=True))))
    assert [part.model_dump() for part in stream_parts(sent).values()] == [
        each.model_dump() for each in stream_parts(made).values()
    ]


@pytest.mark.parametrize(
    ("data", "own", "has"),
    [
        ({"train_on": "all", "chat_template": "x"}, {"messages": "m"}, {"train_on": "all", "chat_template": "x"}),
        ({"chat_template": "x", "prompt": "q", "response": "a"}, {"messages": "m"}, {"chat_template": "x", "prompt": None}),
        ({"chat_template": "x", "messages": "m"}, {"chat_template": None}, {"chat_template": None, "messages": "m"}),
        ({"chat_template": "x", "messages": "m", "train_on": "all"}, {"text": "b"}, {"messages": None, "train_on": "response"}),
        ({"messages": "m"}, {"text": "text"}, {"messages": None, "text": "text"}),
        ({"response": "a"}, {"prompt": "q"}, {"prompt": "q", "response": "a"}),
        ({"input_ids": "i", "labels": "l"}, {"input_ids": "j"}, {"input_ids": "j", "labels": "l"}),
        ({"input_ids": "i", "labels": "l"}, {"text": "b"}, {"input_ids": None, "labels": None}),
        ({"text": "{a}"}, {"train_on": "all", "messages": "m"}, {"text": "text"}),
        (
            {"format": "text", "split": "test", "subset": "en"},
            {"revision": "v1"},
            {"format": "text", "split": "test", "subset": "en"},
        ),
        ({"split": "test"}, {"split": "train"}, {"split": "train"}),
    ],
)
def test_only_another_kind_of_record_displaces_keys_that_are_set_for_all(
    data: dict[str, Any], own: dict[str, Any], has: dict[str, Any]
) -> None:
    chat = {"source": "c", "weight": 0.5, "messages": "said"}  # so that there is a chat
    several = DataSettings(**COMMON, **data, sources=[{"source": "b", "weight": 0.5, **own}, chat])
    validated = DataSettings(**COMMON, **data, sources=[chat | {"weight": 1}], validation={"source": "b", **own})
    for part in (training_parts(several)["b"], validation_parts(validated)[""]):
        assert {key: getattr(part, key) for key in has} == has


def test_a_part_of_a_dataset_belongs_to_the_source_that_is_named_beside_it() -> None:
    data = {**COMMON, "source": "org/a", "format": "dataset", "subset": "en", "split": "train", "revision": "v1"}
    place = {"format": "dataset", "subset": "en", "split": "test", "revision": "v1"}
    for own in ({}, {"source": "org/a"}, {"source": None}):
        part = validation_parts(DataSettings(**data, validation={"split": "test", **own}))[""]
        assert part.source == "org/a" and {key: getattr(part, key) for key in place} == place
    other = validation_parts(DataSettings(**data, validation={"source": "val.jsonl"}))[""]
    assert {key: getattr(other, key) for key in place} == {key: DEFAULTS[key] for key in place}, "a file has none of these"
    several = validation_parts(DataSettings(**data, validation={"sources": [{"source": "org/a", "split": "x"}, {"source": "v"}]}))
    assert [(part.subset, part.revision) for part in several.values()] == [("en", "v1"), (None, None)]


@pytest.mark.parametrize(
    ("wanted", "name", "own", "refused"),
    [
        (
            "text",
            "v.jsonl",
            {},
            "v.jsonl is read as jsonl, and `data.format: text` belongs to data.source; set `format` beside it, to `t",
        ),
        ("text", "v.jsonl", {"format": "auto"}, None),
        ("text", "v.md", {}, None),
        ("jsonl", "v.json", {}, None),
        ("jsonl", "v.md", {}, "v.md is read as text, and `data.format: jsonl` belongs to data.source"),
        ("jsonl", "v.dat", {}, "v.dat: its suffix does not tell its format; set its `format` to"),
        ("auto", "v.md", {}, None),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_a_format_that_may_have_been_meant_for_both_is_asked_for(
    wanted: str, name: str, own: dict[str, Any], refused: str | None, several: bool, tmp_path: Path
) -> None:
    for each in ("a.dat", name):
        (tmp_path / each).write_text(f'{{"text": "{each}"}}\n')
    other = {"source": str(tmp_path / name), **own}
    (tmp_path / "a.md").write_text("text")
    data = {"source": str(tmp_path / ("a.md" if wanted == "auto" else "a.dat")), "format": wanted}
    made = DataSettings(packs=tmp_path / "packs", tokenizer="t", validation={"sources": [other]} if several else other, **data)
    if refused is None:
        check_parts(made)
        return
    with pytest.raises(InputError) as error:
        check_parts(made)
    assert str(error.value).startswith(f"data.validation{'.sources (v)' if several else ''}: {tmp_path}/{refused}")
    check_parts(DataSettings(**made.model_dump(exclude={"validation"}), validation=other | {"format": "text"}))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sources": [{"source": "a", "weight": 1, "prompt": "q"}]}, r"`sources` \(a\): `prompt` is set but `response` is not"),
        (
            {"sources": [{"source": "a", "weight": 1, "labels": "l"}]},
            r"`sources` \(a\): `labels`: for sources that are tokenized",
        ),
        ({"sources": [{"source": "a", "weight": 1, "train_on": "all"}]}, r"`sources` \(a\): `train_on`: for chats"),
        ({"sources": [{"source": "", "name": "n", "weight": 1}]}, r"`sources` \(n\): `source` is empty"),
        ({"source": "a", "validation": {"source": "v", "messages": "m", "labels": "l"}}, "`messages` and `labels` are both set"),
        ({"response": "r", "sources": [{"source": "a", "weight": 1}]}, r"`sources` \(a\): `response` is set but `prompt` is not"),
        ({"response": "r", "sources": [{"source": "a", "weight": 1, "text": "b"}]}, "`response` is set but `prompt` is not"),
        (
            {"add_bos": True, "messages": "m", "source": "a", "validation": {"source": "v", "text": "b"}},
            "`add_bos`: the chat template",
        ),
    ],
)
def test_what_a_source_lacks_or_has_for_nothing_is_refused_by_its_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSettings(**COMMON, **values)


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ({"text": "{a}", "sources": [{"text": "b"}, {"messages": "m"}]}, ["text"]),
        ({"text": "{a}", "sources": [{"text": "b"}, {}]}, []),
        ({"text": "b", "sources": [{"text": "b"}]}, []),
        ({"messages": "m", "sources": [{"text": "b"}]}, ["messages"]),
        ({"messages": "m", "train_on": "all", "sources": [{"text": "b"}]}, ["messages", "train_on"]),
        ({"split": "test", "format": "text", "sources": [{"split": "x"}, {"split": "y"}]}, ["split"]),
        ({"train_on": "all", "sources": [{"messages": "m", "train_on": "response"}]}, ["train_on"]),
        ({"text": "{a}", "validation": {"source": "v", "text": "b"}}, ["text"]),
        ({"source": "s", "text": "{a}", "validation": {"source": "v", "text": "b"}}, []),
    ],
)
def test_a_key_for_all_that_no_source_has_is_named(values: dict[str, Any], keys: list[str]) -> None:
    if several := values.get("sources"):
        several = [{"source": "ab"[n], "weight": 1 / len(several), **each} for n, each in enumerate(several)]
        values = values | {"sources": several}
    assert DataSettings(**COMMON, **values).without_effect == keys


def test_a_setting_that_is_a_default_adds_nothing_to_what_packs_record(tmp_path: Path) -> None:
    """So that packs of recipes whose sources say everything themselves are still theirs."""
    chat = {"prompt": "q", "response": "a", "chat_template": "{{ x }}"}
    made = DataSettings(**COMMON, sources=[{"source": "a", "weight": 0.5, **chat}, {"source": "b", "weight": 0.5, "text": "{x}"}])
    first, second = (content_settings(part) for part in training_parts(made).values())
    assert first | chat == first and not {"train_on", "messages", "input_ids", "revision"} & first.keys()
    assert second["text"] == "{x}" and not {"prompt", "chat_template", "train_on"} & second.keys()


def test_packs_made_of_settings_in_full_are_the_same_bit_for_bit(
    tmp_path: Path, documents: list[str], tokenizer_file: Path
) -> None:
    def lines(name: str, records: list[dict[str, Any]]) -> str:
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        return str(tmp_path / name)

    texts = [text[:400] for text in documents[:60]]
    both = [{"q": text[:50], "a": text[50:]} for text in texts if len(text) > 60]
    chats = [{"m": [{"role": "user", "content": each["q"]}, {"role": "assistant", "content": each["a"]}]} for each in both]
    template = "{% for m in messages %}SAID {{ m.content }}{% endfor %}"
    data = {
        "sources": [
            {"source": lines("pairs.jsonl", both[:20]), "weight": 0.5, "prompt": "q", "response": "a"},
            {"source": lines("chats.jsonl", chats[20:30]), "weight": 0.3, "messages": "m"},
            {"source": lines("texts.jsonl", [{"text": text} for text in texts]), "weight": 0.2},
        ],
        "validation": {
            "sources": [
                {"source": lines("held.jsonl", chats[30:40]), "messages": "m"},
                {"source": lines("other.jsonl", [{"text": text[::-1]} for text in texts[:9]])},
            ]
        },
        **{"text": "TT {text}", "train_on": "all", "chat_template": template, "packing": "best_fit"},
        **{"tokenizer": str(tokenizer_file), "length": 64, "processes": 1},
    }
    made = DataSettings(packs=tmp_path / "packs", **data)
    again = DataSettings.model_validate(made.in_full() | {"packs": str(tmp_path / "again")})
    for each in (made, again):
        prepare(each, progress=False)
    for split in ("train", "held_out"):
        assert open_packs(made, split).fingerprint == open_packs(again, split).fingerprint
    parts = {**training_parts(made), **validation_parts(made)}
    recorded = {name: read_manifest(part.packs) for name, part in parts.items()}
    assert {name for name, each in recorded.items() if each["version"] == 2} == set(), "`train_on: all` masks nothing"
    assert all(recorded[name]["settings"]["chat_template"] == template for name in ("pairs", "chats", "held"))
    assert recorded["texts"]["settings"]["text"] == recorded["other"]["settings"]["text"] == "TT {text}"
    prepare(DataSettings.model_validate(made.in_full()), progress=False)  # and are taken for those of the recipe
    prepare(made.model_copy(update={"format": "jsonl"}), progress=False)  # as all are of that kind, they were `auto` alike
    with pytest.raises(InputError, match=r"pairs: holds packs prepared with other settings \(format: auto -> text"):
        prepare(made.model_copy(update={"format": "text"}), progress=False)


def test_a_stream_is_prepared_once_its_first_part_is_there(tmp_path: Path) -> None:
    settings = DataSettings(packs=tmp_path / "packs", source="a.jsonl", tokenizer="t", streaming={"disk_gb": 1})
    settings.packs.mkdir()
    assert unprepared(settings) == {"data.packs": [settings.packs / FIRST]}
    (settings.packs / FIRST).mkdir()
    assert unprepared(settings), "an empty folder is a place for packs, and holds none"
    (settings.packs / FIRST / "packs.json").touch()
    assert unprepared(settings) == {}


@pytest.mark.parametrize("streaming", [False, {"window": 500, "disk_gb": 0.01}])
def test_a_folder_of_text_may_hold_the_packs_of_every_part(streaming: Any, tokenizer_file: Path, tmp_path: Path) -> None:
    """What is prepared of one source, or to validate on, lies in another source by the time that this is listed."""
    texts = [tmp_path / "mine" / f"{number}.txt" for number in range(5)]
    for path in (*texts, tmp_path / "other.txt", tmp_path / "new.txt"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{path.name} " * 300)
    sources = [{"source": str(tmp_path / name), "weight": 0.5} for name in ("other.txt", "mine")]
    common = {"tokenizer": str(tokenizer_file), "length": 64, "processes": 1, "validation": {"source": str(tmp_path / "new.txt")}}
    data = DataSettings(**common, packs=tmp_path / "mine" / "packs", sources=sources, streaming=streaming)
    half = data.packs.with_name("packs-validation.partial")  # of a run that was killed
    half.mkdir(parents=True)
    (half / "tokenizer.json").write_text("{}")
    (prepare_stream if streaming else prepare)(data, progress=False)
    assert {path.name for path in texts[0].parent.iterdir()} > {"packs", "packs-validation"}
    assert not unprepared(data)
    assert open_source(training_parts(data)["mine"]).paths == texts
    (texts[0].parent / "more.partial").mkdir()
    (texts[0].parent / "more.partial" / "text.txt").write_text("not ours")
    assert len(open_source(training_parts(data)["mine"]).paths) == 6
