"""Build a model on its devices, convert it to the run's precisions, and audit it.

`assemble` calls the other functions in order. docs/developers/architecture.md explains the order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
from pretrain.model.distributed import shard, take_from_first_rank
from pretrain.model.fused.layers import NO_FUSED_LAYERS, FusedLayers
from pretrain.model.gradients import RankSums, attach_main_gradients
from pretrain.model.huggingface import (
    build,
    build_on_first_rank,
    decoder_layers,
    named_tensors,
    round_weights,
)
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.sharding import Sharding, part_from_first
from pretrain.model.wrapping import (
    choose_arithmetic,
    convert,
    fuse,
    not_fused_because,
    wrap_layers,
)
from pretrain.observe.audit import Entry, audit_products, describe
from pretrain.optimizer.adamw import (
    ExactAdamW,
    build_optimizer,
    clear_gradients,
    named_state,
)
from pretrain.optimizer.muon import build_muon
from pretrain.precision.product import PrecisionContext
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.precision.scope import Decision, decide
from pretrain.precision.selection import make_engines
from pretrain.precision.settings import WEIGHT_DTYPES, ActivePrecision
from pretrain.run.job import Job, cuda_graphs
from pretrain.run.tokenizer import stop_after_answers

# The number of packs from which delayed scaling fills its histories before the first step. At least
# two packs are needed to record the gradients of all linears (see `rehearse`). With more packs, the
# largest recorded amax comes closer to the amax of a microbatch. After only one pack, the first
# gradient of a 1.7 B model was saturated so much that its norm was 82 % of the correct norm.
REHEARSALS = 4
# The number of tokens in the audit's microbatch if nothing is quantized or fused. The audit
# observes every linear even with so few tokens. A whole pack may not fit into memory without
# torch.compile.
UNQUANTIZED_TOKENS = 128


@dataclass(frozen=True)
class Built:
    """Stage 1: the Hugging Face model, and the values that its parameters do not have yet.

    Under FSDP2, the parameters have no values. `values` of the first rank has the values of all
    parameters, and `values` of every other rank is empty. Without FSDP2, `values` has the FP32
    values of the parameters with `weights: bf16_exact`, and is empty otherwise.
    """

    hf: PreTrainedModel
    values: dict[str, Tensor]


@dataclass(frozen=True)
class Converted:
    """Stage 2: the model in its final form, but not on its devices yet."""

    # The wrapper of the Hugging Face model that maps packed batches to losses.
    model: PackedLanguageModel
    # Map the name of each precision of the run to its decision for each linear layer.
    decisions: Mapping[str, Mapping[str, Decision]]
    # The part of audit.json that is the same in all precisions.
    shared_audit: dict[str, Any]


@dataclass
class Assembly:
    """Stage 3: a model that is ready to train, and its optimizer."""

    # The Hugging Face model, with its original names of parameters.
    hf: PreTrainedModel
    # The wrapper of `hf` that maps packed batches to losses. It is sharded under FSDP2.
    model: PackedLanguageModel
    optimizer: ExactAdamW
    schedule: PrecisionSchedule
    # Map the name of each precision of the run to its decision for each linear layer.
    decisions: Mapping[str, Mapping[str, Decision]]
    # The part of audit.json that is the same in all precisions.
    shared_audit: dict[str, Any]
    # Map the name of each precision to its part of audit.json.
    audits: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def context(self) -> PrecisionContext:
        """Return the current precision, which all matrix products of the model share."""
        return self.model.context

    @property
    def audit(self) -> dict[str, Any]:
        """Return the contents of audit.json."""
        record = self.audits[self.context.current.name] | self.shared_audit
        if self.schedule.changes:
            record["schedule"] = self.schedule.label
            record["phases"] = {first: active.name for first, _, active in self.schedule.spans}
            record["precisions"] = self.audits
        return record

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Map Hugging Face names to the model's live tensors."""
        return named_tensors(self.hf)

    @cached_property
    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Map names to the optimizer's live tensors, as a checkpoint stores them."""
        return named_state(self.optimizer, self.hf)

    def start_precision(self, active: ActivePrecision, job: Job, accelerator: Accelerator) -> None:
        """Change to the precision `active`, and reset its state as in a new assembly.

        Cached weights are dropped. The histories of delayed scaling are filled by passes with the
        present weights. The model is audited again. Raises InputError if a product does not compute
        in the precision. All ranks must call this method.
        """
        self.context.reset_engines()
        self.context.current = active
        # Set a seed, because dropout changes the amaxes in the histories. Without the seed, the
        # histories would depend on all random numbers that this process has drawn before. A run
        # that is resumed at this step has drawn different random numbers.
        seed_step(job.recipe.seed, 0, accelerator.process_index)
        record = self.audits[active.name]
        record["products"] = rehearse(job, accelerator, self)
        # No step of training has confirmed these products yet.
        record.pop("confirmed_in_step", None)


