"""What to say where memory runs out: the settings that take less, by the plan's own figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from foundation import units
from foundation.reading import one_line
from foundation.units import GIB
from pretrain.plan.plan import Plan

# Libraries that allocate by themselves, and torch on a host, raise errors of other classes.
_SIGNS = ("out of memory", "_ALLOC_FAILED", "can't allocate memory", "not enough memory")
_WORTHWHILE = 0.99  # of what is taken now: what takes more than this is not worth a line
_SMALL_CHUNK = 1024


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether `error`, or what it was raised from, says that a device or the host has no memory left."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in _SIGNS):
            return True
        error = error.__cause__ or error.__context__
    return False


def out_of_memory(plan: Plan, error: BaseException, when: str) -> str:
    """The message for `error`, which came `when`: what the plan had reckoned with, and what takes less, most effective first."""
    limit = f" of {units.memory(plan.devices.memory / GIB)}" if plan.devices.memory else ""
    reckoned = f"about {units.memory(plan.memory.total(plan.expected_microbatch) / GIB)}{limit} a device"
    return (
        f"out of memory {when}: {one_line(error, 160)}. The plan reckoned with {reckoned}, {plan.expected_microbatch} pack(s) a "
        f"microbatch.{listed(plan)}\nCheckpoints are untouched: the same command with one of these goes on from the last; where "
        "it changes `weights` or `optimizer`, with --accept-changes too."
    )


def listed(plan: Plan) -> str:
    """`takes_less` as lines that follow a message."""
    ways = takes_less(plan)
    width = max((len(setting) for setting, _ in ways), default=0)
    lines = [f"\n  {setting:<{width}}  about {units.memory(size / GIB)} a device" for setting, size in ways]
    return "\nWhat takes less, by the plan, most effective first:" + "".join(lines) if lines else ""


def takes_less(plan: Plan) -> list[tuple[str, int]]:
    """Single changes of the plan's settings, and the bytes a device would need by its estimate; the least first."""
    now = plan.memory.total(plan.expected_microbatch)
    changed = [(setting, other.memory.total(other.expected_microbatch)) for setting, other in _changes(plan)]
    return sorted(((setting, size) for setting, size in changed if size < _WORTHWHILE * now), key=lambda each: each[1])


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    recipe, devices = plan.recipe, plan.devices
    smaller = [size for size in plan.microbatch_sizes if size < plan.expected_microbatch]
    for size in {*smaller[-1:], *smaller[:1]}:  # the next one, and the least
        yield f"batch.microbatch={size}", plan.with_microbatch(size)
    plan = plan.with_microbatch(plan.expected_microbatch)
    yield "model.gradient_checkpointing=full", plan.with_settings("model", gradient_checkpointing="full")
    if plan.active.precision.compute_dtype != "float32":
        for mode in {"fp32": ("bf16_exact", "bf16"), "bf16_exact": ("bf16",), "bf16": ()}[recipe.weights]:
            yield f"weights={mode}", replace(plan, recipe=plan.recipe.model_copy(update={"weights": mode}))
    yield "optimizer.moments=bf16", plan.with_settings("optimizer", moments="bf16")
    if not devices.sharded:
        yield "optimizer.gradients=bf16", plan.with_settings("optimizer", gradients="bf16")
    if recipe.loss.kind == "chunked" and plan.loss.tokens_at_once > _SMALL_CHUNK:
        yield f"loss.chunk={_SMALL_CHUNK}", plan.with_settings("loss", chunk=_SMALL_CHUNK)
    if devices.count > 1 and not devices.sharded:
        yield "accelerate_configs/zero.yaml", replace(plan, devices=replace(devices, sharded=True, gathered=True))
    if devices.count > 1 and (devices.gathered or not devices.sharded):
        yield "accelerate_configs/fsdp2.yaml", replace(plan, devices=replace(devices, sharded=True, gathered=False))
