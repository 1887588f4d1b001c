"""Going on where a run was: which checkpoint, whether it belongs to this training, and its state put back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from packing.errors import InputError
from pretrain import optimizer
from pretrain.assembly import Assembly
from pretrain.checkpoint import Checkpoints
from pretrain.exact_weights import Weights, convert, describe_conversion, local_part
from pretrain.metrics.health import Health
from pretrain.precision.recipes import WEIGHT_DTYPES
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
    notes = load_weights(source, checkpoints, job.recipe.weights, assembly)
    optimizer.set_updates_done(assembly.optimizer, state.step - state.skipped_steps)
    health.load_state_dict(source.record["health"])
    checkpoints.set_aside_newer(state.step)
    return state, [f"resumed from {source.path} at step {state.step}", *source.notes, *notes]


def load_weights(source: Source, checkpoints: Checkpoints, mode: Weights, assembly: Assembly) -> list[str]:
    """Copy weights and moments into place, whatever mode of `weights:` they were saved in; returns what the user should know.

    Of another mode, the weights are read as they were stored, become FP32 masters, and are stored again in this run's `mode`.
    """
    saved: Weights = source.record["identity"]["weights"]
    if saved == mode:
        return checkpoints.load(source.path, assembly.tensors, assembly.optimizer_tensors).notes
    parameters = dict(assembly.hf.named_parameters())
    stored = {name: torch.empty_like(p, dtype=getattr(torch, WEIGHT_DTYPES[saved])) for name, p in parameters.items()}
    moments = {key: tensor for key, tensor in assembly.optimizer_tensors.items() if not key.startswith("remainder/")}
    remainders = {f"remainder/{name}": torch.empty_like(p, dtype=torch.int16) for name, p in parameters.items()}
    loaded = checkpoints.load(source.path, assembly.tensors | stored, moments | (remainders if saved == "bf16_exact" else {}))
    for name, parameter in parameters.items():
        remainder = local_part(remainders[f"remainder/{name}"]) if saved == "bf16_exact" else None
        master, _ = convert(local_part(stored.pop(name)), remainder, "fp32")
        assembly.optimizer.set_master(parameter, master)
    return [describe_conversion(saved, mode), *loaded.notes]
