"""What a run will do, worked out before anything is loaded.

Pure: from settings, shapes and counts to figures; `preflight` has checked them, and `rendering` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from foundation import units
from foundation.units import GIB
from packing.order import Mixture
from pretrain.metrics.flops import ModelFlops
from pretrain.metrics.peaks import peak
from pretrain.optimizer import schedule
from pretrain.plan.checks import microbatch_sizes, steps_of
from pretrain.plan.memory import Devices, LayerMemory, MemoryEstimate
from pretrain.precision.advice import cautions
from pretrain.precision.schedule import in_phases, label, label_of_course, last_steps
from pretrain.precision.settings import PRECISIONS, ActivePrecision
from pretrain.settings.recipe import LossSettings, Recipe

ASSUMED_SHARES = (0.5, 0.3)  # of the peak, between which runs of dense models usually lie


@dataclass(frozen=True)
class Plan:
    """One run in figures. Tokens, FLOPs and tokens/s are over all devices, memory is for each."""

    recipe: Recipe
    active: ActivePrecision  # of a run whose precision is a schedule: that of the first phase, or of the one under way
    devices: Devices
    model_type: str
    flops: ModelFlops
    mean_squared: float  # mean over packs of the sum of squared document lengths, divided by the pack's length
    # What each layer of the model takes of memory, by the name of each precision that the run computes in; empty: compiled ones.
    layers: Mapping[str, Sequence[LayerMemory]] = field(default_factory=dict)
    packs: int | None = None  # to train on; None: not known before they are prepared
    held_out_to_come: Sequence[Path] = ()  # folders of `data.validation` that are not prepared yet
    mixture: Mixture | None = None  # of several sources
    trained_share: float | None = None  # of the packs' tokens, those that are labels; None: no mask says which are
    vocabulary: str | None = None  # where a model from scratch has its vocabulary from
    tokens_per_second: float | None = None  # stated or measured
    chunk: int | None = None  # of the loss, where `loss.chunk: auto` takes another than the usual (pretrain.plan.spare)
    keeps_rotated: bool = False  # for backward: queries, keys and values beside what they are made from, where layers can
    # Where the precision changes on the way, in order: until when, as the recipe says it, and in what.
    phases: Sequence[tuple[float | int | None, ActivePrecision]] = ()
    done: int = 0  # steps behind the checkpoint that the run goes on from; those of another run count as well
    done_tokens: int | None = None  # that they took; None: as many as such steps take now
    ran: Mapping[int, str] = field(default_factory=dict)  # the run folder's own of them: by first step, what they computed in

    @property
    def loss(self) -> LossSettings:
        """The recipe's, with the chunk that was chosen."""
        settings = self.recipe.loss
        return settings.model_copy(update={"chunk": self.chunk}) if settings.chunk == "auto" and self.chunk else settings

    def with_settings(self, section: str, **values: Any) -> Plan:
        """The plan with other values of a section of its recipe."""
        changed = getattr(self.recipe, section).model_copy(update=values)
        return replace(self, recipe=self.recipe.model_copy(update={section: changed}))

    def with_microbatch(self, microbatch: int) -> Plan:
        """The plan when `auto` has found its microbatch. A step keeps its tokens; only its number of microbatches changes."""
        return self.with_settings("batch", microbatch=microbatch)

    # ── Steps, and what they compute in ──

    @cached_property
    def steps(self) -> int:
        return steps_of(self.recipe.train, self.tokens_per_step, self.packs or 0, self.recipe.data.length)

    @cached_property
    def spans(self) -> list[tuple[int, int, ActivePrecision]]:
        """The first and the last step of each phase, counted from 1, and what it computes in; all steps where there are no
        phases. Raises InputError where a phase would have no step."""
        untils, actives = zip(*(self.phases or [(None, self.active)]), strict=True)
        ends = last_steps(untils, self.steps)
        return [(before + 1, end, active) for before, end, active in zip([0, *ends], ends, actives, strict=False)]

    def active_after(self, steps: int) -> ActivePrecision:
        """Returns what the step computes in that follows `steps` steps; of a finished run, what the last one did."""
        return next(active for _, end, active in self.spans if min(steps + 1, self.steps) <= end)

    def begins_phase(self, steps: int) -> bool:
        """Whether the step that follows `steps` steps is the first of all or of a phase."""
        return any(first == steps + 1 for first, *_ in self.spans)

    @property
    def actives(self) -> list[ActivePrecision]:
        """Every precision that the run is put together for, once."""
        return list({active.precision.name: active for *_, active in self.spans}.values())

    @cached_property
    def course(self) -> dict[int, str]:
        """The precisions that the steps of this run folder compute in, by the first step of each: those done as they ran, and
        those to come as the schedule has them. A phase that was over before the folder's first step is not among them."""
        done = self.done if self.ran else min(self.done, self.steps - 1)
        to_come = {max(first, done + 1): active.precision.name for first, end, active in self.spans if end > done}
        return in_phases(dict(self.ran) | to_come)

    @property
    def phases_in_use(self) -> list[tuple[int, int, str]]:
        """What `course` says, as first step, last step and precision."""
        ends = [first - 1 for first in self.course][1:]
        return list(zip(self.course, [*ends, max(self.steps, self.done)], self.course.values(), strict=True))

    @property
    def has_several(self) -> bool:
        """Whether more than one precision was asked for, or a resume has changed the one."""
        return bool(self.phases) or set(self.course.values()) != {self.active.precision.name}

    @property
    def in_use(self) -> list[ActivePrecision]:
        """Those of `actives` that a step of this run folder computes in."""
        return [active for active in self.actives if active.precision.name in self.course.values()]

    @property
    def emulated(self) -> bool:
        return any(active.backend == "emulation" for active in self.in_use)

    @property
    def computes(self) -> str:
        """What products are computed in, for people: "delayed", or "delayed to 80 %, then bf16"."""
        begin, untils = min(self.course), [until for until, _ in self.phases] or [None]
        own = [
            (max(first, begin), until, active.precision.name)
            for until, (first, end, active) in zip(untils, self.spans, strict=True)
            if end >= begin
        ]
        if self.course != {first: name for first, _, name in own}:  # the schedule or its horizon was another for some steps
            return label_of_course(self.course)
        return label([{"until": until, "use": name} for _, until, name in own])

    @property
    def requested(self) -> str:
        """What products were asked to be computed in, for people; the device may not have it."""
        return label(self.recipe.precision) or self.active.requested

    def fairness(self, data_fingerprint: str) -> dict[str, Any]:
        """Returns what summary.json says of the text that a run was trained on; `pretrain.compare` tells by it what may be
        compared."""
        return {"seed": self.recipe.seed, "tokens_per_step": self.tokens_per_step, "data_fingerprint": data_fingerprint}

    # ── A step's packs ──

    @property
    def microbatch(self) -> int | None:
        """Packs that a device takes at once; None: found by trying when the run begins."""
        return None if self.recipe.batch.microbatch == "auto" else self.recipe.batch.microbatch

    @property
    def tokens_per_step(self) -> int:
        return self.recipe.batch.tokens

    @property
    def packs_per_step(self) -> int:
        return self.tokens_per_step // self.recipe.data.length

    @property
    def packs_per_rank(self) -> int:
        """The most that a device takes in a step."""
        return -(-self.packs_per_step // self.devices.count)

    @property
    def microbatch_sizes(self) -> list[int]:
        """Microbatches that suit the step's packs and the number of devices, ascending."""
        return microbatch_sizes(self.packs_per_step, self.devices.count)

    @property
    def accumulation(self) -> int | None:
        """Microbatches that a device takes in a step; None while the microbatch is `auto`."""
        return -(-self.packs_per_rank // self.microbatch) if self.microbatch else None

    @property
    def empty_places(self) -> int:
        """Places for packs in a step's microbatches that hold none: computed, and of no effect. 0 while it is `auto`."""
        return self.devices.count * self.accumulation * self.microbatch - self.packs_per_step if self.microbatch else 0

    @cached_property
    def expected_microbatch(self) -> int:
        """The microbatch, or the largest that fits by the estimate, which `auto` should find."""
        memory, sizes = self.devices.memory or math.inf, self.microbatch_sizes
        return self.microbatch or max(size for size in sizes if size == 1 or self.memory.total(size) <= memory)

    @property
    def packs_at_once(self) -> int:
        """`expected_microbatch`, or all packs that a device has in a step where they are fewer."""
        return min(self.expected_microbatch, self.packs_per_rank)

    # ── The whole run ──

    @property
    def total_tokens(self) -> int:
        """The tokens of the run from its first step to the horizon: what its steps took so far, and what those to come will."""
        done = self.done * self.tokens_per_step if self.done_tokens is None else self.done_tokens
        return done + max(self.steps - self.done, 0) * self.tokens_per_step

    @property
    def total_packs(self) -> int:
        return self.total_tokens // self.recipe.data.length

    @property
    def epochs(self) -> float | None:
        return self.total_packs / self.packs if self.packs else None

    @property
    def flops_per_token(self) -> float:
        return self.flops.step(1, self.mean_squared)

    @property
    def total_flops(self) -> float:
        return self.flops_per_token * self.total_tokens

    @property
    def hours(self) -> float | None:
        """The hours that all tokens take at `tokens_per_second`; evaluation and checkpoints not included."""
        return self.total_tokens / self.tokens_per_second / 3600 if self.tokens_per_second else None

    @property
    def peak_tflops(self) -> float | None:
        """Dense peak of all devices together, in the precision of the run; None on an unknown device, and in emulation. Of
        several precisions it is that of the whole run: its FLOPs over the time that each phase takes at its own."""
        peaks = [(last - first + 1, peak(self.devices.name, PRECISIONS[name].peak)) for first, last, name in self.phases_in_use]
        if self.emulated or not all(each for _, each in peaks):
            return None
        return self.devices.count * sum(steps for steps, _ in peaks) / sum(steps / each for steps, each in peaks)

    # ── Memory, and what is kept ──

    @cached_property
    def memory(self) -> MemoryEstimate:
        """The memory of the phase that takes most."""
        recipe = self.recipe.model_copy(update={"loss": self.loss})
        estimates = [
            MemoryEstimate.of(recipe, self.flops, name, self.devices, layers, keeps_rotated=self.keeps_rotated)
            for name, layers in (self.layers or {self.active.precision.name: None}).items()
        ]
        return max(estimates, key=lambda estimate: estimate.total(self.microbatch or 1))

    @property
    def checkpoints_at_once(self) -> int:
        """The most checkpoints that lie on disk together: the kept ones and the one being written, or fewer in a short run."""
        settings, before_decay = self.recipe.checkpoint, self.before_decay
        written = ((self.steps - 1) // settings.every if settings.every else 0) + settings.at_end
        early = before_decay is not None and settings.every is not None and settings.every <= before_decay
        return min(settings.keep + 1 + early, written) + settings.best

    @property
    def before_decay(self) -> int | None:
        """The step after which the rate falls for good, so that the last checkpoint up to there is one to prolong the run from;
        None where there is no such step, as of a rate that falls all the way."""
        settings = self.recipe.schedule
        return schedule.decay_begins(settings, self.steps) if settings.kind == "wsd" else None

    @property
    def bytes_copied(self) -> int:
        """The bytes of host memory that each process takes while a checkpoint is written behind the training: its part of the
        checkpoint."""
        parts = ("parameters", "remainder bits", "optimizer moments")
        return sum(self.memory.held.get(part, 0) for part in parts) * self.devices.shards // self.devices.count

    # ── What to think about ──

    @property
    def warnings(self) -> list[str]:
        """What is allowed, and is perhaps not what the user wants."""
        needed, available, warnings = self.memory.total(self.expected_microbatch), self.devices.memory, []
        if self.packs is None and self.recipe.data.stream is None:
            nothing = "" if self.recipe.data.prepares else ", and no `data.source` says from what: a run would refuse that"
            warnings.append(
                f"`data.packs`: {self.recipe.data.packs} is not prepared yet{nothing}. Not known: how many epochs the steps are. "
                "FLOPs count each pack as one document, which is the most that they can be"
            )
        elif self.packs is not None and self.packs < self.packs_per_step:
            warnings.append(
                f"some of the {self.packs:,} packs occur twice in a step of {self.packs_per_step:,}; lower `batch.tokens`"
            )
        if self.held_out_to_come:
            folders = " and ".join(map(str, self.held_out_to_come))
            warnings.append(f"`data.validation`: {folders}: not prepared yet. Not known: how many packs there are to evaluate on")
        if available is not None and needed > available:
            warnings.append(
                f"about {units.memory(needed / GIB)} may not fit into {units.memory(available / GIB)} of memory; what helps: a "
                "smaller `batch.microbatch`, `model.gradient_checkpointing: full`, `weights: bf16`, sharding"
            )
        if self.empty_places:
            warnings.append(self._empty_places())
        if self.recipe.weights == "bf16":
            warnings.append(self._frozen_weights())
        for active in self.in_use:
            warnings += cautions(active)
            if active.backend == "emulation":
                warnings.append(
                    f"`{active.precision.name}` is emulated on this device: it shows the losses of the format and saves no time "
                    "(a step took 1.3 to 1.8 times BF16's on an H200: benchmarks/results/speed/h200_emulated.json)"
                )
        return [*warnings, self.flops.left_out] if self.flops.uncounted else warnings

    def _empty_places(self) -> str:
        places = self.packs_per_step + self.empty_places
        return (
            f"{self.packs_per_step:,} packs do not divide into {self.devices.count} devices x {self.accumulation} microbatches x "
            f"{self.microbatch} packs: {self.empty_places} of {places:,} places stay empty, "
            f"{units.percent(self.empty_places / places)} of the time. "
            f"A `batch.tokens` that is a multiple of {self.recipe.data.length * self.devices.count:,} can leave none"
        )

    def _frozen_weights(self) -> str:
        """BF16 has 8 significant bits: half its spacing is 2^(e-8) from 2^e up to 2^(e+1), and half of that just below 2^e. AdamW
        moves a weight by about the rate."""
        rate = self.recipe.optimizer.learning_rate
        return (
            f"`weights: bf16` loses small updates: at a rate of {rate:g} a usual step moves no weight beyond "
            f"{2.0 ** math.ceil(math.log2(rate) + 8):.2g} in magnitude; `weights: bf16_exact` keeps every update"
        )
