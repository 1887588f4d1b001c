"""What the files of a run folder say of its run: its metrics, its summary, and the screen it ends with. Works without torch."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foundation.errors import InputError
from foundation.reading import load_object, load_yaml, refusing
from foundation.units import count, duration, memory, percent, plural
from pretrain.checkpoint.state import NO_PAST
from pretrain.metrics.run_folder import MATRIX_FILE, METRICS_FILE, SUMMARY_FILE, RunFolder
from pretrain.precision.settings import label
from pretrain.settings.config import flatten

WARM_UP_STEPS = 2  # compile, allocate, autotune: kept out of every median
# of all steps: where runs have grown apart. One step's loss is mostly noise (sd 0.13 in the
# reference's runs)
LAST_SHARE = 0.2
FEWEST_STEPS = 64  # for a standard error: eight batches of eight
# in a summary: the mean loss of a run's end, and of how many steps it is
LOSS_KEY, END_KEY = "loss_at_end", "steps_at_end"
MEDIANS = (
    "tokens_per_second",
    "samples_per_second",
    "step_ms",
    "tflops",
    "mfu_bf16_peak",
    "mfu_nanogpt",
    "frozen_updates",
)

# in an evaluation's line: which packs it is of, and how many
HELD_OUT_PACKS = ("held_out_fingerprint", "held_out_packs")
# evaluations that differ in one say nothing of each other
MEASURE = (*HELD_OUT_PACKS, "held_out_tokens", "held_out_precision")

# a line of metrics.jsonl: a step, or an event: an evaluation, a rollback or a halt
Record = Mapping[str, Any]


def kind(record: Record) -> str:
    """What a line tells of: a "step", or an event: an "evaluation", "samples", a "rollback", or that the run was "halted". What
    a rollback gave up, steps and events, stands inside of it under `abandoned`, so that every step is one line of the file."""
    return record.get("event", "step")


def at_the_end(steps: np.ndarray) -> np.ndarray:
    """Which of `steps`, the numbers of a run's steps in order, belong to its end: the last fifth of all steps up to its last one,
    or the last FEWEST_STEPS if that is more. Numbers count: a branch, which begins with another run's checkpoint, ends where that
    run does.

    This is the one definition of where runs end: a run's summary and every table, picture and gate take the same steps.
    """
    return steps > steps[-1] - max(math.ceil(steps[-1] * LAST_SHARE), FEWEST_STEPS)


def in_a_word(key: str, value: Any) -> str:
    """The value of a setting with flat keys, as a report says it."""
    return str(label(value) if key == "precision" else "not set" if value is None else value)


def same_measure(first: Record, second: Record, keys: Sequence[str] = MEASURE) -> bool:
    """Whether two evaluations are of the same, as far as both say."""
    return all(first[key] == second[key] for key in keys if key in first and key in second)


def own_evaluations(records: Iterable[Record]) -> Iterator[Record]:
    """Yields of a run's lines in order the evaluations of what it has trained: none from before its first step."""
    own = itertools.dropwhile(lambda record: kind(record) != "step", records)
    return (record for record in own if kind(record) == "evaluation")


