"""Records become documents: chats with a loss on their answers, and tokens unchanged."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from foundation.errors import InputError
from packing.arrow import read_manifest
from packing.chunks import Chunk, Counts, tokenize
from packing.prepare import prepare
from packing.records import CHATML, PLAIN, UNTRAINED, TokenColumns, chat_template, records_of
from packing.settings import DataSettings
from packing.store import open_packs
from packing.tokenizer import TextTokenizer

MARKED = (
    "\n{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
DATED = (
    "{% if strftime_now is defined %}{{ strftime_now('%Y') }}"
    "{% else %}Date: 26 Jul 2024\n{% endif %}" + CHATML
)
CHATS = [
    [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello, 世界."}],
    [
        {"role": "system", "content": "Be kind."},
        *(
            {"role": role, "content": f"{role} {n}"}
            for n in range(3)
            for role in ("user", "assistant")
        ),
    ],
]


def packed(
    tmp_path: Path, tokenizer: Path, records: list[dict], **more: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Prepare the records. Return the tokens of every document with the mask of trained tokens."""
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = DataSettings(
        source=str(tmp_path / "x.jsonl"),
        tokenizer=str(tokenizer),
        packs=tmp_path / "packs",
        length=1024,
        **more,
    )
    prepare(settings, progress=False)
    packs = open_packs(settings, "train")
    documents = []
    for index in range(len(packs)):
        pack = packs[index]
        trained = np.ones(1024, bool) if pack.trained is None else pack.trained
        ends = np.cumsum(pack.lengths)
        documents += [
            (pack.input_ids[a:b], trained[a:b])
            for a, b in zip(ends - pack.lengths, ends, strict=True)
        ]
    return documents


def tokenized(
    tokenizer: Path, records: list[dict], **more: Any
) -> tuple[list[tuple[list[int], list[int]]], Counts]:
    """Return the ids of every document with its trained ids, and the counts.

    It runs the code of a worker.
    """
    text_tokenizer = TextTokenizer("t", Tokenizer.from_file(str(tokenizer)), {"eos": 0})
    text_tokenizer.tokenizer.post_processor = None
    settings = DataSettings(source="x", tokenizer="t", packs="p", **more)
    lines = "\n".join(map(json.dumps, records)).encode()
    result = tokenize(
        Chunk("jsonl", "x.jsonl:", 1, lines, {}),
        text_tokenizer,
        records_of(settings, text_tokenizer),
    )
    documents = np.split(result.tokens, np.cumsum(result.lengths)[:-1])
    return [
        ((ids & ~UNTRAINED).tolist(), ids[ids < UNTRAINED].tolist())
        for ids in documents
        if len(ids)
    ], result.counts


def answers(tokenizer: Path, record: dict, template: str, **more: Any) -> tuple[str, str]:
    """Return the text of the chat in a record, and the part of it that is trained on."""
    ((ids, trained),), _ = tokenized(
        tokenizer, [record], messages="messages", chat_template=template, **more
    )
    decode = Tokenizer.from_file(str(tokenizer)).decode
    return decode(ids), decode(trained)


@pytest.mark.parametrize("template", [CHATML, MARKED, DATED], ids=["chatml", "marked", "dated"])
def test_the_answers_of_a_chat_and_their_ends_are_trained_on(
    template: str, tmp_path: Path, tokenizer_file: Path
) -> None:
    records = [{"messages": chat} for chat in CHATS]
    documents = packed(
        tmp_path, tokenizer_file, records, messages="messages", chat_template=template
    )
    decode = Tokenizer.from_file(str(tokenizer_file)).decode
    rendered = {}
    for ids, trained in documents:
        rendered[decode(ids)] = decode(ids[trained])
    expected = PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file))
    for chat in CHATS:
        text = expected.apply_chat_template(
            chat, chat_template=template.replace("strftime_now is defined", "false"), tokenize=False
        )
        answers = "".join(m["content"] + "<|im_end|>\n" for m in chat if m["role"] == "assistant")
        assert rendered[text].replace("�", "") == answers


