"""Plan a run: compute its figures from settings, shapes and counts before anything is loaded.

`rendering` prints a plan. Nothing here reads a file.

The second part decides the use of a device's memory, from the settings and the device alone. The
chunk of the loss changes the order of sums, so a checkpoint stores the chunk of its run
(pretrain.run.checkpointing). The tensors that layers keep for backward change no result.
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
from pretrain.optimizer.schedule import decay_begins
from pretrain.plan.memory import TAKES_LESS, Devices, LayerMemory, step_memory
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.precision.settings import ActivePrecision, precision_called
from pretrain.settings.recipe import USUAL_CHUNK, LossSettings, Recipe


@dataclass(frozen=True)
class Plan:
    """The figures of one run.

    Tokens, FLOPs and tokens/s count all devices together. Memory is that of one device.
    """

    recipe: Recipe
    schedule: PrecisionSchedule
    devices: Devices
    flops: ModelFlops
    # Mean over packs of the sum of squared document lengths, divided by the pack length.
    mean_squared: float
    # Memory of each layer by the name of each precision of the run. Empty: all layers are compiled.
    layers: Mapping[str, Sequence[LayerMemory]] = field(default_factory=dict)
    # Training packs. None for a stream, and for a plan for other machines without packs.
    packs: int | None = None
    mixture: Mixture | None = None  # if there are several sources
    chunk: int | None = None  # of the loss, if `loss.chunk: auto` is not the usual one
    # Layers keep queries, keys and values before and after rotation.
    keeps_rotated: bool = False

    @property
    def loss(self) -> LossSettings:
        """Return the loss settings of the recipe with the chunk that was chosen."""
        settings = self.recipe.loss
        if settings.chunk == "auto" and self.chunk:
            return settings.model_copy(update={"chunk": self.chunk})
        return settings

    # ── Precisions ──

    @property
    def precisions(self) -> list[ActivePrecision]:
        """Return each precision that the model is built for: of steps, and of `log.gap`."""
        return self.schedule.precisions(and_unquantized=bool(self.recipe.log.gap))

    @property
    def emulated(self) -> bool:
        """Return whether any precision of the run is emulated."""
        return any(active.backend == "emulation" for active in self.precisions)

    # ── The packs of a step ──

    @property
    def microbatch(self) -> int | None:
        """Return the packs that a device takes at once, or None if the run finds them by trying.

        They are at most the recipe's, and split the packs of a step into equal parts.
        """
        most = self.recipe.batch.microbatch
        if isinstance(most, str):
            return None
        microbatches = -(-self.packs_per_rank // most)
        return -(-self.packs_per_rank // microbatches)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a step over all devices."""
        return self.recipe.batch.tokens

    @property
    def packs_per_step(self) -> int:
        """Return the packs of a step over all devices."""
        return self.tokens_per_step // self.recipe.data.length

    @property
    def packs_per_rank(self) -> int:
        """Return the largest number of packs that a device takes in a step."""
        return -(-self.packs_per_step // self.devices.count)

    @property
    def microbatch_sizes(self) -> list[int]:
        """Return the sizes that `batch.microbatch: auto` may choose, ascending from 1.

        For each number of microbatches this is the smallest size that gives it, up to the cap of
        `auto:16`. A size divides the packs of a device, unless devices take different numbers:
        then places stay empty in any case.
        """
        is_uneven = self.packs_per_step % self.devices.count > 0
        most = self.packs_per_rank
        cap = self.recipe.batch.microbatch_cap or most
        sizes = {
            -(-most // microbatches)
            for microbatches in range(1, most + 1)
            if is_uneven or most % microbatches == 0
        }
        return sorted(size for size in sizes if size <= cap)

    @cached_property
    def expected_microbatch(self) -> int:
        """Return the microbatch, or the largest one that fits by the estimate of memory."""
        if self.microbatch:
            return self.microbatch
        limit = self.devices.memory or math.inf
        return max(size for size in self.microbatch_sizes if size == 1 or self.takes(size) <= limit)

    # ── The whole run ──

    @property
    def steps(self) -> int:
        """Return the number of steps of the run, its horizon."""
        return self.schedule.steps

    @property
    def total_tokens(self) -> int:
        """Return the tokens of the run from its first step to the horizon."""
        return self.steps * self.tokens_per_step

    @property
    def total_packs(self) -> int:
        """Return the packs of the run from its first step to the horizon."""
        return self.total_tokens // self.recipe.data.length

    @property
    def epochs(self) -> float | None:
        """Return the epochs of the run, or None if the number of packs is not known."""
        return self.total_packs / self.packs if self.packs else None

    @property
    def flops_per_token(self) -> float:
        """Return the FLOPs of a token, with attention over documents of mean length."""
        return self.flops.step(1, self.mean_squared)

    @property
    def peak_tflops(self) -> float | None:
        """Return the dense peak of all devices, in the precision of the run.

        Several precisions have the peak of the whole run: its FLOPs over the time that each span
        takes at its own peak. None for an unknown device, and if a precision is emulated.
        """
        spans = self.schedule.spans
        peaks = [self._peak_in(span.active) for span in spans]
        if self.emulated or not all(peaks):
            return None
        time = sum(
            (span.last - span.first + 1) / peak for span, peak in zip(spans, peaks, strict=True)
        )
        return self.devices.count * self.steps / time

    def _peak_in(self, active: ActivePrecision) -> float:
        """Return the dense peak of one device for products in `active`, or 0.0 if it is unknown.

        Experts that low precision leaves out count with the peak of BF16.
        """
        fastest = peak(self.devices.name, active.precision.peak) or 0.0
        bf16 = peak(self.devices.name, "bf16") or fastest
        if not fastest:
            return fastest
        if active.precision.plain_forward:
            # One of the three products of a linear. All three have the same FLOPs.
            fastest = 3 / (1 / bf16 + 2 / fastest)
        slower = sum(self.experts_left_out(active).values())
        return 1 / (slower / bf16 + (1 - slower) / fastest) if slower else fastest

    def experts_left_out(self, active: ActivePrecision) -> dict[str, float]:
        """Return the share of all FLOPs of experts that low precision leaves out, by reason."""
        layers = self.layers.get(active.precision.name)
        if not (active.precision.quantized and self.flops.expert_weights and layers):
            return {}
        share = TRAINED * self.flops.expert_weights / self.flops_per_token
        return {reason: share * part for reason, part in layers[-1].experts_left_out.items()}

    @property
    def experts_in_bf16(self) -> list[str]:
        """Return a line for each reason why a low precision leaves out experts, with the share."""
        return [
            f"experts compute in BF16 in {units.percent(share)} of the FLOPs ({reason})"
            for active in self.precisions
            for reason, share in self.experts_left_out(active).items()
        ]

    # ── Memory and checkpoints ──

    def memory(self, microbatch: int) -> dict[str, int]:
        """Return the bytes of a device by part, in the precision that takes most.

        microbatch: packs that the device takes at once.
        """
        layers = self.layers or {self.schedule.at(1).precision.name: ()}
        estimates = [
            step_memory(
                self.recipe,
                self.flops,
                self.devices,
                precision_called(name),
                of_precision,
                microbatch,
                self.loss,
                keeps_rotated=self.keeps_rotated,
            )
            for name, of_precision in layers.items()
        ]
        return max(estimates, key=lambda parts: sum(parts.values()))

    def takes(self, microbatch: int) -> int:
        """Return the bytes of all parts of `memory`."""
        return sum(self.memory(microbatch).values())

    @property
    def checkpoints_at_once(self) -> int:
        """Return the largest number of checkpoints that lie on the disk together.

        These are the kept ones and the one being written, or fewer in a short run.
        """
        settings = self.recipe.checkpoint
        decay = self.before_decay
        every = settings.every or self.steps
        written = (self.steps - 1) // every + settings.at_end
        is_early_kept = decay is not None and every <= decay
        return min(settings.keep + 1 + is_early_kept, written) + settings.best

    @property
    def before_decay(self) -> int | None:
        """Return the step after which the learning rate falls for good, or None.

        A longer run can branch from the last checkpoint up to that step.
        """
        return decay_begins(self.recipe.schedule, self.steps)

    @property
    def warnings(self) -> list[str]:
        """Return warnings about settings that are allowed but may be a mistake."""
        recipe = self.recipe
        batch = recipe.batch
        needed = self.takes(self.expected_microbatch) / GIB
        available = (self.devices.memory or math.inf) / GIB
        warnings = {  # and whether they apply
            f"about {units.memory(needed)} may not fit into {units.memory(available)} of memory; "
            f"what takes less: {TAKES_LESS}": needed > available,
            "`weights: bf16` loses the smallest updates; `weights: bf16_exact` keeps every one": (
                recipe.weights == "bf16"
            ),
            f"`log.gap: {recipe.log.gap}` measures nothing, as no step computes in low precision": (
                recipe.log.gap and self.schedule.unquantized is None
            ),
            f"`batch.microbatch: {batch.microbatch}`: a device has {self.packs_per_rank} packs": (
                isinstance(batch.microbatch, int) and batch.microbatch > self.packs_per_rank
            ),
            f"a step takes {self.packs_per_step} packs, and the training data are {self.packs}": (
                self.packs is not None and self.packs < self.packs_per_step
            ),
            **dict.fromkeys(self.experts_in_bf16, True),
        }
        applying = [text for text, applies in warnings.items() if applies]
        return [*applying, self.flops.left_out] if self.flops.uncounted else applying


# ── How the memory of a device is spent ───────────────────────────────────────────────────────────

# Share of a device's memory that the plan does not count: CUDA, NCCL, fragments.
KEPT_FREE = 0.08
WELL_FILLED = 8192  # tokens at once with which an H200 computes at full speed
# Tokens of a microbatch beyond which a larger one gains less than the decisions below.
FULL_SPEED = 32_768
LOGITS = 2**29  # of a chunk, 1 GiB in BF16: the usual 4,096 tokens with 131,072 words


def fits_gathered(plan: Plan) -> bool:
    """Return whether weights are gathered once a step (`fsdp_reshard_after_forward: auto`).

    That needs shards, and memory for all weights beside the recipe's microbatch. If that is `auto`,
    it is the microbatch that fits with weights gathered for each use, or one that fills a device.
    """
    if not plan.devices.sharded:
        return False
    gathered = replace(plan, devices=replace(plan.devices, gathered=True))
    enough = max(1, WELL_FILLED // plan.recipe.data.length)
    return _has_room(gathered, plan.microbatch or min(plan.expected_microbatch, enough))


def spend_spare_memory(plan: Plan, gathered: bool | None = None) -> Plan:
    """Return `plan` with the decisions that its devices' memory allows.

    gathered: whether shards are gathered once a step, as the topology says. None: if memory allows.

    CPUs and devices of unknown memory keep nothing more than they must.
    """
    if gathered is None:
        gathered = fits_gathered(plan)
    devices = replace(plan.devices, gathered=gathered)
    plan = replace(plan, devices=devices, chunk=None, keeps_rotated=False)
    if devices.memory is None or devices.name == "CPU":
        return plan
    most = min(max(1, FULL_SPEED // plan.recipe.data.length), plan.expected_microbatch)
    packs = plan.microbatch or max(
        (size for size in plan.microbatch_sizes if size <= most), default=1
    )
    if plan.recipe.loss.chunk == "auto":
        plan = replace(plan, chunk=_longer_chunk(plan, packs))
    rotated = replace(plan, keeps_rotated=True)
    keeps_all = plan.recipe.model.gradient_checkpointing == "none"
    takes_more = keeps_all and rotated.takes(packs) > plan.takes(packs)
    return rotated if takes_more and _has_room(rotated, packs) else plan


def _longer_chunk(plan: Plan, packs: int) -> int | None:
    """Return a chunk of the loss that is longer than the usual one, or None without room for it."""
    tokens = min(LOGITS // plan.flops.shape.vocabulary, packs * plan.recipe.data.length)
    longer = 2 ** int(math.log2(max(tokens, 1)))
    if longer > USUAL_CHUNK and _has_room(replace(plan, chunk=longer), packs):
        return longer
    return None


def _has_room(plan: Plan, packs: int) -> bool:
    """Return whether a microbatch of `packs` fits. Unknown memory has room for everything."""
    return plan.takes(packs) <= (1 - KEPT_FREE) * (plan.devices.memory or math.inf)
