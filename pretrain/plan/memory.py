"""How much memory training will take on one device: exact where shapes decide it, an estimate where a compiler does.

Two needs come on top of what is there all the time, and the larger of them makes the peak: what the loss takes while every
layer's activations are kept, or what the backward of one layer takes, when the layers behind it have given theirs back.

A fused layer keeps for backward what the nodes of `pretrain.model.fused.layers` save. Numbers a token:

    2 · hidden               in the compute dtype      the layer's input, and the attention's residual sum
    2 · hidden               as operands               the outputs of the two norms; their statistics, 4 bytes each, beside
    query + 2 · KV widths    in the compute dtype      queries, keys and values, before or after rotation; where heads are
                                                       normed and memory allows (pretrain.plan.plan), both
    query width              in the compute dtype      the attention's output; 4 bytes a head of statistics beside
    query width              as operand                the same for its product; in BF16 the two are one
    gate and up widths       in the compute dtype      the activation's inputs; backward computes its output again

An operand is what the gradient of a weight is multiplied from: the compute dtype, or a byte a number in FP8, with the scales of
its blocks. A compiled layer keeps what the compiler decides not to compute again. That is about this, in the compute dtype:

    4 · hidden                        the layer's input, the attention's residual sum, and the outputs of the two norms
    in · out / hidden, every matrix   queries, keys, values and the attention's output; gate, up and their product
    query and key widths              once more, after normalisation and rotation

On one H200 with Qwen3-1.7B's shape, and on four with 8 B and 14 B models, the estimate is within 5 % of the measured peaks; a
test holds it to them. Not counted: workspaces, histories of delayed scaling, what NCCL takes, and the mask of `sdpa` attention.
So `batch.microbatch: auto` only begins where this estimate says, and tries on the device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from foundation.errors import InputError
from foundation.reading import one_line
from pretrain.metrics.flops import ModelFlops
from pretrain.model.fused.layers import ROTATED_ATTENTION, Parts, assess_layer
from pretrain.model.huggingface import decoder_layers
from pretrain.model.wrapping import not_fused_because
from pretrain.precision.formats.definition import Precision
from pretrain.precision.grouped import STACKS, stacked_experts
from pretrain.precision.scope import Decision, decide
from pretrain.precision.settings import UNQUANTIZED, ActivePrecision, precision_called
from pretrain.settings.recipe import Recipe

if TYPE_CHECKING:
    from pretrain.plan.plan import Plan

BYTES = {"fp32": 4, "bf16": 2}
# Settings of which each takes less memory, most effective first where none is set yet.
TAKES_LESS = (
    "a smaller batch.microbatch, model.gradient_checkpointing=full, weights=bf16_exact, optimizer.moments=bf16, loss.chunk=1024, "
    "or shards over more devices (accelerate_configs/zero.yaml, less by fsdp2.yaml)"
)
# Libraries that allocate by themselves, and torch on a host, raise errors of other classes.
_OUT_OF_MEMORY = ("out of memory", "_ALLOC_FAILED", "can't allocate memory", "not enough memory")
# what a layer compiled in pieces, around low-precision products, keeps over what a whole one does:
# measured
IN_PIECES = 1.15


@dataclass(frozen=True)
class Devices:
    """What a run trains on: `count` equal devices, one a process. `name` and `memory` (bytes) are those of each."""

    count: int = 1
    sharded: bool = False  # parameters, gradients and moments are spread over all of them (FSDP2)
    name: str | None = None
    memory: int | None = None
    # sharded, with weights gathered once a step and gradients reduced once
    # (pretrain.model.sharding)
    gathered: bool = False
    replicas: int = 1  # where they are sharded, over the devices of one replica of so many (HSDP)
    capability: tuple[int, int] | None = None  # CUDA's, of each; None: counted as Hopper's

    @property
    def shards(self) -> int:
        """Devices over which one copy of the parameters is spread."""
        return self.count // self.replicas if self.sharded else 1


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one decoder layer on one device; the first three a token."""

    inputs: int  # what comes in: of a layer that is recomputed in backward, all that is kept
    kept: int  # for backward, what comes in among it
    workspace: int  # of its backward, at its fullest, beside what is kept
    # for forward and backward, kept from the first microbatch of a step to the last
    quantized_weights: int
    unquantized_weights: int  # in the compute dtype; copied where they are stored in FP32
    fused: bool  # then copies are kept for the whole step, whether it is recomputed or not
    # Of its experts' weights, the share that stays unquantized, by the reason for it.
    experts_left_out: Mapping[str, float] = field(default_factory=dict)
    # a token: queries, keys and values, where they may be kept beside what backward can make them
    # from
    rotated: int = 0


