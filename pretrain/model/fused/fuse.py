"""The layers of a model that are fused, and why the others are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from pretrain.model.conversion import LINEARS, Decision
from pretrain.model.fused.arithmetic import Arithmetic, StackedProduct
from pretrain.model.fused.layers import FusedLayer, unfit
from pretrain.precision.product import ObservedProduct


@dataclass(frozen=True)
class FusedLayers:
    """Those of one model, by name. `left_out`: for each layer that stayed as it was, why."""

    layers: Mapping[str, FusedLayer]
    left_out: Mapping[str, str]
    arithmetic: Arithmetic

    @property
    def products(self) -> list[StackedProduct]:
        return [product for layer in self.layers.values() for product in layer.products]

    @property
    def members(self) -> dict[str, StackedProduct]:
        """The linears that no module computes any more, and the products that do."""
        return {member: product for product in self.products for member in product.members}

    @property
    def low_precision_weights(self) -> int:
        """How many weights are multiplied in the recipe's low precision."""
        low = [layer for layer in self.layers.values() if layer.low_precision]
        return sum(weight.numel() for layer in low for product in layer.products for weight in product.weights.weights)

    @property
    def stacks(self) -> list[list[nn.Parameter]]:
        """Parameters that are the rows of one matrix, whose gradients must be those of another."""
        return [product.weights.weights for product in self.products]

    def observed_products(self) -> AbstractContextManager[dict[str, list[ObservedProduct]]]:
        return self.arithmetic.observed_products()

    def describe(self) -> str:
        """For the audit: "28 of 28 layers"."""
        reasons = Counter(self.left_out.values())
        why = "".join(f"; {count} not: {reason}" for reason, count in reasons.items())
        return f"{len(self.layers)} of {len(self.layers) + len(self.left_out)} layers{why}"


def fuse(layers: Mapping[str, nn.Module], decisions: Mapping[str, Decision], arithmetic: Arithmetic) -> FusedLayers:
    """Give each of `layers` that can be fused its fused forward, in place; the rest is left as it is.

    `decisions`: what each linear is to compute in, empty where nothing is quantized. A layer whose linears are not all of one
    mind stays unfused.
    """
    fused, left_out = {}, {}
    for name, layer in layers.items():
        reason, low_precision = verdict(name, layer, decisions)
        if reason:
            left_out[name] = reason
        else:
            layer.forward = fused[name] = FusedLayer(layer, name, arithmetic, low_precision=low_precision)
    return FusedLayers(fused, left_out, arithmetic)


def verdict(name: str, layer: nn.Module, decisions: Mapping[str, Decision]) -> tuple[str | None, bool]:
    """Why `layer`, called `name` in its model, stays unfused, None if it does not; and whether all of it is in low precision."""
    inner = [f"{name}.{part}" for part, module in layer.named_modules() if isinstance(module, LINEARS)]
    low = {decisions[linear].reason is None for linear in inner} if decisions else {False}
    mixed = "its linears compute in different precisions" if len(low) > 1 else None
    return unfit(layer) or mixed, low == {True}
