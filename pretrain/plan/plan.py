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
from foundation.units import GIB, plural
from packing.mixture import Mixture
from pretrain.metrics.flops import ModelFlops
from pretrain.metrics.peaks import peak
from pretrain.optimizer import schedule
from pretrain.plan.checks import microbatch_sizes, shares_out, steps_of
from pretrain.plan.memory import Devices, LayerMemory, MemoryEstimate, microbatch_candidates
from pretrain.precision.advice import cautions
from pretrain.precision.schedule import in_phases, label, label_of_course, last_steps
from pretrain.precision.settings import PRECISIONS, ActivePrecision
from pretrain.settings.recipe import LossSettings, Recipe

SMALL_HIDDEN = 768  # up to which low precision was measured to gain less than at 2,048; nothing was measured between them
SOME = 0.005  # a share worth a word
ASSUMED_SHARES = (0.5, 0.3)  # of the peak, between which runs of dense models usually lie
ASSUMED_SPEED = f"{' to '.join(f'{100 * share:g}' for share in ASSUMED_SHARES)} %"


@dataclass(frozen=True)
class ActivePhase:
    """A part of a run in one precision; `until` as the recipe says it, None: to the end."""

    until: float | int | None
    active: ActivePrecision
    layers: Sequence[LayerMemory]


