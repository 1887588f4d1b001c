"""Read the precision and correct the topology of an accelerate configuration.

`accelerate launch` passes its YAML to the processes as environment variables. The precision
variables are read here and removed, so that accelerate cannot act on them. ACCELERATE_FP8_BACKEND
alone would make accelerate convert the model's linears by its own rules, and its autocast would
round a second time what the working copies have already rounded. `pretrain.precision` is the only
owner of the precision.

accelerate passes unknown keys of `fp8_config` through and fills in its own defaults for the keys
that it knows. A value in the file cannot be distinguished from a default of accelerate. It counts
if the precision has the key, and is ignored otherwise. An `fp8_format` that may be accelerate's
default is refused if the default of the precision differs. Beside `use_mxfp8_block_scaling: true`
it is ignored.

`accelerate config` asks many questions about topology. Some answers would train another model here,
or repeat what the launcher does. Answers that can be corrected safely are corrected with a notice.
All others are refused.
"""

from __future__ import annotations

import ast
import logging
import os
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
# Values that accelerate reads as true.
_TRUE = ("true", "1", "yes", "y", "t", "on")
_log = logging.getLogger(__name__)

# ── Precision ─────────────────────────────────────────────────────────────────────────────────────

_PREFIX = "ACCELERATE_FP8_"
# Value of `mixed_precision` for which accelerate reads `fp8_config`.
_FP8 = "fp8"
# Values that accelerate sets for keys that are missing in its file.
_ACCELERATE_DEFAULTS = {
    "fp8_format": "HYBRID",
    "margin": 0,
    "amax_history_len": 1024,
    "amax_compute_algo": "most_recent",
}
# Keys of accelerate that have no effect here, with their default. Other values are refused.
_WITHOUT_EFFECT = {
    "interval": 1,
    "override_linear_precision": False,
    # of MS-AMP
    "opt_level": "O2",
    # of torchao
    "enable_fsdp_float8_all_gather": True,
    "pad_inner_dim": True,
}
# Other spellings of keys. `accelerate config` writes the first two, which `accelerate launch` does
# not know. The third is left of FP8_FORMAT without the prefix.
_OTHER_NAMES = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "format": "fp8_format",
}


class _Fp8Config(LowPrecisionSettings):
    """The `fp8_config` of an accelerate configuration, where `recipe` names the precision."""

    # mypy does not take a Literal whose names are collected at run time.
    recipe: PrecisionName = BY_ACCELERATE[_FP8].name  # type: ignore[valid-type]


class _File(Settings):
    """The part of an accelerate configuration that is read here.

    Messages name its keys as the file does.
    """

    fp8_config: _Fp8Config


def with_precision(recipe: Recipe, environ: MutableMapping[str, str]) -> Recipe:
    """Return `recipe` with its precision and `fp8_config` resolved.

    The recipe or the command line decides the precision. If they name none, the accelerate
    configuration decides. `fp8_config` is resolved key by key from the recipe, the accelerate
    configuration, and the precision's defaults. Options of an accelerate configuration for another
    precision are ignored. So the resolved recipe, written out, means the same under any accelerate
    configuration.

    A schedule with several quantized precisions keeps options unset, because each precision has its
    own defaults, and ignores all options of the accelerate configuration.

    Removes the precision variables from `environ`. Raises InputError for an unknown precision or
    key, and for options that the precision does not accept.
    """
    requested, inherited = take_requested_precision(environ)
    chosen = [precision_called(name) for _, name in phases_of(recipe.precision)] or [requested]
    quantized = {precision.use: precision for precision in chosen if precision.quantized}
    _check_recipe_options(recipe.fp8_config, chosen, list(quantized.values()))
    if list(quantized) != [requested.name]:
        inherited = inherited.without_options()
    elif recipe.fp8_config.fp8_format is None:
        _check_fp8_format(requested, inherited)
    settings = _merge(inherited, recipe.fp8_config)
    if len(quantized) < 2:
        settings = settings.resolved(next(iter(quantized), chosen[0].name))
    return recipe.model_copy(
        update={"precision": recipe.precision or requested.name, "fp8_config": settings}
    )


def _check_recipe_options(
    settings: LowPrecisionSettings, chosen: list[Precision], quantized: list[Precision]
) -> None:
    """Raise InputError if the recipe sets options that no precision of the run accepts.

    `chosen` has the precision of each phase, and `quantized` the quantized ones among them.
    """
    phase = ", a phase of the schedule," if len(chosen) > 1 else ""
    for precision in quantized or chosen[:1]:
        # An option of another phase's precision is no mistake.
        elsewhere = {key for other in quantized for key in other.options} - set(precision.options)
        remaining = settings.model_copy(update=dict.fromkeys(elsewhere))
        _check_options(remaining, precision, f"`precision: {precision.use}`{phase}")


