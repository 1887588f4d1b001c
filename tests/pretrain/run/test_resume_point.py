"""The comparison of a checkpoint with the run that resumes from it (tests/launcher: finding it)."""

from __future__ import annotations

import json
from collections.abc import Callable
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
from pretrain.checkpoint.state import NO_PAST
from pretrain.optimizer.schedule import learning_rate
from pretrain.run.checkpointing import RollbackPoint
from pretrain.run.data import Data
from pretrain.run.job import Job, prepare_job
from pretrain.run.resume_point import (
    ResumePoint,
    changes_since,
    require_no_other_training,
    where_to_resume,
)
from pretrain.settings.config import load_recipe, resolved
from pretrain.settings.recipe import ScheduleSettings
from tests.conftest import write_recipe, yaml_of
from tests.lab.made_runs import make_run
from tests.pretrain.conftest import on_a

Jobs = Callable[..., Job]


@pytest.fixture(scope="module")
def jobs(recipe_for: Callable, block_packs: Path, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Return a function that makes the job of a recipe of 12 steps of 1,024 tokens."""
    folder = tmp_path_factory.mktemp("jobs")
    recipe = recipe_for(folder / "run")
    recipe["model"]["config"] |= {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    recipe["model"]["config"] |= {"max_position_embeddings": 128, "vocab_size": 128}
    recipe |= {"data": {"packs": str(block_packs), "length": 128}, "batch": {"tokens": 1024}}
    recipe |= {"precision": "bf16", "weights": "fp32", "schedule": {"kind": "constant"}}
    path = write_recipe(recipe | {"fp8_config": {"on_unsupported": "emulate"}}, folder)

    def job_of(overrides: str = "", run_dir: Path | None = None) -> Job:
        words = [word for word in overrides.split(" ; ") if word]
        with on_a("cpu") as accelerator:
            job = prepare_job(load_recipe(path, words), accelerator, ())
        return replace(job, run_dir=run_dir or job.run_dir)

    return job_of


def record_of(job: Job, step: int, **progress: int) -> dict[str, Any]:
    """Return the content of state.json after `step` steps of a job."""
    counters = {"step": step, "steps": job.plan.steps, "left_out": 0}
    counters |= {"tokens": step * job.plan.tokens_per_step, "place": step * job.plan.packs_per_step}
    record = {
        "progress": counters | progress,
        "health": {"losses": [2.0], "rollbacks": 1},
        "identity": job.identity,
        "past": {"changed": [], "left_out": 2},
        "loss_chunk": 64,
    }
    return json.loads(json.dumps(record))


def save(folder: Path, step: int, record: dict[str, Any]) -> Path:
    """Save a tiny checkpoint with this record into a run folder's `checkpoints`."""
    checkpoints = Checkpoints(folder / "checkpoints", keep=10)
    return checkpoints.save(step, {"weight": torch.ones(3)}, {}, record, announce=str)


WSD = "schedule.kind=wsd ; schedule.decay=0.2"
FOR_24 = "train.steps=24"
SHARE = "precision=[{until: 0.5, use: current}, {use: bf16}]"
STEP = "precision=[{until: 6, use: current}, {use: bf16}]"
LATER = "precision=[{until: 18, use: current}, {use: bf16}]"
OTHER = "made by another recipe: .*"
ACCEPT = r"pass --accept-changes\.$"
# Accepting changes is not advised if no step could follow.
NEW_RUN = r"set another `name` or `run_dir`\.$"

# Settings of the saved run, its step, settings of the present run, and words of the refusal. None
# if the run resumes.
RESUMES: list[tuple[str, int, str, str | None]] = [
    ("", 4, "", None),
    ("", 12, "", None),  # The run is complete.
    ("", 4, "batch.microbatch=2 ; deterministic=true ; parity=on ; log.every=3", None),
    ("", 4, "train.steps=null ; train.tokens=12288", None),
    ("", 4, "seed=1", rf"{OTHER}seed \(was 42, now 1\)\. .*{NEW_RUN[:-1]} .*{ACCEPT}"),
    ("", 4, "loss.penalty=neg_entropy ; loss.penalty_weight=0.1", r"penalty \(was not set, now"),
    ("", 4, "optimizer.betas=[0.9,0.9]", r"betas \(was \[0.9, 0.95\], now \[0.9, 0.9\]"),
    ("", 4, "precision=delayed", rf"{OTHER[:-2]}precision \(was bf16, now delayed\)\. "),
    ("", 12, "seed=1", NEW_RUN),
    ("", 12, f"{FOR_24} ; optimizer.name=muon", rf"optimizer.name \(was adamw.*{NEW_RUN}"),
    # The first step of a decay is at the peak in both shapes.
    (WSD, 10, f"{WSD} ; schedule.decay_shape=1-sqrt", None),
    (WSD, 12, f"{WSD} ; schedule.decay_shape=1-sqrt", "schedule.decay_shape "),
    (WSD, 9, f"{WSD} ; {FOR_24}", None),
    (WSD, 12, f"{WSD} ; {FOR_24}", rf"now 24.*{ACCEPT}"),
    # A short trial of the recipe is there.
    (
        f"{WSD} ; schedule.warmup=2 ; train.steps=3",
        3,
        f"{WSD} ; schedule.warmup=20 ; train.steps=60",
        r"schedule.warmup \(was 2, now 20\).*--accept-changes",
    ),
    # Past steps keep their precision.
    (SHARE, 6, f"{SHARE} ; {FOR_24}", None),
    (SHARE, 7, f"{SHARE} ; {FOR_24}", r"train.steps \(was 12, now 24\)"),
    (STEP, 12, f"{STEP} ; {FOR_24}", None),
    ("precision=current", 6, f"{LATER} ; {FOR_24}", r"precision .*, train.steps \(was 12"),
    ("train.steps=30", 30, FOR_24, "ends the run at step 24; raise .* or `run_dir`$"),
    ("train.steps=30", 24, FOR_24, None),
]


@pytest.mark.parametrize(("saved", "step", "present", "refusal"), RESUMES)
def test_a_run_resumes_unless_it_is_another_training(
    saved: str, step: int, present: str, refusal: str | None, jobs: Jobs, tmp_path: Path
) -> None:
    save(tmp_path, step, record_of(jobs(saved), step))
    job = jobs(present, tmp_path)
    if refusal:
        with pytest.raises(InputError, match=refusal):
            where_to_resume(job, "auto", accept_changes=False)
        return
    resumed, _, point = where_to_resume(job, "auto", accept_changes=False)
    assert point.step == step and not point.notes and point.past["changed"] == []
    assert resumed.recipe.loss.chunk == 64, "sums are in the order of the checkpoint"


@pytest.mark.parametrize("had_f32_scales", [False, True])
def test_a_run_with_former_keys_resumes_unless_they_changed_results(
    had_f32_scales: bool, jobs: Jobs, tmp_path: Path
) -> None:
    record = record_of(jobs("precision=block"), 4)
    record["identity"]["fp8_config.use_f32_scales"] = had_f32_scales
    record["health"]["usual_gap"] = None
    save(tmp_path, 4, record)
    job = jobs("precision=block", tmp_path)
    if had_f32_scales:
        with pytest.raises(InputError, match=r"use_f32_scales \(was true"):
            where_to_resume(job, "auto", accept_changes=False)
    else:
        point = where_to_resume(job, "auto", accept_changes=False)[2]
        assert point.health.losses == [2.0]


@pytest.mark.parametrize(
    ("saved", "step", "present", "refusal"),
    [
        ("seed=1", 4, "", None),
        ("seed=1", 12, "", "is from step 12, but `train` ends the run at step 12; raise .*, or"),
        ("batch.tokens=2048", 4, "train.steps=null ; train.tokens=12288", "set `train.steps: 8`"),
    ],
)
def test_accepted_changes_still_need_steps_to_train(
    saved: str, step: int, present: str, refusal: str | None, jobs: Jobs, tmp_path: Path
) -> None:
    """The checkpoint is in another folder, whose metrics.jsonl has its rollbacks."""
    other = save(tmp_path / "other", step, record_of(jobs(saved), step, left_out=3))
    job = jobs(present, tmp_path / "run")
    if refusal:
        with pytest.raises(InputError, match=refusal):
            where_to_resume(job, str(other), accept_changes=True)
        return
    _, _, point = where_to_resume(job, str(other), accept_changes=True)
    assert point.notes == ["changed settings: seed (was 1, now 42)"]
    assert point.past == {"changed": [{"step": 4, "was": {"seed": 1}}], "left_out": 3}


def test_a_branch_may_change_and_starts_with_an_empty_past(jobs: Jobs, tmp_path: Path) -> None:
    trunk = save(tmp_path / "trunk", 4, record_of(jobs("seed=1"), 4))
    job = jobs(f"train.begin_with={trunk}", tmp_path / "run")
    _, _, branch = where_to_resume(job, "auto", accept_changes=False)
    assert branch.is_branch and branch.past == NO_PAST
    assert branch.notes == ["changed settings: seed (was 1, now 42)"]
    assert branch.health.losses == [2.0] and branch.health.rollbacks == 0
    save(tmp_path / "run", 6, record_of(job, 6))
    _, _, resumed = where_to_resume(job, "auto", accept_changes=False)
    assert resumed.health.rollbacks == 1 and resumed.past["left_out"] == 2
    end = save(tmp_path / "trunk", 12, record_of(job, 12))
    job = jobs(f"train.begin_with={end}", tmp_path / "late")
    with pytest.raises(InputError, match=r"at step 12; raise .*without `train.begin_with`$"):
        where_to_resume(job, "auto", accept_changes=False)


SCHEDULES = st.builds(
    ScheduleSettings,
    kind=st.sampled_from(["wsd", "cosine", "linear", "constant"]),
    warmup=st.integers(0, 5),
    decay=st.sampled_from([0.0, 0.2, 0.4]),
    min_lr_ratio=st.sampled_from([0.0, 1.0]),
)


def with_schedule(job: Job, schedule: ScheduleSettings, steps: int) -> Job:
    job = job.with_settings("schedule", **dict(schedule)).with_settings("train", steps=steps)
    precisions = replace(job.plan.schedule, steps=steps)
    return replace(job, plan=replace(job.plan, schedule=precisions))


def test_a_resumed_run_has_the_rates_of_an_uninterrupted_run(jobs: Jobs) -> None:
    """The reference is the table of the rates of both runs, from the first step on."""
    job = jobs()

    @settings(max_examples=200, deadline=None)
    @given(
        step=st.integers(0, 12),
        steps=st.sampled_from([12, 13, 24, 60]),
        saved=SCHEDULES,
        present=SCHEDULES,
        keeps=st.booleans(),
    )
    def check(
        step: int, steps: int, saved: ScheduleSettings, present: ScheduleSettings, keeps: bool
    ) -> None:
        present = saved if keeps else present
        record = record_of(with_schedule(job, saved, 12), step)
        changes = changes_since(record, with_schedule(job, present, steps))
        rates = [
            [learning_rate(past, schedule, 1.0, length) for past in range(step)]
            for schedule, length in ((saved, 12), (present, steps))
        ]
        assert bool(changes) is (rates[0] != rates[1])
        assert all(key.startswith(("schedule.", "train.")) for key in changes)

    check()


@pytest.mark.parametrize("file", ["summary.json", "final"])
def test_a_start_never_overwrites_a_finished_run(file: str, jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / file).mkdir()
    with pytest.raises(InputError, match="finished run, whose files this training would overwrite"):
        where_to_resume(jobs("", tmp_path), "auto", accept_changes=False)


def test_a_start_never_overwrites_steps_on_other_packs(jobs: Jobs, tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "summary.json").unlink(missing_ok=True)
    job = jobs("", run_dir)
    (run_dir / "config.yaml").write_text(yaml_of(resolved(job.recipe)))
    for fingerprint in (job.data.train.fingerprint, "another"):
        environment = {"horizon": 12, "data_fingerprint": fingerprint}
        (run_dir / "environment.json").write_text(json.dumps(environment))
        if fingerprint != "another":
            require_no_other_training(job)
    with pytest.raises(InputError, match=r"contains another training, .* data.fingerprint;"):
        require_no_other_training(job)


def point_of(job: Job, step: int, place: int = 40, **identity: Any) -> ResumePoint:
    record = record_of(job, step, left_out=1, place=place)
    record["identity"] |= identity
    return ResumePoint(Path("step"), record, past=NO_PAST)


@pytest.mark.parametrize("tokens", [1024, 2048])
def test_a_resumed_run_continues_at_the_place_of_the_checkpoint(tokens: int, jobs: Jobs) -> None:
    state = point_of(jobs(), 5, 44, **{"batch.tokens": tokens}).state(jobs("train.steps=16"))
    assert (state.steps, state.step, state.tokens) == (16, 5, 5 * 1024)
    assert (state.left_out, state.place) == (1, 44)


class Stream(Data):
    """Data that are packed while the run trains."""

    @property
    def stream(self) -> Any:
        return SimpleNamespace(first_parts=self.train)


def test_another_stream_is_read_from_its_first_pack(jobs: Jobs) -> None:
    job = jobs()
    job = replace(job, data=Stream(job.data.train, job.data.held_out))
    assert point_of(job, 5).place(job) == 40
    assert point_of(job, 5, **{"data.fingerprint": "another"}).state(job).place == 0


def test_another_pack_length_repeats_no_token_and_skips_less_than_a_pack(jobs: Jobs) -> None:
    job = jobs()

    @given(place=st.integers(0, 10**6), before=st.integers(1, 9000), after=st.integers(1, 9000))
    def check(place: int, before: int, after: int) -> None:
        resumed = job.with_settings("data", length=after)
        record = {"progress": {"place": place}, "identity": {"data.length": before}}
        point = ResumePoint(Path("step"), record)
        tokens_read = place * before
        assert tokens_read <= point.place(resumed) * after < tokens_read + after

    check()


def test_the_place_after_rollbacks_skips_the_discarded_packs(jobs: Jobs) -> None:
    """The run is rolled back to step 5, three steps later, and then to step 4, two steps later."""
    job = jobs()
    source = point_of(job, 5, 48)
    places = []
    for point, steps in ((source, 3), (point_of(job, 4), 2)):
        state = source.state(job)
        places.append(state.place)
        event = {"left_out": state.left_out + state.step + steps - point.step, "rollbacks": 1}
        source = RollbackPoint(
            point.path,
            point.state_json,
            next_place=state.place + steps * job.plan.packs_per_step,
            event=event,
        )
        assert source.health.rollbacks == 1 and source.state(job).left_out == event["left_out"]
    assert [*places, source.state(job).place] == [48, 72, 88]
