"""Deliberate faults in a small run, which the audit and parity have to catch.

Every fault reproduces a mistake that happened in some training code. A fault is entered around a
run that has been built and undone on exit. `applies` says whether a run can have the fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import getattr_static
from types import FunctionType
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
    `weights` lists the ways of storing weights to try. `options` are arguments of `build_run`.
    """

    what: str
    make: Make
    applies: Callable[[SmallRun], bool]
    weights: Sequence[str]
    options: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """Architecture of the model."""
        return self.options.get("kind", "qwen3")

    @contextmanager
    def entered(self, run: SmallRun) -> Iterator[None]:
        """Introduce the fault into `run` and undo it on exit."""
        with pytest.MonkeyPatch.context() as patch:
            self.make(run, patch)
            yield


FAULTS: list[Fault] = []


def fault(
    what: str,
    applies: Callable[[SmallRun], bool] = lambda run: True,
    *,
    weights: Sequence[str] = ("fp32",),
    **options: Any,
) -> Callable[[Make], Make]:
    """Return a decorator that appends a fault to `FAULTS`."""

    def register(make: Make) -> Make:
        FAULTS.append(Fault(what, make, applies, weights, options))
        return make

    return register


def patching(owner: Any, name: str) -> Callable[[Callable[..., Any]], Make]:
    """Return a decorator for the replacement of the function `owner.name`.

    The decorated function is called with the run, the replaced function and the arguments of a
    call. `owner` may be a tuple of owners, or a function that returns the owner in a run.
    """

    def decorate(change: Callable[..., Any]) -> Make:
        def make(run: SmallRun, patch: Patch) -> None:
            found = owner(run) if isinstance(owner, FunctionType) else owner
            for target in found if isinstance(found, tuple) else (found,):
                static = isinstance(getattr_static(target, name), staticmethod)
                patch.setattr(target, name, wrapped(run, getattr(target, name), static))
            # The emulation caches functions that quantize.
            if emulated(run):
                run.packed.context.engine.preparation.cache_clear()

        def wrapped(run: SmallRun, real: Callable[..., Any], static: bool) -> Any:
            def changed(*args: Any, **options: Any) -> Any:
                return change(run, real, *args, **options)

            return staticmethod(changed) if static else changed

        return make

    return decorate


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
@patching(attention, "document_mask")
def blind_to_itself(run: SmallRun, real: Any, ends: Tensor, length: int, tokens: int) -> Tensor:
    mask = real(ends, length, tokens)
    # A document's first token keeps itself. It has nothing else to attend to.
    first = mask.sum(-1, keepdim=True) == 1
    return mask & (first | ~torch.eye(length, dtype=torch.bool, device=mask.device))


