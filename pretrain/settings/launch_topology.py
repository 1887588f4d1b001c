"""What a launch asks of accelerate's topology, and what is put right in it before accelerate acts on it.

`accelerate config` asks many questions, and some of its answers would train another model here, or do a second time what the
launcher does. They reach us as environment variables. What can be put right safely is, each with a notice; the rest is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from foundation.errors import InputError
from pretrain.settings.recipe import Recipe

_ORIGIN = "accelerate configuration"
_GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets
_PARALLELISM = "PARALLELISM_CONFIG_"
_TRUE = ("true", "1", "yes", "y", "t", "on")  # as accelerate reads them

# Variables that would do what the launcher does or what it cannot: the value that asks for nothing, and what is said of others.
_LEFT_OUT = {
    "ACCELERATE_DYNAMO_BACKEND": ("NO", "`dynamo_config`: `model.compile` decides"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "1",
        "`gradient_accumulation_steps`: `batch.tokens` and `batch.microbatch` decide",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("false", "`fsdp_activation_checkpointing_offload`: activations stay on the device"),
}


@dataclass(frozen=True)
class Launch:
    """What remains to be known of a launch once its variables are put right."""

    recipe: Recipe
    replicas: int  # of the shards, under FSDP2 (HSDP); 1: parameters are sharded over all processes, or not at all
    notices: tuple[str, ...]  # what was put right, for the user
    gathers_as_fits: bool  # shards: once a step where memory allows, else for each use


def put_right(recipe: Recipe, environ: MutableMapping[str, str], *, has_gpu: bool) -> Launch:
    """Change `environ`, before an Accelerator is made, to what trains rightly. `has_gpu`: whether this process sees one.

    A launch that cannot be put right is an InputError. What `recipe` says itself goes before what the launch says.
    """
    for variable, kind in (("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"), ("ACCELERATE_USE_MEGATRON_LM", "MEGATRON_LM")):
        if _is_true(environ, variable):
            raise InputError(f"{_ORIGIN}: `distributed_type: {kind}` is not supported; use MULTI_GPU or FSDP")
    notices: list[str] = []
    world = _processes(environ, has_gpu, notices)
    for variable, (nothing, why) in _LEFT_OUT.items():
        if environ.get(variable, nothing).lower() != nothing.lower():
            environ[variable] = nothing
            notices.append(f"left out: {why}")
    replicas, gathers_as_fits = 1, environ.get("FSDP_RESHARD_AFTER_FORWARD", "").lower() == "auto"
    if gathers_as_fits:
        environ["FSDP_RESHARD_AFTER_FORWARD"] = "true"  # accelerate knows no more
    if _is_true(environ, "ACCELERATE_USE_FSDP"):
        if environ.get("FSDP_VERSION", "1") == "1":
            raise InputError(
                f"{_ORIGIN}: `fsdp_version: 1` is not supported; set `fsdp_version: 2`, with "
                "`fsdp_reshard_after_forward: true` for FULL_SHARD and false for SHARD_GRAD_OP"
            )
        recipe, replicas = _shards(recipe, environ, world, notices)
    for variable in [key for key in environ if key.startswith(_PARALLELISM) or key == "ACCELERATE_USE_PARALLELISM_CONFIG"]:
        del environ[variable]  # `replicas` is all that is left of it
    return Launch(recipe, replicas, tuple(f"{_ORIGIN}: {text}" for text in notices), gathers_as_fits)


def _processes(environ: MutableMapping[str, str], has_gpu: bool, notices: list[str]) -> int:
    """Returns how many processes train together, and puts the variables right that say so."""
    world = _number(environ, "WORLD_SIZE")
    if "WORLD_SIZE" not in environ and {"ACCELERATE_DYNAMO_BACKEND", "MASTER_ADDR"} <= environ.keys():
        # accelerate sets MASTER_ADDR for several processes, also where it then starts only one.
        raise InputError(
            f"{_ORIGIN}: `num_processes` is more than 1 and `distributed_type: NO` (or MULTI_CPU, or `--cpu`) starts "
            "one; set `distributed_type: MULTI_GPU`, on CPUs too with ACCELERATE_USE_CPU=true in place of `--cpu`, or "
            "`num_processes: 1`. A MASTER_ADDR that a job script exports for one process: unset it"
        )
    if world == 1 and environ.get("LOCAL_RANK", "0") == "0":  # a group of one has nobody to exchange anything with
        for variable in _GROUP:
            environ.pop(variable, None)
    # Processes of one machine see the same devices. On several, one that has lost its GPU must not go on with a CPU.
    alone = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    if world > 1 and alone and not has_gpu and not _is_true(environ, "ACCELERATE_USE_CPU"):
        environ["ACCELERATE_USE_CPU"] = "true"
        notices.append(f"no GPU is seen here, so {world} processes train on the CPU")
    return world


def _shards(recipe: Recipe, environ: MutableMapping[str, str], world: int, notices: list[str]) -> tuple[Recipe, int]:
    """The recipe, which may recompute now, and the number of replicas."""
    replicas, shards = _mesh(environ, world)
    if shards == 1:
        if _is_true(environ, "FSDP_OFFLOAD_PARAMS"):
            raise InputError(f"{_ORIGIN}: `fsdp_offload_params: true` needs FSDP2 over two processes or more")
        environ["ACCELERATE_USE_FSDP"] = "false"
        notices.append("left out: FSDP, as each process holds the whole model")
        replicas = 1
    if _is_true(environ, "FSDP_ACTIVATION_CHECKPOINTING"):
        if "gradient_checkpointing" in recipe.model.model_fields_set:
            notices.append("left out: `fsdp_activation_checkpointing`: the recipe's `model.gradient_checkpointing` decides")
        else:
            notices.append("`fsdp_activation_checkpointing: true` is taken as `model.gradient_checkpointing: full`")
            model = recipe.model.model_copy(update={"gradient_checkpointing": "full"})
            recipe = recipe.model_copy(update={"model": model})
    environ["FSDP_ACTIVATION_CHECKPOINTING"] = environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # which would untie the head
    # Each decoder layer is a group of shards, as the model itself names them. Checkpoints are not accelerate's.
    environ.pop("FSDP_TRANSFORMER_CLS_TO_WRAP", None)
    environ |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
    return recipe, replicas


def _mesh(environ: Mapping[str, str], world: int) -> tuple[int, int]:
    """Replicas and shards of a `parallelism_config`; without one, as many shards as processes."""
    if not _is_true(environ, "ACCELERATE_USE_PARALLELISM_CONFIG"):
        return 1, world
    replicas, shards = (_number(environ, f"{_PARALLELISM}{key}") for key in ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE"))
    if any(_number(environ, f"{_PARALLELISM}{key}_SIZE") > 1 for key in ("TP", "CP", "SP")):
        raise InputError(f"{_ORIGIN}: tensor, context and sequence parallelism are not supported; remove them")
    if replicas == shards == 1:  # nothing was asked for
        return 1, world
    if replicas * shards != world:
        raise InputError(
            f"{_ORIGIN}: {replicas} replicas x {shards} shards are {replicas * shards} processes, and there are {world}; set "
            "--parallelism_config_dp_replicate_size and --parallelism_config_dp_shard_size to numbers whose product that is"
        )
    return replicas, shards


def _is_true(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable, "false").lower() in _TRUE


def _number(environ: Mapping[str, str], variable: str) -> int:
    text = environ.get(variable, "1")
    if not text.isdecimal():
        raise InputError(f"environment: {variable}={text} is no whole number; correct it, or unset it")
    return int(text)
