"""Audit the precision of every matrix product: observed in training, not read from settings.

Low precision fails without a message. A library that skips one of several equal layers, enters its
context in forward but not in recomputation, or never starts at all, trains on in BF16 and a little
slower. So before the first step one pack runs through the model under observation
(`audit_products`). In the first steps and at statistics steps the products are observed again, as
they run in training (`ProductAudit`). The run stops if a product does not compute as requested.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foundation.errors import InputError
from packing.batch import StepBatches
from pretrain.model.experts import GroupedExperts
from pretrain.model.gradients import was_reached
from pretrain.model.loss.head import LossHead
from pretrain.model.packed import PackedLanguageModel
from pretrain.observe.observers import Observer, Step
from pretrain.observe.product_check import watching_histories
from pretrain.observe.product_observer import ObservedProduct, ProductObserver
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.gemm import GemmEngine
from pretrain.precision.model_precision import ModelPrecision
from pretrain.precision.observed import OPERANDS, dtype_name
from pretrain.precision.product import LowPrecisionLinear
from pretrain.precision.scope import LINEARS, Decision
from pretrain.precision.settings import UNQUANTIZED, ActivePrecision

# An entry of `products` in audit.json: the requested and the effective precision of a module.
Entry = dict[str, Any]

# Linears whose operands are examined again at a statistics step, drawn anew each time. All of them
# would cost 0.8 % of a run of 1.7 B parameters on an H200, these cost less than 0.1 %
# (benchmarks/results/kernels/h200_audit_cost.json).
EXAMINED_AGAIN = 13


# ── Before the first step ─────────────────────────────────────────────────────────────────────────


# A module, a matrix that it multiplies with, and whether all three products must be observed under
# the matrix's name, because they run inside of another module.
_Matrix = tuple[nn.Module, Tensor, bool]


def audit_products(
    packed: PackedLanguageModel,
    compute_loss: Callable[[], Tensor],
    active: ActivePrecision,
    decisions: Mapping[str, Decision],
    optimizer: torch.optim.Optimizer,
) -> list[Entry]:
    """Return an entry for each linear and each other module with matrices.

    compute_loss: computes the loss of a small batch. It runs once, uncompiled, and is
        differentiated. The caller clears the gradients.
    decisions: the precision of each linear. Empty if nothing is quantized.

    Raises InputError if a product computed in another precision than decided, or not at all, and if
    a parameter would not be trained.
    """
    matrices = _matrices(packed)
    low = {
        name
        for name, decision in decisions.items()
        if active.precision.quantized and decision.requested == active.precision.name
    }
    # A linear must multiply nothing beside its product. The forward of a head transforms operands
    # of its backward too, so it is not watched.
    watched = {
        name: module
        for name, (module, _, _) in matrices.items()
        if not (name in low and isinstance(module, LossHead))
    }
    observer = ProductObserver(active)
    with (
        torch.compiler.set_stance("force_eager"),
        observer.observing(),
        _watching_forwards(watched, observer),
    ):
        compute_loss().backward()
    ran_low = _effective_in(active, observer, low)
    routers = packed.routing.routers if packed.routing else ()
    in_routers = {module for router in routers for module in router.modules()}
    entries = []
    for name, (module, weight, is_member) in matrices.items():
        observed = observer.products.get(name, ())
        decision = decisions.get(name, Decision(active.precision.name))
        entry: Entry = {
            "name": name,
            "module": type(module).__name__,
            "requested": decision.requested,
            "effective": ran_low.get(name) or _multiplied(observed, all_three=is_member),
            "products": {},
            "backend": "torch",
            "stored": dtype_name(weight.dtype),
            "reason": decision.reason,
        }
        if packed.fused and name in packed.fused.members:
            entry["module"] = f"fused {entry['module']}"
        if name in low:
            entry["products"] = {
                product.gemm: f"{product.left} x {product.right}" for product in observed
            }
            entry["backend"] = active.backend
        is_linear = isinstance(module, (*LINEARS, LowPrecisionLinear, GroupedExperts))
        if module in in_routers or not is_linear:
            # Routers of a mixture and experts that are not stacked compute as transformers wrote
            # them (routers on a CPU in FP32). Nothing was requested of them.
            entry["requested"] = entry["effective"]
            if active.precision.quantized and not decision.reason:
                entry["reason"] = "no linear, which is what low precision takes"
        entries.append(entry)
    _require_requested(entries, active)
    _check_trained(packed.hf, optimizer)
    return entries


def _matrices(packed: PackedLanguageModel) -> dict[str, _Matrix]:
    """Return the model's matrices by the name of their module, or of their stack of experts."""
    fused = packed.fused.members if packed.fused else {}
    matrices: dict[str, _Matrix] = {}
    for name, module in packed.hf.named_modules():
        if isinstance(module, GroupedExperts):
            for key, stack in module.stacks.items():
                matrices[stack.name] = (module, module.get_parameter(key), True)
        elif not isinstance(module, nn.Embedding):  # which multiplies nothing
            for parameter in module._parameters.values():
                if parameter is not None and parameter.dim() > 1:
                    matrices.setdefault(name, (module, parameter, name in fused))
    return matrices