def assemble(job: Job, accelerator: Accelerator, console: Console | None = None) -> Assembly:
    """Build the model of `job` and its optimizer, and return both ready to train.

    All ranks must call this function. Each stage needs the result of the previous stage.
    docs/developers/architecture.md explains the order.
    """
    built = build_model(job, accelerator)
    stop_after_answers(built.hf, job.tokenizer, job.recipe.data)
    converted = convert_model(job, built, accelerator)
    assembly = place_model(job, built, converted, accelerator)
    audit_precisions(job, accelerator, assembly, console or Console(0, enabled=False))
    return assembly


def build_model(job: Job, accelerator: Accelerator) -> Built:
    """Build the Hugging Face model. All ranks must call this function, and get the same weights."""
    recipe = job.recipe
    is_exact = recipe.weights == "bf16_exact"
    value_dtype = torch.float32 if is_exact else job.weight_dtype
    if accelerator.is_fsdp2:
        hf, values = build_on_first_rank(
            recipe.model,
            job.shapes.config,
            accelerator,
            value_dtype=value_dtype,
            parameter_dtype=job.weight_dtype,
            seed=recipe.seed,
            backend=job.plan.attention.name,
        )
        return Built(hf, values)
    hf = build(
        recipe.model,
        job.shapes.config,
        weights=value_dtype,
        seed=recipe.seed,
        device=accelerator.device,
        backend=job.plan.attention.name,
    )
    take_from_first_rank(accelerator, [*hf.parameters(), *hf.buffers()])
    unrounded = round_weights(hf, job.weight_dtype) if is_exact else {}
    return Built(hf, unrounded)


def convert_model(job: Job, built: Built, accelerator: Accelerator) -> Converted:
    """Fuse the layers of the model, convert its linears to low precision, and wrap its layers.

    Layers that do not support fusing are not fused.
    """
    hf = built.hf
    device = accelerator.device
    first = job.plan.schedule.at(1)
    context = PrecisionContext(
        job.plan.compute_dtype,
        make_engines(job.plan.precisions, device),
        first,
        evaluates_low=first.settings.use_autocast_during_eval,
    )
    layers = decoder_layers(hf)
    decisions = {
        active.name: decide(hf, list(layers.values()), active) for active in job.plan.precisions
    }
    fused, about_fusing = _fuse(job, layers, decisions, context, device.type)
    model = PackedLanguageModel(hf, job.plan.attention.name, job.plan.loss, context, fused)
    for active in job.plan.precisions:
        with context.using(active):
            convert(hf, decisions[active.name], context, fused)
    # Wrap each layer in gradient checkpointing, torch.compile and a cast of FP32 weights to BF16
    # copies. FSDP2 needs no such cast, because it casts weights when it gathers them.
    settings = job.recipe.model
    compiles = settings.compile == "layer" or (settings.compile == "auto" and device.type == "cuda")
    has_copies = job.plan.compute_dtype != job.weight_dtype and not accelerator.is_fsdp2
    cast_to = job.plan.compute_dtype if has_copies else None
    wrap_layers(model, settings, cast_to=cast_to, compile_layers=compiles)
    return Converted(
        model,
        decisions,
        describe_shared_audit(job, model, about_fusing, device.type, compiles=compiles),
    )


