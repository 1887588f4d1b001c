"""The reader of traces divides the time of a step on hand-made traces."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import step_traces
from foundation.errors import InputError
from tests.conftest import ROOT

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ALL_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "nvjet_sm90_qrtst_128x160_128x5_2x1_v_bz_coopA_algo2_TNT"
CAST = "cast_transpose_optimized_kernel(__nv_bfloat16 const*, float const*, __nv_fp8_e4m3*, __"

# Name, start and end of kernels in microseconds, in the order of their launches.
Kernels = Sequence[tuple[str, float, float]]
GEMMS = [(GEMM, 0, 90), (GEMM, 90, 190), (GEMM, 190, 300), (GEMM, 300, 420)]
# One GPU does the work of two ranks.
ONE: Kernels = (*GEMMS, (CAST, 420, 470), ("_adamw", 470, 490))
# Rank 0 waits for rank 1 in both collectives. The first all-reduce is the barrier.
RANK_0: Kernels = (
    (CAST, 0, 5),
    (ALL_REDUCE, 5, 10),
    (GEMM, 20, 120),
    (ALL_GATHER, 130, 200),
    (GEMM, 160, 280),
    (REDUCE_SCATTER, 280, 340),
    (CAST, 300, 330),
)
RANK_1: Kernels = (
    (ALL_REDUCE, 0, 10),
    (GEMM, 20, 150),
    (ALL_GATHER, 150, 200),
    (GEMM, 200, 310),
    (REDUCE_SCATTER, 310, 340),
    (CAST, 340, 370),
)
# Calls of the host on rank 0: name, thread, start and end.
CALLS = (
    ("cudaLaunchKernel", 1, 10, 15),
    ("cudaStreamSynchronize", 1, 0, 12),
    ("cudaEventSynchronize", 1, 100, 300),
    ("cudaEventSynchronize", 2, 50, 350),
)


def write_trace(
    folder: Path,
    rank: int,
    kernels: Kernels,
    calls: Sequence[tuple[str, int, float, float]] = (),
    category: str = "cuda_runtime",
) -> None:
    """Write a trace of torch's profiler. Its kernels are not in the order of their times.

    category: that of the calls.
    """
    records = [{"ph": "M", "name": "process_name", "pid": 0}]
    records.append({"ph": "X", "cat": "Trace", "name": "PyTorch Profiler", "ts": 0, "dur": 999})
    for number, (name, start, end) in reversed(list(enumerate(kernels))):
        place = {"pid": rank, "tid": 7, "args": {"stream": 7, "correlation": number}}
        times = {"ts": start, "dur": end - start}
        records.append({"ph": "X", "cat": "kernel", "name": name} | times | place)
    for name, thread, start, end in calls:
        place = {"pid": 9, "tid": thread, "args": {"correlation": 100}}
        times = {"ts": start, "dur": end - start}
        records.append({"ph": "X", "cat": category, "name": name} | times | place)
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / f"rank_{rank}.json.gz", "wt") as file:
        json.dump({"traceEvents": records}, file)


def read_one(folder: Path, kernels: Kernels = ONE) -> step_traces.RankStep:
    write_trace(folder, 0, kernels)
    return step_traces.read_step(folder)[0]


def read_two(folder: Path) -> list[step_traces.RankStep]:
    write_trace(folder, 0, RANK_0, CALLS)
    write_trace(folder, 1, RANK_1)
    return step_traces.read_step(folder)


# ── The parts of a step ───────────────────────────────────────────────────────────────────────────


def test_each_part_of_a_step_is_measured_and_adds_up_to_the_lost_time(tmp_path: Path) -> None:
    """The expected times are from a drawing of the two ranks."""
    one_gpu = read_one(tmp_path / "one")
    two = step_traces.explain(read_two(tmp_path / "two"), one_gpu, 0.4)
    expected = {
        "gemm": [0.220, 0.240],
        "quantize": [0.030, 0.030],
        "communication": [0.020, 0.080],
        "waiting": [0.040, 0.0],
        "idle": [0.090, 0.050],
    }
    for part, times in two["by_rank_ms"].items():
        assert times == pytest.approx(expected.get(part, [0.0, 0.0])), part
        assert two["parts_ms"][part] == pytest.approx(sum(times) / 2)
    # On one GPU, the second GEMM of a rank takes 100 and 120 us. On rank 0, it is beside the
    # all-gather, and takes 120 us.
    assert two["gemms_slowed_ms"] == pytest.approx((0.120 - 0.110) / 2)
    # The host of rank 0 waits for 200 us in the thread that launches.
    assert two["host_ms"] == pytest.approx((0.2 + 0.4) / 2)
    assert two["collectives"] == 2
    assert two["largest"][0] == {"name": GEMM, "kind": "gemm", "count": 2, "ms": 0.22}

    one = step_traces.explain([one_gpu], None, 0.5)
    causes = {
        "total": 0.38 - 0.49 / 2,
        "communication": 0.050,
        "waiting": 0.020,
        "gemms_slowed": 0.005,
        "quantize_and_cast": 0.030 - 0.050 / 2,
        "host": 0.070 - 0.010 / 2,
        # GEMMs, without the slowed one, and AdamW, which the ranks do not run here.
        "other": (0.230 - 0.420 / 2 - 0.005) - 0.020 / 2,
        # The traced steps took 0.4 - 0.5 / 2 = 0.15 ms more, and the usual ones 0.135 ms.
        "remainder": -0.015,
    }
    assert step_traces.lost(0.38, two, 0.49, one, gpus=2) == pytest.approx(causes)
    assert step_traces.lost(0.49, one, 0.49, one, gpus=1)["total"] == 0


def test_other_numbers_of_gemms_are_not_compared(tmp_path: Path) -> None:
    """A reduction of a split GEMM does not count."""
    ranks = read_two(tmp_path / "two")
    one = read_one(tmp_path / "one", [*ONE, ("cublasLt::splitKreduce_kernel<32, 16>", 490, 495)])
    assert step_traces.slower_gemms(ranks, one) == pytest.approx([0.010, 0.0])
    # The second of two GEMMs of three ranks.
    one = read_one(tmp_path / "one", [*GEMMS, (GEMM, 420, 510), (GEMM, 510, 610)])
    expected = 0.120 - (0.100 + 0.120 + 0.100) / 3
    assert step_traces.slower_gemms(ranks[:1] * 3, one) == pytest.approx([expected] * 3)
    one = read_one(tmp_path / "one", ONE[1:])
    explanation = step_traces.explain(ranks, one, 0.4)
    assert explanation["gemms_slowed_ms"] is None
    alone = step_traces.explain([one], None, 0.5)
    causes = step_traces.lost(0.4, explanation, 0.5, alone, gpus=2)
    assert causes["gemms_slowed"] is None
    assert causes["other"] == pytest.approx(0.230 - 0.330 / 2 - 0.020 / 2)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({}, "measure again"),
        ({1: RANK_1}, r"ranks \[1\]"),
        ({0: RANK_0[:2], 1: RANK_1}, "no kernels"),
        ({0: RANK_0[:4], 1: RANK_1}, "different collectives"),
    ],
)
def test_missing_and_different_traces_are_refused(
    ranks: dict[int, Kernels], message: str, tmp_path: Path
) -> None:
    for rank, kernels in ranks.items():
        write_trace(tmp_path, rank, kernels)
    with pytest.raises(InputError, match=message):
        step_traces.read_step(tmp_path)


def test_operations_of_a_cpu_that_only_call_others_are_dropped(tmp_path: Path) -> None:
    """The thread of Gloo runs at the same time as operations."""
    operations = [
        ("autograd::engine::evaluate_function: CopyBackward0", 1, 0, 100),
        ("aten::linear", 1, 0, 60),
        ("aten::mm", 1, 10, 50),
        ("aten::resolve_conj", 1, 20, 21),
        ("aten::copy_", 1, 70, 80),
        ("aten::mul", 1, 110, 120),
        ("gloo:all_reduce", 2, 75, 115),
    ]
    write_trace(tmp_path, 0, [], operations, "cpu_op")
    explanation = step_traces.explain(step_traces.read_step(tmp_path), None, 0.13)
    times = {part: ms for part, ms in explanation["parts_ms"].items() if ms}
    expected = {"gemm": 0.040, "copy": 0.010, "other": 0.010, "communication": 0.030, "idle": 0.040}
    assert times == pytest.approx(expected)
    assert explanation["host_ms"] is None


def test_kernels_have_their_kind() -> None:
    text = (ROOT / "benchmarks/results/speed/h200_step_profiles.md").read_text()
    published = re.findall(r"(?m)^ *[\d.]+ ms +\d+ +[\d.]+ us +(.+)$", text)
    others = (
        ALL_GATHER,
        "ncclSymDevKernel_AllGather_LLMC(ncclSymDevArgs)",
        "void at::native::(anonymous namespace)::split_with_sizes_copy_out_contiguous",
        "void at::native::(anonymous namespace)::chunk_cat_cuda_kernel<float>",
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "aten::addmm",
        "aten::linear",
    )
    patterns = {
        "^nvjet|addmm": "gemm",
        "flash_attn|^_differentiate_keys": "attention",
        "cast_transpose|^_quantize": "quantize",
        "^_adamw": "update",
        "^_softmax|^_swiglu_(forward|backward)|norm|^_?rotate|aten::linear": "other",
        "^nccl": "communication",
        "copy_out|chunk_cat|^Mem": "copy",
    }
    for pattern, kind in patterns.items():
        names = [name for name in (*published, *others) if re.search(pattern, name)]
        assert names and {step_traces.kind_of(name) for name in names} == {kind}


# ── Intervals ─────────────────────────────────────────────────────────────────────────────────────

intervals = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda pair: (pair[0], sum(pair))),
    max_size=12,
)


def cells(of: Sequence[tuple[float, float]]) -> set[int]:
    """Return the unit cells that intervals cover."""
    return {cell for start, end in of for cell in range(int(start), int(end))}


@given(intervals, intervals, intervals)
def test_a_time_counts_for_the_first_kind(
    first: list[tuple[int, int]], second: list[tuple[int, int]], third: list[tuple[int, int]]
) -> None:
    times = step_traces.exclusive({"first": first, "second": second, "third": third})
    a, b, c = map(cells, (first, second, third))
    assert list(times.values()) == [len(a), len(b - a), len(c - a - b)]


@given(intervals, st.integers(0, 30), st.integers(1, 8))
def test_overlaps_agree_with_cells(of: list[tuple[int, int]], start: int, size: int) -> None:
    merged = step_traces.union(of)
    assert cells(merged) == cells(of) and step_traces.length(merged) == len(cells(of))
    assert all(before[1] < after[0] for before, after in pairwise(merged))
    filled = [(begin, end) for begin, end in of if begin < end]
    overlapping = bool(cells(of) & cells([(start, start + size)]))
    assert step_traces.overlaps((start, start + size), step_traces.union(filled)) == overlapping
