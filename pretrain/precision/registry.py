"""The registry of precisions: finds the files in `formats/`, and the precision that a name means. Nothing here imports torch."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from typing import Literal

from foundation.errors import InputError
from pretrain.precision import formats
from pretrain.precision.formats.definition import Precision

Weights = Literal["fp32", "bf16", "bf16_exact"]  # `weights:` of a recipe
# The torch dtype that parameters are kept in.
WEIGHT_DTYPES: dict[Weights, str] = {"fp32": "float32", "bf16": "bfloat16", "bf16_exact": "bfloat16"}


def _discover() -> dict[str, Precision]:
    """Every precision by name, in order."""
    modules = [importlib.import_module(f"{formats.__name__}.{found.name}") for found in pkgutil.iter_modules(formats.__path__)]
    precisions = [module.PRECISION for module in modules if hasattr(module, "PRECISION")]
    return {precision.name: precision for precision in sorted(precisions, key=lambda precision: precision.order)}


PRECISIONS = _discover()
# What computes a linear that low precision leaves out, by the dtype of its activations.
UNQUANTIZED = {precision.compute_dtype: precision for precision in PRECISIONS.values() if not precision.quantized}


def find(name: str, origin: str) -> Precision:
    """The precision called `name`; InputError that names `origin` and the nearest known one."""
    if name in PRECISIONS:
        return PRECISIONS[name]
    raise InputError(f"{origin}: {unknown(name)}")


def find_by_accelerate_name(mixed_precision: str) -> Precision | None:
    """The precision that a value of accelerate's `mixed_precision` means by itself."""
    return next((precision for precision in PRECISIONS.values() if precision.accelerate_name == mixed_precision), None)


def unknown(name: str) -> str:
    """What to say of a `name` that no precision has: `fp8` and `fp4` are families of precisions, others have a nearest one."""
    family = [precision.name for precision in PRECISIONS.values() if precision.peak == name.lower()]
    near = difflib.get_close_matches(name, PRECISIONS, n=1)
    if family:
        several = f"s are {', '.join(family[:-1])} and" if family[1:] else " is"
        hint = f"the {name.upper()} precision{several} {family[-1]}; all that are "
    else:
        hint = f"did you mean {near[0]!r}? " if near else ""
    return f"unknown precision {name!r}; {hint}known: {', '.join(PRECISIONS)}"
