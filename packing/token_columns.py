"""Read the columns of tokenized data that mark padding, documents, and tokens with a loss.

The rules are the same for tokenized sources and for MDS shards. TRL, torchtune, axolotl,
LLaMA-Factory, llm-foundry, OLMo and transformers write columns with these names. A mask, a label or
a document number belongs to the token at the same index. Labels are not shifted.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from packing.arrow import IGNORE

# Column with 0 for padding. Any other token has 1, or the number of its document. Some writers
# store the lengths of the documents in this column instead.
MASK = "attention_mask"
# Column of labels. A label is the id of the token, or -100 for a token without a loss.
LABELS = "labels"
# Columns with 1 for tokens with a loss, and 0 for other tokens.
LOSS_MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "label_mask")


# Columns with the lengths of the documents.
_LENGTHS = (
    "seq_lengths",
    "seq_lens",
    "seqlens",
    "sequence_lengths",
    "document_lengths",
    "doc_lens",
)
# Columns with 0 and the offset after each document. Some writers pad them with -1.
_OFFSETS = ("cu_seqlens", "cu_seq_lens", "cu_seqlens_q", "cu_seq_lens_q")
# Columns with the number of each token's document, which is negative for padding.
_NUMBERS = ("sequence_id", "sequence_ids", "seq_idx", "document_ids", "doc_ids")
# Columns with the position of each token in its document.
_POSITIONS = ("position_ids", "input_pos")
# Columns that mark documents. If a record has several of them, only the first one in this order is
# used.
BOUNDARIES = (*_LENGTHS, *_OFFSETS, *_NUMBERS, *_POSITIONS)
# All columns that are read beside the token ids.
TOKEN_COLUMNS = (LABELS, MASK, *LOSS_MASKS, *BOUNDARIES)


def whole_numbers(name: str, values: Any) -> np.ndarray:
    """Return the values of the column `name` as an array of integers.

    Booleans and floats without a fraction, such as 1.0, are accepted. Raises ValueError if `values`
    is not a list of whole numbers.
    """
    given = np.asarray(values)
    numbers = given
    if given.dtype.kind in "bf":
        # Let NumPy print no warning for NaN and infinity, which are rejected below.
        with np.errstate(invalid="ignore"):
            numbers = given.astype(np.int64)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iu" or (numbers != given).any():
        raise ValueError(
            f"column `{name}` is not a list of whole numbers; either write whole numbers, or "
            "remove the column"
        )
    return numbers


def token_columns(record: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return the columns of TOKEN_COLUMNS that a record has (see `whole_numbers`)."""
    present = [name for name in TOKEN_COLUMNS if record.get(name) is not None]
    return {name: whole_numbers(name, record[name]) for name in present}


def number_documents(width: int, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the number of each token's document, or -1 for padding: [width] int64.

    If a mask numbers the documents or has their lengths, other columns are ignored.

    `width` is the number of tokens, and `columns` maps names of columns to their values. Raises
    ValueError if the columns describe another number of tokens.
    """
    mask = columns.get(MASK)
    is_real = np.ones(width, bool)
    numbers = np.zeros(width)
    name = next((name for name in BOUNDARIES if name in columns), None)
    if name is not None:
        numbers = _numbers_in(name, columns[name].astype(np.int64))
    # A mask with one number for each token marks padding by 0, and may number the documents. Any
    # other mask has the lengths of the documents.
    if mask is not None and len(mask) == width and mask.min(initial=0) >= 0:
        is_real = mask > 0
        if mask.max(initial=0) > 1:
            numbers = mask
    elif mask is not None:
        numbers = _from_lengths(mask.astype(np.int64))
    if len(numbers) != width:
        raise ValueError(
            f"the columns {', '.join(columns)} are for {len(numbers)} tokens, but the record has "
            f"{width}"
        )
    is_first = np.append(0, numbers[1:] != numbers[:-1])
    return np.where(is_real & (numbers >= 0), np.cumsum(is_first), -1)


def _numbers_in(name: str, values: np.ndarray) -> np.ndarray:
    """Return a number for each token that changes at the first token of each document.

    The number is negative for padding. `values` is the column `name` of BOUNDARIES.
    """
    if name in _LENGTHS:
        return _from_lengths(values)
    if name in _OFFSETS:
        return _from_lengths(np.diff(values[values >= 0]))
    if name in _POSITIONS:
        # A document starts where a position is not the previous position plus one. So subtract the
        # index of each token, and add the number of tokens, so that no difference is negative.
        return values + np.arange(len(values), 0, -1)
    return values


def _from_lengths(lengths: np.ndarray) -> np.ndarray:
    """Return the number of the document of each token, for documents with these `lengths`."""
    if lengths.min(initial=0) < 0:
        raise ValueError("a document has a length below 0")
    return np.repeat(np.arange(len(lengths)), lengths)


def starts_of_documents(is_eos: np.ndarray, *, begins: bool) -> np.ndarray:
    """Return True for each token that starts a document: [tokens] bool.

    `is_eos` is True for each EOS token. By default, EOS ends a document. With `begins`, an EOS
    token begins a document if the token before it is EOS, or if the token after it is not. So the
    first of two EOS tokens in a row ends a document, and the second begins the next one. A single
    EOS token at the end of the array ends a document.
    """
    before = np.append(False, is_eos[:-1])
    if not begins:
        return before
    after = np.append(is_eos[1:], True)
    return is_eos & (before | ~after)


def rule_of_eos(path: Path, token: int, *, begins: bool) -> str:
    """Return a line about the documents of packs that are divided at the EOS token."""
    if begins:
        return (
            f"{path}: each document begins with EOS (id {token}), and EOS before another EOS ends "
            "a document"
        )
    return f"{path}: each document ends with EOS (id {token})"


def trained_tokens(tokens: np.ndarray, columns: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return a mask that is True for tokens with a loss: [tokens] bool.

    Returns None if no column determines which tokens have a loss. Raises ValueError if a column is
    neither labels nor a mask of zeros and ones.
    """
    trained = None
    for name in (LABELS, *LOSS_MASKS):
        if name not in columns:
            continue
        row = columns[name]
        without_loss, with_loss = (IGNORE, tokens) if name == LABELS else (0, 1)
        has_loss = row != without_loss
        if len(row) != len(tokens) or (has_loss & (row != with_loss)).any():
            value = "the token" if name == LABELS else "1"
            raise ValueError(
                f"column `{name}` must have {value} or {without_loss} for each token; either write "
                "the column without a shift, or remove it"
            )
        trained = has_loss if trained is None else trained & has_loss
    return trained
