"""Put a model together: on its devices, in its precisions, with its optimizer and its audit.

`assemble` of train_accelerate.py calls these functions in order. docs/architecture.md explains the
order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from pretrain.model.distributed import take_from_first_rank
from pretrain.model.fused.layers import FusedLayers
from pretrain.model.gradients import RankSums, attach_main_gradients, local_part
from pretrain.model.huggingface import (
    build,
    build_on_first_rank,
    decoder_layers,
    named_tensors,
    round_weights,
)
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.sharding import Sharding, part_from_first
from pretrain.model.wrapping import choose_arithmetic, convert, fuse
from pretrain.observe.audit import Entry, audit_products, describe
from pretrain.optimizer.adamw import ExactAdamW, clear_gradients, named_state
from pretrain.precision.model_precision import ModelPrecision, PrecisionInModel
from pretrain.precision.product import PrecisionContext
from pretrain.precision.scope import decide
from pretrain.precision.selection import make_engines
from pretrain.precision.settings import WEIGHT_DTYPES
from pretrain.run.job import Job

# Packs that delayed scaling sees before the first step. The first two give it the gradients of all
# layers. More come closer to the largest values of a microbatch: after one pack alone, the first
# gradient of a 1.7 B model was cut to 82 % of its norm.
REHEARSALS = 8
# Tokens of the audit's pack if nothing is quantized or fused. All linears multiply in so few, and a
# whole pack may not fit uncompiled.
UNQUANTIZED_TOKENS = 128


@dataclass
class Assembly:
    """One model, its optimizer and its precision."""

    hf: PreTrainedModel  # under its Hugging Face names
    model: PackedLanguageModel  # maps packed batches to losses; sharded if the topology shards
    optimizer: ExactAdamW
    precision: ModelPrecision
    surroundings: dict[str, Any]  # the part of audit.json about all precisions

    @property
    def context(self) -> PrecisionContext:
        """Return the state that all products of the model share."""
        return self.precision.context

    @property
    def audit(self) -> dict[str, Any]:
        """Return the contents of audit.json."""
        record = self.precision.current.audit | self.surroundings
        schedule = self.precision.schedule
        if schedule.changes:
            record |= {
                "schedule": schedule.label,
                "phases": {span.first: span.active.precision.name for span in schedule.spans},
                "precisions": {
                    name: in_model.audit for name, in_model in self.precision.in_model.items()
                },
            }
        return record

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Return the model's live tensors by Hugging Face name."""
        return named_tensors(self.hf)

    @cached_property
    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Return the optimizer's live tensors by name."""
        return named_state(self.optimizer, self.hf)

    def start_precision(self, name: str, job: Job, accelerator: Accelerator) -> None:
        """Compute in the precision `name` as if the model had been assembled in it.

        Cached weights are dropped, histories begin with the present weights, and the model is
        audited again. Raises InputError if a product does not compute in the precision. Collective.
        """
        self.context.forget()
        self.precision.use(name)
        # Histories must not depend on numbers drawn before, which differ in a run that is resumed
        # at this step: dropout shows in them.
        seed_step(job.recipe.seed, 0, accelerator.process_index)
        record = self.precision.current.audit
        record["products"] = rehearse(job, accelerator, self)
        record.pop("confirmed_in_step", None)


