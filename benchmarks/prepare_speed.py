"""How fast `prepare` is, from JSONL on disk to packs on disk, beside what bare `tokenizers.encode_batch` takes for the same text.

    python -m benchmarks.prepare_speed [--threads 2] [--rounds 5] [--out FILE]

The text is the Python standard library's sources, a document a file; the tokenizer a byte-level BPE with 8,192 ids, trained on
every fifth of them. The bare way has all texts in memory, tokenises them in one call on as many threads as `prepare` has
processes, and does nothing with the result. `prepare` reads and parses, starts its processes, collects, orders, packs, hashes and
syncs to disk.

Each way runs in a process of its own, in turns, so that whatever else the machine does meets both alike. Two ratios are reported:
of wall times (what a user waits for) and of CPU times (what remains of it on a busy machine), each the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.machine import measured_on, write
from packing.prepare import prepare
from packing.settings import DataSettings
from packing.vocabulary import train_tokenizer

RESULTS = Path(__file__).parent / "results" / "prepare_speed.json"


def standard_library() -> list[str]:
    """Every source file of the standard library that is UTF-8 text, tests included."""
    root, texts = Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError:  # some of its tests are about other encodings
            continue
    return [text for text in texts if text]


def run_bare(folder: Path) -> None:
    with open(folder / "corpus.jsonl", encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    _report(lambda: tokenizer.encode_batch(texts, add_special_tokens=False))


def run_prepare(folder: Path, threads: int) -> None:
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))  # as many processes tokenise as there are cores
    settings = DataSettings(
        packs=Path(tempfile.mkdtemp(dir=folder)),
        source=str(folder / "corpus.jsonl"),
        tokenizer=str(folder / "tokenizer.json"),
        length=4096,
        held_out=0.01,
    )
    _report(lambda: prepare(settings, progress=False))


def _report(work: Callable[[], object]) -> None:
    """Print wall and CPU seconds of `work`, threads and finished child processes included."""
    wall, cpu = time.perf_counter(), _cpu_seconds()
    work()
    print(json.dumps({"wall_seconds": time.perf_counter() - wall, "cpu_seconds": _cpu_seconds() - cpu}))


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(way: str, folder: Path, threads: int) -> dict[str, float]:
    """One run of a way in a fresh process."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "benchmarks.prepare_speed", "--way", way, "--folder", str(folder), "--threads", str(threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(folder: Path, threads: int, rounds: int) -> dict[str, object]:
    runs: dict[str, list[dict[str, float]]] = {"encode_batch": [], "prepare": []}
    for number in range(rounds):
        for way in runs:
            runs[way].append(measure(way, folder, threads))
            print(f"round {number + 1} of {rounds}: {way} {runs[way][-1]['wall_seconds']:.1f} s", file=sys.stderr)
    ratios = {
        clock: statistics.median(
            bare[f"{clock}_seconds"] / ours[f"{clock}_seconds"] for bare, ours in zip(*runs.values(), strict=True)
        )
        for clock in ("wall", "cpu")
    }
    manifest = json.loads(next(folder.glob("tmp*/packs.json")).read_text())
    tokens = manifest["statistics"]["tokens"]
    size = (folder / "corpus.jsonl").stat().st_size
    return {
        "threads": threads,
        "documents": manifest["statistics"]["documents"],
        "megabytes_of_jsonl": size / 1e6,
        "tokens": tokens,
        "speed_of_prepare_over_encode_batch": {"by_wall_time": ratios["wall"], "by_cpu_time": ratios["cpu"]},
        "tokens_per_second": {way: tokens / statistics.median(run["wall_seconds"] for run in runs[way]) for way in runs},
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--way", choices=("encode_batch", "prepare"), help=argparse.SUPPRESS)  # what a round's process does
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way == "encode_batch":
        run_bare(options.folder)
    elif options.way == "prepare":
        run_prepare(options.folder, options.threads)
    else:
        with tempfile.TemporaryDirectory() as name:
            folder, texts = Path(name), standard_library()
            train_tokenizer(texts[::5], 8192).save(str(folder / "tokenizer.json"))
            with open(folder / "corpus.jsonl", "w", encoding="utf-8") as file:
                file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
            figures = compare(folder, options.threads, options.rounds)
        report = {
            **measured_on(),
            "machine": {"cores": os.cpu_count(), "load_at_the_end": os.getloadavg()[0]},
            **figures,
        }
        write(options.out, report)
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
