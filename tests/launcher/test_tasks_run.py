"""Test `python -m pretrain evaluate --tasks`: scores as lm-evaluation-harness computes them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.compare.report import Report
from pretrain.metrics.run_record import read_run
from tests.conftest import contents

# Common keys of the tasks.
TASK = {"dataset_path": "json", "test_split": "test", "metadata": {"version": 1}}
TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package lm_eval, without the minute in which it reads 13,000 files and runs programs."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs lm_eval of requirements-dev.txt")
    from lm_eval.tasks import TaskManager

    from pretrain.run import tasks

    monkeypatch.setattr(tasks, "TaskManager", partial(TaskManager, include_defaults=False))
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    return lm_eval


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of three tasks with 10 documents of different lengths."""
    import datasets  # Imported late, because other tests do not need it.

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "tasks"
    folder.mkdir()
    documents = [
        {
            "question": counting(number, 1 + 2 * number),
            "choices": [f" {counting(5 * choice + number, 1 + choice)}" for choice in range(4)],
            "label": number % 4,
            # The longest text has more tokens than a pack, which has 32.
            "text": counting(3 * number, 2 + 7 * number),
        }
        for number in range(10)
    ]
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    for name, task in TASKS.items():
        files = {"dataset_kwargs": {"data_files": {"test": str(data)}}}
        content = yaml.safe_dump({"task": name, **TASK, **files, **task})
        (folder / f"{name}.yaml").write_text(content)
    return folder


def counting(first: int, number: int) -> str:
    return " ".join(f"w{(first + index) % 60}" for index in range(number))


def test_scores_equal_those_of_the_exported_model(
    harness: Any,
    tasks: Path,
    words: Path,
    train_here: Callable,
    small_recipe: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lm_eval.models.huggingface import HFLM

    from pretrain.run import tasks as scoring

    recipe = small_recipe | {"train": {"steps": 6}, "parity": "off", "precision": "current"}
    recipe |= {"fp8_config": {"on_unsupported": "emulate", "scope": "linear+head"}, "evaluate": {}}
    recipe["model"]["config"] |= {"vocab_size": 64}
    recipe["data"] |= {"tokenizer": str(words)}
    run = train_here(recipe=recipe)
    assert run.status == 0, run.output
    samples: list[Any] = []

    def with_samples(*arguments: Any, **options: Any) -> Any:
        results = harness.simple_evaluate(*arguments, **options | {"log_samples": True})
        samples.append(results["samples"])
        return results

    monkeypatch.setattr(scoring, "simple_evaluate", with_samples)
    own = ("--tasks", "choice,perplexity", "--include_path", str(tasks))
    evaluated = train_here("evaluate", *own, recipe=recipe)
    assert evaluated.status == 0, evaluated.output
    low, bf16 = [line for line in run.records() if line.get("event") == "tasks"]

    # The reference is the model of transformers, with one document in a batch.
    model = HFLM(
        str(run.run_dir / "final"),
        dtype="bfloat16",
        device="cpu",
        max_length=32,
        softmax_dtype="float32",
    )
    reference = harness.simple_evaluate(
        model,
        tasks=["choice", "perplexity"],
        task_manager=scoring.TaskManager(include_path=str(tasks)),
    )
    assert [low["precision"], bf16["precision"]] == ["current", "bf16"]
    assert bf16["step"] == 6
    assert bf16["scores"] == {
        task: {
            key.removesuffix(",none"): pytest.approx(value, rel=1e-4)
            for key, value in reference["results"][task].items()
            if isinstance(value, float)
        }
        for task in ("choice", "perplexity")
    }
    assert 0 < bf16["scores"]["choice"]["acc"] < 1
    expected = likelihoods(reference["samples"])
    assert likelihoods(samples[1]) == pytest.approx(expected, rel=5e-4)
    assert likelihoods(samples[0]) == pytest.approx(expected, rel=0.05)
    assert likelihoods(samples[0]) != pytest.approx(expected, rel=5e-4)

    # Another evaluation of a part has a row of its own in the report.
    limited = train_here("evaluate", *own, "--limit", "3", "--precisions", "bf16", recipe=recipe)
    assert limited.status == 0, limited.output
    (table,) = [part for part in Report.over([read_run(run.run_dir)]).tables() if "stderr" in part]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    accuracy = bf16["scores"]["choice"]
    shown = f"acc {accuracy['acc']:.4f}   acc_stderr {accuracy['acc_stderr']:.4f}"
    assert rows[0][3:9] == ["precision", "num_fewshot", "limit", "length", "task", "scores"]
    of_choice = [row[3:9] for row in rows if row[-3:-2] == ["choice"]]
    assert of_choice[1][:5] == ["bf16", "not set", "not set", "32", "choice"]
    assert of_choice[1][5].startswith(shown)
    assert of_choice[2][:5] == ["bf16", "not set", "3", "32", "choice"]
    assert len(of_choice) == 3


def likelihoods(samples: dict[str, Any]) -> list[float]:
    """Return the log-likelihoods of all requests."""
    responses = [
        response[0]
        for task in ("choice", "perplexity")
        for sample in samples[task]
        for response in sample["resps"]
    ]
    return [response[0] if isinstance(response, tuple) else response for response in responses]


def test_tasks_that_cannot_be_scored_are_refused(
    harness: Any, tasks: Path, words: Path, train_here: Callable, small_recipe: dict[str, Any]
) -> None:
    small_recipe["data"] |= {"tokenizer": str(words)}
    run = train_here("train.steps=1", "parity=off")
    assert run.status == 0, run.output
    before = contents(run.run_dir)
    folder = ("--include_path", str(tasks))
    for name, message in (("answer", "answer needs generated text"), ("chioce", "'chioce'")):
        evaluated = train_here("evaluate", "--tasks", f"choice,{name}", *folder)
        assert evaluated.status == 2
        assert message in evaluated.err
    assert contents(run.run_dir) == before


def test_options_of_tasks_need_tasks_and_the_harness(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--include_path need --tasks" in train_here("evaluate", "--limit", "3").refusal
    assert (
        "or --tasks at a time" in train_here("evaluate", "--tasks", "arc_easy", "own.txt").refusal
    )
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    missing = train_here("evaluate", "--tasks", "arc_easy").refusal
    assert "--tasks needs the package lm_eval, which is not installed; run `pip install" in missing
