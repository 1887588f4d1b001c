"""Plain transformers, to hold the fast path against: eager attention, one document at a time, nothing of ours in between.

What each token has to predict, at which position it stands and where documents end is made here from a pack's tokens, lengths
and masks. So a batch that was put together wrongly differs from it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

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
from pretrain.model.routing import Routing
from pretrain.precision.grouped import stacked_experts
from pretrain.settings.recipe import LossSettings

# Rounding may send a token to an expert whose logit is this far below those of the chosen ones, in
# standard deviations of a token's logits. In most small healthy models it was 0.15 at most.
NEAR = 0.25


def wrong_batches(
    microbatches: Sequence[Microbatch], packs: Iterable[Pack], *, mask_boundaries: bool
) -> Iterator[str]:
    """Yields how microbatches differ from what the packs say whose tokens they hold. Nothing is to be learnt from a row that is
    none of `packs`, or is one for a second time.

    With `mask_boundaries` the last token of a document predicts nothing, and else the next one's first, where there is one."""
    packs_by_tokens: dict[bytes, list[Pack]] = defaultdict(list)
    for pack in packs:
        packs_by_tokens[pack.input_ids.astype(np.int64).tobytes()].append(pack)
    for number, batch in enumerate(microbatches):
        size, length = batch.input_ids.shape[1], batch.max_seqlen
        expected = {
            "labels": torch.full_like(batch.labels, IGNORE),
            "position_ids": batch.position_ids.clone(),
        }
        offsets = {0, size, *range(0, size, length)}  # a pack's padding is an attention of its own
        for begin, tokens in zip(
            range(0, size, length), batch.input_ids[0].split(length), strict=True
        ):
            if not (alike := packs_by_tokens[tokens.numpy().tobytes()]):
                continue
            pack = alike.pop(0)
            ends = np.cumsum(pack.lengths).tolist()
            labels = tokens[: ends[-1]].roll(-1)
            if pack.trained is not None:  # a token that is not to be learnt is nobody's target
                labels[:-1][torch.from_numpy(~pack.trained[1 : len(labels)])] = IGNORE
            labels[[end - 1 for end in (ends if mask_boundaries else ends[-1:])]] = IGNORE
            positions = torch.cat([torch.arange(each) for each in pack.lengths.tolist()])
            positions[: ends[0]] += pack.first_position
            for name, values in (("labels", labels), ("position_ids", positions)):
                expected[name][0, begin : begin + ends[-1]] = values
            offsets |= {begin + end for end in ends}
        wrong = [
            name
            for name, values in expected.items()
            if not torch.equal(getattr(batch, name), values)
        ]
        wrong += [] if set(batch.cu_seqlens.tolist()) == offsets else ["cu_seqlens"]
        if wrong:
            yield f"batch: {', '.join(wrong)} of microbatch {number} are not those of the packs of step 0"


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
        # one by one: gathered shards are gone before the next
        for name, tensor in named_tensors(plain).items():
            tensor.copy_(whole(of_run[name]))
            tensor.requires_grad_(of_run[name].requires_grad)
    for layer in decoder_layers(plain).values():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    routers = Routing.of(plain)
    for (_, experts), router in zip(
        stacked_experts(plain),
        routers.routers if routers else (),
        strict=False,
    ):
        experts.register_forward_pre_hook(partial(_as_chosen_there, router))
    return plain.eval()


def _as_chosen_there(
    router: nn.Module, experts: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...] | None:
    """Send tokens to the experts that the compared model chose, where rounding explains the choice.

    An expert gets the weight of the one whose place it takes, times the ratio of the router's
    scores. Weights that are shares keep their sum. All other tokens stay with the choice of this
    `router`, so that their gradients differ. Returns None if no choices were recorded.
    """
    (hidden, chosen, weights), there = inputs, getattr(experts, "chosen_there", None)
    if there is None or there.shape != chosen.shape:
        return None
    logits, is_kept = router.router_logits.float(), there[:, :, None] == chosen[:, None]
    least, least_there = (logits.gather(1, choices).amin(1) for choices in (chosen, there))
    is_near = least - least_there <= NEAR * logits.std(1).mean()
    # Logits do not explain the choice of a router that adds a bias to them or chooses among groups.
    is_near |= (least < logits.topk(chosen.shape[1]).values[:, -1]).any()
    moved = (is_near & ~is_kept.any(2).all(1)).nonzero()[:, 0]
    scores = min(  # a token's weights are one multiple of its scores
        (torch.softmax(logits, dim=-1), torch.sigmoid(logits)),
        key=lambda p: (weights / p.gather(1, chosen)).log().var(1, correction=0).sum().item(),
    )[moved]
    kept, before = is_kept[moved], weights[moved].float()
    dropped = ~kept.any(1)
    ratio = before * dropped / (scores.gather(1, chosen[moved]) * dropped).sum(1, keepdim=True)
    moved_weights = ratio.sum(1, keepdim=True) * scores.gather(1, there[moved])
    after = torch.where(kept.any(2), (kept * before[:, None]).sum(2), moved_weights)
    totals = weights.float().sum(1)
    if (totals - totals[0]).abs().max() < 0.02 * totals[0]:
        after = after * (before.sum(1) / after.sum(1))[:, None]
    return (
        hidden,
        chosen.index_copy(0, moved, there[moved]),
        weights.index_copy(0, moved, after.to(weights.dtype)),
    )


