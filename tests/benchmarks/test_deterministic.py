"""benchmarks/deterministic.py: what counts as the same bits, what a difference is called, and which runs are kept."""

from __future__ import annotations

import copy
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import machine, throughput_packs
from benchmarks.deterministic import EQUAL, Training, cost, verdict
from tests.conftest import ROOT
from tests.ranks import ForkedLaunch

SAME = {"two runs": EQUAL, "killed and resumed": EQUAL}


@pytest.fixture
def alone() -> dict[str, Any]:
    return {"figures": [[step, 4.0 / step, 1.0, 0.1, 0.0] for step in range(1, 9)], "tensors": {"model": "aa", "optimizer": "bb"}}


@pytest.fixture
def killed(alone: dict[str, Any]) -> dict[str, Any]:
    """After step 5, from a checkpoint of an earlier one."""
    return copy.deepcopy(alone) | {"before_the_kill": copy.deepcopy(alone["figures"][:5])}


def test_equal_runs_are_equal(alone: dict[str, Any], killed: dict[str, Any]) -> None:
    assert verdict(alone, killed) == SAME


def test_a_last_bit_before_the_kill_is_between_two_runs(alone: dict[str, Any], killed: dict[str, Any]) -> None:
    killed["before_the_kill"][2][1] += 2.0**-50
    found = verdict(alone, killed)
    assert found["two runs"].startswith("DIFFERENT: step 3: [1.333") and found["killed and resumed"] == EQUAL


@pytest.mark.parametrize("missing", [True, False])
def test_tensors_that_differ_or_are_not_there_are_no_equal_end(
    missing: bool, alone: dict[str, Any], killed: dict[str, Any]
) -> None:
    if missing:
        alone["tensors"] = killed["tensors"] = None
    else:
        killed["tensors"]["optimizer"] = "cc"
    named = "tensors are not there" if missing else "optimizer"
    assert verdict(alone, killed) == SAME | {"killed and resumed": f"DIFFERENT: the last checkpoint's {named}"}


def test_a_run_of_fewer_steps_is_not_equal(alone: dict[str, Any], killed: dict[str, Any]) -> None:
    killed["figures"].pop()
    assert verdict(alone, killed)["killed and resumed"] == "DIFFERENT: 8 steps and 7"


def test_the_cost_is_taken_from_the_runs_before_and_after() -> None:
    speeds = [{"tokens_per_second": {"median": each}} for each in (98.0, 101.0, 99.0)]
    assert cost(speeds[0], speeds[1:]) == pytest.approx(0.02)


def test_a_kept_run_is_not_made_again_and_not_taken_for_that_of_another_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real launcher, on a CPU, in a forked process."""
    monkeypatch.setattr(machine, "subprocess", SimpleNamespace(Popen=ForkedLaunch, STDOUT=subprocess.STDOUT))
    throughput_packs.write(tmp_path / "packs", 128, 512, 8)
    recipe, config = ROOT / "benchmarks/tiny.yaml", ROOT / "accelerate_configs/cpu.yaml"
    settings = ["precision=fp32", "parity=off", f"data.packs={tmp_path / 'packs'}"]
    training = Training(recipe, config, [*settings, "weights=fp32"], tmp_path / "runs", steps=4, saved=1)
    found, log = training.alone(), tmp_path / "runs" / "alone.log"
    assert len(found["figures"]) == 4 and found["tensors"] and "weights=fp32" in found["command"]
    log.unlink()
    assert training.alone() == found and not log.exists()
    for other in (replace(training, overrides=[*settings, "weights=bf16_exact"]), replace(training, steps=5)):
        with pytest.raises(SystemExit, match="was made by another command; name another --folder or --out"):
            other.alone()
    assert not log.exists()
