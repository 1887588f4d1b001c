"""Read the files of a run folder: metrics, summary and final screen. Works without torch."""

from __future__ import annotations

import itertools
import json
import math
import shlex
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

# First steps of a run, which compile, allocate and autotune. They are excluded from medians.
WARM_UP_STEPS = 2
# Share of all steps that is a run's end. The loss of a single step is mostly noise (standard
# deviation 0.13 in runs of the reference).
LAST_SHARE = 0.2
# Minimum number of steps at the end: eight batches of eight, for a standard error.
FEWEST_STEPS = 64
# Keys of a summary: the mean loss of the run's end, and its number of steps.
LOSS_KEY = "loss_at_end"
END_KEY = "steps_at_end"
# Keys of a step whose median is part of a summary.
MEDIANS = (
    "tokens_per_second",
    "samples_per_second",
    "step_ms",
    "tflops",
    "mfu_bf16_peak",
    "mfu_nanogpt",
    "frozen_updates",
)

# Keys of an evaluation that identify its packs.
HELD_OUT_PACKS = ("held_out_fingerprint", "held_out_packs")
# Keys of an evaluation that must agree for a comparison.
MEASURE = (*HELD_OUT_PACKS, "held_out_tokens", "held_out_precision")

# A line of metrics.jsonl.
Record = Mapping[str, Any]


def kind(record: Record) -> str:
    """Return "step" or the event of a line: "evaluation", "samples", "rollback" or "halted".

    A rollback holds the lines of abandoned steps and events under `abandoned`. So every step that
    counts is exactly one line of the file.
    """
    return record.get("event", "step")


def at_the_end(steps: np.ndarray) -> np.ndarray:
    """Return a mask of the steps that belong to the end of a run.

    `steps` are the step numbers of the run in order. The end is the last fifth of all steps up to
    the last one, or the last FEWEST_STEPS if that is more. The step numbers decide, so a branch has
    the same end as the run that it branched from.

    Summaries, tables, plots and gates all use this definition.
    """
    length = max(math.ceil(steps[-1] * LAST_SHARE), FEWEST_STEPS)
    return steps > steps[-1] - length


def in_a_word(key: str, value: Any) -> str:
    """Return the value of a setting as text for a report. `key` is the dotted key."""
    if key == "precision":
        return str(label(value))
    return "not set" if value is None else str(value)


def same_measure(first: Record, second: Record, keys: Sequence[str] = MEASURE) -> bool:
    """Return True if two evaluations agree in `keys`, as far as both records have them."""
    return all(first[key] == second[key] for key in keys if key in first and key in second)


