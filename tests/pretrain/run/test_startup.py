"""The search for a microbatch, with models that run out of memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from packing.batch import Microbatch, build_microbatch
from pretrain.model.gradients import attach_main_gradients, was_reached
from pretrain.run.startup import largest_size_within, largest_that_fits
from tests.pretrain.small_models import build_model, random_packs

LENGTH = 8


class SmallDevice(nn.Module):
    """A model on a device with memory for `packs` packs.

    Larger batches raise CUDA's out-of-memory error, in forward or in backward.
    """

    def __init__(self, packed: nn.Module, packs: int, fails_in: str = "forward") -> None:
        super().__init__()
        self.packed = packed
        self.packs = packs
        self.fails_in = fails_in
        self.sharding = None
        self.discard_partial_gradients = lambda: None  # as without FSDP2
        self.tried: list[int] = []

    def forward(self, input_ids: Tensor, **inputs: object) -> Tensor:
        packs = input_ids.shape[1] // LENGTH
        self.tried.append(packs)
        if packs <= self.packs:
            return self.packed(input_ids, **inputs)
        if self.fails_in == "forward":
            run_out_of_memory()
        loss = self.packed(input_ids, **inputs)
        loss.register_hook(run_out_of_memory)
        return loss


def run_out_of_memory(*_: object) -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory.")


def make_batch(packs: int, lengths: tuple[int, ...] = (5, 3)) -> Microbatch:
    return build_microbatch(random_packs([lengths] * packs, sum(lengths)), mask_boundaries=True)


def find(model: SmallDevice, accelerator: Accelerator, used: int = 1) -> int:
    """Return the largest size that fits a device with 100 bytes. Every trial takes `used` bytes."""
    options = {"multiple_of": 8, "usable": 100, "most_reserved": lambda: used}
    return largest_that_fits(model, accelerator, [1, 2, 4, 8], make_batch, **options)


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_a_size_that_runs_out_of_memory_is_not_chosen(
    fails_in: str, accelerator: Accelerator
) -> None:
    model = SmallDevice(build_model(), packs=3, fails_in=fails_in)
    attach_main_gradients(model, torch.float32)
    assert find(model.eval(), accelerator) == 2
    assert model.tried.count(1) == 2, "tried again with gradients in memory"
    assert all(module.training for module in model.modules())
    for name, parameter in model.named_parameters():
        assert parameter.grad is None and not was_reached(parameter), name
    # Nothing fits.
    assert find(SmallDevice(build_model(), packs=0), accelerator) == 0
    assert find(SmallDevice(build_model(), packs=8), accelerator, used=101) == 0


@pytest.mark.parametrize(
    ("constant", "linear", "quadratic", "expected", "most_trials"),
    [
        (10, 10, 0, 8, 4),
        (60, 3, 0, 12, 4),
        (0, 40, 0, 2, 3),
        (70, 1, 0, 24, 5),
        (95, 10, 0, 0, 2),
        (10, 5, 0.5, 8, 5),
    ],
)
def test_a_microbatch_grows_to_the_largest_that_fits(
    constant: int, linear: int, quadratic: float, expected: int, most_trials: int
) -> None:
    """A trial takes constant + linear * packs + quadratic * packs ** 2 of 100 bytes.

    Without a quadratic part, no size beyond the limit is tried.
    """
    tried: list[float] = []

    def most_used(packs: float) -> int:
        tried.append(packs)
        return int(constant + linear * packs + quadratic * packs**2)

    assert largest_size_within([1, 2, 3, 4, 6, 8, 12, 24], 100, most_used, 0.5) == expected
    assert tried[:2] == [0.5, 1] and len(tried) <= most_trials and len(set(tried)) == len(tried)
    assert all(later <= 4 * earlier for earlier, later in pairwise(tried))
    if not quadratic and expected:
        assert max(tried) == expected, "every tried size fits"


def test_growth_starts_with_a_size_that_the_precision_takes(accelerator: Accelerator) -> None:
    """Half a pack has 48 tokens, which is not a multiple of 32, so that 64 are tried.

    The device's memory holds only the tokens of the model's input.
    """
    length = 96
    packed = build_model(max_position_embeddings=length)
    tokens: list[int] = []
    packed.register_forward_pre_hook(
        lambda _, args, inputs: tokens.append(inputs["input_ids"].numel()), with_kwargs=True
    )
    options = {"multiple_of": 32, "usable": 5 * length, "most_reserved": lambda: tokens[-1]}
    batch = lambda packs: make_batch(packs, (length,))  # noqa: E731
    assert largest_that_fits(packed, accelerator, [6, 4, 2, 1], batch, **options) == 4
    assert tokens[::2] == [64, length, 4 * length]
