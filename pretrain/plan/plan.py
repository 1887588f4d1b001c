"""Plan a run: compute steps, FLOPs and memory from settings, model sizes and number of packs.

No weights are loaded for a plan. The module `rendering` prints a plan. The functions of this module
do not read any file.

A `Training` has the facts that its devices do not change. `plan_for` makes the plan for devices: it
chooses the attention, assesses the memory of each layer, and chooses three settings by the memory
of a device. The choices depend only on the recipe and the devices.

* FSDP2 on GPUs gathers weights and reduces gradients only once a step if this fits, because it is
  faster.
* The number of tokens in a chunk of the loss. It changes the order of sums, so a checkpoint stores
  the number that its run has used (pretrain.run.checkpointing).
* Whether layers keep rotated queries, keys and values for backward. This changes no result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from transformers import PreTrainedModel

from foundation.units import bytes_text
from packing.order import Mixture
from pretrain.metrics.flops import ModelFlops
from pretrain.model.attention_backends import Case, Choice, choose
from pretrain.model.distributed import from_all_ranks
from pretrain.optimizer.schedule import decay_begins
from pretrain.plan.memory import (
    Devices,
    LayerMemory,
    layers_of,
    optimizer_state,
    step_memory,
)
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.precision.settings import PRECISIONS, ActivePrecision
from pretrain.settings.recipe import USUAL_LOSS_CHUNK, LossSettings, Recipe

# Settings that save memory, for messages. The last three change the results of a run.
SAVE_MEMORY = (
    "to save memory, set a smaller `batch.microbatch`, `model.gradient_checkpointing: full`, "
    "`optimizer.offload: state` (AdamW), `loss.chunk: 1024`, --config zero or fsdp2 on several "
    "devices, `weights: bf16_exact`, `optimizer.moments: bf16` or `optimizer.gradients: bf16`"
)


@dataclass(frozen=True)
class Training:
    """The settings of one run, and the numbers that do not depend on its devices.

    Tokens and FLOPs are totals of all devices.
    """

    recipe: Recipe
    schedule: PrecisionSchedule
    flops: ModelFlops
    # Sum of the squared lengths of the documents, divided by the number of tokens. The FLOPs of
    # attention per token are proportional to it.
    squared_length_per_token: float
    # Number of training packs. None for a stream, or if the packs of the plan do not exist yet.
    packs: int | None = None
    # The mixture of several sources. None if there is a single source.
    mixture: Mixture | None = None
    # Lines about a schedule that was shortened to the length on the command line.
    notices: Sequence[str] = ()

    # ── Precisions ──

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of activations, which is the same in all precisions of a run."""
        return getattr(torch, self.schedule.at(1).precision.compute_dtype)

    @property
    def precisions(self) -> list[ActivePrecision]:
        """Return all precisions of the run."""
        return self.schedule.precisions

    @property
    def emulated(self) -> bool:
        """Return True if any precision of the run is emulated."""
        return any(active.engine == "emulation" for active in self.precisions)

    # ── The packs of a step ──

    @property
    def tokens_per_step(self) -> int:
        """Return the number of tokens in a step, summed over all devices."""
        return self.recipe.batch.tokens

    @property
    def packs_per_step(self) -> int:
        """Return the number of packs in a step, summed over all devices."""
        return self.tokens_per_step // self.recipe.data.length

    # ── The whole run ──

    @property
    def steps(self) -> int:
        """Return the number of steps of the run, also called its horizon."""
        return self.schedule.steps

    @property
    def total_tokens(self) -> int:
        """Return the number of tokens of the run from its first to its last step."""
        return self.steps * self.tokens_per_step

    @property
    def total_packs(self) -> int:
        """Return the number of packs of the run from its first to its last step."""
        return self.total_tokens // self.recipe.data.length

    @property
    def epochs(self) -> float | None:
        """Return the number of epochs, or None if the number of training packs is not known."""
        return self.total_packs / self.packs if self.packs else None

    @property
    def flops_per_token(self) -> float:
        """Return the mean training FLOPs per token."""
        return self.flops.step(1, self.squared_length_per_token)

    @property
    def checkpoints_at_once(self) -> int:
        """Return the largest number of checkpoints that exist on the disk at the same time.

        These are the newest checkpoints (`checkpoint.keep`), the last one before the decay of the
        learning rate, the checkpoint that is being written, and the one with the lowest held-out
        loss (`checkpoint.best`). A short run may write fewer checkpoints of the first three kinds.
        """
        settings = self.recipe.checkpoint
        every = settings.every or self.steps
        written = (self.steps - 1) // every + bool(settings.at_end or self.recipe.evaluate.served)
        has_one_before_decay = every <= self.before_decay
        return min(settings.keep + has_one_before_decay + 1, written) + settings.best

    @property
    def before_decay(self) -> int:
        """Return the last step before the decay of the learning rate at the end of the run.

        Return 0 if the schedule has no such decay. A longer run can branch from a checkpoint of
        this step or of an earlier step.
        """
        return decay_begins(self.recipe.schedule, self.steps) or 0


