"""The model in memory, in its precision and on its devices, with its optimizer and the proof of what runs in it.

`assemble` of train_accelerate.py puts it together from what stands here; docs/architecture.md says why in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from foundation.progress import advance
from packing.batch import Microbatch
from pretrain.checkpoint.state import seed_step
from pretrain.metrics.console import Console
from pretrain.metrics.precision_health import PrecisionWatch
from pretrain.metrics.run_folder import STATISTICS_FILE
from pretrain.metrics.trackers import JsonlTracker
from pretrain.model import huggingface as model
from pretrain.model.distributed import take_from_first_rank
from pretrain.model.fused.layers import FusedLayers
from pretrain.model.gradients import RankSums, attach_main_gradients, local_part
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.sharding import Sharding, part_from_first
from pretrain.model.wrapping import choose_arithmetic, convert, fuse
from pretrain.optimizer.adamw import ExactAdamW, clear_gradients, named_state
from pretrain.plan.plan import Plan
from pretrain.precision.product import Backend, PrecisionContext
from pretrain.precision.scope import Decision, decide
from pretrain.precision.selection import make_backends
from pretrain.precision.settings import WEIGHT_DTYPES, ActivePrecision
from pretrain.run.job import Job
from pretrain.verify import audit

# Linears whose operands are examined again at a statistics step, drawn anew each time. All of them would cost 0.8 % of a run of
# 1.7 B parameters on an H200, these cost less than 0.1 % (benchmarks/results/kernels/h200_audit_cost.json).
EXAMINED_AGAIN = 13
# Packs that delayed scaling sees before the first step. The first two teach it the gradients of all layers. More come closer to
# the largest values of a microbatch: after one pack alone, the first gradient of a 1.7 B model was cut to 82 % of its norm.
REHEARSALS = 8
# Tokens observed where nothing is quantized or fused: all linears multiply in them, and a whole pack may not fit uncompiled.
SEEN_UNQUANTIZED = 128


@dataclass(frozen=True)
class AssembledPrecision:
    """What a model holds for one of the precisions of its run."""

    active: ActivePrecision
    backend: Backend | None  # None where nothing is quantized
    decisions: Mapping[str, Decision]
    audit: dict[str, Any]  # the part of audit.json that is about this precision


@dataclass
class Assembly:
    """One model under its names, its optimizer and its precision."""

    hf: PreTrainedModel  # as transformers knows it
    # as it maps packed batches to losses, sharded where the topology does
    model: PackedLanguageModel
    optimizer: ExactAdamW
    active: ActivePrecision  # of the steps at present; `use` changes it
    context: PrecisionContext  # which its products share
    precisions: Mapping[str, AssembledPrecision]  # that it computes in, by name
    around: dict[str, Any]  # the part of audit.json that is about all of them

    @property
    def now(self) -> AssembledPrecision:
        """The precision of the steps at present."""
        return self.precisions[self.active.precision.name]

    @property
    def audit(self) -> dict[str, Any]:
        """What audit.json says; parity and `confirming_audit` add to each precision's part what they find."""
        several = (
            {"precisions": {name: each.audit for name, each in self.precisions.items()}}
            if "phases" in self.around
            else {}
        )
        return self.now.audit | self.around | several

    def use(self, active: ActivePrecision) -> None:
        """Compute in `active`, one of the run's precisions, from here on, and let the audit speak of it."""
        self.active = active
        self.context.backend = self.now.backend

    @contextmanager
    def using(self, active: ActivePrecision) -> Iterator[None]:
        """While entered, compute in `active`."""
        before = self.active
        self.use(active)
        try:
            yield
        finally:
            self.use(before)

    def describe_schedule(self, plan: Plan) -> None:
        """Let the audit say which steps compute in what, where that changes on the way."""
        self.around = {
            key: value for key, value in self.around.items() if key not in ("schedule", "phases")
        }
        if plan.is_scheduled:
            phases = {first: active.precision.name for first, _, active in plan.spans}
            self.around |= {"schedule": plan.computes, "phases": phases}

    def begin(self, active: ActivePrecision, job: Job, accelerator: Accelerator) -> None:
        """Go over to `active` between two steps, or begin it again: from here on as if the model had been assembled in it. What
        was stored before is dropped, histories begin with the present weights, and the model is audited again. Collective;
        InputError where a product does not run as it should."""
        self.context.forget()
        self.use(active)
        # Histories must not depend on what was drawn before, which is not the same in a run that is resumed here: dropout shows.
        seed_step(job.recipe.seed, 0, accelerator.process_index)
        self.now.audit["products"] = rehearse(job.with_plan(active=active), accelerator, self)
        self.now.audit.pop("confirmed_in_step", None)

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The model's, by Hugging Face name, live: updates and loading write into them."""
        return model.named_tensors(self.hf)

    @cached_property
    def optimizer_tensors(self) -> dict[str, Tensor]:
        return named_state(self.optimizer, self.hf)

    def precision_watch(
        self, every: int | None, folder: Path, step: int, main_process: bool
    ) -> PrecisionWatch | None:
        """The watch over low-precision operands every so many steps; None without such operands, or where nobody wants it."""
        if not self.context.backends or every is None:
            return None
        file = JsonlTracker(folder / STATISTICS_FILE, step, main_process=main_process)
        watch = PrecisionWatch(self.context, every, file, self.confirming_again)
        watch.go_over_to(self.active, first_step=1)
        file.start()
        return watch

    @contextmanager
    def confirming_audit(self, step: int) -> Iterator[None]:
        """Watches `step`, the first of this process, after a rollback, or of a phase; raises InputError where its low-precision
        products are not the audit's."""
        with audit.confirming(self.active, self.now.audit["products"], step):
            yield
        self.now.audit["confirmed_in_step"] = step

    def confirming_again(self, step: int) -> AbstractContextManager[None]:
        """Watches the first microbatch of a later `step`; raises InputError, before the step's update, where its low-precision
        products are not the audit's any more, or histories do not move on."""
        products = self.now.audit["products"]
        return audit.confirming_first_microbatch(
            self.model, self.active, products, step, most=EXAMINED_AGAIN
        )


