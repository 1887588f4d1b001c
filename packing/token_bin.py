"""Read flat token files, as nanoGPT, llm.c, llmq, Megatron-LM, OLMo and numpy.save write them.

A token file has token ids one after another. It does not mark where packs start. The dtype of the
ids is taken from the first of these that exists:

* the index of Megatron-LM, a file with the suffix .idx beside the token file, which also marks
  where documents end,
* the header of NumPy,
* the header of llm.c: 256 int32 before the ids. The first number identifies the dtype, and the
  third is the number of tokens.
* the header of llmq: 1,024 bytes. After `BIN.TOK\\n` it has five int32: the version (2), the bytes
  of a token (4), the numbers of tokens and of ids, and 1 if masks follow the tokens, a bit each.
* the bounds of documents that OLMo's tools write: `x.csv.gz` beside `x.npy`. Its first two columns
  have the offsets at which each document starts and ends. The last one is the number of tokens.

Otherwise the dtype is uint16, uint32 or int64, which is inferred from the ids.

A file beside the token file with one byte for each token, 0 for tokens without a loss, is read too.
Its name differs by words such as `mask`: `x_mask.npy` beside `x.npy`, or `labels_mask_part_0.npy`
beside `token_ids_part_0.npy`.
"""

from __future__ import annotations

import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa

from foundation.errors import InputError, as_input_error
from foundation.files import hash_file, hash_of
from packing.arrow import Pack, Packs, checked_index
from packing.token_columns import rule_of_eos, starts_of_documents

# Number of different observations that an inferred dtype needs. The probability that tokens of
# another dtype agree by chance is about 2 ** -_EVIDENCE.
_EVIDENCE = 16
# Largest number of places in a file, of 8 bytes each, from which a dtype is inferred.
_PLACES = 2**18
# Largest id of a token. Files of int32 are read as uint32, so negative ids become larger numbers.
_LARGEST = 2**31 - 1
# No vocabulary has an id from this number on.
_TOO_LARGE = 2**28
# Length of the headers of llm.c and llmq in bytes.
_HEADER = 1024
# Dtypes by the first number of llm.c's header.
_MAGIC = {struct.pack("<i", 20240520): "<u2", struct.pack("<i", 20240801): "<u4"}
_LLMQ = b"BIN.TOK\n"
# Dtypes by the bytes of a token, for files with bounds.
_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<i8"}
# Dtypes by their number in Megatron-LM's index.
_INDEX_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
# First bytes of files that are no lists of ids: texts, LitGPT, Parquet, Arrow, zip, gzip, zstd, xz,
# HDF5, pickle and safetensors.
_OTHER_FILES = re.compile(
    rb"[\t\n\r -~]{8}|([\xd0\xd1][\x80-\xbf]){6}|([\xe3-\xe9][\x80-\xbf]{2}){4}|\xef\xbb\xbf"
    rb"|LITPKDS|PAR1|ARROW1|PK\x03\x04|\x1f\x8b\x08|\x28\xb5\x2f\xfd|\xfd7zXZ|\x89HDF"
    rb"|\x80[\x02-\x05][\x95\]c(}]|(?s:...)\x00{5}\{\""
)
# Word in the name of a mask, and all parts in which it may differ from the token file's name.
_MASK = re.compile("mask|labels|loss")
_PARTS = re.compile("token_ids|masks?|labels?|loss|npy|bin|gz|[._-]")


class TokenBin(Packs):
    """Packs of one token file: windows of `length` consecutive tokens. The last window is padded.

    Documents end where the file's index or bounds say. Without them, each token with the id
    `end_token` ends a document, or begins one if the file begins with it (see
    `starts_of_documents`). If `end_token` is None too, each pack is one document. The positions of
    a document that is cut between packs restart at 0 in each pack.
    """

    def __init__(self, path: Path, length: int, end_token: int | None = None) -> None:
        """Open the file `path`.

        Raise InputError if the file is truncated, if a file beside it is not supported or does not
        fit it, or if the dtype of the tokens cannot be determined.

        path: a token file.
        length: number of tokens in a pack.
        end_token: id of the token that ends a document, or None.
        """
        self.path = Path(path)
        self.length = length
        self.end_token = end_token
        # `_ends` has the offsets [documents] int64 at which documents end. Without an index and
        # bounds, it is None, as is the dtype.
        dtype, self._ends = None, None
        files = [self.path]
        for suffix, read in ((".idx", _read_index), (".csv.gz", _read_bounds)):
            if file := self._beside(suffix):
                dtype, self._ends = read(file, self.path)
                files.append(file)
        self._tokens, self._masks, is_of_llm_c = _read_ids(self.path, dtype)
        masks = {file.resolve() for name in self._paths() for file in _masks_of(name)}
        for file in sorted(masks):
            self._masks.append(_read_mask(file, self.path, len(self._tokens)))
            files.append(file)
        # True if EOS begins documents, and False if EOS ends them.
        self._eos_begins = False
        if self._ends is None and end_token is not None:
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

    def _paths(self) -> tuple[Path, Path]:
        """Return the path of the token file and, if it is a link, the path of its target."""
        return self.path, self.path.resolve()

    def _beside(self, suffix: str) -> Path | None:
        """Return the file with this suffix beside the token file, or None if there is none."""
        places = [path.with_suffix(suffix) for path in self._paths()]
        return next(filter(Path.exists, places), None)

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
        if self._masks:
            trained = np.zeros(self.length, bool)
            trained[: len(tokens)] = np.all([mask[start:stop] for mask in self._masks], axis=0)
        bounds = np.union1d(self._bounds_in(start, stop), [0, len(tokens)])
        return Pack(ids, np.diff(bounds).astype(np.int32), trained)

    def _bounds_in(self, start: int, stop: int) -> np.ndarray:
        """Return the offsets at which documents end or begin in the window, relative to `start`."""
        if self._ends is not None:
            first, last = np.searchsorted(self._ends, [start, stop], "right")
            return self._ends[first:last] - start
        # Include the neighbours of the window. No token is equal to None.
        before = max(start - 1, 0)
        is_eos = self._tokens[before : stop + 1] == self.end_token
        starts = starts_of_documents(is_eos, begins=self._eos_begins)
        return np.flatnonzero(starts[start - before : stop - before])