@dataclass(frozen=True, kw_only=True)
class Plan(Training):
    """A training on its devices. `plan_for` makes it. Memory is the memory of one device."""

    devices: Devices
    # Map the name of each precision of the run to the memory of each layer.
    layers: Mapping[str, Sequence[LayerMemory]]
    attention: Choice
    # The number of tokens in a chunk of the loss that was chosen for `loss.chunk: auto`. None for
    # the default number.
    loss_chunk: int | None = None
    # True if layers keep queries, keys and values both before and after rotation.
    keeps_rotated: bool = False

    @property
    def loss(self) -> LossSettings:
        """Return the loss settings of the recipe. `loss_chunk` replaces `loss.chunk: auto`."""
        settings = self.recipe.loss
        if settings.chunk == "auto" and self.loss_chunk:
            return settings.model_copy(update={"chunk": self.loss_chunk})
        return settings

    # ── The packs of a device ──

    @property
    def microbatch(self) -> int | None:
        """Return the number of packs in a microbatch, or None if the run finds it by trial.

        The recipe's `batch.microbatch` is an upper limit. The result is the smallest size with
        which a step has the same number of microbatches as with this limit.
        """
        most = self.recipe.batch.microbatch
        if isinstance(most, str):
            return None
        microbatches = -(-self.packs_per_rank // most)
        return -(-self.packs_per_rank // microbatches)

    @property
    def packs_per_rank(self) -> int:
        """Return the largest number of packs that one device computes in a step."""
        return -(-self.packs_per_step // self.devices.count)

    @property
    def microbatch_sizes(self) -> list[int]:
        """Return the microbatch sizes in packs that `batch.microbatch: auto` may choose, ascending.

        For each number of microbatches in a step, the smallest size that leads to this number is a
        candidate. If all devices have the same number of packs, a candidate that does not divide
        the number of packs of a device is removed. If the devices have different numbers of packs,
        no size fills all microbatches, and no candidate is removed.
        """
        is_uneven = self.packs_per_step % self.devices.count > 0
        most = self.packs_per_rank
        sizes = {
            -(-most // microbatches)
            for microbatches in range(1, most + 1)
            if is_uneven or most % microbatches == 0
        }
        return sorted(sizes)

    @cached_property
    def expected_microbatch(self) -> int:
        """Return the number of packs in a microbatch, or an estimate if it is found by trial.

        The estimate is the largest size whose estimated memory fits into the device.
        """
        if self.microbatch:
            return self.microbatch
        return max(
            size
            for size in self.microbatch_sizes
            if size == 1 or self.needed_memory(size) <= self.devices.memory
        )

    # ── Memory ──

    def memory_parts(self, microbatch: int) -> dict[str, int]:
        """Map each part of a device's memory to its number of bytes.

        If the run has several precisions, the result is for the precision that needs the most
        memory.

        microbatch: the number of packs in a microbatch.
        """
        estimates = [
            step_memory(
                self.recipe,
                self.flops,
                self.devices,
                self.loss,
                microbatch,
                PRECISIONS[name],
                layers,
                keeps_rotated=self.keeps_rotated,
            )
            for name, layers in self.layers.items()
        ]
        return max(estimates, key=lambda parts: sum(parts.values()))

    def needed_memory(self, microbatch: int) -> int:
        """Return the number of bytes that a device needs in total. See `memory_parts`."""
        return sum(self.memory_parts(microbatch).values())

    @property
    def memory_text(self) -> str:
        """Return the parts of the expected memory as text: "parameters 3.2 GiB, ..."."""
        parts = self.memory_parts(self.expected_microbatch)
        return ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())

    @property
    def host_memory(self) -> int:
        """Return the bytes of pinned host memory that each device needs (`optimizer.offload`)."""
        return sum(optimizer_state(self.recipe, self.flops, self.devices, on_host=True).values())

    @property
    def expert_warnings(self) -> list[str]:
        """Return a warning for each reason why experts stay unquantized, and so compute in BF16."""
        # The last layer has experts if any layer has. The first layers may have none.
        reasons = dict.fromkeys(
            reason
            for name, layers in self.layers.items()
            for reason in layers[-1].experts_left_out
            if PRECISIONS[name].quantized
        )
        return [f"experts compute in BF16 ({reason})" for reason in reasons]

    @property
    def warnings(self) -> list[str]:
        """Return warnings about settings that are allowed but may be a mistake."""
        recipe = self.recipe
        needed = self.needed_memory(self.expected_microbatch)
        available = self.devices.memory
        warnings = []
        if needed > available:
            warnings.append(
                f"a device needs about {bytes_text(needed)}, which may not fit into its "
                f"memory of {bytes_text(available)}: {self.memory_text}; {SAVE_MEMORY}"
            )
        if recipe.weights == "bf16":
            warnings.append(
                "`weights: bf16` loses the smallest updates of the weights; set `weights: "
                "bf16_exact` to keep all of them"
            )
        warnings += self.expert_warnings
        if self.flops.uncounted:
            warnings.append(self.flops.uncounted_warning)
        return warnings


# ── The plan for devices ──────────────────────────────────────────────────────────────────────────

# The share of a device's memory that stays free. CUDA, NCCL and fragmentation of memory need it,
# and the estimate of memory does not include them.
KEPT_FREE = 0.08
# The number of tokens in a microbatch with which an H200 reaches nearly its full speed.
WELL_FILLED = 8192
# With `batch.microbatch: auto`, `spend_spare_memory` reserves memory for a microbatch of at most
# this number of tokens. The remaining memory is available for a longer chunk of the loss and for
# kept rotated tensors, because both gain more speed than a larger microbatch.
FULL_SPEED = 32_768
# The largest number of logits in a chunk of the loss. They take 1 GiB in BF16. With a vocabulary of
# 131,072 tokens, a chunk of the default size, 4,096 tokens, has this number of logits.
LOGITS = 2**29


def plan_for(
    training: Training, shapes: PreTrainedModel, devices: Devices, *, elsewhere: bool = False
) -> Plan:
    """Return the plan of a training on devices.

    shapes: the model on the meta device.
    elsewhere: True if this machine does not have the devices. It is assumed that their machine has
        all packages of requirements-cuda.txt.

    All ranks must call this function, and get the same choices.
    """
    capability = devices.capability if elsewhere else None
    flops = training.flops
    dtype = training.compute_dtype
    case = Case(devices.type, flops.shape.head_dim, dtype, capability, flops.changed_scores)
    attention = choose(training.recipe.model.attention, case, training.squared_length_per_token)
    layers = {
        active.precision.name: layers_of(
            shapes, training.flops, training.recipe, active, devices, attention.name
        )
        for active in training.precisions
    }
    plan = Plan(**vars(training), devices=devices, layers=layers, attention=attention)
    if devices.sharded and devices.type == "cuda" and all(from_all_ranks(fits_gathered_once(plan))):
        plan = replace(plan, devices=replace(devices, gathered_once=True))
    return spend_spare_memory(plan)


def fits_gathered_once(plan: Plan) -> bool:
    """Return True if the memory suffices to gather sharded weights only once a step.

    It must suffice for all weights and a microbatch. With `batch.microbatch: auto`, the size of the
    microbatch is assumed to be the smaller of two sizes: the largest size that fits if weights are
    gathered for each use, and the size of WELL_FILLED tokens.
    """
    gathered = replace(plan, devices=replace(plan.devices, gathered_once=True))
    enough = max(1, WELL_FILLED // plan.recipe.data.length)
    return _fits(gathered, plan.microbatch or min(plan.expected_microbatch, enough))


def spend_spare_memory(plan: Plan) -> Plan:
    """Return a copy of `plan` that uses free memory to save time.

    If the memory of a device suffices, the chunks of the loss are larger in the copy, and layers
    keep rotated queries, keys and values. For CPUs, the chunks have the default size, and layers do
    not keep rotated tensors.
    """
    plan = replace(plan, loss_chunk=None, keeps_rotated=False)
    if plan.devices.type == "cpu":
        return plan
    # Number of packs in a microbatch for which memory is reserved.
    packs = plan.microbatch
    if packs is None:
        most = min(max(1, FULL_SPEED // plan.recipe.data.length), plan.expected_microbatch)
        packs = max((size for size in plan.microbatch_sizes if size <= most), default=1)
    if plan.recipe.loss.chunk == "auto":
        plan = replace(plan, loss_chunk=_longer_loss_chunk(plan, packs))
    if plan.recipe.model.gradient_checkpointing != "none":
        return plan
    rotated = replace(plan, keeps_rotated=True)
    # Without rotated tensors, `rotated` needs the same memory as `plan`.
    has_rotated = rotated.needed_memory(packs) > plan.needed_memory(packs)
    return rotated if has_rotated and _fits(rotated, packs) else plan


def _longer_loss_chunk(plan: Plan, packs: int) -> int | None:
    """Return the number of tokens in a chunk of the loss that is longer than the default, or None.

    The number is the largest power of two that has at most LOGITS logits, and is not larger than a
    microbatch of `packs` packs. Return None if it is not longer than the default, or if the memory
    does not suffice for it.
    """
    most = min(LOGITS // plan.flops.shape.vocabulary, packs * plan.recipe.data.length)
    longer = 2 ** int(math.log2(max(most, 1)))
    if longer > USUAL_LOSS_CHUNK and _fits(replace(plan, loss_chunk=longer), packs):
        return longer
    return None


def _fits(plan: Plan, packs: int) -> bool:
    """Return True if a microbatch of `packs` packs fits into the memory of a device."""
    return plan.needed_memory(packs) <= (1 - KEPT_FREE) * plan.devices.memory
