"""Records become documents: texts, chats as transformers writes them, and tokens unchanged."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from foundation.errors import InputError
from packing.arrow import read_manifest
from packing.chunks import Chunk, Counts, read_chunk
from packing.records import (
    CHATML,
    PLAIN,
    UNTRAINED,
    ChatColumns,
    RecordRule,
    TextTemplate,
    TokenColumns,
    chat_columns,
    chat_template,
)
from packing.settings import DataSettings, SourceSettings
from packing.token_columns import TOKEN_COLUMNS
from tests.conftest import ROOT
from tests.packing.conftest import open_reader, packed

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Weather?"}
ANSWER = {"role": "assistant", "content": "It is sunny."}
RESULT = {"role": "tool", "content": "sunny"}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
END = "It is sunny.<|im_end|>\n"
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)


def calling(written: str) -> str:
    """Return a template that writes the arguments of tool calls with the Jinja code `written`."""
    return (
        "{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{{ '<' + m.role + '>' }}{{ m.content or '' }}"
        "{% for call in m.tool_calls or [] %}"
        "{% if call.function is defined %}{% set call = call.function %}{% endif %}"
        "{{ '[' + call.name + '] ' }}" + written + "{% endfor %}{{ '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
    )


# Templates write arguments in these ways: Qwen2.5, Llama 3 and Hermes; Mistral; Qwen3 and Granite;
# DeepSeek; Phi-4-mini; InternLM2; Qwen3-Coder; GLM; Gemma and Tiny Aya.
TO_JSON = calling("{{ call.arguments | tojson }}")
WHOLE = calling("{{ call | tojson }}")
TESTED = calling(
    "{% if call.arguments is string %}{{ call.arguments }}"
    "{% else %}{{ call.arguments | tojson }}{% endif %}"
)
ADDED = calling("{{ '' + call['arguments'] + '' }}")
PRINTED = calling("{{ call.arguments }}")
AS_STRING = calling("{{ '' + call.arguments | string }}")
ITEMS = calling("{% for key, value in call.arguments | items %}{{ key ~ '=' ~ value }}{% endfor %}")
METHOD = calling("{% set a = call.arguments %}{% for k, v in a.items() %}{{ k ~ v }}{% endfor %}")
MAPPING = calling(
    "{% if call.arguments is mapping %}"
    "{% for key, value in call.arguments | dictsort %}{{ key ~ ':' ~ value }}{% endfor %}"
    "{% elif call.arguments is string %}{{ call.arguments }}{% endif %}"
)
OBJECTS = {"tojson": TO_JSON, "whole": WHOLE, "items": ITEMS, "method": METHOD, "mapping": MAPPING}
TEXTS = {"tested": TESTED, "added": ADDED, "printed": PRINTED, "string": AS_STRING}
CALLS = CHATML.replace(
    "message.content",
    "message.content + (message.tool_calls | tojson if message.tool_calls else '')",
)
# DeepSeek-R1's template tests a content for none, and Mistral's requires calls or roles by turns.
NULL_CONTENT = CALLS.replace(
    "message.content +", "(message['content'] if message['content'] is not none else 'null') +"
)
BY_TURNS = (
    "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls and loop.index == 2 %}"
    "{{ raise_exception('by turns') }}{% endif %}{% endfor %}" + CALLS
)
NAMED = CALLS.replace("{{ '<|im_start|>'", "{{ message.name or '<|im_start|>'")
# Qwen2.5 and Llama 3.1 read the first message of the prompt, which has none.
FIRST = "{% if messages[0]['role'] != 'system' %}{{ '<system>You are Q.' }}{% endif %}" + CHATML
NO_PROMPT = FIRST.replace(
    "{% for", "{% if not messages %}{{ raise_exception('no chat') }}{% endif %}{% for", 1
)
# Templates of reasoning models open a thought in the prompt, or drop the thoughts of answers.
THINKING = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
DISTILLED = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}{% else %}"
    "{{ '<A>' + m.content.split('</think>')[-1] + '<E>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<A><think>\n' }}{% endif %}"
)
REASONING = (
    "{% for m in messages %}{{ m.role }}{{ m.reasoning_content }}{{ m.content }};{% endfor %}"
)
DATED = (
    "{% if strftime_now is defined %}{{ strftime_now('%Y') }}"
    "{% else %}Date: 26 Jul 2024\n{% endif %}" + CHATML
)
WITH_TOOLS = "{{ tools | tojson if tools is not none else 'no tools' }}" + CHATML
TURNS_ALONE = (
    "{% for m in messages if m.role in ('user', 'assistant') %}"
    "{{ m.role + ':\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)
# This one writes each answer in another way if other messages follow.
ODD = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"


def rule(template: str, messages: Any = "messages") -> ChatColumns:
    return chat_columns(SourceSettings(messages=messages), template, (("eos_token", "<e>"),))


def trained(template: str, record: dict, messages: Any = "messages") -> tuple[str, str] | None:
    """Return the text of the chat in a record, and its parts that have a loss."""
    document = rule(template, messages).fill(record)
    if document is None:
        return None
    text, spans = document
    return text, "|".join(text[start:end] for start, end in spans)


def expected(template: str, chat: list[dict], **more: Any) -> str:
    """Return the text that transformers writes for a chat. It has no clock."""
    template = template.replace("strftime_now is defined", "false")
    return render_jinja_template([chat], chat_template=template, eos_token="<e>", **more)[0][0]


def call(arguments: Any) -> dict:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


def says(*contents: str) -> list[dict]:
    answers = [{"role": "assistant", "content": content} for content in contents]
    return [message for answer in answers for message in (USER, answer)]


PAIR = ("prompt", "completion")
BOTH = (CHATML, MARKED)
BEGINNING = (*BOTH, FIRST, NO_PROMPT)
SHAREGPT = [{"from": "human", "value": "Weather?"}, {"from": "gpt", "value": "It is sunny."}]
TURNS = [("system", "a"), ("human", "b"), ("gpt", "c"), ("tool", "d"), ("gpt", "e")]
ROLES = ("system", "user", "assistant", "tool", "assistant")
WITH_CALL = [USER, CALL, RESULT, ANSWER]
BARE = {"role": "assistant", "tool_calls": CALL["tool_calls"]}
NULL = BARE | {"content": None}
NARRATED = [{"role": "narrator", "content": "x"}, ANSWER]
NO = ANSWER | {"content": "no"}
NO_WORDS = {"role": "assistant", "content": ""}
CALLED = f"{json.dumps(CALL['tool_calls'])}<|im_end|>\n"

# Arguments of a call in a record, and as a template gets them. Only JSON objects are decoded.
WRITTEN_ARGUMENTS: list[tuple[str, Any]] = [
    ('{"a": "{\\"b\\": 1}"}', {"a": '{"b": 1}'}),
    ("{}", {}),
    ("", {}),
    ("city=X", "city=X"),
    ('{"a": 1', '{"a": 1'),
    ("5", "5"),
]

# Each row has templates, the columns with the chat, and a record or the messages of a record. The
# last values are the chat that transformers gets (None: the same messages), and the parts with a
# loss.
CHATS: list[tuple[tuple[str, ...], Any, Any, list[dict] | None, str]] = [
    (BOTH, "conversations", {"conversations": SHAREGPT}, [USER, ANSWER], END),
    (BOTH, "m", {"m": [SHAREGPT[0], ANSWER]}, [USER, ANSWER], END),
    (BOTH, "m", {"m": [SHAREGPT[0], ANSWER | {"value": 0.5}]}, [USER, ANSWER], END),
    (BOTH, "chosen", {"chosen": [USER, ANSWER], "rejected": [USER]}, [USER, ANSWER], END),
    (BOTH, "m", {"m": [USER | {"weight": None}, ANSWER]}, [USER, ANSWER], END),
    (BOTH, "m", {"m": [USER, ANSWER | {"tool_calls": []}]}, [USER, ANSWER], END),
    (BOTH, PAIR, {"prompt": "Weather?", "completion": "It is sunny."}, [USER, ANSWER], END),
    (BOTH, ("{q}?", "a"), {"q": "Weather", "a": "It is sunny."}, [USER, ANSWER], END),
    (
        BOTH,
        "messages",
        [{"from": role, "value": text} for role, text in TURNS],
        [{"role": role, "content": text} for role, (_, text) in zip(ROLES, TURNS, strict=True)],
        "c<|im_end|>\n|e<|im_end|>\n",
    ),
    # A chat may begin with an answer, and may have several.
    (BEGINNING, "messages", [ANSWER], None, END),
    (BEGINNING, "messages", [ANSWER, USER, ANSWER], None, f"{END}|{END}"),
    (BEGINNING, "messages", [SYSTEM, ANSWER], None, END),
    (BEGINNING, "messages", [SYSTEM, ANSWER, USER, ANSWER], None, f"{END}|{END}"),
    ((DATED,), "messages", says("Hello, 世界."), None, "Hello, 世界.<|im_end|>\n"),
    ((PLAIN,), "messages", [SYSTEM, *says("so", "yes")], None, "so<e>|yes<e>"),
    # An answer without a loss: of weight 0, or one that the template does not write.
    (BOTH, "messages", [USER, NO | {"weight": 0}, USER, ANSWER], None, END),
    (BOTH, "messages", [USER, ANSWER | {"weight": 1}], None, END),
    (BOTH, "messages", WITH_CALL, None, END),
    ((PLAIN,), "messages", [USER, BARE, RESULT, ANSWER], None, "It is sunny.<e>"),
    ((PLAIN,), "messages", [USER, NULL, RESULT, ANSWER], None, "It is sunny.<e>"),
    ((CALLS, BY_TURNS), "messages", WITH_CALL, None, f"{CALLED}|{END}"),
    ((NAMED,), "messages", [USER, CALL | {"name": None, "id": None}], [USER, CALL], CALLED),
    ((NULL_CONTENT,), "messages", [USER, BARE], [USER, NULL], f"null{CALLED}"),
    ((NULL_CONTENT,), "messages", [USER, NULL], None, f"null{CALLED}"),
    ((TURNS_ALONE,), "messages", [USER, SYSTEM | {"content": ""}, ANSWER], None, "It is sunny.\n"),
    ((THINKING,), "messages", says("so", "yes"), None, "so<|im_end|>\n|yes<|im_end|>\n"),
    ((THINKING,), "messages", says("<think>\nhm</think>so"), None, "hm</think>so<|im_end|>\n"),
    ((DISTILLED,), "messages", says("<b>so", "yes"), None, "<b>so<E>|yes<E>"),
    ((DISTILLED,), "messages", says("<think>\nhm</think>so"), None, "so<E>"),
    *(
        ((REASONING,), "messages", [USER, NO_WORDS | {key: "hm"}], None, "assistanthm;")
        for key in ("reasoning_content", "thinking", "reasoning")
    ),
    ((CHATML + "{# narrator #}",), "messages", NARRATED, None, END),
    *(
        ((WITH_TOOLS,), "messages", {"messages": [USER, ANSWER], "tools": tools}, None, END)
        for tools in ([{"name": "f"}], None, [], "")
    ),
    *(
        ((TO_JSON,), "messages", [call(text)], [call(value)], f"[f] {json.dumps(value)}<end>")
        for text, value in WRITTEN_ARGUMENTS
    ),
]


CASES = [(template, *row) for templates, *row in CHATS for template in templates]


@pytest.mark.parametrize(
    ("template", "messages", "record", "chat", "answers"), CASES, ids=map(str, range(len(CASES)))
)
def test_a_chat_has_transformers_text_and_a_loss_on_its_answers(
    template: str, messages: Any, record: Any, chat: list[dict] | None, answers: str
) -> None:
    record = record if isinstance(record, dict) else {"messages": record}
    text = expected(template, chat or record[messages], tools=record.get("tools") or None)
    assert trained(template, record, messages) == (text, answers)


ARGUMENTS = st.dictionaries(
    st.text("abc_", min_size=1, max_size=5),
    st.none() | st.integers() | st.text(max_size=5) | st.booleans() | st.lists(st.integers()),
    max_size=3,
)
SPACES = st.sampled_from([(", ", ": "), (",", ":")])


@pytest.mark.parametrize("name", [*OBJECTS, *TEXTS])
@given(arguments=ARGUMENTS, spaces=SPACES)
def test_a_template_gets_arguments_in_the_form_that_it_writes(
    name: str, arguments: dict, spaces: tuple[str, str]
) -> None:
    template = (OBJECTS | TEXTS)[name]
    for given_form in (arguments, json.dumps(arguments, separators=spaces, ensure_ascii=False)):
        written: Any = arguments
        if name in TEXTS and given_form is arguments:
            written = json.dumps(arguments, ensure_ascii=False)
        elif name in TEXTS:
            written = given_form
        result = trained(template, {"messages": [USER, call(given_form), RESULT, ANSWER]})
        assert result is not None
        assert result[0] == expected(template, [USER, call(written), RESULT, ANSWER])
        assert name in OBJECTS or result[1] == f"[f] {written}<end>|It is sunny.<end>"


def in_lines(record: dict, columns: RecordRule) -> tuple[list, Counts]:
    """Return the documents of a record that is read from JSONL."""
    return read_chunk(Chunk("jsonl", "x.jsonl:", 1, json.dumps(record).encode(), {}), columns)


def in_table(table: pa.Table, columns: ChatColumns) -> tuple[list, Counts]:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return read_chunk(Chunk("table", "x, row ", 0, sink.getvalue().to_pybytes(), {}), columns)


def test_nulls_in_tool_calls_are_kept_in_json_and_dropped_in_a_table() -> None:
    chat = [USER, call({"a": 1, "b": {"c": None}})]
    record = {"messages": chat, "tools": [{"name": "f", "default": None}]}
    (of_lines,), _ = in_lines(record, rule(TO_JSON))
    assert of_lines[0] == expected(TO_JSON, chat, tools=record["tools"])
    assert '"b": {"c": null}' in of_lines[0] and '"default": null' in of_lines[0]
    (of_rows,), counts = in_table(pa.Table.from_pylist([record]), rule(TO_JSON))
    assert of_rows[0] == expected(TO_JSON, [USER, call({"a": 1, "b": {}})], tools=[{"name": "f"}])
    assert not counts.unread


def test_a_map_in_a_table_is_an_object() -> None:
    arguments = pa.array([[("city", "X")]], pa.map_(pa.string(), pa.string()))
    calls = pa.StructArray.from_arrays([pa.array(["f"]), arguments], ["name", "arguments"])
    values = [pa.array(["assistant"]), pa.array([""]), pa.ListArray.from_arrays([0, 1], calls)]
    message = pa.StructArray.from_arrays(values, ["role", "content", "tool_calls"])
    table = pa.table({"messages": pa.ListArray.from_arrays([0, 1], message)})
    ((text, _),), _ = in_table(table, rule(TO_JSON))
    assert text == '<assistant>[f] {"city": "X"}<end>'


def test_the_mask_of_a_marked_template_is_that_of_transformers(tokenizer_file: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file))
    tagged = TO_JSON.replace(
        "{{ m.content or '' }}",
        "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}",
        1,
    ).replace("{{ '<end>' }}", "{{ '<end>' }}{% endgeneration %}{% endif %}")
    chat = [call({"a": 1}), call({"b": "世"}), ANSWER]
    result = tokenizer.apply_chat_template(
        chat, chat_template=tagged, return_assistant_tokens_mask=True, return_dict=True
    )
    of_openai = [call('{"a": 1}'), call('{"b":"世"}'), ANSWER]
    documents = [rule(tagged).fill({"messages": of_openai})]
    (ids,) = rule(tagged).encode(tokenizer.backend_tokenizer, documents)
    assert (ids & ~UNTRAINED).tolist() == result["input_ids"]
    assert (ids < UNTRAINED).tolist() == [bool(bit) for bit in result["assistant_masks"]]


@pytest.mark.parametrize("template", [CHATML, FIRST, MARKED])
@pytest.mark.parametrize(
    ("record", "messages"),
    [
        *(({"messages": chat}, "messages") for chat in ([], None, "", [USER, CALL])),
        ({"messages": [USER, ANSWER | {"content": " "}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [], "id": 7}]}, "messages"),
        ({"messages": [USER, ANSWER | {"weight": 0}]}, "messages"),
        ({"prompt": "Weather?", "completion": None}, PAIR),
        ({"prompt": "Weather?", "completion": " "}, PAIR),
        ({"prompt": "", "completion": ""}, PAIR),
    ],
    ids=str,
)
def test_a_chat_without_messages_or_answers_is_empty(
    template: str, record: dict, messages: Any
) -> None:
    columns = rule(template, messages)
    table = pa.Table.from_pylist([record])
    for documents, counts in (in_lines(record, columns), in_table(table, columns)):
        assert documents == [] and counts.empty == 1


@pytest.mark.parametrize(
    ("template", "record", "unread"),
    [
        (CHATML, {}, {"message.id", "message.thinking"}),
        (CHATML + "{# m.thinking #}", {"id": None}, {"message.id"}),
        (REASONING, {"tools": [{"name": "f"}]}, {"message.id", "tools"}),
        (WITH_TOOLS, {"tools": [{"name": "f"}]}, {"message.id", "message.thinking"}),
    ],
)
def test_columns_and_keys_of_messages_without_an_effect_are_named(
    template: str, record: dict, unread: set[str]
) -> None:
    chat = [USER | {"id": 7}, ANSWER | {"thinking": "hm", "weight": 1}]
    assert rule(template).unread({"messages": chat} | record) == unread


PART = {"type": "text", "text": "a"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}
ONE = {"messages": [USER, ANSWER]}
IN_PYTHON = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
HUGE = "{% for n in range(10**9) %}{{ n }}{% endfor %}"
ENDLESS = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"

# Roles of messages that TURNS_ALONE does not write.
NOT_WRITTEN = ("tool", "developer", "function")

# Each row has a template, the columns with the chat ("m" if the next value is the chat itself), a
# record or a chat, and words of the message.
REFUSED: list[tuple[str, Any, Any, str]] = [
    (CHATML, "m", [USER], "the chat has no answer"),
    (CHATML, "m", [USER | {"content": [PART]}, ANSWER], "not a text, but.*'text'.*datasets.map"),
    (CHATML, "m", [USER, RESULT | {"content": {"t": 20}}, ANSWER], "not a text, but {'t': 20}"),
    (CHATML, "m", [USER | {"content": 7}, ANSWER], "content that is not a text, but 7"),
    (CHATML, "m", {"messages": [USER, ANSWER]}, "not a list of messages.*{'messages': "),
    (CHATML, "m", json.dumps([USER, ANSWER]), "not a list of messages.*datasets.map"),
    (CHATML, "m", {"role": ["user"], "content": ["x"]}, "not a list of messages.*'role'"),
    (CHATML, "m", ["Weather?", "sunny"], "not a list of messages.*'Weather"),
    (CHATML, "m", [USER, {"from": "narrator", "value": "x"}, ANSWER], "role narrator"),
    (CHATML, "m", [USER, {"role": "narrator", "content": "x"}, ANSWER], "role narrator"),
    (CHATML, "m", [USER, ANSWER | {"weight": 0.5}], "`weight` that is neither 0 nor 1"),
    (CHATML, "m", [USER, ANSWER | {"train": False}], "the key `train`, which is not read"),
    (PLAIN, "m", [{"role": "user"}, ANSWER], "rejects this chat"),
    (ODD, "m", says("so", "yes"), "generation"),
    (IN_PYTHON, "m", ONE["messages"], "rejects this chat"),
    (HUGE, "m", ONE["messages"], "OverflowError: Range too big"),
    (ENDLESS, "m", ONE["messages"], "RecursionError"),
    ("{{ 1 / 0 }}", "m", ONE["messages"], "rejects this chat: ZeroDivisionError"),
    *(
        (TURNS_ALONE, "m", [USER, message, ANSWER], f"message 2, .* is {message['role']}")
        for message in (SYSTEM, *(RESULT | {"role": role} for role in NOT_WRITTEN))
    ),
    *(
        (CALLS, "m", [USER, ANSWER | {"tool_calls": calls}], r"`message\.tool_calls` is not a list")
        for calls in ('[{"name": "f"}]', ['{"name": "f"}'], {"name": "f"})
    ),
    *(
        (TO_JSON, "messages", ONE | {"tools": tools}, "`tools` is not a list of objects, each with")
        for tools in (TOOL, ["f"], "f", json.dumps([TOOL]), 7)
    ),
    (CHATML, ("Q: {q}", "a"), {"q": [USER], "a": "x"}, "type list, which is not a text; for chats"),
]


@pytest.mark.parametrize(
    ("template", "messages", "record", "message"), REFUSED, ids=[row[-1][:40] for row in REFUSED]
)
def test_a_chat_that_cannot_be_read_is_refused_with_the_reason(
    template: str, messages: Any, record: Any, message: str
) -> None:
    record = {"m": record} if messages == "m" else record
    with pytest.raises(ValueError, match=message):
        rule(template, messages).fill(record)
    if "tool_calls" in message:
        assert rule(CHATML, "m").fill(record)


def test_backslash_n_is_a_line_break_in_every_template() -> None:
    """Jinja reads it in its own texts, and writes the same."""
    written = r"{title}\n\n{body}\t."
    read = "{title}\n\n{body}\t."
    for key in ("text", "chat_template"):
        assert getattr(DataSettings(packs="p", **{key: written}), key) == read
    assert DataSettings(packs="p", messages=[written, "a"]).messages == (read, "a")
    in_jinja = r"{{ '\n' }}{{ '\\n' }}{{ 'a\tb' }}" + CHATML
    template = DataSettings(packs="p", chat_template=in_jinja).chat_template
    assert template is not None and trained(template, ONE) == trained(in_jinja, ONE)


# ── Chats in packs ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("column", "chat"),
    [("messages", [USER, ANSWER]), ("conversations", SHAREGPT)],
)
def test_chats_are_recognised_by_their_columns(
    column: str, chat: list[dict], tmp_path: Path, tokenizer_file: Path, capsys
) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file))
    fingerprints = set()
    for name, named in (("recognised", {}), ("named", {"messages": column})):
        options = {"chat_template": "plain"} | named
        ((ids, mask),) = packed(tmp_path / name, tokenizer_file, [{column: chat}], **options)
        assert tokenizer.decode(ids[mask]) == "It is sunny.<|endoftext|>"
        text = "User:\nWeather?\n\nAssistant:\nIt is sunny.<|endoftext|>"
        assert ids.tolist() == tokenizer(text).input_ids
        manifest = read_manifest(tmp_path / name / "packs")
        fingerprints.add(manifest["splits"]["train"]["fingerprint"])
    assert len(fingerprints) == 1
    printed = capsys.readouterr().err
    assert printed.count(f"has chats, which are read with data.messages={column}") == 1
    with pytest.raises(InputError, match=r"other settings \(messages"):
        packed(tmp_path / name, tokenizer_file, [{column: chat}], **options | {"messages": "m"})


def test_text_precedes_chats_unless_a_chat_template_is_chosen(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    decode = Tokenizer.from_file(str(tokenizer_file)).decode
    record = ONE | {"text": "words"}
    ((ids, mask),) = packed(tmp_path / "text", tokenizer_file, [record])
    assert decode(ids) == "words" and mask.all()
    ((ids, _),) = packed(tmp_path / "chat", tokenizer_file, [record], chat_template="plain")
    assert decode(ids).startswith("User:\nWeather?")
    with pytest.raises(InputError, match=r"data.text to .*data.messages to .*data.input_ids to"):
        packed(tmp_path / "unclear", tokenizer_file, [ONE | {"input_ids": [1]}])


def test_the_example_in_the_docs_converts_other_chats(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/data.md").read_text()
    (example,) = re.findall(r"```python\n(import datasets.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"system": "Be kind.", "question": "why?", "answer": "so"}\n')
    exec(example)
    records = [json.loads(line) for line in Path("chats.jsonl").read_text().splitlines()]
    ((ids, mask),) = packed(tmp_path, tokenizer_file, records, chat_template="plain")
    decode = Tokenizer.from_file(str(tokenizer_file)).decode
    assert decode(ids) == "System:\nBe kind.\n\nUser:\nwhy?\n\nAssistant:\nso"
    assert decode(ids[mask]) == "so"


def test_the_template_of_a_tokenizer_or_processor_or_file_is_read(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    """Each file of the folder precedes the files that are written before it."""
    folder = shutil.copytree(tokenizer_file.parent, tmp_path / "named")
    several = {"chat_template": [{"name": "default", "template": CHATML}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(several))
    with pytest.raises(InputError, match=r"data\.chat_template: .*or several; either set"):
        chat_template(None, str(folder))
    with pytest.raises(InputError, match=r"data\.chat_template: rag: cannot be read: No such file"):
        chat_template("rag", str(folder))
    (folder / "rag.jinja").write_text("rag")
    assert chat_template(str(folder / "rag.jinja"), str(folder)) == "rag"
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert chat_template(None, str(folder)) == CHATML
    (folder / "chat_template.jinja").write_text(PLAIN)
    assert chat_template(None, str(folder)) == PLAIN


# ── Texts and token ids ───────────────────────────────────────────────────────────────────────────

IDS = [5, 6, 7, 8, 9]


def tokenized(**columns: Any) -> tuple[list[tuple[list[int], list[int]]], Counts]:
    """Return the ids of every document of a record with its trained ids, and the counts."""
    rule = TokenColumns(("input_ids",), TOKEN_COLUMNS, 600)
    documents, counts = in_lines({"input_ids": IDS, **columns}, rule)
    encoded = rule.encode(None, documents)
    return [((ids & ~UNTRAINED).tolist(), ids[ids < UNTRAINED].tolist()) for ids in encoded], counts


ONE_DOCUMENT = ([IDS], [6, 7, 9])
SHORT_MASK = [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("columns", "documents", "trained"),
    [
        ({"attention_mask": [1, 1, 1, 0, 0]}, [[5, 6, 7]], IDS),
        ({"attention_mask": [0, 0, 1, 1, 1]}, [[7, 8, 9]], IDS),
        ({"attention_mask": [0] * 5}, [], IDS),
        ({"attention_mask": [1.0, 1.0, 1.0, 0.0, 0.0]}, [[5, 6, 7]], IDS),
        ({"attention_mask": [1, 1, 2, 2, 0]}, [[5, 6], [7, 8]], IDS),
        ({"attention_mask": [1, 1, 2, 3, 3]}, [[5, 6], [7], [8, 9]], IDS),
        ({"position_ids": [0, 1, 2, 3, 4], "seq_lengths": [2, 3]}, [[5, 6], [7, 8, 9]], IDS),
        ({"position_ids": [0, 1, 0, 1, 0], "attention_mask": SHORT_MASK}, [[5, 6], [7, 8]], IDS),
        ({"cu_seqlens": [0, 2, 5, -1, -1]}, [[5, 6], [7, 8, 9]], IDS),
        ({"attention_mask": None, "position_ids": None}, [IDS], IDS),
        ({"labels": [-100, 6, 7, -100, 9]}, *ONE_DOCUMENT),
        ({"loss_mask": [0, 1, 1, 0, 1]}, *ONE_DOCUMENT),
        ({"assistant_masks": [False, True, True, False, True]}, *ONE_DOCUMENT),
        ({"label_mask": [0.0, 1.0, 1.0, 0.0, 1.0]}, *ONE_DOCUMENT),
        ({"completion_mask": [0, 1, 1, 1, 1], "labels": [5, 6, 7, -100, 9]}, *ONE_DOCUMENT),
        ({"labels": [-100, 6, 7, -100, 9], "seq_lengths": [3, 2]}, [[5, 6, 7], [8, 9]], [6, 7, 9]),
    ],
)
def test_columns_beside_ids_mark_padding_documents_and_losses(
    columns: dict, documents: list, trained: list[int]
) -> None:
    read, counts = tokenized(**columns)
    assert read == [(ids, [number for number in ids if number in trained]) for ids in documents]
    assert counts.empty == (not documents)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"labels": [6, 7, 8, 9, -100]}, "`labels` must have the token or -100.*without a shift"),
        ({"labels": 1}, "column `labels` is not a list of whole numbers"),
        ({"loss_mask": [0, 0.5, 1, 1, 1]}, "column `loss_mask` is not a list"),
        ({"loss_mask": [0, float("nan"), 1, 1, 1]}, "column `loss_mask` is not a list"),
        ({"loss_mask": [0, 1]}, "`loss_mask` must have 1 or 0 for each token"),
        ({"completion_mask": [0, 1, 2, 1, 1]}, "`completion_mask` must have 1 or 0"),
        ({"seq_lengths": [2, 9]}, "seq_lengths are for 11 tokens, but the record has 5"),
        ({"position_ids": [0, 1, 2]}, "position_ids are for 3 tokens"),
        ({"attention_mask": [1, 1]}, "attention_mask are for 2 tokens"),
        ({"attention_mask": [0, 0, 0, -10000, -10000]}, "a length below 0"),
        ({"input_ids": [1, -2]}, "`input_ids` has the id -2"),
        ({"input_ids": [1, 600]}, "has the id 600, but the tokenizer has only 600"),
    ],
)
def test_columns_that_do_not_fit_the_ids_are_rejected(columns: dict, message: str) -> None:
    with pytest.raises(InputError, match=f"x.jsonl:1: .*{message}"):
        tokenized(**columns)


def test_ids_in_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="`ids` is not a list of whole numbers"):
        TokenColumns(("ids",), (), 600).fill({"ids": np.arange(5, dtype=np.uint16).tobytes()})


def test_tokens_and_labels_are_packed_unchanged(tmp_path: Path, tokenizer_file: Path) -> None:
    """Labels that mask nothing do not change the packs."""
    records = [{"ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"ids": [8], "labels": [-100]}]
    documents = packed(tmp_path / "ids", tokenizer_file, records, input_ids="ids")
    assert sorted((ids.tolist(), trained.tolist()) for ids, trained in documents) == [
        ([5, 6, 7], [False, True, True]),
        ([8], [False]),
    ]
    more = {"labels": IDS, "attention_mask": [1] * 5, "token_type_ids": [0] * 5}
    manifests = []
    for name, columns in (("with", more), ("without", {})):
        packed(tmp_path / name, tokenizer_file, [{"ids": IDS, **columns}], input_ids="ids")
        manifests.append(read_manifest(tmp_path / name / "packs"))
    first, second = (manifest["splits"]["train"]["fingerprint"] for manifest in manifests)
    assert first == second
    assert manifests[0]["statistics"]["columns_not_read"] == "token_type_ids"


def test_a_template_sets_columns_into_text(tmp_path: Path) -> None:
    """Null, NaN and infinity are no text. A record without any text is empty."""
    rows = [{"title": number, "n": None, "body": ""} for number in (1.5, math.nan, -math.inf)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    rows += [{"title": "T", "n": 3, "body": None}, {"title": None, "n": "", "body": ""}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for kind, texts_expected, empty in (
        ("jsonl", ["1.5 {}\n", "T 3{}\n"], 3),
        ("parquet", ["1.5 {}\n"], 2),
    ):
        source = open_reader(tmp_path / f"x.{kind}", text="{title} {n}{{}}\n{body}")
        texts, counts = read_chunk(next(source.chunks({})), source.rule)
        assert texts == texts_expected and counts.empty == empty


@pytest.mark.parametrize("text", ["t }", "{t", "{t:.2f}", "{t!r}"])
def test_a_template_with_other_braces_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(InputError, match=r"write a column as \{title\}, and write braces as"):
        TextTemplate.parse(text)


@pytest.mark.parametrize(
    "kinds", [("input_ids", "text"), ("messages", "text"), ("input_ids", "messages")]
)
def test_a_record_is_of_one_kind(kinds: tuple[str, str]) -> None:
    with pytest.raises(ValidationError, match=f"`{kinds[0]}` and `{kinds[1]}` are both set"):
        DataSettings(packs="p", **dict.fromkeys(kinds, "column"))


def test_a_source_inherits_the_keys_that_it_does_not_set() -> None:
    common = {"packs": "p", "tokenizer": "t", "messages": "m", "split": "train_1M"}
    common |= {"chat_template": CHATML}
    sources = [{"source": "a"}, {"source": "b", "text": "t"}, {"name": "made"}]
    several = DataSettings(**common, sources=[source | {"weight": 1} for source in sources])
    first, second, made = several.sources
    weights = [source.weight for source in several.sources]
    assert weights == pytest.approx([1 / 3] * 3, abs=1e-12), "weights have a sum of 1"
    assert first.messages == "m" and first.chat_template == CHATML and first.split == "train_1M"
    assert second.messages is None and second.text == "t" and second.chat_template is None
    assert made.source is None and made.messages is None
    assert DataSettings(**several.model_dump(mode="json")) == several
    one = DataSettings(**common, source="a", validation={"split": "test"}).validation
    assert one.source == "a" and one.messages == "m" and one.split == "test"
    other = DataSettings(**common, source="a", validation={"source": "b"})
    assert other.validation.split == "train" and other.validation.messages == "m"
    assert DataSettings(**other.model_dump(mode="json")) == other
