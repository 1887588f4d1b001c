"""Read the precision of an Accelerate configuration, and correct its topology settings.

`accelerate launch` passes the settings in its YAML file to the processes as environment variables.

**Precision.** This module reads the variables for the precision and removes them, so that only
`pretrain.precision` sets the precision. Otherwise Accelerate would also use them: because of
ACCELERATE_FP8_BACKEND it would convert the linear layers of the model, and its autocast would round
weights that are already rounded.

`accelerate launch` passes on all keys of `fp8_config` that are in the file. If the file lacks a key
that Accelerate supports, Accelerate inserts its own default for this key. So if a key has
Accelerate's default, it is not known whether the user has set the key. If the precision has an
option with the name of the key, the value is used, no matter who has set it. If the precision has
no such option, Accelerate's default is ignored, and any other value is an error.

There is a special rule for the key `fp8_format`: if it has Accelerate's default, and the precision
has another default format, the format is an error.

**Topology.** The topology is the number of processes, and how they divide the model. `accelerate
config` writes some topology settings that this project does not support or that repeat settings of
the recipe. If a setting can be corrected without changing the result of the training, it is
corrected, and a notice is printed. Any other such setting is an error.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from foundation.errors import InputError
from foundation.settings import Settings, flatten, parse, set_value
from pretrain.precision.formats.definition import Precision
from pretrain.precision.settings import (
    ACCELERATE_SWITCHES,
    BY_ACCELERATE,
    PRECISIONS,
    LowPrecisionSettings,
    PrecisionName,
    phases_of,
)
from pretrain.settings.recipe import Recipe

# Beginning of all messages about the Accelerate configuration.
_ORIGIN = "Accelerate configuration"
# Values of `distributed_type` that this project does not support.
UNSUPPORTED_TYPES = ("DEEPSPEED", "MEGATRON_LM")
# Values of environment variables that Accelerate interprets as true, in lower case.
_TRUE = ("true", "1", "yes", "y", "t", "on")


# ── Precision ─────────────────────────────────────────────────────────────────────────────────────

# Prefix of the environment variables for the keys of `fp8_config`.
_PREFIX = "ACCELERATE_FP8_"
# Value of `mixed_precision` with which `fp8_config` has an effect.
_FP8 = "fp8"
# Values that Accelerate inserts if these keys are missing in the file.
_ACCELERATE_DEFAULTS = {
    "fp8_format": "HYBRID",
    "margin": 0,
    "amax_history_len": 1024,
    "amax_compute_algo": "most_recent",
}
# Map each key of Accelerate's `fp8_config` that this project does not support to its default. A
# value other than the default is an error.
_UNSUPPORTED = {
    "interval": 1,
    "override_linear_precision": False,
    # This is a key of the backend MS-AMP.
    "opt_level": "O2",
    # These are keys of the backend torchao.
    "enable_fsdp_float8_all_gather": True,
    "pad_inner_dim": True,
}
# Map other spellings of keys to this project's keys. `accelerate config` writes the first two
# spellings, but `accelerate launch` does not support them. The third spelling is the name of the
# variable ACCELERATE_FP8_FORMAT without its prefix.
_OTHER_NAMES = {
    "amax_history_length": "amax_history_len",
    "amax_compute_algorithm": "amax_compute_algo",
    "format": "fp8_format",
}


class _Fp8Config(LowPrecisionSettings):
    """The `fp8_config` of an Accelerate configuration.

    Its key `recipe` is the name of the precision.
    """

    # mypy does not accept a Literal whose values are computed at run time.
    recipe: PrecisionName = BY_ACCELERATE[_FP8].name  # type: ignore[valid-type]


class _PrecisionSection(Settings):
    """The part of an Accelerate configuration that sets a quantized precision.

    It is parsed as a whole, so that messages begin the name of a key with `fp8_config`.
    """

    fp8_config: _Fp8Config


def with_precision(recipe: Recipe, environ: MutableMapping[str, str]) -> Recipe:
    """Return a copy of `recipe` with resolved `precision` and `fp8_config`.

    The resolved precision is the one in `recipe`, which includes the overrides of the command line.
    If `recipe` has no precision, the precision of the Accelerate configuration is used.

    Each option in `fp8_config` has the value in `recipe`, or else the value in the Accelerate
    configuration, or else the default of the precision. If the Accelerate configuration is for
    another precision than the resolved precision, the options in the Accelerate configuration are
    ignored. The resolved recipe is complete: if it is written to a file, it describes the same
    training with any Accelerate configuration.

    If `precision` is a schedule with several quantized precisions, options that `recipe` does not
    set stay unset, because the precisions have different defaults. The options of the Accelerate
    configuration are ignored in this case.

    The variables for the precision are removed from `environ`, the environment variables of the
    process. Raises InputError for an unknown precision or key, and for options that the precision
    does not accept.
    """
    requested, inherited = take_requested_precision(environ)
    chosen = [PRECISIONS[name] for _, name in phases_of(recipe.precision)] or [requested]
    quantized = [precision for precision in dict.fromkeys(chosen) if precision.quantized]
    # An unquantized precision accepts no options, so one of them suffices for the message.
    relevant = quantized or chosen[:1]
    check_options(recipe.fp8_config, relevant, "precision")
    if quantized != [requested]:
        # The options are for another precision.
        inherited = inherited.without_options()
    elif recipe.fp8_config.fp8_format is None:
        _check_fp8_format(requested, inherited)
    settings = _merge(inherited, recipe.fp8_config)
    # Several precisions have different defaults, so unset options stay unset.
    if len(relevant) == 1:
        settings = settings.resolved(relevant[0].name)
    return recipe.model_copy(
        update={"precision": recipe.precision or requested.name, "fp8_config": settings}
    )


def _check_fp8_format(precision: Precision, inherited: LowPrecisionSettings) -> None:
    """Raise InputError if it is unknown which `fp8_format` the user has chosen.

    The choice is unknown if two conditions are met: the format is Accelerate's default, which
    Accelerate may have inserted for a missing key, and the default of `precision` is a different
    format. `inherited` has the options in the Accelerate configuration.
    """
    filled_in = _ACCELERATE_DEFAULTS["fp8_format"]
    default = precision.options.get("fp8_format")
    if inherited.fp8_format == filled_in and default != filled_in:
        raise InputError(
            f"{_ORIGIN}: `fp8_config.fp8_format: {filled_in}` may be Accelerate's default for a "
            f"missing key; to use {default}, the default of `{precision.name}`, set `fp8_format: "
            f"{default}` in the file; to use {filled_in}, set `fp8_config.fp8_format={filled_in}` "
            "on the command line"
        )


def check_options(
    settings: LowPrecisionSettings, precisions: Sequence[Precision], setting: str, origin: str = ""
) -> None:
    """Raise InputError if `settings` has an option that no precision accepts.

    Args:
        settings: The options.
        precisions: The precisions of all phases. One of them must accept the option.
        setting: Name of the key that sets the precisions, for the message.
        origin: Beginning of the message, such as "Accelerate configuration: ".
    """
    accepted = dict.fromkeys(option for precision in precisions for option in precision.options)
    refused = [
        f"{key}: {value}" for key, value in settings.options_set.items() if key not in accepted
    ]
    if refused:
        options = ", ".join(refused)
        names = ", ".join(precision.name for precision in precisions)
        raise InputError(
            f"{origin}`fp8_config: {{{options}}}` and `{setting}: {names}` contradict each other: "
            f"`{names}` accepts {', '.join(accepted) or 'none of these options'}; either remove "
            "all other options, or set them to null"
        )


def _merge(inherited: LowPrecisionSettings, recipe: LowPrecisionSettings) -> LowPrecisionSettings:
    """Return all options in `inherited` and `recipe`. Options in `recipe` take precedence.

    `inherited` has the options in the Accelerate configuration.
    """
    merged = inherited.model_dump(exclude_unset=True)
    # The keys inside of the section `keep_bf16_layers` are merged too.
    for key, value in flatten(recipe.model_dump(exclude_unset=True)).items():
        set_value(merged, key, value)
    return LowPrecisionSettings.model_validate(merged)


def take_requested_precision(
    environ: MutableMapping[str, str],
) -> tuple[Precision, LowPrecisionSettings]:
    """Return the precision and the options that the Accelerate configuration sets.

    Both are read from environment variables in `environ`, and these variables are removed. If the
    process was not started by `accelerate launch`, there are no such variables, and the precision
    is FP32, as in plain PyTorch. The options in `fp8_config` are ignored unless `mixed_precision`
    is fp8. Raises InputError if a value is not supported.
    """
    # YAML reads `no` without quotation marks as false.
    mixed_precision = environ.pop("ACCELERATE_MIXED_PRECISION", "no").lower().replace("false", "no")
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
            f"{_ORIGIN}: `mixed_precision: {mixed_precision}` is not supported; set it to bf16, to "
            "'no' (which is FP32) or to fp8"
        )
    return precision, LowPrecisionSettings()


def _read_fp8_config(values: dict[str, Any]) -> tuple[Precision, LowPrecisionSettings]:
    """Return the precision and the options of an `fp8_config` in an Accelerate configuration.

    `values` maps keys in the spelling of this project to values. Raises InputError for a mistake.
    """
    for key, default in _UNSUPPORTED.items():
        value = values.pop(key, default)
        if value != default:
            raise InputError(
                f"{_ORIGIN}: `fp8_config.{key}: {value}` is not supported; remove this key "
                "(`keep_bf16_layers` and `keep_bf16` keep layers in BF16)"
            )
    for switch, precision_name in ACCELERATE_SWITCHES.items():
        if str(values.pop(switch, False)).lower() in _TRUE:
            # The switch has the effect of `recipe`.
            recipe = values.setdefault("recipe", precision_name)
            if recipe != precision_name:
                raise InputError(
                    f"{_ORIGIN}: `fp8_config.{switch}: True` and `recipe: {recipe}` contradict "
                    "each other; remove one of them"
                )
    config = parse(_PrecisionSection, {"fp8_config": values}, _ORIGIN).fp8_config
    precision = PRECISIONS[config.recipe]
    if not precision.quantized:
        raise InputError(
            f"{_ORIGIN}: `fp8_config.recipe: {config.recipe}` is not a quantized precision; set "
            "`mixed_precision: bf16` for BF16, or `mixed_precision: 'no'` for FP32"
        )
    # Drop defaults that Accelerate has inserted and the precision does not accept.
    for key, default in _ACCELERATE_DEFAULTS.items():
        if key not in precision.options and values.get(key) == default:
            del values[key]
    values.pop("recipe", None)
    settings = LowPrecisionSettings.model_validate(values)
    check_options(settings, [precision], "recipe", f"{_ORIGIN}: ")
    return precision, settings


def _normalize(variables: dict[str, str]) -> dict[str, Any]:
    """Return the `fp8_config` of an Accelerate configuration, in the spelling of this project.

    `variables` maps the names of environment variables, without their prefix, to texts. The result
    maps keys to parsed values.
    """
    lowered = {variable.lower(): text for variable, text in variables.items()}
    values = {_OTHER_NAMES.get(key, key): _parse_value(text) for key, text in lowered.items()}
    # Accelerate passes `override_linear_precision` as three variables, one for each GEMM.
    overridden = [values.pop(f"override_{gemm}", False) for gemm in ("fprop", "dgrad", "wgrad")]
    values["override_linear_precision"] = any(overridden)
    # On Accelerate's command line the value is lower case: `--fp8_backend te`.
    if str(values.get("backend")).upper() == "TE":
        values["backend"] = "TE"
    return values


def _parse_value(text: str) -> Any:
    """Parse the text of an environment variable, into which Accelerate writes Python literals.

    Examples: True, 1024, {'first': 1}. A text that is not a literal is returned unchanged.
    """
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError):
        return text


# ── Topology ──────────────────────────────────────────────────────────────────────────────────────

# Environment variables that torchrun sets for a process group, and variables that MPI and SLURM set
# for a process, from which Accelerate would also create a process group.
_GROUP = [
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
]
for _mpi in ("OMPI_COMM_WORLD_", "MV2_COMM_WORLD_"):
    _GROUP += [_mpi + name for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
# Prefix of the environment variables for the keys of `parallelism_config`.
_PARALLELISM = "PARALLELISM_CONFIG_"
# Settings that are ignored, because a setting of the recipe replaces them or because they are not
# supported. Map the environment variable of each setting to the text of the notice.
_IGNORED = {
    "ACCELERATE_DYNAMO_BACKEND": "`dynamo_config` (use `model.compile` in the recipe)",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "`gradient_accumulation_steps` (it follows from "
    "`batch.tokens` and `batch.microbatch`)",
    "FSDP_ACTIVATION_CHECKPOINTING": "`fsdp_activation_checkpointing` (use "
    "`model.gradient_checkpointing` in the recipe)",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "`fsdp_activation_checkpointing_offload` (activations "
    "always stay on the device)",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "`fsdp_cpu_ram_efficient_loading` (it would untie the head "
    "from the embedding)",
    "FSDP_AUTO_WRAP_POLICY": "`fsdp_auto_wrap_policy` (each decoder layer is always a shard group)",
    "FSDP_STATE_DICT_TYPE": "`fsdp_state_dict_type` (each process always saves its shards)",
    "FSDP_SHARDING_STRATEGY": "`fsdp_sharding_strategy` (use `fsdp_reshard_after_forward` and "
    "`parallelism_config`)",
}
# Values to which these variables are reset. The others are reset to "false".
_NEUTRAL = {
    "ACCELERATE_DYNAMO_BACKEND": "NO",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
}


def with_topology(
    environ: MutableMapping[str, str], *, has_gpu: bool
) -> tuple[int, tuple[str, ...]]:
    """Correct the environment variables for the topology in `environ`.

    Call this function before an Accelerator is created. `has_gpu` is True if this process can use a
    GPU. Raises InputError if a setting is not supported and cannot be corrected.

    Returns:
        * The number of copies of each shard. It is more than 1 with HSDP. It is 1 if FSDP2
          distributes the parameters over all processes, or if the parameters are not sharded.
        * Texts about the corrections, to be printed.
    """
    _refuse_unsupported(environ)
    processes = _count_processes(environ)
    notices = _correct_device(environ, processes, has_gpu)
    ignored = _reset_ignored(environ)
    replicas = 1
    if is_true(environ, "ACCELERATE_USE_FSDP"):
        on_cpus = not has_gpu or is_true(environ, "ACCELERATE_USE_CPU")
        replicas = _check_mesh(environ, processes)
        is_sharded = replicas < processes
        ignored += _correct_fsdp(environ, is_sharded=is_sharded, on_cpus=on_cpus)
        if not is_sharded:
            replicas = 1
    elif environ.get(f"{_PARALLELISM}DP_SHARD_SIZE", "1") != "1":
        raise InputError(
            f"{_ORIGIN}: `parallelism_config_dp_shard_size` needs `distributed_type: FSDP` and "
            "`fsdp_version: 2`; either set both, or remove the key"
        )
    if ignored:
        notices.append(f"these settings are ignored: {'; '.join(ignored)}")
    # Remove the variables of `parallelism_config`, so that Accelerate does not use them. The
    # returned `replicas` replaces them.
    for variable in list(environ):
        if variable.startswith(_PARALLELISM) or variable == "ACCELERATE_USE_PARALLELISM_CONFIG":
            del environ[variable]
    return replicas, tuple(f"{_ORIGIN}: {text}" for text in notices)


def _refuse_unsupported(environ: Mapping[str, str]) -> None:
    """Raise InputError for a kind of parallelism that this project does not support."""
    for kind in UNSUPPORTED_TYPES:
        if is_true(environ, f"ACCELERATE_USE_{kind}"):
            raise InputError(
                f"{_ORIGIN}: `distributed_type: {kind}` is not supported; set it to MULTI_GPU or "
                "FSDP"
            )
    for axis in ("TP", "CP", "SP"):
        if environ.get(f"{_PARALLELISM}{axis}_SIZE", "1") != "1":
            raise InputError(
                f"{_ORIGIN}: `parallelism_config_{axis.lower()}_size`: tensor, context and "
                "sequence parallelism are not supported; remove the key"
            )


def _reset_ignored(environ: MutableMapping[str, str]) -> list[str]:
    """Reset the variables in `_IGNORED`, and return the texts about settings that are ignored."""
    ignored = []
    for variable, text in _IGNORED.items():
        neutral = _NEUTRAL.get(variable, "false")
        if environ.get(variable, neutral).lower() != neutral.lower():
            environ[variable] = neutral
            ignored.append(text)
    return ignored


def _check_mesh(environ: Mapping[str, str], processes: int) -> int:
    """Return the number of replicas of the model under FSDP2.

    It equals the number of processes if each process stores the whole model. Raises InputError if a
    setting is not supported. `processes` is the number of processes that train together.
    """
    if environ.get("FSDP_VERSION", "1") == "1":
        raise InputError(
            f"{_ORIGIN}: `fsdp_version: 1` is not supported; set `fsdp_version: 2`, and replace "
            "`fsdp_sharding_strategy` by `fsdp_reshard_after_forward`: true for FULL_SHARD, false "
            "for SHARD_GRAD_OP"
        )
    replicas = int(environ.get(f"{_PARALLELISM}DP_REPLICATE_SIZE", "1"))
    shards = int(environ.get(f"{_PARALLELISM}DP_SHARD_SIZE", "1"))
    # Without a `parallelism_config` there is one replica, sharded over all processes.
    if replicas == shards == 1:
        return 1
    if replicas * shards != processes:
        raise InputError(
            f"{_ORIGIN}: {replicas} replicas x {shards} shards are not {processes} processes; set "
            "--parallelism_config_dp_replicate_size (number of replicas) and "
            "--parallelism_config_dp_shard_size (number of shards) to two numbers with this product"
        )
    return replicas


def _correct_fsdp(
    environ: MutableMapping[str, str], *, is_sharded: bool, on_cpus: bool
) -> list[str]:
    """Correct the environment variables for FSDP, and return texts about ignored settings.

    Args:
        environ: The environment variables, which are modified.
        is_sharded: False if each process stores the whole model.
        on_cpus: True if the processes train on CPUs.
    """
    ignored = []
    if not is_sharded:
        environ["ACCELERATE_USE_FSDP"] = "false"
        ignored.append("FSDP (each process stores the whole model)")
    if environ.pop("FSDP_IGNORED_MODULES", None):
        ignored.append("`fsdp_ignored_modules` (every module is always sharded)")
    if on_cpus and is_true(environ, "FSDP_OFFLOAD_PARAMS"):
        environ["FSDP_OFFLOAD_PARAMS"] = "false"
        ignored.append("`fsdp_offload_params` (the parameters are on the CPU anyway)")
    return ignored


def _count_processes(environ: MutableMapping[str, str]) -> int:
    """Return the number of processes.

    If it is 1, the variables of the process group are removed from `environ`, so that Accelerate
    creates no group. Raises InputError if Accelerate has started fewer processes than the
    configuration sets.
    """
    processes = int(environ.get("WORLD_SIZE", "1"))
    # If the configuration sets several processes, Accelerate sets MASTER_ADDR, even if it starts
    # only one process.
    is_from_accelerate = {"ACCELERATE_DYNAMO_BACKEND", "MASTER_ADDR"} <= environ.keys()
    if "WORLD_SIZE" not in environ and is_from_accelerate:
        raise InputError(
            f"{_ORIGIN}: `num_processes` is more than 1, but Accelerate has started only one "
            "process, because of `distributed_type: NO`, `distributed_type: MULTI_CPU` or `--cpu`; "
            "to train with several processes, use accelerate_configs/ddp.yaml (MULTI_GPU), which "
            "also works on CPUs; to train with one process, set `num_processes: 1` and unset the "
            "environment variable MASTER_ADDR"
        )
    # Processes that only mpirun or srun has started are not counted: nobody has asked for a process
    # group.
    if processes == 1 and environ.get("LOCAL_RANK", "0") == "0":
        for variable in _GROUP:
            environ.pop(variable, None)
    return processes


def _correct_device(environ: MutableMapping[str, str], processes: int, has_gpu: bool) -> list[str]:
    """Let several processes train on the CPU if no GPU is visible, and return a notice about it.

    If no GPU is visible to this process and all processes are on one machine, no process can use a
    GPU. With several machines, the GPUs of only one machine may be invisible. This machine must not
    train on its CPU while the other machines use GPUs.
    """
    on_one_machine = environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE")
    is_chosen = has_gpu or is_true(environ, "ACCELERATE_USE_CPU")
    if processes == 1 or is_chosen or not on_one_machine:
        return []
    environ["ACCELERATE_USE_CPU"] = "true"
    return [f"no GPU is visible, so {processes} processes train on the CPU"]


def is_true(environ: Mapping[str, str], variable: str) -> bool:
    """Return True if Accelerate interprets the environment variable as true.

    Return False if the variable is not set.
    """
    return environ.get(variable, "false").lower() in _TRUE
