"""Define the task of a way (`Task`), and the trainer that a way builds for the task (`Way`).

All ways have the initial weights and the batches of the launcher, the same kernel for attention
over documents, and torch's AdamW with the settings of the recipe. So they differ only in the
computation of layers, GEMMs and loss.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from packing.batch import BatchStream, Microbatch
from packing.store import open_packs
from packing.stream import order_of
from pretrain.model import attention
from pretrain.model import huggingface as model
from pretrain.model.configuration import load_config
from pretrain.model.packed import inputs_of
from pretrain.settings.recipe import Recipe


@dataclass(frozen=True)
class Task:
    """A model to train.

    `weights` is "fp32" (with BF16 autocast), "bf16" (BF16 parameters) or "bf16_exact" (BF16
    parameters and an optimizer that keeps the low 16 bits of FP32 weights).
    """

    recipe: Recipe
    device: torch.device
    weights: str

    @cached_property
    def config(self) -> PretrainedConfig:
        return load_config(self.recipe.model)

    @property
    def attention(self) -> str:
        """Return the attention: FlashAttention-2 on a GPU, and SDPA with a mask on a CPU."""
        return "packed_varlen" if self.device.type == "cuda" else "packed_sdpa"

    def hugging_face_model(self) -> PreTrainedModel:
        """Return the model with the launcher's initial weights, rounded from FP32 to `weights`."""
        dtype = torch.float32 if self.weights == "fp32" else torch.bfloat16
        hf = model.build(
            self.recipe.model,
            self.config,
            weights=dtype,
            seed=self.recipe.seed,
            device=self.device,
            backend=self.attention,
        )
        return hf.train()

    def adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """Return torch's AdamW with the settings of the recipe, fused on a GPU.

        Matrices and embeddings decay, as in the launcher.
        """
        settings = self.recipe.optimizer
        matrices: list[nn.Parameter] = []
        vectors: list[nn.Parameter] = []
        for parameter in parameters:
            (matrices if parameter.ndim > 1 else vectors).append(parameter)
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        options = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
        return torch.optim.AdamW(groups, **options, fused=self.device.type == "cuda")

    def autocast(self) -> AbstractContextManager[Any]:
        """Return BF16 autocast for FP32 weights on a GPU. BF16 is slow on a CPU."""
        if self.weights == "fp32" and self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()

    def batches(self, microbatch: int) -> BatchStream:
        """Return the batches of the launcher, with `microbatch` packs at a time."""
        data = self.recipe.data
        packs = open_packs(data, "train")
        return BatchStream(
            packs,
            order_of(packs, self.recipe.seed),
            self.recipe.batch.tokens // data.length,
            microbatch=microbatch,
            rank=0,
            world_size=1,
            mask_boundaries=data.mask_boundaries,
            pin_memory=self.device.type == "cuda",
            vocab_size=self.config.vocab_size,
        )

    def inputs(self, batch: Microbatch) -> dict[str, Any]:
        """Return the arguments of the model's forward: ids, positions, labels and documents."""
        inputs = inputs_of(batch, self.device)
        inputs["documents"] = attention.documents_for(
            self.attention, inputs["cu_seqlens"], batch.max_seqlen, batch.input_ids.shape[1]
        )
        return inputs


@dataclass
class Way:
    """A way that is ready to train.

    Attributes:
        model: The model. All of its parameters should be trained.
        optimizer: The optimizer with the parameters that will be trained.
        loss: Returns the summed loss of a microbatch, divided by the number of labels of the step.
        backward: Computes the gradients of a loss.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Microbatch, int], Tensor]
    backward: Callable[[Tensor], None] = Tensor.backward


class Builder(Protocol):
    """The functions that every module with a way defines."""

    def obstacle(self, device: torch.device) -> str | None:
        """Return the reason why this way cannot run on `device`, or None if it can."""
        ...

    def build(self, task: Task) -> Way:
        """Build the model and the optimizer."""
        ...


def hugging_face_loss(
    task: Task, forward: Callable[..., Any]
) -> Callable[[Microbatch, int], Tensor]:
    """Return the loss function of transformers: cross-entropy of all FP32 logits."""

    def loss(batch: Microbatch, step_tokens: int) -> Tensor:
        inputs = task.inputs(batch)
        # The labels are already shifted. Boundaries of documents are masked.
        labels = inputs.pop("labels")
        with task.autocast():
            output = forward(
                **inputs,
                labels=labels,
                shift_labels=labels,
                num_items_in_batch=step_tokens,
                use_cache=False,
            )
        return output.loss

    return loss


def missing(device: torch.device, *packages: str, needs_gpu: bool) -> str | None:
    """Return a message if a GPU or a package is missing, or None."""
    if needs_gpu and device.type != "cuda":
        return f"needs a CUDA device, this is {device.type}"
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"needs the package {' and '.join(absent)}, which is not installed" if absent else None
