"""One recipe under every topology: real processes, joined by gloo, on the CPU, beside one process.

`two[ddp]` is started by `accelerate launch` itself, all as tests/ranks.py does.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig
from matplotlib.image import imread
from transformers import AutoModelForCausalLM

from pretrain.metrics.run_record import read_metrics
from tests.conftest import Finished, write_recipe
from tests.ranks import accelerate_launch, start_agent, torchrun

TOPOLOGIES = {
    "ddp": ["--config_file", "accelerate_configs/ddp.yaml", "--mixed_precision", "no"],
    "fsdp2": ["--config_file", "accelerate_configs/fsdp2.yaml", "--mixed_precision", "no"],
}

pytestmark = pytest.mark.multi


@pytest.fixture(scope="session")
def recipe_for(recipe_for: Callable) -> Callable[[Path], dict[str, Any]]:
    """Of 8 steps: with a checkpoint to go on from, and one at the end."""
    return lambda run_dir: recipe_for(run_dir) | {"train": {"steps": 8}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("topologies")


@pytest.fixture(scope="module")
def one(start_here: Callable, recipe_for: Callable, folder: Path) -> Any:
    """The finished run of one process."""
    finished = start_here(recipe_for(folder / "one"), folder)
    assert finished.status == 0, finished.output
    return finished


@pytest.fixture(scope="module", params=TOPOLOGIES)
def two(request: pytest.FixtureRequest, start_as_ranks: Callable, recipe_for: Callable, caches: str, folder: Path) -> Any:
    """The finished run of two processes, held against plain transformers before its first step."""
    recipe, launch = recipe_for(folder / request.param), TOPOLOGIES[request.param]
    if request.param == "ddp":
        command = [*launch, "train_accelerate.py", str(write_recipe(recipe, folder)), "parity=on"]
        cpu = {"ACCELERATE_USE_CPU": "true"}  # the YAML is for GPUs; this is accelerate's own way to run it on CPUs
        said = start_agent(accelerate_launch, command, folder, **cpu, XDG_CACHE_HOME=caches)
        finished = Finished(*said, Path(recipe["run_dir"]))
    else:
        finished = start_as_ranks(recipe, folder, "parity=on", launch=launch)
    assert finished.status == 0, finished.output
    return finished


def sent_back(run_dir: Path, copy: Path) -> str:
    """A copy of the run as it was after step 4, as the argument `run_dir`.

    It is not a run of 4 steps, because the schedule belongs to the horizon of 8.
    """
    shutil.copytree(run_dir, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000008")
    return f"run_dir={copy}"


def test_two_processes_have_the_loss_curve_of_one(one: Any, two: Any) -> None:
    assert two.losses() == pytest.approx(one.losses(), abs=1e-6)
    assert one.losses()[-1] < 0.8 * one.losses()[0]
    keys = ("step", "tokens", "epoch", "learning_rate", "gradient_norm", "held_out_loss", "held_out_tokens")
    for a, b in zip(one.records(), two.records(), strict=True):
        assert {k: b[k] for k in keys if k in b} == pytest.approx({k: a[k] for k in keys if k in a}, abs=1e-5)
    models = [AutoModelForCausalLM.from_pretrained(run.run_dir / "final") for run in (one, two)]
    for a, b in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("two", ["ddp"], indirect=True)
def test_a_launched_run_lets_the_allocator_grow_its_segments(two: Any) -> None:
    assert json.loads((two.run_dir / "environment.json").read_text())["allocator"] == "expandable_segments:True"


@pytest.mark.parametrize("two", ["ddp"], indirect=True)
def test_a_launched_run_leaves_a_picture_of_its_losses(two: Any) -> None:
    assert imread(two.run_dir / "loss.png").shape[:2] == (975, 1350)


def test_gradients_summed_over_two_processes_are_those_of_all_their_documents(two: Any) -> None:
    assert two.output.count("parity with plain transformers") == 1
    found = json.loads((two.run_dir / "audit.json").read_text())["parity"]
    assert found["failures"] == [] and found["plain"]["least_cosine"] > 1 - 1e-6
    assert found["plain"]["gradient_norm"] == pytest.approx(found["plain"]["reference_norm"], rel=1e-5)


def test_a_run_of_two_processes_resumes_in_one(one: Any, two: Any, train_here: Callable, tmp_path: Path) -> None:
    resumed = train_here(sent_back(two.run_dir, tmp_path / "moved"), "parity=on")
    assert resumed.status == 0 and "at step 4" in resumed.output, resumed.output
    assert resumed.losses() == pytest.approx(one.losses(), abs=1e-5)


def test_a_run_of_two_processes_resumes_in_two_bit_for_bit(two: Any, train_as_ranks: Callable, tmp_path: Path) -> None:
    """Under FSDP2 too: what ranks add up, and in which order, is fixed before the first step."""
    topology = two.run_dir.name
    resumed = train_as_ranks(sent_back(two.run_dir, tmp_path / "again"), launch=TOPOLOGIES[topology])
    assert resumed.status == 0 and "at step 4" in resumed.output, resumed.output
    assert resumed.losses() == two.losses()
    assert all(
        (resumed.run_dir / "final" / file.name).read_bytes() == file.read_bytes()
        for file in (two.run_dir / "final").glob("*.safetensors")
    )


def test_a_run_of_one_process_resumes_in_two(one: Any, train_as_ranks: Callable, tmp_path: Path) -> None:
    resumed = train_as_ranks(sent_back(one.run_dir, tmp_path / "moved"), launch=TOPOLOGIES["ddp"])
    assert resumed.status == 0 and "at step 4" in resumed.output, resumed.output
    assert resumed.losses() == pytest.approx(one.losses(), abs=1e-5)


@pytest.mark.parametrize("fused", ["on", "off"])
def test_exact_weights_get_the_gradients_of_one_process(
    train_as_ranks: Callable, train_here: Callable, tmp_path: Path, fused: str
) -> None:
    """To what the order of additions in FP32 explains: at this rate it has turned no BF16 weight within these steps."""
    exact = ["precision=bf16", "weights=bf16_exact", "optimizer.learning_rate=1e-5", "train.steps=4", f"model.fused={fused}"]
    one = train_here(f"run_dir={tmp_path / 'one'}", *exact)
    two = train_as_ranks(f"run_dir={tmp_path / 'two'}", *exact, launch=TOPOLOGIES["ddp"])
    assert one.status == two.status == 0, one.output + two.output
    assert two.losses() == pytest.approx(one.losses(), rel=1e-6)
    norms = [[record["gradient_norm"] for record in run.records() if "loss" in record] for run in (one, two)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
    assert json.loads((two.run_dir / "audit.json").read_text())["gradients"] == "fp32"


def test_torchrun_trains_what_accelerate_launch_does(one: Any, small_recipe: dict[str, Any], tmp_path: Path) -> None:
    """Without any variable of accelerate's: FP32, plain data parallelism, and the CPU where there is no GPU."""
    short = ["evaluate.every=null", "checkpoint.every=null", f"run_dir={tmp_path / 'torchrun'}"]
    command = ["--standalone", "--nproc-per-node", "2", "train_accelerate.py", str(write_recipe(small_recipe, tmp_path)), *short]
    status, out, err = start_agent(torchrun, command, tmp_path)
    assert status == 0, err
    assert torch.cuda.is_available() or "no GPU is seen here, so 2 processes train on the CPU" in out
    losses = [record["loss"] for record in read_metrics(tmp_path / "torchrun") if "loss" in record]
    assert losses == pytest.approx(one.losses(), abs=1e-6)


