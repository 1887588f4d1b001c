"""Faults of low-precision products that leave their first call or their usual part correct.

They occur in later chunks of the LM head, in later microbatches, in experts with few tokens, in the
routing of few tokens, in biases, or in later phases. Importing this module registers them with
`faults.FAULTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from foundation.overrides import overridden
from pretrain.model import experts
from pretrain.model.loss import head as loss_head
from pretrain.precision import delayed_state, emulation, gemm
from pretrain.precision.emulation import EmulatedGemm, Operand
from pretrain.precision.product import LinearFunction
from pretrain.precision.schedule import PrecisionSchedule
from tests.pretrain.conftest import active_in
from tests.pretrain.verify.faults import (
    TOKENS,
    Make,
    Patch,
    delayed,
    emulated,
    fault,
    patching,
    quantized,
    unquantized_gradient,
)
from tests.pretrain.verify.small_runs import MIXTURES, SmallRun

# ── Chunks of the head ──────────────────────────────────────────────────────────────────

# With three packs in a microbatch, the head computes three chunks.
fault_of_head = partial(fault, packs_a_microbatch=3, scope="linear+head")
ChunkLoss = Callable[..., Tensor]


def in_later_chunks(change: Callable[..., Tensor]) -> Make:
    """Return a fault of a low-precision head in all chunks but the first.

    `change(chunk_loss, hidden, labels, d_hidden, d_weight, d_bias)` replaces the function of a
    chunk.
    """

    def make(run: SmallRun, patch: Patch) -> None:
        @contextmanager
        def changed(head: Any, low: Any, dtype: torch.dtype) -> Iterator[ChunkLoss]:
            with differentiating(head, low, dtype) as chunk_loss:

                def faulty(*arguments: Any, first: bool) -> Tensor:
                    if first or not low:
                        return chunk_loss(*arguments, first=first)
                    return change(partial(chunk_loss, first=False), *arguments)

                yield faulty

        differentiating = loss_head._differentiating
        patch.setattr(loss_head, "_differentiating", changed)

    return make


@fault_of_head("the labels are shifted in later chunks of a quantized head", quantized)
@in_later_chunks
def labels_shifted(chunk_loss: ChunkLoss, hidden: Tensor, labels: Tensor, *rest: Any) -> Tensor:
    return chunk_loss(hidden, labels.roll(-1), *rest)


@fault_of_head("the input's gradient is halved in later chunks of a quantized head", quantized)
@in_later_chunks
def d_hidden_halved(chunk_loss: ChunkLoss, *arguments: Any) -> Tensor:
    losses = chunk_loss(*arguments)
    d_hidden = arguments[2]
    d_hidden.div_(2)
    return losses


fault_of_head("the gradient of a quantized head contains only the last chunk", quantized)(
    in_later_chunks(lambda chunk_loss, *arguments: chunk_loss(*arguments, first=True))
)
fault_of_head("the loss is halved in later chunks of a quantized head", quantized)(
    in_later_chunks(lambda chunk_loss, *arguments: chunk_loss(*arguments) / 2)
)


@fault_of_head("the logits are 10 % too large in later chunks of a quantized head", emulated)
@in_later_chunks
def logits_scaled(chunk_loss: ChunkLoss, *arguments: Any) -> Tensor:
    token_losses = loss_head.token_losses
    with overridden(
        loss_head,
        token_losses=lambda logits, *rest, **options: token_losses(
            logits.mul_(1.1), *rest, **options
        ),
    ):
        return chunk_loss(*arguments)


# ── Later microbatches ──────────────────────────────────────────────────────────────────


@fault("quantized weights' gradients are 8 % too large in later microbatches", emulated)
@patching(gemm, "add_to")
def later_gradients_too_large(
    run: SmallRun, real: Any, total: Tensor, gradient: Tensor, *, overwrite: bool
) -> None:
    factor = 1.0 if run.packed.context.first_microbatch else 1.08
    real(total, factor * gradient, overwrite=overwrite)


@fault("the tokens of the transposed input are shifted in later microbatches", emulated)
@patching(EmulatedGemm, "factors")
def later_inputs_shifted(
    run: SmallRun, real: Any, gemm: EmulatedGemm, kind: str, *operands: Any
) -> list[Operand]:
    left, right = real(gemm, kind, *operands)
    if kind == "wgrad" and not run.packed.context.first_microbatch:
        right = Operand(TOKENS(right.values), right.scale)
    return [left, right]


@fault("output gradients are not quantized in later microbatches", emulated)
@patching(EmulatedGemm, "quantize_along")
def later_gradients_unquantized(run: SmallRun, real: Any, *arguments: Any) -> Operand:
    if run.packed.context.first_microbatch:
        return real(*arguments)
    return unquantized_gradient(run, real, *arguments)


# ── Experts with few tokens ─────────────────────────────────────────────────────────────


def changing_grouped_products(
    kind: str, change: Callable[[Tensor | Sequence[Tensor], list[int]], object]
) -> Make:
    """Return a fault that changes the results of the experts in one kind of grouped product.

    `change(parts, by_tokens)` changes the experts' results in place. `by_tokens` has the experts
    with tokens, the one with the fewest tokens first.
    """

    by_tokens: dict[tuple[int, ...], list[int]] = {}

    @patching(emulation, "multiply_grouped")
    def make(
        run: SmallRun,
        real: Any,
        gemm_kind: str,
        left: Operand,
        right: Operand,
        dtype: Any,
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
def gradients_exchanged(parts: Any, by_tokens: list[int]) -> None:
    smallest, next_one = by_tokens[:2]
    parts[[smallest, next_one]] = parts[[next_one, smallest]]


# ── Routing of one token in 64 ──────────────────────────────────────────────────────────


def changing_choices(change: Callable[[Tensor, Tensor], None], *, recorded: bool = True) -> Make:
    """Return a fault that changes the experts of every 64th token.

    `change` modifies the experts, int64 [tokens, choices], and their weights in place. If
    `recorded` is false, only the arrangement by experts is changed, not the choice that the run
    records.
    """

    @patching(experts, "arrange")
    def changing_arrangement(run: SmallRun, real: Any, chosen: Tensor, *rest: int) -> Any:
        chosen = chosen.clone()
        change(chosen[::64], torch.zeros(()))
        return real(chosen, *rest)

    def changed(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, chosen, weights = inputs[0], inputs[1].clone(), inputs[2].clone()
        change(chosen[::64], weights[::64])
        return hidden, chosen, weights

    def changing_records(run: SmallRun, patch: Patch) -> None:
        for layer in run.layers:
            layer.mlp.experts.register_forward_pre_hook(changed)

    return changing_records if recorded else changing_arrangement


def choose_next_expert(chosen: Tensor, weights: Tensor) -> None:
    chosen.add_(1).remainder_(MIXTURES["qwen3_moe"]["num_experts"])


fault("one token in 64 gets zero weights for its experts", kind="qwen3_moe")(
    changing_choices(lambda chosen, weights: weights.zero_())
)
fault("one token in 64 is routed to the next experts", kind="qwen3_moe")(
    changing_choices(choose_next_expert)
)
fault("one token in 64 is computed by the next experts", kind="qwen3_moe")(
    changing_choices(choose_next_expert, recorded=False)
)


# ── Biases ──────────────────────────────────────────────────────────────────────────────


def changing_biases(factor: float) -> Make:
    """Return a fault that multiplies the biases of low-precision products by `factor`."""
    return patching(emulation, "multiply")(
        lambda run, real, left, right, dtype, bias: real(
            left, right, dtype, None if bias is None else factor * bias
        )
    )


fault_of_biases = partial(fault, applies=emulated, kind="gpt2")
fault_of_biases("a quantized linear drops its bias")(changing_biases(0.0))
fault_of_biases("a quantized linear adds its bias twice")(changing_biases(2.0))


def changing_bias_gradients(factor: float) -> Make:
    """Return a fault that multiplies the gradients of biases of low-precision linears."""

    @patching(LinearFunction, "backward")
    def make(run: SmallRun, real: Any, ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, db, rest = real(ctx, dy)
        is_changed = db is not None and ctx.linear_pass.gemm.quantizes
        return dx, dw, factor * db if is_changed else db, rest

    return make


fault_of_biases("the bias of a quantized linear has no gradient")(changing_bias_gradients(0.0))
fault_of_biases("the gradient of a quantized linear's bias is doubled")(
    changing_bias_gradients(2.0)
)


# ── Phases and histories ────────────────────────────────────────────────────────────────


fault("a phase has the precision of the phase before it", quantized)(
    patching(PrecisionSchedule, "at")(lambda *_: active_in("bf16", "torch"))
)


def halving_amax(role: str) -> Make:
    """Return a fault that records half of the amax of the operands `role`."""
    return patching(delayed_state.DelayedState, "record")(
        lambda run, real, state, module, recorded_role, amax: real(
            state, module, recorded_role, amax / 2 if recorded_role == role else amax
        )
    )


fault("the amax histories of weights contain half of the amax", delayed)(halving_amax("weight"))
fault("the amax histories of gradients contain half of the amax", delayed)(
    halving_amax("grad_output")
)
