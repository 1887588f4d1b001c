"""Chats, written out by chat templates: text, tokens and masks against transformers' own `apply_chat_template`."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from foundation.errors import InputError
from packing.__main__ import main
from packing.arrow import IGNORE
from packing.batch import build_microbatch
from packing.chat import ChatColumns
from packing.chunks import read_chunk
from packing.inspection import decoded, describe, open_splits
from packing.manifest import MASKED_VERSION, read_manifest
from packing.packer import prepare_stream
from packing.part_maker import PartMaker
from packing.prepare import check_first_records, prepare, prepared_records
from packing.settings import DataSettings
from packing.sources import open_source
from packing.store import open_packs
from packing.stream import PartStart
from packing.tokenizer import load_tokenizer
from packing.workers import plain_tokenizer, tokenize

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Llama's: it trims, and writes the day's date where there is a clock.
DATED = (
    "{{ bos_token }}{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}26 Jul 2024{% endif %}"
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] | trim }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# Its blocks say what the assistant writes; an answer that others follow loses its thoughts, as Qwen3's do.
MARKED = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A:{% generation %}"
    "{% if loop.last %}<think></think>{% endif %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}\n"
    "{% else %}{{ message['role'] }}:{{ message['content'] }}\n{% endif %}{% endfor %}"
)
MARKS_NOTHING = "{{ messages[0].content }}{% generation %}{% endgeneration %}"
ENDLESS = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "assistant", "content": "y"}]
TAKES_PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
FORGETFUL = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")

CHATS = [
    [{"role": "user", "content": "What is 1+1?"}, {"role": "assistant", "content": " two, 世界 🌏 naïve"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello\n\n  there"},
        {"role": "assistant", "content": "Hi.\n"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "\tdef f(): return 0"},
    ],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "thanks"}],
]


@pytest.fixture
def tokenizer_folder(tmp_path: Path, tokenizer_file: Path) -> Path:
    """A tokenizer with ChatML's tokens; its post-processor takes blanks out of offsets and would add a token, as many do."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    trim = processors.ByteLevel(trim_offsets=True)
    start = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    tokenizer.post_processor = processors.Sequence([trim, start])
    folder = tmp_path / "tokenizer"
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<s>")
    made.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def write_lines(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def settings_of(tmp_path: Path, tokenizer: Path, records: list[dict[str, Any]], **values: Any) -> DataSettings:
    source = write_lines(tmp_path / "chats.jsonl", records)
    chosen = {"length": 256, "packing": "best_fit", "shuffle": False, "processes": 1, **values}
    return DataSettings(packs=tmp_path / "packs", source=source, tokenizer=str(tokenizer), **chosen)


def read_chats(settings: DataSettings) -> list[tuple[list[int], list[bool]]]:
    """Ids and mask of every document, in order."""
    packs, found = open_packs(settings, "train"), []
    for pack in (packs[index] for index in range(len(packs))):
        for begin, end in pairwise(np.cumsum([0, *pack.lengths]).tolist()):
            found.append((pack.input_ids[begin:end].tolist(), pack.trained[begin:end].tolist()))
    return sorted(found)


def tokenised(settings: DataSettings) -> list[tuple[list[int], list[bool]]]:
    """As `read_chats`, of what a process that tokenises makes of the source's only chunk, in this one."""
    tokenizer = load_tokenizer(settings.tokenizer)
    (chunk,) = open_source(settings).chunks()
    texts = read_chunk(chunk, prepared_records(settings, tokenizer), skip_bad=False)
    made = tokenize(chunk, texts, plain_tokenizer(str(Path(settings.tokenizer) / "tokenizer.json")), [], [])
    cuts = np.cumsum(made.lengths)[:-1]
    mask = np.ones(len(made.tokens), bool) if made.trained is None else made.trained
    return sorted((ids.tolist(), of.tolist()) for ids, of in zip(np.split(made.tokens, cuts), np.split(mask, cuts), strict=True))


@pytest.mark.parametrize("template", [CHATML, DATED, MARKED], ids=["chatml", "dated", "marked"])
def test_chats_have_the_tokens_that_transformers_gives_them(tmp_path: Path, tokenizer_folder: Path, template: str) -> None:
    records = [{"messages": chat} for chat in CHATS]
    settings = settings_of(tmp_path, tokenizer_folder, records, messages="messages", chat_template=template)
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder)
    still = template.replace("strftime_now is defined", "false")  # transformers has a clock
    expected = [theirs.apply_chat_template(chat, chat_template=still, tokenize=True)["input_ids"] for chat in CHATS]
    assert [ids for ids, _ in tokenised(settings)] == sorted(expected)


