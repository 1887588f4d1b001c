"""Read the files of a run folder, summarize its metrics, and format its last screen.

This module does not import torch.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from foundation.errors import InputError, as_input_error
from foundation.reading import load_object, load_yaml
from foundation.settings import flatten, parse
from foundation.units import count, duration, memory, percent, plural
from pretrain.checkpoint.state import NO_PAST
from pretrain.metrics.run_folder import MATRIX_FILE, METRICS_FILE, RunFolder
from pretrain.precision.settings import label
from pretrain.settings.config import CONFIG_FILE
from pretrain.settings.recipe import Recipe

# Number of steps at the start of a run that are excluded from medians. In these steps, the run
# compiles, allocates and autotunes.
WARM_UP_STEPS = 2
# Share of a run's steps that form the end of the run (`end_begins`). The loss at the end is a mean
# over these steps, because the loss of a single step is mostly noise (standard deviation 0.13 in
# the reference runs).
LAST_SHARE = 0.2
# Minimum number of steps that form the end of a run. The standard error of the loss at the end is
# computed from eight groups of eight steps.
FEWEST_STEPS = 64
# Keys of a summary: the mean loss over the end of the run, and the number of steps in this mean.
LOSS_KEY = "loss_at_end"
END_KEY = "steps_at_end"
# Keys of the steps whose medians are part of a summary.
MEDIANS = (
    "tokens_per_second",
    "samples_per_second",
    "step_ms",
    "tflops",
    "mfu_bf16_peak",
    "mfu_nanogpt",
    "frozen_updates",
)

# Keys of an evaluation that identify the held-out packs and their labels. With another value of
# `data.mask_boundaries`, the same packs have another number of labels, `held_out_tokens`.
HELD_OUT_LABELS = ("held_out_fingerprint", "held_out_packs", "held_out_tokens")
# Keys of an evaluation that identify how its loss was measured. The losses of two evaluations may
# be compared only if the evaluations have equal values of these keys.
MEASURE = (*HELD_OUT_LABELS, "held_out_precision")

# A line of metrics.jsonl.
Record = Mapping[str, Any]


def kind(record: Record) -> str:
    """Return the kind of a line in metrics.jsonl.

    The kind is "step", or the event of the line: "evaluation", "served", "samples",
    "rollback" or "halted". Runs of earlier versions have the event "speed" too. A rollback removes
    the lines of abandoned steps and events from the file and stores them in its own line, under
    `abandoned`. Therefore each step that was not abandoned has exactly one line.
    """
    return record.get("event", "step")


def end_begins(last_step: int) -> int:
    """Return the first step of the end of a run. Summaries, tables and plots use this definition.

    With N as the last step number, the end consists of the last N / 5 step numbers, rounded up, or
    of the last FEWEST_STEPS if that is more. A branch has only the steps after its starting
    checkpoint. But its step numbers continue the numbers of the earlier run, so its end has the
    same length as the end of a run that is not a branch.
    """
    return last_step + 1 - max(math.ceil(last_step * LAST_SHARE), FEWEST_STEPS)


def as_text(value: Any, key: str = "") -> str:
    """Format the value of a setting for a report. `key` is the setting's dotted key.

    Fingerprints and commit hashes are cut to 10 characters. Floats have no more digits than
    necessary. None is "not set", and booleans are spelled as in YAML.
    """
    if key == "precision":
        value = label(value)
    if value is None or isinstance(value, bool):
        return {None: "not set", True: "true", False: "false"}[value]
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", value):
        return value[:10]
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)


def observed_layers(products: Iterable[Mapping[str, Any]]) -> list[str]:
    """Summarise `products` of an audit as lines, the line with the most layers first.

    There is a line for each combination of effective precision, engine, weight dtype and reason.
    For example: "1 in bf16 on torch, weights float32 (scope linear excludes the LM head)".
    """
    kinds = Counter(
        (product["effective"], product["backend"], product["stored"], product["reason"])
        for product in products
    )
    lines = []
    for (effective, engine, stored, reason), number in kinds.most_common():
        because = f" ({reason})" if reason else ""
        engine_name = engine.replace("_", " ")
        lines.append(f"{number} in {effective} on {engine_name}, weights {stored}{because}")
    return lines


def same_measure(first: Record, second: Record, keys: Sequence[str] = MEASURE) -> bool:
    """Return True if two evaluations have equal values of all `keys`.

    A key that one of the records lacks is ignored.
    """
    return all(first[key] == second[key] for key in keys if key in first and key in second)


def evaluations_of_training(records: Iterable[Record]) -> Iterator[Record]:
    """Yield the evaluations after the first step of a run, in order.

    An evaluation before the first step measures the weights that the run started from.
    """
    from_first_step = itertools.dropwhile(lambda record: kind(record) != "step", records)
    return (record for record in from_first_step if kind(record) == "evaluation")


def best_evaluation(records: Iterable[Record]) -> Record | None:
    """Return the first evaluation with the lowest finite held-out loss, or None.

    records: evaluations, in the order of their steps. If the measure changes (the held-out packs or
        the precision), only the evaluations after the last change are compared.
    """
    best = None
    for record in records:
        loss = record["held_out_loss"]
        if loss is None or not math.isfinite(loss):
            continue
        if best is None or not same_measure(best, record) or loss < best["held_out_loss"]:
            best = record
    return best


@dataclass(frozen=True)
class RunRecord:
    """Content of the files in a run folder. The run may be finished or still training."""

    path: Path
    config: dict[str, Any]
    # Content of environment.json. The run writes this file whenever it is started or resumed.
    environment: dict[str, Any]
    # Lines of metrics.jsonl: steps and events.
    metrics: list[dict[str, Any]]
    # Summary of `metrics`.
    summary: dict[str, Any]
    # Content of audit.json and of summary.json, or an empty dict if the run has not written the
    # file yet.
    audit: dict[str, Any] = field(default_factory=dict)
    written_summary: dict[str, Any] = field(default_factory=dict)
    # True if the run temporarily shared its machine with other runs of a matrix. Then its speed
    # cannot be compared with the speed of other runs.
    side_by_side: bool = False

    @property
    def name(self) -> str:
        """Return the name of the run folder."""
        return self.path.resolve().name

    @property
    def recipe(self) -> Recipe:
        """Return the recipe in config.yaml. Raises InputError if its settings are not valid."""
        return parse(Recipe, self.config, str(self.path / CONFIG_FILE))

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the records of steps, without events."""
        return [record for record in self.metrics if kind(record) == "step"]

    def curve(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays: the step numbers (int64) and the values of `key` (float64).

        The values of "held_out_loss" are read from the evaluations, and the values of all other
        keys from the steps. A missing value is NaN, so that plots show a gap.
        """
        records = self.evaluations if key == "held_out_loss" else self.steps
        steps = [record["step"] for record in records]
        values = [math.nan if record.get(key) is None else record[key] for record in records]
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Return the evaluations on the same held-out packs and labels as the last evaluation.

        The held-out packs may have changed when the run was resumed.
        """
        last = self.last_evaluation
        return [
            record
            for record in self.metrics
            if kind(record) == "evaluation" and same_measure(record, last, HELD_OUT_LABELS)
        ]

    @property
    def last_evaluation(self) -> Record:
        """Return the last evaluation, or an empty record if the run has no evaluation."""
        return next((line for line in reversed(self.metrics) if kind(line) == "evaluation"), {})

    @property
    def is_evaluated_at_end(self) -> bool:
        """Return True if the last evaluation was after the last step, or if there was none."""
        last_step = self.summary["steps"]
        return bool(self.last_evaluation.get("step", last_step) == last_step)

    @property
    def when_evaluated(self) -> str:
        """Return the step of the last evaluation as " (step 10)", for reports.

        Return "" if the run `is_evaluated_at_end`. Reports append the text to the held-out loss.
        """
        if self.is_evaluated_at_end:
            return ""
        return f" (step {self.last_evaluation['step']:,})"

    @property
    def averaged_steps(self) -> str:
        """Return the steps over which the loss at the end is averaged: "steps 937 to 1,000"."""
        last = self.summary["steps"]
        return f"steps {last - self.summary[END_KEY] + 1:,} to {last:,}"

    @property
    def data_fingerprint(self) -> str | None:
        """Return the fingerprint of the training packs."""
        return self.environment.get("data_fingerprint")

    @property
    def source_config(self) -> dict[str, Any]:
        """Return the settings in the config.json of `model.source` when the run was last started.

        The keys are the same as in a run's identity (`pretrain.settings.config.identity_of`).
        """
        return self.environment.get("source_config", {})

    @property
    def past(self) -> dict[str, Any]:
        """Return the differences between the run's history and its config.

        `NO_PAST` in pretrain/checkpoint/state.py documents the keys.
        """
        return NO_PAST | self.environment.get("past", {})

    @property
    def settings(self) -> dict[str, Any]:
        """Return all settings of the run by dotted key.

        They include the config of `model.source` and the fingerprint of the training packs.
        """
        return {
            **flatten(self.config),
            **self.source_config,
            "data.fingerprint": self.data_fingerprint,
        }

    @property
    def changed_settings(self) -> dict[str, str]:
        """Map each setting that a resume has changed to a text with its values.

        For example, "42 to step 6, then 7" means that the value was 42 up to step 6 and is 7 since.
        """
        earlier: dict[str, str] = {}
        for change in self.past["changed"]:
            for key, value in change["was"].items():
                text = f"{as_text(value, key)} to step {change['step']:,}, then "
                earlier[key] = earlier.get(key, "") + text
        current = self.settings
        return {key: text + as_text(current.get(key), key) for key, text in earlier.items()}

    @property
    def devices(self) -> tuple[int, str]:
        """Return the number of devices and their name, such as (2, "NVIDIA H200") or (1, "CPU")."""
        launch = self.environment.get("accelerate", {})
        gpus = [] if launch.get("device", "cpu") == "cpu" else self.environment["gpus"]
        return launch.get("processes", 1), " and ".join(dict.fromkeys(gpus)) or "CPU"

    @property
    def tokens_per_step(self) -> int:
        """Return `batch.tokens`, the number of tokens per step."""
        return self.config["batch"]["tokens"]

    @property
    def precision(self) -> str | None:
        """Return the requested precision, such as "delayed" or "nvfp4 to 80 %, then bf16".

        If the run fell back to another precision, the text also has that precision in parentheses.
        """
        requested = label(self.config.get("precision"))
        effective = self.audit.get("schedule", self.audit.get("effective", requested))
        return requested if effective == requested else f"{requested} (ran {effective})"

    @property
    def audits(self) -> dict[str, Any]:
        """Map the name of each precision of the run to its audit, in the order of the phases.

        If audit.json does not exist yet, there is one entry, and its audit is empty.
        """
        if "precisions" in self.audit:
            return self.audit["precisions"]
        # Without a precision schedule, audit.json itself is the audit of the only precision.
        only_precision: Any = self.audit.get("effective", self.precision)
        return {only_precision: self.audit}

    @property
    def engine(self) -> str | None:
        """Return the engine of the matrix products, or None if the audit does not have it.

        The engine is "torch", "transformer_engine" or "emulation". For a precision schedule, the
        engine of the low-precision phases is returned.
        """
        engines = [audit.get("backend") for audit in self.audits.values()]
        return next((engine for engine in engines if engine != "torch"), engines[-1])

    @property
    def emulated(self) -> bool:
        """Return True if the precision was emulated.

        The losses of an emulated run are valid for the format. Its speed is not the speed of
        hardware that supports the format.
        """
        return self.engine == "emulation"

    @property
    def failure(self) -> str:
        """Return the reason why the training has failed, or "" if it has not failed.

        Examples are "was halted at step 2" and "has no finite loss from step 7 on". The results of
        a failed run must not be used as final results. Steps without labels have no loss and are
        ignored.
        """
        if "halted" in self.summary:
            return f"was halted at step {self.summary['steps']:,}"
        first_failed = None
        for step in self.steps:
            if step["loss"] is not None:
                first_failed = None
            elif first_failed is None and not step.get("unlabelled"):
                first_failed = step["step"]
        return "" if first_failed is None else f"has no finite loss from step {first_failed:,} on"

    @property
    def is_unfinished(self) -> bool:
        """Return True if the run has not reached its last step, or lacks its served loss.

        The number of the last step is the horizon in environment.json.
        """
        if self.summary["steps"] < self.environment.get("horizon", 0):
            return True
        served = self.config.get("evaluate", {}).get("served")
        return served is not None and "served_loss" not in self.summary

    @property
    def is_finished(self) -> bool:
        """Return True if the run has reached its last step and has then written its summary.

        The summary is the last file that a run writes. If the summary is for another step than the
        last step in metrics.jsonl, it is outdated, and the run is not finished.
        """
        return self.written_summary.get("steps") == self.summary["steps"] and not self.is_unfinished

    @property
    def has_ended(self) -> bool:
        """Return True if the run is finished or was halted, so that it cannot continue."""
        return self.is_finished or "halted" in self.summary


# ── Reading ───────────────────────────────────────────────────────────────────────────────────────


class NoStepYet(InputError):
    """The folder is not a run folder, or the run in it has not completed a step yet."""


def read_run(run_dir: Path, last_step: float = math.inf) -> RunRecord:
    """Read the files in the run folder `run_dir`.

    Lines of metrics.jsonl after step `last_step` are ignored. The summary is computed without these
    lines. Raises NoStepYet if `run_dir` is not a run folder, or if the run has no step yet.
    """
    folder = RunFolder(run_dir, owner=False)
    metrics = [record for record in read_metrics(run_dir) if record["step"] <= last_step]
    # The metrics may consist of an evaluation before the first step.
    if not any(kind(record) == "step" for record in metrics):
        raise NoStepYet(
            f"{run_dir / METRICS_FILE}: holds no step yet; wait until the run has completed its "
            "first step"
        )
    matrix_entry = _read_object(run_dir / MATRIX_FILE)
    return RunRecord(
        path=run_dir,
        config=load_yaml(folder.config),
        environment=_read_object(folder.environment),
        metrics=metrics,
        summary=summary_of(metrics),
        audit=_read_object(folder.audit),
        written_summary=_read_object(folder.summary),
        side_by_side=matrix_entry.get("side_by_side", False),
    )


def read_finished(run_dir: Path) -> RunRecord | None:
    """Return the run in `run_dir`, or None if it is not finished (`RunRecord.is_finished`)."""
    with suppress(InputError):
        run = read_run(run_dir)
        if run.is_finished:
            return run
    return None


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, which are steps and events.

    A last line without a line feed is ignored, because the run is still writing it. Raises
    NoStepYet if the file is missing, and InputError if another line is not a JSON object with the
    number of a step.
    """
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise NoStepYet(
            f"{path}: there is no such file; either {run_dir} is not a run folder, or its run has "
            "not started yet"
        )
    records = []
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        if line.endswith(b"\n"):
            place = f"{path}, line {number}: not a JSON object with an integer `step`"
            with as_input_error((ValueError, LookupError, TypeError), place, "remove that line"):
                record = json.loads(line)
                operator.index(record["step"])  # raises TypeError unless it is an integer
                records.append(record)
    return records


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty dict if the file does not exist yet."""
    return load_object(path, "restore the complete file") if path.exists() else {}


# ── Summary ───────────────────────────────────────────────────────────────────────────────────────


def summary_of(records: Sequence[Record]) -> dict[str, Any]:
    """Return the content of `summary.json`, computed from the lines of metrics.jsonl.

    Losses are in nats per token. Medians and `data_wait_share` exclude the first two steps. `hours`
    is the total duration of all steps. Starting the process, evaluating and saving do not count.
    The held-out loss is the loss of the last evaluation. An evaluation before the first step is not
    used. The served loss is measured after the last step (`evaluate.served`). Keys without a value
    are absent, for example the held-out loss of a run without an evaluation, and the MFU on a
    device whose peak is unknown.
    """
    steps = [record for record in records if kind(record) == "step"]
    last = steps[-1]
    steady = steps[WARM_UP_STEPS:] or steps
    first_of_end = end_begins(last["step"])
    end = [step for step in steps if step["step"] >= first_of_end]
    values = {
        "steps": last["step"],
        "tokens": last["tokens"],
        "epoch": last.get("epoch"),
        "hours": sum(_finite(steps, "step_ms")) / 3.6e6,
        "loss": last["loss"],
    }
    values[LOSS_KEY] = _statistic(statistics.fmean, end, "loss")
    values[END_KEY] = len(end)
    for evaluation in evaluations_of_training(records):
        values["held_out_loss"] = evaluation["held_out_loss"]
        values["held_out_perplexity"] = evaluation.get("held_out_perplexity")
    for record in records:
        if kind(record) == "served" and record["step"] == last["step"]:
            values["served_loss"] = record["served_loss"]
    for key in MEDIANS:
        values[key] = _statistic(statistics.median, steady, key)
    milliseconds = sum(_finite(steady, "step_ms")) or math.inf
    values["data_wait_share"] = sum(_finite(steady, "data_wait_ms")) / milliseconds
    values["memory_gib"] = _statistic(max, steps, "memory_gib")
    values["recompiles"] = sum(_finite(steps, "recompiles"))
    values["skipped_steps"] = sum(bool(step.get("skipped")) for step in steps)
    values["rollbacks"] = _statistic(max, records, "rollbacks")
    halts = [record["reason"] for record in records if kind(record) == "halted"]
    values["halted"] = halts[0] if halts else last.get("halted")
    return {key: value for key, value in values.items() if value is not None}


def _finite(records: Iterable[Record], key: str) -> list[float]:
    """Return the finite values of `key` in `records`.

    Records without the key and values of None are skipped. None represents NaN and infinity, which
    JSON does not support.
    """
    values = (record.get(key) for record in records)
    return [value for value in values if value is not None and math.isfinite(value)]


def _statistic(
    function: Callable[[list[float]], float], records: Iterable[Record], key: str
) -> float | None:
    """Apply `function` to the list of finite values of `key`. Return None if no value is finite.

    `function` returns one number for the list, such as the mean.
    """
    values = _finite(records, key)
    return function(values) if values else None


def last_screen(run: RunRecord, folder: RunFolder) -> tuple[str, dict[str, str]]:
    """Return the title and the rows of the panel that a finished run prints (`Console.panel`).

    A value that is not known has no row.
    """
    summary = run.summary
    steps = plural(summary["steps"], "step")
    tokens = count(summary["tokens"])
    hours = duration(summary["hours"] * 3600)
    first_step = run.steps[0]["step"]
    # In a branch, the first step is not 1. An earlier run has trained the steps before it.
    branch = f"; this run from step {first_step:,} on," if first_step > 1 else ""
    rows = {"trained": f"{steps}, {tokens} tokens{branch} in {hours}"}
    if LOSS_KEY in summary:
        rows["mean loss"] = f"{summary[LOSS_KEY]:.4f} (training loss, {run.averaged_steps})"
    if "held_out_loss" in summary:
        perplexity = f"perplexity {summary['held_out_perplexity']:.4g}"
        rows["held-out loss"] = f"{summary['held_out_loss']:.4f} ({perplexity})"
    speed = f"{count(summary['tokens_per_second'])} tokens/s"
    if "mfu_bf16_peak" in summary:
        speed += f", {percent(summary['mfu_bf16_peak'])} MFU"
    waited = percent(summary["data_wait_share"])
    rows["speed"] = f"{speed} (median), {waited} of the time waiting for data"
    rows["memory"] = memory(summary["memory_gib"])
    if folder.final.exists():
        rows["model"] = f"{folder.final} (AutoModelForCausalLM.from_pretrained loads it)"
    return f"{run.name}: done", rows
