"""Going on where a run was: which checkpoint, whether it belongs to this training, and its state put back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packing.errors import InputError
from pretrain import optimizer
from pretrain.assembly import Assembly
from pretrain.checkpoint import Checkpoints
from pretrain.metrics.health import Health
from pretrain.preflight import Job
from pretrain.state import TrainState, check_same_training


@dataclass(frozen=True)
class Source:
    """A checkpoint that may be continued."""

    path: Path
    record: dict[str, Any]  # its state.json
    notes: list[str]  # what differs between its recipe and the present one


def find_source(checkpoints: Checkpoints, wanted: str, job: Job, accept_changes: bool) -> Source | None:
    """The checkpoint to go on from, `wanted` ("auto" or a path); None where there is none yet. Costs no more than its hashes.

    Raises InputError where it belongs to another training and `accept_changes` is not set, and where all are damaged: starting
    over in their place would bury what may still be rescued.
    """
    path = checkpoints.newest() if wanted == "auto" else Path(wanted)
    if path is None:
        if checkpoints.damaged:
            raise InputError(
                f"{checkpoints.folder}: every checkpoint is damaged; name another `run_dir` to train from the beginning"
            )
        return None
    record = checkpoints.read_state(path)
    changes = check_same_training(record, job.identity, path, accept_changes)
    return Source(path, record, [f"the recipe has changed: {change}" for change in changes])


def restore(
    source: Source | None, checkpoints: Checkpoints, job: Job, assembly: Assembly, health: Health
) -> tuple[TrainState, list[str]]:
    """Put the checkpoint's weights, moments and counters back; returns the state and what the user should know of it."""
    if source is None:
        return TrainState(steps=job.plan.steps), []
    state = TrainState.from_record(source.record, job.plan.steps, source.path)
    loaded = checkpoints.load(source.path, assembly.tensors, assembly.optimizer_tensors)
    optimizer.set_updates_done(assembly.optimizer, state.step - state.skipped_steps)
    health.load_state_dict(source.record["health"])
    checkpoints.set_aside_newer(state.step)
    return state, [f"resumed from {source.path} at step {state.step}", *source.notes, *loaded.notes]
