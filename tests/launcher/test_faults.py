"""Test runs without memory or metrics.jsonl: they print one message and lose no checkpoint."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train_accelerate
from pretrain.checkpoint import checkpoint
from tests.golden.runs import losses_changed, steps_logged, steps_saved


def test_memory_that_runs_out_is_one_message_and_what_was_saved_stays(
    train_here: Callable, small_recipe: dict[str, Any]
) -> None:
    """Memory runs out in the backward pass of step 7."""

    def fail(loss: torch.Tensor) -> torch.Tensor:
        if steps_logged(Path(small_recipe["run_dir"])) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss

    with losses_changed(fail):
        run = train_here("parity=off")
    assert run.status == 2, run.output
    assert run.err.count("error: ") == 1, run.output
    assert "Traceback" not in run.output, run.output
    for words in (
        "out of memory",
        "2.00 GiB",
        "batch.microbatch",
        "model.gradient_checkpointing=full",
    ):
        assert words in run.err
    resumed = train_here("batch.microbatch=1", "parity=off")
    assert resumed.status == 0
    assert "at step 4" in resumed.output


def test_a_run_saves_after_its_metrics_were_removed(
    train_here: Callable, small_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = train_accelerate.checkpointing.save
    run_dir = Path(small_recipe["run_dir"])

    def save_without_metrics(*arguments: Any, **options: Any) -> None:
        (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        save(*arguments, **options)

    monkeypatch.setattr(train_accelerate.checkpointing, "save", save_without_metrics)
    train_here("parity=off", "checkpoint.keep=9")
    assert steps_saved(run_dir) == [4, 8, 12]


def test_a_failed_save_in_the_background_is_an_error_after_the_last_step(
    train_here: Callable, small_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 8 fails after the last step was trained."""
    run_dir = Path(small_recipe["run_dir"])
    write_part = checkpoint.write_part

    def fail_in_step_8(partial: Path, files: Any) -> Any:
        if partial.name.endswith("8"):
            while steps_logged(run_dir) < 9:
                time.sleep(0.01)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_part(partial, files)

    monkeypatch.setattr(checkpoint, "write_part", fail_in_step_8)
    run = train_here("parity=off", "train.steps=9", "checkpoint.at_end=false")
    assert run.status == 2, run.output
    assert "step-00000008: could not be saved" in run.err
    assert not (run_dir / "summary.json").exists()
