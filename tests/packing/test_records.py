"""What a record becomes: chats by their template, with the answers alone trained on, and tokens as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from foundation.errors import InputError
from packing.prepare import prepare
from packing.records import CHATML
from packing.settings import DataSettings
from packing.store import open_packs

MARKED = (
    "\n{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content + '<|im_end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)
DATED = (
    "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}Date: 26 Jul 2024\n{% endif %}"
    + CHATML
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
    """The tokens of each document, and which are trained on."""
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = DataSettings(
        source=str(tmp_path / "x.jsonl"),
        tokenizer=str(tokenizer),
        packs=tmp_path / "packs",
        length=1024,
        **more,
    )
    prepare(settings, progress=False)
    packs, documents = open_packs(settings, "train"), []
    for index in range(len(packs)):
        pack = packs[index]
        trained = np.ones(1024, bool) if pack.trained is None else pack.trained
        ends = np.cumsum(pack.lengths)
        documents += [
            (pack.input_ids[a:b], trained[a:b])
            for a, b in zip(ends - pack.lengths, ends, strict=True)
        ]
    return documents


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
        whole = expected.apply_chat_template(
            chat, chat_template=template.replace("strftime_now is defined", "false"), tokenize=False
        )
        answers = "".join(m["content"] + "<|im_end|>\n" for m in chat if m["role"] == "assistant")
        assert rendered[whole].replace("�", "") == answers


TURNS = {"system": "Be kind.", "human": "why?", "gpt": "so"}
SHAREGPT = {"conversations": [{"from": role, "value": text} for role, text in TURNS.items()]}


@pytest.mark.parametrize(
    ("record", "keys", "before"),
    [
        ({"q": "why", "a": "so"}, {"messages": ["{q}?", "a"], "chat_template": CHATML}, ""),
        (
            SHAREGPT,
            {"messages": "conversations", "chat_template": "chatml"},
            "<|im_start|>system\nBe kind.<|im_end|>\n",
        ),
    ],
    ids=["prompt and response", "ShareGPT's names, and a template by name"],
)
def test_a_chat_in_other_columns_is_one(
    record: dict, keys: dict, before: str, tmp_path: Path, tokenizer_file: Path
) -> None:
    ((ids, trained),) = packed(tmp_path, tokenizer_file, [record], **keys)
    decode = Tokenizer.from_file(str(tokenizer_file)).decode
    assert (
        decode(ids)
        == f"{before}<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\nso<|im_end|>\n"
    )
    assert decode(ids[trained]) == "so<|im_end|>\n"


def test_tokens_and_labels_are_taken_as_they_are(tmp_path: Path, tokenizer_file: Path) -> None:
    records = [{"ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"ids": [8], "labels": [-100]}]
    documents = packed(tmp_path, tokenizer_file, records, input_ids="ids", labels="labels")
    assert sorted((ids.tolist(), trained.tolist()) for ids, trained in documents) == [
        ([5, 6, 7], [False, True, True]),
        ([8], [False]),
    ]


ODD = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"
IN_PYTHON = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
LISTS = [{"role": "user", "content": [{"type": "text"}]}, {"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    "record, settings, message",
    [
        (
            {"m": [{"role": "user", "content": "a"}]},
            {"messages": "m", "chat_template": CHATML},
            "without an answer",
        ),
        (
            {"m": "text"},
            {"messages": "m", "chat_template": CHATML},
            "`m` holds no list of messages",
        ),
        ({"m": CHATS[1]}, {"messages": "m", "chat_template": ODD}, "generation"),
        ({"m": CHATS[0]}, {"messages": "m", "chat_template": IN_PYTHON}, "does not take this chat"),
        (
            {"m": LISTS},
            {
                "messages": "m",
                "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
            },
            "content is no text",
        ),
        ({"i": [1, 2], "l": [2, -100]}, {"input_ids": "i", "labels": "l"}, "`l` is neither"),
        ({"i": [1, -2]}, {"input_ids": "i"}, "`i` holds the id -2"),
    ],
)
def test_a_record_that_cannot_be_used_is_one_message(
    record: dict, settings: dict, message: str, tmp_path: Path, tokenizer_file: Path
) -> None:
    with pytest.raises(InputError, match=message):
        packed(tmp_path, tokenizer_file, [record], **settings)


def test_a_source_has_the_keys_of_all_that_it_leaves_open() -> None:
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
    assert [each.weight for each in several.sources] == pytest.approx([1 / 3] * 3, abs=1e-12), (
        "shares of their sum"
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
