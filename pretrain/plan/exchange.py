"""What the GPUs of one machine lose to exchanges, a step: bytes over a share of NVLink's bandwidth.

S is the size of what is exchanged, in bytes, over g GPUs. In NCCL's rings each GPU sends (g - 1) / g · S to gather, or to reduce
and scatter, and twice that to add up over all. The share is no measured speed of NVLink: it is fitted so that the time for the
bytes equals all that four H200s lost (docs/scaling.md), ranks that wait for the slowest and updates that are not divided
included. Over several machines nothing was measured, so nothing is planned.
"""

from __future__ import annotations

from dataclasses import replace

from pretrain.metrics.peaks import known_as
from pretrain.plan.plan import Plan
from pretrain.plan.preflight import fits_gathered
from pretrain.plan.spare import spend_spare_memory

OF_NVLINK_ONCE, OF_NVLINK_EACH = 0.45, 0.75  # weights gathered once a step, and for each use
SUM_BYTES = 4  # gradients are exchanged in FP32 under every topology
# One direction, GB/s. H100, H200: 18 links of 25 GB/s (H200 data sheet: 900 GB/s both ways). B200: 18 links of 50 GB/s.
NVLINK = {"H100": 450.0, "H200": 450.0, "B200": 900.0}
ASSUMED = "H200"  # where the device is not in the table


def on_devices(plan: Plan, count: int, *, sharded: bool) -> Plan:
    """The plan on `count` devices of one machine, each with a copy or with shards of the model."""
    devices = replace(plan.devices, count=count, sharded=sharded and count > 1, replicas=1, gathered=False)
    plan = replace(plan, devices=devices)
    gathered = devices.sharded and fits_gathered(plan)
    return spend_spare_memory(replace(plan, devices=replace(devices, gathered=gathered)))


def step_seconds(plan: Plan, tokens_per_second: float) -> float:
    """Seconds of a step on all of the plan's devices, of which one alone makes `tokens_per_second`: the compute of the device
    with most packs, empty places included, and what exchanges cost."""
    microbatches = -(-plan.packs_per_rank // plan.packs_at_once)
    compute = microbatches * plan.packs_at_once * plan.recipe.data.length / tokens_per_second
    each_use = plan.devices.sharded and not plan.devices.gathered
    rate = (OF_NVLINK_EACH if each_use else OF_NVLINK_ONCE) * NVLINK[known_as(plan.devices.name, NVLINK) or ASSUMED] * 1e9
    return compute + bytes_sent(plan, microbatches) / rate


def bytes_sent(plan: Plan, microbatches: int) -> float:
    """What each GPU sends in a step."""
    values, gpus = plan.flops.parameters, plan.devices.count
    once = (gpus - 1) / gpus
    if not plan.devices.sharded:
        return 2 * once * SUM_BYTES * values
    weights = plan.active.precision.number_bytes * values
    if plan.devices.gathered:
        return once * (SUM_BYTES * values + weights)
    return once * microbatches * (SUM_BYTES * values + 2 * weights)
