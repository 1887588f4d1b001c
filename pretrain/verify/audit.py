"""What really computes in which precision: observed in a forward and backward of the model, not read off the settings.

Low precision fails in silence. A library that skips one sibling of a layer, enters its context in forward and not in recompute,
or never engages at all, trains on, a little slower and in BF16. So before the first step the model runs once under observation
(`observe`), and in the first step its low-precision products are observed again, as they run in training (`confirming`). Where
request and effect differ, the run stops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from foundation.errors import InputError
from pretrain.model.loss.head import LossHead
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.wrapping import was_reached
from pretrain.precision.formats.definition import Role
from pretrain.precision.linear import LowPrecisionLinear, LowPrecisionNorm
from pretrain.precision.observation import ObservedProduct, dtype_name
from pretrain.precision.registry import UNQUANTIZED
from pretrain.precision.scope import LINEARS, Decision
from pretrain.precision.settings import ActivePrecision

# The left and the right operand of a linear's products: x w^T, g w and g^T x.
OPERANDS: dict[str, tuple[Role, Role]] = {
    "forward": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}

Entry = dict[str, Any]


def observe(
    packed: PackedLanguageModel,
    run: Callable[[], Tensor],
    active: ActivePrecision,
    decisions: Mapping[str, Decision] | None = None,
) -> list[Entry]:
    """One `_entry` for each linear, low-precision norm and other module with matrices.

    `run` computes a loss of one small batch; it is run once, uncompiled, and differentiated where the model multiplies in low
    precision or in fused layers. Gradients are left for the caller to clear. `decisions`: what `convert` was to do. InputError if
    a product computed in another precision than was decided, or not at all, and if a trained parameter was not reached.
    """
    hf, context, fused = packed.hf, packed.context, packed.fused
    linears = {n: m for n, m in hf.named_modules() if isinstance(m, (*LINEARS, LowPrecisionLinear))}
    others = {n: m for n, m in hf.named_modules() if n not in linears and not isinstance(m, nn.Embedding) and matrices_of(m)}
    stored = {name: dtype_name(matrices_of(module)[0].dtype) for name, module in (linears | others).items()}
    context.calls_outside.clear()
    with (
        torch.compiler.set_stance("force_eager"),
        DtypesOfLinears(linears | others) as dtypes,
        context.observed_products() as observed,
    ):
        if context.backend is None and fused is None:
            with torch.no_grad():
                run()
        else:  # products of ours have a backward of ours too, and both are to be seen
            run().backward()
            _check_reached(hf)
    members = fused.members if fused else {}
    _check_tied(hf)

    entries, precision = [], active.precision.name
    for name, module in linears.items():
        decision = (decisions or {}).get(name, Decision(name, precision))
        products = observed.get(name, ())
        effective = _multiplied(dtypes.seen.get(name), products)
        entry = _entry(name, module, decision.requested, effective, "torch", stored[name], decision.reason)
        if active.precision.quantized and decision.requested == precision:
            entry["effective"] = _effective(products, effective, context.calls_outside[name], active)
            entry["products"] = {product.gemm: f"{product.left} x {product.right}" for product in products}
            entry["backend"] = active.backend
        if name in members:
            entry |= {"module": f"fused {type(module).__name__}", "part_of": members[name].name}
        entries.append(entry)
    for name, module in hf.named_modules():
        if isinstance(module, LowPrecisionNorm):
            effective, weight = precision if module.calls else "not run", dtype_name(module.weight.dtype)
            entries.append(_entry(name, module, precision, effective, active.backend, weight))
    _refuse(entries, active)
    # Modules whose matrices are no linear's, such as the stacked experts of a mixture and their router. Nothing was asked of
    # them, so nothing is refused: they compute as transformers wrote them, and a router may do so in FP32.
    reason = "no linear, which is what low precision takes" if active.precision.quantized else None
    for name, module in others.items():
        effective = _multiplied(dtypes.seen.get(name), ())
        entries.append(_entry(name, module, effective, effective, "torch", stored[name], reason))
    return entries


def _entry(
    name: str, module: nn.Module, requested: str, effective: str, backend: str, stored: str, reason: str | None = None
) -> Entry:
    """What was asked of a module and what it did. `products`: the operands of those that ran in low precision, by their gemm."""
    entry = {"name": name, "module": type(module).__name__, "requested": requested, "effective": effective, "products": {}}
    return entry | {"backend": backend, "stored": stored, "reason": reason}


@contextmanager
def confirming(packed: PackedLanguageModel, active: ActivePrecision, products: Sequence[Entry]) -> Iterator[None]:
    """Around the first step, compiled and recomputed as training is: what the low-precision products multiply there must be what
    they did under `observe`, which returned `products`; else InputError."""
    context = packed.context
    context.calls_outside.clear()
    with context.observed_products() as observed:
        yield
    checked = []
    for entry in (entry for entry in products if entry["products"]):
        name = entry["name"]
        effective = _effective(observed.get(name, ()), "not run", context.calls_outside[name], active)
        checked.append(entry | {"effective": effective})
    _refuse(checked, active)


def check_trained(hf: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """InputError for a parameter that no group of the optimizer has: one that was made after the optimizer, and stands still."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    lost = [name for name, parameter in hf.named_parameters() if parameter.requires_grad and id(parameter) not in trained]
    if lost:
        raise InputError(
            f"model: the optimizer does not know {len(lost)} parameters, {lost[0]} among them; they would not be trained"
        )


