"""Test runs whose data, model, memory or files fail: no wrong weights are saved or lost."""

from __future__ import annotations

import errno
import gc
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

import train_accelerate
from pretrain.checkpoint import checkpoint
from pretrain.precision.emulation import BothWays
from tests.conftest import Trainer, flip
from tests.golden.runs import losses_changed, poisoned_once, steps_logged, steps_saved, tensors_of


@pytest.fixture
def train_here(train_here: Trainer) -> Trainer:
    """Function that trains six steps without evaluation, with checkpoints after 2, 4 and 6."""
    train_here.recipe |= {"train": {"steps": 6}, "checkpoint": {"every": 2}, "evaluate": {}}
    train_here.recipe["schedule"] = {"kind": "constant"}
    return train_here


def copies_in_fp8() -> int:
    """Return the number of cached weights in FP8."""
    gc.collect()
    return sum(isinstance(candidate, BothWays) for candidate in gc.get_objects())


def test_a_rollback_before_the_profiled_step_keeps_the_profile(train_here: Trainer) -> None:
    run_dir = train_here.run_dir
    with poisoned_once(run_dir, steps_before=3):
        finished = train_here("health.on_nan=rollback", "--profile", "train.steps=8").done()
    assert "Rollback 1" in finished.output
    assert (run_dir / "profile.md").is_file()


def test_a_run_stopped_after_two_rollbacks_saves_its_step_and_count(train_here: Trainer) -> None:
    """The run resumes at step 4 and rolls back to 4 and, as other data fail too, to 2.

    Step 2 is before the phase in FP8, so no FP8 copy of a weight is kept. The signal comes in step
    3.
    """
    train_here.recipe |= {
        "batch": {"tokens": 2 * 32, "microbatch": 1},
        "precision": [{"until": 3, "use": "bf16"}, {"use": "delayed"}],
        "fp8_config": {"on_unsupported": "emulate"},
        "log": {"fp8_statistics": 1},
    }
    assert train_here("train.steps=4").status == 0
    run_dir = train_here.run_dir
    # The number of logged steps at the start of every step, and the number of copies in FP8.
    steps_before = []
    copies = [copies_in_fp8()]

    def poison(loss: torch.Tensor) -> torch.Tensor:
        if steps_before[-1:] != [logged := steps_logged(run_dir)]:
            steps_before.append(logged)
            if logged == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            copies.append(copies_in_fp8())
        return loss * math.inf if logged == 5 else loss

    again = ("health.on_nan=rollback", "--accept-changes")
    with losses_changed(poison):
        stopped = train_here(*again)
    assert stopped.status == 128 + signal.SIGTERM, stopped.output
    assert steps_before == [4, 5, 4, 5, 2], stopped.output
    assert copies[5] == copies[0] < min(copies[1:5])
    assert (run_dir / "fp8_statistics.jsonl").read_text() == "", (
        "the statistics of rolled back steps must be removed"
    )
    saved = json.loads((run_dir / "checkpoints" / "step-00000003" / "state.json").read_text())
    assert (saved["progress"]["left_out"], saved["health"]["rollbacks"]) == (6, 2)
    finished = train_here(*again).done()
    assert "at step 3" in finished.output, finished.output


