"""Estimate the memory that a training step needs on one device.

The memory has two peaks: at the loss, when the activations of all layers are in memory, and in the
backward of a layer, after the following layers have freed their activations. The estimate is the
larger peak.

The activations of a fused layer are known exactly. The autograd functions in
`pretrain.model.fused.layers` save the following tensors for backward. The first column is the
number of values per token.

    2 · hidden               in the compute dtype      the input of the layer, and the sum of this
                                                       input and the attention's output
    2 · hidden               as operands               the outputs of the two norms. Each norm also
                                                       keeps 4 bytes of statistics, or 8 if it
                                                       is a LayerNorm
    query + 2 · KV widths    in the compute dtype      queries, keys and values, before or after
                                                       rotation. Both are kept if heads have norms
                                                       and memory suffices (pretrain.plan.plan)
    query width              in the compute dtype      the output of attention. Each head also keeps
                                                       4 bytes of statistics
    query width              as operand                the output of attention as the input of the
                                                       output projection. In BF16 it is the tensor
                                                       in the row above
    gate and up widths       in the compute dtype      the inputs of the activation function.
                                                       Backward computes its output again

In this table, an operand is the input of a linear layer in the form in which backward needs it: to
compute the gradient of the weight, backward multiplies the operand by the gradient of the output.
An unquantized operand is in the compute dtype. In FP8, a value of an operand takes one byte, plus
its share of the scales of blocks.

The compiler chooses the activations that a compiled layer keeps. These activations are
approximately the following, all in the compute dtype:

    4 · hidden                          the input of the layer, the sum of this input and the
                                        attention's output, and the outputs of the two norms
    in · out / hidden for each matrix   queries, keys, values, the output of attention, gate, up,
                                        and the output of the activation function
    query and key widths                queries and keys after normalisation and rotation

If only the MLP is fused (pretrain.model.fused.half_layers), a layer keeps these activations too,
with two exceptions. The outputs of the norms and of attention, or of the layer with a state, are
kept as operands. The output of the activation function is kept only in formats with scales of
blocks, also as an operand.

On one H200 with the shapes of Qwen3-1.7B and Qwen3.5, and on four H200s with models of 8 B and 14 B
parameters, the estimate is within 5 % of the measured peaks (tests/pretrain/plan/test_memory.py).
The estimate does not contain workspaces, CUDA graphs, the histories of delayed scaling, buffers of
NCCL, and the mask of `sdpa` attention. So `batch.microbatch: auto` starts with this estimate and
then tries sizes on the device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn
from transformers import PreTrainedModel

from pretrain.metrics.flops import ModelFlops
from pretrain.model.attention import ATTENTION_KERNELS
from pretrain.model.fused.half_layers import can_fuse_mlp
from pretrain.model.fused.layers import Parts, assess_layer
from pretrain.model.huggingface import decoder_layers
from pretrain.model.scores import SINKS
from pretrain.model.wrapping import not_fused_because
from pretrain.optimizer.offload import OFFLOADED
from pretrain.precision.formats.definition import Precision, QuantizedPrecision
from pretrain.precision.grouped import STACKS, stacked_experts
from pretrain.precision.scope import QUANTIZED_SHARE, Decision, decide, features_of, quantized_names
from pretrain.precision.settings import UNQUANTIZED, ActivePrecision
from pretrain.settings.recipe import LossSettings, Recipe

BYTES = {"fp32": 4, "bf16": 2}  # bytes per value
# A layer with low-precision products is compiled in several pieces. This
# increases the memory of its activations by this factor, as measured.
IN_PIECES = 1.15


@dataclass(frozen=True)
class Devices:
    """The devices of a run, which are all of the same kind. Each process uses one device."""

    # The number of devices.
    count: int = 1
    # True with FSDP2: parameters, gradients and moments are distributed over the devices.
    sharded: bool = False
    # The name of the device.
    name: str = "device"
    # Bytes of memory of one device.
    memory: float = math.inf
    # True if weights are gathered and gradients are reduced only once a step
    # (pretrain.model.sharding). False if this is done for each use of a layer.
    gathered_once: bool = False
    # The number of sharded copies of the model. It is larger than 1 with HSDP.
    replicas: int = 1
    # The CUDA compute capability. If it is None, memory is estimated as for Hopper.
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"

    @property
    def type(self) -> str:
        """Return torch's type of the devices, "cpu" or "cuda"."""
        return "cpu" if self.name == "CPU" else "cuda"

    @property
    def shards(self) -> int:
        """Return the number of devices over which one copy of the parameters is distributed."""
        return self.count // self.replicas if self.sharded else 1

    @property
    def topology(self) -> str:
        """Return "one", "ddp", "zero" (weights are gathered once a step) or "fsdp2"."""
        if self.sharded:
            return "zero" if self.gathered_once else "fsdp2"
        return "ddp" if self.count > 1 else "one"


