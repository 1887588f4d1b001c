"""Predict the speed of a training from the sizes of its model and the data sheet of its GPU.

The time of a step is the sum of eight parts: GEMMs, passes over memory, attention, the loss, sums
of gradients, the optimizer, launches of kernels, and communication. Three numbers are fitted to the
measured steps in benchmarks/planner_rows.csv: the shares of the dense peak that GEMMs sustain in
BF16, in FP8 with a scale per tensor, and in FP8 with a scale per block.
`python -m benchmarks.planner_fit` fits them again and prints the errors. The other constants are
read off profiles of steps and of kernels in benchmarks/results.

A prediction has one of these bases:

* Measured: measured.csv has a step of the same kind on one such card. The same kind is the same
  model, precision, kernels and state of the optimizer. Microbatch and document lengths may differ
  as long as the formula predicts at most 5 % more or less time per token. The prediction is
  multiplied by the measured time of the step divided by its predicted time.
* Predicted from rates that this machine has measured.
* Predicted from the data sheet: the bar is the error of the card (`pretrain.metrics.cards`). It is
  wider for work of which few steps were measured.
* No speed, if no similar step was measured. The gain over BF16 may still be known, because most
  errors are the same in both precisions.

`python -m benchmarks.planner_rows` writes measured.csv. Its columns `predicted` and `measured` are
microseconds for a token.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pretrain.metrics.card_rates import CardRates, read_rates
from pretrain.metrics.cards import GUESSED, MEASURED, Card, card_of
from pretrain.metrics.flops import FLOPS_PER_WEIGHT
from pretrain.plan.plan import Plan
from pretrain.plan.work import Work, work_of
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
    "packed_triton": (0.33, 0.5e-9),
    "packed_varlen": (0.52, 3.8e-9),
    "packed_cudnn": (0.6, 2.0e-9),
    "packed_dense": (0.79, 2.8e-9),  # cuDNN in other trainers, for packs of one document
}
FP32_OF_HOPPER = 67.0
# Kernel launches of a layer and microbatch that the GPU waits for, and the seconds of a launch.
LAUNCHES = 40
LAUNCH = 2.5e-6
# Shares of the rate in the data sheet that a copy in memory, NCCL and a copy to the host reach.
OF_BANDWIDTH = 0.88
OF_LINK = 0.79
OF_PCIE = 0.7
# A step waits as long as if it sent everything at this share of NCCL's rate after its backward.
EXPOSED = 0.394
# Bytes that Muon moves for each weight in addition to AdamW, and that it sends to gather directions
# and updates. They are counted in its code, and not measured.
MUON = 48
MUON_SENT = {"one": 0, "ddp": 2, "zero": 4, "fsdp2": 4}
# Bytes of a parameter that are sent to sum its gradient over all devices, to gather its BF16 value,
# and to reduce its FP32 gradient.
SENT = {"sum": 8, "gather": 2, "reduce": 4}

# Half-widths of the error of a speed, as fractions: measured on another host, with measured rates
# of the card, and work of which few steps were measured.
SAME = 0.04
KNOWN_RATES = 0.15
FEW = 0.15
# Half-widths of the error of a gain: on cards with measured steps, and on others.
GAIN = 0.05
ROUGH_GAIN = 0.10
# The largest ratio of times per token between a plan and a measured step of the same kind.
SIMILAR = 1.05
# Largest shares of the time that these parts had in a measured step. If a part has a larger share,
# its own error determines that of the speed. No step with other head dimensions was measured.
LARGEST = {
    "attention": 0.3,
    "loss": 0.11,
    "gradient sums": 0.07,
    "optimizer": 0.055,
    "launches": 0.04,
}
HEAD_DIMS = (64, 128)
# No speed is predicted for microbatches with fewer tokens, because they wait for the host: FP8 was
# 6 and 16 % slower than predicted with 2,048 and 1,024 tokens (planner_rows.csv). More GPUs were
# not measured.
LEAST_MICROBATCH = 4096
HOST_GPUS = 8
# Part of the basis of a prediction from measured rates.
HERE = "with the rates measured here"


@dataclass(frozen=True)
class Prediction:
    """Predicted speed, as a mean over the steps of a run."""

    # Seconds of each part of a step. Empty if neither speed nor gain is known.
    parts: Mapping[str, float]
    # Number of tokens in a step, on all devices together.
    tokens: int
    # Half-width of the error of the speed, as a fraction. None if the speed is not known.
    bar: float | None
    # Basis of the speed, or the reason why it is not known.
    basis: str
    # Speed divided by the speed in BF16, and the half-width of its error. None if not known.
    gain: float | None = None
    gain_bar: float | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed of all devices together, or None if it is not known."""
        return self.tokens / sum(self.parts.values()) if self.bar else None


# ── The formula ───────────────────────────────────────────────────────────────────────────────────