def rows(found: Mapping[str, Any]) -> dict[str, str]:
    """An audit for people: a row a kind of linear (the last part of its name), then what attention and loss run on."""
    groups = Counter(
        (p["name"].rsplit(".", 1)[-1], p["module"], p["stored"], p["effective"], p["backend"], p["reason"])
        for p in found["products"]
    )
    kinds: dict[str, list[str]] = {}
    for (kind, module, stored, effective, backend, reason), count in groups.items():
        on = "" if backend == "torch" else f" on {backend.replace('_', ' ')}"
        why = f" ({reason})" if reason else ""
        what = "FP32 inside" if module == LowPrecisionNorm.__name__ else f"products {effective}"
        kinds.setdefault(kind, []).append(f"{count} x {module}, weights {stored}, {what}{on}{why}")
    backends = {name: ", ".join(f"{key} {value}" for key, value in found[name].items()) for name in ("attention", "loss")}
    whole = {key: found[key] for key in ("gradients", "fused", "compiled")}
    return {kind: "; ".join(lines) for kind, lines in kinds.items()} | backends | whole


def _multiplied(seen: Collection[str] | None, observed: Sequence[ObservedProduct]) -> str:
    """The precision, or else the dtypes, that a module multiplied in, by itself or in a fused product that was `observed`."""
    if observed:
        seen = {operand for product in observed for operand in (product.left, product.right)}
    dtypes = " x ".join(sorted(seen)) if seen else "not run"
    return UNQUANTIZED[dtypes].name if dtypes in UNQUANTIZED else dtypes


def _effective(observed: Sequence[ObservedProduct], otherwise: str, outside: int, active: ActivePrecision) -> str:
    """The precision's name if all three products ran on operands of its formats; else what ran. `otherwise`: where no product was
    observed. `outside`: calls from outside the low-precision context, as of a layer that is recomputed after it was left."""
    if not observed:
        return otherwise
    if outside:
        return f"{outside} calls outside the low-precision context"
    wrong = sorted({f"{p.gemm} {p.left} x {p.right}" for p in observed if not _is_expected(p, active)})
    missing = sorted(f"{gemm} not run" for gemm in OPERANDS.keys() - {product.gemm for product in observed})
    return ", ".join([*wrong, *missing]) or active.precision.name


def _is_expected(product: ObservedProduct, active: ActivePrecision) -> bool:
    """Whether both operands are what the precision makes of them: by their kind on Transformer Engine, which says what a tensor
    is, and by their significant bits in emulation, where it is an ordinary tensor of few values."""
    for kind, role in zip((product.left, product.right), OPERANDS[product.gemm], strict=True):
        if active.backend == "emulation":  # "4 significant bits"
            expected = int(kind.split()[0]) <= active.precision.significant_bits(active.settings, role)
        else:
            expected = kind in active.precision.te_operand_kinds(active.settings, role)
        if not expected:
            return False
    return True


def _refuse(entries: Sequence[Entry], active: ActivePrecision) -> None:
    wrong = [entry for entry in entries if entry["effective"] != entry["requested"]]
    if wrong:
        listed = ", ".join(f"{entry['name']} ({entry['effective']})" for entry in wrong[:5])
        raise InputError(
            f"precision {active.precision.name!r}: {len(wrong)} of {len(entries)} modules did not run in it as they should: "
            f"{listed}"
        )


def _check_reached(hf: nn.Module) -> None:
    """InputError for a trained parameter without a gradient: one that was copied, or untied, and is no longer what computes."""
    lost = [name for name, parameter in hf.named_parameters() if parameter.requires_grad and not was_reached(parameter)]
    if lost:
        raise InputError(f"model: {len(lost)} parameters get no gradient, {lost[0]} among them; they would never be trained")


def _check_tied(hf: nn.Module) -> None:
    head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
    tied = getattr(hf.config.get_text_config(), "tie_word_embeddings", False)
    if tied and isinstance(head, LossHead) and head.weight is not embedding.weight:
        raise InputError("model: its configuration ties the LM head to the embedding, and they have become two parameters")


# ── What torch's own products multiply ─────────────────────────────────────────────────────────────────────────────────────────

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
    """While entered, collects in `seen` the dtypes of the operands of each of `linears` (modules with matrices) that runs, by
    name. Products inside of its forward count as its own, so a cast that somebody put into a forward is seen as well."""

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
