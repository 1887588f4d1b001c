"""Find the checkpoint that a run continues from, and refuse one that does not fit its recipe.

There are two kinds. A resumed checkpoint belongs to the same training: the run folder's newest one,
or the one that --resume names. A branch starts a new training from another run's checkpoint, which
`train.begin_with` names. A run that has a checkpoint of its own never branches again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.reading import load_object
from foundation.settings import parse
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.format import MANIFEST, STATE, newest_in, step_folders
from pretrain.checkpoint.state import NO_PAST, changed_keys
from pretrain.metrics.health import HealthState
from pretrain.metrics.run_folder import SUMMARY_FILE
from pretrain.metrics.run_record import NoStepYet, read_run
from pretrain.optimizer.schedule import describe, learning_rate
from pretrain.run.job import Job
from pretrain.settings.config import HORIZON, branch_checkpoint, identity_of
from pretrain.settings.recipe import Recipe

# Changed settings between a checkpoint's training and the run's, in order of keys: the saved value
# and the present one.
Changes = dict[str, tuple[Any, Any]]


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues from, with notes and the run's past."""

    path: Path
    record: Mapping[str, Any]  # the content of its state.json
    is_branch: bool = False  # another run's checkpoint, named by `train.begin_with`
    in_run_folder: bool = False
    notes: Sequence[str] = ()  # changes of the recipe, as lines for the user
    past: Mapping[str, Any] = field(default_factory=lambda: NO_PAST)  # of the run that continues

    @property
    def step(self) -> int:
        """Return the number of steps that the checkpoint was trained for."""
        return self.record["progress"]["step"]

    @property
    def health(self) -> HealthState:
        """Return the state of health after the checkpoint's steps.

        A branch keeps the losses alone: they show which loss is usual for this model.
        """
        values = dict(self.record["health"])
        if self.is_branch:
            values |= {"skipped_steps": 0, "rollbacks": 0, "switched_after": None, "usual_gap": {}}
        return HealthState(**values)

    def is_of_another_stream(self, job: Job) -> bool:
        """Return whether the checkpoint has no place in the packs that the run streams.

        The run then starts with the first pack of its stream.
        """
        fingerprint = self.record["identity"].get("data.fingerprint")
        return job.data.stream is not None and fingerprint != job.identity["data.fingerprint"]

    def place(self, job: Job) -> int:
        """Return the place in the order of packs after the checkpoint's last pack.

        It counts packs of the job's length, which may differ from the checkpoint's.
        """
        if self.is_of_another_stream(job):
            return 0
        identity = self.record["identity"]
        progress = self.record["progress"]
        place = progress.get("place")
        if place is None:  # Checkpoints of earlier versions have counters alone.
            packs_per_step = identity["batch.tokens"] // identity["data.length"]
            place = self._data_steps * packs_per_step + progress["shift"]
        return -(-(place * identity["data.length"]) // job.recipe.data.length)  # rounded up

    def shift(self, job: Job) -> int:
        """Return the `TrainState.shift` that makes the first step read from `place` on."""
        return self.place(job) - self._data_steps * job.plan.packs_per_step

    @property
    def _data_steps(self) -> int:
        """The number of steps whose packs were used or passed over by rollbacks."""
        return self.record["progress"]["step"] + self.record["progress"]["left_out"]


def where_to_resume(
    job: Job, requested: str, accept_changes: bool
) -> tuple[Job, Checkpoints, ResumePoint | None]:
    """Return the job as it continues, the run folder's checkpoints, and the one to continue from.

    Changes nothing on the disk. Collective. Raises InputError as `find_resume_point` does, if the
    checkpoint leaves no step to train, and if the start would overwrite another training's files.
    """
    checkpoints = Checkpoints(
        job.run_dir / "checkpoints", job.recipe.checkpoint.keep, before=job.plan.before_decay
    )
    source = find_resume_point(checkpoints, requested, job, accept_changes)
    if source is None or not source.in_run_folder:
        require_own_records(job)
    chunk = job.plan.loss.tokens_at_once
    if source is not None:
        require_same_stream(source, job)
        require_steps_to_train(source, job)
        job = job.with_plan(
            schedule=job.plan.schedule.switched_to_bf16_after(source.health.switched_after)
        )
        if job.recipe.loss.chunk == "auto":
            # The chunk decides the order of a sum, so a resumed run keeps it.
            chunk = source.record["loss_chunk"]
    return job.with_settings("loss", chunk=chunk), checkpoints, source


def find_resume_point(
    checkpoints: Checkpoints, requested: str, job: Job, accept_changes: bool
) -> ResumePoint | None:
    """Return the checkpoint to continue from, or None if the run starts from the beginning.

    `requested` is the value of --resume. Collective. Raises InputError as `find_checkpoint` and
    `require_same_training` do; the latter applies unless `accept_changes` is set.
    """
    source = find_checkpoint(checkpoints, requested, branch_checkpoint(job.recipe))
    if source is None:
        return None
    changes = compare_identities(
        source.record["identity"],
        job.identity,
        horizon_may_move=horizon_may_move(source.record, job),
    )
    if not accept_changes:
        require_same_training(source, changes, job, step_folders(checkpoints.folder))
    return with_changes(source, changes, job)


# ── Find the checkpoint ───────────────────────────────────────────────────────────────────────────


def find_checkpoint(
    checkpoints: Checkpoints, requested: str, branch_from: Path | None
) -> ResumePoint | None:
    """Return the checkpoint to resume, else the one to branch from, else None.

    `requested` is "auto" for the newest intact checkpoint of the run folder, a checkpoint, or a run
    folder, whose newest one is taken. Collective.

    Raises InputError if a named checkpoint does not exist, and if every checkpoint of the run
    folder is damaged: a new run would overwrite files that may still be rescued.
    """
    path = checkpoints.newest() if requested == "auto" else newest_in(Path(requested))
    if path is not None:
        return ResumePoint(path, checkpoints.read_state(path), in_run_folder=checkpoints.owns(path))
    if checkpoints.damaged:
        raise InputError(
            f"{checkpoints.folder}: every checkpoint is damaged; "
            "name another `run_dir` to train from the beginning"
        )
    if branch_from is None:
        return None
    if not (branch_from / MANIFEST).is_file():
        newest = newest_in(branch_from)
        example = "RUN/checkpoints/step-00000100" if newest == branch_from else newest
        raise InputError(
            f"`train.begin_with`: {branch_from}: is not a checkpoint; name one, such as {example}"
        )
    return ResumePoint(branch_from, checkpoints.read_state(branch_from), is_branch=True)


# ── Compare its training with the run's ───────────────────────────────────────────────────────────


def compare_identities(
    saved: Mapping[str, Any], present: Mapping[str, Any], *, horizon_may_move: bool = False
) -> Changes:
    """Return the settings that differ between two identities (see `identity_of`).

    With `horizon_may_move`, the length of the training is not compared.
    """
    if horizon_may_move:
        present = {**present, **{key: saved.get(key) for key in HORIZON}}
    return {key: (saved.get(key), present.get(key)) for key in changed_keys(saved, present)}


def lines_of(changes: Changes) -> dict[str, str]:
    """Return a line for each changed key."""
    return {
        key: f"{key}: saved {json.dumps(saved)}, now {json.dumps(present)}"
        for key, (saved, present) in changes.items()
    }


def with_changes(source: ResumePoint, changes: Changes, job: Job) -> ResumePoint:
    """Return the resume point with notes for the user and the run's past.

    A branch starts with an empty past. A resumed run adds the changes of its recipe. The number of
    steps passed over before the folder's first step comes from the checkpoint only if another
    folder holds it: the folder's own metrics record its rollbacks.

    Changes that another change brings have no note: `train.begin_with` of a branch, and the options
    of another precision that the saved one does not have.
    """
    progress = source.record["progress"]
    past = source.record["past"]
    notes = []
    changed = []
    if not source.is_branch:
        changed = list(past["changed"])
        if changes:
            changed.append(
                {"step": source.step, "was": {key: saved for key, (saved, _) in changes.items()}}
            )
        if progress["steps"] != job.plan.steps and horizon_may_move(source.record, job):
            schedule = describe(job.recipe.schedule, job.recipe.optimizer, job.plan.steps)
            notes.append(
                f"the horizon moves from step {progress['steps']:,} to {job.plan.steps:,}; "
                f"{schedule}"
            )
    for key, line in lines_of(changes).items():
        is_new_option = key.startswith("fp8_config.") and changes[key][0] is None
        is_implied = is_new_option and "precision" in changes
        if not (is_implied or (key == "train.begin_with" and source.is_branch)):
            notes.append(f"the recipe has changed: {line}")
    left_out = past["left_out"] if source.in_run_folder else progress["left_out"]
    return replace(source, notes=notes, past={"changed": changed, "left_out": left_out})


def horizon_may_move(record: Mapping[str, Any], job: Job) -> bool:
    """Return whether a checkpoint may be continued to the job's number of steps.

    It may if it was trained for the same number, perhaps given in another unit, or if its steps had
    the learning rates that the new schedule gives them. The last step shows that: a learning rate
    that had started to fall differs. Phases of precision that scale with the horizon forbid it.
    """
    saved_steps = record["progress"]["steps"]
    if saved_steps == job.plan.steps:
        return True
    last_step = max(record["progress"]["step"] - 1, 0)
    before, now = (
        learning_rate(last_step, job.recipe.schedule, job.recipe.optimizer, steps)
        for steps in (saved_steps, job.plan.steps)
    )
    return before == now and not job.plan.schedule.changes


# ── Refuse it ─────────────────────────────────────────────────────────────────────────────────────


def require_same_training(
    source: ResumePoint, changes: Changes, job: Job, run_checkpoints: Iterable[Path]
) -> None:
    """Raise InputError if a checkpoint to resume belongs to another training.

    The message lists the changes. If that is the horizon alone, it names one of
    `run_checkpoints` that may be continued to the new horizon. A checkpoint past the horizon is
    left to `require_steps_to_train`, whose message is simpler.
    """
    only_horizon = changes.keys() <= {*HORIZON}
    if source.is_branch or not changes or (only_horizon and source.step > job.plan.steps):
        return
    changed = "".join(f"\n  {line}" for line in lines_of(changes).values())
    new_run = "Set another `run_dir`" if source.in_run_folder else "Omit --resume"
    message = (
        f"{source.path}: the checkpoint was made by another recipe:{changed}\n{new_run} to "
        "start a new run, or pass --accept-changes to continue this one with the present values."
    )
    if only_horizon:
        earlier = (
            f", which {path} is"
            for path in run_checkpoints
            if path != source.path
            and (path / STATE).is_file()
            and horizon_may_move(load_object(path / STATE, "name another"), job)
        )
        message += (
            " To end elsewhere, name a checkpoint from before the learning rate fell with --resume"
            f"{next(earlier, '')}."
        )
    raise InputError(message)


def require_same_stream(source: ResumePoint, job: Job) -> None:
    """Raise InputError if a checkpoint to resume has no place in the run's stream of packs."""
    if source.is_of_another_stream(job) and not source.is_branch:
        raise InputError(
            f"{source.path}: is of another stream; set another `run_dir`, and "
            f"`train.begin_with: {source.path}` for its weights"
        )


def require_steps_to_train(source: ResumePoint, job: Job) -> None:
    """Raise InputError if no step follows the checkpoint, or if its tokens do not count steps.

    A run folder's own checkpoint may be at the horizon: its run has ended there. A horizon in
    tokens needs steps of one size.
    """
    plan = job.plan
    tokens = source.record["progress"]["tokens"]
    if job.recipe.train.steps is None and tokens != source.step * plan.tokens_per_step:
        steps_to_train = math.ceil((plan.total_tokens - tokens) / plan.tokens_per_step)
        steps = source.step + max(steps_to_train, 0)
        raise InputError(
            f"{source.path}: its steps had another `batch.tokens`; "
            f"set the horizon as `train.steps: {steps}`"
        )
    if source.step > plan.steps or (source.step == plan.steps and not source.in_run_folder):
        new_run = ", or set another `run_dir` to start a new run" if source.in_run_folder else ""
        raise InputError(
            f"{source.path}: is from step {source.step:,}, and `train` ends the run at "
            f"{plan.steps:,}; lengthen it{new_run}"
        )


def require_own_records(job: Job) -> None:
    """Raise InputError if a start without a checkpoint would overwrite files of another training.

    These are the model of a finished run, or the logged steps of a run with another identity.
    """
    if (job.run_dir / "final").exists() or (job.run_dir / SUMMARY_FILE).exists():
        raise InputError(
            f"{job.run_dir}: is of a finished run that has no checkpoint to continue from; "
            "set another `run_dir`"
        )
    with suppress(NoStepYet):
        run = read_run(job.run_dir)
        trained = identity_of(
            parse(Recipe, run.config, str(run.path / "config.yaml")), run.data_fingerprint or ""
        )
        if changed := changed_keys(trained, identity_of(job.recipe, job.data.train.fingerprint)):
            raise InputError(
                f"{job.run_dir}: is of another training ({', '.join(changed)}); "
                "set another `run_dir`"
            )
