"""Predict the speed of a training from the sizes of its model and the data sheet of its GPU.

The time of a step is the sum of eight parts: GEMMs, passes over memory, attention, the loss, sums
of gradients, the optimizer, launches of kernels, and communication. Three numbers are fitted to the
measured steps in rows.csv: the shares of the dense peak that GEMMs sustain in BF16, FP8 and block
scaling. `python -m benchmarks.planner_fit` fits them again and prints the errors. The other
constants are from profiles of steps and kernels in benchmarks/results.

`predict` says how sure a prediction is:

* A step of the same model was measured on the same card, and the formula predicts at most a tenth
  more or less time per token. The measured speed is scaled by the predicted ratio.
* Another model on a card with measured steps, with published steps of another trainer, or of a
  class of cards with such steps. The error of the card (pretrain.metrics.cards) is the bar. It is
  wider for work of which only a few steps were measured.
* No speed, if nothing similar was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from pretrain.metrics.cards import MEASURED, Card, card_of
from pretrain.plan.plan import Plan
from pretrain.plan.rows import measured_steps
from pretrain.plan.work import Work, work_of
from pretrain.precision.formats.definition import BLACKWELL
from pretrain.precision.settings import BF16


@dataclass(frozen=True)
class Costs:
    """Costs of a step in one precision."""

    # Share of the dense peak that long GEMMs sustain. It is fitted, and includes errors of the
    # other parts.
    share: float
    # Bytes that a token moves in forward and backward of a layer, for each value of the hidden
    # width, of the MLP's width, and of queries, keys and values. From profiles of steps.
    hidden: int
    mlp: int
    qkv: int
    # Factor of these bytes if layers are not fused.
    unfused: float
    # Speed of grouped GEMMs of experts, relative to dense GEMMs.
    grouped: float
    # True if only one model was measured.
    rare: bool = False
    # Compute capability from which Transformer Engine uses other kernels, which are not measured.
    below: tuple[int, int] = (99, 0)


COSTS = {
    "bf16": Costs(0.696, 24, 18, 12, 1.8, 0.87),
    "delayed": Costs(0.645, 48, 18, 14, 2.4, 0.67),
    "current": Costs(0.645, 54, 27, 20, 2.4, 0.67, rare=True),
    "block": Costs(0.512, 58, 27, 18, 2.4, 0.67, rare=True, below=BLACKWELL),
}
# Bytes that a token moves for each logit.
LOGIT = 8
# Bytes that a microbatch moves for each parameter to sum gradients, by the bytes of a sum. GEMMs
# add to FP32 sums. If sums are BF16, gradients are written first.
SUMMED = {4: 8, 2: 6}
# Kernels of attention: share of the sustained BF16 rate that long documents reach, and seconds for
# a token, head and layer on a card with FP32_OF_HOPPER, because the work of short documents follows
# the arithmetic units outside of the tensor cores.
ATTENTION = {
    "packed_fa4": (0.50, 1.7e-9),
    "packed_triton": (0.23, 0.5e-9),
    "packed_varlen": (0.36, 3.8e-9),
    "packed_cudnn": (0.55, 2.8e-9),  # in steps of other trainers
}
FP32_OF_HOPPER = 67.0
# Share of the data sheet's memory bandwidth that a copy reaches.
BANDWIDTH = 0.88
# Kernel launches of a layer and microbatch that the GPU waits for, and seconds of one launch.
LAUNCHES = 40
LAUNCH = 2.5e-6
# Shares of the data sheet's rate that NCCL over NVLink and copies to the host reach.
NCCL = 0.79
HOST = 0.7
# Share of NCCL's rate with which a step waits for communication if nothing is hidden.
EXPOSED = 0.394
# Bytes that a parameter sends in a step if nothing is sharded (FP32 gradients, summed and sent
# back), if gradients and weights are sent once a step, and for each microbatch.
SENT = {"ddp": 8, "zero": 6, "fsdp2": 8}

# Classes of work: the half-width of the error of a speed, as a fraction.
SAME = 0.04  # measured on another host
KNOWN_RATES = 0.10  # the rates of the card were measured
FEW = 0.15  # few steps were measured
GATHERED_OFTEN = 0.30  # weights are gathered for each use
# Half-width of the error of a gain over BF16. The error of a card has the same effect in both
# precisions.
GAIN = 0.05
GAIN_OF_FEW = 0.10
# A prediction may differ from a measured step by this factor of time per token.
SIMILAR = 1.10
# A model with fewer parameters waits for the host.
SMALL = 50_000_000
# No microbatch with fewer tokens was measured.
LEAST_MICROBATCH = 4096
# GPUs of one host with NVLink.
HOST_GPUS = 8


@dataclass(frozen=True)
class Rates:
    """Rates that a card sustains: of its data sheet, or as measured."""

    # FLOP/s of long GEMMs by the name of the precision.
    gemm: Mapping[str, float]
    # Bytes/s that a copy reads and writes.
    bandwidth: float
    # Seconds of the host for one kernel launch.
    launch: float
    # Bytes/s of NCCL by the bytes of the message.
    nccl: Mapping[int, float]


@dataclass(frozen=True)
class Prediction:
    """Predicted speed of a run, as a mean over its steps."""

    # Seconds of each part of a step.
    parts: Mapping[str, float]
    # Tokens of a step, of all devices together.
    tokens: int
    # None if the speed is not known.
    tokens_per_second: float | None
    # Half-width of the error as a fraction. None if the speed is not known.
    bar: float | None
    # Evidence behind the speed, or the reason why it is not known.
    basis: str
    # Speed divided by the speed in BF16, and the half-width of its error. None if not known.
    gain: float | None
    gain_bar: float | None


def rates_of(card: Card, costs: Mapping[str, Costs] = COSTS) -> Rates:
    """Return the rates of the card's data sheet that steps sustain.

    costs: the costs of each precision. The benchmark of the fit passes others.
    """
    factor = 1e12 * (card.factor or 1.0)
    peaks = {name: card.bf16 if name == BF16.name else (card.fp8 or card.bf16) for name in costs}
    return Rates(
        {name: factor * costs[name].share * peaks[name] for name in costs},
        BANDWIDTH * card.bandwidth * 1e12,
        LAUNCH,
        {0: NCCL * (card.nvlink or card.pcie) * 1e9},
    )


def step_seconds(card: Card, work: Work, rates: Rates | None = None) -> dict[str, float]:
    """Return the seconds of each part of a step.

    rates: measured rates of the card. None: the rates of its data sheet.
    """
    rates = rates or rates_of(card)
    gemms, passes, attention = (1 + share for share in work.recomputed)
    microbatches = work.tokens / work.microbatch
    in_layers, in_head = _products(work, rates)
    summed = work.parameters - (0 if work.tied else work.hidden * work.vocabulary)
    own = work.parameters / work.shards
    state = 2 * work.weights + 3 * work.gradients + (0 if work.offloaded else 2 * work.moments)
    copied = own * work.offloaded / (HOST * card.pcie * 1e9)
    link = EXPOSED * rates.nccl[max(rates.nccl)]
    return {
        "GEMMs": 6 * work.tokens * (in_layers * gemms + in_head),
        "passes": work.tokens * _moved(work) * passes / rates.bandwidth,
        "attention": work.tokens * _in_attention(card, work, rates) * attention,
        "loss": work.tokens * LOGIT * work.vocabulary / rates.bandwidth,
        "gradient sums": microbatches * summed * SUMMED[work.gradients] / rates.bandwidth,
        "optimizer": own * state / rates.bandwidth + copied,
        "launches": microbatches * work.layers * LAUNCHES * rates.launch,
        "communication": _sent(work, microbatches) / link,
    }


def _products(work: Work, rates: Rates) -> tuple[float, float]:
    """Return the weights of the layers and of the LM head, each divided by the rate of its GEMM."""
    low, plain = rates.gemm[work.precision], rates.gemm[BF16.name]
    grouped, grouped_plain = COSTS[work.precision].grouped, COSTS[BF16.name].grouped
    dense = work.layer_weights - work.expert_weights
    in_dense = dense * (work.kept / plain + (1 - work.kept) / low)
    in_experts = work.expert_weights * (
        work.experts_kept / (grouped_plain * plain) + (1 - work.experts_kept) / (grouped * low)
    )
    return in_dense + in_experts, work.head_weights / (low if work.low_head else plain)


def _moved(work: Work) -> float:
    """Return the bytes that a token moves in passes over memory, in all layers."""
    costs = COSTS[work.precision]
    qkv = (work.heads + 2 * work.kv_heads) * work.head_dim
    # An MLP without a gate has fewer tensors.
    width = (1.0 if work.gated else 0.7) * work.feed_forward
    moved = costs.hidden * work.hidden + costs.mlp * width + costs.qkv * qkv
    return work.layers * moved * (1.0 if work.fused else costs.unfused)


def _in_attention(card: Card, work: Work, rates: Rates) -> float:
    """Return the seconds of a token in the attention of all layers."""
    share, short = ATTENTION[work.attention]
    # The BF16 peak of the card, times its factor.
    peak = rates.gemm[BF16.name] / COSTS[BF16.name].share
    scores = 6 * work.head_dim * work.squares / (share * peak)
    return work.layers * work.heads * (scores + short * FP32_OF_HOPPER / card.fp32)


def _sent(work: Work, microbatches: float) -> float:
    """Return the bytes that a device sends in a step, without overhead of the algorithm."""
    if work.gpus == 1:
        return 0.0
    own = work.parameters / work.shards
    if work.topology == "ddp":
        return SENT["ddp"] * work.parameters * (work.gpus - 1) / work.gpus
    times = microbatches if work.topology == "fsdp2" else 1
    within = SENT[work.topology] * times * own * (work.shards - 1)
    # Each device sums the gradients of its shard with those of the other copies of the model.
    copies = work.gpus // work.shards
    return within + SENT["ddp"] * own * (copies - 1) / copies


def predict(plan: Plan, rates: Rates | None = None) -> Prediction:
    """Return the predicted speed of a run on the devices of its plan.

    rates: measured rates of the device. None: the rates of its data sheet.
    """
    card = card_of(plan.devices.name)
    spans = plan.schedule.spans
    works = [work_of(plan, span.active) for span in spans]
    reason = next(filter(None, (_not_predicted(card, work) for work in works)), None)
    if plan.emulated:
        reason = "emulation is slower than the hardware, and its speed is not predicted"
    if card is None or reason:
        return Prediction({}, plan.tokens_per_step, None, None, reason or "", None, None)
    steps = [_predict_step(card, work, rates) for work in works]
    shares = [(span.last - span.first + 1) / plan.steps for span in spans]
    parts = {
        name: sum(share * step.parts[name] for step, share in zip(steps, shares, strict=True))
        for name in steps[0].parts
    }
    seconds = sum(parts.values())
    in_bf16 = sum(share * step.in_bf16 for step, share in zip(steps, shares, strict=True))
    widest = max(steps, key=lambda step: step.bar or 1.0)
    basis = widest.basis
    if plan.mean_squared == plan.recipe.data.length:
        basis += ", each pack counted as one document"
    return Prediction(
        parts,
        plan.tokens_per_step,
        plan.tokens_per_step / seconds if widest.bar else None,
        widest.bar,
        basis,
        in_bf16 / seconds,
        max(step.gain_bar for step in steps),
    )


@dataclass(frozen=True)
class _Step:
    """Prediction for a step in one precision."""

    parts: Mapping[str, float]
    # Seconds of the same step in BF16.
    in_bf16: float
    bar: float | None
    basis: str
    gain_bar: float


def _predict_step(card: Card, work: Work, rates: Rates | None) -> _Step:
    """Return the prediction for a step, scaled to the measured steps of the same kind."""
    plain = replace(work, precision=BF16.name, low_head=False)
    parts = step_seconds(card, work, rates)
    in_bf16 = sum(step_seconds(card, plain, rates).values())
    bar = bar_of(card, work, has_rates=rates is not None)
    basis = "no step was measured on a similar card" if bar is None else f"± {100 * bar:.0f} %"
    gain_bar = GAIN if bar and bar <= MEASURED else GAIN_OF_FEW
    scale = measured_scale(card, work, rates)
    if scale is None:
        return _Step(parts, in_bf16, bar, basis, gain_bar)
    return _Step(
        {name: scale * seconds for name, seconds in parts.items()},
        in_bf16 * (measured_scale(card, plain, rates) or scale),
        SAME,
        f"measured (hosts differ by {100 * SAME:.0f} %)",
        GAIN,
    )


def bar_of(card: Card, work: Work, *, has_rates: bool = False) -> float | None:
    """Return the half-width of the error of a predicted speed, or None if it is not known.

    has_rates: True if the rates of the card were measured.
    """
    error = KNOWN_RATES if has_rates else card.error
    if error is None:
        return None
    if work.topology == "fsdp2":
        return max(error, GATHERED_OFTEN)
    is_rare = (
        COSTS[work.precision].rare
        or not work.fused
        or work.expert_weights > 0
        or any(work.recomputed)
        or work.gpus > 1
    )
    return max(error, FEW) if is_rare else error


def _not_predicted(card: Card | None, work: Work) -> str | None:
    """Return the reason why no speed is predicted, or None."""
    if card is None:
        return "the data sheet of this device is not in the table"
    costs = COSTS.get(work.precision)
    if costs is None or card.capability >= costs.below:
        return f"no step in {work.precision} was measured on such a card"
    # Map each reason to a value that is true if the reason applies.
    reasons = {
        f"this card has no {work.precision} GEMMs": work.precision != BF16.name and not card.fp8,
        f"no step with {work.attention or 'this attention'} was measured": (
            work.attention not in ATTENTION
        ),
        "a model of less than 50 million parameters waits for the host": work.parameters < SMALL,
        f"no microbatch of less than {LEAST_MICROBATCH:,} tokens was measured": (
            work.microbatch < LEAST_MICROBATCH
        ),
        "several such cards were never measured, because they have no NVLink": (
            work.gpus > 1 and not card.nvlink
        ),
        "no more than one host was measured": work.gpus > HOST_GPUS,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def measured_scale(card: Card, work: Work, rates: Rates | None = None) -> float | None:
    """Return the measured time of steps of the same kind, divided by the predicted time.

    Such a step has the same model, card, precision and kernels. Its microbatch and its documents
    may differ, if the predicted time per token differs by at most the factor SIMILAR. Return the
    median of all such steps, or None if none was measured.
    """
    seconds = sum(step_seconds(card, work).values()) / work.tokens
    ratios = []
    for step in measured_steps():
        same = replace(
            step.work,
            parameters=work.parameters,
            layer_weights=work.layer_weights,
            head_weights=work.head_weights,
            squares=work.squares,
            tokens=work.tokens,
            microbatch=work.microbatch,
        )
        if step.card == card.name and same == work:
            predicted = sum(step_seconds(card, step.work).values()) / step.work.tokens
            if 1 / SIMILAR <= seconds / predicted <= SIMILAR:
                ratios.append(step.work.gpus / step.tokens_per_second / predicted)
    if not ratios:
        return None
    # The scale is applied to times by `rates`.
    by_rates = sum(step_seconds(card, work, rates).values()) / work.tokens
    return median(ratios) * seconds / by_rates