def _masks_of(path: Path) -> list[Path]:
    """Return the files with masks of a token file."""
    common_name = _PARTS.sub("", path.name)
    return [
        file
        for file in path.parent.iterdir()
        if _MASK.search(file.name) and _PARTS.sub("", file.name) == common_name and file != path
    ]


def _map(path: Path, dtype: str, offset: int = 0, count: int = -1) -> np.ndarray:
    """Return numbers in a file as a memory-mapped array. Raise ValueError if the file is too short.

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
        lengths = np.frombuffer(content, "<i4", sequences, 34)
        documents = np.frombuffer(content, "<i8", boundaries, 34 + 12 * sequences)
        offsets = np.append(0, np.cumsum(lengths, dtype=np.int64))
        is_index = magic == [b"MMIDIDX\0\0", 1] and documents[-1] == sequences
        is_ascending = min(lengths.min(initial=0), np.diff(documents, prepend=0).min()) >= 0
        size = offsets[-1] * np.dtype(dtype).itemsize
        if not (is_index and is_ascending and size == token_file.stat().st_size):
            raise ValueError(f"its format is unknown, or it does not cover {token_file.name}")
        return dtype, offsets[documents]


def _read_bounds(path: Path, token_file: Path) -> tuple[str, np.ndarray]:
    """Return the dtype of a token file, and the offsets at which its documents end.

    The first two columns of `path` have the offsets at which each document starts and ends. Raise
    InputError if the documents do not follow one another, or do not cover the token file.
    """
    with as_input_error(
        (OSError, EOFError, zlib.error, ValueError, LookupError, ArithmeticError),
        f"{path}: the file does not have the bounds of all documents of {token_file.name}",
        "write or copy both files again, or move the bounds away if they belong to other files",
    ):
        bounds = np.loadtxt(path, np.int64, delimiter=",", usecols=(0, 1), ndmin=2)
        starts, ends = bounds.T
        if (starts != np.append(0, ends[:-1])).any() or (starts > ends).any():
            raise ValueError("a document does not start where the document before it ends")
        width, rest = divmod(token_file.stat().st_size, int(ends[-1]))
        if rest:
            raise ValueError(f"the last document ends at token {ends[-1]:,}")
        return _WIDTHS[width], ends


def _read_mask(path: Path, token_file: Path, count: int) -> np.ndarray:
    """Return the mask of a token file: [count], 0 for tokens without a loss, 1 for others."""
    with as_input_error(
        (OSError, ValueError),
        f"{path}: the file is not a mask of {token_file.name}",
        "write one byte for each token, 1 for tokens with a loss and 0 for others, or move the "
        "file away if it belongs to another one",
    ):
        mask = _map(path, "<u1")
        if mask[:6].tobytes() == np.lib.format.MAGIC_PREFIX:
            mask = np.load(path, "r")
        is_binary = mask.dtype.kind in "biu" and mask.min() >= 0 and mask.max() <= 1
        if mask.shape != (count,) or not is_binary:
            raise ValueError(f"it has not one value of 0 or 1 for each of {count:,} tokens")
    return mask


def _read_ids(path: Path, dtype: str | None) -> tuple[np.ndarray, list[np.ndarray], bool]:
    """Return the memory-mapped ids of a file, its masks, and True if llm.c wrote the file.

    `dtype` is the dtype in the file's index or bounds, or None if the file has neither. Raise
    InputError if the file is damaged or truncated, or if the dtype cannot be determined.
    """
    start = np.fromfile(path, np.uint8, 28).tobytes()
    is_of_llm_c = start[:4] in _MAGIC and dtype is None
    masks: list[np.ndarray] = []
    with as_input_error(
        (ValueError, struct.error),
        f"{path}: the file is not a complete list of token ids",
        "copy the file again, or write the ids as an array of integers with one dimension",
    ):
        if start.startswith(np.lib.format.MAGIC_PREFIX):
            tokens = np.load(path, "r")
        elif is_of_llm_c:
            tokens = _map(path, _MAGIC[start[:4]], _HEADER)
        elif start.startswith(_LLMQ):
            tokens, masks = _read_llmq(path, start)
        elif dtype is None and _OTHER_FILES.match(start):
            raise ValueError(f"it begins with {start[:8]!r}, as files of another kind do")
        else:
            tokens = _map(path, dtype or _infer_dtype(path))
        is_list = tokens.ndim == 1 and tokens.size > 0 and tokens.dtype.kind in "iu"
        # The third number of llm.c's header is the number of tokens.
        is_cut = is_of_llm_c and tokens.size != int.from_bytes(start[8:12], "little")
        if not is_list or is_cut or _TOO_LARGE <= tokens[0] < 2**31:
            raise ValueError(
                f"it has {tokens.dtype} in the shape {tokens.shape}, and begins with {start[:8]!r}"
            )
    return tokens, masks, is_of_llm_c


def _read_llmq(path: Path, start: bytes) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the memory-mapped ids of a file of llmq, and its mask if it has one.

    `start` has the first bytes of the file. Raise ValueError if the file is damaged or truncated.
    """
    version, width, count, _, has_mask = struct.unpack_from("<5i", start, len(_LLMQ))
    tokens = _map(path, "<i4", _HEADER, count)
    bits = _map(path, "<u1", _HEADER + tokens.nbytes)
    mask_bytes = -(-count // 8) if has_mask else 0
    if (version, width, len(tokens), len(bits)) != (2, 4, count, mask_bytes):
        raise ValueError("it is not of version 2 of llmq's format, or it is cut")
    return tokens, [np.unpackbits(bits, count=count, bitorder="little")] if has_mask else []


def _infer_dtype(path: Path) -> str:
    """Return the dtype of a token file that does not record it: uint16, uint32 or int64.

    Random places of the whole file are read as uint16 values. In a uint32 or int64 file, every
    second value is the upper half of an id, and many lower halves are much larger than nearly all
    upper halves. In a uint16 file, the values at both places have the same distribution. Negative
    ids, and the most frequent value, such as padding, are not compared. Raise InputError if neither
    is certain, for example because the file is short or all ids are equal.
    """
    dtype = None
    if words := path.stat().st_size // 8:  # of 8 bytes
        # With 8 places for each word, nearly all words of a small file are read.
        places = np.random.default_rng(0).integers(words, size=min(8 * words, _PLACES))
        dtype = _dtype_of(_map(path, "<i8", count=words)[np.unique(places)])
    if dtype is None:
        raise InputError(
            f"{path}: the file does not record the dtype of its token ids, and its content fits "
            "several dtypes; write the ids with numpy.save, as .npy, which records the dtype"
        )
    return dtype


def _dtype_of(words: np.ndarray) -> str | None:
    """Return the dtype of ids that are read as int64 numbers, or None if it is not certain."""
    is_int64 = np.count_nonzero(np.abs(words) < 2**31) > 0.999 * len(words)
    ids = words.astype("<i4") if is_int64 else words.view("<i4")
    # Lower and upper half of each id, without small negative ids such as -100.
    halves = ids[(ids >= 0) | (ids < -(2**15))].view("<u2").reshape(-1, 2)
    if len(halves) < _EVIDENCE:
        return None
    values, counts = np.unique(halves, return_counts=True)
    most_frequent = values[counts.argmax()]
    largest_upper = np.quantile(halves[:, 1], 0.999)
    # Sorted lower halves and sorted upper halves.
    low, high = (np.sort(half[half != most_frequent]) for half in halves.T)
    larger = low[low > 16 * largest_upper]
    # If all upper halves are 0, the ids may be few different numbers, such as digits.
    least_different = _EVIDENCE if largest_upper else 2
    has_many_larger = len(larger) >= max(_EVIDENCE, len(low) / 8)
    if has_many_larger and len(np.unique(larger)) >= least_different:
        return "<i8" if is_int64 else "<u4"
    fewest = min(len(low), len(high))
    if is_int64 or 2 * fewest < _EVIDENCE or high[0] == high[-1]:
        return None
    # The largest difference of the two distributions, and a limit of its error.
    low_shares = np.searchsorted(low, values, "right") / len(low)
    high_shares = np.searchsorted(high, values, "right") / len(high)
    difference = np.abs(low_shares - high_shares).max()
    limit = 0.05 + 1.7 * np.sqrt(2 / fewest)
    # No uint32 file has two small halves in each id.
    return "<u2" if difference <= limit or values[-1] < 2**12 else None
