"""Describe the work of a training step by the numbers that determine its time."""

from __future__ import annotations

from dataclasses import dataclass

from pretrain.metrics.flops import ModelFlops
from pretrain.optimizer.offload import OFFLOADED
from pretrain.plan.memory import BYTES, Devices
from pretrain.plan.plan import Plan
from pretrain.precision.settings import ActivePrecision

# Time of recomputation in backward, as shares of the time of the layers' GEMMs, of passes over
# memory, and of attention.
RECOMPUTED = (1 / 3, 0.3, 0.25)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a training step on one device."""

    flops: ModelFlops
    # Name of the precision.
    precision: str
    # True if the LM head is quantized too.
    quantized_head: bool
    # Share of the layers' weights outside of experts that stay in BF16.
    bf16_share: float = 0.0
    # Share of the weights of experts that stay in BF16.
    bf16_experts_share: float = 0.0
    # Share of the layers that keep codes of their weights. FSDP2 gathers these weights once a step.
    coded_share: float = 0.0
    # Name of the packed attention.
    attention: str
    # Sum of the squared lengths of the documents, divided by the number of tokens.
    squared_length_per_token: float
    # Number of tokens that a device computes in a step.
    tokens: int
    # Number of tokens in a microbatch.
    microbatch: int
    devices: Devices
    # Bytes of a parameter's gradient sum.
    gradient_bytes: int
    # Mean bytes of a parameter's moments.
    moment_bytes: float
    # Mean bytes of a parameter's optimizer state that is copied from the host and back.
    offloaded_bytes: float
    # True if all layers are fused.
    fused: bool
    # RECOMPUTED, multiplied by the share of the layers that are recomputed.
    recomputed_shares: tuple[float, ...]


def work_of(plan: Plan, active: ActivePrecision) -> Work:
    """Return the work of a step of `plan` in the precision `active`."""
    recipe = plan.recipe
    flops = plan.flops
    layers = plan.layers[active.precision.name]
    size = plan.expected_microbatch
    microbatches = -(-plan.packs_per_rank // size)
    # AdamW has two moments for each parameter. Muon has one for each of the hidden weights.
    moment_bytes = (2 - flops.muon_weights / flops.parameters) * BYTES[recipe.moments_kept_in]
    offloaded = OFFLOADED[recipe.optimizer.offload]
    quantizes = active.precision.quantized
    bf16_share = 0.0
    if quantizes:
        # In layers that are not fused, `unquantized_weights` are copies of all weights.
        bf16_bytes = sum(layer.unquantized_weights for layer in layers if layer.fused)
        all_bytes = active.precision.number_bytes * (flops.attention_weights + flops.mlp_weights)
        bf16_share = bf16_bytes / all_bytes
    recomputed_share = sum(layer.recomputed for layer in layers) / len(layers)
    offloaded_bytes = 0.0
    if "exp_avg" in offloaded:
        offloaded_bytes += moment_bytes
    if "remainder" in offloaded:
        offloaded_bytes += 2
    return Work(
        flops=flops,
        precision=active.precision.name,
        quantized_head=quantizes and active.settings.scope != "linear",
        bf16_share=bf16_share,
        # All layers with experts have the same shares. The last layer has experts if any layer has.
        bf16_experts_share=sum(layers[-1].experts_left_out.values()),
        coded_share=sum(layer.keeps_codes for layer in layers) / len(layers),
        attention=plan.attention.name,
        squared_length_per_token=plan.squared_length_per_token,
        tokens=microbatches * size * recipe.data.length,
        microbatch=size * recipe.data.length,
        devices=plan.devices,
        gradient_bytes=BYTES[recipe.gradients_kept_in],
        moment_bytes=moment_bytes,
        offloaded_bytes=offloaded_bytes,
        fused=all(layer.fused for layer in layers),
        recomputed_shares=tuple(recomputed_share * share for share in RECOMPUTED),
    )
