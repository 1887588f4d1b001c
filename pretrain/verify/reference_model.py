"""Plain transformers, to hold the fast path against: eager attention, one document at a time, nothing of ours in between.

What a document is, which tokens it has to predict and at which positions they stand is made here from tokens, lengths and masks.
So a batch that was put together wrongly differs from it, as a model that computes something else does.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from packing.arrow import IGNORE, Pack
from packing.batch import Microbatch
from pretrain.model.huggingface import decoder_layers, named_tensors
from pretrain.settings.recipe import LossSettings


@dataclass(frozen=True)
class Document:
    """Tokens int64 [n] that see each other alone, with what each is to predict (IGNORE: nothing); from `begin` in a
    microbatch."""

    tokens: Tensor
    targets: Tensor
    first_position: int
    begin: int

    @property
    def span(self) -> slice:
        return slice(self.begin, self.begin + len(self.tokens))

    @property
    def valid_tokens(self) -> int:
        return int((self.targets != IGNORE).sum())


def documents_of(pack: Pack, *, mask_boundaries: bool, begin: int = 0) -> list[Document]:
    """The documents of a pack that stands in a microbatch at `begin`; the padding at its end is none.

    The last token of a document predicts nothing with `mask_boundaries`, and else the next one's first, if the pack has one.
    """
    lengths = pack.lengths.tolist()
    tokens = torch.from_numpy(pack.input_ids[: sum(lengths)].astype(np.int64))
    targets = tokens.roll(-1)
    if pack.trained is not None:  # a token that is not to be learnt is nobody's target
        targets[:-1][torch.from_numpy(~pack.trained[1 : len(tokens)])] = IGNORE
    documents, first = [], 0
    for length in lengths:
        end = first + length
        if mask_boundaries or end == len(tokens):
            targets[end - 1] = IGNORE
        first_position = pack.first_position if first == 0 else 0
        documents.append(Document(tokens[first:end], targets[first:end], first_position, begin + first))
        first = end
    return documents


def documents_in(microbatches: Sequence[Microbatch], packs: Iterable[Pack], *, mask_boundaries: bool) -> list[list[Document]]:
    """Returns, for each microbatch, the documents of the packs whose tokens it holds. A row that is none of `packs`, or is one
    for a second time, has none."""
    packs_by_tokens: dict[bytes, list[Pack]] = defaultdict(list)
    for pack in packs:
        packs_by_tokens[pack.input_ids.astype(np.int64).tobytes()].append(pack)
    documents: list[list[Document]] = [[] for _ in microbatches]
    for batch, of_batch in zip(microbatches, documents, strict=True):
        for row, tokens in enumerate(batch.input_ids[0].split(batch.max_seqlen)):
            if alike := packs_by_tokens[tokens.numpy().tobytes()]:
                of_batch += documents_of(alike.pop(0), mask_boundaries=mask_boundaries, begin=row * batch.max_seqlen)
    return documents


def differences(batch: Microbatch, documents: Sequence[Document]) -> list[str]:
    """Says how a microbatch differs from the documents that it should hold; empty where it does not."""
    size = batch.input_ids.shape[1]
    ids, positions, labels = batch.input_ids.clone(), batch.position_ids.clone(), torch.full_like(batch.labels, IGNORE)
    ends = {0, size, *range(0, size, batch.max_seqlen)}  # a pack's padding is an attention of its own
    for each in documents:
        ids[0, each.span], labels[0, each.span] = each.tokens, each.targets
        positions[0, each.span] = each.first_position + torch.arange(len(each.tokens))
        ends |= {each.span.start, each.span.stop}
    expected = {"input_ids": ids, "labels": labels, "position_ids": positions}
    wrong = [name for name, values in expected.items() if not torch.equal(getattr(batch, name), values)]
    return wrong + ([] if set(batch.cu_seqlens.tolist()) == ends else ["cu_seqlens"])


def reference_model(hf: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A new model of the class and configuration of `hf`, in evaluation mode, with its weights as they are stored, in FP32.
    Attention and the experts of a mixture are plain too, one matrix after the other.

    Layers are recomputed in backward, since eager attention keeps heads x length^2 scores a layer. The same operations run on the
    same values again, so nothing else changes. Draws random numbers. Collective where `hf` is sharded.
    """
    plainly = {"attn_implementation": "eager", "experts_implementation": "eager"}
    with device:
        plain = type(hf)._from_config(copy.deepcopy(hf.config), dtype=torch.float32, **plainly)
    of_run = named_tensors(hf)
    with torch.no_grad():
        for name, tensor in named_tensors(plain).items():  # one by one: gathered shards are gone before the next
            tensor.copy_(whole(of_run[name]))
            tensor.requires_grad_(of_run[name].requires_grad)
    for layer in decoder_layers(plain).values():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return plain.eval()


def in_bf16(plain: PreTrainedModel) -> PreTrainedModel:
    """`plain` with its parameters in BF16; in place. Rotary frequencies are buffers and stay in FP32."""
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return plain


def reference_pass(
    plain: PreTrainedModel, documents: Iterable[Document], loss: LossSettings | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Forward and backward of each document alone: the losses of all tokens that have a label (nats, FP32), with the penalty that
    `loss` asks for, and the gradient of their sum, by parameter name.

    Gradients add up in FP32 whatever the parameters are: what BF16 loses in a document is to be seen, not what a sum of many
    loses.
    """
    trained = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    gradients = {name: torch.zeros_like(parameter, dtype=torch.float32) for name, parameter in trained.items()}
    device = plain.device
    losses = [torch.zeros(0, device=device)]
    for document in documents:
        if not document.valid_tokens:  # a document of one token
            continue
        ids, labels = document.tokens.to(device), document.targets.to(device)
        positions = torch.arange(document.first_position, document.first_position + len(ids), device=device)
        logits = plain(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0].float()
        token_losses = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        if loss and loss.penalty:
            token_losses = token_losses + loss.penalty_weight * _penalties(logits, loss)
        token_losses = token_losses[labels != IGNORE]
        token_losses.sum().backward()
        losses.append(token_losses.detach())
        for name, parameter in trained.items():
            if parameter.grad is not None:  # None of an expert that no token has chosen
                gradients[name] += parameter.grad
            parameter.grad = None
    return torch.cat(losses), gradients


def _penalties(logits: Tensor, loss: LossSettings) -> Tensor:
    """Computes penalties by the words of the recipe, not by the formulas that training takes its gradient from."""
    p = torch.softmax(logits, dim=-1)
    if loss.penalty == "neg_entropy":
        return torch.distributions.Categorical(logits=logits).entropy()
    return 1 - p.max(dim=-1).values


def whole(tensor: Tensor) -> Tensor:
    """`tensor` with all its shards, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
