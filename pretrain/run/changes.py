"""What has changed between a checkpoint's run and the one that goes on from it: what to know at its start, and what it keeps.

Everything is told from the checkpoint's `state.json` (`record`) and the present recipe (`job`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, PositiveInt, ValidationError

from foundation.errors import InputError
from foundation.reading import load_object
from foundation.units import count, plural
from pretrain.checkpoint.folders import step_folders, step_of
from pretrain.checkpoint.manifest import MANIFEST
from pretrain.checkpoint.saving import STATE
from pretrain.checkpoint.state import Change, Past, changed_keys, check_record
from pretrain.metrics.run_record import is_step, read_metrics
from pretrain.optimizer import schedule
from pretrain.plan.preflight import Job
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.schedule import in_phases, last_steps, phases_of
from pretrain.settings.recipe import ScheduleSettings

HORIZON = {"train.steps", "train.tokens", "train.epochs"}


# ── The text ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class SavedSteps(BaseModel):
    """What a step of the checkpoint's run took, in tokens."""

    tokens: Annotated[int, Field(gt=0, lt=2**31)]
    length: PositiveInt


def packs_before(record: Mapping[str, Any], length: int) -> int | None:
    """How many packs of `length` tokens a checkpoint's run had taken from its text, or passed over; None of a version that does
    not say."""
    identity, progress = record["identity"], record["progress"]
    try:
        saved = SavedSteps(tokens=identity.get("batch.tokens"), length=identity.get("data.length"))
    except ValidationError:
        return None
    packs = steps_before(record) * (saved.tokens // saved.length) + progress.get("shift", 0)
    return max(-(-packs * saved.length // length), 0)


def steps_before(record: Mapping[str, Any]) -> int:
    """Returns the number of steps whose packs a checkpoint's run had taken, or passed over in a rollback."""
    return record["progress"]["step"] + record["progress"].get("left_out", 0)


def shift_of(record: Mapping[str, Any], job: Job) -> int:
    """`TrainState.shift` with which the text goes on where the checkpoint's ended, however many packs a step takes now."""
    packs, progress = packs_before(record, job.recipe.data.length), record["progress"]
    reckoned = steps_before(record) * job.plan.packs_per_step
    if of_another_stream(record, job):
        return -reckoned
    return progress.get("shift", 0) if packs is None else packs - reckoned


def of_another_stream(record: Mapping[str, Any], job: Job) -> bool:
    """Whether this run's packs are streamed, and the checkpoint has no place in that text: it begins at its first pack."""
    return job.data.stream is not None and record["identity"].get("data.fingerprint") != job.identity["data.fingerprint"]


def other_text(record: Mapping[str, Any], job: Job) -> Iterator[str]:
    """What to know of the packs to come, where a step takes others than the checkpoint's steps did."""
    identity, progress, plan = record["identity"], record["progress"], job.plan
    packs, step = packs_before(record, job.recipe.data.length), progress["step"]
    if packs is None:
        return
    if of_another_stream(record, job):
        yield "the text, its sources or their shares are others than the checkpoint's: this stream begins at its first pack"
        return
    if shift_of(record, job) != progress.get("shift", 0):
        tokens = progress["tokens"] + max(plan.steps - step, 0) * plan.tokens_per_step
        yield (
            f"a step takes {plural(plan.packs_per_step, 'pack')} now: the text goes on where the checkpoint's ended, after "
            f"{plural(packs, 'pack')}; steps are counted on, so the horizon of {plan.steps:,} is {count(tokens)} tokens in all"
        )
    others = [key for key in ("seed", "data.fingerprint") if identity.get(key) != job.identity.get(key)]
    if others and step:
        yield (
            f"the order of the packs is another than the checkpoint's ({', '.join(others)}), and it goes on after the first "
            f"{plural(packs, 'pack')} of it: some of these may never have been trained on, and some to come may have been"
        )


# ── The rate ────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def extending_a_decayed_run(path: Path, record: Mapping[str, Any], job: Job, *, begins: bool = False) -> str | None:
    """What to know where the checkpoint's rate has fallen towards a shorter horizon than the present one and would leap up:
    by how much, and which checkpoint is from before. None for any other checkpoint."""
    identity, progress = record["identity"], record["progress"]
    step, horizon = progress["step"], progress["steps"]
    decay, rate = _decay_left(record, job), identity.get("optimizer.learning_rate")
    if decay is None or rate is None:
        return None
    (settings, _), recipe = schedule_of(identity), job.recipe
    optimizer = recipe.optimizer.model_copy(update={"learning_rate": rate})
    last = schedule.learning_rate(step - 1, settings, optimizer, horizon)
    following = schedule.learning_rate(step, recipe.schedule, recipe.optimizer, job.plan.steps)
    if following <= last:  # as after a decay's first step, which has the whole rate still
        return None
    told = (
        f"{path.name} is from the decay towards step {horizon:,}, which began after step {decay:,}: the rate would leap from "
        f"{last:.3g} to {following:.3g}, and what the decay has gained would be lost. "
    )
    if settings.kind != "wsd":
        return told + f"A {settings.kind} schedule falls all the way, so train anew with another `run_dir`"
    earlier = last_before(decay, step_folders(path.parent))
    if earlier is None:
        return told + "No checkpoint from before it is there; a smaller `checkpoint.every` would have saved one, which is kept"
    how = f"train.begin_with={earlier}" if begins else f"--resume {earlier} --accept-changes"
    return told + f"{earlier.name} is from before it; go on from there with {how}"


def last_before(decay: int | None, folders: Iterable[Path]) -> Path | None:
    """The first of checkpoint `folders`, newest first, that a run can be prolonged from whose decay begins after step `decay`:
    one from before it, and from no earlier decay."""
    before = (folder for folder in folders if decay is not None and step_of(folder) <= decay)
    return next((folder for folder in before if not _is_decayed(folder)), None)


def decay_begun(record: Mapping[str, Any]) -> int | None:
    """The step after which the decay began that a checkpoint is from, by its own schedule and horizon; None: it is from none."""
    if (found := schedule_of(record["identity"])) is None:
        return None
    settings, _ = found
    decay = schedule.decay_begins(settings, record["progress"]["steps"])
    return decay if decay is not None and record["progress"]["step"] > decay else None


def _decay_left(record: Mapping[str, Any], job: Job) -> int | None:
    """What `decay_begun` returns of a checkpoint from which the run goes on beyond the horizon that it had; else None."""
    progress, steps = record["progress"], job.plan.steps
    return decay_begun(record) if max(progress["step"], progress["steps"]) < steps else None


def _is_decayed(folder: Path) -> bool:
    """Whether the checkpoint in `folder` is from a decay, as one may be that a run was prolonged after; or cannot be read."""
    try:
        record = load_object(folder / STATE, "resume from another checkpoint")
        check_record(record, folder)
    except InputError:
        return True
    return decay_begun(record) is not None


def schedule_of(identity: Mapping[str, Any]) -> tuple[ScheduleSettings, int] | None:
    """A checkpoint's schedule, and the tokens of its steps; None for one of a version whose schedules were others."""
    saved = {key.removeprefix("schedule."): value for key, value in identity.items() if key.startswith("schedule.")}
    try:
        return ScheduleSettings(**saved), identity["batch.tokens"]
    except (ValidationError, KeyError):
        return None


def rate_has_moved(record: Mapping[str, Any], job: Job) -> str | None:
    """What to know where the next step stands elsewhere in the present schedule than in the checkpoint's; None where not."""
    recipe, plan, step = job.recipe, job.plan, record["progress"]["step"]
    if (found := schedule_of(record["identity"])) is None:
        return None
    settings, _ = found
    saved = schedule.learning_rate(step, settings, recipe.optimizer, record["progress"]["steps"])
    now = schedule.learning_rate(step, recipe.schedule, recipe.optimizer, plan.steps)
    if step >= plan.steps or math.isclose(saved, now, rel_tol=0.01):
        return None
    most = recipe.optimizer.learning_rate
    own = saved * record["identity"].get("optimizer.learning_rate", most) / most
    return (
        f"the learning rate of step {step + 1:,} is {now:.3g}, and the checkpoint's run would have had {own:.3g}, because "
        "`schedule`, the horizon or `batch.tokens` has changed; leave all three as they were to keep the rate"
    )


# ── The precision ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def precisions_around(record: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Returns two precisions of the schedule that a checkpoint was saved under: that of its last step, whose histories can be
    used further, and that of the step to come; None for both where there was no schedule."""
    setting, progress = record["identity"].get("precision"), record["progress"]
    if len(phases_of(setting)) < 2:
        return None, None
    try:
        steps = (max(progress["step"], 1), progress["step"] + 1)
        before, after = (_until_step(setting, progress["steps"], step) for step in steps)
    except (InputError, TypeError):  # the checkpoint is of a version with other rules
        return None, None
    return before[-1][1], after[-1][1]


def precision_has_moved(record: Mapping[str, Any], job: Job) -> str | None:
    """What to know where the present schedule goes on in another precision than the checkpoint's own: a changed horizon moves the
    shares. None where it does not."""
    (before, saved), step = precisions_around(record), record["progress"]["step"]
    now = job.plan.active_after(step).precision.name
    if saved in (None, now):
        return None
    how = "goes on" if before == now else "begins anew"
    return (
        f"after step {step:,} the checkpoint's `precision` was to be {saved}; by the present schedule it is {now}, "
        f"which {how} there. An `until` that is a step number stays where it is when the horizon changes"
    )


def precisions_so_far(job: Job, record: Mapping[str, Any], past: Past) -> dict[int, str]:
    """Returns the precisions of the steps in the run folder's metrics up to the checkpoint's, each under the first step that it
    computed: as the steps' own lines say, or where the run had one precision, as resumes have changed it since. Empty where there
    are no steps, and for a run that has only ever had one precision: its metrics are not read for that."""
    changes = [(change.step, change.was["precision"]) for change in past.changed if "precision" in change.was]
    if not (changes or job.plan.phases):
        return {}

    def known(line: Mapping[str, Any]) -> str:
        told = line.get("precision", next((was for until, was in changes if line["step"] <= until), None))
        planned = job.plan.active_after(line["step"] - 1).precision.name
        return told if isinstance(told, str) and told in PRECISIONS else planned

    return in_phases({line["step"]: known(line) for line in steps_so_far(job.run_dir, record)})


def steps_so_far(run_dir: Path, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps in the metrics of `run_dir`, as far as the checkpoint's; none where there are no metrics, or such as resuming
    mends."""
    try:
        return [line for line in read_metrics(run_dir) if is_step(line) and line["step"] <= record["progress"]["step"]]
    except InputError:
        return []


# ── What the run keeps ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def past_of(path: Path, record: Mapping[str, Any], job: Job, *, begins: bool, own: bool) -> Past:
    """What the run that goes on from `path` keeps of its past.

    A run that resumes keeps what the checkpoint says of the past, and what `job` has changed since. A run that `begins` with
    another's checkpoint keeps the hash of its manifest: another checkpoint may come to lie at the same path. `own`: the
    checkpoint lies in the run's folder, whose metrics tell of its rollbacks.
    """
    progress, past = record["progress"], Past.model_validate(record.get("past", {}))
    left_out = past.left_out if own else progress.get("left_out", 0)
    if begins:
        manifest = path / MANIFEST  # which another machine may have
        return Past(begin_with=sha256(manifest.read_bytes()).hexdigest() if manifest.is_file() else None, left_out=left_out)
    was = felt_changes(record, job)
    change = [Change(step=progress["step"], was=was)] if was else []
    left = {"left_out": left_out}
    if was and (decay := _decay_left(record, job)) is not None:
        left["left_decay"] = decay
    return past.model_copy(update={"changed": [*past.changed, *change], **left})


def felt_changes(record: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """The settings that the checkpoint's steps were trained under and that this run has changed, with the checkpoint's values.

    A horizon or a schedule that gives those steps the same rates and precisions changes nothing of them. Nor does an option of
    `fp8_config` that only one of two precisions has.
    """
    identity, current = record["identity"], job.identity
    was = {key: identity.get(key) for key in changed_keys(identity, current)}
    if not was:
        return {}
    same_rates, same_precisions = _same_rates(record, job), _same_precisions(record, job)
    unfelt = {"precision"} if same_precisions else set()
    if same_rates:
        unfelt |= {key for key in was if key.startswith("schedule.")}
        unfelt |= HORIZON if same_precisions or "precision" in was else set()
    if "precision" in was:
        unfelt |= {key for key, old in was.items() if key.startswith("fp8_config.") and None in (old, current.get(key))}
    return {key: old for key, old in was.items() if key not in unfelt}


def _same_rates(record: Mapping[str, Any], job: Job) -> bool:
    """Whether the present schedule and horizon give the checkpoint's steps the rates that they had, of one largest rate."""
    recipe, horizon = job.recipe, record["progress"]["steps"]
    if (found := schedule_of(record["identity"])) is None:
        return False
    settings, _ = found
    return all(
        schedule.learning_rate(step, settings, recipe.optimizer, horizon)
        == schedule.learning_rate(step, recipe.schedule, recipe.optimizer, job.plan.steps)
        for step in range(record["progress"]["step"])
    )


def _same_precisions(record: Mapping[str, Any], job: Job) -> bool:
    """Whether the checkpoint's steps would be of the same precisions by the present schedule of these."""
    progress = record["progress"]
    try:
        saved = _until_step(record["identity"].get("precision"), progress["steps"], progress["step"])
        return saved == _until_step(job.identity["precision"], job.plan.steps, progress["step"])
    except (InputError, TypeError):  # the checkpoint is of a version with other rules
        return False


def _until_step(setting: Any, steps: int, step: int) -> list[tuple[int, str]]:
    """The phases of a `precision` in a horizon of `steps`, as far as `step`: the last step of each, and its name."""
    phases = phases_of(setting)
    ends = last_steps([until for until, _ in phases], steps)
    begins = [0, *ends]
    return [(min(end, step), name) for begin, end, (_, name) in zip(begins, ends, phases, strict=False) if begin < step]
