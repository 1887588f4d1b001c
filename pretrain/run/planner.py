"""What a recipe would take elsewhere: `python -m pretrain plan RECIPE [key=value ...]`.

    python -m pretrain plan my.yaml train.tokens=20e9                             hours on H100, H200, B200 and 8 x B200
    python -m pretrain plan my.yaml --on 8xH200 --run runs/my --price-per-hour H200=3.50       by the speed of a run of yours
    python -m pretrain plan my.yaml --hours 24                                    what a day buys

What a launch on this machine would do is told by `accelerate launch ... train_accelerate.py RECIPE --plan`. Neither needs packs.
"""

from __future__ import annotations

import argparse
import math
import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from foundation import units
from foundation.command import CommandParser, number
from foundation.errors import InputError
from foundation.tables import markdown, or_dash, screen_width
from foundation.units import GIB, plural
from pretrain.metrics.peaks import known_as
from pretrain.metrics.run_folder import METRICS_FILE
from pretrain.metrics.run_record import read_run
from pretrain.plan.preflight import Job, prepare_job
from pretrain.plan.rendering import WIDTH, wrapped
from pretrain.plan.spare import KEPT_FREE
from pretrain.plan.targets import USUAL, Estimate, MeasuredRun, Target, estimates, left_out, span
from pretrain.run.command_line import as_launched
from pretrain.settings.config import load_recipe
from pretrain.settings.launch_environment import with_precision

