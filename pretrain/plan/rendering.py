"""What `--plan` prints: the figures of a plan in lines of text."""

from __future__ import annotations

import textwrap

from foundation import units
from foundation.units import GIB, plural
from pretrain.metrics.flops import ModelFlops
from pretrain.optimizer import schedule
from pretrain.plan.plan import Plan

WIDTH = 100  # columns of what is printed
ASSUMED_SHARES = (0.3, 0.5)  # of the peak, between which runs of dense models usually lie


def render(plan: Plan, *, brief: bool = False) -> str:
    """The plan as a user reads it, a few lines to a subject; `brief`: memory without its parts."""
    devices = plan.devices
    where = f"{devices.count} x {devices.name or 'device'}"
    if devices.sharded:
        replicas = (
            f"{devices.replicas} replicas of {devices.shards} shards"
            if devices.replicas > 1
            else "shards"
        )
        where += f", {replicas}, gathered {'once a step' if devices.gathered else 'for each use'}"
    title = f"{plan.recipe.name}: {plan.computes} compute{', emulated' * plan.emulated}, {plan.recipe.weights} weights, {where}"
    subjects = {
        "model": model_lines(plan),
        "step": [_step_line(plan)],
        "horizon": horizon_lines(plan),
        "FLOPs": [flops_line(plan)],
        "time": [_time_line(plan)],
        "memory": _memory_lines(plan)[: 1 if brief else None],
        "warning: ": plan.warnings,
    }
    return "\n".join([*textwrap.wrap(title, WIDTH), "─" * WIDTH, in_subjects(subjects)])


def in_subjects(subjects: dict[str, list[str]]) -> str:
    """The texts of each subject in lines of WIDTH columns at most, the subject's name at the left of its first."""
    lines = [
        (name if i == 0 else "", text)
        for name, texts in subjects.items()
        for i, text in enumerate(texts)
    ]
    return "\n".join(
        textwrap.fill(text, WIDTH, initial_indent=f"{name:<9}", subsequent_indent=" " * 9)
        for name, text in lines
    )


def shape_lines(flops: ModelFlops) -> list[str]:
    shape, head = flops.shape, "head tied to the embedding" if flops.tied else "head of its own"
    without = units.count(flops.parameters - flops.embedding_parameters)
    active = (
        f", {units.count(flops.parameters - flops.idle_weights)} of them for a token"
        if flops.idle_weights
        else ""
    )
    heads = (
        f"{plural(shape.heads, 'head')} of {shape.head_dim} ({shape.kv_heads} for keys and values)"
    )
    return [
        f"{units.count(flops.parameters)} parameters{active}, {without} without embeddings, {head}",
        f"{shape.layers} layers, hidden {shape.hidden:,}, {heads}, vocabulary {shape.vocabulary:,}",
    ]


def model_lines(plan: Plan) -> list[str]:
    layers = plan.flops.shape.layers
    kept = {
        each.precision.name: each.kept_layers(layers)
        for each in plan.actives
        if each.precision.quantized
    }
    return [
        *shape_lines(plan.flops),
        *(
            f"{name} leaves {' and '.join(ends)} in bf16 (fp8_config.keep_bf16_layers)"
            for name, (first, last) in kept.items()
            if (
                ends := [
                    f"the {where} {plural(each, 'layer')}"
                    for where, each in (("first", first), ("last", last))
                    if each
                ]
            )
        ),
    ]


def _step_line(plan: Plan) -> str:
    devices, packs, each = plan.devices.count, plan.packs_per_step, plan.packs_per_rank
    total = f"{plan.tokens_per_step:,} tokens = {packs:,} packs of {plan.recipe.data.length:,} = {plural(devices, 'device')} x "
    if plan.microbatch is None:
        return f"{total}{plural(each, 'pack')}, microbatch: auto"
    microbatches = -(-each // plan.microbatch)
    empty = devices * microbatches * plan.microbatch - packs
    share = f", {plural(empty, 'place')} of {packs + empty:,} empty" if empty else ""
    return f"{total}{plural(microbatches, 'microbatch')} x {plural(plan.microbatch, 'pack')}{share}"


def flops_line(plan: Plan) -> str:
    tokens = {"a token": 1, "a step": plan.tokens_per_step, "in all": plan.total_tokens}
    return ", ".join(
        f"{units.operations(plan.flops_per_token * number)} {unit}"
        for unit, number in tokens.items()
    )


def horizon_lines(plan: Plan) -> list[str]:
    epochs = f" = {plan.epochs:.2f} epochs of {plural(plan.packs, 'pack')}" if plan.packs else ""
    lines = [f"{plural(plan.steps, 'step')} = {units.count(plan.total_tokens)} tokens{epochs}"]
    spans = plan.spans if plan.is_scheduled else ()
    lines += [
        f"steps {first:,} to {last:,} in {active.precision.name}" for first, last, active in spans
    ]
    if stream := plan.recipe.data.stream:
        lines.append(
            f"packed as it comes: {units.count(stream.window)} tokens at a time, {stream.disk_gb:g} GB on disk at most"
        )
    elif plan.mixture is not None:
        shares, passes = (
            plan.mixture.shares(plan.total_packs),
            plan.mixture.epochs(plan.total_packs),
        )
        lines += [
            f"{units.percent(shares[name])} of the tokens from {name}: {passes[name]:.2f} epochs of {plural(count, 'pack')}"
            for name, count in zip(plan.mixture.names, plan.mixture.counts, strict=True)
        ]
    return [*lines, schedule.describe(plan.recipe.schedule, plan.recipe.optimizer, plan.steps)]


def _time_line(plan: Plan) -> str:
    """Says how long the run takes at two utilisations between which runs of dense models usually lie."""
    if not (peak := plan.peak_tflops):
        return "not known: no peak is known for this device, or for emulation"
    work, (low, high) = (
        plan.flops_per_token * plan.total_tokens / (peak * units.TERA),
        ASSUMED_SHARES,
    )
    shares = f"{100 * high:g} to {100 * low:g} % of the {plan.computes} peak, {peak:,.4g} TFLOP/s"
    return f"{units.duration(work / high)} to {units.duration(work / low)} at {shares}: assumed, not measured"


def _memory_lines(plan: Plan) -> list[str]:
    size = plan.expected_microbatch
    limit = f" of {units.memory(plan.devices.memory / GIB)}" if plan.devices.memory else ""
    chosen = "" if plan.microbatch else "; auto finds what fits by trying"
    parts = plan.memory(size)
    width = max(map(len, parts))
    return [
        f"about {units.memory(sum(parts.values()) / GIB)}{limit} a device, {plural(size, 'pack')} a microbatch{chosen}",
        *(f"  {name:<{width}}  {units.memory(part / GIB):>9}" for name, part in parts.items()),
    ]
