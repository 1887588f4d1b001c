"""Test the use of GPU memory by losses and optimizers, and the search for the microbatch."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from packing.batch import Microbatch, build_microbatch
from pretrain.model.gradients import gradient_of
from pretrain.model.loss.head import LossHead
from pretrain.model.packed import inputs_of
from pretrain.optimizer.adamw import ExactAdamW
from pretrain.optimizer.offload import OFFLOADED, PIECE, SLOTS
from pretrain.run.startup import largest_that_fits
from pretrain.settings.recipe import LossSettings
from tests.gpu.assembled import LENGTH, assemble, pack_of
from tests.gpu.test_head_gpu import problem

HYPER = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of the memory that `run` allocates."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def test_peak_memory_is_one_chunk_of_logits_and_the_gradients() -> None:
    tokens = 16_384
    hidden = 512
    vocabulary = 50_304
    chunk = 1024
    states, linear, labels = problem(tokens, hidden, vocabulary)
    head = LossHead(linear, LossSettings(chunk=chunk))

    def train() -> None:
        gradients = torch.autograd.grad(head(states, labels), (states, linear.weight))
        assert len(gradients) == 2

    def evaluate() -> None:
        with torch.no_grad():
            head(states, labels)

    logits = 2 * tokens * vocabulary
    chunk_logits = 2 * chunk * vocabulary
    # The states' gradient is BF16. The weight's gradient is FP32, with a copy in BF16.
    gradients = 2 * tokens * hidden + (4 + 2) * vocabulary * hidden
    train()  # compiles
    training = peak_bytes(train)
    assert training < 1.1 * (chunk_logits + gradients) < 0.3 * logits
    evaluate()
    assert peak_bytes(evaluate) < min(1.1 * chunk_logits, training)


def test_offloading_lowers_the_peak_by_the_size_of_the_moments() -> None:
    values = 2**27

    def update(offload: str) -> None:
        weight = nn.Parameter(torch.zeros(values, dtype=torch.bfloat16, device="cuda"))
        optimizer = ExactAdamW([weight], **HYPER, offload=OFFLOADED[offload])
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    on_gpu, on_host = (peak_bytes(lambda o=o: update(o)) for o in ("none", "moments"))
    slots = 2 * SLOTS * 4 * PIECE
    assert on_gpu - on_host > 8 * values - slots - 2**22


def test_host_memory_is_unpinned_when_the_optimizer_is_freed() -> None:
    for _ in range(3):
        weight = nn.Parameter(torch.zeros(10_000, device="cuda"))
        optimizer = ExactAdamW([weight], **HYPER, offload=OFFLOADED["moments"])
        optimizer.materialise()
        values = optimizer.state[weight]["exp_avg"].detach()
        assert values.is_pinned()
        del weight, optimizer
        gc.collect()
        assert not values.is_pinned()


@pytest.fixture
def memory_for() -> Iterator[Callable[[int], None]]:
    """Function that limits this process to the memory it has reserved plus a number of bytes."""

    def limit(extra: int) -> None:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + extra) / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def trial(packs: int) -> Microbatch:
    draw = np.random.default_rng(0)
    return build_microbatch([pack_of(4, LENGTH, draw) for _ in range(packs)], mask_boundaries=True)


def test_the_largest_microbatch_that_fits_the_memory_is_chosen(
    accelerator: Accelerator, memory_for: Callable
) -> None:
    packed = assemble("qwen3", "bf16", fused=False, weights=torch.float32)

    def largest(sizes: list[int], extra: int = 2**33) -> int:
        """Return the largest of `sizes` that fits into the reserved memory plus `extra` bytes."""
        options = {
            "usable": torch.cuda.memory_reserved() + extra,
            "most_reserved": torch.cuda.max_memory_reserved,
        }
        return largest_that_fits(packed, accelerator, sizes, trial, multiple_of=1, **options)

    assert largest([1, 4]) == 4
    memory_for(256 * 2**20)
    # With 1,024 packs, the input of one norm takes 0.5 GiB.
    assert largest([1, 4, 512, 1024], 256 * 2**20) == 4
    assert all(not gradient_of(parameter).any() for parameter in packed.parameters())
    # The chosen microbatch runs. The failed trials have left no memory allocated.
    packed(**inputs_of(trial(4), accelerator.device)).backward()
    memory_for(32 * 2**20)
    assert largest([1024], 32 * 2**20) == 0
