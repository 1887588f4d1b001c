"""A model from scratch has the tokens of its data: in its vocabulary, in its exported folder, and where `generate` stops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

PAD, EOS = "<|pad|>", "<|end|>"  # ids 0 and 1: not what any architecture has by default
TEXTS = ["one two three", "four five six", "seven eight nine"]


@pytest.fixture(scope="module")
def made_here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of 300 ids and a corpus of three sentences, again and again."""
    folder = tmp_path_factory.mktemp("from_scratch")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = " ".join(TEXTS) + " ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty hundred"
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=[PAD, EOS], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([words] * 20, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD).save_pretrained(folder / "tokenizer")
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS * 60))
    return folder


@pytest.fixture(scope="module")
def recipe(made_here: Path) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return {
        "name": "scratch",
        "model": {"config": {"model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 64, **sizes}},
        "data": {
            "source": str(made_here / "corpus.jsonl"),
            "tokenizer": str(made_here / "tokenizer"),
            "packs": str(made_here / "packs"),
            "length": 32,
            "processes": 1,
        },
        "batch": {"tokens": 256, "microbatch": 8},
        "optimizer": {"learning_rate": 0.02},
        "schedule": {"kind": "constant"},
        "train": {"steps": 60},
        "run_dir": str(made_here / "run"),
    }


@pytest.fixture(scope="module")
def trained(start_here: Callable, recipe: dict[str, Any], made_here: Path) -> Any:
    finished = start_here(recipe, made_here)
    assert finished.status == 0, finished.output
    return finished


def test_the_vocabulary_is_the_tokenizers_rounded_up_and_the_plan_says_so(trained):
    config = json.loads((trained.run_dir / "final" / "config.json").read_text())
    assert config["vocab_size"] == 384
    assert (config["eos_token_id"], config["pad_token_id"], config.get("bos_token_id")) == (1, 0, None)
    said = " ".join(trained.output.split())
    assert "rounded up to a multiple of 128 from the tokenizer's 300 ids; EOS 1, BOS none, padding 0" in said


def test_generate_on_the_exported_model_stops_where_documents_end(trained):
    final = trained.run_dir / "final"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 1
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 0
    output = model.generate(**tokenizer("four five", return_tensors="pt", return_token_type_ids=False), max_new_tokens=40)
    assert tokenizer.decode(output[0]) == f"four five six{EOS}"


def test_a_resumed_run_repeats_the_resolved_tokens(trained, start_here, recipe, made_here, tmp_path):
    written = yaml.safe_load((trained.run_dir / "config.yaml").read_text())
    tokens = {"vocab_size": 384, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
    assert tokens.items() <= written["model"]["config"].items()
    for each in (recipe, written):
        again = start_here(each, tmp_path)
        assert again.status == 0 and "at step 60" in again.output, again.output


@pytest.mark.parametrize("source", ["data", "packs"])
def test_what_contradicts_the_tokenizer_is_one_message(source, trained, start_here, recipe, tmp_path):
    data = recipe["data"] if source == "data" else {"packs": recipe["data"]["packs"], "length": 32}
    changes = ["model.config.vocab_size=200", "model.config.eos_token_id=[2]", "model.config.bos_token_id=5"]
    said = start_here(recipe | {"data": data}, tmp_path, "--plan", *changes).refusal
    assert "`model.config` contradicts the tokenizer of the data" in said and "leave these keys out" in said.lower()
    assert "`vocab_size: 200`, but it has 300 ids" in said and "`eos_token_id: [2]`, but its EOS token is 1" in said
    assert "bos_token_id" not in said, "the tokenizer has none to contradict"


def test_packs_that_were_prepared_here_bring_the_tokenizer_along(trained, start_here, recipe, made_here, tmp_path):
    data = {"packs": recipe["data"]["packs"], "length": 32}
    changed = recipe | {"data": data, "run_dir": str(tmp_path / "run"), "train": {"steps": 2}, "evaluate": {"samples": ["one"]}}
    finished = start_here(changed, tmp_path)
    assert finished.status == 0, finished.output
    model, tokenizer = (auto.from_pretrained(tmp_path / "run" / "final") for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert (model.config.vocab_size, model.generation_config.eos_token_id) == (384, 1)
    assert (tokenizer.eos_token, tokenizer.pad_token) == (EOS, PAD)
    own = AutoTokenizer.from_pretrained(made_here / "tokenizer")
    assert tokenizer("one two three")["input_ids"] == own("one two three")["input_ids"] != []


def test_another_tokenizer_than_that_of_the_packs_is_refused(trained, start_here, recipe, made_here, tmp_path):
    other = tmp_path / "other.json"
    Tokenizer(models.WordLevel({PAD: 0, EOS: 1, "one": 2}, unk_token=PAD)).save(str(other))
    data = {"packs": recipe["data"]["packs"], "length": 32, "tokenizer": str(other)}
    said = start_here(recipe | {"data": data}, tmp_path, "--plan").refusal
    assert "`data.tokenizer`" in said and "is not the tokenizer of" in said
