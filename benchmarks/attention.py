"""Measure the attention kernels by document length and heads.

    python -m benchmarks.attention --out FILE.json
    python -m benchmarks.attention --report FILE.json

A microbatch has 32,768 tokens, in packs of 8,192 tokens or of one longer document. Each pack holds
documents of one length, and a shorter document at its end if they do not fill it. The time is the
median of the forward and backward passes of one layer, between CUDA events, after the kernels have
been compiled. The gradient of the output has the layout that the output projection gives it.

A kernel that cannot run here is recorded with the reason. On a CPU, the command measures a few
documents with the kernels that run there.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from benchmarks.machine import measured_on
from foundation.errors import one_line
from foundation.files import write_json
from foundation.reading import load_object
from foundation.units import markdown
from pretrain.model import attention

KERNELS = ("fa4", "cudnn", "varlen", "triton", "documents", "sdpa")
# Lengths of documents, and (query heads, KV heads, values in a head).
LENGTHS = (300, 600, 1000, 2000, 4096, 8192, 32768)
HEADS = ((12, 12, 64), (14, 2, 64), (32, 8, 64), (24, 8, 96), (16, 8, 128), (32, 8, 128))
TOKENS = 32_768
PACK = 8_192
WARM_UP = 3
TIMED = 9


def cases(device: str) -> Iterator[tuple[int, int, tuple[int, int, int]]]:
    """Yield the tokens of a microbatch, the length of a document, and the heads."""
    if device == "cpu":
        yield 512, 100, (4, 2, 64)
        return
    for heads in HEADS:
        for length in LENGTHS:
            yield TOKENS, length, heads


def document_ends(tokens: int, pack: int, length: int) -> Tensor:
    """Return cu_seqlens of packs with documents of `length` tokens, as the launcher pads it."""
    ends = [0]
    while ends[-1] < tokens:
        pack_end = (ends[-1] // pack + 1) * pack
        ends.append(min(ends[-1] + length, pack_end))
    ends += [tokens] * (-len(ends) % 16)
    return torch.tensor(ends, dtype=torch.int32)


def milliseconds(kind: str, tokens: int, length: int, heads: tuple[int, int, int]) -> float:
    """Return the median time of a forward and backward pass of a kernel."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    query, kv, dim = heads
    pack = min(max(PACK, length), tokens)
    cu_seqlens = document_ends(tokens, pack, length).to(device)
    states = [
        torch.randn(tokens, n, dim, device=device, dtype=dtype)
        .transpose(0, 1)[None]
        .requires_grad_()
        for n in (query, kv, kv)
    ]
    name = f"packed_{kind}"
    kernel = AttentionInterface()[name]
    documents = attention.documents_for(name, cu_seqlens, pack, tokens)
    gradient = torch.randn(1, tokens, query, dim, device=device, dtype=dtype)

    def forward_and_backward() -> None:
        output, _ = kernel(
            torch.nn.Module(),
            *states,
            None,
            cu_seqlens=cu_seqlens,
            max_seqlen=pack,
            documents=documents,
        )
        torch.autograd.grad(output, states, gradient)

    times = []
    for _ in range(WARM_UP + TIMED):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            forward_and_backward()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        else:
            started = time.perf_counter()
            forward_and_backward()
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[WARM_UP:])


def measure() -> list[dict[str, Any]]:
    """Return a row of times and of reasons for each case."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rows = []
    for tokens, length, heads in cases(device):
        times: dict[str, float] = {}
        reasons: dict[str, str] = {}
        for kind in KERNELS:
            # A mask over long packs needs much memory and time, and `auto` uses it on no GPU.
            if kind == "sdpa" and device == "cuda":
                continue
            name = "flash_attn" if kind == "fa4" else kind
            if obstacle := attention.obstacle(name, attention.Case(device, heads[2], dtype)):
                reasons[kind] = obstacle
                continue
            try:
                times[kind] = milliseconds(kind, tokens, length, heads)
            except (RuntimeError, AssertionError, ValueError) as error:
                reasons[kind] = one_line(error)
        rows.append({"heads": heads, "length": length, "tokens": tokens, "ms": times})
        rows[-1]["reasons"] = reasons
        print(length, heads, {kind: round(ms, 2) for kind, ms in times.items()}, flush=True)
    return rows


def report(result: dict[str, Any]) -> str:
    """Return the table of a result, in Markdown. The fastest kernel of a row is bold."""
    lines = []
    for row in result["rows"]:
        fastest = min(row["ms"], key=row["ms"].get)
        texts = {kind: f"{ms:.2f}" for kind, ms in row["ms"].items()}
        texts[fastest] = f"**{texts[fastest]}**"
        heads = " / ".join(map(str, row["heads"]))
        lines.append([heads, f"{row['length']:,}", *(texts.get(kind, "–") for kind in KERNELS)])
    return markdown(["heads", "tokens of a document", *KERNELS], lines)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--out", type=Path, help="file of the result")
    action.add_argument("--report", type=Path, help="print the table of a result")
    arguments = parser.parse_args()
    if arguments.report:
        print(report(load_object(arguments.report, "pass a file that this command has written")))
        return
    result = {**measured_on(), "rows": measure()}
    write_json(arguments.out, result)
    print(report(result))


if __name__ == "__main__":
    main()
