"""What a run will do, worked out before anything is loaded.

Pure: from settings, shapes and counts to figures. `--plan` prints the result, and a run prints it before it begins.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from foundation import units
from pretrain.metrics.flops import ModelFlops
from pretrain.metrics.peaks import peak
from pretrain.optimizer import schedule
from pretrain.plan.checks import check_data, check_model, check_settings, steps_of
from pretrain.plan.layer_memory import LayerMemory
from pretrain.plan.memory import MemoryEstimate, divisors_of, largest_expected_to_fit, microbatch_candidates
from pretrain.precision.registry import PRECISIONS
from pretrain.settings.recipe import Recipe

GIB = 2**30
WIDTH = 100  # of the rendered plan


@dataclass(frozen=True)
class Plan:
    """One run in figures. Tokens, FLOPs and tokens/s are over all devices, memory is for each."""

    recipe: Recipe
    precision: str  # the effective recipe's name: what matrix products compute in
    emulated: bool  # in software, on products of BF16
    world_size: int
    sharded: bool
    packs: int
    mean_squared: float  # mean over packs of the sum of squared document lengths, divided by the pack's length
    steps: int
    microbatch: int | None  # packs a device takes at once; None: found by trying when the run begins
    flops: ModelFlops
    memory: MemoryEstimate
    model_type: str
    device_name: str | None
    device_memory: int | None  # bytes
    tokens_per_second: float | None

    @classmethod
    def make(
        cls,
        recipe: Recipe,
        *,
        model: PreTrainedModel,
        precision: str,
        emulated: bool = False,
        packs: int,
        mean_squared: float,
        world_size: int = 1,
        sharded: bool = False,
        layers: Sequence[LayerMemory] | None = None,
        held_out_packs: int = 0,
        packs_vocabulary: int | None = None,
        device_name: str | None = None,
        device_memory: int | None = None,
        tokens_per_second: float | None = None,
    ) -> Plan:
        """Check everything and work it out; InputError names the keys of what does not go together.

        `model`: of the right shapes, on the meta device. `layers`: what each of its layers takes of memory; None: they are
        compiled. `packs`, `held_out_packs`: how many there are. `packs_vocabulary`: the size of the vocabulary that they were
        tokenized with. `tokens_per_second`: stated or measured, over all devices.
        """
        check_settings(recipe, precision, world_size)
        check_data(recipe, packs, held_out_packs)
        check_model(recipe, model, packs_vocabulary)
        steps = steps_of(recipe.train, recipe.batch.tokens, packs, recipe.data.length)
        schedule.check(recipe.schedule, steps, recipe.batch.tokens)
        flops = ModelFlops.of(model)
        return cls(
            recipe=recipe,
            precision=precision,
            emulated=emulated,
            world_size=world_size,
            sharded=sharded,
            packs=packs,
            mean_squared=mean_squared,
            steps=steps,
            microbatch=None if recipe.batch.microbatch == "auto" else recipe.batch.microbatch,
            flops=flops,
            memory=MemoryEstimate.of(recipe, flops, precision, world_size, sharded, layers),
            model_type=model.config.model_type,
            device_name=device_name,
            device_memory=device_memory,
            tokens_per_second=tokens_per_second,
        )

    def with_microbatch(self, microbatch: int) -> Plan:
        """The plan once `auto` is settled; a step keeps its tokens, only its number of microbatches changes."""
        check_settings(self.recipe, self.precision, self.world_size, microbatch)
        batch = self.recipe.batch.model_copy(update={"microbatch": microbatch})
        return replace(self, microbatch=microbatch, recipe=self.recipe.model_copy(update={"batch": batch}))

    def fairness(self, data_fingerprint: str) -> dict[str, Any]:
        """What two runs must have in common for their losses to be compared; `pretrain.compare.report` asks for it."""
        return {"seed": self.recipe.seed, "tokens_per_step": self.tokens_per_step, "data_fingerprint": data_fingerprint}

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.batch.tokens

    @property
    def packs_per_step(self) -> int:
        return self.tokens_per_step // self.recipe.data.length

    @property
    def packs_per_rank(self) -> int:
        return self.packs_per_step // self.world_size

    @property
    def accumulation(self) -> int | None:
        """Microbatches that a device takes in a step; None while the microbatch is `auto`."""
        return self.packs_per_rank // self.microbatch if self.microbatch else None

    @property
    def total_tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def epochs(self) -> float:
        return self.steps * self.packs_per_step / self.packs

    @property
    def flops_per_token(self) -> float:
        return self.flops.step(1, self.mean_squared)

    @property
    def flops_per_step(self) -> float:
        return self.flops_per_token * self.tokens_per_step

    @property
    def total_flops(self) -> float:
        return self.flops_per_token * self.total_tokens

    @property
    def legacy_flops_per_token(self) -> dict[str, float]:
        """By the formulas of other launchers; for comparison only."""
        return self.flops.legacy(1, self.recipe.data.length)

    @property
    def hours(self) -> float | None:
        """At `tokens_per_second`; evaluation and checkpoints not included."""
        return self.total_tokens / self.tokens_per_second / 3600 if self.tokens_per_second else None

    @property
    def checkpoints_at_once(self) -> int:
        """The most checkpoints that lie on disk together: the kept ones and the one being written, or fewer in a short run."""
        settings = self.recipe.checkpoint
        written = (self.steps // settings.every if settings.every else 0) + settings.at_end
        return min(settings.keep + 1, written)

    @property
    def peak_tflops(self) -> float | None:
        """Dense peak of all devices together, for products in `precision`; None on an unknown device, and in emulation."""
        one = None if self.emulated else peak(self.device_name, PRECISIONS[self.precision].peak)
        return one * self.world_size if one else None

    @property
    def microbatch_candidates(self) -> list[int]:
        """Microbatches for `auto` to try, largest first."""
        return microbatch_candidates(self.packs_per_rank, self.memory, self.device_memory)

    @property
    def expected_microbatch(self) -> int:
        """The settled microbatch, or the one that `auto` should find by the estimate."""
        if self.microbatch:
            return self.microbatch
        if self.device_memory is None:
            return self.packs_per_rank
        return largest_expected_to_fit(divisors_of(self.packs_per_rank), self.memory, self.device_memory) or 1

    @property
    def warnings(self) -> list[str]:
        """What is allowed and perhaps not meant."""
        return [text for text in (self._few_packs(), self._tight_memory(), self._lost_updates(), self._uncounted()) if text]

    def render(self) -> str:
        """The plan as a user reads it, a few lines to a subject."""
        return _render(self)

    def _few_packs(self) -> str | None:
        if self.packs >= self.packs_per_step:
            return None
        return f"some of the {self.packs:,} packs occur twice in a step of {self.packs_per_step:,}; lower `batch.tokens`"

    def _tight_memory(self) -> str | None:
        needed = self.memory.total(self.expected_microbatch)
        if self.device_memory is None or needed <= self.device_memory:
            return None
        smaller = "a smaller `batch.microbatch`, " if self.expected_microbatch > 1 else ""
        return (
            f"about {units.memory(needed / GIB)} may not fit into {units.memory(self.device_memory / GIB)} of memory; "
            f"what helps: {smaller}`model.gradient_checkpointing: full`, `weights: bf16`, sharding"
        )

    def _lost_updates(self) -> str | None:
        if self.recipe.weights != "bf16":
            return None
        # BF16 has 8 significant bits: in [2^e, 2^(e+1)) half its spacing is 2^(e-8), and AdamW moves a weight by about the rate.
        rate = self.recipe.optimizer.learning_rate
        unmoved = 2.0 ** math.ceil(math.log2(rate) + 8)
        return (
            f"`weights: bf16` loses small updates: at a rate of {rate:g} a usual step moves no weight of magnitude "
            f"{unmoved:.2g} or more; `weights: bf16_exact` keeps every update"
        )

    def _uncounted(self) -> str | None:
        names = self.flops.uncounted
        return f"FLOPs leave out {len(names)} weights that are in no known product: {names[0]}, ..." if names else None


def _render(plan: Plan) -> str:
    recipe, devices = plan.recipe, f"{plan.world_size} x {plan.device_name or 'device'}"
    compute = f"{plan.precision} compute, emulated" if plan.emulated else f"{plan.precision} compute"
    title = f"{recipe.name}: {compute}, {recipe.weights} weights, {devices}"
    subjects = {
        "model": _model_lines(plan),
        "step": [_step_line(plan)],
        "horizon": _horizon_lines(plan),
        "FLOPs": _flops_lines(plan),
        "time": [_time_line(plan)],
        "memory": _memory_lines(plan),
    }
    lines = [f"{name if i == 0 else '':<9}{text}" for name, texts in subjects.items() for i, text in enumerate(texts)]
    warnings = [textwrap.fill(f"warning: {text}", WIDTH, subsequent_indent=" " * 9) for text in plan.warnings]
    return "\n".join([title, "─" * WIDTH, *lines, *warnings])


def _model_lines(plan: Plan) -> list[str]:
    flops, shape = plan.flops, plan.flops.shape
    head = "head tied to the embedding" if flops.tied else "head of its own"
    without = units.count(flops.parameters - flops.embedding_parameters)
    heads = f"{shape.heads} heads of {shape.head_dim}"
    groups = f" ({shape.kv_heads} for keys and values)" if shape.kv_heads != shape.heads else ""
    return [
        f"{units.count(flops.parameters)} parameters, {without} without embeddings, {head}",
        f"{plan.model_type}: {shape.layers} layers, hidden {shape.hidden:,}, {heads}{groups}, vocabulary {shape.vocabulary:,}",
    ]


def _step_line(plan: Plan) -> str:
    total = f"{plan.tokens_per_step:,} tokens = {plan.packs_per_step:,} packs of {plan.recipe.data.length:,}"
    devices = _plural(plan.world_size, "device")
    if plan.microbatch is None:
        return f"{total} = {devices} x {_plural(plan.packs_per_rank, 'pack')}, microbatch: auto"
    return f"{total} = {devices} x {_plural(plan.accumulation, 'microbatch')} x {_plural(plan.microbatch, 'pack')}"


def _horizon_lines(plan: Plan) -> list[str]:
    tokens = f"{units.count(plan.total_tokens)} tokens"
    return [
        f"{_plural(plan.steps, 'step')} = {tokens} = {plan.epochs:.2f} epochs of {_plural(plan.packs, 'pack')}",
        schedule.describe(plan.recipe.schedule, plan.recipe.optimizer, plan.steps, plan.tokens_per_step),
    ]


def _flops_lines(plan: Plan) -> list[str]:
    total = plan.flops_per_token
    parts = plan.flops.by_part(1, plan.mean_squared)
    return [
        f"{_operations(total)} a token, {_operations(plan.flops_per_step)} a step, {_operations(plan.total_flops)} in all",
        ", ".join(f"{name} {units.percent(value / total)}" for name, value in parts.items()),
        "by other launchers' formulas, to compare with their tables:",
        *(f"  {_operations(value)} a token: {name}" for name, value in plan.legacy_flops_per_token.items()),
    ]


def _time_line(plan: Plan) -> str:
    """At the stated speed; without one, at two utilisations between which runs of dense models usually lie."""
    if plan.tokens_per_second:
        tflops = plan.tokens_per_second * plan.flops_per_token / 1e12
        share = f", {units.percent(tflops / plan.peak_tflops)} of the {plan.precision} peak" if plan.peak_tflops else ""
        speed = f"{plan.tokens_per_second:,.0f} tokens/s ({tflops:.4g} TFLOP/s{share})"
        return f"{units.duration(plan.hours * 3600)} at {speed}"
    if plan.peak_tflops:
        fast, slow = (units.duration(plan.total_flops / (share * plan.peak_tflops * 1e12)) for share in (0.5, 0.3))
        return (
            f"{fast} to {slow} at 50 to 30 % of the {plan.precision} peak, {plan.peak_tflops:,.4g} TFLOP/s: assumed, not measured"
        )
    if plan.emulated:
        return "not known: no speed is stated or measured yet; emulation takes up to three times as long as BF16"
    return "not known: no speed is stated or measured yet, and no peak of this device is known"


def _memory_lines(plan: Plan) -> list[str]:
    size = plan.expected_microbatch
    limit = f" of {units.memory(plan.device_memory / GIB)}" if plan.device_memory else ""
    chosen = "" if plan.microbatch else "; auto finds what fits by trying"
    parts = plan.memory.parts(size)
    width = max(map(len, parts))
    return [
        f"about {units.memory(plan.memory.total(size) / GIB)}{limit} a device, {_plural(size, 'pack')} a microbatch{chosen}",
        *(f"  {name:<{width}}  {units.memory(part / GIB):>9}" for name, part in parts.items()),
    ]


def _operations(value: float) -> str:
    """10.58 GFLOP, 1.387 PFLOP."""
    scale = min(6, int(math.log10(max(value, 1.0)) // 3))
    return f"{value / 1000**scale:.4g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[scale]}FLOP"


def _plural(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"