@contextmanager
def _watching_forwards(
    modules: Mapping[str, nn.Module], observer: ProductObserver
) -> Iterator[None]:
    """Observe what torch multiplies in the forward of each module, under its name.

    So a cast that was added to a forward is observed too.
    """
    names: dict[nn.Module, list[str]] = defaultdict(list)  # grouped experts have two
    for name, module in modules.items():
        names[module].append(name)
    replaced = {module: vars(module)["forward"] for module in names if "forward" in vars(module)}
    for module, of_module in names.items():
        module.forward = observer.during(of_module, "forward")(module.forward)
    try:
        yield
    finally:
        for module in names:
            del module.forward
            if module in replaced:
                module.forward = replaced[module]


# ── In training ───────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class ProductAudit(Observer):
    """Compare low-precision products of training with the audit before the first step.

    New steps are observed as a whole, with all their microbatches. In a statistics step the first
    microbatch is observed, some of its operands are examined, and histories of delayed scaling must
    move on. Raises InputError before the step's update.
    """

    packed: PackedLanguageModel
    precision: ModelPrecision
    every: int | None  # `log.fp8_statistics`
    write: Callable[[], None]  # writes audit.json

    def due(self, step: Step) -> bool:
        """Return True in new steps and in statistics steps, if products are quantized."""
        return step.is_quantized and (step.is_new or step.measures_operands(self.every))

    @contextmanager
    def passes(self, step: Step, batches: StepBatches, place: int) -> Iterator[None]:
        """Observe all microbatches of a new step, and record in audit.json that they passed."""
        if not step.is_new:
            yield
            return
        with self._confirming(step):
            yield
        self.precision.current.audit["confirmed_in_step"] = step.number
        self.write()

    @contextmanager
    def first_microbatch(self, step: Step) -> Iterator[None]:
        """Observe products and histories of the first microbatch of a statistics step."""
        if not step.measures_operands(self.every):
            yield
            return
        with ExitStack() as watching:
            wrong = watching.enter_context(
                watching_histories(self.packed.context, self.precision.current.active)
            )
            if not step.is_new:  # then `passes` observes the products
                watching.enter_context(self._confirming(step, most=EXAMINED_AGAIN))
            yield
        if wrong:
            raise InputError(
                f"step {step.number}: {len(wrong)} histories or scales do not follow from the "
                f"operands: {', '.join(wrong[:5])}"
            )

    @contextmanager
    def _confirming(self, step: Step, *, most: int | None = None) -> Iterator[None]:
        """Raise InputError unless the block computes the products of the audit.

        most: examine the operands of this number of linears, or of all. The step's number draws the
            linears and the blocks of their operands.
        """
        current = self.precision.current
        low = {entry["name"]: entry for entry in current.audit["products"] if entry["products"]}
        number = len(low) if most is None else min(len(low), most)
        examined = set(random.Random(step.number).sample(list(low), number))
        observer = ProductObserver(current.active, step.number, examined)
        with observer.observing():
            yield
        ran_low = _effective_in(current.active, observer, low)
        entries = [entry | {"effective": ran_low[name]} for name, entry in low.items()]
        _require_requested(entries, current.active, f" in step {step.number}")


# ── audit.json ────────────────────────────────────────────────────────────────────────────────────


