"""Read flat token files, as nanoGPT and llm.c write them.

A .bin file has token ids one after another, as uint16, uint32 or int64 (the default of numpy). It
does not mark where documents or packs start. Files of llm.c have a header of 256 int32 before the
ids. The first number identifies the dtype, and the third is the number of tokens. A folder has
`train.bin`, and possibly `val.bin`.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from foundation.errors import InputError
from foundation.files import hash_file, hash_of
from packing.arrow import Pack, Packs, checked_index

# Number of uint16 values from which the dtype is inferred.
_SAMPLED_TOKENS = 2**20
# Bits 16 to 31 of every id below 2^20 are less than this number.
_HIGH_WORD_LIMIT = 16
# Size of llm.c's header in bytes.
_HEADER_BYTES = 1024
# Dtypes by the first number of llm.c's header.
_MAGIC = {20240520: "uint16", 20240801: "uint32"}


class TokenBin(Packs):
    """Packs of one .bin file: windows of `length` consecutive tokens. The last window is padded.

    Each token with the id `end_token` ends a document. If `end_token` is None, each pack is one
    document. The positions of a document that is cut between packs restart at 0 in each pack.
    """

    def __init__(self, path: Path, length: int, end_token: int | None = None) -> None:
        """Open the file `path`. Raise InputError if the file is truncated.

        path: a .bin file, with or without the header of llm.c.
        length: number of tokens in a pack.
        end_token: id of the token that ends a document, or None.
        """
        self.path = Path(path)
        self.length = length
        self.end_token = end_token
        header = np.fromfile(self.path, "<i4", _HEADER_BYTES // 4)
        has_header = len(header) == _HEADER_BYTES // 4 and int(header[0]) in _MAGIC
        dtype = _MAGIC[int(header[0])] if has_header else _dtype_of(self.path)
        start = _HEADER_BYTES if has_header else 0
        size = self.path.stat().st_size - start
        tokens, rest = divmod(size, np.dtype(dtype).itemsize)
        # The third number of a header is the number of tokens.
        if rest or tokens == 0 or (has_header and tokens != header[2]):
            raise InputError(
                f"{self.path}: the file is truncated: it has {size} bytes of {dtype} tokens, which "
                "is not the size of a complete file; write or copy the file again"
            )
        self._tokens = np.memmap(self.path, np.dtype(dtype).newbyteorder("<"), "r", start)
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
        return Pack(ids, np.diff(np.union1d(ends, len(tokens)), prepend=0).astype(np.int32))


def _dtype_of(path: Path) -> str:
    """Return "uint16", "uint32" or "int64", the probable dtype of a token file without a header.

    The beginning of the file is read as uint16 values. In a uint32 or int64 file, the second value
    of each pair has upper bits of an id. So the ids are wider than 16 bits if the second values of
    all pairs are below _HIGH_WORD_LIMIT, and a first value is not. In an int64 file, the first
    value of every second pair is 0 too.
    """
    sample = np.fromfile(path, "<u2", _SAMPLED_TOKENS)
    low_words = sample[0::2]
    high_words = sample[1::2]
    if not high_words.max(initial=0) < _HIGH_WORD_LIMIT <= low_words.max(initial=0):
        return "uint16"
    return "uint32" if low_words[1::2].any() else "int64"
