"""Predicted speeds agree with the measured and published steps in planner_rows.csv."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks import planner_fit
from benchmarks.planner_fit import Point, Shares, gain_error, points
from benchmarks.planner_rows import read_rows
from lab.speed.speed import COSTS, predict, step_seconds
from lab.speed.work import work_of
from pretrain.metrics.cards import CARDS, card_of
from pretrain.plan.memory import Devices
from pretrain.plan.plan import Plan
from tests.conftest import ROOT
from tests.pretrain.plan.plan_recipe import QWEN3, in_phases, on_meta, plan_of


@cache
def fitted() -> Shares:
    return planner_fit.fit(points("fit"))


@cache
def cross_validated() -> list[tuple[Point, Shares]]:
    return planner_fit.cross_validated(points("fit"))


# The rows and the fit


def test_every_row_names_its_source() -> None:
    rows = read_rows(*{"fit", "multi", "not fused", "experts", "tiny", "special", "published"})
    lines = (ROOT / "benchmarks/planner_rows.csv").read_text(encoding="utf-8").splitlines()
    assert len(rows) == len(lines) - 1, "the status of a row is not known"
    for row in rows:
        if row.values["trainer"] == "ours":
            assert (ROOT / "benchmarks/results" / row.values["file"]).is_file(), row.values
        assert row.values["file"] and card_of(row.values["card"]).name == row.values["card"]


def test_the_shipped_constants_are_those_of_the_fit() -> None:
    assert planner_fit.shipped() == {name: round(share, 3) for name, share in fitted().items()}
    for name in ("mxfp8", "nvfp4"):
        assert COSTS[name].share == pytest.approx(planner_fit.share_of(name, fitted()), rel=2e-3)
    factors = planner_fit.all_factors(fitted())
    assert {card.name: card.factor for card in CARDS if card.factor is not None} == {
        name: round(factor, 2) for name, factor in factors.items()
    }


def test_a_model_that_was_left_out_and_its_gain_are_predicted() -> None:
    errors = [abs(point.error(shares)) for point, shares in cross_validated()]
    assert statistics.median(errors) <= 0.03
    assert statistics.quantiles(errors, n=20)[-1] <= 0.07 and max(errors) <= 0.10
    shares = {id(point): without for point, without in cross_validated()}
    pairs = planner_fit.gains([point for point, _ in cross_validated()])
    errors = [gain_error(*pair, shares[id(pair[0])]) for pair in pairs]
    assert len(errors) > 40 and max(map(abs, errors)) <= 0.05


@pytest.mark.parametrize("card", planner_fit.published("llmq"))
def test_published_steps_are_predicted_with_one_factor_a_card(card: str) -> None:
    steps = planner_fit.published("llmq")[card]
    factor = planner_fit.factor_of(steps, fitted())
    errors = [point.error(fitted(), factor) for point in steps]
    assert len(steps) >= 7 and statistics.median(map(abs, errors)) <= 0.05
    pairs = planner_fit.gains(steps)
    assert max(abs(gain_error(*pair, fitted(), factor)) for pair in pairs) <= 0.10


@pytest.mark.parametrize(
    ("trainer", "bar"),
    [
        *dict.fromkeys(["Megatron Bridge", "NeMo", "llm-foundry", "fms-fsdp"], 0.15).items(),
        # Its attention is in FP8.
        ("MLPerf", 0.2),
    ],
)
def test_steps_of_other_trainers_are_predicted_with_the_factors_of_the_table(
    trainer: str, bar: float
) -> None:
    for steps in planner_fit.published(trainer).values():
        for point in steps:
            assert abs(point.error(planner_fit.shipped())) <= bar, point.row.values


def test_published_gains_of_blackwell_are_predicted() -> None:
    """MXFP8 had 0.94 to 0.99 of the speed of FP8 per tensor, and NVFP4 1.15 and 1.20 times."""
    (point, *_) = planner_fit.published("NeMo")["B200"]
    seconds = {
        name: sum(
            step_seconds(point.card, replace(point.work, precision=name, bf16_share=kept)).values()
        )
        for name, kept in (("current", 0.0), ("mxfp8", 0.0), ("nvfp4", 0.125))
    }
    assert 0.95 <= seconds["current"] / seconds["mxfp8"] <= 0.97
    assert 1.15 <= seconds["current"] / seconds["nvfp4"] <= 1.21


def test_most_steps_of_a_class_lie_within_its_bar() -> None:
    """Two GeForce cards are similar: each is predicted with the factor of the other."""
    few = points("multi", "not fused", "experts", "published")
    geforce = {"RTX 4090": "RTX 5090", "RTX 5090": "RTX 4090"}
    errors = {
        0.07: [point.error(shares) for point, shares in cross_validated()],
        0.15: [point.error(fitted()) for point in few if point.card.error <= 0.15],
        0.25: [
            point.error(fitted(), card_of(other).factor)
            for card, other in geforce.items()
            for point in planner_fit.published("llmq")[card]
        ],
    }
    for bar, of_class in errors.items():
        assert len(of_class) >= 6
        # An error is a ratio, and the bar is symmetric.
        within = [abs(math.log(1 + error)) <= math.log(1 + bar) for error in of_class]
        assert sum(within) / len(within) >= 0.95, bar


@pytest.mark.parametrize(
    ("devices", "coded_share", "sent"),
    [
        (Devices(2), 0.0, 8 / 2),
        (Devices(2, sharded=True, gathered_once=True), 0.0, (2 + 4) / 2),
        (Devices(2, sharded=True), 0.0, 3 * (2 + 2 + 4) / 2),
        (Devices(2, sharded=True), 1.0, (2 + 3 * 4) / 2),
        (Devices(2, sharded=True), 0.75, (2 * 0.75 + 3 * (2 + 2) * 0.25 + 3 * 4) / 2),
        (Devices(4, sharded=True, replicas=2), 1.0, (2 + 3 * 4) / 2 + 8 / 2 / 2),
    ],
    ids=["ddp", "zero", "fsdp2", "fsdp2 in FP8", "fsdp2 in FP8 and BF16", "hsdp in FP8"],
)
def test_bytes_that_are_sent_in_three_microbatches(
    devices: Devices, coded_share: float, sent: float
) -> None:
    """Weights that are gathered for each use are gathered twice a microbatch, codes once a step."""
    work = read_rows("fit")[0].work
    sizes = {"microbatch": work.tokens // 3, "tokens": work.tokens // 3 * 3}
    work = replace(work, devices=devices, coded_share=coded_share, **sizes)
    seconds = sent * work.flops.parameters / (0.394 * 0.79 * 450e9)
    assert step_seconds(card_of("H100"), work)["communication"] == pytest.approx(seconds)


def test_offloaded_moments_are_not_moved_in_the_memory_of_the_device() -> None:
    work = read_rows("fit")[0].work
    kept, offloaded = (
        step_seconds(card_of("H200"), replace(work, offloaded_bytes=copied))["optimizer"]
        for copied in (0, 1e-3)
    )
    assert offloaded < kept


# Plans


def plan(precision: str = "delayed", device: str = "H200", **changes: Any) -> Plan:
    """Return the plan of Qwen3-1.7B with the documents of the measured steps."""
    usual = {
        "devices": Devices(name=device),
        "squared_length_per_token": 527.0,
        "weights": "bf16_exact",
    }
    usual |= {"train": {"steps": 10}, "schedule": {"warmup": 0}}
    return plan_of(precision, fused=True, **(usual | changes))


def test_a_plan_has_the_work_of_the_measured_step() -> None:
    low, plain = plan(), plan("bf16")
    for precision, run_plan in (("delayed", low), ("bf16", plain)):
        rows = (row for row in read_rows("fit") if row.values["precision"] == precision)
        row = next(row for row in rows if row.values["file"] == "speed/h200_throughput_bf16.json")
        work = work_of(run_plan, run_plan.precisions[0])
        assert (work.tokens, work.microbatch) == (row.work.tokens, row.work.microbatch)
        times = [sum(step_seconds(card_of("H200"), step).values()) for step in (work, row.work)]
        assert times[0] == pytest.approx(times[1], rel=1e-3)
        assert predict(run_plan).tokens_per_second == pytest.approx(row.speed, rel=0.07)
    fast, slow = map(predict, (low, plain))
    assert fast.gain == pytest.approx(fast.tokens_per_second / slow.tokens_per_second)
    assert slow.gain == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("in_bf16", "share"),
    [({"keep_bf16": ["down_proj"]}, 1.0), ({"keep_bf16_layers": {"first": 7}}, 7 / 28)],
)
def test_layers_with_matrices_in_bf16_are_gathered_for_each_use(
    in_bf16: dict[str, object], share: float
) -> None:
    run_plan = plan(devices=Devices(4, sharded=True, name="H200"), fp8_config=in_bf16)
    assert work_of(run_plan, run_plan.precisions[0]).coded_share == pytest.approx(1 - share)


EAGER = {"source": "some/model", "compile": "none", "fused": "off"}
FULL = {"section": {"source": "m", "gradient_checkpointing": "full"}}
SMALL = {"batch": {"tokens": 65_536, "microbatch": 1}, "data": {"packs": "p", "length": 2048}}
GEMMA2 = on_meta({**QWEN3, "model_type": "gemma2"})
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 1024}
MIXTURE = on_meta({**QWEN3, "model_type": "qwen3_moe", **EXPERTS})
FEW = "no speed is predicted below 7.00 B parameters"


@pytest.mark.parametrize(
    ("device", "precision", "changes", "basis", "gain_error"),
    [
        ("H200", "delayed", {"squared_length_per_token": 3000.0}, "± 7 %", 0.05),
        ("H200", "current", {"squared_length_per_token": 4000.0}, "± 7 %", 0.05),
        ("H200", "delayed", FULL, "± 7 %", 0.05),
        ("L40S", "delayed", {}, "± 15 %", 0.10),
        ("RTX 6000 Ada", "delayed", {}, "± 25 %", 0.10),
        ("GH200", "delayed", {}, "no step was measured on a similar card", 0.10),
        ("A100", "bf16", {}, "± 25 %", 0.10),
        ("B300", "delayed", {}, "± 25 %", 0.10),
        ("B200", "mxfp8", {}, "± 15 %", 0.10),
        ("B200", "nvfp4", {}, FEW, None),
        ("B200", "block", {}, "no step in block was measured", None),
        ("H200", "delayed", {"model": MIXTURE}, "± 15 %", 0.10),
        ("H200", "delayed", {"devices": Devices(16, name="H200")}, "more than 8 cards", None),
        ("L40S", "delayed", {"devices": Devices(4, name="L40S")}, "several cards without", None),
        ("H200", "bf16", {"devices": Devices(4, name="H200")}, "± 15 %", 0.10),
        ("H200", "delayed", {"optimizer": {"name": "muon"}}, "no step with Muon", None),
        ("H200", "bf16", {"model": GEMMA2}, "no speed is predicted for layers with a state", None),
        ("H200", "bf16", {"section": EAGER}, "no step with layers that are neither fused", None),
        ("H200", "bf16", {"section": EAGER | {"fused": "on"}}, "± 7 %", 0.05),
        ("H200", "bf16", {"devices": Devices(4, sharded=True, name="H200")}, "± 15 %", 0.10),
        ("H200", "delayed", SMALL, "microbatches of less than 4,096 tokens wait", None),
    ],
)
def test_a_prediction_says_how_sure_it_is(
    device: str, precision: str, changes: dict, basis: str, gain_error: float | None
) -> None:
    prediction = predict(plan(precision, device, **changes))
    bar = f"± {100 * prediction.error:.0f} %" if prediction.error else prediction.reason
    assert bar.startswith(basis) and prediction.gain_error == gain_error
    assert (prediction.tokens_per_second is None) == (prediction.error is None)
    assert (prediction.error is None) == bool(prediction.reason)
    assert (prediction.gain is None) == (gain_error is None)


def test_phases_are_weighted_by_their_steps() -> None:
    low, plain = plan(), plan("bf16")
    both = predict(in_phases(low, plain, until=0.8))
    in_low, in_bf16 = (1 / predict(single).tokens_per_second for single in (low, plain))
    mean = 0.8 * in_low + 0.2 * in_bf16
    assert 1 / both.tokens_per_second == pytest.approx(mean)
    assert both.gain == pytest.approx(in_bf16 / mean)
