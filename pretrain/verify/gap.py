"""What low precision costs: a step's first microbatch in BF16 too, its loss and gradient beside those in low precision.

docs/verification.md says what is measured. The pass in BF16 comes first and leaves nothing behind, so the run's numbers are those
of a run without a meter. Each process compares its own first microbatch, before gradients are exchanged; or, where FSDP2 has
reduced them, its shards of those of all. Dot products and losses add up over processes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from foundation.overrides import overridden
from packing.arrow import IGNORE
from packing.batch import StepBatches
from pretrain.metrics.recorder import layer_of
from pretrain.model.experts import recording_choices
from pretrain.model.gradients import gradient_of, local_part
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.optimizer.adamw import ExactAdamW, clear_gradients

PIECE = 2**24  # values of a gradient that are compared at once, in FP32


class GapMeter:
    """One run's. At a step that is due: `look`, then `beside` around the step's own first microbatch, then `figures`."""

    def __init__(
        self, packed: PackedLanguageModel, optimizer: ExactAdamW, accelerator: Accelerator
    ) -> None:
        self._packed, self._optimizer, self._accelerator = packed, optimizer, accelerator
        self._matrices = {
            name: each.dim() > 1
            for name, each in packed.hf.named_parameters()
            if each.requires_grad
        }
        self._layers = tuple(decoder_layers(packed.hf))
        # Of each matrix at the last look, where its gradient lies beside the one in BF16, see `_place`. Rounding takes it some
        # way off, in a deep model in FP4 as far as the gradient is long; much the same at each look, until something breaks.
        self.places: dict[str, tuple[float, float]] = {}

    def look(self, batches: StepBatches) -> None:
        """Forward and backward of the first microbatch in BF16. Random numbers are left for the caller to seed again."""
        self._in_bf16: list[Tensor | None] = []
        device = self._accelerator.device
        # by parameter, see `_products`
        self._sums = torch.zeros(len(self._matrices), 3, dtype=torch.float64, device=device)
        # in low precision, in BF16; and the labels they are of
        self._losses = torch.zeros(3, dtype=torch.float64, device=device)
        # of experts: those that BF16 has not made, and all
        self._choices = torch.zeros(2, dtype=torch.float64, device=device)
        self._chosen: list[list[Tensor]] = []  # in BF16, by layer
        if not batches.microbatches:
            return
        inputs, packed = inputs_of(batches.microbatches[0], device), self._packed
        more_come = packed.sharding and len(batches.microbatches) > 1
        with (
            overridden(packed.context, quantizing=False),
            packed.sharding.accumulating() if more_come else nullcontext(),
        ):
            with recording_choices(packed) as self._chosen:
                loss = packed(**inputs)
            self._accelerator.backward(loss * (1 / max(batches.valid_tokens, 1)))
        self._losses[1], self._losses[2] = loss.detach(), (inputs["labels"] != IGNORE).sum()
        # What lies in `.grad` is let go by clearing, and stays here; sums are cleared in place.
        self._in_bf16 = [
            None if each is None else each.clone() if is_sum else each
            for each, is_sum in self._gradients()
        ]
        clear_gradients(self._optimizer, packed)
        for product in packed.fused.products if packed.fused else ():
            product.plain.weight = None  # of the unquantized path, which training may never take

    @contextmanager
    def beside(self, watching: AbstractContextManager[Any] | None) -> Iterator[None]:
        """Put this around forward and backward of the step's own first microbatch, with `watching` inside of it."""

        def after_forward(module: nn.Module, inputs: Any, loss: Tensor) -> None:
            self._losses[0] = loss.detach()

        hook = self._packed.register_forward_hook(after_forward)
        try:
            with watching or nullcontext(), recording_choices(self._packed) as chosen:
                yield
        finally:
            hook.remove()
        # a layer that is recomputed chooses alike again
        for (low, *_), (in_bf16,) in zip(chosen, self._chosen, strict=False):
            others = (low[:, :, None] != in_bf16[:, None]).all(2)
            self._choices += torch.stack(
                [others.sum(), torch.full_like(others.sum(), others.numel())]
            )
        self._chosen = []
        for row, (gradient, _), in_bf16 in zip(
            self._sums, self._gradients(), self._in_bf16, strict=True
        ):
            if gradient is not None and in_bf16 is not None:
                row.copy_(_products(gradient, in_bf16))
        self._in_bf16 = []  # their memory

    def _gradients(self) -> Iterator[tuple[Tensor | None, bool]]:
        """Yields the gradient of each trained parameter, and whether it is its `main_grad`. Under FSDP2 the parameters are others
        where shards are gathered: then each rank's own sums; else this rank's shard of the gradient that was reduced."""
        for parameter in self._packed.hf.parameters():
            if parameter.requires_grad:
                gradient = gradient_of(parameter)
                yield (
                    (None, False)
                    if gradient is None
                    else (local_part(gradient), gradient is not parameter.grad)
                )

    def figures(self) -> dict[str, float]:
        """What the step adds to its line of metrics: `gap/loss` (nats per token, above 0 where low precision's loss is higher),
        of a mixture `gap/routing` (the share of tokens' choices of experts that BF16 has not made), the gradient's `gap/cosine`
        and `gap/norm_ratio` (low precision over BF16), and the same of each layer. Waits for the device. Collective."""
        all_sums = torch.cat([self._sums.flatten(), self._losses, self._choices])
        *products, low, bf16, labels, others, choices = self._accelerator.reduce(
            all_sums, reduction="sum"
        ).tolist()
        rows = dict(zip(self._matrices, np.array(products).reshape(-1, 3), strict=True))
        self.places = {
            name: _place(*rows[name])
            for name, is_matrix in self._matrices.items()
            if is_matrix and rows[name][2]
        }
        layers: dict[str, Any] = defaultdict(lambda: np.zeros(3))
        for name, row in rows.items():
            layers[layer_of(name, self._layers)] += row
        figures = {"gap/loss": (low - bf16) / max(labels, 1)} | (
            {"gap/routing": others / choices} if choices else {}
        )
        for suffix, sums in [
            ("", sum(rows.values())),
            *((f"/{layer}", sums) for layer, sums in layers.items()),
        ]:
            dot, of_low, of_bf16 = sums.tolist()
            if of_low and of_bf16:  # the layer has a gradient
                figures[f"gap/cosine{suffix}"] = dot / math.sqrt(of_low * of_bf16)
                figures[f"gap/norm_ratio{suffix}"] = math.sqrt(of_low / of_bf16)
        return figures


def _products(low: Tensor, in_bf16: Tensor) -> Tensor:
    """The dot product of two gradients, and of each with itself: FP64 [3], of sums in FP32 over pieces."""
    total = torch.zeros(3, dtype=torch.float64, device=low.device)
    for x, y in zip(low.reshape(-1).split(PIECE), in_bf16.reshape(-1).split(PIECE), strict=True):
        x, y = x.float(), y.float()
        total += torch.stack([(x * y).sum(), x.square().sum(), y.square().sum()])
    return total


def _place(dot: float, low: float, bf16: float) -> tuple[float, float]:
    """Where a gradient lies beside the one in BF16: its part along that one, and the norm of its part across, both as shares of
    that one's norm."""
    along = dot / bf16
    return along, math.sqrt(max(low / bf16 - along**2, 0.0))
