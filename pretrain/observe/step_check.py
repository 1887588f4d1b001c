"""Check the token counts and gradients of a step, and the optimizer's update.

The parity check covers forward and backward, and the audit covers matrix products. This check
covers the rest of a step. It runs in the first two steps after a start, a rollback or a change of
the precision (`Step.is_new`), and every `log.fp8_statistics` steps. `pretrain.observe.update_check`
computes the update again. docs/developers/checks.md lists everything that is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from packing.arrow import IGNORE
from packing.batch import StepBatches
from pretrain.metrics.health import TrainingHalted, some_of
from pretrain.model.distributed import from_all_ranks, largest_over_ranks
from pretrain.model.gradients import gradients_of, local_part
from pretrain.model.packed import PackedLanguageModel
from pretrain.observe.observers import Observer, Step, is_due
from pretrain.observe.update_check import (
    Update,
    checks_of,
    expected_clipping,
    some_values,
)
from pretrain.optimizer.adamw import ExactAdamW
from pretrain.precision.gemm import Gemm, Operand
from pretrain.precision.product import Probe
from pretrain.settings.recipe import Recipe

# Gradients must be summed over microbatches in FP32. If BF16 can store more than this share of the
# nonzero sums without rounding, the check concludes that the sums were rounded to BF16.
BF16_VALUED = 0.9
# Relative difference of the mean losses of two microbatches with the same tokens, whose losses may
# be summed in another order.
EQUAL_LOSSES = 1e-6
# Relative tolerance of a step's loss, which is an FP32 sum over the microbatches.
LOSS_TOLERANCE = 1e-4
# Tolerance of the product of a loss's factor and the number of labels, which must be 1.
FACTOR_TOLERANCE = 1e-5


def checksum(codes: Tensor) -> Tensor:
    """Return a checksum of `codes` [..., rows, features], which changes if rows are moved."""
    rows = codes.contiguous().view(torch.uint8).flatten(0, -2).sum(1)
    return (rows * torch.arange(1, len(rows) + 1, device=rows.device)).sum()


@dataclass(eq=False)
class StepCheck(Observer):
    """Check the forward and backward passes and the update of a step.

    Raises TrainingHalted after the update if the step or the update is wrong.
    """

    packed: PackedLanguageModel
    optimizer: ExactAdamW
    recipe: Recipe
    accelerator: Accelerator

    def due(self, step: Step) -> bool:
        """Return True if `Step.is_new` is set, and in every n-th step (`log.fp8_statistics`)."""
        return step.is_new or is_due(step.number, self.recipe.log.fp8_statistics)

    @contextmanager
    def passes(self, step: Step, batches: StepBatches, place: int) -> Iterator[None]:
        """Find faults in the forward and backward passes of the step. `update` reports the faults.

        All ranks must call this method.

        place: the position, in the order of packs, of the first pack that the step must use.
        """
        # Faults in the passes.
        self._wrong: list[str] = []
        # For each microbatch whose backward has begun, FP32 [3]: the number of labels, the summed
        # loss, and the factor by which this loss is multiplied before backward.
        self._seen: list[Tensor] = []
        # Results of `_fit_bf16`, bool scalars: after each of the first two microbatches, and after
        # the last one.
        self._sums_fit_bf16: list[Tensor] = []
        # Number of gradients that are not zero before the first microbatch, a tensor. It is read
        # only after `yield`, so the host does not wait for the device here.
        not_cleared = sum(local_part(sums).any() for sums in gradients_of(self.packed).values())
        sharding = self.packed.sharding
        not_gathered = sharding.stale_weights() if sharding else []
        cached_weights = CachedWeights()
        with (
            self.packed.register_forward_hook(self._after_forward, with_kwargs=True),
            self.packed.context.probing(cached_weights),
        ):
            yield
        self._sums_fit_bf16.append(self._fit_bf16(over_ranks=True))
        start = batches.places.start
        if start != place:
            self._wrong.append(
                f"the step's packs begin at position {start:,} in the order of packs, not at "
                f"{place:,}"
            )
        if number := int(not_cleared):
            self._wrong.append(f"{number} gradients were not cleared before the step")
        self._check_losses(batches.valid_tokens)
        if any(self._sums_fit_bf16):
            self._wrong.append(
                "gradients are added up in BF16, not in FP32: their sums fit into BF16"
            )
        self._add(
            "modules are in evaluation mode",
            [name for name, module in self.packed.named_modules() if not module.training],
        )
        self._add("products use weights from before the last update", cached_weights.stale)
        self._add(
            "products use another quantized weight in another process",
            cached_weights.differing_over_ranks(),
        )
        self._add("weights were not gathered after the last update", not_gathered)

    def _after_forward(
        self, module: nn.Module, args: Any, inputs: dict[str, Any], loss: Tensor
    ) -> None:
        """Record the loss of a microbatch in its backward, and check the sums before it.

        This is a forward hook of the model.
        """
        labels = (inputs["labels"] != IGNORE).sum()
        losses = loss.detach()
        loss.register_hook(
            lambda factor: self._seen.append(torch.stack([labels, losses, factor.detach()]))
        )
        # Check the sums of the first one and two microbatches. With more microbatches, the sums
        # have more bits, and the check could not find that earlier sums were rounded.
        if len(self._seen) in (1, 2):
            sharding = self.packed.sharding
            # True if each microbatch's gradients are summed over ranks before they are accumulated.
            is_reduced = bool(sharding and not sharding.once_a_step)
            self._sums_fit_bf16.append(self._fit_bf16(over_ranks=is_reduced))

    def _check_losses(self, counted: int) -> None:
        """Compute the mean loss of the step, and check the labels and the divisor of the loss.

        counted: the number of labels that the step counts, over all ranks.
        """
        seen = torch.stack(self._seen).double()
        total, loss, _ = self.accelerator.reduce(seen.sum(0), reduction="sum").tolist()
        divisor = max(counted, 1)
        # Mean loss that the step minimizes.
        self._loss = loss / divisor
        if total != counted:
            self._wrong.append(
                f"{total:,.0f} labels were trained on, but the step counts {counted:,}"
            )
        # A factor that is NaN is wrong too.
        if not ((seen[:, 2] * divisor - 1).abs() <= FACTOR_TOLERANCE).all():
            self._wrong.append(f"a token's loss is not divided by the step's {counted:,} labels")

    def _add(self, problem: str, names: list[str]) -> None:
        """Add a line about `problem` if modules, products or weights of these names have it."""
        if names:
            self._wrong.append(f"{len(names)} {problem}: {some_of(names)}")

    @contextmanager
    def update(
        self, step: Step, learning_rate: float, past_updates: int, losses: Mapping[str, float]
    ) -> Iterator[None]:
        """Compare the update with torch's, and `losses` with the losses of the microbatches.

        All ranks must call this method. Raises TrainingHalted on all processes if any process has
        found a fault in the step or in the update.
        """
        hf = self.packed.hf
        update = Update(
            names={parameter: name for name, parameter in hf.named_parameters()},
            optimizer=self.optimizer,
            recipe=self.recipe,
            learning_rate=learning_rate,
            past_updates=past_updates,
            clipping=expected_clipping(hf, self.recipe.optimizer.clip),
        )
        checks = checks_of(update)
        yield
        wrong = self._wrong + self._wrong_losses(losses)
        wrong += sorted({line for check in checks for line in check.differences()})
        if largest_over_ranks(self.accelerator, len(wrong)):
            lines = "\n  ".join(wrong or ["see the message of another process"])
            raise TrainingHalted(
                step.number,
                "the step or its update is wrong. The update is compared with those of "
                f"torch.optim:\n  {lines}\nThe step is not saved. The fault lies in the code or in "
                "the device, not in the recipe",
            )

    def _wrong_losses(self, losses: Mapping[str, float]) -> list[str]:
        """Return a line of text if the logged losses differ from the microbatches' losses."""
        weights = {
            "loss": 1.0,
            "penalty": self.recipe.loss.penalty_weight,
            "router_loss": self.packed.routing.coefficient,
        }
        # The step minimizes this sum. Losses without a weight are not logged.
        logged = sum(weight * losses[name] for name, weight in weights.items() if weight)
        if abs(logged - self._loss) <= LOSS_TOLERANCE * abs(self._loss):
            return []
        return [
            f"the losses to be logged add up to {logged:.6f}, those of the microbatches to "
            f"{self._loss:.6f}"
        ]

    def _fit_bf16(self, *, over_ranks: bool) -> Tensor:
        """Return a bool scalar: True if BF16 can store almost all sampled gradient sums exactly.

        Then the sums were rounded to BF16, with one exception: the gradients of one microbatch may
        be BF16 values, and so may their sum with equal gradients. Therefore return False unless two
        microbatches in the sums have different mean losses. The samples are `some_values` of each
        FP32 sum. Zeros are not counted.

        over_ranks: True for sums over all ranks. Then all ranks must call this method. Under FSDP2,
            only the sharded gradients are such sums.
        """
        kind = DTensor if over_ranks and self.packed.sharding else Tensor
        samples = [
            some_values(sums)
            for sums in gradients_of(self.packed).values()
            if isinstance(sums, kind) and sums.dtype == torch.float32
        ]
        # A zero keeps the list from being empty if no gradient is FP32.
        values = torch.cat([torch.zeros(1, device=self.packed.hf.device), *samples])
        is_counted = values != 0
        fits = is_counted & (values == values.bfloat16())
        labels, losses, _ = torch.stack(self._seen).double().unbind(1)
        # The mean is NaN for a microbatch without labels, which has no gradients. The comparison
        # below is false for NaN.
        means = losses / labels
        if over_ranks:
            means = self.accelerator.gather(means)
        mean = means.nanmean()
        losses_differ = ((means - mean).abs() > EQUAL_LOSSES * mean.abs()).any()
        return losses_differ & (fits.sum() > BF16_VALUED * is_counted.sum())


