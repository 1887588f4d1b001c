"""What happens to a run from outside: memory runs out, its folder vanishes. One message each, and nothing lost."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import train_accelerate
from foundation.errors import InputError
from packing.batch import BatchStream, StepBatches

CUDA_SAYS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.81 GiB of which 1.2 GiB is free."


def after_step(number: int, monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Any]) -> None:
    log = train_accelerate.log

    def log_and_more(run: Any, figures: dict[str, Any], **more: Any) -> None:
        log(run, figures, **more)
        if figures["step"] == number:
            happens()

    monkeypatch.setattr(train_accelerate, "log", log_and_more)


# ── Time ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_hours_are_over_however_the_clock_is_set_meanwhile(train_here: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time
    after_step(1, monkeypatch, lambda: monkeypatch.setattr(time, "time", lambda: now() - 86_400))
    run = train_here("train.max_hours=1e-9")
    assert run.status == 128 + signal.SIGUSR1 and "stopped by `train.max_hours: 1e-09` after step 1" in run.out, run.output


# ── Memory ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_out(*arguments: Any, **options: Any) -> None:
    raise torch.OutOfMemoryError(CUDA_SAYS)


def fail_to_compile(*arguments: Any, **options: Any) -> None:
    """As a library does that allocates by itself, inside of something that wraps its error."""
    try:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    except RuntimeError as error:
        raise RuntimeError("backend failed") from error


@pytest.mark.parametrize(
    ("where", "name", "when"),
    [
        ("pretrain.run.assembly.ExactAdamW.materialise", run_out, "before the first step was done"),
        ("train_accelerate.forward_backward", run_out, "before the first step was done"),
        ("train_accelerate.forward_backward", fail_to_compile, "before the first step was done"),
        ("pretrain.run.evaluate.held_out_sums", run_out, "after step 5"),
    ],
)
def test_memory_that_runs_out_is_one_message_with_the_settings_that_take_less(
    where: str, name: Callable, when: str, train_here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name)
    run = train_here("checkpoint.at_end=false")
    assert run.status == 2 and run.err.count("error: ") == 1 and "Traceback" not in run.output, run.output
    first, *lines = run.err.partition("error: ")[2].splitlines()
    assert first.startswith(f"out of memory {when}: ") and "The plan reckoned with about" in first
    assert name is not run_out or "Tried to allocate 2.00 GiB" in first
    ways = [line.split()[0] for line in lines if line.startswith("  ")]
    assert {"batch.microbatch=1", "model.gradient_checkpointing=full", "optimizer.moments=bf16"} <= set(ways)
    assert "--accept-changes" in lines[-1]


def test_where_not_even_one_pack_fits_the_settings_that_take_less_are_named(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretrain.run.microbatch._fits", lambda *arguments: False)
    run = train_here("batch.microbatch=auto")
    assert run.status == 2 and "`batch.microbatch: auto`: 1 pack(s) at once do not fit" in run.err
    assert "\n  model.gradient_checkpointing=full " in run.err and "batch.microbatch=" not in run.err


def test_memory_that_runs_out_in_a_later_step_leaves_what_was_saved(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch, small_recipe: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:
        after_step(6, patch, run_out)
        run = train_here()
    assert run.status == 2 and "out of memory after step 6" in run.err
    again = train_here("batch.microbatch=1")
    assert again.status == 0 and "at step 4" in again.output, "the setting that the message names goes on from the last save"


def test_an_error_that_is_not_of_memory_keeps_its_traceback(train_here: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("a bug of ours")

    monkeypatch.setattr(train_accelerate, "forward_backward", fail)
    with pytest.raises(RuntimeError, match="a bug of ours"):
        train_here()


def test_sizes_that_do_not_go_together_are_one_message_where_the_model_is_first_run(train_here: Callable) -> None:
    sizes = "hidden_size: 32, num_attention_heads: 4, num_key_value_heads: 4, head_dim: 16, num_hidden_layers: 1"
    run = train_here(f"model.config={{model_type: helium, vocab_size: 61, {sizes}}}")
    assert run.status == 2 and "Traceback" not in run.output, run.output
    assert "`model.config`: the sizes of HeliumForCausalLM do not go together: mat1 and mat2 " in run.err


# ── Packs that cannot be read ─────────────────────────────────────────────────────────────────────────────────────────────────


def failing_at(number: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread that reads the packs of step `number`, counted from 0, fail."""
    read = BatchStream.step

    def read_or_not(stream: BatchStream, wanted: int) -> StepBatches:
        if wanted == number:
            raise error
        return read(stream, wanted)

    monkeypatch.setattr(BatchStream, "step", read_or_not)


