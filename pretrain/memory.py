"""How much memory training will take on one device: exact where shapes decide it, an estimate for activations.

Activations are counted from what a compiled decoder layer keeps for backward, in the compute dtype and by token:

    4 · hidden                        the layer's input, the attention's residual sum, and what the two norms make of them
    in · out / hidden, every matrix   queries, keys, values and the attention's output; gate, up and their product
    query and key widths              once more, after normalisation and rotation

For Qwen3-1.7B that is 71,680 bytes a token and layer. On one H200 (8 packs of 4,096 tokens, chunked loss, no checkpointing) the
estimate is within 1 % of the measured peaks: 77.0 GiB with BF16 weights, 86.6 with exact ones, 93.0 with FP32 weights
(benchmarks/results/h200_bf16.json; gradients in the weights' dtype). Around low-precision products a layer is compiled in pieces,
which keep what a whole layer would compute again: 98.0 to 98.5 GiB in FP8, 99.7 to 102.4 emulated (h200_low_precision.json,
h200_emulated.json), met to 5 %.
Layers that are not compiled keep FP32 intermediates of their norms as well and take more; so does masked `sdpa` attention.
`batch.microbatch: auto` therefore tries on the device, and only begins where this estimate says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.metrics.flops import ModelFlops
from pretrain.precision.recipes import RECIPES
from pretrain.settings import Recipe

# What a layer in pieces keeps for backward, over what a whole one does: measured, see above.
IN_PIECES = 1.15
# `microbatch_candidates` starts where this share of the estimate would fit: too large costs one trial, too small costs speed.
OPTIMISM = 0.8
_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device. What ends in `_by_pack` is for each pack of a microbatch."""

    parameters: int
    gradients: int  # one sum a parameter for the whole step; under DDP views into its buckets, so no second copy
    moments: int  # AdamW's two; unless the recipe says, BF16 where the parameters are plain BF16, else FP32
    remainders: int  # the 16 bits beside each BF16 parameter of `weights: bf16_exact`
    working_copies: int  # BF16 casts of FP32 parameters that backward needs again
    quantized_weights: int  # of low-precision linears, for forward and backward; made once a step, kept between microbatches
    head_gradient: int  # the LM head's, summed over chunks in FP32
    activations_by_pack: int
    layer_by_pack: int  # backward's workspace: the gradients of one layer's activations
    logits_by_pack: int  # the loss's buffers, were all logits held at once
    logits_at_most: int | None  # the same for one chunk; None: not chunked

    @classmethod
    def of(cls, recipe: Recipe, flops: ModelFlops, precision: str, world_size: int, sharded: bool) -> MemoryEstimate:
        """The estimate for `recipe`; `sharded`: parameters, gradients and moments are spread over all devices (FSDP2)."""
        shape, length = flops.shape, recipe.data.length
        stored, computed = (4 if recipe.weights == "fp32" else 2), (4 if precision == "fp32" else 2)
        shards = world_size if sharded else 1
        values = math.ceil(flops.parameters / shards)
        weights = values * stored
        recomputed = _recomputed_layers(recipe, shape.layers)
        quantized = RECIPES[precision].quantized
        layer = int(_layer_elements(flops) * computed * length * (IN_PIECES if quantized else 1))
        kept = shape.layers - recomputed
        # A recomputed layer keeps its input; one at a time is whole again while its backward runs.
        activations = kept * layer + recomputed * shape.hidden * computed * length + (layer if recomputed else 0)
        # The final norm's output and its gradient stand beside the logits. The chunked loss overwrites a logit with its gradient;
        # the reference keeps the product, the softmax and its gradient, the last two in FP32.
        final = 2 * shape.hidden * computed * length
        chunked = recipe.loss.kind == "chunked"
        logit = computed if chunked else 8 + computed
        materialised = recipe.loss.kind != "cce"
        return cls(
            parameters=weights,
            gradients=values * _BYTES[recipe.gradients_kept_in(world_size)],
            moments=2 * values * _moment_bytes(recipe),
            remainders=2 * values if recipe.weights == "bf16_exact" else 0,
            working_copies=_working_copies(flops, kept) if stored > computed else 0,
            quantized_weights=2 * _linear_weights(flops) if quantized else 0,
            head_gradient=shape.vocabulary * shape.hidden * (4 if chunked else computed),
            activations_by_pack=activations + final,
            layer_by_pack=layer,
            logits_by_pack=length * shape.vocabulary * logit if materialised else 0,
            logits_at_most=recipe.loss.chunk * shape.vocabulary * logit if chunked else None,
        )

    def parts(self, microbatch: int) -> dict[str, int]:
        """Bytes by part while a microbatch of that many packs is in flight, empty parts left out."""
        logits = self.logits_by_pack * microbatch
        loss = logits if self.logits_at_most is None else min(logits, self.logits_at_most)
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer moments": self.moments,
            "remainder bits": self.remainders,
            "BF16 working copies": self.working_copies,
            "quantized weights": self.quantized_weights,
            "head gradient": self.head_gradient,
            "activations": self.activations_by_pack * microbatch,
            # The logits are gone when the layers' backward begins, so only the larger of the two counts.
            "loss or backward workspace": max(loss, self.layer_by_pack * microbatch),
        }
        return {name: size for name, size in parts.items() if size}

    def total(self, microbatch: int) -> int:
        """Estimated peak in bytes; the CUDA context and the allocator's fragments (about 1 GiB) come on top."""
        return sum(self.parts(microbatch).values())


def microbatch_candidates(packs_per_rank: int, estimate: MemoryEstimate, device_memory: int | None) -> list[int]:
    """Microbatches (packs at once) worth trying, largest first: divisors of a device's packs a step.

    The first is the largest that would fit if the estimate were too high by a quarter; 1 is always among them. Without
    `device_memory` (bytes) all divisors are.
    """
    divisors = divisors_of(packs_per_rank)[::-1]
    if device_memory is None:
        return divisors
    return [size for size in divisors if size == 1 or OPTIMISM * estimate.total(size) <= device_memory]


def largest_expected_to_fit(candidates: Sequence[int], estimate: MemoryEstimate, device_memory: int) -> int | None:
    """The largest of `candidates` whose estimate is within `device_memory`, None where not even one pack is."""
    return max((size for size in candidates if estimate.total(size) <= device_memory), default=None)


def divisors_of(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _layer_elements(flops: ModelFlops) -> int:
    """Numbers that one layer keeps for each token."""
    shape = flops.shape
    rotated = shape.query_width + shape.kv_heads * shape.head_dim
    return 4 * shape.hidden + _linear_weights(flops) // shape.layers // shape.hidden + rotated


def _linear_weights(flops: ModelFlops) -> int:
    return sum(m.inputs * m.outputs for m in flops.matrices if m.part != "head")


def _moment_bytes(recipe: Recipe) -> int:
    moments = recipe.optimizer.moments or ("bf16" if recipe.weights == "bf16" else "fp32")
    return _BYTES[moments]


def _recomputed_layers(recipe: Recipe, layers: int) -> int:
    setting = recipe.model.gradient_checkpointing
    if isinstance(setting, str):
        return layers if setting == "full" else 0
    return math.ceil(layers / setting.every)


def _working_copies(flops: ModelFlops, kept_layers: int) -> int:
    """Bytes of BF16 copies alive at once: the head's, all kept layers' and one recomputed layer's; embeddings are cast by row."""
    head = sum(m.inputs * m.outputs for m in flops.matrices if m.part == "head")
    alive = min(kept_layers + 1, flops.shape.layers)
    return 2 * (head + _linear_weights(flops) * alive // flops.shape.layers)
