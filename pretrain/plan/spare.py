"""What the memory of devices decides beside the microbatch: whether queries, keys and values are kept that backward else makes
again, and the chunks of the loss: longer than usual for a small vocabulary, shorter where they do not fit.

On one H200 with Qwen3-1.7B in FP8, keeping them made steps 1.5 % shorter, together with chunks of 8,192 tokens in place of 4,096
(benchmarks/results/h200_fused_steps.json). Such chunks alone gained nothing (h200_attention_in_steps.json) and take memory: with
its 151,936 words 4,096 tokens keep a GPU busy. With 8,192 words they do not, and launching them takes longer than computing them,
so a chunk has as many tokens as make `LOGITS` of them. Microbatches of up to 32,768 tokens go before what is kept, and what that
leaves goes to larger ones with `batch.microbatch: auto`.

The choices follow from settings and the device's memory alone. Chunks change the order of sums, so a checkpoint says which ones
its run took (pretrain.run.resume); what is kept changes no number.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pretrain.plan.plan import Plan
from pretrain.settings.recipe import USUAL_CHUNK

KEPT_FREE = 0.08  # of a device's memory, beside what the plan counts: CUDA, NCCL, fragments
FULL_SPEED = 32_768  # tokens of a microbatch, beyond which a larger one gains less than what is decided here
LOGITS = 2**29  # of a chunk, 1 GiB in BF16: the usual 4,096 tokens with 131,072 words
SHORT_CHUNKS = (2048, 1024)  # where the usual one would not fit at all


def spend_spare_memory(plan: Plan) -> Plan:
    """`plan` with what its devices' memory allows; plans for devices of unknown memory, and for CPUs, stay as they are."""
    plan = replace(plan, chunk=None, keeps_rotated=False)
    if plan.devices.memory is None or plan.devices.name == "CPU":  # nothing is kept on a CPU
        return plan
    enough = max(1, FULL_SPEED // plan.recipe.data.length)
    fits = [size for size in plan.microbatch_sizes if size <= min(enough, plan.expected_microbatch)]
    packs = plan.microbatch or max(fits, default=1)
    if plan.recipe.loss.kind == "chunked" and plan.recipe.loss.chunk == "auto":
        plan = replace(plan, chunk=_chunk(plan, packs))
    keeping = replace(plan, keeps_rotated=True)
    recomputed = plan.recipe.model.gradient_checkpointing != "none"
    spends = not recomputed and keeping.memory.total(packs) > plan.memory.total(packs)
    return keeping if spends and _has_room(keeping, packs) else plan


def _chunk(plan: Plan, packs: int) -> int | None:
    """Returns the chunk of the loss for which there is room; None for the usual one."""
    tokens = min(LOGITS // plan.flops.shape.vocabulary, packs * plan.recipe.data.length)
    longer = 2 ** int(math.log2(max(tokens, 1)))
    if longer > USUAL_CHUNK and _has_room(replace(plan, chunk=longer), packs):
        return longer
    for chunk in (None, *SHORT_CHUNKS):
        if replace(plan, chunk=chunk).memory.total(packs) <= plan.devices.memory:
            return chunk
    return SHORT_CHUNKS[-1]


def _has_room(plan: Plan, packs: int) -> bool:
    return plan.memory.total(packs) <= (1 - KEPT_FREE) * plan.devices.memory
