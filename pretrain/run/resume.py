"""Resuming: which checkpoint, whether it belongs to this training, and its state copied back."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from foundation.errors import InputError
from foundation.files import REPLACED, name_aside, replace_file
from foundation.reading import load_json, load_object, read_lines, reason_of
from foundation.settings import load_yaml, parse
from foundation.units import plural
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.disks import find_disks, look_at_disks
from pretrain.checkpoint.folders import set_aside, step_folder, step_folders
from pretrain.checkpoint.manifest import NOT_HERE, TensorEntry, read_manifest
from pretrain.checkpoint.state import Past, TrainState, changed_keys, check_record, check_same_training, differences
from pretrain.metrics.health import Health
from pretrain.metrics.recorded import RecordedAudit, RecordedEnvironment
from pretrain.metrics.run_folder import (
    AUDIT_FILE,
    METRICS_FILE,
    PROFILE_FILE,
    STATISTICS_FILE,
    SUMMARY_FILE,
    TENSORBOARD,
    TRACKERS_FILE,
    RunFolder,
)
from pretrain.metrics.run_record import RunRecord, read_finished, read_metrics
from pretrain.metrics.tracked_run import TAKEN_BACK
from pretrain.metrics.trackers import last_steps, read_kept
from pretrain.model.distributed import local_part, refused_together, require_same_on_all_ranks
from pretrain.model.huggingface import named_tensors, weights_fingerprint
from pretrain.optimizer.adamw import set_updates_done
from pretrain.optimizer.adamw_update import convert_weight, describe_conversion
from pretrain.plan.preflight import Job
from pretrain.plan.tokenizer import check_same_tokenizer
from pretrain.precision.linear import PREFIX
from pretrain.precision.registry import WEIGHT_DTYPES, Weights
from pretrain.precision.settings import ActivePrecision
from pretrain.run.assembly import REHEARSALS, Assembly
from pretrain.run.changes import (
    extending_a_decayed_run,
    last_before,
    of_another_stream,
    other_text,
    past_of,
    precision_has_moved,
    precisions_around,
    precisions_so_far,
    rate_has_moved,
    shift_of,
    steps_so_far,
)
from pretrain.settings.config import begin_of, identity_of
from pretrain.settings.recipe import USUAL_CHUNK, Recipe

_log = logging.getLogger(__name__)
BEGIN_WITH = "`train.begin_with`: "  # before what is wrong with its checkpoint


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint from which a run goes on: one to resume, or another run's to begin with."""

    path: Path
    record: dict[str, Any]  # its state.json
    notes: list[str]  # what differs between its recipe and the present one
    begins: bool = False  # it is that of `train.begin_with`: another training's is what was asked for
    past: Past = field(default_factory=Past)  # of the run that goes on from it
    warnings: list[str] = field(default_factory=list)  # which differences the user should look at