@dataclass(frozen=True)
class LayerMemory:
    """The memory of one decoder layer on one device, in bytes."""

    # Bytes per token of the layer's input.
    inputs: int
    # Bytes per token of all activations that are kept for backward, including the input.
    kept: int
    # Bytes per token that backward needs at its peak, in addition to the kept activations.
    workspace: int
    # Bytes of the quantized weights, which are cached from the first microbatch of a step to the
    # last one.
    quantized_weights: int
    # Bytes of the unquantized weights in the compute dtype. If weights are stored in FP32, they are
    # copies.
    unquantized_weights: int
    # True for a layer that is fused, or whose MLP is. A fused layer keeps its weight copies for the
    # whole step, even if it is recomputed.
    fused: bool
    # True if a sharded device keeps only the quantized weights during a step. False if it also
    # gathers the unquantized weights (QUANTIZED_SHARE).
    keeps_codes: bool = False
    # Map each reason why experts stay unquantized to a share: the number of expert weights that
    # stay unquantized for this reason, divided by the number of all expert weights. The counts are
    # for the whole model, so all layers with experts have the same map.
    experts_left_out: Mapping[str, float] = field(default_factory=dict)
    # Bytes per token of queries, keys and values after rotation. They can be kept in addition to
    # queries, keys and values before rotation, which are part of `kept`.
    rotated: int = 0
    # True if the layer is recomputed in backward (gradient checkpointing).
    recomputed: bool = False

    def as_recomputed(self) -> LayerMemory:
        """Return the memory of the layer if it is recomputed in backward.

        A recomputed layer keeps only its input. Its other activations are computed again in its
        backward, so they are part of its workspace.
        """
        workspace = self.workspace + self.kept - self.inputs
        return replace(self, kept=self.inputs, workspace=workspace, recomputed=True)


