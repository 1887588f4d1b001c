"""Audit any PyTorch model: report the operands of every matrix product, as the products run.

`audit` reports the products of any model: of nn.Linear, of our low-precision linears, and of the
FP8 layers of Transformer Engine, torchao and Accelerate. The launcher observes its model by the
same `ModelObserver` and compares the products with the recipe (`audit_products`).

A product that no `watched` block announces belongs to the module whose forward runs, or to the
module whose forward has created the running node of autograd.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from foundation.errors import InputError
from foundation.overrides import overridden
from pretrain.observe.product_observer import (
    ObservedProduct,
    ProductObserver,
    TorchProducts,
    operand_kind,
)
from pretrain.precision.observed import FP8_FORMATS

_aten = torch.ops.aten
# Names of torch's FP8 dtypes, such as "e4m3".
_FP8 = {dtype: grid.name.lower() for dtype, grid in FP8_FORMATS.values()}
# Operations whose result is a cast, scaled or copied first argument.
_COPIES = {
    _aten.to,
    _aten._to_copy,
    _aten.clone,
    _aten.contiguous,
    _aten.mul,
    _aten.div,
    _aten.clamp,
}


class Product(NamedTuple):
    """A matrix product (GEMM) of a module.

    name: the name of the module. "" is the model itself, or code outside of the model.
    module: the class of the module.
    gemm: "forward", "dgrad" (gradient of the input), "wgrad" (gradient of the weight), "other" for
        a product without the module's weight, or "not visible" if the module has a matrix and was
        called, but no product was observed.
    left, right: number format and scaling of the operands, such as "e4m3 tensor-scaled".
    engine: the library or the operation that multiplied, such as "aten._scaled_mm".
    """

    name: str
    module: str
    gemm: str
    left: str
    right: str
    engine: str


class Audit(list[Product]):
    """List of the products of a model. `str` returns a table with one line for equal layers."""

    def __str__(self) -> str:
        # Layers are equal if their names differ only in numbers.
        lines = Counter(
            product._replace(name=re.sub(r"\b\d+\b", "*", product.name) or "(model)")
            for product in self
        )
        rows = [
            ("module", "class", "product", "left operand", "right operand", "engine", "modules")
        ]
        rows += [(*line, str(count)) for line, count in lines.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


# Keyword arguments of a model, or a function that computes the loss. See `audit`.
Batch = Mapping[str, Any] | Callable[[], Tensor]


def audit(model: nn.Module, batch: Batch) -> Audit:
    """Run one forward and backward of `model`, and report the precision of every matrix product.

    Functions that torch.compile has compiled run uncompiled, because products inside of a compiled
    kernel are not visible. Gradients are restored afterwards. Buffers, amax histories and random
    states advance as in a microbatch of training.

    Args:
        model: The model, on its device and in its training mode. It may be wrapped.
        batch: Keyword arguments of `model`, whose result has the attribute `loss`; or a function
            that computes the loss with `model`.

    Returns:
        The products, in the order of execution.
    """
    observer = ModelObserver(model)
    with torch.compiler.set_stance("force_eager"), observer.observing():
        backward_of(model, batch)
    return observer.audit()


def backward_of(model: nn.Module, batch: Batch) -> None:
    """Run forward and backward of `model`, and restore its gradients. See `audit`."""
    with ExitStack() as gradients:
        for parameter in model.parameters():
            gradients.enter_context(overridden(parameter, grad=None))
        loss = batch() if callable(batch) else getattr(model(**batch), "loss", None)
        if loss is None:
            raise InputError(
                "the model has returned no loss; add `labels` to the batch, or pass a function "
                "that computes the loss"
            )
        loss.backward()


class _Origin(NamedTuple):
    """Origin of the values of a tensor."""

    # Names of the modules with this weight. Empty if the tensor is no copy of a weight.
    owners: tuple[str, ...] = ()
    # Text about the FP8 format of the values, if the dtype of the tensor is wider.
    fp8: str = ""


class ModelObserver(ProductObserver):
    """Observer that records every product of a model, inside and outside of `watched` blocks."""

    def __init__(self, model: nn.Module, single_product: Container[str] = ()) -> None:
        """Create an observer of `model`.

        single_product: the names of modules whose forward should compute only the product with the
            weight. Each product in it is recorded as "forward", so that the caller finds others.
        """
        super().__init__()
        self._single_product = single_product
        # torch.compile adds this part to the names of modules that it has wrapped.
        self._modules = {
            name.replace("_orig_mod.", ""): module for name, module in model.named_modules()
        }
        # Names of the modules whose forwards run, from the outermost to the innermost.
        self._stack: list[str] = []
        # Names of the modules that were called, in order.
        self._called: dict[str, None] = {}
        # Map each node of autograd to the name of the module whose forward has created it.
        self._nodes: dict[Any, str] = {}
        # Map the memory of a tensor to the origin of its values.
        self._origins: dict[StorageWeakRef | None, _Origin] = {}
        for name, module in self._modules.items():
            for weight in matrices_of(module):
                # Tied weights have several owners.
                owners = self._origins.get(_storage(weight), _Origin()).owners
                self._origins[_storage(weight)] = _Origin((*owners, name))
        # A subclass of Tensor has no storage of its own. Its product belongs to the running module.
        self._origins.pop(None, None)

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Context manager that observes all products, and the forwards of all modules."""
        with super().observing(), ExitStack() as hooks, TorchProducts(self):
            for name, module in self._modules.items():
                enter, leave = partial(self._enter, name), partial(self._leave, name)
                before = module.register_forward_pre_hook(enter, with_kwargs=True)
                hooks.callback(before.remove)
                hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        # The code of the parent module has computed the arguments.
        self._claim((args, kwargs), self._stack[-1] if self._stack else "")
        self._stack.append(name)
        self._called[name] = None

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self._claim(output, name)
        self._stack.pop()

    def _claim(self, tensors: Any, name: str) -> None:
        """Map the new nodes of autograd that compute `tensors` to the module `name`."""
        nodes = [leaf.grad_fn for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)]
        while nodes:
            node = nodes.pop()
            if node is not None and node not in self._nodes:
                self._nodes[node] = name
                nodes += [next_node for next_node, _ in node.next_functions]

    def record(
        self,
        *operands: Any,
        scales: Sequence[Tensor | None] = (None, None),
        engine: str = "cublasLt",
        gemm: str | None = None,
    ) -> None:
        """Record a product of a `watched` block, of the running module, or of the running node."""
        if self._running:
            super().record(*operands, engine=engine)
            return
        # A product inside of a module's forward belongs to this module, even if the forward is
        # recomputed in backward. Another product belongs to the module of the running node.
        node = torch._C._current_autograd_node()
        name = self._stack[-1] if self._stack else self._nodes.get(node, "")
        origins = [self._origins.get(_storage(operand), _Origin()) for operand in operands]
        # Names of the modules whose weight is an operand, or the source of an operand.
        owners = [owner for origin in origins for owner in origin.owners]
        # A product with a weight belongs to the weight's module, even if another module runs.
        if owners and name not in owners:
            name = owners[-1]
        if gemm is None:
            kind_with_weight = "forward" if self._stack or node is None else "dgrad"
            if self._stack and name in self._single_product:
                gemm = "forward"
            elif owners:
                gemm = kind_with_weight
            else:
                gemm = _gemm_of(operands, self._modules[name], kind_with_weight)
        left, right = (
            operand_kind(operand, scale) + origin.fp8
            for operand, scale, origin in zip(operands, scales, origins, strict=True)
        )
        self.products.setdefault(name, []).append(ObservedProduct(gemm, left, right, engine))

    def follow_values(self, operation: Any, result: Any, source: Any = None) -> None:
        """Remember the origin of the tensors in `result`, which are computed from `source`."""
        origin = _Origin()
        if operation in _COPIES:
            origin = self._origins.get(_storage(source), origin)
            if source.dtype in _FP8 and result.dtype not in _FP8:
                origin = origin._replace(fp8=f" with {_FP8[source.dtype]} values")
        # A result in the memory of `source`, such as a view, keeps its origin.
        for storage in {*map(_storage, tree_leaves(result))} - {None, _storage(source)}:
            self._origins[storage] = origin

    def audit(self) -> Audit:
        """Return all products, and an entry for each module whose products are not visible."""
        result = Audit()
        for recorded_name, products in self.products.items():
            name = self._present_name(recorded_name)
            # The name of a stack of experts is the name of its parameter.
            module = self._modules.get(name) or self._modules.get(name.rpartition(".")[0])
            class_name = type(module).__name__
            # Equal products of a module have one entry.
            result += [Product(name, class_name, *product) for product in dict.fromkeys(products)]
        with_products = [f"{product.name}." for product in result]
        for name in self._called:
            module = self._modules[name]
            multiplies = matrices_of(module) and not isinstance(module, nn.Embedding)
            # The products of a module may belong to its submodules or parameters.
            is_visible = any(path.startswith(f"{name}.") for path in with_products)
            if multiplies and not is_visible:
                result.append(Product(name, type(module).__name__, "not visible", "", "", ""))
        return result

    def _present_name(self, name: str) -> str:
        """Return the name of a module in the model, for the name that a product was recorded with.

        A `watched` block has the name from the time when the linear was converted. If the model was
        wrapped later, the present name has a prefix.
        """
        candidates = (present for present in self._modules if f".{present}".endswith(f".{name}"))
        return min(candidates, key=len, default=name)


