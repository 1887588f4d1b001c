"""Run records and the final screen, from files of a run folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from foundation.errors import InputError
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import RunRecord, last_screen, read_run, summary_of
from pretrain.metrics.trackers import JsonlTracker


def step(number: int, **changes: Any) -> dict[str, Any]:
    progress = {"tokens": number * 131_072, "epoch": number / 694, "loss": 3.0 - number / 1000}
    measured = {"step_ms": 500.0, "data_wait_ms": 1.0, "tokens_per_second": 47_512.0}
    measured |= {"memory_gib": 80.94, "recompiles": 0}
    return {"step": number, **progress, **measured, **changes}


def screen(folder: Path, records: list[dict[str, Any]]) -> tuple[str, dict[str, str]]:
    with RunFolder(folder) as run_folder:
        run_folder.config.write_text("seed: 1")
        run_folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        return last_screen(read_run(folder), run_folder)


def evaluation(step: int) -> dict[str, Any]:
    losses = {"held_out_loss": 2.9512, "held_out_perplexity": 19.129, "held_out_tokens": 900}
    return {"step": step, "event": "evaluation", **losses}


def test_the_last_screen_shows_results_speed_and_files(tmp_path: Path) -> None:
    folder = tmp_path / "small-bf16-fp32"
    (folder / "final").mkdir(parents=True)
    title, rows = screen(
        folder, [step(n, mfu_bf16_peak=0.496) for n in range(1, 61)] + [evaluation(60)]
    )
    assert title == "small-bf16-fp32: done"
    for label, facts in {
        "trained": ["60 steps", "7.86 M tokens", "30 s"],
        "mean loss": ["2.9695", "(training loss, steps 1 to 60)"],
        "held-out loss": ["2.9512", "19.13"],
        "speed": ["47.5k tokens/s", "49.6 % MFU", "0.2 % of the time waiting for data"],
        "memory": ["80.9 GiB"],
        "model": [f"{folder}/final"],
    }.items():
        assert not [fact for fact in facts if fact not in rows[label]], rows[label]
    for steps, first in ((8, 1), (70, 7)):
        _, rows = screen(tmp_path / str(steps), [step(n) for n in range(1, steps + 1)])
        assert rows["mean loss"].endswith(f"(training loss, steps {first} to {steps})")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        *(
            (line, "metrics\\.jsonl.*; remove that line")
            for line in ("[1]", "3", "null", '{"loss": 2.0}', '{"step": "x"}', '{"step": 1.5}')
        ),
        ('{"step": 2, "tokens"', r"metrics\.jsonl, line 3: "),
    ],
)
def test_a_wrong_line_is_reported_to_readers_and_resumed_runs(line, words, tmp_path):
    screen(tmp_path / "run", [step(1), step(2)])
    metrics = tmp_path / "run" / "metrics.jsonl"
    with metrics.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(InputError, match=words):
        read_run(tmp_path / "run")
    if line != '{"step": 1.5}':
        with pytest.raises(InputError, match=r"metrics\.jsonl: cannot be read or written"):
            JsonlTracker(metrics, resumed_step=2).start()


def test_a_held_out_loss_is_from_after_the_first_step_and_names_its_step() -> None:
    steps = [step(number) for number in range(1, 4)]
    lines = {
        "start": [evaluation(0), *steps],
        "earlier": [*steps[:2], evaluation(2), steps[2]],
        "end": [*steps, evaluation(3), {"step": 2, "event": "served", "served_loss": 2.0}],
    }
    runs = {
        name: RunRecord(Path(), {}, {}, metrics, summary_of(metrics))
        for name, metrics in lines.items()
    }
    assert "held_out_loss" not in runs["start"].summary, "it was measured before training"
    assert "served_loss" not in runs["end"].summary, "it was measured before the last step"
    assert (runs["earlier"].when_evaluated, runs["end"].when_evaluated) == (" (step 2)", "")


def test_a_step_without_labels_counts_neither_as_loss_nor_as_failure(tmp_path: Path) -> None:
    blank = {"loss": None, "unlabelled": True}
    screen(tmp_path / "run", [step(1), step(2, **blank), step(3, loss=2.0), step(4, **blank)])
    run = read_run(tmp_path / "run")
    assert run.summary["loss_at_end"] == pytest.approx((2.999 + 2.0) / 2)
    assert "loss" not in run.summary
    assert not run.failure
    screen(tmp_path / "failed", [step(1), step(2, loss=None), step(3, **blank)])
    assert read_run(tmp_path / "failed").failure, "null without `unlabelled` was NaN"


@pytest.mark.parametrize(
    ("environment", "devices"),
    [
        ({"gpus": ["H200"] * 8, "accelerate": {"processes": 2, "device": "cuda"}}, (2, "H200")),
        ({"gpus": ["H200"], "accelerate": {"processes": 2, "device": "cpu"}}, (2, "CPU")),
        ({}, (1, "CPU")),
    ],
)
def test_devices_are_counted_and_named(environment, devices):
    assert RunRecord(Path(), {}, environment, [], {}).devices == devices
