"""What `--plan` prints: the figures of a plan in lines of text."""

from __future__ import annotations

import textwrap

from foundation import units
from foundation.tables import screen_width
from foundation.units import GIB, plural
from pretrain.metrics.flop_formulas import FORMULAS
from pretrain.optimizer import schedule
from pretrain.plan.plan import ASSUMED_SHARES, Plan

WIDTH = 100  # of the rendered plan, or as many columns as a narrower terminal has


def render(plan: Plan, *, brief: bool = False) -> str:
    """The plan as a user reads it, a few lines to a subject; `brief`: without the parts of FLOPs and memory. As wide as the
    terminal, WIDTH columns at most."""
    recipe, devices, width = plan.recipe, f"{plan.devices.count} x {plan.devices.name or 'device'}", screen_width(WIDTH)
    if plan.devices.replicas > 1:
        devices += f" ({plan.devices.replicas} replicas of {plan.devices.shards} shards)"
    if plan.devices.sharded:
        devices += f", shards gathered {'once a step' if plan.devices.gathered else 'for each use'}"
    compute = f"{plan.computes} compute, emulated" if plan.emulated else f"{plan.computes} compute"
    title = f"{recipe.name}: {compute}, {recipe.weights} weights, {devices}"
    subjects = {
        "model": _model_lines(plan),
        "step": [_step_line(plan)],
        "horizon": _horizon_lines(plan),
        "FLOPs": _flops_lines(plan)[: 1 if brief else None],
        "time": [_time_line(plan)],
        "memory": _memory_lines(plan)[: 1 if brief else None],
        "warning: ": plan.warnings,
    }
    lines = [(name if i == 0 else "", text) for name, texts in subjects.items() for i, text in enumerate(texts)]
    return "\n".join([*textwrap.wrap(title, width), "─" * width, *(wrapped(name, text, width) for name, text in lines)])


def wrapped(name: str, text: str, width: int) -> str:
    """`text` in lines of at most `width` columns, `name` at the left of the first."""
    return textwrap.fill(text, width, initial_indent=f"{name:<9}", subsequent_indent=" " * 9)


def _model_lines(plan: Plan) -> list[str]:
    flops, shape = plan.flops, plan.flops.shape
    head = "head tied to the embedding" if flops.tied else "head of its own"
    without = units.count(flops.parameters - flops.embedding_parameters)
    heads = f"{plural(shape.heads, 'head')} of {shape.head_dim} ({shape.kv_heads} for keys and values)"
    return [
        f"{units.count(flops.parameters)} parameters, {without} without embeddings, {head}",
        f"{plan.model_type}: {shape.layers} layers, hidden {shape.hidden:,}, {heads}, vocabulary {shape.vocabulary:,}",
        *([plan.vocabulary] if plan.vocabulary else []),
    ]


def _step_line(plan: Plan) -> str:
    total = f"{plan.tokens_per_step:,} tokens = {plan.packs_per_step:,} packs of {plan.recipe.data.length:,}"
    devices = plural(plan.devices.count, "device")
    if plan.microbatch is None:
        return f"{total} = {devices} x {plural(plan.packs_per_rank, 'pack')}, microbatch: auto"
    empty = f", {plural(plan.empty_places, 'place')} empty" if plan.empty_places else ""
    return f"{total} = {devices} x {plural(plan.accumulation, 'microbatch')} x {plural(plan.microbatch, 'pack')}{empty}"


def _horizon_lines(plan: Plan) -> list[str]:
    tokens = f"{units.count(plan.total_tokens)} tokens"
    if plan.trained_share is not None:
        tokens += f" ({units.count(plan.total_tokens * plan.trained_share)} of them trained on)"
    epochs = f" = {plan.epochs:.2f} epochs of {plural(plan.packs, 'pack')}" if plan.packs else ""
    phases = [f"steps {first:,} to {last:,} in {name}" for first, last, name in plan.phases_in_use if plan.has_several]
    sources = []
    if stream := plan.recipe.data.stream:
        sources = [f"packed as it comes: {units.count(stream.window)} tokens at a time, {stream.disk_gb:g} GB on disk at most"]
    elif plan.mixture is not None:
        shares, passes = plan.mixture.shares(plan.total_packs), plan.mixture.epochs(plan.total_packs)
        sources = [
            f"{units.percent(shares[name])} of the tokens from {name}: {passes[name]:.2f} epochs of {plural(count, 'pack')}"
            for name, count in zip(plan.mixture.names, plan.mixture.counts, strict=True)
        ]
    rate = schedule.describe(plan.recipe.schedule, plan.recipe.optimizer, plan.steps)
    return [f"{plural(plan.steps, 'step')} = {tokens}{epochs}", *phases, *sources, rate]


def _flops_lines(plan: Plan) -> list[str]:
    total, length = plan.flops_per_token, plan.recipe.data.length
    sizes = {"a token": total, "a step": total * plan.tokens_per_step, "in all": plan.total_flops}
    parts = plan.flops.by_part(1, plan.mean_squared)
    others = [formula.per_token(plan.flops, length) for formula in FORMULAS[1:]]
    return [
        ", ".join(f"{units.operations(value)} {unit}" for unit, value in sizes.items()),
        ", ".join(f"{name} {units.percent(value / total)}" for name, value in parts.items()),
        f"by other launchers' formulas {units.operations(min(others))} to {units.operations(max(others))} a token "
        "(python -m pretrain flops)",
    ]


def _time_line(plan: Plan) -> str:
    """Says how long the run takes at the stated speed; without one, at two utilisations between which runs of dense models
    usually lie."""
    if plan.tokens_per_second:
        tflops = plan.tokens_per_second * plan.flops_per_token / units.TERA
        share = f", {units.percent(tflops / plan.peak_tflops)} of the {plan.computes} peak" if plan.peak_tflops else ""
        speed = f"{plan.tokens_per_second:,.0f} tokens/s ({tflops:.4g} TFLOP/s{share})"
        return f"{units.duration(plan.hours * 3600)} at {speed}"
    if plan.peak_tflops:
        fast, slow = (units.duration(plan.total_flops / (share * plan.peak_tflops * units.TERA)) for share in ASSUMED_SHARES)
        shares = " to ".join(f"{100 * share:g}" for share in ASSUMED_SHARES)
        return (
            f"{fast} to {slow} at {shares} % of the {plan.computes} peak, {plan.peak_tflops:,.4g} TFLOP/s: assumed, not measured"
        )
    return "not known: no speed is stated or measured yet, and no peak says anything of this device or of emulation"


def _memory_lines(plan: Plan) -> list[str]:
    size = plan.expected_microbatch
    limit = f" of {units.memory(plan.devices.memory / GIB)}" if plan.devices.memory else ""
    chosen = "" if plan.microbatch else "; auto finds what fits by trying"
    parts = plan.memory.parts(size)
    width = max(map(len, parts))
    copies = units.memory(plan.bytes_copied / GIB)
    saves = [f"host: {copies} a process for copies while a checkpoint is written"] if plan.recipe.checkpoint.every else []
    spent = [f"loss in chunks of {plan.chunk:,} tokens"] if plan.chunk else []
    spent += ["queries, keys and values kept for backward"] if plan.keeps_rotated else []
    return [
        f"about {units.memory(plan.memory.total(size) / GIB)}{limit} a device, {plural(size, 'pack')} a microbatch{chosen}",
        *([f"by the memory that is there: {', '.join(spent)}"] if spent else []),
        *(f"  {name:<{width}}  {units.memory(part / GIB):>9}" for name, part in parts.items()),
        *saves,
    ]
