"""What happens to a run from outside: memory runs out, a disk is slow. One message, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator

from tests.golden.runs import steps_logged
from tests.moments import LauncherProcess, Moment


def fail_after(steps: int, run_dir: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise `error` in the backward pass of the step that follows so many."""
    backward = Accelerator.backward

    def fail(accelerator: Accelerator, loss: torch.Tensor, **options: Any) -> None:
        if steps_logged(Path(run_dir)) == steps:
            raise error
        backward(accelerator, loss, **options)

    monkeypatch.setattr(Accelerator, "backward", fail)


def test_memory_that_runs_out_is_one_message_and_leaves_what_was_saved(
    train_here: Callable, small_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_after(6, small_recipe["run_dir"], torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), patch)
        run = train_here("parity=off")
    assert run.status == 2 and run.err.count("error: ") == 1 and "Traceback" not in run.output, run.output
    for remedy in ("out of memory", "2.00 GiB", "batch.microbatch", "model.gradient_checkpointing=full"):
        assert remedy in run.err
    again = train_here("batch.microbatch=1", "parity=off")
    assert again.status == 0 and "at step 4" in again.output


# ── While a checkpoint is written behind training ─────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def started(small_recipe: dict[str, Any], tmp_path: Path) -> Callable[[Moment], LauncherProcess]:
    """A run of 12 steps that saves every 4, held at a moment of writing."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(small_recipe | {"evaluate": {}, "parity": "off"}))

    def start(moment: Moment) -> LauncherProcess:
        process = LauncherProcess([str(tmp_path / "recipe.yaml")], tmp_path / "log", moment)
        process.wait_until_it_waits()
        return process

    return start


def test_steps_go_on_while_a_checkpoint_is_written_until_the_next_is_due(started: Callable, tmp_path: Path) -> None:
    process, checkpoints = started(Moment("os.rename", r"/step-00000004$")), tmp_path / "run" / "checkpoints"
    process.wait_until(lambda: steps_logged(tmp_path / "run") == 8)  # nothing but the thread is held
    assert not list(checkpoints.glob("step-*"))
    process.go_on()
    assert process.end() == 0, (tmp_path / "log").read_text()
    assert sorted(path.name[-2:] for path in checkpoints.glob("step-*")) == ["04", "08", "12"]
