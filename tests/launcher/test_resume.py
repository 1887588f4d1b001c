"""Test that runs that are killed, stopped or damaged end with the bits of an uninterrupted run.

benchmarks/kill_resume.py kills runs under `accelerate launch` at random moments.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGKILL, SIGTERM
from typing import Any

import pytest
import torch
import yaml

from packing.batch import BatchStream
from pretrain.run import checkpointing
from pretrain.run.assembly import Assembly
from pretrain.settings import config
from tests.conftest import Finished, contents, flip, write_recipe
from tests.golden.runs import digest, saved, steps_logged, steps_saved, tensors_of
from tests.moments import LauncherProcess, Moment

# Steps of a run with checkpoints after 4, 8 and 12.
STEPS = 12


@pytest.fixture(scope="module")
def recipe(recipe_for: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Recipe with dropout, so that other random numbers after a resume change the losses."""
    small = recipe_for(tmp_path_factory.mktemp("resume") / "run")
    sizes = {
        "model_type": "gpt2",
        "vocab_size": 61,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 64,
    }
    dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
    return small | {
        "model": {"config": sizes | dropout},
        "train": {"steps": STEPS},
        "parity": "off",
    }


@pytest.fixture(scope="module")
def alone(recipe: dict[str, Any], start_here: Callable) -> Finished:
    """Finished run without interruption."""
    finished = start_here(recipe, Path(recipe["run_dir"]).parent)
    assert finished.status == 0, finished.output
    return finished


@pytest.fixture
def run(recipe: dict[str, Any], start_here: Callable, tmp_path: Path) -> Callable[..., Finished]:
    """Function that trains the recipe in this test's folder, in this process."""
    return lambda *arguments: start_here(
        recipe | {"run_dir": str(tmp_path / "run")}, tmp_path, *arguments
    )


@pytest.fixture
def start(recipe: dict[str, Any], tmp_path: Path) -> Callable[..., LauncherProcess]:
    """Function that trains the recipe in this test's folder, in a process with `moments`."""
    return lambda *moments, settings=(): LauncherProcess(
        [
            str(write_recipe(recipe | {"run_dir": str(tmp_path / "run")}, tmp_path)),
            *settings,
        ],
        tmp_path / "log",
        *moments,
    )


@pytest.fixture
def copied(alone: Finished, tmp_path: Path) -> Callable[..., Path]:
    """Function that copies the uninterrupted run without its export and some checkpoints.

    It takes the steps of the checkpoints to omit, and returns the folder of the copy.
    """

    def copy(*without: int) -> Path:
        run_dir = shutil.copytree(alone.run_dir, tmp_path / "run")
        shutil.rmtree(run_dir / "final")
        for step in without:
            shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08d}")
        return run_dir

    return copy


def outcome(run: Finished) -> list[Any]:
    """Return the figures that do not depend on the machine, and the hashes of the weights.

    Weights are those of the last checkpoint and of the exported model.
    """
    final = digest(tensors_of(run.run_dir / "final"), named=True)
    machine_suffixes = ("_ms", "per_second", "tflops", "memory_gib", "recompiles")
    figures = [
        {key: value for key, value in record.items() if not key.endswith(machine_suffixes)}
        for record in run.records()
    ]
    return [figures, saved(run.run_dir, STEPS), final]


def test_a_recomputed_layer_draws_the_same_dropout(alone: Finished, run: Callable) -> None:
    recomputed = run("model.gradient_checkpointing=full")
    assert recomputed.status == 0, recomputed.output
    assert recomputed.losses() == alone.losses()


# Moments in which one run is killed, start after start, and the possible steps of its newest
# checkpoint then. Checkpoints are written in the background, so the newest one when a step is
# logged depends on the machine.
KILLS = [
    # at the start
    (Moment("os.rename", r"/config\.yaml$", SIGKILL), {None}),
    # between steps
    (Moment("logged", "^2$", SIGKILL), {None}),
    # the first checkpoint is half written
    (Moment("open", r"/\.partial-step-00000004/", SIGKILL), {None}),
    (Moment("logged", "^7$", SIGKILL), {None, 4}),
    # a checkpoint is complete, but does not have its name yet
    (Moment("os.rename", r"/step-00000008$", SIGKILL), {4}),
    # during the export
    (Moment("os.rename", r"/\.final\.\w+\.writing$", SIGKILL), {STEPS}),
    (Moment("open", r"/\.final\.\w+\.writing/[^.]", SIGKILL), {STEPS}),
]


def test_a_run_killed_many_times_equals_one_left_alone(
    alone: Finished, start: Callable, run: Callable, tmp_path: Path
) -> None:
    for moment, newest in KILLS:
        assert start(moment).end() == -SIGKILL, (moment, (tmp_path / "log").read_text())
        assert max(steps_saved(tmp_path / "run"), default=None) in newest, moment
    finished = run()
    assert finished.status == 0, finished.output
    assert outcome(finished) == outcome(alone)
    assert not list((tmp_path / "run").rglob("*partial*"))
    assert not list((tmp_path / "run").glob(".final*"))