@dataclass(frozen=True)
class RunRecord:
    """What the files of a run folder hold, of a run finished or still going. `summary` is as of the last step written."""

    path: Path
    config: dict[str, Any]
    environment: dict[str, Any]  # of its last start
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]
    audit: dict[str, Any] = field(default_factory=dict)
    # some of it shared the machine with other runs of a matrix, so that its speed is not its own
    side_by_side: bool = False

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The run's metrics without the events between steps."""
        return [record for record in self.metrics if kind(record) == "step"]

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(steps int64, values float64) of a key of the steps, or of the evaluations' "held_out_loss"; NaN, a gap in a line,
        where the value is not known."""
        records = self.evaluations if key == "held_out_loss" else self.steps
        values = [math.nan if record.get(key) is None else record[key] for record in records]
        return np.array([record["step"] for record in records], dtype=np.int64), np.array(
            values, dtype=np.float64
        )

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The evaluations on the same held-out packs as the last one: a resume may have taken others."""
        evaluations = [record for record in self.metrics if kind(record) == "evaluation"]
        return [
            record
            for record in evaluations
            if same_measure(record, evaluations[-1], HELD_OUT_PACKS)
        ]

    @property
    def when_evaluated(self) -> str:
        """What stands behind its held-out loss: " (step 10)" where more steps followed, else nothing."""
        last = self.evaluations[-1]["step"] if self.evaluations else self.summary["steps"]
        return "" if last == self.summary["steps"] else f" (step {last:,})"

    @property
    def data_fingerprint(self) -> str | None:
        """Identity of the packs trained on."""
        return self.environment.get("data_fingerprint")

    @property
    def source_config(self) -> dict[str, Any]:
        """What the config.json of `model.source` said at its last start, under keys of an identity."""
        return self.environment.get("source_config", {})

    @property
    def past(self) -> dict[str, Any]:
        """What it has trained otherwise than its config says, as `NO_PAST`."""
        return NO_PAST | self.environment.get("past", {})

    @property
    def settings(self) -> dict[str, Any]:
        """Its config with flat keys, what its `model.source` said, and `data.fingerprint`."""
        return (
            flatten(self.config) | self.source_config | {"data.fingerprint": self.data_fingerprint}
        )

    @property
    def changed_settings(self) -> dict[str, str]:
        """The settings that a resume has changed, with all of their values: "42 to step 6, then 7"."""
        now, before = self.settings, dict[str, str]()
        for change in self.past["changed"]:
            for key, value in change["was"].items():
                before[key] = (
                    f"{before.get(key, '')}{in_a_word(key, value)} to step {change['step']:,}, then "
                )
        return {key: values + in_a_word(key, now.get(key)) for key, values in before.items()}

    @property
    def devices(self) -> tuple[int, str]:
        """On how many devices it trained, one a process, and what they are called: (2, "NVIDIA H200"), (1, "CPU")."""
        launch = self.environment.get("accelerate") or {}
        gpus = [] if launch.get("device") == "cpu" else self.environment.get("gpus") or []
        name = " and ".join(dict.fromkeys(gpus)) or str(launch.get("device") or "cpu").upper()
        return launch.get("processes") or len(gpus) or 1, name

    @property
    def tokens_per_step(self) -> int:
        return self.config["batch"]["tokens"]

    @property
    def precision(self) -> str | None:
        """The precision asked for, as "nvfp4 to 80 %, then bf16"; where the device made it fall back to another, both."""
        requested = label(self.config.get("precision"))
        effective = self.audit.get("schedule", self.audit.get("effective", requested))
        return requested if effective == requested else f"{requested} (ran {effective})"

    @property
    def backend(self) -> str | None:
        """What computed the products: "torch", "transformer_engine" or "emulation"; of a schedule, its low-precision ones."""
        backends = [
            each.get("backend") for each in self.audit.get("precisions", {"": self.audit}).values()
        ]
        return next((backend for backend in backends if backend != "torch"), backends[-1])

    @property
    def emulated(self) -> bool:
        """Whether the precision was computed in software: its losses are the format's, its speed is not the hardware's."""
        return self.backend == "emulation"

    @property
    def broke_off(self) -> str:
        """Says how its training came to nothing, so that its figures stand for no end: "was halted at step 2", "has no finite
        loss from step 7 on"; empty where it did not. A step without labels has no loss, and says nothing of it."""
        if "halted" in self.summary:
            return f"was halted at step {self.summary['steps']:,}"
        labelled = [step for step in self.steps if not step.get("unlabelled")]
        lost = list(itertools.takewhile(lambda step: step["loss"] is None, reversed(labelled)))
        return f"has no finite loss from step {lost[-1]['step']:,} on" if lost else ""

    @property
    def is_unfinished(self) -> bool:
        """Whether steps are to come to the horizon of its last start."""
        return self.summary["steps"] < self.environment.get("horizon", 0)


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class NoStepYet(InputError):
    """There is nothing to read of a run so far, if it is one."""


def read_run(run_dir: Path, last_step: float = math.inf) -> RunRecord:
    """Read a run folder as the run was after `last_step`; all figures come from its metrics. InputError where it is no run
    folder, or has no step yet."""
    if not run_dir.is_dir():
        raise NoStepYet(f"{run_dir}: there is no such run folder")
    folder = RunFolder(run_dir, owner=False)
    metrics = [record for record in read_metrics(run_dir) if record["step"] <= last_step]
    if "step" not in map(kind, metrics):  # an evaluation may come before
        raise NoStepYet(f"{run_dir / METRICS_FILE}: holds no step yet; wait for the run's first")
    return RunRecord(
        path=run_dir,
        config=load_yaml(folder.config),
        environment=_read_object(folder.environment),
        metrics=metrics,
        summary=summary(metrics),
        audit=_read_object(folder.audit),
        side_by_side=_read_object(run_dir / MATRIX_FILE).get("side_by_side", False),
    )


