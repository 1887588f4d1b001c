"""Deliberate faults in a small run, which the audit and parity have to catch.

Every fault reproduces a mistake that happened in some training code. A fault is entered around a
run that has been built and undone on exit. `applies` says whether a run can have the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from foundation.overrides import overridden
from packing.arrow import IGNORE
from packing.batch import build_microbatch
from pretrain.model import attention
from pretrain.model.fused import arithmetic
from pretrain.model.gradients import gradient_of
from pretrain.model.loss import head as loss_head
from pretrain.precision import delayed_state, emulation, gemm
from pretrain.precision.emulation import Operand
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.product import LinearState
from pretrain.precision.quantizers import E2M1, E4M3, E5M2, Grid, blocks, tensor
from pretrain.settings.recipe import LossSettings
from pretrain.verify import parity
from tests.pretrain.verify.small_runs import LENGTH, SmallRun

Patch = pytest.MonkeyPatch
Make = Callable[[SmallRun, Patch], None]  # changes a run or patches the code behind it
Inputs = dict[str, Any]
Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fault:
    """A deliberate fault, with the options of the run that it is made in.

    `what` is the row of the fault in docs/developers/faults.md. `make` introduces the fault.
    `recompute` enables activation checkpointing. `weights` lists the ways of storing weights to
    try. `kind` is the model's architecture and `loss` the loss settings. `run` has more arguments
    of `build_run`.
    """

    what: str
    make: Make
    applies: Callable[[SmallRun], bool]
    recompute: bool = False
    weights: Sequence[str] = ("fp32",)
    kind: str = "qwen3"
    loss: LossSettings | None = None
    run: Mapping[str, Any] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `build_run` for a run that has this fault."""
        return {
            "kind": self.kind,
            "recompute": self.recompute,
            "loss": self.loss,
            **(self.run or {}),
        }

    @contextmanager
    def entered(self, run: SmallRun) -> Iterator[None]:
        """Introduce the fault into `run` and undo it on exit."""
        with pytest.MonkeyPatch.context() as patch:
            self.make(run, patch)
            yield


FAULTS: list[Fault] = []


def fault(
    what: str, applies: Callable[[SmallRun], bool] = lambda run: True, **options: Any
) -> Callable[[Make], Make]:
    """Return a decorator that appends a fault to `FAULTS`."""

    def register(make: Make) -> Make:
        FAULTS.append(Fault(what, make, applies, **options))
        return make

    return register


def quantized(run: SmallRun) -> bool:
    return run.active.precision.quantized


def emulated(run: SmallRun) -> bool:
    return run.active.engine == "emulation"


def in_blocks(run: SmallRun) -> bool:
    return emulated(run) and run.active.precision.block_scaled


def delayed(run: SmallRun) -> bool:
    return emulated(run) and run.active.precision.keeps_history


def transforms(run: SmallRun) -> bool:
    return emulated(run) and run.active.settings.disable_rht is False


def stochastic(run: SmallRun) -> bool:
    return emulated(run) and run.active.settings.disable_stochastic_rounding is False


# ── Inputs of the model ─────────────────────────────────────────────────────────────────


def changing_inputs(change: Callable[[Inputs], Inputs]) -> Make:
    """Return a fault that updates the keyword arguments of the model's forward with `change`."""

    def make(run: SmallRun, patch: Patch) -> None:
        run.packed.register_forward_pre_hook(
            lambda module, args, inputs: (args, inputs | change(inputs)), with_kwargs=True
        )

    return make


@fault("documents of a pack attend to each other")
@changing_inputs
def documents_leak(inputs: Inputs) -> Inputs:
    ids = inputs["input_ids"]
    return {
        "cu_seqlens": torch.arange(
            0, ids.shape[1] + 1, LENGTH, dtype=torch.int32, device=ids.device
        )
    }