def test_a_longer_horizon_goes_on_where_the_rate_has_not_fallen(
    recipe: dict[str, Any], run: Callable, start_here: Callable, tmp_path: Path
) -> None:
    assert run("schedule.kind=constant", "train.steps=8").status == 0
    longer = run("schedule.kind=constant")
    assert longer.status == 0, longer.output
    uninterrupted = start_here(
        recipe | {"run_dir": str(tmp_path / "uninterrupted")}, tmp_path, "schedule.kind=constant"
    )
    assert outcome(longer)[1:] == outcome(uninterrupted)[1:]


def test_a_longer_horizon_needs_a_checkpoint_before_the_decay(
    run: Callable,
) -> None:
    shorter = run("schedule.kind=wsd", "train.steps=8")
    assert shorter.status == 0
    refusal = run("schedule.kind=wsd", "train.steps=10").refusal
    assert "pass an earlier checkpoint to --resume" in refusal
    checkpoint = shorter.run_dir / "checkpoints/step-00000004"
    longer = run("schedule.kind=wsd", "train.steps=10", "--resume", str(checkpoint))
    assert longer.status == 0, longer.output


def test_a_run_folder_to_resume_is_its_newest_checkpoint(
    recipe: dict[str, Any], copied: Callable, alone: Finished, start_here: Callable, tmp_path: Path
) -> None:
    folder = copied(12)
    resumed = start_here(
        recipe | {"run_dir": str(tmp_path / "resumed")}, tmp_path, "--resume", str(folder)
    )
    assert resumed.status == 0, resumed.output
    assert f"{folder}/checkpoints/step-00000008 at step 8" in resumed.out, resumed.output
    assert outcome(resumed)[-1] == outcome(alone)[-1]


# A signal between two steps stops the run after the next step, and a signal before or during an
# evaluation stops it after the evaluation.
@pytest.mark.parametrize(("logged", "step", "signal"), [(2, 3, SIGTERM), (5, 5, SIGINT)])
def test_a_stopped_run_saves_its_step_and_resumes_exactly(
    logged: int,
    step: int,
    signal: Any,
    alone: Finished,
    start: Callable,
    run: Callable,
    tmp_path: Path,
) -> None:
    assert start(Moment("logged", f"^{logged}$", signal)).end() == 128 + signal
    output = (tmp_path / "log").read_text()
    assert signal.name in output
    assert "Traceback" not in output
    assert steps_saved(tmp_path / "run")[-1] == steps_logged(tmp_path / "run") == step
    finished = run()
    assert finished.status == 0, finished.output
    assert f"at step {step}" in finished.output
    assert outcome(finished) == outcome(alone)


def test_a_signal_while_the_last_step_is_saved_loses_nothing_of_it(
    alone: Finished, copied: Callable, start: Callable, run: Callable
) -> None:
    run_dir = copied(STEPS)
    assert start(Moment("os.rename", f"/step-{STEPS:08d}$", SIGTERM)).end() == 128 + SIGTERM
    assert steps_saved(run_dir)[-1] == STEPS
    finished = run()
    assert finished.status == 0, finished.output
    assert outcome(finished) == outcome(alone)


def test_a_signal_after_the_last_step_saves_it_without_a_last_checkpoint(
    start: Callable, run: Callable, tmp_path: Path
) -> None:
    moment = Moment("logged", f"^{STEPS}$", SIGTERM)
    stopped = start(moment, settings=("checkpoint.at_end=false",))
    assert stopped.end() == 128 + SIGTERM, (tmp_path / "log").read_text()
    assert steps_saved(tmp_path / "run")[-1] == STEPS
    finished = run("checkpoint.at_end=false")
    assert finished.status == 0, finished.output
    assert finished.records()[-1]["event"] == "evaluation"


def test_a_run_resumes_before_a_damaged_checkpoint_and_names_it(
    alone: Finished, copied: Callable, run: Callable
) -> None:
    newest = copied() / "checkpoints" / f"step-{STEPS:08d}"
    flip(max(newest.glob("*.safetensors")))
    finished = run()
    assert finished.status == 0, finished.output
    assert str(newest) in finished.output
    assert "at step 8" in finished.output
    assert outcome(finished) == outcome(alone)


def test_a_run_resumes_exactly_with_another_place_of_its_state(
    alone: Finished, copied: Callable, run: Callable
) -> None:
    copied(STEPS)
    finished = run("optimizer.offload=state")
    assert finished.status == 0, finished.output
    assert "at step 8" in finished.out
    assert outcome(finished) == outcome(alone)


def test_where_every_checkpoint_is_damaged_no_run_begins_anew(
    copied: Callable, run: Callable
) -> None:
    run_dir = copied()
    (run_dir / "summary.json").unlink()  # Only finished runs have a summary.
    for file in run_dir.glob("checkpoints/*/*.safetensors"):
        flip(file)
    before = contents(run_dir)
    assert f"{run_dir}/checkpoints: every checkpoint is damaged" in run().refusal
    assert contents(run_dir) == before


