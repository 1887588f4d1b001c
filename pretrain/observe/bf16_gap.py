"""Measure how low precision changes the loss and the gradient of a step's first microbatch.

The microbatch is first computed in BF16, and then in low precision as part of the step. The two
losses and the two gradients are compared. Their difference is called the gap. The BF16 pass changes
no state of the run, so training has the same results, bit for bit, with and without the
measurement. Each process compares the gradient of its own first microbatch before gradients are
exchanged. If FSDP2 has already reduced a gradient, each process compares its shard of the reduced
gradient instead. Dot products and losses are summed over processes.
docs/developers/verification.md defines the figures.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from foundation.overrides import overridden
from packing.arrow import IGNORE
from packing.batch import StepBatches
from pretrain.checkpoint.state import seed_step
from pretrain.model.experts import recording_choices
from pretrain.model.gradients import gradients_of, local_part
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.observe.observers import Observer, Step
from pretrain.optimizer.adamw import ExactAdamW, clear_gradients
from pretrain.settings.recipe import Recipe

# The number of gradient values that are copied to FP32 and compared at once.
PIECE = 2**24


class GapMeter(Observer):
    """Compare the first microbatch's loss and gradient with BF16 in every quantized step.

    No rank may exchange gradients in the first microbatch.
    """

    def __init__(
        self,
        packed: PackedLanguageModel,
        optimizer: ExactAdamW,
        recipe: Recipe,
        accelerator: Accelerator,
    ) -> None:
        self._packed = packed
        self._optimizer = optimizer
        self._recipe = recipe
        self._accelerator = accelerator
        # Names of the trained parameters.
        self._names = [
            name for name, parameter in packed.hf.named_parameters() if parameter.requires_grad
        ]
        self._layers = tuple(decoder_layers(packed.hf))
        self._figures: dict[str, Any] = {}

    def due(self, step: Step) -> bool:
        """Return True unless the step computes without quantization."""
        return step.is_quantized

    @contextmanager
    def passes(self, step: Step, batches: StepBatches, place: int) -> Iterator[None]:
        """Compute the first microbatch in BF16 before `yield`.

        After `yield`, compute the figures from the results of both precisions.
        """
        self._compute_in_bf16(batches)
        # Seed again, so that the step draws the same random numbers as without the BF16 pass.
        seed_step(self._recipe.seed, step.number - 1, self._accelerator.process_index)
        yield
        self._measure()

    @contextmanager
    def first_microbatch(self, step: Step) -> Iterator[None]:
        """Compare the first microbatch in low precision with the same microbatch in BF16.

        The caller's `with` statement runs the forward and backward in low precision. The losses,
        gradients and routing of both precisions are compared.
        """

        def after_forward(module: nn.Module, inputs: Any, loss: Tensor) -> None:
            self._losses[0] = loss.detach()

        with (
            self._packed.register_forward_hook(after_forward),
            recording_choices(self._packed) as choices,
        ):
            yield
        # Use the choices of each layer's first forward. A recomputed layer repeats these choices.
        for (low, *_), (in_bf16,) in zip(choices, self._chosen_in_bf16, strict=False):
            differs = (low[:, :, None] != in_bf16[:, None]).all(2)
            self._choices[0] += differs.sum()
            self._choices[1] += differs.numel()
        # Map the names of parameters to the results of `_dot_and_norms`.
        self._dots_and_norms = {
            name: _dot_and_norms(local_part(gradient), self._in_bf16[name])
            for name, gradient in gradients_of(self._packed.hf).items()
            if name in self._in_bf16
        }
        # Free the memory of the BF16 gradients and of the experts that were chosen in BF16.
        self._in_bf16.clear()
        self._chosen_in_bf16.clear()

    def metrics(self, step: Step) -> dict[str, Any]:
        """Return the step's figures.

        gap/loss: the loss in low precision minus the loss in BF16, in nats per token.
        gap/cosine, gap/norm_ratio: the cosine of the gradients in low precision and BF16, and the
            ratio of their norms. Keys that end in /LAYER have the figures of one layer.
        gap/routing: in a mixture of experts, the share of the experts chosen in low precision that
            BF16 did not choose for the same token.
        """
        return self._figures

    def _compute_in_bf16(self, batches: StepBatches) -> None:
        """Compute the loss and gradients of the first microbatch in BF16, and store them."""
        device = self._accelerator.device
        # Three values: the summed loss in low precision, the summed loss in BF16, and the number of
        # labels.
        self._losses: Tensor = torch.zeros(3, dtype=torch.float64, device=device)
        # Two counts of expert choices in low precision: the choices that BF16 did not make for the
        # same token, and all choices.
        self._choices: Tensor = torch.zeros(2, dtype=torch.float64, device=device)
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
        # Map the names of parameters to their BF16 gradients. Under FSDP2, a gradient is this
        # process's sum over microbatches while parameters are gathered. Otherwise it is this
        # process's shard of the reduced gradient.
        self._in_bf16 = {
            name: local_part(gradient).clone() for name, gradient in gradients_of(packed.hf).items()
        }
        clear_gradients(self._optimizer, packed)
        for product in packed.fused.products if packed.fused else ():
            # Drop the unquantized weight that the BF16 pass has cached. The step must not use it.
            product.plain.forget()

    def _measure(self) -> None:
        """Compute the figures of the step, and wait for the device.

        All ranks must call this method.
        """
        # Use zeros for a parameter without a gradient.
        zeros = torch.zeros_like(self._losses)
        rows = [self._dots_and_norms.get(name, zeros) for name in self._names]
        *values, low, bf16, labels, differing, choices = self._accelerator.reduce(
            torch.cat([*rows, self._losses, self._choices]), reduction="sum"
        ).tolist()
        by_name = dict(zip(self._names, np.array(values).reshape(-1, 3), strict=True))
        layers: dict[str, Any] = defaultdict(lambda: np.zeros(3))
        for name, row in by_name.items():
            layers[_layer_of(name, self._layers)] += row
        self._figures = {"gap/loss": (low - bf16) / max(labels, 1)}
        self._figures |= {"gap/routing": differing / choices} if choices else {}
        self._figures |= _similarity("", sum(by_name.values()))
        for layer, sums in layers.items():
            self._figures |= _similarity(f"/{layer}", sums)


def _similarity(suffix: str, sums: Any) -> dict[str, float]:
    """Return the figures gap/cosine and gap/norm_ratio. Return {} if a gradient is zero.

    suffix: the end of the keys, for example "/model.layers.0".
    sums: the three values that `_dot_and_norms` returns, or their sums over several parameters.
    """
    dot, low_squared, bf16_squared = sums.tolist()
    if not (low_squared and bf16_squared):
        return {}
    return {
        f"gap/cosine{suffix}": dot / math.sqrt(low_squared * bf16_squared),
        f"gap/norm_ratio{suffix}": math.sqrt(low_squared / bf16_squared),
    }


def _dot_and_norms(low: Tensor, in_bf16: Tensor) -> Tensor:
    """Return the dot product of two gradients, and the squared norm of each gradient, FP64 [3].

    low: a gradient in low precision. Its squared norm is the second value.
    in_bf16: the BF16 gradient of the same parameter. Its squared norm is the third value.

    Pieces of PIECE values are summed in FP32.
    """
    total = torch.zeros(3, dtype=torch.float64, device=low.device)
    pieces = zip(low.reshape(-1).split(PIECE), in_bf16.reshape(-1).split(PIECE), strict=True)
    for x, y in (map(Tensor.float, pair) for pair in pieces):
        total += torch.stack([(x * y).sum(), x.square().sum(), y.square().sum()])
    return total


def _layer_of(name: str, layers: Collection[str]) -> str:
    """Return the layer in `layers` that contains the parameter `name`.

    If no layer contains the parameter, return the name of the module that owns the parameter.
    """
    module = name.rpartition(".")[0]
    return next((layer for layer in layers if name.startswith(f"{layer}.")), module)
