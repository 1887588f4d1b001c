"""Predicted speeds at the start of a run, and their comparison with the first steps."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pretrain.metrics import card_rates
from pretrain.model import attention
from pretrain.model.attention import Choice
from pretrain.plan.memory import Devices, layers_of
from pretrain.plan.plan import Plan
from pretrain.plan.speed import Prediction, predict
from pretrain.run.job import Job
from pretrain.run.speed_check import COMPARED, compare, line_about_attention, predict_phase
from tests.pretrain.conftest import active_in
from tests.pretrain.plan.plan_recipe import QWEN3, flops_of, on_meta, recipe, schedule_of

TOKENS = 131_072
QUIET = ("off: they need a GPU", 1, 0.0)


def prediction(speed: float = 78_000.0, bar: float = 0.07) -> Prediction:
    seconds = TOKENS / speed
    return Prediction({"GEMMs": 0.75 * seconds, "passes": 0.25 * seconds}, TOKENS, bar, "± 7 %")


def steps(speed: float, waiting: float = 0.0, **more: Any) -> list[dict[str, Any]]:
    """Return the records of the first steps. The first two compile and are ten times as long.

    waiting: the share of the time that waits for data.
    more: further values of each step, or functions from the number of the step to a value.
    """
    records = []
    for number in range(1, COMPARED + 1):
        milliseconds = 1e3 * TOKENS / speed * (10 if number <= 2 else 1)
        record = {
            "step": 100 + number,
            "tokens": TOKENS * number,
            "loss": 2.0,
            "step_ms": milliseconds,
            "data_wait_ms": waiting * milliseconds,
            "tokens_per_second": 1e3 * TOKENS / milliseconds,
            "recompiles": 0,
            "memory_retries": 3,
        }
        extra = {key: value(number) if callable(value) else value for key, value in more.items()}
        records.append(record | extra)
    return records


# The comparison


def test_a_speed_within_the_bar_is_compared_without_a_cause() -> None:
    event = compare(prediction(), steps(76_700.0, waiting=0.02), *QUIET)
    assert event["text"] == "speed: predicted 78,000, measured 76,700 tokens/s (-2 %)"
    assert (event["step"], event["event"], event["cause"]) == (120, "speed", "")
    assert event["ratio"] == pytest.approx(76_700 / 78_000)
    assert sum(event["parts"].values()) == pytest.approx(TOKENS / event["predicted"])
    assert json.loads(json.dumps(event)) == event


@pytest.mark.parametrize(
    ("records", "load", "cause"),
    [
        (steps(66_300.0, waiting=0.09), QUIET, "9 % of the time waits for data"),
        (
            steps(66_300.0, waiting=0.01),
            ("off: they need fused layers", 1, 0.12),
            "the GPU is idle for 11 % of the time, because the host launches kernels too slowly "
            "(CUDA graphs off: they need fused layers)",
        ),
        (steps(66_300.0, memory_retries=lambda number: number), QUIET, "memory is nearly full"),
        (steps(66_300.0, recompiles=1), QUIET, "torch.compile compiles in most steps"),
        (steps(66_300.0, recompiles=lambda number: int(number == 9)), QUIET, "computes slower"),
        (steps(66_300.0, **{"gap/loss": 0.1}), QUIET, "`log.gap`"),
        (steps(66_300.0, **{"fp8/underflow": 0.1}), QUIET, "`log.fp8_statistics`"),
        (steps(66_300.0), ("auto", 2, 0.01), "2 processes share the GPU"),
        (
            steps(66_300.0, waiting=0.01),
            ("auto", 1, 0.02),
            "the GPU computes slower than predicted, so compare it with `python -m pretrain "
            "doctor`",
        ),
    ],
    ids=["data", "host", "memory", "recompiles", "recompiled once", "gap", "fp8", "shared", "GPU"],
)
def test_a_slow_run_names_the_cause_that_costs_most(
    records: list[dict[str, Any]], load: tuple[str, int, float], cause: str
) -> None:
    event = compare(prediction(), records, *load)
    assert event["text"].startswith("speed: predicted 78,000, measured 66,300 tokens/s (-15 %): ")
    assert cause in event["cause"] and event["text"].endswith(event["cause"])


SHARE = st.floats(0.0, 0.9)


@given(st.floats(1e3, 1e7), st.floats(0.02, 3.0), st.floats(0.02, 0.35), SHARE, SHARE)
def test_only_a_speed_below_the_bar_has_a_cause(
    predicted: float, ratio: float, bar: float, waiting: float, idle: float
) -> None:
    event = compare(
        prediction(predicted, bar), steps(ratio * predicted, waiting), "on: 9 GiB", 1, idle
    )
    assert event["predicted"] == pytest.approx(predicted)
    assert event["ratio"] == pytest.approx(ratio)
    assert re.search(r"\(([+-]\d+) %\)", event["text"])[1] == f"{round(100 * (ratio - 1)):+d}"
    # The bar is a symmetric ratio.
    if abs(ratio * (1 + bar) - 1) > 1e-9:
        assert bool(event["cause"]) == (ratio * (1 + bar) < 1)
    explained = {
        "waits for data": waiting,
        "is idle": idle - waiting,
        "computes slower": 1 - ratio - max(idle, waiting),
    }
    largest = max(explained.values())
    for text, share in explained.items():
        if text in event["cause"]:
            assert share == pytest.approx(largest)


# The prediction


@pytest.fixture
def job() -> Job:
    """Job of Qwen3-1.7B on an H200, in FP8 for 80 % of the steps and then in BF16."""
    settings = recipe(weights="bf16_exact", train={"steps": 10}, schedule={"warmup": 0})
    model = on_meta(QWEN3)
    low, plain = active_in("delayed", "transformer_engine"), active_in("bf16", "torch")
    layers = {
        active.precision.name: layers_of(
            model, flops_of(model), settings, active, "cuda", "packed_varlen", (9, 0)
        )
        for active in (low, plain)
    }
    plan = Plan(
        settings,
        schedule_of(settings, low, (None, plain), until=0.8),
        Devices(name="NVIDIA H200"),
        flops_of(model),
        mean_squared=527.0,
        layers=layers,
        attention="packed_varlen",
    )
    choice = Choice("packed_varlen", "requested")
    return Job(plan, Path("run"), model, None, None, choice, {})


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_rates, "CACHE", tmp_path)


def test_the_precision_of_the_first_step_is_predicted(job: Job, empty_cache: None) -> None:
    low, plain = (predict_phase(job, step, "packed_varlen") for step in (8, 9))
    assert low.gain > 1.1 and plain.gain == pytest.approx(1.0)
    whole_run = predict(job.plan)
    assert plain.tokens_per_second < whole_run.tokens_per_second < low.tokens_per_second


def test_a_missing_attention_package_is_named_with_the_speed_that_it_gives(
    job: Job, empty_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CPU has no attention package that could be missing, so the GPU is simulated."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    def missing() -> None:
        raise ImportError("No module named 'flash_attn'")

    monkeypatch.setattr(attention, "_flash", missing)
    choice = attention.choose("auto", "cuda", 128, torch.bfloat16, 527.0)
    assert choice.name == "packed_varlen"
    prediction = predict_phase(job, 1, choice.name)
    faster = predict_phase(job, 1, "packed_fa4").tokens_per_second
    assert faster > 1.02 * prediction.tokens_per_second
    assert line_about_attention(replace(job, attention=choice), 1) == (
        f"FlashAttention-4 would give {faster:,.0f} tokens/s; the attention is the fastest that "
        "runs here; flash_attn needs the package flash-attn-4 (pip install -r "
        "requirements-cuda.txt): No module named 'flash_attn'; cudnn needs Transformer Engine: a "
        "CUDA device"
    )
