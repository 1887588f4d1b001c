"""The parts of a timeline add up to the time since the launch."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from foundation.timeline import Timeline


def test_a_nested_part_does_not_count_for_the_outer_part() -> None:
    timeline = Timeline()

    @timeline.part("inner")
    def inner() -> None:
        time.sleep(0.2)

    began = time.monotonic()
    with timeline.part("outer"):
        inner()
        time.sleep(0.1)
        inner()
    outside = time.monotonic() - began
    timeline.end()
    parts = timeline.start
    assert parts["inner"] >= 0.4 and 0.1 <= parts["outer"] <= outside - 0.4 + 0.002
    others = {"imports", "launcher"} & parts.keys()
    assert parts["total"] == pytest.approx(
        parts["inner"] + parts["outer"] + sum(parts[name] for name in others), abs=0.01
    )


def test_a_part_that_raises_is_left() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError), timeline.part("failing"):
        raise ValueError
    timeline.end()
    assert timeline._running == ["imports"]


def test_the_first_part_begins_with_the_launch_of_the_process() -> None:
    program = (
        "import time; time.sleep(0.5); from foundation.timeline import START; START.end(); "
        "print(START.start['imports'])"
    )
    began = time.monotonic()
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert 0.45 < float(output) <= time.monotonic() - began + 0.05