def build_model(job: Job, accelerator: Accelerator) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Build the model, the same on all ranks.

    The second value has, by parameter, the values that `set_weights` loads once the model is on its
    devices: under `bf16_exact` the FP32 values, under FSDP2 all values, on the first rank alone.
    Collective.
    """
    recipe = job.recipe
    exact = recipe.weights == "bf16_exact"
    weights = torch.float32 if exact else job.weight_dtype
    if accelerator.is_fsdp2:
        return build_on_first_rank(
            recipe.model,
            job.model_config,
            accelerator,
            kept=weights,
            weights=job.weight_dtype,
            seed=recipe.seed,
            backend=job.attention.name,
        )
    hf = build(
        recipe.model,
        job.model_config,
        weights=weights,
        seed=recipe.seed,
        device=accelerator.device,
        backend=job.attention.name,
    )
    take_from_first_rank(accelerator, [*hf.parameters(), *hf.buffers()])
    return hf, round_weights(hf, job.weight_dtype) if exact else {}


def convert_model(
    job: Job, hf: PreTrainedModel, device: torch.device
) -> tuple[PackedLanguageModel, ModelPrecision, str]:
    """Prepare `hf` for packed batches in the precisions of the run.

    Layers are fused if they can be, and linears get products in low precision. Return the model,
    its precision, and a description of the fused layers for the audit.
    """
    first = job.plan.schedule.at(1)
    engines = make_engines(job.plan.precisions, device)
    context = PrecisionContext(
        engines[first.precision.name],
        job.compute_dtype,
        evaluates_low=first.settings.use_autocast_during_eval,
        backends=[engine for engine in engines.values() if engine is not None],
    )
    packed = PackedLanguageModel(hf, job.attention.name, job.plan.loss, context)
    layers = decoder_layers(hf)
    in_model = {}
    for active in job.plan.precisions:
        name = active.precision.name
        quantizes = active.precision.quantized
        decisions = decide(hf, list(layers.values()), active) if quantizes else {}
        in_model[name] = PrecisionInModel(active, engines[name], decisions, {})
    packed.fused, fused = _fuse(job, layers, list(in_model.values()), context, device.type)
    precision = ModelPrecision(context, in_model, job.plan.schedule)
    for entry in in_model.values():
        with precision.using(entry.name):
            convert(hf, entry.decisions, context, packed.fused)
    return packed, precision, fused


def _fuse(
    job: Job,
    layers: Mapping[str, nn.Module],
    precisions: Sequence[PrecisionInModel],
    context: PrecisionContext,
    device_type: str,
) -> tuple[FusedLayers | None, str]:
    """Fuse the layers that can be. Return them, or None without any, and a text for the audit."""
    # The quantized precision comes first: its arithmetic serves all, and its reason is reported.
    quantized_first = sorted(
        job.plan.precisions, key=lambda active: active.precision.quantized, reverse=True
    )
    chosen = [
        choose_arithmetic(job.recipe.model.fused, active, device_type, context)
        for active in quantized_first
    ]
    arithmetic, _ = chosen[0]
    missing = [reason for possible, reason in chosen if possible is None]
    if arithmetic is None or missing:
        return None, missing[0]
    arithmetic.keeps_rotated = job.plan.keeps_rotated
    fused = fuse(layers, {entry.backend: entry.decisions for entry in precisions}, arithmetic)
    return fused if fused.layers else None, fused.describe()


def allocate_gradient_sums(job: Job, accelerator: Accelerator, packed: PackedLanguageModel) -> None:
    """Allocate the sums of the placed model's gradients, and let ranks exchange them."""
    dtype = getattr(torch, WEIGHT_DTYPES[job.recipe.gradients_kept_in])
    stacks = packed.fused.stacks if packed.fused else ()
    if accelerator.is_fsdp2:
        packed.sharding = Sharding(packed, dtype, stacks, once_a_step=job.plan.devices.gathered)
    elif _needs_gradient_sums(job, accelerator, packed.fused):
        attach_main_gradients(packed, dtype, stacks)
        if accelerator.num_processes > 1:
            packed.rank_sums = RankSums(packed.parameters())


def _needs_gradient_sums(job: Job, accelerator: Accelerator, fused: FusedLayers | None) -> bool:
    """Return whether gradients are summed in buffers.

    Autograd sums in the dtype of the parameters. Another dtype needs buffers, and so do products
    that add to them, and ranks that exchange them.
    """
    stored_in = job.recipe.gradients_kept_in
    other_dtype = WEIGHT_DTYPES[stored_in] != WEIGHT_DTYPES[job.recipe.weights]
    # A phase that never runs counts too: a start before it and one after it must sum alike.
    emulates = job.plan.emulated and stored_in == "fp32"
    return other_dtype or emulates or fused is not None or accelerator.num_processes > 1


