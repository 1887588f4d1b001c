"""Deliberate faults that patch a run or a function, for example in one layer or in later passes.

Importing this module registers them with `faults.FAULTS`.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from packing.arrow import IGNORE
from packing.batch import StepBatches, build_microbatch
from pretrain.model import attention, gradients, packed
from pretrain.model.fused import arithmetic
from pretrain.model.gradients import gradient_of
from pretrain.model.loss import head as loss_head
from pretrain.model.loss.head import Penalty
from pretrain.optimizer.muon import Muon
from pretrain.precision import delayed_state, emulation, gemm
from pretrain.precision.emulation import BothWays, EmulatedGemm, Operand
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.gemm import Gemm, GemmKind
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.verify import parity
from tests.pretrain.conftest import active_in
from tests.pretrain.verify import small_runs
from tests.pretrain.verify.faults import Make, Patch, delayed, emulated, fault, patching, quantized
from tests.pretrain.verify.small_runs import SmallRun

# ── The batches of a step ───────────────────────────────────────────────────────────────


@fault("one pack is trained twice and another is skipped")
def pack_twice(run: SmallRun, patch: Patch) -> None:
    first, _, *rest = run.step.microbatches
    run.step = replace(run.step, microbatches=[first, first, *rest])


@fault("the labels of a step's third microbatch are shifted twice")
def third_microbatch_shifted(run: SmallRun, patch: Patch) -> None:
    first, second, third, *rest = run.step.microbatches
    third = replace(third, labels=third.labels.roll(-1, 1))
    run.step = replace(run.step, microbatches=[first, second, third, *rest])


@fault("targets cross the boundaries of documents")
def targets_cross(run: SmallRun, patch: Patch) -> None:
    size = len(run.packs) // len(run.step.microbatches)
    groups = [run.packs[at : at + size] for at in range(0, len(run.packs), size)]
    run.step = replace(
        run.step, microbatches=[build_microbatch(group, mask_boundaries=False) for group in groups]
    )


# ── The model ───────────────────────────────────────────────────────────────────────────


@fault(
    "the head comes untied from the embedding", lambda run: run.packed.hf.config.tie_word_embeddings
)
def head_untied(run: SmallRun, patch: Patch) -> None:
    head = run.packed.hf.get_output_embeddings()
    patch.setattr(head, "weight", nn.Parameter(head.weight.detach().clone()))


@fault(
    "attention scores have the wrong scale",
    lambda run: hasattr(next(iter(run.layers)), "self_attn"),
)
def attention_scale(run: SmallRun, patch: Patch) -> None:
    patch.setattr(run.layers[0].self_attn, "scaling", run.layers[0].self_attn.scaling / 2)


@fault(
    "one layer uses another RoPE base", lambda run: hasattr(run.packed.hf.base_model, "rotary_emb")
)
def another_base(run: SmallRun, patch: Patch) -> None:
    rotary = copy.deepcopy(run.packed.hf.base_model.rotary_emb)
    half = len(rotary.inv_freq)
    rotary.inv_freq = 500_000.0 ** (-torch.arange(half, device=run.accelerator.device) / half)
    forward = run.layers[1].forward

    def rotated(
        hidden: Tensor,
        *args: Any,
        position_ids: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **options: Any,
    ) -> Any:
        tables = rotary(position_embeddings[0], position_ids)
        return forward(
            hidden, *args, position_ids=position_ids, position_embeddings=tables, **options
        )

    patch.setattr(run.layers[1], "forward", rotated)


def in_torch(run: SmallRun) -> bool:
    """Return whether the run has fused layers that use torch operations."""
    layers = list(run.packed.fused.layers.values())
    return bool(layers) and not isinstance(
        layers[0].arithmetic, arithmetic.TransformerEngineArithmetic
    )


@fault("the second norm of a fused layer uses the first norm's weight", in_torch)
@patching(arithmetic.Arithmetic, "norm")
def norms_swapped(
    run: SmallRun,
    real: Callable[..., Any],
    self: arithmetic.Arithmetic,
    x: Tensor,
    norm: nn.Module,
    *rest: Any,
) -> tuple[Any, ...]:
    layers = run.packed.fused.layers.values()
    first_norms = {layer.parts.norms[1]: layer.parts.norms[0] for layer in layers}
    return real(self, x, first_norms.get(norm, norm), *rest)


@fault("the residual's gradient is lost in backward", in_torch)
@patching(arithmetic.Arithmetic, "norm_backward")
def residual_lost(
    run: SmallRun, real: Callable[..., Any], *inputs: Any, residual: Tensor, **options: Any
) -> tuple[Any, ...]:
    norm = inputs[-1]
    last_layer = list(run.packed.fused.layers.values())[-1]
    if norm is last_layer.parts.norms[1]:
        residual = torch.zeros_like(residual)
    return real(*inputs, residual=residual, **options)


@fault("one layer is skipped")
def layer_skipped(run: SmallRun, patch: Patch) -> None:
    patch.setattr(run.layers[-1], "forward", lambda hidden, *args, **kwargs: hidden)


# ── Single documents in one layer ───────────────────────────────────────────────────────


def in_two_layers(run: SmallRun) -> bool:
    return len(run.layers) > 1 and not run.packed.fused.layers


def changing_attention_of_one_layer(change: Callable[..., dict[str, Any]]) -> Make:
    """Return a fault that updates the arguments of the second layer's attention with `change`.

    `change` is called with the query, the key, the value, and the other arguments.
    """

    def make(run: SmallRun, patch: Patch) -> None:
        def changed(module: Any, *states: Tensor, **options: Any) -> Any:
            if module.layer_idx == 1:
                options |= change(*states[:3], **options)
            return kernel(module, *states, **options)

        kernel = AttentionInterface._global_mapping["packed_sdpa"]
        patch.setitem(AttentionInterface._global_mapping, "packed_sdpa", changed)

    return make


@fault("in one layer, a document attends to the document before it", in_two_layers)
@changing_attention_of_one_layer
def one_layer_leaks(
    query: Tensor, *states: Tensor, cu_seqlens: Tensor, max_seqlen: int, **_: Any
) -> dict[str, Any]:
    ends = cu_seqlens.unique()
    ends = torch.cat([ends[:2], ends[3:]])
    return {"documents": attention.document_mask(ends, max_seqlen, query.shape[2])}


@fault("in backward, a document's keys get the gradients of the next document's", in_two_layers)
@changing_attention_of_one_layer
def gradient_leaks(
    query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens: Tensor, **_: Any
) -> dict[str, Any]:
    def leaked(gradient: Tensor) -> Tensor:
        boundary = int(cu_seqlens.unique()[1])
        of_next = gradient[:, :, boundary : 2 * boundary]
        gradient = gradient.clone()
        gradient[:, :, : of_next.shape[2]] += of_next
        return gradient

    for state in (key, value):
        if state.requires_grad:
            state.register_hook(leaked)
    return {}


def changing_gradient_of_tokens(change: Callable[[Tensor, list[int]], None]) -> Make:
    """Return a fault that changes the gradient of the second layer's input in place.

    `change` is called with the gradient [tokens, features] and the offsets of the documents.
    """

    def make(run: SmallRun, patch: Patch) -> None:
        def changed(layer: Any, args: tuple[Tensor, ...], options: dict[str, Any]) -> None:
            def hook(gradient: Tensor) -> Tensor:
                gradient = gradient.clone()
                change(gradient[0], options["cu_seqlens"].unique().tolist())
                return gradient

            if args[0].requires_grad:
                args[0].register_hook(hook)

        run.layers[1].register_forward_pre_hook(changed, with_kwargs=True)

    return make


@fault("one document's gradient is doubled", in_two_layers)
@changing_gradient_of_tokens
def document_doubled(gradient: Tensor, ends: list[int]) -> None:
    gradient[ends[-2] :] *= 2


@fault("a microbatch's first document has no gradient", in_two_layers)
@changing_gradient_of_tokens
def document_lost(gradient: Tensor, ends: list[int]) -> None:
    gradient[: ends[1]] = 0


# ── Gradients ───────────────────────────────────────────────────────────────────────────


@fault("the logits' gradient contains only the label's term")
@patching(loss_head, "token_losses")
def label_alone(
    run: SmallRun,
    real: Callable[..., Tensor],
    logits: Tensor,
    labels: Tensor,
    *penalty: Penalty | None,
    with_gradient: bool,
) -> Tensor:
    losses = real(logits.clone(), labels, *penalty, with_gradient=with_gradient)
    if with_gradient:
        logits.zero_()
        (rows,) = (labels != IGNORE).nonzero(as_tuple=True)
        logits[rows, labels[rows]] = -1
    return losses


def changing_gradients(name: str, change: Callable[[Tensor], object]) -> Make:
    """Return a fault that changes gradients in place after the passes of a step.

    It changes the gradients of the second layer's parameters whose names end in `name`.
    """

    @patching(parity, "forward_backward")
    def make(run: SmallRun, real: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        loss = real(*args, **options)
        for parameter_name, parameter in run.packed.hf.named_parameters():
            if ".1." in parameter_name and parameter_name.endswith(name):
                change(gradient_of(parameter))
        return loss

    return make


fault("one weight's gradient is lost")(changing_gradients("_proj.weight", torch.Tensor.zero_))
fault("one weight's gradient is 25 % too large")(
    changing_gradients("_proj.weight", lambda gradient: gradient.mul_(1.25))
)

# ── Later microbatches and phases ───────────────────────────────────────────────────────


@fault("quantized weights' gradients are 8 % too large in later microbatches", emulated)
@patching(gemm, "add_to")
def later_gradients_too_large(
    run: SmallRun, real: Callable[..., None], total: Tensor, gradient: Tensor, *, overwrite: bool
) -> None:
    factor = 1.0 if run.packed.context.first_microbatch else 1.08
    real(total, factor * gradient, overwrite=overwrite)


@fault("the tokens of the transposed input are shifted in later microbatches", emulated)
@patching(EmulatedGemm, "factors")
def later_inputs_shifted(
    run: SmallRun,
    real: Callable[..., list[Operand]],
    gemm: EmulatedGemm,
    kind: GemmKind,
    *operands: BothWays,
) -> list[Operand]:
    left, right = real(gemm, kind, *operands)
    if kind == "wgrad" and not run.packed.context.first_microbatch:
        right = Operand(right.values.roll(1, 1), right.scale)
    return [left, right]


@fault("output gradients are not quantized in later microbatches", emulated)
@patching(EmulatedGemm, "quantize_along")
def later_gradients_unquantized(
    run: SmallRun,
    real: Callable[..., Operand],
    gemm: EmulatedGemm,
    role: Role,
    x: Tensor,
    along: Along,
    scale: Tensor | None,
) -> Operand:
    operand = real(gemm, role, x, along, scale)
    if role != "grad_output" or run.packed.context.first_microbatch:
        return operand
    if along == "rows":
        x = x.t()
    return Operand(x.float(), None)


fault("a phase has the precision of the phase before it", quantized)(
    patching(PrecisionSchedule, "at")(lambda *_: active_in("bf16", "torch"))
)


@fault("amax histories have half of their length", delayed)
def half_of_the_history(run: SmallRun, patch: Patch) -> None:
    states = run.packed.context.engine.delayed._states
    for direction, state in states.items():
        half = state.amax_history[len(state.amax_history) // 2 :].clone()
        half[0] = 0
        patch.setitem(states, direction, state._replace(amax_history=half))


# ── Experts with few tokens ─────────────────────────────────────────────────────────────


def changing_grouped_products(kind: GemmKind, change: Callable[[Any, list[int]], object]) -> Make:
    """Return a fault that changes the results of the experts in one kind of grouped product.

    `change(parts, by_tokens)` changes the experts' results in place. `parts` is a tensor of all
    weight gradients, or a sequence with one tensor for each expert. `by_tokens` has the experts
    with tokens, the one with the fewest tokens first.
    """

    by_tokens: dict[tuple[int, ...], list[int]] = {}

    @patching(emulation, "multiply_grouped")
    def make(
        run: SmallRun,
        real: Callable[..., Tensor],
        gemm_kind: GemmKind,
        left: Operand,
        right: Operand,
        dtype: torch.dtype | None,
        ends: Tensor,
    ) -> Tensor:
        cuts = tuple(ends.tolist())
        if gemm_kind == "forward":
            tokens = [part.any(1).sum() for part in left.values.tensor_split(cuts[:-1])]
            used = [expert for expert, number in enumerate(tokens) if number]
            by_tokens[cuts] = sorted(used, key=tokens.__getitem__)
        result = real(gemm_kind, left, right, dtype, ends)
        if gemm_kind == kind:
            parts = result if kind == "wgrad" else result.tensor_split(cuts[:-1])
            change(parts, by_tokens[cuts])
        return result

    return make


fault_of_experts = partial(fault, applies=emulated, kind="qwen3_moe")
fault_of_experts("the forward results of the smallest expert are zero")(
    changing_grouped_products("forward", lambda parts, by_tokens: parts[by_tokens[0]].zero_())
)
# In MXFP4, no check judges errors of stochastic rounding in so few rows (see product_check.py).
fault(
    "the input's gradient of the smallest expert is doubled",
    lambda run: emulated(run) and run.active.requested != "mxfp4",
    kind="qwen3_moe",
)(changing_grouped_products("dgrad", lambda parts, by_tokens: parts[by_tokens[0]].mul_(2)))
fault_of_experts("the weight's gradient of the smallest expert is zero")(
    changing_grouped_products("wgrad", lambda parts, by_tokens: parts[by_tokens[0]].zero_())
)


@fault_of_experts("two experts' weight gradients are exchanged")
@partial(changing_grouped_products, "wgrad")
def gradients_exchanged(parts: Tensor, by_tokens: list[int]) -> None:
    smallest, next_one = by_tokens[:2]
    parts[[smallest, next_one]] = parts[[next_one, smallest]]


# ── The update, and cached weights in the next step ─────────────────────────────────────

fault_of_update = partial(fault, weights=("fp32", "bf16", "bf16_exact"))


def after_update(run: SmallRun, patch: Patch, then: Callable[[int], object]) -> None:
    """Call `then` after every update with the number of updates so far."""
    step = run.optimizer.step
    count = itertools.count(1)

    def stepped(**options: Any) -> None:
        step(**options)
        then(next(count))

    patch.setattr(run.optimizer, "step", stepped)


@fault_of_update("one weight is never updated")
def one_weight_never_updated(run: SmallRun, patch: Patch) -> None:
    weight = run.layers[0].mlp.down_proj.weight
    before = weight.detach().clone()
    after_update(run, patch, lambda _: weight.data.copy_(before))


@fault_of_update("the weights of norms decay")
def norms_decay(run: SmallRun, patch: Patch) -> None:
    patch.setitem(run.optimizer.param_groups[1], "weight_decay", 0.1)


@fault_of_update(
    "a weight's cached copy is stale in every second step",
    lambda run: quantized(run) or bool(run.packed.fused.layers and run.has_copies),
)
def stale_copy(run: SmallRun, patch: Patch) -> None:
    updates = [0]
    after_update(run, patch, updates.append)

    @patching(Gemm, "weight_operand")
    def stale(
        run: SmallRun, real: Callable[..., Any], *args: Any, refresh: bool, **options: Any
    ) -> Any:
        is_second_step = updates[-1] % 2 == 1
        return real(*args, refresh=refresh and not is_second_step, **options)

    stale(run, patch)


@fault("a weight's cached copy is stale from the second microbatch of a step on", emulated)
def stale_later(run: SmallRun, patch: Patch) -> None:
    before: dict[str, Any] = {}
    last: dict[str, Any] = {}

    @patching(EmulatedGemm, "weight_operand")
    def later(
        run: SmallRun,
        real: Callable[..., Any],
        gemm: EmulatedGemm,
        *args: Any,
        refresh: bool,
        **options: Any,
    ) -> Any:
        operand = real(gemm, *args, refresh=refresh, **options)
        if refresh:
            before[gemm.name] = last.pop(gemm.name, operand)
            last[gemm.name] = operand
        return operand if refresh else before[gemm.name]

    later(run, patch)


# Runs forward and backward on the batches of a step, and returns the loss.
Passes = Callable[[StepBatches], Tensor]


def changing_passes(change: Callable[[SmallRun, Passes, StepBatches], Tensor]) -> Make:
    """Return a fault of the passes in training, which parity does not use.

    `change(run, passes, step)` replaces the passes of a step. `passes` runs them on a step's
    batches.
    """

    @patching(packed, "forward_backward")
    def make(
        run: SmallRun, real: Callable[..., Tensor], model: nn.Module, step: StepBatches, *rest: Any
    ) -> Tensor:
        return change(run, lambda batches: real(model, batches, *rest), step)

    return make


fault_of_update("the last microbatch of a step is dropped")(
    changing_passes(
        lambda run, passes, step: passes(replace(step, microbatches=step.microbatches[:-1]))
    )
)


@fault_of_update(
    "gradients are accumulated in BF16, not in FP32", lambda run: not run.accelerator.is_fsdp2
)
def sums_in_bf16(run: SmallRun, patch: Patch) -> None:
    table = run.packed.get_input_embeddings()
    if table.weight.dtype == torch.bfloat16:
        # The replaced forward adds an embedding's rows to FP32 sums only.
        vars(table).pop("forward", None)
    gradients.attach_main_gradients(run.packed, torch.bfloat16, run.packed.fused.stacks)


def round_to_bf16(run: SmallRun) -> None:
    for gradient in map(gradient_of, run.packed.parameters()):
        if gradient is not None:
            gradient.copy_(gradient.bfloat16())


@fault_of_update("FP32 gradient sums are rounded to BF16")
@changing_passes
def sums_rounded_to_bf16(run: SmallRun, passes: Passes, step: StepBatches) -> Tensor:
    loss = passes(step)
    round_to_bf16(run)
    return loss


@fault_of_update(
    "FP32 gradient sums are rounded to BF16 before each microbatch",
    lambda run: len(run.step.microbatches) > 2,
)
@changing_passes
def sums_rounded_between(run: SmallRun, passes: Passes, step: StepBatches) -> Tensor:
    with run.packed.register_forward_pre_hook(lambda *_: round_to_bf16(run)):
        return passes(step)


@fault_of_update("gradients are not cleared after a step")
def not_cleared(run: SmallRun, patch: Patch) -> None:
    patch.setattr(small_runs, "clear_gradients", lambda optimizer, model: None)


@fault_of_update("a step is trained in evaluation mode")
@changing_passes
def in_evaluation_mode(run: SmallRun, passes: Passes, step: StepBatches) -> Tensor:
    run.packed.eval()
    return passes(step)


@fault_of_update("the loss that is logged is the last microbatch's")
@changing_passes
def last_loss_logged(run: SmallRun, passes: Passes, step: StepBatches) -> Tensor:
    losses: list[Tensor] = []
    with run.packed.register_forward_hook(lambda module, args, loss: losses.append(loss.detach())):
        passes(step)
    return losses[-1] * len(losses) / step.valid_tokens


@fault("the momentum of one matrix of Muon stays zero", optimizer="muon")
@patching(Muon, "prepare")
def momentum_stays_zero(
    run: SmallRun, real: Callable[..., Callable[[], None]], optimizer: Muon, **options: Any
) -> Callable[[], None]:
    update = real(optimizer, **options)

    def update_without_one() -> None:
        update()
        optimizer.state[run.layers[0].self_attn.k_proj.weight]["momentum"].zero_()

    return update_without_one


@fault("no scale is updated from the second step on", delayed)
def scales_stand_still(run: SmallRun, patch: Patch) -> None:
    after_update(
        run, patch, lambda _: patch.setattr(delayed_state.DelayedState, "_update", lambda *_: None)
    )
