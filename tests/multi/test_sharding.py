"""Shards, gathered once a step or for each use: the numbers of one process, and what is exchanged for them."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pretrain.checkpoint.manifest import read_manifest
from pretrain.checkpoint.shards import DTYPE_NAMES
from pretrain.checkpoint.weights import SavedWeights
from pretrain.model import huggingface as model
from pretrain.settings.recipe import ModelSettings

pytestmark = pytest.mark.multi

WAYS = {way: ["--config_file", f"accelerate_configs/{way}.yaml"] for way in ("zero", "fsdp2")}
EXACT = {"zero": "on", "fsdp2": "off"}  # `model.fused` of the runs with exact weights
# So slow that BF16 weights round alike where their masters differ in the last bits; a step later one might not.
WEIGHTS = {
    "fp32": ["weights=fp32", "precision=fp32"],
    "bf16_exact": ["weights=bf16_exact", "precision=bf16", "optimizer.learning_rate=2e-4"],
}


def figures(run: Any, key: str) -> list[float]:
    return [record[key] for record in run.records() if key in record]


@pytest.fixture(scope="session")
def recipe_for(recipe_for: Callable) -> Callable[[Path], dict[str, Any]]:
    """Of 8 steps: with a checkpoint to go on from, and one at the end."""
    return lambda run_dir: recipe_for(run_dir) | {"train": {"steps": 8}}


@pytest.fixture(scope="module")
def runs(
    start_here: Callable, start_as_ranks: Callable, recipe_for: Callable, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Any]:
    """The finished run of these weights, fused or not, in one process ("one") or sharded over two; each is trained once. The head
    is tied where weights are exact."""
    folder, finished = tmp_path_factory.mktemp("sharding"), {}

    def run(way: str, weights: str, fused: str) -> Any:
        name = f"{way}-{weights}-{fused}"
        if name not in finished:
            recipe = recipe_for(folder / name)
            recipe["model"]["config"] |= {"attention_bias": True, "tie_word_embeddings": weights != "fp32"}
            arguments = [f"model.fused={fused}", *WEIGHTS[weights], "log.gradient_statistics=2"]
            if way == "one":
                finished[name] = start_here(recipe, folder, *arguments, "parity=off")
            else:
                arguments += ["parity=on"] if weights == "fp32" else ["parity=off", "--profile"]
                finished[name] = start_as_ranks(recipe, folder, *arguments, launch=WAYS[way])
            assert finished[name].status == 0, finished[name].output
        return finished[name]

    return run


@pytest.mark.parametrize(
    ("way", "weights", "fused"),
    [("zero", "fp32", "off"), ("fsdp2", "fp32", "on"), *((way, "bf16_exact", fused) for way, fused in EXACT.items())],
)
def test_shards_train_what_one_process_trains(runs: Callable, way: str, weights: str, fused: str) -> None:
    one, two = runs("one", weights, fused), runs(way, weights, fused)
    assert two.losses() == pytest.approx(one.losses(), abs=1e-6)
    for key in ("gradient_norm", "held_out_loss"):
        assert figures(two, key) == pytest.approx(figures(one, key), rel=1e-6)
    deviations = [key for key in one.records()[1] if key.startswith("grad_std/")]
    assert len(deviations) == 4 + (weights == "fp32"), "of the embedding, two layers, the last norm and a head of its own"
    for key in deviations:
        assert figures(two, key) == pytest.approx(figures(one, key), rel=1e-5)
        means = (figures(run, key.replace("grad_std", "grad_mean")) for run in (one, two))
        assert next(means) == pytest.approx(next(means), abs=1e-6 * max(figures(one, key)))
    models = [AutoModelForCausalLM.from_pretrained(run.run_dir / "final", dtype="auto") for run in (one, two)]
    for a, b in zip(*(each.parameters() for each in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert two.output.count("parity with plain transformers") == int(weights == "fp32")
    assert "UserWarning" not in two.err
    gathered = json.loads((two.run_dir / "environment.json").read_text())["accelerate"]["gathered"]
    assert gathered == {"zero": "once a step", "fsdp2": "for each use"}[way]


def test_a_checkpoint_of_exact_weights_is_the_same_in_shards_and_goes_on_elsewhere(
    runs: Callable, start_here: Callable, start_as_ranks: Callable, recipe_for: Callable, tmp_path: Path
) -> None:
    one, two = (runs(way, "bf16_exact", "on") for way in ("one", "zero"))
    manifests = [read_manifest(run.run_dir / "checkpoints" / "step-00000004") for run in (one, two)]
    kept = [{n: (e.dtype, e.shape) for part in (m.model, m.optimizer) for n, e in part.items()} for m in manifests]
    assert kept[0] == kept[1] and any(name.startswith("remainder/") for name in kept[0])
    for run in (one, two):
        folder = tmp_path / run.run_dir.name
        shutil.copytree(run.run_dir, folder)
        shutil.rmtree(folder / "checkpoints" / "step-00000008")
        recipe = recipe_for(folder)
        recipe["model"]["config"]["attention_bias"] = True
        arguments = ["model.fused=on", "parity=off", *WEIGHTS["bf16_exact"]]
        if run is two:
            resumed = start_here(recipe, tmp_path, *arguments)
        else:
            resumed = start_as_ranks(recipe, tmp_path, *arguments, launch=WAYS["zero"])
        assert resumed.status == 0 and "at step 4" in resumed.output, resumed.output
        assert resumed.losses() == pytest.approx(one.losses(), abs=1e-6)


@pytest.mark.parametrize(("way", "gathers", "reduced"), [("zero", 4, 4), ("fsdp2", 2 * (2 + 2 * 2), 2 * 4)])
def test_a_step_gathers_each_group_once_or_as_often_as_it_is_used(runs: Callable, way: str, gathers: int, reduced: int) -> None:
    """Groups: two layers, the embedding with the tied head, the final norm. Two microbatches a step; this is a step's profile."""
    run = runs(way, "bf16_exact", EXACT[way])
    trace = json.loads(gzip.decompress((run.run_dir / "profile.json.gz").read_bytes()))
    names = Counter(str(event.get("name")).partition(" (")[0] for event in trace["traceEvents"])
    assert names["FSDP::all_gather"] == gathers
    assert names["FSDP::post_backward_reduce"] == reduced


