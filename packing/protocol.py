"""What a pack is, and what every store of packs offers, whatever its format on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np

from foundation.errors import InputError

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Pack:
    """One row of training data: always `length` tokens wide, whatever documents it holds."""

    input_ids: np.ndarray  # [length] uint32; a read-only view into the file where the format allows it
    lengths: np.ndarray  # [documents] int32, in order; they sum to the real tokens, and what they leave uncovered is padding
    first_position: int = 0  # position of the first token in its document; > 0 only where a cut document goes on counting


class Packs(Protocol):
    """Random access to the packs of one split. Readers hold no position, so threads may share one."""

    path: Path
    length: int
    fingerprint: str  # sha256 hex of what a model would see, in order: equal fingerprints mean equal training data
    tokenizer: dict | None  # name, fingerprint, vocab_size, bos_id, eos_id, pad_id, where the format knows them

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Pack:
        """Pack `index` of 0 .. len - 1; IndexError outside."""
        ...

    def lengths(self, index: int) -> np.ndarray:
        """[documents] int32 of one pack, without reading its tokens where the format allows it."""
        ...

    def verify(self) -> None:
        """Hash every file against what its writer recorded, whatever was checked before; InputError names the first damaged."""
        ...


def checked_index(index: int, count: int) -> int:
    """`index` itself where it lies in 0 .. count - 1. Negative indices would hide arithmetic mistakes, so they are errors."""
    if not 0 <= index < count:
        raise IndexError(f"pack {index} of {count}")
    return index


def as_token_ids(values: np.ndarray, where: str) -> np.ndarray:
    """`values` as uint32, copied only if they are something else; InputError where that would change one."""
    if values.dtype == np.uint32:
        return values
    if values.dtype.kind not in "iu":
        raise InputError(f"{where}: token ids are whole numbers, these are {values.dtype}; write them as uint16 or uint32")
    if values.size and (values.min() < 0 or values.max() >= 2**32):
        raise InputError(f"{where}: token ids run from {values.min()} to {values.max()}; they must be 0 or more and below 2^32")
    return values.astype(np.uint32)
