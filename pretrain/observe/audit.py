"""Audit the precision of every matrix product. The products are observed as they run.

Low precision can fail silently. A library may skip one of several equal layers, enter its
low-precision context in forward but not in recomputation, or never enter the context. Then training
continues in BF16 and is only a little slower. Therefore one pack runs through the model before the
first step, and all its products are observed (`audit_products`). In training, `ProductAudit`
observes products in the first two steps after a start, a rollback or a change of the precision
(`Step.is_new`), and every `log.fp8_statistics` steps. The run stops if a product does not compute
in the requested precision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foundation.errors import InputError
from packing.batch import StepBatches
from pretrain.metrics.run_record import observed_layers
from pretrain.model.experts import GroupedExperts
from pretrain.model.gradients import was_reached
from pretrain.model.loss.head import LossHead
from pretrain.model.packed import PackedLanguageModel
from pretrain.model.sharding import Sharding
from pretrain.observe.history_check import watching_histories
from pretrain.observe.model_audit import ModelObserver, matrices_of
from pretrain.observe.observers import Observer, Step
from pretrain.observe.product_observer import ObservedProduct, ProductObserver
from pretrain.precision.observed import OPERANDS, dtype_name
from pretrain.precision.product import LowPrecisionLinear, PrecisionContext
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.precision.scope import LINEARS, Decision, quantized_names
from pretrain.precision.settings import UNQUANTIZED, ActivePrecision

# An entry of `products` in audit.json: the requested and the effective precision of a module.
Entry = dict[str, Any]


# ── Before the first step ─────────────────────────────────────────────────────────────────────────


def audit_products(
    packed: PackedLanguageModel,
    compute_loss: Callable[[], Tensor],
    decisions: Mapping[str, Decision],
    optimizer: torch.optim.Optimizer,
) -> list[Entry]:
    """Observe the products of one forward and backward. Return an entry of audit.json per module.

    There is an entry for each linear, and for each other module that multiplies with a matrix.

    compute_loss: computes the loss of a small batch. It is called once, without torch.compile, and
        its result is differentiated. The caller clears the gradients.
    decisions: map the name of each linear to its precision. Empty if nothing is quantized.
    optimizer: the run's optimizer, which must contain every trained parameter.

    Raises InputError if a linear multiplied in a precision that differs from its decision, if one
    of its products did not run, if a parameter is not trained, or if FSDP2 rounds gradients.
    """
    active = packed.context.current
    fused = packed.fused.members
    routers = {module for router in packed.routing.routers for module in router.modules()}
    low = quantized_names(decisions)
    multiplied = _multiplied(packed.hf)
    # The forward of a module should compute only the product with its weight. A low-precision LM
    # head is an exception, because its forward may also multiply operands by a Hadamard matrix.
    heads = {name for name, (module, _) in multiplied.items() if isinstance(module, LossHead)}
    observer = ModelObserver(packed.hf, single_product=multiplied.keys() - (low & heads))
    with torch.compiler.set_stance("force_eager"), observer.observing():
        compute_loss().backward()
    entries = []
    for name, (module, weight) in multiplied.items():
        observed = observer.products.get(name, ())
        kind = type(module).__name__
        # The code of fused layers and of grouped experts announces each product (`watched`).
        is_announced = name in fused or isinstance(module, GroupedExperts)
        effective = _precision_in_torch(observed, is_announced)
        engine = "torch"
        products = {}
        if name in low:
            effective = _effective_in(active, observed)
            engine = active.engine
            for product in _with_weight(observed):
                products[product.gemm] = f"{product.left} x {product.right}"
        decision = decisions.get(name, Decision(active.name))
        requested = decision.requested
        reason = decision.reason
        is_linear = isinstance(module, (*LINEARS, LowPrecisionLinear, GroupedExperts))
        if module in routers or not is_linear:
            # Low precision does not replace the routers of a mixture, or experts that are not
            # stacked. These modules compute in the precision that transformers has implemented (on
            # a CPU, routers compute in FP32). So the observed precision is also reported as the
            # requested precision.
            requested = effective
            if active.precision.quantized and not reason:
                reason = "not a linear layer; low precision replaces only linear layers"
        entries.append(
            {
                "name": name,
                "module": f"fused {kind}" if name in fused else kind,
                "requested": requested,
                "effective": effective,
                "products": products,
                "backend": engine,
                "stored": dtype_name(weight.dtype),
                "reason": reason,
            }
        )
    _require_requested(entries, active)
    _check_trained(packed.hf, optimizer)
    if packed.sharding and packed.sharding.reduced_dtype == torch.float32:
        _check_not_rounded(packed.sharding)
    return entries


def _multiplied(hf: PreTrainedModel) -> dict[str, tuple[nn.Module, Tensor]]:
    """Return the modules that multiply with a matrix, and the matrix of each, by module name.

    A stack of experts has an entry of its own, with the name of its parameter.
    """
    multiplied: dict[str, tuple[nn.Module, Tensor]] = {}
    for name, module in hf.named_modules():
        if isinstance(module, GroupedExperts):
            for key, stack in module.stacks.items():
                multiplied[stack.name] = (module, module.get_parameter(key))
        # An embedding looks up rows, and a convolution of a hybrid model has no matrix product.
        elif not isinstance(module, nn.Embedding | nn.Conv1d):
            matrices = matrices_of(module)
            if matrices:
                multiplied[name] = (module, matrices[0])
    return multiplied


# ── In training ───────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class ProductAudit(Observer):
    """Check that the products of training match the audit that ran before the first step.

    Each low-precision linear is observed in all microbatches of a step. The first microbatch must
    add exactly one entry to every history of delayed scaling. Raises InputError before the step's
    update if a product or a history is wrong, or if the precision is not that of the schedule.

    audits: map the name of each precision to its part of audit.json.
    write: writes audit.json.
    """

    packed: PackedLanguageModel
    schedule: PrecisionSchedule
    audits: Mapping[str, dict[str, Any]]
    write: Callable[[], None]

    def due(self, step: Step) -> bool:
        """Return True in a step that sets `Step.is_new` or is a statistics step."""
        return step.is_new or step.measures_operands

    @contextmanager
    def passes(self, step: Step, batches: StepBatches, place: int) -> Iterator[None]:
        """Raise InputError if the products of the step differ from the recorded products.

        The audit before the first step has recorded the products. If `Step.is_new` is set and the
        products agree, record the step in audit.json.
        """
        active = self.packed.context.current
        scheduled = self.schedule.at(step.number)
        if active.name != scheduled.name:
            raise InputError(
                f"step {step.number} would compute in {active.name!r}, but the schedule of the "
                f"precision has {scheduled.name!r} for this step; this is a fault of the launcher"
            )
        if not step.is_quantized:
            yield
            return
        audit = self.audits[active.name]
        low = [entry for entry in audit["products"] if entry["products"]]
        observer = ProductObserver()
        # The products of each microbatch. A product that is missing in one microbatch may run
        # several times in another, for example in each chunk of the loss.
        observed: list[Mapping[str, Sequence[ObservedProduct]]] = []

        def start_microbatch(*_: Any) -> None:
            observer.products = {}
            observed.append(observer.products)

        with self.packed.register_forward_pre_hook(start_microbatch), observer.observing():
            yield
        # A microbatch that did not run has no products.
        missing = len(batches.microbatches) - len(observed)
        observed += [{}] * missing
        for number, products in enumerate(observed, 1):
            entries = [
                entry | {"effective": _effective_in(active, products.get(entry["name"], ()))}
                for entry in low
            ]
            where = f" in microbatch {number} of step {step.number}"
            _require_requested(entries, active, where)
        if step.is_new:
            audit["confirmed_in_step"] = step.number
            self.write()

    @contextmanager
    def first_microbatch(self, step: Step) -> Iterator[None]:
        """Check the histories of delayed scaling in the first microbatch."""
        context = self.packed.context
        wrong: list[str] = []
        with watching_histories(context, context.current, wrong):
            yield
        if wrong:
            raise InputError(
                f"step {step.number}: {len(wrong)} amax histories or scales of delayed scaling do "
                f"not match the observed operands: {', '.join(wrong[:5])}"
            )


# ── audit.json ────────────────────────────────────────────────────────────────────────────────────


def describe(
    context: PrecisionContext, hf: PreTrainedModel, products: Sequence[Entry]
) -> dict[str, Any]:
    """Return the part of audit.json about the current precision of `context`.

    hf: the Hugging Face model.
    products: the result of `audit_products`.
    """
    active = context.current
    precision = active.precision
    engine = context.engine
    computed_by = engine.describe() if engine else f"torch {torch.__version__}"
    head = hf.get_output_embeddings()
    loss = {"kind": head.settings.kind, "chunk": head.chunk}
    return {
        "precision": active.requested,
        "effective": precision.name,
        "reason": active.reason,
        "backend": active.engine,
        "computes": precision.description,
        "compute_dtype": precision.compute_dtype,
        "computed_by": computed_by,
        "loss": loss,
        "products": products,
    }


def console_rows(audited: Mapping[str, Any]) -> dict[str, str]:
    """Return two texts of several lines that summarise the audit on the console.

    The keys of the texts are "layers" and "settings". "layers" has the lines of `observed_layers`.
    "settings" has one line for each of: the attention, the dtype of gradient sums, fused kernels,
    torch.compile, and deterministic mode if it is on.

    audited: the contents of audit.json.
    """
    attention = audited["attention"]["kind"].removeprefix("packed_")
    compiled = audited["compiled"].replace("nothing", "off")
    settings = [
        f"attention: within each document ({attention})",
        f"gradient sums: {audited['gradients']}",
        f"fused kernels: {audited['fused']}",
        f"torch.compile: {compiled}",
    ]
    if audited["deterministic"] != "no":
        settings.append("deterministic")
    return {
        "layers": "\n".join(observed_layers(audited["products"])),
        "settings": "\n".join(settings),
    }


# ── Requested and effective precisions ────────────────────────────────────────────────────────────


def _precision_in_torch(observed: Sequence[ObservedProduct], all_three: bool) -> str:
    """Return the precision of products that torch computed, for example "bf16".

    If the operands have different dtypes, or a dtype that belongs to no precision, return the names
    of the dtypes instead. Return "not run" if there are no products.

    observed: the products of one linear.
    all_three: True if forward, dgrad and wgrad must all have run. Then the text also lists the
        products that did not run.
    """
    # Without `all_three`, only the forward is judged, because torch may sum over rows in another
    # dtype in backward.
    judged = [product for product in observed if all_three or product.gemm == "forward"]
    kinds = {kind for product in judged for kind in (product.left, product.right)}
    if not kinds:
        return "not run"
    dtypes = " x ".join(sorted(kinds))
    name = UNQUANTIZED[dtypes].name if dtypes in UNQUANTIZED else dtypes
    missing = _not_run(observed) if all_three else []
    return ", ".join([name, *missing])


def _effective_in(active: ActivePrecision, observed: Sequence[ObservedProduct]) -> str:
    """Return the effective precision of a low-precision linear.

    It is the name of the active precision if forward, dgrad and wgrad ran, and if all their
    operands had the kinds of this precision. Otherwise it is a text that lists the faults.

    observed: the products of the linear in one microbatch.
    """
    wrong = {
        f"{product.gemm} {product.left} x {product.right}"
        for product in _with_weight(observed)
        if not is_expected(product, active)
    }
    return ", ".join([*sorted(wrong), *_not_run(observed)]) or active.name


def _with_weight(observed: Sequence[ObservedProduct]) -> list[ObservedProduct]:
    """Return the products with the weight of a linear, without Hadamard transforms."""
    return [product for product in observed if product.gemm in OPERANDS]


def _not_run(observed: Sequence[ObservedProduct]) -> list[str]:
    """Return a text such as "dgrad not run" for each kind of product missing in `observed`."""
    return sorted(
        f"{gemm} not run" for gemm in OPERANDS.keys() - {product.gemm for product in observed}
    )


def is_expected(product: ObservedProduct, active: ActivePrecision) -> bool:
    """Return whether both operands have the kind that the precision requires.

    The kind of an operand is its number format and its scaling.
    """
    precision = active.quantized_precision
    return [product.left, product.right] == [
        precision.operand_kind(role) for role in OPERANDS[product.gemm]
    ]


def _require_requested(entries: Sequence[Entry], active: ActivePrecision, where: str = "") -> None:
    """Raise InputError if a module did not use its requested precision.

    entries: entries of audit.json.
    where: a text for the message, such as " in microbatch 1 of step 8". Empty before the first
        step.
    """
    wrong = [entry for entry in entries if entry["effective"] != entry["requested"]]
    if wrong:
        listed = ", ".join(f"{entry['name']} ({entry['effective']})" for entry in wrong[:5])
        raise InputError(
            f"precision {active.precision.name!r}: {len(wrong)} of {len(entries)} modules did not "
            f"compute in this precision{where}: {listed}"
        )


def _check_not_rounded(sharding: Sharding) -> None:
    """Raise InputError if FSDP2 rounds gradients to BF16, before or after it adds them up.

    Discards the gradients of the model. All ranks must call this function.
    """
    if rounded := sharding.rounded_gradients():
        raise InputError(
            f"FSDP2: torch {torch.__version__} rounds the gradients of {len(rounded)} weights to "
            f"BF16 when it adds them up over processes, for example that of {rounded[0]}; install "
            "the version of torch in requirements.txt"
        )


def _check_trained(hf: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError if training would not update a parameter.

    There are two checks:

    * The optimizer must contain the parameter. This check fails for a parameter that was created
      after the optimizer.
    * The parameter must have a gradient. This check fails if the model computes with a copy of the
      parameter, if the parameter was untied from the tensor that the model computes with, or if
      packed attention does not use the parameter. The weights of an expert are exempt, because it
      is possible that no token of the pack has chosen the expert.
    """
    optimized = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    trained = {name: weight for name, weight in hf.named_parameters() if weight.requires_grad}
    lost = []
    for name, parameter in trained.items():
        is_reached = was_reached(parameter) or re.search(r"\.experts\.\d+\.", name)
        if not is_reached or id(parameter) not in optimized:
            lost.append(name)
    if lost:
        raise InputError(
            f"model: {len(lost)} parameters would not be trained, for example {lost[0]}, because "
            "they have no gradient or the optimizer does not contain them. If "
            f"{type(hf).__name__} uses these parameters only in its own implementation of "
            "attention, choose another model"
        )
