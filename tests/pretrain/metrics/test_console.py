"""Console output: one line per step, its means, and robustness against any text."""

from __future__ import annotations

import io
import math
import os
import re
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pretrain.metrics.console import Console


def record(step: int = 120, **changes: float) -> dict[str, Any]:
    values: dict[str, Any] = {
        "step": step,
        "loss": 2.1337,
        "learning_rate": 1.96e-5,
        "gradient_norm": 1.518,
        "tokens_per_second": 47523.0,
        "memory_gib": 80.9,
        "calculation_method": "ours",
        "mfu_bf16_peak": 0.4963,
        "data_wait_ms": 2.8,
        "step_ms": 2757.0,
    }
    return values | changes


def output_of(
    act: Callable[[Console], object], total_steps: int = 2776, encoding: str = "utf-8"
) -> str:
    """Return the output of `act`, which is called with a Console."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with redirect_stdout(stream):
        act(Console(total_steps))
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def test_a_step_is_one_line_that_labels_each_figure():
    line = output_of(lambda console: console.step(record()))
    assert line.count("\n") == 1
    labelled = {
        "step": "120/2776",
        "loss": "2.1337",
        "lr": "1.96e-05",
        "grad": "1.52",
        "MFU": "49.6 %",
        "data wait": "0.1 %",
    }
    for label, figure in labelled.items():
        assert re.search(rf"{label} +{re.escape(figure)}", line)
    assert "47.5k tok/s" in line and "80.9 GiB" in line
    assert "… left" in line, "after the first step the time left is unknown"


def test_a_line_has_the_means_since_the_last_line():
    def act(console: Console) -> None:
        for step in range(1, 9):
            slow = 3.0 if step == 2 else 1.0
            rates = {"tokens_per_second": 1000 / slow, "mfu_bf16_peak": 0.4 / slow}
            times = {"step_ms": 100 * slow, "data_wait_ms": 10 * slow}
            changes = {"loss": step * 1.0, "learning_rate": step / 1e3, "gradient_norm": step * 1.0}
            console.step(record(step, **rates, **times, **changes), show=step % 4 == 0)

    first, second = output_of(act, total_steps=8).splitlines()
    # Four steps of 100 tokens in 100, 300, 100 and 100 ms.
    for line, pattern in (
        (first, r"4/8 .*loss  2\.5000   lr 4\.00e-03   grad +4 +667 tok/s   MFU 26\.7 %"),
        (second, r"8/8 .*loss  6\.5000   lr 8\.00e-03   grad +8 +1\.00k tok/s   MFU 40\.0 %"),
    ):
        assert re.search(rf"step {pattern} .* 10\.0 %", line)


def test_the_time_left_is_estimated_from_the_steps_of_this_process():
    def act(console: Console) -> None:
        console.step(record(101))
        time.sleep(0.05)
        console.step(record(102))

    line = output_of(act, total_steps=2102).splitlines()[1]
    assert re.search(r"\d [mhd] \d\d [smh] left", line), "2,000 steps of 0.05 s or more"


@given(value=st.floats(min_value=0) | st.just(math.nan))
def test_any_values_make_one_line(value):
    assert "nan" in output_of(lambda console: console.step(record(loss=math.nan)))
    changes = {"loss": value, "gradient_norm": value, "tokens_per_second": value}
    assert output_of(lambda console: console.step(record(**changes))).count("\n") == 1


@given(prompt=st.text(), text=st.text())
def test_no_sample_can_move_the_cursor_or_fail_on_an_ascii_log(prompt, text):
    for encoding in ("utf-8", "ascii"):
        output = output_of(lambda console: console.sample(prompt, text), encoding=encoding)
        for line in output.split("\n"):
            assert all(char.isprintable() for char in line)


def test_a_closed_pipe_ends_the_output_but_not_the_run():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        console = Console(2776)
        os.close(reader)
        with redirect_stdout(stream):
            for _ in range(3):
                console.notice("a line")
        assert not console.enabled
