"""How fast packing is on one core: both strategies from lengths to packed tokens, the order of a step, and its batches.

    python -m benchmarks.packing_speed [--tokens 20e6] [--out FILE]

Documents have log-normal lengths with a mean of 200 tokens (sigma 1, as web text roughly has) and lie on disk as 16-bit tokens in
another order than they are packed in, so materialising has to gather. Each figure is the median of 5 runs in CPU seconds of one
thread, system time included: what a core gives, also while others keep the machine busy (its load is in the report).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy and torch start their threads

import numpy as np
import torch

from benchmarks.machine import measured_on, write
from packing.arrow import Pack
from packing.batch import BatchStream
from packing.order import Mixture, Order, spread
from packing.pack import Layout, PackBlock, best_fit, materialise, truncate

RESULTS = Path(__file__).parent / "results" / "packing_speed.json"
LENGTH = 4096
PACKS_AT_ONCE = 256
REPEATS = 5


def seconds(work: Callable[[], object]) -> float:
    """Median CPU time of `work` after one run that nobody counts."""
    work()
    times = []
    for _ in range(REPEATS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times)


def materialise_all(layout: Layout, tokens: np.ndarray, starts: np.ndarray) -> list[PackBlock]:
    return [
        materialise(layout, first, min(first + PACKS_AT_ONCE, len(layout)), tokens, starts, 0)
        for first in range(0, len(layout), PACKS_AT_ONCE)
    ]


def measure_strategies(lengths: np.ndarray, starts: np.ndarray, tokens: np.ndarray) -> dict[str, dict[str, float]]:
    total = int(lengths.sum())
    figures = {}
    for strategy in (truncate, best_fit):
        layout = strategy(lengths, LENGTH)
        deciding = seconds(lambda strategy=strategy: strategy(lengths, LENGTH))
        copying = seconds(lambda layout=layout: materialise_all(layout, tokens, starts))
        figures[strategy.__name__] = {
            "tokens_per_second": total / (deciding + copying),
            "tokens_per_second_layout_only": total / deciding,
            "tokens_per_second_materialise_only": total / copying,
            "packs": len(layout),
            "fill": int((layout.stop - layout.start).sum()) / (len(layout) * layout.length),
            "cut_documents": layout.cut_documents,
        }
    return figures


class PacksInMemory:
    """Packs without a file, so that the figure is that of building batches alone."""

    path = Path("in memory")
    length = LENGTH
    fingerprint = ""
    tokenizer = None

    def __init__(self, block: PackBlock) -> None:
        self.block = block

    def __len__(self) -> int:
        return len(self.block.input_ids)

    def __getitem__(self, index: int) -> Pack:
        return Pack(self.block.input_ids[index], self.block.lengths[index])

    def lengths(self, index: int) -> np.ndarray:
        return self.block.lengths[index]

    def trained(self, index: int) -> None:
        return None

    def verify(self) -> None: ...


def measure_batches(packs: PacksInMemory, vocab_size: int) -> dict[str, float]:
    """Steps of 32 packs in microbatches of 8: the published recipe's 131,072 tokens."""
    order = Order(Mixture.alone(len(packs)), packs_per_step=32, seed=42)
    batches = BatchStream(packs, order, microbatch=8, rank=0, world_size=1, mask_boundaries=True, vocab_size=vocab_size)
    step = seconds(lambda: [batches.step(number) for number in range(20)]) / 20
    return {"tokens_per_second": 32 * LENGTH / step, "milliseconds_per_step_of_131072_tokens": step * 1e3}


def measure_order() -> dict[str, float]:
    order = Order(Mixture.alone(1_000_000), packs_per_step=1024, seed=42)
    costs = np.random.default_rng(0).lognormal(14, 0.5, 1024).astype(np.int64)
    return {
        "packs_of_step_us_per_1024_packs": seconds(lambda: [order.packs_of_step(number) for number in range(100)]) * 1e4,
        "spread_us_per_1024_packs_on_8_ranks_of_16_microbatches": seconds(lambda: spread(costs, 8, 16)) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float, default=20e6, help="how many tokens to pack, about")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    rng = np.random.default_rng(0)
    lengths = 1 + rng.lognormal(np.log(199) - 0.5, 1.0, int(arguments.tokens / 200)).astype(np.int64)
    on_disk = rng.permutation(len(lengths))
    starts = np.empty_like(lengths)
    starts[on_disk] = np.cumsum(lengths[on_disk]) - lengths[on_disk]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        rng.integers(0, 50_000, int(lengths.sum())).astype(np.uint16).tofile(path)
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        strategies = measure_strategies(lengths, starts, tokens)
        layout = best_fit(lengths, LENGTH)
        packs = PacksInMemory(materialise(layout, 0, len(layout), tokens, starts, 0))

    report = {
        **measured_on(),
        "machine": {"cores_used": 1, "load": os.getloadavg()[0]},
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "pack_length": LENGTH,
        "strategies": strategies,
        "batches": measure_batches(packs, vocab_size=50_000),
        "order": measure_order(),
    }
    write(arguments.out, report)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
