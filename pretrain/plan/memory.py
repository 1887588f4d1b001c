"""How much memory training will take on one device: exact where shapes decide it, an estimate for what a compiler decides.

What is there all the time (weights, gradients, the optimizer's state, quantized weights) and what the layers keep for backward
(pretrain.plan.layer_memory) stand beside one of two things: what the loss needs, while every layer's activations are kept, or what a
layer's backward needs, the layers behind it already free. The larger of the two makes the peak.

Beside peaks measured on one H200 (Qwen3-1.7B's shape, 8 packs of 4,096 tokens, chunked loss, no checkpointing, exact BF16 weights
with FP32 gradients and moments): fused layers are met within 0.2 %, 74.0 GiB in BF16, 74.9 in FP8, 75.0 with block scales; with
the head in FP8 too, 1 % is missing of 77.3, which the first step's look at its operands takes. Compiled layers are met within
1 %: 77.0 GiB with BF16 weights and gradients, 93.0 with FP32 ones (benchmarks/results/h200_bf16.json); those in pieces, around
low-precision products, within 5 %: 98.0 to 102.4 GiB (h200_low_precision.json, h200_emulated.json; gradients in BF16).

Not counted: libraries' workspaces (a tenth of a GiB), one layer's stacked gradients where several processes exchange them, and
the mask of `sdpa` attention in layers that are not fused. `batch.microbatch: auto` therefore tries on the device, and only begins
where this estimate says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pretrain.metrics.flops import ModelFlops
from pretrain.plan.layer_memory import LayerMemory, compiled_layer
from pretrain.precision.registry import PRECISIONS
from pretrain.settings.recipe import Recipe

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
    working_copies: int  # of the layers' FP32 weights in BF16, for forward and backward
    quantized_weights: int  # of low-precision linears, for forward and backward; made once a step, kept between microbatches
    activations_by_pack: int  # what all layers keep
    loss: int  # the head's gradient, summed over chunks in FP32, and its working copy
    loss_by_pack: int  # the last hidden states, the final norm's output and its gradient
    logits_by_pack: int  # the loss's buffers, were all logits held at once
    logits_at_most: int | None  # the same for one chunk; None: not chunked
    backward: int  # a tied head's gradient, where autograd holds it until it has the embedding's
    backward_by_pack: int  # of a layer: its gradients, and where it is recomputed what it had not kept

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        flops: ModelFlops,
        precision: str,
        world_size: int,
        sharded: bool,
        layers: Sequence[LayerMemory] | None = None,
    ) -> MemoryEstimate:
        """The estimate for `recipe`; `sharded`: parameters, gradients and moments are spread over all devices (FSDP2).

        `layers`: of the model, in order; None: all are compiled, none is fused.
        """
        length, stored = recipe.data.length, 4 if recipe.weights == "fp32" else 2
        values = math.ceil(flops.parameters / (world_size if sharded else 1))
        layers = layers or [compiled_layer(flops, PRECISIONS[precision], recipe.weights)] * flops.shape.layers
        again = _recomputed(recipe, len(layers))
        head = _HeadMemory.of(recipe, flops, precision)
        return cls(
            parameters=values * stored,
            gradients=values * _BYTES[recipe.gradients_kept_in(world_size)],
            moments=2 * values * _moment_bytes(recipe),
            remainders=2 * values if recipe.weights == "bf16_exact" else 0,
            working_copies=_working_copies(layers, again),
            quantized_weights=sum(layer.quantized_weights for layer in layers) + head.quantized_weights,
            activations_by_pack=length * sum(_kept(layers, again)),
            loss=head.at_the_loss,
            loss_by_pack=length * 3 * head.hidden_states,
            logits_by_pack=length * head.logits,
            logits_at_most=recipe.loss.chunk * head.logits if recipe.loss.kind == "chunked" else None,
            # One process adds it to the main gradient at once.
            backward=stored * head.weights if flops.tied and world_size > 1 else 0,
            backward_by_pack=length * _backward(layers, again),
        )

    def parts(self, microbatch: int) -> dict[str, int]:
        """Bytes by part at the peak, while a microbatch of that many packs is in flight; empty parts left out."""
        logits = self.logits_by_pack * microbatch
        at_the_loss = self.loss + self.loss_by_pack * microbatch
        at_the_loss += logits if self.logits_at_most is None else min(logits, self.logits_at_most)
        in_backward = self.backward + self.backward_by_pack * microbatch
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer moments": self.moments,
            "remainder bits": self.remainders,
            "BF16 working copies": self.working_copies,
            "quantized weights": self.quantized_weights,
            "activations": self.activations_by_pack * microbatch,
            "the loss": at_the_loss if at_the_loss >= in_backward else 0,
            "a layer's backward": in_backward if in_backward > at_the_loss else 0,
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


@dataclass(frozen=True)
class _HeadMemory:
    """Of the LM head and its loss. `logits` and `hidden_states` are bytes a token, the rest bytes."""

    weights: int  # how many
    quantized_weights: int
    at_the_loss: int
    logits: int
    hidden_states: int

    @classmethod
    def of(cls, recipe: Recipe, flops: ModelFlops, precision: str) -> _HeadMemory:
        shape, kind, products = flops.shape, recipe.loss.kind, PRECISIONS[precision]
        weights, computed = shape.vocabulary * shape.hidden, products.number_bytes
        quantized = products.quantized and recipe.fp8_config.scope != "linear"
        cast = recipe.weights == "fp32" and computed == 2 and not quantized
        # A fused head's products add a chunk's gradient to the sum (pretrain.model.loss.fp8_head).
        a_chunks_own = computed * weights if quantized and kind == "chunked" and not products.fuses_head else 0
        # The chunked loss overwrites a logit with its gradient, or writes that as an FP8 operand in both layouts beside it; the
        # reference keeps the product, the softmax and its gradient, the last two in FP32.
        logit = {"chunked": computed + (2 if quantized else 0), "reference": 8 + computed, "cce": 0}[kind]
        return cls(
            weights=weights,
            quantized_weights=2 * weights if quantized else 0,
            at_the_loss=(4 if kind == "chunked" else computed) * weights + (computed * weights if cast else 0) + a_chunks_own,
            logits=shape.vocabulary * logit,
            hidden_states=shape.hidden * computed,
        )


def _recomputed(recipe: Recipe, layers: int) -> list[bool]:
    """Of each layer, whether backward computes it again."""
    setting = recipe.model.gradient_checkpointing
    every = {"none": layers + 1, "full": 1}[setting] if isinstance(setting, str) else setting.every
    return [setting != "none" and index % every == 0 for index in range(layers)]


def _kept(layers: Sequence[LayerMemory], again: Sequence[bool]) -> list[int]:
    """Bytes a token that each layer keeps for backward."""
    return [layer.inputs if recomputed else layer.kept for layer, recomputed in zip(layers, again, strict=True)]


def _backward(layers: Sequence[LayerMemory], again: Sequence[bool]) -> int:
    """The most bytes a token that the backward of a layer stands in beyond what all layers keep.

    A layer that is recomputed is whole again while its backward runs; by then the layers behind it have given back theirs.
    """
    kept, given_back, most = _kept(layers, again), 0, 0
    for layer, size in zip(reversed(layers), reversed(kept), strict=True):
        most = max(most, layer.kept - size + layer.workspace - given_back)
        given_back += size
    return most


def _working_copies(layers: Sequence[LayerMemory], again: Sequence[bool]) -> int:
    """A fused layer keeps its copies for the whole step, another one while the graph of its forward lives."""
    passing = [not layer.fused and recomputed for layer, recomputed in zip(layers, again, strict=True)]
    kept = sum(layer.working_copies for layer, gone in zip(layers, passing, strict=True) if not gone)
    return kept + max((layer.working_copies for layer, gone in zip(layers, passing, strict=True) if gone), default=0)


def _moment_bytes(recipe: Recipe) -> int:
    moments = recipe.optimizer.moments or ("bf16" if recipe.weights == "bf16" else "fp32")
    return _BYTES[moments]
