"""The picture of a run that a test makes in its own process, and of a forked one: blank, as drawing takes longer than such a run.

tests/pretrain/compare/test_page.py draws, and so does every run in a process of its own.
"""

from __future__ import annotations

from base64 import b64decode

from foundation.files import WRITTEN_BY

ONE_PIXEL = b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC")


def blank(_: object) -> bytes:
    """A picture of a run that shows nothing."""
    return ONE_PIXEL + WRITTEN_BY.encode()
