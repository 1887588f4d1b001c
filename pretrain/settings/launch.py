"""What an accelerate configuration says: which precision, and on which topology.

`accelerate launch` hands its YAML over as environment variables. Those of precision are read here and taken away, because
accelerate would otherwise act on them: a mere ACCELERATE_FP8_BACKEND makes it convert the model's linears by its own rules, and
autocast would round what the working copies already round. Precision has one owner, and it is `pretrain.precision`. accelerate
passes unknown keys of `fp8_config` on unread, and fills in its own defaults for those that it knows. So a default of accelerate's
may be what somebody wrote. It counts where the precision has such a key, and for nothing elsewhere.
An `fp8_format` that may be accelerate's default is refused if the precision has another default.

`accelerate config` asks many questions about topology, and some of its answers would train another model here, or do a second
time what the launcher does. What can safely be corrected is corrected, each time with a notice. The rest is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from foundation.errors import InputError
from foundation.settings import Settings, parse
from pretrain.precision.formats.definition import Precision
from pretrain.precision.settings import (
    ACCELERATE_SWITCHES,
    BY_ACCELERATE,
    PRECISIONS,
    LowPrecisionSettings,
    PrecisionName,
    phases_of,
    precision_called,
)
from pretrain.settings.recipe import Recipe

_ORIGIN = "accelerate configuration"

# ── Precision ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────

_PREFIX = "ACCELERATE_FP8_"
_FP8 = "fp8"  # the `mixed_precision` with which accelerate reads an `fp8_config`
# What accelerate sets for options of ours that its file leaves out.
_FILLED_IN = {
    "fp8_format": "HYBRID",
    "margin": 0,
    "amax_history_len": 1024,
    "amax_compute_algo": "most_recent",
}
# Keys of accelerate's that have no effect here, by the value that asks for nothing.
_WITHOUT_EFFECT = {"interval": 1, "override_linear_precision": False}
# MS-AMP's, torchao's
_WITHOUT_EFFECT |= {"opt_level": "O2", "enable_fsdp_float8_all_gather": True, "pad_inner_dim": True}
# By `accelerate config`, whose words `accelerate launch` does not know; and a prefix that has swallowed a beginning.
_OTHER_NAMES = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "format": "fp8_format",
}


class _Fp8Config(LowPrecisionSettings):
    recipe: PrecisionName = BY_ACCELERATE[_FP8].name


class _File(Settings):
    """The part of an accelerate configuration that is read here, for messages that name its keys as the file does."""

    fp8_config: _Fp8Config


def with_precision(recipe: Recipe, environ: MutableMapping[str, str]) -> Recipe:
    """`recipe` with its precision decided: its own where it (or the command line) names one, else the accelerate configuration's.

    `fp8_config` is decided key by key: the recipe's own, then the accelerate configuration's (without options of another
    precision), then the precision's defaults. So the result, written out, means the same under any accelerate configuration. Of a
    schedule's quantized precisions several have their own defaults, and then no option of the accelerate configuration counts.
    Raises InputError for an unknown precision or key, and for options that the precision does not take.
    """
    requested, inherited = take_requested_precision(environ)
    chosen = [precision_called(use) for _, use in phases_of(recipe.precision)] or [requested]
    quantized = {each.use: each for each in chosen if each.quantized}
    for each in quantized.values() or chosen[:1]:
        of_others = {key for other in quantized.values() for key in other.options} - set(
            each.options
        )
        named = f"`precision: {each.use}`{', a phase of the schedule,' * (len(chosen) > 1)}"
        _check_options(recipe.fp8_config.model_copy(update=dict.fromkeys(of_others)), each, named)
    filled_in = _FILLED_IN["fp8_format"]
    default = requested.options.get("fp8_format")
    if [*quantized] != [requested.name]:
        inherited = inherited.without_options()
    elif inherited.fp8_format == filled_in != default and recipe.fp8_config.fp8_format is None:
        raise InputError(
            f"{_ORIGIN}: `fp8_config.fp8_format: {filled_in}` under `{requested.name}` may be "
            f"accelerate's default for a missing key; set `fp8_format: {default}` in the file, "
            f"or `fp8_config.fp8_format={filled_in}` on the command line"
        )
    settings = _over(inherited, recipe.fp8_config)
    if len(quantized) < 2:
        settings = settings.resolved(next(iter(quantized), chosen[0].name))
    return recipe.model_copy(
        update={"precision": recipe.precision or requested.name, "fp8_config": settings}
    )


def _check_options(
    settings: LowPrecisionSettings, precision: Precision, named: str, origin: str = ""
) -> None:
    """InputError where `settings` have options that `precision`, which `named` says, does not take."""
    if contradictions := settings.contradictions(precision):
        options = ", ".join(f"{key}: {value}" for key, value in contradictions.items())
        raise InputError(
            f"{origin}`fp8_config: {{{options}}}` and {named} contradict each other: `{precision.use}` takes "
            f"{', '.join(precision.options) or 'no such option'}; leave out the others, or on the command line set them to null"
        )


def _over(inherited: LowPrecisionSettings, own: LowPrecisionSettings) -> LowPrecisionSettings:
    """Both, key by key, `own` on top."""
    below, above = (settings.model_dump(exclude_unset=True) for settings in (inherited, own))
    layers = "keep_bf16_layers"  # the one key that has keys of its own
    nested = {layers: below[layers] | above[layers]} if layers in below and layers in above else {}
    return LowPrecisionSettings.model_validate(below | above | nested)


def take_requested_precision(
    environ: MutableMapping[str, str],
) -> tuple[Precision, LowPrecisionSettings]:
    """Returns what the launch environment asks for, with what its file sets, as far as that can be told; `environ` loses its
    variables.

    Without `accelerate launch` nothing is named, and FP32 is what plain PyTorch would do. Variables of an `fp8_config` without
    `mixed_precision: fp8` are left over from elsewhere and ask for nothing. Raises InputError for what no recipe here stands for.
    """
    mixed_precision = environ.pop("ACCELERATE_MIXED_PRECISION", "no").lower()
    variables = {
        key.removeprefix(_PREFIX): environ.pop(key)
        for key in list(environ)
        if key.startswith(_PREFIX)
    }
    if mixed_precision == _FP8:
        return _read_fp8_config(_in_our_names(variables))
    if (precision := BY_ACCELERATE.get(mixed_precision)) is None:
        raise InputError(
            f"{_ORIGIN}: `mixed_precision: {mixed_precision}` is not supported; set bf16, 'no' for FP32, or fp8"
        )
    return precision, LowPrecisionSettings()


def _read_fp8_config(values: dict[str, Any]) -> tuple[Precision, LowPrecisionSettings]:
    for key, nothing in _WITHOUT_EFFECT.items():
        if (value := values.pop(key, nothing)) != nothing:
            raise InputError(
                f"{_ORIGIN}: `fp8_config.{key}: {value}` has no effect; leave it out (`keep_bf16_layers` keeps whole layers)"
            )
    for switch, switched_on in ACCELERATE_SWITCHES.items():
        if values.pop(switch, False) and values.setdefault("recipe", switched_on) != switched_on:
            raise InputError(
                f"{_ORIGIN}: `fp8_config.{switch}: True` and `recipe: {values['recipe']}` "
                "contradict each other; leave one of them out"
            )
    config = parse(_File, {"fp8_config": values}, _ORIGIN).fp8_config
    precision = PRECISIONS[config.recipe]
    if not precision.quantized:
        raise InputError(
            f"{_ORIGIN}: `fp8_config.recipe: {config.recipe}` is no FP8; set `mixed_precision: bf16`, FP32 is 'no'"
        )
    filled_in = {
        key
        for key, value in _FILLED_IN.items()
        if values.get(key) == value and key not in precision.options
    }
    chosen = config.model_dump(exclude_unset=True, exclude={"recipe", *filled_in})
    settings = LowPrecisionSettings.model_validate(chosen)
    _check_options(settings, precision, f"`recipe: {precision.name}`", f"{_ORIGIN}: ")
    return precision, settings


def _in_our_names(variables: dict[str, str]) -> dict[str, Any]:
    """Variables without their prefix as keys and values of an `fp8_config`, names in the spelling that is ours."""
    values = {
        _OTHER_NAMES.get(key.lower(), key.lower()): _value(text) for key, text in variables.items()
    }
    overridden = [
        values.pop(f"override_{product}", False) for product in ("fprop", "dgrad", "wgrad")
    ]
    values["override_linear_precision"] = any(overridden)
    # `--fp8_backend te` on accelerate's own command line
    if str(values.get("backend")).upper() == "TE":
        values["backend"] = "TE"
    return values


def _value(text: str) -> Any:
    """accelerate writes values of its YAML as Python does: True, 1024, {'first': 1}; what is no such literal is text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text