def build_model(
    job: Job, accelerator: Accelerator, attention: str
) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """The model of `job`, the same on all ranks; and by parameter the values that it gets later, when it is placed on its
    devices: under `bf16_exact` the FP32 values, under FSDP2 all values, on the first rank alone. Collective."""
    recipe, exact = job.recipe, job.recipe.weights == "bf16_exact"
    weights = torch.float32 if exact else job.weight_dtype
    options = {"seed": recipe.seed, "backend": attention}
    if accelerator.is_fsdp2:
        options |= {"kept": weights, "weights": job.weight_dtype}
        return model.build_on_first_rank(recipe.model, job.model_config, accelerator, **options)
    hf = model.build(
        recipe.model, job.model_config, weights=weights, device=accelerator.device, **options
    )
    take_from_first_rank(accelerator, [*hf.parameters(), *hf.buffers()])
    return hf, model.round_weights(hf, job.weight_dtype) if exact else {}


def in_its_precisions(
    job: Job, hf: PreTrainedModel, attention: str, device: torch.device
) -> tuple[PackedLanguageModel, dict[str, AssembledPrecision], str]:
    """`hf` for packed batches, its layers fused where they can be and its linears in low precision; each of the run's precisions
    by name; and what is fused, for the audit."""
    actives, layers = job.plan.actives, model.decoder_layers(hf)
    backends = make_backends(actives, device)
    context = PrecisionContext(
        backends[job.precision.name],
        job.compute_dtype,
        evaluates_low=job.active.settings.use_autocast_during_eval,
        backends=[*filter(None, backends.values())],
    )
    packed = PackedLanguageModel(hf, attention, job.plan.loss, context)
    precisions = {}
    for each in actives:
        decisions = decide(hf, list(layers.values()), each) if each.precision.quantized else {}
        precisions[each.precision.name] = AssembledPrecision(
            each, backends[each.precision.name], decisions, {}
        )
    # A phase with a BF16 forward takes its products from its precision without one, which so comes first.
    in_order = sorted(precisions.values(), key=lambda each: each.active.precision.plain_forward)
    packed.fused, what_is_fused = _fuse(job, layers, in_order, context, device.type)
    for each in in_order:
        context.backend = each.backend
        convert(hf, each.decisions, context, packed.fused)
    context.backend = backends[job.precision.name]
    return packed, precisions, what_is_fused


def _fuse(
    job: Job,
    layers: Mapping[str, nn.Module],
    precisions: Sequence[AssembledPrecision],
    context: PrecisionContext,
    device_type: str,
) -> tuple[FusedLayers | None, str]:
    """Fuse the layers that can be. Returns them, None where there are none, and what the audit says of it."""
    # Of several precisions the quantized one's arithmetic serves all, and its reason counts, so it comes first.
    actives = sorted(job.plan.actives, key=lambda each: each.precision.quantized, reverse=True)
    chosen = [
        choose_arithmetic(job.recipe.model.fused, active, device_type, context)
        for active in actives
    ]
    if reasons := [why_not for arithmetic, why_not in chosen if arithmetic is None]:
        return None, reasons[0]
    arithmetic = chosen[0][0]
    arithmetic.keeps_rotated = job.plan.keeps_rotated
    fused = fuse(layers, {each.backend: each.decisions for each in precisions}, arithmetic)
    return fused if fused.layers else None, fused.describe()