TURNS = {"system": "Be kind.", "human": "why?", "gpt": "so"}
SHAREGPT = {"conversations": [{"from": role, "value": text} for role, text in TURNS.items()]}


@pytest.mark.parametrize(
    ("record", "keys", "before"),
    [
        ({"q": "why", "a": "so"}, {"messages": ["{q}?", "a"], "chat_template": CHATML}, ""),
        (
            SHAREGPT,
            {"messages": "conversations", "chat_template": CHATML},
            "<|im_start|>system\nBe kind.<|im_end|>\n",
        ),
    ],
    ids=["prompt and response", "ShareGPT's names"],
)
def test_a_chat_in_other_columns_is_read(
    record: dict, keys: dict, before: str, tmp_path: Path, tokenizer_file: Path
) -> None:
    ((ids, trained),) = packed(tmp_path, tokenizer_file, [record], **keys)
    decode = Tokenizer.from_file(str(tokenizer_file)).decode
    assert (
        decode(ids)
        == f"{before}<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
    )
    assert decode(ids[trained]) == "so<|im_end|>\n"


@pytest.mark.parametrize(
    ("record", "messages", "prompt"),
    [
        ({"messages": CHATS[0], "id": "a"}, "messages", "User:\nHi?\n\n"),
        (SHAREGPT, "conversations", "System:\nBe kind.\n\nUser:\nwhy?\n\n"),
    ],
    ids=["messages", "ShareGPT"],
)
def test_chats_are_recognised_by_their_columns(
    record: dict,
    messages: Any,
    prompt: str,
    tmp_path: Path,
    tokenizer_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folders = [tmp_path / name for name in ("recognised", "named")]
    for folder, named in zip(folders, ({}, {"messages": messages}), strict=True):
        folder.mkdir()
        ((ids, trained),) = packed(folder, tokenizer_file, [record], chat_template="plain", **named)
        decode = Tokenizer.from_file(str(tokenizer_file)).decode
        answer = decode(ids[trained], skip_special_tokens=False)
        assert answer in ("Hello, 世界.<|endoftext|>", "so<|endoftext|>")
        text = decode(ids, skip_special_tokens=False)
        assert text == f"{prompt}Assistant:\n{answer}"
    printed = capsys.readouterr().err
    assert printed.count("has chats, which are read with data.messages=") == 1
    recognised, named = (read_manifest(folder / "packs") for folder in folders)
    assert recognised["splits"]["train"]["fingerprint"] == named["splits"]["train"]["fingerprint"]
    with pytest.raises(InputError, match=r"other settings \(messages"):
        packed(folders[0], tokenizer_file, [record], chat_template="plain", messages="m")


def test_the_example_in_the_docs_converts_other_chats(
    tmp_path: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    (example,) = re.findall(r"```python\n(import datasets.*?)```", page, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"system": "Be kind.", "question": "why?", "answer": "so"}\n')
    exec(example)
    records = [json.loads(line) for line in Path("chats.jsonl").read_text().splitlines()]
    ((ids, trained),) = packed(tmp_path, tokenizer_file, records, chat_template="plain")
    decode = Tokenizer.from_file(str(tokenizer_file)).decode
    assert decode(ids) == "System:\nBe kind.\n\nUser:\nwhy?\n\nAssistant:\nso"
    assert decode(ids[trained]) == "so"


def test_columns_of_text_precede_those_of_chats(tmp_path: Path, tokenizer_file: Path) -> None:
    ((ids, trained),) = packed(tmp_path, tokenizer_file, [SHAREGPT | {"text": "words"}])
    assert Tokenizer.from_file(str(tokenizer_file)).decode(ids) == "words" and trained.all()
    with pytest.raises(
        InputError, match=r"Set data.text to .*data.messages to .*data.input_ids to"
    ):
        (tmp_path / "other").mkdir()
        packed(tmp_path / "other", tokenizer_file, [{"messages": CHATS[0], "input_ids": [1]}])


def test_a_chosen_chat_template_selects_chats_beside_text(
    tmp_path: Path, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = {"messages": CHATS[0], "text": "words"}
    ((ids, _),) = packed(tmp_path, tokenizer_file, [record], chat_template="plain")
    assert Tokenizer.from_file(str(tokenizer_file)).decode(ids).startswith("User:\nHi?")
    assert "has chats, which are read with data.messages=messages" in capsys.readouterr().err


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_the_plain_template_accepts_tool_calls_without_content(
    content: dict, tokenizer_file: Path
) -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]} | content
    chat = [CHATS[0][0], call, {"role": "tool", "content": "7"}, CHATS[0][1]]
    text, trained = answers(tokenizer_file, {"messages": chat}, "plain")
    assert text == "User:\nHi?\n\nAssistant:\nTool:\n7\n\nAssistant:\nHello, 世界."
    assert trained == "Hello, 世界."
    with pytest.raises(InputError, match="the chat template rejects this chat"):
        answers(tokenizer_file, {"messages": [{"role": "user"}, CHATS[0][1]]}, "plain")


def test_the_plain_template_is_that_of_transformers(tokenizer_file: Path) -> None:
    expected = PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file), eos_token="<|endoftext|>"
    )
    text = expected.apply_chat_template(CHATS[1], chat_template=PLAIN, tokenize=False)
    assert text == (
        "System:\nBe kind.\n\n"
        "User:\nuser 0\n\nAssistant:\nassistant 0<|endoftext|>"
        "User:\nuser 1\n\nAssistant:\nassistant 1<|endoftext|>"
        "User:\nuser 2\n\nAssistant:\nassistant 2<|endoftext|>"
    )
    ids = expected(text).input_ids
    _, trained = answers(tokenizer_file, {"messages": CHATS[1]}, "plain")
    assert trained == "assistant 0assistant 1assistant 2"
    ((written, _),), _ = tokenized(
        tokenizer_file, [{"messages": CHATS[1]}], messages="messages", chat_template="plain"
    )
    assert written == ids