def find_resume_point(
    checkpoints: Checkpoints, wanted: str, job: Job, accept_changes: bool, *, look_only: bool = False
) -> ResumePoint | None:
    """The checkpoint to continue, `wanted` ("auto" or a path); where there is none yet that of another run with which the recipe
    begins (`train.begin_with`), or None. `look_only`: for a plan, which changes nothing on the disk.

    Raises InputError where it does not exist, where it belongs to another training and `accept_changes` is not set, and where all
    checkpoints are damaged: a new run in their place would bury what may still be rescued.
    """
    path = _to_resume(checkpoints, wanted, look_only=look_only)
    begins = path is None
    if begins:
        path = begin_of(job.recipe)
        if path is None:
            return None
        named, remedy = BEGIN_WITH, _to_begin_with(path)
        if not checkpoints.is_there(path):
            raise InputError(f"{named}{path}: no such checkpoint; {remedy}")
    else:
        named, remedy = "", "--resume takes a step-* folder of a run's `checkpoints`, or auto, which finds the newest intact one"
    try:
        record = checkpoints.read_state(path)
        check_record(record, path)
    except InputError as error:
        raise InputError(f"{named}{error}; {remedy}") from None
    hint = extending_a_decayed_run(path, record, job, begins=begins)
    try:  # who begins with a checkpoint asks for another training
        changes = check_same_training(record, job.identity, path, accept_changes or begins)
    except InputError as error:
        raise InputError("\n".join(filter(None, [str(error), hint]))) from None
    if misfits := checkpoints.misfits(path, named_tensors(job.shapes)):
        more = f", and {len(misfits) - 2} more" if len(misfits) > 2 else ""
        settings = [change for change in changes if change.startswith("model.")]
        because = f" ({'; '.join(settings[:2])})" if settings else ""
        fits = "name a checkpoint of this model" if begins else "resume with the recipe it was made by, or set another `run_dir`"
        raise InputError(f"{named}{path}: does not fit this run's model{because}: {'; '.join(misfits[:2])}{more}; {fits}")
    notes = [f"the recipe has changed: {each}" for each in changes if not (begins and each.startswith("train.begin_with:"))]
    moved = None if hint else rate_has_moved(record, job)
    notes += filter(None, [*other_text(record, job), moved])
    warnings = [*filter(None, [precision_has_moved(record, job), hint])]
    past = past_of(path, record, job, begins=begins, own=checkpoints.owns(path))
    return ResumePoint(path, record, notes, begins, past, warnings)


def _to_resume(checkpoints: Checkpoints, wanted: str, *, look_only: bool) -> Path | None:
    """The checkpoint that `wanted` names, or for "auto" the run's newest; None where it has none yet. InputError as above."""
    path = checkpoints.newest(look_only=look_only) if wanted == "auto" else Path(wanted)
    if path is not None and not checkpoints.is_there(path):
        there = ", ".join(folder.name for folder in step_folders(checkpoints.folder)) or "no checkpoint"
        raise InputError(
            f"--resume {path}: no such checkpoint; {checkpoints.folder} holds {there}; name a step-* folder, or auto"
        )
    if path is None and checkpoints.damaged:
        newest, problems = max(checkpoints.damaged.items())
        if all(NOT_HERE in problem for problem in problems):
            raise InputError(f"checkpoint {newest}: {'; '.join(problems)}; then start the same command again")
        raise InputError(f"{checkpoints.folder}: every checkpoint is damaged; name another `run_dir` to train from the beginning")
    return path


def _to_begin_with(path: Path) -> str:
    """What `train.begin_with` may name in place of `path`: what lies in it as a run's folder, or beside it."""
    folders = (path, path / "checkpoints", path.parent, path.parent / "checkpoints")
    there = next(filter(None, ([each for each in step_folders(folder) if each != path] for folder in folders)), [])
    listed = f": {there[0].parent} holds {', '.join(each.name for each in there[:8])}" if there else ""
    return (
        f"name a step-* folder of another run's `checkpoints`, whose `checkpoint.every` and `checkpoint.keep` decide which there "
        f"are{listed}"
    )


