"""Chats of many forms become the text and the mask that transformers gives for their usual form."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from packing.records import CHATML, ChatColumns, chat_columns
from packing.settings import SourceSettings

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Weather?"}
ANSWER = {"role": "assistant", "content": "It is sunny."}
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
)


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
