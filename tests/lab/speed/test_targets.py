"""Plans for devices other than this machine's, by peaks that were measured on them."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from foundation.errors import InputError
from lab.speed import targets
from lab.speed.targets import devices_called, obstacle
from pretrain.plan.plan import Plan, Training
from pretrain.precision.selection import select_precision
from pretrain.precision.settings import LowPrecisionSettings
from tests.pretrain.plan.plan_recipe import QWEN3, flops_of, on_meta, qwen3, recipe, schedule_of

FLASH = {"config": QWEN3, "attention": "flash_attn"}


def plan_on(
    target: str,
    precision: str = "bf16",
    trained: PreTrainedModel | None = None,
    squared_length_per_token: float = 745.0,
    topology: str | None = None,
    **changes: Any,
) -> Plan:
    """Return the plan of a billion tokens of Qwen3-1.7B on a target."""
    active = select_precision(precision, LowPrecisionSettings(), lambda precision: None)
    usual = {"weights": "bf16_exact", "train": {"tokens": 10**9}}
    resolved = recipe(precision=precision, **(usual | changes))
    trained = trained or qwen3()
    schedule = schedule_of(resolved, active)
    training = Training(resolved, schedule, flops_of(trained), squared_length_per_token)
    return targets.plan_on(devices_called(target), training, trained, topology)


@pytest.mark.parametrize(
    ("target", "precision", "changes", "message"),
    [
        ("H200", "mxfp8", {}, "needs a GPU of compute capability 10.0"),
        ("B200", "mxfp8", {}, None),
        ("B200", "block", {}, None),
        ("A100", "current", {}, "needs a GPU of compute capability 8.9"),
        ("8xB200", "bf16", {"batch": {"tokens": 4 * 4096}}, "set `batch.tokens` to at least 32768"),
        ("8xB200", "bf16", {"batch": {"tokens": 8 * 4096}}, None),
        ("RTX 4090", "bf16", {"model": FLASH}, "flash_attn needs an sm_90 or sm_100 GPU"),
        ("H200", "fp32", {"model": FLASH, "weights": "fp32"}, "flash_attn needs BF16"),
        ("H200", "bf16", {"model": FLASH}, None),
        ("H200", "bf16", {"model": FLASH | {"attention": "cudnn"}}, None),
    ],
)
def test_an_obstacle_on_a_device_is_named(
    target: str, precision: str, changes: dict, message: str | None
) -> None:
    reason = obstacle(plan_on(target, precision, **changes))
    assert reason is message or message in reason


def test_a_model_too_large_for_a_device_is_sharded() -> None:
    for length, sharded in ((4096, False), (2**17, True)):
        changes = {"data": {"packs": "p", "length": length}, "batch": {"tokens": 2**21}}
        alone, eight = (plan_on(f"{count} x NVIDIA H100 80GB HBM3", **changes) for count in (1, 8))
        assert (alone.devices.sharded, eight.devices.sharded) == (False, sharded)
        assert (alone.needed_memory(1) > alone.devices.memory) == sharded


@pytest.mark.parametrize("precision", ["bf16", "delayed", "mxfp8"])
def test_a_precision_is_sharded_if_its_microbatch_does_not_fit_otherwise(precision: str) -> None:
    """FP32 weights of a copy take 28 GiB and more, and the activations of 12 packs 80 to 90."""
    changes = {"weights": "fp32", "batch": {"tokens": 2**21, "microbatch": 12}}
    alone = plan_on("8xH100", precision, topology="ddp", **changes)
    assert alone.needed_memory(1) <= alone.devices.memory < alone.needed_memory(12)
    assert plan_on("8xH100", precision, **changes).devices.sharded


@pytest.mark.parametrize(
    ("target", "gib"), {"A100": 79.1, "2xRTX A6000": 47.4, "L40S": 44.3}.items()
)
def test_a_microbatch_fits_the_memory_of_the_device(target: str, gib: float) -> None:
    """Every device has a memory size, not only a peak speed."""
    changes = {"data": {"packs": "p", "length": 2048}, "batch": {"tokens": 2**21}}
    plan = plan_on(target, **changes)
    assert (
        plan.needed_memory(1) <= plan.needed_memory(plan.expected_microbatch) <= 0.92 * gib * 2**30
    )
    assert plan.expected_microbatch < plan.packs_per_rank


def test_triton_attention_needs_the_memory_of_flash_attention_4() -> None:
    """Both keep rotated queries and keys only if memory suffices."""
    config = QWEN3 | {"head_dim": 64}
    layers = []
    for attention in ("flash_attn", "triton", "varlen"):
        settings = {"config": config, "attention": attention}
        layers.append(plan_on("H200", trained=on_meta(config), model=settings).layers["bf16"][0])
    flash, triton, varlen = layers
    assert triton == flash and triton.rotated > varlen.rotated == 0


@pytest.mark.parametrize("text", ["Q9", "H20", "8x", "0xH200"])
def test_an_unknown_device_raises_the_names_of_the_table(text: str) -> None:
    message = f"--on {text}: this device is not .*the table has A100 40GB, A100, .*RTX 5090$"
    with pytest.raises(InputError, match=message):
        devices_called(text)


def test_several_devices_may_be_written_in_several_ways() -> None:
    texts = ("H200", " 8 X b200", "8xH100", "8 x rtx4090")
    devices = [str(devices_called(text)) for text in texts]
    assert devices == ["1 x H200", "8 x B200", "8 x H100", "8 x RTX 4090"]


@pytest.mark.parametrize(
    ("topology", "sharded", "gathered"),
    [(None, False, False), ("ddp", False, False), ("zero", True, True), ("fsdp2", True, True)],
)
def test_a_topology_replaces_the_first_that_fits(
    topology: str | None, sharded: bool, gathered: bool
) -> None:
    devices = plan_on("8xH100", topology=topology).devices
    assert (devices.sharded, devices.gathered_once) == (sharded, gathered)
    assert not plan_on("H100", topology=topology).devices.sharded


@pytest.mark.parametrize(
    ("target", "requested", "head_dim", "length", "attention"),
    [
        ("H100", "auto", 128, 745, "triton"),
        ("B200", "flash_attn", 128, 745, "fa4"),
        ("H100", "auto", 64, 745, "triton"),
        ("H100", "auto", 64, 1200, "fa4"),
        ("B200", "auto", 64, 745, "fa4"),
        ("RTX 4090", "auto", 64, 745, "varlen"),
        ("RTX 5090", "auto", 128, 745, "varlen"),
        ("H100", "auto", 512, 745, "sdpa"),
        ("H100", "sdpa", 128, 745, "sdpa"),
    ],
)
def test_a_target_uses_the_attention_that_is_chosen_there(
    target: str, requested: str, head_dim: int, length: int, attention: str
) -> None:
    config = QWEN3 | {"head_dim": head_dim}
    settings = {"config": config, "attention": requested}
    plan = plan_on(
        target, trained=on_meta(config), model=settings, squared_length_per_token=float(length)
    )
    assert plan.attention.name == f"packed_{attention}"
