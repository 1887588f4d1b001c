"""Measure the cost of low precision: compute a step's first microbatch in BF16 too, and compare.

The pass in BF16 comes first and leaves nothing behind, so the run has the numbers of a run without
the measurement. Each process compares its own first microbatch before gradients are exchanged.
Under FSDP2 with gradients already reduced it compares its shards of the gradients of all processes.
Dot products and losses are summed over processes. docs/verification.md defines the figures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from foundation.overrides import overridden
from packing.arrow import IGNORE
from packing.batch import StepBatches
from pretrain.checkpoint.state import seed_step
from pretrain.metrics.health import Health, StepDecision
from pretrain.metrics.recorder import layer_of
from pretrain.model.experts import recording_choices
from pretrain.model.gradients import gradient_of, local_part
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.observe.observers import Observer, Step, is_due
from pretrain.optimizer.adamw import ExactAdamW, clear_gradients
from pretrain.precision.model_precision import ModelPrecision
from pretrain.settings.recipe import Recipe

PIECE = 2**24  # values of a gradient that are compared at once, in FP32


class GapMeter(Observer):
    """Compare the first microbatch's loss and gradient with BF16, every `log.gap` steps.

    The health check judges the comparison (`health.on_gap`). If the run shall go on in BF16, the
    schedule switches after the step.
    """

    separates_first_microbatch = True

    def __init__(
        self,
        packed: PackedLanguageModel,
        optimizer: ExactAdamW,
        precision: ModelPrecision,
        health: Health,
        recipe: Recipe,
        accelerator: Accelerator,
    ) -> None:
        self._packed = packed
        self._optimizer = optimizer
        self._precision = precision
        self._health = health
        self._recipe = recipe
        self._accelerator = accelerator
        self._is_matrix = {
            name: parameter.dim() > 1
            for name, parameter in packed.hf.named_parameters()
            if parameter.requires_grad
        }
        self._layers = tuple(decoder_layers(packed.hf))
        self._figures: dict[str, Any] = {}
        # Where the gradient of each matrix lies beside that in BF16, see `_place`. Rounding moves
        # it, in a deep model in FP4 as far as the gradient is long, but about as far each time,
        # until something breaks.
        self.places: dict[str, tuple[float, float]] = {}

    def due(self, step: Step) -> bool:
        """Return True in every n-th step that computes in low precision."""
        return step.is_quantized and is_due(step.number, self._recipe.log.gap)

    @contextmanager
    def passes(self, step: Step, batches: StepBatches, place: int) -> Iterator[None]:
        """Compute the first microbatch in BF16 before the step, and the figures after it."""
        self._compute_in_bf16(batches)
        # The step draws the random numbers that it would draw without this pass.
        seed_step(self._recipe.seed, step.number - 1, self._accelerator.process_index)
        yield
        self._measure()

    @contextmanager
    def first_microbatch(self, step: Step) -> Iterator[None]:
        """Compare the microbatch with the one in BF16."""

        def after_forward(module: nn.Module, inputs: Any, loss: Tensor) -> None:
            self._losses[0] = loss.detach()

        with (
            self._packed.register_forward_hook(after_forward),
            recording_choices(self._packed) as choices,
        ):
            yield
        # A layer that is recomputed makes the same choices a second time.
        for (low, *_), (in_bf16,) in zip(choices, self._chosen_in_bf16, strict=False):
            differs = (low[:, :, None] != in_bf16[:, None]).all(2)
            self._choices[0] += differs.sum()
            self._choices[1] += differs.numel()
        self._products: dict[str, Tensor] = {
            name: _products(gradient, self._in_bf16[name])
            for name, gradient, _ in self._gradients()
            if name in self._in_bf16
        }
        self._in_bf16.clear()  # free their memory
        self._chosen_in_bf16.clear()

    def judge(self, step: Step, decision: StepDecision) -> StepDecision:
        """Let the health check judge the gap if it would update without it."""
        if not decision.proceed:
            return decision
        judged, figures = self._health.judge_gap(
            step.number, self._precision.current.name, self.places
        )
        self._figures |= figures
        if self._health.state.switched_after == step.number:
            self._precision.schedule = self._precision.schedule.switched_to_bf16_after(step.number)
        reasons = [reason for reason in (decision.reason, judged.reason) if reason]
        return replace(judged, reason="; ".join(reasons) or None)

    def metrics(self, step: Step) -> dict[str, Any]:
        """Return the step's figures.

        gap/loss: nats a token, positive if the loss is higher in low precision.
        gap/cosine, gap/norm_ratio: of the gradients in low precision and BF16, and of each layer's.
        gap/routing: share of tokens' choices of experts that BF16 has not made, in a mixture.
        gap/moved, gap/worst: of the health check.
        """
        return self._figures

    def _compute_in_bf16(self, batches: StepBatches) -> None:
        """Run forward and backward of the first microbatch in BF16, and keep loss and gradient."""
        device = self._accelerator.device
        self._in_bf16: dict[str, Tensor] = {}  # gradients
        self._products = {}  # of gradients, see `_products`
        # The loss in low precision, in BF16, and the number of labels.
        self._losses: Tensor = torch.zeros(3, dtype=torch.float64, device=device)
        # Choices of experts that BF16 has not made, and all choices.
        self._choices: Tensor = torch.zeros(2, dtype=torch.float64, device=device)
        self._chosen_in_bf16: list[list[Tensor]] = []
        if not batches.microbatches:
            return
        packed = self._packed
        inputs = inputs_of(batches.microbatches[0], device)
        with ExitStack() as contexts:
            contexts.enter_context(overridden(packed.context, quantizing=False))
            if packed.sharding and len(batches.microbatches) > 1:
                contexts.enter_context(packed.sharding.accumulating())
            with recording_choices(packed) as self._chosen_in_bf16:
                loss = packed(**inputs)
            self._accelerator.backward(loss * (1 / max(batches.valid_tokens, 1)))
        self._losses[1] = loss.detach()
        self._losses[2] = (inputs["labels"] != IGNORE).sum()
        # Clearing drops `.grad`, and overwrites sums in place.
        self._in_bf16 = {
            name: part.clone() if is_sum else part for name, part, is_sum in self._gradients()
        }
        clear_gradients(self._optimizer, packed)
        for product in packed.fused.products if packed.fused else ():
            # The unquantized path has cached it, and training may not use it.
            product.plain.weight = None

    def _gradients(self) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield name and this process's part of each trained gradient, and whether it is a sum.

        Under FSDP2 gathering replaces the parameters. Then these are the rank's own sums, otherwise
        its shard of the gradient that was reduced.
        """
        for name, parameter in self._packed.hf.named_parameters():
            gradient = gradient_of(parameter)
            if parameter.requires_grad and gradient is not None:
                yield name, local_part(gradient), gradient is not parameter.grad

    def _measure(self) -> None:
        """Compute the figures of the step. Waits for the device. Collective."""
        nothing = torch.zeros_like(self._losses)  # of a parameter without a gradient
        rows = [self._products.get(name, nothing) for name in self._is_matrix]
        *products, low, bf16, labels, differing, choices = self._accelerator.reduce(
            torch.cat([*rows, self._losses, self._choices]), reduction="sum"
        ).tolist()
        by_name = dict(zip(self._is_matrix, np.array(products).reshape(-1, 3), strict=True))
        self.places = {
            name: _place(*row) for name, row in by_name.items() if self._is_matrix[name] and row[2]
        }
        layers: dict[str, Any] = defaultdict(lambda: np.zeros(3))
        for name, row in by_name.items():
            layers[layer_of(name, self._layers)] += row
        self._figures = {"gap/loss": (low - bf16) / max(labels, 1)}
        self._figures |= {"gap/routing": differing / choices} if choices else {}
        self._figures |= _likeness("", sum(by_name.values()))
        for layer, sums in layers.items():
            self._figures |= _likeness(f"/{layer}", sums)