def memory_of(
    plan: Plan, precision: str, layers: Sequence[LayerMemory] | None, microbatch: int
) -> dict[str, int]:
    """Returns estimated bytes on each device of `plan` by part, at the peak of a step in `precision` while a `microbatch` of so
    many packs is in flight; empty parts left out. The CUDA context and the allocator's fragments (about 1 GiB) come on top.

    `layers`: of the plan's model, in order; None: all are compiled, none is fused.
    """
    recipe, flops, devices, loss = plan.recipe, plan.flops, plan.devices, plan.loss
    shape, products, tokens = (
        flops.shape,
        precision_called(precision),
        recipe.data.length * microbatch,
    )
    number, layouts = products.number_bytes, products.layouts_on(devices.capability)
    head, values = shape.vocabulary * shape.hidden, math.ceil(flops.parameters / devices.shards)
    low_head = products.quantized and recipe.fp8_config.scope != "linear"
    layers = layers or [compiled_layer(flops, products, layouts, {})] * shape.layers
    if plan.keeps_rotated:
        layers = [replace(layer, kept=layer.kept + layer.rotated) for layer in layers]
    again = [recipe.model.recomputes(index) for index in range(len(layers))]
    kept = [
        layer.inputs if recomputed else layer.kept
        for layer, recomputed in zip(layers, again, strict=True)
    ]

    # With shards, beside a device's own part: gathered weights, sums of their gradients, and sums being sent. If gathered for
    # each use, these are a layer, the next one and its copy, and the head in forward and backward.
    in_use = sums = on_their_way = 0
    if devices.sharded:
        layer = math.ceil((flops.parameters - head * (1 if flops.tied else 2)) / shape.layers)
        on_their_way = layer if flops.tied else max(layer, head)
        in_use = flops.parameters if devices.gathered else 3 * layer + head
        sums = flops.parameters if devices.gathered else on_their_way + (head if flops.tied else 0)

    # At the loss: the gradient of the head, its working copy, and a chunk's own gradient where products do not add that to the
    # sum; the last hidden states, the final norm's output and its gradient; and logits, which are overwritten with their
    # gradient. In FP8 that lies beside them in its layouts.
    copied = (
        recipe.weights == "fp32" and products.compute_dtype != "float32" and not devices.sharded
    )
    adds = low_head and loss.penalty is None and products.fuses_head_on(devices.capability)
    of_head = 4 + number * (copied and not low_head) + number * (low_head and not adds)
    logits = (
        (number + layouts * low_head)
        * shape.vocabulary
        * min(tokens, loss.tokens_at_once)
        * (loss.kind == "chunked")
    )
    at_the_loss = head * of_head + tokens * 3 * shape.hidden * number + logits
    kept_in_bf16 = 4 * sums if devices.gathered else values * BYTES[recipe.gradients_kept_in]
    in_backward = 4 * on_their_way + tokens * _backward(layers, kept)
    parts = {
        "parameters": values * (4 if recipe.weights == "fp32" else 2),
        "gathered weights": number * in_use,
        # one sum a parameter for the whole step
        "gradients": values * BYTES[recipe.gradients_kept_in] + 4 * sums,
        "gradients in BF16 for log.gap": kept_in_bf16
        if recipe.log.gap and products.quantized
        else 0,
        "optimizer moments": 2 * values * BYTES[recipe.moments_kept_in],
        "remainder bits": 2 * values * (recipe.weights == "bf16_exact"),
        "BF16 working copies": _working_copies(layers, again) if copied else 0,
        "quantized weights": sum(layer.quantized_weights for layer in layers)
        + layouts * head * low_head,
        "activations": tokens * sum(kept),
        "the loss" if at_the_loss >= in_backward else "a layer's backward": max(
            at_the_loss, in_backward
        ),
    }
    return {part: size for part, size in parts.items() if size}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or what it was raised from, says that a device or the host has no memory left."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
            sign in str(error) for sign in _OUT_OF_MEMORY
        ):
            return True
        error = error.__cause__ or error.__context__
    return False


