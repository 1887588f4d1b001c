"""Plain transformers as the reference for parity, with eager attention and unpacked documents.

This module also computes labels, positions and document boundaries from the tokens, lengths and
masks of a pack. This code is independent of `packing.batch`, so that it finds mistakes in the
batches.
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
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from packing.arrow import IGNORE, Pack
from packing.batch import Microbatch
from pretrain.model.gradients import full_tensor
from pretrain.model.huggingface import named_tensors
from pretrain.model.routing import Routing
from pretrain.precision.grouped import stacked_experts
from pretrain.settings.recipe import LossSettings

# The compared model and the reference may choose different experts for a token. If two logits of
# the router differ by at most this number, the different choices are attributed to rounding. The
# two logits are the lowest logit among the experts that the reference has chosen, and the lowest
# logit among the experts that the compared model has chosen. The unit is the standard deviation of
# a token's logits, averaged over tokens. In most small correct models the difference is at most
# 0.15.
NEAR = 0.25
# Largest relative difference of the sums of two tokens' weights in a router that normalizes them.
# It allows for sums of rounded weights.
SAME_TOTAL = 0.02


def wrong_batches(
    microbatches: Sequence[Microbatch], packs: Iterable[Pack], *, mask_boundaries: bool
) -> Iterator[str]:
    """Yield an error message for each microbatch with wrong labels, positions or document ends.

    Each row of a microbatch is compared with the pack that has the same tokens. If a pack occurs in
    more rows than in `packs`, the additional rows must have no labels.

    Args:
        microbatches: Microbatches of one step.
        packs: Packs of this step.
        mask_boundaries: True if the last token of a document must have no label. False if its
            label must be the first token of the next document in the pack.
    """
    packs_by_tokens: dict[bytes, list[Pack]] = defaultdict(list)
    for pack in packs:
        packs_by_tokens[pack.input_ids.astype(np.int64).tobytes()].append(pack)
    for number, batch in enumerate(microbatches):
        size = batch.input_ids.shape[1]
        begins = range(0, size, batch.max_seqlen)
        labels = torch.full_like(batch.labels, IGNORE)
        position_ids = batch.position_ids.clone()
        # Include the ends of the packs, because attention treats the padding of a pack as a
        # document.
        offsets = {size, *begins}
        rows = batch.input_ids[0].split(batch.max_seqlen)
        for begin, tokens in zip(begins, rows, strict=True):
            same_packs = packs_by_tokens[tokens.numpy().tobytes()]
            if not same_packs:
                continue
            pack = same_packs.pop(0)
            ends = np.cumsum(pack.lengths).tolist()
            part = slice(begin, begin + ends[-1])
            labels[0, part] = _labels(pack, tokens, ends if mask_boundaries else ends[-1:])
            position_ids[0, part] = torch.cat([torch.arange(n) for n in pack.lengths.tolist()])
            offsets |= {begin + end for end in ends}
        wrong = []
        if not torch.equal(batch.labels, labels):
            wrong.append("labels")
        if not torch.equal(batch.position_ids, position_ids):
            wrong.append("position_ids")
        if {*batch.cu_seqlens.tolist()} != offsets:
            wrong.append("cu_seqlens")
        if wrong:
            yield (
                f"batch: {', '.join(wrong)} of microbatch {number} differ from the packs of step 0"
            )


def _labels(pack: Pack, tokens: Tensor, unlabelled_ends: Sequence[int]) -> Tensor:
    """Return the labels of all tokens in a pack's documents. Padding is not included.

    Args:
        pack: The pack.
        tokens: Tokens of the pack.
        unlabelled_ends: Ends of the documents whose last token has no label.
    """
    labels = tokens[: int(pack.lengths.sum())].roll(-1)
    if pack.trained is not None:
        # Tokens that the pack's mask excludes from the loss are not used as labels.
        labels[:-1][torch.from_numpy(~pack.trained[1 : len(labels)])] = IGNORE
    labels[[end - 1 for end in unlabelled_ends]] = IGNORE
    return labels


def reference_model(hf: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """Return a new causal language model in FP32 with the configuration and weights of `hf`.

    The model is in evaluation mode. Attention and experts use transformers' eager code. Stacked
    experts follow the choices of the compared model (`_follow_recorded_choices`). Draws random
    numbers. If `hf` is sharded, all ranks must call this function.
    """
    with device:
        plain = AutoModelForCausalLM.from_config(
            copy.deepcopy(hf.config),
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        )
    stored = named_tensors(hf)
    with torch.no_grad():
        # The tensors are gathered one after the other, so that each gathered tensor is freed before
        # the next tensor is gathered.
        for name, tensor in named_tensors(plain).items():
            tensor.copy_(full_tensor(stored[name]))
            tensor.requires_grad_(stored[name].requires_grad)
    routers = Routing(plain).routers
    mixtures = stacked_experts(plain, biased=True)
    # `strict` is False, because a model may have routers without stacked experts.
    for (_, experts), router in zip(mixtures, routers, strict=False):
        experts.register_forward_pre_hook(partial(_follow_recorded_choices, router))
    return plain.eval()


def _follow_recorded_choices(
    router: Any, experts: Any, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, ...] | None:
    """Use the experts that the compared model has chosen, if its choice differs only by rounding.

    This is a forward pre-hook of the reference's experts. If the compared model has chosen other
    experts for a token than `router`, and the logits are nearly equal (`NEAR`), the token is sent
    to the experts of the compared model. The weights of these experts are recomputed from the
    scores of `router`. If the router normalizes the weights, the sum of the weights does not
    change. All other tokens keep the choice of `router`. So if a router of the compared model is
    wrong, the gradients differ and the comparison finds the fault.

    Return the new inputs, or None if there are no recorded choices for these tokens.

    inputs: hidden states [tokens, hidden], chosen experts and their weights [tokens, choices].
    """
    hidden, chosen, weights = inputs
    recorded = getattr(experts, "recorded_choices", None)
    if recorded is None or recorded.shape != chosen.shape:
        return None
    logits = router.router_logits.float()
    least_chosen = logits.gather(1, chosen).amin(1)
    least_recorded = logits.gather(1, recorded).amin(1)
    is_near = least_chosen - least_recorded <= NEAR * logits.std(1).mean()
    # Some routers add a bias to the logits or first choose groups of experts. If the logits do not
    # explain the choice of the router, accept every choice of the compared model.
    least_of_largest = logits.topk(chosen.shape[1]).values[:, -1]
    is_near |= (least_chosen < least_of_largest).any()
    differs = (recorded.sort(1).values != chosen.sort(1).values).any(1)
    moved = (is_near & differs).nonzero()[:, 0]
    moved_to = recorded[moved]
    moved_weights = _weights_of(recorded, logits, chosen, weights)[moved]
    return (
        hidden,
        chosen.index_copy(0, moved, moved_to),
        weights.index_copy(0, moved, moved_weights.to(weights.dtype)),
    )


def _weights_of(recorded: Tensor, logits: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weights [tokens, choices] that a router would give to the `recorded` experts.

    `logits` [tokens, experts], `chosen` and `weights` are the results of the router. The weights of
    a token are its scores times a factor of the token.
    """
    scores = _scores_of(logits, chosen, weights)
    totals = weights.float().sum(1, keepdim=True)
    # A router that normalizes the weights gives other experts weights with the same sum. With any
    # other router, the factor stays the same.
    normalizes = (totals - totals[0]).abs().max() < SAME_TOTAL * totals[0]
    divided = recorded if normalizes else chosen
    factors = totals / scores.gather(1, divided).sum(1, keepdim=True)
    return factors * scores.gather(1, recorded)