def test_how_often_to_gather_may_be_left_to_the_plan(train_as_ranks: Callable) -> None:
    planned = train_as_ranks("--plan", launch=[*WAYS["fsdp2"], "--fsdp_reshard_after_forward", "auto"])
    assert planned.status == 0 and "2 x CPU, shards gathered once a step" in planned.output, planned.output


@pytest.mark.parametrize(
    ("way", "origin", "weights", "dtypes"),
    [
        ("zero", "scratch", "bf16_exact", ("float32", "bfloat16")),
        ("fsdp2", "folder", "bf16_exact", ("float32", "bfloat16")),
        ("fsdp2", "scratch", "bf16", ("bfloat16", "bfloat16")),
        ("zero", "folder", "fp32", ("float32", "float32")),
    ],
)
def test_ranks_that_build_their_parts_begin_with_the_bits_of_one_process(
    way: str, origin: str, weights: str, dtypes: tuple[str, str], recipe_for: Callable, start_as_ranks: Callable, tmp_path: Path
) -> None:
    """The step's rate is too small to change a bit."""
    recipe = recipe_for(tmp_path / "run") | {"schedule": {"kind": "constant"}, "train": {"steps": 1}, "evaluate": {}}
    recipe["model"]["config"] |= {"vocab_size": 513}  # which does not divide
    if origin == "folder":
        settings = ModelSettings(config=recipe["model"]["config"])
        torch.manual_seed(5)
        AutoModelForCausalLM.from_config(model.load_config(settings)).save_pretrained(tmp_path / "drawn", max_shard_size="50KB")
        recipe["model"] = {"source": str(tmp_path / "drawn")}
    arguments = [f"weights={weights}", f"precision={'fp32' if weights == 'fp32' else 'bf16'}", "parity=off", "seed=4"]
    run = start_as_ranks(recipe, tmp_path, *arguments, "optimizer.learning_rate=1e-35", launch=WAYS[way])
    assert run.status == 0, run.output
    assert json.loads((run.run_dir / "audit.json").read_text())["built"] == "in parts"
    settings, kept = ModelSettings(**recipe["model"]), getattr(torch, dtypes[0])
    options = {"weights": kept, "seed": 4, "device": torch.device("cpu"), "backend": "packed_sdpa"}
    expected = dict(model.build(settings, model.load_config(settings), **options).named_parameters())
    saved = SavedWeights(run.run_dir / "checkpoints" / "step-00000001")
    assert set(saved.names()) == set(expected)
    for name, parameter in expected.items():
        assert torch.equal(saved.read(name, "fp32"), parameter.detach().float()), name
        assert saved.manifest.model[name].dtype == DTYPE_NAMES[getattr(torch, dtypes[1])]
