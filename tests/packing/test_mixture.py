"""Sources mixed by weight, separate validation data, and the held-out tail of a single file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from foundation.errors import InputError
from packing.arrow import read_manifest
from packing.order import MixedPacks
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.store import open_packs
from packing.stream import order_of


def write_rows(path: Path, column: str, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({column: text, "n": 1}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def values(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], tokenizer_file: Path
) -> dict[str, Any]:
    """Return settings with two sources. The second source is short and has other columns."""
    folder = tmp_path_factory.mktemp("mixture")
    web = write_rows(folder / "web.jsonl", "text", [text[:900] for text in documents])
    code = write_rows(folder / "code.jsonl", "body", [text[:300] for text in documents[:20]])
    both = [
        {"source": str(web), "weight": 0.7},
        {"source": str(code), "weight": 0.3, "name": "short", "text": "{n}: {body}"},
    ]
    options = {"length": 64, "held_out": 0.1, "tokenizer": str(tokenizer_file)}
    return {"packs": str(folder / "packs"), "sources": both, **options}


@pytest.fixture(scope="module")
def data(values: dict[str, Any]) -> DataSettings:
    settings = DataSettings(**values)
    prepare(settings, progress=False)
    return settings


def test_sources_are_prepared_separately_and_mixed_by_weight(
    data: DataSettings, values: dict[str, Any]
) -> None:
    packs = open_packs(data, "train")
    held_out = open_packs(data, "held_out")
    assert isinstance(packs, MixedPacks)
    assert list(packs.by_source) == list(held_out.by_source) == ["web", "short"]
    web, short = packs.by_source.values()
    assert len(packs) == len(web) + len(short)
    assert packs[len(web)].input_ids.tolist() == short[0].input_ids.tolist()
    assert read_manifest(data.packs / "web")["settings"]["source"] == values["sources"][0]["source"]

    order = order_of(packs, seed=3)
    count = 3 * len(packs)
    tokens = [0, 0]
    for index in order.packs_at(range(count)).tolist():
        tokens[index >= len(web)] += int(packs[index].lengths.sum())
    assert tokens[0] / sum(tokens) == pytest.approx(0.7, abs=0.01)
    metrics = order.metrics(count)
    assert metrics["share/web"] == pytest.approx(0.7, abs=0.005)
    assert metrics["epoch/short"] > 1 > 0.4 * metrics["epoch/web"]
    # Other weights make other data with the same packs.
    other = values | {"sources": [part | {"weight": 0.5} for part in values["sources"]]}
    assert open_packs(DataSettings(**other), "train").fingerprint != packs.fingerprint


def test_packs_of_sources_that_exist_need_no_source(data: DataSettings) -> None:
    """With other sources, the error is about the settings, not about a missing file."""
    parts = [{"name": "web", "weight": 0.7}, {"name": "short", "weight": 0.3}]
    again = DataSettings(packs=data.packs, length=64, sources=parts)
    assert not again.prepares
    assert open_packs(again, "train").fingerprint == open_packs(data, "train").fingerprint
    moved = [part | {"source": "missing.jsonl"} for part in parts]
    common = {"packs": data.packs, "length": 64, "tokenizer": data.tokenizer}
    with pytest.raises(InputError, match="prepared with other settings"):
        prepare(DataSettings(sources=moved, **common), progress=False)


def test_another_file_or_split_is_the_validation_data(
    tmp_path: Path, documents: list[str], tokenizer_file: Path
) -> None:
    import datasets  # slow to import

    texts = {"train": documents[:30], "test": documents[30:40]}
    texts = {split: [text[:2000] for text in texts[split]] for split in texts}
    train, test = (
        str(write_rows(tmp_path / f"{split}.jsonl", "body", texts[split])) for split in texts
    )
    saved = str(tmp_path / "saved")
    datasets.DatasetDict(
        {split: datasets.Dataset.from_dict({"body": texts[split]}) for split in texts}
    ).save_to_disk(saved)
    common = {"tokenizer": str(tokenizer_file), "length": 64, "text": "body"}
    fingerprints = []
    for source, validation in ((train, {"source": test}), (saved, {"split": "test"})):
        packs = tmp_path / f"packs-{len(fingerprints)}"
        data = DataSettings(packs=packs, source=source, validation=validation, **common)
        prepare(data, progress=False)
        text = Tokenizer.from_file(str(tokenizer_file)).decode(tokens_in(data, "held_out"))
        assert sorted(text) == sorted("".join(texts["test"]))
        fingerprints.append(
            [open_packs(data, split).fingerprint for split in ("train", "held_out")]
        )
    assert fingerprints[0] == fingerprints[1]
    dev = DataSettings(packs=tmp_path / "dev", source=saved, split="dev", **common)
    with pytest.raises(InputError, match=r"`data.split: dev`: .*set `data.split` to one of train"):
        prepare(dev, progress=False)


def tokens_in(settings: DataSettings, split: str = "train") -> list[int]:
    packs = open_packs(settings, split)
    return [token for pack in packs for token in pack.input_ids[: pack.lengths.sum()].tolist()]


def test_a_single_text_file_holds_out_its_tail(
    tmp_path: Path, documents: list[str], tokenizer_file: Path
) -> None:
    text = tmp_path / "input.txt"
    text.write_text("".join(text[:4000] for text in documents[:5]))
    common = {"source": str(text), "tokenizer": str(tokenizer_file), "length": 64}
    divided = DataSettings(packs=tmp_path / "divided", held_out=0.1, **common)
    whole = DataSettings(packs=tmp_path / "whole", **common)
    for settings in (divided, whole):
        prepare(settings, progress=False)
    held_out = tokens_in(divided, "held_out")
    assert tokens_in(divided) + held_out == tokens_in(whole)
    assert len(held_out) == round(0.1 * len(tokens_in(whole)))
