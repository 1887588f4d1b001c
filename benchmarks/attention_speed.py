"""How long attention over packed documents takes in each backend, by documents, heads and empty slots, on this GPU.

    python -m benchmarks.attention_speed --out benchmarks/results/h200_attention_speed.json

32,768 tokens, eight packs of 4,096, in documents of four kinds. Times are the device's alone: everything is queued while the
device is asleep, and a measurement in which it woke before the host was done is thrown away. Forward is what training runs, so it
includes what backward needs; TFLOP/s count the scores at and below the diagonal of each document, 4 products of a head's width in
forward and 10 in backward (2 x 5 products: scores again, dV, dP, dQ, dK).
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.device_time import mark, phases_ms
from benchmarks.machine import measured_on, write
from benchmarks.short_documents import SHORTEST as FEWEST_CHARACTERS
from benchmarks.short_documents import pieces
from benchmarks.throughput_packs import LOG_DEVIATION, LOG_MEAN, SHORTEST
from demo.corpus import library_documents, standard_library
from foundation.attributes import holding
from pretrain.model.attention import backends as attention
from pretrain.model.attention import cudnn, flash
from pretrain.model.attention.heads import Heads

PACK, TOKENS = 4096, 32_768
CHARACTERS_A_TOKEN = 4  # of Python code, in the vocabularies of today's models
HEADS = [Heads(16, 8, 128), Heads(32, 8, 128), Heads(32, 32, 64), Heads(16, 8, 64)]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # q, k, v [1, heads, T, D], cu_seqlens -> [1, T, heads, D]


@dataclass(frozen=True)
class Variant:
    name: str
    attend: Attend
    slots: Callable[[int], int] = lambda documents: documents
    deterministic: bool = False
    parts_up_to: int = flash.LONG  # of FlashAttention-4's backward; 0: never


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    torch.utils.deterministic.fill_uninitialized_memory = False  # it is the kernels that are asked to be deterministic
    if obstacle := cudnn.obstacle(HEADS[0], PACK, torch.bfloat16):
        raise SystemExit(f"cudnn {obstacle}")
    results = []
    for (kind, lengths), heads in itertools.product(documents().items(), HEADS):
        for variant in variants():
            row = {"documents": kind, "heads": str(heads), "variant": variant.name}
            results.append(row | measure(variant, heads, lengths, arguments.times))
            print(describe(results[-1]), flush=True)
    report = {
        **measured_on(),
        "tokens": TOKENS,
        "documents": {
            kind: {"count": len(lengths), "longest": max(lengths), "sum_squared_a_token": sum(n * n for n in lengths) / TOKENS}
            for kind, lengths in documents().items()
        },
        "results": results,
    }
    write(arguments.out, report)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20, help="timed calls; the median counts")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


# ── What is attended to ───────────────────────────────────────────────────────────────────────────────────────────────────────


def documents() -> dict[str, list[int]]:
    """Lengths in tokens, TOKENS together, by kind."""
    return {
        "log-normal": packed(log_normal()),
        "whole packs": packed(itertools.repeat(PACK)),
        "256 each": packed(itertools.repeat(256)),
        "Python's library": packed(definitions()),
    }


def packed(lengths: Iterable[int]) -> list[int]:
    """Return as many of `lengths` as fill the packs, each cut where its pack ends."""
    found: list[int] = []
    room = PACK
    for length in lengths:
        found.append(min(length, room))
        room = (room - found[-1]) or PACK
        if sum(found) == TOKENS:
            return found
    raise ValueError(f"documents of {sum(found)} tokens fill no {TOKENS}")


def log_normal() -> Iterator[int]:
    """Documents of the law of `benchmarks.throughput_packs`, in a draw of their own, which kept figures are of."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield max(SHORTEST, int(torch.empty(1).log_normal_(LOG_MEAN, LOG_DEVIATION, generator=generator).item()))


