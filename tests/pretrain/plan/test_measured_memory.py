"""Plans of the runs in a result file agree with the memory that these runs allocated."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest

from foundation.units import GIB
from lab.speed.targets import devices_called, plan_on
from pretrain.metrics.flops import ModelFlops
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build_on_meta
from pretrain.plan.plan import Training
from pretrain.settings.config import load_recipe
from tests.conftest import ROOT
from tests.pretrain.conftest import QUANTIZED, active_in
from tests.pretrain.plan.plan_recipe import schedule_of

FILE = ROOT / "benchmarks/results/speed/h200_qwen2_5.json"
RUNS = json.loads(FILE.read_text(encoding="utf-8"))["runs"]


@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_the_plan_of_a_run_has_the_memory_that_it_allocated(run: dict[str, Any]) -> None:
    # The command was recorded without quotation marks around the JSON text of the model.
    config, rest = re.search(r"model\.config=(\{.*?\})(.*)", run["command"]).groups()
    machine = ("data.", "run_dir=")  # paths of the machine
    settings = [text for text in shlex.split(rest) if not text.startswith(machine)]
    settings += [f"model.config={config}", "model.attention=varlen"]
    recipe = load_recipe(ROOT / "benchmarks/qwen2_5.yaml", settings)
    model = build_on_meta(load_config(recipe.model))
    engine = "transformer_engine" if recipe.precision in QUANTIZED else "torch"
    active = active_in(recipe.precision, engine, scope=recipe.fp8_config.scope)
    schedule = schedule_of(recipe, active)
    training = Training(recipe, schedule, ModelFlops.of(model), mean_squared=1024.0)
    plan = plan_on(devices_called("H200"), training, model)
    planned = plan.takes(recipe.batch.microbatch) / GIB
    assert planned == pytest.approx(run["memory_gib"], rel=0.01)