def test_tokens_and_labels_are_read_unchanged(tmp_path: Path, tokenizer_file: Path) -> None:
    records = [{"ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"ids": [8], "labels": [-100]}]
    documents = packed(tmp_path, tokenizer_file, records, input_ids="ids")
    assert sorted((ids.tolist(), trained.tolist()) for ids, trained in documents) == [
        ([5, 6, 7], [False, True, True]),
        ([8], [False]),
    ]


IDS = [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"attention_mask": [1, 1, 1, 0, 0]}, [[5, 6, 7]]),
        ({"attention_mask": [0, 0, 1, 1, 1]}, [[7, 8, 9]]),
        ({"attention_mask": [2, 3]}, [[5, 6], [7, 8, 9]]),
        ({"attention_mask": [0] * 5}, []),
        ({"attention_mask": [1.0, 1.0, 1.0, 0.0, 0.0]}, [[5, 6, 7]]),
        ({"attention_mask": [1, 1, 2, 2, 0]}, [[5, 6], [7, 8]]),
        ({"attention_mask": [1, 1, 2, 3, 3]}, [[5, 6], [7], [8, 9]]),
        ({"position_ids": [0, 1, 0, 1, 2]}, [[5, 6], [7, 8, 9]]),
        ({"position_ids": [0, 1, 2, 3, 4], "seq_lengths": [2, 3]}, [[5, 6], [7, 8, 9]]),
        ({"position_ids": [0, 1, 0, 1, 0], "attention_mask": [1, 1, 1, 1, 0]}, [[5, 6], [7, 8]]),
        ({"sequence_id": [0, 0, 1, 1, -1]}, [[5, 6], [7, 8]]),
        ({"cu_seqlens": [0, 2, 5, 5]}, [[5, 6], [7, 8, 9]]),
        ({"cu_seqlens": [0, 2, 5, -1, -1]}, [[5, 6], [7, 8, 9]]),
        ({"attention_mask": None, "position_ids": None}, [IDS]),
    ],
)
def test_columns_beside_ids_mark_padding_and_documents(
    columns: dict, expected: list, tokenizer_file: Path
) -> None:
    documents, counts = tokenized(
        tokenizer_file, [{"input_ids": IDS, **columns}], input_ids="input_ids"
    )
    assert documents == [(ids, ids) for ids in expected]
    assert counts.empty == (not expected) and counts.trained == counts.tokens


