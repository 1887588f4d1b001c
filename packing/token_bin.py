"""Flat token files as nanoGPT writes them: token ids one after another, without any sign of where documents or packs begin.

A folder holds `train.bin` and perhaps `val.bin`; a `meta.json` beside them may name the `dtype` and the `vocab_size`.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from foundation.errors import InputError
from foundation.files import hash_file
from foundation.reading import load_object
from packing.arrow import Pack, Packs, checked_index

_SAMPLED_TOKENS = 2**20
_HIGH_WORD_LIMIT = 16  # a uint32 file of a vocabulary below 2^20 has only such values in every other uint16


class TokenBin(Packs):
    """Consecutive windows of `length` tokens of one .bin file; the last one is padded.

    With `end_token`, each document ends with that id, and the positions of a cut one restart in each pack; without, a pack is one
    document. Raises InputError for signs of another dtype.
    """

    def __init__(self, path: Path, length: int, end_token: int | None = None) -> None:
        self.path, self.length, self.end_token = Path(path), length, end_token
        meta_file = self.path.parent / "meta.json"
        meta = load_object(meta_file, 'write {"dtype": "uint16", "vocab_size": 50257}') if meta_file.exists() else {}
        vocab_size = meta.get("vocab_size")
        self.tokenizer = {"vocab_size": vocab_size} if vocab_size else None
        dtype = meta.get("dtype") or ("uint32" if (vocab_size or 0) > 2**16 else "uint16")
        size, width = self.path.stat().st_size, np.dtype(dtype).itemsize
        if size == 0 or size % width:
            raise InputError(f"{self.path}: truncated: {size} bytes are no whole number of {dtype} tokens; write it again")
        self._tokens = np.memmap(self.path, np.dtype(dtype).newbyteorder("<"), mode="r")
        sample = self._tokens[:_SAMPLED_TOKENS]
        if not meta and len(sample) >= 64 and sample[1::2].max() < _HIGH_WORD_LIMIT <= sample[0::2].max():
            raise InputError(f'{self.path}: looks like uint32 tokens; write {meta_file}: {{"dtype": "uint32"}}, or "uint16"')
        digest = hash_file(self.path, "xxh3_128")
        self.fingerprint = hashlib.sha256(json.dumps([digest, dtype, length, end_token]).encode()).hexdigest()

    def __len__(self) -> int:
        return -(-len(self._tokens) // self.length)

    def __getitem__(self, index: int) -> Pack:
        start = checked_index(index, len(self)) * self.length
        tokens = self._tokens[start : start + self.length]
        ids = np.full(self.length, self.end_token or 0, np.uint32)
        ids[: len(tokens)] = tokens
        ends = np.flatnonzero(tokens == self.end_token) + 1 if self.end_token is not None else np.zeros(0, np.int64)
        return Pack(ids, np.diff(np.union1d(ends, len(tokens)), prepend=0).astype(np.int32))
