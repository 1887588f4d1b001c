"""What really computes in which precision: observed in a forward and backward of the model, not read off the settings.

Low precision fails in silence. A library that skips one sibling of a layer, enters its context in forward and not in recompute,
or never engages at all, trains on, a little slower and in BF16. So before the first step the model runs once under observation
(`observe`), and in the first step and at every statistics step its low-precision products are observed again, as they run in
training (`confirming`, `confirming_histories`). Where request and effect differ, the run stops.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from foundation.errors import InputError
from pretrain.model.gradients import was_reached
from pretrain.model.loss.head import LossHead
from pretrain.model.packed import PackedLanguageModel
from pretrain.precision.observed import FACTORS, OPERANDS, ObservedProduct, ProductObserver, dtype_name
from pretrain.precision.product import Backend, LowPrecisionLinear, PrecisionContext
from pretrain.precision.scope import LINEARS, Decision
from pretrain.precision.settings import UNQUANTIZED, ActivePrecision
from pretrain.verify.histories import HistoryWatch

Entry = dict[str, Any]


def observe(
    packed: PackedLanguageModel,
    run: Callable[[], Tensor],
    active: ActivePrecision,
    decisions: Mapping[str, Decision],
) -> list[Entry]:
    """One `_entry` for each linear and other module with matrices.

    `run` computes a loss of one small batch; it is run once, uncompiled, and differentiated. Gradients are left for the caller to
    clear. `decisions`: what `convert` was to do; empty where nothing is quantized. InputError if a product computed in another
    precision than was decided, or not at all, and if a trained parameter was not reached.
    """
    hf, context, fused = packed.hf, packed.context, packed.fused
    linears = {n: m for n, m in hf.named_modules() if isinstance(m, (*LINEARS, LowPrecisionLinear))}
    others = {n: m for n, m in hf.named_modules() if n not in linears and not isinstance(m, nn.Embedding) and matrices_of(m)}
    stored = {name: dtype_name(matrices_of(module)[0].dtype) for name, module in (linears | others).items()}
    context.calls_outside.clear()
    with (
        torch.compiler.set_stance("force_eager"),
        observing(packed, active) as observer,
        DtypesOfLinears(linears | others, observer) as dtypes,
    ):
        run().backward()
    _check_tied(hf)

    members, faults, precision = fused.members if fused else {}, observer.faults(), active.precision.name
    entries = []
    for name, module in linears.items():
        decision, products = decisions.get(name, Decision(name, precision)), observer.products.get(name, ())
        effective = _multiplied(dtypes.seen[name], products, all_three=name in members)
        entry = _entry(name, module, decision.requested, effective, stored[name], decision.reason)
        if active.precision.quantized and decision.requested == precision:
            wrong = [*faults.get(name, ()), *dtypes.strays[name]]
            entry["effective"] = _effective(products, effective, context.calls_outside[name], active, wrong)
            entry["products"] = {product.gemm: f"{product.left} x {product.right}" for product in products}
            entry["backend"] = active.backend
        if name in members:
            entry |= {"module": f"fused {type(module).__name__}", "part_of": members[name].name}
        entries.append(entry)
    _refuse(entries, active)
    _check_reached(hf)
    # Modules whose matrices are no linear's, such as the stacked experts of a mixture and their router. Nothing was asked of
    # them, so nothing is refused: they compute as transformers wrote them, and a router may do so in FP32.
    reason = "no linear, which is what low precision takes" if active.precision.quantized else None
    for name, module in others.items():
        effective = _multiplied(dtypes.seen[name], ())
        entries.append(_entry(name, module, effective, effective, stored[name], reason))
    return entries


def _entry(name: str, module: nn.Module, requested: str, effective: str, stored: str, reason: str | None) -> Entry:
    """What was asked of a module and what it did. `products`: the operands of those that ran in low precision, by their gemm."""
    entry = {"name": name, "module": type(module).__name__, "requested": requested, "effective": effective, "products": {}}
    return entry | {"backend": "torch", "stored": stored, "reason": reason}


@contextmanager
def observing(
    packed: PackedLanguageModel, active: ActivePrecision, seed: int = 0, examined: Set[str] | None = None
) -> Iterator[ProductObserver]:
    """While entered, every product of ours is seen, in forward and backward. `seed` picks the blocks that are looked at, of the
    operands of the linears `examined`, or of all."""
    observer = ProductObserver(active, seed, examined)
    with packed.context.observed_by(observer), packed.fused.observed_by(observer) if packed.fused else nullcontext():
        yield observer


@contextmanager
def confirming(
    packed: PackedLanguageModel, active: ActivePrecision, products: Sequence[Entry], step: int, *, most: int | None = None
) -> Iterator[None]:
    """Watches training, compiled and recomputed as it is; raises InputError unless the low-precision products multiply there what
    they did under `observe`, which returned `products`. `step` draws the blocks of operands that are looked at, and
    which linears' they are, where those of `most` linears are enough. Inside of another one it leaves all to that."""
    context = packed.context
    if context.observed:
        yield
        return
    context.calls_outside.clear()
    low = {entry["name"]: entry for entry in products if entry["products"]}
    examined = set(random.Random(step).sample(list(low), min(len(low), most or len(low))))
    with observing(packed, active, step, examined) as observer:
        yield
    checked, faults = [], observer.faults()
    for name, entry in low.items():
        ran, outside = observer.products.get(name, ()), context.calls_outside[name]
        checked.append(entry | {"effective": _effective(ran, "not run", outside, active, faults.get(name, ()))})
    _refuse(checked, active, f" in step {step}")