@pytest.mark.parametrize(
    "columns",
    [
        {"labels": [-100, 6, 7, -100, 9]},
        {"loss_mask": [0, 1, 1, 0, 1]},
        {"assistant_masks": [False, True, True, False, True]},
        {"label_mask": [0.0, 1.0, 1.0, 0.0, 1.0]},
        {"completion_mask": [0, 1, 1, 1, 1], "labels": [5, 6, 7, -100, 9]},
        {
            "labels": [-100, 6, 7, -100, 9],
            "position_ids": [0, 1, 2, 3, 4],
            "attention_mask": [1] * 5,
        },
    ],
    ids=lambda columns: "+".join(columns),
)
def test_columns_beside_ids_mark_trained_tokens(columns: dict, tokenizer_file: Path) -> None:
    assert tokenized(tokenizer_file, [{"input_ids": IDS, **columns}], input_ids="input_ids")[0] == [
        (IDS, [6, 7, 9])
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            {"labels": [6, 7, 8, 9, -100]},
            "`labels` must have the token or -100 for each token; .* without a shift",
        ),
        ({"labels": 1}, "column `labels` is not a list of whole numbers"),
        ({"loss_mask": [0, 0.5, 1, 1, 1]}, "column `loss_mask` is not a list"),
        ({"loss_mask": [0, float("nan"), 1, 1, 1]}, "column `loss_mask` is not a list"),
        ({"loss_mask": [0, 1]}, "`loss_mask` must have 1 or 0 for each token"),
        ({"completion_mask": [0, 1, 2, 1, 1]}, "`completion_mask` must have 1 or 0"),
        ({"seq_lengths": [2, 9]}, "seq_lengths are for 11 tokens, but the record has 5"),
        ({"position_ids": [0, 1, 2]}, "position_ids are for 3 tokens"),
        ({"attention_mask": [1, 1]}, "attention_mask are for 2 tokens"),
        ({"attention_mask": [0, 0, 0, -10000, -10000]}, "a length below 0"),
    ],
)
def test_columns_that_do_not_fit_the_ids_are_rejected(
    columns: dict, message: str, tokenizer_file: Path
) -> None:
    with pytest.raises(InputError, match=f"x.jsonl:1: .*{message}"):
        tokenized(tokenizer_file, [{"input_ids": IDS, **columns}], input_ids="input_ids")


def test_ids_in_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="`ids` is not a list of whole numbers"):
        TokenColumns(("ids",), (), 600).fill({"ids": np.arange(5, dtype=np.uint16).tobytes()})


def test_labels_that_mask_nothing_do_not_change_packs(tmp_path: Path, tokenizer_file: Path) -> None:
    fingerprints = []
    for name, columns in (
        ("with", {"labels": IDS, "attention_mask": [1] * 5, "token_type_ids": [0] * 5}),
        ("without", {}),
    ):
        (tmp_path / name).mkdir()
        packed(
            tmp_path / name, tokenizer_file, [{"input_ids": IDS, **columns}], input_ids="input_ids"
        )
        fingerprints.append(
            read_manifest(tmp_path / name / "packs")["splits"]["train"]["fingerprint"]
        )
    assert fingerprints[0] == fingerprints[1]
    assert (
        read_manifest(tmp_path / "with" / "packs")["statistics"]["columns_not_read"]
        == "token_type_ids"
    )


