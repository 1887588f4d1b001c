"""The columns of all tables: what each shows, how it is written, and what it means. Console, Markdown and page have the same."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from foundation.units import UNKNOWN, count, markdown, memory, percent
from pretrain.compare.comparison import RunComparison, Standing, own_speed
from pretrain.compare.differences import CONFIDENCE, Gap
from pretrain.compare.fairness import keys_told_apart_by, option
from pretrain.metrics.run_record import END_KEY, FEWEST_STEPS, LOSS_KEY, RunRecord


@dataclass(frozen=True)
class Column:
    """A column of rows of any kind: a `Standing`, or a group of seeds. What is not known is None, and a dash."""

    title: str
    meaning: str
    value: Callable[[Any], Any]  # by which the page sorts
    form: Callable[[Any], str] = str
    mark: Callable[[Any], str] = lambda row: ""  # what stands behind a value that is known
    words: bool = False  # to the left, and sorted upwards first

    def known(self, row: Any) -> Any:
        value = self.value(row)
        return None if isinstance(value, float) and not math.isfinite(value) else value

    def text(self, row: Any) -> str:
        value = self.known(row)
        return UNKNOWN if value is None else self.form(value) + self.mark(row)


def table_of(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    words = max(place for place, column in enumerate(columns) if column.words) + 1
    header, cells = (
        [column.title for column in columns],
        [[column.text(row) for column in columns] for row in rows],
    )
    return markdown(header, cells, names=words)


def meanings(columns: Iterable[Column]) -> list[str]:
    return list(
        dict.fromkeys(f"{column.title}: {column.meaning}." for column in columns if column.meaning)
    )


def signed(nats: float, digits: int = 4) -> str:
    """+0.0004, with a minus as wide as a plus."""
    # nothing has no sign of its own
    return f"{round(nats, digits) + 0.0:+.{digits}f}".replace("-", "−")


def as_text(value: Any) -> str:
    """A setting as a reader writes it: the beginning of a fingerprint or a commit, a float without its noise."""
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", value):
        return value[:10]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _key(
    title: str,
    meaning: str,
    key: str,
    form: Callable[[Any], str],
    counts: Callable[[RunRecord], Any] = bool,
    **more: Any,
) -> Column:
    """A figure of summaries. `counts`: whether that of a run does; with `own_speed` it is one of hardware."""
    return Column(
        title,
        meaning,
        lambda each: each.run.summary.get(key) if counts(each.run) else None,
        form,
        **more,
    )


def _ended(each: Standing) -> str:
    return (
        ", halted"
        if "halted" in each.run.summary
        else ", not finished"
        if each.run.is_unfinished
        else ""
    )


AT_END = (
    f"the mean of the last fifth of the steps, or of the last {FEWEST_STEPS} where that is more"
)
RUN = Column("run", "", lambda each: each.label, words=True)


def figures_of(comparison: RunComparison) -> list[Column]:
    """All that some run knows something about."""
    differ = [
        Column(
            key,
            "a setting in which runs differ",
            lambda each, key=key: option(each.run, key),
            as_text,
            words=True,
        )
        for key in keys_told_apart_by(comparison.runs)
    ]
    speed = "median of all steps but the first two, padding included"
    # a branch may have fewer steps than the end of the others
    ends = {run.summary.get(END_KEY) for run in comparison.runs}
    of_steps = (
        (lambda each: f" (last {each.run.summary[END_KEY]})")
        if len(ends) > 1
        else (lambda each: "")
    )
    evaluated, emulated = (
        (lambda each: each.run.when_evaluated),
        (lambda each: " (emulated)" if each.run.emulated else ""),
    )
    columns = [
        RUN,
        Column(
            "precision",
            "what products are computed in",
            lambda each: each.run.precision,
            words=True,
        ),
        Column(
            "weights",
            "how weights are stored",
            lambda each: each.run.config.get("weights"),
            words=True,
        ),
        *differ,
        Column("backend", "what computed the products", lambda each: each.run.backend, words=True),
        _key("steps", "", "steps", "{:,}".format, mark=_ended),
        _key("tokens", "", "tokens", count),
        _key(
            "loss at the end",
            f"training loss, nats a token, {AT_END}",
            LOSS_KEY,
            "{:.4f}".format,
            mark=of_steps,
        ),
        _key(
            "held-out",
            "loss of packs that are not trained on",
            "held_out_loss",
            "{:.4f}".format,
            mark=evaluated,
        ),
        Column(
            "held-out − baseline",
            "where both were evaluated last in one step",
            lambda each: each.held_out_gap,
            signed,
        ),
        _key(
            "tok/s",
            speed,
            "tokens_per_second",
            "{:,.0f}".format,
            lambda run: not run.side_by_side,
            mark=emulated,
        ),
        Column("× baseline", "on one kind of machine", lambda each: each.speedup, "{:.2f}".format),
        _key(
            "MFU",
            "the model's FLOPs over the device's BF16 peak",
            "mfu_bf16_peak",
            percent,
            own_speed,
        ),
        _key(
            "MFU, nanoGPT's",
            "the same by nanoGPT's count of operations",
            "mfu_nanogpt",
            percent,
            own_speed,
        ),
        _key(
            "memory",
            "the most that was allocated on a GPU; on a CPU what the process held",
            "memory_gib",
            memory,
        ),
        _key(
            "frozen",
            "share of parameters whose update rounding has lost",
            "frozen_updates",
            percent,
        ),
        _key("data wait", "share of the steps' time", "data_wait_share", percent, own_speed),
    ]
    return [
        column
        for column in columns
        if any(column.known(each) is not None for each in comparison.standings)
    ]


def differences_of(comparison: RunComparison) -> list[Column]:
    """Each run's loss minus the baseline's at the end, paired by step, with its verdict."""

    def of_gap(
        title: str, meaning: str, value: Callable[[Gap], Any], form: Callable[[Any], str] = str
    ) -> Column:
        return Column(title, meaning, lambda each: value(each.gap) if each.gap else None, form)

    base, share = comparison.baseline.label, f"{100 * CONFIDENCE:.0f} %"
    interval = (
        f"half of the mean's {share} interval along this run, not over seeds. Neighbouring steps resemble each other, which it "
        f"allows for; none below {FEWEST_STEPS} steps"
    )
    verdict = (
        f"where the whole interval lies, within ± {comparison.tolerance:g} nats around the baseline or beyond. Beyond: one that "
        f"holds its {share} for all rows together (Bonferroni)"
    )
    return [
        RUN,
        of_gap(
            f"minus {base}, at the end",
            f"paired by step: {AT_END}",
            lambda gap: gap.mean,
            partial(signed, digits=5),
        ),
        of_gap(f"± {share}", interval, lambda gap: gap.half_width, "{:.5f}".format),
        of_gap("steps", "", lambda gap: gap.steps),
        Column("verdict", verdict, lambda each: each.verdict),
    ]