def _check_fp8_format(precision: Precision, inherited: LowPrecisionSettings) -> None:
    """Raise InputError if `fp8_format` may be accelerate's default and not the precision's."""
    filled_in = _ACCELERATE_DEFAULTS["fp8_format"]
    default = precision.options.get("fp8_format")
    if inherited.fp8_format == filled_in != default:
        raise InputError(
            f"{_ORIGIN}: `fp8_config.fp8_format: {filled_in}` under `{precision.name}` may be "
            f"accelerate's default for a missing key; set `fp8_format: {default}` in the file, "
            f"or `fp8_config.fp8_format={filled_in}` on the command line"
        )


def _check_options(
    settings: LowPrecisionSettings, precision: Precision, description: str, origin: str = ""
) -> None:
    """Raise InputError if `settings` have options that `precision` does not accept.

    `description` names the precision in the message, and `origin` the file.
    """
    if contradictions := settings.contradictions(precision):
        options = ", ".join(f"{key}: {value}" for key, value in contradictions.items())
        accepted = ", ".join(precision.options) or "none of these options"
        raise InputError(
            f"{origin}`fp8_config: {{{options}}}` and {description} contradict each other: "
            f"`{precision.use}` takes {accepted}; remove the others, or set them to null on the "
            "command line"
        )


def _merge(inherited: LowPrecisionSettings, recipe: LowPrecisionSettings) -> LowPrecisionSettings:
    """Merge the settings key by key. Keys that the recipe sets override inherited keys."""
    below = inherited.model_dump(exclude_unset=True)
    above = recipe.model_dump(exclude_unset=True)
    merged = below | above
    layers = "keep_bf16_layers"  # the one key that is a section
    if layers in below and layers in above:
        merged[layers] = below[layers] | above[layers]
    return LowPrecisionSettings.model_validate(merged)


def take_requested_precision(
    environ: MutableMapping[str, str],
) -> tuple[Precision, LowPrecisionSettings]:
    """Return the precision and the settings that the launch environment requests.

    Removes the precision variables from `environ`. Without `accelerate launch`, the precision is
    FP32, as in plain PyTorch. Variables of an `fp8_config` without `mixed_precision: fp8` are
    leftovers and are ignored. Raises InputError for a request that is not supported.
    """
    mixed_precision = environ.pop("ACCELERATE_MIXED_PRECISION", "no").lower()
    variables = {
        name.removeprefix(_PREFIX): environ.pop(name)
        for name in list(environ)
        if name.startswith(_PREFIX)
    }
    if mixed_precision == _FP8:
        return _read_fp8_config(_normalize(variables))
    precision = BY_ACCELERATE.get(mixed_precision)
    if precision is None:
        raise InputError(
            f"{_ORIGIN}: `mixed_precision: {mixed_precision}` is not supported; set bf16, 'no' for "
            "FP32, or fp8"
        )
    return precision, LowPrecisionSettings()


def _read_fp8_config(values: dict[str, Any]) -> tuple[Precision, LowPrecisionSettings]:
    """Return the precision and the settings of an `fp8_config`. Raises InputError for mistakes."""
    for key, default in _WITHOUT_EFFECT.items():
        value = values.pop(key, default)
        if value != default:
            raise InputError(
                f"{_ORIGIN}: `fp8_config.{key}: {value}` has no effect; remove it "
                "(`keep_bf16_layers` keeps layers in BF16)"
            )
    for switch, switched_on in ACCELERATE_SWITCHES.items():
        if str(values.pop(switch, False)).lower() not in _TRUE:
            continue
        if values.setdefault("recipe", switched_on) != switched_on:
            raise InputError(
                f"{_ORIGIN}: `fp8_config.{switch}: True` and `recipe: {values['recipe']}` "
                "contradict each other; remove one of them"
            )
        # accelerate fills in a format if the file has none, so that the switch is enough.
        if values.get("fp8_format") == _ACCELERATE_DEFAULTS["fp8_format"]:
            del values["fp8_format"]
            if os.environ.get("RANK", "0") == "0":
                _log.warning(
                    "%s: `fp8_config.%s` computes in `fp8_format: %s`; set another one by "
                    "`fp8_config.fp8_format=` on the command line",
                    _ORIGIN,
                    switch,
                    PRECISIONS[switched_on].options["fp8_format"],
                )
    config = parse(_File, {"fp8_config": values}, _ORIGIN).fp8_config
    precision = PRECISIONS[config.recipe]
    if not precision.quantized:
        raise InputError(
            f"{_ORIGIN}: `fp8_config.recipe: {config.recipe}` is not a quantized precision; set "
            "`mixed_precision: bf16`, or 'no' for FP32"
        )
    ignored = {
        key
        for key, default in _ACCELERATE_DEFAULTS.items()
        if values.get(key) == default and key not in precision.options
    }
    chosen = config.model_dump(exclude_unset=True, exclude={"recipe", *ignored})
    settings = LowPrecisionSettings.model_validate(chosen)
    _check_options(settings, precision, f"`recipe: {precision.name}`", f"{_ORIGIN}: ")
    return precision, settings