@contextmanager
def confirming_histories(context: PrecisionContext, active: ActivePrecision) -> Iterator[None]:
    """Watches a step's first microbatch; raises InputError where a history of delayed scaling, or its scale, is not what the
    microbatch makes of it. Does nothing where scales come from the tensors themselves. Collective."""
    if not context.state():
        yield
        return
    watch = HistoryWatch(context, active)
    context.observers.append(watch.see)
    try:
        yield
    finally:
        context.observers.remove(watch.see)
    if wrong := watch.wrong():
        raise InputError(
            f"precision {active.precision.name!r}: {len(wrong)} delayed scales are not the ones that their histories make: "
            f"{', '.join(wrong[:5])}"
        )


def check_trained(hf: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """InputError for a parameter that no group of the optimizer has: one that was made after the optimizer, and stands still."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    lost = [name for name, parameter in hf.named_parameters() if parameter.requires_grad and id(parameter) not in trained]
    if lost:
        raise InputError(
            f"model: the optimizer does not know {len(lost)} parameters, {lost[0]} among them; they would not be trained"
        )


def describe(active: ActivePrecision, backend: Backend | None, hf: PreTrainedModel, products: Sequence[Entry]) -> dict[str, Any]:
    """What audit.json says of one precision, while the model computes in it. `products`: of `observe`; `backend`: None where
    nothing is quantized."""
    return {
        "precision": active.requested,
        "effective": active.precision.name,
        "reason": active.reason,
        "backend": active.backend,
        "computes": active.precision.description,
        "compute_dtype": active.precision.compute_dtype,
        "computed_by": backend.describe() if backend else f"torch {torch.__version__}",
        "loss": hf.get_output_embeddings().describe(),
        "products": products,
    }


def in_short(audited: Mapping[str, Any]) -> dict[str, str]:
    """An audit for people: a row of its products, one of what stands around them."""
    linears = defaultdict[tuple[str, str | None], list[str]](list)
    for p in audited["products"]:
        on = "" if p["backend"] == "torch" else f" on {p['backend'].replace('_', ' ')}"
        linears[f"in {p['effective']}{on}, weights {p['stored']}", p["reason"]].append(p["name"].rsplit(".", 1)[-1])
    products = []
    for (what, reason), names in sorted(linears.items(), key=lambda group: -len(group[1])):
        kinds = list(dict.fromkeys(names))
        named = f" ({', '.join(kinds)}: {reason})" if reason else f" ({kinds[0]})" if len(kinds) == 1 else ""
        products.append(f"{len(names)} {what}{named}")
    if "algorithms" in audited:
        products.append(f"cublasLt's algorithms: {audited['algorithms']}")
    around = [f"attention {audited['attention']['kind'].removeprefix('packed_')}", f"loss {audited['loss']['kind']}"]
    around += [f"gradients {audited['gradients']}", f"fused: {audited['fused']}", f"compiled: {audited['compiled']}"]
    around += ["deterministic"] if audited["deterministic"] != "no" else []
    return {"products": "; ".join(products), "around them": ", ".join(around)}


def _multiplied(seen: Collection[str], observed: Sequence[ObservedProduct], *, all_three: bool = False) -> str:
    """The precision, or else the dtypes, that a module multiplied in, by itself or in a fused product that was `observed`, of
    which `all_three` gemms are to be seen."""
    operands = {operand for product in observed for operand in (product.left, product.right)} or seen
    if not operands:
        return "not run"
    dtypes = " x ".join(sorted(operands))
    name = UNQUANTIZED[dtypes].name if dtypes in UNQUANTIZED else dtypes
    return ", ".join([name, *(_not_run(observed) if all_three else ())])


def _effective(
    observed: Sequence[ObservedProduct], otherwise: str, outside: int, active: ActivePrecision, faults: Sequence[str]
) -> str:
    """The precision's name if all three products ran on operands of its formats; else what ran. `otherwise`: where no product was
    observed. `outside`: calls from outside the low-precision context, as of a layer that is recomputed after it was left.
    `faults`: what else is wrong."""
    if not observed:
        return otherwise
    if outside:
        return f"{outside} calls outside the low-precision context"
    wrong = sorted({f"{p.gemm} {p.left} x {p.right}" for p in observed if not _is_expected(p, active)})
    return ", ".join([*wrong, *_not_run(observed), *faults]) or active.precision.name


def _not_run(observed: Sequence[ObservedProduct]) -> list[str]:
    return sorted(f"{gemm} not run" for gemm in OPERANDS.keys() - {product.gemm for product in observed})


def _is_expected(product: ObservedProduct, active: ActivePrecision) -> bool:
    """Whether both operands are of a kind that the precision makes. What an emulated one really is its blocks tell."""
    precision, settings = active.precision, active.settings
    emulated = active.backend == "emulation"
    return all(
        kind in ({precision.operand_kind(settings, role)} if emulated else precision.te_operand_kinds(settings, role))
        for kind, role in zip((product.left, product.right), OPERANDS[product.gemm], strict=True)
    )


def _refuse(entries: Sequence[Entry], active: ActivePrecision, where: str = "") -> None:
    wrong = [entry for entry in entries if entry["effective"] != entry["requested"]]
    if wrong:
        listed = ", ".join(f"{entry['name']} ({entry['effective']})" for entry in wrong[:5])
        raise InputError(
            f"precision {active.precision.name!r}: {len(wrong)} of {len(entries)} modules did not run in it as they should"
            f"{where}: {listed}"
        )


def _check_reached(hf: nn.Module) -> None:
    """InputError for a trained parameter without a gradient: one that was copied, or untied, and is no longer what computes, or
    one that packed attention has no use for. An expert of its own may be what no token of a pack has chosen."""
    lost = [
        name
        for name, parameter in hf.named_parameters()
        if parameter.requires_grad and not was_reached(parameter) and not re.search(r"\.experts\.\d+\.", name)
    ]
    if lost:
        raise InputError(
            f"model: {len(lost)} parameters get no gradient, {lost[0]} among them; they would never be trained. If "
            f"{type(hf).__name__} attends with them in a way of its own, name another model"
        )


def _check_tied(hf: nn.Module) -> None:
    head, embedding = hf.get_output_embeddings(), hf.get_input_embeddings()
    tied = getattr(hf.config.get_text_config(), "tie_word_embeddings", False)
    if tied and isinstance(head, LossHead) and head.weight is not embedding.weight:
        raise InputError(
            "`model.config.tie_word_embeddings` is true, here or in the config.json of `model.source`: it ties the LM head to "
            "the embedding, and they have become two parameters, as where the weights hold a head of their own; set "
            "`model.config.tie_word_embeddings: false`, which trains both, or name weights without such a head"
        )


# ── What torch's own products multiply ─────────────────────────────────────────────────────────────────────────────────────────


class DtypesOfLinears(TorchDispatchMode):
    """While entered, collects in `seen` the dtypes of the operands of each of `linears` (modules with matrices) that runs, by
    name. Products inside of its forward count as its own, so a cast that somebody put into a forward is seen as well. In `strays`
    are those that a low-precision linear multiplies beside its product, which `observer` sees."""

    def __init__(self, linears: Mapping[str, nn.Module], observer: ProductObserver) -> None:
        super().__init__()
        self.seen = defaultdict[str, set[str]](set)
        self.strays = defaultdict[str, set[str]](set)
        self._observer = observer
        self._running: list[str] = []
        self._linears = linears
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> DtypesOfLinears:
        for name, module in self._linears.items():
            self._hooks.append(module.register_forward_pre_hook(partial(self._begin, name)))
            # Called also where a recomputation is broken off as soon as it has what backward needs.
            self._hooks.append(module.register_forward_hook(self._end, always_call=True))
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
        self.seen[name].update(dtype_name(each.dtype) for each in floats)

    def _end(self, *_: Any) -> None:  # returns nothing: what a forward hook returns would replace the output
        self._running.pop()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._running and (factors := FACTORS.get(function.overloadpacket)):
            name, dtypes = self._running[-1], [dtype_name(factor.dtype) for factor in args[factors]]
            self.seen[name].update(dtypes)
            if isinstance(self._linears[name], LowPrecisionLinear) and not self._observer.multiplying:
                self.strays[name].add(f"a product of its own in {' x '.join(dtypes)}")
        return function(*args, **(kwargs or {}))


def matrices_of(module: nn.Module) -> list[Tensor]:
    """The parameters of `module` itself, not of what it consists of, that have two dimensions or more."""
    return [parameter for parameter in module._parameters.values() if parameter is not None and parameter.dim() > 1]