def _scores_of(logits: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the softmax or the sigmoid of a router's logits, whichever fits its weights better.

    The arguments are as in `_weights_of`. The quotient of weights and scores is the factor of a
    token, so it is the same for all chosen experts if the scores are right. With one choice per
    token, both fit, and the result is the softmax. `_weights_of` is then inexact for a router that
    uses the sigmoid and does not normalize.
    """

    def variance(scores: Tensor) -> float:
        """Return the variance of the quotient's logarithm within tokens, summed over tokens."""
        return (weights / scores.gather(1, chosen)).log().var(1, correction=0).sum().item()

    return min(logits.softmax(-1), logits.sigmoid(), key=variance)


class Documents(NamedTuple):
    """Documents of one microbatch, without the rest of the microbatch.

    All documents have the same number of tokens n. Each document is a row, so its tokens attend
    only to tokens of this document.
    """

    # int64 [documents, n].
    tokens: Tensor
    # int64 [documents, n], with IGNORE for a token without a label.
    labels: Tensor
    # Indices of the tokens in the microbatch, int64 [documents, n].
    indices: Tensor
    # For each layer, the experts that the compared model has chosen for the tokens, int64
    # [documents * n, choices].
    choices: Sequence[Tensor] = ()


def reference_pass(
    plain: PreTrainedModel,
    microbatches: Iterable[Documents],
    loss: LossSettings,
    head_factor: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward and backward of the documents of each microbatch.

    The loss of a token is the sum of up to three terms:

    * the cross-entropy,
    * the penalty, with a weight of 1.0, if `loss.penalty_weight` is not 0.0,
    * the token's share of the router loss of its microbatch, if the model's configuration enables
      the router loss.

    The gradients of the microbatches are summed in FP32, even if the parameters are BF16. So this
    sum does not add to the measured errors of a BF16 model.

    Args:
        plain: Reference model.
        microbatches: Documents of each microbatch.
        loss: Settings of the loss.
        head_factor: Factor of the input of the LM head.

    Returns:
        FP32 [2, labels] in nats, and a dict that maps the name of each parameter to the gradient of
        the sum of the losses. The first row has the losses of all tokens with a label. The second
        row has their cross-entropies, which are the losses in an evaluation.
    """
    parameters = {
        name: parameter for name, parameter in plain.named_parameters() if parameter.requires_grad
    }
    gradients = {
        name: torch.zeros_like(parameter, dtype=torch.float32)
        for name, parameter in parameters.items()
    }
    losses = []
    for documents in microbatches:
        has_label = documents.labels != IGNORE
        output = _output_of(plain, documents, has_label, head_factor)
        labels = documents.labels[has_label].to(plain.device)
        logits = output.logits.float()
        token_losses, cross_entropies = losses_of(logits, labels, loss)
        if getattr(plain.config, "output_router_logits", None):
            is_counted = has_label.flatten()
            router_logits = torch.cat([layer[is_counted] for layer in output.router_logits])
            token_losses = token_losses + _router_loss(plain, router_logits)
        token_losses.sum().backward()
        losses.append(torch.stack([token_losses, cross_entropies]).detach())
        for name, parameter in parameters.items():
            # An expert that no token has chosen has no gradient.
            if parameter.grad is not None:
                gradients[name] += parameter.grad
            parameter.grad = None
    return torch.cat(losses, dim=1), gradients


def losses_of(logits: Tensor, labels: Tensor, loss: LossSettings) -> tuple[Tensor, Tensor]:
    """Return the loss of each token in training, and its cross-entropy. Both are FP32 [labels].

    logits: FP32 [labels, vocabulary].
    labels: Target of each token, int64 [labels]. No target is IGNORE.
    loss: Settings of the loss. The weight of a penalty is 1.0.
    """
    cross_entropies = F.cross_entropy(logits, labels, reduction="none")
    if not loss.penalty_weight:
        return cross_entropies, cross_entropies
    return cross_entropies + _penalty(logits, loss), cross_entropies


def _penalty(logits: Tensor, loss: LossSettings) -> Tensor:
    """Return the penalty of each token.

    The penalty is computed by its definition, and autograd computes its gradient. Training uses a
    formula for the gradient instead.
    """
    log_p = torch.log_softmax(logits, dim=-1)
    if loss.penalty == "neg_entropy":
        return -(log_p.exp() * log_p).sum(dim=-1)
    # If several words are likeliest, the gradient is that of the first one, as in training.
    return 1 - log_p.exp().max(dim=-1).values


def _router_loss(plain: PreTrainedModel, logits: Tensor) -> Tensor:
    """Return the router loss of a microbatch: equations 4 to 6 of arXiv:2101.03961.

    The load of an expert is the number of tokens that chose it, divided by the number of tokens,
    and averaged over the layers. No gradient flows through the load.

    logits: router logits of the tokens with a label in all layers, [layers * labels, experts].
    """
    model: Any = plain
    p = logits.float().softmax(-1)
    chosen = p.topk(model.num_experts_per_tok).indices
    load = F.one_hot(chosen, p.shape[1]).sum(1).float().mean(0)
    return model.router_aux_loss_coef * p.shape[1] * (p * load).sum() / len(p)


def _output_of(
    plain: PreTrainedModel, documents: Documents, has_label: Tensor, head_factor: float
) -> Any:
    """Return the model's output for the documents of a microbatch.

    The output has logits [labels, vocabulary] only for tokens with a label.
    """
    mixtures = stacked_experts(plain, biased=True)
    # `strict` is False, because the documents have no choices if they were not recorded.
    for (_, experts), choices in zip(mixtures, documents.choices, strict=False):
        vars(experts)["recorded_choices"] = choices
    input_ids = documents.tokens.to(plain.device)
    position_ids = torch.arange(input_ids.shape[1], device=plain.device).expand_as(input_ids)
    head = plain.get_output_embeddings()
    with head.register_forward_pre_hook(lambda head, inputs: head_factor * inputs[0][has_label]):
        return plain(input_ids=input_ids, position_ids=position_ids, use_cache=False)
