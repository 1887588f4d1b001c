"""A step's loss and gradients, held against one plain batch of separate documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from accelerate import Accelerator
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from packing.arrow import Pack
from packing.batch import StepBatches, build_microbatch, sum_of_squares
from pretrain.model.packed import forward_backward

LENGTH = 12


def step_of(packs: Sequence[Pack], splits: Sequence[int]) -> StepBatches:
    """One rank's step, the packs dealt out to microbatches of these sizes in turn."""
    ends = [sum(splits[: i + 1]) for i in range(len(splits))]
    parts = [packs[end - size : end] for size, end in zip(splits, ends, strict=True)]
    microbatches = [build_microbatch(part, mask_boundaries=True) for part in parts]
    return StepBatches(
        microbatches=microbatches,
        tokens=LENGTH * len(packs),
        valid_tokens=sum(each.valid_tokens for each in microbatches),
        sum_squared_lengths=sum(sum_of_squares(each.lengths) for each in packs),
        epoch=1.0,
    )


@st.composite
def document_lengths(draw: st.DrawFn) -> list[int]:
    """Of one pack: long ones, single tokens (which have nothing to predict), a tail of padding, or no document at all."""
    left, lengths = draw(st.integers(0, LENGTH)), []
    while left:
        lengths.append(draw(st.integers(1, left)))
        left -= lengths[-1]
    return lengths


steps = st.lists(st.lists(document_lengths(), min_size=1, max_size=3), min_size=1, max_size=4)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps)
def test_a_step_is_one_plain_batch_however_it_is_cut_into_microbatches(
    accelerator: Accelerator,
    build_model: Callable,
    plain_copy: Callable,
    plain_loss: Callable,
    random_packs: Callable,
    step: list,
) -> None:
    packs = random_packs([lengths for microbatch in step for lengths in microbatch], LENGTH)
    packed = build_model()
    loss = forward_backward(packed, step_of(packs, [len(microbatch) for microbatch in step]), accelerator)

    plain = plain_copy(packed)
    expected = plain_loss(plain, packs)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    if expected.requires_grad:
        expected.backward()
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in plain.parameters()]
    scale = torch.stack(
        [gradient.norm() for gradient in gradients]
    ).norm()  # a gradient that nearly cancels is rounding beside it
    for (name, parameter), gradient in zip(packed.hf.named_parameters(), gradients, strict=True):
        assert (parameter.grad - gradient).norm() <= 1e-5 * scale, name
