"""Files as `accelerate config` writes them: each trains as it should, with a notice where that takes one, or is refused at once.

accelerate's own code writes each file, reads it and makes the variables of a process; torchrun's are added.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import launch as accelerate_launch

from foundation.errors import InputError
from pretrain.settings.launch import Launch, take_requested_precision, with_topology

# What its questions come to where each is answered with the default.
COMMON = {"compute_environment": "LOCAL_MACHINE", "use_cpu": False, "debug": False, "mixed_precision": "bf16"}
COMMON |= {"downcast_bf16": "no", "enable_cpu_affinity": False, "gpu_ids": "all", "machine_rank": 0, "num_machines": 1}
COMMON |= {"rdzv_backend": "static", "same_network": True, "main_training_function": "main"}
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": True,
    "fsdp_activation_checkpointing": False,
}


def mesh(replicas: int, shards: int, **sizes: int) -> dict[str, int]:
    given = {"dp_replicate_size": replicas, "dp_shard_size": shards, "tp_size": 1, "cp_size": 1} | sizes
    return {f"parallelism_config_{key}": size for key, size in given.items()}


def written(folder: Path, processes: int, *, machines: int = 1, **answers: Any) -> dict[str, str]:
    """The variables of one of `processes` on one of `machines`, under the file with these answers."""
    path = folder / "default_config.yaml"
    values = {key: value for key, value in COMMON.items() if key != "compute_environment"} | {"num_machines": machines}
    values |= {
        "num_processes": processes,
        "main_process_ip": "h1" if machines > 1 else None,
        "main_process_port": 29999,
    } | answers
    ClusterConfig(compute_environment="LOCAL_MACHINE", **values).to_yaml_file(path)
    command = launch_command_parser().parse_args(["--config_file", str(path), "train_accelerate.py"])
    command = _validate_launch_command(command)[0]
    if command.multi_gpu or command.use_fsdp or command.use_megatron_lm:
        environ = accelerate_launch.prepare_multi_gpu_env(command)
        environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes // machines)}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    else:
        _, environ = accelerate_launch.prepare_simple_launcher_cmd_env(command)
    return environ


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate_launch, "is_fp8_available", lambda: True)  # without a library it stops
    for key in list(os.environ):
        if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_", "MASTER_")):
            monkeypatch.delenv(key)


def settle(environ: dict[str, str], *, has_gpu: bool = True) -> Launch:
    take_requested_precision(environ)
    return with_topology(environ, has_gpu=has_gpu)


PLAIN, DDP, SHARDED = "one process", "DDP", "FSDP2"


def topology(environ: dict[str, str]) -> str:
    if environ.get("ACCELERATE_USE_FSDP") == "true":
        return SHARDED
    return DDP if "WORLD_SIZE" in environ else PLAIN


def fsdp(mesh: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": FSDP2 | changes} | ({"parallelism_config": mesh} if mesh else {})


@pytest.mark.parametrize(
    ("processes", "answers", "becomes", "replicas", "notice"),
    [
        (1, {"distributed_type": "NO"}, PLAIN, 1, ""),
        (1, {"distributed_type": "NO", "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, PLAIN, 1, "`dynamo_config`"),
        (4, {"distributed_type": "MULTI_GPU", "debug": True, "downcast_bf16": "yes"}, DDP, 1, ""),
        (8, {"distributed_type": "MULTI_GPU", "machines": 2}, DDP, 1, ""),
        (4, fsdp(), SHARDED, 1, ""),
        (1, fsdp(), PLAIN, 1, "FSDP"),
        (4, fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=9), SHARDED, 1, ""),
        (4, fsdp(fsdp_activation_checkpointing=True), SHARDED, 1, "`fsdp_activation_checkpointing`"),
        (4, fsdp(fsdp_activation_checkpointing_offload=True), SHARDED, 1, "`fsdp_activation_checkpointing_offload`"),
        (4, fsdp(mesh(1, 4)), SHARDED, 1, ""),
        (4, fsdp(mesh(4, 1)), DDP, 1, "FSDP"),
        (8, fsdp(mesh(2, 4)), SHARDED, 2, ""),
    ],
)
def test_a_file_that_accelerate_writes_trains(
    processes: int, answers: dict[str, Any], becomes: str, replicas: int, notice: str, tmp_path: Path
) -> None:
    environ = written(tmp_path, processes, **answers)
    launch = settle(environ)
    assert (topology(environ), launch.replicas) == (becomes, replicas)
    assert len(launch.notices) == bool(notice) and notice in "".join(launch.notices)
    assert not any(key.startswith("PARALLELISM_") for key in environ) and environ["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    if becomes == SHARDED:
        assert environ["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP" and "FSDP_TRANSFORMER_CLS_TO_WRAP" not in environ
        assert {environ[f"FSDP_{key}"] for key in ("CPU_RAM_EFFICIENT_LOADING", "ACTIVATION_CHECKPOINTING")} == {"false"}


def test_accumulation_that_a_command_asks_for_is_said_to_have_no_effect() -> None:
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    (notice,) = settle(environ).notices
    assert "`batch.tokens`" in notice and environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "1"


@pytest.mark.parametrize(
    ("answers", "key"),
    [
        ({"distributed_type": "MULTI_CPU", "use_cpu": True}, "distributed_type: NO"),
        ({"distributed_type": "MEGATRON_LM"}, "MEGATRON_LM"),
        (fsdp(mesh(2, 4)), "8 processes"),
        (fsdp(mesh(1, 2, tp_size=2)), "tensor"),
        (fsdp(fsdp_version=1), "fsdp_version: 1"),
        ({"mixed_precision": "fp16", "distributed_type": "MULTI_GPU"}, "mixed_precision: fp16"),
    ],
)
def test_what_cannot_be_put_right_is_one_message(answers: dict[str, Any], key: str, tmp_path: Path) -> None:
    environ = written(tmp_path, 4, **answers)
    with pytest.raises(InputError, match=f"^accelerate configuration: .*{key}"):
        settle(environ)


def test_fp8_as_accelerate_writes_it_is_delayed_scaling_with_its_history(tmp_path: Path) -> None:
    """Its questions call two options by names that its launcher does not know, and the launcher fills in others."""
    fp8 = {"backend": "TE", "use_autocast_during_eval": False, "margin": 0, "interval": 1, "fp8_format": "HYBRID"}
    fp8 |= {"amax_history_length": 16, "amax_compute_algorithm": "max", "override_linear_precision": (False, False, False)}
    environ = written(tmp_path, 4, distributed_type="MULTI_GPU", mixed_precision="fp8", fp8_config=fp8)
    precision, settings = take_requested_precision(environ)
    assert (precision.name, settings.amax_history_len) == ("delayed", 16)


def test_processes_without_a_gpu_train_on_the_cpu_of_their_machine_together(tmp_path: Path) -> None:
    """As torchrun starts them, or a file for GPUs on a machine without. On several machines one may just have lost its GPUs."""
    for machines, on_cpu in ((1, True), (2, False)):
        environ = written(tmp_path, 4, machines=machines, distributed_type="MULTI_GPU")
        launch = settle(environ, has_gpu=False)
        assert (environ.get("ACCELERATE_USE_CPU") == "true") == on_cpu == bool(launch.notices)


@pytest.mark.parametrize(("reshard", "fits", "left"), [(True, False, "true"), (False, False, "false"), ("auto", True, "true")])
def test_auto_is_for_the_plan_and_hidden_from_accelerate(reshard: Any, fits: bool, left: str, tmp_path: Path) -> None:
    launch = settle(environ := written(tmp_path, 4, **fsdp(fsdp_reshard_after_forward=reshard)))
    assert launch.gathers_as_fits == fits and environ["FSDP_RESHARD_AFTER_FORWARD"].lower() == left
