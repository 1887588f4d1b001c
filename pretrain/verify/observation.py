"""The dtypes that torch's own products really multiplied, caught on their way to the kernel, by the module that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from pretrain.model.loss.head import LossHead
from pretrain.precision.observation import dtype_name

# Products, and where their two factors stand: what addmm adds the product to is no factor, and may be an FP32 sum.
_FACTORS = {
    torch.ops.aten.mm: slice(0, 2),
    torch.ops.aten.bmm: slice(0, 2),
    torch.ops.aten.linear: slice(0, 2),
    torch.ops.aten.addmm: slice(1, 3),
    torch.ops.aten.baddbmm: slice(1, 3),
    torch.ops.aten._grouped_mm: slice(0, 2),
}


class DtypesOfLinears(TorchDispatchMode):
    """While entered, collects in `seen` the dtypes of the operands of each of `linears` that runs, by its name: of linears, and
    of other modules that hold matrices, such as stacked experts.

    Products inside of a linear's forward count as its own, so a cast that somebody put into a forward is seen as well.
    """

    def __init__(self, linears: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.seen: dict[str, set[str]] = {}
        self._running: list[str] = []
        self._linears = linears
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> DtypesOfLinears:
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
        operands = args[:1] if isinstance(module, LossHead) else (*args[:1], *matrices_of(module))
        floats = (each for each in operands if isinstance(each, Tensor) and each.is_floating_point())
        self.seen.setdefault(name, set()).update(dtype_name(each.dtype) for each in floats)

    def _end(self, *_: Any) -> None:  # returns nothing: what a forward hook returns would replace the output
        self._running.pop()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._running and (factors := _FACTORS.get(function.overloadpacket)):
            self.seen[self._running[-1]].update(dtype_name(factor.dtype) for factor in args[factors])
        return function(*args, **(kwargs or {}))


def matrices_of(module: nn.Module) -> list[Tensor]:
    """The parameters of `module` itself, not of what it consists of, that have two dimensions or more."""
    return [parameter for parameter in module._parameters.values() if parameter is not None and parameter.dim() > 1]