def test_packs_that_cannot_be_read_end_the_run_with_the_step_before_them_saved(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        failing_at(6, InputError("packs: pack 7 holds token id 99"), patch)
        run = train_here()
    assert run.status == 2 and "error: packs: pack 7 holds token id 99. Step 6 is saved" in run.err, run.output
    again = train_here()
    assert again.status == 0 and "at step 6" in again.output


def test_a_bug_in_reading_packs_keeps_its_traceback_and_the_step_before_it(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError, match="a bug of ours") as bug:
        failing_at(6, ZeroDivisionError("a bug of ours"), patch)
        train_here()
    assert bug.value.__notes__ == ["Step 6 is saved"] and "read_or_not" in {each.name for each in bug.traceback}
    assert "at step 6" in train_here().output


def test_packs_of_the_first_step_that_cannot_be_read_leave_nothing_behind(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(0, InputError("packs: damaged"), monkeypatch)
    run = train_here()
    assert run.status == 2 and run.err.endswith("error: packs: damaged\n") and not list(run.run_dir.glob("checkpoints/step-*"))


# ── A folder that vanishes ────────────────────────────────────────────────────────────────────────────────────────────────────


def delete(folder: Path) -> None:
    """As ``rm -r`` again and again: a checkpoint may be written beside training, and its folder renamed meanwhile."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


def step_of_rescue(run_dir: Path) -> Path:
    (saved,) = (run_dir.with_name(f"{run_dir.name}.rescued-1") / "checkpoints").iterdir()
    return saved


def test_a_run_folder_deleted_during_the_run_ends_it_at_that_step_and_saves_beside_it(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch, small_recipe: dict[str, Any]
) -> None:
    run_dir = Path(small_recipe["run_dir"])
    with monkeypatch.context() as patch:
        after_step(6, patch, lambda: delete(run_dir))
        run = train_here()
    assert run.status == 2 and run.err.count("error: ") == 1 and "Traceback" not in run.output, run.output
    saved = step_of_rescue(run_dir)
    assert saved.name == "step-00000006" and not run_dir.exists(), "nothing is written where it was"
    assert f"{run_dir}: the run folder was deleted or replaced" in run.err and f"--resume {saved}" in run.err
    again = train_here("--resume", str(saved))
    assert again.status == 0 and "at step 6" in again.output


def test_a_run_folder_renamed_during_the_run_is_found_and_one_in_its_place_is_not_touched(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch, small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    run_dir, moved = Path(small_recipe["run_dir"]), tmp_path / "elsewhere"

    def replace() -> None:
        run_dir.rename(moved)
        run_dir.mkdir()
        (run_dir / ".lock").write_text("somebody else's")

    with monkeypatch.context() as patch:
        after_step(3, patch, replace)
        run = train_here()
    assert run.status == 2, run.output
    saved = step_of_rescue(run_dir)
    assert f"It is {moved} now" in run.err and f"run_dir={moved} --resume {saved}" in run.err
    assert [path.name for path in run_dir.iterdir()] == [".lock"] and (run_dir / ".lock").read_text() == "somebody else's"
    again = train_here(f"run_dir={moved}", "--resume", str(saved))
    assert again.status == 0 and again.losses() == [record["loss"] for record in again.records() if "loss" in record]
    assert [record["step"] for record in again.records() if "loss" in record] == list(range(1, 13))


def test_metrics_deleted_during_the_run_end_it_at_that_step_with_the_step_saved(
    train_here: Callable, monkeypatch: pytest.MonkeyPatch, small_recipe: dict[str, Any]
) -> None:
    metrics = Path(small_recipe["run_dir"]) / "metrics.jsonl"
    with monkeypatch.context() as patch:
        after_step(3, patch, metrics.unlink)
        run = train_here()
    assert run.status == 2 and f"{metrics}: was deleted or replaced" in run.err and "up to step 3" in run.err
    assert train_here().status == 0