@dataclass(frozen=True)
class Plan:
    """One run in figures. Tokens, FLOPs and tokens/s are over all devices, memory is for each."""

    recipe: Recipe
    active: ActivePrecision  # of a run whose precision is a schedule: that of the first phase, or of the one under way
    devices: Devices
    model_type: str
    flops: ModelFlops
    mean_squared: float  # mean over packs of the sum of squared document lengths, divided by the pack's length
    layers: Sequence[LayerMemory] | None = None  # what each layer of the model takes of memory; None: they are compiled
    packs: int | None = None  # to train on; None: not known before they are prepared
    held_out_to_come: Sequence[Path] = ()  # folders of `data.validation` that are not prepared yet
    mixture: Mixture | None = None  # of several sources
    trained_share: float | None = None  # of the packs' tokens, those that are labels; None: no mask says which are
    vocabulary: str | None = None  # where a model from scratch has its vocabulary from
    tokens_per_second: float | None = None  # stated or measured
    weight_spread: float | None = None  # the standard deviation at which the model's matrices begin, where its config says it
    chunk: int | None = None  # of the loss, where `loss.chunk: auto` takes another than the usual (pretrain.plan.spare)
    keeps_rotated: bool = False  # for backward: queries, keys and values beside what they are made from, where layers can
    phases: Sequence[ActivePhase] = ()  # where the precision changes on the way, in order
    low_linears: tuple[int, int] | None = None  # of so many linears, how many are in low precision when it is its turn
    done: int = 0  # steps behind the checkpoint that the run goes on from; those of another run count as well
    done_tokens: int | None = None  # that they took; None: as many as such steps take now
    ran: Mapping[int, str] = field(default_factory=dict)  # the run folder's own of them: by first step, what they computed in

    @property
    def loss(self) -> LossSettings:
        """The recipe's, with the chunk that was chosen."""
        settings = self.recipe.loss
        return settings.model_copy(update={"chunk": self.chunk}) if settings.chunk == "auto" and self.chunk else settings

    def with_chunk(self, chunk: int) -> Plan:
        """The plan when it is known which chunk `auto` stands for."""
        loss = self.recipe.loss.model_copy(update={"chunk": chunk})
        return replace(self, recipe=self.recipe.model_copy(update={"loss": loss}), chunk=None)

    def with_microbatch(self, microbatch: int) -> Plan:
        """The plan when `auto` has found its microbatch. A step keeps its tokens; only its number of microbatches changes."""
        batch = self.recipe.batch.model_copy(update={"microbatch": microbatch})
        return replace(self, recipe=self.recipe.model_copy(update={"batch": batch}))

    @cached_property
    def steps(self) -> int:
        return steps_of(self.recipe.train, self.tokens_per_step, self.packs or 0, self.recipe.data.length)

    @cached_property
    def spans(self) -> list[tuple[int, int, ActivePrecision]]:
        """The first and the last step of each phase, counted from 1, and what it computes in; all steps where there are no
        phases. Raises InputError where a phase would have no step."""
        ends = last_steps([phase.until for phase in self.phases], self.steps) or [self.steps]
        actives = [phase.active for phase in self.phases] or [self.active]
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

    def after(self, done: int, ran: Mapping[int, str], tokens: int | None = None) -> Plan:
        """The plan of a run that goes on after `done` steps, which took so many `tokens`, and of which its folder's own computed
        in what `ran` says."""
        return replace(self, done=done, ran=ran, done_tokens=tokens)

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
    def computes(self) -> str:
        """What products are computed in, for people: "delayed", or "delayed to 80 %, then bf16"."""
        first, untils = min(self.course), [phase.until for phase in self.phases] or [None]
        planned = zip(untils, self.spans, strict=True)
        own = [(until, end, active.precision.name) for until, (_, end, active) in planned if end >= first]
        begins = [first, *(end + 1 for _, end, _ in own)]
        if self.course != {begin: name for begin, (_, _, name) in zip(begins, own, strict=False)}:
            return label_of_course(self.course)  # the schedule or its horizon was another for some steps
        return label([{"until": until, "use": name} for until, _, name in own])

    @property
    def requested(self) -> str:
        """What products were asked to be computed in, for people; the device may not have it."""
        return label(self.recipe.precision) or self.active.requested

    @cached_property
    def memory(self) -> MemoryEstimate:
        """The memory of the phase that takes most."""
        known = {phase.active.precision.name: phase.layers for phase in self.phases}
        known = known or {self.active.precision.name: self.layers}
        recipe = self.recipe.model_copy(update={"loss": self.loss})
        estimates = [
            MemoryEstimate.of(recipe, self.flops, name, self.devices, layers, keeps_rotated=self.keeps_rotated)
            for name, layers in known.items()
        ]
        return max(estimates, key=lambda estimate: estimate.total(self.microbatch or 1))

    def fairness(self, data_fingerprint: str) -> dict[str, Any]:
        """Returns what summary.json says of the text that a run was trained on; `pretrain.compare` tells by it what may be
        compared."""
        return {"seed": self.recipe.seed, "tokens_per_step": self.tokens_per_step, "data_fingerprint": data_fingerprint}

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

    @property
    def total_tokens(self) -> int:
        """The tokens of the run from its first step to the horizon: what its steps took so far, and what those to come will."""
        if self.done_tokens is None:
            return self.steps * self.tokens_per_step
        return self.done_tokens + max(self.steps - self.done, 0) * self.tokens_per_step

    @property
    def total_packs(self) -> int:
        return self.total_tokens // self.recipe.data.length

    @property
    def epochs(self) -> float | None:
        return self.total_packs / self.packs if self.packs else None

    @property
    def emulated(self) -> bool:
        return any(active.backend == "emulation" for active in self.in_use)

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
        held = self.memory.parameters + self.memory.remainders + self.memory.moments
        return held * self.devices.shards // self.devices.count

    @property
    def peak_tflops(self) -> float | None:
        """Dense peak of all devices together, in the precision of the run; None on an unknown device, and in emulation. Of
        several precisions it is that of the whole run: its FLOPs over the time that each phase takes at its own."""
        time = 0.0
        for first, last, name in self.phases_in_use:
            one = None if self.emulated else peak(self.devices.name, PRECISIONS[name].peak)
            if one is None:
                return None
            time += (last - first + 1) / one
        return (self.steps - min(self.course) + 1) / time * self.devices.count

    @property
    def expected_microbatch(self) -> int:
        """The microbatch, or the one that `auto` should find by the estimate."""
        return self.microbatch or microbatch_candidates(self.microbatch_sizes, self.memory, self.devices.memory, share=1.0)[0]

    @property
    def packs_at_once(self) -> int:
        """`expected_microbatch`, or all packs that a device has in a step where they are fewer."""
        return min(self.expected_microbatch, self.packs_per_rank)

    @property
    def warnings(self) -> list[str]:
        """What is allowed, and is perhaps not what the user wants."""
        found, needed, available = [], self.memory.total(self.expected_microbatch), self.devices.memory
        if self.packs is None and self.recipe.data.stream is None:
            nothing = "" if self.recipe.data.prepares else ", and no `data.source` says from what: a run would refuse that"
            held_out = "; whether there are held-out packs to evaluate on" if self.recipe.evaluate.every and nothing else ""
            found.append(
                f"`data.packs`: {self.recipe.data.packs} is not prepared yet{nothing}. Not known: how many epochs the steps "
                f"are{held_out}. FLOPs count each pack as one document, which is the most that they can be"
            )
        elif self.packs is not None and self.packs < self.packs_per_step:
            found.append(
                f"some of the {self.packs:,} packs occur twice in a step of {self.packs_per_step:,}; lower `batch.tokens`"
            )
        if self.held_out_to_come:
            folders, are = " and ".join(map(str, self.held_out_to_come)), "is" if len(self.held_out_to_come) == 1 else "are"
            found.append(
                f"`data.validation`: {folders} {are} not prepared yet. Not known: how many packs there are to evaluate on"
            )
        if available is not None and needed > available:
            smaller = "a smaller `batch.microbatch`, " if self.expected_microbatch > 1 else ""
            found.append(
                f"about {units.memory(needed / GIB)} may not fit into {units.memory(available / GIB)} of memory; "
                f"what helps: {smaller}`model.gradient_checkpointing: full`, `weights: bf16`, sharding"
            )
        if self.empty_places:
            found.append(self._empty_places())
        if self.recipe.weights == "bf16":
            found.append(self._frozen_weights())
        found += self._phases_without_steps()
        for active in self.in_use:
            found += cautions(active)
            found += self._speed_of(active)
        if self.flops.uncounted:
            found.append(self.flops.left_out)
        return found

    def _phases_without_steps(self) -> list[str]:
        """The phases of the schedule that were over before the run came to them."""
        found, own = [], min(self.course)
        for number, (first, end, active) in enumerate(self.spans, 1):
            name = active.precision.name
            if any(name == used and first <= last and start <= end for start, last, used in self.phases_in_use):
                continue
            why = f"its first step is {own:,}" if end < own else f"its steps up to {self.done:,} computed in something else"
            found.append(
                f"`precision`: phase {number} of {len(self.spans)}, {name} to step {end:,}, never runs in this run: {why}. "
                "It is put together and checked all the same; leave it out, or go on from an earlier checkpoint"
            )
        return found

    def _speed_of(self, active: ActivePrecision) -> list[str]:
        """Returns why it is emulated, or gains less over BF16 than with a large model; nothing where neither is so."""
        if active.backend == "emulation":
            return [
                f"`{active.precision.name}` is emulated on this device: it shows the losses of the format and saves no time (a "
                "step took 1.3 to 1.8 times BF16's on an H200, both without fused layers: benchmarks/results/h200_emulated.json)"
            ]
        if active.precision.quantized and self.flops.shape.hidden <= SMALL_HIDDEN:
            return [
                f"`{active.precision.name}` gains less in a small model: on an H200, FP8 ran at 1.17 to 1.24 times BF16's speed "
                f"at a hidden size of {SMALL_HIDDEN} with 112 million parameters (benchmarks/results/h200_evidence_111m.json), "
                "where 1.7 billion run at 1.42 times, and with 14 million it was mostly no faster; measure both"
            ]
        return []

    def _empty_places(self) -> str:
        if not shares_out(self.packs_per_step, self.devices.count, self.microbatch):
            return (
                f"a launch on {plural(self.devices.count, 'device')} would refuse `batch.microbatch: {self.microbatch}`, which "
                f"does not divide the {plural(self.packs_per_rank, 'pack')} that each takes in a step"
            )
        places = self.packs_per_step + self.empty_places
        better = max(size for size in self.microbatch_sizes if size <= self.microbatch)
        fewer = f"`batch.microbatch: {better}` leaves {self.with_microbatch(better).empty_places}, and "
        unit = self.recipe.data.length * self.devices.count
        return (
            f"{self.packs_per_step:,} packs do not divide into {self.devices.count} devices x {self.accumulation} microbatches x "
            f"{self.microbatch} packs: {self.empty_places} of {places:,} places stay empty, "
            f"{units.percent(self.empty_places / places)} of the time. "
            f"{'' if better == self.microbatch else fewer}a `batch.tokens` that is a multiple of {unit:,} can leave none"
        )

    def _frozen_weights(self) -> str:
        """BF16 has 8 significant bits: half its spacing is 2^(e-8) from 2^e up to 2^(e+1), and half of that just below 2^e. AdamW
        moves a weight by about the rate."""
        rate, spread = self.recipe.optimizer.learning_rate, self.weight_spread
        limit = 2.0 ** math.ceil(math.log2(rate) + 8)
        what = ["norms, which begin at 1, stay as they are"] if limit < 1 else []
        if spread and (share := math.erfc(limit / (spread * math.sqrt(2)))) >= SOME:
            what.append(f"so do {units.percent(share)} of the values of a matrix with a standard deviation of {spread:g}")
        said = f": {', and '.join(what)}" if what else ""
        return (
            f"`weights: bf16` loses small updates: at a rate of {rate:g} a usual step moves no weight beyond {limit:.2g} in "
            f"magnitude{said}; `weights: bf16_exact` keeps every update"
        )
