"""Time and cost on devices that are not here: from peaks and from runs, each reckoned again by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from foundation.errors import InputError
from pretrain.metrics.run_record import read_run
from pretrain.plan.memory import Devices
from pretrain.plan.plan import Plan
from pretrain.plan.targets import MeasuredRun, Target, bytes_sent, estimates, left_out, on_devices, step_seconds
from pretrain.precision.selection import missing_on, select_precision
from pretrain.precision.settings import LowPrecisionSettings
from tests.pretrain.plan.plan_recipe import QWEN3, flops_of, on_meta, recipe

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def shapes() -> Any:
    return on_meta(QWEN3)


@pytest.fixture
def job(shapes: Any) -> Callable[..., Any]:
    """As much of a job as a target asks for: a billion tokens of Qwen3-1.7B's shape."""

    def make(precision: str = "bf16", **changes: Any) -> Any:
        settings = LowPrecisionSettings(on_unsupported="emulate", **changes.get("fp8_config", {}))
        active = select_precision(precision, settings, missing_on("cpu"))
        wanted = recipe(precision=precision, weights="bf16_exact", **({"train": {"tokens": 10**9}} | changes))
        plan = Plan(wanted, active, Devices(), "qwen3", flops_of(shapes), 745.0)
        return SimpleNamespace(plan=plan, active=active, shapes=shapes, recipe=wanted)

    return make


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """What a run of ten steps has left, the first two of them slow."""

    def write(name: str, tflops: float, gpus: list[str], processes: int = 1, precision: str = "bf16", **audit: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        lines = [
            {"step": step, "tokens": step, "epoch": 0.1, "loss": 1.0, "step_ms": 1.0, "tokens_per_second": 1.0, "tflops": reached}
            for step, reached in enumerate([1.0, 1.0, *[tflops] * 8], start=1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "config.yaml").write_text(yaml.safe_dump({"precision": precision}))
        accelerate = {"processes": processes, "device": "cuda" if gpus else "cpu"}
        (folder / "environment.json").write_text(json.dumps({"gpus": gpus, "accelerate": accelerate}))
        (folder / "audit.json").write_text(json.dumps({"effective": precision, "backend": "torch"} | audit))
        return folder

    return write


def measured(folder: Path) -> MeasuredRun:
    return MeasuredRun.of(read_run(folder))


def test_hours_are_operations_over_the_stated_share_of_the_peak(job):
    [row] = estimates(job(), [Target("H200")], [], [0.4])
    work = row.plan.flops.step(1, 745.0) * row.plan.total_tokens
    assert row.hours == pytest.approx([work / (0.4 * 989.5e12) / 3600])
    assert "40 % of the bf16 peak, stated" in row.by
    assert row.cost({"H200": 3.0, "": 9.0}) == pytest.approx([3 * row.hours[0]])
    assert row.cost({"H100": 3.0}) == (), "no price is invented"
    as_driven = replace(row, target=Target("NVIDIA H100 80GB HBM3"))
    assert as_driven.cost({"H200": 9.0, "H100": 3.0}) == pytest.approx([3 * row.hours[0]])
    [low, high] = next(estimates(job(), [Target("H200")], [])).hours
    assert low / high == pytest.approx(5 / 3), "30 to 50 % are assumed where none is stated"
    assert row.steps_in(10) == (int(10 / row.hours[0] * row.plan.total_tokens / row.plan.tokens_per_step),)


def test_a_run_goes_over_to_another_device_by_the_ratio_of_peaks(job, run_folder):
    run = measured(run_folder("mine", 500.0, ["NVIDIA H200"]))
    assumed, same, other_assumed, other = estimates(job(), [Target("H200"), Target("B200")], [run])
    assert assumed.by.endswith("assumed") and other_assumed.by.endswith("assumed")
    assert same.tokens_per_second == pytest.approx([500e12 / same.plan.flops_per_token])
    assert other.tokens_per_second[0] / same.tokens_per_second[0] == pytest.approx(2250 / 989.5)
    assert same.by == "run mine: 1 x NVIDIA H200, measured over 8 steps"
    assert not Target("H100").is_called("NVIDIA H100 PCIe") and Target("H100").is_called("NVIDIA H100 80GB HBM3")
    assert other.by == f"{same.by}, x 2250 / 989.5 TFLOP/s"


def test_several_devices_lose_what_they_exchange_unless_the_run_had_it_too(job, run_folder):
    alone = measured(run_folder("alone", 500.0, ["NVIDIA B200"]))
    eight = measured(run_folder("eight", 500.0, ["NVIDIA B200"] * 8, processes=8))
    larger = job(batch={"tokens": 2**20})
    _, of_one, of_eight, own = estimates(larger, [Target("B200", 8)], [alone, eight], [0.5])
    assert str(own.target) == "1 x NVIDIA B200", "what was measured is always among the rows"
    whole = 8 * 500e12 / of_one.plan.flops_per_token
    assert of_eight.tokens_per_second == pytest.approx([whole])
    assert 0.5 * whole < of_one.tokens_per_second[0] < 0.99 * whole


def test_a_run_in_another_precision_is_left_out_and_named(job, run_folder):
    run = measured(run_folder("fp8", 700.0, ["NVIDIA H200"], precision="delayed"))
    assert len(list(estimates(job(), [Target("H200")], [run]))) == 1
    assert list(left_out(job(), [run], [])) == ["run fp8 computed in delayed, this plan in bf16: its speed is left out"]


def test_runs_whose_speed_is_not_their_own_are_refused(run_folder):
    emulated = run_folder("emulated", 1.0, [], precision="delayed", backend="emulation")
    with pytest.raises(InputError, match=r"--run .*emulated: its precision was emulated"):
        measured(emulated)
    shared = run_folder("shared", 1.0, [])
    (shared / "matrix.json").write_text(json.dumps({"side_by_side": True}))
    with pytest.raises(InputError, match=r"--run .*shared: it shared its machine"):
        measured(shared)
    (short := run_folder("short", 1.0, []) / "metrics.jsonl").write_text(
        '{"step": 1, "tokens": 1, "epoch": 0.1, "loss": 1.0, "step_ms": 1.0}\n'
    )
    with pytest.raises(InputError, match="no measured tflops after its first 2 steps"):
        measured(short.parent)


def test_what_a_device_cannot_run_is_said_in_its_row(job):
    def obstacle(target: str, **changes: Any) -> str | None:
        [row] = estimates(job(**changes), [Target.parse(target)], [])
        return row.obstacle

    assert obstacle("H200", precision="mxfp8") == (
        "mxfp8 needs a GPU of compute capability 10.0 or higher and below 12.0 (B200, GB200)"
    )
    assert obstacle("B200", precision="mxfp8") is None
    assert obstacle("B200", precision="block") is None
    assert obstacle("A100", precision="current") == "no current peak is known of it"
    assert obstacle("8xB200", batch={"tokens": 4 * 4096}) == (
        "a step of 4 packs is too small for it: `batch.tokens: 32768` at least"
    )


@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_memory_is_what_a_run_took_on_that_device(precision, job):
    """Of exact BF16 weights, 8 packs of 4,096 at once."""
    measured = json.loads((ROOT / "benchmarks/results/speed/h200_throughput.json").read_text())["ways"][f"{precision}_exact"][
        "memory_gib"
    ]
    planned = Target("H200").plan(job(precision, batch={"tokens": 131072, "microbatch": 8}))
    assert planned.chunk is None and planned.keeps_rotated
    assert planned.memory.total(8) / 2**30 == pytest.approx(measured, rel=0.03)


@pytest.mark.parametrize("text", ["Q9", "8x", "0xH200"])
def test_devices_that_are_none_are_refused(text):
    assert [Target.parse(known) for known in ("H200", " 8 X b200")] == [Target("H200"), Target("b200", 8)]
    with pytest.raises(InputError, match=f"--on {text}: "):
        Target.parse(text)


VALUES = 1_720_574_976  # of QWEN3


def on(shapes: Any, tokens: int, devices: int, *, sharded: bool = False) -> Plan:
    changed = recipe(batch={"tokens": tokens, "microbatch": 8}, data={"packs": "p", "length": 4096})
    bf16 = select_precision("bf16", LowPrecisionSettings(), missing_on("cpu"))
    one = Plan(changed, bf16, Devices(name="NVIDIA H200"), "any", flops_of(shapes), 745.0, packs=22_206)
    return on_devices(one, devices, sharded=sharded)


def test_a_copy_on_each_sends_its_sums_twice_and_shards_send_sums_and_weights_once(shapes):
    assert bytes_sent(on(shapes, 131_072, 4), 1) == pytest.approx(2 * 3 / 4 * 4 * VALUES)
    assert bytes_sent(on(shapes, 131_072, 4, sharded=True), 1) == pytest.approx(3 / 4 * (4 + 2) * VALUES)
    assert bytes_sent(on(shapes, 131_072, 1), 4) == 0


@pytest.mark.parametrize(("tokens", "measured"), [(131_072, 278_422), (524_288, 299_000)])
def test_what_four_h200s_lost_is_met_within_two_percent(tokens: int, measured: int, shapes):
    """DDP in FP8 with its head, where one made 76,923 tokens/s: benchmarks/results/speed/h200_x4_ddp.json, docs/scaling.md."""
    assert tokens / step_seconds(on(shapes, tokens, 4), 76_923) == pytest.approx(measured, rel=0.02)