def read_finished(run_dir: Path) -> RunRecord | None:
    """The run in `run_dir`, where it has come to its end and has written its summary, the last of all; else None. A summary of
    another step than the metrics' last is older than what was trained since."""
    try:
        run, at_its_end = read_run(run_dir), _read_object(run_dir / SUMMARY_FILE)
    except InputError:
        return None
    return (
        run if at_its_end.get("steps") == run.summary["steps"] and not run.is_unfinished else None
    )


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The objects of `run_dir`/metrics.jsonl, steps and events as written; InputError where there is no such file."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise NoStepYet(
            f"{path}: there is no such file; {run_dir} is not a run folder, or its run has not begun"
        )
    return read_lines(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file of a run, but for a last line still being written. InputError where a line is no JSON."""
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        with refusing(
            (ValueError,), f"{path}, line {number}: not valid JSON", "take that line out"
        ):
            records += [json.loads(line)] if line.endswith(b"\n") else []
    return records


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where the run has not written it yet."""
    return load_object(path, "the report needs it whole") if path.exists() else {}


# ── Summing up ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def summary(records: Iterable[Record]) -> dict[str, Any]:
    """What `summary.json` holds: final losses, medians, peaks and totals over every step of the run, resumed or not.

    Losses are nats per token. Medians and `data_wait_share` leave out the run's first two steps. `hours` is the time inside
    steps, without evaluation, saving and starting. The held-out loss is that of the last evaluation, but not of the model as it
    was before the run. A key whose figure is not known (no evaluation, no known peak) is absent.
    """
    records = list(records)
    steps = [record for record in records if kind(record) == "step"]
    evaluations = [*own_evaluations(records)]
    last, steady = steps[-1], steps[WARM_UP_STEPS:] or steps
    end = list(
        itertools.compress(steps, at_the_end(np.array([record["step"] for record in steps])))
    )
    milliseconds, losses = sum(_known(steady, "step_ms")), _known(end, "loss")
    figures = {
        "steps": last["step"],
        "tokens": last["tokens"],
        "epoch": last.get("epoch"),
        "hours": sum(_known(steps, "step_ms")) / 3.6e6,
        "loss": last["loss"],
        LOSS_KEY: statistics.fmean(losses) if losses else None,
        END_KEY: len(end),
        **(
            {key: evaluations[-1].get(key) for key in ("held_out_loss", "held_out_perplexity")}
            if evaluations
            else {}
        ),
        **{key: statistics.median(known) for key in MEDIANS if (known := _known(steady, key))},
        "data_wait_share": sum(_known(steady, "data_wait_ms")) / milliseconds
        if milliseconds
        else 0.0,
        "memory_gib": max(_known(steps, "memory_gib"), default=None),
        "recompiles": sum(_known(steps, "recompiles")),
        "skipped_steps": sum(bool(record.get("skipped")) for record in steps),
        "rollbacks": max(
            (record["rollbacks"] for record in records if kind(record) == "rollback"), default=None
        ),
        "halted": next(
            (record["reason"] for record in records if kind(record) == "halted"), last.get("halted")
        ),
    }
    return {key: value for key, value in figures.items() if value is not None}


def _known(records: Iterable[Record], key: str) -> list[float]:
    """The finite values of `key`: not-a-number is null in metrics.jsonl, and a figure that is not known has no key."""
    return [
        value
        for record in records
        if (value := record.get(key)) is not None and math.isfinite(value)
    ]


def last_screen(run: RunRecord, folder: RunFolder) -> tuple[str, dict[str, str]]:
    """What a finished run prints last, for `Console.panel`: a title and rows. Unknown figures have no row."""
    figures, steps, first = run.summary, plural(run.summary["steps"], "step"), run.steps[0]["step"]
    # of a branch: another run has trained those before
    own = f"; here from step {first:,} on," if first > 1 else ""
    rows = {
        "trained": f"{steps}, {count(figures['tokens'])} tokens{own} in {duration(figures['hours'] * 3600)}"
    }
    if LOSS_KEY in figures:
        rows["loss"] = (
            f"{figures[LOSS_KEY]:.4f} (mean of the last {plural(figures[END_KEY], 'step')})"
        )
    if "held_out_loss" in figures:
        rows["held-out loss"] = (
            f"{figures['held_out_loss']:.4f} (perplexity {figures['held_out_perplexity']:.4g})"
        )
    mfu = f", {percent(figures['mfu_bf16_peak'])} MFU" if "mfu_bf16_peak" in figures else ""
    waiting = percent(figures["data_wait_share"])
    rows["speed"] = (
        f"{count(figures['tokens_per_second'])} tokens/s{mfu} (median), {waiting} of the time waiting for data"
    )
    rows["memory"] = memory(figures["memory_gib"])
    if folder.final.exists():
        rows["model"] = f"{folder.final} (AutoModelForCausalLM.from_pretrained loads it)"
    rows["curve"] = str(folder.loss_plot)
    rows["compare it"] = f"python -m pretrain report {shlex.quote(str(folder.path))} OTHER_RUN"
    return f"{run.name}: done", rows
