"""What the user sees: how the run begins, a line a step, evaluations, samples, and where everything is at the end.

Lines are never rewritten, so a log file reads and greps like the screen. What takes long has a bar below them, on a terminal only
(`foundation.progress`).
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
    """Writes for one run; with `enabled=False`, as on all processes but the main one, it writes nothing."""

    def __init__(
        self, total_steps: int, *, enabled: bool = True, stream: TextIO | None = None
    ) -> None:
        self.total_steps = total_steps
        self.enabled = enabled
        self.stream = stream or sys.stdout
        # the first step of this process, which compiles, and when it ended
        self._first_end: tuple[int, float] | None = None
        self._since_line: list[Mapping[str, Any]] = []  # steps that no line has told of yet

    def panel(self, title: str, rows: Mapping[str, str]) -> None:
        """The first and the last screen: a title, and aligned `label  text` rows."""
        self._write("", title)
        width = max(map(len, rows), default=0) + 2
        for label, text in rows.items():
            self._write(
                INDENT + label.ljust(width) + text.replace("\n", "\n" + INDENT + " " * width)
            )
        self._write("")

    def step(self, record: Mapping[str, Any], *, show: bool = True) -> None:
        """A line, from a step's metrics object; with `show=False` the step only counts towards the next line and the time left.

        Loss, speed, utilisation and the wait for data are means since the line before, the other figures this step's.
        """
        if self._first_end is None:
            self._first_end = record["step"], time.monotonic()
        self._since_line.append(record)
        if show:
            self._write("   ".join(self._figures(record)))
            self._since_line.clear()

    def evaluation(self, record: Mapping[str, Any], seconds: float) -> None:
        """Held-out loss and perplexity, from the evaluation's metrics object, and the seconds it took."""
        prefix = "held_out_loss/"
        sources = [
            f"{key.removeprefix(prefix)} {record[key]:.4f}"
            for key in record
            if key.startswith(prefix)
        ]
        by_source = f" ({', '.join(sources)})" if sources else ""
        penalty = (
            f"   penalty {record['held_out_penalty']:.4f}" if "held_out_penalty" in record else ""
        )
        self._write(
            f"eval {self._position(record['step'])}   held-out loss {record['held_out_loss']:.4f}{by_source}   "
            f"perplexity {record['held_out_perplexity']:.4g}{penalty}   in {duration(seconds)}"
        )

    def sample(self, prompt: str, text: str) -> None:
        """How the model continued `prompt`, behind a margin. Control characters in either are shown as escapes."""
        self._write(f"{INDENT}sample after {_visible(prompt)}")
        for line in _visible(text).split("\n"):
            self._write(f"{INDENT}│ {line}")

    def progress(self, task: str, unit: str = "", **options: Any) -> Progress:
        """A context manager that shows on a terminal how far `task` is, of whose `unit`s `total` are to be done."""
        return Progress(task, unit, self.enabled and sys.stderr.isatty(), **options)

    def notice(self, text: str) -> None:
        """Something to know that needs no action: a checkpoint saved, a run resumed."""
        self._write(text)

    def warning(self, text: str) -> None:
        """Something the user should look at; the run goes on."""
        self._write(f"WARNING  {text}")

    def _figures(self, record: Mapping[str, Any]) -> Iterator[str]:
        """Yields every figure of a step's line, in order and of constant width."""
        loss, penalty = (
            or_dash(self._mean(key), "{:.4f}".format).rjust(7) for key in ("loss", "penalty")
        )
        milliseconds = math.fsum(each["step_ms"] for each in self._since_line)
        yield f"step {self._position(record['step'])}"
        yield f"loss {loss}"
        if "penalty" in record:
            yield f"penalty {penalty}"
        if "gap/loss" in record:
            yield f"gap to BF16 {record['gap/loss']:+.1e}, cosine {record['gap/cosine']:.4f}"
        yield f"lr {record['learning_rate']:.2e}"
        yield f"grad {record['gradient_norm']:>8.3g}"
        yield f"{count(self._rate('tokens_per_second', milliseconds)):>6} tok/s"
        if "mfu_bf16_peak" in record:
            yield f"MFU {percent(self._rate('mfu_bf16_peak', milliseconds)):>6} ({record['calculation_method']})"
        yield f"{memory(record['memory_gib']):>9}"
        waited = math.fsum(each["data_wait_ms"] for each in self._since_line)
        yield f"data {percent(waited / milliseconds):>6}"
        yield f"{self._time_left(record['step']):>9} left"

    def _mean(self, key: str) -> float | None:
        """Over the finite values since the line before; NaN where none is finite, None where no step has a label."""
        known = [record[key] for record in self._since_line if record.get(key) is not None]
        finite = [value for value in known if math.isfinite(value)]
        return statistics.fmean(finite or [math.nan]) if known else None

    def _rate(self, key: str, milliseconds: float) -> float:
        """The rate `key` over all of their time."""
        return (
            math.fsum(record[key] * record["step_ms"] for record in self._since_line) / milliseconds
        )

    def _time_left(self, step: int) -> str:
        """Returns what is left by the mean time of a step so far, with what goes by between steps, but without the first one."""
        first, ended = self._first_end
        return (
            duration((self.total_steps - step) * (time.monotonic() - ended) / (step - first))
            if step > first
            else "…"
        )

    def _position(self, step: int) -> str:
        return f"{step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _write(self, *lines: str) -> None:
        if not self.enabled:
            return
        # a sample in any script must not end a run whose log is ASCII
        encoding = self.stream.encoding or "utf-8"
        text = "".join(f"{line}\n" for line in lines).encode(encoding, "replace").decode(encoding)
        try:
            with tqdm.external_write_mode(file=self.stream):
                self.stream.write(text)
                self.stream.flush()
        except OSError:
            # The terminal closed, Ctrl-C ended the `tee` that read our output, or a log's disk is full. The run goes on, since
            # metrics.jsonl has every figure. What is still buffered goes nowhere: at exit Python would fail to flush it.
            self.enabled = False
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self.stream.fileno())


def _visible(text: str) -> str:
    """`text` with its control characters but line feeds as escapes: a sample must not move the cursor or ring the bell."""
    return "".join(
        char if char == "\n" or char.isprintable() else f"\\x{ord(char):02x}"
        for char in text.replace("\t", "    ")
    )
