"""Resuming: which checkpoint, whether it belongs to this training, and its state copied back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor

from foundation.errors import InputError
from foundation.reading import load_json
from foundation.settings import parse
from foundation.units import plural
from pretrain.checkpoint.checkpoint import Checkpoints, require_shared
from pretrain.checkpoint.manifest import MANIFEST, TensorEntry, read_manifest
from pretrain.checkpoint.shards import mismatches
from pretrain.checkpoint.state import Change, Past, TrainState, changed_keys, check_same_training, differences
from pretrain.metrics.health import Health
from pretrain.metrics.run_folder import AUDIT_FILE, METRICS_FILE, SUMMARY_FILE, RunFolder
from pretrain.metrics.run_record import NoStepYet, is_step, read_metrics, read_run
from pretrain.model.distributed import local_part, refused_together, require_same_on_all_ranks
from pretrain.model.huggingface import named_tensors, weights_fingerprint
from pretrain.optimizer.adamw import set_updates_done
from pretrain.optimizer.adamw_update import convert_weight, describe_conversion
from pretrain.plan.preflight import Job
from pretrain.precision.linear import PREFIX
from pretrain.precision.schedule import in_phases, last_steps, phases_of
from pretrain.precision.settings import WEIGHT_DTYPES, ActivePrecision, Weights
from pretrain.run.assembly import REHEARSALS, Assembly
from pretrain.settings.config import begin_of, identity_of
from pretrain.settings.recipe import Recipe

BEGIN_WITH = "`train.begin_with`: "  # before what is wrong with its checkpoint


# ── Which checkpoint ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint from which a run goes on: one to resume, or another run's to begin with."""

    path: Path
    record: dict[str, Any]  # its state.json
    notes: list[str]  # what differs between its recipe and the present one
    begins: bool = False  # it is that of `train.begin_with`
    past: Past = field(default_factory=Past)  # of the run that goes on from it


def find_resume_point(
    checkpoints: Checkpoints, wanted: str, job: Job, accept_changes: bool, *, look_only: bool = False
) -> ResumePoint | None:
    """The checkpoint to continue, `wanted` ("auto" or a path); where there is none yet that of another run with which the recipe
    begins (`train.begin_with`), or None. `look_only`: for a plan, which changes nothing on the disk.

    Raises InputError where it does not exist, where it belongs to another training and `accept_changes` is not set, and where all
    checkpoints are damaged: a new run in their place would bury what may still be rescued.
    """
    path = checkpoints.newest(look_only=look_only) if wanted == "auto" else Path(wanted)
    if path is None and checkpoints.damaged:
        raise InputError(f"{checkpoints.folder}: every checkpoint is damaged; name another `run_dir` to train from the beginning")
    begins = path is None
    path = path or begin_of(job.recipe)
    if path is None:
        return None
    named = BEGIN_WITH if begins else "" if wanted == "auto" else "--resume "
    try:
        record = checkpoints.read_state(path)
    except InputError as error:
        raise InputError(f"{named}{error}; name a step-* folder of a run's `checkpoints`") from None
    changes = check_same_training(record, job.identity, path, accept_changes or begins)
    if misfits := mismatches(read_manifest(path).model, named_tensors(job.shapes)):
        raise InputError(
            f"{named}{path}: does not fit this run's model: {'; '.join(misfits[:2])}; name a checkpoint of this model"
        )
    notes = [f"the recipe has changed: {each}" for each in changes if not (begins and each.startswith("train.begin_with:"))]
    return ResumePoint(path, record, notes, begins, past_of(path, record, job, begins=begins, own=checkpoints.owns(path)))