def require_steps_to_come(source: ResumePoint | None, checkpoints: Checkpoints, job: Job) -> None:
    """InputError where nothing can be trained from a checkpoint on: it has no place in this run's stream, and is none to begin
    with; it is from another folder and at the horizon already, so that the run would have no step of its own to tell of; or its
    steps were of other sizes, and the horizon counts tokens; or the run folder has a curve of its own that is not the
    checkpoint's. And where a run would begin over one that is finished, whose checkpoints somebody has removed."""
    if (source is None or source.begins) and (end := _end_of_a_run(job)):
        raise InputError(
            f"{end} of a finished run, of which {checkpoints.folder} has no checkpoint to go on from; training anew would write "
            f"over it and {METRICS_FILE}; set another `run_dir`, or move {job.run_dir} away"
        )
    if source is None:
        return
    if of_another_stream(source.record, job) and not source.begins:
        raise InputError(
            f"{source.path}: was trained on other text, sources or shares than this stream has, and has no place in it; set "
            f"another `run_dir`, and `train.begin_with: {source.path}` to begin this stream with its weights, or "
            "`data.streaming: false` to prepare all packs before the run"
        )
    progress, train, plan = source.record["progress"], job.recipe.train, job.plan
    step, tokens = progress["step"], progress["tokens"]
    of_this_curve = checkpoints.owns(source.path) and REPLACED not in source.path.name  # what was set aside has its own
    if not of_this_curve and not _goes_on_here(source, job.run_dir):
        raise InputError(
            f"{BEGIN_WITH if source.begins else '--resume '}{source.path}: is of another run than the steps in "
            f"{job.run_dir / METRICS_FILE}, whose curve would go on with it; set another `run_dir`"
        )
    key = next(key for key in ("steps", "tokens", "epochs") if getattr(train, key) is not None)
    named, asked = BEGIN_WITH if source.begins else "", f"`train.{key}: {getattr(train, key)}`"
    if key != "steps" and tokens != step * plan.tokens_per_step:
        steps = step + max(math.ceil((plan.total_tokens - tokens) / plan.tokens_per_step), 0)
        raise InputError(
            f"{named}{source.path}: {asked} does not say at which step to end: this checkpoint's {plural(step, 'step')} took "
            f"{tokens:,} tokens, and as many steps of `batch.tokens: {plan.tokens_per_step}` take "
            f"{step * plan.tokens_per_step:,}; set `train.steps: {steps}` in its place, which ends the run after as many tokens"
        )
    if step >= plan.steps and not checkpoints.owns(source.path):
        horizon = f"this run's horizon, {asked}, is {plural(plan.steps, 'step')}"
        raise InputError(f"{named}{source.path}: is from step {step:,}, and {horizon}: nothing is left; set a longer one")


def require_its_tokenizer(source: ResumePoint | None, job: Job) -> None:
    """InputError where the run that goes on was trained with another tokenizer than there is now: packs of mere token ids fit
    any, and `final/` would get the wrong one."""
    if source is None or source.begins:
        return
    trained_with = None
    with suppress(OSError, ValueError):  # no record, or a damaged one
        written = load_json(RunFolder(source.path.absolute().parent.parent, owner=False).environment)
        trained_with = RecordedEnvironment.model_validate(written).tokenizer_fingerprint
    try:
        check_same_tokenizer(job.recipe.data, job.recipe.model, job.data, trained_with)
    except InputError as error:
        raise InputError(
            f"{source.path}: its tokenizer is another now: {error}, or set another `run_dir`, with `train.begin_with` to go on "
            "from this checkpoint"
        ) from None


def _end_of_a_run(job: Job) -> str | None:
    """What the run folder has of the end of a run, whatever its recipe was, as the beginning of a message."""
    ends = {"final": "is the model", SUMMARY_FILE: "is the summary"}
    return next((f"{job.run_dir / name}: {what}" for name, what in ends.items() if (job.run_dir / name).exists()), None)


def finished_before(job: Job) -> RunRecord | None:
    """What the run folder holds, where it is this very training and that has reached its end already; else None."""
    run = read_finished(job.run_dir)
    ended = run is not None and run.summary["steps"] == job.plan.steps
    return run if ended and _is_this(run.config, run.data_fingerprint, run.source_config, job) else None


def _is_this(config: dict[str, Any], fingerprint: str | None, source: Mapping[str, Any], job: Job) -> bool:
    """Whether a run of `config`, on data of this `fingerprint`, with a `model.source` that said `source`, is this training."""
    try:
        recipe = parse(Recipe, config, str(job.run_dir / "config.yaml"))
    except InputError:  # another version wrote it
        return False
    ours = identity_of(job.recipe, job.data.train.fingerprint) | job.source_config
    return not changed_keys(identity_of(recipe, fingerprint or "") | source, ours)


def put_other_steps_aside(job: Job, source: ResumePoint | None, step: int, wanted: str) -> None:
    """Keeps under other names what the run folder's files tell of steps that were given up. Call it before newer checkpoints make
    way: where a kill came between, the next start would go on from `step` unasked, and cut those lines. InputError where that
    cannot be written."""
    if source is None or source.begins:
        set_aside_another(job)
    elif wanted != "auto":
        keep_what_is_cut(job, step)