def set_weights(
    hf: PreTrainedModel, values: dict[str, Tensor], optimizer: ExactAdamW, *, exact: bool
) -> None:
    """Give the placed parameters their `values`, which `build_model` has returned.

    Values are taken out one by one, so that FP32 weights are freed while remainders are allocated.
    """
    dtype = torch.float32 if exact else hf.dtype
    for name, parameter in hf.named_parameters():
        value = values.pop(name, None)
        if isinstance(parameter, DTensor):
            value = part_from_first(value, parameter, dtype)
        elif value is None:
            continue
        if exact:
            optimizer.set_master(parameter, value)
        else:
            local_part(parameter).copy_(value)


def audit_precisions(
    job: Job, accelerator: Accelerator, assembly: Assembly, console: Console
) -> None:
    """Run packs through the model in each precision, and fill the audit. Collective.

    This comes last, because it must see the model as it will train.
    """
    precision = assembly.precision
    # The present precision comes last: a phase with a BF16 forward shares its histories, which must
    # begin anew after that phase.
    for entry in sorted(precision.in_model.values(), key=lambda entry: entry is precision.current):
        with precision.using(entry.name):
            if entry.backend is not None:
                entry.backend.reset()
            with console.progress(
                "auditing the precision of products",
                "packs",
                total=REHEARSALS if assembly.context.state() else 1,
            ):
                products = rehearse(job, accelerator, assembly)
            entry.audit.update(describe(entry.active, entry.backend, assembly.hf, products))


def rehearse(job: Job, accelerator: Accelerator, assembly: Assembly) -> list[Entry]:
    """Run packs through the model in its present precision. Return the audit of the first.

    The loss is scaled as in training, so delayed scaling begins with a history of real packs. Its
    first scales are one, and with them gradients round to zero. So the first backward records only
    the gradients of a layer's last products, and the second one the others.
    """
    packed = assembly.model
    packed.train()

    def loss_of(pack: int) -> Tensor:
        batch = job.data.one_pack(pack, job.model_config.vocab_size)
        if packed.context.backend is None and packed.fused is None:
            batch = first_tokens(batch, UNQUANTIZED_TOKENS)
        return packed(**inputs_of(batch, accelerator.device)) * (1 / job.plan.tokens_per_step)

    current = assembly.precision.current
    entries = audit_products(
        packed, lambda: loss_of(0), current.active, current.decisions, assembly.optimizer
    )
    advance()
    if packed.context.state():
        with torch.compiler.set_stance("force_eager"):
            for pack in range(1, REHEARSALS):
                loss_of(pack).backward()
                advance()
    clear_gradients(assembly.optimizer, packed)
    return entries


def first_tokens(batch: Microbatch, tokens: int) -> Microbatch:
    """Return a microbatch of one pack, cut to its first `tokens` tokens."""
    length = min(tokens, batch.max_seqlen)
    cut = {
        name: getattr(batch, name)[:, :length] for name in ("input_ids", "position_ids", "labels")
    }
    return replace(batch, **cut, cu_seqlens=batch.cu_seqlens.clamp(max=length), max_seqlen=length)


def describe_surroundings(
    job: Job, packed: PackedLanguageModel, fused: str, *, compiles: bool
) -> dict[str, Any]:
    """Return the part of audit.json about all precisions.

    fused: the fused layers, or the reason why there are none.
    compiles: torch.compile compiles the layers that are not fused.
    """
    compiled = "each layer"
    if not compiles or (packed.fused and not packed.fused.left_out):
        compiled = "nothing"
    elif packed.context.backends:
        compiled = "each layer, between its low-precision products"
    return {
        "attention": {"kind": job.attention.name, "reason": job.attention.reason},
        "fused": fused,
        "compiled": compiled,
        "weights": job.recipe.weights,
        "gradients": job.recipe.gradients_kept_in,
        "deterministic": "yes" if torch.are_deterministic_algorithms_enabled() else "no",
    }
