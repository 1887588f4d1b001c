"""What every way is given, and what it makes of it: a model, an optimizer, and the loss of a microbatch.

All start from the launcher's own draw of weights, read the launcher's batches, attend through the same variable-length kernel
and are updated by torch's AdamW with the recipe's settings. What is left to differ is what is compared: how the layers, their
products and the loss are computed.
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
from packing.order import order_of
from packing.store import open_packs
from pretrain.model import attention
from pretrain.model import huggingface as model
from pretrain.model.packed import inputs_of
from pretrain.settings.recipe import Recipe


@dataclass(frozen=True)
class Task:
    """One model to train. `weights`: "fp32", computing in BF16 under torch's autocast, or "bf16", parameters and all."""

    recipe: Recipe
    device: torch.device
    weights: str

    @cached_property
    def config(self) -> PretrainedConfig:
        return model.load_config(self.recipe.model)

    @property
    def attention(self) -> str:
        """torch's variable-length FlashAttention-2 on a GPU, which is what Hugging Face users get; a mask on a CPU."""
        return "packed_varlen" if self.device.type == "cuda" else "packed_sdpa"

    def hugging_face_model(self) -> PreTrainedModel:
        """The launcher's draw: drawn in FP32 from the recipe's seed, then rounded to the dtype of the weights."""
        dtype = torch.float32 if self.weights == "fp32" else torch.bfloat16
        settings, seed = self.recipe.model, self.recipe.seed
        hf = model.build(
            settings,
            self.config,
            weights=dtype,
            seed=seed,
            device=self.device,
            backend=self.attention,
        )
        return hf.train()

    def adamw(self, parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
        """torch's, fused where it can be, with the recipe's settings; matrices and embeddings decay, as in the launcher."""
        settings, every = self.recipe.optimizer, list(parameters)
        groups = [
            {"params": [p for p in every if p.ndim > 1], "weight_decay": settings.weight_decay},
            {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0},
        ]
        options = {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.eps}
        return torch.optim.AdamW(groups, **options, fused=self.device.type == "cuda")

    def autocast(self) -> AbstractContextManager[Any]:
        """BF16 for FP32 weights on a GPU; on a CPU, where BF16 is slow, the tiny model computes in FP32."""
        if self.weights == "fp32" and self.device.type == "cuda":
            return torch.autocast("cuda", torch.bfloat16)
        return nullcontext()

    def batches(self, microbatch: int, rank: int = 0, world_size: int = 1) -> BatchStream:
        """The launcher's own, `microbatch` packs at once."""
        data, packs = self.recipe.data, open_packs(self.recipe.data, "train")
        return BatchStream(
            packs,
            order_of(packs, self.recipe.batch.tokens // data.length, self.recipe.seed),
            microbatch=microbatch,
            rank=rank,
            world_size=world_size,
            mask_boundaries=data.mask_boundaries,
            pin_memory=self.device.type == "cuda",
            vocab_size=self.config.vocab_size,
        )

    def inputs(self, batch: Microbatch) -> dict[str, Any]:
        """What the Hugging Face model's forward takes: ids, positions, labels, and where documents begin and end."""
        inputs = inputs_of(batch, self.device)
        if self.attention == "packed_sdpa":
            inputs["document_mask"] = attention.document_mask(
                inputs["cu_seqlens"], batch.max_seqlen, batch.input_ids.shape[1]
            )
        return inputs


@dataclass
class Way:
    """A way, ready to train: `loss` gives a microbatch's share of the step's mean loss, its sum over the step's valid tokens.

    `model`: whose parameters are to be trained. `optimizer`: over those that will be.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[[Microbatch, int], Tensor]
    backward: Callable[[Tensor], None] = Tensor.backward


class Builder(Protocol):
    """What a module of this folder offers."""

    def obstacle(self, device: torch.device) -> str | None:
        """Why this way cannot run here; None where it can. Checked before anything is built."""
        ...

    def build(self, task: Task) -> Way: ...


def hugging_face_loss(
    task: Task, forward: Callable[..., Any]
) -> Callable[[Microbatch, int], Tensor]:
    """The loss as transformers computes it itself: all logits of the microbatch, in FP32, and torch's cross-entropy."""

    def loss(batch: Microbatch, step_tokens: int) -> Tensor:
        inputs = task.inputs(batch)
        labels = inputs.pop("labels")  # shifted already, with document boundaries masked
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
    """What of a GPU and of these packages is not here, in words; None where all of it is."""
    if needs_gpu and device.type != "cuda":
        return f"needs a CUDA device, this is {device.type}"
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    return f"needs the package {' and '.join(absent)}, which is not installed" if absent else None
