"""What really computes in which precision: observed in a forward and backward of the model, not read off the settings.

Low precision fails in silence. A library that skips one sibling of a layer, enters its context in forward and not in recompute,
or never engages at all, trains on, a little slower and in BF16. So before the first step the model runs once under observation
(`observe`), and in the first step and at every statistics step its low-precision products are observed again, as they run in
training (`confirming`). Where request and effect differ, the run stops.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foundation.errors import InputError
from pretrain.model.experts import GroupedExperts
from pretrain.model.gradients import was_reached
from pretrain.model.loss.head import LossHead
from pretrain.model.packed import PackedLanguageModel
from pretrain.precision.gemm import GemmEngine
from pretrain.precision.observed import OPERANDS, ObservedProduct, ProductObserver, dtype_name
from pretrain.precision.product import LowPrecisionLinear
from pretrain.precision.scope import LINEARS, Decision
from pretrain.precision.settings import UNQUANTIZED, ActivePrecision
from pretrain.verify.probe import watching_histories

Entry = dict[str, Any]  # of audit.json's `products`: what was asked of a module, and what it did


def observe(
    packed: PackedLanguageModel,
    run: Callable[[], Tensor],
    active: ActivePrecision,
    decisions: Mapping[str, Decision],
    optimizer: torch.optim.Optimizer,
) -> list[Entry]:
    """One entry for each linear and other module with matrices.

    `run` computes a loss of one small batch; it is run once, uncompiled, and differentiated. Gradients are left for the caller to
    clear. `decisions`: what `convert` was to do; empty where nothing is quantized. InputError if a product computed in another
    precision than was decided, or not at all, and if a parameter would not be trained.
    """
    hf, precision, linear = (
        packed.hf,
        active.precision.name,
        (*LINEARS, LowPrecisionLinear, GroupedExperts),
    )
    members = {**(packed.fused.members if packed.fused else {})}
    matrices, modules = {}, {}
    for name, module in hf.named_modules():
        if isinstance(module, GroupedExperts):
            of_module = {
                stack.name: module.get_parameter(key) for key, stack in module.stacks.items()
            }
            members |= of_module
        else:
            # it multiplies with none
            own = [] if isinstance(module, nn.Embedding) else module._parameters.values()
            own = [each for each in own if each is not None and each.dim() > 1]
            of_module = {name: own[0]} if own else {}
        matrices |= of_module
        modules |= dict.fromkeys(of_module, module)
    low = {
        name
        for name, each in decisions.items()
        if each.requested == precision and active.precision.quantized
    }
    routers = {
        part
        for router in (packed.routing.routers if packed.routing else ())
        for part in router.modules()
    }
    # A linear must multiply nothing beside its product; a head's forward transforms operands of its backward, too.
    watched = {
        name: each
        for name, each in modules.items()
        if not (name in low and isinstance(each, LossHead))
    }
    observer = ProductObserver(active)
    with (
        torch.compiler.set_stance("force_eager"),
        observer.looking_on(),
        _watching_forwards(watched, observer),
    ):
        run().backward()
    ran_low, entries = _effective_in(active, observer, low), []
    for name, module in modules.items():
        products, decision = (
            observer.products.get(name, ()),
            decisions.get(name, Decision(precision)),
        )
        effective = ran_low.get(name) or _multiplied(products, all_three=name in members)
        entry = {
            "name": name,
            "module": f"{'fused ' if packed.fused and name in packed.fused.members else ''}{type(module).__name__}",
            "requested": decision.requested,
            "effective": effective,
            "products": {each.gemm: f"{each.left} x {each.right}" for each in products}
            if name in low
            else {},
            "backend": active.backend if name in low else "torch",
            "stored": dtype_name(matrices[name].dtype),
            "reason": decision.reason,
        }
        if module in routers or not isinstance(module, linear):
            # A mixture's routers, and experts not stacked, compute as transformers wrote them (on a CPU routers in FP32).
            # Nothing was asked of them, so nothing is refused.
            entry["requested"] = effective
            entry["reason"] = decision.reason or (
                "no linear, which is what low precision takes"
                if active.precision.quantized
                else None
            )
        entries.append(entry)
    _refuse(entries, active)
    _check_trained(hf, optimizer)
    return entries


@contextmanager
def confirming(
    active: ActivePrecision, products: Sequence[Entry], step: int, *, most: int | None = None
) -> Iterator[None]:
    """Watches training, compiled and recomputed as it is; raises InputError unless the low-precision products multiply there what
    they did under `observe`, which returned `products`. `step` draws the blocks of operands that are looked at, and
    which linears' they are, where those of `most` linears are enough."""
    low = {entry["name"]: entry for entry in products if entry["products"]}
    observer = ProductObserver(
        active, step, set(random.Random(step).sample(list(low), min(len(low), most or len(low))))
    )
    with observer.looking_on():
        yield
    ran_low = _effective_in(active, observer, low)
    _refuse(
        [entry | {"effective": ran_low[name]} for name, entry in low.items()],
        active,
        f" in step {step}",
    )


@contextmanager
def confirming_first_microbatch(
    packed: PackedLanguageModel,
    active: ActivePrecision,
    products: Sequence[Entry],
    step: int,
    *,
    most: int,
) -> Iterator[None]:
    """`confirming` around one microbatch, after which histories of delayed scaling must have moved on. Within a `confirming`,
    that one sees to the products."""
    looked_at = (
        nullcontext() if ProductObserver.current else confirming(active, products, step, most=most)
    )
    with watching_histories(packed.context, active) as wrong, looked_at:
        yield
    if wrong:
        raise InputError(
            f"step {step}: {len(wrong)} histories or scales do not follow from the operands: {', '.join(wrong[:5])}"
        )