USER = {"role": "user", "content": "why?"}
ANSWER = {"role": "assistant", "content": "so"}
FUNCTION = {"function": {"name": "f"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [FUNCTION]}
CALLS = CHATML.replace(
    "message.content",
    "message.content + (message.tool_calls | tojson if message.tool_calls else '')",
)


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_an_answer_of_weight_0_is_not_trained_on(template: str, tokenizer_file: Path) -> None:
    first = {"role": "assistant", "content": "no", "weight": 0}
    chat = [USER, first, USER, ANSWER | {"weight": 1}]
    text, trained = answers(tokenizer_file, {"messages": chat}, template)
    assert "no<|im_end|>" in text and trained == "so<|im_end|>\n"
    keys = {"messages": "messages", "chat_template": template}
    documents, counts = tokenized(tokenizer_file, [{"messages": [USER, first]}], **keys)
    assert documents == [] and counts.empty == 1


@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["chatml", "marked"])
def test_an_answer_that_the_template_does_not_write_is_not_trained_on(
    template: str, tokenizer_file: Path
) -> None:
    chat = [USER, CALL, {"role": "tool", "content": "r"}, ANSWER]
    assert answers(tokenizer_file, {"messages": chat}, template)[1] == "so<|im_end|>\n"
    keys = {"messages": "messages", "chat_template": template}
    documents, counts = tokenized(tokenizer_file, [{"messages": chat[:2]}], **keys)
    assert documents == [] and counts.empty == 1 and counts.unread == ("message.tool_calls",)


def test_an_answer_of_tool_calls_that_the_template_writes_is_trained_on(
    tokenizer_file: Path,
) -> None:
    chat = [USER, CALL, {"role": "tool", "content": "r"}, ANSWER]
    expected = '[{"function": {"name": "f"}}]<|im_end|>\nso<|im_end|>\n'
    assert answers(tokenizer_file, {"messages": chat}, CALLS)[1] == expected


def test_nulls_in_a_message_are_not_written(tokenizer_file: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [FUNCTION], "name": None, "id": None}
    expected = f"[{json.dumps(FUNCTION)}]<|im_end|>\n"
    template = CALLS.replace("{{ '<|im_start|>'", "{{ message.name or '<|im_start|>'")
    assert answers(tokenizer_file, {"messages": [USER, call]}, template)[1] == expected


# DeepSeek-R1's template tests a content for none, and Mistral's requires calls or roles by turns.
NULL_CONTENT = CALLS.replace(
    "message.content +", "(message['content'] if message['content'] is not none else 'null') +"
)
BY_TURNS = (
    "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls and loop.index == 2 %}"
    "{{ raise_exception('by turns') }}{% endif %}{% endfor %}" + CALLS
)


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["no content", "null content"])
def test_a_null_content_reaches_a_template_that_tests_for_it(
    content: dict, tokenizer_file: Path
) -> None:
    call = {"role": "assistant", "tool_calls": [FUNCTION]} | content
    trained = answers(tokenizer_file, {"messages": [USER, call]}, NULL_CONTENT)[1]
    assert trained == f"null[{json.dumps(FUNCTION)}]<|im_end|>\n"


def test_a_template_that_refuses_a_chat_without_a_message_writes_it(tokenizer_file: Path) -> None:
    chat = [USER, CALL, {"role": "tool", "content": "r"}, ANSWER]
    expected = '[{"function": {"name": "f"}}]<|im_end|>\nso<|im_end|>\n'
    assert answers(tokenizer_file, {"messages": chat}, BY_TURNS)[1] == expected


