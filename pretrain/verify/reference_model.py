"""Plain transformers, to hold the fast path against: eager attention, one document at a time, nothing of ours in between."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from packing.batch import IGNORE, Microbatch
from pretrain.model.huggingface import decoder_layers, named_tensors


@dataclass(frozen=True)
class Pass:
    """What a forward and backward gave: the loss (nats per valid token) and its gradients by parameter name, in whatever dtype
    and sharding they came; None where nothing reached the parameter."""

    loss: float
    gradients: Mapping[str, Tensor | None]


def reference_model(hf: PreTrainedModel, device: torch.device, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A new model of the class and configuration of `hf`, in evaluation mode, with its weights as they are stored, in `dtype`.

    Layers are recomputed in backward: eager attention keeps heads x length^2 scores a layer, several times over. The same
    operations run on the same values again, so nothing else changes. Draws random numbers. Collective where `hf` is sharded.
    """
    with device:
        plain = type(hf)._from_config(copy.deepcopy(hf.config), dtype=torch.float32, attn_implementation="eager")
    of_run = named_tensors(hf)
    with torch.no_grad():
        for name, tensor in named_tensors(plain).items():  # one by one: gathered shards are gone before the next
            tensor.copy_(whole(of_run[name]))
            tensor.requires_grad_(of_run[name].requires_grad)
    for parameter in plain.parameters():  # not plain.to(): rotary frequencies are buffers and stay in FP32
        parameter.data = parameter.data.to(dtype)
    for layer in decoder_layers(plain).values():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return plain.eval()


def reference_pass(plain: PreTrainedModel, microbatches: Iterable[Microbatch], valid_tokens: int, device: torch.device) -> Pass:
    """Forward and backward of each document alone. The sum of losses is divided by `valid_tokens`, of a whole step if need be.

    A document is what the offsets of a microbatch say, at the positions it has there: one that was cut may go on counting.
    """
    total = 0.0
    for batch in microbatches:
        for begin, end in itertools.pairwise(batch.cu_seqlens.unique().tolist()):
            labels = batch.labels[0, begin:end]
            if (labels == IGNORE).all():  # padding, or a document of one token
                continue
            ids, positions = (tensor[:, begin:end].to(device) for tensor in (batch.input_ids, batch.position_ids))
            logits = plain(input_ids=ids, position_ids=positions, use_cache=False).logits[0].float()
            loss = F.cross_entropy(logits, labels.to(device), ignore_index=IGNORE, reduction="sum") / valid_tokens
            loss.backward()
            total += loss.item()
    trained = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    return Pass(total, {name: p.grad if p.grad is not None else torch.zeros_like(p) for name, p in trained.items()})


def whole(tensor: Tensor) -> Tensor:
    """`tensor` with all its shards, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
