"""What a search among cublasLt's algorithms would give over its first choice, for each matrix product of a training step.

    python -m benchmarks.product_search --recipe benchmarks/qwen3_1_7b.yaml --recipe benchmarks/llama_3_1_8b.yaml \\
        --out benchmarks/results/h200_product_search.json

Transformer Engine asks cublasLt's heuristic for one algorithm and takes it. Here every algorithm that the heuristic names is run,
in the workspace that Transformer Engine has and in a larger one. A second question is the residual: whether a product that adds
it (d = a b + c) spares more than it costs.

Each time is of several launches over more tensors than fit in the cache, taken in turns with what it is compared with: clocks
move with power, and so are alike in what is compared. The fastest is chosen by one set of times and measured by another. A result
counts only if its first rows are close to FP32 arithmetic. The file is written after each product.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import step_products
from benchmarks.gpu_log import gpu_log
from benchmarks.limits import mark
from benchmarks.machine import measured_on, write
from benchmarks.step_products import HEAD_CHUNKS, PRECISIONS, Launch, Operands, StepProduct, head_name
from pretrain.precision.cublaslt import Algorithm, CublasLt, CublasLtError
from pretrain.settings.config import load_recipe
from pretrain.verify.kernels import relative_error

WORKSPACE = 32 * 2**20 + 1024  # of Transformer Engine's products on Hopper
LARGE_WORKSPACE = 128 * 2**20
ASKED, KEPT = 64, 5  # algorithms asked of the heuristic at a time, and kept for a second look
CHOOSING, MEASURED = 4, 16  # rounds
LARGEST_ERROR = 0.01  # of the norm: BF16 outputs and FP8's accumulators stay under a third of it
Row = Mapping[str, Any]


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    products = [
        p for path in arguments.recipe for p in step_products.products_of(load_recipe(path), arguments.precision or PRECISIONS)
    ]
    has_transformer_engine = importlib.util.find_spec("transformer_engine") is not None
    if has_transformer_engine:
        importlib.import_module("transformer_engine.pytorch")  # seconds, which are no product's
    warm_up()
    library = CublasLt()
    rows: list[dict[str, Any]] = []
    report = {
        **measured_on(),
        "cublaslt": {"version": library.version, "file": Path(library.path).name},
        "results": rows,
    }
    print(HEADLINE)
    began, spans = time.monotonic(), []
    with gpu_log() as log:
        for product in products:
            if time.monotonic() - began > arguments.seconds:
                break
            started = datetime.now()
            rows.append(row_of(Search(product, library, has_transformer_engine)))
            spans.append((started, datetime.now()))
            print(line(rows[-1]), flush=True)
            write(arguments.out, report)
            torch.cuda.empty_cache()
    for row, span in zip(rows, spans, strict=True):
        row |= log.between(*span)
    report |= {"steps": steps(rows), "not_reached": [product.name for product in products[len(rows) :]]}
    write(arguments.out, report)
    print("\n".join([*residual_lines(rows), *step_lines(report["steps"])]))
    if report["not_reached"]:
        print(f"not reached in {arguments.seconds:.0f} s: {', '.join(report['not_reached'])}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, action="append", required=True, help="model and microbatch; may be repeated")
    parser.add_argument("--precision", action="append", choices=PRECISIONS, help="of the products, all by default")
    parser.add_argument("--seconds", type=float, default=80, help="begin no further product after this time")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def row_of(search: Search) -> dict[str, Any]:
    """What was measured of one product, or why nothing was: a failure says as much of an algorithm as its time does."""
    names = ("model", "product", "which", "precision", "tokens", "m", "n", "k", "count")
    row = {name: getattr(search.product, name) for name in names}
    row["output"] = str(search.product.output).removeprefix("torch.")
    try:
        return row | search.measure()
    except RuntimeError as error:
        return row | {"failed": str(error).strip()}


# ── How long it takes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def interleaved(launches: Sequence[Launch], rounds: int, repetitions: int, sets: int) -> list[list[float]]:
    """Microseconds a launch, by launch and round; rounds go through them forth and back, all of it queued at once."""
    numbers = itertools.cycle(range(sets))
    marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in launches]
    torch.cuda._sleep(2_000_000)  # a millisecond, in which the host gets ahead
    for turn in range(rounds):
        order = range(len(launches)) if turn % 2 == 0 else reversed(range(len(launches)))
        for index in order:
            begun = mark()
            for _ in range(repetitions):
                launches[index](next(numbers))
            marks[index].append((begun, mark()))
    torch.cuda.synchronize()
    return [[1e3 * begun.elapsed_time(ended) / repetitions for begun, ended in pairs] for pairs in marks]


def warm_up(seconds: float = 2.0) -> None:
    """Products until clocks and temperature are those of work. They also make torch load cublasLt."""
    square = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        for _ in range(20):
            square @ square
        torch.cuda.synchronize()


def distinct(algorithms: Iterable[Algorithm]) -> list[Algorithm]:
    """Each once, under the name by which it came first."""
    found: dict[bytes, Algorithm] = {}
    for algorithm in algorithms:
        found.setdefault(algorithm.key, algorithm)
    return list(found.values())


@dataclass
class Search:
    """The algorithms of one product, run on its tensors."""

    product: StepProduct
    library: CublasLt
    has_transformer_engine: bool
    tried: set[bytes] = field(default_factory=set)
    refused: set[bytes] = field(default_factory=set)
    errors: dict[bytes, float] = field(default_factory=dict)  # of those looked at twice

    def _make_tensors(self) -> None:
        self.sets = [Operands.random(self.product, seed) for seed in range(self.product.sets)]
        self.scales = step_products.scales_of(self.product)
        self.expected = step_products.checked_rows(self.product, self.sets[0], self.scales)
        self.workspace = torch.empty(LARGE_WORKSPACE, dtype=torch.uint8, device="cuda")

    def measure(self) -> dict[str, Any]:
        """Microseconds by Transformer Engine, by cublasLt's first choice and by the fastest of its algorithms."""
        self._make_tensors()
        p = self.product
        self.matmul = self.library.matmul((p.m, p.n, p.k), p.types, p.transposed, fast_accumulation=p.fast_accumulation)
        if self.scales is not None:
            self.matmul.set_scales(*self.scales)
        first = self.matmul.named_by_heuristic(1, WORKSPACE)[0]
        named = distinct(a for space in (WORKSPACE, LARGE_WORKSPACE) for a in self.matmul.named_by_heuristic(ASKED, space))
        ranked = self.screened([first, *named])
        kept = [algorithm for algorithm in distinct([first, *ranked[:KEPT]]) if self.agrees(algorithm)]
        if first not in kept:
            error = self.errors.get(first.key)
            raise CublasLtError(f"cublasLt's first choice is {error} off FP32 arithmetic: operands are not what it was told")
        best = self.fastest(kept, {algorithm.key: self.launch(algorithm) for algorithm in kept})
        launches = {"first": self.launch(first), "best": self.launch(best)}
        row = {
            "named": len(named),
            "tried": len(self.tried),
            "refused": len(self.refused),
            "wrong": sum(not right(error) for error in self.errors.values()),
            "first": self.described(first),
            "best": self.described(best),
            "largest_difference": self.difference(first, best),
            **self.add_transformer_engine(launches),
        }
        row["microseconds"] = times = self.compared(launches)
        row["gain"] = usual(times) / times["best"] - 1
        row["tflops"] = p.flops / times["best"] / 1e6
        if p.adds_residual:
            row["residual"] = self.residual(kept, launches)
        return row

    def launch(self, algorithm: Algorithm, *, residual: bool = False) -> Launch:
        """Into d, to which d was added `beta` times; or, with `residual`, into d with c added."""

        def launch(number: int) -> None:
            s = self.sets[number]
            added, beta = (s.c, 1.0) if residual else (s.d, self.product.beta)
            stream = torch.cuda.current_stream().cuda_stream
            if status := self.matmul.run(s.a, s.b, added, s.d, beta, algorithm, self.workspace, stream):
                raise CublasLtError(f"cublasLtMatmul returned status {status} for {algorithm.source}")

        return launch

    def then_added(self, launch: Launch) -> Launch:
        """The product, and a kernel that adds c to it, as the fused layers do today."""

        def both(number: int) -> None:
            launch(number)
            self.sets[number].d.add_(self.sets[number].c)

        return both

    def add_transformer_engine(self, launches: dict[str, Launch]) -> dict[str, Any]:
        """Where it is installed: its launch among `launches`, and whether it gives the bits of cublasLt's first choice."""
        if not self.has_transformer_engine:
            return {}
        try:
            launch = step_products.by_transformer_engine(self.product, self.sets, self.scales)
            before = self.result(launches["first"]).clone()
            same = torch.equal(before, self.result(launch))
        except (ImportError, AttributeError, TypeError, AssertionError, RuntimeError) as error:  # of a version that differs
            return {"transformer_engine_failed": f"{type(error).__name__}: {error}"}
        launches["transformer_engine"] = launch
        return {"transformer_engine_repeats_first": same}

    def screened(self, algorithms: Iterable[Algorithm]) -> list[Algorithm]:
        """Those that run, each once, by the time of one group of launches."""
        runnable = []
        for algorithm in distinct(algorithms):
            self.tried.add(algorithm.key)
            try:
                self.launch(algorithm)(0)
            except CublasLtError:
                self.refused.add(algorithm.key)
            else:
                runnable.append(algorithm)
        times = self.interleaved([self.launch(algorithm) for algorithm in runnable], 1)
        return [algorithm for algorithm, _ in sorted(zip(runnable, times, strict=True), key=lambda pair: pair[1])]

    def fastest(self, algorithms: Sequence[Algorithm], launches: Mapping[bytes, Launch]) -> Algorithm:
        times = self.interleaved([launches[algorithm.key] for algorithm in algorithms], CHOOSING)
        return min(zip(algorithms, times, strict=True), key=lambda pair: statistics.median(pair[1]))[0]

    def compared(self, launches: Mapping[str, Launch]) -> dict[str, float]:
        """Median microseconds by name, after two rounds that do not count."""
        times = self.interleaved(list(launches.values()), MEASURED + 2)
        return {name: statistics.median(found[2:]) for name, found in zip(launches, times, strict=True)}

    def interleaved(self, launches: Sequence[Launch], rounds: int) -> list[list[float]]:
        return interleaved(launches, rounds, self.product.repetitions, len(self.sets))

    def result(self, launch: Launch) -> Tensor:
        """What it makes of the first tensors, d being zero before."""
        self.sets[0].d.zero_()
        launch(0)
        return self.sets[0].d

    def agrees(self, algorithm: Algorithm) -> bool:
        found = self.result(self.launch(algorithm))[: step_products.CHECKED_ROWS]
        self.errors[algorithm.key] = relative_error(found, self.expected)
        return right(self.errors[algorithm.key])

    def difference(self, one: Algorithm, other: Algorithm) -> float:
        """The largest, of what the two make of the same tensors."""
        before = self.result(self.launch(one)).clone()
        return before.sub_(self.result(self.launch(other))).abs_().max().item()

    def described(self, algorithm: Algorithm) -> dict[str, Any]:
        settings = self.library.settings(algorithm)
        error = self.errors[algorithm.key]
        return {"source": algorithm.source, "workspace": algorithm.workspace, "error": error, "settings": settings}

    def residual(self, kept: Sequence[Algorithm], launches: Mapping[str, Launch]) -> dict[str, Any]:
        """Microseconds of product and residual: in two kernels, by each of `launches`, and in one by the fastest for that."""
        fused = {algorithm.key: self.launch(algorithm, residual=True) for algorithm in kept}
        try:
            for launch in fused.values():
                launch(0)
        except CublasLtError as error:
            return {"failed": str(error)}
        best = self.fastest(kept, fused)
        times = self.compared({name: self.then_added(launch) for name, launch in launches.items()} | {"in one": fused[best.key]})
        found = self.result(fused[best.key])[: step_products.CHECKED_ROWS]
        expected = self.expected + self.sets[0].c[: step_products.CHECKED_ROWS]
        error = relative_error(found, expected)
        return {"microseconds": times, "best": self.described(best), "error": error}