def _backward(layers: Sequence[LayerMemory], kept: Sequence[int]) -> int:
    """The most bytes a token that the backward of a layer stands in beyond what all layers keep, which is `kept`. A layer that is
    recomputed is whole again while its backward runs; by then the layers behind it have given back theirs."""
    given_back, most = 0, 0
    for layer, size in zip(reversed(layers), reversed(kept), strict=True):
        most = max(most, layer.kept - size + layer.workspace - given_back)
        given_back += size
    return most


def _working_copies(layers: Sequence[LayerMemory], again: Sequence[bool]) -> int:
    """A fused layer keeps its copies for the whole step, another one while the graph of its forward lives."""
    passing = [
        layer.unquantized_weights
        for layer, recomputed in zip(layers, again, strict=True)
        if recomputed and not layer.fused
    ]
    return (
        sum(layer.unquantized_weights for layer in layers) - sum(passing) + max(passing, default=0)
    )


def layers_of(
    model: PreTrainedModel,
    flops: ModelFlops,
    recipe: Recipe,
    active: ActivePrecision,
    device_type: str,
    attention: str,
    capability: tuple[int, int] | None = None,
) -> list[LayerMemory]:
    """Returns what each decoder layer of `model`, on the meta device, takes of memory, in order: fused where a run with this
    packed `attention` would fuse it. `flops`: of `model`; `capability`: as `Devices` has it."""
    layers, dtype = decoder_layers(model), getattr(torch, active.precision.compute_dtype)
    # Fused layers normalise in a way of their own, so what the scope says of norms does not matter; to find it out takes weights.
    without_norms = replace(active, settings=active.settings.model_copy(update={"scope": "linear"}))
    decisions = (
        decide(model, list(layers.values()), without_norms, capability)
        if active.precision.quantized
        else {}
    )
    not_fused = not_fused_because(recipe.model.fused, active, device_type, dtype)
    layouts, others = (
        active.precision.layouts_on(capability),
        UNQUANTIZED[active.precision.compute_dtype],
    )
    left_out = _experts_left_out(model, decisions) if flops.choices else {}
    compiled = compiled_layer(flops, active.precision, layouts, left_out)
    result = []
    for name, layer in layers.items():
        reason, low = assess_layer(name, layer, decisions)
        if not_fused or reason:
            result.append(compiled)
            continue
        parts = Parts.of(layer)
        of_stacks = [
            active.precision if f"{name}.{next(iter(stack))}" in low else others
            for stack in parts.stacks
        ]
        result.append(fused_layer(parts, of_stacks, attention, layouts))
    return result