def definitions() -> Iterator[int]:
    """The lengths of real text: functions and classes of Python's library, each on its own, in the order of its modules."""
    for document in library_documents(standard_library(), []):
        for text in pieces(document.text) if document.name.endswith(".py") else [document.text]:
            yield max(FEWEST_CHARACTERS, len(text)) // CHARACTERS_A_TOKEN


# ── What attends ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def variants() -> list[Variant]:
    cudnn = partial(by_registry, attention.packed_cudnn)
    return [
        Variant("cudnn", cudnn),
        Variant("cudnn, 16 empty slots", cudnn, lambda documents: documents + 16),
        Variant("cudnn, twice the slots", cudnn, lambda documents: 2 * documents),
        Variant("cudnn, KV heads repeated", repeated),
        Variant("cudnn, deterministic", cudnn, deterministic=True),
        Variant("varlen", partial(by_registry, attention.packed_varlen)),
        Variant("varlen, deterministic", partial(by_registry, attention.packed_varlen), deterministic=True),
        *(of_flash_attention_4() if flash.obstacle() is None else []),
    ]


def of_flash_attention_4() -> list[Variant]:
    """The kernel is timed as training takes it, and with each backward for all documents: query heads apart, or in one call."""
    fa4 = partial(by_registry, attention.packed_fa4)
    return [
        Variant("fa4", fa4),
        Variant("fa4, deterministic", fa4, deterministic=True),
        Variant("fa4, query heads of a group apart", fa4, parts_up_to=sys.maxsize),
        Variant("fa4, query heads of a group in one call", fa4, parts_up_to=0),
    ]


def by_registry(function: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    return function(None, q, k, v, None, cu_seqlens=cu_seqlens, max_seqlen=PACK)[0]


def repeated(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Give every query head a KV head: that is more to read, but dK and dV need no sum over a group's heads in cuDNN."""
    k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for states in (k, v))
    return by_registry(attention.packed_cudnn, q, k, v, cu_seqlens)


# ── How long it takes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def measure(variant: Variant, heads: Heads, lengths: list[int], times: int) -> dict[str, Any]:
    """Median milliseconds and TFLOP/s of forward and backward; or why there are none."""
    slots = variant.slots(len(lengths))
    cu_seqlens = torch.tensor(list(itertools.accumulate([0, *lengths, *[0] * (slots - len(lengths))])), dtype=torch.int32).cuda()
    # As a layer's products leave them: tokens first in memory.
    states = [torch.randn(1, TOKENS, n, heads.dim, device="cuda").bfloat16() for n in (heads.query, heads.kv, heads.kv)]
    q, k, v = (s.transpose(1, 2).requires_grad_() for s in states)
    d_output = torch.randn(1, TOKENS, heads.query, heads.dim, device="cuda").bfloat16()

    def once() -> list[torch.cuda.Event]:
        begun = mark()
        output = variant.attend(q, k, v, cu_seqlens)
        attended = mark()
        torch.autograd.grad(output, (q, k, v), d_output)
        return [begun, attended, mark()]

    try:
        with deterministic_algorithms(variant.deterministic), holding(flash, LONG=variant.parts_up_to):
            forward, backward = phases_ms(once, times)
    except RuntimeError as error:  # out of memory, or no such kernel: as much a result as a time is
        torch.cuda.empty_cache()
        return {"slots": slots, "failed": str(error).strip().splitlines()[0]}
    product = heads.query * heads.dim * sum(n * (n + 1) / 2 for n in lengths)
    return {
        "slots": slots,
        "forward_ms": forward,
        "backward_ms": backward,
        "total_ms": forward + backward,
        "forward_tflops": 4 * product / forward / 1e9,
        "backward_tflops": 10 * product / backward / 1e9,
    }


@contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def describe(row: dict[str, Any]) -> str:
    if "failed" in row:
        return "{documents}, {heads}, {variant}, {slots} slots: {failed}".format(**row)
    times = "forward {forward_ms:.3f} ms, backward {backward_ms:.3f}, together {total_ms:.3f}".format(**row)
    return "{documents}, {heads}, {variant}, {slots} slots: ".format(**row) + times


if __name__ == "__main__":
    main()
