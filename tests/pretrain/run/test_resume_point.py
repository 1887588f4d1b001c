"""Finding, comparing and validating the checkpoint that a run resumes from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foundation.errors import InputError
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.state import TrainState
from pretrain.optimizer.schedule import learning_rate
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.run.checkpointing import RollbackPoint
from pretrain.run.resume_point import (
    Changes,
    ResumePoint,
    changes_since,
    find_checkpoint,
    repeats_past,
    require_no_other_training,
    require_same_training,
    require_steps_to_train,
    where_to_resume,
    with_changes,
)
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import OptimizerSettings, ScheduleSettings
from tests.conftest import flip
from tests.lab.made_runs import make_run

CONSTANT = ScheduleSettings(kind="constant")
WSD = ScheduleSettings(kind="wsd")
SCHEDULES = st.builds(
    ScheduleSettings,
    kind=st.sampled_from(["wsd", "cosine", "linear", "constant"]),
    warmup=st.integers(0, 5),
    decay=st.sampled_from([0.0, 0.2, 0.4]),
    min_lr_ratio=st.sampled_from([0.0, 1.0]),
)


def record_of(
    step: int, steps: int = 12, schedule: ScheduleSettings = CONSTANT, **identity: Any
) -> dict[str, Any]:
    """Return the content of state.json after `step` of `steps` steps of 1,024 tokens."""
    progress = {"step": step, "steps": steps, "tokens": 1024 * step, "left_out": 0}
    return {
        "progress": progress | {"place": 4 * step},
        "health": {"losses": [2.0], "rollbacks": 1},
        "identity": {
            "batch.tokens": 1024,
            "data.length": 256,
            "seed": 0,
            "optimizer.learning_rate": 3e-4,
            "train.steps": steps,
            **{f"schedule.{key}": value for key, value in schedule},
        }
        | identity,
        "past": {"changed": [], "left_out": 2},
    }


def job_of(
    steps: int = 12,
    *,
    schedule: ScheduleSettings = CONSTANT,
    phases: tuple[float | int | None, ...] = (None,),
    stream: object = None,
    begin_with: str | None = None,
    run_dir: Path = Path("run"),
    **identity: Any,
) -> Any:
    """Return a stand-in for a job with the attributes that decide where it resumes."""
    recipe = SimpleNamespace(
        name="my",
        run_dir="runs/{name}",
        schedule=schedule,
        optimizer=OptimizerSettings(),
        train=SimpleNamespace(steps=None, begin_with=begin_with),
        data=SimpleNamespace(length=256),
    )
    plan = SimpleNamespace(
        steps=steps,
        schedule=PrecisionSchedule([(until, str(until)) for until in phases], steps),
        tokens_per_step=1024,
        packs_per_step=4,
        total_tokens=1024 * steps,
    )
    return SimpleNamespace(
        recipe=recipe,
        plan=plan,
        data=SimpleNamespace(stream=stream),
        identity=record_of(0, steps, schedule, **identity)["identity"],
        run_dir=run_dir,
    )


def checkpoint_at(
    step: int, steps: int = 12, *, is_branch: bool = False, in_run_folder: bool = True
) -> ResumePoint:
    """Return a found checkpoint of `step`."""
    path = Path(f"run/checkpoints/step-{step:08d}")
    return ResumePoint(path, record_of(step, steps), is_branch, in_run_folder)


def save(folder: Path, *steps: int) -> list[Path]:
    """Save tiny checkpoints of these steps into a run folder's `checkpoints`."""
    checkpoints = Checkpoints(folder / "checkpoints", keep=10)
    tensors = {"weight": torch.ones(3)}
    return [checkpoints.save(step, tensors, {}, record_of(step), announce=str) for step in steps]


# ── Find ──────────────────────────────────────────────────────────────────────────────────────────


def find(
    run_dir: Path, requested: str = "auto", branch_from: Path | None = None
) -> ResumePoint | None:
    """Find the checkpoint of a run folder."""
    return find_checkpoint(Checkpoints(run_dir / "checkpoints", keep=10), requested, branch_from)


def test_auto_finds_the_newest_intact_checkpoint(tmp_path: Path) -> None:
    assert find(tmp_path) is None
    _, middle, newest = save(tmp_path, 4, 8, 12)
    checkpoint = find(tmp_path)
    assert checkpoint.path == newest and checkpoint.step == 12
    assert checkpoint.in_run_folder and not checkpoint.is_branch
    flip(max(newest.glob("*.safetensors")))
    assert find(tmp_path).path == middle


def test_a_run_folder_to_resume_means_its_newest_checkpoint(tmp_path: Path) -> None:
    first, last = save(tmp_path / "other", 4, 8)
    run_dir = tmp_path / "run"
    for requested, path in ((tmp_path / "other", last), (first, first)):
        checkpoint = find(run_dir, str(requested))
        assert checkpoint.path == path and not checkpoint.in_run_folder and not checkpoint.is_branch
    with pytest.raises(InputError, match="this is no complete checkpoint"):
        find(run_dir, str(tmp_path / "nowhere"))


