"""A run's data are prepared on first use and rejected if they do not fit the model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from foundation.errors import InputError
from packing.arrow import Pack, write_packs
from packing.order import MixedPacks
from packing.settings import DataSettings
from packing.store import SelectedPacks
from pretrain.run.data import (
    Data,
    check_labels,
    check_tokens,
    evaluated_packs,
    open_data,
    require_prepared,
)
from pretrain.run.tokenizer import fingerprint_at, with_tokens
from pretrain.settings.recipe import ModelSettings


@pytest.fixture
def settings(words: Path, tmp_path: Path) -> DataSettings:
    """Return settings for packs to be prepared from 40 documents of very different lengths."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, size=40)
    texts = [" ".join(f"w{word}" for word in rng.integers(60, size=size)) for size in sizes]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    paths = {"packs": tmp_path / "packs", "source": str(corpus), "tokenizer": str(words)}
    return DataSettings(**paths, length=16, held_out=0.1, packing="best_fit")


@pytest.fixture
def data(settings: DataSettings) -> Data:
    return open_data(settings, is_main_process=False)


@pytest.mark.parametrize(("limit", "counts"), [(None, [9, 1]), (5, [4, 1]), (100, [9, 1])])
def test_a_limited_evaluation_reads_packs_of_every_source(
    limit: int | None, counts: list[int], data: Data
) -> None:
    sources = {name: SelectedPacks(data.train, np.arange(n)) for name, n in (("a", 9), ("b", 1))}
    both = MixedPacks(data.train.path, sources, dict.fromkeys(sources, 0.5))
    assert [count for _, count in evaluated_packs(both, limit).values()] == counts


def test_a_plan_of_this_machine_prepares_no_packs(settings: DataSettings) -> None:
    recipe = Path("my.yaml")
    with pytest.raises(InputError, match=r"`data\.packs`.*not prepared.*prepare my\.yaml`"):
        require_prepared(settings, recipe)
    assert not settings.packs.exists()
    open_data(settings, is_main_process=False)
    require_prepared(settings, recipe)


def test_squared_length_per_token_equals_a_plain_sum(data: Data) -> None:
    sums = [
        sum(int(n) ** 2 for n in data.train[index].lengths) / 16 for index in range(len(data.train))
    ]
    assert data.squared_length_per_token == pytest.approx(sum(sums) / len(sums), rel=1e-12)


def test_another_tokenizer_with_the_same_size_is_rejected(
    data: Data, settings: DataSettings, words: Path, tmp_path: Path
) -> None:
    file = shutil.copytree(words, tmp_path / "model") / "tokenizer.json"
    file.write_text(
        file.read_text().replace('"w1": 1,', '"w1": 2,').replace('"w2": 2,', '"w2": 1,')
    )
    other = ModelSettings(source=str(tmp_path / "model"))
    with pytest.raises(InputError, match=r"another tokenizer.*with the model's tokenizer"):
        check_tokens(data, 61, fingerprint_at(other.weights_source))
    with pytest.raises(InputError, match=r"`data\.tokenizer`.*is not the tokenizer of `model"):
        with_tokens(other, settings, None, needed=True)


def test_a_null_vocabulary_has_the_size_of_the_tokenizer(settings: DataSettings) -> None:
    model = ModelSettings(config={"model_type": "llama", "vocab_size": None})
    assert (with_tokens(model, settings, None, needed=False).config or {})["vocab_size"] == 128


def test_a_token_of_the_tokenizer_that_no_pack_has_needs_no_embedding(
    settings: DataSettings, words: Path, small_packs: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(words / "tokenizer.json"))
    tokenizer.add_special_tokens(["<image>"])
    folder = shutil.copytree(words, tmp_path / "more")
    tokenizer.save(str(folder / "tokenizer.json"))
    data = open_data(settings.model_copy(update={"tokenizer": str(folder)}), is_main_process=True)
    assert data.tokenizer["vocab_size"] == tokenizer.get_vocab_size() == 62
    # The packs of `small_packs` have no tokenizer.
    without = open_data(DataSettings(packs=small_packs, length=32), is_main_process=True)
    assert without.tokenizer == {}
    for packs in (data, without):
        fingerprint = packs.tokenizer.get("fingerprint")
        check_tokens(packs, 61, fingerprint)
        with pytest.raises(InputError, match=r"token id 60, but the model has only 60 ids"):
            check_tokens(packs, 60, fingerprint)


@pytest.mark.parametrize(
    ("lengths", "trained", "mask_boundaries", "labels"),
    [
        ([1, 1, 2], None, True, True),
        ([1, 1, 1], None, True, False),
        ([1, 1, 1], None, False, True),
        ([1], None, False, False),
        ([2, 2], [1, 0, 1, 0], True, False),
        ([2, 2], [1, 0, 1, 0], False, True),
        ([2, 2], [0, 0, 0, 1], True, True),
    ],
)
@pytest.mark.parametrize("kind", ["train", "held-out"])
def test_packs_without_a_label_are_rejected(
    kind: str, lengths: list, trained: list | None, mask_boundaries: bool, labels: bool, tmp_path
) -> None:
    def pack_of(lengths: list[int], trained: list[int] | None) -> Pack:
        mask = None if trained is None else np.array(trained, bool)
        return Pack(np.ones(4, np.uint32), np.array(lengths, np.int32), mask)

    good = pack_of([4], trained and [1] * 4)
    splits = {"train": [[good]], "held_out": [[good]]}
    splits[kind.replace("-", "_")] = [[pack_of(lengths, trained)]]
    write_packs(tmp_path / "packs", 4, splits, settings={}, statistics={}, tokenizer=None)
    settings = DataSettings(packs=tmp_path / "packs", length=4, mask_boundaries=mask_boundaries)
    data = open_data(settings, is_main_process=True)
    if labels:
        check_labels(data, settings, None)
        return
    with pytest.raises(InputError, match=f"packs: no token .* 1 {kind}.* pack .*`data.length`"):
        check_labels(data, settings, None)