def rates_of(card: Card, costs: Mapping[str, StepCosts] = COSTS) -> CardRates:
    """Return the rates that steps sustain, by the data sheet of a card and its factor.

    costs: the costs of each precision, with the shares of the peak.
    """
    factor = 1e12 * (card.factor or 1.0)
    peaks = {name: card.bf16 if name == BF16.name else card.fp8 or card.bf16 for name in costs}
    gemm = {name: factor * costs[name].share * peak for name, peak in peaks.items()}
    return CardRates(
        device=card.name,
        gemm=gemm,
        bandwidth=OF_BANDWIDTH * 1e12 * card.bandwidth,
        launch=LAUNCH,
        nccl={},
    )


def step_seconds(card: Card, work: Work, rates: CardRates | None = None) -> dict[str, float]:
    """Return the seconds of each part of a step.

    rates: rates of the card. By default, those of its data sheet.
    """
    rates = rates or rates_of(card)
    flops = work.flops
    shape = flops.shape
    gemms, passes, attention = (1 + share for share in work.recomputed)
    microbatches = work.tokens / work.microbatch
    in_layers, in_head = _gemm_seconds(work, rates)
    summed = flops.parameters - (0 if flops.tied else flops.embedding_parameters)
    share = flops.parameters / work.devices.shards
    # The bandwidth of all_reduce is not the link's if switches add the values.
    nccl = [rate for name, rate in rates.nccl.items() if not name.startswith("all_reduce")]
    link = max(nccl, default=OF_LINK * 1e9 * (card.nvlink or card.pcie))
    state = 8 + 3 * work.gradients + (0 if work.offloaded else 2 * work.moments)
    return {
        "GEMMs": work.tokens * (in_layers * gemms + in_head),
        "passes": work.tokens * _moved(work) * passes / rates.bandwidth,
        "attention": work.tokens * _attention_seconds(card, work, rates) * attention,
        "loss": work.tokens * LOGIT * shape.vocabulary / rates.bandwidth,
        "gradient sums": microbatches * summed * SUMMED[work.gradients] / rates.bandwidth,
        "optimizer": share * state / rates.bandwidth
        + share * work.offloaded / (OF_PCIE * 1e9 * card.pcie)
        + flops.hidden_weights / work.devices.shards * MUON / rates.bandwidth
        + flops.orthogonalization / (work.devices.count * rates.gemm[BF16.name]),
        "launches": microbatches * shape.layers * LAUNCHES * rates.launch,
        "communication": _sent(work, microbatches) / (EXPOSED * link),
    }


def _gemm_seconds(work: Work, rates: CardRates) -> tuple[float, float]:
    """Return the seconds per token of the GEMMs of the layers, and of the GEMMs of the LM head."""
    flops = work.flops
    low = FLOPS_PER_WEIGHT / rates.gemm[work.precision]
    plain = FLOPS_PER_WEIGHT / rates.gemm[BF16.name]
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


def _attention_seconds(card: Card, work: Work, rates: CardRates) -> float:
    """Return the seconds of a token in the attention of all layers."""
    share, short = ATTENTION[work.attention]
    long = work.flops.per_squared_length * work.mean_squared / (share * rates.gemm[BF16.name])
    shape = work.flops.shape
    return long + shape.layers * shape.heads * short * FP32_OF_HOPPER / card.fp32


def _sent(work: Work, microbatches: float) -> float:
    """Return the bytes that a device sends in a step."""
    copies = work.devices.count // work.devices.shards
    share = work.flops.parameters / work.devices.shards
    # The devices that have the same shard sum its gradients. Without shards, these are all devices.
    sent = SENT["sum"] * share * (copies - 1) / copies
    sent += MUON_SENT[work.devices.topology] * work.flops.hidden_weights
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


def predict(plan: Plan, rates: CardRates | None = None) -> Prediction:
    """Return the predicted speed of a run on the devices of its plan.

    rates: measured rates of the devices. By default, the rates that the doctor has stored. The
        rates of the data sheet are used instead if there are none, if they lack a precision of the
        run, or if steps of the card were measured, because measured steps predict better.
    """
    card = card_of(plan.devices.name)
    tokens = plan.tokens_per_step
    if card is None:
        return Prediction({}, tokens, None, f"{plan.devices.name} is not in the table of GPUs")
    rates = None if card.error == MEASURED else rates or read_rates(plan.devices.name)
    spans = plan.schedule.spans
    # The head and the gain need the rate of BF16 in every precision.
    needed = {BF16.name, *(span.active.precision.name for span in spans)}
    if rates and not needed <= rates.gemm.keys():
        rates = None
    parts: Counter[str] = Counter()
    in_bf16 = 0.0
    bars = []
    for span in spans:
        work = work_of(plan, span.active)
        if reason := _why_not(plan, card, work):
            return Prediction({}, tokens, None, reason)
        share = (span.last - span.first + 1) / plan.steps
        step, step_in_bf16, bar = _predict_step(card, work, rates)
        parts.update({name: share * seconds for name, seconds in step.items()})
        in_bf16 += share * step_in_bf16
        bars.append(bar)
    bar = max(bars, key=lambda bar: bar or 1.0)
    return Prediction(
        parts,
        tokens,
        bar,
        _basis(bar, rates),
        in_bf16 / sum(parts.values()),
        GAIN if bar and bar <= MEASURED else ROUGH_GAIN,
    )


