"""Where a model stands: inside a low-precision forward or outside, in which microbatch of its step, and who is watching.

One object a model, shared by its low-precision modules. Training forwards enter it; evaluation does not, unless the user asks for
it, so a held-out loss tells runs apart by what their weights have learnt. A layer that is recomputed in backward enters it again:
what leaves the context between the two passes would be recomputed in another precision, without any sign of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pretrain.precision.product import Backend, LinearProduct, Role

Observer = Callable[[str, Role, Tensor, LinearProduct], None]


@dataclass
class PrecisionContext:
    """`evaluates_low`: evaluation runs in the low precision too. `observers` are called with each operand of each product, as it
    stands before it is quantized: (module name, role, tensor [tokens or out, features], product). `plain_calls` counts, by module
    name, the calls that came from outside: in evaluation all of them, in training none."""

    backend: Backend
    compute_dtype: torch.dtype
    evaluates_low: bool = False
    low_precision: bool = False
    first_microbatch: bool = True
    observers: list[Observer] = field(default_factory=list)
    plain_calls: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def forward(self, *, training: bool) -> Iterator[None]:
        """Around a forward of the whole model."""
        if not (training or self.evaluates_low):
            yield
            return
        with self.backend.forward(), self._active():
            yield

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run `function` now, and again in backward, in this context both times."""

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), self._active()

        return self.backend.checkpoint(function, *args, context_fn=contexts, **kwargs)

    def multiply(
        self, name: str, product: LinearProduct, x: Tensor, weight: Tensor, bias: Tensor | None, *, later_call: bool = False
    ) -> Tensor:
        """x [tokens, in] times weight [out, in], in the low precision; operands in another dtype than BF16 are cast here.

        `later_call`: the module has been called in this forward before (the LM head takes its tokens in chunks), with this
        weight.
        """
        x, weight = x.to(self.compute_dtype), weight.to(self.compute_dtype)
        bias = None if bias is None else bias.to(self.compute_dtype)
        y = product(x, weight, bias, first_microbatch=(self.first_microbatch or not torch.is_grad_enabled()) and not later_call)
        if self.observers:
            self._show("input", x, name, product)
            self._show("weight", weight, name, product)
            if y.requires_grad:
                y.register_hook(partial(self._show, "grad_output", name=name, product=product))
        return y

    def _show(self, role: Role, tensor: Tensor, name: str, product: LinearProduct) -> None:
        for observer in self.observers:
            observer(name, role, tensor.detach(), product)

    @contextmanager
    def preserving_state(self) -> Iterator[None]:
        """Around passes that are not training's: history and scales are afterwards what they were before.

        Whatever else the backend holds is forgotten. A pass that ran out of memory leaves behind what its backward would have
        taken up, such as the scales put aside for recomputing a layer, and the next backward would take them for its own.
        """
        before = {name: tensor.clone() for name, tensor in self.backend.state().items()}
        try:
            yield
        finally:
            self.backend.reset()
            for name, tensor in self.backend.state().items():
                tensor.copy_(before[name])

    def forget_overflow(self) -> None:
        """Take what is not finite out of delayed scaling's histories, after a step that was skipped for it.

        A scale stays as it is while its history holds an infinity, which a history of 1,024 does for 1,024 microbatches.
        """
        for name, tensor in self.backend.state().items():
            if name.endswith("/amax_history"):
                tensor.nan_to_num_(nan=0.0, posinf=0.0)

    @contextmanager
    def _active(self) -> Iterator[None]:
        before, self.low_precision = self.low_precision, True
        try:
            yield
        finally:
            self.low_precision = before