def require_steps_to_come(source: ResumePoint | None, checkpoints: Checkpoints, job: Job) -> None:
    """InputError where the run folder holds what another training has written, and where nothing can be trained from `source` on:
    it has no place in this run's stream, is at the horizon already, or its steps were of other sizes and the horizon counts
    tokens."""
    own = source is not None and checkpoints.owns(source.path)
    if not own:
        _require_own_records(job)
    if source is None:
        return
    named = BEGIN_WITH if source.begins else "--resume "
    if of_another_stream(source.record, job) and not source.begins:
        raise InputError(
            f"{source.path}: was trained on other text, sources or shares than this stream has; set another `run_dir`, and "
            f"`train.begin_with: {source.path}` to begin this stream with its weights"
        )
    progress, train, plan = source.record["progress"], job.recipe.train, job.plan
    step, tokens = progress["step"], progress["tokens"]
    key = next(key for key in ("steps", "tokens", "epochs") if getattr(train, key) is not None)
    if key != "steps" and tokens != step * plan.tokens_per_step:
        steps = step + max(math.ceil((plan.total_tokens - tokens) / plan.tokens_per_step), 0)
        raise InputError(
            f"{named}{source.path}: its {plural(step, 'step')} were of another `batch.tokens`, so `train.{key}` does not say at "
            f"which step to end; set `train.steps: {steps}` in its place, which ends the run after as many tokens"
        )
    if step >= plan.steps and not own:
        raise InputError(
            f"{named}{source.path}: is from step {step:,}, and `train.{key}` ends the run at {plan.steps:,}; set a longer one"
        )


def _require_own_records(job: Job) -> None:
    """InputError where a start that goes on from none of the run folder's checkpoints would write over what stands there: the
    model of a finished run, or the steps of another training."""
    for end in (job.run_dir / "final", job.run_dir / SUMMARY_FILE):
        if end.exists():
            raise InputError(
                f"{end}: is of a finished run that has no checkpoint to go on from; set another `run_dir`, or move it away"
            )
    metrics = job.run_dir / METRICS_FILE
    if not metrics.exists():
        return
    with suppress(NoStepYet):
        run = read_run(job.run_dir)
        trained = identity_of(parse(Recipe, run.config, str(run.path / "config.yaml")), run.data_fingerprint or "")
        ours = identity_of(job.recipe, job.data.train.fingerprint) | job.source_config
        if changed := changed_keys(trained | run.source_config, ours):
            raise InputError(f"{metrics}: is of another training ({', '.join(changed)}); set another `run_dir`, or move it away")


def look_for_resume_point(wanted: str, job: Job, accept_changes: bool) -> tuple[Checkpoints, ResumePoint | None]:
    """Returns the checkpoints of the run folder, and what `find_resume_point` finds among them; changes nothing on the disk."""
    checkpoints = Checkpoints(job.run_dir / "checkpoints", job.recipe.checkpoint.keep)
    return checkpoints, find_resume_point(checkpoints, wanted, job, accept_changes, look_only=True)


def where_to_resume(
    job: Job, folder: RunFolder, wanted: str, accept_changes: bool
) -> tuple[Job, Checkpoints, ResumePoint | None]:
    """The checkpoint from which the run goes on, among the checkpoints of its folder, and the job as it goes on from there.
    Collective. InputError as `find_resume_point` and `require_steps_to_come`."""
    require_shared(folder.path)
    checkpoints = Checkpoints(folder.checkpoints, job.recipe.checkpoint.keep, before=job.plan.before_decay)
    source = find_resume_point(checkpoints, wanted, job, accept_changes)
    refused_together(lambda: require_steps_to_come(source, checkpoints, job))
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
        return source.record["loss_chunk"]
    return job.plan.loss.tokens_at_once


# ── What the checkpoint's steps were trained under ────────────────────────────────────────────────────────────────────────────


def of_another_stream(record: Mapping[str, Any], job: Job) -> bool:
    """Whether this run's packs are streamed, and the checkpoint has no place in that text: it begins at its first pack."""
    return job.data.stream is not None and record["identity"].get("data.fingerprint") != job.identity["data.fingerprint"]


