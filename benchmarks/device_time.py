"""Timing what runs on a device. Each function times another thing, so figures of two of them do not compare."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch

WARM_UP, TIMES = 3, 10


def mark() -> torch.cuda.Event:
    """This moment, by the device's clock."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def median_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of TIMES runs that wait for each other, after WARM_UP; by the device's clock where it is a GPU."""
    seconds = []
    for turn in range(WARM_UP + TIMES):
        if device.type == "cuda":
            begin = mark()
            run()
            end = mark()
            end.synchronize()
            took = begin.elapsed_time(end) / 1e3
        else:
            began = time.perf_counter()
            run()
            took = time.perf_counter() - began
        if turn >= WARM_UP:
            seconds.append(took)
    return statistics.median(seconds)


def median_ms(run: Callable[[], object], times: int) -> float:
    """Median milliseconds from the end of one run to the end of the next, after two to warm up: host included."""
    marks = []
    for _ in range(times + 3):
        run()
        marks.append(mark())
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks[2:]))


def phases_ms(once: Callable[[], list[torch.cuda.Event]], times: int) -> tuple[float, float]:
    """Median milliseconds between the three marks of `once`, all queued before the device begins: host left out."""
    for _ in range(3):
        once()
    cycles = 2**26
    while True:
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        awake = mark()
        marks = [once() for _ in range(times)]
        queued_in_time = not awake.query()
        torch.cuda.synchronize()
        if queued_in_time:
            break
        cycles *= 2
    first = statistics.median(begin.elapsed_time(middle) for begin, middle, _ in marks)
    return first, statistics.median(middle.elapsed_time(end) for _, middle, end in marks)


def elapsed(function: Callable[[], None], device: torch.device) -> float:
    """Seconds of one run, host included: by the clock on CUDA; on a CPU the processor's, which other programs do not stretch."""
    if device.type == "cpu":
        began = time.process_time()
        function()
        return time.process_time() - began
    torch.cuda.synchronize()
    began = time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - began
