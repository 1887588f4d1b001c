"""What the user sees: how the run begins, a line a step, evaluations, samples, and where everything is at the end.

Lines are never rewritten, so a log file reads and greps like the screen. A narrow terminal drops the least important figures.
What takes long has a bar below them, on a terminal only (`foundation.progress`).
"""

from __future__ import annotations

import math
import os
import re
import shutil
import statistics
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from tqdm import tqdm

from foundation.tables import or_dash
from foundation.units import count, duration, memory, percent, three_digits

INDENT = "  "
SAMPLE_WIDTH, WIDEST = 96, 100
LEAST_ROOM = 20  # columns, below which text is not wrapped to fit
BOLD, DIM, YELLOW, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[33m", "\x1b[0m"


class Console:
    """Writes for one run; with `enabled=False`, as on all processes but the main one, it writes nothing."""

    def __init__(self, total_steps: int, *, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.total_steps = total_steps
        self.enabled = enabled
        self.stream = stream or sys.stdout
        self._first_end: tuple[int, float] | None = None  # the first step of this process, which compiles, and when it ended
        self._since_line: list[Mapping[str, Any]] = []  # steps that no line has told of yet
        self._told_of_means = False
        self._terminal = self.stream.isatty()
        self._shades = self._terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def panel(self, title: str, rows: Mapping[str, str], commands: Mapping[str, str] | None = None) -> None:
        """The first and the last screen: a title, aligned `label  text` rows, and commands to run next with what each does."""
        self._write("", self._shade(BOLD, title))
        width = max((len(label) for label in rows), default=0) + 2
        room = max((self._columns or sys.maxsize) - len(INDENT) - width, LEAST_ROOM)
        for label, text in rows.items():
            # A path or a command is not broken.
            wrapped = (textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) for line in text.splitlines())
            first, *rest = [piece for pieces in wrapped for piece in pieces or [""]] or [""]
            self._write(f"{INDENT}{self._shade(DIM, label.ljust(width))}{first}", *(INDENT + " " * width + line for line in rest))
        for what, command in (commands or {}).items():
            self._write("", f"{INDENT}{self._shade(DIM, what)}", f"{INDENT}{INDENT}{command}")
        self._write("")

    def step(self, record: Mapping[str, Any], *, show: bool = True) -> None:
        """A line, from a step's metrics object; with `show=False` the step only counts towards the next line and the time left.

        Loss, speed, utilisation and the wait for data are means since the line before, the other figures this step's.
        """
        if self._first_end is None:
            self._first_end = record["step"], time.monotonic()
        self._since_line.append(record)
        if not show:
            return
        if len(self._since_line) > 1 and not self._told_of_means:
            self._told_of_means = True
            self._write(self._shade(DIM, "loss, tok/s, MFU, data: means since the line before; lr, grad: of the step"))
        self._write(self._fit(self._figures(record | _means(self._since_line))))
        self._since_line.clear()

    def evaluation(self, record: Mapping[str, Any], seconds: float) -> None:
        """Held-out loss and perplexity, from the evaluation's metrics object, and the seconds it took."""
        what = f"{self._shade(BOLD, 'eval')} {self._position(record['step'])}"
        loss = f"held-out loss {self._shade(BOLD, format(record['held_out_loss'], '.4f'))}"
        prefix = "held_out_loss/"
        sources = [f"{key.removeprefix(prefix)} {record[key]:.4f}" for key in record if key.startswith(prefix)]
        by_source = f" ({', '.join(sources)})" if sources else ""
        penalty = f"   penalty {record['held_out_penalty']:.4f}" if "held_out_penalty" in record else ""
        perplexity = f"perplexity {record['held_out_perplexity']:.4g}{penalty}"
        self._write(f"{what}   {loss}{by_source}   {perplexity}   in {duration(seconds)}")

    def sample(self, prompt: str, text: str) -> None:
        """How the model continued `prompt`, behind a margin. Control characters in either are shown as escapes."""
        self._write(f"{INDENT}{self._shade(DIM, 'sample after')} {_visible(prompt)}")
        for line in _visible(text).split("\n"):
            for piece in textwrap.wrap(line, min(SAMPLE_WIDTH, max((self._columns or WIDEST) - 4, LEAST_ROOM))) or [""]:
                self._write(f"{INDENT}{self._shade(DIM, '│')} {piece}")

    def notice(self, text: str) -> None:
        """Something to know that needs no action: a checkpoint saved, a run resumed."""
        self._write(text)

    def warning(self, text: str) -> None:
        """Something the user should look at; the run goes on."""
        self._write(self._shade(YELLOW, f"WARNING  {text}"))

    def _figures(self, record: Mapping[str, Any]) -> list[tuple[int, str]]:
        """(rank, text) of every figure on a step's line, in order and of constant width. The highest rank is dropped first."""
        loss, penalty = (or_dash(record.get(key), "{:.4f}".format).rjust(7) for key in ("loss", "penalty"))
        figures = [
            (0, f"{self._shade(DIM, 'step')} {self._position(record['step'])}"),
            (0, f"{self._shade(DIM, 'loss')} {self._shade(BOLD, loss)}"),
            *([(3, f"{self._shade(DIM, 'penalty')} {penalty}")] if "penalty" in record else []),
            (1, f"{self._shade(DIM, 'lr')} {record['learning_rate']:.2e}"),
            (2, f"{self._shade(DIM, 'grad')} {_gradient(record['gradient_norm']):>6}"),
            (3, f"{count(record['tokens_per_second']):>6} {self._shade(DIM, 'tok/s')}"),
        ]
        if "mfu_bf16_peak" in record:
            figures.append((5, f"{self._shade(DIM, 'MFU')} {percent(record['mfu_bf16_peak']):>6}"))
        elif "tflops" in record:
            figures.append((8, f"{three_digits(record['tflops']):>6} {self._shade(DIM, 'TFLOP/s')}"))
        return [
            *figures,
            (6, f"{memory(record['memory_gib']):>9}"),
            (7, f"{self._shade(DIM, 'data')} {percent(record['data_wait_ms'] / record['step_ms']):>6}"),
            (4, f"{self._time_left(record['step']):>9} {self._shade(DIM, 'left')}"),
        ]

    def _time_left(self, step: int) -> str:
        """Returns what is left by the mean time of a step so far, with what goes by between steps, but without the first one."""
        first, ended = self._first_end
        return duration((self.total_steps - step) * (time.monotonic() - ended) / (step - first)) if step > first else "…"

    def _fit(self, figures: list[tuple[int, str]]) -> str:
        """The figures in one line; on a terminal only those that its width has room for, always those of rank 0."""
        while True:
            line = "   ".join(text for _, text in figures)
            shown = re.sub(r"\x1b\[\d+m", "", line)  # shades take no width
            if self._columns is None or len(shown) <= self._columns or not max(rank for rank, _ in figures):
                return line
            figures.remove(max(figures, key=lambda figure: figure[0]))

    @property
    def _columns(self) -> int | None:
        """The columns of the terminal, which may be resized; None where there is none."""
        return shutil.get_terminal_size().columns if self._terminal else None

    def _position(self, step: int) -> str:
        return f"{step:>{len(str(self.total_steps))}}/{self.total_steps}"

    def _shade(self, shade: str, text: str) -> str:
        return f"{shade}{text}{PLAIN}" if self._shades and text else text

    def _write(self, *lines: str) -> None:
        if not self.enabled:
            return
        encoding = self.stream.encoding or "utf-8"  # a sample in any script must not end a run whose log is ASCII
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


def _means(records: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """What a line says of several steps: of their losses and penalties that are numbers the means, None where no step has a
    label; speeds by all tokens over all their time."""
    times = [record["step_ms"] for record in records]
    rates = [key for key in ("tokens_per_second", "mfu_bf16_peak", "tflops") if all(key in record for record in records)]
    means = {key: math.fsum(r[key] * ms for r, ms in zip(records, times, strict=True)) / math.fsum(times) for key in rates}
    means |= {key: statistics.fmean(record[key] for record in records) for key in ("step_ms", "data_wait_ms")}
    for key in ("loss", "penalty"):
        known = [record[key] for record in records if record.get(key) is not None]
        if key in records[0]:
            means[key] = statistics.fmean([value for value in known if math.isfinite(value)] or [math.nan]) if known else None
    return means


def _gradient(norm: float) -> str:
    """0.412, 1.52, 38.1, 4120, 2e+07: six characters at most."""
    return three_digits(norm) if norm < 999.5 else f"{norm:.0f}" if norm < 1e6 else f"{norm:.0e}"


def _visible(text: str) -> str:
    """`text` with its control characters but line feeds as escapes: a sample must not move the cursor or ring the bell."""
    return "".join(char if char == "\n" or char.isprintable() else f"\\x{ord(char):02x}" for char in text.replace("\t", "    "))