def shift_of(record: Mapping[str, Any], job: Job) -> int:
    """`TrainState.shift` with which the text goes on where the checkpoint's ended, however many packs a step takes now."""
    identity, progress = record["identity"], record["progress"]
    steps = progress["step"] + progress["left_out"]
    if of_another_stream(record, job):
        return -steps * job.plan.packs_per_step
    packs = steps * (identity["batch.tokens"] // identity["data.length"]) + progress["shift"]
    return -(-packs * identity["data.length"] // job.recipe.data.length) - steps * job.plan.packs_per_step


def precisions_around(record: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Returns two precisions of the schedule that a checkpoint was saved under: that of its last step, whose histories can be
    used further, and that of the step to come; None for both where there was no schedule."""
    phases, progress = phases_of(record["identity"].get("precision")), record["progress"]
    if len(phases) < 2:
        return None, None
    begins = [0, *last_steps([until for until, _ in phases], progress["steps"])]

    def precision_of(step: int) -> str:
        return [name for begin, (_, name) in zip(begins, phases, strict=False) if begin < step][-1]

    return precision_of(max(progress["step"], 1)), precision_of(progress["step"] + 1)


def precisions_so_far(job: Job, record: Mapping[str, Any], past: Past) -> dict[int, str]:
    """Returns the precisions of the steps in the run folder's metrics up to the checkpoint's, each under the first step that it
    computed. Empty for a run that has only ever had one precision."""
    changes = [(change.step, change.was["precision"]) for change in past.changed if "precision" in change.was]
    if not (changes or job.plan.phases):
        return {}

    def precision_of(line: Mapping[str, Any]) -> str:
        earlier = next((was for until, was in changes if line["step"] <= until and isinstance(was, str)), None)
        return line.get("precision") or earlier or job.plan.active_after(line["step"] - 1).precision.name

    metrics = read_metrics(job.run_dir) if (job.run_dir / METRICS_FILE).exists() else []
    steps = [line for line in metrics if is_step(line) and line["step"] <= record["progress"]["step"]]
    return in_phases({line["step"]: precision_of(line) for line in steps})


def new_past(job: Job, accelerator: Accelerator) -> Past:
    """The past of a run that begins here: the hash of the weights in the folder of `model.source`, which only the main process
    reads, as all ranks have begun with the same. Collective; InputError on all of them where a file cannot be read."""
    main, settings = accelerator.is_main_process, job.recipe.model
    fingerprint = refused_together(lambda: weights_fingerprint(settings) if main else None)
    return Past(source_weights=broadcast_object_list([fingerprint])[0])


def past_of(path: Path, record: Mapping[str, Any], job: Job, *, begins: bool, own: bool) -> Past:
    """The past of the run that goes on from `path`: what the checkpoint says of it, and what `job` has changed since.

    A run that `begins` with another's checkpoint keeps the hash of its manifest: another checkpoint may come to lie at the same
    path. `own`: the checkpoint lies in the run's folder, whose metrics have its rollbacks.
    """
    progress, past = record["progress"], Past.model_validate(record["past"])
    left_out = past.left_out if own else progress["left_out"]
    if begins:
        return Past(begin_with=sha256((path / MANIFEST).read_bytes()).hexdigest(), left_out=left_out)
    was = {key: record["identity"].get(key) for key in changed_keys(record["identity"], job.identity)}
    change = [Change(step=progress["step"], was=was)] if was else []
    return past.model_copy(update={"changed": [*past.changed, *change], "left_out": left_out})


# ── Its state copied back ─────────────────────────────────────────────────────────────────────────────────────────────────────


def begin_stream(source: ResumePoint | None, job: Job) -> None:
    """Have packs made from where `source` was in the stream; from its beginning where there is no source, or one of another
    stream. Does nothing for packs that were prepared."""
    if job.data.stream is not None:
        continues = source is not None and not of_another_stream(source.record, job)
        job.data.stream.begin(source.record.get("stream", {}) if continues else None)


def take_up(
    source: ResumePoint,
    checkpoints: Checkpoints,
    job: Job,
    assembly: Assembly,
    health: Health,
    accelerator: Accelerator,
) -> tuple[TrainState, list[str]]:
    """Put the run's memory and its stream into the state of `source`, which all ranks must have read alike; returns the counters,
    and notes for the user. Collective; `Checkpoints.abandon_newer` is left to do."""
    begin_stream(source, job)
    state = TrainState.from_record(source.record, job.plan.steps)
    state.shift = shift_of(source.record, job)
    scales, scale_notes = scales_to_load(source.path, assembly.context.saved_state())
    notes = scale_notes + load_weights(source, checkpoints, job.recipe.weights, assembly, scales)
    set_updates_done(assembly.optimizer, state.step - state.skipped_steps)
    health.load_state_dict(source.record["health"], anew=source.begins)
    require_same_on_all_ranks(accelerator, assembly.tensors | assembly.state_tensors, f"all must read the same {source.path}")
    return state, [f"resumed from {source.path} at step {state.step}", *source.notes, *notes]


def keep_findings(source: ResumePoint, assembly: Assembly, job: Job) -> None:
    """Let the audit of a run that goes on from `source` keep what earlier starts alone have found: parity, which is looked at
    before a run's first step; the step that confirmed a precision of no step to come; and precisions that this start lacks."""
    step, written = source.record["progress"]["step"], source.path.absolute().parent.parent / AUDIT_FILE
    coming = job.plan.active_after(step).precision.name
    of_precision: dict[str, dict[str, Any]] = {}
    with suppress(OSError, ValueError):  # none, or damaged: what it held is not known
        earlier = load_json(written)
        of_precision = earlier.get("precisions") or {earlier["effective"]: earlier}
    for name, each in assembly.precisions.items():
        known = of_precision.get(name, {})
        if "parity" in known:
            when = f"before the run's first step; its start from step {step:,} did not look again"
            each.found["parity"] = known["parity"] | {"when": when}
        elif job.recipe.parity:
            why = f"it is checked before a run's first step only, and {written} has no record of that for {name}"
            each.found["parity"] = {"source": "this run", "left_out": why}
        if (name != coming or step >= job.plan.steps) and known.get("confirmed_in_step", math.inf) <= step:
            each.found["confirmed_in_step"] = known["confirmed_in_step"]
    of_each = {key for each in assembly.precisions.values() for key in each.found} | {"confirmed_in_step"}
    for name in set(job.plan.course.values()) & of_precision.keys() - assembly.precisions.keys():
        assembly.audit["precisions"][name] = {key: value for key, value in of_precision[name].items() if key in of_each}
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
    missing = len(wanted) - len(fits)
    note = f"{missing} of {len(wanted)} tensors of delayed scaling are not in the checkpoint: {REHEARSALS} packs fill them"
    return fits | rest, [note] if missing else []


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
        key, default = "fp8_config.fp8_format", active.precision.options["fp8_format"]
        loss = {name: value for name, value in identity.items() if name == "batch.tokens" or name.startswith("loss.")}
        return loss | {key: identity.get(key) or default}

    changed = differences(size_of_gradients(record["identity"]), size_of_gradients(job.identity))
    return [name for name in histories if not changed or "/backward/" not in name], "; ".join(changed)


def _histories_in(path: Path) -> dict[str, TensorEntry]:
    return {name: entry for name, entry in read_manifest(path).optimizer.items() if name.startswith(PREFIX)}


def _fitting(saved: Mapping[str, TensorEntry], wanted: Mapping[str, Tensor]) -> list[str]:
    """The names of those wanted that are saved in the same shape."""
    return [name for name, tensor in wanted.items() if name in saved and tuple(saved[name].shape) == tuple(tensor.shape)]