def describe(
    active: ActivePrecision,
    backend: GemmEngine | None,
    hf: PreTrainedModel,
    products: Sequence[Entry],
) -> dict[str, Any]:
    """What audit.json says of the precision in force. products: of `observe`; backend: None where nothing is quantized."""
    head = hf.get_output_embeddings()
    return {
        "precision": active.requested,
        "effective": active.precision.name,
        "reason": active.reason,
        "backend": active.backend,
        "computes": active.precision.description,
        "compute_dtype": active.precision.compute_dtype,
        "computed_by": backend.describe() if backend else f"torch {torch.__version__}",
        "loss": {"kind": head.settings.kind, "chunk": head.chunk},
        "products": products,
    }


def in_short(audited: Mapping[str, Any]) -> dict[str, str]:
    """An audit for people: a row of its products, one of what stands around them."""
    kinds = Counter(
        (p["effective"], p["backend"].replace("_", " "), p["stored"], p["reason"])
        for p in audited["products"]
    )
    products = [
        f"{number} in {effective} on {backend}, weights {stored}{f' ({reason})' if reason else ''}"
        for (effective, backend, stored, reason), number in kinds.most_common()
    ]
    around = [f"attention {audited['attention']['kind'].removeprefix('packed_')}"]
    around += [
        f"gradients {audited['gradients']}",
        f"fused: {audited['fused']}",
        f"compiled: {audited['compiled']}",
    ]
    around += ["deterministic"] if audited["deterministic"] != "no" else []
    return {"products": "; ".join(products), "around them": ", ".join(around)}


@contextmanager
def _watching_forwards(
    modules: Mapping[str, nn.Module], observer: ProductObserver
) -> Iterator[None]:
    """While entered, `observer` sees what torch multiplies in the forward of each of `modules`, under its name: a cast that
    somebody put there is seen too."""
    names: dict[nn.Module, list[str]] = defaultdict(list)  # experts have two
    for name, module in modules.items():
        names[module].append(name)
    own = {
        module: {"forward": vars(module)["forward"]} if "forward" in vars(module) else {}
        for module in names
    }
    for module, of_module in names.items():
        module.forward = observer.during(of_module, "forward")(module.forward)
    try:
        yield
    finally:
        for module in names:
            del module.forward
            vars(module).update(own[module])


def _multiplied(observed: Sequence[ObservedProduct], *, all_three: bool) -> str:
    """The precision, or else the dtypes, of a module's products, alone or fused. all_three: backward's gemms must be seen too."""
    if not observed:
        return "not run"
    dtypes = " x ".join(
        sorted({operand for product in observed for operand in (product.left, product.right)})
    )
    name = UNQUANTIZED[dtypes].name if dtypes in UNQUANTIZED else dtypes
    return ", ".join([name, *(_not_run(observed) if all_three else ())])


def _effective_in(
    active: ActivePrecision, observer: ProductObserver, names: Iterable[str]
) -> dict[str, str]:
    """For each of the low-precision linears `names` the precision's name, if all three products ran on operands of its formats
    that are sound; else what ran, or what is wrong."""
    effective, faults = {}, observer.faults()
    for name in names:
        observed = observer.products.get(name, ())
        wrong = sorted(
            {f"{p.gemm} {p.left} x {p.right}" for p in observed if not _is_expected(p, active)}
        )
        effective[name] = (
            ", ".join([*wrong, *_not_run(observed), *faults.get(name, ())]) or active.precision.name
        )
    return effective


def _not_run(observed: Sequence[ObservedProduct]) -> list[str]:
    return sorted(
        f"{gemm} not run" for gemm in OPERANDS.keys() - {product.gemm for product in observed}
    )


def _is_expected(product: ObservedProduct, active: ActivePrecision) -> bool:
    """Whether both operands are of a kind that the precision makes. What an emulated one really is its blocks tell."""
    kinds = [
        active.precision.operand_kind(active.settings, role, product.gemm)
        for role in OPERANDS[product.gemm]
    ]
    return [product.left, product.right] == kinds


def _refuse(entries: Sequence[Entry], active: ActivePrecision, where: str = "") -> None:
    wrong = [entry for entry in entries if entry["effective"] != entry["requested"]]
    if wrong:
        listed = ", ".join(f"{entry['name']} ({entry['effective']})" for entry in wrong[:5])
        raise InputError(
            f"precision {active.precision.name!r}: {len(wrong)} of {len(entries)} modules did not compute in it{where}: {listed}"
        )


def _check_trained(hf: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """InputError for a trained parameter that the optimizer does not know, as one that was made after it, and for one without a
    gradient: one that was copied, or untied, and is no longer what computes, or one that packed attention has no use for. An
    expert of its own may be what no token of a pack has chosen."""
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {
        name: parameter for name, parameter in hf.named_parameters() if parameter.requires_grad
    }
    lost = [
        name
        for name, parameter in trained.items()
        if id(parameter) not in known
        or not (was_reached(parameter) or re.search(r"\.experts\.\d+\.", name))
    ]
    if lost:
        raise InputError(
            f"model: {len(lost)} parameters get no gradient, or are unknown to the optimizer, {lost[0]} among them; they would "
            f"never be trained. If {type(hf).__name__} attends with them in a way of its own, name another model"
        )
