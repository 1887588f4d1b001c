"""What one decoder layer takes of a device's memory: known for a fused layer, estimated for a compiled one.

A fused layer keeps for backward what its autograd nodes save (pretrain.model.fused.functions), so many numbers a token:

    2 · hidden               in the compute dtype      the layer's input, and the attention's residual sum
    2 · hidden               as operands               what the two norms make of them; their statistics, 4 bytes each, beside
    query + 2 · KV widths    in the compute dtype      queries, keys and values as their product left them, or turned
    query width              in the compute dtype      the attention's output; 4 bytes a head of statistics beside
    query width              as operand                the same for its product; in BF16 the two are one
    gate and up widths       in the compute dtype      what they activate is made again in backward, and not kept

An operand is what the weight's gradient will be multiplied from: the compute dtype, or a byte a number in FP8, transposed, with
the scales of blocks. For Qwen3-1.7B that makes 53,320 bytes a token and layer in BF16, and 51,272 in FP8.

A compiled layer keeps what the compiler decides not to compute again, about this, in the compute dtype:

    4 · hidden                        the layer's input, the attention's residual sum, and what the two norms make of them
    in · out / hidden, every matrix   queries, keys, values and the attention's output; gate, up and their product
    query and key widths              once more, after normalisation and rotation

71,680 bytes for the same model. Around low-precision products a layer is compiled in pieces, which keep what a whole layer would
compute again. Layers that are neither fused nor compiled keep FP32 intermediates of their norms as well and take more.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from pretrain.metrics.flops import ModelFlops
from pretrain.model.conversion import decide
from pretrain.model.fused.choice import not_fused_because
from pretrain.model.fused.fuse import verdict
from pretrain.model.fused.layers import Parts, parts_of
from pretrain.model.fused.weights import StackedWeight
from pretrain.model.huggingface import decoder_layers
from pretrain.precision.definition import Precision
from pretrain.precision.registry import UNQUANTIZED
from pretrain.precision.selection import ActivePrecision
from pretrain.settings.recipe import Recipe

# What a compiled layer in pieces keeps for backward, over what a whole one does: measured, see pretrain.plan.memory.
IN_PIECES = 1.15


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one decoder layer on one device; the first three a token."""

    inputs: int  # what comes in: of a layer that is recomputed in backward, all that is kept
    kept: int  # for backward, what comes in among it
    workspace: int  # of its backward, at its fullest, beside what is kept
    quantized_weights: int  # for forward and backward, kept from the first microbatch of a step to the last
    working_copies: int  # in BF16, of FP32 weights
    fused: bool  # then its working copies are kept as its quantized weights are, whether it is recomputed or not


def layers_of(
    model: PreTrainedModel, recipe: Recipe, active: ActivePrecision, device_type: str, attention: str
) -> list[LayerMemory]:
    """Of each decoder layer of `model`, on the meta device, in order: fused where a run would fuse it.

    `attention`: the packed backend's name.
    """
    layers, dtype = decoder_layers(model), getattr(torch, active.precision.compute_dtype)
    # Fused layers normalise in a way of their own, so what the scope says of norms does not matter; to find it out takes weights.
    settings = active.settings.model_copy(update={"scope": "linear"})
    decisions = {}
    if active.precision.quantized:
        decisions = decide(model, list(layers.values()), dataclasses.replace(active, settings=settings))
    off = not_fused_because(recipe.model.fused, active, device_type, dtype)
    compiled = compiled_layer(ModelFlops.of(model), active.precision, recipe.weights)
    left_out = UNQUANTIZED[active.precision.compute_dtype]
    found = []
    for name, layer in layers.items():
        reason, low_precision = verdict(name, layer, decisions)
        precision = active.precision if low_precision else left_out
        is_fused = not (off or reason)
        found.append(fused_layer(layer, precision, recipe, device_type, attention) if is_fused else compiled)
    return found


