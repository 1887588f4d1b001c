"""Console output of a run: plan, one line per step, evaluations, samples and the final summary.

Lines are never rewritten, so a log file reads like the screen and can be searched. Long tasks show
a progress bar below the lines, on a terminal only (`foundation.progress`).
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from tqdm import tqdm

from foundation.progress import Progress
from foundation.units import count, duration, memory, or_dash, percent

INDENT = "  "


class Console:
    """Console output of one run. Writes nothing with `enabled=False`, as on ranks above 0."""

    def __init__(
        self, total_steps: int, *, enabled: bool = True, stream: TextIO | None = None
    ) -> None:
        self.total_steps = total_steps
        self.enabled = enabled
        self.stream = stream or sys.stdout
        # The first step of this process, which compiles, and the time at which it ended. (0, 0.0)
        # before it has ended.
        self._first_end: tuple[int, float] = (0, 0.0)
        # Steps since the last printed line.
        self._since_line: list[Mapping[str, Any]] = []

    def panel(self, title: str, rows: Mapping[str, str]) -> None:
        """Print a title and aligned `label  text` rows, at the start or the end of a run."""
        self._write("", title)
        width = max(map(len, rows), default=0) + 2
        margin = "\n" + INDENT + " " * width
        for label, text in rows.items():
            self._write(INDENT + label.ljust(width) + text.replace("\n", margin))
        self._write("")

    def step(self, record: Mapping[str, Any], *, show: bool = True) -> None:
        """Print a line for a step from its metrics.

        With `show=False` the step only counts for the next line and the time left. Loss, speed,
        utilization and data wait are means since the last line. All other numbers are of this
        step alone.
        """
        if not self._first_end[0]:
            self._first_end = (record["step"], time.monotonic())
        self._since_line.append(record)
        if show:
            self._write("   ".join(self._figures(record)))
            self._since_line.clear()

    def evaluation(self, record: Mapping[str, Any], seconds: float) -> None:
        """Print the held-out loss and perplexity of an evaluation's metrics, and its duration."""
        prefix = "held_out_loss/"
        sources = [
            f"{key.removeprefix(prefix)} {record[key]:.4f}"
            for key in record
            if key.startswith(prefix)
        ]
        by_source = f" ({', '.join(sources)})" if sources else ""
        has_penalty = "held_out_penalty" in record
        penalty = f"   penalty {record['held_out_penalty']:.4f}" if has_penalty else ""
        self._write(
            f"eval {self._position(record['step'])}   "
            f"held-out loss {record['held_out_loss']:.4f}{by_source}   "
            f"perplexity {record['held_out_perplexity']:.4g}{penalty}   in {duration(seconds)}"
        )

    def sample(self, prompt: str, text: str) -> None:
        """Print a prompt and the generated text. Control characters are shown as escapes."""
        self._write(f"{INDENT}sample after {_escape_controls(prompt)}")
        for line in _escape_controls(text).split("\n"):
            self._write(f"{INDENT}│ {line}")

    def progress(self, task: str, unit: str = "", **options: Any) -> Progress:
        """Return a progress bar for `task`, counted in `unit`. It is shown on a terminal only."""
        return Progress(task, unit, self.enabled and sys.stderr.isatty(), **options)

    def notice(self, text: str) -> None:
        """Print information that needs no action, such as a saved checkpoint."""
        self._write(text)

    def warning(self, text: str) -> None:
        """Print a warning that the user should look at. The run continues."""
        self._write(f"WARNING  {text}")

    def _figures(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Yield the numbers of a step's line in order. Each has a constant width."""
        milliseconds = math.fsum(step["step_ms"] for step in self._since_line)
        yield f"step {self._position(record['step'])}"
        yield f"loss {self._loss('loss')}"
        if "penalty" in record:
            yield f"penalty {self._loss('penalty')}"
        if "gap/loss" in record:
            yield f"gap to BF16 {record['gap/loss']:+.1e}, cosine {record['gap/cosine']:.4f}"
        yield f"lr {record['learning_rate']:.2e}"
        yield f"grad {record['gradient_norm']:>8.3g}"
        yield f"{count(self._rate('tokens_per_second', milliseconds)):>6} tok/s"
        if "mfu_bf16_peak" in record:
            mfu = percent(self._rate("mfu_bf16_peak", milliseconds))
            yield f"MFU {mfu:>6} ({record['calculation_method']})"
        yield f"{memory(record['memory_gib']):>9}"
        waited = math.fsum(step["data_wait_ms"] for step in self._since_line)
        yield f"data {percent(waited / milliseconds):>6}"
        yield f"{self._time_left(record['step']):>9} left"

    def _loss(self, key: str) -> str:
        """Return the mean of the finite values of `key` since the last line, of constant width.

        Return NaN if no value is finite, and a dash if no step has a value because it has no
        labels.
        """
        values = [record[key] for record in self._since_line if record.get(key) is not None]
        finite = [value for value in values if math.isfinite(value)]
        mean = statistics.fmean(finite or [math.nan]) if values else None
        return or_dash(mean, "{:.4f}".format).rjust(7)

    def _rate(self, key: str, milliseconds: float) -> float:
        """Return the mean of the rate `key` since the last line, weighted by the steps' time."""
        weighted = (record[key] * record["step_ms"] for record in self._since_line)
        return math.fsum(weighted) / milliseconds

    def _time_left(self, step: int) -> str:
        """Return the estimated time left from the mean time of a step.

        The mean includes the time between steps, but not the first step, which compiles.
        """
        first, ended = self._first_end
        if step <= first:
            return "…"
        seconds_per_step = (time.monotonic() - ended) / (step - first)
        return duration((self.total_steps - step) * seconds_per_step)

    def _position(self, step: int) -> str:
        """Return `step` and the total number of steps, with a constant width."""
        return f"{step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _write(self, *lines: str) -> None:
        """Print lines without disturbing a progress bar."""
        if not self.enabled:
            return
        # Replace characters that the log's encoding lacks: a sample in any script must not end a
        # run whose log is ASCII.
        encoding = self.stream.encoding or "utf-8"
        text = "".join(f"{line}\n" for line in lines).encode(encoding, "replace").decode(encoding)
        try:
            with tqdm.external_write_mode(file=self.stream):
                self.stream.write(text)
                self.stream.flush()
        except OSError:
            # The terminal was closed, Ctrl-C ended the `tee` that reads our output, or the disk of
            # the log is full. The run continues, because metrics.jsonl has every number. Redirect
            # the stream to the null device, or Python would fail to flush its buffer at exit.
            self.enabled = False
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), self.stream.fileno())


def _escape_controls(text: str) -> str:
    """Replace control characters except line feeds by escapes, and tabs by spaces.

    A sample must not move the cursor or ring the bell.
    """
    return "".join(
        char if char == "\n" or char.isprintable() else f"\\x{ord(char):02x}"
        for char in text.replace("\t", "    ")
    )
