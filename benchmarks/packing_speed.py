"""Measure the speed of packing on a CPU.

    python -m benchmarks.packing_speed core       # both strategies on one core, without tokenizing
    python -m benchmarks.packing_speed prepare    # `prepare` compared with `encode_batch` alone

`core`: document lengths are log-normal with a mean of 200 tokens (sigma 1, roughly as in web text).
Documents are on disk as 16-bit tokens in another order than the packs, so packing has to gather
them. Each speed is computed from the median CPU seconds of 5 runs in one thread. CPU seconds do not
depend on other load of the machine.

`prepare`: the text is the source code of Python's standard library with one document per file. The
tokenizer is a byte-level BPE with 8,192 ids. `tokenizers.encode_batch` has all texts in memory,
tokenizes them in one call with the same number of threads as `prepare` has processes, and discards
the result. `prepare` reads, parses, starts its processes, orders, packs, hashes and syncs to disk.
Runs of `encode_batch` and `prepare` alternate, each in its own process, so that other load affects
both.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.machine import measured_on
from foundation.files import write_json
from packing.pack import Layout, best_fit, materialise, truncate
from packing.pack_maker import usable_cores
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.tokenizer import train_tokenizer

RESULTS = Path(__file__).parent / "results" / "cpu"
LENGTH = 4096
PACKS_AT_ONCE = 256
REPEATS = 5


def measure_core(documents: int = 100_000) -> dict[str, Any]:
    """Return the tokens/s per core and the fill of both packing strategies."""
    rng = np.random.default_rng(0)
    lengths = 1 + rng.lognormal(np.log(199) - 0.5, 1.0, documents).astype(np.int64)
    total = int(lengths.sum())
    on_disk = rng.permutation(documents)
    starts = np.empty_like(lengths)
    starts[on_disk] = np.cumsum(lengths[on_disk]) - lengths[on_disk]
    strategies = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        rng.integers(0, 50_000, total).astype(np.uint16).tofile(path)
        tokens = np.memmap(path, dtype=np.uint16, mode="r")

        def copy_all(layout: Layout) -> None:
            for first in range(0, len(layout), PACKS_AT_ONCE):
                materialise(
                    layout, first, min(first + PACKS_AT_ONCE, len(layout)), tokens, starts, 0
                )

        for strategy in (truncate, best_fit):
            layout = strategy(lengths, LENGTH)
            deciding = cpu_seconds(lambda strategy=strategy: strategy(lengths, LENGTH))
            copying = cpu_seconds(lambda layout=layout: copy_all(layout))
            fill = total / (len(layout) * LENGTH)
            strategies[strategy.__name__] = {
                "tokens_per_second": total / (deciding + copying),
                "fill": fill,
            }
    return {
        "documents": documents,
        "tokens": total,
        "pack_length": LENGTH,
        "strategies": strategies,
    }


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the median CPU time of `work` after one run to warm up."""
    times = []
    for _ in range(REPEATS + 1):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return statistics.median(times[1:])


def measure_prepare() -> dict[str, Any]:
    """Return the times of `prepare` and of `encode_batch` alone, and the ratio of their speeds."""
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = [path for path in sorted(root.rglob("*.py")) if "site-packages" not in path.parts]
    texts = [
        text for path in sources if (text := path.read_text(encoding="utf-8", errors="ignore"))
    ]
    os.environ |= {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(usable_cores())}
    runs: dict[str, list[dict[str, float]]] = {"encode_batch": [], "prepare": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer(texts[::5], 8192).save(str(folder / "tokenizer.json"))
        (folder / "corpus.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
        )
        for _ in range(REPEATS):
            for way, times in runs.items():
                with ProcessPoolExecutor(
                    1, mp_context=multiprocessing.get_context("spawn")
                ) as pool:
                    times.append(pool.submit(one_run, way, folder).result())
    pairs = list(zip(runs["encode_batch"], runs["prepare"], strict=True))
    ratios = {
        clock: statistics.median(bare[clock] / full[clock] for bare, full in pairs)
        for clock in ("wall_seconds", "cpu_seconds")
    }
    return {
        "threads": usable_cores(),
        "documents": len(texts),
        "speed_of_prepare_over_encode_batch": ratios,
        "runs": runs,
    }


def one_run(way: str, folder: Path) -> dict[str, float]:
    """Return wall and CPU seconds of "prepare" or "encode_batch".

    CPU seconds include threads and finished child processes. Call this function in a new process.
    """
    corpus = folder / "corpus.jsonl"
    file = folder / "tokenizer.json"
    if way == "prepare":
        settings = DataSettings(
            packs=Path(tempfile.mkdtemp(dir=folder)),
            source=str(corpus),
            tokenizer=str(file),
            length=LENGTH,
            held_out=0.01,
        )
        return timed(lambda: prepare(settings, progress=False))
    texts = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")]
    tokenizer = Tokenizer.from_file(str(file))
    return timed(lambda: tokenizer.encode_batch(texts, add_special_tokens=False))


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Return the wall and CPU seconds of `work`."""
    wall = time.perf_counter()
    cpu = cpu_time()
    work()
    return {"wall_seconds": time.perf_counter() - wall, "cpu_seconds": cpu_time() - cpu}


def cpu_time() -> float:
    """Return the CPU seconds of this process and its finished children so far."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("core", "prepare"), help="what to measure")
    parser.add_argument("--out", type=Path, help="result file to write")
    options = parser.parse_args()
    name = {"core": "packing_speed.json", "prepare": "prepare_speed.json"}[options.what]
    measure = {"core": measure_core, "prepare": measure_prepare}[options.what]
    report = {**measured_on(), "load": os.getloadavg()[0], **measure()}
    write_json(options.out or RESULTS / name, report)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
