"""Whole small runs against what they gave when the file beside this was written: nothing that is computed changes unnoticed.

    python -m pytest tests/golden                  # all of it; `-k bf16` for a part
    python -m pytest tests/golden --write-golden   # write expected.json anew, after a change of numerics that was wanted

Losses and gradient norms agree everywhere to a tolerance. On the machine that wrote the file (CPU and torch), all figures and the
hashes of the weights are equal to the bit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture
def compare(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], None]:
    """Compare results with the expected ones of this name, or write them there."""

    def check(name: str, results: dict[str, Any]) -> None:
        expected = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
        if request.config.getoption("write_golden"):
            expected[name] = results | {"machine": machine()}
            EXPECTED.write_text(
                re.sub(r"\n {6,}", " ", json.dumps(expected, indent=2, sort_keys=True)) + "\n"
            )
            return
        there = expected[name]
        for key, values in there["figures"].items():
            tolerance = IN_FP32 if there["effective"].keys() == {"fp32"} else IN_FEWER_BITS[key]
            assert results["figures"][key] == pytest.approx(values, rel=tolerance, nan_ok=True), key
        assert results["effective"] == there["effective"]
        if there["machine"] == machine():
            assert results == {key: there[key] for key in results}

    return check


# which is launched below
@pytest.mark.parametrize("name", [name for name in RUNS if name != "ddp"])
def test_a_run_computes_what_it_did(
    name: str, folder: Path, start_here: Callable, start_as_ranks: Callable, compare: Callable
) -> None:
    (folder / name).mkdir()
    outcome = train(RUNS[name], folder, folder / name / "run", start_here, start_as_ranks)
    assert outcome.status == 0, outcome.output
    compare(name, results_of(RUNS[name], folder / name / "run"))


@pytest.mark.multi
@pytest.mark.long
def test_accelerate_launch_of_ddp_computes_what_it_did(
    folder: Path, start_in_processes: Callable, compare: Callable
) -> None:
    """README's command for DDP, as a user types it."""
    run_dir = folder / "launched" / "run"
    launch = ["--config_file", "accelerate_configs/ddp.yaml", "--num_processes", "2"]
    recipe = recipe_of(RUNS["ddp"], folder, run_dir)
    environment = forking() | {"ACCELERATE_USE_CPU": "true"}
    outcome = start_in_processes(
        recipe, folder / "launched", *RUNS["ddp"].settings, launch=launch, **environment
    )
    assert outcome.status == 0, outcome.output
    compare("ddp", results_of(RUNS["ddp"], run_dir))