def matrices_of(module: nn.Module) -> list[Tensor]:
    """Return the parameters of `module`, without its submodules, that have two or more axes."""
    return [weight for weight in module.parameters(recurse=False) if weight.dim() > 1]


def _storage(operand: Any) -> StorageWeakRef | None:
    """Return the identity of a tensor's memory, or None for a subclass and for another object.

    Unlike an address, the identity is never reused for other memory as long as the audit keeps it.
    """
    is_plain = type(operand) in (Tensor, nn.Parameter)
    return StorageWeakRef(operand.untyped_storage()) if is_plain else None


def _gemm_of(operands: Sequence[Tensor], module: nn.Module, kind_with_weight: str) -> str:
    """Return the kind of a product from its shapes: `kind_with_weight`, "wgrad" or "other".

    It is used for operands that are not known to be copies of a weight of `module`.

    kind_with_weight: the kind of the product if an operand is a weight. It is "forward" for a
        product of forward, and "dgrad" for a product of backward.
    """
    left, right = (operand.shape[-2:] for operand in operands)
    # A weight may be transposed, so the order of the two sizes is ignored.
    weights = [sorted(weight.shape[-2:]) for weight in matrices_of(module)]
    # The gradient of a weight has the shape of the weight.
    if kind_with_weight == "dgrad" and sorted((left[0], right[1])) in weights:
        return "wgrad"
    has_weight = sorted(left) in weights or sorted(right) in weights
    return kind_with_weight if has_weight else "other"