def set_aside_another(job: Job) -> None:
    """Renames to `<name>.replaced-<n>` what another training has left in the run folder, so that neither a file nor a tracker
    takes its steps for this one's. For a run without a checkpoint of its own, where that training came to none either."""
    folder = RunFolder(job.run_dir, owner=False)
    with suppress(InputError):  # there is none, or it is damaged
        read_metrics(job.run_dir)
        environment = load_object(folder.environment, "start the run again to write it")
        told = environment.get("data_fingerprint"), environment.get("source_config", {})
        if _is_this(load_yaml(folder.config), *told, job):  # its steps are trained again
            return
    for name in (METRICS_FILE, STATISTICS_FILE, PROFILE_FILE, TENSORBOARD):
        path = job.run_dir / name
        if path.is_file() and path.stat().st_size == 0:
            path.unlink()
        elif path.exists():
            set_aside(path)


def keep_what_is_cut(job: Job, step: int) -> None:
    """Copy to `<name>.replaced-<n>` what the run folder's files tell of steps after `step`, for a run that the user has sent back
    there: those lines are about to be cut, and what comes may be another training. Says which trackers cannot follow. InputError
    where that cannot be written."""
    for path in (job.run_dir / METRICS_FILE, job.run_dir / STATISTICS_FILE):
        if not path.exists() or max(last_steps(path).values(), default=0) <= step:
            continue
        aside = name_aside(path)
        try:
            replace_file(aside, b"".join(read_lines(path)))
        except OSError as error:
            what = "the steps that are abandoned cannot be kept there"
            raise InputError(f"{aside}: {what}: {reason_of(error)}; make room, or move {path.name} away") from None
        _log.warning("%s holds steps after %d, which are abandoned; they are kept in %s", path, step, aside.name)
    had = max(last_steps(metrics).values(), default=0) if (metrics := job.run_dir / METRICS_FILE).exists() else 0
    given = read_kept(kept_in) if (kept_in := job.run_dir / TRACKERS_FILE).exists() else {}
    for name, entry in given.items():
        # Where a tracker did not end cleanly, `seen` is a lower bound.
        beyond = max(entry["seen"].values(), default=0) > step or (had > step and not entry["complete"])
        if name in job.recipe.log.trackers and name not in TAKEN_BACK and beyond:
            _log.warning(
                "`log.trackers`: %s cannot take back steps after %d and keeps the values that it has; to begin another run "
                "there, stop this one, remove %s and start again",
                name,
                step,
                kept_in,
            )


def nothing_left(job: Job, wanted: str) -> RunRecord | None:
    """The run as it ended, where starting it again has nothing left to do: it has ended without a checkpoint of its last step, as
    `checkpoint.at_end: false` has it, and without one there is nothing to evaluate or to export. None where a checkpoint is
    `wanted` by its name: its steps are to be trained again."""
    saved = step_folder(job.run_dir / "checkpoints", job.plan.steps).exists()
    return None if job.recipe.checkpoint.at_end or saved or wanted != "auto" else finished_before(job)


def said_of_the_end(job: Job) -> str:
    """What to tell of a run that has `nothing_left`."""
    return (
        f"{job.run_dir}: the run has finished after {plural(job.plan.steps, 'step')}, and is not trained again: "
        "`checkpoint.at_end: false` wants no model of it. To train it once more set another `run_dir`, or move this one away"
    )


def _goes_on_here(source: ResumePoint, run_dir: Path) -> bool:
    """Whether the metrics in `run_dir` tell of no step up to the checkpoint's, or of those that it has seen: its last loss."""
    before = steps_so_far(run_dir, source.record)
    losses = [line["loss"] for line in before if line["loss"] is not None and not line.get("skipped")]
    return not losses or not source.record["health"]["losses"] or losses[-1] == source.record["health"]["losses"][-1]