def fused_layer(
    parts: Parts, of_stacks: Sequence[Precision], attention: str, layouts: int
) -> LayerMemory:
    """A layer of these `parts` by its shapes. `of_stacks`: what its four products compute in: queries, keys and values; the
    attention's output; gate and up; down. `layouts`: held of a quantized operand that enters two products."""
    number, heads = of_stacks[0].number_bytes, parts.heads
    linears = [list(stack.values()) for stack in parts.stacks]
    sizes = [sum(linear.weight.numel() for linear in stack) for stack in linears]
    hidden, query, _, activated = (stack[0].in_features for stack in linears)
    inside = sizes[2] // hidden  # gate and up together
    operands = [
        precision.operand_bytes if precision.quantized else number for precision in of_stacks
    ]

    kept = 2 * number * hidden + sum(operand * hidden + 4 for operand in (operands[0], operands[2]))
    kept += (
        number * (heads.width + query)
        + 4 * heads.query
        + operands[1] * query * of_stacks[1].quantized
    )
    # a norm keeps what came in and attention what came out
    if attention != ROTATED_ATTENTION and parts.head_norms:
        kept += number * heads.width
    kept += number * inside
    if of_stacks[3].quantized and (
        of_stacks[3].block_scaled or of_stacks[3].plain_forward or not of_stacks[2].quantized
    ):
        kept += operands[3] * activated
    quantized = zip(of_stacks, operands, sizes, strict=True)
    of_weights = (
        layouts * (each.weight_bytes or operand) * size
        for each, operand, size in quantized
        if each.quantized
    )
    unquantized = (size for each, size in zip(of_stacks, sizes, strict=True) if not each.quantized)
    return LayerMemory(
        inputs=number * hidden,
        kept=round(kept),
        # the gradients of the MLP, which makes most of all
        workspace=number * (hidden + inside + activated),
        quantized_weights=round(sum(of_weights)),
        unquantized_weights=number * sum(unquantized),
        fused=True,
        rotated=number * heads.width if parts.head_norms and attention == ROTATED_ATTENTION else 0,
    )


def _experts_left_out(
    model: PreTrainedModel, decisions: Mapping[str, Decision]
) -> dict[str, float]:
    """Of the weights of all stacked experts of `model` the share that stays unquantized, by the reason for it."""
    stacks = {
        f"{name}.{key}": getattr(each, key).numel()
        for name, each in stacked_experts(model)
        for key in STACKS
    }
    shares: dict[str, float] = defaultdict(float)
    for name, size in stacks.items():
        if name in decisions and (reason := decisions[name].reason):
            shares[reason] += size / sum(stacks.values())
    return shares if stacks else {"they are not stacked as most are": 1.0}


def compiled_layer(
    flops: ModelFlops, precision: Precision, layouts: int, experts_left_out: Mapping[str, float]
) -> LayerMemory:
    """A mean layer of the model that `flops` counts; `layouts`: held of a quantized weight."""
    shape, number = flops.shape, precision.number_bytes
    linears = (flops.attention_weights + flops.mlp_weights) // shape.layers
    rotated = shape.query_width + shape.kv_heads * shape.head_dim
    experts, idle = flops.expert_weights // shape.layers, flops.idle_weights // shape.layers
    # Experts keep what comes in once for each choice of a token, and what comes out, which its weight is multiplied with.
    values = (
        4 * shape.hidden
        + (linears + experts) // shape.hidden
        + rotated
        + 2 * flops.choices * shape.hidden
    )
    kept = int(values * number * (IN_PIECES if precision.quantized else 1))
    return LayerMemory(
        inputs=shape.hidden * number,
        kept=kept,
        workspace=kept,  # the gradients of what it keeps
        quantized_weights=layouts
        * round(linears + (experts + idle) * (1 - sum(experts_left_out.values()))),
        unquantized_weights=number * (linears + experts + idle),
        fused=False,
        experts_left_out=experts_left_out,
    )


@contextmanager
def explaining_errors() -> Iterator[None]:
    """InputError with the settings that take less where a device, or the host, runs out of memory inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"out of memory: {one_line(error)}. What takes less: {TAKES_LESS}; `--plan` says how much. Checkpoints are "
            "untouched: the same command with one of these goes on, with --accept-changes where `weights` or `optimizer` differ"
        ) from None