def test_a_template_that_marks_answers_gives_the_mask_that_transformers_gives(tmp_path: Path, tokenizer_folder: Path) -> None:
    chats = CHATS[1:]  # in the first, transformers leaves out all but the first token of a character of several
    settings = settings_of(tmp_path, tokenizer_folder, [{"m": chat} for chat in chats], messages="m", chat_template=MARKED)
    theirs, expected = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder), []
    theirs._tokenizer.post_processor = None  # with blanks taken out of offsets it finds other tokens
    for chat in chats:
        made = theirs.apply_chat_template(
            chat, chat_template=MARKED, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        expected.append((made["input_ids"], [bool(each) for each in made["assistant_masks"]]))
    assert tokenised(settings) == sorted(expected)


def test_what_is_trained_on_is_the_answers_and_their_end(tmp_path: Path, tokenizer_folder: Path) -> None:
    settings = settings_of(tmp_path, tokenizer_folder, [{"messages": chat} for chat in CHATS], messages="messages")
    prepare(settings, progress=False)
    tokenizer, found = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")), set()
    for ids, mask in read_chats(settings):
        changes = np.flatnonzero(np.diff([False, *mask, False]))
        parts = [ids[begin:end] for begin, end in changes.reshape(-1, 2).tolist()]
        found.add(tuple(tokenizer.decode(part, skip_special_tokens=False) for part in parts))
    assert found == {tuple(f"{m['content']}<|im_end|>\n" for m in chat if m["role"] == "assistant") for chat in CHATS}
    splits = open_splits(settings.packs, None, None)
    assert any("trained on" in line and "%" in line for line in describe(settings.packs, splits))
    shown = list(decoded(splits["train"], 0, None))
    assert shown[shown.index("[trained on]") + 1] in {part for parts in found for part in parts}
    statistics = read_manifest(settings.packs)["statistics"]
    assert statistics["trained_tokens"] == sum(sum(mask) for _, mask in read_chats(settings)) < statistics["tokens"]


def test_prompt_and_response_are_a_chat_of_two(tmp_path: Path, tokenizer_folder: Path, capsys: pytest.CaptureFixture) -> None:
    asked, answered = CHATS[0]
    by_columns = settings_of(
        tmp_path, tokenizer_folder, [{"p": "1+1?", "s": answered["content"]}], prompt="What is {p}", response="s"
    )
    prepare(by_columns, progress=False)
    chat = tmp_path / "chat"
    chat.mkdir()
    by_messages = settings_of(chat, tokenizer_folder, [{"m": [asked, answered]}], messages="m")
    prepare(by_messages, progress=False)
    assert open_packs(by_columns, "train").fingerprint == open_packs(by_messages, "train").fingerprint
    # A dataset's split, and a table's messages, whose keys that are null are not there.
    saved = tmp_path / "saved"
    told = datasets.Dataset.from_list([{"m": [asked | {"name": None}, answered | {"name": "x"}]}])
    datasets.DatasetDict({"train_1M": told, "train": datasets.Dataset.from_list([{"m": [asked, asked]}])}).save_to_disk(saved)
    flags = ["--source", str(saved), "--split", "train_1M", "--messages", "m", "--tokenizer", str(tokenizer_folder)]
    assert main(["prepare", *flags, "--length", "256", "--packing", "best_fit", "--out", str(tmp_path / "split")]) == 0
    assert "trained tokens" in capsys.readouterr().err
    assert (
        open_packs(by_columns.model_copy(update={"packs": tmp_path / "split"}), "train").fingerprint
        == open_packs(by_columns, "train").fingerprint
    )


def test_masked_tokens_are_no_labels_and_masks_survive_cuts(tmp_path: Path, tokenizer_folder: Path) -> None:
    whole = settings_of(tmp_path, tokenizer_folder, [{"m": chat} for chat in CHATS], messages="m", packing="truncate", length=16)
    prepare(whole, progress=False)
    packs = open_packs(whole, "train")
    ids, mask, labels = [], [], []
    for pack in (packs[index] for index in range(len(packs))):
        real = int(pack.lengths.sum())
        ids += pack.input_ids[:real].tolist()
        mask += pack.trained[:real].tolist()
        assert not pack.trained[real:].any()
        batch = build_microbatch([pack], mask_boundaries=False)
        labels += batch.labels[0, :real].tolist()
    for place, label in enumerate(labels):
        within = place % 16 != 15 and place + 1 < len(ids)
        assert label == (ids[place + 1] if within and mask[place + 1] else IGNORE)
    manifest = read_manifest(whole.packs)
    assert manifest["version"] == MASKED_VERSION and sum(mask) == manifest["statistics"]["trained_tokens"]


def test_a_template_that_writes_an_end_is_refused_to_a_tokenizer_that_names_none(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tokenizer_folder / "tokenizer_config.json").write_text('{"eos_token": "<none>"}')
    settings = settings_of(tmp_path, tokenizer_folder, [{"m": CHATS[0]}], messages="m", chat_template=MARKED)
    with pytest.raises(InputError, match=r"data.chat_template: writes `eos_token`, and the tokenizer .* names no EOS token"):
        prepare(settings, progress=False)
    asks = "{% for m in messages %}{{ m.content }}{{ eos_token if eos_token is defined else '<|im_end|>' }}{% endfor %}"
    for number, template in enumerate((CHATML, asks)):
        changed = {"chat_template": template, "packs": tmp_path / str(number)}
        prepare(settings.model_copy(update=changed), progress=False)


def test_tokens_that_were_made_without_an_end_go_on(tmp_path: Path, tokenizer_folder: Path, monkeypatch) -> None:
    """Earlier versions wrote nothing for it. A stream that has begun cannot take another template."""
    (tokenizer_folder / "tokenizer_config.json").write_text("{}")
    records = [{"m": chat} for chat in CHATS * 20]
    chosen = {"messages": "m", "chat_template": MARKED, "train_on": "all", "length": 16}
    half = settings_of(tmp_path, tokenizer_folder, records, **chosen)
    streaming = {"disk_gb": 0.001, "window": 100}
    stream = settings_of(tmp_path, tokenizer_folder, records, **chosen, streaming=streaming)
    stream = stream.model_copy(update={"packs": tmp_path / "stream"})
    with monkeypatch.context() as patch, pytest.raises(InputError, match="leaves none to train on"):
        patch.setattr(ChatColumns, "lacks_end", lambda columns: False)
        prepare_stream(stream, progress=False)
        prepare(half.model_copy(update={"held_out": 0.999}), progress=False)
    prepare(half, progress=False)
    with PartMaker(stream, 1) as maker:
        assert maker.make(PartStart(number=1)) is not None


def test_train_on_all_has_no_mask_and_the_same_tokens(tmp_path: Path, tokenizer_folder: Path) -> None:
    records = [{"m": chat} for chat in CHATS]
    masked = settings_of(tmp_path, tokenizer_folder, records, messages="m", chat_template=MARKED)
    every = masked.model_copy(update={"train_on": "all"})
    assert masked.masks and not every.masks
    assert [ids for ids, _ in tokenised(every)] == [ids for ids, _ in tokenised(masked)]
    assert all(all(mask) for _, mask in tokenised(every)) and not any(all(mask) for _, mask in tokenised(masked))


def test_packs_do_not_depend_on_processes_or_an_interruption(
    tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("packing.sources.CHUNK_BYTES", 2000)
    monkeypatch.setattr("packing.token_log._COMMIT_SECONDS", 0.0)
    settings = settings_of(tmp_path, tokenizer_folder, [{"m": chat} for chat in CHATS * 20], messages="m")
    whole = settings.model_copy(update={"packs": tmp_path / "whole", "processes": 2})
    prepare(whole, progress=False)
    append, left = __import__("packing.token_log", fromlist=["TokenLog"]).TokenLog.append, [3]

    def broken(log: Any, result: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise InputError("stopped here")
        append(log, result)

    with monkeypatch.context() as patch, pytest.raises(InputError, match="stopped here"):
        patch.setattr("packing.token_log.TokenLog.append", broken)
        prepare(settings, progress=False)
    kept = tmp_path / "packs.partial" / "trained.bin"
    assert kept.stat().st_size
    with open(kept, "ab") as file:
        file.write(b"\1" * 7)  # what a kill left beyond the last commit
    prepare(settings, progress=False)
    assert open_packs(settings, "train").fingerprint == open_packs(whole, "train").fingerprint


def test_a_marked_block_may_hold_others() -> None:
    template = "{% generation %}a{% generation %}{{ messages[1].content }}{% endgeneration %}b{% endgeneration %}c"
    chat = [CHATS[0][0], {"role": "assistant", "content": "XY"}]
    rendered = ChatColumns("m", None, None).written_by(template, {}).fill({"m": chat})
    assert rendered.text == "aXYbc" and rendered.answers == ((0, 1), (1, 3), (3, 4))


def test_a_template_that_takes_content_in_parts_writes_their_text() -> None:
    rendered = ChatColumns("m", None, None).written_by(TAKES_PARTS, {}).fill({"m": PARTS})
    assert rendered.text == "xy" and rendered.answers == ((1, 2),)


@pytest.mark.parametrize("template", ["{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}", TAKES_PARTS])
def test_a_content_of_no_parts_is_no_text(template: str) -> None:
    chat = [{"role": "user", "content": "x = []"}, {"role": "assistant", "content": [], "tool_calls": [{"name": "run"}]}]
    chat.append({"role": "assistant", "content": "y"})
    columns = ChatColumns("m", None, None, train_on="all").written_by(template, {})
    said = columns.fill({"m": chat}).text
    assert said == ("x = []y" if template is TAKES_PARTS else "x = [][{'name': 'run'}]y")


@pytest.mark.parametrize(
    ("record", "values", "message"),
    [
        ({"m": CHATS[0][:1]}, {"messages": "m"}, "chats.jsonl:1: a chat without an answer"),
        ({"m": [{"from": "human", "value": "x"}]}, {"messages": "m"}, "has from, value; a message has a `role`"),
        ({"m": "text"}, {"messages": "m"}, "holds str, not a list of messages"),
        ({"x": 1}, {"messages": "m"}, "no column `m`; the columns are: x. Set data.messages"),
        ({"p": " ", "r": "y"}, {"prompt": "p", "response": "r"}, "the prompt .`p`. is empty, so nothing would be masked"),
        ({"p": "x", "r": ""}, {"prompt": "p", "response": "r"}, "a chat without an answer"),
        ({"p": "x", "q": "y"}, {"prompt": "p", "response": "r"}, "no column `r`.* Set data.prompt and data.response"),
        ({"m": CHATS[1]}, {"messages": "m", "chat_template": FORGETFUL}, "message 3 otherwise once others follow"),
        ({"m": CHATS[0]}, {"messages": "m", "chat_template": "{% if %}"}, "data.chat_template: no Jinja that can be used"),
        ({"m": CHATS[0]}, {"messages": "m", "chat_template": "{{ raise_exception('no system') }}"}, "does not take .*no system"),
        ({"m": CHATS[0]}, {"messages": "m", "chat_template": "{{ strftime_now('%Y') }}"}, "'strftime_now' is undefined"),
        ({"m": CHATS[0]}, {"messages": "m", "chat_template": "nowhere.jinja"}, "data.chat_template: nowhere.jinja: no chat"),
        ({"m": CHATS[0]}, {"messages": "m", "tokenizer": "bare"}, "has no chat template to write chats with"),
        ({"m": PARTS}, {"messages": "m", "chat_template": "{{ messages[0].content }}"}, "message 1 has a list as its content"),
        ({"m": CHATS[0]}, {"messages": "m", "chat_template": ENDLESS}, "does not take this chat: maximum recursion depth"),
        ({"m": CHATS[0]}, {"messages": "m", "chat_template": MARKS_NOTHING}, "the chat template writes nothing for the answers"),
        ({"m": CHATS[0]}, {"messages": "m", "chat_template": "{{ 'x' * 10**18 }}"}, "does not take this chat: MemoryError"),
        ({"m": [{"role": "a\ufdd0", "content": "x"}, CHATS[0][-1]]}, {"messages": "m"}, "holds U.FDD0"),
        ({"m": [{"role": "user", "content": [{"text": "\ufdd0"}]}, CHATS[0][-1]]}, {"messages": "m"}, "holds U.FDD0"),
    ],
)
def test_a_chat_that_cannot_be_used_is_one_message(
    tmp_path: Path, tokenizer_folder: Path, tokenizer_file: Path, record: dict, values: dict[str, Any], message: str
) -> None:
    tokenizer = tokenizer_file if values.get("tokenizer") else tokenizer_folder
    settings = settings_of(tmp_path, tokenizer, [record], **{key: each for key, each in values.items() if key != "tokenizer"})
    with pytest.raises(InputError, match=message):
        check_first_records(settings)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt": "p"}, "`prompt` is set but `response` is not"),
        ({"messages": "m", "prompt": "p", "response": "r"}, "both set"),
        ({"messages": "m", "text": "body"}, "`text` and `messages` are both set"),
        ({"messages": "m", "add_bos": True}, "the chat template puts in the BOS"),
        ({"train_on": "all"}, "`train_on`: for chats"),
    ],
)
def test_settings_of_chats_that_contradict_each_other_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataSettings(packs=Path("packs"), source="x.jsonl", tokenizer="t", **values)
