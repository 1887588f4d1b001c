"""Convert a plan to the lines of text that `--plan` prints."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence

from foundation import units
from foundation.units import bytes_text, plural
from pretrain.optimizer.schedule import describe
from pretrain.plan.plan import Plan, Training


def width() -> int:
    """Return the number of columns of the output: 100, or the width of a narrower terminal."""
    return min(100, shutil.get_terminal_size((100, 24)).columns)


def render(plan: Plan, *, brief: bool = False) -> str:
    """Return the plan as text, with a few lines for each subject.

    With `brief`, the text does not have the parts of the memory.
    """
    emulated = ", emulated" if plan.emulated else ""
    title = (
        f"{plan.recipe.name}: {plan.schedule.label} compute{emulated}, "
        f"{plan.recipe.weights} weights, {_devices_line(plan)}"
    )
    memory = _memory_lines(plan)
    if brief:
        memory = memory[:1]
    subjects = {
        "model": model_lines(plan),
        "step": [_step_line(plan)],
        "horizon": horizon_lines(plan),
        "FLOPs": [flops_line(plan)],
        "memory": memory,
        "warning: ": plan.warnings,
    }
    return "\n".join([*textwrap.wrap(title, width()), "─" * width(), in_subjects(subjects)])


def in_subjects(subjects: Mapping[str, Sequence[str]]) -> str:
    """Return the texts of all subjects as lines of at most `width` columns.

    subjects: maps the name of each subject to its texts. The first text of a subject begins with
        the name.
    """
    lines = []
    for name, texts in subjects.items():
        indent = f"{name:<9}"
        for text in texts:
            # Do not cut paths and commands.
            lines += textwrap.wrap(
                text,
                width(),
                initial_indent=indent,
                subsequent_indent=" " * 9,
                break_long_words=False,
                break_on_hyphens=False,
            )
            indent = " " * 9
    return "\n".join(lines)


def _devices_line(plan: Plan) -> str:
    """Return the number and the name of the devices, and how the weights are sharded over them."""
    devices = plan.devices
    if not devices.sharded:
        return str(devices)
    shards = "shards"
    if devices.replicas > 1:
        shards = f"{devices.replicas} replicas of {devices.shards} shards"
    if devices.gathered_once:
        return f"{devices}, {shards}, gathered and reduced once a step"
    # Layers that keep codes of their weights gather them only once a step.
    keeps_codes = all(layer.keeps_codes for layers in plan.layers.values() for layer in layers)
    gathered = "once a step" if keeps_codes else "for each use"
    return f"{devices}, {shards}, gathered {gathered}, reduced in each microbatch"


def model_lines(plan: Training) -> list[str]:
    """Return lines about the model's parameters, its shape, and the layers that stay in BF16."""
    flops = plan.flops
    shape = flops.shape
    parameters = f"{units.count(flops.parameters)} parameters"
    if flops.idle_weights:
        in_use = units.count(flops.parameters - flops.idle_weights)
        parameters += f", {in_use} of them used per token"
    without = units.count(flops.parameters - flops.embedding_parameters)
    head = "tied" if flops.tied else "not tied"
    heads = f"{plural(shape.heads, 'head')} of {shape.head_dim}"
    heads += f" ({shape.kv_heads} for keys and values)"
    lines = [f"{parameters}, {without} without embeddings, head {head} to the embedding"]
    vocabulary = f"vocabulary {shape.vocabulary:,}"
    lines.append(f"{shape.layers} layers, hidden {shape.hidden:,}, {heads}, {vocabulary}")
    for active in plan.precisions:
        first, last = active.kept_layers(shape.layers) if active.precision.quantized else (0, 0)
        if first or last:
            lines.append(
                f"{active.precision.name} leaves the first {first} and the last {last} layers in "
                "bf16 (fp8_config.keep_bf16_layers)"
            )
    return lines


def _step_line(plan: Plan) -> str:
    """Return a line about the tokens, packs and microbatches of a step."""
    devices = plan.devices.count
    packs = plan.packs_per_step
    in_packs = f"{plural(packs, 'pack')} of {plan.recipe.data.length:,}"
    total = f"{plan.tokens_per_step:,} tokens = {in_packs} = {plural(devices, 'device')} x "
    if plan.microbatch is None:
        return f"{total}{plural(plan.packs_per_rank, 'pack')}, microbatch: auto"
    microbatches = -(-plan.packs_per_rank // plan.microbatch)
    return f"{total}{plural(microbatches, 'microbatch')} x {plural(plan.microbatch, 'pack')}"


def flops_line(plan: Training) -> str:
    """Return a line with the FLOPs of a token, of a step, and of the run."""
    tokens = {"per token": 1, "per step": plan.tokens_per_step, "in total": plan.total_tokens}
    parts = [
        f"{units.operations(plan.flops_per_token * number)} {unit}"
        for unit, number in tokens.items()
    ]
    return ", ".join(parts)


def horizon_lines(plan: Training) -> list[str]:
    """Return lines about the steps: their number, precisions, sources of data and learning rate."""
    epochs = f" = {plan.epochs:.2f} epochs of {plural(plan.packs, 'pack')}" if plan.packs else ""
    lines = [f"{plural(plan.steps, 'step')} = {units.count(plan.total_tokens)} tokens{epochs}"]
    if plan.schedule.changes:
        for first, last, active in plan.schedule.spans:
            lines.append(f"steps {first:,} to {last:,} in {active.name}")
    if plan.mixture is not None:
        shares = plan.mixture.shares(plan.total_packs)
        passes = plan.mixture.epochs(plan.total_packs)
        for name, count in zip(plan.mixture.names, plan.mixture.counts, strict=True):
            epochs = f"{passes[name]:.2f} epochs of {plural(count, 'pack')}"
            lines.append(f"{units.percent(shares[name])} of the tokens from {name}: {epochs}")
    peak = plan.recipe.optimizer.learning_rate
    return [*lines, describe(plan.recipe.schedule, peak, plan.steps)]


def _memory_lines(plan: Plan) -> list[str]:
    """Return a line about the total memory of a device, and one line about each part of it."""
    size = plan.expected_microbatch
    searched = "" if plan.microbatch else "; auto finds the largest that fits by trial"
    parts = plan.memory_parts(size)
    longest = max(map(len, parts))
    total = bytes_text(sum(parts.values()))
    available = bytes_text(plan.devices.memory)
    line = (
        f"about {total} of {available} per device for tensors, with {plural(size, 'pack')} per "
        f"microbatch{searched}"
    )
    if plan.host_memory:
        line += f", and {bytes_text(plan.host_memory)} of host memory (optimizer.offload)"
    lines = [line]
    for name, part in parts.items():
        lines.append(f"  {name:<{longest}}  {bytes_text(part):>9}")
    return lines