def sum_gradients_apart(job: Job, accelerator: Accelerator, packed: PackedLanguageModel) -> None:
    """Allocate the sums in which the placed model's gradients add up, and let ranks exchange them."""
    summed_in = getattr(torch, WEIGHT_DTYPES[job.recipe.gradients_kept_in])
    stacks = packed.fused.stacks if packed.fused else ()
    if accelerator.is_fsdp2:
        packed.sharding = Sharding(packed, summed_in, stacks, once_a_step=job.plan.devices.gathered)
    elif _sums_apart(job, accelerator, packed.fused):
        attach_main_gradients(packed, summed_in, stacks)
        packed.rank_sums = RankSums(packed.parameters()) if accelerator.num_processes > 1 else None


def _sums_apart(job: Job, accelerator: Accelerator, fused: FusedLayers | None) -> bool:
    """Whether gradients have buffers to add up in. Autograd by itself adds up in the parameters' dtype: another dtype needs
    buffers, and so do products that add to them, and ranks that exchange them."""
    kept_in = job.recipe.gradients_kept_in
    if WEIGHT_DTYPES[kept_in] != WEIGHT_DTYPES[job.recipe.weights]:
        return True
    # A phase that never runs counts too: a start before it and one after it must add up alike.
    emulated = any(active.backend == "emulation" for active in job.plan.actives)
    return fused is not None or accelerator.num_processes > 1 or (emulated and kept_in == "fp32")


def give_values(
    hf: PreTrainedModel, aside: dict[str, Tensor], optimizer: ExactAdamW, *, exact: bool
) -> None:
    """Give the placed parameters the values that were set `aside`. These are taken out one by one, so that FP32 weights are freed
    as remainders are allocated."""
    weights = torch.float32 if exact else hf.dtype
    for name, parameter in hf.named_parameters():
        values = aside.pop(name, None)
        if isinstance(parameter, DTensor):
            values = part_from_first(values, parameter, weights)
        elif values is None:
            continue
        if exact:
            optimizer.set_master(parameter, values)
        else:
            local_part(parameter).copy_(values)


def observe(job: Job, accelerator: Accelerator, assembly: Assembly, console: Console) -> None:
    """Run a pack through the model in each of its precisions under observation, and fill the audit. Last, as it must see what
    training will run. Collective."""
    # The present precision comes last: a phase with a BF16 forward shares its histories, which must begin anew after it.
    for each in sorted(assembly.precisions.values(), key=lambda each: each is assembly.now):
        with assembly.using(each.active):
            if each.backend is not None:
                each.backend.reset()
            packs = REHEARSALS if assembly.context.state() else 1
            with console.progress("looking at what runs", "packs", total=packs):
                products = rehearse(job.with_plan(active=each.active), accelerator, assembly)
            each.audit.update(audit.describe(each.active, each.backend, assembly.hf, products))
    assembly.around |= {
        "weights": job.recipe.weights,
        "gradients": job.recipe.gradients_kept_in,
        "deterministic": "yes" if torch.are_deterministic_algorithms_enabled() else "no",
    }
    assembly.describe_schedule(job.plan)


def rehearse(job: Job, accelerator: Accelerator, assembly: Assembly) -> list[audit.Entry]:
    """Run a pack through the model under observation, in the precision that it computes in now; returns what ran in which.

    The loss is scaled as in training, so delayed scaling begins with a history of real packs. Its first scales are one, at which
    gradients round to zero: the first backward teaches it those of a layer's last products only, the second the others.
    """
    packed = assembly.model
    packed.train()

    def loss_of(pack: int) -> Tensor:
        batch = job.data.one_pack(pack, job.model_config.vocab_size)
        if packed.context.backend is None and packed.fused is None:
            batch = beginning_of(batch, SEEN_UNQUANTIZED)
        return packed(**inputs_of(batch, accelerator.device)) * (1 / job.plan.tokens_per_step)

    entries = audit.observe(
        packed, lambda: loss_of(0), job.active, assembly.now.decisions, assembly.optimizer
    )
    advance()
    if packed.context.state():
        with torch.compiler.set_stance("force_eager"):
            for pack in range(1, REHEARSALS):
                loss_of(pack).backward()
                advance()
    clear_gradients(assembly.optimizer, packed)
    return entries


def beginning_of(batch: Microbatch, tokens: int) -> Microbatch:
    """The first `tokens` of a microbatch of one pack, as a shorter pack; all of it where that is as short."""
    length = min(tokens, batch.max_seqlen)
    cut = {
        name: getattr(batch, name)[:, :length] for name in ("input_ids", "position_ids", "labels")
    }
    return replace(batch, **cut, cu_seqlens=batch.cu_seqlens.clamp(max=length), max_seqlen=length)


def what_is_compiled(compiled: bool, packed: PackedLanguageModel) -> str:
    if not compiled or (packed.fused and not packed.fused.left_out):
        return "nothing"
    return (
        "each layer, between its low-precision products"
        if packed.context.backends
        else "each layer"
    )