def step_memory(
    recipe: Recipe,
    flops: ModelFlops,
    devices: Devices,
    loss: LossSettings,
    microbatch: int,
    precision: Precision,
    layers: Sequence[LayerMemory],
    *,
    keeps_rotated: bool,
) -> dict[str, int]:
    """Map each part of a device's memory at the peak of a step to its number of bytes.

    Parts without bytes are omitted. The CUDA context and fragmentation of the memory, about 1 GiB,
    are not included.

    flops: the FLOPs and sizes of the model.
    precision: the precision of the step.
    layers: the memory of each layer, in order.
    microbatch: number of packs in a microbatch.
    loss: the loss settings, with the chunk that was chosen for `loss.chunk: auto`.
    keeps_rotated: True if layers keep `LayerMemory.rotated` in addition to `LayerMemory.kept`. Then
        no layer is recomputed.
    """
    number_bytes = precision.number_bytes
    layouts = precision.layouts_on(devices.capability)
    tokens = recipe.data.length * microbatch
    parameters = math.ceil(flops.parameters / devices.shards)
    head = flops.shape.vocabulary * flops.shape.hidden
    quantizes_head = precision.quantized and recipe.fp8_config.scope != "linear"
    # FP32 weights need BF16 working copies. With shards, the gathered weights are these copies.
    has_copies = recipe.weights == "fp32" and number_bytes == 2 and not devices.sharded
    if keeps_rotated:
        layers = [replace(layer, kept=layer.kept + layer.rotated) for layer in layers]
    layers_with_codes = sum(layer.keeps_codes for layer in layers)
    gathered_weights, unreduced_gradients, sent_gradients = _values_with_shards(
        flops, devices, head, layers_with_codes
    )
    gradients = parameters * BYTES[recipe.gradients_kept_in]
    quantized_weights = sum(layer.quantized_weights for layer in layers)
    if quantizes_head:
        quantized_weights += layouts * head
    # Parts that are counted at all peaks: at the loss, in a layer's backward, and in the update.
    parts = {
        "parameters": parameters * (4 if recipe.weights == "fp32" else 2),
        "gathered weights": number_bytes * gathered_weights,
        "gradients": gradients + 4 * unreduced_gradients,
        **optimizer_state(recipe, flops, devices, on_host=False),
        "BF16 working copies": _working_copies(layers) if has_copies else 0,
        "quantized weights": quantized_weights,
    }
    parts |= _parts_at_peak(
        activations=tokens * sum(layer.kept for layer in layers),
        at_loss=_bytes_at_loss(flops, devices, precision, loss, tokens, quantizes_head, has_copies),
        in_backward=4 * sent_gradients + tokens * _largest_backward(layers),
        # Muon's update has a BF16 direction for each of its weights.
        in_update=2 * math.ceil(flops.muon_weights / devices.shards),
    )
    return {part: size for part, size in parts.items() if size}


def _parts_at_peak(
    *, activations: int, at_loss: int, in_backward: int, in_update: int
) -> dict[str, int]:
    """Return the parts that are needed only at the largest of the three peaks of a step.

    `at_loss` and `in_backward` are needed in addition to the activations. `in_update` is needed
    after the activations have been freed.
    """
    if in_update > activations + max(at_loss, in_backward):
        return {"Muon's update": in_update}
    if at_loss >= in_backward:
        return {"activations": activations, "the loss": at_loss}
    return {"activations": activations, "a layer's backward": in_backward}


def optimizer_state(
    recipe: Recipe, flops: ModelFlops, devices: Devices, *, on_host: bool
) -> dict[str, int]:
    """Map each part of the optimizer's state to its number of bytes for one device.

    on_host: True for the parts in pinned host memory (`optimizer.offload`), False for the parts in
        the memory of the device.
    """
    offloaded = OFFLOADED["none" if devices.type == "cpu" else recipe.optimizer.offload]
    parameters = math.ceil(flops.parameters / devices.shards)
    # AdamW has two moments for each parameter. Muon has one for each of its weights.
    muon_weights = math.ceil(flops.muon_weights / devices.shards)
    moments_on_host = "exp_avg" in offloaded
    remainder_on_host = "remainder" in offloaded
    parts = {}
    if moments_on_host == on_host:
        moments = 2 * parameters - muon_weights
        parts["optimizer moments"] = moments * BYTES[recipe.moments_kept_in]
    if recipe.weights == "bf16_exact" and remainder_on_host == on_host:
        parts["remainder bits"] = 2 * parameters
    return parts


def _values_with_shards(
    flops: ModelFlops, devices: Devices, head: int, layers_with_codes: int
) -> tuple[int, int, int]:
    """Return three counts of values that a device stores in addition to its shards.

    1. Gathered weights. If weights are gathered only once a step, these are all weights, except for
       the layers that keep codes. If weights are gathered for each use of a layer, these are the
       weights of the current layer, two copies of the weights of the next layer, and the weights of
       the LM head, which stay gathered from forward to backward. If all layers keep codes, only the
       LM head is counted, because the layers are gathered before the memory has its peaks.
    2. FP32 values of the gradients of gathered weights. They are stored until the gradients are
       summed over the devices.
    3. FP32 values of the gradients that are being sent to the other devices.

    All three counts are 0 if the model is not sharded.

    head: number of weights of the LM head.
    layers_with_codes: number of layers that keep codes.
    """
    if not devices.sharded:
        return 0, 0, 0
    # The embedding and the head are outside of the layers. They have the same size.
    outside = head if flops.tied else 2 * head
    layer = math.ceil((flops.parameters - outside) / flops.shape.layers)
    sent = layer if flops.tied else max(layer, head)
    if devices.gathered_once:
        return flops.parameters - layers_with_codes * layer, flops.parameters, sent
    in_use = 3 * layer if layers_with_codes < flops.shape.layers else 0
    # The gradient of a tied head is not complete before the backward of the embedding.
    waiting = head if flops.tied else 0
    return in_use + head, sent + waiting, sent


