"""Read flat token files, as nanoGPT, llm.c, Megatron-LM, OLMo, numpy.save and datatrove write them.

A token file has token ids one after another. It does not mark where packs start. The dtype of the
ids is taken from the first of these that exists:

* the index of Megatron-LM, a file with the suffix .idx beside the token file, which also marks
  where documents end,
* the header of NumPy,
* the header of llm.c: 256 int32 before the ids. The first number identifies the dtype, and the
  third is the number of tokens.

Otherwise the dtype is uint16, uint32 or int64, which is inferred from the beginning of the file.

Hugging Face's datatrove tokenizes a large corpus on many machines. Each task of its
DocumentTokenizer writes one file or several files. Beside the tokens in `x.ds` are `x.ds.index`,
the offset [documents] uint64 at which each document ends, and `x.ds.metadata`, a text. Its first
line has the name of the tokenizer, `|`, and the bytes of a token. Its second line has the number of
tokens. Masks of tokens without a loss, in `x.ds.loss`, are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa

from foundation.errors import InputError, as_input_error
from foundation.files import ALWAYS_HASHED_BYTES, hash_file, hash_of
from packing.arrow import JoinedPacks, Pack, Packs, checked_index
from packing.tokenizer import load_tokenizer

# Number of different observations that an inferred dtype needs. The probability that tokens of
# another dtype agree by chance is about 2 ** -_EVIDENCE.
_EVIDENCE = 16
# Dtypes by the first number of llm.c's header.
_MAGIC = {struct.pack("<i", 20240520): "<u2", struct.pack("<i", 20240801): "<u4"}
# Dtypes by their number in Megatron-LM's index.
_INDEX_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class TokenBin(Packs):
    """Packs of one token file: windows of `length` consecutive tokens. The last window is padded.

    Documents end where the file's index says. Without an index, each token with the id `end_token`
    ends a document. If `end_token` is None too, each pack is one document. The positions of a
    document that is cut between packs restart at 0 in each pack.
    """

    def __init__(self, path: Path, length: int, end_token: int | None = None) -> None:
        """Open the file `path`.

        Raise InputError if the file is truncated, if its index is not supported or does not fit the
        file, or if the dtype of the tokens cannot be determined.

        path: a token file.
        length: number of tokens in a pack.
        end_token: id of the token that ends a document, or None.
        """
        self.path = Path(path)
        self.length = length
        self.end_token = end_token
        # The token file may be a link, to a file that has an index beside it.
        places = [file.with_suffix(".idx") for file in (self.path, self.path.resolve())]
        index = next(filter(Path.exists, places), places[0])
        # `_ends` has the offsets [documents] int64 at which documents end. Without an index, it is
        # None, as is the dtype.
        dtype, self._ends = _read_index(index, self.path) if index.exists() else (None, None)
        self._tokens = _map_tokens(self.path, dtype)
        hashes = [hash_file(file, "xxh3_128") for file in (self.path, index) if file.exists()]
        self.fingerprint = hash_of([*hashes, self._tokens.dtype.name, length, end_token])

    def __len__(self) -> int:
        return -(-len(self._tokens) // self.length)

    def __getitem__(self, index: int) -> Pack:
        start = checked_index(index, len(self)) * self.length
        tokens = self._tokens[start : start + self.length]
        ids = np.full(self.length, self.end_token or 0, np.uint32)
        ids[: len(tokens)] = tokens
        if self._ends is not None:
            first, last = np.searchsorted(self._ends, [start, start + len(tokens)], "right")
            ends = self._ends[first:last] - start
        else:
            # No token is equal to None.
            ends = np.flatnonzero(tokens == self.end_token) + 1
        return Pack(ids, np.diff(np.union1d(ends, len(tokens)), prepend=0).astype(np.int32))


class DatatroveFile(TokenBin):
    """Packs of one .ds file of datatrove. Its index has the ends of documents."""

    def __init__(self, path: Path, length: int) -> None:
        """Open the file `path`. Raise InputError if a file of the task is missing or damaged."""
        self.path = path
        self.length = length
        self.end_token = None
        with as_input_error(
            (OSError, ValueError, LookupError),
            f"{path}: the file or one of its files .metadata, .index and .loss cannot be used",
            "run its task again with save_index and save_final_metadata, and without "
            "save_loss_metadata, or copy all of these files again",
        ):
            first, count, *_ = Path(f"{path}.metadata").read_text(encoding="utf-8").splitlines()
            self.tokenizer_name, _, width = first.rpartition("|")
            self._tokens = _map_numbers(path, {"2": "<u2", "4": "<u4"}[width])
            self._ends = _map_numbers(Path(f"{path}.index"), "<i8")
            end = self._ends[-1] if len(self._ends) else 0
            is_ordered = (np.diff(self._ends, prepend=0) >= 0).all()
            if not (is_ordered and len(self._tokens) == int(count) == end):
                raise ValueError(
                    f"it has {len(self._tokens):,} tokens, its metadata has {int(count):,}, and "
                    f"its index, which must ascend, ends at {end:,}"
                )
            if Path(f"{path}.loss").exists():
                raise ValueError("masks of tokens without a loss are not supported")


class DatatrovePacks(JoinedPacks):
    """The packs of several .ds files of datatrove, concatenated in the order of the files."""

    def __init__(
        self, files: Sequence[Path], path: Path, length: int, tokenizer: str | None
    ) -> None:
        """Open `files`. `path` is the name of these packs in messages.

        Raise InputError if a file is damaged or was not made with `tokenizer`. If `tokenizer` is
        None, all files must have the same tokenizer.
        """
        parts = [DatatroveFile(file, length) for file in files]
        super().__init__(path, parts)
        self.length = length
        if not len(self):
            raise InputError(f"{path}: its .ds files have no tokens; run the tasks again")
        expected = tokenizer or parts[0].tokenizer_name
        self.tokenizer = {"name": expected}
        # The tokenizer may be a path on another machine.
        with suppress(InputError):
            self.tokenizer = load_tokenizer(expected).describe()
        present = self.tokenizer.get("fingerprint")
        for name, file in {part.tokenizer_name: part.path for part in parts}.items():
            with as_input_error(
                (InputError,),
                f"{file}: its metadata has the tokenizer {name} instead of {expected}",
                "set `data.tokenizer` to the tokenizer of all files. If it is the same tokenizer "
                "with another name, write this name before the `|` in the .metadata file",
            ):
                if name != expected and load_tokenizer(name).fingerprint != present:
                    raise InputError("the two tokenizers differ")
        # Hash all files of a small dataset. The ends of all documents identify a large one.
        is_small = sum(file.stat().st_size for file in files) <= ALWAYS_HASHED_BYTES
        hashed = [*(files if is_small else ()), *(Path(f"{file}.index") for file in files)]
        self.fingerprint = hash_of([*(hash_file(file, "xxh3_128") for file in hashed), length])


def _map_numbers(path: Path, dtype: str) -> np.ndarray:
    """Return the numbers in a file as a memory-mapped array.

    Arrow's memory map does not keep the file open. A corpus may have more files than a process may
    open.
    """
    return np.frombuffer(pa.memory_map(str(path)).read_buffer(), dtype)


def _read_index(path: Path, token_file: Path) -> tuple[str | None, np.ndarray | None]:
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
        lengths = np.frombuffer(content, "<i4", sequences, 34)
        documents = np.frombuffer(content, "<i8", boundaries, 34 + 12 * sequences)
        offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
        if (
            magic != [b"MMIDIDX\0\0", 1]
            or lengths.min(initial=0) < 0
            or np.diff(documents, prepend=0).min() < 0
            or documents[-1] != sequences
            or offsets[-1] * np.dtype(dtype).itemsize != token_file.stat().st_size
        ):
            raise ValueError(f"its format is unknown, or it does not cover {token_file.name}")
        return dtype, offsets[documents]


def _map_tokens(path: Path, dtype: str | None) -> np.ndarray:
    """Return the tokens of a file as a memory-mapped array.

    `dtype` is the dtype in the file's index, or None if the file has no index. Raise InputError if
    the file is damaged or truncated, or if the dtype cannot be determined.
    """
    start = np.fromfile(path, np.uint8, 12).tobytes()
    has_header = start[:4] in _MAGIC and dtype is None
    with as_input_error(
        (ValueError,),
        f"{path}: the file is not a complete list of token ids",
        "copy the file again, or write the ids as an array of integers with one dimension",
    ):
        if start.startswith(np.lib.format.MAGIC_PREFIX):
            tokens = np.load(path, "r")
        elif has_header:
            tokens = np.memmap(path, _MAGIC[start[:4]], "r", 256 * 4)
        else:
            tokens = np.memmap(path, dtype or _infer_dtype(path), "r")
        if (
            tokens.size == 0
            or tokens.ndim != 1
            or tokens.dtype.kind not in "iu"
            # The third number of llm.c's header is the number of tokens.
            or (has_header and tokens.size != int.from_bytes(start[8:], "little"))
            # A pointer of Git LFS, a file of LitGPT, or a zip, gzip or zstd file.
            or start.startswith((b"version http", b"LITPKDS", b"PK\3\4"))
            or start.startswith((b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd"))
        ):
            raise ValueError(
                f"it has {tokens.dtype} in the shape {tokens.shape}, and begins with {start[:8]!r}"
            )
    return tokens


def _infer_dtype(path: Path) -> str:
    """Return the dtype of a token file that does not record it: uint16, uint32 or int64.

    The first 2 MiB of the file are read as uint16 values. In a uint32 or int64 file, every second
    value is the upper half of an id, and most ids below 2^28 have a lower half that is much larger
    than all upper halves. In a uint16 file, the values at both places are of the same kind. Raise
    InputError if neither is certain, for example because the file is short or all ids are equal.
    """
    words: np.ndarray = np.fromfile(path, np.dtype(("<u2", 4)), 2**18)
    low, high = words[:, 0::2], words[:, 1::2]
    larger = low[low > 16 * int(high.max(initial=0))]
    # In an int64 file, the upper two of the four values of an id are 0.
    is_int64 = not words[:, 2:].any()
    # If all upper halves are 0, the ids may be few different numbers, such as digits.
    if len(larger) >= _EVIDENCE and len(np.unique(larger)) >= (_EVIDENCE if high.any() else 2):
        return "<i8" if is_int64 else "<u4"
    if not len(larger) and high.size >= _EVIDENCE and np.ptp(high) and not is_int64:
        return "<u2"
    raise InputError(
        f"{path}: the file does not record the dtype of its token ids, and its content fits "
        "several dtypes; write the ids with numpy.save, as .npy, which records the dtype"
    )