def fused_layer(layer: nn.Module, precision: Precision, recipe: Recipe, device_type: str, attention: str) -> LayerMemory:
    """`layer` by its shapes; `precision`: what its products compute in, on `device_type` in packed `attention`."""
    parts, number, quantized = parts_of(layer), precision.number_bytes, precision.quantized
    stacks = [StackedWeight(list(each.values())) for each in (parts.qkv, parts.output, parts.below, parts.above)]
    qkv, output, below, above = stacks
    weights = sum(weight.numel() for stack in stacks for weight in stack.weights)
    operand = precision.operand_bytes if quantized else number
    statistics = 4 if parts.attention_norm.kind == "rms" else 8
    kept = 2 * number * qkv.in_features + 2 * (operand * qkv.in_features + statistics) + number * below.out_features
    kept += _attention(parts, number, attention, recipe.data.length) + (operand * output.in_features if quantized else 0)
    activated, workspace = _mlp_backward(parts, precision, device_type, below.in_features, below.out_features, above.in_features)
    return LayerMemory(
        inputs=number * qkv.in_features,
        kept=round(kept + activated),
        workspace=round(workspace),
        quantized_weights=round(2 * (precision.weight_bytes or operand) * weights) if quantized else 0,
        working_copies=number * weights if _weights_are_cast(recipe.weights, precision) and not quantized else 0,
        fused=True,
    )


def _mlp_backward(
    parts: Parts, precision: Precision, device_type: str, hidden: int, inside: int, activated: int
) -> tuple[float, float]:
    """Bytes a token of the activated values that are kept for it, and of what it makes by the time that it holds most of all.

    That is where the gradient of `inside`, of the gate and up widths together, is made: from that of the `activated` values,
    which was made from that of the layer's output. The attention's backward comes when what the MLP kept is free again.
    """
    number = precision.number_bytes
    made = number * hidden + number * activated
    if device_type == "cpu":  # plain torch: the formula's steps one by one, in FP32
        return 0, made + number * (inside + activated) + 4 * 4 * inside
    gated = parts.activation == "swiglu"
    if not precision.quantized:
        return (0, made + number * (inside + activated)) if gated else (number * activated, made + number * inside)
    operand = precision.operand_bytes
    made += 2 * operand * (hidden + inside)
    if gated and precision.activates_again:
        return 0, made + operand * activated
    return operand * activated, made + (0 if gated else number * inside)


def compiled_layer(flops: ModelFlops, precision: Precision, weights: str) -> LayerMemory:
    """A mean layer of the model that `flops` counts; `weights`: as a recipe says it."""
    shape, number, quantized = flops.shape, precision.number_bytes, precision.quantized
    linears = sum(matrix.inputs * matrix.outputs for matrix in flops.matrices if matrix.part != "head") // shape.layers
    rotated = shape.query_width + shape.kv_heads * shape.head_dim
    kept = int((4 * shape.hidden + linears // shape.hidden + rotated) * number * (IN_PIECES if quantized else 1))
    return LayerMemory(
        inputs=shape.hidden * number,
        kept=kept,
        workspace=kept,  # the gradients of what it keeps
        quantized_weights=2 * linears if quantized else 0,
        working_copies=number * linears if _weights_are_cast(weights, precision) else 0,
        fused=False,
    )


def _attention(parts: Parts, number: int, backend: str, length: int) -> int:
    """Bytes a token that the rotation and the attention keep, the attention's output included."""
    heads = parts.heads
    query, width = heads.query * heads.dim, heads.width
    result = number * query + 4 * heads.query
    if backend == "packed_cudnn" and parts.rotary:  # makes queries and keys again where heads are normed
        return result + number * width
    # A norm keeps what came in and the attention what came out; a rotation alone keeps neither.
    result += number * width if parts.head_norms else 0
    if backend == "packed_sdpa":  # KV heads as many as queries', and the mask in the compute dtype
        return result + number * (3 * query + length)
    return result + number * width


def _weights_are_cast(weights: str, precision: Precision) -> bool:
    return weights == "fp32" and precision.compute_dtype != "float32"