def test_the_steps_of_another_training_are_not_cut_away(
    alone: Finished, copied: Callable, run: Callable
) -> None:
    """Without a checkpoint, a start with other settings would restart metrics.jsonl at step 0."""
    run_dir = copied(4, 8, STEPS)
    (run_dir / "summary.json").unlink()
    before = (run_dir / "metrics.jsonl").read_bytes()
    refused = run("optimizer.learning_rate=0.5")
    assert refused.status == 2
    assert str(run_dir) in refused.refusal
    assert "optimizer.learning_rate" in refused.refusal
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    assert outcome(run()) == outcome(alone), "the same recipe must start from step 0"


def test_a_finished_run_started_again_changes_nothing(
    alone: Finished, start_here: Callable, recipe: dict[str, Any]
) -> None:
    before = outcome(alone)
    folder = Path(recipe["run_dir"]).parent
    repeated = start_here(recipe, folder)
    assert repeated.status == 0 and "already finished" in repeated.output, repeated.output
    assert outcome(repeated) == before
    in_tokens = start_here(recipe, folder, f"train.tokens={STEPS * recipe['batch']['tokens']}")
    assert in_tokens.status == 0, in_tokens.output
    assert outcome(in_tokens) == before, "the same horizon in tokens must change nothing"
    files = contents(repeated.run_dir)
    for options in ((), ("--accept-changes",), ("--plan",)):
        refusal = start_here(recipe, folder, "train.steps=8", *options).refusal
        assert "is from step 12, but `train` ends the run at step 8; raise" in refusal
        assert contents(repeated.run_dir) == files


# ── Restored state ──


def after_loading(change: Callable[[Assembly], object]) -> Callable[[pytest.MonkeyPatch], None]:
    """Make a fault that changes the assembly after a checkpoint was loaded into it."""
    load = checkpointing.load_weights

    def loaded(source: Any, checkpoints: Any, mode: Any, assembly: Assembly) -> list[str]:
        notes = load(source, checkpoints, mode, assembly)
        change(assembly)
        return notes

    return lambda patch: patch.setattr(checkpointing, "load_weights", loaded)


def forget(key: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Make a fault that replaces the optimizer's `key` state by new zeros."""

    def change(assembly: Assembly) -> None:
        for state in assembly.optimizer.state.values():
            state[key] = torch.zeros_like(state[key])

    return after_loading(change)


def flip_a_bit(assembly: Assembly) -> None:
    assembly.tensors["transformer.ln_f.bias"].data.view(torch.int16)[0] ^= 1


def begin_later(packs: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Make a fault that reads packs `packs` places after the run's place, or before it."""
    steps = BatchStream.steps

    def moved(batches: BatchStream, place: int, count: int) -> Any:
        return steps(batches, place + packs, count)

    return lambda patch: patch.setattr(BatchStream, "steps", moved)


FAULTS = {
    "second moments are forgotten": (forget("exp_avg_sq"), "exp_avg_sq/"),
    "remainders are forgotten": (forget("remainder"), "remainder/"),
    "a weight has another bit": (after_loading(flip_a_bit), "1 tensors .*transformer.ln_f.bias"),
    "histories are forgotten": (
        after_loading(lambda assembly: assembly.context.forget()),
        "amax_history",
    ),
    "a pack is repeated": (
        begin_later(-1),
        "packs begin at position 15 in the order of packs, not at 16",
    ),
}


def test_an_fp32_run_resumes_where_the_default_is_bf16_exact(
    run: Callable, copied: Callable, alone: Finished, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = copied(8, 12)
    monkeypatch.setattr(config, "usual_weights", lambda recipe, *, on_gpu: "bf16_exact")
    resumed = run()
    assert resumed.status == 0, resumed.output
    assert outcome(resumed) == outcome(alone)
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["weights"] == "fp32"


LOW = (
    "precision=delayed",
    "weights=bf16_exact",
    "fp8_config.on_unsupported=emulate",
    "train.steps=4",
)


@pytest.fixture(scope="module")
def low(
    recipe: dict[str, Any],
    start_here: Callable,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Folder of a run in low precision that was saved after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("low")
    run_dir = folder / "run"
    finished = start_here(recipe | {"run_dir": str(run_dir)}, folder, *LOW, "checkpoint.every=2")
    assert finished.status == 0, finished.output
    return run_dir


@pytest.mark.parametrize("fault", FAULTS)
def test_a_resume_from_anything_but_what_was_saved_stops(
    fault: str,
    low: Path,
    run: Callable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, line = FAULTS[fault]
    make(monkeypatch)
    resumed = run(*LOW, "--resume", str(low / "checkpoints/step-00000002"))
    assert resumed.status == 3, resumed.output
    assert re.search(line, resumed.err), resumed.output
