"""Test that an interrupted run ends with the bits of an uninterrupted run.

test_stream_run.py and test_storage_run.py do the same with streams and buckets.
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
from tests.conftest import Finished, Trainer, contents, flip
from tests.golden.runs import outcome, poisoned_once, steps_logged, steps_saved, tensor_files
from tests.launcher.conftest import EXPERTS, LOW
from tests.moments import Moment

# Steps of a run with checkpoints after 4, 8 and 12.
STEPS = 12
DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
GPT2 = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 2}


@pytest.fixture(scope="module")
def recipe(recipe_for: Callable, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Recipe with dropout, so that other random numbers after a resume change the losses."""
    return recipe_for(tmp_path_factory.mktemp("resume") / "run") | {
        "model": {"config": GPT2 | DROPOUT | {"n_positions": 64}},
        "train": {"steps": STEPS},
    }


@pytest.fixture(scope="module")
def alone(recipe: dict[str, Any], start_here: Callable) -> Finished:
    """Finished run without interruption."""
    return start_here(recipe, Path(recipe["run_dir"]).parent).done()


@pytest.fixture
def run(recipe: dict[str, Any], start_here: Callable, tmp_path: Path) -> Trainer:
    """Function that trains the recipe in this test's folder, in this process."""
    return Trainer(start_here, recipe | {"run_dir": str(tmp_path / "run")}, tmp_path)


def same_end(finished: Finished, alone: Finished) -> bool:
    assert finished.status == 0, finished.output
    return outcome(finished.run_dir, STEPS) == outcome(alone.run_dir, STEPS)


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


def test_a_run_killed_many_times_equals_one_left_alone(alone: Finished, run: Trainer) -> None:
    for moment, newest in KILLS:
        assert run.process(moment).end() == -SIGKILL, (moment, run.log)
        assert max(steps_saved(run.run_dir), default=None) in newest, moment
    assert same_end(run(), alone)
    assert not [*run.run_dir.rglob("*partial*"), *run.run_dir.glob(".final*")]


# A signal between two steps stops the run after the next step, and a signal before or during an
# evaluation stops it after the evaluation. A signal while the last step is saved loses nothing.
@pytest.mark.parametrize(
    ("moment", "step"),
    [
        (Moment("logged", "^2$", SIGTERM), 3),
        (Moment("logged", "^5$", SIGINT), 5),
        (Moment("os.rename", f"/step-{STEPS:08d}$", SIGTERM), STEPS),
    ],
)
def test_a_stopped_run_saves_its_step_and_resumes_exactly(
    moment: Moment, step: int, alone: Finished, run: Trainer
) -> None:
    assert run.process(moment).end() == 128 + moment.signal
    assert moment.signal.name in run.log and "Traceback" not in run.log
    assert steps_saved(run.run_dir)[-1] == steps_logged(run.run_dir) == step
    finished = run()
    assert f"at step {step}" in finished.output
    assert same_end(finished, alone)


def test_a_signal_after_the_last_step_saves_it_without_a_last_checkpoint(run: Trainer) -> None:
    run.recipe["checkpoint"] = {"at_end": False}
    assert run.process(Moment("logged", f"^{STEPS}$", SIGTERM)).end() == 128 + SIGTERM
    assert steps_saved(run.run_dir) == [STEPS]
    assert run().done().records()[-1]["event"] == "evaluation"