# ── Topology ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────

# what torchrun sets
_GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PARALLELISM = "PARALLELISM_CONFIG_"
_TRUE = ("true", "1", "yes", "y", "t", "on")  # as accelerate reads them
# Variables that would do what the launcher does or what it cannot: the value that asks for nothing, and what is said of others.
_LEFT_OUT = {
    "ACCELERATE_DYNAMO_BACKEND": ("NO", "`dynamo_config`: `model.compile` decides"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (
        "1",
        "`gradient_accumulation_steps`: `batch.tokens` and `.microbatch` decide",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        "false",
        "`fsdp_activation_checkpointing`: `model.gradient_checkpointing` decides",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (
        "false",
        "`fsdp_activation_checkpointing_offload`: activations stay on the device",
    ),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": (
        "false",
        "`fsdp_cpu_ram_efficient_loading`: true would untie the head from the embedding",
    ),
    "FSDP_AUTO_WRAP_POLICY": (
        "TRANSFORMER_BASED_WRAP",
        "`fsdp_auto_wrap_policy`: each decoder layer is a shard group",
    ),
    "FSDP_STATE_DICT_TYPE": (
        "SHARDED_STATE_DICT",
        "`fsdp_state_dict_type`: each process saves its own shards",
    ),
    "FSDP_BACKWARD_PREFETCH": ("NO_PREFETCH", "`fsdp_backward_prefetch`: FSDP2 decides"),
    "FSDP_FORWARD_PREFETCH": ("false", "`fsdp_forward_prefetch`: FSDP2 decides"),
}


@dataclass(frozen=True)
class Launch:
    """What remains to be known of a launch once its variables are corrected."""

    # of the shards, under FSDP2 (HSDP); 1: parameters are sharded over all processes, or not at all
    replicas: int
    notices: tuple[str, ...]  # what was corrected, for the user
    gathers_as_fits: bool  # shards: once a step where memory allows, else for each use


def with_topology(environ: MutableMapping[str, str], *, has_gpu: bool) -> Launch:
    """Change `environ`, before an Accelerator is made, to what trains rightly. `has_gpu`: whether this process sees one.
    InputError for a launch that cannot be corrected."""
    for variable, kind in (
        ("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"),
        ("ACCELERATE_USE_MEGATRON_LM", "MEGATRON_LM"),
    ):
        if _is_true(environ, variable):
            raise InputError(
                f"{_ORIGIN}: `distributed_type: {kind}` is not supported; use MULTI_GPU or FSDP"
            )
    notices: list[str] = []
    world = _processes(environ, has_gpu, notices)
    for axis in ("TP", "CP", "SP"):
        if environ.get(f"{_PARALLELISM}{axis}_SIZE", "1") != "1":
            raise InputError(
                f"{_ORIGIN}: `parallelism_config_{axis.lower()}_size`: tensor, context and "
                "sequence parallelism are not supported; remove the key"
            )
    left_out = []
    for variable, (nothing, why) in _LEFT_OUT.items():
        if environ.get(variable, nothing).lower() != nothing.lower():
            environ[variable] = nothing
            left_out.append(why)
    replicas, gathers_as_fits = 1, environ.get("FSDP_RESHARD_AFTER_FORWARD", "").lower() == "auto"
    if gathers_as_fits:
        environ["FSDP_RESHARD_AFTER_FORWARD"] = "true"  # accelerate knows no more
    if _is_true(environ, "ACCELERATE_USE_FSDP"):
        if environ.get("FSDP_VERSION", "1") == "1":
            raise InputError(
                f"{_ORIGIN}: `fsdp_version: 1` is not supported; set `fsdp_version: 2`, with "
                "`fsdp_reshard_after_forward: true` for FULL_SHARD and false for SHARD_GRAD_OP"
            )
        replicas, shards = _mesh(environ, world)
        if shards == 1:
            replicas, environ["ACCELERATE_USE_FSDP"] = 1, "false"
            left_out.append("FSDP: each process holds the whole model")
        # Each decoder layer is a group of shards, as the model itself names them.
        environ.pop("FSDP_TRANSFORMER_CLS_TO_WRAP", None)
        if environ.pop("FSDP_IGNORED_MODULES", None):
            left_out.append("`fsdp_ignored_modules`: every module is sharded")
        environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
    elif environ.get(f"{_PARALLELISM}DP_SHARD_SIZE", "1") != "1":
        raise InputError(
            f"{_ORIGIN}: `parallelism_config_dp_shard_size` needs `distributed_type: FSDP` and "
            "`fsdp_version: 2`; set them, or remove the key"
        )
    if left_out:
        notices.append(f"left out: {'; '.join(left_out)}")
    for variable in [
        key
        for key in environ
        if key.startswith(_PARALLELISM) or key == "ACCELERATE_USE_PARALLELISM_CONFIG"
    ]:
        del environ[variable]  # `replicas` is all that is left of it
    return Launch(replicas, tuple(f"{_ORIGIN}: {text}" for text in notices), gathers_as_fits)


def _processes(environ: MutableMapping[str, str], has_gpu: bool, notices: list[str]) -> int:
    """Returns how many processes train together, and puts the variables right that say so."""
    world = int(environ.get("WORLD_SIZE", "1"))
    if (
        "WORLD_SIZE" not in environ
        and {"ACCELERATE_DYNAMO_BACKEND", "MASTER_ADDR"} <= environ.keys()
    ):
        # accelerate sets MASTER_ADDR for several processes, also where it then starts only one.
        raise InputError(
            f"{_ORIGIN}: `num_processes` is more than 1 and `distributed_type: NO` (or MULTI_CPU, or `--cpu`) starts "
            "one; take accelerate_configs/ddp.yaml (MULTI_GPU), on CPUs too, or set `num_processes: 1` and unset MASTER_ADDR"
        )
    # a group of one has nobody to exchange anything with
    if world == 1 and environ.get("LOCAL_RANK", "0") == "0":
        for variable in _GROUP:
            environ.pop(variable, None)
    # Processes of one machine see the same devices. On several, one that has lost its GPU must not go on with a CPU.
    alone = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    if world > 1 and alone and not has_gpu and not _is_true(environ, "ACCELERATE_USE_CPU"):
        environ["ACCELERATE_USE_CPU"] = "true"
        notices.append(f"no GPU is seen here, so {world} processes train on the CPU")
    return world


def _mesh(environ: Mapping[str, str], world: int) -> tuple[int, int]:
    """Replicas and shards of a `parallelism_config`; without one, as many shards as processes."""
    replicas, shards = (
        int(environ.get(f"{_PARALLELISM}{key}", "1"))
        for key in ("DP_REPLICATE_SIZE", "DP_SHARD_SIZE")
    )
    if replicas == shards == 1:  # nothing was asked for
        return 1, world
    if replicas * shards != world:
        raise InputError(
            f"{_ORIGIN}: {replicas} replicas x {shards} shards are {replicas * shards} processes, and there are {world}; set "
            "--parallelism_config_dp_replicate_size and --parallelism_config_dp_shard_size to numbers with that product"
        )
    return replicas, shards


def _is_true(environ: Mapping[str, str], variable: str) -> bool:
    return environ.get(variable, "false").lower() in _TRUE
