"""Records become documents: texts from templates, and tokens unchanged (chats: test_chats.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from foundation.errors import InputError
from packing.arrow import read_manifest
from packing.chunks import Chunk, Counts, read_chunk
from packing.records import CHATML, UNTRAINED, TextTemplate, TokenColumns
from packing.settings import DataSettings
from packing.token_columns import TOKEN_COLUMNS
from tests.packing.conftest import open_reader, packed

IDS = [5, 6, 7, 8, 9]


def tokenized(**columns: Any) -> tuple[list[tuple[list[int], list[int]]], Counts]:
    """Return the ids of every document of a record with its trained ids, and the counts."""
    line = json.dumps({"input_ids": IDS, **columns}).encode()
    rule = TokenColumns(("input_ids",), TOKEN_COLUMNS, 600)
    documents, counts = read_chunk(Chunk("jsonl", "x.jsonl:", 1, line, {}), rule)
    return [
        ((ids & ~UNTRAINED).tolist(), ids[ids < UNTRAINED].tolist())
        for ids in rule.encode(None, documents)
    ], counts


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"attention_mask": [1, 1, 1, 0, 0]}, [[5, 6, 7]]),
        ({"attention_mask": [0, 0, 1, 1, 1]}, [[7, 8, 9]]),
        ({"attention_mask": [2, 3]}, [[5, 6], [7, 8, 9]]),
        ({"attention_mask": [0] * 5}, []),
        ({"attention_mask": [1.0, 1.0, 1.0, 0.0, 0.0]}, [[5, 6, 7]]),
        ({"attention_mask": [1, 1, 2, 2, 0]}, [[5, 6], [7, 8]]),
        ({"attention_mask": [1, 1, 2, 3, 3]}, [[5, 6], [7], [8, 9]]),
        ({"position_ids": [0, 1, 0, 1, 2]}, [[5, 6], [7, 8, 9]]),
        ({"position_ids": [0, 1, 2, 3, 4], "seq_lengths": [2, 3]}, [[5, 6], [7, 8, 9]]),
        ({"position_ids": [0, 1, 0, 1, 0], "attention_mask": [1, 1, 1, 1, 0]}, [[5, 6], [7, 8]]),
        ({"sequence_id": [0, 0, 1, 1, -1]}, [[5, 6], [7, 8]]),
        ({"cu_seqlens": [0, 2, 5, 5]}, [[5, 6], [7, 8, 9]]),
        ({"cu_seqlens": [0, 2, 5, -1, -1]}, [[5, 6], [7, 8, 9]]),
        ({"attention_mask": None, "position_ids": None}, [IDS]),
    ],
)
def test_columns_beside_ids_mark_padding_and_documents(columns: dict, expected: list) -> None:
    documents, counts = tokenized(**columns)
    assert documents == [(ids, ids) for ids in expected]
    assert counts.empty == (not expected)


@pytest.mark.parametrize(
    "columns",
    [
        {"labels": [-100, 6, 7, -100, 9]},
        {"loss_mask": [0, 1, 1, 0, 1]},
        {"assistant_masks": [False, True, True, False, True]},
        {"label_mask": [0.0, 1.0, 1.0, 0.0, 1.0]},
        {"completion_mask": [0, 1, 1, 1, 1], "labels": [5, 6, 7, -100, 9]},
        {"labels": [-100, 6, 7, -100, 9], "position_ids": [*range(5)], "attention_mask": [1] * 5},
    ],
    ids=lambda columns: "+".join(columns),
)
def test_columns_beside_ids_mark_trained_tokens(columns: dict) -> None:
    assert tokenized(**columns)[0] == [(IDS, [6, 7, 9])]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"labels": [6, 7, 8, 9, -100]}, "`labels` must have the token or -100.*without a shift"),
        ({"labels": 1}, "column `labels` is not a list of whole numbers"),
        ({"loss_mask": [0, 0.5, 1, 1, 1]}, "column `loss_mask` is not a list"),
        ({"loss_mask": [0, float("nan"), 1, 1, 1]}, "column `loss_mask` is not a list"),
        ({"loss_mask": [0, 1]}, "`loss_mask` must have 1 or 0 for each token"),
        ({"completion_mask": [0, 1, 2, 1, 1]}, "`completion_mask` must have 1 or 0"),
        ({"seq_lengths": [2, 9]}, "seq_lengths are for 11 tokens, but the record has 5"),
        ({"position_ids": [0, 1, 2]}, "position_ids are for 3 tokens"),
        ({"attention_mask": [1, 1]}, "attention_mask are for 2 tokens"),
        ({"attention_mask": [0, 0, 0, -10000, -10000]}, "a length below 0"),
        ({"input_ids": [1, -2]}, "`input_ids` has the id -2"),
        ({"input_ids": [1, 600]}, "has the id 600, but the tokenizer has only 600"),
    ],
)
def test_columns_that_do_not_fit_the_ids_are_rejected(columns: dict, message: str) -> None:
    with pytest.raises(InputError, match=f"x.jsonl:1: .*{message}"):
        tokenized(**columns)


def test_ids_in_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match="`ids` is not a list of whole numbers"):
        TokenColumns(("ids",), (), 600).fill({"ids": np.arange(5, dtype=np.uint16).tobytes()})


def test_tokens_and_labels_are_packed_unchanged(tmp_path: Path, tokenizer_file: Path) -> None:
    """Labels that mask nothing do not change the packs."""
    records = [{"ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"ids": [8], "labels": [-100]}]
    documents = packed(tmp_path / "ids", tokenizer_file, records, input_ids="ids")
    assert sorted((ids.tolist(), trained.tolist()) for ids, trained in documents) == [
        ([5, 6, 7], [False, True, True]),
        ([8], [False]),
    ]
    more = {"labels": IDS, "attention_mask": [1] * 5, "token_type_ids": [0] * 5}
    manifests = []
    for name, columns in (("with", more), ("without", {})):
        packed(tmp_path / name, tokenizer_file, [{"ids": IDS, **columns}], input_ids="ids")
        manifests.append(read_manifest(tmp_path / name / "packs"))
    first, second = (manifest["splits"]["train"]["fingerprint"] for manifest in manifests)
    assert first == second
    assert manifests[0]["statistics"]["columns_not_read"] == "token_type_ids"


def test_a_template_sets_columns_into_text(tmp_path: Path) -> None:
    """Null, NaN and infinity are no text. A record without any text is empty."""
    rows = [{"title": "T", "n": 3, "body": None}, {"title": None, "n": "", "body": ""}]
    rows += [{"title": number, "n": None, "body": ""} for number in (1.5, float("nan"))]
    rows += [{"title": float("-inf"), "n": None, "body": None}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    titles = {"title": [1.5, float("nan"), float("-inf")], "n": [None] * 3, "body": ["", "", None]}
    pq.write_table(pa.table(titles), tmp_path / "x.parquet")
    for kind, expected, empty in (
        ("jsonl", ["T 3{}\n", "1.5 {}\n"], 3),
        ("parquet", ["1.5 {}\n"], 2),
    ):
        source = open_reader(tmp_path / f"x.{kind}", text="{title} {n}{{}}\n{body}")
        texts, counts = read_chunk(next(source.chunks({})), source.records)
        assert texts == expected and counts.empty == empty


@pytest.mark.parametrize("text", ["t }", "{t", "{t:.2f}", "{t!r}"])
def test_a_template_with_other_braces_is_refused_with_a_remedy(text: str) -> None:
    with pytest.raises(InputError, match=r"write a column as \{title\}, and write braces as"):
        TextTemplate.parse(text)


@pytest.mark.parametrize(
    "kinds", [("input_ids", "text"), ("messages", "text"), ("input_ids", "messages")]
)
def test_a_record_is_of_one_kind(kinds: tuple[str, str]) -> None:
    with pytest.raises(ValidationError, match=f"`{kinds[0]}` and `{kinds[1]}` are both set"):
        DataSettings(packs="p", **dict.fromkeys(kinds, "column"))


def test_a_source_inherits_the_keys_that_it_does_not_set() -> None:
    common = {"packs": "p", "tokenizer": "t", "messages": "m", "split": "train_1M"}
    common |= {"chat_template": CHATML}
    sources = [{"source": "a"}, {"source": "b", "text": "t"}, {"name": "made"}]
    several = DataSettings(**common, sources=[source | {"weight": 1} for source in sources])
    first, second, made = several.sources
    weights = [source.weight for source in several.sources]
    assert weights == pytest.approx([1 / 3] * 3, abs=1e-12), "weights have a sum of 1"
    assert first.messages == "m" and first.chat_template == CHATML and first.split == "train_1M"
    assert second.messages is None and second.text == "t" and second.chat_template is None
    assert made.source is None and made.messages is None
    assert DataSettings(**several.model_dump(mode="json")) == several
    one = DataSettings(**common, source="a", validation={"split": "test"}).validation
    assert one.source == "a" and one.messages == "m" and one.split == "test"
    other = DataSettings(**common, source="a", validation={"source": "b"})
    assert other.validation.split == "train" and other.validation.messages == "m"
    assert DataSettings(**other.model_dump(mode="json")) == other