def test_a_file_as_accelerate_writes_it_trains_the_same(one: Any, train_as_ranks: Callable, tmp_path: Path) -> None:
    """FSDP2 with what it asks for by default, a second compiler and a second recomputation among it. 3 processes for 8 packs."""
    fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
    fsdp |= {"fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True}
    fsdp |= {"fsdp_activation_checkpointing": True, "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_min_num_params": 9}
    ClusterConfig(
        compute_environment="LOCAL_MACHINE",
        distributed_type="FSDP",
        mixed_precision="no",
        use_cpu=False,
        debug=True,
        num_processes=3,
        fsdp_config=fsdp,
        dynamo_config={"dynamo_backend": "INDUCTOR"},
    ).to_yaml_file(tmp_path / "default_config.yaml")
    arguments = [f"run_dir={tmp_path / 'three'}", "evaluate.every=null", "checkpoint.every=null"]
    three = train_as_ranks(*arguments, launch=["--config_file", str(tmp_path / "default_config.yaml")], processes=3)
    assert three.status == 0 and three.output.count("accelerate configuration: ") == 4, three.output
    assert three.losses() == pytest.approx(one.losses(), abs=1e-6)
    assert json.loads((three.run_dir / "environment.json").read_text())["accelerate"]["sharded"] is True


def test_replicas_of_shards_train_what_one_process_trains_and_are_resumed_in_one(
    one: Any, train_as_ranks: Callable, train_here: Callable, tmp_path: Path
) -> None:
    launch = ["--config_file", "accelerate_configs/hsdp.yaml", "--mixed_precision", "no"]
    four = train_as_ranks(f"run_dir={tmp_path / 'four'}", "evaluate.every=null", launch=launch, processes=4)
    assert four.status == 0 and "4 x CPU (2 replicas of 2 shards)" in four.output, four.output
    assert four.losses() == pytest.approx(one.losses(), abs=1e-6)
    assert json.loads((four.run_dir / "environment.json").read_text())["accelerate"]["replicas"] == 2
    resumed = train_here(sent_back(four.run_dir, tmp_path / "moved"))
    assert resumed.status == 0 and "at step 4" in resumed.output, resumed.output
    assert resumed.losses() == pytest.approx(one.losses(), abs=1e-5)


def test_processes_that_do_not_divide_the_packs_train_what_one_trains(one: Any, train_as_ranks: Callable, tmp_path: Path) -> None:
    """8 packs over 3 processes, in microbatches of one: one process has a microbatch of nothing, and takes part all the same."""
    arguments = [f"run_dir={tmp_path / 'three'}", "batch.microbatch=1", "evaluate.every=null"]
    three = train_as_ranks(*arguments, launch=TOPOLOGIES["ddp"], processes=3)
    assert three.status == 0 and "3 microbatches x 1 pack, 1 place empty" in three.output, three.output
    assert three.losses() == pytest.approx(one.losses(), abs=1e-6)
    norms = [[record["gradient_norm"] for record in run.records() if "loss" in record] for run in (one, three)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)