def _predict_step(
    card: Card, work: Work, rates: CardRates | None
) -> tuple[dict[str, float], float, float | None]:
    """Return the seconds of each part of a step, its seconds in BF16, and the error bar.

    The error bar is the half-width of the error of the speed, or None. Without `rates`, the seconds
    are scaled to the measured steps of the same kind. With `rates`, they depend on the rates alone,
    because this machine may be faster or slower than the machine of the measured steps.
    """
    plain = replace(
        work, precision=BF16.name, low_head=False, kept=0.0, experts_kept=0.0, keeping_codes=0.0
    )
    parts = step_seconds(card, work, rates)
    in_bf16 = sum(step_seconds(card, plain, rates).values())
    ratio = None if rates else measured_ratio(card, work, measured_steps())
    if ratio is None:
        return parts, in_bf16, bar_of(card, work, rates)
    in_bf16 *= measured_ratio(card, plain, measured_steps()) or ratio
    return {name: ratio * seconds for name, seconds in parts.items()}, in_bf16, SAME


@cache
def measured_steps() -> list[dict[str, str]]:
    """Return the rows of measured.csv."""
    with Path(__file__).with_name("measured.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def measured_ratio(card: Card, work: Work, steps: Sequence[Mapping[str, str]]) -> float | None:
    """Return the measured time of a step of the same kind, divided by its predicted time.

    The result is that of the newest step in `steps`, so precisions that were measured together are
    compared. Return None if there is no step of this kind.
    """
    predicted = 1e6 * sum(step_seconds(card, work).values()) / work.tokens
    ratios = {
        step["date"]: float(step["measured"]) / float(step["predicted"])
        for step in steps
        if (step["card"], step["kind"]) == (card.name, work.kind)
        and 1 / SIMILAR < predicted / float(step["predicted"]) < SIMILAR
    }
    return ratios[max(ratios)] if ratios else None


def _basis(bar: float | None, rates: CardRates | None) -> str:
    """Return the basis of a speed with this bar, see `Prediction`."""
    if bar is None:
        return "no step was measured on a similar card"
    basis = f"± {100 * bar:.0f} %"
    if bar == SAME:
        basis = f"measured (hosts differ by {100 * SAME:.0f} %)"
    if rates:
        basis += f", {HERE}"
    return basis


def bar_of(card: Card, work: Work, rates: CardRates | None = None) -> float | None:
    """Return the half-width of the error of a predicted speed, or None if it is not known.

    rates: measured rates of the card, if they are known.
    """
    error = KNOWN_RATES if rates else card.error
    if error is None:
        return None
    parts = step_seconds(card, work)
    beyond = max(parts[name] / share for name, share in LARGEST.items()) / sum(parts.values())
    # Map each bar to a value that is true if the bar applies.
    bars = {
        FEW: beyond > 1
        or not work.fused
        or work.flops.expert_weights > 0
        or work.flops.shape.head_dim not in HEAD_DIMS
        or work.flops.hidden_weights > 0
        or any(work.recomputed)
        or work.devices.count > 1,
        GUESSED: beyond > 2,
    }
    return max([error, *(bar for bar, applies in bars.items() if applies)])


def _why_not(plan: Plan, card: Card, work: Work) -> str | None:
    """Return the reason why neither speed nor gain is predicted for a step of `plan`, or None."""
    costs = COSTS.get(work.precision)
    devices = plan.devices
    # Map each reason to a value that is true if the reason applies.
    reasons = {
        f"no step in {work.precision} was measured on such a card": (
            costs is None or card.capability >= costs.below
        ),
        f"this card has no GEMMs in {work.precision}": work.precision != BF16.name and not card.fp8,
        f"no step with the attention {work.attention} was measured": (
            work.attention not in ATTENTION
        ),
        "no step with layers that are neither fused nor compiled was measured": (
            plan.recipe.model.compile == "none" and not work.fused
        ),
        f"a step in {work.precision} was never measured with so few parameters": (
            costs is not None and work.flops.parameters < costs.least_parameters
        ),
        f"microbatches of less than {LEAST_MICROBATCH:,} tokens wait for the host": (
            work.microbatch < LEAST_MICROBATCH
        ),
        "several cards without NVLink were not measured": devices.count > 1 and not card.nvlink,
        f"more than {HOST_GPUS} cards were not measured": devices.count > HOST_GPUS,
        "the speed of emulation is not predicted": plan.emulated,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
