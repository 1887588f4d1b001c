"""What happens to a run from outside: memory runs out, a disk is slow. One message, and nothing lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from tests.golden.runs import steps_logged


def test_memory_that_runs_out_is_one_message_and_leaves_what_was_saved(
    train_here: Callable, small_recipe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the backward pass of step 7."""
    backward = Accelerator.backward

    def fail(accelerator: Accelerator, loss: torch.Tensor, **options: Any) -> None:
        if steps_logged(Path(small_recipe["run_dir"])) == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        backward(accelerator, loss, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Accelerator, "backward", fail)
        run = train_here("parity=off")
    assert run.status == 2 and run.err.count("error: ") == 1 and "Traceback" not in run.output, run.output
    for remedy in ("out of memory", "2.00 GiB", "batch.microbatch", "model.gradient_checkpointing=full"):
        assert remedy in run.err
    again = train_here("batch.microbatch=1", "parity=off")
    assert again.status == 0 and "at step 4" in again.output
