"""A trial of a W&B sweep without a network: the shipped sweep file, its own agent, and the launcher as the agent starts it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pretrain.run.command_line import LaunchParser
from pretrain.settings.config import load_recipe, run_dir_of

ROOT = Path(__file__).parents[2]
SWEEP = yaml.safe_load((ROOT / "recipes/sweeps/smoke.yaml").read_text())

# In the launcher's place: what it was started with.
CAPTURE = """
import json, os, sys
ours = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}
open(os.environ["CAPTURED"], "w").write(json.dumps([sys.argv[1:], ours]))
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[list[str], dict[str, str]]]:
    """Have wandb's agent start a trial, as when its server has sent one: the arguments and variables that the launcher gets."""
    from wandb.wandb_agent import Agent

    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):  # which the agent sets
        monkeypatch.setenv(name, "")
    captured, program = tmp_path / "captured.json", tmp_path / "capture.py"
    program.write_text(CAPTURE)
    for name, value in {"WANDB_DIR": tmp_path, "WANDB_SWEEP_ID": "sw33p", "CAPTURED": captured}.items():
        monkeypatch.setenv(name, str(value))

    def start(run_id: str, **parameters: Any) -> tuple[list[str], dict[str, str]]:
        ours = Agent(api=None, queue=None)
        ours._sweep_command = list(SWEEP["command"])  # as the agent reads it from the sweep
        args = {key.replace("__", "."): {"value": value} for key, value in parameters.items()}
        done = ours._process_command({"id": 1, "type": "run", "run_id": run_id, "program": str(program), "args": args})
        assert "exception" not in done, done
        assert ours._run_processes[run_id].wait() == 0
        arguments, variables = json.loads(captured.read_text())
        return arguments, variables

    return start


def test_each_trial_of_a_sweep_trains_in_a_folder_of_its_own_and_reports_to_its_run(
    agent, launcher_here, small_recipe, tmp_path, monkeypatch
):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({key: value for key, value in small_recipe.items() if key != "run_dir"}))

    def start_trial(run_id: str, rate: float) -> tuple[list[str], dict[str, str]]:
        arguments, variables = agent(run_id, optimizer__learning_rate=rate, optimizer__weight_decay=0.1)
        assert arguments[0] == "recipes/smoke.yaml" and f"--optimizer.learning_rate={rate}" in arguments
        return [text.replace("run_dir=runs", f"run_dir={tmp_path}/runs") for text in arguments[1:]], variables

    arguments, variables = start_trial("tr1al", 0.0012)
    for name, value in (variables | {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}).items():
        monkeypatch.setenv(name, value)
    status, _, said = launcher_here(str(recipe), *arguments, "train.steps=3", "checkpoint.at_end=false", "parity=off")
    sys.modules["wandb"].teardown()
    assert status == 0, said
    folder = tmp_path / "runs/sweep/lr0.0012-wd0.1"
    assert yaml.safe_load((folder / "config.yaml").read_text())["optimizer"]["learning_rate"] == 0.0012
    assert json.loads((folder / "trackers.json").read_text()).keys() == {"wandb"}
    (stored,) = (folder / "wandb").glob("offline-run-*/run-tr1al.wandb")
    for expected in (SWEEP["metric"]["name"], "sw33p", "loss_picture"):
        assert expected.encode() in stored.read_bytes()

    arguments, _ = start_trial("tr2al", 3e-5)
    settings = LaunchParser(None).read([str(recipe), *arguments]).overrides
    assert run_dir_of(load_recipe(recipe, settings)) == tmp_path / "runs/sweep/lr3e-05-wd0.1"