# Patterns of the checkpoints that a copy of the run lacks, a pattern of checkpoints to damage,
# settings of a second start, and its result: the step after which it resumes, or the words of its
# refusal.
COPIES: dict[str, tuple[list[str], str, tuple[str, ...], int | str | None]] = {
    "a damaged checkpoint": ([], "*12", (), 8),
    "another place of the state": (["*12"], "none", ("optimizer.offload=state",), 8),
    "no checkpoint": (["*"], "none", (), None),
    "damaged checkpoints": ([], "*", (), "/checkpoints: every checkpoint is damaged"),
    # Without a checkpoint, metrics.jsonl would restart at step 0.
    "another training": (
        ["*"],
        "none",
        ("optimizer.learning_rate=0.5",),
        "optimizer.learning_rate",
    ),
}


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_a_run_resumes_exactly_or_stays_as_it_is(
    name: str, alone: Finished, run: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, damaged, settings, end = COPIES[name]
    run_dir = shutil.copytree(alone.run_dir, tmp_path / "run")
    shutil.rmtree(run_dir / "final")
    (run_dir / "summary.json").unlink()  # Only finished runs have a summary.
    for pattern in missing:
        for folder in run_dir.glob(f"checkpoints/step-{pattern}"):
            shutil.rmtree(folder)
    for file in run_dir.glob(f"checkpoints/step-{damaged}/*.safetensors"):
        flip(file)
    if isinstance(end, str):
        before = contents(run_dir)
        refusal = run(*settings).refusal
        assert str(run_dir) in refusal and end in refusal
        assert contents(run_dir) == before
        return
    if end:
        # A resumed run keeps its dtype of weights, whatever the default is now.
        monkeypatch.setattr(config, "usual_weights", lambda recipe, *, on_gpu: "bf16_exact")
    finished = run(*settings)
    assert (f"at step {end}" in finished.output) == (end is not None)
    assert ("damaged" in finished.output) == (damaged != "none"), finished.output
    assert same_end(finished, alone)
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["weights"] == "fp32"


def test_a_recomputed_layer_draws_the_same_dropout(alone: Finished, run: Trainer) -> None:
    recomputed = run("model.gradient_checkpointing=full")
    assert recomputed.losses() == alone.losses(), recomputed.output


def test_a_longer_horizon_goes_on_where_the_rate_has_not_fallen(
    alone: Finished, run: Trainer, tmp_path: Path
) -> None:
    constant = ("schedule.kind=constant", "evaluate.every=null")
    assert run(*constant, "train.steps=4").status == 0
    longer = run(*constant, "train.steps=8").done()
    uninterrupted = run(*constant, "train.steps=8", f"run_dir={tmp_path / 'uninterrupted'}")
    assert outcome(longer.run_dir, 8)[1:] == outcome(uninterrupted.run_dir, 8)[1:]


def test_a_longer_horizon_needs_a_checkpoint_before_the_decay(run: Trainer) -> None:
    shorter = run("schedule.kind=wsd", "train.steps=8").done()
    checkpoint = shorter.run_dir / "checkpoints/step-00000004"
    refusal = run("schedule.kind=wsd", "train.steps=10").refusal
    assert f"To continue with this schedule, pass --resume {checkpoint}." in refusal
    run("schedule.kind=wsd", "train.steps=10", "--resume", str(checkpoint)).done()


def test_a_finished_run_started_again_changes_nothing(
    alone: Finished, start_here: Callable, recipe: dict[str, Any]
) -> None:
    before = outcome(alone.run_dir, STEPS)
    folder = alone.run_dir.parent
    for horizon in ((), (f"train.tokens={STEPS * recipe['batch']['tokens']}",)):
        repeated = start_here(recipe, folder, *horizon)
        assert "already finished" in repeated.output, repeated.output
        assert outcome(repeated.run_dir, STEPS) == before
    files = contents(alone.run_dir)
    for options in ((), ("--accept-changes",), ("--plan",)):
        refusal = start_here(recipe, folder, "train.steps=8", *options).refusal
        assert "is from step 12, but `train` ends the run at step 8; raise" in refusal
        assert contents(alone.run_dir) == files


# ── Precisions, experts and ranks ──

PHASES = "precision=[{until: 3, use: delayed}, "
MUON = ("precision=bf16", "optimizer.name=muon", "optimizer.moments=bf16")

# The step after which a run of five steps resumes, the topology of two ranks, and settings.
RESUMES: dict[str, tuple[int, str | None, tuple[str, ...]]] = {
    "at a switch of precision": (3, None, (PHASES + "{use: bf16}]",)),
    "before a switch of precision": (2, None, (PHASES + "{use: current}]",)),
    "experts": (2, None, (EXPERTS, "precision=delayed", "model.gradient_checkpointing=full")),
    "after a skipped step": (2, None, ("precision=bf16", "health.on_nan=skip")),
    "Muon": (2, None, MUON),
    "Muon in shards": (2, "fsdp2", MUON),
    "histories of two ranks": (2, "fsdp2", ("precision=delayed",)),
}


@pytest.mark.multi
@pytest.mark.parametrize("name", RESUMES)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    name: str, started: Callable[..., Finished], tmp_path: Path
) -> None:
    """The folder of a run stands for its newest checkpoint."""
    step, topology, settings = RESUMES[name]
    if name == "after a skipped step":
        with poisoned_once(tmp_path / "run", steps_before=1):
            run = started("run", *settings)
        assert [record["skipped"] for record in run.steps()] == [False, True, False, False, False]
    else:
        run = started("run", *settings, topology=topology)
    folders = ("checkpoints/step-00000005", "final")
    expected = [tensor_files(run.run_dir / folder) for folder in folders]
    for newer in range(step + 1, 6):
        shutil.rmtree(run.run_dir / f"checkpoints/step-{newer:08}")
    resumed = started("resumed", *settings, "--resume", str(run.run_dir), topology=topology)
    assert f"{run.run_dir}/checkpoints/step-{step:08} at step {step}" in resumed.output
    assert "changed settings" not in resumed.output
    assert resumed.losses() == run.losses()[step:]
    assert [tensor_files(resumed.run_dir / folder) for folder in folders] == expected