def _fuse(
    job: Job,
    layers: Mapping[str, nn.Module],
    decisions: Mapping[str, Mapping[str, Decision]],
    context: PrecisionContext,
    device_type: str,
) -> tuple[FusedLayers, str]:
    """Fuse the layers that support it. Return the fused layers and a text for the audit.

    layers: map names to the decoder layers.
    decisions: map the name of each precision of the run to its decisions.

    If no layer was fused, the text contains the reason.
    """
    # Sort quantized precisions first. In all precisions, the fused layers use the arithmetic that
    # is chosen for the first precision of this list. If several precisions do not support fusing,
    # return the reason of the first one.
    quantized_first = sorted(
        job.plan.precisions, key=lambda active: active.precision.quantized, reverse=True
    )
    setting = job.recipe.model.fused
    for active in quantized_first:
        if reason := not_fused_because(setting, active, device_type, context.compute_dtype):
            return NO_FUSED_LAYERS, reason
    arithmetic = choose_arithmetic(
        quantized_first[0], device_type, context, keeps_rotated=job.plan.keeps_rotated
    )
    fused = fuse(layers, decisions, arithmetic)
    return fused, fused.describe()


def place_model(job: Job, built: Built, converted: Converted, accelerator: Accelerator) -> Assembly:
    """Shard the model under FSDP2, build its optimizer, set weights, and allocate gradients."""
    recipe = job.recipe
    model = converted.model
    # Without FSDP2 the model is already on its device.
    if accelerator.is_fsdp2:
        model = shard(
            accelerator, model, job.plan.compute_dtype, once_a_step=job.plan.devices.gathered_once
        )
    build = build_muon if recipe.optimizer.name == "muon" else build_optimizer
    optimizer = build(model, recipe.optimizer, exact=recipe.weights == "bf16_exact")
    # Remove each value, so that its memory is free when the parameter has it.
    set_weights(built.hf, lambda name: built.values.pop(name, None), optimizer)
    allocate_gradient_sums(job, accelerator, model)
    optimizer.materialise()
    return Assembly(
        built.hf,
        model,
        optimizer,
        job.plan.schedule,
        converted.decisions,
        converted.shared_audit,
    )


def allocate_gradient_sums(job: Job, accelerator: Accelerator, packed: PackedLanguageModel) -> None:
    """Allocate buffers for sums of gradients, and set up the exchange of gradients between ranks.

    Call this when the model is on its devices.
    """
    dtype = getattr(torch, WEIGHT_DTYPES[job.recipe.gradients_kept_in])
    stacks = packed.fused.stacks
    if accelerator.is_fsdp2:
        # FSDP2 has sharded the parameters. `Sharding` allocates the sums for its groups of
        # parameters. FSDP2 reduces the sums over ranks.
        packed.sharding = Sharding(
            packed, dtype, stacks, once_a_step=job.plan.devices.gathered_once
        )
    elif _needs_gradient_sums(job, accelerator, packed.fused):
        # Each process has all parameters and sums its own gradients. With several processes,
        # `RankSums` then adds up these sums over the processes.
        attach_main_gradients(packed, dtype, stacks)
        if accelerator.num_processes > 1:
            packed.rank_sums = RankSums(packed.parameters())


def _needs_gradient_sums(job: Job, accelerator: Accelerator, fused: FusedLayers) -> bool:
    """Return whether gradients must be summed in buffers of our own.

    Autograd adds up gradients in the dtype of the parameters. Buffers are needed if the sums have
    another dtype, if matrix products add their results to the sums (emulation and fused layers), or
    if ranks exchange gradients.
    """
    stored_in = job.recipe.gradients_kept_in
    other_dtype = WEIGHT_DTYPES[stored_in] != WEIGHT_DTYPES[job.recipe.weights]
    # `plan.emulated` is True if any phase of the run is emulated, even if this process does not
    # train that phase. So a run that is resumed in another phase sums gradients in the same way.
    emulates = job.plan.emulated and stored_in == "fp32"
    return other_dtype or emulates or bool(fused.layers) or accelerator.num_processes > 1


def set_weights(
    hf: PreTrainedModel, read: Callable[[str], Tensor | None], optimizer: ExactAdamW
) -> None:
    """Set the values of parameters that are on their devices.

    hf: the model.
    read: returns the value of a parameter by its name. With None, the parameter keeps its value.
        Under FSDP2, only the values of the first rank are used, and it must have all of them.
    optimizer: the optimizer. With `weights: bf16_exact`, it stores the lower 16 bits of each FP32
        value as a remainder.
    """
    dtype = torch.float32 if optimizer.exact else hf.dtype
    for name, parameter in hf.named_parameters():
        value = read(name)
        if isinstance(parameter, DTensor):
            # All ranks call this function, most of them with None.
            value = part_from_first(value, parameter, dtype)
        if value is not None:
            optimizer.set_master(parameter, value)


