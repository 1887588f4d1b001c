"""Compare small runs with the results in expected.json, so that no change of numerics is missed.

    python -m pytest tests/golden -m ""                  # all runs; `-k bf16` for some
    python -m pytest tests/golden -m "" --write-golden   # overwrite expected.json

Losses and gradient norms agree within a tolerance on every machine. With the CPU and the torch
version that wrote the file, all figures and the hashes of weights are equal bit for bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.forked_commands import forking
from tests.golden.runs import (
    OF_EVERY_COMMIT,
    RUNS,
    machine,
    poisoned_once,
    recipe_of,
    results_of,
    write_sources,
)

EXPECTED = Path(__file__).with_name("expected.json")
# Tolerances for other processors, which may sum in another order, for example with AMX.
FP32_TOLERANCE = 1e-5
LOW_PRECISION_TOLERANCES = {"loss": 5e-3, "held_out_loss": 5e-3, "gradient_norm": 8e-2}
# Another order of sums changes which values a stochastic rounding rounds up. The losses of NVFP4 on
# two processors differed by 0.54 % after five steps.
FP4_TOLERANCES = LOW_PRECISION_TOLERANCES | {"loss": 1e-2, "held_out_loss": 1e-2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    write_sources(folder)
    return folder


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], None]:
    """Function that compares the results of a run with expected.json, or writes them to it."""

    def check(name: str, results: dict[str, Any]) -> None:
        expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
        if request.config.getoption("write_golden"):
            expected[name] = results | {"machine": machine()}
            EXPECTED.write_text(
                re.sub(r"\n {6,}", " ", json.dumps(expected, indent=2, sort_keys=True)) + "\n"
            )
            return
        entry = expected[name]
        in_fp32 = entry["effective"].keys() == {"fp32"}
        in_fp4 = any(name.endswith("fp4") for name in entry["effective"])
        tolerances = FP4_TOLERANCES if in_fp4 else LOW_PRECISION_TOLERANCES
        for key, values in entry["figures"].items():
            tolerance = FP32_TOLERANCE if in_fp32 else tolerances[key]
            assert results["figures"][key] == pytest.approx(values, rel=tolerance, nan_ok=True), key
        assert results["effective"] == entry["effective"]
        if entry["machine"] == machine():
            assert results == {key: entry[key] for key in results}

    return check


OTHERS = RUNS.keys() - OF_EVERY_COMMIT - {"ddp"}  # The test below launches `ddp`.


@pytest.mark.parametrize(
    "name",
    [
        *sorted(OF_EVERY_COMMIT),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in sorted(OTHERS)),
    ],
)
def test_a_run_computes_what_it_did(
    name: str, folder: Path, start_here: Callable, compare: Callable
) -> None:
    run = RUNS[name]
    run_dir = folder / name / "run"
    run_dir.parent.mkdir()
    arguments = (recipe_of(run, folder, run_dir), run_dir.parent, *run.settings)
    with ExitStack() as stack:
        if run.poisoned:
            stack.enter_context(poisoned_once(run_dir, steps_before=3))
        finished = start_here(*arguments, topology=run.launch, processes=run.processes).done()
    compare(name, results_of(run, finished))


@pytest.mark.nightly
def test_accelerate_launch_of_ddp_computes_what_it_did(
    folder: Path, train: Callable, compare: Callable
) -> None:
    """The command is README's command for DDP."""
    run_dir = folder / "launched" / "run"
    launch = ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "2"]
    recipe = recipe_of(RUNS["ddp"], folder, run_dir)
    environment = forking() | {"ACCELERATE_USE_CPU": "true"}
    launched = train(*RUNS["ddp"].settings, recipe=recipe, launch=launch, env=environment)
    compare("ddp", results_of(RUNS["ddp"], launched.done()))
