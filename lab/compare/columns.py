"""Columns of the report's tables. The console and the HTML page use the same columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from foundation.units import UNKNOWN, count, memory, percent, signed, tables
from lab.compare.comparison import ComparedRun, hardware_speed
from lab.compare.fairness import distinguishing_keys, effective_value
from pretrain.metrics.run_record import (
    FEWEST_STEPS,
    LOSS_KEY,
    RunRecord,
    as_text,
)


@dataclass(frozen=True)
class Column:
    """A column of a table.

    A row of the table is an object, for example a ComparedRun or a GroupResult. `value` computes
    the value of a row in this column.
    """

    title: str
    # Explanation of the column, without a full stop. "" if the title explains itself.
    meaning: str
    # Function that returns the value of a row, or None if the value is not known. The page sorts
    # the rows by this value.
    value: Callable[[Any], Any]
    # Function that formats a value as text.
    form: Callable[[Any], str] = str
    # Function that returns a text to append to the formatted value of a row.
    suffix: Callable[[Any], str] = lambda row: ""
    # True if the values are texts instead of numbers. In the HTML page, text columns are aligned to
    # the left, and the first click on the title of a text column sorts the rows in ascending order.
    is_text: bool = False

    def text(self, row: Any) -> str:
        """Return the text of this column in a row, or a dash if the value is not known."""
        value = self.value(row)
        return UNKNOWN if value is None else self.form(value) + self.suffix(row)


def with_values(columns: Sequence[Column], rows: Sequence[Any]) -> list[Column]:
    """Return the columns that have a value in at least one row."""
    return [column for column in columns if any(column.value(row) is not None for row in rows)]


def tables_of(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Return Markdown tables with one line for each row (`foundation.units.tables`)."""
    header = [column.title for column in columns]
    return tables(header, [[column.text(row) for column in columns] for row in rows])


def _summary_column(
    title: str,
    meaning: str,
    key: str,
    form: Callable[[Any], str],
    is_shown: Callable[[RunRecord], Any] = bool,
    **options: Any,
) -> Column:
    """Return a column with the value of `key` in each run's summary. The rows are ComparedRuns.

    Args:
        title: Title of the column.
        meaning: Explanation of the column, or "".
        key: Key of the summary.
        form: Function that formats the value as text.
        is_shown: Function of a run. If its result is false or None, the value of the run is not
            shown. For example, `hardware_speed` is None for emulated precisions.
        options: Values for other fields of Column.
    """

    def value(compared: ComparedRun) -> Any:
        return compared.run.summary.get(key) if is_shown(compared.run) else None

    return Column(title, meaning, value, form, **options)


AT_END = (
    f"mean over the last fifth of the steps, or over the last {FEWEST_STEPS} (or all) if a fifth "
    "is less"
)


def columns_for(compared_runs: Sequence[ComparedRun]) -> list[Column]:
    """Return the columns of the table with all figures of the runs.

    Columns without a value for any run are omitted.
    """
    # The loss at the end is a mean over steps. If the averaged steps differ between the runs, the
    # suffix of the loss shows the averaged steps.
    runs = [compared.run for compared in compared_runs]
    ends = {run.averaged_steps for run in runs}
    columns = [
        Column("run", "", lambda compared: compared.label, is_text=True),
        Column(
            "precision",
            "precision of the matrix products",
            lambda compared: compared.run.precision,
            is_text=True,
        ),
        Column(
            "weights",
            "dtype of the stored weights",
            lambda compared: compared.run.config.get("weights"),
            is_text=True,
        ),
        *map(_setting_column, distinguishing_keys(runs)),
        Column(
            "backend",
            "engine that computes the matrix products",
            lambda compared: compared.run.engine,
            is_text=True,
        ),
        _summary_column(
            "steps",
            "",
            "steps",
            "{:,}".format,
            suffix=lambda compared: ", not finished" if compared.run.is_unfinished else "",
        ),
        _summary_column("tokens", "", "tokens", count),
        _summary_column(
            "loss at the end",
            f"training loss in nats per token, {AT_END}",
            LOSS_KEY,
            "{:.4f}".format,
            suffix=lambda compared: f" ({compared.run.averaged_steps})" if len(ends) > 1 else "",
        ),
        Column(
            "loss − baseline",
            "training loss minus the baseline's training loss in nats per token, at the same steps "
            f"of both runs: {AT_END}. There is no verdict, because another seed would give another "
            "difference",
            lambda compared: compared.loss_gap,
            partial(signed, digits=5),
        ),
        _summary_column(
            "held-out",
            "loss in nats per token on held-out packs, which are not used for training",
            "held_out_loss",
            "{:.4f}".format,
            suffix=lambda compared: compared.run.when_evaluated,
        ),
        _summary_column(
            "served",
            "loss on held-out packs in the precision `evaluate.served`, after the last step",
            "served_loss",
            "{:.4f}".format,
        ),
        _summary_column(
            "tok/s",
            "tokens per second, including padding: median over all steps except the first two",
            "tokens_per_second",
            "{:,.0f}".format,
            is_shown=lambda run: not run.side_by_side,
        ),
        Column(
            "× baseline",
            "speed divided by the baseline's speed, if both runs used the same kind of machine",
            lambda compared: compared.speedup,
            "{:.2f}".format,
        ),
        _summary_column(
            "MFU",
            "model FLOPs utilization: the model's FLOP/s divided by the device's BF16 peak",
            "mfu_bf16_peak",
            percent,
            is_shown=hardware_speed,
        ),
        _summary_column(
            "memory",
            "peak of the allocated memory on a GPU, or the memory of the process on a CPU",
            "memory_gib",
            memory,
        ),
        _summary_column(
            "frozen",
            "share of the parameters whose update was lost to rounding",
            "frozen_updates",
            percent,
        ),
        _summary_column(
            "data wait",
            "share of the steps' time spent waiting for data",
            "data_wait_share",
            percent,
            is_shown=lambda run: not run.side_by_side,
        ),
    ]
    return with_values(columns, compared_runs)


def _setting_column(key: str) -> Column:
    """Return the column of the setting `key`, which differs between runs."""
    return Column(
        key,
        "a setting that differs between the runs",
        lambda compared: effective_value(compared.run, key),
        as_text,
        is_text=True,
    )
