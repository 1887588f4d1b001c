"""A run's state between two steps: the counters a checkpoint holds, what defines the training, and the random seeds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError, field_validator

from foundation.errors import InputError
from foundation.integrity import Size
from foundation.settings import first_mistake
from packing.order import splitmix64
from pretrain.precision.registry import Weights
from pretrain.settings.config import SOURCE

_NOT_ALWAYS = {"left_out", "shift"}  # counters that stand in a checkpoint where they are not 0
Steps = Annotated[int, Field(ge=0, lt=2**40)]  # so that the number of their packs is one of 64 bits


@dataclass
class TrainState:
    """Counters between two optimizer steps. Learning rate and random numbers of a step depend on `step` alone; its packs on
    `step` and on how many steps' packs the run has passed over."""

    steps: Size  # the horizon: the run is finished when `step` reaches it
    step: Steps = 0  # optimizer steps done
    tokens: Size = 0  # tokens seen, padding included, over all ranks
    valid_tokens: Size = 0  # of these, the ones with a label
    skipped_steps: Size = 0  # steps without an update, because a loss or gradient was not finite
    left_out: Steps = 0  # steps' packs that rollbacks have passed over
    # Packs by which the text is further on than so many steps are; below 0 where it is less far. A step has not always had as
    # many packs as now.
    shift: Annotated[int, Field(ge=-(2**62), le=2**62)] = 0

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    @property
    def data_steps(self) -> tuple[int, int]:
        """Which steps of the stream of packs are trained on from here to the horizon: the first, and the end."""
        return self.step + self.left_out, self.steps + self.left_out

    def advance(self, *, tokens: int, valid_tokens: int, skipped: bool = False) -> None:
        """Count one step that took `tokens` over all ranks."""
        self.step += 1
        self.tokens += tokens
        self.valid_tokens += valid_tokens
        self.skipped_steps += skipped

    def record(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """What `state.json` of a checkpoint holds: these counters, and what defines the training. A run that never went back
        writes no `left_out`, and one whose steps were alike no `shift`: versions before these then read the checkpoint, and
        none that would train on other packs."""
        progress = {key: value for key, value in asdict(self).items() if key not in _NOT_ALWAYS or value}
        return {"progress": progress, "identity": dict(identity)}

    @classmethod
    def from_record(cls, record: Mapping[str, Any], steps: int, source: Path) -> TrainState:
        """The state in `record`, with the present recipe's `steps`; InputError naming `source` where it holds none."""
        progress = record.get("progress")
        wanted = {field.name for field in fields(cls)} - _NOT_ALWAYS
        if not isinstance(progress, dict) or progress.keys() - _NOT_ALWAYS != wanted:
            raise InputError(
                f"{source}: its state.json is not a training state of this version (wanted {', '.join(sorted(wanted))})"
            )
        return cls(**{**progress, "steps": steps})


class Change(BaseModel):
    """Says that a run went on with other settings after `step`; `was`: what each had been up to there, None where it was not
    set."""

    step: Size
    was: dict[str, Any]


class ComputedOn(BaseModel):
    """What computes steps, and by which code, under keys of environment.json."""

    model_config = ConfigDict(strict=True)
    gpus: list[str]
    cpu_cores: int | None
    system: str
    git: dict[str, Any] | None
    accelerate: dict[str, Any]
    packages: dict[str, str | None] = {}  # older versions did not say

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> ComputedOn:
        """Returns what `environment` says of it, the content of environment.json."""
        return cls(**{key: environment[key] for key in cls.model_fields})


class EarlierStart(BaseModel):
    """Says that steps up to `until` were computed on another machine than later ones, or by other code or packages."""

    until: Size
    on: ComputedOn


class Past(BaseModel):
    """What a run has trained otherwise than its recipe says now. It stands in each checkpoint and in environment.json."""

    changed: list[Change] = []  # in order
    machines: list[EarlierStart] = []  # in order; the steps after the last are of the machine that environment.json describes
    begin_with: str | None = None  # SHA-256 of the manifest of another run's checkpoint with which the run began
    source_weights: str | None = None  # hash of the weights files in the folder of `model.source` with which the run began
    left_out: Size = 0  # steps' packs that rollbacks had passed over before this folder's first step
    left_decay: Size | None = None  # the step after which a decay began that the run was last prolonged in

    def back_at(self, step: int) -> Past:
        """Returns the past of a run that has gone back to `step`: what it trains from there is as its recipe says now."""
        changed: list[Change] = []
        told: dict[str, int] = {}
        for change in self.changed:
            end = min(change.step, step)
            if was := {key: value for key, value in change.was.items() if told.get(key, 0) < end}:
                changed.append(Change(step=end, was=was))
                told |= dict.fromkeys(was, end)
        machines = [each.model_copy(update={"until": min(each.until, step)}) for each in self.machines]
        return self.model_copy(update={"changed": changed, "machines": machines})

    def going_on(self, record: Mapping[str, Any], environment: Mapping[str, Any]) -> Past:
        """Returns the past of a run that goes on from the checkpoint of this `record` in `environment`."""
        if (told := record.get("computed_on")) is None or (was := ComputedOn(**told)) == ComputedOn.of(environment):
            return self
        return self.model_copy(update={"machines": [*self.machines, EarlierStart(until=record["progress"]["step"], on=was)]})

    def record(self) -> dict[str, Any]:
        """Returns it for JSON, under `past`; nothing where all was as it is now."""
        return {"past": self.model_dump()} if self != Past() else {}


class SavedHealth(BaseModel):
    losses: list[FiniteFloat]
    in_spike: bool
    skipped_steps: Size
    consecutive_skips: Size
    rollbacks: Size = 0


class SavedIdentity(BaseModel):
    weights: Weights
    learning_rate: FiniteFloat = Field(0.0, alias="optimizer.learning_rate")


class SavedRecord(BaseModel):
    """What state.json of a checkpoint must hold, as far as it is read by name."""

    progress: TrainState
    identity: SavedIdentity
    health: SavedHealth
    microbatch: Annotated[int, Field(gt=0)]
    loss_chunk: Annotated[int, Field(gt=0)] | None = None  # older versions did not say
    world_size: Annotated[int, Field(gt=0)]
    computed_on: ComputedOn | None = None  # older versions did not say
    past: Past = Past()

    @field_validator("progress")
    @classmethod
    def _counts_go_together(cls, progress: TrainState) -> TrainState:
        if progress.skipped_steps > progress.step:
            raise ValueError(f"{progress.skipped_steps} of {progress.step} steps cannot have been skipped")
        return progress


def check_record(record: Mapping[str, Any], source: Path) -> None:
    """InputError naming `source` where `record` is not what a run of this version saves."""
    try:
        SavedRecord.model_validate_json(json.dumps(record), strict=True)  # what is no number becomes none here
    except ValidationError as error:
        raise InputError(f"{source}: its state.json is not a training state of this version: {first_mistake(error)}") from None


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """One line for each key whose value differs between two identities: flat mappings of dotted settings and fingerprints.

    A missing key equals one that is None, so a checkpoint does not differ by unused settings that were introduced after it.
    """
    changed = changed_keys(saved, current)
    texts = [{key: json.dumps(value) for key, value in each.items()} for each in (saved, current)]
    return [f"{key}: saved {texts[0].get(key, 'not set')}, now {texts[1].get(key, 'not set')}" for key in changed]


def changed_keys(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """The keys whose values differ, as `differences` has them.

    Of what the config.json of `model.source` says nothing counts where one of them has no word of it, as older checkpoints.
    """
    current = json.loads(json.dumps(current))  # the saved one went through JSON, where tuples become lists
    changed = [key for key in sorted(saved.keys() | current.keys()) if saved.get(key) != current.get(key)]
    told = all(any(key.startswith(SOURCE) for key in each) for each in (saved, current))
    return changed if told else [key for key in changed if not key.startswith(SOURCE)]


def check_same_training(
    record: Mapping[str, Any], current: Mapping[str, Any], source: Path, accept_changes: bool = False
) -> list[str]:
    """InputError if the checkpoint `source` was made by another training than `current`; with `accept_changes` what differs."""
    changed = differences(record.get("identity", {}), current)
    if changed and not accept_changes:
        listed = "".join(f"\n  {line}" for line in changed)
        folder = current.get("model.source")
        put_back = f"What begins with `{SOURCE}` is in the config.json of {folder}: put that file back as it was. "
        raise InputError(
            f"{source}: the checkpoint was made by another recipe:{listed}\n"
            f"{put_back if any(line.startswith(SOURCE) for line in changed) else ''}"
            "Set another `run_dir` to start a new run, or pass --accept-changes to continue this one with the present values."
        )
    return changed


def check_same_source(identity: Mapping[str, Any], current: Mapping[str, Any], source: Path, folder: str | None) -> None:
    """InputError where the checkpoint `source`, of this `identity`, is of another model than the config.json of `folder`, the
    `model.source`, describes now; `current`: what that says, under keys as those of an identity. For who would take the one for
    the other."""
    if changed := differences({key: value for key, value in identity.items() if key.startswith(SOURCE)}, current):
        listed = "".join(f"\n  {line}" for line in changed)
        raise InputError(
            f"{source}: was trained with another config.json in {folder}, the `model.source`, than is there now:{listed}\n"
            "With these values it would be another model; put that file back as it was."
        )


def step_seed(seed: int, step: int, rank: int) -> int:
    """A 64-bit seed for one rank's step, by chained splitmix64: near inputs give unrelated seeds."""
    state = np.zeros(1, np.uint64)
    for part in (seed, step, rank):
        state = splitmix64(state + np.uint64(part))
    return int(state[0])


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed torch's CPU and CUDA generators for one step of one rank; call it before the step's first forward.

    As they depend on (seed, step, rank) alone, a checkpoint holds no generator states, and what an evaluation or a sample draws
    between two steps does not change the training. A run resumed with the same world size repeats its dropout masks and its
    stochastic rounding bit for bit.
    """
    import torch  # here, so that the rest of this module does without torch

    seed = step_seed(seed, step, rank)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # for GPUs that are not there `manual_seed` keeps where it was called from, which takes a millisecond of each step
        torch.default_generator.manual_seed(seed)