def _bytes_at_loss(
    flops: ModelFlops,
    devices: Devices,
    precision: Precision,
    loss: LossSettings,
    tokens: int,
    quantizes_head: bool,
    has_copies: bool,
) -> int:
    """Return the bytes that the loss needs in addition to the kept activations.

    The loss is computed in chunks of tokens. It needs memory for these tensors:

    * The gradient of the LM head's weight in FP32. Each chunk adds to it.
    * A second tensor with the shape of this weight. If the head is not quantized, it is the working
      copy of the weight (`has_copies`). If the head is quantized, it is the weight gradient of one
      chunk. A fused head needs no second tensor, because its matrix product adds to the gradient.
    * For each token, the last hidden state, the output of the final norm, and the gradient of this
      output.
    * The logits of one chunk. Their gradient overwrites them.
    * The quantized layouts of this gradient, if the head is quantized.

    tokens: number of tokens in a microbatch.
    quantizes_head: True if the LM head is quantized.
    has_copies: True if weights have working copies.
    """
    shape = flops.shape
    number_bytes = precision.number_bytes
    has_second_tensor = has_copies
    if isinstance(precision, QuantizedPrecision) and quantizes_head:
        is_fused = loss.penalty is None and precision.fuses_head_on(devices.capability)
        has_second_tensor = not is_fused
    head = shape.vocabulary * shape.hidden
    size = 4 * head
    if has_second_tensor:
        size += number_bytes * head
    size += tokens * 3 * shape.hidden * number_bytes
    if loss.kind == "chunked":
        logit_bytes = number_bytes
        if quantizes_head:
            logit_bytes += precision.layouts_on(devices.capability)
        size += logit_bytes * shape.vocabulary * min(tokens, loss.tokens_at_once)
    return size


def _largest_backward(layers: Sequence[LayerMemory]) -> int:
    """Return the bytes per token that backward needs at its peak, besides the kept activations.

    When the backward of a layer runs, the layers after it have freed their kept activations. So the
    freed bytes are subtracted from the workspace of the layer.
    """
    freed = most = 0
    for layer in reversed(layers):
        most = max(most, layer.workspace - freed)
        freed += layer.kept
    return most


def _working_copies(layers: Sequence[LayerMemory]) -> int:
    """Return the bytes of the working copies of all weights.

    A layer keeps its copies from forward to backward, and a fused layer keeps them for the whole
    step. A layer that is recomputed and not fused keeps its copies only while it is computed. Only
    one such layer has copies at the same time, so only the largest of them is counted.
    """
    total = sum(layer.unquantized_weights for layer in layers)
    temporary = [
        layer.unquantized_weights for layer in layers if layer.recomputed and not layer.fused
    ]
    return total - sum(temporary) + max(temporary, default=0)


