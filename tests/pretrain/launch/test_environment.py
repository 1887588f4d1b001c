"""Precision and topology of Accelerate configurations.

accelerate's own code turns the files into environment variables. The launcher must remove the
variables of the precision, and correct or refuse a topology that would not train as intended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.state import AcceleratorState
from accelerate.utils.environment import get_cpu_distributed_information

from foundation.errors import InputError
from foundation.settings import parse
from pretrain.launch.environment import take_requested_precision, with_precision, with_topology
from pretrain.model.distributed import check_offload, multiply_in_ieee_fp32
from pretrain.precision.settings import PRECISIONS
from pretrain.settings.config import load_recipe, resolved
from pretrain.settings.recipe import Recipe
from tests.ranks import environment_under

SMALLEST = {
    "name": "small",
    "model": {"source": "somewhere"},
    "data": {"packs": "packs"},
    "train": {"steps": 10},
}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without an FP8 library, accelerate refuses to launch.
    monkeypatch.setattr("accelerate.utils.launch.is_fp8_available", lambda: True)
    for key in list(os.environ):
        if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_", "MASTER_")):
            monkeypatch.delenv(key)


@pytest.fixture
def environment(tmp_path: Path) -> Any:
    """Return a function from an `fp8_config` to the variables of `accelerate launch` on a CPU."""
    file = {"distributed_type": "NO", "use_cpu": True, "mixed_precision": "fp8"}
    return lambda **fp8_config: launch_variables(tmp_path, 1, **file, fp8_config=fp8_config)


def recipe_with(**values: Any) -> Recipe:
    return parse(Recipe, SMALLEST | values, "recipe.yaml")


def resolve(environ: dict[str, str], **values: Any) -> tuple[str, dict[str, Any]]:
    """Return the resolved precision and `fp8_config` of a recipe, without options that are None."""
    recipe = with_precision(recipe_with(**values), environ)
    return recipe.precision, {
        key: value for key, value in recipe.fp8_config.model_dump().items() if value is not None
    }


# The requested precision


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "fp32"),
        ({"ACCELERATE_MIXED_PRECISION": "False"}, "fp32"),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "BF16"}, "bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_RECIPE": "block"}, "block"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8", "ACCELERATE_FP8_BACKEND": "TE"}, "delayed"),
        # Variables left over in a shell. accelerate would convert the model although
        # `mixed_precision` is not fp8.
        (
            {
                "ACCELERATE_MIXED_PRECISION": "bf16",
                "ACCELERATE_FP8_RECIPE": "nonsense",
                "ACCELERATE_FP8_BACKEND": "TE",
            },
            "bf16",
        ),
    ],
)
def test_the_requested_precision_is_read_and_its_variables_are_removed(
    environ: dict[str, str], name: str
) -> None:
    unrelated = {"PATH": "/bin", "ACCELERATE_USE_CPU": "true", "FP8_BACKEND": "mine"}
    environ = unrelated | environ
    assert take_requested_precision(environ)[0].name == name
    assert environ == unrelated


def test_every_key_of_a_file_arrives(environment: Any) -> None:
    given = {
        "backend": "emulation",
        "scope": "linear+head",
        "on_unsupported": "emulate",
        "keep_bf16_layers": {"first": 1, "last": 2},
        "keep_bf16": ("layers.0.*", "down_proj"),
        "use_autocast_during_eval": True,
        "disable_rht": True,
        "disable_stochastic_rounding": False,
    }
    assert resolve(environment(recipe="nvfp4", **given)) == ("nvfp4", given)
    delayed = {
        "fp8_format": "E4M3",
        "margin": 2,
        "amax_history_len": 16,
        "amax_compute_algo": "max",
    }
    _, fp8_config = resolve(environment(recipe="delayed", **delayed))
    assert {key: fp8_config[key] for key in delayed} == delayed


def test_accelerates_defaults_count_only_if_the_precision_has_the_key(
    environment: Any,
) -> None:
    _, delayed = resolve(environment(recipe="delayed"))
    # Accelerate's default. A file that wants `max` must set it.
    assert delayed["amax_compute_algo"] == "most_recent"
    # Ignored, as if the file did not have the key.
    _, block = resolve(environment(recipe="block", fp8_format="HYBRID"))
    assert not {"fp8_format", "margin"} & block.keys()
    _, without_a_file = resolve({}, precision="delayed")
    assert without_a_file["amax_compute_algo"] == "max"


@pytest.mark.parametrize(
    ("fp8_config", "message"),
    [
        (
            {"recpie": "nvfp4"},
            r"`fp8_config.recpie`: unknown key; did you mean `fp8_config.recipe`\?",
        ),
        ({"recipe": "mxfp"}, r"`fp8_config.recipe`: .*'mxfp8'.* 'mxfp'"),
        (
            {"recipe": "bf16"},
            r"`fp8_config.recipe: bf16` is not a quantized precision; set `mixed_precision: bf16`",
        ),
        ({"fp8_format": "E5M2"}, r"`fp8_config.fp8_format`: .*'HYBRID' or 'E4M3'"),
        ({"interval": 4}, r"`fp8_config.interval: 4` is not supported; remove this key"),
        (
            {"override_linear_precision": [False, True, False]},
            r"override_linear_precision.* is not supported; .*keep_bf16_layers",
        ),
        (
            {"recipe": "nvfp4", "nvfp4_4over6": "weights"},
            r"`fp8_config.nvfp4_4over6`: unknown key; known keys here: amax_compute_algo",
        ),
        (
            {"use_mxfp8_block_scaling": True, "recipe": "delayed"},
            r"use_mxfp8_block_scaling: True` and `recipe: delayed` contradict",
        ),
        (
            {"use_mxfp8_block_scaling": True, "fp8_format": "E4M3", "margin": 1},
            r"`fp8_config: {margin: 1}` and `recipe: mxfp8` contradict",
        ),
        (
            {"recipe": "block", "margin": 1},
            r"`fp8_config: {margin: 1}` and `recipe: block` contradict",
        ),
        (
            {"recipe": "delayed", "disable_rht": True},
            r"`fp8_config: {disable_rht: True}` and `recipe: delayed` contradict",
        ),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_its_key_and_a_remedy(
    fp8_config: dict, message: str, environment: Any
) -> None:
    with pytest.raises(InputError, match=rf"^Accelerate configuration: .*{message}"):
        take_requested_precision(environment(**fp8_config))


def test_accelerates_switch_for_mxfp8_is_accepted(environment: Any) -> None:
    file = {"backend": "TE", "use_mxfp8_block_scaling": True, "fp8_format": "E4M3"}
    precision, fp8_config = resolve(environment(**file))
    assert (precision, fp8_config["fp8_format"]) == ("mxfp8", "E4M3")
    for off in (False, "false", "off"):
        assert resolve(environment(use_mxfp8_block_scaling=off))[0] == "delayed"


@pytest.mark.parametrize("fp8_config", [{"recipe": "mxfp8"}, {"use_mxfp8_block_scaling": True}])
def test_a_missing_fp8_format_does_not_make_mxfp8_hybrid(
    fp8_config: dict, environment: Any
) -> None:

    with pytest.raises(InputError, match=r"may be Accelerate's default .* set `fp8_format: E4M3`"):
        resolve(environment(**fp8_config))
    for number_format in ("HYBRID", "E4M3"):
        precision, settings = resolve(
            environment(**fp8_config), fp8_config={"fp8_format": number_format}
        )
        assert (precision, settings["fp8_format"]) == ("mxfp8", number_format)
    assert resolve(environment(**fp8_config), precision="bf16")[0] == "bf16"


# The recipe and the Accelerate configuration together


def test_the_recipe_overrides_the_accelerate_file_key_by_key(environment: Any) -> None:
    environ = environment(
        recipe="delayed",
        margin=2,
        amax_history_len=16,
        scope="linear+head",
        keep_bf16_layers={"first": 1, "last": 2},
    )
    in_recipe = {"margin": 3, "keep_bf16_layers": {"first": 0}, "amax_compute_algo": "max"}
    precision, fp8_config = resolve(environ, fp8_config=in_recipe)
    assert precision == "delayed"
    assert (
        fp8_config["margin"],
        fp8_config["amax_history_len"],
        fp8_config["amax_compute_algo"],
    ) == (3, 16, "max")
    assert (fp8_config["scope"], fp8_config["keep_bf16_layers"]) == (
        "linear+head",
        {"first": 0, "last": 2},
    )


@pytest.mark.parametrize("name", ["fp32", "bf16", "current", "nvfp4"])
def test_another_precision_inherits_common_keys_but_no_options(name: str, environment: Any) -> None:
    environ = environment(
        recipe="delayed", margin=2, fp8_format="E4M3", scope="linear+head", on_unsupported="emulate"
    )
    precision, fp8_config = resolve(environ, precision=name)
    assert precision == name
    assert (fp8_config["scope"], fp8_config["on_unsupported"]) == ("linear+head", "emulate")
    options = PRECISIONS[name].options
    defaults = {key: value for key, value in options.items() if value is not None}
    assert {key: value for key, value in fp8_config.items() if key in options} == defaults
    assert "margin" not in fp8_config


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_resolved_recipe_is_independent_of_the_accelerate_file(
    name: str, environment: Any, tmp_path: Path
) -> None:
    in_recipe = {"scope": "linear+head", "keep_bf16_layers": {"first": 1}}
    first = with_precision(
        recipe_with(precision=name, fp8_config=in_recipe), environment(recipe="delayed", margin=3)
    )
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(resolved(first)))
    environments = [
        {},
        {"ACCELERATE_MIXED_PRECISION": "bf16"},
        environment(recipe="mxfp8", scope="linear+head", fp8_format="E4M3"),
    ]
    environments.append(
        environment(
            recipe="delayed",
            margin=7,
            keep_bf16_layers={"first": 5, "last": 5},
            backend="emulation",
        )
    )
    for environ in environments:
        assert with_precision(load_recipe(path), environ) == first


# accelerate's own conversion


def test_accelerate_does_not_convert_once_its_variables_are_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If accelerate ever stops converting models by itself, launch.py is not needed any more."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")

    def prepared() -> torch.nn.Module:
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            return Accelerator(cpu=True).prepare(torch.nn.Linear(16, 32))
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)

    assert prepared().forward.__func__ is not torch.nn.Linear.forward  # autocast wraps it
    for key, value in {"FP8_BACKEND": "TE", "FP8_RECIPE": "block", "FP8_FORMAT": "HYBRID"}.items():
        monkeypatch.setenv(f"ACCELERATE_{key}", value)
    take_requested_precision(os.environ)
    model = prepared()
    assert type(model) is torch.nn.Linear and model.forward.__func__ is torch.nn.Linear.forward
    assert model(torch.randn(2, 16)).dtype == torch.float32


# Topology

# Answers of `accelerate config` if each question is answered with the default, except
# fsdp_cpu_ram_efficient_loading, whose default is true and is corrected.
COMMON = {
    "compute_environment": "LOCAL_MACHINE",
    "use_cpu": False,
    "debug": False,
    "mixed_precision": "bf16",
}
COMMON |= {
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "gpu_ids": "all",
    "machine_rank": 0,
    "num_machines": 1,
}
COMMON |= {"rdzv_backend": "static", "same_network": True, "main_training_function": "main"}
FSDP2 = {
    "fsdp_version": 2,
    "fsdp_reshard_after_forward": True,
    "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_activation_checkpointing": False,
}


def mesh(replicas: int, shards: int, **sizes: int) -> dict[str, int]:
    given = {
        "dp_replicate_size": replicas,
        "dp_shard_size": shards,
        "tp_size": 1,
        "cp_size": 1,
    } | sizes
    return {f"parallelism_config_{key}": size for key, size in given.items()}


def launch_variables(
    folder: Path, processes: int, *, machines: int = 1, **answers: Any
) -> dict[str, str]:
    """Return the variables of one process, launched with a file of these answers.

    There are `processes` in total on `machines`.
    """
    path = folder / "default_config.yaml"
    values = {key: value for key, value in COMMON.items() if key != "compute_environment"} | {
        "num_machines": machines
    }
    values |= {"main_process_ip": "h1" if machines > 1 else None, "main_process_port": 29999}
    values |= {"num_processes": processes} | answers
    ClusterConfig(compute_environment="LOCAL_MACHINE", **values).to_yaml_file(path)
    group = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes // machines),
    }
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    alone = answers["distributed_type"] in ("NO", "MULTI_CPU")
    return environment_under(["--config_file", str(path)]) | ({} if alone else group)


def correct(environ: dict[str, str], *, has_gpu: bool = True) -> tuple[int, tuple[str, ...]]:
    """Correct `environ` as the launcher does."""
    take_requested_precision(environ)
    return with_topology(environ, has_gpu=has_gpu)


@pytest.mark.parametrize(
    "variables",
    [
        {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        {f"OMPI_COMM_WORLD_{key}": "2" for key in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")},
        {f"MV2_COMM_WORLD_{key}": "2" for key in ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")},
    ],
)
def test_variables_of_mpi_alone_start_one_process(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the process group that Accelerate reads from the environment."""
    environ = dict(variables)
    assert correct(environ, has_gpu=False) == (1, ())
    for key in variables:
        if key in environ:
            monkeypatch.setenv(key, environ[key])
    group = get_cpu_distributed_information()
    assert (group.world_size, group.rank, group.local_rank, group.local_world_size) == (1, 0, 0, 1)


