"""Flat token files as nanoGPT writes them: token ids one after another, without any sign of where documents or packs begin.

A folder holds `train.bin` and perhaps `val.bin`; `meta.json` or nanoGPT's `meta.pkl` beside them may name the dtype and the
vocabulary. The format carries no checksum; a `train.bin.sha256` (as `sha256sum` writes it) is compared where there is one.
"""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from foundation.errors import InputError, shown
from foundation.integrity import FileRecord, check_files, digests
from foundation.reading import load_json, read_regular, reason_of
from packing.arrow import Pack, checked_index

_SAMPLED_TOKENS = 2**20
_HEADER_MAGICS = {20240520, 20240801}  # llm.c's and modded-nanogpt's files, which begin with 256 int32
_HIGH_WORD_LIMIT = 16  # a uint32 file of a vocabulary below 2^20 has only such values in every other uint16


class TokenBin:
    """Consecutive windows of `length` tokens of one .bin file; the last one is padded.

    With `end_token`, each document ends with that id, and the positions of a cut one restart in each pack; without, a pack is one
    document. Raises InputError for signs of another dtype, an end token that never occurs, and ids beyond meta's vocabulary: at
    opening in the first million tokens, later in each pack read.
    """

    def __init__(self, path: Path, length: int, end_token: int | None = None) -> None:
        self.path = Path(path)
        self.length = length
        self.end_token = end_token
        if not self.path.is_file():
            raise InputError(f"{self.path}: is no file; name a .bin file of tokens in `data.packs`, or a folder that holds one")
        meta = read_meta(self.path.parent)
        self._dtype = _dtype(meta, self.path)
        size = self.path.stat().st_size
        if size == 0:
            raise InputError(f"{self.path}: is empty; write its tokens again")
        if length > max(size // self._dtype.itemsize, _SAMPLED_TOKENS):
            raise InputError(f"{self.path}: holds fewer tokens than one pack of `data.length: {length}`; set a shorter one")
        if size % self._dtype.itemsize:
            raise InputError(
                f"{self.path}: truncated: {size} bytes are no whole number of {self._dtype.name} tokens; write it again"
            )
        self._vocab_size: int | None = meta.get("vocab_size")
        self.tokenizer: dict | None = {"vocab_size": self._vocab_size} if self._vocab_size else None
        self._tokens = np.memmap(self.path, self._dtype, mode="r")
        self._check_dtype(named="dtype" in meta or self._vocab_size is not None)
        sample = self._tokens[:_SAMPLED_TOKENS]
        self._check_vocabulary(sample)
        if end_token is not None and len(sample) == _SAMPLED_TOKENS and not (sample == end_token).any():
            raise InputError(
                f"{self.path}: `data.end_token` {end_token} does not occur in its first {len(sample):,} tokens; set it to "
                "the id that ends a document, or leave it out to take each pack for one"
            )
        self.verify(trust_stamp=True)
        digest = digests(self.path.parent, [self.path.name], ["sha256"])[self.path.name]["sha256"]
        self.fingerprint = hashlib.sha256(json.dumps([digest, self._dtype.name, length, end_token]).encode()).hexdigest()

    def __len__(self) -> int:
        return -(-len(self._tokens) // self.length)

    def __getitem__(self, index: int) -> Pack:
        tokens = self._window(index)
        self._check_vocabulary(tokens)
        ids = np.full(self.length, self.end_token or 0, np.uint32)
        ids[: len(tokens)] = tokens
        return Pack(ids, self._documents(tokens), 0)

    def lengths(self, index: int) -> np.ndarray:
        return self._documents(self._window(index))

    def trained(self, index: int) -> np.ndarray | None:
        return None  # the format has no place for it

    def verify(self, *, trust_stamp: bool = False) -> None:
        """Compare the file with the .sha256 beside it, where there is one."""
        recorded = self.path.with_name(f"{self.path.name}.sha256")
        if recorded.exists():
            try:
                words = str(read_regular(recorded, 2**20), "utf-8").split() or [""]
            except (OSError, ValueError) as error:
                raise InputError(f"{recorded}: cannot be read: {reason_of(error)}; write it again, or remove it") from None
            record = FileRecord(self.path.name, self.path.stat().st_size, {"sha256": words[0].lower()})
            remedy = f"write it again, or remove {recorded.name} if that is out of date"
            check_files(self.path.parent, [record], remedy, trust_stamp=trust_stamp)

    def _window(self, index: int) -> np.ndarray:
        start = checked_index(index, len(self)) * self.length
        return self._tokens[start : start + self.length]

    def _documents(self, tokens: np.ndarray) -> np.ndarray:
        if self.end_token is None:
            return np.array([len(tokens)], np.int32)
        ends = np.flatnonzero(tokens == self.end_token) + 1
        if len(ends) == 0 or ends[-1] != len(tokens):
            ends = np.append(ends, len(tokens))
        return np.diff(ends, prepend=0).astype(np.int32)

    def _check_dtype(self, named: bool) -> None:
        """Refuse a header, and uint32 tokens that would be read as uint16 because nothing names their dtype."""
        head = np.fromfile(self.path, "<i4", 1)
        if len(head) and int(head[0]) in _HEADER_MAGICS:
            raise InputError(f"{self.path}: begins with a header (llm.c's); drop its first 1024 bytes: tail -c +1025")
        words = self._tokens[:_SAMPLED_TOKENS]
        if named or len(words) < 64 or len(words) % 2:
            return
        if words[1::2].max() < _HIGH_WORD_LIMIT <= words[0::2].max():
            raise InputError(
                f"{self.path}: looks like uint32 tokens, and nothing names its dtype; write "
                f'{self.path.parent / "meta.json"}: {{"dtype": "uint32"}}, or "uint16" if that is what it holds'
            )

    def _check_vocabulary(self, tokens: np.ndarray) -> None:
        if self._vocab_size is not None and int(tokens.max()) >= self._vocab_size:
            seen = f"holds token id {int(tokens.max())}, but its meta says vocab_size {self._vocab_size}"
            raise InputError(
                f"{self.path}: {seen}: it is damaged, of another vocabulary, or not {self._dtype.name}; "
                "name its `dtype` in meta.json, or write the file again"
            )


def read_meta(folder: Path) -> dict[str, Any]:
    """The content of meta.json or meta.pkl in `folder`; empty where there is neither, InputError where it cannot be read."""
    for name, load in (("meta.json", load_json), ("meta.pkl", _load_pickle)):
        path = folder / name
        if path.exists():
            try:
                meta = load(path)
            except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
                raise InputError(
                    f'{path}: cannot be read ({reason_of(error)}); write meta.json: {{"dtype": "uint16", "vocab_size": ...}}'
                ) from None
            vocab_size = meta.get("vocab_size") if isinstance(meta, dict) else 0
            if vocab_size is not None and (type(vocab_size) is not int or not 0 < vocab_size <= 2**32):
                raise InputError(
                    f'{path}: a mapping with a whole `vocab_size` is wanted: {{"dtype": "uint16", "vocab_size": 50257}}'
                )
            return meta
    return {}


def _dtype(meta: dict[str, Any], path: Path) -> np.dtype:
    """The dtype that meta names, else the narrowest that holds its vocabulary, else nanoGPT's uint16."""
    name = meta.get("dtype") or ("uint32" if (meta.get("vocab_size") or 0) > 2**16 else "uint16")
    if name not in ("uint16", "uint32"):
        raise InputError(f"{path.parent}: meta names the dtype {shown(name, repr)}; token files are uint16 or uint32")
    return np.dtype(name).newbyteorder("<")


class _PlainUnpickler(pickle.Unpickler):
    """Reads numbers, text and containers; nothing in a pickle can call a function that is not looked up here."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it holds a {module}.{name}, only plain numbers, strings and containers are read")


def _load_pickle(path: Path) -> Any:
    with open(path, "rb") as file:
        return _PlainUnpickler(file).load()
