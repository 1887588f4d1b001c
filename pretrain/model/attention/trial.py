"""Attention tried at a run's start: a small case of the run's heads and dtype beside the formula in FP64, forward and backward.

A library's kernel may be wrong for one shape and say nothing: cuDNN's dq was a third off for heads of 256. One that disagrees, or
fails, is passed over for the next fastest; one that was requested by name is refused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pretrain.model.attention import backends
from pretrain.model.attention.operator import Heads
from pretrain.settings.recipe import Attention

TOKENS = 512  # of a pack, at most
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-6}  # relative errors that it explains
SAME_BITS = 2.0**-60  # a single value that is another number is more
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


def choose_tried(
    choice: backends.Choice,
    requested: Attention,
    heads: Heads,
    dtype: torch.dtype,
    length: int,
    device: torch.device,
    largest_over_ranks: Callable[[int], int] = int,
) -> backends.Choice:
    """Returns `choice`, or the next backend that agrees with its formula here in packs of `length`; the same on every rank.

    InputError where the one that was requested by name disagrees, or all do. Collective.
    """
    refused: dict[str, str] = {}
    while True:
        fault = disagreement(choice.name, heads, dtype, length, device)
        if largest_over_ranks(int(fault is not None)) == 0:
            return choice
        refused[choice.name.removeprefix("packed_")] = fault or "disagrees with its formula on another rank"
        choice = backends.choose(requested, device.type, heads, dtype, refused)


def disagreement(name: str, heads: Heads, dtype: torch.dtype, length: int, device: torch.device) -> str | None:
    """How the backend `name` is off its formula, or fails; None where it agrees. Among packs of one token nothing attends."""
    if length == 1:
        return None
    worst = ("", 0.0, 1.0)
    try:
        with torch.enable_grad():
            for tensor, ours, exact, allowed in _compare(name, heads, dtype, min(length, TOKENS), device):
                worst = max(worst, (tensor, relative_error(ours, exact), allowed), key=lambda each: each[1] / each[2])
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except FAILURES as error:
        return f"fails here: {type(error).__name__}: {error}"
    tensor, error, allowed = worst
    if error <= allowed:
        return None
    return f"disagrees with its formula: {tensor} is {error:.2g} off, rounding explains {allowed:.2g}"


def relative_error(ours: Tensor, exact: Tensor) -> float:
    """Norm of the difference over that of `exact`; infinite where ours is not finite."""
    error = ((ours.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-300)).item()
    return error if math.isfinite(error) else math.inf


def _compare(
    name: str, heads: Heads, dtype: torch.dtype, length: int, device: torch.device
) -> Iterator[tuple[str, Tensor, Tensor, float]]:
    """Name, the kernel's tensor, the formula's, and the error allowed, for two packs: documents of uneven lengths, one of them a
    single token; and one document of a whole pack."""
    sizes = [size for size in (1, length // 3, length - 1 - length // 3) if size] + [length]
    ends = torch.tensor([0, *itertools.accumulate(sizes), *[2 * length] * 5], dtype=torch.int32, device=device)
    mask = backends.document_mask(ends, length, 2 * length)
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    states = [draw(1, count, 2 * length, heads.dim).requires_grad_() for count in (heads.query, heads.kv, heads.kv)]
    gradient, scale = draw(1, 2 * length, heads.query, heads.dim), heads.dim**-0.5
    options = {"cu_seqlens": ends, "max_seqlen": length, "document_mask": mask, "scaling": scale}
    output, _ = getattr(backends, name)(None, *states, None, **options)
    repeats = torch.are_deterministic_algorithms_enabled()
    gradients = torch.autograd.grad(output, states, gradient, retain_graph=repeats)

    wide = [each.detach().double().requires_grad_() for each in states]
    q, k, v = (each[0].unflatten(1, (2, length)).transpose(0, 1) for each in wide)  # [packs, heads, length, dim]
    k, v = (each.repeat_interleave(heads.query // heads.kv, dim=1) for each in (k, v))
    weights = (scale * q @ k.mT).masked_fill(~mask, -math.inf).softmax(-1)
    exact = (weights @ v).transpose(1, 2).flatten(0, 1)[None]
    exact_gradients = torch.autograd.grad(exact, wide, gradient.double())
    yield "output", output.detach(), exact.detach(), ROUNDING[dtype]
    for tensor, ours, theirs in zip(("dq", "dk", "dv"), gradients, exact_gradients, strict=True):
        yield tensor, ours, theirs, ROUNDING[dtype]
    if repeats:
        again = torch.autograd.grad(output, states, gradient)
        for tensor, first, second in zip(("dq", "dk", "dv"), gradients, again, strict=True):
            yield f"{tensor} a second time", second, first, SAME_BITS