def layers_of(
    model: PreTrainedModel,
    flops: ModelFlops,
    recipe: Recipe,
    active: ActivePrecision,
    devices: Devices,
    attention: str,
) -> list[LayerMemory]:
    """Return the memory of each decoder layer of `model`, in order.

    model: the model on the meta device.
    flops: the FLOPs and sizes of the model.
    active: the precision of the run or phase.
    attention: the name of the packed attention, which determines the tensors that fused layers
        keep.
    """
    layers = decoder_layers(model)
    decisions = decide(model, list(layers.values()), active, devices.capability)
    low = quantized_names(decisions)
    not_fused = not_fused_because(
        recipe.model.fused, active, devices.type, getattr(torch, active.precision.compute_dtype)
    )
    layouts = active.precision.layouts_on(devices.capability)
    unquantized = UNQUANTIZED[active.precision.compute_dtype]
    left_out = _experts_left_out(model, decisions) if flops.experts_per_token else {}
    result = []
    for index, (name, layer) in enumerate(layers.items()):
        if not_fused or assess_layer(name, layer, [low]):
            # `compiled_layer` returns a mean over all layers. In a mixture of experts, the size of
            # the MLP in this mean is not known.
            has_known_mlp = not flops.experts_per_token
            fuses_mlp = has_known_mlp and not not_fused and can_fuse_mlp(name, layer, [low])
            memory = compiled_layer(flops, active.precision, layouts, left_out, fuses_mlp=fuses_mlp)
        else:
            parts = Parts.of(layer)
            # All linears of a stack have the same precision, see `assess_layer`.
            precisions = [
                active.precision if f"{name}.{next(iter(stack))}" in low else unquantized
                for stack in parts.stacks.values()
            ]
            memory = fused_layer(parts, precisions, attention, layouts)
        memory = _with_scores(memory, flops, recipe.data.length, attention)
        result.append(memory.as_recomputed() if recipe.model.recomputes(index) else memory)
    return result


def _with_scores(
    memory: LayerMemory, flops: ModelFlops, length: int, attention: str
) -> LayerMemory:
    """Add the attention scores to the memory of a layer, if plain torch computes caps or sinks.

    The scores are in FP32. For backward, `Scores.attend` keeps the probabilities, and with a cap
    also the result of tanh. Backward holds two gradients with the size of the scores.

    length: number of tokens in a pack.
    """
    if not flops.changed_scores or attention not in ("packed_sdpa", "packed_documents"):
        return memory
    scores = 4 * flops.shape.heads * length
    kept = scores * (1 if flops.changed_scores == SINKS else 2)
    return replace(memory, kept=memory.kept + kept, workspace=memory.workspace + 2 * scores)


def fused_layer(
    parts: Parts, precisions: Sequence[Precision], attention: str, layouts: int
) -> LayerMemory:
    """Return the memory of a fused layer, computed from its shapes.

    parts: the modules of the decoder layer.
    precisions: the precisions of the four linear layers in the fused layer: the stacked projections
        to queries, keys and values, the output projection of attention, the stacked gate and up
        projections (GPT-2 has a single linear in place of them), and the down projection.
    attention: the name of the packed attention.
    layouts: number of layouts of a quantized operand.
    """
    qkv, output, gate_up, down = precisions
    number_bytes = qkv.number_bytes
    stacks = [list(stack.values()) for stack in parts.stacks.values()]
    sizes = [sum(linear.weight.numel() for linear in stack) for stack in stacks]
    # The widths of the inputs of the four linear layers. The third is `hidden` again.
    hidden, query, _, activated = (features_of(stack[0])[0] for stack in stacks)
    statistics = 8 if isinstance(parts.norms[0], nn.LayerNorm) else 4
    gate_and_up = sizes[2] // hidden
    # The norms of heads keep their inputs, and attention keeps their rotated outputs.
    rotated = number_bytes * parts.heads.width if parts.head_norms else 0
    # With these kernels, the rotated outputs are kept only if memory suffices.
    is_optional = attention in ATTENTION_KERNELS
    unquantized = 0
    quantized_bytes = 0.0
    for precision, size in zip(precisions, sizes, strict=True):
        if isinstance(precision, QuantizedPrecision):
            quantized_bytes += layouts * (precision.weight_bytes or precision.operand_bytes) * size
        else:
            unquantized += size
    # The input of the layer, and the sum of this input and the attention's output.
    kept: float = 2 * number_bytes * hidden
    # The outputs of the two norms, and their statistics.
    kept += (qkv.operand_bytes + gate_up.operand_bytes) * hidden + 2 * statistics
    # Queries, keys and values.
    kept += number_bytes * parts.heads.width
    # The output of attention, and its statistics.
    kept += number_bytes * query + 4 * parts.heads.query
    # The output of attention as a quantized operand.
    if output.quantized:
        kept += output.operand_bytes * query
    if not is_optional:
        kept += rotated
    # The inputs of the activation function.
    kept += number_bytes * gate_and_up
    # The output of the activation function, if backward does not compute it again.
    if down.block_scaled or (down.quantized and not gate_up.quantized):
        kept += down.operand_bytes * activated
    return LayerMemory(
        inputs=number_bytes * hidden,
        kept=round(kept),
        # The gradients in the MLP, which need more memory than those in attention.
        workspace=number_bytes * (hidden + gate_and_up + activated),
        quantized_weights=round(quantized_bytes),
        unquantized_weights=number_bytes * unquantized,
        fused=True,
        keeps_codes=sum(sizes) - unquantized >= QUANTIZED_SHARE * sum(sizes),
        rotated=rotated if is_optional else 0,
    )