DEFAULT_PRECISION = "bf16"  # where neither recipe nor command line names one, as there is no accelerate configuration here


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command; InputError for a mistake in them."""
    parser = CommandParser("python -m pretrain plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, several = parser.add_argument, {"action": "append", "default": []}
    add("recipe", type=Path, help="what would be trained: a YAML file, see recipes/")
    add("overrides", nargs="*", metavar="key=value", help="over the recipe's settings: train.tokens=2e9")
    add("--on", metavar="DEVICE", help=f"H200, 8xB200, 'RTX 4090'; may be repeated; default: {', '.join(USUAL)}", **several)
    add("--mfu", type=number(most=1), metavar="SHARE", help="of the peak that is reached, 0.4 say; twice: from, to", **several)
    add("--run", type=Path, metavar="FOLDER", help="a run of yours, to reckon by its speed; may be repeated", **several)
    add("--price-per-hour", metavar="PRICE", help="of one device: 2.5, or H200=3.5; may be repeated", **several)
    add("--hours", type=number(), metavar="H", help="also: the steps and tokens that fit into so many hours")
    return parser.parse_intermixed_args(arguments)


def prices_of(texts: Sequence[str]) -> dict[str, float]:
    """Returns prices by device in capitals, "" for all others; InputError for what is no price."""
    prices = {}
    for text in texts:
        name, _, price = text.rpartition("=")
        try:
            value = float(price)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise InputError(f"--price-per-hour {text}: give a price, as in 2.5, or one for a device, as in H200=3.5")
        prices[name.strip().upper()] = value
    return prices


def main(arguments: list[str]) -> int:
    """Print the plan; returns 0. InputError for a mistake in what was given."""
    options = parse(arguments)
    targets, prices = [Target.parse(text) for text in options.on or USUAL], prices_of(options.price_per_hour)
    recipe, notices = load_recipe(options.recipe, options.overrides), []
    if recipe.precision is None:
        recipe = recipe.model_copy(update={"precision": DEFAULT_PRECISION})
        notices.append(f"precision: {DEFAULT_PRECISION}, as the recipe names none; precision=NAME plans another")
    # What this machine lacks, another one may have.
    recipe = recipe.model_copy(update={"fp8_config": recipe.fp8_config.model_copy(update={"on_unsupported": "emulate"})})
    runs = [MeasuredRun.of(read_run(folder)) for folder in options.run]
    recipe, accelerator, put_right = as_launched(with_precision(recipe, os.environ))
    job = prepare_job(recipe, accelerator, purpose="elsewhere")
    if not runs and (job.run_dir / METRICS_FILE).exists():  # the recipe's own run has begun already
        try:
            runs = [MeasuredRun.of(read_run(job.run_dir))]
        except InputError as error:
            notices.append(str(error))
    devices = [target.name for target in targets] + [run.device for run in runs]
    if unknown := [name for name in prices if name and not any(known_as(device, [name]) or device == name for device in devices)]:
        raise InputError(f"--price-per-hour {unknown[0]}=...: no such device is planned for; add it with --on, or correct it")
    for line in sections(job, options, targets, runs, prices, [*put_right, *job.notices, *notices]):
        print(line)
    return 0


def sections(
    job: Job,
    options: argparse.Namespace,
    targets: Sequence[Target],
    runs: Sequence[MeasuredRun],
    prices: Mapping[str, float],
    notices: Sequence[str],
) -> Iterator[str]:
    """All that is printed, by lines."""
    plan, rows = job.plan, list(estimates(job, targets, runs, options.mfu))
    parameters, width = plan.flops.parameters, screen_width(WIDTH)
    yield f"{plan.recipe.name}: {plan.requested} compute, {plan.recipe.weights} weights, {units.count(parameters)} parameters"
    yield "─" * width
    epochs = f" = {plan.epochs:.2f} epochs" if plan.epochs else ""
    horizon = (
        f"{plural(plan.steps, 'step')} x {plan.tokens_per_step:,} tokens = {plan.total_tokens:,} tokens{epochs}, "
        f"{plan.total_tokens / parameters:.3g} a parameter (a rule of thumb says 20); {plan.total_flops:.4g} FLOP, "
        f"{plan.flops_per_token:.4g} a token"
    )
    yield wrapped("horizon", horizon, width)
    splits = [f"{size} x {-(-plan.packs_per_step // size)}" for size in plan.microbatch_sizes]
    shown = ", ".join(splits if len(splits) <= 8 else [*splits[:4], "...", *splits[-4:]])
    packs = f"{plural(plan.packs_per_step, 'pack')} of {plan.recipe.data.length:,}"
    step = f"{plan.tokens_per_step:,} tokens = {packs}; microbatch x accumulation on one device: {shown}"
    yield wrapped("step", step, width)
    yield "\nTime" + (" and cost, at the prices given" if prices else "; --price-per-hour PRICE adds the cost")
    yield _time_table(rows, prices, options.hours)
    yield from _noted([*_notes_on_time(rows), *left_out(job, runs, targets), *notices])
    yield "\nMicrobatch, by the estimate of memory"
    yield _memory_table(rows)
    yield from _noted([f"{units.percent(KEPT_FREE)} of a device's memory is left free"])
    yield from _noted(f"warning: {text}" for text in plan.warnings if text.startswith(("`data.", "FLOPs")))


def _noted(texts: Iterable[str]) -> Iterator[str]:
    return (textwrap.fill(f"* {text}", screen_width(WIDTH), subsequent_indent="  ") for text in texts)


def _time_table(rows: Sequence[Estimate], prices: Mapping[str, float], hours: float | None) -> str:
    header = ["on", "speed by", "tokens/s", "time", *(["cost"] if prices else [])]
    header += [f"steps in {hours:g} h", f"tokens in {hours:g} h"] if hours else []
    lines = []
    for row in rows:
        line = [str(row.target), row.obstacle or row.by, span(row.tokens_per_second, "{:,.0f}".format)]
        line.append(span(row.hours, lambda each: units.duration(3600 * each)))
        if prices:
            line.append(span(row.cost(prices), "{:,.2f}".format))
        if hours:
            steps = row.steps_in(hours)
            line += [span(steps, "{:,}".format), span([each * row.plan.tokens_per_step for each in steps], units.count)]
        lines.append(line)
    return markdown(header, lines, names=2)


def _notes_on_time(rows: Sequence[Estimate]) -> Iterator[str]:
    yield (
        "time is that of training steps alone; of another device or model it is taken by the ratio of peaks and of operations a "
        "token: docs/planning.md says how far that holds"
    )
    if any(not row.obstacle and not row.tokens_per_second for row in rows):
        yield "how fast so small a model is, no share of a peak says; --mfu states one, --run FOLDER has its own"


def _memory_table(rows: Sequence[Estimate]) -> str:
    lines: dict[Target, list[str]] = {}
    for row in rows:
        plan, limit = row.plan, row.plan.devices.memory
        if row.obstacle or row.target in lines:
            continue
        size = plan.packs_at_once
        takes = plan.memory.total(size)
        chosen = "the recipe's" if plan.microbatch == size else "the largest that fits"
        if size == plan.packs_per_rank != plan.microbatch:
            chosen = "all of a step"
        if limit and takes > limit:
            chosen = "fits barely" if plan.microbatch and takes <= row.target.memory else "does not fit"
        of_each = or_dash(row.target.memory, lambda each: units.memory(each / GIB))
        accumulation = str(-(-plan.packs_per_rank // size))
        lines[row.target] = [
            str(row.target),
            of_each,
            f"{plural(size, 'pack')}: {chosen}",
            units.memory(takes / GIB),
            accumulation,
        ]
    header = ["on", "of each", "microbatch", "takes", "x accumulation"]
    return markdown(header, list(lines.values()), names=1) if lines else "none of these devices can run it"
