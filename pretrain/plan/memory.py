"""Estimate the memory of one device, exactly for fused layers, approximately for compiled ones.

The peak is either at the loss, while the activations of all layers are kept, or in the backward of
one layer, after the layers behind it have freed theirs. The larger one counts.

A fused layer keeps for backward what the nodes of `pretrain.model.fused.layers` save. Numbers for
each token:

    2 · hidden               in the compute dtype      the layer's input, and the attention's
                                                       residual sum
    2 · hidden               as operands               the outputs of the two norms, and 4 bytes
                                                       each of statistics
    query + 2 · KV widths    in the compute dtype      queries, keys and values, before or after
                                                       rotation. Both if heads are normed and
                                                       memory allows (pretrain.plan.plan)
    query width              in the compute dtype      the attention's output, and 4 bytes a head
                                                       of statistics
    query width              as operand                the same for its product. In BF16 the two
                                                       are one
    gate and up widths       in the compute dtype      the activation's inputs. Backward computes
                                                       its output again

An operand is the tensor that the gradient of a weight is multiplied from. It has the compute dtype,
or one byte a number in FP8 with the scales of its blocks. The compiler decides which activations a
compiled layer keeps. These are about, in the compute dtype:

    4 · hidden                        the layer's input, the attention's residual sum, and the
                                      outputs of the two norms
    in · out / hidden, every matrix   queries, keys, values and the attention's output; gate, up
                                      and their product
    query and key widths              once more, after normalisation and rotation

On one H200 with Qwen3-1.7B's shape, and on four with 8 B and 14 B models, the estimate is within
5 % of the measured peaks (tests/pretrain/plan/test_memory.py). It does not count workspaces,
histories of delayed scaling, buffers of NCCL, and the mask of `sdpa` attention. So
`batch.microbatch: auto` starts with this estimate and then tries on the device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from pretrain.metrics.flops import ModelFlops
from pretrain.model.fused.layers import ROTATED_ATTENTION, Parts, assess_layer
from pretrain.model.huggingface import decoder_layers
from pretrain.model.wrapping import not_fused_because
from pretrain.precision.formats.definition import Precision, QuantizedPrecision
from pretrain.precision.grouped import STACKS, stacked_experts
from pretrain.precision.scope import Decision, decide
from pretrain.precision.settings import UNQUANTIZED, ActivePrecision
from pretrain.settings.recipe import LossSettings, ModelSettings, Recipe

BYTES = {"fp32": 4, "bf16": 2}
# Settings that take less memory, the most effective first if none is set yet.
TAKES_LESS = (
    "a smaller batch.microbatch, model.gradient_checkpointing=full, weights=bf16_exact, "
    "optimizer.moments=bf16, loss.chunk=1024, or shards over more devices "
    "(accelerate_configs/zero.yaml, less by fsdp2.yaml)"
)
# Activations of a layer that is compiled in pieces around low-precision products, relative to one
# that is compiled as a whole. Measured.
IN_PIECES = 1.15


@dataclass(frozen=True)
class Devices:
    """The devices of a run: `count` equal ones, one for each process."""

    count: int = 1
    sharded: bool = False  # FSDP2: parameters, gradients and moments are spread over the devices
    name: str | None = None
    memory: int | None = None  # bytes of one device
    # Weights are gathered and gradients reduced once a step (pretrain.model.sharding).
    gathered: bool = False
    replicas: int = 1  # number of sharded copies of the model (HSDP)
    capability: tuple[int, int] | None = None  # CUDA's; None counts as Hopper's

    @property
    def shards(self) -> int:
        """Return the number of devices over which one copy of the parameters is spread."""
        return self.count // self.replicas if self.sharded else 1


@dataclass(frozen=True)
class LayerMemory:
    """Bytes that one decoder layer takes on one device. Activations are bytes a token."""

    inputs: int  # activation: the layer's input, all that a recomputed layer keeps
    kept: int  # activations kept for backward, the input among them
    workspace: int  # largest workspace of the backward beside the kept activations
    # Kept for forward and backward from the first microbatch of a step to the last.
    quantized_weights: int
    unquantized_weights: int  # in the compute dtype; copies if weights are stored in FP32
    # A fused layer keeps weight copies for the whole step, whether it is recomputed or not.
    fused: bool
    # Share of the experts' weights that stays unquantized, by reason.
    experts_left_out: Mapping[str, float] = field(default_factory=dict)
    # Activations: queries, keys and values after rotation, if they are kept beside the ones before.
    rotated: int = 0
    recomputed: bool = False


def step_memory(
    recipe: Recipe,
    flops: ModelFlops,
    devices: Devices,
    precision: Precision,
    layers: Sequence[LayerMemory],
    microbatch: int,
    loss: LossSettings,
    *,
    keeps_rotated: bool,
) -> dict[str, int]:
    """Return the bytes of one device at the peak of a step by part, without empty parts.

    The CUDA context and fragments of the allocator (about 1 GiB) come on top.

    layers: in order; empty if all layers are compiled and none is fused.
    microbatch: packs that the device computes at once.
    loss: of the recipe, with the chunk that was chosen.
    keeps_rotated: whether layers keep `LayerMemory.rotated` too.
    """
    number = precision.number_bytes
    layouts = precision.layouts_on(devices.capability)
    tokens = recipe.data.length * microbatch
    values = math.ceil(flops.parameters / devices.shards)
    head = flops.shape.vocabulary * flops.shape.hidden
    low_head = precision.quantized and recipe.fp8_config.scope != "linear"
    # BF16 working copies of FP32 weights. Shards get theirs by gathering.
    has_copies = recipe.weights == "fp32" and number == 2 and not devices.sharded
    compiled = compiled_layer(flops, precision, layouts, {})
    layers = _as_recomputed(
        layers or [compiled] * flops.shape.layers, recipe.model, keeps_rotated=keeps_rotated
    )
    gathered, sums, sent = _in_shards(flops, devices, head)
    gradients = values * BYTES[recipe.gradients_kept_in]
    gap_gradients = 4 * sums if devices.gathered else gradients
    parts = {
        "parameters": values * (4 if recipe.weights == "fp32" else 2),
        "gathered weights": number * gathered,
        "gradients": gradients + 4 * sums,
        "gradients in BF16 for log.gap": gap_gradients
        * bool(recipe.log.gap and precision.quantized),
        "optimizer moments": 2 * values * BYTES[recipe.moments_kept_in],
        "remainder bits": 2 * values * (recipe.weights == "bf16_exact"),
        "BF16 working copies": _working_copies(layers) * has_copies,
        "quantized weights": sum(layer.quantized_weights for layer in layers)
        + layouts * head * low_head,
        "activations": tokens * sum(layer.kept for layer in layers),
    }
    in_backward = 4 * sent + tokens * _largest_backward(layers)
    at_loss = _at_loss(flops, devices, precision, loss, tokens, low_head, has_copies)
    parts["the loss" if at_loss >= in_backward else "a layer's backward"] = max(
        at_loss, in_backward
    )
    return {part: size for part, size in parts.items() if size}


def _as_recomputed(
    layers: Sequence[LayerMemory], model: ModelSettings, *, keeps_rotated: bool
) -> list[LayerMemory]:
    """Return the layers with rotated activations and recomputation taken into account.

    A recomputed layer keeps its input alone, and has the other activations again while its backward
    runs.
    """
    result = []
    for index, layer in enumerate(layers):
        kept = layer.kept + layer.rotated * keeps_rotated
        recomputed = model.recomputes(index)
        stays = layer.inputs if recomputed else kept
        workspace = layer.workspace + kept - stays
        result.append(replace(layer, kept=stays, workspace=workspace, recomputed=recomputed))
    return result


def _in_shards(flops: ModelFlops, devices: Devices, head: int) -> tuple[int, int, int]:
    """Return counts of numbers that come on top with shards.

    These are gathered weights, sums of their gradients, and sums that are being sent. If weights
    are gathered for each use, they belong to a layer, to the next one and its copy, and to the head
    in forward and backward.

    head: number of weights of the LM head.
    """
    if not devices.sharded:
        return 0, 0, 0
    layer = math.ceil((flops.parameters - head * (1 if flops.tied else 2)) / flops.shape.layers)
    sent = layer if flops.tied else max(layer, head)
    if devices.gathered:
        return flops.parameters, flops.parameters, sent
    return 3 * layer + head, sent + (head if flops.tied else 0), sent


def _at_loss(
    flops: ModelFlops,
    devices: Devices,
    precision: Precision,
    loss: LossSettings,
    tokens: int,
    low_head: bool,
    has_copies: bool,
) -> int:
    """Return the bytes that the loss takes beside the kept activations.

    For the head: its gradient, its working copy, and the gradient of a chunk if products do not add
    it to the sum. For each token: the last hidden state, the output of the final norm and its
    gradient. Logits are overwritten with their gradient, which in FP8 has its layouts beside it.

    tokens: of a microbatch.
    low_head: whether the LM head is quantized.
    has_copies: whether weights have working copies.
    """
    shape = flops.shape
    number = precision.number_bytes
    copies = has_copies
    if isinstance(precision, QuantizedPrecision) and low_head:
        # A gradient that the products do not add to the sum.
        copies = loss.penalty is not None or not precision.fuses_head_on(devices.capability)
    size = shape.vocabulary * shape.hidden * (4 + number * copies)
    size += tokens * 3 * shape.hidden * number
    if loss.kind == "chunked":
        logit_bytes = number + precision.layouts_on(devices.capability) * low_head
        size += logit_bytes * shape.vocabulary * min(tokens, loss.tokens_at_once)
    return size


def _largest_backward(layers: Sequence[LayerMemory]) -> int:
    """Return the largest memory of a layer's backward beyond all kept activations.

    In bytes a token. By then the layers behind it have freed theirs.
    """
    freed = most = 0
    for layer in reversed(layers):
        most = max(most, layer.workspace - freed)
        freed += layer.kept
    return most


def _working_copies(layers: Sequence[LayerMemory]) -> int:
    """Return the bytes of working copies.

    A fused layer keeps its copies for the whole step. A recomputed layer that is not fused keeps
    them while the graph of its forward lives, so only the largest one counts.
    """
    total = sum(layer.unquantized_weights for layer in layers)
    passing = [
        layer.unquantized_weights for layer in layers if layer.recomputed and not layer.fused
    ]
    return total - sum(passing) + max(passing, default=0)


def layers_of(
    model: PreTrainedModel,
    flops: ModelFlops,
    recipe: Recipe,
    active: ActivePrecision,
    device_type: str,
    attention: str,
    capability: tuple[int, int] | None = None,
) -> list[LayerMemory]:
    """Return the memory of each decoder layer of `model`, in order.

    model: the model on the meta device.
    flops: of the model.
    attention: the name of the packed attention. It decides which layers are fused.
    capability: CUDA's compute capability, as in `Devices`.
    """
    layers = decoder_layers(model)
    is_low = active.precision.quantized
    decisions = decide(model, list(layers.values()), active, capability) if is_low else {}
    not_fused = not_fused_because(
        recipe.model.fused, active, device_type, getattr(torch, active.precision.compute_dtype)
    )
    layouts = active.precision.layouts_on(capability)
    unquantized = UNQUANTIZED[active.precision.compute_dtype]
    left_out = _experts_left_out(model, decisions) if flops.choices else {}
    compiled = compiled_layer(flops, active.precision, layouts, left_out)
    result = []
    for name, layer in layers.items():
        reason, low = assess_layer(name, layer, decisions)
        if not_fused or reason:
            result.append(compiled)
        else:
            parts = Parts.of(layer)
            precisions = [
                active.precision if f"{name}.{next(iter(stack))}" in low else unquantized
                for stack in parts.stacks
            ]
            result.append(fused_layer(parts, precisions, attention, layouts))
    return result


def fused_layer(
    parts: Parts, precisions: Sequence[Precision], attention: str, layouts: int
) -> LayerMemory:
    """Return the memory of a fused layer, from its shapes.

    precisions: of its four products: queries, keys and values; the attention's output; gate and
        up; down.
    layouts: number of stored layouts of a quantized operand of two products.
    """
    number = precisions[0].number_bytes
    stacks = [list(stack.values()) for stack in parts.stacks]
    sizes = [sum(linear.weight.numel() for linear in stack) for stack in stacks]
    hidden, query, _, activated = (stack[0].in_features for stack in stacks)
    gate_and_up = sizes[2] // hidden
    rotated = number * parts.heads.width if parts.head_norms else 0
    operands = [
        precision.operand_bytes if isinstance(precision, QuantizedPrecision) else number
        for precision in precisions
    ]
    _, output, gate_up, down = precisions

    keeps_activated = isinstance(down, QuantizedPrecision) and (
        down.block_scaled or down.plain_forward or not gate_up.quantized
    )
    kept = (
        2 * number * hidden,  # the layer's input, and the attention's residual sum
        operands[0] * hidden + 4,  # the output of each norm, and its statistics
        operands[2] * hidden + 4,
        number * parts.heads.width,  # queries, keys and values
        number * query + 4 * parts.heads.query,  # the attention's output, and its statistics
        operands[1] * query * output.quantized,
        # Elsewhere the norms of heads keep their inputs, and attention their outputs.
        rotated * (attention != ROTATED_ATTENTION),
        number * gate_and_up,
        operands[3] * activated * keeps_activated,
    )
    return LayerMemory(
        inputs=number * hidden,
        kept=round(sum(kept)),
        # The gradients of the MLP, which takes more than attention.
        workspace=number * (hidden + gate_and_up + activated),
        quantized_weights=round(
            sum(
                layouts * (precision.weight_bytes or precision.operand_bytes) * size
                for precision, size in zip(precisions, sizes, strict=True)
                if isinstance(precision, QuantizedPrecision)
            )
        ),
        unquantized_weights=sum(
            number * size
            for precision, size in zip(precisions, sizes, strict=True)
            if not precision.quantized
        ),
        fused=True,
        rotated=rotated if attention == ROTATED_ATTENTION else 0,
    )


def _experts_left_out(
    model: PreTrainedModel, decisions: Mapping[str, Decision]
) -> dict[str, float]:
    """Return the share of all experts' weights that stays unquantized, by reason."""
    sizes = {
        f"{name}.{key}": getattr(experts, key).numel()
        for name, experts in stacked_experts(model)
        for key in STACKS
    }
    if not sizes:
        return {"they are not stacked as most are": 1.0}
    shares: dict[str, float] = defaultdict(float)
    for name, size in sizes.items():
        decision = decisions.get(name)
        if decision is not None and decision.reason:
            shares[decision.reason] += size / sum(sizes.values())
    return shares


def compiled_layer(
    flops: ModelFlops, precision: Precision, layouts: int, experts_left_out: Mapping[str, float]
) -> LayerMemory:
    """Return the memory of a mean layer of the model that `flops` counts.

    layouts: number of stored layouts of a quantized weight.
    """
    shape = flops.shape
    number = precision.number_bytes
    linears = (flops.attention_weights + flops.mlp_weights) // shape.layers
    rotated = shape.query_width + shape.kv_heads * shape.head_dim
    experts = flops.expert_weights // shape.layers
    idle = flops.idle_weights // shape.layers
    # Experts keep their input once for each choice of a token, and their output, which the
    # router's weight multiplies.
    values = (4 + 2 * flops.choices) * shape.hidden + (linears + experts) // shape.hidden + rotated
    kept = int(values * number * (IN_PIECES if precision.quantized else 1))
    quantized_share = 1 - sum(experts_left_out.values())
    return LayerMemory(
        inputs=shape.hidden * number,
        kept=kept,
        workspace=kept,  # the gradients of the kept activations
        quantized_weights=layouts * round(linears + (experts + idle) * quantized_share),
        unquantized_weights=number * (linears + experts + idle),
        fused=False,
        experts_left_out=experts_left_out,
    )
