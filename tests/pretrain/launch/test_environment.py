"""Precision and topology of Accelerate configurations.

accelerate's own code turns the files into environment variables. The launcher must remove the
variables of the precision, and correct or refuse a topology that would not train as intended.
"""

from __future__ import annotations

import os
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

SMALLEST = {"name": "small", "model": {"source": "somewhere"}, "data": {"packs": "packs"}}
SMALLEST |= {"train": {"steps": 10}}


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


BF16 = {"ACCELERATE_MIXED_PRECISION": "bf16"}
FP8 = {"ACCELERATE_MIXED_PRECISION": "fp8"}


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "fp32"),
        ({"ACCELERATE_MIXED_PRECISION": "False"}, "fp32"),
        (BF16, "bf16"),
        ({"ACCELERATE_MIXED_PRECISION": "BF16"}, "bf16"),
        (FP8 | {"ACCELERATE_FP8_RECIPE": "block"}, "block"),
        (FP8 | {"ACCELERATE_FP8_BACKEND": "TE"}, "delayed"),
        # Variables left over in a shell. accelerate would convert the model although
        # `mixed_precision` is not fp8.
        (BF16 | {"ACCELERATE_FP8_RECIPE": "nonsense", "ACCELERATE_FP8_BACKEND": "TE"}, "bf16"),
    ],
)
def test_the_requested_precision_is_read_and_its_variables_are_removed(
    environ: dict[str, str], name: str
) -> None:
    unrelated = {"PATH": "/bin", "ACCELERATE_USE_CPU": "true", "FP8_BACKEND": "mine"}
    environ = unrelated | environ
    assert take_requested_precision(environ)[0].name == name
    assert environ == unrelated


GENERAL = {"backend": "emulation", "scope": "linear+head", "on_unsupported": "emulate"}
GENERAL |= {"keep_bf16_layers": {"first": 1, "last": 2}, "keep_bf16": ("layers.0.*", "down_proj")}
GENERAL |= {"use_autocast_during_eval": True}
OF_NVFP4 = {"disable_rht": True, "disable_stochastic_rounding": False}
OF_DELAYED = {"fp8_format": "E4M3", "margin": 2, "amax_history_len": 16, "amax_compute_algo": "max"}
# `accelerate config` writes two options by names that `accelerate launch` does not know.
BY_ACCELERATE = {"backend": "TE", "use_autocast_during_eval": False, "margin": 0, "interval": 1}
BY_ACCELERATE |= {"fp8_format": "HYBRID", "amax_history_length": 16}
BY_ACCELERATE |= {"amax_compute_algorithm": "max", "override_linear_precision": (False,) * 3}
MXFP8_SWITCH = {"use_mxfp8_block_scaling": True, "fp8_format": "E4M3"}
E4M3 = {"fp8_format": "E4M3"}
HYBRID = {"fp8_format": "HYBRID"}