def _normalize(variables: dict[str, str]) -> dict[str, Any]:
    """Return the keys and values of an `fp8_config` from variables without their prefix.

    Keys get the spelling of this project.
    """
    lowered = {variable.lower(): text for variable, text in variables.items()}
    values = {_OTHER_NAMES.get(key, key): _parse_value(text) for key, text in lowered.items()}
    overridden = [values.pop(f"override_{gemm}", False) for gemm in ("fprop", "dgrad", "wgrad")]
    values["override_linear_precision"] = any(overridden)
    # accelerate's command line writes `--fp8_backend te` in lower case.
    if str(values.get("backend")).upper() == "TE":
        values["backend"] = "TE"
    return values


def _parse_value(text: str) -> Any:
    """Parse a value of accelerate's YAML, which it writes as a Python literal.

    Examples: True, 1024, {'first': 1}. Text that is not a literal is returned unchanged.
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text


# ── Topology ──────────────────────────────────────────────────────────────────────────────────────

# Variables that torchrun sets for a process group.
_GROUP = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PARALLELISM = "PARALLELISM_CONFIG_"
# Variables whose setting would repeat the launcher's work, or is not supported: the neutral value
# that they are reset to, and the text of the notice.
_RESET = {
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
    "FSDP_SHARDING_STRATEGY": (
        "FULL_SHARD",
        "`fsdp_sharding_strategy`: `fsdp_reshard_after_forward` and `parallelism_config` decide",
    ),
    "FSDP_BACKWARD_PREFETCH": ("NO_PREFETCH", "`fsdp_backward_prefetch`: FSDP2 decides"),
    "FSDP_FORWARD_PREFETCH": ("false", "`fsdp_forward_prefetch`: FSDP2 decides"),
}


@dataclass(frozen=True)
class Launch:
    """The topology of a launch that the corrected environment variables do not hold."""

    # Number of copies of the shards under FSDP2 (HSDP). 1 if parameters are sharded over all
    # processes, or not sharded.
    replicas: int
    # Corrections to report to the user.
    notices: tuple[str, ...]
    # Under FSDP2: gather shards once per step if memory allows, else for each use.
    gathers_as_fits: bool


def with_topology(environ: MutableMapping[str, str], *, has_gpu: bool) -> Launch:
    """Correct the topology variables in `environ` before an Accelerator is created.

    `has_gpu` is True if this process sees a GPU. Raises InputError if the launch cannot be
    corrected.
    """
    for variable, kind in (
        ("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED"),
        ("ACCELERATE_USE_MEGATRON_LM", "MEGATRON_LM"),
    ):
        if _is_true(environ, variable):
            raise InputError(
                f"{_ORIGIN}: `distributed_type: {kind}` is not supported; use MULTI_GPU or FSDP"
            )
    notices: list[str] = []
    processes = _correct_processes(environ, has_gpu, notices)
    for axis in ("TP", "CP", "SP"):
        if environ.get(f"{_PARALLELISM}{axis}_SIZE", "1") != "1":
            raise InputError(
                f"{_ORIGIN}: `parallelism_config_{axis.lower()}_size`: tensor, context and "
                "sequence parallelism are not supported; remove the key"
            )
    ignored = []
    for variable, (neutral, text) in _RESET.items():
        if environ.get(variable, neutral).lower() != neutral.lower():
            environ[variable] = neutral
            ignored.append(text)
    gathers_as_fits = environ.get("FSDP_RESHARD_AFTER_FORWARD", "").lower() == "auto"
    if gathers_as_fits:
        environ["FSDP_RESHARD_AFTER_FORWARD"] = "true"  # accelerate knows only true and false
    replicas = 1
    if _is_true(environ, "ACCELERATE_USE_FSDP"):
        on_cpus = not has_gpu or _is_true(environ, "ACCELERATE_USE_CPU")
        replicas = _correct_fsdp(environ, processes, ignored, on_cpus=on_cpus)
    elif environ.get(f"{_PARALLELISM}DP_SHARD_SIZE", "1") != "1":
        raise InputError(
            f"{_ORIGIN}: `parallelism_config_dp_shard_size` needs `distributed_type: FSDP` and "
            "`fsdp_version: 2`; set them, or remove the key"
        )
    if ignored:
        notices.append(f"ignored: {'; '.join(ignored)}")
    # The mesh is in `replicas` from here on.
    for variable in list(environ):
        if variable.startswith(_PARALLELISM) or variable == "ACCELERATE_USE_PARALLELISM_CONFIG":
            del environ[variable]
    return Launch(replicas, tuple(f"{_ORIGIN}: {text}" for text in notices), gathers_as_fits)


def _correct_fsdp(
    environ: MutableMapping[str, str], processes: int, ignored: list[str], *, on_cpus: bool
) -> int:
    """Return the number of replicas of FSDP, and correct the variables of FSDP.

    The texts of ignored settings are added to `ignored`. `on_cpus` is True if the processes train
    on CPUs.
    """
    if environ.get("FSDP_VERSION", "1") == "1":
        raise InputError(
            f"{_ORIGIN}: `fsdp_version: 1` is not supported; set `fsdp_version: 2`, with "
            "`fsdp_reshard_after_forward: true` for FULL_SHARD and false for SHARD_GRAD_OP"
        )
    replicas, shards = _mesh(environ, processes)
    if shards == 1:
        replicas = 1
        environ["ACCELERATE_USE_FSDP"] = "false"
        ignored.append("FSDP: each process holds the whole model")
    # Each decoder layer is a shard group. The model itself names the class of its layers.
    environ.pop("FSDP_TRANSFORMER_CLS_TO_WRAP", None)
    if environ.pop("FSDP_IGNORED_MODULES", None):
        ignored.append("`fsdp_ignored_modules`: every module is sharded")
    environ["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP"
    if on_cpus and _is_true(environ, "FSDP_OFFLOAD_PARAMS"):
        environ["FSDP_OFFLOAD_PARAMS"] = "false"
        ignored.append("`fsdp_offload_params`: the parameters are on the CPU")
    return replicas


def _correct_processes(environ: MutableMapping[str, str], has_gpu: bool, notices: list[str]) -> int:
    """Return the number of processes that train together, and correct their variables.

    Corrections for the user are added to `notices`.
    """
    processes = int(environ.get("WORLD_SIZE", "1"))
    # accelerate sets MASTER_ADDR for several processes even if it then starts only one.
    is_from_accelerate = {"ACCELERATE_DYNAMO_BACKEND", "MASTER_ADDR"} <= environ.keys()
    if "WORLD_SIZE" not in environ and is_from_accelerate:
        raise InputError(
            f"{_ORIGIN}: `num_processes` is more than 1 and `distributed_type: NO` (or MULTI_CPU, "
            "or `--cpu`) starts one; use accelerate_configs/ddp.yaml (MULTI_GPU), on CPUs too, or "
            "set `num_processes: 1` and unset MASTER_ADDR"
        )
    # A single process needs no process group.
    if processes == 1 and environ.get("LOCAL_RANK", "0") == "0":
        for variable in _GROUP:
            environ.pop(variable, None)
    # Processes of one machine see the same devices. With several machines, a machine that has lost
    # its GPUs must not go on with its CPU.
    on_one_machine = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    uses_cpu = _is_true(environ, "ACCELERATE_USE_CPU")
    if processes > 1 and on_one_machine and not has_gpu and not uses_cpu:
        environ["ACCELERATE_USE_CPU"] = "true"
        notices.append(f"no GPU is visible, so {processes} processes train on the CPU")
    return processes


def _mesh(environ: Mapping[str, str], processes: int) -> tuple[int, int]:
    """Return the replicas and shards of a `parallelism_config`.

    Without a `parallelism_config` each process holds one shard.
    """
    replicas = int(environ.get(f"{_PARALLELISM}DP_REPLICATE_SIZE", "1"))
    shards = int(environ.get(f"{_PARALLELISM}DP_SHARD_SIZE", "1"))
    if replicas == shards == 1:
        return 1, processes
    if replicas * shards != processes:
        raise InputError(
            f"{_ORIGIN}: {replicas} replicas x {shards} shards are {replicas * shards} processes, "
            f"but the launch has {processes}; set --parallelism_config_dp_replicate_size and "
            "--parallelism_config_dp_shard_size to numbers with that product"
        )
    return replicas, shards


def _is_true(environ: Mapping[str, str], variable: str) -> bool:
    """Return True if accelerate reads the variable as true. A missing variable is false."""
    return environ.get(variable, "false").lower() in _TRUE