def _likeness(suffix: str, sums: Any) -> dict[str, float]:
    """Return cosine and norm ratio of gradients, from their `_products`.

    Empty without a gradient.
    """
    dot, low, bf16 = sums.tolist()
    if not (low and bf16):
        return {}
    return {
        f"gap/cosine{suffix}": dot / math.sqrt(low * bf16),
        f"gap/norm_ratio{suffix}": math.sqrt(low / bf16),
    }


def _products(low: Tensor, in_bf16: Tensor) -> Tensor:
    """Return the dot product of two gradients, and that of each with itself: FP64 [3].

    Pieces are summed in FP32.
    """
    total = torch.zeros(3, dtype=torch.float64, device=low.device)
    pieces = zip(low.reshape(-1).split(PIECE), in_bf16.reshape(-1).split(PIECE), strict=True)
    for x, y in (map(Tensor.float, pair) for pair in pieces):
        total += torch.stack([(x * y).sum(), x.square().sum(), y.square().sum()])
    return total


def _place(dot: float, low: float, bf16: float) -> tuple[float, float]:
    """Return where a gradient lies beside that in BF16, as shares of its norm.

    The first value is the part along the gradient in BF16, the second the norm of the part across.
    """
    along = dot / bf16
    return along, math.sqrt(max(low / bf16 - along**2, 0.0))
