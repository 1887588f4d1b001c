"""Columns of the report's tables. Console, Markdown and page use the same columns."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from foundation.units import UNKNOWN, count, markdown, memory, percent
from pretrain.compare.comparison import ComparedRun, RunComparison, own_speed
from pretrain.compare.differences import CONFIDENCE
from pretrain.compare.fairness import distinguishing_keys, option
from pretrain.metrics.run_record import END_KEY, FEWEST_STEPS, LOSS_KEY, RunRecord


@dataclass(frozen=True)
class Column:
    """A column of a table. Its rows are of any type, for example ComparedRun or GroupResult."""

    title: str
    meaning: str
    # Returns the value of a row, or None if it is unknown. The page sorts by it.
    value: Callable[[Any], Any]
    # Returns the text of a value.
    form: Callable[[Any], str] = str
    # Returns text to print behind the value of a row.
    suffix: Callable[[Any], str] = lambda row: ""
    # The column holds text: it is aligned to the left, and the page sorts it ascending first.
    is_text: bool = False

    def text(self, row: Any) -> str:
        """Return the text of a row, which is a dash for an unknown value."""
        value = self.value(row)
        return UNKNOWN if value is None else self.form(value) + self.suffix(row)


def table_of(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """Return a Markdown table."""
    header = [column.title for column in columns]
    cells = [[column.text(row) for column in columns] for row in rows]
    # Columns of text come first.
    return markdown(header, cells, names=sum(column.is_text for column in columns))


def meanings(columns: Iterable[Column]) -> list[str]:
    """Return an explanation of each column that has one."""
    texts = [f"{column.title}: {column.meaning}." for column in columns if column.meaning]
    return list(dict.fromkeys(texts))


def signed(nats: float, digits: int = 4) -> str:
    """Format a difference with its sign: +0.0004. The minus is as wide as the plus."""
    rounded = round(nats, digits) + 0.0  # turns -0.0 into 0.0
    return f"{rounded:+.{digits}f}".replace("-", "−")


def as_text(value: Any) -> str:
    """Format a setting: fingerprints and commits are shortened, floats lose their noise."""
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", value):
        return value[:10]
    return f"{value:g}" if isinstance(value, float) else str(value)


def column_of_part(
    attribute: str,
    title: str,
    meaning: str,
    value: Callable[[Any], Any],
    form: Callable[[Any], str] = str,
) -> Column:
    """Return a column with `value` of an attribute of the rows, for rows that have the attribute.

    The attribute of a row may be None.
    """

    def of_row(row: Any) -> Any:
        part = getattr(row, attribute)
        return None if part is None else value(part)

    return Column(title, meaning, of_row, form)


def _summary_column(
    title: str,
    meaning: str,
    key: str,
    form: Callable[[Any], str],
    counts: Callable[[RunRecord], Any] = bool,
    **options: Any,
) -> Column:
    """Return a column with `key` of the summaries.

    `counts` returns something true if the value of a run counts. With `own_speed` only speeds of
    hardware that the run had for itself count.
    """

    def value(compared: ComparedRun) -> Any:
        return compared.run.summary.get(key) if counts(compared.run) else None

    return Column(title, meaning, value, form, **options)


def _end_suffix(compared: ComparedRun) -> str:
    """Return a note for a run that has not finished normally."""
    if "halted" in compared.run.summary:
        return ", halted"
    return ", not finished" if compared.run.is_unfinished else ""


AT_END = f"the mean of the last fifth of the steps, or of the last {FEWEST_STEPS} if that is more"
RUN = Column("run", "", lambda compared: compared.label, is_text=True)


def figures_of(comparison: RunComparison) -> list[Column]:
    """Return the columns that have a value for at least one run."""
    # A branch may have fewer steps at its end than the other runs.
    is_same_end = len({run.summary.get(END_KEY) for run in comparison.runs}) == 1
    columns = [
        RUN,
        Column(
            "precision",
            "precision of the matrix products",
            lambda compared: compared.run.precision,
            is_text=True,
        ),
        Column(
            "weights",
            "storage of the weights",
            lambda compared: compared.run.config.get("weights"),
            is_text=True,
        ),
        *map(_setting_column, distinguishing_keys(comparison.runs)),
        Column(
            "backend", "engine of the products", lambda compared: compared.run.backend, is_text=True
        ),
        _summary_column("steps", "", "steps", "{:,}".format, suffix=_end_suffix),
        _summary_column("tokens", "", "tokens", count),
        _summary_column(
            "loss at the end",
            f"training loss in nats per token, {AT_END}",
            LOSS_KEY,
            "{:.4f}".format,
            suffix=lambda compared: (
                "" if is_same_end else f" (last {compared.run.summary[END_KEY]})"
            ),
        ),
        _summary_column(
            "held-out",
            "loss on packs that are not trained on",
            "held_out_loss",
            "{:.4f}".format,
            suffix=lambda compared: compared.run.when_evaluated,
        ),
        Column(
            "held-out − baseline",
            "if both were last evaluated after the same step",
            lambda compared: compared.held_out_gap,
            signed,
        ),
        _summary_column(
            "tok/s",
            "median over all steps except the first two, padding included",
            "tokens_per_second",
            "{:,.0f}".format,
            counts=lambda run: not run.side_by_side,
            suffix=lambda compared: " (emulated)" if compared.run.emulated else "",
        ),
        Column(
            "× baseline",
            "only on the same kind of machine",
            lambda compared: compared.speedup,
            "{:.2f}".format,
        ),
        _summary_column(
            "MFU",
            "the model's FLOPs over the device's BF16 peak",
            "mfu_bf16_peak",
            percent,
            counts=own_speed,
        ),
        _summary_column(
            "MFU, nanoGPT's",
            "the same with nanoGPT's count of FLOPs",
            "mfu_nanogpt",
            percent,
            counts=own_speed,
        ),
        _summary_column(
            "memory",
            "peak allocation on a GPU; on a CPU the memory of the process",
            "memory_gib",
            memory,
        ),
        _summary_column(
            "frozen",
            "share of parameters whose update was lost to rounding",
            "frozen_updates",
            percent,
        ),
        _summary_column(
            "data wait",
            "share of the steps' time spent waiting for data",
            "data_wait_share",
            percent,
            counts=own_speed,
        ),
    ]
    rows = comparison.compared_runs
    return [column for column in columns if any(column.value(row) is not None for row in rows)]


def _setting_column(key: str) -> Column:
    """Return the column of a setting that differs between runs."""
    return Column(
        key,
        "a setting in which runs differ",
        lambda compared: option(compared.run, key),
        as_text,
        is_text=True,
    )


def differences_of(comparison: RunComparison) -> list[Column]:
    """Return columns with each run's loss minus the baseline's at the end, and its verdict."""
    gap_column = partial(column_of_part, "gap")
    base = comparison.baseline.label
    confidence = f"{100 * CONFIDENCE:.0f} %"

    return [
        RUN,
        gap_column(
            f"minus {base}, at the end",
            f"paired by step: {AT_END}",
            lambda gap: gap.mean,
            partial(signed, digits=5),
        ),
        gap_column(
            f"± {confidence}",
            f"half of the {confidence} interval of the mean along this run, not over seeds. It "
            f"considers that neighbouring steps are correlated. Below {FEWEST_STEPS} steps there "
            "is none",
            lambda gap: gap.half_width,
            "{:.5f}".format,
        ),
        gap_column("steps", "", lambda gap: gap.steps),
        Column(
            "verdict",
            f"position of the interval: within ± {comparison.tolerance:g} nats around the "
            f"baseline, or beyond. A run is called beyond only if the {confidence} hold for all "
            "rows together (Bonferroni)",
            lambda compared: compared.verdict,
        ),
    ]
