"""Attention tried at a run's start: a small case of the run's heads and dtype beside the formula in FP64, forward and backward.

A library's kernel may be wrong for one shape and say nothing: cuDNN's dq was a third off for heads of 256. One that disagrees, or
fails, is passed over for the next fastest; one that was requested by name is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pretrain.model.attention import backends, flash
from pretrain.model.attention.heads import Heads
from pretrain.settings.recipe import Attention

# Of a pack, at most. The CPU's kernel goes through 64 queries at a time: 256 show as much of it as 512.
TOKENS, TOKENS_ON_CPU = 512, 256
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-6}  # relative errors that it explains
SAME_BITS = 2.0**-60  # a single value that is another number is more
# What libraries fail with; memory that is full says nothing of a kernel.
FAILURES = (
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    LookupError,
    ArithmeticError,
    OSError,
    ImportError,
)
Compared = Iterator[tuple[str, Tensor, Tensor, float]]  # name, the kernel's tensor, the formula's, and the error allowed


def choose_tried(
    choice: backends.Choice,
    requested: Attention,
    heads: Heads,
    dtype: torch.dtype,
    length: int,
    device: torch.device,
    largest_over_ranks: Callable[[int], int] = int,
) -> backends.Choice:
    """Returns `choice`, or the next backend that agrees with its formula here; the same on every rank.

    InputError where the one that was requested by name disagrees, or all do. Collective.
    """
    refused: dict[str, str] = {}
    while True:
        fault = disagreement(choice.name, heads, dtype, length, device)
        if largest_over_ranks(int(fault is not None)) == 0:
            return choice
        refused[choice.name.removeprefix("packed_")] = fault or "disagrees with its formula on another rank"
        choice = backends.choose(requested, device.type, heads, dtype, length, refused)


def disagreement(name: str, heads: Heads, dtype: torch.dtype, length: int, device: torch.device) -> str | None:
    """How the backend `name` is off its formula, or fails; None where it agrees. torch's own
    kernel on a CPU is not tried, and among packs of one token nothing attends."""
    if length == 1 or (name == "packed_sdpa" and device.type == "cpu"):
        return None
    worst = ("", 0.0, 1.0)
    try:
        with torch.enable_grad():
            for tensor, ours, exact, allowed in _compare(name, heads, dtype, length, device):
                error = relative_error(ours, exact)
                worst = max(worst, (tensor, error, allowed), key=lambda each: each[1] / each[2])
    except torch.OutOfMemoryError:
        raise
    except FAILURES as error:  # then this kernel is not used
        return f"fails here: {type(error).__name__}: {error}"
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    tensor, error, allowed = worst
    return (
        None if error <= allowed else f"disagrees with its formula: {tensor} is {error:.2g} off, rounding explains {allowed:.2g}"
    )


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Norm of the difference over that of `exact`; infinite where ours is not finite."""
    error = ((ours.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-300)).item()
    return error if math.isfinite(error) else math.inf


def _compare(name: str, heads: Heads, dtype: torch.dtype, length: int, device: torch.device) -> Compared:
    """Two packs: documents of uneven lengths, one of them a single token; and one document of a whole pack."""
    run_length, length = length, min(length, TOKENS_ON_CPU if device.type == "cpu" else TOKENS)
    sizes = [size for size in (1, length // 3, length - 1 - length // 3) if size] + [length]
    ends = torch.tensor([0, *itertools.accumulate(sizes), *[2 * length] * 5], dtype=torch.int32, device=device)
    mask = backends.document_mask(ends, length, 2 * length)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    states = [draw(1, count, 2 * length, heads.dim) for count in (heads.query, heads.kv, heads.kv)]
    gradient, scale = draw(1, 2 * length, heads.query, heads.dim), heads.dim**-0.5

    leaves = [each.clone().requires_grad_() for each in states]
    options = {"cu_seqlens": ends, "max_seqlen": length, "document_mask": mask, "scaling": scale}
    output, _ = getattr(backends, name)(None, *leaves, None, **options)
    repeats = torch.are_deterministic_algorithms_enabled()
    gradients = torch.autograd.grad(output, leaves, gradient, retain_graph=repeats)

    wide = [each.double().requires_grad_() for each in states]
    q, k, v = (each[0].unflatten(1, (2, length)).transpose(0, 1) for each in wide)  # [packs, heads, length, dim]
    k, v = (each.repeat_interleave(heads.query // heads.kv, dim=1) for each in (k, v))
    weights = (scale * q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1)
    exact = (weights @ v).transpose(1, 2).flatten(0, 1)[None]
    exact_gradients = torch.autograd.grad(exact, wide, gradient.double())
    yield "output", output.detach(), exact.detach(), ROUNDING[dtype]
    for tensor, ours, theirs in zip(("dq", "dk", "dv"), gradients, exact_gradients, strict=True):
        yield tensor, ours, theirs, ROUNDING[dtype]
    if repeats:
        again = torch.autograd.grad(output, leaves, gradient)
        for tensor, first, second in zip(("dq", "dk", "dv"), gradients, again, strict=True):
            yield f"{tensor} a second time", second, first, SAME_BITS
    group = heads.query // heads.kv
    here, there = (flash.heads_apart(group, *of) for of in ((2 * length, len(ends) - 1), (run_length, 1)))
    if name == "packed_fa4" and group > 1 and here and not there:
        yield from _compare_in_one_call(states, gradient, ends, length, scale, exact_gradients)


def _compare_in_one_call(
    states: Sequence[Tensor], gradient: Tensor, ends: Tensor, length: int, scale: float, exact_gradients: Sequence[Tensor]
) -> Compared:
    """FlashAttention-4's backward in one call, which a run takes where documents are longer than those of the case."""
    q, k, v, d_output = (each[0].transpose(0, 1).contiguous() for each in (*states, gradient.transpose(1, 2)))
    output, log_sums = flash.flash_forward(q, k, v, ends, length, scale)
    saved = (output, log_sums, ends, length, scale)
    gradients, again = (flash.flash_backward_in_parts(d_output, q, k, v, *saved, apart=False) for _ in range(2))
    for tensor, ours, theirs, second in zip(("dq", "dk", "dv"), gradients, exact_gradients, again, strict=True):
        yield f"{tensor} in one call", ours.transpose(0, 1)[None], theirs, ROUNDING[q.dtype]
        if torch.are_deterministic_algorithms_enabled():
            yield f"{tensor} in one call a second time", second, ours, SAME_BITS
