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


def write_texts(path: Path, texts: list[str], **more: Any) -> Path:
    path.write_text("".join(json.dumps({"text": text} | more) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def values(
    tmp_path_factory: pytest.TempPathFactory, documents: list[str], tokenizer_file: Path
) -> dict[str, Any]:
    """Return settings with two sources. The second source is short and has other columns."""
    folder = tmp_path_factory.mktemp("mixture")
    web = write_texts(folder / "web.jsonl", [text[:900] for text in documents])
    code = folder / "code.jsonl"
    code.write_text(
        "".join(json.dumps({"body": text[:300], "n": 1}) + "\n" for text in documents[:20])
    )
    both = [
        {"source": str(web), "weight": 0.7},
        {"source": str(code), "weight": 0.3, "name": "short", "text": "{n}: {body}"},
    ]
    options = {"length": 64, "held_out": 0.1, "tokenizer": str(tokenizer_file)}
    return {"packs": str(folder / "packs"), "sources": both, **options}


@pytest.fixture(scope="module")
def data(values: dict[str, Any]) -> DataSettings:
    """Return the settings after the packs are prepared."""
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
    figures = order.figures(count)
    assert figures["share/web"] == pytest.approx(0.7, abs=0.005)
    assert figures["epoch/short"] > 1 > 0.4 * figures["epoch/web"]
    # Other weights make other data with the same packs.
    other = values | {"sources": [part | {"weight": 0.5} for part in values["sources"]]}
    assert open_packs(DataSettings(**other), "train").fingerprint != packs.fingerprint


def test_packs_of_sources_that_exist_need_no_source(data: DataSettings) -> None:
    parts = [{"name": "web", "weight": 0.7}, {"name": "short", "weight": 0.3}]
    again = DataSettings(packs=data.packs, length=64, sources=parts)
    missing_sources = [
        {**part, "source": str(data.packs / "missing.jsonl"), "name": source.name}
        for part, source in zip(parts, again.sources, strict=True)
    ]
    common = {"packs": data.packs, "length": 64, "tokenizer": data.tokenizer}
    moved = DataSettings(sources=missing_sources, **common)
    # The error is about the settings, not about the missing file.
    with pytest.raises(InputError, match="prepared with other settings"):
        prepare(moved, progress=False)
    assert not again.prepares
    assert open_packs(again, "train").fingerprint == open_packs(data, "train").fingerprint


def test_another_file_or_split_is_the_validation_data(
    tmp_path: Path, documents: list[str], tokenizer_file: Path
) -> None:
    documents = [text[:2000] for text in documents]
    train = write_texts(tmp_path / "a.jsonl", documents[:30])
    other = write_texts(tmp_path / "b.jsonl", documents[30:40])
    common = {"tokenizer": str(tokenizer_file), "length": 64}
    by_file = DataSettings(
        packs=tmp_path / "packs", source=str(train), validation={"source": str(other)}, **common
    )
    prepare(by_file, progress=False)
    text = Tokenizer.from_file(str(tokenizer_file)).decode(tokens_in(by_file, "held_out"))
    assert sorted(text) == sorted("".join(documents[30:40]))
    import datasets  # slow to import

    saved = tmp_path / "saved"
    splits = {"train": documents[:30], "test": documents[30:40]}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"body": texts}) for name, texts in splits.items()}
    ).save_to_disk(saved)
    common |= {"text": "body"}
    test = {"split": "test"}
    by_split = DataSettings(packs=tmp_path / "split", source=str(saved), validation=test, **common)
    prepare(by_split, progress=False)
    for split in ("train", "held_out"):
        assert open_packs(by_split, split).fingerprint == open_packs(by_file, split).fingerprint
    dev = DataSettings(packs=tmp_path / "dev", source=str(saved), split="dev", **common)
    with pytest.raises(InputError, match=r"`data.split: dev`: .*set `data.split` to one of train"):
        prepare(dev, progress=False)


def tokens_in(settings: DataSettings, split: str = "train") -> list[int]:
    packs = open_packs(settings, split)
    read = [packs[index] for index in range(len(packs))]
    return [token for pack in read for token in pack.input_ids[: pack.lengths.sum()].tolist()]


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
