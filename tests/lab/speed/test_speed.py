"""Predicted speeds agree with the measured and published steps in planner_rows.csv."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import pytest

from benchmarks import planner_fit
from benchmarks.planner_fit import Point, Shares, gain_error, points
from benchmarks.planner_rows import read_rows
from lab.speed.speed import COSTS, predict, step_seconds
from lab.speed.work import work_of
from pretrain.metrics.cards import CARDS, card_of
from pretrain.model.attention import Choice
from pretrain.plan.memory import Devices, layers_of
from pretrain.plan.plan import Plan
from tests.conftest import ROOT
from tests.pretrain.conftest import active_in
from tests.pretrain.plan.plan_recipe import QWEN3, flops_of, on_meta, recipe, schedule_of


@cache
def fitted() -> Shares:
    return planner_fit.fit(points("fit"))


@cache
def left_out() -> list[tuple[Point, Shares]]:
    return planner_fit.left_out(points("fit"))


def within(errors: Sequence[float], bar: float) -> float:
    """Return the share of errors within a bar, which is a symmetric ratio."""
    return sum(abs(math.log(1 + error)) <= math.log(1 + bar) for error in errors) / len(errors)


def percentile(errors: Sequence[float]) -> float:
    """Return the 95th percentile of the absolute errors."""
    return sorted(map(abs, errors))[math.ceil(0.95 * len(errors)) - 1]


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
    errors = [point.error(shares) for point, shares in left_out()]
    assert statistics.median(map(abs, errors)) <= 0.03
    assert percentile(errors) <= 0.07 and max(map(abs, errors)) <= 0.10
    shares = {id(point): without for point, without in left_out()}
    pairs = planner_fit.gains([point for point, _ in left_out()])
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
        name: sum(step_seconds(point.card, replace(point.work, precision=name, kept=kept)).values())
        for name, kept in (("current", 0.0), ("mxfp8", 0.0), ("nvfp4", 0.125))
    }
    assert 0.95 <= seconds["current"] / seconds["mxfp8"] <= 0.97
    assert 1.15 <= seconds["current"] / seconds["nvfp4"] <= 1.21


def errors_of_models_that_were_left_out() -> list[float]:
    return [point.error(shares) for point, shares in left_out()]


def errors_of_few_steps() -> list[float]:
    """Return the errors of published steps, and of steps of which few were measured."""
    steps = points("multi", "not fused", "experts", "published")
    return [point.error(fitted()) for point in steps if point.card.error <= 0.15]


def errors_of_another_geforce() -> list[float]:
    """Return the errors of two GeForce cards with the factor of the other."""
    cards = {"RTX 4090": "RTX 5090", "RTX 5090": "RTX 4090"}
    steps = planner_fit.published("llmq")
    return [
        point.error(fitted(), card_of(other).factor)
        for card, other in cards.items()
        for point in steps[card]
    ]


@pytest.mark.parametrize(
    ("bar", "errors"),
    [
        (0.07, errors_of_models_that_were_left_out),
        (0.15, errors_of_few_steps),
        (0.25, errors_of_another_geforce),
    ],
    ids=["card", "few", "similar card"],
)
def test_most_steps_of_a_class_lie_within_its_bar(
    bar: float, errors: Callable[[], list[float]]
) -> None:
    assert len(errors()) >= 6 and within(errors(), bar) >= 0.95


@pytest.mark.parametrize(
    ("devices", "keeping_codes", "sent"),
    [
        (Devices(2), 0.0, 8 / 2),
        (Devices(2, sharded=True, gathered=True), 0.0, (2 + 4) / 2),
        (Devices(2, sharded=True), 0.0, 3 * (2 + 2 + 4) / 2),
        (Devices(2, sharded=True), 1.0, (2 + 3 * 4) / 2),
        (Devices(2, sharded=True), 0.75, (2 * 0.75 + 3 * (2 + 2) * 0.25 + 3 * 4) / 2),
        (Devices(4, sharded=True, replicas=2), 1.0, (2 + 3 * 4) / 2 + 8 / 2 / 2),
    ],
    ids=["ddp", "zero", "fsdp2", "fsdp2 in FP8", "fsdp2 in FP8 and BF16", "hsdp in FP8"],
)
def test_bytes_that_are_sent_in_three_microbatches(
    devices: Devices, keeping_codes: float, sent: float
) -> None:
    """Weights that are gathered for each use are gathered twice a microbatch, codes once a step."""
    work = read_rows("fit")[0].work
    sizes = {"microbatch": work.tokens // 3, "tokens": work.tokens // 3 * 3}
    work = replace(work, devices=devices, keeping_codes=keeping_codes, **sizes)
    seconds = sent * work.flops.parameters / (0.394 * 0.79 * 450e9)
    assert step_seconds(card_of("H100"), work)["communication"] == pytest.approx(seconds)


def test_offloaded_moments_are_not_moved_in_the_memory_of_the_device() -> None:
    work = read_rows("fit")[0].work
    kept, offloaded = (
        step_seconds(card_of("H200"), replace(work, offloaded=copied))["optimizer"]
        for copied in (0, 1e-3)
    )
    assert offloaded < kept


# Plans

EAGER = {"source": "some/model", "compile": "none", "fused": "off"}


def plan(precision: str = "delayed", device: str = "H200", **changes: object) -> Plan:
    """Return the plan of Qwen3-1.7B with the documents of the measured steps."""
    devices = changes.pop("devices", Devices(name=device))
    mean_squared = changes.pop("mean_squared", 527.0)
    settings = {"weights": "bf16_exact", "train": {"steps": 10}, "schedule": {"warmup": 0}}
    resolved = recipe(**(settings | changes))
    model = on_meta(QWEN3)
    flops = flops_of(model)
    engine = "torch" if precision == "bf16" else "transformer_engine"
    active = active_in(precision, engine, **changes.get("fp8_config", {}))
    layers = layers_of(model, flops, resolved, active, devices, "packed_fa4")
    planned = {"devices": devices, "layers": {active.precision.name: layers}}
    planned["attention"] = Choice("packed_fa4", "requested")
    return Plan(resolved, schedule_of(resolved, active), flops, mean_squared, **planned)


def test_a_plan_has_the_work_of_the_measured_step() -> None:
    row = next(row for row in read_rows("fit") if row.values["precision"] == "delayed")
    run_plan = plan()
    work = work_of(run_plan, run_plan.precisions[0])
    assert (work.tokens, work.microbatch) == (row.work.tokens, row.work.microbatch)
    assert work.flops.parameters == pytest.approx(row.work.flops.parameters, rel=1e-3)
    times = [sum(step_seconds(card_of("H200"), step).values()) for step in (work, row.work)]
    assert times[0] == pytest.approx(times[1], rel=1e-3)


@pytest.mark.parametrize(
    ("in_bf16", "share"),
    [({"keep_bf16": ["down_proj"]}, 1.0), ({"keep_bf16_layers": {"first": 7}}, 7 / 28)],
)
def test_layers_with_matrices_in_bf16_are_gathered_for_each_use(
    in_bf16: dict[str, object], share: float
) -> None:
    def communication(precision: str, **changes: object) -> float:
        devices = Devices(4, sharded=True, name="H200")
        run_plan = plan(precision, devices=devices, batch={"microbatch": 1}, **changes)
        work = work_of(run_plan, run_plan.precisions[0])
        return step_seconds(card_of("H200"), work)["communication"]

    often = communication("bf16")
    once = communication("delayed")
    assert communication("delayed", fp8_config=in_bf16) == pytest.approx(
        share * often + (1 - share) * once
    )


def test_a_plan_has_the_speed_of_the_measured_step() -> None:
    speeds = {
        row.values["precision"]: row.speed
        for row in read_rows("fit")
        if row.values["file"] == "speed/h200_throughput_bf16.json"
    }
    low, plain = predict(plan()), predict(plan("bf16"))
    assert low.tokens_per_second == pytest.approx(speeds["delayed"], rel=low.bar)
    assert plain.tokens_per_second == pytest.approx(speeds["bf16"], rel=plain.bar)
    assert low.gain == pytest.approx(low.tokens_per_second / plain.tokens_per_second)
    assert plain.gain == pytest.approx(1.0)


FULL = {"model": {"source": "m", "gradient_checkpointing": "full"}}
SMALL = {"batch": {"tokens": 65_536, "microbatch": 1}, "data": {"packs": "p", "length": 2048}}
FEW = "no speed is predicted below 7.00 B parameters"


@pytest.mark.parametrize(
    ("device", "precision", "changes", "basis", "gain_bar"),
    [
        ("H200", "delayed", {"mean_squared": 3000.0}, "± 7 %", 0.05),
        ("H200", "current", {"mean_squared": 4000.0}, "± 7 %", 0.05),
        ("H200", "delayed", FULL, "± 7 %", 0.05),
        ("L40S", "delayed", {}, "± 15 %", 0.10),
        ("RTX 6000 Ada", "delayed", {}, "± 25 %", 0.10),
        ("GH200", "delayed", {}, "no step was measured on a similar card", 0.10),
        ("A100", "bf16", {}, "± 25 %", 0.10),
        ("B300", "delayed", {}, "± 25 %", 0.10),
        ("B200", "mxfp8", {}, "± 15 %", 0.10),
        ("B200", "nvfp4", {}, FEW, None),
        ("B200", "block", {}, "no step in block was measured", None),
        ("H20", "delayed", {}, "H20 is not in the table of GPUs", None),
        ("H200", "delayed", {"devices": Devices(16, name="H200")}, "more than 8 cards", None),
        ("L40S", "delayed", {"devices": Devices(4, name="L40S")}, "several cards without", None),
        ("H200", "bf16", {"devices": Devices(4, name="H200")}, "± 7 %", 0.05),
        ("H200", "delayed", {"optimizer": {"name": "muon"}}, "no step with Muon", None),
        ("H200", "bf16", {"model": EAGER}, "no step with layers that are neither fused", None),
        ("H200", "bf16", {"model": EAGER | {"fused": "on"}}, "± 7 %", 0.05),
        ("H200", "bf16", {"devices": Devices(4, sharded=True, name="H200")}, "± 7 %", 0.05),
        ("H200", "delayed", SMALL, "microbatches of less than 4,096 tokens wait", None),
    ],
)
def test_a_prediction_says_how_sure_it_is(
    device: str, precision: str, changes: dict, basis: str, gain_bar: float | None
) -> None:
    prediction = predict(plan(precision, device, **changes))
    bar = f"± {100 * prediction.bar:.0f} %" if prediction.bar else prediction.reason
    assert bar.startswith(basis) and prediction.gain_bar == gain_bar
    assert (prediction.tokens_per_second is None) == (prediction.bar is None)
    assert (prediction.bar is None) == bool(prediction.reason)
    assert (prediction.gain is None) == (gain_bar is None)


def test_phases_are_weighted_by_their_steps() -> None:
    low, plain = plan(), plan("bf16")
    schedule = schedule_of(low.recipe, low.precisions[0], (None, plain.precisions[0]), until=0.8)
    both = predict(replace(low, schedule=schedule, layers={**low.layers, **plain.layers}))
    in_low, in_bf16 = (1 / predict(single).tokens_per_second for single in (low, plain))
    mean = 0.8 * in_low + 0.2 * in_bf16
    assert 1 / both.tokens_per_second == pytest.approx(mean)
    assert both.gain == pytest.approx(in_bf16 / mean)
