"""Predict the speed of a training from the sizes of its model and the data sheet of its GPU.

The time of a step is the sum of eight parts: GEMMs, passes over memory, attention, the loss, sums
of gradients, the optimizer, launches of kernels, and communication. Three numbers are fitted to the
measured steps in benchmarks/planner_rows.csv: the shares of the dense peak that GEMMs sustain in
BF16, in FP8 with a scale per tensor, and in FP8 with a scale per block.
`python -m benchmarks.planner_fit` fits them again and prints the errors. The other constants are
read off profiles of steps and of kernels in benchmarks/results.

The bar of a prediction is the error of the card (`pretrain.metrics.cards`), and at least
ROUGH_SPEED on several GPUs, with experts, and with layers that are not fused. The speed is not
known if no step was measured on a similar card. The gain over BF16 may still be known, because most
errors are the same in both precisions.
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
LOGIT = 8
# Bytes that a microbatch moves for each parameter to sum gradients, by the bytes of a sum. GEMMs
# add to FP32 sums. If sums are BF16, gradients are written first.
SUMMED = {4: 8, 2: 6}
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
LAUNCHES = 100e-6
# Shares of the rate in the data sheet that a copy in memory, NCCL and a copy to the host reach.
OF_BANDWIDTH = 0.88
OF_LINK = 0.79
OF_PCIE = 0.7
# A step waits as long as if it sent everything at this share of NCCL's rate after its backward.
EXPOSED = 0.394
# Bytes of a parameter that are sent to sum its gradient over all devices, to gather its BF16 value,
# and to reduce its FP32 gradient.
SENT = {"sum": 8, "gather": 2, "reduce": 4}

# Half-width of the error of a speed on several GPUs, with experts, and with layers that are not
# fused. The measured steps of these classes differed by up to 12 % from the predicted ones.
ROUGH_SPEED = 0.15
# Half-widths of the error of a gain: if the speed has the error MEASURED, and in all other cases.
GAIN = 0.05
ROUGH_GAIN = 0.10
# No speed is predicted for microbatches with fewer tokens, because they wait for the host: FP8 was
# 6 and 16 % slower than predicted with 2,048 and 1,024 tokens (planner_rows.csv). More GPUs were
# not measured.
LEAST_MICROBATCH = 4096
HOST_GPUS = 8


@dataclass(frozen=True)
class Prediction:
    """Predicted speed, as a mean over the steps of a run."""

    # Tokens per second of all devices together, and the half-width of its error as a fraction. None
    # if the speed is not known.
    tokens_per_second: float | None = None
    bar: float | None = None
    # Reason why the speed is not known, or "".
    reason: str = ""
    # Speed divided by the speed in BF16, and the half-width of its error. None if not known.
    gain: float | None = None
    gain_bar: float | None = None


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
    # Factors of the times that recomputation in backward makes longer.
    gemms, passes, attention = (1 + share for share in work.recomputed)
    microbatches = work.tokens / work.microbatch
    in_bf16 = gemm_rate(card, BF16.name, costs)
    in_layers, in_head = _gemm_seconds(work, in_bf16, gemm_rate(card, work.precision, costs))
    bandwidth = OF_BANDWIDTH * 1e12 * card.bandwidth
    link = OF_LINK * 1e9 * (card.nvlink or card.pcie)
    # Products add to all of their gradient sums. A lookup adds only to the rows of its tokens.
    only_looked_up = 0 if flops.tied else flops.embedding_parameters
    summed = flops.parameters - only_looked_up
    share = flops.parameters / work.devices.shards
    # Bytes that AdamW moves in the device's memory for each parameter: 4 bytes of the weight are
    # read and written, and so are the moments, unless they are copied from the host and back.
    moments = 0 if work.offloaded else 2 * work.moments
    moved = 2 * 4 + 3 * work.gradients + moments
    optimizer = share * moved / bandwidth
    optimizer += share * work.offloaded / (OF_PCIE * 1e9 * card.pcie)
    return {
        "GEMMs": work.tokens * (in_layers * gemms + in_head),
        "passes": work.tokens * _moved(work) * passes / bandwidth,
        "attention": work.tokens * _attention_seconds(card, work, in_bf16) * attention,
        "loss": work.tokens * LOGIT * shape.vocabulary / bandwidth,
        "gradient sums": microbatches * summed * SUMMED[work.gradients] / bandwidth,
        "optimizer": optimizer,
        "launches": microbatches * shape.layers * LAUNCHES,
        "communication": _sent(work, microbatches) / (EXPOSED * link),
    }


def _gemm_seconds(work: Work, in_bf16: float, in_precision: float) -> tuple[float, float]:
    """Return the seconds per token of the GEMMs of the layers, and of the GEMMs of the LM head.

    in_bf16, in_precision: the FLOP/s of GEMMs in BF16, and in the precision of the step.
    """
    flops = work.flops
    low = FLOPS_PER_WEIGHT / in_precision
    plain = FLOPS_PER_WEIGHT / in_bf16
    dense = flops.attention_weights + flops.mlp_weights
    in_experts = work.experts_kept * plain / COSTS[BF16.name].grouped
    in_experts += (1 - work.experts_kept) * low / COSTS[work.precision].grouped
    in_layers = dense * (work.kept * plain + (1 - work.kept) * low)
    in_head = flops.head_weights * (low if work.low_head else plain)
    return in_layers + flops.expert_weights * in_experts, in_head


def _moved(work: Work) -> float:
    """Return the bytes that a token moves in passes over memory, in all layers."""
    costs = COSTS[work.precision]
    shape = work.flops.shape
    qkv = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    # The MLP's width, summed over all layers, if the MLP has three matrices. An MLP without a gate
    # has two matrices, and moves about two thirds of the bytes.
    width = (work.flops.mlp_weights + work.flops.expert_weights) / (3 * shape.hidden)
    moved = shape.layers * (costs.hidden * shape.hidden + costs.qkv * qkv) + costs.mlp * width
    return moved if work.fused else costs.unfused * moved


def _attention_seconds(card: Card, work: Work, in_bf16: float) -> float:
    """Return the seconds of a token in the attention of all layers.

    in_bf16: the FLOP/s of GEMMs in BF16.
    """
    share, of_short_on_hopper = ATTENTION[work.attention]
    of_long = work.flops.per_squared_length * work.mean_squared / (share * in_bf16)
    shape = work.flops.shape
    of_short = shape.layers * shape.heads * of_short_on_hopper * FP32_OF_HOPPER / card.fp32
    return of_long + of_short


def _sent(work: Work, microbatches: float) -> float:
    """Return the bytes that a device sends in a step."""
    copies = work.devices.count // work.devices.shards
    share = work.flops.parameters / work.devices.shards
    # The devices that have the same shard sum its gradients. Without shards, these are all devices.
    sent = SENT["sum"] * share * (copies - 1) / copies
    if work.devices.shards > 1:
        # Share of the weights that are gathered once a step. The others are gathered by forward and
        # backward of each microbatch.
        once = 1.0 if work.devices.topology == "zero" else work.keeping_codes
        reductions = microbatches if work.devices.topology == "fsdp2" else 1
        gathers = once + (1 - once) * 2 * microbatches
        bytes_sent = SENT["gather"] * gathers + SENT["reduce"] * reductions
        sent += bytes_sent * share * (work.devices.shards - 1)
    return sent


# ── The prediction and its error ──────────────────────────────────────────────────────────────────


def predict(plan: Plan) -> Prediction:
    """Return the predicted speed of a run on the devices of its plan, which can run it."""
    card = card_called(plan.devices.name, "--on")
    seconds = in_bf16 = 0.0
    error = card.error or 0.0
    for first, last, active in plan.schedule.spans:
        work = work_of(plan, active)
        if reason := _why_not(plan, card, work):
            return Prediction(reason=reason)
        if work.devices.count > 1 or work.flops.expert_weights or not work.fused:
            error = max(error, ROUGH_SPEED)
        steps = last - first + 1
        seconds += steps * sum(step_seconds(card, work).values())
        in_bf16 += steps * sum(step_seconds(card, _in_bf16(work)).values())
    gain = in_bf16 / seconds
    if card.error is None:
        reason = "no step was measured on a similar card"
        return Prediction(reason=reason, gain=gain, gain_bar=ROUGH_GAIN)
    gain_bar = GAIN if error == MEASURED else ROUGH_GAIN
    return Prediction(plan.total_tokens / seconds, error, gain=gain, gain_bar=gain_bar)


def _in_bf16(work: Work) -> Work:
    """Return the work of the same step in BF16."""
    return replace(
        work, precision=BF16.name, low_head=False, kept=0.0, experts_kept=0.0, keeping_codes=0.0
    )


def _why_not(plan: Plan, card: Card, work: Work) -> str | None:
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
