"""How much memory training will take on one device: exact where shapes decide it, an estimate where a compiler does.

Two needs come on top of what is there all the time, and the larger of them makes the peak: what the loss takes while every
layer's activations are kept, or what the backward of one layer takes, when the layers behind it have given theirs back.

A fused layer keeps for backward what the nodes of `pretrain.model.fused.layers` save. Numbers a token:

    2 · hidden               in the compute dtype      the layer's input, and the attention's residual sum
    2 · hidden               as operands               the outputs of the two norms; their statistics, 4 bytes each, beside
    query + 2 · KV widths    in the compute dtype      queries, keys and values, before or after rotation; where heads are
                                                       normed and memory allows (pretrain.plan.spare), both
    query width              in the compute dtype      the attention's output; 4 bytes a head of statistics beside
    query width              as operand                the same for its product; in BF16 the two are one
    gate and up widths       in the compute dtype      the activation's inputs; backward computes its output again

An operand is what the gradient of a weight is multiplied from: the compute dtype, or a byte a number in FP8, with the scales of
its blocks. A compiled layer keeps what the compiler decides not to compute again. That is about this, in the compute dtype:

    4 · hidden                        the layer's input, the attention's residual sum, and the outputs of the two norms
    in · out / hidden, every matrix   queries, keys, values and the attention's output; gate, up and their product
    query and key widths              once more, after normalisation and rotation

Around low-precision products a layer is compiled in pieces, which keep some of what a whole layer would compute again. On one
H200, with Qwen3-1.7B's shape, the estimate of fused layers is within 0.2 % of the peaks (2.4 % with the head in FP8), that of
compiled layers within 1 %, in pieces within 5 % (benchmarks/results/h200_bf16.json, h200_low_precision.json, h200_emulated.json).
On four, DDP and shards are within 3 % (h200_x4_*.json), of 8 B and 14 B models too.

Not counted: workspaces (a tenth of a GiB) but that of searched products, the FP32 sum that a search for a weight's gradient tries
algorithms into, once and only where there is room, what NCCL takes, one layer's stacked gradients under FSDP2, and the mask of
`sdpa` attention in layers that are not fused. So `batch.microbatch: auto` only begins where this estimate says, and tries on the
device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from pretrain.metrics.flops import ModelFlops
from pretrain.model.fused.layers import ROTATED_ATTENTION, Parts, assess_layer
from pretrain.model.fused.stacked import StackedWeight
from pretrain.model.huggingface import decoder_layers
from pretrain.model.wrapping import not_fused_because
from pretrain.precision.delayed_state import SLOTS
from pretrain.precision.emulation import operand_dtype_of
from pretrain.precision.formats.definition import Precision
from pretrain.precision.scope import decide
from pretrain.precision.searched import WORKSPACE
from pretrain.precision.settings import PRECISIONS, UNQUANTIZED, ActivePrecision
from pretrain.settings.recipe import Recipe

# `microbatch_candidates` starts where this share of the estimate fits: too large costs one trial, too small costs speed.
OPTIMISM = 0.8
_BYTES = {"fp32": 4, "bf16": 2}
# What a compiled layer in pieces keeps for backward, over what a whole one does: measured.
IN_PIECES = 1.15


@dataclass(frozen=True)
class Devices:
    """What a run trains on: `count` equal devices, one a process. `name` and `memory` (bytes) are those of each."""

    count: int = 1
    sharded: bool = False  # parameters, gradients and moments are spread over all of them (FSDP2)
    name: str | None = None
    memory: int | None = None
    gathered: bool = False  # sharded, with weights gathered once a step and gradients reduced once (pretrain.model.sharding)
    replicas: int = 1  # where they are sharded, over the devices of one replica of so many (HSDP)
    capability: tuple[int, int] | None = None  # CUDA's, of each; None: counted as Hopper's

    @property
    def shards(self) -> int:
        """Devices over which one copy of the parameters is spread."""
        return self.count // self.replicas if self.sharded else 1


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device. What ends in `_by_pack` is for each pack of a microbatch."""

    parameters: int
    gathered_weights: int  # of shards, in the compute dtype: all of them, or the groups in use
    gradients: int  # one sum a parameter for the whole step, which is also what ranks exchange; of shards, their parts of it too
    moments: int  # AdamW's two; unless the recipe says, BF16 where the parameters are plain BF16, else FP32
    remainders: int  # the 16 bits beside each BF16 parameter of `weights: bf16_exact`
    working_copies: int  # of the layers' FP32 weights in BF16, for forward and backward
    quantized_weights: int  # of low-precision linears, for forward and backward; made once a step, kept between microbatches
    activations_by_pack: int  # what all layers keep
    loss: int  # the head's gradient, summed over chunks in FP32, and its working copy
    loss_by_pack: int  # the last hidden states, the final norm's output and its gradient
    logits_by_pack: int  # the loss's buffers, were all logits held at once
    logits_at_most: int | None  # the same for one chunk; None: not chunked
    backward: int  # of shards, a group's sums on their way
    backward_by_pack: int  # of a layer: its gradients, and where it is recomputed what it had not kept
    workspace: int  # of the products whose algorithms may be searched (pretrain.precision.searched)
    histories: int = 0  # the largest values of past microbatches, of which delayed scaling makes its scales

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        flops: ModelFlops,
        precision: str,
        devices: Devices,
        layers: Sequence[LayerMemory] | None = None,
        *,
        keeps_rotated: bool = False,
    ) -> MemoryEstimate:
        """The estimate for `recipe` in `precision` on each of `devices`. `layers`: of the model that `flops` counts, in order;
        None: all are compiled, none is fused. `keeps_rotated`: what they can keep besides, they do."""
        length, shape, products = recipe.data.length, flops.shape, PRECISIONS[precision]
        computed = products.number_bytes
        values = math.ceil(flops.parameters / devices.shards)  # parameters that a device has
        layouts = products.layouts_on(devices.capability)
        layers = layers or [compiled_layer(flops, products, recipe.weights, layouts)] * shape.layers
        if keeps_rotated:
            layers = [dataclasses.replace(layer, kept=layer.kept + layer.rotated) for layer in layers]
        again = [recipe.model.recomputes(index) for index in range(len(layers))]
        kept = [layer.inputs if recomputed else layer.kept for layer, recomputed in zip(layers, again, strict=True)]
        head = shape.vocabulary * shape.hidden
        quantized_head = layouts * head if _head_is_quantized(recipe, products) else 0
        logits = shape.vocabulary * _logit(recipe, products, layouts)
        shards = _shards(flops, computed, gathered=devices.gathered) if devices.sharded else _Shards(0, 0, 0)
        searches = devices.name != "CPU" and not recipe.deterministic and products.compute_dtype == "bfloat16"
        return cls(
            parameters=values * (4 if recipe.weights == "fp32" else 2),
            gathered_weights=shards.in_use,
            gradients=values * _BYTES[recipe.gradients_kept_in] + shards.sums,
            moments=2 * values * _BYTES[recipe.moments_kept_in],
            remainders=2 * values if recipe.weights == "bf16_exact" else 0,
            working_copies=0 if devices.sharded else _working_copies(layers, again),  # what is gathered is in the compute dtype
            quantized_weights=sum(layer.quantized_weights for layer in layers) + quantized_head,
            activations_by_pack=length * sum(kept),
            loss=head * _head_at_the_loss(recipe, products, devices),
            loss_by_pack=length * 3 * shape.hidden * computed,
            logits_by_pack=length * logits,
            logits_at_most=recipe.loss.tokens_at_once * logits if recipe.loss.kind == "chunked" else None,
            backward=shards.on_their_way,
            backward_by_pack=length * _backward(layers, kept),
            workspace=WORKSPACE if searches else 0,
            histories=_histories(recipe, flops, products),
        )

    def parts(self, microbatch: int) -> dict[str, int]:
        """Bytes by part at the peak, while a microbatch of that many packs is in flight; empty parts left out."""
        logits = self.logits_by_pack * microbatch
        at_the_loss = self.loss + self.loss_by_pack * microbatch
        at_the_loss += logits if self.logits_at_most is None else min(logits, self.logits_at_most)
        in_backward = self.backward + self.backward_by_pack * microbatch
        parts = {
            "parameters": self.parameters,
            "gathered weights": self.gathered_weights,
            "gradients": self.gradients,
            "optimizer moments": self.moments,
            "remainder bits": self.remainders,
            "BF16 working copies": self.working_copies,
            "quantized weights": self.quantized_weights,
            "activations": self.activations_by_pack * microbatch,
            "the loss": at_the_loss if at_the_loss >= in_backward else 0,
            "a layer's backward": in_backward if in_backward > at_the_loss else 0,
            "products' workspace": self.workspace,
            "amax histories": self.histories,
        }
        return {name: size for name, size in parts.items() if size}

    def total(self, microbatch: int) -> int:
        """Estimated peak in bytes; the CUDA context and the allocator's fragments (about 1 GiB) come on top."""
        return sum(self.parts(microbatch).values())


