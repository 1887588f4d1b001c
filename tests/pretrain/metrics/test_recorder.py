"""Step records and summaries."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch

from pretrain.metrics.flops import ModelFlops
from pretrain.metrics.recorder import Recorder
from pretrain.metrics.run_record import summary_of
from tests.pretrain.plan.plan_recipe import flops_of, on_meta

CPU = torch.device("cpu")
BATCH = {"step_tokens": 4096, "sum_squared_lengths": 1_000_000}


def figures(step: int = 1, **changes: float) -> dict[str, Any]:
    values = {"step": step, "tokens": 4096 * step, "epoch": 0.1, "loss": 2.0, "data_wait_ms": 1.0}
    return {**values, "learning_rate": 1e-3, "gradient_norm": 0.5, **BATCH, **changes}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def flops() -> ModelFlops:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    return flops_of(
        on_meta({"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2} | sizes)
    )


def test_rates_cover_the_complete_step_and_all_devices(flops):
    clock = Clock()
    recorder = Recorder(
        pack_length=512, flops=flops, peak_tflops=2.0, device=CPU, world_size=4, clock=clock
    )
    with recorder.step():
        clock.now += 0.5
    record = recorder.finish(**figures(), skipped=False)
    assert record["step_ms"] == 500 and record["tokens_per_second"] == 8192
    # Products take 2 FLOPs per weight in forward and 4 in backward, attention 6 L Q per squared
    # length.
    weights = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 64 * 512
    by_hand = (6 * weights * 4096 + 6 * 2 * 64 * 1_000_000) / 0.5 / 4 / 1e12
    assert record["tflops"] == pytest.approx(by_hand)
    assert record["mfu_bf16_peak"] == pytest.approx(by_hand / 2.0)
    assert record["skipped"] is False and record["samples_per_second"] == 4096 / 512 / 0.5
    assert record["calculation_method"] == "ours"
    assert record["flops_per_token"] == pytest.approx(record["tflops"] * 1e12 * 0.5 * 4 / 4096)
    # The model has no learned positions, two layers, and queries of width 64.
    by_nanogpt = 6 * flops.parameters + 12 * 2 * 64 * 512
    assert record["mfu_nanogpt"] == pytest.approx(by_nanogpt * 4096 / 0.5 / 4 / 2.0e12)


def test_a_record_has_exactly_the_documented_keys(flops):
    def keys(**parts: Any) -> list[str]:
        recorder = Recorder(pack_length=512, device=CPU, **parts)
        with recorder.step():
            pass
        return list(recorder.finish(**figures()))

    always = ["step", "tokens", "epoch", "loss", "learning_rate", "gradient_norm", "step_ms"]
    always += ["data_wait_ms", "tokens_per_second", "samples_per_second"]
    end = ["memory_gib", "recompiles"]
    counted = ["flops_per_token", "calculation_method", "tflops"]
    assert keys(flops=None, peak_tflops=None) == [*always, *end]
    assert keys(flops=flops, peak_tflops=None) == [*always, *counted, *end]
    with_peak = [*counted, "peak_tflops", "mfu_bf16_peak", "mfu_nanogpt"]
    assert keys(flops=flops, peak_tflops=989.0) == [*always, *with_peak, *end]


def test_medians_exclude_the_first_two_steps_and_totals_include_them():
    steps = []
    for step in range(1, 101):
        ms = (100.0 + step % 7) * (50 if step <= 2 else 1)
        speed = {"step_ms": ms, "data_wait_ms": 0.5, "tokens_per_second": 4.096e6 / ms}
        changes = {"memory_gib": 1.0 + step % 3, "recompiles": int(step == 9)}
        steps.append(figures(step, epoch=step / 10, loss=5 - step / 100, **speed, **changes))
    evaluations = [
        {"step": s, "event": "evaluation", "held_out_loss": 4 - s / 100, "held_out_perplexity": 9.0}
        for s in (50, 100)
    ]
    result = summary_of([*steps[:50], evaluations[0], *steps[50:], evaluations[1]])
    assert result["steps"] == 100 and result["tokens"] == 409_600 and result["epoch"] == 10.0
    milliseconds = [record["step_ms"] for record in steps]
    assert result["step_ms"] == statistics.median(milliseconds[2:])
    assert result["data_wait_share"] == pytest.approx(98 * 0.5 / sum(milliseconds[2:]))
    assert result["hours"] == pytest.approx(sum(milliseconds) / 3.6e6)
    assert result["loss"] == 4.0 and result["loss_at_end"] == pytest.approx(4.315)
    assert (result["held_out_loss"], result["memory_gib"], result["recompiles"]) == (3.0, 3.0, 1)
    assert "mfu_bf16_peak" not in result
