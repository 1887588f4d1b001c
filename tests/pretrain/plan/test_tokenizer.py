"""What a model from scratch takes from the tokenizer of its data, and what of a recipe stays as it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from foundation.errors import InputError
from pretrain.plan.tokenizer import tokens_of
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT

DEMO = {
    "name": "demo",
    "fingerprint": "f",
    "vocab_size": 4096,
    "bos_id": None,
    "eos_id": 0,
    "pad_id": 0,
}


def completed(tokenizer: dict, **config: object) -> dict:
    return tokens_of(tokenizer, config, LlamaConfig())


@given(st.integers(1, 200_000))
def test_the_vocabulary_rounds_up_to_a_multiple_of_128(size: int) -> None:
    vocabulary = completed(DEMO | {"vocab_size": size})["vocab_size"]
    assert vocabulary % 128 == 0 and size <= vocabulary < size + 128


def test_a_recipe_that_sets_its_tokens_stays_the_same_training() -> None:
    before = load_recipe(ROOT / "recipes/smoke.yaml").model
    after = completed(DEMO, **before.config)
    assert after | {"bos_token_id": None} == before.config | {"bos_token_id": None}


def test_special_tokens_may_be_set_to_none_or_among_several_and_not_to_others() -> None:
    assert completed(DEMO, pad_token_id=None)["pad_token_id"] is None
    assert completed(DEMO, eos_token_id=[0, 7])["eos_token_id"] == [0, 7]
    for key in ("eos_token_id", "pad_token_id"):
        with pytest.raises(InputError, match=f"model.config.{key}: 7`"):
            completed(DEMO, **{key: 7})