def microbatch_candidates(
    sizes: Sequence[int], estimate: MemoryEstimate, device_memory: int | None, share: float = OPTIMISM
) -> list[int]:
    """Returns those of `sizes` (packs at once, ascending) that are worth trying, largest first: 1, and those for which `share` of
    the estimate fits into `device_memory` (bytes; None: any)."""
    limit = math.inf if device_memory is None else device_memory
    return [size for size in sizes[::-1] if size == 1 or share * estimate.total(size) <= limit]


def _histories(recipe: Recipe, flops: ModelFlops, products: Precision) -> int:
    """Bytes of `fp8_config.amax_history_len` values for each tensor of each product, as if none were left out."""
    if not (products.quantized and products.keeps_history):
        return 0
    linears = sum(matrix.part != "head" for matrix in flops.matrices) + _head_is_quantized(recipe, products)
    return 4 * recipe.fp8_config.resolved(products.name).amax_history_len * linears * sum(map(len, SLOTS.values()))


def _head_is_quantized(recipe: Recipe, products: Precision) -> bool:
    return products.quantized and recipe.fp8_config.scope != "linear"


def _head_at_the_loss(recipe: Recipe, products: Precision, devices: Devices) -> int:
    """Bytes for each of the head's weights while the loss is computed: its gradient, its working copy, and a chunk's own gradient
    unless products add that to the sum (pretrain.model.loss.fp8_head), as they do on no Blackwell."""
    chunked, quantized = recipe.loss.kind == "chunked", _head_is_quantized(recipe, products)
    found = 4 if chunked else products.number_bytes
    if _weights_are_cast(recipe.weights, products) and not quantized and not devices.sharded:
        found += products.number_bytes
    if quantized and chunked and (recipe.loss.penalty is not None or not products.fuses_head_on(devices.capability)):
        found += products.number_bytes
    return found


