"""What really computes in which dtype: observed in a forward of the model, not read off the settings.

`observe` runs one small batch without compilation and notes, for every linear product, the dtypes of the operands that met in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from packing.errors import InputError
from pretrain.loss import LossHead
from pretrain.precision.recipes import PrecisionRecipe

_LINEAR = (nn.Linear, Conv1D)


@torch.no_grad()
def observe(model: nn.Module, inputs: Mapping[str, Any], recipe: PrecisionRecipe) -> list[dict[str, str]]:
    """One entry for each linear of `model`: name, module, requested and effective dtype, and the dtype its weight is stored in.

    Runs `model(**inputs)` once, uncompiled. Raises InputError if a linear computed in another dtype than the recipe's, or not at
    all: a run whose precision is not what was asked for measures something else.
    """
    seen: dict[str, str] = {}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, _LINEAR)}

    stored = {name: str(module.weight.dtype).removeprefix("torch.") for name, module in linears.items()}

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            # The LM head casts its weight to its input's dtype inside its own forward; every other linear takes it as it finds it.
            operands = {args[0].dtype} if isinstance(module, LossHead) else {args[0].dtype, module.weight.dtype}
            seen[name] = " x ".join(sorted(str(dtype).removeprefix("torch.") for dtype in operands))

        return hook

    handles = [module.register_forward_pre_hook(note(name)) for name, module in linears.items()]
    try:
        with torch.compiler.set_stance("force_eager"):
            model(**inputs)
    finally:
        for handle in handles:
            handle.remove()

    entries = [
        {
            "name": name,
            "module": type(module).__name__,
            "requested": recipe.compute_dtype,
            "effective": seen.get(name, "not run"),
            "stored": stored[name],
        }
        for name, module in linears.items()
    ]
    wrong = [entry for entry in entries if entry["effective"] != entry["requested"]]
    if wrong:
        listed = ", ".join(f"{entry['name']} ({entry['effective']})" for entry in wrong[:5])
        raise InputError(f"precision {recipe.name!r}: {len(wrong)} of {len(entries)} linear products did not run in it: {listed}")
    return entries


def rows(products: list[dict[str, str]], backends: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """The audit for people: a row a kind of linear (the last part of its name), then the backends with their options."""
    groups = Counter((p["name"].rsplit(".", 1)[-1], p["module"], p["stored"], p["effective"]) for p in products)
    kinds = {kind: f"{count} x {module}, weights {stored}, products {dtype}" for (kind, module, stored, dtype), count in groups.items()}
    return kinds | {name: ", ".join(f"{key} {value}" for key, value in options.items()) for name, options in backends.items()}
