"""Train one recipe in one, two and three processes on the CPU, and resume it with another number.

All of them have the same loss curve. tests/golden tests the bits of every topology, and
tests/launcher/test_resume.py resumes two processes by two.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Finished
from tests.launcher.conftest import EXPERTS

pytestmark = pytest.mark.multi

# Runs that no test resumes. Two steps would not show a momentum that one rank forgets.
SHORT = ("train.steps=3", "checkpoint.every=2")
MUON = (*SHORT, "optimizer.name=muon", "log.fp8_statistics=2")
LOW = (
    *SHORT,
    "precision=current",
    "fp8_config.on_unsupported=emulate",
    "weights=bf16_exact",
)
# A model with a gated delta rule in its first layer, and attention in the second.
HYBRID = (
    "model.config.model_type=qwen3_5_text",
    "model.config.layer_types=[linear_attention, full_attention]",
    "model.config.linear_num_key_heads=16",
    "model.config.linear_num_value_heads=16",
    "model.config.linear_key_head_dim=4",
    "model.config.linear_value_head_dim=4",
)
# A model with attention sinks, and with experts that have biases.
SINKS = (
    "model.config.model_type=gpt_oss",
    "model.config.num_local_experts=4",
    "model.config.num_experts_per_tok=2",
)
# Sums of two microbatches a rank in BF16, and only the final norm is reduced once a step.
ROUNDED = (
    "optimizer.gradients=bf16",
    "model.config.tie_word_embeddings=false",
    "batch.microbatch=2",
)
CHECKED = ("parity=on",)
SERVED = (*CHECKED, "evaluate.served=current", "evaluate.merge=2")
EXACT_CURVE = dict.fromkeys(("loss", "gradient_norm", "held_out_loss", "tokens"), 1e-5)
# Gradients that are summed in another order differ by 1e-7, and then by a bit of BF16.
MUON_CURVE = {"loss": 1e-4, "held_out_loss": 1e-4, "muon_update_rms": 1e-2}
CODES_CURVE = {"loss": 1e-3, "held_out_loss": 1e-3}
LOW_CURVE = dict.fromkeys(("loss", "router_loss", "held_out_loss", "served_loss"), 2e-3)

# The topology of two ranks, settings, and the tolerances of figures. Current scaling has scales per
# microbatch, and two processes have the microbatches of one.
AS_ONE: dict[str, tuple[str, tuple[str, ...], dict[str, float]]] = {
    "copies": ("ddp", CHECKED, EXACT_CURVE),
    "shards": ("fsdp2", CHECKED, EXACT_CURVE),
    "Muon's copies of shards": ("zero", MUON, MUON_CURVE),
    "Muon's shards": ("fsdp2", MUON, MUON_CURVE),
    "Muon's codes": ("fsdp2", (*MUON, *LOW, *ROUNDED), CODES_CURVE),
    "experts": ("fsdp2", (EXPERTS, *LOW, *SERVED), LOW_CURVE),
    "a hybrid's shards": ("fsdp2", (*HYBRID, *LOW), CODES_CURVE),
    "a fused hybrid's shards": (
        "fsdp2",
        (*HYBRID, *SHORT, "model.fused=on", *CHECKED),
        EXACT_CURVE,
    ),
    "shards of sinks": ("fsdp2", (*SINKS, *LOW, *CHECKED), CODES_CURVE),
}


# Checkpoints are saved after steps 4 and 8. FSDP2 shards the layers separately. Each of two ranks
# has two microbatches.
EIGHT_STEPS = ("train.steps=8", "batch.microbatch=2", "model.config.num_hidden_layers=2")


@pytest.fixture(scope="module")
def trained(
    start_here: Callable, recipe_for: Callable, tmp_path_factory: Any
) -> Callable[..., Finished]:
    """Function that trains with settings once. With `topology`, two ranks train.

    One process trains without parity, which many other tests check in one process.
    """
    folder = tmp_path_factory.mktemp("processes")

    @cache
    def train(topology: str | None, settings: tuple[str, ...]) -> Finished:
        recipe = recipe_for(folder / f"run-{len([*folder.glob('run-*')])}")
        if topology is None:
            settings = tuple(setting for setting in settings if setting not in CHECKED)
        return start_here(recipe, folder, *EIGHT_STEPS, *settings, topology=topology).done()

    return train


def figures(run: Finished, key: str) -> list[float]:
    return [record[key] for record in run.records() if key in record]


def assert_same_curve(run: Finished, other: Finished, tolerances: dict[str, float]) -> None:
    for key, tolerance in tolerances.items():
        assert figures(other, key), key
        assert figures(run, key) == pytest.approx(figures(other, key), rel=tolerance), key


@pytest.mark.parametrize("name", AS_ONE)
def test_two_processes_train_as_one(name: str, trained: Callable[..., Finished]) -> None:
    topology, settings, tolerances = AS_ONE[name]
    two = trained(topology, settings)
    lines = re.findall(r"rank \d waits for all 2 ranks at 127\.0\.0\.1:\d+$", two.out, re.MULTILINE)
    assert sorted(line[:6] for line in lines) == ["rank 0", "rank 1"]
    assert_same_curve(two, trained(None, settings), tolerances)
    if name == "experts":
        products = [row for row in two.audit()["products"] if ".experts." in row["name"]]
        assert {row["effective"] for row in products} == {"current"}


# The second run has 3 processes for 8 microbatches of one pack, so one of them is empty.
@pytest.mark.parametrize(
    ("topology", "settings", "options"),
    [
        ("fsdp2", (), {}),
        (None, ("batch.microbatch=1",), {"topology": "ddp", "processes": 3}),
    ],
)
def test_another_number_of_processes_resumes_a_run(
    topology: str | None,
    settings: tuple[str, ...],
    options: dict[str, Any],
    trained: Callable[..., Finished],
    start_here: Callable,
    recipe_for: Callable,
    tmp_path: Path,
) -> None:
    run = trained(topology, CHECKED)
    copy = shutil.copytree(run.run_dir, tmp_path / "copy")
    shutil.rmtree(copy / "final")
    shutil.rmtree(copy / "checkpoints" / "step-00000008")
    settings = (*EIGHT_STEPS, *settings)
    resumed = start_here(recipe_for(copy), tmp_path, *settings, **options).done()
    assert resumed.losses()[:4] == run.losses()[:4], resumed.output
    assert_same_curve(resumed, trained(None, CHECKED), EXACT_CURVE)