PLAIN = "one process"
DDP = "DDP"
SHARDED = "FSDP2"


def topology(environ: dict[str, str]) -> str:
    """Return the topology that accelerate will train with."""
    if environ.get("ACCELERATE_USE_FSDP") == "true":
        return SHARDED
    return DDP if "WORLD_SIZE" in environ else PLAIN


def fsdp(mesh: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    return {"distributed_type": "FSDP", "fsdp_config": FSDP2 | changes} | (
        {"parallelism_config": mesh} if mesh else {}
    )


@pytest.mark.parametrize(
    ("processes", "answers", "becomes", "replicas", "notice"),
    [
        (1, {"distributed_type": "NO"}, PLAIN, 1, ""),
        (
            1,
            {"distributed_type": "NO", "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
            PLAIN,
            1,
            "`dynamo_config`",
        ),
        (4, {"distributed_type": "MULTI_GPU", "debug": True, "downcast_bf16": "yes"}, DDP, 1, ""),
        (8, {"distributed_type": "MULTI_GPU", "machines": 2}, DDP, 1, ""),
        (4, fsdp(), SHARDED, 1, ""),
        (1, fsdp(), PLAIN, 1, "FSDP"),
        (
            4,
            fsdp(fsdp_auto_wrap_policy="SIZE_BASED_WRAP", fsdp_min_num_params=9),
            SHARDED,
            1,
            "`fsdp_auto_wrap_policy`",
        ),
        (4, fsdp(fsdp_cpu_ram_efficient_loading=True), SHARDED, 1, "would untie the head"),
        (4, fsdp(fsdp_state_dict_type="FULL_STATE_DICT"), SHARDED, 1, "`fsdp_state_dict_type`"),
        (4, fsdp(fsdp_backward_prefetch="BACKWARD_PRE"), SHARDED, 1, "`fsdp_backward_prefetch`"),
        (
            4,
            fsdp(fsdp_activation_checkpointing=True),
            SHARDED,
            1,
            "`fsdp_activation_checkpointing`",
        ),
        (
            4,
            fsdp(fsdp_activation_checkpointing_offload=True),
            SHARDED,
            1,
            "`fsdp_activation_checkpointing_offload`",
        ),
        (4, fsdp(fsdp_ignored_modules=".*norm"), SHARDED, 1, "`fsdp_ignored_modules`"),
        (
            4,
            fsdp(fsdp_sharding_strategy="HYBRID_SHARD"),
            SHARDED,
            1,
            "`fsdp_sharding_strategy`",
        ),
        (4, fsdp(mesh(1, 4)), SHARDED, 1, ""),
        (4, fsdp(mesh(4, 1)), DDP, 1, "FSDP"),
        (8, fsdp(mesh(2, 4)), SHARDED, 2, ""),
    ],
)
def test_a_file_that_accelerate_writes_trains(
    processes: int,
    answers: dict[str, Any],
    becomes: str,
    replicas: int,
    notice: str,
    tmp_path: Path,
) -> None:
    environ = launch_variables(tmp_path, processes, **answers)
    copies, notices = correct(environ)
    assert (topology(environ), copies) == (becomes, replicas)
    assert len(notices) == bool(notice) and notice in "".join(notices)
    assert (
        not any(key.startswith("PARALLELISM_") for key in environ)
        and environ["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    )
    if becomes == SHARDED:
        assert "FSDP_IGNORED_MODULES" not in environ
        assert {
            environ[f"FSDP_{key}"]
            for key in ("CPU_RAM_EFFICIENT_LOADING", "ACTIVATION_CHECKPOINTING")
        } == {"false"}


def test_one_notice_names_all_keys_without_effect(tmp_path: Path) -> None:
    answers = fsdp(fsdp_forward_prefetch=True, fsdp_cpu_ram_efficient_loading=True)
    answers |= {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}
    (notice,) = correct(launch_variables(tmp_path, 4, **answers))[1]
    names = ("dynamo_config", "fsdp_forward_prefetch", "fsdp_cpu_ram_efficient_loading")
    assert all(f"`{name}`" in notice for name in names)


def ddp(mesh: dict[str, int]) -> dict[str, Any]:
    return {"distributed_type": "MULTI_GPU", "parallelism_config": mesh}


def test_gradient_accumulation_of_accelerate_is_reset_with_a_notice() -> None:
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    (notice,) = correct(environ)[1]
    assert "`batch.tokens`" in notice and environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "1"


def test_parameters_are_offloaded_from_gpus_only(tmp_path: Path) -> None:
    for has_gpu in (True, False):
        environ = launch_variables(tmp_path, 4, **fsdp(fsdp_offload_params=True))
        notices = correct(environ, has_gpu=has_gpu)[1]
        assert environ["FSDP_OFFLOAD_PARAMS"] == str(has_gpu).lower()
        assert ("`fsdp_offload_params`" in "".join(notices)) == (not has_gpu)


@pytest.mark.parametrize(("processes", "has_gpu"), [(4, True), (4, False), (1, True)])
def test_muon_refuses_parameters_in_host_memory(
    processes: int, has_gpu: bool, tmp_path: Path
) -> None:
    environ = launch_variables(tmp_path, processes, **fsdp(fsdp_offload_params=True))
    correct(environ, has_gpu=has_gpu)
    muon = recipe_with(optimizer={"name": "muon"})
    check_offload(recipe_with(), environ)
    if (processes, has_gpu) == (4, True):
        with pytest.raises(InputError, match="`fsdp_offload_params: true` needs AdamW"):
            check_offload(muon, environ)
    else:  # nothing is offloaded
        check_offload(muon, environ)


@pytest.mark.parametrize(
    ("answers", "key"),
    [
        ({"distributed_type": "MULTI_CPU", "use_cpu": True}, "distributed_type: NO"),
        ({"distributed_type": "MEGATRON_LM"}, "MEGATRON_LM"),
        (fsdp(mesh(2, 4)), "are not 4 processes"),
        (fsdp(mesh(1, 2, tp_size=2)), "parallelism_config_tp_size"),
        (ddp(mesh(1, 1, tp_size=4)), "parallelism_config_tp_size"),
        (ddp(mesh(1, 1, cp_size=4)), "parallelism_config_cp_size"),
        (ddp(mesh(1, 4)), "parallelism_config_dp_shard_size"),
        (fsdp(fsdp_version=1), "fsdp_version: 1"),
        ({"mixed_precision": "fp16", "distributed_type": "MULTI_GPU"}, "mixed_precision: fp16"),
    ],
)
def test_a_topology_that_cannot_be_corrected_is_one_message(
    answers: dict[str, Any], key: str, tmp_path: Path
) -> None:
    environ = launch_variables(tmp_path, 4, **answers)
    with pytest.raises(InputError, match=f"^Accelerate configuration: .*{key}"):
        correct(environ)


def test_the_fp8_file_of_accelerate_config_is_delayed_scaling(tmp_path: Path) -> None:
    """`accelerate config` writes two options by names that `accelerate launch` does not know."""
    fp8 = {
        "backend": "TE",
        "use_autocast_during_eval": False,
        "margin": 0,
        "interval": 1,
        "fp8_format": "HYBRID",
    }
    fp8 |= {
        "amax_history_length": 16,
        "amax_compute_algorithm": "max",
        "override_linear_precision": (False, False, False),
    }
    environ = launch_variables(
        tmp_path, 4, distributed_type="MULTI_GPU", mixed_precision="fp8", fp8_config=fp8
    )
    precision, settings = take_requested_precision(environ)
    assert (precision.name, settings.amax_history_len) == ("delayed", 16)


def test_processes_of_a_machine_without_a_gpu_train_on_its_cpu(tmp_path: Path) -> None:
    """With several machines nothing is corrected: one of them may have lost its GPUs."""
    for machines, on_cpu in ((1, True), (2, False)):
        environ = launch_variables(tmp_path, 4, machines=machines, distributed_type="MULTI_GPU")
        _, notices = correct(environ, has_gpu=False)
        assert (environ.get("ACCELERATE_USE_CPU") == "true") == on_cpu == bool(notices)


def test_fp32_products_are_ieee_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variable = "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"
    code = (
        "import torch; from pretrain.model.distributed import multiply_in_ieee_fp32 as ieee\n"
        "matmul = torch.backends.cuda.matmul; print(matmul.fp32_precision); ieee()\n"
        "print(matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, env={**os.environ, variable: "1"}, check=True, capture_output=True, text=True
    )
    assert result.stdout.split() == ["tf32", "ieee", "ieee"]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    multiply_in_ieee_fp32()
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(InputError, match="unset it"):
        multiply_in_ieee_fp32()
