"""Plans for devices that are not here: what fits them, by figures that were measured there, and what they cannot run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedModel

from foundation.errors import InputError
from pretrain.plan.memory import Devices
from pretrain.plan.plan import Plan
from pretrain.plan.targets import Target
from pretrain.precision.selection import missing_on, select_precision
from pretrain.precision.settings import LowPrecisionSettings
from tests.pretrain.plan.plan_recipe import QWEN3, flops_of, on_meta, recipe, schedule_of


@pytest.fixture(scope="module")
def shapes() -> PreTrainedModel:
    return on_meta(QWEN3)


@pytest.fixture(scope="module")
def plan_on(shapes: PreTrainedModel) -> Callable[..., Plan]:
    """Return the plan of a billion tokens of Qwen3-1.7B's shape on a target."""

    def make(target: Target, precision: str = "bf16", **changes: Any) -> Plan:
        settings = LowPrecisionSettings(on_unsupported="emulate", **changes.get("fp8_config", {}))
        active = select_precision(precision, settings, missing_on("cpu"))
        wanted = recipe(
            precision=precision, weights="bf16_exact", **({"train": {"tokens": 10**9}} | changes)
        )
        plan = Plan(wanted, schedule_of(wanted, active), Devices(), flops_of(shapes), 745.0)
        return target.plan(plan, shapes)

    return make


@pytest.mark.parametrize(
    ("target", "precision", "changes", "says"),
    [
        ("H200", "mxfp8", {}, "needs a GPU of compute capability 10.0"),
        ("B200", "mxfp8", {}, None),
        ("B200", "block", {}, None),
        ("A100", "current", {}, "no current peak"),
        ("8xB200", "bf16", {"batch": {"tokens": 4 * 4096}}, "`batch.tokens: 32768` at least"),
    ],
)
def test_what_a_device_cannot_run_is_said(
    target: str, precision: str, changes: dict, says: str | None, plan_on: Callable
) -> None:
    there = Target.parse(target)
    obstacle = there.obstacle(plan_on(there, precision, **changes))
    assert obstacle is says or says in obstacle


def test_devices_that_do_not_hold_the_model_have_shards_of_it(plan_on: Callable) -> None:
    for length, sharded in ((4096, False), (2**17, True)):
        changes = {"data": {"packs": "p", "length": length}, "batch": {"tokens": 2**21}}
        alone, eight = (
            plan_on(Target("NVIDIA H100 80GB HBM3", count), **changes) for count in (1, 8)
        )
        assert (alone.devices.sharded, eight.devices.sharded) == (False, sharded)
        assert (alone.takes(1) > alone.devices.memory) == sharded


@pytest.mark.parametrize(
    ("target", "gib"), {"A100": 79.1, "2xRTX A6000": 47.4, "L40S": 44.3}.items()
)
def test_a_microbatch_fits_the_memory_of_the_device(
    target: str, gib: float, plan_on: Callable
) -> None:
    """Devices of which only the peak was known were planned as if memory were endless."""
    changes = {"data": {"packs": "p", "length": 2048}, "batch": {"tokens": 2**21}}
    plan = plan_on(Target.parse(target), **changes)
    assert plan.takes(1) <= plan.takes(plan.expected_microbatch) <= 0.92 * gib * 2**30
    assert plan.expected_microbatch < plan.packs_per_rank


def test_a_device_that_holds_the_model_keeps_gradients_of_the_gap(plan_on: Callable) -> None:
    """2 bytes a parameter, as the sums are."""
    there = plan_on(Target("NVIDIA H200"), "delayed", log={"gap": 10})
    assert (
        not there.devices.sharded
        and there.memory(1)["gradients in BF16 for log.gap"] == there.memory(1)["gradients"]
    )


@pytest.mark.parametrize("text", ["Q9", "8x", "0xH200"])
def test_devices_that_are_none_are_refused(text: str) -> None:
    assert [Target.parse(known) for known in ("H200", " 8 X b200")] == [
        Target("H200"),
        Target("b200", 8),
    ]
    with pytest.raises(InputError, match=f"--on {text}: "):
        Target.parse(text)