TURNS_ALONE = (
    "{% for m in messages if m.role in ('user', 'assistant') %}"
    "{{ m.role + ':\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)


@pytest.mark.parametrize("role", ["system", "developer", "tool", "function"])
def test_a_message_that_the_template_does_not_write_is_refused(
    role: str, tokenizer_file: Path
) -> None:
    final = {"role": "assistant", "content": "It is 4."}
    message = {"role": role, "content": "Be kind." if role == "system" else "4"}
    with pytest.raises(InputError, match=f"does not write message 2, whose role is {role}"):
        answers(tokenizer_file, {"messages": [USER, message, final]}, TURNS_ALONE)
    chat = [USER, {"role": role, "content": ""}, final]
    assert answers(tokenizer_file, {"messages": chat}, TURNS_ALONE)[1] == "It is 4.\n"


def test_a_prompt_without_a_response_is_empty(tokenizer_file: Path) -> None:
    keys = {"messages": ["instruction", "output"], "chat_template": CHATML}
    records = [{"instruction": "why?", "output": output} for output in ("", None, " ", "so")]
    documents, counts = tokenized(tokenizer_file, records, **keys)
    assert len(documents) == 1 and counts.empty == 3


THINKING = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
DISTILLED = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<U>' + m.content }}{% else %}"
    "{{ '<A>' + m.content.split('</think>')[-1] + '<E>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<A><think>\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "contents", "trained"),
    [
        (THINKING, ["so"], "so<|im_end|>\n"),
        (THINKING, ["so", "yes"], "so<|im_end|>\nyes<|im_end|>\n"),
        (THINKING, ["<think>\nhm</think>so"], "hm</think>so<|im_end|>\n"),
        (DISTILLED, ["so"], "so<E>"),
        (DISTILLED, ["<b>so", "yes"], "<b>so<E>yes<E>"),
        (DISTILLED, ["<think>\nhm</think>so"], "so<E>"),
    ],
)
def test_a_prompt_that_opens_a_thought_keeps_the_answer(
    template: str, contents: list[str], trained: str, tokenizer_file: Path
) -> None:
    chat = [
        message
        for content in contents
        for message in (USER, {"role": "assistant", "content": content})
    ]
    assert answers(tokenizer_file, {"messages": chat}, template)[1] == trained


WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML


def test_tools_are_passed_to_a_template_that_uses_them(tokenizer_file: Path) -> None:
    record = {"messages": [USER, ANSWER], "tools": [{"name": "f"}]}
    text, trained = answers(tokenizer_file, record, WITH_TOOLS)
    assert text.startswith('[{"name": "f"}]<|im_start|>user') and trained == "so<|im_end|>\n"
    keys = {"messages": "messages", "chat_template": CHATML}
    assert tokenized(tokenizer_file, [record], **keys)[1].unread == ("tools",)


def test_roles_of_sharegpt_are_those_of_templates(tokenizer_file: Path) -> None:
    turns = [("system", "a"), ("human", "b"), ("gpt", "c"), ("tool", "d"), ("gpt", "e")]
    chat = [{"from": role, "value": text} for role, text in turns]
    text, trained = answers(tokenizer_file, {"messages": chat}, CHATML)
    roles = ["system", "user", "assistant", "tool", "assistant"]
    assert text == "".join(
        f"<|im_start|>{role}\n{words}<|im_end|>\n"
        for role, (_, words) in zip(roles, turns, strict=True)
    )
    assert trained == "c<|im_end|>\ne<|im_end|>\n"
    for narrator in ({"from": "narrator", "value": "x"}, {"role": "narrator", "content": "x"}):
        with pytest.raises(InputError, match="role narrator"):
            answers(tokenizer_file, {"messages": [USER, narrator, ANSWER]}, CHATML)
    named = {"messages": [{"role": "narrator", "content": "x"}, ANSWER]}
    assert "<|im_start|>narrator\nx" in answers(tokenizer_file, named, CHATML + "{# narrator #}")[0]


def test_keys_of_messages_without_an_effect_are_named(tokenizer_file: Path) -> None:
    chat = [USER | {"id": 7}, ANSWER | {"thinking": "hm", "weight": 1}]
    for template, unread in (
        (CHATML, ("message.id", "message.thinking")),
        (CHATML + "{# m.thinking #}", ("message.id",)),
    ):
        keys = {"messages": "messages", "chat_template": template}
        assert (
            tokenized(tokenizer_file, [{"messages": chat, "id": None}], **keys)[1].unread == unread
        )


