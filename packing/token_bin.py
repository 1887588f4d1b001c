"""Read flat token files, as nanoGPT writes them.

A .bin file has token ids one after another, uint16 or uint32, without any sign of where documents
or packs start. A folder has `train.bin`, and possibly `val.bin`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from foundation.errors import InputError
from foundation.files import hash_file, hash_of
from packing.arrow import Pack, Packs, checked_index

_SAMPLED_TOKENS = 2**20
_FEWEST_TOKENS = 64  # Among fewer tokens, all high words may happen to be small.
# In a uint32 file of a vocabulary below 2^20, every other uint16 is less than this.
_HIGH_WORD_LIMIT = 16


class TokenBin(Packs):
    """Consecutive windows of `length` tokens of one .bin file. The last one is padded.

    The id `end_token` ends each document. The positions of a cut document restart in each pack.
    Without it, a pack is one document.
    """

    def __init__(self, path: Path, length: int, end_token: int | None = None) -> None:
        """Open the file. Raise InputError if it holds no whole number of tokens."""
        self.path = Path(path)
        self.length = length
        self.end_token = end_token
        dtype = _dtype_of(self.path)
        size = self.path.stat().st_size
        if size == 0 or size % np.dtype(dtype).itemsize:
            raise InputError(
                f"{self.path}: truncated: {size} bytes are no whole number of {dtype} tokens; "
                "write it again"
            )
        self._tokens = np.memmap(self.path, np.dtype(dtype).newbyteorder("<"), mode="r")
        self.fingerprint = hash_of([hash_file(self.path, "xxh3_128"), dtype, length, end_token])

    def __len__(self) -> int:
        return -(-len(self._tokens) // self.length)

    def __getitem__(self, index: int) -> Pack:
        start = checked_index(index, len(self)) * self.length
        tokens = self._tokens[start : start + self.length]
        ids = np.full(self.length, self.end_token or 0, np.uint32)
        ids[: len(tokens)] = tokens
        ends = np.zeros(0, np.int64)
        if self.end_token is not None:
            ends = np.flatnonzero(tokens == self.end_token) + 1
        lengths = np.diff(np.union1d(ends, len(tokens)), prepend=0)
        return Pack(ids, lengths.astype(np.int32))


def _dtype_of(path: Path) -> str:
    """Return the dtype of a token file: "uint32" if every other uint16 is small, else "uint16"."""
    sample = np.fromfile(path, "<u2", _SAMPLED_TOKENS)
    if len(sample) < _FEWEST_TOKENS:
        return "uint16"
    low_words = sample[0::2]
    high_words = sample[1::2]
    is_wide = high_words.max() < _HIGH_WORD_LIMIT <= low_words.max()
    return "uint32" if is_wide else "uint16"