def audit_precisions(
    job: Job, accelerator: Accelerator, assembly: Assembly, console: Console
) -> None:
    """Run packs through the model in each precision, and record the audit.

    All ranks must call this function. Call this last in the assembly, because the audit must
    observe the model exactly as it trains. Raises InputError if a product does not use its
    precision.
    """
    context = assembly.context
    for active in job.plan.precisions:
        with context.using(active):
            if context.engine is not None:
                context.engine.reset()
            with console.progress(
                "auditing the precision of products",
                "packs",
                total=REHEARSALS if context.state() else 1,
            ):
                products = rehearse(job, accelerator, assembly)
            assembly.audits[active.name] = describe(context, assembly.hf, products)


def rehearse(job: Job, accelerator: Accelerator, assembly: Assembly) -> list[Entry]:
    """Run packs through the model in its present precision. Return the audit of the last pack.

    With delayed scaling, REHEARSALS packs fill the histories. Otherwise only one pack runs. The
    loss is scaled as in training, so that the histories contain gradients of the same size as in
    training.

    At least two packs are needed to record the gradients of all linear layers. In the first
    backward, all scales are 1, and gradients that are quantized with this scale become zero. Only
    the last linear of each attention and each MLP receives a gradient that is not zero, because the
    residual connections carry this gradient past all quantized products. The linears before it
    receive zeros. After the first backward, the last linears have scales that suit their gradients,
    so the second backward passes gradients on to all other linears.
    """
    packed = assembly.model
    packed.train()

    def loss_of(pack: int) -> Tensor:
        batch = job.data.one_pack(pack, job.shapes.config.vocab_size)
        if packed.context.engine is None and not packed.fused.layers:
            batch = first_tokens(batch, UNQUANTIZED_TOKENS)
        return packed(**inputs_of(batch, accelerator.device)) * (1 / job.plan.tokens_per_step)

    rehearsals = REHEARSALS - 1 if packed.context.state() else 0
    # A pack may have another shape than a microbatch, and compiling it would take seconds.
    with torch.compiler.set_stance("force_eager"):
        for pack in range(rehearsals):
            loss_of(pack).backward()
            advance()
    clear_gradients(assembly.optimizer, packed)
    # The audit uses the last pack. Many gradients of the first one are zero.
    entries = audit_products(
        packed,
        lambda: loss_of(rehearsals),
        assembly.decisions[packed.context.current.name],
        assembly.optimizer,
    )
    advance()
    clear_gradients(assembly.optimizer, packed)
    return entries


def first_tokens(batch: Microbatch, tokens: int) -> Microbatch:
    """Return a microbatch with the first `tokens` tokens of `batch`, which has one pack."""
    length = min(tokens, batch.max_seqlen)
    cut = {
        name: getattr(batch, name)[:, :length] for name in ("input_ids", "position_ids", "labels")
    }
    return replace(batch, **cut, cu_seqlens=batch.cu_seqlens.clamp(max=length), max_seqlen=length)


def describe_shared_audit(
    job: Job, packed: PackedLanguageModel, fused: str, device_type: str, *, compiles: bool
) -> dict[str, Any]:
    """Return the part of audit.json that is the same in all precisions.

    fused: a text about the fused layers, or the reason why no layers are fused.
    device_type: the type of the device that trains. Before FSDP2 shards a model, it is on the CPU.
    compiles: True if torch.compile compiles the layers that are not fused.
    """
    compiled = "each layer"
    if not compiles or packed.fused.are_complete:
        compiled = "nothing"
    elif packed.context.engines:
        compiled = "each layer, between its low-precision products"
    attention = job.plan.attention
    return {
        "attention": {"kind": attention.name, "reason": attention.reason},
        "fused": fused,
        "compiled": compiled,
        "weights": job.recipe.weights,
        "gradients": job.recipe.gradients_kept_in,
        "cuda_graphs": cuda_graphs(job.plan, job.shapes),
        "deterministic": "yes" if torch.are_deterministic_algorithms_enabled() else "no",
    }