def test_a_tokenizer_with_several_templates_needs_a_file(
    tmp_path: Path, tokenizer_file: Path
) -> None:
    folder = shutil.copytree(tokenizer_file.parent, tmp_path / "named")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    stored = config | {"chat_template": [{"name": "default", "template": CHATML}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r"data\.chat_template: .*or several; either set"):
        chat_template(None, str(folder))
    with pytest.raises(InputError, match=r"data\.chat_template: rag: cannot be read: No such file"):
        chat_template("rag", str(folder))
    (folder / "rag.jinja").write_text("rag")
    assert chat_template(str(folder / "rag.jinja"), str(folder)) == "rag"


def test_the_template_of_a_processor_is_read(tmp_path: Path, tokenizer_file: Path) -> None:
    folder = shutil.copytree(tokenizer_file.parent, tmp_path / "processor")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    assert chat_template(None, str(folder)) == CHATML
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("rag")
    (folder / "chat_template.jinja").write_text(PLAIN)
    assert chat_template(None, str(folder)) == PLAIN


ODD = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"
IN_PYTHON = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
HUGE = "{% for n in range(10**9) %}{{ n }}{% endfor %}"
ENDLESS = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
LISTS = [{"role": "user", "content": [{"type": "text"}]}, {"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    "record, settings, message",
    [
        (
            {"m": [{"role": "user", "content": "a"}]},
            {"messages": "m", "chat_template": CHATML},
            "the chat has no answer",
        ),
        (
            {"m": "text"},
            {"messages": "m", "chat_template": CHATML},
            "`m` is not a list of messages",
        ),
        ({"m": CHATS[1]}, {"messages": "m", "chat_template": ODD}, "generation"),
        ({"m": CHATS[0]}, {"messages": "m", "chat_template": IN_PYTHON}, "rejects this chat"),
        ({"m": CHATS[0]}, {"messages": "m", "chat_template": HUGE}, "OverflowError: Range too big"),
        ({"m": CHATS[0]}, {"messages": "m", "chat_template": ENDLESS}, "RecursionError"),
        (
            {"m": LISTS},
            {
                "messages": "m",
                "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
            },
            "a content that is not a text",
        ),
        (
            {"m": [USER, ANSWER | {"weight": 0.5}]},
            {"messages": "m", "chat_template": CHATML},
            "`weight` that is neither 0 nor 1",
        ),
        (
            {"m": [USER, ANSWER | {"train": False}]},
            {"messages": "m", "chat_template": CHATML},
            "the key `train`, which is not read",
        ),
        ({"i": [1, -2]}, {"input_ids": "i"}, "`i` has the id -2"),
        ({"t": "a"}, {"text": "t }"}, "write a column as {title}, and write braces as"),
    ],
)
def test_an_unusable_record_raises_one_message(
    record: dict, settings: dict, message: str, tmp_path: Path, tokenizer_file: Path
) -> None:
    with pytest.raises(InputError, match=message):
        packed(tmp_path, tokenizer_file, [record], **settings)


def test_a_record_is_of_one_kind() -> None:
    for kinds in (("input_ids", "text"), ("messages", "text"), ("input_ids", "messages")):
        with pytest.raises(ValidationError, match=f"`{kinds[0]}` and `{kinds[1]}` are both set"):
            DataSettings(packs="p", **dict.fromkeys(kinds, "column"))


def test_a_source_inherits_the_keys_that_it_does_not_set() -> None:
    common = {
        "packs": "p",
        "tokenizer": "t",
        "messages": "m",
        "chat_template": CHATML,
        "split": "train_1M",
    }
    several = DataSettings(
        **common,
        sources=[
            {"source": "a", "weight": 1},
            {"source": "b", "text": "t", "weight": 1},
            {"name": "made", "weight": 1},
        ],
    )
    first, second, made = several.sources
    assert [source.weight for source in several.sources] == pytest.approx([1 / 3] * 3, abs=1e-12), (
        "weights are normalized to a sum of 1"
    )
    assert first.messages == "m" and first.chat_template == CHATML and first.split == "train_1M"
    assert second.messages is None and second.text == "t" and second.chat_template is None
    assert made.source is None and made.messages is None
    again = DataSettings(**several.model_dump(mode="json"))
    assert again == several
    one = DataSettings(**common, source="a", validation={"split": "test"})
    assert (
        one.validation.source == "a"
        and one.validation.messages == "m"
        and one.validation.split == "test"
    )
    other = DataSettings(**common, source="a", validation={"source": "b"})
    assert other.validation.split == "train" and other.validation.messages == "m"
    assert DataSettings(**other.model_dump(mode="json")) == other