def describe(
    active: ActivePrecision,
    backend: GemmEngine | None,
    hf: PreTrainedModel,
    products: Sequence[Entry],
) -> dict[str, Any]:
    """Return the part of audit.json about one precision.

    backend: None if nothing is quantized.
    products: of `audit_products`.
    """
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
    """Return two rows for people: the products of an audit, and what surrounds them."""
    kinds = Counter(
        (
            entry["effective"],
            entry["backend"].replace("_", " "),
            entry["stored"],
            entry["reason"],
        )
        for entry in audited["products"]
    )
    products = [
        f"{count} in {effective} on {backend}, weights {stored}{f' ({reason})' if reason else ''}"
        for (effective, backend, stored, reason), count in kinds.most_common()
    ]
    settings = [
        f"attention: {audited['attention']['kind'].removeprefix('packed_')}",
        f"gradient sums: {audited['gradients']}",
        f"fused kernels: {audited['fused']}",
        f"torch.compile: {audited['compiled']}",
        *(["deterministic"] if audited["deterministic"] != "no" else []),
    ]
    return {"products": "; ".join(products), "settings": " · ".join(settings)}


# ── Requested and effective precisions ────────────────────────────────────────────────────────────


def _multiplied(observed: Sequence[ObservedProduct], *, all_three: bool) -> str:
    """Return the precision of products that torch multiplied, or else the dtypes of their operands.

    all_three: a gemm of backward that did not run is reported too.
    """
    if not observed:
        return "not run"
    operands = {operand for product in observed for operand in (product.left, product.right)}
    dtypes = " x ".join(sorted(operands))
    name = UNQUANTIZED[dtypes].name if dtypes in UNQUANTIZED else dtypes
    return ", ".join([name, *(_not_run(observed) if all_three else ())])


def _effective_in(
    active: ActivePrecision, observer: ProductObserver, names: Iterable[str]
) -> dict[str, str]:
    """Return the effective precision of each of the low-precision linears `names`.

    It is the name of the precision if all three products ran on sound operands of its formats, and
    otherwise a list of the faults.
    """
    effective = {}
    faults = observer.faults()
    for name in names:
        observed = observer.products.get(name, ())
        wrong = {
            f"{product.gemm} {product.left} x {product.right}"
            for product in observed
            if not is_expected(product, active)
        }
        findings = [*sorted(wrong), *_not_run(observed), *faults.get(name, ())]
        effective[name] = ", ".join(findings) or active.precision.name
    return effective


def _not_run(observed: Sequence[ObservedProduct]) -> list[str]:
    """Return a text for each of the three gemms that was not observed."""
    return sorted(
        f"{gemm} not run" for gemm in OPERANDS.keys() - {product.gemm for product in observed}
    )


def is_expected(product: ObservedProduct, active: ActivePrecision) -> bool:
    """Return whether both operands have the kind that the precision makes.

    Whether an emulated operand really has its kind is found by examining its blocks.
    """
    precision = cast(QuantizedPrecision, active.precision)
    return [product.left, product.right] == [
        precision.operand_kind(active.settings, role, product.gemm)
        for role in OPERANDS[product.gemm]
    ]


def _require_requested(entries: Sequence[Entry], active: ActivePrecision, where: str = "") -> None:
    """Raise InputError if a module did not compute in the requested precision."""
    wrong = [entry for entry in entries if entry["effective"] != entry["requested"]]
    if wrong:
        listed = ", ".join(f"{entry['name']} ({entry['effective']})" for entry in wrong[:5])
        raise InputError(
            f"precision {active.precision.name!r}: {len(wrong)} of {len(entries)} modules did not "
            f"compute in it{where}: {listed}"
        )


def _check_trained(hf: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError if a parameter would not be trained.

    The optimizer may not have it, because it was made later. Or it has no gradient: it was copied
    or untied and no longer computes, or packed attention does not use it. An expert that no token
    of the pack has chosen has no gradient either, and is no fault.
    """
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    lost = [
        name
        for name, parameter in hf.named_parameters()
        if parameter.requires_grad
        and not (
            id(parameter) in optimized
            and (was_reached(parameter) or re.search(r"\.experts\.\d+\.", name))
        )
    ]
    if lost:
        raise InputError(
            f"model: {len(lost)} parameters get no gradient, or are unknown to the optimizer, "
            f"{lost[0]} among them; they would never be trained. If {type(hf).__name__} attends "
            "with them in a way of its own, name another model"
        )
