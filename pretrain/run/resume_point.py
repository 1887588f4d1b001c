"""Find the checkpoint that a run continues from. Refuse a checkpoint that does not fit its recipe.

A run can continue in two ways. It resumes from a checkpoint of the same training: the newest
checkpoint in the run folder, or the checkpoint given by --resume. Or it branches: it starts a new
training from another run's checkpoint, given by `train.begin_with`. A run whose folder already has
a checkpoint resumes from it and ignores `train.begin_with`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.folders import newest_in, step_folders, step_of
from pretrain.checkpoint.state import NO_PAST, TrainState, changed_keys
from pretrain.metrics.health import HealthState
from pretrain.metrics.run_folder import SUMMARY_FILE
from pretrain.metrics.run_record import NoStepYet, as_text, read_run
from pretrain.optimizer.schedule import learning_rate
from pretrain.run.job import Job
from pretrain.settings.config import HORIZON, branch_checkpoint, identity_of
from pretrain.settings.recipe import ScheduleSettings

# Beginnings of the keys that determine the learning rates, except for the peak.
_SCHEDULE = ("schedule.", *HORIZON)
# Map each setting that differs between a checkpoint and the run to (saved value, present value).
# The keys are sorted.
Changes = dict[str, tuple[Any, Any]]
# A schedule of the learning rate: its settings, the peak, and the number of steps.
RateSchedule = tuple[ScheduleSettings, float, int]


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run continues from, with notes for the user."""

    path: Path
    # The content of the checkpoint's state.json (`_state_to_save` of `pretrain.run.checkpointing`).
    state_json: Mapping[str, Any]
    # True if the run starts a new training from another run's checkpoint (`train.begin_with`).
    is_branch: bool = False
    # True if the checkpoint is in the run folder.
    in_run_folder: bool = False
    # Changes of the recipe, as lines for the user.
    notes: Sequence[str] = ()
    # Earlier changes of the run's settings, in the format of `NO_PAST`. `with_changes` sets this
    # attribute and `notes`.
    past: Mapping[str, Any] = field(default_factory=lambda: NO_PAST)

    @property
    def step(self) -> int:
        """Return the number of training steps before the checkpoint."""
        return self.state_json["progress"]["step"]

    @property
    def health(self) -> HealthState:
        """Return the state of the health check for the continued run.

        A branch starts with all counters at zero. It only takes over the recent losses, which are
        needed to find spikes.
        """
        saved = dict(self.state_json["health"])
        if self.is_branch:
            return HealthState(losses=saved["losses"])
        saved.pop("usual_gap", None)  # in checkpoints of runs with the former key `log.gap`
        return HealthState(**saved)

    def is_of_another_stream(self, job: Job) -> bool:
        """Return True if the run streams its packs and the checkpoint belongs to other packs.

        If so, the checkpoint has no position in the run's stream, and the run starts with the first
        pack.
        """
        return job.data.stream is not None and (
            self.state_json["identity"].get("data.fingerprint") != job.identity["data.fingerprint"]
        )

    def place(self, job: Job) -> int:
        """Return the position in the order of packs at which the run continues.

        The position is counted in packs of the job's `data.length`. If the checkpoint was made
        with another `data.length`, its position is converted and rounded up.
        """
        if self.is_of_another_stream(job):
            return 0
        tokens = self.state_json["progress"]["place"] * self.state_json["identity"]["data.length"]
        # Round up, so that no token is read twice.
        return -(-tokens // job.recipe.data.length)

    def state(self, job: Job) -> TrainState:
        """Return the counters of the continued run at its start."""
        counters = {"steps": job.plan.steps, "place": self.place(job)}
        return TrainState(**self.state_json["progress"] | counters)


def where_to_resume(
    job: Job, requested: str, accept_changes: bool
) -> tuple[Job, Checkpoints, ResumePoint | None]:
    """Return (job, checkpoints, point): the job to run, and the checkpoint to continue from.

    requested: the value of --resume.
    accept_changes: True to continue although the recipe has changed (--accept-changes).

    The returned job keeps the loss chunk of the checkpoint. `checkpoints` manages the checkpoints
    of the run folder. `point` is None if the run starts from the beginning.

    Changes nothing on the disk. All ranks must call this function. Raises InputError as
    `find_checkpoint` does. Also raises InputError if the checkpoint belongs to another training
    (unless `accept_changes` is set), if no step is left to train after the checkpoint, or if the
    run would overwrite files of another training.
    """
    checkpoints = Checkpoints(
        job.run_dir / "checkpoints",
        job.recipe.checkpoint.keep,
        before_decay=job.plan.before_decay,
        merge=job.recipe.evaluate.merge,
        every=job.recipe.checkpoint.every or 1,
    )
    point = find_checkpoint(checkpoints, requested, branch_checkpoint(job.recipe))
    if point is None or not point.in_run_folder:
        require_no_other_training(job)
    loss_chunk = job.plan.loss.tokens_at_once
    if point is not None:
        changes = changes_since(point.state_json, job)
        if not accept_changes:
            require_same_training(point, changes, job)
        require_steps_to_train(point, job)
        point = with_changes(point, changes)
        if job.recipe.loss.chunk == "auto":
            # Keep the chunk of the checkpoint, because it determines the order in which the loss
            # and its gradients are summed. So the resumed run repeats the uninterrupted run bit for
            # bit.
            loss_chunk = point.state_json["loss_chunk"]
    return job.with_settings("loss", chunk=loss_chunk), checkpoints, point


# ── Find the checkpoint ───────────────────────────────────────────────────────────────────────────


def find_checkpoint(
    checkpoints: Checkpoints, requested: str, branch_from: Path | None
) -> ResumePoint | None:
    """Return the checkpoint to resume. If there is none, return the checkpoint to branch from.

    Return None if there is neither.

    checkpoints: the checkpoints of the run folder.
    requested: "auto" for the newest intact checkpoint of the run folder. Otherwise the path of a
        checkpoint, or the path of a run folder. For a path of a run folder, its newest checkpoint
        is used.
    branch_from: the path of another run's checkpoint (`train.begin_with`), or None.

    All ranks must call this function. Raises InputError if a requested checkpoint does not exist.
    Also raises InputError if every checkpoint of the run folder is damaged, because a new run would
    overwrite files that may still be rescued.
    """
    path = checkpoints.newest() if requested == "auto" else newest_in(Path(requested))
    if path is not None:
        return ResumePoint(path, checkpoints.read_state(path), in_run_folder=checkpoints.owns(path))
    if checkpoints.damaged:
        raise InputError(
            f"{checkpoints.folder}: every checkpoint is damaged; "
            "set another `run_dir` to train from the beginning"
        )
    if branch_from is None:
        return None
    return ResumePoint(branch_from, checkpoints.read_state(branch_from), is_branch=True)


# ── Compare the checkpoint's settings with the run's settings ─────────────────────────────────────


def changes_since(state_json: Mapping[str, Any], job: Job) -> Changes:
    """Return the settings that differ between a checkpoint and the job.

    The settings of the schedule are not included if they do not change the steps before the
    checkpoint (see `repeats_past`). The resumed run then equals an uninterrupted run of the job.
    """
    # The identity of a training with AdamW lacks the name of the optimizer.
    saved = {"optimizer.name": "adamw"} | state_json["identity"]
    present = {"optimizer.name": "adamw"} | job.identity
    # This former key had no effect unless it was true.
    if not saved.get("fp8_config.use_f32_scales"):
        saved.pop("fp8_config.use_f32_scales", None)
    ignored = _SCHEDULE if repeats_past(state_json, job, state_json["progress"]["step"]) else ()
    return {
        key: (saved.get(key), present.get(key))
        for key in changed_keys(saved, present)
        if not key.startswith(ignored)
    }


def saved_schedule(state_json: Mapping[str, Any]) -> RateSchedule:
    """Return the schedule of the learning rate in the state.json of a checkpoint."""
    identity = state_json["identity"]
    settings = {
        key.removeprefix("schedule."): value
        for key, value in identity.items()
        if key.startswith("schedule.")
    }
    peak = identity["optimizer.learning_rate"]
    return ScheduleSettings(**settings), peak, state_json["progress"]["steps"]


def in_words(changes: Changes) -> str:
    """Return the changed keys, each with its saved and its present value.

    Options that only one of two precisions has are omitted, because they follow from `precision`.
    """
    parts = []
    for key, pair in changes.items():
        if "precision" in changes and key.startswith("fp8_config.") and None in pair:
            continue
        saved, present = (as_text(value, key) for value in pair)
        parts.append(f"{key} (was {saved}, now {present})")
    return ", ".join(parts)


def with_changes(point: ResumePoint, changes: Changes) -> ResumePoint:
    """Return `point` with its `notes` and its `past` filled in.

    changes: the result of `changes_since`.

    `past` has two keys, `changed` and `left_out`:

    changed: a list of past changes. It is empty for a branch. For a resumed run it is the list in
        the checkpoint, followed by `changes`.
    left_out: the number of steps that were discarded by rollbacks, without the rollbacks that the
        run folder's metrics.jsonl records. For a checkpoint in the run folder, it is the number in
        the checkpoint's `past`, because metrics.jsonl records all later rollbacks. For a checkpoint
        in another folder, it is the checkpoint's counter of all rollbacks, because metrics.jsonl
        does not record them.

    `notes` has a line with the changes, except for the key that starts a branch.
    """
    shown = in_words({key: pair for key, pair in changes.items() if key != "train.begin_with"})
    notes = [f"changed settings: {shown}"] if shown else []
    return replace(point, notes=notes, past=_past(point, changes))


def _past(point: ResumePoint, changes: Changes) -> dict[str, Any]:
    """Return the `past` of `point`. See `with_changes`."""
    past = point.state_json["past"]
    changed = [] if point.is_branch else list(past["changed"])
    if changes and not point.is_branch:
        was = {key: saved for key, (saved, _) in changes.items()}
        changed.append({"step": point.step, "was": was})
    counted = past if point.in_run_folder else point.state_json["progress"]
    return {"changed": changed, "left_out": counted["left_out"]}


def repeats_past(state_json: Mapping[str, Any], job: Job, steps: int) -> bool:
    """Return True if the job's schedule does not change the first `steps` steps of a saved run.

    The schedules are compared as functions of the step: each past step must have the learning rate
    and the precision that it would have in an uninterrupted run of the job. So the number of steps,
    and everything that begins later, such as the decay, may differ.
    """
    saved = saved_schedule(state_json)
    present = job.recipe.schedule, job.recipe.optimizer.learning_rate, job.plan.steps
    if saved == present:
        return True
    precisions = job.plan.schedule
    # The saved phases are those of the job, unless `precision` has changed.
    if "precision" in changed_keys(state_json["identity"], job.identity) and precisions.changes:
        return False
    saved_precisions = replace(precisions, steps=state_json["progress"]["steps"])

    def is_unchanged(step: int) -> bool:
        if learning_rate(step, *saved) != learning_rate(step, *present):
            return False
        return saved_precisions.at(step + 1) == precisions.at(step + 1)

    # Compare the last step first, because it differs if a decay has begun.
    return all(map(is_unchanged, reversed(range(steps))))


# ── Refuse a checkpoint ───────────────────────────────────────────────────────────────────────────


def require_same_training(point: ResumePoint, changes: Changes, job: Job) -> None:
    """Raise InputError if a checkpoint to resume belongs to another training.

    changes: the result of `changes_since`. The message lists them. It suggests --accept-changes
        unless the optimizer has changed or no step is left to train. If only the schedule has
        changed, it suggests the newest checkpoint in the folder that fits the present schedule.

    No error is raised if only the schedule or the length of the training has changed and the
    checkpoint is past the new end: `require_steps_to_train` has a simpler message for this case.
    """
    only_schedule = all(key.startswith(_SCHEDULE) for key in changes)
    if point.is_branch or not changes or (only_schedule and point.step > job.plan.steps):
        return
    message = (
        f"{point.path}: the checkpoint was made by another recipe: {in_words(changes)}. To start "
        f"a new run, {_set_another_folder(point)}."
    )
    # The state of the other optimizer does not fit, and a finished run has no step left.
    if "optimizer.name" not in changes and point.step < job.plan.steps:
        message += " To continue with the present values, pass --accept-changes."
    if only_schedule:
        for path in step_folders(point.path.parent):
            if repeats_past(point.state_json, job, step_of(path)):
                message += f" To continue with this schedule, pass --resume {path}."
                break
    raise InputError(message)


def _set_another_folder(point: ResumePoint) -> str:
    """Return the remedy for a new run instead of a resumed one."""
    remedy = "set another `name` or `run_dir`"
    if point.in_run_folder:
        return remedy
    return f"{remedy} without {'`train.begin_with`' if point.is_branch else '--resume'}"


def require_steps_to_train(point: ResumePoint, job: Job) -> None:
    """Raise InputError if no step is left to train after the checkpoint.

    A checkpoint of the last step in the run folder is accepted, because this run is finished.

    Also raise InputError if the recipe gives the length in tokens or epochs, but the steps before
    the checkpoint were trained with another `batch.tokens`. Then the length cannot be converted to
    a number of steps.
    """
    plan = job.plan
    tokens = point.state_json["progress"]["tokens"]
    if job.recipe.train.steps is None and tokens != point.step * plan.tokens_per_step:
        steps_to_train = math.ceil((plan.total_tokens - tokens) / plan.tokens_per_step)
        steps = point.step + max(steps_to_train, 0)
        raise InputError(
            f"{point.path}: the steps before this checkpoint were trained with another "
            "`batch.tokens`, so the length of the run must be given in steps; set "
            f"`train.steps: {steps}` to train the same number of tokens"
        )
    if point.step > plan.steps or (point.step == plan.steps and not point.in_run_folder):
        raise InputError(
            f"{point.path}: the checkpoint is from step {point.step:,}, but `train` ends the run "
            f"at step {plan.steps:,}; raise the length of the run in `train`, or start a new run: "
            f"{_set_another_folder(point)}"
        )


def require_no_other_training(job: Job) -> None:
    """Raise InputError if a run without a checkpoint would overwrite files of another training.

    Such files are the results of a finished run, and the logged steps of a run whose identity
    differs from the job's identity.
    """
    if (job.run_dir / "final").exists() or (job.run_dir / SUMMARY_FILE).exists():
        raise InputError(
            f"{job.run_dir}: the folder contains a finished run, whose files this training would "
            "overwrite, because it does not continue a checkpoint of this folder; set another "
            "`run_dir`"
        )
    with suppress(NoStepYet):
        run = read_run(job.run_dir)
        trained = identity_of(run.recipe, run.data_fingerprint or "")
        if changed := changed_keys(trained, identity_of(job.recipe, job.data.train.fingerprint)):
            raise InputError(
                f"{job.run_dir}: the folder contains another training, which differs in "
                f"{', '.join(changed)}; set another `run_dir`"
            )
