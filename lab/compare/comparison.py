"""Comparison of single runs with a baseline run: loss differences, speeds, and notes."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lab.compare.fairness import loss_differences, why_not_paired
from pretrain.metrics.run_record import FEWEST_STEPS, LAST_SHARE, RunRecord, end_begins
from pretrain.settings.config import RECORDS, settings_without

# Colours of the first ten runs: the default palette of Tableau and plotly, whose colours are easy
# to distinguish. The next ten runs have the same colours and the next dash in DASHES, and so on.
COLOURS = (
    "#1F77B4",
    "#FF7F0E",
    "#2CA02C",
    "#D62728",
    "#9467BD",
    "#8C564B",
    "#E377C2",
    "#7F7F7F",
    "#BCBD22",
    "#17BECF",
)
DASHES = ("solid", "dash", "dot", "dashdot")
# Keys, and prefixes of keys, in which the runs of one group may differ. They include the keys for
# the location of the data, because the fingerprint of the packs is compared instead.
_WITHIN = (
    *RECORDS,
    "seed",
    "batch.microbatch",
    "evaluate.samples",
    "data.packs",
    "data.source",
    "data.tokenizer",
)
_SEED_IN_A_NAME = re.compile(r"(?:^|[-_.,])seed[=_-]?\d+(?=$|[-_.,])")


@dataclass(frozen=True)
class ComparedRun:
    """A run compared with the baseline. Properties whose value is not known are None."""

    run: RunRecord
    # The run of the baseline's group that has the same seed, or the first run if there is none.
    base: RunRecord
    # Name of the group of runs that differ from `run` only in their seeds.
    group: str
    # Name of `run`, unique within a comparison.
    label: str
    # Colour of the curves of `run`, such as "#1F77B4".
    colour: str
    # Dash of the curves of `run`, an element of DASHES.
    dash: str

    @property
    def is_baseline(self) -> bool:
        """Return True if `run` belongs to the baseline's group."""
        return self.run is self.base

    @cached_property
    def pairing_obstacle(self) -> str | None:
        """Return the reason why the run and the baseline cannot be compared step by step.

        Return None if they can be compared.
        """
        return why_not_paired(self.base, self.run)

    @property
    def not_paired(self) -> str | None:
        """Return the reason why there is no loss difference at the end of training.

        Either the two runs cannot be compared step by step, or one of them has failed. Return None
        if there is a loss difference.
        """
        if self.pairing_obstacle:
            return self.pairing_obstacle
        if self.run.failure:
            return f"it {self.run.failure}"
        if self.base.failure:
            return f"the baseline {self.base.failure}"
        return None

    @cached_property
    def loss_gap(self) -> float | None:
        """Return the run's training loss at the end minus the baseline's, in nats per token.

        The difference is a mean over the last steps that both runs have. Return None if the run is
        its own baseline, or if the difference cannot be computed. `not_paired` returns the reason.
        """
        if self.is_baseline or self.not_paired:
            return None
        steps, differences = loss_differences(self.base, self.run)
        return float(differences[steps >= end_begins(steps[-1])].mean())

    @property
    def speedup(self) -> float | None:
        """Return the speed of the run divided by the baseline's speed.

        Return None if the run is its own baseline, or if one of the two speeds is not known. Also
        return None if the two runs used different kinds of machines, because the ratio would show
        the effect of the machine instead of the precision. Software versions may differ, because
        their effect may be the subject of the comparison.
        """
        if self.is_baseline or machine_of(self.base) != machine_of(self.run):
            return None
        return speed_ratio(self.base, self.run)


def compare(runs: Sequence[RunRecord]) -> list[ComparedRun]:
    """Compare each of `runs` with the baseline's run that has the same seed.

    The baseline is the group of the first run.
    """
    labels = unique_names([run.name for run in runs], runs)
    groups = group_names(runs)
    first_group = groups[0]
    base_runs = {
        run.config["seed"]: run
        for run, group in zip(runs, groups, strict=True)
        if group == first_group
    }
    styles = itertools.cycle(itertools.product(DASHES, COLOURS))
    compared_runs = []
    for run, group, label, (dash, colour) in zip(runs, groups, labels, styles, strict=False):
        base = base_runs.get(run.config["seed"], runs[0])
        compared_runs.append(ComparedRun(run, base, group, label, colour, dash))
    return compared_runs


