"""Predict the speed of a training from the sizes of its model and the data sheet of its GPU.

The time of a step is the sum of eight parts: GEMMs, passes over memory, attention, the loss, sums
of gradients, the optimizer, launches of kernels, and communication. Three numbers are fitted to the
measured steps in benchmarks/planner_rows.csv: the shares of the dense peak that GEMMs sustain in
BF16, in FP8 with a scale per tensor, and in FP8 with a scale per block.
`python -m benchmarks.planner_fit` fits them again and prints the errors. The other constants are
read off profiles of steps and of kernels in benchmarks/results.

The error of a prediction is the error of the card (`pretrain.metrics.cards`), and at least
ROUGH_SPEED_ERROR on several GPUs, with experts, and with layers that are not fused. The speed is
not known if no step was measured on a similar card. The gain over BF16 may still be known, because
most errors are the same in both precisions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from foundation.units import count
from lab.speed.work import Work, work_of
from pretrain.metrics.cards import MEASURED, Card, card_called
from pretrain.metrics.flops import FLOPS_PER_WEIGHT
from pretrain.plan.plan import Plan
from pretrain.precision.formats.definition import StepCosts
from pretrain.precision.settings import BF16, PRECISIONS

# The precisions in which steps were measured.
COSTS = {name: precision.costs for name, precision in PRECISIONS.items() if precision.costs}
# Bytes that a token moves for each logit.
LOGIT_BYTES = 8
# Bytes that a microbatch moves for each parameter to sum gradients, by the bytes of a sum. GEMMs
# add to FP32 sums. If sums are BF16, gradients are written first.
SUMMING_BYTES = {4: 8, 2: 6}
# Kernels of attention: the FLOP/s of long documents, as a share of the FLOP/s of BF16 GEMMs, and
# the seconds of short documents for a token, head and layer on a card with FP32_OF_HOPPER TFLOP/s.
# The latter are in inverse proportion to the FP32 peak.
ATTENTION = {
    "packed_fa4": (0.72, 1.7e-9),
    "packed_triton": (0.45, 0.7e-9),
    "packed_varlen": (0.52, 3.8e-9),
    "packed_cudnn": (0.6, 2.0e-9),
    "packed_dense": (0.79, 2.8e-9),  # cuDNN in other trainers, for packs of one document
}
FP32_OF_HOPPER = 67.0
# Seconds of a layer and microbatch in which the GPU waits for the launches of kernels.
LAUNCH_SECONDS = 100e-6
# Shares of the rate in the data sheet that a copy in memory, NCCL and a copy to the host reach.
BANDWIDTH_SHARE = 0.88
LINK_SHARE = 0.79
PCIE_SHARE = 0.7
# A step waits as long as if it sent everything at this share of NCCL's rate after its backward.
EXPOSED_SHARE = 0.394
# Bytes of a parameter that are sent to sum its gradient over all devices, to gather its BF16 value,
# and to reduce its FP32 gradient.
SENT_BYTES = {"sum": 8, "gather": 2, "reduce": 4}

# Error of a speed on several GPUs, with experts, and with layers that are not fused. The measured
# steps of these classes differed by up to 12 % from the predicted ones.
ROUGH_SPEED_ERROR = 0.15
# Errors of a gain: if the speed has the error MEASURED, and in all other cases.
GAIN_ERROR = 0.05
ROUGH_GAIN_ERROR = 0.10
# No speed is predicted for microbatches with fewer tokens, because they wait for the host: FP8 was
# 6 and 16 % slower than predicted with 2,048 and 1,024 tokens (planner_rows.csv). More GPUs were
# not measured.
LEAST_MICROBATCH = 4096
HOST_GPUS = 8


@dataclass(frozen=True)
class Prediction:
    """Predicted speed, as a mean over the steps of a run."""

    # Tokens per second of all devices together, or None if the speed is not known.
    tokens_per_second: float | None = None
    # Largest expected error of the speed, as a fraction of the speed.
    error: float | None = None
    # Reason why the speed is not known, or "".
    reason: str = ""
    # Speed divided by the speed in BF16, or None if it is not known.
    gain: float | None = None
    # Largest expected error of the gain, as a fraction of the gain.
    gain_error: float | None = None


# ── The formula ───────────────────────────────────────────────────────────────────────────────────


def gemm_rate(card: Card, precision: str, costs: Mapping[str, StepCosts]) -> float:
    """Return the FLOP/s that the GEMMs of steps in a precision sustain on a card."""
    peak = card.bf16 if precision == BF16.name else card.fp8 or card.bf16
    return 1e12 * (card.factor or 1.0) * costs[precision].share * peak


def step_seconds(
    card: Card, work: Work, costs: Mapping[str, StepCosts] = COSTS
) -> dict[str, float]:
    """Return the seconds of each part of a step.

    costs: the costs of each precision, with the shares of the peak.
    """
    flops = work.flops
    shape = flops.shape
    # Factors by which recomputation in backward makes times longer.
    gemm_factor, pass_factor, attention_factor = (1 + share for share in work.recomputed_shares)
    microbatches = work.tokens / work.microbatch
    bf16_rate = gemm_rate(card, BF16.name, costs)
    precision_rate = gemm_rate(card, work.precision, costs)
    layer_gemms, head_gemms = _gemm_seconds(work, bf16_rate, precision_rate)
    bandwidth = BANDWIDTH_SHARE * 1e12 * card.bandwidth
    link = LINK_SHARE * 1e9 * (card.nvlink or card.pcie)
    # Products add to all of their gradient sums. A lookup adds only to the rows of its tokens.
    only_looked_up = 0 if flops.tied else flops.embedding_parameters
    summed = flops.parameters - only_looked_up
    stored = flops.parameters / work.devices.shards
    # Bytes that AdamW moves in the device's memory for each parameter: 4 bytes of the weight are
    # read and written, and so are the moments, unless they are copied from the host and back.
    moved_moments = 0 if work.offloaded_bytes else 2 * work.moment_bytes
    moved_bytes = 2 * 4 + 3 * work.gradient_bytes + moved_moments
    optimizer = stored * moved_bytes / bandwidth
    optimizer += stored * work.offloaded_bytes / (PCIE_SHARE * 1e9 * card.pcie)
    return {
        "GEMMs": work.tokens * (layer_gemms * gemm_factor + head_gemms),
        "passes": work.tokens * _pass_bytes(work) * pass_factor / bandwidth,
        "attention": work.tokens * _attention_seconds(card, work, bf16_rate) * attention_factor,
        "loss": work.tokens * LOGIT_BYTES * shape.vocabulary / bandwidth,
        "gradient sums": microbatches * summed * SUMMING_BYTES[work.gradient_bytes] / bandwidth,
        "optimizer": optimizer,
        "launches": microbatches * shape.layers * LAUNCH_SECONDS,
        "communication": _bytes_sent(work, microbatches) / (EXPOSED_SHARE * link),
    }


def _gemm_seconds(work: Work, bf16_rate: float, precision_rate: float) -> tuple[float, float]:
    """Return the seconds per token of the GEMMs of the layers, and of the GEMMs of the LM head.

    bf16_rate, precision_rate: the FLOP/s of GEMMs in BF16, and in the precision of the step.
    """
    flops = work.flops
    # Seconds of a weight in the precision of the step, and in BF16.
    in_precision = FLOPS_PER_WEIGHT / precision_rate
    in_bf16 = FLOPS_PER_WEIGHT / bf16_rate
    dense_weights = flops.attention_weights + flops.mlp_weights
    dense = dense_weights * (work.bf16_share * in_bf16 + (1 - work.bf16_share) * in_precision)
    expert_seconds = work.bf16_experts_share * in_bf16 / COSTS[BF16.name].grouped
    expert_seconds += (1 - work.bf16_experts_share) * in_precision / COSTS[work.precision].grouped
    head = flops.head_weights * (in_precision if work.quantized_head else in_bf16)
    return dense + flops.expert_weights * expert_seconds, head


def _pass_bytes(work: Work) -> float:
    """Return the bytes that a token moves in passes over memory, in all layers."""
    costs = COSTS[work.precision]
    shape = work.flops.shape
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # The MLP's width, summed over all layers, if the MLP has three matrices. An MLP without a gate
    # has two matrices, and moves about two thirds of the bytes.
    width = (work.flops.mlp_weights + work.flops.expert_weights) / (3 * shape.hidden)
    moved = shape.layers * (costs.hidden * shape.hidden + costs.qkv * qkv) + costs.mlp * width
    return moved if work.fused else costs.unfused * moved


def _attention_seconds(card: Card, work: Work, bf16_rate: float) -> float:
    """Return the seconds of a token in the attention of all layers.

    bf16_rate: the FLOP/s of GEMMs in BF16.
    """
    rate_share, seconds_on_hopper = ATTENTION[work.attention]
    flops_per_token = work.flops.per_squared_length * work.squared_length_per_token
    # The first part grows with the length of documents. The second part is that of short ones.
    shape = work.flops.shape
    short_seconds = shape.layers * shape.heads * seconds_on_hopper * FP32_OF_HOPPER / card.fp32
    return flops_per_token / (rate_share * bf16_rate) + short_seconds


def _bytes_sent(work: Work, microbatches: float) -> float:
    """Return the bytes that a device sends in a step.

    microbatches: the number of microbatches in a step.
    """
    devices = work.devices
    stored = work.flops.parameters / devices.shards
    # The devices that have the same shard sum its gradients. Without shards, these are all devices.
    copies = devices.count // devices.shards
    sent = SENT_BYTES["sum"] * stored * (copies - 1) / copies
    if devices.shards == 1:
        return sent
    gathered_once_share = 1.0
    reductions = 1.0
    if devices.topology == "fsdp2":
        gathered_once_share = work.coded_share
        reductions = microbatches
    # All other weights are gathered by forward and backward of each microbatch.
    gathers = gathered_once_share + (1 - gathered_once_share) * 2 * microbatches
    sent_per_parameter = SENT_BYTES["gather"] * gathers + SENT_BYTES["reduce"] * reductions
    # Each shard is sent to, or reduced with, all other shards.
    return sent + sent_per_parameter * stored * (devices.shards - 1)


# ── The prediction and its error ──────────────────────────────────────────────────────────────────


def predict(plan: Plan) -> Prediction:
    """Return the predicted speed of a run on the devices of its plan, which can run it."""
    card = card_called(plan.devices.name, "--on")
    seconds = in_bf16 = 0.0
    error = card.error or 0.0
    for first, last, active in plan.schedule.spans:
        work = work_of(plan, active)
        if reason := _why_not_predicted(plan, card, work):
            return Prediction(reason=reason)
        if work.devices.count > 1 or work.flops.expert_weights or not work.fused:
            error = max(error, ROUGH_SPEED_ERROR)
        steps = last - first + 1
        seconds += steps * sum(step_seconds(card, work).values())
        in_bf16 += steps * sum(step_seconds(card, _in_bf16(work)).values())
    gain = in_bf16 / seconds
    if card.error is None:
        reason = "no step was measured on a similar card"
        return Prediction(reason=reason, gain=gain, gain_error=ROUGH_GAIN_ERROR)
    speed = plan.total_tokens / seconds
    gain_error = GAIN_ERROR if error == MEASURED else ROUGH_GAIN_ERROR
    return Prediction(speed, error, gain=gain, gain_error=gain_error)


def _in_bf16(work: Work) -> Work:
    """Return the work of the same step in BF16."""
    return replace(
        work,
        precision=BF16.name,
        quantized_head=False,
        bf16_share=0.0,
        bf16_experts_share=0.0,
        coded_share=0.0,
    )


def _why_not_predicted(plan: Plan, card: Card, work: Work) -> str | None:
    """Return the reason why neither speed nor gain is predicted for a step of `plan`, or None."""
    precision = work.precision
    costs = COSTS.get(precision)
    devices = plan.devices
    if costs is None or card.capability >= costs.below:
        return f"no step in {precision} was measured on such a card"
    if plan.recipe.optimizer.name == "muon":
        return "no step with Muon is predicted; with AdamW, a step is a little shorter"
    if work.flops.state_values or work.flops.changed_scores:
        return "no speed is predicted for layers with a state, capped scores or attention sinks"
    if work.attention not in ATTENTION:
        return f"no step with the attention {work.attention} was measured"
    if plan.recipe.model.compile == "none" and not work.fused:
        return "no step with layers that are neither fused nor compiled was measured"
    if work.flops.parameters < costs.least_parameters:
        return f"no speed is predicted below {count(costs.least_parameters)} parameters"
    if work.microbatch < LEAST_MICROBATCH:
        return f"microbatches of less than {LEAST_MICROBATCH:,} tokens wait for the host"
    if devices.count > 1 and not card.nvlink:
        return "several cards without NVLink were not measured"
    if devices.count > HOST_GPUS:
        return f"more than {HOST_GPUS} cards were not measured"
    return "the speed of emulation is not predicted" if plan.emulated else None
