"""What really computes in which dtype: observed in a forward of the model, not read off the settings.

`observe` runs one small batch without compilation and notes, for every linear, the dtypes that met in it: of what it was called
with, and of the operands of the matrix products that ran inside. So a cast that somebody put into a forward is seen as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers.pytorch_utils import Conv1D

from packing.errors import InputError
from pretrain.loss import LossHead
from pretrain.precision.recipes import PrecisionRecipe

_LINEAR = (nn.Linear, Conv1D)
_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm, torch.ops.aten.linear}


class _DtypesOfLinears(TorchDispatchMode):
    """While entered, collects in `seen` the dtypes of the operands of each linear of `linears` that runs, by its name."""

    def __init__(self, linears: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}
        self._running: list[str] = []
        self._linears = linears
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> _DtypesOfLinears:
        for name, module in self._linears.items():
            self._hooks.append(module.register_forward_pre_hook(partial(self._begin, name)))
            self._hooks.append(module.register_forward_hook(self._end))
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*raised)

    def _begin(self, name: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._running.append(name)
        # The LM head casts its weight to its input's dtype inside its own forward; every other linear takes it as it finds it.
        operands = args[:1] if isinstance(module, LossHead) else (args[0], module.weight)
        self.seen.setdefault(name, set()).update(operand.dtype for operand in operands)

    def _end(self, *_: Any) -> None:  # returns nothing: what a forward hook returns would replace the output
        self._running.pop()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._running and function.overloadpacket in _PRODUCTS:
            self.seen[self._running[-1]].update(operand.dtype for operand in args if isinstance(operand, Tensor))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def observe(model: nn.Module, inputs: Mapping[str, Any], recipe: PrecisionRecipe) -> list[dict[str, str]]:
    """One entry for each linear of `model`: name, module, requested and effective dtype, and the dtype its weight is stored in.

    Runs `model(**inputs)` once, uncompiled. Raises InputError if a linear computed in another dtype than the recipe's, or not at
    all: a run whose precision is not what was asked for measures something else.
    """
    linears = {name: module for name, module in model.named_modules() if isinstance(module, _LINEAR)}
    stored = {name: _name(module.weight.dtype) for name, module in linears.items()}
    with torch.compiler.set_stance("force_eager"), _DtypesOfLinears(linears) as dtypes:
        model(**inputs)

    entries = [
        {
            "name": name,
            "module": type(module).__name__,
            "requested": recipe.compute_dtype,
            "effective": " x ".join(sorted(map(_name, dtypes.seen[name]))) if name in dtypes.seen else "not run",
            "stored": stored[name],
        }
        for name, module in linears.items()
    ]
    wrong = [entry for entry in entries if entry["effective"] != entry["requested"]]
    if wrong:
        listed = ", ".join(f"{entry['name']} ({entry['effective']})" for entry in wrong[:5])
        raise InputError(f"precision {recipe.name!r}: {len(wrong)} of {len(entries)} linear products did not run in it: {listed}")
    return entries


def rows(found: Mapping[str, Any]) -> dict[str, str]:
    """An audit for people: a row a kind of linear (the last part of its name), then what attention and loss run on."""
    groups = Counter((p["name"].rsplit(".", 1)[-1], p["module"], p["stored"], p["effective"]) for p in found["products"])
    kinds: dict[str, list[str]] = {}
    for (kind, module, stored, dtype), count in groups.items():
        kinds.setdefault(kind, []).append(f"{count} x {module}, weights {stored}, products {dtype}")
    backends = {name: ", ".join(f"{key} {value}" for key, value in found[name].items()) for name in ("attention", "loss")}
    return {kind: "; ".join(lines) for kind, lines in kinds.items()} | backends | {"compiled": found["compiled"]}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
