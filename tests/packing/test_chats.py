"""Chats become the text and the mask that transformers gives for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from foundation.errors import InputError
from packing.chunks import Chunk, Counts, read_chunk
from packing.records import CHATML, ChatColumns, chat_columns
from packing.settings import DataSettings, SourceSettings

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Weather?"}
ANSWER = {"role": "assistant", "content": "It is sunny."}
RESULT = {"role": "tool", "content": "sunny"}
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)


def calling(written: str, body: str = "") -> str:
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
    """Return the text that transformers writes for a chat."""
    return render_jinja_template([chat], chat_template=template, **more)[0][0]


def call(arguments: Any) -> dict:
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}


ARGUMENTS = st.dictionaries(
    st.text("abc_", min_size=1, max_size=5),
    st.none() | st.integers() | st.text(max_size=5) | st.booleans() | st.lists(st.integers()),
    max_size=3,
)


@pytest.mark.parametrize("template", OBJECTS.values(), ids=OBJECTS)
@given(arguments=ARGUMENTS, spaces=st.sampled_from([(", ", ": "), (",", ":")]))
def test_arguments_in_json_are_objects_for_a_template_of_objects(
    template: str, arguments: dict, spaces: tuple[str, str]
) -> None:
    for given_form in (arguments, json.dumps(arguments, separators=spaces)):
        chat = [USER, call(given_form), RESULT, ANSWER]
        result = trained(template, {"messages": chat})
        assert result is not None
        assert result[0] == expected(template, [USER, call(arguments), RESULT, ANSWER])


@pytest.mark.parametrize("template", TEXTS.values(), ids=TEXTS)
@given(arguments=ARGUMENTS, spaces=st.sampled_from([(", ", ": "), (",", ":")]))
def test_a_template_that_writes_arguments_as_text_gets_them_as_json(
    template: str, arguments: dict, spaces: tuple[str, str]
) -> None:
    text = json.dumps(arguments, separators=spaces, ensure_ascii=False)
    result = trained(template, {"messages": [USER, call(text)]})
    assert result == (expected(template, [USER, call(text)]), f"[f] {text}<end>")
    of_object = trained(template, {"messages": [USER, call(arguments)]})
    written = json.dumps(arguments, ensure_ascii=False)
    assert of_object == (expected(template, [USER, call(written)]), f"[f] {written}<end>")


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a": "{\\"b\\": 1}"}', '{"a": "{\\"b\\": 1}"}'),
        ("{}", "{}"),
        ("", "{}"),
        ("city=X", '"city=X"'),
        ('{"a": 1', '"{\\"a\\": 1"'),
        ("5", '"5"'),
    ],
)
def test_only_arguments_that_are_json_objects_are_decoded(arguments: str, written: str) -> None:
    assert trained(TO_JSON, {"messages": [USER, call(arguments)]}) == (
        f"<user>Weather?<end><assistant>[f] {written}<end>",
        f"[f] {written}<end>",
    )


def in_table(record: dict, columns: ChatColumns) -> tuple[list, Counts]:
    """Return the documents of a record that is read from a table."""
    table = pa.Table.from_pylist([record])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    chunk = Chunk("table", "x, row ", 0, sink.getvalue().to_pybytes(), {})
    return read_chunk(chunk, columns)


def test_nulls_in_tool_calls_are_kept_in_json_and_dropped_in_a_table() -> None:
    record = {
        "messages": [USER, call({"a": 1, "b": {"c": None}})],
        "tools": [{"name": "f", "default": None}],
    }
    lines = Chunk("jsonl", "x:", 1, json.dumps(record).encode(), {})
    (of_lines,), _ = read_chunk(lines, rule(TO_JSON))
    assert of_lines[0] == expected(TO_JSON, record["messages"], tools=record["tools"])
    assert '{"a": 1, "b": {"c": null}}' in of_lines[0] and '"default": null' in of_lines[0]
    (of_rows,), counts = in_table(record, rule(TO_JSON))
    dropped = [USER, call({"a": 1, "b": {}})]
    assert of_rows[0] == expected(TO_JSON, dropped, tools=[{"name": "f"}])
    assert not counts.unread


def test_a_map_in_a_table_is_an_object() -> None:
    arguments = pa.array([[("city", "X")]], pa.map_(pa.string(), pa.string()))
    calls = pa.StructArray.from_arrays([pa.array(["f"]), arguments], ["name", "arguments"])
    message = pa.StructArray.from_arrays(
        [
            pa.array(["assistant"]),
            pa.array([""]),
            pa.ListArray.from_arrays(pa.array([0, 1]), calls),
        ],
        ["role", "content", "tool_calls"],
    )
    table = pa.table({"messages": pa.ListArray.from_arrays(pa.array([0, 1]), message)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    chunk = Chunk("table", "x, row ", 0, sink.getvalue().to_pybytes(), {})
    ((text, _),), _ = read_chunk(chunk, rule(TO_JSON))
    assert text == '<assistant>[f] {"city": "X"}<end>'


PAIR = ("prompt", "completion")
SHAREGPT = [{"from": "human", "value": "Weather?"}, {"from": "gpt", "value": "It is sunny."}]


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["prompts", "marks"])
@pytest.mark.parametrize(
    ("record", "messages", "chat"),
    [
        ({"conversations": SHAREGPT}, "conversations", [USER, ANSWER]),
        ({"m": [SHAREGPT[0], ANSWER]}, "m", [USER, ANSWER]),
        ({"m": [SHAREGPT[0], ANSWER | {"value": 0.5}]}, "m", [USER, ANSWER]),
        ({"chosen": [USER, ANSWER], "rejected": [USER]}, "chosen", [USER, ANSWER]),
        ({"m": [USER | {"weight": None}, ANSWER]}, "m", [USER, ANSWER]),
        ({"m": [USER, ANSWER | {"tool_calls": []}]}, "m", [USER, ANSWER]),
        ({"prompt": "Weather?", "completion": "It is sunny."}, PAIR, [USER, ANSWER]),
    ],
)  # fmt: skip
def test_a_chat_of_each_form_equals_its_usual_form(
    template: str, record: dict, messages: Any, chat: list[dict]
) -> None:
    result = trained(template, record, messages)
    answer = chat[-1]["content"]
    assert result == (expected(template, chat), f"{answer}<|im_end|>\n")


def test_the_mask_of_a_marked_template_is_that_of_transformers(tokenizer_file: Path) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file))
    tagged = TO_JSON.replace("{{ m.content or '' }}", "{% generation %}{{ m.content or '' }}", 1)
    tagged = tagged.replace("{{ '<end>' }}", "{{ '<end>' }}{% endgeneration %}")
    tagged = tagged.replace("{% generation %}", "{% if m.role == 'assistant' %}{% generation %}", 1)
    tagged = tagged.replace("{% endgeneration %}", "{% endgeneration %}{% endif %}")
    chat = [call({"a": 1}), call({"b": "世"}), ANSWER]
    result = tokenizer.apply_chat_template(
        chat, chat_template=tagged, return_assistant_tokens_mask=True, return_dict=True
    )
    of_openai = [call('{"a": 1}'), call('{"b":"世"}'), ANSWER]
    documents = [rule(tagged).fill({"messages": of_openai})]
    (ids,) = rule(tagged).encode(tokenizer.backend_tokenizer, documents)
    assert (ids & 0x7FFFFFFF).tolist() == result["input_ids"]
    assert (ids < 1 << 31).tolist() == [bool(bit) for bit in result["assistant_masks"]]


# Qwen2.5 and Llama 3.1 read the first message of the prompt, which has none.
FIRST = "{% if messages[0]['role'] != 'system' %}{{ '<system>You are Q.' }}{% endif %}" + CHATML
NO_PROMPT = FIRST.replace(
    "{% for", "{% if not messages %}{{ raise_exception('no chat') }}{% endif %}{% for", 1
)


@pytest.mark.parametrize("template", [CHATML, FIRST, NO_PROMPT, MARKED])
@pytest.mark.parametrize("before", [[], [SYSTEM]], ids=["answer", "system"])
def test_a_chat_may_begin_with_an_answer(template: str, before: list[dict]) -> None:
    chat = [*before, ANSWER, USER, ANSWER]
    end = "It is sunny.<|im_end|>\n"
    result = trained(template, {"messages": chat})
    assert result == (expected(template, chat), f"{end}|{end}")
    assert trained(template, {"messages": chat[: len(before) + 1]}) == (
        expected(template, chat[: len(before) + 1]),
        end,
    )


@pytest.mark.parametrize("template", [CHATML, FIRST, MARKED])
@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ""}, "messages"),
        ({"messages": [USER, ANSWER | {"content": " "}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [], "id": 7}]}, "messages"),
        ({"messages": [USER, ANSWER | {"weight": 0}]}, "messages"),
        ({"prompt": "Weather?", "completion": None}, PAIR),
        ({"prompt": "", "completion": ""}, PAIR),
    ],
    ids=str,
)
def test_a_chat_without_messages_or_answers_is_empty(
    template: str, record: dict, messages: Any
) -> None:
    columns = rule(template, messages)
    lines = Chunk("jsonl", "x:", 1, json.dumps(record).encode(), {})
    for documents, counts in (read_chunk(lines, columns), in_table(record, columns)):
        assert documents == [] and counts.empty == 1


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_an_answer_of_reasoning_alone_has_a_loss(key: str) -> None:
    template = (
        "{% for message in messages %}{{ message.role }}: {{ message.reasoning_content }}"
        "{{ message.content }};{% endfor %}"
    )
    record = {"messages": [USER, {"role": "assistant", "content": "", key: "hm"}]}
    columns = rule(template, "messages")
    assert columns.unread(record) == set()
    text, [(start, end)] = columns.fill(record)
    assert "hm" in text[start:end]


PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("record", "messages", "message"),
    [
        ({"m": [USER]}, "m", "the chat has no answer"),
        ({"m": [USER | {"content": [PART]}, ANSWER]}, "m", "not a text, but.*'text'.*datasets.map"),
        ({"m": [USER, RESULT | {"content": {"t": 20}}, ANSWER]}, "m", "not a text, but {'t': 20}"),
        ({"m": [USER | {"content": 7}, ANSWER]}, "m", "content that is not a text, but 7"),
        ({"m": {"messages": [USER, ANSWER]}}, "m", "not a list of messages.*{'messages': "),
        ({"m": json.dumps([USER, ANSWER])}, "m", "not a list of messages.*datasets.map"),
        ({"m": {"role": ["user"], "content": ["x"]}}, "m", "not a list of messages.*'role'"),
        ({"m": ["Weather?", "sunny"]}, "m", "not a list of messages.*'Weather"),
        ({"q": [USER], "a": "x"}, ("Q: {q}", "a"), "type list, which is not a text; for chats"),
    ],
)
def test_a_chat_of_an_unknown_form_is_shown_in_the_message(
    record: dict, messages: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        rule(CHATML, messages).fill(record)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"default": None}}}


@pytest.mark.parametrize("tools", [None, [], ""])
def test_no_tools_are_passed_to_the_template_as_none(tools: Any) -> None:
    template = "{{ tools is none }}" + CHATML
    result = trained(template, {"messages": [USER, ANSWER], "tools": tools})
    assert result is not None and result[0].startswith("True<|im_start|>")


@pytest.mark.parametrize("tools", [TOOL, ["f"], "f", json.dumps([TOOL]), 7], ids=str)
def test_tools_of_another_form_are_refused_with_the_form(tools: Any) -> None:
    message = "column `tools` is not a list of objects, each with the schema of a function: "
    with pytest.raises(ValueError, match=message):
        rule(TO_JSON).fill({"messages": [USER, ANSWER], "tools": tools})


@pytest.mark.parametrize("calls", ['[{"name": "f"}]', ['{"name": "f"}'], {"name": "f"}], ids=str)
def test_calls_in_json_are_refused_instead_of_written_by_characters(calls: Any) -> None:
    template = "{% for m in messages %}{{ m.content }}"
    template += "{% for call in m.tool_calls or [] %}[{{ call.name }}]{% endfor %}{% endfor %}"
    chat = {"messages": [USER, ANSWER | {"tool_calls": calls}]}
    with pytest.raises(ValueError, match=r"`message\.tool_calls` is not a list"):
        rule(template).fill(chat)
    assert rule(CHATML).fill(chat)


@pytest.mark.parametrize(
    "code",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_cannot_be_computed_rejects_the_chat(code: str) -> None:
    with pytest.raises(ValueError, match="the chat template rejects this chat: "):
        rule(code + CHATML).fill({"messages": [USER, ANSWER]})


ESCAPED = r"{title}\n\n{body}\t."


@pytest.mark.parametrize("key", ["text", "messages", "chat_template"])
def test_a_recipe_may_have_backslash_n_in_any_template(key: str) -> None:
    value: Any = [ESCAPED, "answer"] if key == "messages" else ESCAPED
    settings = DataSettings(packs="p", **{key: value})
    wanted = "{title}\n\n{body}\t."
    assert getattr(settings, key) == ((wanted, "answer") if key == "messages" else wanted)
    assert DataSettings(**settings.model_dump(mode="json")) == settings


def test_backslash_n_in_jinja_writes_the_same_text() -> None:
    template = r"{{ '\n' }}{{ '\\n' }}{{ 'a\tb' }}" + CHATML
    read = DataSettings(packs="p", chat_template=template).chat_template
    assert read is not None
    assert trained(read, {"messages": [USER, ANSWER]}) == trained(
        template, {"messages": [USER, ANSWER]}
    )


def test_a_message_of_an_unreadable_chat_names_its_line() -> None:
    lines = Chunk("jsonl", "x.jsonl:", 1, b'{"m": "x"}', {})
    with pytest.raises(InputError, match=r"x\.jsonl:1: column `m` is not a list of messages"):
        read_chunk(lines, rule(CHATML, "m"))