class CachedWeights(Probe):
    """Probe that compares cached quantized weights with two references.

    The first reference is the present weight, quantized again. The second is the cached weight of
    other ranks.
    """

    def __init__(self) -> None:
        # Map (name of the product, id of the cached weight) to a bool scalar: True if the cached
        # weight differs from the present weight.
        self._are_stale: dict[tuple[str, int], Tensor] = {}
        # Map the name of a product to a checksum of its codes.
        self._checksums: dict[str, Tensor] = {}

    @property
    def stale(self) -> list[str]:
        """Return the sorted names of products that used a stale weight. Waits for the device."""
        return sorted({name for (name, _), is_stale in self._are_stale.items() if is_stale})

    def differing_over_ranks(self) -> list[str]:
        """Return the sorted names of products whose codes differ between two ranks.

        The host waits for the device. All ranks must call this method.
        """
        of_rank = {name: int(value) for name, value in self._checksums.items()}
        of_ranks = from_all_ranks(of_rank)
        # A rank may have computed no product with an expert. The other ranks compare this product.
        return sorted(
            name
            for name, value in of_rank.items()
            if any(other.get(name, value) != value for other in of_ranks)
        )

    @torch.no_grad()
    def weight(self, gemm: Gemm, operand: Operand, matrix: Callable[[], Tensor]) -> None:
        """Compare a cached weight in the first microbatch that uses it.

        Under delayed scaling, later microbatches have other scales than the cached weight.
        """
        codes = gemm.codes(operand)
        # Later microbatches use the same tensor, unless they quantize the weight again.
        key = (gemm.name, id(codes))
        if key not in self._are_stale:
            # `both` is not needed, because `codes` returns only the codes of the forward product.
            requantized = gemm.quantize("weight", matrix(), both=False)
            self._are_stale[key] = (codes != gemm.codes(requantized)).any()
            # Ranks exchange checksums, because all codes would be as large as the model.
            self._checksums[gemm.name] = checksum(codes)
