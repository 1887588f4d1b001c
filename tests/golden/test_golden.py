"""Whole small runs against what they gave when the file beside this was written: nothing that is computed changes unnoticed.

    python -m pytest tests/golden                  # all of it; `-k bf16` for a part
    python -m pytest tests/golden --write-golden   # write expected.json anew, after a change of numerics that was wanted

Losses and gradient norms agree everywhere to a tolerance. On the machine that wrote the file (CPU and torch), all figures and the
hashes of the weights are equal to the bit.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pretrain.__main__ import main as pretrain
from tests.forked_commands import forking
from tests.golden.runs import RUNS, machine, recipe_of, results_of, train, write_sources

EXPECTED = Path(__file__).with_name("expected.json")
# On another processor, which may add up in another order, as one with AMX does.
IN_FP32, IN_FEWER_BITS = 1e-5, {"loss": 5e-3, "held_out_loss": 5e-3, "gradient_norm": 8e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    write_sources(folder)
    return folder


@pytest.fixture(scope="module")
def finished(folder: Path, start_here: Callable, start_as_ranks: Callable) -> Callable[[str], Path]:
    """Train the run of this name, once; returns its folder."""
    done: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in done:
            (folder / name).mkdir(exist_ok=True)
            outcome = train(RUNS[name], folder, folder / name / "run", start_here, start_as_ranks)
            assert outcome.status == 0, outcome.output
            done[name] = folder / name / "run"
        return done[name]

    return run


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], None]:
    """Compare results with the expected ones of this name, or write them there."""

    def check(name: str, results: dict[str, Any]) -> None:
        expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
        if request.config.getoption("write_golden"):
            expected[name] = results | {"machine": machine()}
            EXPECTED.write_text(re.sub(r"\n {6,}", " ", json.dumps(expected, indent=2, sort_keys=True)) + "\n")
            return
        there = expected[name]
        for key, values in there["figures"].items():
            tolerance = IN_FP32 if there["effective"].keys() == {"fp32"} else IN_FEWER_BITS[key]
            assert results["figures"][key] == pytest.approx(values, rel=tolerance, nan_ok=True), key
        assert results.get("effective") == there.get("effective")
        if there["machine"] == machine():
            assert {key: results[key] for key in ("figures", "hashes") if key in results} == {
                key: there[key] for key in ("figures", "hashes") if key in there
            }

    return check


@pytest.mark.parametrize("name", [name for name in RUNS if name != "ddp"])  # which is launched below
def test_a_run_computes_what_it_did(name: str, finished: Callable, compare: Callable) -> None:
    compare(name, results_of(RUNS[name], finished(name)))


def test_a_run_that_went_on_from_its_middle_equals_one_that_nobody_stopped(finished: Callable) -> None:
    """The expected file says it of `resume`; this says it of today's code, on any machine."""
    first = results_of(RUNS["delayed"], finished("delayed"))
    assert results_of(RUNS["resume"], finished("resume")) == first


def test_the_report_subtracts_losses_step_by_step(finished: Callable, folder: Path) -> None:
    names, page = ("bf16_exact_fused", "delayed"), folder / "report.html"
    first, second = (results_of(RUNS[name], finished(name))["figures"]["loss"] for name in names)
    runs = [str(finished(name)) for name in names]
    assert pretrain(["report", *runs, "--vary", "precision", "--vary", "fp8_config", "--out", str(page)]) == 0
    assert f"{statistics.fmean(b - a for a, b in zip(first, second, strict=True)):+.5f}" in page.read_text()


@pytest.mark.multi
@pytest.mark.long
def test_accelerate_launch_of_ddp_computes_what_it_did(folder: Path, start_in_processes: Callable, compare: Callable) -> None:
    """README's command for DDP, as a user types it."""
    run_dir = folder / "launched" / "run"
    launch = ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "2"]
    recipe = recipe_of(RUNS["ddp"], folder, run_dir)
    environment = forking() | {"ACCELERATE_USE_CPU": "true"}
    outcome = start_in_processes(recipe, folder / "launched", *RUNS["ddp"].settings, launch=launch, **environment)
    assert outcome.status == 0, outcome.output
    compare("ddp", results_of(RUNS["ddp"], run_dir))