def test_a_run_branches_only_without_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    (trunk,) = save(tmp_path / "trunk", 4)
    run_dir = tmp_path / "run"
    branch = find(run_dir, branch_from=trunk)
    assert branch.path == trunk and branch.is_branch and not branch.in_run_folder
    (newest,) = save(run_dir, 6)
    resumed = find(run_dir, branch_from=trunk)
    assert resumed.path == newest and not resumed.is_branch


def test_damaged_checkpoints_alone_are_refused(tmp_path: Path) -> None:
    (trunk,) = save(tmp_path / "trunk", 4)
    for path in save(tmp_path / "run", 4, 8):
        flip(max(path.glob("*.safetensors")))
    with pytest.raises(InputError, match="checkpoints: every checkpoint is damaged"):
        find(tmp_path / "run", branch_from=trunk)


@pytest.mark.parametrize("folder", ["trunk", "nowhere"])
def test_a_branch_needs_the_folder_of_a_checkpoint(folder: str, tmp_path: Path) -> None:
    save(tmp_path / "trunk", 4, 8)
    with pytest.raises(InputError, match=r"manifest\.json.*no complete checkpoint; choose"):
        find(tmp_path / "run", branch_from=tmp_path / folder)


# ── Compare ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("present", "changed"),
    [
        ({}, set()),
        ({"seed": 1}, {"seed"}),
        ({"loss.penalty": None}, set()),
        ({"loss.penalty": "neg_entropy"}, {"loss.penalty"}),
        ({"train.steps": None, "train.tokens": 12 * 1024}, set()),
        ({"train.begin_with": "step-00000004"}, {"train.begin_with"}),
        ({"precision": "delayed", "fp8_config.margin": 0}, {"precision", "fp8_config.margin"}),
        # Tuples equal the lists that JSON makes of them.
        ({"betas": (0.9, 0.95)}, set()),
    ],
)
def test_identities_differ_by_these_keys(present: dict[str, Any], changed: set[str]) -> None:
    record = record_of(4, betas=[0.9, 0.95])
    changes = changes_since(record, job_of(**{"betas": [0.9, 0.95]} | present))
    assert changes.keys() == changed
    for key, (saved, now) in changes.items():
        assert saved == record["identity"].get(key) and now == present[key]


def test_another_decay_shape_changes_only_steps_of_the_decay() -> None:
    record = record_of(11, schedule=WSD)
    other = WSD.model_copy(update={"decay_shape": "1-sqrt"})
    # The first step of the decay is at the peak in both shapes.
    assert not changes_since(record, job_of(schedule=other))
    record["progress"]["step"] = 12
    assert "schedule.decay_shape" in changes_since(record, job_of(schedule=other))


@settings(max_examples=200, deadline=None)
@given(
    step=st.integers(0, 12),
    steps=st.sampled_from([12, 13, 24, 60]),
    saved=SCHEDULES,
    present=SCHEDULES,
    keeps=st.booleans(),
)
def test_a_resumed_run_has_the_rates_of_an_uninterrupted_run(
    step: int, steps: int, saved: ScheduleSettings, present: ScheduleSettings, keeps: bool
) -> None:
    """The reference is the table of the rates of both runs, from the first step on."""
    present = saved if keeps else present
    record = record_of(step, 12, saved)
    changes = changes_since(record, job_of(steps, schedule=present))
    rates = [
        [learning_rate(past, schedule, 1.0, length) for past in range(step)]
        for schedule, length in ((saved, 12), (present, steps))
    ]
    assert bool(changes) is (rates[0] != rates[1])
    assert all(key.startswith(("schedule.", "train.")) for key in changes)


@pytest.mark.parametrize(
    ("step", "phases", "is_repeated"),
    [
        (5, (0.5, None), True),
        (6, (0.5, None), True),
        (7, (0.5, None), False),  # Step 7 was in the second phase, and would be in the first.
        (12, (6, None), True),  # The phase ends at a step, not at a share of all steps.
    ],
)
def test_longer_runs_repeat_the_precisions_of_past_steps(
    step: int, phases: tuple[float | int | None, ...], is_repeated: bool
) -> None:
    assert repeats_past(record_of(step), job_of(24, phases=phases)) is is_repeated


def test_phases_may_end_after_the_last_step_of_the_saved_run() -> None:
    job = job_of(24, phases=(18, None), precision=[{"until": 18, "use": "bf16"}, {"use": "nvfp4"}])
    changes = changes_since(record_of(6, 12, precision="bf16"), job)
    assert changes.keys() == {"precision", "train.steps"}


