"""What a record becomes by the `data` settings: a text, or a chat."""

from __future__ import annotations

from packing.chat import ChatColumns
from packing.chunks import Records, TextTemplate
from packing.settings import DataSettings


def records_of(settings: DataSettings) -> Records:
    """How the records of `settings.source` become documents; chats are written after `ChatColumns.written_by`."""
    if settings.messages is not None:
        return ChatColumns(settings.messages, None, None, settings.train_on)
    if settings.prompt is not None:
        prompt, response = (TextTemplate.parse(getattr(settings, key), f"data.{key}") for key in ("prompt", "response"))
        return ChatColumns(None, prompt, response, settings.train_on)
    return TextTemplate.parse(settings.text)