def test_a_rollback_uses_the_only_intact_checkpoint_again(
    train_here: Trainer, tmp_path: Path
) -> None:
    """Step 5 fails twice after the checkpoint of step 4, the only intact one.

    Then a run in another folder resumes from it, and rolls back to it too.
    """
    with poisoned_once(train_here.run_dir, steps_before=1):
        assert train_here("train.steps=4", "health.on_nan=skip").status == 0
    run_dir = train_here.run_dir
    flip(max((run_dir / "checkpoints" / "step-00000002").glob("*.safetensors")))

    def poison(loss: torch.Tensor) -> torch.Tensor:
        # The second event contains the line of the first.
        rollbacks = (run_dir / "metrics.jsonl").read_text().count('"rollbacks"')
        return loss * math.inf if rollbacks < 2 else loss

    with losses_changed(poison):
        finished = train_here("health.on_nan=rollback").done()
    (event,) = (record for record in finished.records() if record.get("event") == "rollback")
    assert (event["resumed_from"], event["rollbacks"]) == (4, 2)
    other = tmp_path / "other"
    with poisoned_once(other, steps_before=1):
        checkpoint_of_4 = ("--resume", str(run_dir / "checkpoints" / "step-00000004"))
        train_here("health.on_nan=rollback", f"run_dir={other}", *checkpoint_of_4).done()
    saved = json.loads((other / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert (saved["health"]["skipped_steps"], saved["health"]["rollbacks"]) == (1, 1)


@pytest.mark.parametrize(
    "settings",
    [
        ("checkpoint.every=3",),
        ("checkpoint.every=4", "health.on_nan=skip"),
        ("checkpoint.every=null", "train.steps=3"),
    ],
)
def test_weights_that_an_update_has_overflowed_are_never_saved(
    settings: tuple[str, ...], train_here: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update of step 3 overflows a weight, after a finite loss and gradient."""
    clear = train_accelerate.adamw.clear_gradients

    def overflow(optimizer: Any, model: Any) -> None:
        clear(optimizer, model)
        if steps_logged(train_here.run_dir) == 2:
            next(model.parameters()).data[0] = math.inf

    monkeypatch.setattr(train_accelerate.adamw, "clear_gradients", overflow)
    run = train_here(*settings)
    assert run.status == 3, run.output
    assert "halted: step" in run.err, run.output
    for folder in (run.run_dir / "checkpoints").glob("step-*"):
        assert all(tensor.isfinite().all() for tensor in tensors_of(folder).values())
    assert not (run.run_dir / "final").exists()


def test_a_run_that_would_train_something_else_stops_before_a_step(
    train_here: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The MLP's output is 50 % too large unless attention is eager, like that of a wrong kernel."""
    forward = Qwen3MLP.forward

    def broken(mlp: Qwen3MLP, x: torch.Tensor) -> torch.Tensor:
        return forward(mlp, x) * (1 if mlp.config._attn_implementation == "eager" else 1.5)

    monkeypatch.setattr(Qwen3MLP, "forward", broken)
    run = train_here("parity=on", "model.fused=off", "train.steps=3")
    assert run.status == 3, run.output
    assert "halted: step 0: parity" in run.err, run.output
    assert ".mlp." in run.output, run.output
    assert run.audit()["parity"]["failures"]
    assert not (run.run_dir / "metrics.jsonl").exists() or not run.records()


def test_memory_that_runs_out_is_one_message_and_what_was_saved_stays(train_here: Trainer) -> None:
    """Memory runs out in the backward pass of step 4."""

    def fail(loss: torch.Tensor) -> torch.Tensor:
        if steps_logged(train_here.run_dir) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return loss

    with losses_changed(fail):
        run = train_here()
    assert run.status == 2, run.output
    assert run.err.count("error: ") == 1 and "Traceback" not in run.output, run.output
    for words in ("out of memory", "2.00 GiB", "batch.microbatch", "gradient_checkpointing: full"):
        assert words in run.err
    resumed = train_here("batch.microbatch=1").done()
    assert "at step 2" in resumed.output


def test_a_run_saves_after_its_metrics_were_removed(
    train_here: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = train_accelerate.checkpointing.save
    run_dir = train_here.run_dir

    def save_without_metrics(*arguments: Any, **options: Any) -> None:
        (run_dir / "metrics.jsonl").unlink(missing_ok=True)
        save(*arguments, **options)

    monkeypatch.setattr(train_accelerate.checkpointing, "save", save_without_metrics)
    train_here("checkpoint.keep=9")
    assert steps_saved(run_dir) == [2, 4, 6]


def test_a_failed_save_in_the_background_is_an_error_after_the_last_step(
    train_here: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save of step 4 fails after the last step was trained."""
    run_dir = train_here.run_dir
    write_part = checkpoint.write_part

    def fail_in_step_4(partial: Path, files: Any) -> Any:
        if partial.name.endswith("4"):
            while steps_logged(run_dir) < 5:
                time.sleep(0.01)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_part(partial, files)

    monkeypatch.setattr(checkpoint, "write_part", fail_in_step_4)
    run = train_here("train.steps=5", "checkpoint.at_end=false")
    assert run.status == 2, run.output
    assert "step-00000004: could not be saved" in run.err
    assert not (run_dir / "summary.json").exists()