@fault("every second boundary between documents is lost")
@changing_inputs
def boundaries_lost(inputs: Inputs) -> Inputs:
    ends = inputs["cu_seqlens"].unique()
    return {"cu_seqlens": torch.cat([ends[:-1:2], ends[-1:]]).to(torch.int32)}


@fault("targets cross the boundaries of documents")
def targets_cross(run: SmallRun, patch: Patch) -> None:
    size = len(run.packs) // len(run.step.microbatches)
    groups = [run.packs[at : at + size] for at in range(0, len(run.packs), size)]
    run.step = replace(
        run.step, microbatches=[build_microbatch(group, mask_boundaries=False) for group in groups]
    )


@fault("a document's last token is trained to predict the next document's first")
@changing_inputs
def labels_shifted_again(inputs: Inputs) -> Inputs:
    labels, ids = inputs["labels"], inputs["input_ids"]
    # A token without label whose predecessor has one is the last of its document.
    after = torch.cat([labels[:, :1], labels[:, :-1]], dim=1)
    return {"labels": torch.where((labels == IGNORE) & (after != IGNORE), ids.roll(-1, 1), labels)}


fault("labels are shifted twice")(
    changing_inputs(lambda inputs: {"labels": inputs["labels"].roll(-1, 1)})
)


@fault("positions continue across the documents of a pack")
@changing_inputs
def positions_run_on(inputs: Inputs) -> Inputs:
    # RoPE depends on differences of positions only, so that a constant offset would change nothing.
    # Halving the positions changes the differences too.
    ids = inputs["input_ids"]
    return {"position_ids": torch.arange(ids.shape[1], device=ids.device)[None] % LENGTH // 2}


@fault("the tokens at a microbatch's end are dropped")
@changing_inputs
def tokens_dropped(inputs: Inputs) -> Inputs:
    labels = inputs["labels"].clone()
    labels[:, -labels.shape[1] // 2 :] = IGNORE
    return {"labels": labels}


@fault("one pack is trained twice and another is skipped")
def pack_twice(run: SmallRun, patch: Patch) -> None:
    first, _, *rest = run.step.microbatches
    run.step = replace(run.step, microbatches=[first, first, *rest])


@fault("the labels of a step's third microbatch are shifted twice")
def third_microbatch_shifted(run: SmallRun, patch: Patch) -> None:
    first, second, third, *rest = run.step.microbatches
    third = replace(third, labels=third.labels.roll(-1, 1))
    run.step = replace(run.step, microbatches=[first, second, third, *rest])


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


def in_torch(run: SmallRun) -> bool:
    """Return whether the run has fused layers that use torch operations."""
    return run.packed.fused is not None and not isinstance(
        run.packed.fused.arithmetic, arithmetic.TransformerEngineArithmetic
    )


def rotates(run: SmallRun) -> bool:
    return hasattr(run.packed.hf.base_model, "rotary_emb")


@fault("one layer uses another RoPE base", rotates)
def another_base(run: SmallRun, patch: Patch) -> None:
    forward = run.layers[1].forward
    config = run.packed.hf.config
    half = config.head_dim // 2
    frequencies = 500_000.0 ** (-torch.arange(half, device=run.accelerator.device) / half)

    def rotated(
        hidden: Tensor,
        *args: Any,
        position_ids: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **options: Any,
    ) -> Any:
        angles = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
        tables = tuple(
            table.to(position_embeddings[0].dtype) for table in (angles.cos(), angles.sin())
        )
        return forward(
            hidden, *args, position_ids=position_ids, position_embeddings=tables, **options
        )

    patch.setattr(run.layers[1], "forward", rotated)


@fault("a token does not attend to itself")
def blind_to_itself(run: SmallRun, patch: Patch) -> None:
    def without_diagonal(cu_seqlens: Tensor, max_seqlen: int, tokens: int) -> Tensor:
        mask = document_mask(cu_seqlens, max_seqlen, tokens)
        # A document's first token keeps itself. It has nothing else to attend to.
        first = mask.sum(-1, keepdim=True) == 1
        return mask & (first | ~torch.eye(max_seqlen, dtype=torch.bool, device=mask.device))

    document_mask = attention.document_mask
    patch.setattr(attention, "document_mask", without_diagonal)


@fault("no token attends further back than half a pack")
def half_of_the_keys(run: SmallRun, patch: Patch) -> None:
    document_mask = attention.document_mask
    patch.setattr(
        attention,
        "document_mask",
        lambda *documents: document_mask(*documents).triu(1 - LENGTH // 2),
    )


@fault("positions restart at half a pack")
@changing_inputs
def positions_wrap(inputs: Inputs) -> Inputs:
    return {"position_ids": inputs["position_ids"] % (LENGTH // 2)}


def changing_window(change: Callable[[int | None], int | None]) -> Make:
    """Change the sliding window of the attention kernel. None means full attention."""

    def make(run: SmallRun, patch: Patch) -> None:
        kernel = AttentionInterface._global_mapping["packed_sdpa"]

        def changed(*states: Any, sliding_window: int, **options: Any) -> Any:
            return kernel(*states, sliding_window=change(sliding_window), **options)

        patch.setitem(AttentionInterface._global_mapping, "packed_sdpa", changed)

    return make


fault("the sliding window is ignored", kind="mistral")(changing_window(lambda window: None))
fault("the sliding window is one key too wide", kind="mistral")(
    changing_window(lambda window: window and window + 1)
)


@fault("the second norm of a fused layer uses the first norm's weight", in_torch)
def norms_swapped(run: SmallRun, patch: Patch) -> None:
    real = arithmetic.Arithmetic.norm
    layers = run.packed.fused.layers.values()
    first_norms = {layer.parts.norms[1]: layer.parts.norms[0] for layer in layers}
    patch.setattr(
        arithmetic.Arithmetic,
        "norm",
        lambda self, x, norm, *rest: real(self, x, first_norms.get(norm, norm), *rest),
    )


@fault("the residual's gradient is lost in backward", in_torch)
def residual_lost(run: SmallRun, patch: Patch) -> None:
    def without_residual(arithmetic: Any, *inputs: Any, residual: Tensor, **options: Any) -> Any:
        is_last = inputs[-1] is list(run.packed.fused.layers.values())[-1].parts.norms[1]
        return norm_backward(arithmetic, *inputs, residual=residual * (not is_last), **options)

    norm_backward = arithmetic.Arithmetic.norm_backward
    patch.setattr(arithmetic.Arithmetic, "norm_backward", without_residual)


@fault("one layer is skipped")
def layer_skipped(run: SmallRun, patch: Patch) -> None:
    patch.setattr(run.layers[-1], "forward", lambda hidden, *args, **kwargs: hidden)


# ── Gradients and their accumulation ────────────────────────────────────────────────────


def changing_loss(change: Callable[[SmallRun, Tensor, Inputs], Tensor]) -> Make:
    """Return a fault that replaces the loss of a forward by `change(run, loss, inputs)`."""

    def make(run: SmallRun, patch: Patch) -> None:
        run.packed.register_forward_hook(
            lambda module, args, inputs, loss: change(run, loss, inputs), with_kwargs=True
        )

    return make


fault("the gradient is halved")(changing_loss(lambda run, loss, _: loss / 2 + loss.detach() / 2))


@fault("the loss is averaged over microbatches, not over tokens")
@changing_loss
def averaged_over_microbatches(run: SmallRun, loss: Tensor, inputs: Inputs) -> Tensor:
    valid = (inputs["labels"] != IGNORE).sum().clamp(min=1)
    return loss / valid * run.step.valid_tokens / len(run.step.microbatches)


@fault("a microbatch's gradient is lost")
@changing_loss
def microbatch_lost(run: SmallRun, loss: Tensor, inputs: Inputs) -> Tensor:
    return loss if run.packed.context.first_microbatch else loss.detach() + loss * 0


@fault("the head's gradient contains only the last chunk of tokens")
def last_chunk_alone(run: SmallRun, patch: Patch) -> None:
    add = loss_head.add_product_
    patch.setattr(
        loss_head,
        "add_product_",
        lambda total, left, right, overwrite=False: add(total, left, right, overwrite=True),
    )


def changing_gradient_of_logits(change: Callable[[Tensor, Tensor, Any], None]) -> Make:
    """Return a fault that changes the gradient of the logits in place.

    `change` is called with that gradient, the labels and the penalty after the losses are computed.
    """

    def make(run: SmallRun, patch: Patch) -> None:
        def changed(
            logits: Tensor, labels: Tensor, penalty: Any = None, *, with_gradient: bool
        ) -> Tensor:
            losses = token_losses(logits.clone(), labels, penalty, with_gradient=with_gradient)
            if with_gradient:
                change(logits, labels, penalty)
            return losses

        token_losses = loss_head.token_losses
        patch.setattr(loss_head, "token_losses", changed)

    return make


@fault(
    "the penalty's gradient is lost",
    loss=LossSettings(chunk=256, penalty="non_max_sum", penalty_weight=0.1),
)
@changing_gradient_of_logits
def without_penalty(logits: Tensor, labels: Tensor, penalty: Any) -> None:
    loss_head.Penalty().gradient_(logits, labels)


@fault("the logits' gradient contains only the label's term")
@changing_gradient_of_logits
def label_alone(logits: Tensor, labels: Tensor, penalty: Any) -> None:
    logits.zero_()
    (rows,) = (labels != IGNORE).nonzero(as_tuple=True)
    logits[rows, labels[rows]] = -1


def changing_gradients(name: str, change: Callable[[Tensor], object]) -> Make:
    """Return a fault that changes gradients in place after the passes of a step.

    It changes the gradients of the second layer's parameters whose names end in `name`.
    """

    def make(run: SmallRun, patch: Patch) -> None:
        parameters = [
            p for n, p in run.packed.hf.named_parameters() if ".1." in n and n.endswith(name)
        ]

        def changed(*args: Any, **kwargs: Any) -> Tensor:
            loss = forward_backward(*args, **kwargs)
            for parameter in parameters:
                change(gradient_of(parameter))
            return loss

        forward_backward = parity.forward_backward
        patch.setattr(parity, "forward_backward", changed)

    return make


fault("one weight's gradient is lost")(changing_gradients("_proj.weight", torch.Tensor.zero_))
fault("one weight's gradient is 25 % too large")(
    changing_gradients("_proj.weight", lambda gradient: gradient.mul_(1.25))
)


@fault("a quantized weight keeps only the last microbatch's gradient", emulated)
def only_last_microbatch(run: SmallRun, patch: Patch) -> None:
    patch.setattr(gemm, "add_to", lambda total, gradient, overwrite: total.copy_(gradient))


@fault("a square weight's gradient is accumulated transposed", emulated)
def accumulated_transposed(run: SmallRun, patch: Patch) -> None:
    """Transpose the gradient buffer, as code that infers the layout from the shape would."""
    multiply = LinearState.__call__

    def transposed(
        linear: LinearState, x: Tensor, weight: Tensor, *rest: Any, **options: Any
    ) -> Tensor:
        main = getattr(weight, "main_grad", None)
        if main is not None and main.shape[0] == main.shape[1]:
            weight.main_grad = main.t()
        return multiply(linear, x, weight, *rest, **options)

    patch.setattr(LinearState, "__call__", transposed)


# ── Products ────────────────────────────────────────────────────────────────────────────


def changing_products(
    kind: str, left: Change = lambda values: values, right: Change = lambda values: values
) -> Make:
    """Return a fault that changes operand values of one kind of product in the second layer."""

    def make(run: SmallRun, patch: Patch) -> None:
        def changed(gemm: Any, gemm_kind: str, *operands: Any) -> Any:
            quantized_operands = factors(gemm, gemm_kind, *operands)
            if gemm_kind == kind and ".1." in gemm.name:
                return [
                    Operand(change(operand.values), operand.scale)
                    for change, operand in zip((left, right), quantized_operands, strict=True)
                ]
            return quantized_operands

        factors = emulation.EmulatedGemm.factors
        patch.setattr(emulation.EmulatedGemm, "factors", changed)

    return make


ROWS, TOKENS = (partial(torch.roll, shifts=1, dims=dim) for dim in (0, 1))
fault("the rows of the transposed weight are shifted", emulated)(
    changing_products("dgrad", right=ROWS)
)
fault("the tokens of the transposed input are shifted", emulated)(
    changing_products("wgrad", right=TOKENS)
)
fault("the input's gradient is 25 % too large", emulated)(
    changing_products("dgrad", lambda values: values * 1.25)
)


def every_second_token_doubled(values: Tensor) -> Tensor:
    """Double even columns, the tokens of a gradient, and clear odd ones."""
    factors = torch.zeros(values.shape[1], dtype=values.dtype, device=values.device)
    factors[::2] = 2
    return values * factors


fault("a weight's gradient uses every second token, doubled", emulated)(
    changing_products("wgrad", every_second_token_doubled)
)


@fault("output gradients are not quantized", emulated)
def gradients_unquantized(run: SmallRun, patch: Patch) -> None:
    quantize_along = emulation.EmulatedGemm.quantize_along

    def unquantized(gemm: Any, role: str, x: Tensor, along: str, scale: Tensor | None) -> Operand:
        operand = quantize_along(gemm, role, x, along, scale)
        plain = Operand(x.float() if along == "features" else x.t().float(), None)
        return plain if role == "grad_output" else operand

    patch.setattr(emulation.EmulatedGemm, "quantize_along", unquantized)


def in_quantizers(make: Make) -> Make:
    """Introduce a fault in the code of the formats, which parity uses too, and clear its cache."""

    def applied(run: SmallRun, patch: Patch) -> None:
        make(run, patch)
        run.packed.context.engine.preparation.cache_clear()

    return applied


def changing_rounding(
    nearest: Callable[[Tensor, Grid], Tensor], stochastic: Callable[[Tensor, Grid, Tensor], Tensor]
) -> Make:
    """Return a fault that replaces both rounding functions of the quantizers."""

    @in_quantizers
    def make(run: SmallRun, patch: Patch) -> None:
        for module in (tensor, blocks):
            patch.setattr(module, "round_to_grid", nearest)
        patch.setattr(blocks, "round_stochastically", stochastic)

    return make


fault("quantization leaves values unrounded", emulated)(
    changing_rounding(lambda x, grid: x, lambda x, grid, uniform: x)
)


@fault("no forward enters low precision", quantized)
def never_entered(run: SmallRun, patch: Patch) -> None:
    patch.setattr(run.packed.context, "forward", lambda **_: nullcontext())


@fault("nothing is quantized from the second microbatch of a step on", emulated)
def entered_for_first_microbatch_only(run: SmallRun, patch: Patch) -> None:
    context, forward = run.packed.context, run.packed.context.forward
    patch.setattr(
        context,
        "forward",
        lambda **options: forward(**options) if context.first_microbatch else nullcontext(),
    )


@fault("a layer is recomputed outside low precision", quantized, recompute=True)
def recomputed_outside(run: SmallRun, patch: Patch) -> None:
    real = run.packed.context.engine.checkpoint

    def outside(function: Callable[..., Any], *args: Any, again: Callable[[], Any]) -> Any:
        return real(
            function, *args, again=lambda: overridden(run.packed.context, low_precision=False)
        )

    patch.setattr(run.packed.context.engine, "checkpoint", outside)


# ── Rounding and formats ────────────────────────────────────────────────────────────────


def toward_zero(x: Tensor, grid: Grid, uniform: Tensor | None = None) -> Tensor:
    x, quantum, per_quantum = tensor._in_quanta(x, grid)
    return torch.trunc(x * per_quantum) * quantum


def on_another_grid(change: Callable[[Grid], Grid]) -> Make:
    """Return a fault that rounds to `change(grid)` instead of the format's grid."""
    nearest, stochastic = tensor.round_to_grid, tensor.round_stochastically
    return changing_rounding(
        lambda x, grid: nearest(x, change(grid)),
        lambda x, grid, uniform: stochastic(x, change(grid), uniform),
    )


REPLACEMENT = {E4M3: E5M2, E5M2: E4M3, E2M1: E4M3}
fault("values are truncated, not rounded", emulated)(changing_rounding(toward_zero, toward_zero))
fault("codes have one mantissa bit too few", emulated)(
    on_another_grid(
        lambda grid: replace(grid, mantissa_bits=grid.mantissa_bits - 1, maximum=grid.maximum)
    )
)
fault("codes have one mantissa bit too many", emulated)(
    on_another_grid(lambda grid: replace(grid, mantissa_bits=grid.mantissa_bits + 1))
)
fault("E5M2 replaces E4M3, and E4M3 replaces E5M2 and E2M1", emulated)(
    # The scale remains that of the replaced format.
    on_another_grid(lambda grid: replace(REPLACEMENT[grid], maximum=grid.maximum))
)


@fault("a block is decoded with its neighbour's scale", in_blocks)
@in_quantizers
def neighbours_scale(run: SmallRun, patch: Patch) -> None:
    real = blocks.Blocks.quantized

    def shifted(
        self: blocks.Blocks, scaled: Tensor, scale: Tensor, *rest: Any, **options: Any
    ) -> Any:
        if self.two_dimensional and scale.shape[2] > 1:
            axis = 2
        elif self.two_dimensional or self.transposed:
            axis = 0
        else:
            axis = -2
        return real(self, scaled, scale.roll(1, axis), *rest, **options)

    patch.setattr(blocks.Blocks, "quantized", shifted)


@fault("one scale per tensor instead of one per block", in_blocks)
@in_quantizers
def no_blocks(run: SmallRun, patch: Patch) -> None:
    def by_tensor(self: Any, role: str) -> Any:
        grid = self.grid(role)
        return lambda x, scale, amax: tensor.quantize_by_amax(x, amax, grid)

    patch.setattr(QuantizedPrecision, "along_features", by_tensor)


@fault(
    "the tensor scale is doubled, so that values saturate",
    lambda run: emulated(run) and run.active.precision.tensor_scaled,
)
def saturating_scale(run: SmallRun, patch: Patch) -> None:
    # Delayed scales are computed from the history after the operands are quantized.
    def double_delayed_scale(*history_and_rule: Any) -> tuple[Tensor, Tensor]:
        history, scale = update_scale(*history_and_rule)
        return history, 2 * scale

    @in_quantizers
    def double_current_scale(run: SmallRun, patch: Patch) -> None:
        for module in (tensor, blocks):
            patch.setattr(
                module,
                "scale_from_amax",
                lambda amax, maximum, **options: 2 * real(amax, maximum, **options),
            )

    update_scale = delayed_state.update_scale
    real = tensor.scale_from_amax
    patch.setattr(delayed_state, "update_scale", double_delayed_scale)
    double_current_scale(run, patch)


@fault("the Hadamard transform is applied to one operand only", transforms)
@in_quantizers
def one_side_transformed(run: SmallRun, patch: Patch) -> None:
    def inputs_only(self: Any, role: str) -> Any:
        return blocks.hadamard if role == "input" else None

    patch.setattr(QuantizedPrecision, "transform", inputs_only)


def replacing_decision(method: str, replacement: Any) -> Make:
    """Return a fault that replaces one of a precision's methods for choosing the quantization."""
    return in_quantizers(lambda run, patch: patch.setattr(QuantizedPrecision, method, replacement))


fault("the Hadamard transform is skipped", transforms)(
    replacing_decision("transform", lambda *_: None)
)
fault("gradients are rounded to nearest, not stochastically", stochastic)(
    replacing_decision("is_stochastic", lambda *_: False)
)


@fault("stochastic rounding always rounds up", stochastic)
@in_quantizers
def always_up(run: SmallRun, patch: Patch) -> None:
    real = tensor.round_stochastically
    patch.setattr(
        blocks,
        "round_stochastically",
        lambda x, grid, uniform: real(x, grid, torch.zeros_like(uniform)),
    )


@fault("stochastic rounding rounds up too often, by 3 % of a quantum", stochastic)
@in_quantizers
def biased_stochastic(run: SmallRun, patch: Patch) -> None:
    real = tensor.round_stochastically
    patch.setattr(
        blocks, "round_stochastically", lambda x, grid, uniform: real(x, grid, uniform - 0.03)
    )


@fault("values are rounded down by a quarter of a quantum", emulated)
@in_quantizers
def rounded_down(run: SmallRun, patch: Patch) -> None:
    def quarter_down(x: Tensor, grid: Grid, uniform: Tensor | None = None) -> Tensor:
        x, quantum, per_quantum = tensor._in_quanta(x, grid)
        return torch.round(x * per_quantum - 0.25) * quantum

    for module in (tensor, blocks):
        patch.setattr(module, "round_to_grid", quarter_down)
    patch.setattr(blocks, "round_stochastically", quarter_down)


@fault("ties are rounded away from zero", in_blocks)
@in_quantizers
def ties_away(run: SmallRun, patch: Patch) -> None:
    def nearest(x: Tensor, grid: Grid) -> Tensor:
        x, quantum, per_quantum = tensor._in_quanta(x, grid)
        return torch.copysign((x.abs() * per_quantum + 0.5).floor() * quantum, x)

    patch.setattr(blocks, "round_to_grid", nearest)


def scaled_by_blocks_only(run: SmallRun) -> bool:
    return in_blocks(run) and not run.active.precision.tensor_scaled


def changing_block_amax(change: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Make:
    """Return a fault that replaces the amax of every block.

    `change` computes it from the absolute values, split into blocks, and the dimensions of a block.
    """

    @in_quantizers
    def make(run: SmallRun, patch: Patch) -> None:
        patch.setattr(
            blocks, "absolute_maximum", lambda x, dim, keepdim: change(x.float().abs(), dim)
        )

    return make


fault("a block's scale is computed from half of its values", scaled_by_blocks_only)(
    changing_block_amax(
        lambda x, dim: x.narrow(dim[-1], 0, x.shape[dim[-1]] // 2).amax(dim, keepdim=True)
    )
)
fault("a block's scale is half as large as needed", scaled_by_blocks_only)(
    changing_block_amax(lambda x, dim: x.amax(dim, keepdim=True) / 2)
)


# ── Delayed scaling ─────────────────────────────────────────────────────────────────────


def never_called(owner: type, method: str) -> Make:
    return lambda run, patch: patch.setattr(owner, method, lambda *_: None)


fault("a scale is never updated", delayed)(never_called(delayed_state.DelayedState, "_update"))
fault("the gradients' scales are never updated", delayed)(
    never_called(delayed_state.DelayedState, "_update_after_backward")
)


@fault("a linear uses its neighbour's scale", delayed)
def neighbours_delayed_scale(run: SmallRun, patch: Patch) -> None:
    real = delayed_state.DelayedState.scale
    count = len(run.packed.context.engine.delayed._modules)
    patch.setattr(
        delayed_state.DelayedState,
        "scale",
        lambda self, module, role: real(self, (module + 1) % count, role),
    )


@fault("amax histories record only a quarter of the tokens", delayed)
def part_of_the_amax(run: SmallRun, patch: Patch) -> None:
    real = emulation.absolute_maximum
    patch.setattr(emulation, "absolute_maximum", lambda x: real(x[: len(x) // 4]))
    run.packed.context.engine.preparation.cache_clear()
