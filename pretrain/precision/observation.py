"""What the matrix products of a model really multiplied, seen from underneath: the operands as they reach the product.

Settings, class names and flags say what was meant. A module may carry the right name and multiply in BF16 all the same, so
nothing here asks a module anything: PyTorch's own products are caught on their way to the kernel, and a low-precision backend
shows the operands it hands to its kernels (`observed_products`). An emulated operand is an ordinary BF16 tensor; what gives it
away is that its values have no more significant bits than the format it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from pretrain.loss import LossHead

# Products, and where their two factors stand: what addmm adds the product to is no factor, and may be an FP32 sum.
_FACTORS = {
    torch.ops.aten.mm: slice(0, 2),
    torch.ops.aten.bmm: slice(0, 2),
    torch.ops.aten.linear: slice(0, 2),
    torch.ops.aten.addmm: slice(1, 3),
    torch.ops.aten.baddbmm: slice(1, 3),
    torch.ops.aten._grouped_mm: slice(0, 2),
}
# Significant bits, the leading one included, of a format's values; NVFP4's two, times its E4M3 block scale's four.
BITS = {"e5m2": 3, "e4m3": 4, "nvfp4": 6, "bfloat16": 8, "float32": 24}


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


def significant_bits(tensor: Tensor) -> int:
    """The most significant bits, from a value's first one-bit to its last, that any finite value of `tensor` has; waits for the
    device. A tensor of BF16 numbers that were not quantized has 8, one of E4M3 numbers times powers of two 4."""
    mantissa = tensor.float().nan_to_num(0, 0, 0).view(torch.int32) & 0x7FFFFF
    for bits in range(1, 24):
        if not (mantissa & ((1 << (24 - bits)) - 1)).any():
            return bits
    return 24


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
