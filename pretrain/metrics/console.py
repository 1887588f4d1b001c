"""Console output of a run: plan, one line per step, evaluations, samples and the final summary.

Printed lines are never rewritten, so a log file contains the same lines as the screen. On a
terminal, long tasks also show a progress bar below the lines (`foundation.progress`).
"""

from __future__ import annotations

import math
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tqdm import tqdm

from foundation.progress import Progress
from foundation.units import count, duration, memory, or_dash, percent

INDENT = "  "
# Text between the parts of a step's line.
SEPARATOR = "   "


class Console:
    """Console output of one run.

    Args:
        total_steps: Number of steps of the run.
        enabled: True to print. With False, which ranks above 0 use, nothing is printed.
    """

    def __init__(self, total_steps: int, *, enabled: bool = True) -> None:
        self.total_steps = total_steps
        self.enabled = enabled
        # Number of the first step of this process, and the time at which this step ended. The value
        # is None until this step has ended.
        self._first_end: tuple[int, float] | None = None
        # Metrics of the steps since the last printed step line.
        self._since_line: list[Mapping[str, Any]] = []

    def panel(self, title: str, rows: Mapping[str, str]) -> None:
        """Print a title and below it the rows, aligned as `label  text`.

        A run prints a panel at its start and at its end. `rows` maps each label to its text.
        """
        width = max(map(len, rows), default=0) + 2
        margin = "\n" + INDENT + " " * width
        lines = [
            INDENT + label.ljust(width) + text.replace("\n", margin) for label, text in rows.items()
        ]
        self.notice("", title, *lines, "")

    def step(self, record: Mapping[str, Any], *, show: bool = True) -> None:
        """Print a line with the metrics of a step.

        Loss, penalty, speed, utilization and data wait are means over all steps since the last
        printed line. All other numbers belong to this step alone.

        Args:
            record: Metrics of the step.
            show: True to print a line. If False, the step is included in the means of the next
                printed line, and in the estimate of the time left.
        """
        self._first_end = self._first_end or (record["step"], time.monotonic())
        self._since_line.append(record)
        if show:
            self.notice(SEPARATOR.join(self._parts(record)))
            self._since_line.clear()

    def evaluation(self, record: Mapping[str, Any], seconds: float) -> None:
        """Print held-out loss, perplexity and duration of an evaluation.

        `record` contains the metrics of the evaluation. `seconds` is its duration.
        """
        parts = [
            f"eval {self._position(record['step'])}",
            f"held-out loss {record['held_out_loss']:.4f}",
            f"perplexity {record['held_out_perplexity']:.4g}",
            f"in {duration(seconds)}",
        ]
        self.notice(SEPARATOR.join(parts))

    def sample(self, prompt: str, text: str) -> None:
        """Print a prompt and the text that the model generated after it.

        Control characters are replaced by escapes, and several empty lines by one.
        """
        shown = re.sub(r"\n(\s*\n)+", "\n\n", _escape_controls(text))
        lines = [f"{INDENT}│ {line}" for line in shown.split("\n")]
        self.notice(f"{INDENT}sample after {_escape_controls(prompt)}", *lines)

    def progress(self, task: str, unit: str = "", **options: Any) -> Progress:
        """Return a progress bar for `task`. The bar is shown on a terminal only.

        `unit` is the unit of the counter. `options` are options of `Progress`.
        """
        return Progress(task, unit, self.enabled and sys.stderr.isatty(), **options)

    def notice(self, *lines: str) -> None:
        """Print `lines`. A disabled console prints nothing.

        If a progress bar is visible, the lines appear above the bar. A notice is information that
        needs no action, such as a saved checkpoint.
        """
        if not self.enabled:
            return
        # Replace characters that the encoding of the stream cannot represent. Otherwise a
        # generated text with such a character would end the run, for example if the log is ASCII.
        encoding = sys.stdout.encoding or "utf-8"
        text = "".join(f"{line}\n" for line in lines).encode(encoding, "replace").decode(encoding)
        try:
            with tqdm.external_write_mode(file=sys.stdout):
                sys.stdout.write(text)
                sys.stdout.flush()
        except OSError:
            # The terminal was closed, Ctrl-C ended the `tee` that reads our output, or the disk of
            # the log is full. The run continues, because metrics.jsonl has every number. The stream
            # is redirected to the null device. Otherwise Python would fail at exit, when it
            # flushes the buffer of the stream.
            self.enabled = False
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), sys.stdout.fileno())

    def warning(self, text: str) -> None:
        """Print a warning for the user. The run continues."""
        self.notice(f"WARNING  {text}")

    def _parts(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Yield the parts of a step's line from left to right, each padded to a constant width."""
        milliseconds = math.fsum(step["step_ms"] for step in self._since_line)
        yield f"step {self._position(record['step'])}"
        yield f"loss {self._loss('loss')}"
        if "penalty" in record:
            yield f"penalty {self._loss('penalty')}"
        yield f"lr {record['learning_rate']:.2e}"
        yield f"grad {record['gradient_norm']:>8.3g}"
        yield f"{count(self._rate('tokens_per_second', milliseconds)):>6} tok/s"
        if "mfu_bf16_peak" in record:
            mfu = percent(self._rate("mfu_bf16_peak", milliseconds))
            yield f"MFU {mfu:>6}"
        yield f"{memory(record['memory_gib']):>9}"
        waited = math.fsum(step["data_wait_ms"] for step in self._since_line)
        yield f"data wait {percent(waited / milliseconds):>6}"
        yield f"{self._time_left(record['step']):>9} left"

    def _loss(self, key: str) -> str:
        """Return the mean of a loss over the steps since the last line, as text of constant width.

        `key` is the key of the loss in the steps' metrics. The text is a dash if no step has a
        value, because no token of these steps has a label.
        """
        values = [record[key] for record in self._since_line if record.get(key) is not None]
        mean = statistics.fmean(values) if values else None
        return or_dash(mean, "{:.4f}".format).rjust(7)

    def _rate(self, key: str, milliseconds: float) -> float:
        """Return the mean of the rate `key` over the steps since the last line.

        Each step is weighted by its duration. `milliseconds` is the total duration of these steps.
        """
        return (
            math.fsum(record[key] * record["step_ms"] for record in self._since_line) / milliseconds
        )

    def _time_left(self, step: int) -> str:
        """Return the estimated time until the end of the run as text, or "…" at the first step.

        The estimate is the number of remaining steps times the mean time of a step. The mean
        includes the time between steps. It excludes the first step of this process, because that
        step compiles the model.
        """
        first, ended = self._first_end or (step, math.nan)
        if step <= first:
            return "…"
        seconds_per_step = (time.monotonic() - ended) / (step - first)
        return duration((self.total_steps - step) * seconds_per_step)

    def _position(self, step: int) -> str:
        """Return `step` and the total number of steps as text of constant width."""
        return f"{step:>{len(str(self.total_steps))}}/{self.total_steps}"


def _escape_controls(text: str) -> str:
    """Return `text` with escapes in place of control characters, and spaces in place of tabs.

    Line feeds are kept. Other control characters in a generated text could move the cursor or ring
    the bell of the terminal.
    """
    safe = {"\n", " ", *filter(str.isprintable, text)}
    return "".join(char if char in safe else f"\\x{ord(char):02x}" for char in text.expandtabs(4))
