"""A model from scratch has the tokens of its data: in its vocabulary, in its exported folder, and where `generate` stops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tests.conftest import Finished

PAD, EOS = "<|pad|>", "<|end|>"  # ids 0 and 1: not what any architecture has by default
TEXTS = ["one two three", "four five six", "seven eight nine"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 300 ids and a corpus of three sentences, again and again."""
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
def recipe(folder: Path) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    data = {"source": str(folder / "corpus.jsonl"), "tokenizer": str(folder / "tokenizer"), "packs": str(folder / "packs")}
    return {
        "name": "scratch",
        "model": {"config": {"model_type": "llama", "num_key_value_heads": 2, "max_position_embeddings": 64, **sizes}},
        "data": data | {"length": 32},
        "batch": {"tokens": 256, "microbatch": 8},
        "optimizer": {"learning_rate": 0.02},
        "schedule": {"kind": "constant"},
        "train": {"steps": 60},
        "parity": "off",
        "run_dir": str(folder / "run"),
    }


@pytest.fixture(scope="module")
def trained(start_here: Callable, recipe: dict[str, Any], folder: Path) -> Finished:
    finished = start_here(recipe, folder)
    assert finished.status == 0, finished.output
    return finished


def test_the_exported_model_has_the_tokenizers_vocabulary_and_stops_where_documents_end(trained: Finished) -> None:
    final = trained.run_dir / "final"
    config = json.loads((final / "config.json").read_text())
    assert config["vocab_size"] == 384 and (config["eos_token_id"], config["pad_token_id"]) == (1, 0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    prompt = tokenizer("four five", return_tensors="pt", return_token_type_ids=False)
    assert tokenizer.decode(model.generate(**prompt, max_new_tokens=40)[0]) == f"four five six{EOS}"


def test_the_cards_own_code_loads_the_model_and_continues_a_text(
    trained: Finished, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(trained.run_dir / "final")
    code = Path("README.md").read_text().split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.startswith("Once upon a time")
