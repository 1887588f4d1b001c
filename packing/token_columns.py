"""Read the columns of tokenized data that mark padding, documents, and tokens with a loss.

Tokenized sources and MDS shards follow the same rule. TRL, torchtune, axolotl, LLaMA-Factory,
llm-foundry, OLMo and transformers write these names. Masks, labels and numbers belong to the tokens
at the same index, not to the tokens before them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from packing.arrow import IGNORE

# Zeros for padding, and ones or the numbers of the documents; or the lengths of the documents.
MASK = "attention_mask"
LABELS = "labels"  # the tokens, or -100 for tokens without a loss
LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "label_mask")


def _from_lengths(lengths: np.ndarray) -> np.ndarray:
    if lengths.min(initial=0) < 0:
        raise ValueError("a document has a length below 0")
    return np.repeat(np.arange(len(lengths)), lengths)


def _from_offsets(ends: np.ndarray) -> np.ndarray:
    """Number the tokens between offsets. Some writers pad the offsets with -1."""
    return _from_lengths(np.diff(ends[ends >= 0]))


# Functions from a column to a number for each token. The number changes at the first token of a
# document, and is negative for padding. If there are several columns, the first in this order
# counts.
BOUNDARIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    **dict.fromkeys(("seq_lengths", "seq_lens", "seqlens", "sequence_lengths"), _from_lengths),
    **dict.fromkeys(("document_lengths", "doc_lens"), _from_lengths),
    **dict.fromkeys(("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q"), _from_offsets),
    **dict.fromkeys(("sequence_id", "sequence_ids", "seq_idx"), lambda numbers: numbers),
    **dict.fromkeys(("document_ids", "doc_ids"), lambda numbers: numbers),
    # A position that is not the previous one plus one starts a document.
    **dict.fromkeys(
        ("position_ids", "input_pos"),
        lambda positions: positions + np.arange(len(positions), 0, -1),
    ),
}
TOKEN_COLUMNS = (MASK, *LOSS_MASKS, *BOUNDARIES)  # and labels, whose column may have another name


def whole_numbers(name: str, values: Any) -> np.ndarray:
    """Return the values of the column `name` as integers. Booleans and floats such as 1.0 count.

    Raises ValueError if they are no list of whole numbers.
    """
    given = np.asarray(values)
    numbers = given
    if given.dtype.kind in "bf":
        with np.errstate(invalid="ignore"):  # of NaN and infinity
            numbers = given.astype(np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or (numbers != given).any():
        raise ValueError(
            f"column `{name}` holds no list of whole numbers; write one, or leave out the column"
        )
    return numbers


def number_documents(width: int, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the number of each token's document, -1 for padding: [width] int64.

    Raises ValueError if the columns do not fit `width` tokens.
    """
    mask = columns.get(MASK)
    is_real = np.ones(width, bool)
    numbers = np.zeros(width)
    for name in [name for name in BOUNDARIES if name in columns][:1]:
        numbers = BOUNDARIES[name](columns[name].astype(np.int64))
    if mask is not None and len(mask) == width and mask.min(initial=0) >= 0:
        is_real = mask > 0
        if mask.max(initial=0) > 1:
            numbers = mask
    elif mask is not None:
        numbers = _from_lengths(mask.astype(np.int64))
    if len(numbers) != width:
        raise ValueError(f"the columns {', '.join(columns)} are those of {len(numbers)} tokens")
    documents = np.cumsum(np.append(0, numbers[1:] != numbers[:-1]))
    return np.where(is_real & (numbers >= 0), documents, -1)


def trained_tokens(
    tokens: np.ndarray, columns: Mapping[str, np.ndarray], labels: str = LABELS
) -> np.ndarray | None:
    """Return which tokens have a loss, [tokens] bool, or None if no column decides it.

    `labels` is the name of the column of labels. Raises ValueError if a column is neither labels
    nor a mask of zeros and ones.
    """
    trained = None
    for name in [name for name in (labels, *LOSS_MASKS) if name in columns]:
        row = columns[name]
        off, on = (IGNORE, tokens) if name == labels else (0, 1)
        if len(row) != len(tokens) or not ((row == off) | (row == on)).all():
            value = "the token" if name == labels else "1"
            raise ValueError(
                f"column `{name}` is neither {value} nor {off} everywhere; write it unshifted, or "
                "leave it out"
            )
        trained = (row != off) if trained is None else trained & (row != off)
    return trained
