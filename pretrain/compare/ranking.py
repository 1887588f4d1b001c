"""The cells of a matrix, best first by held-out loss, with every key in which they differ, from what runs have written so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.tables import markdown, or_dash
from pretrain.compare.fairness import in_words, of_one_text
from pretrain.compare.matrix_file import Matrix, MatrixRun
from pretrain.compare.report import EMULATED, mean_loss, speed_of
from pretrain.metrics.run_record import LOSS_KEY, RunRecord, averaged_steps, read_run

BEST = 10  # cells that are shown while others still run
OTHER_TEXT = "The cells were evaluated on different text, so their held-out losses do not say which is better."


class Ranking:
    """The table of a matrix, made again whenever a cell has ended; what a finished cell has written is read once.

    `runs`: of these cells alone. `by_speed`: the fastest first, where that is what is looked for."""

    def __init__(self, matrix: Matrix, runs: Sequence[MatrixRun] | None = None, *, by_speed: bool = False) -> None:
        self._matrix = matrix
        self._runs = matrix.runs if runs is None else runs
        self._by_speed = by_speed
        self._finished: dict[str, RunRecord] = {}

    def table(self, best: int | None = None) -> str:
        """Markdown: finished cells from the lowest held-out loss to the highest, then those without one by the mean of their last
        training losses, then those that are not finished; the `best` first ones only, or all. A folder that holds another
        training, of other settings, is named in its place."""
        written = [(run, record) for run in self._runs if (record := self._read(run)) is not None]
        found = [(run, record) for run, record in written if run.name in self._finished or run.is_in_its_folder()]
        shown = {run.name for run, _ in found}
        strange = [run for run, _ in written if run.name not in shown]
        others = f"left out, since their run folders hold trainings of other settings: {_told_apart(strange)}" if strange else ""
        if not found:
            return others or "No cell has trained a step yet."
        found.sort(key=lambda pair: self._place(*pair))
        varied = self._matrix.varied
        averaged = sorted({averaged_steps(record.summary) for _, record in found})
        header = ["#", *varied, "held-out", f"loss, last {' or '.join(map(str, averaged[-2:]))}", "steps", "tok/s"]
        rows = [
            [str(number), *(run.value(key) for key in varied), *self._figures(run, record)]
            for number, (run, record) in enumerate(found[:best], start=1)
        ]
        left = len(self._runs) - len(written)
        notes = [
            f"{len(found) - len(rows)} more" if len(rows) < len(found) else "",
            f"{left} of {len(self._runs)} cells have not begun" if left and best is None else "",
            others,
            EMULATED if any(record.emulated for _, record in found[:best]) else "",
            "" if of_one_text([record for _, record in found if "held_out_loss" in record.summary]) else OTHER_TEXT,
        ]
        return "\n\n".join(filter(None, [markdown(header, rows, names=1 + len(varied)), *notes]))

    def _read(self, run: MatrixRun) -> RunRecord | None:
        if run.name not in self._finished:
            try:
                record = read_run(Path(run.run_dir))
            except InputError:  # not begun, or its first step is still to come
                return None
            if not run.is_finished():
                return record
            self._finished[run.name] = record
        return self._finished[run.name]

    def _place(self, run: MatrixRun, record: RunRecord) -> tuple[bool, float, float]:
        if self._by_speed:
            return run.name not in self._finished, -record.summary.get("tokens_per_second", 0.0), 0.0
        losses = (record.summary.get(key) for key in ("held_out_loss", LOSS_KEY))
        held_out, trained = (math.inf if loss is None or math.isnan(loss) else loss for loss in losses)
        return run.name not in self._finished, held_out, trained

    def _figures(self, run: MatrixRun, record: RunRecord) -> list[str]:
        figures = record.summary
        done = "" if run.name in self._finished else ", halted" if "halted" in figures else ", not finished"

        def written(key: str, form: Callable[[Any], str]) -> str:
            return or_dash(figures.get(key), form)

        return [
            written("held_out_loss", lambda loss: f"{loss:.4f}{record.when_evaluated}"),
            mean_loss(record),
            f"{figures['steps']}{done}",
            speed_of(record),
        ]


def _told_apart(runs: Sequence[MatrixRun]) -> str:
    """The names of `runs`, whose folders hold other trainings, and what the first of these is another one by."""
    names = ", ".join(run.name for run in runs)
    try:
        differ = in_words(runs[0].unlike_in_its_folder())
    except InputError:  # damaged, or of another version
        return names
    remedy = "give the `key=value` that they were trained with, or name another `run_dir` in the matrix"
    return f"{names}. {runs[0].run_dir} (now, and then): {differ}; {remedy}"