@fault("no token attends further back than half a pack")
@patching(attention, "document_mask")
def half_of_the_keys(run: SmallRun, real: Any, *documents: Any) -> Tensor:
    return real(*documents).triu(1 - LENGTH // 2)


@fault("positions restart at half a pack")
@changing_inputs
def positions_wrap(inputs: Inputs) -> Inputs:
    return {"position_ids": inputs["position_ids"] % (LENGTH // 2)}


def changing_kernel(change: Callable[..., Any]) -> Make:
    """Return a fault that calls `change(kernel, *arguments)` instead of the attention kernel."""

    def make(run: SmallRun, patch: Patch) -> None:
        kernels = AttentionInterface._global_mapping
        patch.setitem(kernels, "packed_sdpa", partial(change, kernels["packed_sdpa"]))

    return make


def changing_window(change: Callable[[int | None], int | None]) -> Make:
    """Change the sliding window of the attention kernel. None means full attention."""
    return changing_kernel(
        lambda kernel, *states, sliding_window, **options: kernel(
            *states, sliding_window=change(sliding_window), **options
        )
    )


fault("the sliding window is ignored", kind="mistral")(changing_window(lambda window: None))
fault("the sliding window is one key too wide", kind="mistral")(
    changing_window(lambda window: window and window + 1)
)


@fault("the second norm of a fused layer uses the first norm's weight", in_torch)
@patching(arithmetic.Arithmetic, "norm")
def norms_swapped(run: SmallRun, real: Any, self: Any, x: Tensor, norm: Any, *rest: Any) -> Any:
    layers = run.packed.fused.layers.values()
    first_norms = {layer.parts.norms[1]: layer.parts.norms[0] for layer in layers}
    return real(self, x, first_norms.get(norm, norm), *rest)


@fault("the residual's gradient is lost in backward", in_torch)
@patching(arithmetic.Arithmetic, "norm_backward")
def residual_lost(run: SmallRun, real: Any, *inputs: Any, residual: Tensor, **options: Any) -> Any:
    is_last = inputs[-1] is list(run.packed.fused.layers.values())[-1].parts.norms[1]
    return real(*inputs, residual=residual * (not is_last), **options)


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
@patching(loss_head, "add_product_")
def last_chunk_alone(run: SmallRun, real: Any, *product: Tensor, overwrite: bool = False) -> None:
    real(*product, overwrite=True)


def changing_gradient_of_logits(change: Callable[[Tensor, Tensor], object]) -> Make:
    """Return a fault that changes the gradient of the logits in place, after the losses."""

    @patching(loss_head, "token_losses")
    def make(
        run: SmallRun,
        real: Any,
        logits: Tensor,
        labels: Tensor,
        penalty: Any = None,
        *,
        with_gradient: bool,
    ) -> Tensor:
        losses = real(logits.clone(), labels, penalty, with_gradient=with_gradient)
        if with_gradient:
            change(logits, labels)
        return losses

    return make


@fault(
    "the penalty's gradient is lost",
    loss=LossSettings(chunk=256, penalty="non_max_sum", penalty_weight=0.1),
)
@changing_gradient_of_logits
def without_penalty(logits: Tensor, labels: Tensor) -> None:
    loss_head.Penalty().gradient_(logits, labels)


@fault("the logits' gradient contains only the label's term")
@changing_gradient_of_logits
def label_alone(logits: Tensor, labels: Tensor) -> None:
    logits.zero_()
    (rows,) = (labels != IGNORE).nonzero(as_tuple=True)
    logits[rows, labels[rows]] = -1


def changing_gradients(name: str, change: Callable[[Tensor], object]) -> Make:
    """Return a fault that changes gradients in place after the passes of a step.

    It changes the gradients of the second layer's parameters whose names end in `name`.
    """

    @patching(parity, "forward_backward")
    def make(run: SmallRun, real: Any, *args: Any, **options: Any) -> Tensor:
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


@fault("a quantized weight keeps only the last microbatch's gradient", emulated)
@patching(gemm, "add_to")
def only_last_microbatch(
    run: SmallRun, real: Any, total: Tensor, gradient: Tensor, overwrite: bool
) -> None:
    total.copy_(gradient)


@fault("a square weight's gradient is accumulated transposed", emulated)
@patching(LinearState, "__call__")
def accumulated_transposed(
    run: SmallRun, real: Any, linear: LinearState, x: Tensor, weight: Tensor, *rest: Any
) -> Tensor:
    """Transpose the gradient buffer, as code that infers the layout from the shape would."""
    main = getattr(weight, "main_grad", None)
    if main is not None and main.shape[0] == main.shape[1]:
        weight.main_grad = main.t()
    return real(linear, x, weight, *rest)


# ── Products ────────────────────────────────────────────────────────────────────────────


def changing_products(
    kind: str, left: Change = lambda values: values, right: Change = lambda values: values
) -> Make:
    """Return a fault that changes operand values of one kind of product in the second layer."""

    @patching(emulation.EmulatedGemm, "factors")
    def make(run: SmallRun, real: Any, gemm: Any, gemm_kind: str, *operands: Any) -> Any:
        factors = real(gemm, gemm_kind, *operands)
        if gemm_kind != kind or ".1." not in gemm.name:
            return factors
        return [
            Operand(change(operand.values), operand.scale)
            for change, operand in zip((left, right), factors, strict=True)
        ]

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


def unquantized_gradient(
    run: SmallRun, real: Any, gemm: Any, role: str, x: Tensor, along: str, scale: Tensor | None
) -> Operand:
    operand = real(gemm, role, x, along, scale)
    plain = Operand(x.float() if along == "features" else x.t().float(), None)
    return plain if role == "grad_output" else operand


fault("output gradients are not quantized", emulated)(
    patching(emulation.EmulatedGemm, "quantize_along")(unquantized_gradient)
)


def changing_rounding(
    nearest: Callable[[Tensor, Grid], Tensor], stochastic: Callable[[Tensor, Grid, Tensor], Tensor]
) -> Make:
    """Return a fault that replaces both rounding functions of the formats."""
    round_nearest = patching((tensor, blocks), "round_to_grid")(lambda run, real, *x: nearest(*x))
    round_stochastically = patching(blocks, "round_stochastically")(
        lambda run, real, *x: stochastic(*x)
    )

    def make(run: SmallRun, patch: Patch) -> None:
        round_nearest(run, patch)
        round_stochastically(run, patch)

    return make


fault("quantization leaves values unrounded", emulated)(
    changing_rounding(lambda x, grid: x, lambda x, grid, uniform: x)
)


@fault("no forward enters low precision", quantized)
def never_entered(run: SmallRun, patch: Patch) -> None:
    patch.setattr(run.packed.context, "forward", lambda **_: nullcontext())


@fault("nothing is quantized from the second microbatch of a step on", emulated)
@patching(lambda run: run.packed.context, "forward")
def entered_for_first_microbatch_only(run: SmallRun, real: Any, **options: Any) -> Any:
    return real(**options) if run.packed.context.first_microbatch else nullcontext()


@fault("a layer is recomputed outside low precision", quantized, recompute=True)
@patching(lambda run: run.packed.context.engine, "checkpoint")
def recomputed_outside(run: SmallRun, real: Any, *arguments: Any, again: Any) -> Any:
    context = run.packed.context
    return real(*arguments, again=lambda: overridden(context, low_precision=False))


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
@patching(blocks.Blocks, "quantized")
def neighbours_scale(
    run: SmallRun, real: Any, self: blocks.Blocks, scaled: Tensor, scale: Tensor, *rest: Any
) -> Any:
    if self.two_dimensional and scale.shape[2] > 1:
        axis = 2
    elif self.two_dimensional or self.transposed:
        axis = 0
    else:
        axis = -2
    return real(self, scaled, scale.roll(1, axis), *rest)


@fault("one scale per tensor instead of one per block", in_blocks)
@patching(QuantizedPrecision, "along_features")
def no_blocks(run: SmallRun, real: Any, self: QuantizedPrecision, role: str) -> Any:
    grid = self.grid(role)
    return lambda x, scale, amax: tensor.quantize_by_amax(x, amax, grid)


@fault(
    "the tensor scale is doubled, so that values saturate",
    lambda run: emulated(run) and run.active.precision.tensor_scaled,
)
def saturating_scale(run: SmallRun, patch: Patch) -> None:
    @patching((tensor, blocks), "scale_from_amax")
    def double_current_scale(run: SmallRun, real: Any, *arguments: Any, **options: Any) -> Tensor:
        return 2 * real(*arguments, **options)

    # Delayed scales are computed from the history after the operands are quantized.
    @patching(delayed_state, "update_scale")
    def double_delayed_scale(run: SmallRun, real: Any, *rule: Any) -> tuple[Tensor, Tensor]:
        history, scale = real(*rule)
        return history, 2 * scale

    double_current_scale(run, patch)
    double_delayed_scale(run, patch)


@fault("the Hadamard transform is applied to one operand only", transforms)
@patching(QuantizedPrecision, "transform")
def one_side_transformed(run: SmallRun, real: Any, self: Any, role: str) -> Any:
    return blocks.hadamard if role == "input" else None


fault("the Hadamard transform is skipped", transforms)(
    patching(QuantizedPrecision, "transform")(lambda *_: None)
)
fault("gradients are rounded to nearest, not stochastically", stochastic)(
    patching(QuantizedPrecision, "is_stochastic")(lambda *_: False)
)
fault("stochastic rounding always rounds up", stochastic)(
    patching(blocks, "round_stochastically")(
        lambda run, real, x, grid, uniform: real(x, grid, torch.zeros_like(uniform))
    )
)
fault("stochastic rounding rounds up too often, by 3 % of a quantum", stochastic)(
    patching(blocks, "round_stochastically")(
        lambda run, real, x, grid, uniform: real(x, grid, uniform - 0.03)
    )
)


def quarter_down(x: Tensor, grid: Grid, uniform: Tensor | None = None) -> Tensor:
    x, quantum, per_quantum = tensor._in_quanta(x, grid)
    return torch.round(x * per_quantum - 0.25) * quantum


fault("values are rounded down by a quarter of a quantum", emulated)(
    changing_rounding(quarter_down, quarter_down)
)


@fault("ties are rounded away from zero", in_blocks)
@patching(blocks, "round_to_grid")
def ties_away(run: SmallRun, real: Any, x: Tensor, grid: Grid) -> Tensor:
    x, quantum, per_quantum = tensor._in_quanta(x, grid)
    return torch.copysign((x.abs() * per_quantum + 0.5).floor() * quantum, x)


def scaled_by_blocks_only(run: SmallRun) -> bool:
    return in_blocks(run) and not run.active.precision.tensor_scaled


def changing_block_amax(change: Callable[[Tensor, tuple[int, ...]], Tensor]) -> Make:
    """Return a fault that replaces the amax of every block.

    `change` computes it from the absolute values, split into blocks, and the dimensions of a block.
    """
    return patching(blocks, "absolute_maximum")(
        lambda run, real, x, dim, keepdim: change(x.float().abs(), dim)
    )


fault("a block's scale is computed from half of its values", scaled_by_blocks_only)(
    changing_block_amax(
        lambda x, dim: x.narrow(dim[-1], 0, x.shape[dim[-1]] // 2).amax(dim, keepdim=True)
    )
)
fault("a block's scale is half as large as needed", scaled_by_blocks_only)(
    changing_block_amax(lambda x, dim: x.amax(dim, keepdim=True) / 2)
)


# ── Delayed scaling ─────────────────────────────────────────────────────────────────────


fault("a scale is never updated", delayed)(
    patching(delayed_state.DelayedState, "_update")(lambda *_: None)
)
fault("the gradients' scales are never updated", delayed)(
    patching(delayed_state.DelayedState, "_update_after_backward")(lambda *_: None)
)


@fault("a linear uses its neighbour's scale", delayed)
@patching(delayed_state.DelayedState, "scale")
def neighbours_delayed_scale(
    run: SmallRun, real: Any, state: delayed_state.DelayedState, module: int, role: str
) -> Tensor:
    return real(state, (module + 1) % len(state._modules), role)


@fault("amax histories record only a quarter of the tokens", delayed)
@patching(emulation, "absolute_maximum")
def part_of_the_amax(run: SmallRun, real: Any, x: Tensor) -> Tensor:
    return real(x[: len(x) // 4])
