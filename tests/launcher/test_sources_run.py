"""A run on several sources, one of them chats: its figures, and the same curve after a kill, on another number of processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from tests.conftest import write_recipe
from tests.moments import LauncherProcess, Moment

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEPS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sources")


@pytest.fixture(scope="module")
def recipe(folder: Path, recipe_for: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """70 % of the tokens from texts, 30 % from chats, of which the answers are trained on."""
    texts = [" ".join(str((n * k) % 97) for k in range(1, 40)) for n in range(80)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    chats = [{"p": f"Count from {n}", "r": " ".join(str(n + k) for k in range(9))} for n in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet))
    tokenizer.save(str(folder / "tokenizer.json"))
    small = recipe_for(folder / "run")
    config = {key: value for key, value in small["model"]["config"].items() if key != "vocab_size"}
    return small | {
        "model": {"config": config},
        "data": {
            "packs": str(folder / "packs"),
            "sources": [
                {"source": str(folder / "texts.jsonl"), "weight": 0.7},
                {"source": str(folder / "chats.jsonl"), "weight": 0.3, "prompt": "p", "response": "r", "chat_template": CHATML},
            ],
            "tokenizer": str(folder / "tokenizer.json"),
            "length": 64,
            "packing": "best_fit",
            "held_out": 0.1,
            "processes": 1,
        },
        "batch": {"tokens": 8 * 64, "microbatch": 2},
        "train": {"steps": STEPS},
        "parity": "on",
    }


@pytest.fixture(scope="module")
def alone(recipe: dict[str, Any], folder: Path, start_here: Callable) -> Any:
    finished = start_here(recipe, folder)
    assert finished.status == 0, finished.output
    return finished


def test_plan_and_metrics_say_what_came_from_where(
    alone: Any, recipe: dict[str, Any], folder: Path, start_here: Callable
) -> None:
    steps = [record for record in alone.records() if "loss" in record]
    last = steps[-1]
    assert last["share/texts"] == pytest.approx(0.7, abs=0.03) and last["share/texts"] + last["share/chats"] == pytest.approx(1)
    assert last["epoch/chats"] > steps[0]["epoch/chats"] > 0
    assert 0 < last["trained_tokens"] < last["tokens"] and steps[0]["trained_tokens"] < last["trained_tokens"]
    evaluation = next(record for record in alone.records() if record.get("event") == "evaluation")
    by_source = [evaluation[f"held_out_loss/{name}"] for name in ("texts", "chats")]
    assert min(by_source) < evaluation["held_out_loss"] < max(by_source)
    planned = start_here(recipe, folder, "--plan")
    assert f"% of the tokens from chats: {last['epoch/chats']:.2f} epochs of" in planned.out
    assert "of them trained on" in planned.out
    assert AutoTokenizer.from_pretrained(alone.run_dir / "final").chat_template == CHATML
    card = (alone.run_dir / "final" / "README.md").read_text()
    assert f"| data | 70.0 % {folder / 'texts.jsonl'}, 30.0 % {folder / 'chats.jsonl'} |" in card
    assert "plain transformers" in alone.output  # parity, which makes labels of masks by itself


def test_other_weights_are_another_training_and_named(
    alone: Any, recipe: dict[str, Any], folder: Path, start_here: Callable
) -> None:
    texts, chats = recipe["data"]["sources"]
    others = recipe["data"] | {"sources": [texts | {"weight": 0.6}, chats | {"weight": 0.4}]}
    planned = start_here(recipe | {"data": others}, folder, "--plan")
    assert planned.status == 2 and "data.sources.chats.weight: saved 0.3, now 0.4" in planned.output


@pytest.mark.multi
def test_a_run_killed_and_resumed_on_two_processes_has_the_same_curve(
    alone: Any, recipe: dict[str, Any], folder: Path, start_as_ranks: Callable
) -> None:
    run_dir = folder / "killed"
    arguments = [str(write_recipe(recipe, folder)), f"run_dir={run_dir}", "parity=off"]
    process = LauncherProcess(arguments, folder / "log", Moment("logged", "^6$", SIGKILL))
    assert process.end() == -SIGKILL, (folder / "log").read_text()
    ddp = ["--config_file", "accelerate_configs/ddp.yaml", "--mixed_precision", "no"]
    again = f"run_dir={run_dir}", "parity=off"
    resumed = start_as_ranks(recipe, folder, *again, launch=ddp, ACCELERATE_USE_CPU="true")
    assert resumed.status == 0, resumed.output
    figures = ("tokens", "trained_tokens", "share/chats", "epoch/texts")
    steps, unbroken = ([record for record in run.records() if "loss" in record] for run in (resumed, alone))
    assert [[record[key] for key in figures] for record in steps] == [[record[key] for key in figures] for record in unbroken]
    assert [record["loss"] for record in steps] == pytest.approx([record["loss"] for record in unbroken], rel=1e-5)