def look_for_resume_point(wanted: str, job: Job, accept_changes: bool) -> tuple[Checkpoints, ResumePoint | None]:
    """Returns the checkpoints of the run folder, and what `find_resume_point` finds among them; changes nothing on the disk."""
    disks = look_at_disks(job.run_dir)
    checkpoints = Checkpoints(job.run_dir / "checkpoints", job.recipe.checkpoint.keep, disks=disks)
    return checkpoints, find_resume_point(checkpoints, wanted, job, accept_changes, look_only=True)


def planned_resume(job: Job, wanted: str, accept_changes: bool) -> tuple[Job, str | None, list[str]]:
    """Returns, for --plan, the job as it would go on, a text about what it would go on from, None where it would begin, and
    warnings. InputError where the run would refuse."""
    if job.data is None:  # packs that are not prepared belong to no checkpoint yet
        return job, None, []
    if nothing_left(job, wanted):
        return job, said_of_the_end(job), []
    checkpoints, source = look_for_resume_point(wanted, job, accept_changes)
    require_steps_to_come(source, checkpoints, job)
    require_its_tokenizer(source, job)
    if source is None:
        return job, None, []
    return going_on(job, source), "\n".join([f"would resume from {source.path}", *source.notes]), source.warnings


def where_to_resume(
    job: Job, folder: RunFolder, wanted: str, accept_changes: bool
) -> tuple[Job, Checkpoints, ResumePoint | None]:
    """The checkpoint from which the run goes on, among the checkpoints of its folder, and the job as it goes on from there.
    Collective. InputError as `find_resume_point` and `require_steps_to_come`."""
    disks, keep = find_disks(folder.path, folder.take), job.recipe.checkpoint.keep
    checkpoints = Checkpoints(folder.checkpoints, keep, disks=disks)
    source = find_resume_point(checkpoints, wanted, job, accept_changes)
    require_steps_to_come(source, checkpoints, job)
    require_its_tokenizer(source, job)
    decays = (job.plan.before_decay, source.past.left_decay if source else None)
    checkpoints.early = lambda folders: {last_before(decay, folders) for decay in decays}
    return going_on(job, source).with_chunk(chunk_of(job, source)), checkpoints, source


def going_on(job: Job, source: ResumePoint | None) -> Job:
    """The job, with what the run folder's steps have computed in before `source`, from which the run goes on."""
    if source is None:
        return job
    ran = {} if source.begins else precisions_so_far(job, source.record, source.past)
    return job.after(source.record["progress"]["step"], ran, source.record["progress"]["tokens"])


def chunk_of(job: Job, source: ResumePoint | None) -> int:
    """Tokens of the loss at once: the recipe's, or where that is `auto` those that the run began with, so that sums keep their
    order; of a fresh run, what its memory allows."""
    if job.recipe.loss.chunk == "auto" and source:
        return source.record.get("loss_chunk", USUAL_CHUNK)
    return job.plan.loss.tokens_at_once


def new_past(job: Job, accelerator: Accelerator) -> Past:
    """What a run that begins here keeps: the hash of the weights in the folder of `model.source`, which only the main process
    reads, as all ranks have begun with the same. Collective; InputError on all of them where a file cannot be read."""
    main, settings = accelerator.is_main_process, job.recipe.model
    found = refused_together(lambda: weights_fingerprint(settings) if main else None)
    return Past(source_weights=broadcast_object_list([found])[0])


def begin_stream(source: ResumePoint | None, job: Job) -> None:
    """Have packs made from where `source` was in the stream; from its beginning where there is no source, or one of another
    stream. Does nothing for packs that were prepared."""
    if job.data.stream is not None:
        known = source is not None and not of_another_stream(source.record, job)
        job.data.stream.begin(source.record.get("stream", {}) if known else None)


def take_up(
    source: ResumePoint,
    checkpoints: Checkpoints,
    job: Job,
    assembly: Assembly,
    health: Health,
    accelerator: Accelerator,
) -> tuple[TrainState, list[str]]:
    """Put the run's memory and its stream into the state of `source`, which all ranks must have read alike; returns what
    `restore` does. Collective; `Checkpoints.set_aside_newer` is left to do."""
    begin_stream(source, job)
    state, notes = restore(source, checkpoints, job, assembly, health)
    require_same_on_all_ranks(accelerator, assembly.tensors | assembly.state_tensors, f"all must read the same {source.path}")
    return state, notes


