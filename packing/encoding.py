"""Encode texts of any length.

The library needs about 150 bytes of memory for each byte of a text that it encodes. So a long text
is encoded in windows, and each window overlaps the window before it. Two windows are joined in the
overlap, at a boundary where the text can be cut without changing its tokens:

* Between two words of the pre-tokenizer, because the model encodes each word by itself.
* Between two tokens of a BPE model, also within a word. Merges depend on ranks alone. So tokens are
  the encoding of their text if each pair of neighbours is the encoding of the pair's text. Each
  pair of the joined tokens is also a pair in one of the two windows.

The pre-tokenizer may need the characters before a word, or after it. So a window begins at a
boundary of the window before it, and the two windows must agree on the tokens and words in the
middle of the overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer
from tokenizers.models import BPE

# Number of characters in a window. A text of up to 4 windows is encoded without windows, which is
# faster, because windows need offsets.
WINDOW = 2**17
# Fields of a token. `ids` and `offsets` have the names and the meaning of the library's `Encoding`.
# `boundary` is 0 if the text must not be cut before the token. Otherwise it is a larger number
# before the first token of a word than before other tokens.
_FIELDS = np.dtype([("ids", np.uint32), ("offsets", np.int64, 2), ("boundary", np.uint8)])


def encode_texts(
    tokenizer: Tokenizer, texts: list[str], encode_batch: Callable[..., list[Encoding]]
) -> Iterator[Iterable[Encoding | np.recarray]]:
    """Yield the encoding of each text in parts, which have the attributes `ids` and `offsets`.

    Special tokens are not added. `encode_batch` is the method of the tokenizer for short texts:
    `encode_batch`, or `encode_batch_fast`, which does not compute offsets. Raises ValueError if a
    long text cannot be encoded in windows.
    """
    short_texts = [text for text in texts if len(text) <= 4 * WINDOW]
    encodings = iter(encode_batch(short_texts, add_special_tokens=False))
    for text in texts:
        if len(text) <= 4 * WINDOW:
            yield [next(encodings)]
        else:
            yield encode_in_windows(tokenizer, text)


def encode_in_windows(tokenizer: Tokenizer, text: str) -> Iterator[np.recarray]:
    """Yield the tokens of `text` in parts. Together they are the encoding of the whole text.

    Raises ValueError if two windows have no boundary at which they can be joined.
    """
    overlap = WINDOW // 8
    tokens: Any = _encode_window(tokenizer, text, 0)
    end = WINDOW
    while end < len(text):
        begin = end - overlap
        # Begin the next window at the last boundary that leaves an overlap, if possible at a word.
        near_end = tokens[_starting_in(tokens, begin - overlap, begin)]
        if len(near_end):
            best = np.flatnonzero(near_end.boundary == near_end.boundary.max())
            begin = int(near_end.offsets[best[-1], 0])
        following = _encode_window(tokenizer, text, begin)
        # Compare the tokens in the middle of the overlap. Tokens at the borders of a window may
        # differ from those of the whole text.
        margin = overlap // 4
        shared = _starting_in(tokens, begin + margin, end - margin)
        shared_in_following = _starting_in(following, begin + margin, end - margin)
        # A join must be between two shared tokens, so it cannot be before the first one.
        joins = np.flatnonzero(tokens.boundary[shared][1:]) + 1
        if not len(joins) or not np.array_equal(tokens[shared], following[shared_in_following]):
            raise ValueError(
                f"a text of {len(text):,} characters that begins with {text[:40]!r} cannot be "
                f"encoded in parts, because the tokenizer does not divide it near character {end:,}"
            )
        yield tokens[: shared.start + joins[0]]
        tokens = following[shared_in_following.start + joins[0] :]
        end = begin + WINDOW
    yield tokens


def _starting_in(tokens: Any, begin: int, end: int) -> slice:
    """Return the indices of the tokens that start at the characters `begin` to `end - 1`."""
    starts = tokens.offsets[:, 0]
    first, last = np.searchsorted(starts, [begin, end]).tolist()
    return slice(first, last)


def _encode_window(tokenizer: Tokenizer, text: str, begin: int) -> np.recarray:
    """Return the tokens of the window of `text` that begins at character `begin`."""
    encoding = tokenizer.encode(text[begin : begin + WINDOW], add_special_tokens=False)
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + begin
    words = np.array(encoding.word_ids, np.int64)
    starts_word = np.diff(words, prepend=0) != 0
    # Only the text of a BPE model may also be cut within a word.
    in_word = int(isinstance(tokenizer.model, BPE))
    strength = in_word + 2 * starts_word
    # The text is not cut between tokens that share a character, such as its bytes. `roll` puts the
    # end of the last token before the first token, so the text is not cut there either.
    previous_ends = np.roll(offsets[:, 1], 1)
    boundary = np.where(previous_ends <= offsets[:, 0], strength, 0)
    return np.rec.fromarrays([encoding.ids, offsets, boundary], dtype=_FIELDS)