# ── Refuse ────────────────────────────────────────────────────────────────────────────────────────

SEED_CHANGED = {"seed": (0, 1)}


@pytest.mark.parametrize("in_run_folder", [True, False])
def test_another_recipe_is_refused_with_its_changes(in_run_folder: bool) -> None:
    checkpoint = checkpoint_at(6, in_run_folder=in_run_folder)
    with pytest.raises(InputError) as error:
        require_same_training(checkpoint, SEED_CHANGED, job_of())
    message = str(error.value)
    assert "made by another recipe:\n  seed: saved 0, now 1\n" in message
    assert "set another `name` or `run_dir`, without --resume" in message
    assert "--accept-changes" in message


@pytest.mark.parametrize(
    ("steps", "identity"), [(12, {"seed": 1}), (24, {"optimizer.name": "muon"})]
)
def test_accepting_changes_is_not_advised_if_no_step_could_follow(
    steps: int, identity: dict[str, Any]
) -> None:
    checkpoint = checkpoint_at(12)
    job = job_of(steps, **identity)
    with pytest.raises(InputError, match=r"without --resume\.$"):
        require_same_training(checkpoint, changes_since(checkpoint.record, job), job)


def test_a_decayed_rate_is_refused_with_a_hint_at_earlier_checkpoints() -> None:
    checkpoint = ResumePoint(Path("step"), record_of(12, schedule=WSD), in_run_folder=True)
    job = job_of(24, schedule=WSD)
    with pytest.raises(InputError, match=r"pass an earlier checkpoint to --resume\.$"):
        require_same_training(checkpoint, changes_since(checkpoint.record, job), job)


def test_a_shortened_trial_is_refused_with_both_schedules() -> None:
    """A run of three steps is there, whose warmup the launcher has shortened."""
    trial = ScheduleSettings(warmup=2, decay=1 / 3)
    whole = ScheduleSettings(warmup=20, decay=0.4)
    checkpoint = ResumePoint(Path("step"), record_of(3, 3, trial), in_run_folder=True)
    job = job_of(60, schedule=whole)
    with pytest.raises(InputError) as error:
        require_same_training(checkpoint, changes_since(checkpoint.record, job), job)
    message = str(error.value)
    assert "schedule.warmup: saved 2, now 20" in message
    assert "--accept-changes" in message


@pytest.mark.parametrize(
    ("checkpoint", "changes"),
    [
        (checkpoint_at(12), {}),
        (checkpoint_at(12, is_branch=True), SEED_CHANGED),
        (checkpoint_at(30, 30), {"train.steps": (30, 24)}),  # past the horizon
    ],
)
def test_these_checkpoints_are_not_refused_for_their_changes(
    checkpoint: ResumePoint, changes: Changes
) -> None:
    require_same_training(checkpoint, changes, job_of(24))


@pytest.mark.parametrize(
    ("step", "in_run_folder", "message"),
    [
        (11, True, None),
        (12, True, None),  # the run is complete
        (12, False, "is from step 12, but `train` ends the run at step 12; raise .* `train`, or"),
        (13, True, "ends the run at step 12; raise .* set another `run_dir`"),
    ],
)
def test_a_checkpoint_must_leave_steps_to_train(
    step: int, in_run_folder: bool, message: str | None
) -> None:
    source = ResumePoint(Path("step"), record_of(step), in_run_folder=in_run_folder)
    if message is None:
        require_steps_to_train(source, job_of())
        return
    with pytest.raises(InputError, match=message):
        require_steps_to_train(source, job_of())


def test_a_horizon_in_tokens_needs_steps_of_equal_size() -> None:
    record = record_of(4)
    record["progress"]["tokens"] = 4 * 2048
    source = ResumePoint(Path("step"), record)
    with pytest.raises(InputError, match=r"in steps; set `train.steps: 8`"):
        require_steps_to_train(source, job_of())


def test_another_stream_is_read_from_its_first_pack() -> None:
    job = job_of(stream=object(), **{"data.fingerprint": "b"})
    record = record_of(4, **{"data.fingerprint": "a"})
    assert ResumePoint(Path("step"), record).state(job).place == 0


@pytest.mark.parametrize("file", ["summary.json", "final"])
def test_a_start_never_overwrites_a_finished_run(file: str, tmp_path: Path) -> None:
    (tmp_path / file).mkdir()
    with pytest.raises(InputError, match="finished run, whose files this training would overwrite"):
        require_no_other_training(job_of(run_dir=tmp_path))


def test_a_start_never_overwrites_the_steps_of_another_training(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "summary.json").unlink(missing_ok=True)
    job = job_of(run_dir=run_dir)
    job.recipe = load_recipe(run_dir / "config.yaml")
    job.data.train = SimpleNamespace(fingerprint="ab12")
    require_no_other_training(job)
    job.data.train.fingerprint = "cd34"
    with pytest.raises(InputError, match=r"contains another training, .* data.fingerprint;"):
        require_no_other_training(job)
    job.run_dir = tmp_path / "nothing yet"
    require_no_other_training(job)