def restore(
    source: ResumePoint, checkpoints: Checkpoints, job: Job, assembly: Assembly, health: Health
) -> tuple[TrainState, list[str]]:
    """Copy the checkpoint's weights, moments and counters back; returns the state, and notes about it for the user."""
    state = TrainState.from_record(source.record, job.plan.steps, source.path)
    state.shift = shift_of(source.record, job)
    scales, scale_notes = scales_to_load(source.path, assembly.context.saved_state())
    notes = scale_notes + load_weights(source, checkpoints, job.recipe.weights, assembly, scales)
    set_updates_done(assembly.optimizer, state.step - state.skipped_steps)
    health.load_state_dict(source.record["health"], anew=source.begins)
    return state, [f"resumed from {source.path} at step {state.step}", *source.notes, *notes]


def renamed_source(source: ResumePoint, checkpoints: Checkpoints) -> ResumePoint:
    """Returns `source`, from which the run goes on now; one of its own that was set aside gets its step's name back."""
    if source.begins or REPLACED not in source.path.name or not checkpoints.owns(source.path):
        return source
    return replace(source, path=checkpoints.take_back(source.path, source.record["progress"]["step"]))


def keep_findings(source: ResumePoint, assembly: Assembly, job: Job) -> None:
    """Let the audit of a run that goes on from `source` keep what earlier starts alone have found: parity, which is looked at
    before a run's first step, which step has confirmed a precision that no next step is in, and all of a precision that
    steps of the run were in and no step to come can be."""
    step, written = source.record["progress"]["step"], source.path.absolute().parent.parent / AUDIT_FILE
    coming = job.plan.active_after(step).precision.name
    of_precision: dict[str, dict[str, Any]] = {}
    with suppress(OSError, ValueError):  # none, or damaged: what it held is not known
        found = load_json(written)
        earlier = RecordedAudit.model_validate(found)
        of_precision = found["precisions"] if earlier.precisions else {earlier.effective or "": found}
    for name, each in assembly.precisions.items():
        known = of_precision.get(name, {})
        if isinstance(parity := known.get("parity"), dict):
            when = f"before the run's first step; its start from step {step:,} did not look again"
            each.found["parity"] = parity | {"when": when}
        elif job.recipe.parity:
            why = f"it is checked before a run's first step only, and {written} has no record of that for {name}"
            each.found["parity"] = {"source": "this run", "left_out": why}
        confirmed = known.get("confirmed_in_step")
        if (name != coming or step >= job.plan.steps) and isinstance(confirmed, int) and confirmed <= step:
            each.found["confirmed_in_step"] = confirmed
    of_each = {key for each in assembly.precisions.values() for key in each.found} | {"confirmed_in_step"}
    for name in set(job.plan.course.values()) & of_precision.keys() - assembly.precisions.keys():
        own = {key: value for key, value in of_precision[name].items() if key in of_each}
        assembly.audit["precisions"][name] = own
    assembly.use(assembly.active)


def load_weights(
    source: ResumePoint, checkpoints: Checkpoints, mode: Weights, assembly: Assembly, scales: Mapping[str, Tensor]
) -> list[str]:
    """Copy weights, moments and `scales` into place, whatever mode of `weights:` they were saved in; returns notes for the user.

    Weights of another mode are read as they were stored, become FP32 masters, and are stored in this run's `mode`.
    """
    saved: Weights = source.record["identity"]["weights"]
    if saved == mode:
        return checkpoints.load(source.path, assembly.tensors, assembly.optimizer_tensors | scales)
    parameters = dict(assembly.hf.named_parameters())
    stored = {name: torch.empty_like(p, dtype=getattr(torch, WEIGHT_DTYPES[saved])) for name, p in parameters.items()}
    moments = {key: tensor for key, tensor in assembly.optimizer_tensors.items() if not key.startswith("remainder/")}
    remainders = {f"remainder/{name}": torch.empty_like(p, dtype=torch.int16) for name, p in parameters.items()}
    kept = moments | scales | (remainders if saved == "bf16_exact" else {})
    notes = checkpoints.load(source.path, assembly.tensors | stored, kept)
    for name, parameter in parameters.items():
        # Plain BF16 keeps the stored weight: the master would round to its neighbour where it lies just between two.
        remainder = local_part(remainders[f"remainder/{name}"]) if saved == "bf16_exact" and mode == "fp32" else None
        master, _ = convert_weight(local_part(stored.pop(name)), remainder, "fp32")
        assembly.optimizer.set_master(parameter, master)
    return [describe_conversion(saved, mode), *notes]


