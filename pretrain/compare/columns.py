"""The columns of all tables: what each shows, how it is written, and what it means. Console, Markdown and page have the same."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from foundation.units import UNKNOWN, count, markdown, memory, percent, three_digits
from pretrain.compare.comparison import RunComparison, Standing
from pretrain.compare.differences import CONFIDENCE, FEWEST_STEPS, Gap
from pretrain.compare.fairness import keys_told_apart_by, option
from pretrain.metrics.run_record import LAST_STEPS, LOSS_KEY, averaged_steps


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
    header, cells = [column.title for column in columns], [[column.text(row) for column in columns] for row in rows]
    return markdown(header, cells, names=words)


def meanings(columns: Iterable[Column]) -> list[str]:
    return list(dict.fromkeys(f"{column.title}: {column.meaning}." for column in columns if column.meaning))


def signed(nats: float, digits: int = 4) -> str:
    """+0.0004, with a minus as wide as a plus."""
    return f"{round(nats, digits) + 0.0:+.{digits}f}".replace("-", "−")  # nothing has no sign of its own


def as_text(value: Any) -> str:
    """A setting as a reader writes it: the beginning of a fingerprint or a commit, a float without its noise."""
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", value):
        return value[:10]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _key(title: str, meaning: str, key: str, form: Callable[[Any], str], **more: Any) -> Column:
    return Column(title, meaning, lambda each: each.run.summary.get(key), form, **more)


def _of_hardware(title: str, meaning: str, key: str, form: Callable[[Any], str]) -> Column:
    """A figure of hardware that computes the precision itself, and that the run had for itself."""
    return Column(title, meaning, lambda each: each.run.summary.get(key) if each.speed is not None else None, form)


def _ended(each: Standing) -> str:
    return ", halted" if "halted" in each.run.summary else ", not finished" if each.run.is_unfinished else ""


def _averaged(each: Standing) -> str:
    steps = averaged_steps(each.run.summary)
    return "" if steps == LAST_STEPS else f" (of {steps})"


RUN = Column("run", "folder of the run", lambda each: each.label, words=True)
STEPS = _key("steps", "updates so far", "steps", "{:,}".format, mark=_ended)
_MEAN = "training loss, mean of the last steps, nats a token"
LOSS = _key(f"loss, last {LAST_STEPS}", _MEAN, LOSS_KEY, "{:.4f}".format, mark=_averaged)
_HELD_OUT = "loss of packs that are not trained on, nats a token"
HELD_OUT = _key("held-out", _HELD_OUT, "held_out_loss", "{:.4f}".format, mark=lambda each: each.run.when_evaluated)
SPEED = Column(
    "tok/s",
    "tokens a second, median of all steps but the first two, padding included",
    lambda each: each.shown_speed,
    "{:,.0f}".format,
    mark=lambda each: " (emulated)" if each.run.emulated else "",
)
_MFU = "the model's floating-point operations over the device's BF16 peak"
_RECIPE = "the share of a step that its products would take, each at its precision's peak"
_MEMORY = "the most that torch had allocated on a GPU; on a CPU what the process held"


def figures_of(comparison: RunComparison) -> list[Column]:
    """All that some run knows something about."""
    differ = [
        Column(key, "a setting in which runs differ", lambda each, key=key: option(each.run, key), as_text, words=True)
        for key in keys_told_apart_by(comparison.runs)
    ]
    held_out_gap = "of the step in which both were evaluated last, on the same packs"
    speedup = "tokens/s over the baseline's, on one kind of machine"
    columns = [
        RUN,
        Column("precision", "what products are computed in", lambda each: each.run.precision, words=True),
        Column("weights", "how weights are stored", lambda each: each.run.config.get("weights"), words=True),
        *differ,
        Column("backend", "what computed the products", lambda each: each.run.backend, words=True),
        STEPS,
        _key("tokens", "read so far", "tokens", count),
        LOSS,
        HELD_OUT,
        Column("held-out − baseline", held_out_gap, lambda each: each.held_out_gap, signed),
        _key("perplexity", "e to the held-out loss", "held_out_perplexity", "{:.4g}".format),
        SPEED,
        Column("× baseline", speedup, lambda each: each.speedup, "{:.2f}".format),
        _of_hardware("MFU", _MFU, "mfu_bf16_peak", percent),
        _of_hardware("MFU, nanoGPT's", "the same by nanoGPT's count of operations", "mfu_nanogpt", percent),
        _of_hardware("MFU, recipe's peak", _RECIPE, "mfu_recipe_peak", percent),
        _key("memory", _MEMORY, "memory_gib", memory),
        _key("frozen", "share of parameters whose update rounding has lost", "frozen_updates", percent),
        _of_hardware("data wait", "share of the steps' time", "data_wait_share", percent),
        _of_hardware("tok/J", "tokens a joule, by the GPUs' own counters; no host, no cooling", "tokens_per_joule", three_digits),
    ]
    return [column for column in columns if any(column.known(each) is not None for each in comparison.standings)]


def differences_of(comparison: RunComparison) -> list[Column]:
    """Each run's loss minus the baseline's, paired by step, over all common steps and at the end, with its verdict."""

    def of_all(each: Standing) -> Gap | None:
        return None if each.is_baseline or each.differences is None else Gap.over(each.differences[1])

    def of_end(each: Standing) -> Gap | None:
        return each.gap

    def of_gap(title: str, meaning: str, gap_of: Callable[[Standing], Gap | None], figure: str, form: Any = str) -> Column:
        return Column(title, meaning, lambda each: (gap := gap_of(each)) and getattr(gap, figure), form)

    mean, nats = partial(signed, digits=5), "{:.5f}".format
    error = (
        "the standard error of the mean difference. Neighbouring steps resemble each other, so it is computed from the means of "
        "batches of floor(sqrt(n)) consecutive steps"
    )
    end = f"the last fifth of the steps, or the last {FEWEST_STEPS} where that is more"
    share = f"{100 * CONFIDENCE:.0f} %"
    interval = f"half of the {share} interval of the end, by Student's t over these batches; none below {FEWEST_STEPS} steps"
    verdict = f"where the whole interval of the end lies, within ± {comparison.tolerance:g} nats around the baseline or beyond"
    return [
        RUN,
        of_gap(f"minus {comparison.baseline.label}, all", "", of_all, "mean", mean),
        of_gap("std. error", error, of_all, "standard_error", nats),
        of_gap("at the end", end, of_end, "mean", mean),
        of_gap("std. error", error, of_end, "standard_error", nats),
        of_gap(f"± {share}", interval, of_end, "half_width", nats),
        of_gap("steps", "", of_end, "steps"),
        Column("verdict", verdict, lambda each: each.verdict),
    ]