# ── Build ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_resumed_run_remembers_what_has_changed() -> None:
    own = with_changes(checkpoint_at(4), SEED_CHANGED)
    assert own.notes == ["the recipe has changed: seed: saved 0, now 1"]
    assert own.past == {"changed": [{"step": 4, "was": {"seed": 0}}], "left_out": 2}
    unchanged = with_changes(checkpoint_at(4), {})
    assert unchanged.notes == [] and unchanged.past["changed"] == []


def test_a_branch_starts_with_an_empty_past() -> None:
    found = checkpoint_at(4, steps=8, is_branch=True, in_run_folder=False)
    changes = {"seed": (0, 1), "train.begin_with": (None, "x")}
    branch = with_changes(found, changes)
    assert branch.notes[0] == "the recipe has changed: seed: saved 0, now 1"
    assert branch.past == {"changed": [], "left_out": 0} and branch.is_branch
    assert branch.health.losses == [2.0]
    assert branch.health.rollbacks == 0


def test_accepted_changes_are_not_refused(tmp_path: Path) -> None:
    save(tmp_path, 4)
    job = job_of(seed=1, run_dir=tmp_path)
    job.recipe.checkpoint = SimpleNamespace(keep=10, every=4)
    job.recipe.evaluate = SimpleNamespace(merge=1)
    job.recipe.loss = SimpleNamespace(chunk=64)
    job.plan.loss = SimpleNamespace(tokens_at_once=64)
    job.plan.before_decay = 0
    job.with_settings = lambda *_, **values: job
    with pytest.raises(InputError, match="seed: saved 0, now 1"):
        where_to_resume(job, "auto", accept_changes=False)
    _, _, point = where_to_resume(job, "auto", accept_changes=True)
    assert point.step == 4 and "seed" in point.notes[0]


@pytest.mark.parametrize("tokens", [1024, 2048], ids=["the same steps", "larger steps"])
def test_a_resumed_run_continues_at_the_place_of_the_checkpoint(tokens: int) -> None:
    source = checkpoint_at(5)
    source.record["progress"] |= {"left_out": 1, "place": 24}
    source.record["identity"]["batch.tokens"] = tokens
    assert source.state(job_of(16)) == TrainState(
        steps=16, step=5, tokens=5 * 1024, left_out=1, place=24
    )


def rolled_back(run: Any, point: ResumePoint) -> RollbackPoint:
    """Return `point` as the target of a rollback after the run's present step."""
    left_out = run.state.left_out + run.state.step - point.step
    return RollbackPoint(
        point.path,
        point.record,
        past=run.past,
        next_place=run.state.place,
        event={"left_out": left_out, "rollbacks": 1},
    )


def run_from(source: ResumePoint, job: Any, steps: int = 0) -> Any:
    """Return a stand-in for a run that has trained some steps after `source`."""
    state = source.state(job)
    state.step += steps
    state.place += steps * job.plan.packs_per_step
    return SimpleNamespace(job=job, state=state, past=source.past)


def test_the_place_after_rollbacks_skips_the_discarded_packs() -> None:
    job = job_of()
    source = replace(checkpoint_at(5), past={"changed": [], "left_out": 0})
    source.record["progress"] |= {"left_out": 1, "place": 24}
    # A rollback to step 5, and a second one to step 4.
    once = rolled_back(run_from(source, job, steps=3), source)
    older = replace(checkpoint_at(4), past=source.past)
    older.record["progress"] |= {"left_out": 1, "place": 20}
    twice = rolled_back(run_from(once, job, steps=2), older)
    assert [point.state(job).place for point in (source, once, twice)] == [24, 36, 44]


def test_another_pack_length_or_stream_moves_the_place() -> None:
    other_length, stream = checkpoint_at(5), checkpoint_at(5)
    other_length.record["identity"]["data.length"] = 250
    stream.record["identity"]["data.fingerprint"] = "a"
    assert other_length.place(job_of()) == 20
    assert stream.place(job_of(stream=object(), **{"data.fingerprint": "b"})) == 0


@given(place=st.integers(0, 10**6), before=st.integers(1, 9000), after=st.integers(1, 9000))
def test_another_pack_length_repeats_no_token_and_skips_less_than_a_pack(
    place: int, before: int, after: int
) -> None:
    checkpoint = checkpoint_at(3)
    checkpoint.record["progress"]["place"] = place
    checkpoint.record["identity"]["data.length"] = before
    job = job_of()
    job.recipe.data.length = after
    tokens_read = place * before
    first_token = checkpoint.state(job).place * after
    assert tokens_read <= first_token < tokens_read + after