def _logit(recipe: Recipe, products: Precision, layouts: int) -> int:
    """Bytes for each logit that is held."""
    if recipe.loss.kind == "cce":
        return 0
    if recipe.loss.kind == "chunked":  # overwritten with its gradient, or beside it that as an FP8 operand in its layouts
        return products.number_bytes + (layouts if _head_is_quantized(recipe, products) else 0)
    # The reference keeps the product, the softmax and its gradient, the last two in FP32, and a second time for a penalty.
    return products.number_bytes + (8 if recipe.loss.penalty is None else 16)


class _Shards(NamedTuple):
    """Bytes that a device needs beside its own part of a sharded model."""

    in_use: int  # weights that are gathered
    sums: int  # of gradients, of what is gathered
    on_their_way: int  # of sums, in the backward of a group


def _shards(flops: ModelFlops, computed: int, *, gathered: bool) -> _Shards:
    """`computed`: bytes of a number that is gathered. Weights are for a step if `gathered`, else for each use: then they are a
    layer, the next one and its copy on the way, and the head from its forward to its backward."""
    head = flops.shape.vocabulary * flops.shape.hidden
    group = math.ceil((flops.parameters - head * (1 if flops.tied else 2)) / flops.shape.layers)
    largest = group if flops.tied else max(group, head)
    in_use = flops.parameters if gathered else 3 * group + head
    summed = flops.parameters if gathered else largest + (head if flops.tied else 0)
    return _Shards(computed * in_use, 4 * summed, 4 * largest)


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
    passing = [not layer.fused and recomputed for layer, recomputed in zip(layers, again, strict=True)]
    kept = sum(layer.working_copies for layer, gone in zip(layers, passing, strict=True) if not gone)
    return kept + max((layer.working_copies for layer, gone in zip(layers, passing, strict=True) if gone), default=0)


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one decoder layer on one device; the first three a token."""

    inputs: int  # what comes in: of a layer that is recomputed in backward, all that is kept
    kept: int  # for backward, what comes in among it
    workspace: int  # of its backward, at its fullest, beside what is kept
    quantized_weights: int  # for forward and backward, kept from the first microbatch of a step to the last
    working_copies: int  # in BF16, of FP32 weights
    fused: bool  # then its working copies are kept as its quantized weights are, whether it is recomputed or not
    rotated: int = 0  # a token: queries, keys and values, where they may be kept beside what backward can make them from


def layers_of(
    model: PreTrainedModel,
    recipe: Recipe,
    active: ActivePrecision,
    device_type: str,
    attention: str,
    capability: tuple[int, int] | None = None,
) -> list[LayerMemory]:
    """Returns what each decoder layer of `model`, on the meta device, takes of memory, in order: fused where a run with this
    packed `attention` would fuse it. `capability`: as `Devices` has it."""
    layers, dtype = decoder_layers(model), getattr(torch, active.precision.compute_dtype)
    # Fused layers normalise in a way of their own, so what the scope says of norms does not matter; to find it out takes weights.
    without_norms = dataclasses.replace(active, settings=active.settings.model_copy(update={"scope": "linear"}))
    decisions = decide(model, list(layers.values()), without_norms) if active.precision.quantized else {}
    off = not_fused_because(recipe.model.fused, active, device_type, dtype)
    layouts = active.precision.layouts_on(capability)
    held = _emulated_weight(active, device_type) if active.backend == "emulation" else layouts
    compiled = compiled_layer(ModelFlops.of(model), active.precision, recipe.weights, held)
    left_out = UNQUANTIZED[active.precision.compute_dtype]
    found = []
    for name, layer in layers.items():
        reason, low = assess_layer(name, layer, decisions)
        if off or reason:
            found.append(compiled)
            continue
        parts = Parts.of(layer)
        of_stacks = [active.precision if f"{name}.{next(iter(stack))}" in low else left_out for stack in parts.stacks]
        found.append(fused_layer(parts, of_stacks, recipe, device_type, attention, layouts))
    return found


def fused_layer(
    parts: Parts, of_stacks: Sequence[Precision], recipe: Recipe, device_type: str, attention: str, layouts: int
) -> LayerMemory:
    """A layer of these `parts` by its shapes; `of_stacks`: what its four products compute in, on `device_type` in packed
    `attention`: queries, keys and values; the attention's output; gate and up; down. `layouts`: held of a quantized operand that
    enters two products."""
    number = of_stacks[0].number_bytes
    stacks = [StackedWeight(list(each.values())) for each in parts.stacks]
    qkv, output, below, above = stacks
    weights = [sum(weight.numel() for weight in stack.weights) for stack in stacks]
    operands = [precision.operand_bytes if precision.quantized else number for precision in of_stacks]
    statistics = 4  # of a norm: FP32, one a token
    kept = 2 * number * qkv.in_features + number * below.out_features
    kept += sum(operand * qkv.in_features + statistics for operand in (operands[0], operands[2]))
    kept += _attention(parts, number, attention, recipe.data.length)
    kept += operands[1] * output.in_features if of_stacks[1].quantized else 0
    widths = below.in_features, below.out_features, above.in_features
    activated, workspace = _mlp_backward(of_stacks[2], of_stacks[3], device_type, layouts, *widths)
    quantized_weights = working_copies = 0.0
    for precision, operand, of_stack in zip(of_stacks, operands, weights, strict=True):
        if precision.quantized:
            quantized_weights += layouts * (precision.weight_bytes or operand) * of_stack
        elif _weights_are_cast(recipe.weights, precision):
            working_copies += number * of_stack
    return LayerMemory(
        inputs=number * qkv.in_features,
        kept=round(kept + activated),
        workspace=round(workspace),
        quantized_weights=round(quantized_weights),
        working_copies=round(working_copies),
        fused=True,
        rotated=number * parts.heads.width if parts.head_norms and attention in ROTATED_ATTENTION else 0,
    )


def _mlp_backward(
    below: Precision, above: Precision, device_type: str, layouts: int, hidden: int, inside: int, activated: int
) -> tuple[float, float]:
    """Bytes a token of the activated values that are kept for it, and of what it makes by the time that it holds most of all.

    That is where the gradient of `inside`, of the gate and up widths together, is made: from that of the `activated` values,
    which was made from that of the layer's output. The attention's backward comes when what the MLP kept is free again. `below`,
    `above`: what the products below and above the activation compute in.
    """
    number = above.number_bytes
    made = number * hidden + number * activated
    if device_type == "cpu":  # plain torch: the formula's steps one by one, in FP32
        return 0, made + number * (inside + activated) + 4 * 4 * inside
    made += layouts * above.operand_bytes * hidden if above.quantized else 0
    made += layouts * below.operand_bytes * inside if below.quantized else 0
    if not above.quantized:
        return 0, made + number * (inside + activated)
    operand = above.operand_bytes
    if above.activates_again and below.quantized:
        return 0, made + operand * activated
    return operand * activated, made + (0 if below.quantized else number * inside)


def _emulated_weight(active: ActivePrecision, device_type: str) -> int:
    """Bytes that the emulation holds of a quantized weight: an operand, or two where one does not serve both products."""
    number = operand_dtype_of(active, device_type).itemsize
    return number if active.precision.serves_both(active.settings, "weight") else 2 * number


def compiled_layer(flops: ModelFlops, precision: Precision, weights: str, held: int) -> LayerMemory:
    """A mean layer of the model that `flops` counts; `weights`: as a recipe says it; `held`: bytes of a quantized weight."""
    shape, number = flops.shape, precision.number_bytes
    linears = sum(matrix.inputs * matrix.outputs for matrix in flops.matrices if matrix.part != "head") // shape.layers
    rotated = shape.query_width + shape.kv_heads * shape.head_dim
    kept = int((4 * shape.hidden + linears // shape.hidden + rotated) * number * (IN_PIECES if precision.quantized else 1))
    return LayerMemory(
        inputs=shape.hidden * number,
        kept=kept,
        workspace=kept,  # the gradients of what it keeps
        quantized_weights=held * linears,
        working_copies=number * linears if _weights_are_cast(weights, precision) else 0,
        fused=False,
    )


def _attention(parts: Parts, number: int, backend: str, length: int) -> int:
    """Bytes a token that the rotation and the attention keep, the attention's output included."""
    heads = parts.heads
    query, width = heads.query * heads.dim, heads.width
    result = number * query + 4 * heads.query
    if backend in ROTATED_ATTENTION:  # one of queries and keys and what they are made from is enough
        return result + number * width
    # A norm keeps what came in and the attention what came out; a rotation alone keeps neither.
    result += number * width if parts.head_norms else 0
    if backend == "packed_sdpa":  # KV heads as many as queries', and the mask in the compute dtype
        return result + number * (3 * query + length)
    if backend == "packed_documents":
        return result + number * 3 * query
    return result + number * width


def _weights_are_cast(weights: str, precision: Precision) -> bool:
    return weights == "fp32" and precision.compute_dtype != "float32"
