"""Random packs and documents for the comparison with plain transformers.

docs/developers/checks.md explains the choice of the documents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from packing.arrow import IGNORE, Pack
from packing.batch import Microbatch, build_microbatch
from pretrain.verify.reference_model import Documents

# Boundaries of documents in a random pack, in sevenths of the pack's length. Sevenths are used
# because they are not boundaries of the blocks of tokens that attention kernels process.
FOUR_DOCUMENTS = (0, 1, 3, 5, 7)
ONE_DOCUMENT = (0, 7)
# Largest number of labels of a document.
LABELS = 341
# The reference evaluates the first tokens of all documents of the first microbatch, because a leak
# between two documents changes the second one alone. To save time, it evaluates only as many tokens
# as DOCUMENTS documents of LABELS tokens have, but at least LEAST tokens of each document.
DOCUMENTS = 3
LEAST = 8
# Map each device type to the largest number of tokens of a document that plain transformers
# processes in the second microbatch. Eager attention stores heads x length^2 scores per layer, so
# longer documents would need too much memory.
LONGEST = {"cpu": 2048, "cuda": 4096}


def draw_documents(
    shapes: Microbatch, vocabulary: int, generator: np.random.Generator
) -> tuple[Microbatch, Documents]:
    """Draw random packs of four documents. The first tokens of each document have labels.

    `_draw` describes the arguments.
    """
    batch, spans = _draw(shapes, vocabulary, generator, FOUR_DOCUMENTS)
    longest = int(spans.diff().max())
    # Divide the tokens of DOCUMENTS documents among all documents.
    tokens = DOCUMENTS * min(LABELS, longest) // len(spans)
    tokens = min(max(tokens, LEAST), longest)
    return _labelled(batch, spans, tokens)


def draw_long_document(
    shapes: Microbatch, vocabulary: int, generator: np.random.Generator, longest: int
) -> tuple[Microbatch, Documents]:
    """Draw random packs. Each pack is one document, and only the last pack has labels.

    At most LABELS tokens, evenly spaced among the first `longest` tokens, have labels. `_draw`
    describes the other arguments.
    """
    batch, spans = _draw(shapes, vocabulary, generator, ONE_DOCUMENT)
    tokens = min(shapes.max_seqlen, longest)
    spacing = math.ceil(tokens / LABELS)
    # Attention kernels process blocks of tokens, whose sizes are powers of two. With an odd
    # spacing, the labels take all positions in a block, one after the other.
    if spacing % 2 == 0:
        spacing += 1
    return _labelled(batch, spans[-1:], tokens, spacing)


def _draw(
    shapes: Microbatch, vocabulary: int, generator: np.random.Generator, sevenths: Sequence[int]
) -> tuple[Microbatch, Tensor]:
    """Return a microbatch of random tokens, and the begin and end of its documents.

    The second value is int64 [documents, 2].

    Args:
        shapes: Microbatch whose number of packs and pack length are used.
        vocabulary: Number of tokens in the vocabulary.
        generator: Generator of the random tokens.
        sevenths: Boundaries of the documents in each pack, in sevenths of the pack's length.
    """
    length = shapes.max_seqlen
    packs = shapes.input_ids.shape[1] // length
    rows = generator.integers(vocabulary, size=(packs, length), dtype=np.uint32)
    # Short packs have fewer documents.
    boundaries = np.unique([length * seventh // 7 for seventh in sevenths])
    lengths = np.diff(boundaries).astype(np.int32)
    batch = build_microbatch([Pack(row, lengths) for row in rows], mask_boundaries=True)
    return batch, batch.cu_seqlens.unique().long().unfold(0, 2, 1)


def _labelled(
    batch: Microbatch, spans: Tensor, tokens: int, spacing: int = 1
) -> tuple[Microbatch, Documents]:
    """Return a microbatch with fewer labels, and the beginnings of documents that have labels.

    Args:
        batch: Microbatch with all labels.
        spans: Begin and end of the documents that have labels, [documents, 2].
        tokens: Number of tokens at the beginning of each document that the reference evaluates. In
            the row of a shorter document, the tokens after its end have no labels, so they do not
            affect the comparison.
        spacing: Every `spacing`-th of these tokens has a label, counted back from the last but one.
            The last token of a document has no label, because the label is the next token.
    """
    begins, ends = spans.split(1, dim=1)
    positions = torch.arange(tokens)
    # A row of the last document may extend beyond the end of the microbatch.
    last_index = batch.input_ids.shape[1] - 1
    indices = (begins + positions).clamp(max=last_index)
    is_chosen = (positions - (tokens - 2)) % spacing == 0
    next_is_inside = indices + 1 < ends
    has_label = is_chosen & next_is_inside
    labelled = indices[has_label]
    all_labels = batch.labels[0]
    labels = torch.full_like(batch.labels, IGNORE)
    labels[0, labelled] = all_labels[labelled]
    document_labels = torch.where(has_label, all_labels[indices], IGNORE)
    documents = Documents(batch.input_ids[0, indices], document_labels, indices)
    return replace(batch, labels=labels, valid_tokens=labelled.numel()), documents
