"""Measure attention kernels on packed documents on one GPU, by heads and document lengths.

    python -m benchmarks.short_documents --out FILE.json

Each shape is measured with our Triton kernels and with FlashAttention-4. Documents have log-normal
lengths as in `benchmarks.throughput_packs`, times a factor. The end of a pack cuts its last
document. `squares` is the mean over all tokens of the length of the token's document. Times are in
microseconds, by `triton.testing.do_bench`. The document bounds of our kernels are computed once for
all layers, so their time is not included. h100_short_documents.json includes it in both passes.
Heads of 128 values are measured too, although `model.attention: triton` refuses them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from benchmarks.machine import measured_on
from benchmarks.throughput_packs import LOG_DEVIATION, LOG_MEAN, SEED, SHORTEST
from foundation.files import write_json
from pretrain.model import attention
from pretrain.model import attention_kernel as ours

TOKENS = 65_536
# Tiles of FlashAttention-4's forward pass: queries and keys. None is its default.
TILES = [None, (64, 64), (64, 128), (128, 64), (128, 128)]


class Shape(NamedTuple):
    """Query heads, KV heads, values of a head, pack length, and factor of the document lengths."""

    heads: int
    kv: int
    dim: int
    length: int
    factor: float


SHAPES = [
    Shape(12, 12, 64, 1024, 1.0),
    Shape(12, 4, 64, 2048, 1.0),
    Shape(16, 8, 128, 4096, 1.0),
    Shape(12, 12, 64, 1024, 3.2),
    Shape(16, 8, 128, 4096, 1.6),
    Shape(16, 8, 128, 4096, 2.4),
    Shape(32, 8, 128, 4096, 1.6),
    Shape(12, 12, 64, 4096, 2.4),
]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="result file")
    out = parser.parse_args().out
    shapes = []
    for shape in SHAPES:
        shapes.append(shape._asdict() | measure(shape))
        print(shapes[-1], flush=True)
    write_json(out, measured_on() | {"tokens": TOKENS, "shapes": shapes})


def offsets(shape: Shape) -> Tensor:
    """Return cu_seqlens of random documents, int32."""
    draw = np.random.default_rng(SEED)
    ends = [0]
    while ends[-1] < TOKENS:
        tokens = int(draw.lognormal(LOG_MEAN + np.log(shape.factor), LOG_DEVIATION))
        pack_end = (ends[-1] // shape.length + 1) * shape.length
        ends.append(min(ends[-1] + max(SHORTEST, tokens), pack_end, TOKENS))
    padding = [TOKENS] * (-len(ends) % 16)
    return torch.tensor(ends + padding, dtype=torch.int32, device="cuda")


def measure(shape: Shape) -> dict[str, Any]:
    """Return the times of all kernels for a shape."""
    ends = offsets(shape)
    torch.manual_seed(SEED)
    q, k, v, d_output = (
        torch.randn(TOKENS, heads, shape.dim, device="cuda", dtype=torch.bfloat16)
        for heads in (shape.heads, shape.kv, shape.kv, shape.heads)
    )
    scale = shape.dim**-0.5
    bounds = attention.document_bounds(ends, TOKENS)
    output, log_sums = ours.attend(q, k, v, bounds, scale)
    results = (d_output, q, k, v, output, log_sums)

    def flash(tile: tuple[int, int] | None) -> object:
        """Call FlashAttention-4's forward pass with a tile."""
        options = attention._documents(ends, shape.length) | {"tile_mn": tile}
        forward = attention._flash()._flash_attn_fwd
        return forward(q, k, v, softmax_scale=scale, causal=True, return_lse=True, **options)

    return {
        "squares": float((ends.diff().double() ** 2).sum() / TOKENS),
        "forward": microseconds(lambda: ours.attend(q, k, v, bounds, scale)),
        "backward": microseconds(lambda: ours.attend_backward(*results, bounds, scale)),
        "fa4_forward": {str(tile): microseconds(partial(flash, tile)) for tile in TILES},
        "fa4_backward": microseconds(
            lambda: attention.flash_backward_in_parts(*results, ends, shape.length, scale)
        ),
    }


def microseconds(function: Callable[[], object]) -> float:
    """Return the time of a call on the GPU."""
    return 1e3 * triton.testing.do_bench(function)


if __name__ == "__main__":
    main()
