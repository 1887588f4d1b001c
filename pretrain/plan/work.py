"""Describe the work of a training step by the numbers that determine its time."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.optimizer.offload import OFFLOADED
from pretrain.plan.memory import BYTES
from pretrain.plan.plan import Plan
from pretrain.precision.settings import ActivePrecision

# Time of layers that are recomputed in backward, in addition to that of other layers, as shares of
# the time of their GEMMs, of their passes over memory, and of their attention.
RECOMPUTED = (1 / 3, 0.3, 0.25)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a training step on one device."""

    # Sizes of the model. `feed_forward` is the width of the MLP, or the widths of all experts that
    # a token chooses.
    layers: int
    hidden: int
    feed_forward: int
    gated: bool
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    parameters: int
    # Numbers of weights that a token is multiplied by: in all layers, in the experts that it
    # chooses (these are part of the former), and in the LM head.
    layer_weights: int
    expert_weights: int = 0
    head_weights: int
    # The name of the precision. `low_head` is True if the LM head is quantized too.
    precision: str
    low_head: bool = False
    # Shares of the layers' weights without experts, and of the experts, that stay in BF16.
    kept: float = 0.0
    experts_kept: float = 0.0
    # Name of the packed attention.
    attention: str
    # Mean over tokens of the length of the document that contains the token.
    squares: float
    # Numbers of tokens that a device computes in a step and in a microbatch.
    tokens: int
    microbatch: int
    # The number of devices, and of devices over which a copy of the parameters is distributed.
    # `topology` is "one", "ddp", "zero" (weights gathered once a step) or "fsdp2" (for each use).
    gpus: int = 1
    shards: int = 1
    topology: str = "one"
    # Bytes of a parameter: its weight, its gradient, both moments of AdamW, and the bytes that are
    # copied from the host and back in a step.
    weights: int = 4
    gradients: int = 4
    moments: int = 8
    offloaded: float = 0
    fused: bool = True
    # See RECOMPUTED. Zeros if nothing is recomputed.
    recomputed: tuple[float, ...] = (0.0, 0.0, 0.0)


def work_of(plan: Plan, active: ActivePrecision) -> Work:
    """Return the work of a step of `plan` in the precision `active`."""
    recipe = plan.recipe
    flops = plan.flops
    shape = flops.shape
    devices = plan.devices
    layers = plan.layers[active.precision.name]
    size = min(plan.expected_microbatch, plan.packs_per_rank)
    length = recipe.data.length
    # A gated MLP has three matrices instead of two. All known experts are gated.
    is_gated = flops.mlp_weights > 2.5 * shape.layers * shape.hidden * shape.feed_forward
    width = shape.feed_forward
    if flops.expert_weights:
        width = flops.expert_weights // (3 * shape.layers * shape.hidden)
    in_layers = flops.attention_weights + flops.mlp_weights
    # Compiled layers do not count the weights that stay in BF16.
    in_bf16 = sum(layer.unquantized_weights for layer in layers if layer.fused)
    topology = "one" if devices.count == 1 else "ddp"
    if devices.sharded:
        topology = "zero" if devices.gathered else "fsdp2"
    moments = 2 * BYTES[recipe.moments_kept_in]
    offloaded = OFFLOADED["none" if devices.name == "CPU" else recipe.optimizer.offload]
    share = sum(layer.recomputed for layer in layers) / len(layers)
    return Work(
        layers=shape.layers,
        hidden=shape.hidden,
        feed_forward=width,
        gated=is_gated or bool(flops.expert_weights),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocabulary=shape.vocabulary,
        tied=flops.tied,
        parameters=flops.parameters,
        layer_weights=in_layers + flops.expert_weights,
        expert_weights=flops.expert_weights,
        head_weights=flops.head_weights,
        precision=active.precision.name,
        low_head=active.precision.quantized and active.settings.scope != "linear",
        kept=in_bf16 / (active.precision.number_bytes * in_layers),
        experts_kept=sum(layers[-1].experts_left_out.values()),
        attention=plan.attention,
        squares=plan.mean_squared,
        tokens=-(-plan.packs_per_rank // size) * size * length,
        microbatch=size * length,
        gpus=devices.count,
        shards=devices.shards,
        topology=topology,
        weights=2 if recipe.weights == "bf16" else 4,
        gradients=BYTES[recipe.gradients_kept_in],
        moments=moments,
        offloaded=moments * ("exp_avg" in offloaded) + 2 * ("remainder" in offloaded),
        fused=all(layer.fused for layer in layers),
        recomputed=tuple(share * part for part in RECOMPUTED),
    )
