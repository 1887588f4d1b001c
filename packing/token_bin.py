"""Read flat token files, as nanoGPT, llm.c, llmq, Megatron-LM and numpy.save write them.

A token file has token ids one after another. It does not mark where packs start. The dtype of the
ids is taken from the first of these that exists:

* the index of Megatron-LM, a file with the suffix .idx beside the token file, which also marks
  where documents end,
* the header of NumPy,
* the header of llm.c: 256 int32 before the ids. The first number identifies the dtype, and the
  third is the number of tokens.
* the header of llmq: 1,024 bytes. After `BIN.TOK\\n` it has five int32: the version (2), the bytes
  of a token (4), the numbers of tokens and of ids, and 1 if masks follow the tokens, a bit each.
* the setting `data.token_dtype`.
"""

from __future__ import annotations

import struct
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow as pa

from foundation.errors import InputError, as_input_error
from foundation.files import hash_file, hash_of
from packing.arrow import Pack, Packs, checked_index
from packing.token_columns import rule_of_eos, starts_of_documents

# Largest id of a token. Files of int32 are read as uint32, so negative ids become larger numbers.
_LARGEST = 2**31 - 1
# Length of the headers of llm.c and llmq.
_HEADER_BYTES = 1024
# Dtypes by the first number of llm.c's header.
_LLM_C_DTYPES = {struct.pack("<i", 20240520): "<u2", struct.pack("<i", 20240801): "<u4"}
_LLMQ_MAGIC = b"BIN.TOK\n"
# Dtypes by their number in Megatron-LM's index.
_INDEX_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class TokenBin(Packs):
    """Packs of one token file, each of `length` consecutive tokens. The last pack is padded.

    Documents end where the file's index says. Without an index, each token with the id `end_token`
    ends a document, or begins one if the file begins with it (see `starts_of_documents`). If
    `end_token` is None too, each pack is one document. The positions of a document that is cut
    between packs restart at 0 in each pack.
    """

    def __init__(
        self, path: Path, length: int, end_token: int | None = None, dtype: str | None = None
    ) -> None:
        """Open the file `path`.

        Raise InputError if the file is truncated, if its index is not supported or does not fit it,
        or if the dtype of the tokens is not known.

        path: a token file.
        length: number of tokens in a pack.
        end_token: id of the token that ends a document, or None.
        dtype: dtype of the tokens in a file that does not record it, or None.
        """
        self.path = Path(path)
        self.length = length
        self.end_token = end_token
        files = [self.path]
        # Offsets [documents] int64 at which documents end, or None if there is no index.
        self._ends: np.ndarray | None = None
        # True if EOS begins documents, and False if EOS ends them.
        self._eos_begins = False
        # [tokens] uint8: 0 for tokens without a loss. None means that all tokens have a loss.
        self._mask: np.ndarray | None = None
        index = self.path.with_suffix(".idx")
        if index.exists():
            files.append(index)
            recorded, self._ends = _read_index(index, self.path)
            with _damage_as_input_error(self.path):
                self._tokens = _map(self.path, recorded)
        else:
            self._tokens, self._mask, is_of_llm_c = _read_ids(self.path, dtype)
            if end_token is not None:
                first, last = self._tokens[[0, -1]]
                # A shard of llm.c may begin and end within a document.
                is_cut_shard = is_of_llm_c and last != end_token
                self._eos_begins = bool(first == end_token or is_cut_shard)
                self.notes = (rule_of_eos(self.path, end_token, begins=self._eos_begins),)
        hashes = [hash_file(file, "xxh3_128") for file in files]
        content = [*hashes, self._tokens.dtype.name, length, end_token]
        # Other files keep the hash that they had before EOS could begin documents.
        if self._eos_begins:
            content.append("begins")
        self.fingerprint = hash_of(content)

    def __len__(self) -> int:
        return -(-len(self._tokens) // self.length)

    def __getitem__(self, index: int) -> Pack:
        start = checked_index(index, len(self)) * self.length
        tokens = self._tokens[start : start + self.length]
        stop = start + len(tokens)
        is_wrong = (tokens < 0) | (tokens > _LARGEST)
        if is_wrong.any():
            raise InputError(
                f"{self.path}: pack {index} has the id {tokens[is_wrong][0]}, but ids are from 0 "
                f"to {_LARGEST}; padding and ignored labels have negative ids, such as -100, which "
                "are above this limit in uint32; write the ids without them, or write rows of "
                "`input_ids` and `labels` to a Parquet file and set `data.input_ids`"
            )
        ids = np.full(self.length, self.end_token or 0, np.uint32)
        ids[: len(tokens)] = tokens
        trained = None
        if self._mask is not None:
            trained = np.zeros(self.length, bool)
            trained[: len(tokens)] = self._mask[start:stop]
        bounds = np.union1d(self._bounds_in(start, stop), [0, len(tokens)])
        return Pack(ids, np.diff(bounds).astype(np.int32), trained)

    def _bounds_in(self, start: int, stop: int) -> np.ndarray:
        """Return the offsets at which documents end or begin in a pack, relative to `start`.

        The pack has the tokens from `start` to before `stop`.
        """
        if self._ends is not None:
            first, last = np.searchsorted(self._ends, [start, stop], "right")
            return self._ends[first:last] - start
        # Include the token before the pack and the token after it. No token is equal to None.
        before = max(start - 1, 0)
        is_eos = self._tokens[before : stop + 1] == self.end_token
        starts = starts_of_documents(is_eos, begins=self._eos_begins)
        return np.flatnonzero(starts[start - before : stop - before])


def _map(path: Path, dtype: str, offset: int = 0, count: int = -1) -> np.ndarray:
    """Return numbers in a file as a memory-mapped array. Raise ValueError if the file is too short.

    The array has `count` numbers from the byte `offset` on. -1 stands for all numbers.

    Arrow's memory map does not keep the file open. A corpus may have more files than a process may
    open.
    """
    return np.frombuffer(pa.memory_map(str(path)).read_buffer(), dtype, count, offset)


def _read_index(path: Path, token_file: Path) -> tuple[str, np.ndarray]:
    """Return the dtype of a token file, and the offsets at which its documents end.

    Both are read from the index `path` of Megatron-LM (megatron/core/datasets/indexed_dataset.py).
    After the version, the dtype and two counts, the index has the number of tokens of each
    sequence, the byte at which each sequence starts, and the number of sequences before each
    document. The number of all sequences is at the end. Raise InputError if the index has another
    format, or does not fit the token file.
    """
    with as_input_error(
        (OSError, ValueError, LookupError, ArithmeticError, struct.error),
        f"{path}: the file is not an index of Megatron-LM for {token_file.name}",
        "write or copy both files again, or move the index away if it belongs to other files",
    ):
        content = path.read_bytes()
        *magic, number, sequences, boundaries = struct.unpack_from("<9sQBQQ", content)
        dtype = _INDEX_DTYPES[number]
        lengths = np.frombuffer(content, "<i4", sequences, offset=34)
        documents = np.frombuffer(content, "<i8", boundaries, offset=34 + 12 * sequences)
        offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
        is_index = magic == [b"MMIDIDX\0\0", 1] and documents[-1] == sequences
        is_ascending = min(lengths.min(initial=0), np.diff(documents, prepend=0).min()) >= 0
        size = offsets[-1] * np.dtype(dtype).itemsize
        if not (is_index and is_ascending and size == token_file.stat().st_size > 0):
            raise ValueError(f"its format is unknown, or it does not cover {token_file.name}")
        return dtype, offsets[documents]


def _damage_as_input_error(path: Path) -> AbstractContextManager[None]:
    """Context manager that raises InputError for a token file that is damaged or cut."""
    return as_input_error(
        (ValueError, struct.error),
        f"{path}: the file is not a complete list of token ids",
        "copy the file again, or write the ids as an array of integers with one dimension",
    )


def _read_ids(path: Path, dtype: str | None) -> tuple[np.ndarray, np.ndarray | None, bool]:
    """Return the memory-mapped ids of a file, its mask or None, and True if llm.c wrote the file.

    `dtype` is the dtype of a file without a header. Raise InputError if the file is damaged or
    truncated, or if its dtype is not known.
    """
    header = np.fromfile(path, np.uint8, 28).tobytes()
    llm_c_dtype = _LLM_C_DTYPES.get(header[:4])
    mask = None
    with _damage_as_input_error(path):
        if header.startswith(np.lib.format.MAGIC_PREFIX):
            tokens = np.load(path, "r")
        elif llm_c_dtype:
            tokens = _map(path, llm_c_dtype, _HEADER_BYTES)
        elif header.startswith(_LLMQ_MAGIC):
            tokens, mask = _read_llmq(path, header)
        elif dtype:
            tokens = _map(path, dtype)
        else:
            raise InputError(
                f"{path}: the file does not record the dtype of its token ids; set "
                "`data.token_dtype` in the recipe, which is uint16 for nanoGPT's GPT-2 files"
            )
        is_integer_vector = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        # The third number of llm.c's header is the number of tokens.
        is_truncated = llm_c_dtype and tokens.size != int.from_bytes(header[8:12], "little")
        if not is_integer_vector or tokens.size == 0 or is_truncated:
            raise ValueError(f"it has {tokens.dtype} in the shape {tokens.shape}")
    return tokens, mask, llm_c_dtype is not None


def _read_llmq(path: Path, header: bytes) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the memory-mapped ids of a file of llmq, and its mask or None.

    `header` has the first bytes of the file. Raise ValueError if the file is damaged or truncated.
    """
    version, width, count, _, has_mask = struct.unpack_from("<5i", header, len(_LLMQ_MAGIC))
    tokens = _map(path, "<i4", _HEADER_BYTES, count)
    bits = _map(path, "<u1", _HEADER_BYTES + tokens.nbytes)
    mask_bytes = -(-count // 8) if has_mask else 0
    if (version, width, len(tokens), len(bits)) != (2, 4, count, mask_bytes):
        raise ValueError("it is not of version 2 of llmq's format, or it is cut")
    mask = np.unpackbits(bits, count=count, bitorder="little") if has_mask else None
    return tokens, mask
