"""Sources that are tokenized already: ids, labels and document lengths as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundation.errors import InputError
from packing.arrow import IGNORE
from packing.prepare import check_first_records, prepare
from packing.records import TokenColumns
from packing.settings import DataSettings
from packing.store import open_packs

ROWS = [
    {"ids": [5, 6, 7, 8, 9], "labels": [IGNORE, IGNORE, 7, 8, 9], "lengths": [2, 3]},
    {"ids": [1, 2, 3, 0, 0], "labels": [IGNORE, 2, 3, IGNORE, IGNORE], "lengths": [3]},
    {"ids": [], "labels": [], "lengths": []},
]
COLUMNS = {"input_ids": "ids", "labels": "labels", "document_lengths": "lengths"}


def settings_of(source: Path, tokenizer: Path, **values: Any) -> DataSettings:
    chosen = {"length": 8, "shuffle": False, "processes": 1, **COLUMNS, **values}
    return DataSettings(packs=source.with_name(f"packs-of-{source.name}"), source=str(source), tokenizer=str(tokenizer), **chosen)


def write_lines(folder: Path, rows: list[dict[str, Any]]) -> Path:
    (path := folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tokens_labels_and_documents_are_taken_as_they_are(tmp_path: Path, tokenizer_file: Path) -> None:
    lines, table = write_lines(tmp_path, ROWS), tmp_path / "tokens.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), table)
    found = []
    for source in (lines, table):
        data = settings_of(source, tokenizer_file)
        prepare(data, progress=False)
        found.append(packs := open_packs(data, "train"))
    (pack,) = (packs[index] for index in range(len(packs)))
    assert pack.input_ids.tolist() == [5, 6, 7, 8, 9, 1, 2, 3] and pack.lengths.tolist() == [2, 3, 3]
    assert pack.trained.tolist() == [False, False, True, True, True, False, True, True]
    assert found[0].fingerprint == found[1].fingerprint
    assert packs.manifest["statistics"]["trained_tokens"] == 5 and packs.manifest["statistics"]["empty_documents"] == 1


@given(st.lists(st.integers(0, 99), max_size=30), st.data())
def test_what_a_record_becomes_is_a_part_of_it(tokens: list[int], data: st.DataObject) -> None:
    mask = data.draw(st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=4)))
    lengths = np.diff([0, *cuts]).tolist()
    labels = [token if learnt else IGNORE for token, learnt in zip(tokens, mask, strict=True)]
    found = TokenColumns("ids", "labels", "lengths", 100).fill({"ids": tokens, "labels": labels, "lengths": lengths})
    real = sum(lengths)
    assert found.tokens.tolist() == tokens[:real] and found.trained.tolist() == mask[:real]
    assert found.lengths.tolist() == [length for length in lengths if length]
    whole = TokenColumns("ids", None, None, 100).fill({"ids": tokens})
    assert whole.tokens.tolist() == tokens and whole.trained is None and whole.lengths.tolist() == [len(tokens)] * bool(tokens)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"ids": [1, 600]}, "tokens.jsonl:1: column `ids` holds the id 600, and the tokenizer has 600 ids"),
        ({"ids": [1, -1]}, "holds the id -1"),
        ({"ids": "text"}, "column `ids` holds no list of whole numbers"),
        ({"ids": [1.5]}, "column `ids` holds no list of whole numbers"),
        ({"labels": [6, 7, 8, 9, IGNORE]}, "neither `ids` itself nor -100; write it as the tokens themselves, not shifted"),
        ({"labels": [5]}, "neither `ids` itself nor -100"),
        ({"lengths": [9]}, "column `lengths` adds up to 9 tokens, and the record has 5"),
        ({"lengths": [6, -1]}, "column `lengths` holds the length -1, below 0"),
        ({"lengths": [2**62] * 4}, "column `lengths` adds up to 18,446,744,073,709,551,616 tokens"),
        ({"ids": [[1, 2], [3]]}, "column `ids` holds no list of whole numbers"),
        ({"ids": [2**63]}, "column `ids` holds no list of whole numbers"),
    ],
)
def test_tokens_that_cannot_be_used_are_one_message(
    tmp_path: Path, tokenizer_file: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_first_records(settings_of(write_lines(tmp_path, [ROWS[0] | row]), tokenizer_file))


def test_a_source_that_trains_no_token_is_refused(tmp_path: Path, tokenizer_file: Path) -> None:
    masked = [row | {"labels": [IGNORE] * len(row["ids"])} for row in ROWS]
    with pytest.raises(InputError, match=r"none of its .* tokens is trained on: `labels` is -100 everywhere"):
        prepare(settings_of(write_lines(tmp_path, masked), tokenizer_file), progress=False)


def test_columns_that_are_not_there_or_hold_something_else_are_refused(tmp_path: Path, tokenizer_file: Path) -> None:
    path = tmp_path / "tokens.parquet"
    pq.write_table(pa.table({"ids": ["words"], "labels": [[1]], "lengths": [[1]]}), path)
    with pytest.raises(InputError, match="column `ids` holds string, not lists of whole numbers"):
        check_first_records(settings_of(path, tokenizer_file))
    with pytest.raises(InputError, match=r"no column `loss`; the columns are: ids, labels, lengths"):
        check_first_records(settings_of(path, tokenizer_file, labels="loss"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_ids": None}, "`labels`: for sources that are tokenized"),
        ({"text": "body"}, "`text` and `input_ids` are both set"),
        ({"add_bos": True}, "tokens are taken as they are"),
    ],
)
def test_settings_of_tokens_that_contradict_others_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings_of(Path("x.jsonl"), Path("t"), **values)
