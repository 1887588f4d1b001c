"""The environment variables that accelerate and torch read, looked at before they are imported: of a value that they cannot use,
accelerate names no variable, and some end its import."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from foundation.errors import InputError

_WHOLE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_DYNAMO = ("USE_FULLGRAPH", "USE_DYNAMIC", "USE_REGIONAL_COMPILATION")
_TRUTH = (
    *(f"ACCELERATE_{name}" for name in ("USE_CPU", "DEBUG_MODE", "CPU_AFFINITY", "USE_FSDP", "USE_MEGATRON_LM", "ENABLE_RICH")),
    "USE_TORCH_XLA",
    *(f"ACCELERATE_DYNAMO_{name}" for name in _DYNAMO),
)
TRUE, FALSE = ("true", "1", "yes", "y", "t", "on"), ("false", "0", "no", "n", "f", "off")  # as accelerate reads them
_PRECISIONS = ("no", "bf16", "fp16", "fp8")  # what `accelerate launch` lets through


def check_variables(environ: Mapping[str, str]) -> None:
    """InputError, which names the variable, where one has a value that accelerate or torch cannot use."""
    for name in filter(environ.__contains__, _WHOLE):
        try:
            int(environ[name])
        except ValueError:
            raise unusable(environ, name, "is no whole number") from None
    for name in filter(environ.__contains__, _TRUTH):
        if environ[name].lower() not in TRUE + FALSE:
            raise unusable(environ, name, "is neither true nor false")
    if environ.get(name := "ACCELERATE_MIXED_PRECISION", "no").lower() not in _PRECISIONS:
        raise unusable(environ, name, f"is none of {', '.join(_PRECISIONS)}")
    level = environ.get(name := "ACCELERATE_LOG_LEVEL", "INFO").upper()
    if level not in (levels := logging.getLevelNamesMapping()):
        raise unusable(environ, name, f"is none of {', '.join(levels).lower()}")


def unusable(environ: Mapping[str, str], name: str, what: str) -> InputError:
    """The error for a variable whose value is what `what` says of it: "is no whole number", say."""
    return InputError(f"environment: {name}={environ[name]} {what}; correct it, or unset it")