def notes_on(compared_runs: Sequence[ComparedRun]) -> list[str]:
    """Return notes that explain the tables of the report."""
    notes = [note for compared in compared_runs for note in _notes_on_run(compared)]
    runs = [compared.run for compared in compared_runs]
    if any(run.side_by_side for run in runs):
        notes.append("Speeds are omitted for runs that shared their machine with other runs.")
    # Shorter runs average more than LAST_SHARE of their steps in the loss at the end.
    enough = FEWEST_STEPS / LAST_SHARE
    if len(runs) > 1 and all(len(run.steps) < enough for run in runs):
        notes.append(
            f"All runs have fewer than {enough:.0f} steps, so they show nothing about the loss of "
            "a longer training."
        )
    return notes


def _notes_on_run(compared: ComparedRun) -> Iterator[str]:
    """Yield notes on the training of one run.

    A run with another seed than the baseline has no note about their pairing.
    """
    run = compared.run
    if run.failure:
        reason = run.summary.get("halted", "it has no result at the end of training")
        yield f"{compared.label} {run.failure}: {reason}"
    elif compared.not_paired and run.config["seed"] == compared.base.config["seed"]:
        yield (
            f"{compared.label} is not paired with {compared.base.name}, so their training losses "
            f"are not compared: {compared.not_paired}."
        )
    if run.changed_settings:
        changes = [f"`{key}` was {text}" for key, text in run.changed_settings.items()]
        yield f"{compared.label} changed its settings during training: {'; '.join(changes)}."


def group_names(runs: Sequence[RunRecord]) -> list[str]:
    """Return the name of the group of each run. Runs that differ only in their seeds are a group.

    The name of a group is the name of its first run without the part for the seed, such as
    "seed=3".

    A group has only one run per seed. If a training was repeated with the same seed, its n-th
    repetition belongs to the n-th group of these settings.
    """
    # Map the settings and the seed of a training to the number of its runs so far.
    repetitions: Counter[tuple[str, int]] = Counter()
    # The group of each run: its settings, and the number of earlier runs of its training.
    groups: list[tuple[str, int]] = []
    first_runs: dict[tuple[str, int], RunRecord] = {}
    for run in runs:
        settings = str(_settings(run))
        training = settings, run.config["seed"]
        group = settings, repetitions[training]
        repetitions[training] += 1
        groups.append(group)
        first_runs.setdefault(group, run)
    names = [
        _SEED_IN_A_NAME.sub("", run.name).strip("-_.,") or run.name for run in first_runs.values()
    ]
    unique = unique_names(names, [*first_runs.values()])
    name_of = dict(zip(first_runs, unique, strict=True))
    return [name_of[group] for group in groups]


def unique_names(names: Sequence[str], runs: Sequence[RunRecord]) -> list[str]:
    """Return a unique name for each run.

    `names` has one name for each run. If several runs have the same name, the path of each of these
    runs is returned instead.
    """
    return [
        name if names.count(name) == 1 else str(run.path)
        for name, run in zip(names, runs, strict=True)
    ]


def _settings(run: RunRecord) -> dict[str, Any]:
    """Return the properties that must be equal in all runs of a group, by dotted key."""
    return {
        **settings_without(run.recipe, _WITHIN),
        "precision": run.precision,
        "backend": run.engine,
        "data.fingerprint": run.data_fingerprint,
        **run.source_config,
        **run.changed_settings,
    }


def hardware_speed(run: RunRecord) -> float | None:
    """Return the median speed of a run in tokens/s.

    Return None if the precision was emulated, or if the run shared its machine with other runs,
    because such a speed says nothing about the hardware.
    """
    if run.side_by_side or run.emulated:
        return None
    return run.summary.get("tokens_per_second")


def speed_ratio(base: RunRecord, run: RunRecord) -> float | None:
    """Return the speed of `run` divided by the speed of `base`.

    Return None if `hardware_speed` returns None for one of them.
    """
    base_speed = hardware_speed(base)
    speed = hardware_speed(run)
    return speed / base_speed if speed and base_speed else None


def machine_of(run: RunRecord) -> str:
    """Describe the devices of a run: "2 × NVIDIA H200", "1 × CPU, 8 cores, Linux x86_64"."""
    processes, name = run.devices
    machine = f"{processes} × {name}"
    if name == "CPU":
        machine += f", {run.environment.get('cpu_cores')} cores, {run.environment.get('system')}"
    return machine