def right(error: float) -> bool:
    return error <= LARGEST_ERROR


# ── What is told ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

COLUMNS = "{:<44} {:>8} {:>8} {:>8} {:>7} {:>8} {:>10}  {}"
HEADLINE = COLUMNS.format("product", "TE us", "first", "best", "gain", "TFLOP/s", "algorithms", "the best")


def line(row: Row) -> str:
    name = "{model} {product} {which} {precision}".format(**row)
    if "failed" in row:
        return f"{name}: {row['failed']}"
    times = {name: f"{value:.1f}" for name, value in row["microseconds"].items()}
    settings = ", ".join(f"{name} {number}" for name, number in row["best"]["settings"].items() if number)
    return COLUMNS.format(
        name,
        times.get("transformer_engine", "-"),
        times["first"],
        times["best"],
        f"{row['gain']:+.1%}",
        f"{row['tflops']:.0f}",
        row["tried"] - row["refused"],
        f"{row['best']['source']} ({settings})",
    )


def usual(times: Mapping[str, float]) -> float:
    """What training takes today: Transformer Engine's time, or where it was not measured that of what it would take."""
    return times.get("transformer_engine", times["first"])


def steps(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Milliseconds of all products of a step, by model, format and chunk of the head, for those that were measured in full.

    What adding the residual in the product spares comes on top: it is against the fastest algorithm and a kernel that adds.
    """
    measured = {(row["model"], row["precision"], row["product"], row["which"]): row for row in rows if "failed" not in row}
    found = []
    for model, precision, chunk in itertools.product(dict.fromkeys(row["model"] for row in rows), PRECISIONS, HEAD_CHUNKS):
        chosen = []
        for product, which in itertools.product(("qkv", "o", "gate+up", "down", head_name(chunk)), ("forward", "dgrad", "wgrad")):
            of = "e4m3" if precision == "hybrid" and which == "forward" else precision
            chosen.append(measured.get((model, of, product, which)))
        if None in chosen:
            continue
        today = sum(row["count"] * usual(row["microseconds"]) for row in chosen) / 1e3
        best = sum(row["count"] * row["microseconds"]["best"] for row in chosen) / 1e3
        added = [(row["count"], row["residual"]["microseconds"]) for row in chosen if "microseconds" in row.get("residual", {})]
        spared = sum(count * (each["best"] - each["in one"]) for count, each in added) / 1e3
        step = {"model": model, "precision": precision, "head_chunk": chunk, "today_ms": today, "best_ms": best}
        found.append(step | {"spared_ms": today - best, "spared_by_residual_ms": spared})
    return found


def residual_lines(rows: Iterable[Row]) -> list[str]:
    found = []
    for row in rows:
        if "microseconds" in row.get("residual", {}):
            times = ", ".join(f"{name} {value:.1f}" for name, value in row["residual"]["microseconds"].items())
            found.append("{model} {product} {precision} and the residual, us: ".format(**row) + times)
    return found


def step_lines(found: Iterable[Row]) -> list[str]:
    text = "a step of {model}, {precision}, head in chunks of {head_chunk}: products {today_ms:.1f} ms, searched {best_ms:.1f}, "
    return [(text + "the residual added in them {spared_by_residual_ms:.1f} ms less").format(**step) for step in found]


if __name__ == "__main__":
    main()