def _experts_left_out(
    model: PreTrainedModel, decisions: Mapping[str, Decision]
) -> dict[str, float]:
    """Map each reason why experts stay unquantized to a share of the expert weights.

    The share is the number of expert weights that stay unquantized for this reason, divided by the
    number of all expert weights.
    """
    sizes = {
        f"{name}.{key}": getattr(experts, key).numel()
        for name, experts in stacked_experts(model)
        for key in STACKS
    }
    if not sizes:
        return {"they have biases, or another layout than stacked weights": 1.0}
    shares: dict[str, float] = defaultdict(float)
    for name, size in sizes.items():
        decision = decisions.get(name)
        if decision is not None and decision.reason:
            shares[decision.reason] += size / sum(sizes.values())
    return shares


def compiled_layer(
    flops: ModelFlops,
    precision: Precision,
    layouts: int,
    experts_left_out: Mapping[str, float],
    *,
    fuses_mlp: bool,
) -> LayerMemory:
    """Return the memory of a compiled layer, as a mean over all layers of the model.

    flops: the FLOPs and sizes of the model.
    layouts: number of stored layouts of a quantized weight.
    experts_left_out: see `LayerMemory.experts_left_out`.
    fuses_mlp: True if the MLP is fused, and only the rest of the layer is compiled.
    """
    shape = flops.shape
    number_bytes = precision.number_bytes
    linears = flops.attention_weights + flops.mlp_weights
    rotated = shape.query_width + shape.kv_heads * shape.head_dim
    rotated *= shape.layers - flops.without_attention
    # The activations of all layers, except for those that have the hidden width.
    wide = (linears + flops.expert_weights) // shape.hidden + rotated + flops.state_values
    # For each expert that a token chooses, the layer keeps the input and the output of the expert.
    # The output is kept because it is multiplied by the weight from the router.
    values = (4 + 2 * flops.experts_per_token) * shape.hidden + wide // shape.layers
    kept = int(values * number_bytes * (IN_PIECES if precision.quantized else 1))
    if fuses_mlp:
        # The outputs of the norms and of the mixer, and that of the activation function.
        operands = 2 * shape.hidden + shape.query_width
        kept = number_bytes * (values - operands - shape.feed_forward)
        if precision.block_scaled:
            operands += shape.feed_forward
        kept += round(precision.operand_bytes * operands)
    experts = (flops.expert_weights + flops.idle_weights) // shape.layers
    weights = linears // shape.layers + experts
    quantized = weights - experts * sum(experts_left_out.values())
    return LayerMemory(
        inputs=shape.hidden * number_bytes,
        kept=kept,
        workspace=kept,  # the gradients of the kept activations
        quantized_weights=layouts * round(quantized),
        unquantized_weights=number_bytes * weights,
        fused=fuses_mlp,
        keeps_codes=precision.quantized and quantized >= QUANTIZED_SHARE * weights,
        experts_left_out=experts_left_out,
    )