@pytest.mark.parametrize(
    ("file", "recipe", "name", "expected"),
    [
        (GENERAL | OF_NVFP4 | {"recipe": "nvfp4"}, {}, "nvfp4", GENERAL | OF_NVFP4),
        (OF_DELAYED | {"recipe": "delayed"}, {}, "delayed", OF_DELAYED),
        (BY_ACCELERATE, {}, "delayed", {"amax_history_len": 16}),
        # Accelerate's default. A file that wants `max` must set it.
        ({"recipe": "delayed"}, {}, "delayed", {"amax_compute_algo": "most_recent"}),
        (None, {"precision": "delayed"}, "delayed", {"amax_compute_algo": "max"}),
        # Ignored, as if the file did not have the key.
        ({"recipe": "block"} | HYBRID, {}, "block", {"fp8_format": None, "margin": None}),
        (MXFP8_SWITCH | {"backend": "TE"}, {}, "mxfp8", E4M3),
        *(({"use_mxfp8_block_scaling": off}, {}, "delayed", {}) for off in (False, "false", "off")),
        # A format in the recipe replaces a missing one in the file.
        ({"recipe": "mxfp8"}, {"fp8_config": HYBRID}, "mxfp8", HYBRID),
        ({"recipe": "mxfp8"}, {"fp8_config": E4M3}, "mxfp8", E4M3),
        ({"use_mxfp8_block_scaling": True}, {"fp8_config": E4M3}, "mxfp8", E4M3),
        ({"recipe": "mxfp8"}, {"precision": "bf16"}, "bf16", {}),
        # The recipe overrides the file key by key.
        (
            {"recipe": "delayed", "keep_bf16_layers": {"first": 1, "last": 2}} | OF_DELAYED,
            {"fp8_config": {"margin": 3, "keep_bf16_layers": {"first": 0}}},
            "delayed",
            OF_DELAYED | {"margin": 3, "keep_bf16_layers": {"first": 0, "last": 2}},
        ),
    ],
)
def test_the_keys_of_the_file_and_of_the_recipe_arrive(
    file: dict | None, recipe: dict, name: str, expected: dict, environment: Any
) -> None:
    environ = {} if file is None else environment(**file)
    precision, fp8_config = resolve(environ, **recipe)
    assert precision == name
    assert {key: fp8_config.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("fp8_config", "words"),
    [
        ({"recpie": "nvfp4"}, r"`fp8_config.recpie`: .* did you mean `fp8_config.recipe`\?"),
        ({"recipe": "mxfp"}, r"`fp8_config.recipe`: .*'mxfp8'.* 'mxfp'"),
        ({"recipe": "bf16"}, "`fp8_config.recipe: bf16` .* set `mixed_precision: bf16`"),
        ({"fp8_format": "E5M2"}, r"`fp8_config.fp8_format`: .*'HYBRID' or 'E4M3'"),
        ({"interval": 4}, "`fp8_config.interval: 4` is not supported; remove this key"),
        (
            {"override_linear_precision": [False, True, False]},
            "override_linear_precision.* is not supported; .*keep_bf16_layers",
        ),
        (
            {"recipe": "nvfp4", "nvfp4_4over6": "weights"},
            "`fp8_config.nvfp4_4over6`: unknown key; known keys here: amax_compute_algo",
        ),
        (
            {"use_mxfp8_block_scaling": True, "recipe": "delayed"},
            "use_mxfp8_block_scaling: True` and `recipe: delayed` contradict",
        ),
        (MXFP8_SWITCH | {"margin": 1}, "{margin: 1}` and `recipe: mxfp8` contradict"),
        ({"recipe": "block", "margin": 1}, "{margin: 1}` and `recipe: block` contradict"),
        (
            {"recipe": "delayed", "disable_rht": True},
            "{disable_rht: True}` and `recipe: delayed` contradict",
        ),
        # A missing format is not taken for HYBRID.
        ({"recipe": "mxfp8"}, "may be Accelerate's default .* set `fp8_format: E4M3`"),
        ({"use_mxfp8_block_scaling": True}, "may be Accelerate's default .* `fp8_format: E4M3`"),
    ],
)
def test_a_mistake_in_a_file_is_reported_with_its_key_and_a_remedy(
    fp8_config: dict, words: str, environment: Any
) -> None:
    with pytest.raises(InputError, match=rf"^Accelerate configuration: .*{words}"):
        resolve(environment(**fp8_config))


@pytest.mark.parametrize("name", ["fp32", "bf16", "current", "nvfp4"])
def test_another_precision_inherits_common_keys_but_no_options(name: str, environment: Any) -> None:
    environ = environment(recipe="delayed", **OF_DELAYED, **GENERAL)
    precision, fp8_config = resolve(environ, precision=name)
    assert precision == name
    assert GENERAL.items() <= fp8_config.items()
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
    layers = {"first": 5, "last": 5}
    for environ in (
        {},
        dict(BF16),
        environment(recipe="mxfp8", scope="linear+head", **E4M3),
        environment(recipe="delayed", margin=7, keep_bf16_layers=layers, backend="emulation"),
    ):
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
COMMON = {"use_cpu": False, "debug": False, "mixed_precision": "bf16", "downcast_bf16": "no"}
COMMON |= {"enable_cpu_affinity": False, "gpu_ids": "all", "machine_rank": 0}
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
    given = {"dp_replicate_size": replicas, "dp_shard_size": shards, "tp_size": 1, "cp_size": 1}
    return {f"parallelism_config_{key}": size for key, size in (given | sizes).items()}


