"""Shipped recipes, trained in a tiny form: the file itself with its keys, and only sizes, lengths and places put over it.

One of each kind. What builds on another (`base`) and is not here differs from it in shapes, tokenizers, rates and places only,
which tests/docs/test_recipes_page.py plans.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from packing.__main__ import main as packing
from pretrain.__main__ import main as pretrain
from tests.conftest import ROOT, over

LINES = [
    f"{word}: count {n} and {n + 1}, then {n * 7 % 97} and {n * 5 % 89}." for n in range(150) for word in ("ROMEO", "JULIET")
]
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 384}
LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"head_dim": 8, "vocab_size": 384}
EVERYWHERE = [
    "data.length=64",
    "batch.tokens=512",
    "schedule.warmup=1",
    "evaluate.every=2",
    "evaluate.packs=4",
]
EVERYWHERE += ["checkpoint.every=2", "log.every=1", "parity=off"]

Trained = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with input.txt and the tokenizer that the project's command makes of it."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "input.txt").write_text("\n".join(LINES))
    assert packing(["tokenizer", str(folder / "input.txt"), "--vocabulary", "300", "--out", str(folder / "tokenizer")]) == 0
    return folder


@pytest.fixture
def trained(launcher_here: Callable[..., tuple[int, str, str]], here: Path, tmp_path: Path) -> Trained:
    """Train a shipped recipe, which ends well, and return its metrics."""

    def run(name: str, config: dict[str, int], *overrides: str, steps: str = "train.steps=4") -> list[dict[str, Any]]:
        sizes = [f"model.config.{key}={value}" for key, value in config.items()]
        places = [f"data.packs={tmp_path / 'packs'}", f"run_dir={tmp_path / 'run'}", f"data.tokenizer={here / 'tokenizer'}"]
        status, out, err = launcher_here(
            str(ROOT / f"recipes/{name}.yaml"), *over([*EVERYWHERE, steps, *sizes, *places], *overrides)
        )
        assert status == 0, out + err
        return [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]

    return run


def test_gpt2_in_fp8_with_a_penalty_keeps_its_best_checkpoint(trained, here, tmp_path):
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    emulated = ["precision=delayed", "fp8_config.backend=emulation", "fp8_config.margin=1"]
    penalty = ["loss.penalty=non_max_sum", "loss.penalty_weight=0.01"]
    told = ["data.subset=null", "data.held_out=0.1", f"data.source={tmp_path / 'docs.jsonl'}"]
    metrics = trained("gpt2_openwebtext", GPT2, *told, *emulated, *penalty)
    steps = [each for each in metrics if "loss" in each]
    assert [each["step"] for each in steps] == [1, 2, 3, 4] and all(0 < each["penalty"] < 1 for each in steps)
    rates = [each["learning_rate"] for each in steps]
    assert rates == sorted(rates, reverse=True) and rates[0] == pytest.approx(6e-4) and rates[-1] >= 6e-5
    best = min((each for each in metrics if "held_out_loss" in each), key=lambda each: each["held_out_loss"])
    assert (tmp_path / f"run/checkpoints/step-{best['step']:08d}").is_dir()


def test_tinyshakespeare_is_trained_and_sampled_as_its_comment_says(trained, here, tmp_path, capsys):
    metrics = trained("tinyshakespeare", GPT2, f"data.source={here / 'input.txt'}", "batch.microbatch=8")
    assert [each["samples"][0]["prompt"] for each in metrics if each.get("event") == "samples"] == ["ROMEO:"] * 2
    assert pretrain(["sample", str(tmp_path / "run/final"), "ROMEO:", "--tokens", "4"]) == 0
    assert "ROMEO:" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("llama3_1_8b_openmath", ["precision=bf16"]),  # its layers are computed again in backward, its weights exact
    ],
)
def test_problems_are_masked_and_the_chat_template_goes_along(name, precision, trained, here, tmp_path):
    given = [{"problem": f"What is {n} + {n}?", "generated_solution": f"It is {2 * n}."} for n in range(150)]
    DatasetDict({"train_1M": Dataset.from_list(given)}).save_to_disk(tmp_path / "openmath")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(here / "tokenizer/tokenizer.json")))
    tokenizer.eos_token = "<|endoftext|>"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**LLAMA, max_position_embeddings=64, eos_token_id=0, bos_token_id=0))
    for each in (model, tokenizer):
        each.save_pretrained(tmp_path / "llama")
    told = [f"data.source={tmp_path / 'openmath'}", f"model.source={tmp_path / 'llama'}", f"data.tokenizer={tmp_path / 'llama'}"]
    metrics = trained(name, {}, *told, *precision, "data.held_out=0.1", steps="train.epochs=1")
    last = [each for each in metrics if "loss" in each][-1]
    assert 0 < last["trained_tokens"] < 0.6 * last["tokens"], "half of an example is its problem"
    assert AutoTokenizer.from_pretrained(tmp_path / "run/final").chat_template, "it goes along with the model"