# ── Restored state ──


def forget(key: str) -> Callable[[Assembly], None]:
    """Return a fault that replaces the optimizer's `key` state by new zeros."""

    def change(assembly: Assembly) -> None:
        for state in assembly.optimizer.state.values():
            state[key] = torch.zeros_like(state[key])

    return change


def flip_a_bit(assembly: Assembly) -> None:
    assembly.tensors["transformer.ln_f.bias"].data.view(torch.int16)[0] ^= 1


# What changes after a checkpoint was loaded, and words of the message.
FAULTS: dict[str, tuple[Callable[[Assembly], object], str]] = {
    "second moments are forgotten": (forget("exp_avg_sq"), "exp_avg_sq/"),
    "remainders are forgotten": (forget("remainder"), "remainder/"),
    "a weight has another bit": (flip_a_bit, "1 tensors .*transformer.ln_f.bias"),
    "histories are forgotten": (lambda assembly: assembly.context.reset_engines(), "amax_history"),
    "a pack is repeated": (lambda assembly: None, "packs begin at position 15 .*, not at 16"),
}


@pytest.fixture(scope="module")
def low(recipe: dict[str, Any], start_here: Callable, tmp_path_factory: Any) -> Path:
    """Folder of a run in low precision that was saved after steps 2 and 4."""
    folder = tmp_path_factory.mktemp("low")
    settings = (*LOW, "train.steps=4", "checkpoint.every=2", f"run_dir={folder / 'run'}")
    return start_here(recipe, folder, *settings).done().run_dir


@pytest.mark.parametrize("fault", FAULTS)
def test_a_resume_from_anything_but_what_was_saved_stops(
    fault: str, low: Path, run: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, line = FAULTS[fault]
    load = checkpointing.load_weights
    steps = BatchStream.steps

    def loaded(source: Any, checkpoints: Any, mode: Any, assembly: Assembly) -> list[str]:
        notes = load(source, checkpoints, mode, assembly)
        change(assembly)
        return notes

    def one_before(batches: BatchStream, place: int, count: int) -> Any:
        return steps(batches, place - 1, count)

    monkeypatch.setattr(checkpointing, "load_weights", loaded)
    if fault == "a pack is repeated":
        monkeypatch.setattr(BatchStream, "steps", one_before)
    checkpoint = str(low / "checkpoints/step-00000002")
    resumed = run(*LOW, "train.steps=4", "--resume", checkpoint)
    assert resumed.status == 3, resumed.output
    assert re.search(line, resumed.err), resumed.output