def scales_to_load(path: Path, wanted: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Returns tensors to load the checkpoint's history and scales of delayed scaling into, by name, and notes for the user.

    Those that this run has too, in the same shape, go into `wanted`; the others into tensors that nobody keeps.
    """
    saved = _histories_in(path)
    fits = {name: wanted[name] for name in _fitting(saved, wanted)}
    rest = {name: torch.empty(tuple(entry.shape), dtype=torch.float32) for name, entry in saved.items() if name not in fits}
    notes = []
    if len(fits) < len(wanted):
        notes.append(
            f"{len(wanted) - len(fits)} of {len(wanted)} tensors of delayed scaling are not in the checkpoint: its histories "
            f"of amax are empty, and passes over {REHEARSALS} packs, under the weights from which its steps go on, fill them"
        )
    if rest:
        notes.append(f"{len(rest)} tensors of delayed scaling in the checkpoint have no place in this run")
    return fits | rest, notes


def complete_histories(source: ResumePoint, assembly: Assembly, job: Job, accelerator: Accelerator) -> str | None:
    """Begins anew the histories of the present precision that the checkpoint `source` lacks, or has in a form that is of no use.
    Call it once the checkpoint's weights are loaded: until then histories are of the weights that the model was built with, whose
    gradients are many times as large. Collective.

    Returns what to tell the user of those of no use; None where there are none.
    """
    live = assembly.context.state()
    if not live:
        return None
    fits = _fitting(_histories_in(source.path), live)
    kept, why_not = _of_use(fits, source.record, assembly.active, job)
    if len(kept) < len(live):
        assembly.begin_histories(kept, job, accelerator)
    if len(kept) == len(fits):
        return None
    anew = f"{len(fits) - len(kept)} of {len(live)} tensors of delayed scaling"
    return f"{anew} begin with packs under the checkpoint's weights: {why_not}"


def _of_use(histories: list[str], record: Mapping[str, Any], active: ActivePrecision, job: Job) -> tuple[list[str], str]:
    """Which `histories` of a checkpoint are of its weights, and of gradients such as are to come in `active`; and why not all."""
    before, _ = precisions_around(record)
    if before not in (None, active.precision.name):
        return [], f"the checkpoint's last step was in {before}"  # they wait for their phase, or it is over

    def size_of_gradients(identity: Mapping[str, Any]) -> dict[str, Any]:
        """What the scales of gradients follow: their largest code, the loss, and by how many tokens it is divided."""
        key, default = "fp8_config.fp8_format", active.precision.options["fp8_format"].default
        loss = {name: value for name, value in identity.items() if name == "batch.tokens" or name.startswith("loss.")}
        return loss | {key: identity.get(key) or default}

    changed = differences(size_of_gradients(record["identity"]), size_of_gradients(job.identity))
    return [name for name in histories if not changed or "/backward/" not in name], "; ".join(changed)


def _histories_in(path: Path) -> dict[str, TensorEntry]:
    return {name: entry for name, entry in read_manifest(path).optimizer.items() if name.startswith(PREFIX)}


def _fitting(saved: Mapping[str, TensorEntry], wanted: Mapping[str, Tensor]) -> list[str]:
    """The names of those wanted that are saved in the same shape."""
    return [name for name, tensor in wanted.items() if name in saved and tuple(saved[name].shape) == tuple(tensor.shape)]