class Document(NamedTuple):
    """Tokens int64 [n] that see each other alone, with what each is to predict (IGNORE: nothing). `part`: where they stand in
    their microbatch. `chosen`: of a mixture, by layer, the experts that they went to there, int64 [n, choices]."""

    tokens: Tensor
    labels: Tensor
    part: slice = slice(None)
    chosen: Sequence[Tensor] = ()


def reference_pass(
    plain: PreTrainedModel,
    microbatches: Iterable[Sequence[Document]],
    loss: LossSettings,
    sharper: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward and backward of each document of the `microbatches` by itself.

    Return the losses of all tokens that have a label (nats, FP32), and the gradient of their sum by
    parameter name. A loss is the cross-entropy, plus the penalty that `loss` asks for with a weight
    of 1.0 (0.0 if that is its weight), plus the loss that balances the experts of the document's
    microbatch if the model's configuration asks for it. The head multiplies its input by `sharper`.

    Gradients add up in FP32 whatever the parameters are: what BF16 loses in a document is to be seen, not what a sum of many
    loses.
    """
    trained = {
        name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad
    }
    gradients = {
        name: torch.zeros_like(parameter, dtype=torch.float32)
        for name, parameter in trained.items()
    }
    losses = []
    for document, chosen in _with_choices(plain, microbatches):
        output, has_label = _output_of(plain, document, sharper), document.labels != IGNORE
        labels, logits = document.labels[has_label].to(plain.device), output.logits.float()
        token_losses = F.cross_entropy(logits, labels, reduction="none")
        if loss.penalty_weight:  # from its definition, not by the formulas of its gradient
            log_p = torch.log_softmax(logits, dim=-1)
            entropy, top = -(log_p.exp() * log_p).sum(dim=-1), log_p.exp().amax(dim=-1)
            token_losses = token_losses + (entropy if loss.penalty == "neg_entropy" else 1 - top)
        # equations 4 to 6 of the Switch Transformer (arXiv:2101.03961), this document's part
        if chosen is not None:
            p = torch.cat([layer[has_label].float().softmax(-1) for layer in output.router_logits])
            token_losses = token_losses + plain.router_aux_loss_coef * p.shape[1] * (
                p * chosen
            ).sum() / len(p)
        token_losses.sum().backward()
        losses.append(token_losses.detach())
        for name, parameter in trained.items():
            if parameter.grad is not None:  # None of an expert that no token has chosen
                gradients[name] += parameter.grad
            parameter.grad = None
    return torch.cat(losses), gradients


def _output_of(plain: PreTrainedModel, document: Document, sharper: float = 1.0) -> Any:
    """What `plain` computes of a document; logits [tokens, vocabulary] of labelled tokens only."""
    ids, has_label = document.tokens.to(plain.device)[None], document.labels != IGNORE
    for (_, experts), chosen in zip(stacked_experts(plain), document.chosen, strict=False):
        experts.chosen_there = chosen
    head = plain.get_output_embeddings()
    with head.register_forward_pre_hook(lambda head, inputs: sharper * inputs[0][0, has_label]):
        return plain(
            input_ids=ids,
            position_ids=torch.arange(ids.shape[1], device=plain.device)[None],
            use_cache=False,
        )


def _with_choices(
    plain: PreTrainedModel, microbatches: Iterable[Sequence[Document]]
) -> Iterator[tuple[Document, Tensor | None]]:
    """Yields each document, and where experts are to be balanced how often each of them is chosen by a token that has a label, of
    the document's microbatch, in a layer: a share of these tokens and layers, FP32 [experts]."""
    for documents in microbatches:
        chosen = None
        if getattr(plain.config, "output_router_logits", None):
            with torch.no_grad():
                outputs = [
                    (each.labels != IGNORE, _output_of(plain, each).router_logits)
                    for each in documents
                ]
            logits = torch.cat(
                [of_layer[labelled] for labelled, layers in outputs for of_layer in layers]
            ).float()
            first = logits.topk(plain.num_experts_per_tok).indices
            chosen = F.one_hot(first, logits.shape[1]).sum(1).float().mean(0)
        yield from ((document, chosen) for document in documents)


def whole(tensor: Tensor) -> Tensor:
    """`tensor` with all its shards, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