def own_evaluations(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the evaluations after the first step of a run, in order.

    An evaluation before the first step measures the weights that the run started from.
    """
    from_first_step = itertools.dropwhile(lambda record: kind(record) != "step", records)
    return (record for record in from_first_step if kind(record) == "evaluation")


@dataclass(frozen=True)
class RunRecord:
    """The content of a run folder. The run may be finished or still training."""

    path: Path
    config: dict[str, Any]
    # Environment of the last start.
    environment: dict[str, Any]
    metrics: list[dict[str, Any]]
    # Summary up to the last step in `metrics`.
    summary: dict[str, Any]
    audit: dict[str, Any] = field(default_factory=dict)
    # The run shared its machine with other runs of a matrix, at least for some time. Its speed
    # cannot be compared.
    side_by_side: bool = False

    @property
    def name(self) -> str:
        """Return the name of the run folder."""
        return self.path.resolve().name

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the records of steps, without events."""
        return [record for record in self.metrics if kind(record) == "step"]

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return step numbers (int64) and values (float64) of `key`.

        "held_out_loss" comes from evaluations, other keys from steps. Missing values are NaN,
        which is a gap in a line.
        """
        records = self.evaluations if key == "held_out_loss" else self.steps
        steps = [record["step"] for record in records]
        values = [math.nan if record.get(key) is None else record[key] for record in records]
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations on the same held-out packs as the last one.

        A resumed run may evaluate on other packs than before.
        """
        last = self.last_evaluation
        return [
            record
            for record in self.metrics
            if kind(record) == "evaluation" and same_measure(record, last, HELD_OUT_PACKS)
        ]

    @property
    def last_evaluation(self) -> Record:
        """Return the last evaluation, or an empty record without an evaluation."""
        return next((line for line in reversed(self.metrics) if kind(line) == "evaluation"), {})

    @property
    def when_evaluated(self) -> str:
        """Return " (step 10)" if the last evaluation is not of the last step, else "".

        Reports print it behind the held-out loss.
        """
        evaluated_step = self.last_evaluation.get("step", self.summary["steps"])
        return "" if evaluated_step == self.summary["steps"] else f" (step {evaluated_step:,})"

    @property
    def data_fingerprint(self) -> str | None:
        """Return the fingerprint of the training packs."""
        return self.environment.get("data_fingerprint")

    @property
    def source_config(self) -> dict[str, Any]:
        """Return the config.json of `model.source` at the last start, by keys of the identity."""
        return self.environment.get("source_config", {})

    @property
    def past(self) -> dict[str, Any]:
        """Return how the training differed from the config, in the form of `NO_PAST`."""
        return NO_PAST | self.environment.get("past", {})

    @property
    def settings(self) -> dict[str, Any]:
        """Return the config by dotted key, with the source's config and the data's fingerprint."""
        settings = flatten(self.config) | self.source_config
        return settings | {"data.fingerprint": self.data_fingerprint}

    @property
    def changed_settings(self) -> dict[str, str]:
        """Return the settings that a resume has changed, as texts: "42 to step 6, then 7"."""
        earlier: dict[str, str] = {}
        for change in self.past["changed"]:
            for key, value in change["was"].items():
                text = f"{in_a_word(key, value)} to step {change['step']:,}, then "
                earlier[key] = earlier.get(key, "") + text
        current = self.settings
        return {key: text + in_a_word(key, current.get(key)) for key, text in earlier.items()}

    @property
    def devices(self) -> tuple[int, str]:
        """Return the number and the name of the devices: (2, "NVIDIA H200") or (1, "CPU")."""
        launch = self.environment.get("accelerate") or {}
        device = launch.get("device")
        gpus = [] if device == "cpu" else self.environment.get("gpus") or []
        name = " and ".join(dict.fromkeys(gpus)) or str(device or "cpu").upper()
        return launch.get("processes") or len(gpus) or 1, name

    @property
    def tokens_per_step(self) -> int:
        """Return `batch.tokens`."""
        return self.config["batch"]["tokens"]

    @property
    def precision(self) -> str | None:
        """Return the requested precision: "delayed" or "nvfp4 to 80 %, then bf16".

        If the run fell back to another precision, that one follows in parentheses.
        """
        requested = label(self.config.get("precision"))
        effective = self.audit.get("schedule", self.audit.get("effective", requested))
        return requested if effective == requested else f"{requested} (ran {effective})"

    @property
    def backend(self) -> str | None:
        """Return the engine of the products: "torch", "transformer_engine" or "emulation".

        For a schedule it is the engine of the low-precision phases.
        """
        audits = self.audit.get("precisions", {"": self.audit}).values()
        backends = [audit.get("backend") for audit in audits]
        return next((backend for backend in backends if backend != "torch"), backends[-1])

    @property
    def emulated(self) -> bool:
        """Return True if the precision was emulated.

        Its losses are valid for the format, but its speed says nothing about hardware.
        """
        return self.backend == "emulation"

    @property
    def broke_off(self) -> str:
        """Return why the training has failed, or "" if it has not.

        Examples: "was halted at step 2", "has no finite loss from step 7 on". The results of a
        failed run do not count as an end. Steps without labels have no loss and are ignored.
        """
        if "halted" in self.summary:
            return f"was halted at step {self.summary['steps']:,}"
        labelled = [step for step in self.steps if not step.get("unlabelled")]
        failed = list(itertools.takewhile(lambda step: step["loss"] is None, reversed(labelled)))
        return f"has no finite loss from step {failed[-1]['step']:,} on" if failed else ""

    @property
    def is_unfinished(self) -> bool:
        """Return True if the run has not reached the horizon of its last start."""
        return self.summary["steps"] < self.environment.get("horizon", 0)


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


class NoStepYet(InputError):
    """The folder has no step of a run yet, or is not a run folder."""


def read_run(run_dir: Path, last_step: float = math.inf) -> RunRecord:
    """Read a run folder, with the metrics and the summary up to `last_step`.

    Raises NoStepYet if `run_dir` is not a run folder or the run has no step yet.
    """
    folder = RunFolder(run_dir, owner=False)
    metrics = [record for record in read_metrics(run_dir) if record["step"] <= last_step]
    # An evaluation may precede the first step.
    if not any(kind(record) == "step" for record in metrics):
        raise NoStepYet(
            f"{run_dir / METRICS_FILE}: holds no step yet; wait for the first step of the run"
        )
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
    """Return the run in `run_dir` if it is finished, else None.

    A finished run has reached its horizon and has written its summary, which is its last file. A
    summary of another step than the last one in the metrics is outdated.
    """
    try:
        run = read_run(run_dir)
        written_summary = _read_object(run_dir / SUMMARY_FILE)
    except InputError:
        return None
    is_current = written_summary.get("steps") == run.summary["steps"]
    return run if is_current and not run.is_unfinished else None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the steps and events in metrics.jsonl. Raises NoStepYet if the file is missing."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise NoStepYet(
            f"{path}: there is no such file; {run_dir} is not a run folder, or its run has not "
            "started"
        )
    return read_lines(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects in a .jsonl file of a run. Raises InputError if a line is not JSON.

    A last line that is still being written is ignored.
    """
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if line.endswith(b"\n"):
            place = f"{path}, line {number}: not valid JSON"
            with refusing((ValueError,), place, "remove that line"):
                records.append(json.loads(line))
    return records


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the run has not written it yet."""
    return load_object(path, "the report needs the complete file") if path.exists() else {}


# ── Summary ───────────────────────────────────────────────────────────────────────────────────────


def summary(records: Iterable[Record]) -> dict[str, Any]:
    """Return the content of `summary.json`, over all steps of the run.

    Losses are in nats per token. Medians and `data_wait_share` exclude the first two steps. `hours`
    is the time inside of steps, without evaluation, saving and starting. The held-out loss is that
    of the last evaluation after the first step. Keys without a value are absent, for example
    without an evaluation or for a device without a known peak.
    """
    records = list(records)
    steps = [record for record in records if kind(record) == "step"]
    last = steps[-1]
    steady = steps[WARM_UP_STEPS:] or steps
    end = list(itertools.compress(steps, at_the_end(np.array([step["step"] for step in steps]))))
    *_, evaluation = [{}, *own_evaluations(records)]
    milliseconds = sum(_finite(steady, "step_ms"))
    rollbacks = [record["rollbacks"] for record in records if kind(record) == "rollback"]
    halts = [record["reason"] for record in records if kind(record) == "halted"]
    figures = {
        "steps": last["step"],
        "tokens": last["tokens"],
        "epoch": last.get("epoch"),
        "hours": sum(_finite(steps, "step_ms")) / 3.6e6,
        "loss": last["loss"],
        LOSS_KEY: _statistic(statistics.fmean, end, "loss"),
        END_KEY: len(end),
        "held_out_loss": evaluation.get("held_out_loss"),
        "held_out_perplexity": evaluation.get("held_out_perplexity"),
        **{key: _statistic(statistics.median, steady, key) for key in MEDIANS},
        "data_wait_share": sum(_finite(steady, "data_wait_ms")) / (milliseconds or math.inf),
        "memory_gib": _statistic(max, steps, "memory_gib"),
        "recompiles": sum(_finite(steps, "recompiles")),
        "skipped_steps": sum(bool(step.get("skipped")) for step in steps),
        "rollbacks": max(rollbacks, default=None),
        "halted": halts[0] if halts else last.get("halted"),
    }
    return {key: value for key, value in figures.items() if value is not None}


def _finite(records: Iterable[Record], key: str) -> list[float]:
    """Return the finite values of `key`. NaN is null in metrics.jsonl, and keys may be missing."""
    values = (record.get(key) for record in records)
    return [value for value in values if value is not None and math.isfinite(value)]


def _statistic(
    function: Callable[[list[float]], float], records: Iterable[Record], key: str
) -> float | None:
    """Return `function` of the finite values of `key`, or None if there are none."""
    values = _finite(records, key)
    return function(values) if values else None


def last_screen(run: RunRecord, folder: RunFolder) -> tuple[str, dict[str, str]]:
    """Return the title and the rows that a finished run prints last, for `Console.panel`.

    Values that are not known have no row.
    """
    figures = run.summary
    first_step = run.steps[0]["step"]
    # Another run has trained the steps before the first one of a branch.
    branch = f"; this run from step {first_step:,} on," if first_step > 1 else ""
    rows = {
        "trained": f"{plural(figures['steps'], 'step')}, {count(figures['tokens'])} tokens{branch} "
        f"in {duration(figures['hours'] * 3600)}"
    }
    if LOSS_KEY in figures:
        steps_at_end = plural(figures[END_KEY], "step")
        rows["loss"] = f"{figures[LOSS_KEY]:.4f} (mean of the last {steps_at_end})"
    if "held_out_loss" in figures:
        rows["held-out loss"] = (
            f"{figures['held_out_loss']:.4f} (perplexity {figures['held_out_perplexity']:.4g})"
        )
    mfu = f", {percent(figures['mfu_bf16_peak'])} MFU" if "mfu_bf16_peak" in figures else ""
    rows["speed"] = (
        f"{count(figures['tokens_per_second'])} tokens/s{mfu} (median), "
        f"{percent(figures['data_wait_share'])} of the time waiting for data"
    )
    rows["memory"] = memory(figures["memory_gib"])
    if folder.final.exists():
        rows["model"] = f"{folder.final} (AutoModelForCausalLM.from_pretrained loads it)"
    rows["curve"] = str(folder.loss_plot)
    rows["compare it"] = f"python -m pretrain report {shlex.quote(str(folder.path))} OTHER_RUN"
    return f"{run.name}: done", rows
