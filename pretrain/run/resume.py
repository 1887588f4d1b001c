"""Where a run goes on from: a checkpoint of an earlier start or of another run, or, after a bad step, one of its own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from foundation.errors import InputError
from foundation.reading import load_object
from foundation.settings import parse
from foundation.units import plural
from pretrain.checkpoint.checkpoint import Checkpoints, checksums
from pretrain.checkpoint.format import (
    DTYPE_NAMES,
    MANIFEST,
    STATE,
    newest_in,
    read_manifest,
    step_folders,
)
from pretrain.checkpoint.state import NO_PAST, TrainState, changed_keys
from pretrain.metrics.health import MOST_ROLLBACKS, Health, HealthState, TrainingHalted, some_of
from pretrain.metrics.run_folder import SUMMARY_FILE
from pretrain.metrics.run_record import NoStepYet, read_metrics, read_run
from pretrain.metrics.trackers import Trackers
from pretrain.model.gradients import local_part
from pretrain.optimizer.adamw import named_state, set_updates_done
from pretrain.optimizer.exact_weights import master_of
from pretrain.optimizer.schedule import describe, learning_rate
from pretrain.precision.product import PREFIX
from pretrain.precision.settings import WEIGHT_DTYPES, Weights
from pretrain.run.assembly import REHEARSALS, Assembly
from pretrain.run.evaluate import best_so_far
from pretrain.run.job import Job
from pretrain.run.run import Run
from pretrain.settings.config import HORIZON, begin_of, identity_of, resolved
from pretrain.settings.recipe import Recipe

# Settings that scales of gradients depend on: the largest code, the loss, and by how many tokens it is divided.
SCALES_FOLLOW = ("batch.tokens", "loss.", "fp8_config.fp8_format")


# ── Which checkpoint ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint from which a run goes on: one to resume, or another run's to begin with."""

    path: Path
    record: dict[str, Any]  # its state.json
    notes: list[str]  # what differs between its recipe and the present one
    begins: bool = False  # it is that of `train.begin_with`
    # of the run that goes on from it
    past: Mapping[str, Any] = field(default_factory=lambda: NO_PAST)

    @property
    def step(self) -> int:
        return self.record["progress"]["step"]

    @property
    def health(self) -> HealthState:
        """The state after the steps up to here; of another run only the losses, which tell what is usual here too."""
        own = (
            {"skipped_steps": 0, "rollbacks": 0, "switched_after": None, "usual_gap": {}}
            if self.begins
            else {}
        )
        return HealthState(**self.record["health"] | own)

    def is_of_another_stream(self, job: Job) -> bool:
        """Whether this run streams packs of text in which the checkpoint has no place: then it begins at the first pack."""
        return (
            job.data.stream is not None
            and self.record["identity"].get("data.fingerprint") != job.identity["data.fingerprint"]
        )

    def place(self, job: Job) -> int:
        """Return the place in the stream after the checkpoint's last pack, in packs of this job."""
        identity, progress = self.record["identity"], self.record["progress"]
        if self.is_of_another_stream(job):
            return 0
        steps = progress["step"] + progress["left_out"]
        packs = steps * (identity["batch.tokens"] // identity["data.length"]) + progress["shift"]
        # Checkpoints of earlier versions have no place. Their counters give it.
        return -(-progress.get("place", packs) * identity["data.length"] // job.recipe.data.length)

    def shift(self, job: Job) -> int:
        """Return the `TrainState.shift` with which the first step reads from `place` on."""
        steps = self.record["progress"]["step"] + self.record["progress"]["left_out"]
        return self.place(job) - steps * job.plan.packs_per_step


def where_to_resume(
    job: Job, wanted: str, accept_changes: bool
) -> tuple[Job, Checkpoints, ResumePoint | None]:
    """The run folder's checkpoints, the one to go on from, and the job as it goes on. Changes nothing on disk. Collective.
    InputError as `find_resume_point`, and where nothing can be trained from there."""
    checkpoints = Checkpoints(
        job.run_dir / "checkpoints", job.recipe.checkpoint.keep, before=job.plan.before_decay
    )
    source = find_resume_point(checkpoints, wanted, job, accept_changes)
    own = source is not None and checkpoints.owns(source.path)
    if not own:
        _require_own_records(job)
    chunk = job.plan.loss.tokens_at_once
    if source is not None:
        _require_steps_to_come(source, job, own=own)
        switched_after = source.health.switched_after
        job = job.with_plan(schedule=job.plan.schedule.switched_to_bf16_after(switched_after))
        # what the run began with, so that sums keep their order
        if job.recipe.loss.chunk == "auto":
            chunk = source.record["loss_chunk"]
    return job.with_settings("loss", chunk=chunk), checkpoints, source


def find_resume_point(
    checkpoints: Checkpoints, wanted: str, job: Job, accept_changes: bool
) -> ResumePoint | None:
    """The checkpoint to continue, `wanted` ("auto", a checkpoint, or a run folder: its newest); where there is none yet that of
    another run with which the recipe begins (`train.begin_with`), or None.

    Raises InputError where it does not exist, where it belongs to another training and `accept_changes` is not set, and where all
    checkpoints are damaged: a new run in their place would bury what may still be rescued.
    """
    path = checkpoints.newest() if wanted == "auto" else newest_in(Path(wanted))
    if path is None and checkpoints.damaged:
        raise InputError(
            f"{checkpoints.folder}: every checkpoint is damaged; name another `run_dir` to train from the beginning"
        )
    begins = path is None
    path = path or begin_of(job.recipe)
    if path is None:
        return None
    if begins and not (path / MANIFEST).is_file():
        example = newest_in(path) if newest_in(path) != path else "RUN/checkpoints/step-00000100"
        raise InputError(f"`train.begin_with`: {path}: is no checkpoint; name one, as {example}")
    record = checkpoints.read_state(path)
    identity, present, past, own = (
        record["identity"],
        job.identity,
        record["past"],
        checkpoints.owns(path),
    )
    steps, longer = record["progress"]["steps"], []
    if steps != job.plan.steps and _rates_were_alike(record, job):
        schedule = describe(job.recipe.schedule, job.recipe.optimizer, job.plan.steps)
        longer = [f"the horizon moves from step {steps:,} to {job.plan.steps:,}; {schedule}"]
    # the same horizon, perhaps written otherwise, or one that may move
    if steps == job.plan.steps or longer:
        present = present | {key: identity.get(key) for key in HORIZON}
    keys = changed_keys(identity, present)
    changes = [
        f"{key}: saved {json.dumps(identity.get(key))}, now {json.dumps(present.get(key))}"
        for key in keys
    ]
    only_horizon = {*keys} <= {*HORIZON}
    # which `_require_steps_to_come` refuses
    past_it = only_horizon and record["progress"]["step"] > job.plan.steps
    if changes and not (accept_changes or begins or past_it):
        listed = "".join(f"\n  {each}" for each in changes)
        others = [
            each
            for each in step_folders(checkpoints.folder)
            if each != path and (each / STATE).is_file()
        ]
        serves = (
            f", which {each} is"
            for each in others
            if _rates_were_alike(load_object(each / STATE, "name another"), job)
        )
        elsewhere = f" To end elsewhere, name a checkpoint from before the learning rate fell with --resume{next(serves, '')}."
        anew = "Set another `run_dir`" if own else "Leave --resume out"
        raise InputError(
            f"{path}: the checkpoint was made by another recipe:{listed}\n{anew} to start a new run, or pass --accept-changes to "
            f"continue this one with the present values.{elsewhere if only_horizon else ''}"
        )
    implied = {"train.begin_with"} if begins else set[str]()
    if "precision" in keys:  # which brings options that the earlier one lacks
        implied |= {
            key for key in keys if key.startswith("fp8_config.") and identity.get(key) is None
        }
    notes = [
        f"the recipe has changed: {each}"
        for key, each in zip(keys, changes, strict=True)
        if key not in implied
    ]
    was = {} if begins else {key: identity.get(key) for key in keys}
    past = {
        "changed": []
        if begins
        else [
            *past["changed"],
            *([{"step": record["progress"]["step"], "was": was}] if was else []),
        ],
        # the folder's own metrics have its rollbacks
        "left_out": past["left_out"] if own else record["progress"]["left_out"],
    }
    return ResumePoint(path, record, notes if begins else longer + notes, begins, past)


def _rates_were_alike(record: Mapping[str, Any], job: Job) -> bool:
    """Whether the checkpoint's steps had the present horizon's rates, by the last one: a rate that had begun to fall differs."""
    rates = [
        learning_rate(
            max(record["progress"]["step"] - 1, 0), job.recipe.schedule, job.recipe.optimizer, steps
        )
        for steps in (record["progress"]["steps"], job.plan.steps)
    ]
    return rates[0] == rates[1] and not job.plan.schedule.changes


def _require_steps_to_come(source: ResumePoint, job: Job, *, own: bool) -> None:
    """InputError where `source` is of another stream, at or past the horizon, or had other step sizes under one in tokens."""
    if source.is_of_another_stream(job) and not source.begins:
        raise InputError(
            f"{source.path}: is of another stream; set another `run_dir`, and `train.begin_with: {source.path}` for its weights"
        )
    train, plan, tokens = job.recipe.train, job.plan, source.record["progress"]["tokens"]
    if train.steps is None and tokens != source.step * plan.tokens_per_step:
        steps = source.step + max(math.ceil((plan.total_tokens - tokens) / plan.tokens_per_step), 0)
        raise InputError(
            f"{source.path}: its steps had another `batch.tokens`; set the horizon as `train.steps: {steps}`"
        )
    # at it, a run of this folder has ended
    if source.step > plan.steps or (source.step == plan.steps and not own):
        ends = (
            f"is from step {source.step:,}, and `train` ends the run at {plan.steps:,}; lengthen it"
        )
        raise InputError(
            f"{source.path}: {ends}{', or set another `run_dir` to start a new run' if own else ''}"
        )


def _require_own_records(job: Job) -> None:
    """InputError where a start that goes on from none of the run folder's checkpoints would write over what stands there: the
    model of a finished run, or the steps of another training."""
    if (job.run_dir / "final").exists() or (job.run_dir / SUMMARY_FILE).exists():
        raise InputError(
            f"{job.run_dir}: is of a finished run that has no checkpoint to go on from; set another `run_dir`"
        )
    with suppress(NoStepYet):
        run = read_run(job.run_dir)
        trained = identity_of(
            parse(Recipe, run.config, str(run.path / "config.yaml")), run.data_fingerprint or ""
        )
        if changed := changed_keys(trained, identity_of(job.recipe, job.data.train.fingerprint)):
            raise InputError(
                f"{job.run_dir}: is of another training ({', '.join(changed)}); set another `run_dir`"
            )


# ── Its state copied back ─────────────────────────────────────────────────────────────────────────────────────────────────────


def begin_stream(source: ResumePoint | None, job: Job) -> None:
    """Have packs made from where `source` was in the stream; from its beginning where there is no source, or one of another
    stream. Does nothing for packs that were prepared."""
    if job.data.stream is not None:
        continues = source is not None and not source.is_of_another_stream(job)
        job.data.stream.begin(source.record.get("stream", {}) if continues else None)


def restore(
    source: ResumePoint, checkpoints: Checkpoints, job: Job, assembly: Assembly, health: Health
) -> tuple[TrainState, list[str]]:
    """Restore memory and stream to the state of `source`. Return the counters and notes for the user.

    Collective. The caller still has to call `Checkpoints.abandon_newer`.
    """
    begin_stream(source, job)
    progress = source.record["progress"] | {
        "steps": job.plan.steps,
        "shift": source.shift(job),
        "place": source.place(job),
    }
    state = TrainState(**progress)
    notes = load_weights(source, checkpoints, job.recipe.weights, assembly)
    set_updates_done(assembly.optimizer, state.step - state.skipped_steps)
    health.state = source.health
    return state, [f"resumed from {source.path} at step {state.step}", *source.notes, *notes]


def load_weights(
    source: ResumePoint, checkpoints: Checkpoints, mode: Weights, assembly: Assembly
) -> list[str]:
    """Load weights, moments and histories, and return notes for the user.

    mode: `weights` of the recipe. The checkpoint may have another one. Then its weights are read as
        they were stored, become FP32 masters, and are stored in `mode`.

    Histories of other layers or precisions are not loaded.
    """
    saved: Weights = source.record["identity"]["weights"]
    parameters = dict(assembly.hf.named_parameters())
    stored: dict[str, torch.Tensor] = {}
    targets = assembly.optimizer_tensors | histories_in(source, assembly)
    if saved != mode:
        dtype = getattr(torch, WEIGHT_DTYPES[saved])
        stored = {name: torch.empty_like(p, dtype=dtype) for name, p in parameters.items()}
        targets = {
            name: tensor for name, tensor in targets.items() if not name.startswith("remainder/")
        }
        # Plain BF16 keeps the stored weight: a master between two BF16 values would round to the
        # other one.
        if (saved, mode) == ("bf16_exact", "fp32"):
            targets |= {
                f"remainder/{name}": torch.empty_like(p, dtype=torch.int16)
                for name, p in parameters.items()
            }
    not_loaded = {
        name
        for name in read_manifest(source.path).optimizer.keys() - targets.keys()
        if name.startswith((PREFIX, "remainder/"))
    }
    checkpoints.load(source.path, assembly.tensors | stored, targets, left_out=not_loaded)
    if saved == mode:
        return []
    for name, parameter in parameters.items():
        remainder = targets.pop(f"remainder/{name}", None)
        master = master_of(
            local_part(stored.pop(name)), None if remainder is None else local_part(remainder)
        )
        assembly.optimizer.set_master(parameter, master)
    if mode == "bf16":
        return [f"weights: {saved} became {mode}; the lower 16 bits of each weight are LOST"]
    return [f"weights: {saved} became {mode}; nothing is lost, and updates are exact from now on"]


def require_restored(source: ResumePoint, assembly: Assembly) -> None:
    """Raise TrainingHalted unless the live tensors have the checkpoint's bits. Collective.

    Compared are weights, moments, remainders and histories that have the checkpoint's dtype.
    Checkpoints of earlier versions have no checksums.
    """
    manifest = read_manifest(source.path)
    saved = manifest.model | manifest.optimizer
    live = {
        **assembly.tensors,
        **named_state(assembly.optimizer, assembly.hf),
        **histories_in(source, assembly),
    }
    comparable = {
        name: tensor
        for name, tensor in live.items()
        if name in saved and saved[name].dtype == DTYPE_NAMES[tensor.dtype]  # and not converted
    }
    present = checksums(comparable)
    wrong = [name for name in present if saved[name].checksum not in (None, present[name])]
    if wrong:
        raise TrainingHalted(
            source.step,
            f"{source.path}: {len(wrong)} tensors in memory differ from what was saved: "
            f"{some_of(wrong)}. No step was trained. The fault lies in the code or in the device, "
            "not in the recipe",
        )


def histories_in(source: ResumePoint, assembly: Assembly) -> dict[str, torch.Tensor]:
    """Return the live histories and scales of delayed scaling if the checkpoint holds them."""
    return assembly.context.saved_state() if holds_histories(source, assembly) else {}


def holds_histories(source: ResumePoint, assembly: Assembly) -> bool:
    """Return whether the checkpoint has exactly the histories and scales that this run has."""
    saved = {
        name: entry.shape
        for name, entry in read_manifest(source.path).optimizer.items()
        if name.startswith(PREFIX)
    }
    live = assembly.context.saved_state()
    return saved == {name: tuple(tensor.shape) for name, tensor in live.items()}


def needs_new_histories(source: ResumePoint, assembly: Assembly, job: Job) -> bool:
    """Return whether the present precision has histories that the checkpoint's cannot continue.

    These may be of other products, or of other gradients than those to come. Then call
    `Assembly.start_precision` after the checkpoint's weights are loaded. Before that, histories are
    those of the weights that the model was built with, whose gradients are many times as large.
    """
    if not assembly.context.state():
        return False
    changed = changed_keys(source.record["identity"], job.identity)
    return (
        any(key.startswith(SCALES_FOLLOW) for key in changed)
        or source.record["precision"] != assembly.precision.current.name
        or not holds_histories(source, assembly)
    )


def resume_precision(run: Run, source: ResumePoint) -> None:
    """Compute in the precision of the run's last step before `source`. Collective.

    If the checkpoint is another run's, compute in the precision of the next step. The next step may
    change the precision. Delayed scaling fills histories that the checkpoint lacks.
    """
    require_restored(source, run.assembly)
    schedule = run.precision.schedule
    name = schedule.at(run.state.step + 1).precision.name
    names = [active.precision.name for active in schedule.precisions()]
    if not source.begins and source.record["precision"] in names:
        name = source.record["precision"]
    run.precision.use(name)
    if needs_new_histories(source, run.assembly, run.job):
        run.assembly.start_precision(name, run.job, run.accelerator)
        run.console.notice(
            f"delayed scaling fills its histories again, from {REHEARSALS} packs under the "
            "checkpoint's weights"
        )


# ── After a bad step ──────────────────────────────────────────────────────────────────────────────


def roll_back(run: Run, reason: str) -> None:
    """Restore the newest good checkpoint, and go on with the packs after those of the judged step.

    All ranks call this after that step. If the run has gone back to that checkpoint before, and has
    failed again on other packs, it takes the checkpoint before it if that still exists.

    The lines of abandoned steps are removed from metrics.jsonl and kept inside one line of event
    `rollback`. Its step is the next one: a run that is resumed from the checkpoint drops that line,
    meets the same step, and goes back by itself.
    """
    judged = run.state
    rollbacks = run.health.state.rollbacks + 1
    checkpoints = run.checkpoints
    checkpoints.wait()
    source = _rollback_point(checkpoints, judged)
    run.assembly.context.forget()
    run.state, notes = restore(source, checkpoints, run.job, run.assembly, run.health)
    step = run.state.step
    checkpoints.abandon_newer(step)
    # Steps trained from here on are in no checkpoint yet.
    run.resumed_step = min(run.resumed_step, step)
    run.health.state.rollbacks = rollbacks
    # The next packs are those after the judged step's, whatever place the checkpoint has.
    run.state = replace(
        run.state,
        left_out=judged.left_out + judged.step - step,
        shift=judged.shift,
        place=judged.place,
    )

    switched_after = run.health.state.switched_after
    run.precision.schedule = run.precision.schedule.switched_to_bf16_after(switched_after)
    resume_precision(run, source)
    run.observers.go_back(step)
    run.write_audit()
    if run.accelerator.is_main_process:
        _record_rollback(run, f"step {judged.step}: {reason}")
    run.best = best_so_far(run)
    run.console.warning(
        f"step {judged.step}: {reason}. Rollback {rollbacks} of {MOST_ROLLBACKS} at most: "
        f"{notes[0]}; the packs of {plural(judged.step - step, 'step')} since are passed over"
    )


def _rollback_point(checkpoints: Checkpoints, judged: TrainState) -> ResumePoint:
    """Return the checkpoint that a rollback from `judged` restores."""
    # Without a checkpoint of its own, the run goes back to the one that it was resumed from.
    path = checkpoints.newest() or checkpoints.latest
    record = checkpoints.read_state(path)
    if record["progress"]["left_out"] != judged.left_out:
        path = checkpoints.newest(before=record["progress"]["step"]) or path
        record = checkpoints.read_state(path)
    return ResumePoint(path, record, [], begins=not checkpoints.owns(path))


def _record_rollback(run: Run, reason: str) -> None:
    """Replace the lines of abandoned steps in metrics.jsonl by one event."""
    step = run.state.step
    event = {
        "step": step + 1,
        "event": "rollback",
        "reason": reason,
        "resumed_from": step,
        "rollbacks": run.health.state.rollbacks,
        "left_out": run.state.left_out,
        "abandoned": [line for line in read_metrics(run.folder.path) if line["step"] > step],
    }
    # To a tracker this is a resume: the file is cut back, and a hosted service keeps the abandoned
    # steps.
    run.trackers.finish()
    run.trackers = Trackers(run.job.recipe.log, run.folder.path, step)
    run.trackers.start(resolved(run.job.recipe))
    run.trackers.log(event)
