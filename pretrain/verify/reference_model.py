"""Plain transformers, to hold the fast path against: eager attention, one document at a time, nothing of ours in between.

What a document is, which tokens it has to predict and at which positions they stand is made here from tokens, lengths and masks.
So a batch that was put together wrongly differs from it, as a model that computes something else does.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from packing.arrow import IGNORE, Pack
from packing.batch import Microbatch
from pretrain.model.huggingface import decoder_layers, named_tensors
from pretrain.settings.recipe import LossSettings

RECOMPUTED_FROM = 1024  # tokens of a document: eager attention keeps heads x length^2 scores a layer, several times over


@dataclass(frozen=True)
class Pass:
    """What a forward and backward gave: the loss, summed over its tokens and divided by the step's (nats), and its gradients by
    parameter name, in whatever dtype and sharding they came; None where nothing reached the parameter. `token_losses`: FP32, of
    the tokens that have a label, where they are known."""

    loss: float
    gradients: Mapping[str, Tensor | None]
    token_losses: Tensor | None = None


@dataclass(frozen=True)
class Document:
    """Tokens [n] that see each other alone, with what each is to predict (IGNORE: nothing); from `begin` in a microbatch."""

    tokens: np.ndarray
    targets: np.ndarray
    first_position: int
    begin: int

    @property
    def end(self) -> int:
        return self.begin + len(self.tokens)

    @property
    def valid_tokens(self) -> int:
        return int((self.targets != IGNORE).sum())


def documents_of(pack: Pack, *, mask_boundaries: bool, begin: int = 0) -> list[Document]:
    """The documents of a pack that stands in a microbatch at `begin`; the padding at its end is none.

    The last token of a document predicts nothing with `mask_boundaries`, and else the next one's first, if the pack has one.
    """
    documents, at = [], 0
    real = int(pack.lengths.sum())
    for number, length in enumerate(int(each) for each in pack.lengths):
        targets = np.full(length, IGNORE, dtype=np.int64)
        targets[:-1] = pack.input_ids[at + 1 : at + length]
        if not mask_boundaries and at + length < real:
            targets[-1] = pack.input_ids[at + length]
        for place in range(length if pack.trained is not None else 0):  # a token that is not to be learnt is nobody's target
            if at + place + 1 < real and not pack.trained[at + place + 1]:
                targets[place] = IGNORE
        tokens = pack.input_ids[at : at + length].astype(np.int64)
        documents.append(Document(tokens, targets, pack.first_position if number == 0 else 0, begin + at))
        at += length
    return documents


def valid_tokens_of(pack: Pack, *, mask_boundaries: bool) -> int:
    """How many tokens of a pack have something to predict."""
    return sum(document.valid_tokens for document in documents_of(pack, mask_boundaries=mask_boundaries))


def documents_in(microbatches: Sequence[Microbatch], packs: Iterable[Pack], *, mask_boundaries: bool) -> list[list[Document]]:
    """Returns, for each microbatch, the documents of the packs whose tokens it holds. A row that is none of `packs`, or is one
    for a second time, has none."""
    known: dict[bytes, list[Pack]] = defaultdict(list)
    for pack in packs:
        known[pack.input_ids.astype(np.int64).tobytes()].append(pack)
    found = []
    for batch in microbatches:
        length, documents = batch.max_seqlen, []
        for begin in range(0, batch.input_ids.shape[1], length):
            alike = known[batch.input_ids[0, begin : begin + length].contiguous().numpy().tobytes()]
            if alike:
                documents += documents_of(alike.pop(0), mask_boundaries=mask_boundaries, begin=begin)
        found.append(documents)
    return found


def differences(batch: Microbatch, documents: Sequence[Document]) -> list[str]:
    """Says how a microbatch differs from the documents that it should hold; empty where it does not."""
    size = batch.input_ids.shape[1]
    expected = {"input_ids": batch.input_ids[0].numpy().copy(), "labels": np.full(size, IGNORE)}
    expected["position_ids"] = batch.position_ids[0].numpy().copy()
    ends = {0, size, *range(0, size, batch.max_seqlen)}  # a pack's padding is an attention of its own
    for each in documents:
        span = slice(each.begin, each.end)
        expected["input_ids"][span], expected["labels"][span] = each.tokens, each.targets
        expected["position_ids"][span] = each.first_position + np.arange(len(each.tokens))
        ends |= {each.begin, each.end}
    wrong = [name for name, values in expected.items() if not np.array_equal(getattr(batch, name)[0].numpy(), values)]
    return wrong + ([] if set(batch.cu_seqlens.tolist()) == ends else ["cu_seqlens"])


def reference_model(hf: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A new model of the class and configuration of `hf`, in evaluation mode, with its weights as they are stored, in FP32.
    Attention and the experts of a mixture are plain too, one matrix after the other.

    Layers are recomputed in backward where a document is long. The same operations run on the same values again, so nothing else
    changes. Draws random numbers. Collective where `hf` is sharded.
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
        layer.forward = partial(_recomputed_where_long, layer.forward)
    return plain.eval()


def _recomputed_where_long(forward: nn.Module, hidden: Tensor, *args: object, **kwargs: object) -> object:
    if hidden.shape[1] < RECOMPUTED_FROM:
        return forward(hidden, *args, **kwargs)
    return checkpoint(forward, hidden, *args, use_reentrant=False, **kwargs)


def in_bf16(plain: PreTrainedModel) -> PreTrainedModel:
    """`plain` with its parameters in BF16 and without gradients; in place. Rotary frequencies are buffers and stay in FP32."""
    for parameter in plain.parameters():
        parameter.grad, parameter.data = None, parameter.data.to(torch.bfloat16)
    return plain


def release(plain: PreTrainedModel) -> None:
    """Give back the memory of its parameters: modules whose forward was replaced are cycles, which wait for the collector."""
    for parameter in plain.parameters():
        parameter.grad, parameter.data = None, parameter.data.new_empty(0)


def reference_pass(
    plain: PreTrainedModel, documents: Iterable[Document], valid_tokens: int, loss: LossSettings | None = None
) -> Pass:
    """Forward and backward of each document alone. The sum of losses, with the penalty that `loss` asks for, is divided by
    `valid_tokens`, of a whole step if need be.

    Gradients add up in FP32 whatever the parameters are: what BF16 loses in a document is to be seen, not what a sum of many
    loses.
    """
    device, losses = next(plain.parameters()).device, []
    trained = {name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad}
    sums: dict[str, Tensor] = {}
    hooks = []
    for name, parameter in trained.items():
        if parameter.dtype != torch.float32:
            hooks.append(parameter.register_post_accumulate_grad_hook(partial(_add_up, sums, name)))
    for document in documents:
        if not document.valid_tokens:  # a document of one token
            continue
        ids, labels = (torch.from_numpy(each).to(device) for each in (document.tokens, document.targets))
        positions = torch.arange(document.first_position, document.first_position + len(ids), device=device)
        logits = plain(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0].float()
        token_losses = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
        if loss and loss.penalty:
            token_losses = token_losses + loss.penalty_weight * _penalties(logits, loss).where(labels != IGNORE, 0.0)
        (token_losses.sum() / valid_tokens).backward()
        losses.append(token_losses.detach()[labels != IGNORE])
    for hook in hooks:
        hook.remove()
    token_losses = torch.cat(losses) if losses else torch.zeros(0, device=device)
    gradients = {name: sums.get(name, p.grad) for name, p in trained.items()}
    gradients = {name: torch.zeros_like(trained[name]) if g is None else g for name, g in gradients.items()}
    return Pass(token_losses.double().sum().item() / valid_tokens, gradients, token_losses)


def _penalties(logits: Tensor, loss: LossSettings) -> Tensor:
    """Computes penalties by the words of the recipe, not by the formulas that training takes its gradient from."""
    p = torch.softmax(logits, dim=-1)
    if loss.penalty == "neg_entropy":
        return torch.distributions.Categorical(logits=logits).entropy()
    if loss.penalty == "top_k_mass":
        return 1 - p.sort(dim=-1, descending=True).values[:, : loss.top_k].sum(dim=-1)
    largest = p.max(dim=-1).values
    return -largest if loss.penalty == "neg_max_prob" else 1 - largest


def _add_up(sums: dict[str, Tensor], name: str, parameter: nn.Parameter) -> None:
    if name in sums:
        sums[name] += parameter.grad
    else:
        sums[name] = parameter.grad.float()
    parameter.grad = None


def whole(tensor: Tensor) -> Tensor:
    """`tensor` with all its shards, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
