"""The last screen says what the run's files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pretrain.metrics.last_screen import last_screen
from pretrain.metrics.run_files import read_run
from pretrain.metrics.run_folder import RunFolder


def step(number: int, **changes: Any) -> dict[str, Any]:
    measured = {"step_ms": 500.0, "data_wait_ms": 1.0, "tokens_per_second": 47_512.0, "memory_gib": 80.94, "recompiles": 0}
    return {"step": number, "tokens": number * 131_072, "epoch": number / 694, "loss": 3.0 - number / 1000} | measured | changes


def screen(folder: Path, records: list[dict[str, Any]]) -> tuple[str, dict[str, str], dict[str, str]]:
    with RunFolder(folder) as run_folder:
        run_folder.write_yaml(run_folder.config, {"seed": 1})
        run_folder.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        return last_screen(read_run(folder), run_folder)


def test_a_whole_run(tmp_path: Path) -> None:
    folder = tmp_path / "small-bf16-fp32"
    (folder / "final").mkdir(parents=True)
    evaluation = {
        "step": 60,
        "event": "evaluation",
        "held_out_loss": 2.9512,
        "held_out_perplexity": 19.129,
        "held_out_tokens": 900,
    }
    title, rows, commands = screen(folder, [step(n, mfu_bf16_peak=0.496) for n in range(1, 61)] + [evaluation])
    assert title == "small-bf16-fp32: done"
    assert rows == {
        "trained": "60 steps, 7.86 M tokens in 30 s",
        "loss": "2.9645 (mean of the last 50 steps)",
        "held-out loss": "2.9512 (perplexity 19.13)",
        "speed": "47.5k tokens/s, 49.6 % MFU (median), 0.2 % of the time waiting for data",
        "memory": "80.9 GiB",
        "model": f"{folder}/final (AutoModelForCausalLM.from_pretrained loads it)",
        "curves": f"{folder}/loss.png",
        "every step": f"{folder}/metrics.jsonl",
        "settings": f"{folder}/config.yaml",
    }
    assert list(commands.values()) == [f"python -m pretrain report {folder} OTHER_RUN"]


@pytest.mark.parametrize("loss", [2.5, None])
def test_what_is_not_known_has_no_row(loss: float | None, tmp_path: Path) -> None:
    _, rows, _ = screen(tmp_path / "run", [step(n, loss=loss) for n in range(1, 4)])
    assert ("loss" in rows) == (loss is not None)  # None: every step's was not a number
    assert not {"held-out loss", "model"} & rows.keys()  # nothing held out; no model exported, as for a speed test
    assert "MFU" not in rows["speed"]
