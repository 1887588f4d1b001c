"""What a model from scratch takes from the tokenizer of its data, and what of a recipe stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.errors import InputError
from pretrain.checkpoint.state import changed_keys
from pretrain.plan.tokenizer import with_tokens_of
from pretrain.settings.config import flatten, load_recipe
from pretrain.settings.recipe import ModelSettings

ROOT = Path(__file__).parents[3]
DEMO = {"name": "demo", "fingerprint": "f", "vocab_size": 4096, "bos_id": None, "eos_id": 0, "pad_id": 0}


def completed(tokenizer: dict, **config: object) -> tuple[dict, str]:
    settings, said = with_tokens_of(tokenizer, ModelSettings(config={"model_type": "llama", **config}))
    return settings.config, said


@pytest.mark.parametrize(("size", "vocabulary"), [(1, 128), (128, 128), (129, 256), (50_257, 50_304)])
def test_the_vocabulary_rounds_up_to_a_multiple_of_128(size: int, vocabulary: int) -> None:
    config, said = completed(DEMO | {"vocab_size": size})
    assert config["vocab_size"] == vocabulary
    assert f"{size:,} ids" in said


def test_a_recipe_that_sets_its_tokens_stays_the_same_training() -> None:
    before = load_recipe(ROOT / "recipes/smoke.yaml").model
    after, _ = with_tokens_of(DEMO, before)
    assert changed_keys(flatten({"model": before.config}), flatten({"model": after.config})) == []


def test_where_the_tokenizer_is_not_known_nothing_is_taken_from_it() -> None:
    for given in ({}, {"vocab_size": 61}):
        config, said = completed({}, **given)
        assert config == {"model_type": "llama", **given} and "not known" in said


def test_special_tokens_may_be_set_to_none_or_among_several_and_not_to_others() -> None:
    assert completed(DEMO, pad_token_id=None)[0]["pad_token_id"] is None
    assert completed(DEMO, eos_token_id=[0, 7])[0]["eos_token_id"] == [0, 7]
    for key in ("eos_token_id", "pad_token_id"):
        with pytest.raises(InputError, match=f"model.config.{key}: 7`"):
            completed(DEMO, **{key: 7})
