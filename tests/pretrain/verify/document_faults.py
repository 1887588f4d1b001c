"""Faults of single documents, and faults of the held-out loss.

Importing this module registers them with `faults.FAULTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundation.overrides import overridden
from packing.batch import Microbatch
from pretrain.model import attention
from pretrain.model.loss.head import LossHead
from pretrain.precision import delayed_state
from pretrain.run import evaluate
from tests.pretrain.verify.faults import (
    Inputs,
    Make,
    Patch,
    changing_inputs,
    changing_kernel,
    delayed,
    fault,
    patching,
)
from tests.pretrain.verify.small_runs import SmallRun
from tests.pretrain.verify.update_faults import PENALIZED


def without(ends: Tensor, boundary: int) -> Tensor:
    """Return the offsets `ends` without one boundary, if there are documents beside it."""
    ends = ends.unique()
    keep = torch.ones_like(ends, dtype=torch.bool)
    if len(ends) > 2:
        keep[boundary] = False
    return ends[keep]


def losing_boundary(boundary: int) -> Make:
    return changing_inputs(lambda inputs: {"cu_seqlens": without(inputs["cu_seqlens"], boundary)})


fault("the first boundary between documents is lost")(losing_boundary(1))
fault("the last boundary between documents is lost")(losing_boundary(-2))


def changing_attention_of_one_layer(change: Callable[..., dict[str, Any]]) -> Make:
    """Return a fault that updates the arguments of the second layer's attention with `change`.

    `change` is called with the query, the key, the value, and the other arguments.
    """

    def changed(kernel: Any, module: Any, *states: Tensor, **options: Any) -> Any:
        if module.layer_idx == 1:
            options |= change(*states[:3], **options)
        return kernel(module, *states, **options)

    return changing_kernel(changed)


def in_two_layers(run: SmallRun) -> bool:
    return len(run.layers) > 1 and run.packed.fused is None


@fault("in one layer, a document attends to the document before it", in_two_layers)
@changing_attention_of_one_layer
def one_layer_leaks(
    query: Tensor, *states: Tensor, cu_seqlens: Tensor, max_seqlen: int, **_: Any
) -> dict[str, Any]:
    ends = without(cu_seqlens, 2)
    return {"documents": attention.document_mask(ends, max_seqlen, query.shape[2])}


@fault("in backward, a document's keys get the gradients of the next document's", in_two_layers)
@changing_attention_of_one_layer
def gradient_leaks(
    query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens: Tensor, **_: Any
) -> dict[str, Any]:
    def leaked(gradient: Tensor) -> Tensor:
        boundary = int(cu_seqlens.unique()[1])
        of_next = gradient[:, :, boundary : 2 * boundary]
        gradient = gradient.clone()
        gradient[:, :, : of_next.shape[2]] += of_next
        return gradient

    for state in (key, value):
        if state.requires_grad:
            state.register_hook(leaked)
    return {}


def changing_gradient_of_tokens(change: Callable[[Tensor, list[int]], None]) -> Make:
    """Return a fault that changes the gradient of the second layer's input in place.

    `change` is called with the gradient [tokens, features] and the offsets of the documents.
    """

    def make(run: SmallRun, patch: Patch) -> None:
        def changed(layer: Any, args: tuple[Tensor, ...], options: Inputs) -> None:
            def hook(gradient: Tensor) -> Tensor:
                gradient = gradient.clone()
                change(gradient[0], ends)
                return gradient

            ends = options["cu_seqlens"].unique().tolist()
            if args[0].requires_grad:
                args[0].register_hook(hook)

        handle = run.layers[1].register_forward_pre_hook(changed, with_kwargs=True)
        patch.setattr(run, "handle", handle, raising=False)

    return make


@fault("one document's gradient is doubled", in_two_layers)
@changing_gradient_of_tokens
def document_doubled(gradient: Tensor, ends: list[int]) -> None:
    gradient[ends[-2] :] *= 2


@fault("a microbatch's first document has no gradient", in_two_layers)
@changing_gradient_of_tokens
def document_lost(gradient: Tensor, ends: list[int]) -> None:
    gradient[: ends[1]] = 0


@fault("the positions of one document do not restart", kind="gpt2")
@changing_inputs
def one_document_runs_on(inputs: Inputs) -> Inputs:
    ends = inputs["cu_seqlens"].unique().tolist()
    positions = inputs["position_ids"].clone()
    if len(ends) > 3:
        positions[:, ends[1] : ends[2]] += ends[1]
    return {"position_ids": positions}


@fault("the labels of one document are shifted twice")
@changing_inputs
def one_document_shifted(inputs: Inputs) -> Inputs:
    first, second = inputs["cu_seqlens"].unique().tolist()[:2]
    labels = inputs["labels"].clone()
    labels[:, first:second] = labels[:, first:second].roll(-1, 1)
    return {"labels": labels}


# ── Held-out loss ───────────────────────────────────────────────────────────────────────


@fault("the held-out loss includes the penalty", loss=PENALIZED)
@patching(LossHead, "forward")
def penalty_in_held_out_loss(run: SmallRun, real: Any, head: LossHead, *inputs: Any) -> Tensor:
    with overridden(head, training=True):
        return real(head, *inputs)


def changing_evaluation(change: Callable[[list[Microbatch]], Iterable[Microbatch]]) -> Make:
    """Return a fault that evaluates `change(microbatches)` instead of the microbatches."""
    return patching(evaluate, "held_out_sums")(
        lambda run, real, model, batches, *rest: real(model, change(list(batches)), *rest)
    )


fault("the last microbatch of an evaluation is dropped")(
    changing_evaluation(lambda batches: batches[:-1])
)
fault("the held-out loss is divided by all tokens, not by the labels")(
    changing_evaluation(
        lambda batches: [replace(batch, valid_tokens=batch.labels.numel()) for batch in batches]
    )
)


@fault("in an evaluation, documents attend to each other")
def evaluation_leaks(run: SmallRun, patch: Patch) -> None:
    run.packed.register_forward_pre_hook(
        lambda module, args, inputs: (
            (args, inputs)
            if module.training
            else (args, inputs | {"cu_seqlens": without(inputs["cu_seqlens"], 1)})
        ),
        with_kwargs=True,
    )


# ── Delayed scaling ─────────────────────────────────────────────────────────────────────


@fault("scales are computed from the newest amax, not from the largest", delayed)
@patching(delayed_state, "update_scale")
def newest_amax(run: SmallRun, real: Any, *rule: Any) -> tuple[Tensor, Tensor]:
    return real(*rule[:-1], "most_recent")


@fault("amax histories have half of their length", delayed)
def half_of_the_history(run: SmallRun, patch: Patch) -> None:
    states = run.packed.context.engine.delayed._states
    for direction, state in states.items():
        half = state.amax_history[len(state.amax_history) // 2 :].clone()
        half[0] = 0
        patch.setitem(states, direction, state._replace(amax_history=half))


@fault("an amax history drops its newest amax", delayed)
@patching(delayed_state, "update_scale")
def newest_amax_dropped(run: SmallRun, real: Any, *rule: Any) -> tuple[Tensor, Tensor]:
    following, scale = real(*rule)
    following[-1] = following[-2]
    return following, scale
