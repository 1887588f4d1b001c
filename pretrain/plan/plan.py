"""What a run will do, worked out before anything is loaded.

From settings, shapes and counts to figures; `rendering` shows them. Nothing here reads a file.

At the end: what the memory of devices decides beside the microbatch, from settings and the device alone. Chunks of the loss
change the order of sums, so a checkpoint says which ones its run took (pretrain.run.resume); what is kept changes no number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from foundation import units
from foundation.units import GIB
from packing.order import Mixture
from pretrain.metrics.flops import TRAINED, ModelFlops
from pretrain.metrics.peaks import peak
from pretrain.optimizer import schedule
from pretrain.plan.checks import steps_of
from pretrain.plan.memory import TAKES_LESS, Devices, LayerMemory, StepMemory
from pretrain.precision.settings import ActivePrecision, label, last_steps, precision_called
from pretrain.settings.recipe import USUAL_CHUNK, LossSettings, Recipe


@dataclass(frozen=True)
class Plan:
    """One run in figures. Tokens, FLOPs and tokens/s are over all devices, memory is for each."""

    recipe: Recipe
    # of a run whose precision is a schedule: that of the first phase, or of the one under way
    active: ActivePrecision
    devices: Devices
    flops: ModelFlops
    # mean over packs of the sum of squared document lengths, divided by the pack's length
    mean_squared: float
    # What each layer of the model takes of memory, by the name of each precision that the run computes in; empty: compiled ones.
    layers: Mapping[str, Sequence[LayerMemory]] = field(default_factory=dict)
    # to train on; None: of a stream, or where a plan for other machines has no packs
    packs: int | None = None
    mixture: Mixture | None = None  # of several sources
    chunk: int | None = None  # of the loss, where `loss.chunk: auto` takes another than the usual
    # for backward: queries, keys and values beside what they are made from, where layers can
    keeps_rotated: bool = False
    # What the steps compute in, in order: until when, as the recipe says it, and in what. Empty: `active` throughout.
    phases: Sequence[tuple[float | int | None, ActivePrecision]] = ()
    unquantized: ActivePrecision | None = None  # what low precision is measured against (`log.gap`)
    # the step after which the run went over to that for good (`health.on_gap`)
    switched_after: int | None = None
    # steps behind the checkpoint that the run goes on from; those of another run count as well
    done: int = 0

    @property
    def loss(self) -> LossSettings:
        """The recipe's, with the chunk that was chosen."""
        settings = self.recipe.loss
        return (
            settings.model_copy(update={"chunk": self.chunk})
            if settings.chunk == "auto" and self.chunk
            else settings
        )

    # ── Steps, and what they compute in ──

    @cached_property
    def steps(self) -> int:
        return steps_of(
            self.recipe.train, self.tokens_per_step, self.packs or 0, self.recipe.data.length
        )

    @cached_property
    def spans(self) -> list[tuple[int, int, ActivePrecision]]:
        """The first and the last step of each phase, counted from 1, and what it computes in; all steps where there are no
        phases. Raises InputError where a phase would have no step."""
        untils, actives = zip(*(self.phases or [(None, self.active)]), strict=True)
        ends = last_steps(untils, self.steps)
        spans = [
            (before + 1, end, active)
            for before, end, active in zip([0, *ends], ends, actives, strict=False)
        ]
        last = self.switched_after
        if self.unquantized is None or last is None or last >= self.steps:
            return spans
        kept = [(first, min(end, last), active) for first, end, active in spans if first <= last]
        return [*kept, (last + 1, self.steps, self.unquantized)]

    @cached_property
    def is_scheduled(self) -> bool:
        """Whether not all steps compute in the same."""
        return len(self.spans) > 1

    def active_after(self, steps: int) -> ActivePrecision:
        """Returns what the step computes in that follows `steps` steps; of a finished run, what the last one did."""
        return next(active for _, end, active in self.spans if min(steps + 1, self.steps) <= end)

    @property
    def actives(self) -> list[ActivePrecision]:
        """Every precision that the run is put together for, once: of its steps, and what `log.gap` measures against."""
        against = [self.unquantized] if self.unquantized and self.recipe.log.gap else []
        return list(
            {
                each.precision.name: each
                for each in [*(active for *_, active in self.spans), *against]
            }.values()
        )

    @property
    def emulated(self) -> bool:
        return any(active.backend == "emulation" for active in self.actives)

    @property
    def computes(self) -> str:
        """What products are computed in, for people: "delayed", or "delayed to 80 %, then bf16"."""
        phases = self.phases or [(None, self.active)]
        if self.switched_after is not None and self.is_scheduled:
            *before, (_, _, last) = self.spans
            phases = [*((end, active) for _, end, active in before), (None, last)]
        return label([{"until": until, "use": active.precision.name} for until, active in phases])

    # ── A step's packs ──

    @property
    def microbatch(self) -> int | None:
        """Packs that a device takes at once: at most the recipe's, in equal parts of what it takes in a step. None: found by
        trying when the run begins."""
        batch, each = self.recipe.batch, self.packs_per_rank
        return None if batch.microbatch_is_searched else -(-each // -(-each // batch.microbatch))

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
        """For each number of microbatches in a step the smallest size that gives it, ascending from 1, up to the cap of
        `auto:16`. It divides what a device takes, unless not all devices can take equally many: then places stay empty anyway."""
        uneven, most = self.packs_per_step % self.devices.count, self.packs_per_rank
        sizes = {-(-most // turns) for turns in range(1, most + 1) if uneven or most % turns == 0}
        return sorted(size for size in sizes if size <= (self.recipe.batch.microbatch_cap or most))

    @cached_property
    def expected_microbatch(self) -> int:
        """The microbatch, or the largest that fits by the estimate, which `auto` should find."""
        limit = self.devices.memory or math.inf
        return self.microbatch or max(
            size for size in self.microbatch_sizes if size == 1 or self.takes(size) <= limit
        )

    # ── The whole run ──

    @property
    def total_tokens(self) -> int:
        """The tokens of the run from its first step to the horizon."""
        return self.steps * self.tokens_per_step

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
    def peak_tflops(self) -> float | None:
        """Dense peak of all devices together, in the precision of the run; None on an unknown device, and in emulation. Of
        several precisions it is that of the whole run: its FLOPs over the time that each phase takes at its own."""
        peaks = [(last - first + 1, self._peak_in(active)) for first, last, active in self.spans]
        if self.emulated or not all(each for _, each in peaks):
            return None
        return (
            self.devices.count
            * sum(steps for steps, _ in peaks)
            / sum(steps / each for steps, each in peaks)
        )

    def _peak_in(self, active: ActivePrecision) -> float | None:
        """Dense peak of one device over products that are in `active`, but for those of a mixture's experts that stay in BF16."""
        fastest, bf16 = (
            peak(self.devices.name, active.precision.peak),
            peak(self.devices.name, "bf16"),
        )
        # of a linear's three products, which are alike in FLOPs, one
        if fastest and active.precision.plain_forward:
            fastest = 3 / (1 / bf16 + 2 / fastest)
        slower = sum(self.experts_left_out(active).values())
        return 1 / (slower / bf16 + (1 - slower) / fastest) if fastest and slower else fastest

    def experts_left_out(self, active: ActivePrecision) -> dict[str, float]:
        """Of all FLOPs the share of a mixture's experts that low precision leaves out, by the reason for it."""
        if not (active.precision.quantized and self.flops.expert_weights):
            return {}
        layers, share = (
            self.layers.get(active.precision.name),
            TRAINED * self.flops.expert_weights / self.flops_per_token,
        )
        return (
            {reason: share * each for reason, each in layers[-1].experts_left_out.items()}
            if layers
            else {}
        )

    @property
    def experts_in_bf16(self) -> list[str]:
        """Of each low precision a line on the experts that it leaves out, why and how much of the work that is."""
        left_out = (
            pair for active in self.actives for pair in self.experts_left_out(active).items()
        )
        return [
            f"experts compute in BF16 in {units.percent(share)} of the FLOPs ({reason})"
            for reason, share in left_out
        ]

    # ── Memory, and what is kept ──

    def memory(self, microbatch: int) -> dict[str, int]:
        """Returns bytes by part on a device, with a microbatch of so many packs, in the phase that takes most."""
        layers = self.layers or {self.active.precision.name: ()}
        phases = [
            StepMemory(
                self.recipe,
                self.flops,
                self.devices,
                precision_called(name),
                kept,
                microbatch,
                self.loss,
                self.keeps_rotated,
            ).parts()
            for name, kept in layers.items()
        ]
        return max(phases, key=lambda parts: sum(parts.values()))

    def takes(self, microbatch: int) -> int:
        """Returns the bytes of all parts."""
        return sum(self.memory(microbatch).values())

    @property
    def checkpoints_at_once(self) -> int:
        """The most checkpoints that lie on disk together: the kept ones and the one being written, or fewer in a short run."""
        settings, before_decay = self.recipe.checkpoint, self.before_decay
        written = ((self.steps - 1) // settings.every if settings.every else 0) + settings.at_end
        early = (
            before_decay is not None
            and settings.every is not None
            and settings.every <= before_decay
        )
        return min(settings.keep + 1 + early, written) + settings.best

    @property
    def before_decay(self) -> int | None:
        """The step after which the rate falls for good, so that the last checkpoint up to there is one to prolong the run from;
        None where there is no such step, as of a rate that falls all the way."""
        return schedule.decay_begins(self.recipe.schedule, self.steps)

    @property
    def warnings(self) -> list[str]:
        """What is allowed, and is perhaps not what the user wants."""
        needed, available, warnings = self.takes(self.expected_microbatch), self.devices.memory, []
        if available is not None and needed > available:
            room = f"about {units.memory(needed / GIB)} may not fit into {units.memory(available / GIB)} of memory"
            warnings.append(f"{room}; what takes less: {TAKES_LESS}")
        log, batch = self.recipe.log, self.recipe.batch
        checks = [
            (
                self.recipe.weights == "bf16",
                "`weights: bf16` loses the smallest updates; `weights: bf16_exact` keeps every one",
            ),
            (
                log.gap and self.unquantized is None,
                f"`log.gap: {log.gap}` measures nothing, as no step computes in low precision",
            ),
            (
                not batch.microbatch_is_searched and batch.microbatch > self.packs_per_rank,
                f"`batch.microbatch: {batch.microbatch}`: a device has {self.packs_per_rank} packs",
            ),
            (
                self.packs is not None and self.packs < self.packs_per_step,
                f"a step takes {self.packs_per_step} packs, and the training data are {self.packs}",
            ),
        ]
        warnings += [text for applies, text in checks if applies]
        warnings += self.experts_in_bf16
        return [*warnings, self.flops.left_out] if self.flops.uncounted else warnings


# ── What the memory of devices decides ────────────────────────────────────────────────────────────────────────────────────────

KEPT_FREE = 0.08  # of a device's memory, beside what the plan counts: CUDA, NCCL, fragments
WELL_FILLED = 8192  # tokens at once, with which an H200 computes at full speed
# tokens of a microbatch, beyond which a larger one gains less than what is decided here
FULL_SPEED = 32_768
LOGITS = 2**29  # of a chunk, 1 GiB in BF16: the usual 4,096 tokens with 131,072 words


def fits_gathered(plan: Plan) -> bool:
    """Returns what `fsdp_reshard_after_forward: auto` means: whether there are shards, and a device has the memory to gather them
    once a step, with the recipe's microbatch; where that is `auto`, with what fits when they are gathered for each use, or what
    fills a device well."""
    if plan.devices.memory is None or not plan.devices.sharded:
        return plan.devices.sharded
    gathered = replace(plan, devices=replace(plan.devices, gathered=True))
    enough = max(1, WELL_FILLED // plan.recipe.data.length)
    return _has_room(gathered, plan.microbatch or min(plan.expected_microbatch, enough))


def spend_spare_memory(plan: Plan, gathered: bool | None = None) -> Plan:
    """`plan` with what its devices' memory allows; for devices of unknown memory, and for CPUs, nothing is kept. `gathered`: as
    the topology says, whether shards are gathered once a step; None: where memory allows it."""
    devices = replace(plan.devices, gathered=fits_gathered(plan) if gathered is None else gathered)
    plan = replace(plan, devices=devices, chunk=None, keeps_rotated=False)
    if plan.devices.memory is None or plan.devices.name == "CPU":  # nothing is kept on a CPU
        return plan
    enough = max(1, FULL_SPEED // plan.recipe.data.length)
    fits = [size for size in plan.microbatch_sizes if size <= min(enough, plan.expected_microbatch)]
    packs = plan.microbatch or max(fits, default=1)
    if plan.recipe.loss.chunk == "auto":
        plan = replace(plan, chunk=_chunk(plan, packs))
    keeping = replace(plan, keeps_rotated=True)
    recomputed = plan.recipe.model.gradient_checkpointing != "none"
    spends = not recomputed and keeping.takes(packs) > plan.takes(packs)
    return keeping if spends and _has_room(keeping, packs) else plan


def _chunk(plan: Plan, packs: int) -> int | None:
    """Returns a chunk of the loss that is longer than the usual one, where there is room; None for the usual one."""
    tokens = min(LOGITS // plan.flops.shape.vocabulary, packs * plan.recipe.data.length)
    longer = 2 ** int(math.log2(max(tokens, 1)))
    return (
        longer if longer > USUAL_CHUNK and _has_room(replace(plan, chunk=longer), packs) else None
    )


def _has_room(plan: Plan, packs: int) -> bool:
    return plan.takes(packs) <= (1 - KEPT_FREE) * plan.devices.memory