def launch_variables(
    folder: Path, processes: int, *, machines: int = 1, **answers: Any
) -> dict[str, str]:
    """Return the variables of one process, launched with a file of these answers.

    There are `processes` in total on `machines`.
    """
    path = folder / "default_config.yaml"
    address = {"main_process_ip": "h1" if machines > 1 else None, "main_process_port": 29999}
    values = COMMON | address | {"num_machines": machines, "num_processes": processes} | answers
    ClusterConfig(compute_environment="LOCAL_MACHINE", **values).to_yaml_file(path)
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes)}
    group |= {"LOCAL_WORLD_SIZE": str(processes // machines)}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    alone = answers["distributed_type"] in ("NO", "MULTI_CPU")
    return environment_under(["--config_file", str(path)]) | ({} if alone else group)


def correct(environ: dict[str, str], *, has_gpu: bool = True) -> tuple[int, tuple[str, ...]]:
    """Correct `environ` as the launcher does."""
    take_requested_precision(environ)
    return with_topology(environ, has_gpu=has_gpu)


MPI = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OF_ONE = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE")


@pytest.mark.parametrize(
    "variables",
    [
        MPI,
        {f"OMPI_COMM_WORLD_{key}": "2" for key in OF_ONE},
        {f"MV2_COMM_WORLD_{key}": "2" for key in OF_ONE},
    ],
)
def test_variables_of_mpi_alone_start_one_process(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference is the process group that Accelerate reads from the environment."""
    environ = dict(variables)
    assert correct(environ, has_gpu=False) == (1, ())
    for key, value in environ.items():
        monkeypatch.setenv(key, value)
    group = get_cpu_distributed_information()
    assert (group.world_size, group.rank, group.local_rank, group.local_world_size) == (1, 0, 0, 1)


PLAIN = "one process"
DDP = "DDP"
SHARDED = "FSDP2"
ALONE = {"distributed_type": "NO"}
SEVERAL = {"distributed_type": "MULTI_GPU"}


def topology(environ: dict[str, str]) -> str:
    """Return the topology that accelerate will train with."""
    if environ.get("ACCELERATE_USE_FSDP") == "true":
        return SHARDED
    return DDP if "WORLD_SIZE" in environ else PLAIN


def fsdp(mesh: dict[str, int] | None = None, **changes: Any) -> dict[str, Any]:
    """Return the answers for FSDP2. `changes` have no prefix `fsdp_`."""
    config = FSDP2 | {f"fsdp_{key}": value for key, value in changes.items()}
    parallelism = {"parallelism_config": mesh} if mesh else {}
    return {"distributed_type": "FSDP", "fsdp_config": config} | parallelism


INDUCTOR = {"dynamo_config": {"dynamo_backend": "INDUCTOR"}}
SIZE_BASED = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 9}


@pytest.mark.parametrize(
    ("processes", "answers", "becomes", "replicas", "words"),
    [
        (1, ALONE, PLAIN, 1, ()),
        (1, ALONE | INDUCTOR, PLAIN, 1, ["`dynamo_config`"]),
        (4, SEVERAL | {"debug": True, "downcast_bf16": "yes"}, DDP, 1, ()),
        (8, SEVERAL | {"machines": 2}, DDP, 1, ()),
        (4, fsdp(), SHARDED, 1, ()),
        (1, fsdp(), PLAIN, 1, ["FSDP"]),
        (4, fsdp(**SIZE_BASED), SHARDED, 1, ["`fsdp_auto_wrap_policy`"]),
        (4, fsdp(cpu_ram_efficient_loading=True), SHARDED, 1, ["would untie the head"]),
        *(
            (4, fsdp(**{key: value}), SHARDED, 1, [f"`fsdp_{key}`"])
            for key, value in {
                "state_dict_type": "FULL_STATE_DICT",
                "activation_checkpointing": True,
                "activation_checkpointing_offload": True,
                "ignored_modules": ".*norm",
                "sharding_strategy": "HYBRID_SHARD",
            }.items()
        ),
        # One notice names all keys.
        (
            4,
            fsdp(state_dict_type="FULL_STATE_DICT", cpu_ram_efficient_loading=True) | INDUCTOR,
            SHARDED,
            1,
            ["dynamo_config`", "`fsdp_state_dict_type`", "`fsdp_cpu_ram_efficient_loading`"],
        ),
        (4, fsdp(mesh(1, 4)), SHARDED, 1, ()),
        (4, fsdp(mesh(4, 1)), DDP, 1, ["FSDP"]),
        (8, fsdp(mesh(2, 4)), SHARDED, 2, ()),
    ],
)
def test_a_file_that_accelerate_writes_trains(
    processes: int,
    answers: dict[str, Any],
    becomes: str,
    replicas: int,
    words: list[str],
    tmp_path: Path,
) -> None:
    environ = launch_variables(tmp_path, processes, **answers)
    copies, notices = correct(environ)
    assert (topology(environ), copies) == (becomes, replicas)
    assert len(notices) == bool(words) and all(word in notices[0] for word in words)
    assert not any(key.startswith("PARALLELISM_") for key in environ)
    assert environ["ACCELERATE_DYNAMO_BACKEND"] == "NO"
    if becomes == SHARDED:
        assert "FSDP_IGNORED_MODULES" not in environ
        assert environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"
        assert environ["FSDP_ACTIVATION_CHECKPOINTING"] == "false"


def test_gradient_accumulation_of_accelerate_is_reset_with_a_notice() -> None:
    environ = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    (notice,) = correct(environ)[1]
    assert "`batch.tokens`" in notice and environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "1"


@pytest.mark.parametrize(("processes", "has_gpu"), [(4, True), (4, False), (1, True)])
def test_parameters_are_offloaded_from_gpus_only_and_not_with_muon(
    processes: int, has_gpu: bool, tmp_path: Path
) -> None:
    environ = launch_variables(tmp_path, processes, **fsdp(offload_params=True))
    notices = correct(environ, has_gpu=has_gpu)[1]
    assert ("`fsdp_offload_params`" in "".join(notices)) == (not has_gpu)
    muon = recipe_with(optimizer={"name": "muon"})
    check_offload(recipe_with(), environ)
    if (processes, has_gpu) == (4, True):
        assert environ["FSDP_OFFLOAD_PARAMS"] == "true"
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
        (SEVERAL | {"parallelism_config": mesh(1, 1, tp_size=4)}, "parallelism_config_tp_size"),
        (SEVERAL | {"parallelism_config": mesh(1, 1, cp_size=4)}, "parallelism_config_cp_size"),
        (SEVERAL | {"parallelism_config": mesh(1, 4)}, "parallelism_config_dp_shard_size"),
        (fsdp(version=1), "fsdp_version: 1"),
        (SEVERAL | {"mixed_precision": "fp16"}, "mixed_precision: fp16"),
    ],
)
def test_a_topology_that_cannot_be_corrected_is_one_message(
    answers: dict[str, Any], key: str, tmp_path: Path
) -> None:
    environ = launch_variables(tmp_path, 4, **answers)
    with pytest.raises(InputError, match=f"^Accelerate configuration: .*{key}"):
        correct(environ)


def test_processes_of_a_machine_without_a_gpu_train_on_its_cpu(tmp_path: Path) -> None:
    """With several machines nothing is corrected: one of them may have lost its GPUs."""
    for machines, on_cpu in ((1, True), (2, False)):
        environ = launch_variables(tmp_path, 4, machines=machines, distributed_type="MULTI_GPU")
        _, notices = correct(environ, has_gpu=False)
        assert (environ.get("ACCELERATE_USE_CPU") == "true") == on_cpu == bool(notices)


def test_fp32_products_are_ieee_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE sets the precision of products when torch is imported."""
    products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    for product in products:
        product.fp32_precision = "tf32"
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    multiply_in_ieee_fp32()
    assert [product.fp32_precision for product in products] == ["ieee", "ieee"]
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    with pytest.raises(InputError, match="unset it"):
        multiply_in_ieee_fp32()
