"""Read traces of a training step on all ranks, and divide the time of the step by its causes.

The traces are those of `benchmarks.traced_training`. The time of a step on a rank has these parts:

* `gemm`, `attention`, `quantize`, `copy`, `update` and `other`: a kernel of this kind runs. If
  kernels of several kinds run at the same time, the time counts for the first of these kinds.
  `copy` contains casts, and the copies of FSDP2 before and after its collectives.
* `communication`: data is transferred between ranks, and no other kernel runs. This is exposed
  communication.
* `waiting`: a collective waits for a slower rank, and no other kernel runs.
* `idle`: nothing runs, because the host has not launched the next kernel yet.

A collective has the same transfer on all ranks. So its shortest kernel is on the rank that came
last and did not wait. On each other rank, the kernel begins with a wait, and its last part, which
is as long as the shortest kernel, is the transfer. Clocks of ranks are not compared.

On a CPU, operations take the place of kernels, and collectives are those of Gloo.
"""

from __future__ import annotations

import gzip
import json
import re
import statistics
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.errors import InputError

# Number of last steps of a run that are traced. The first of them loads the profiler.
TRACED = 2
# Patterns in the names of kernels and operations. The first pattern that fits gives the kind.
PATTERNS = {
    "communication": r"^nccl|^gloo:",
    "attention": r"flash|attention|attend|fmha|sdpa|_differentiate_(scores|queries|keys)",
    "gemm": r"nvjet|gemm|xmma|cutlass|splitk|aten::(addmm|mm|bmm|baddbmm)$",
    "quantize": r"cast_transpose|cast_kernel|transpose_kernel|quantize(?!d)|amax|delayed_scaling",
    "copy": r"copy|memcpy|memset|chunk_cat",
    "update": r"adam",
}
COMPUTE = ("gemm", "attention", "quantize", "copy", "update", "other")
PARTS = (*COMPUTE, "communication", "waiting", "idle")
# cuBLAS adds the parts of a split GEMM in a kernel of its own. Not every algorithm has one.
REDUCTION = "splitkreduce"
# Categories of records: work of the GPU, and calls of the host.
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
# A longer call waits for the GPU: it synchronizes, or the queue of launches is full. A launch takes
# some 5 microseconds.
LONG_CALL_US = 100
# Number of kernels in `largest`.
LARGEST = 16

Interval = tuple[float, float]


@dataclass(frozen=True)
class Event:
    """A kernel or an operation. Times are in milliseconds."""

    name: str
    kind: str
    start: float
    end: float
    # Order of launches in the process.
    order: float

    @property
    def interval(self) -> Interval:
        """Return start and end."""
        return self.start, self.end

    @property
    def duration(self) -> float:
        """Return the duration."""
        return self.end - self.start


@dataclass(frozen=True)
class RankStep:
    """The trace of a step on a rank."""

    # In the order of their launches.
    events: list[Event]
    # Times in which the host waits for the GPU. None on a CPU.
    host_waits: list[Interval] | None

    @property
    def collectives(self) -> list[Event]:
        """Return the collectives."""
        return [event for event in self.events if event.kind == "communication"]

    @property
    def gemms(self) -> list[Event]:
        """Return the GEMMs, without reductions of split GEMMs."""
        return [
            event
            for event in self.events
            if event.kind == "gemm" and REDUCTION not in event.name.lower()
        ]

    def after_first_collective(self) -> RankStep:
        """Return everything that starts after the first collective, which is a barrier."""
        begin = max((barrier.end for barrier in self.collectives[:1]), default=float("-inf"))
        waits = self.host_waits
        if waits is not None:
            waits = [wait for wait in waits if wait[0] >= begin]
        return RankStep([event for event in self.events if event.start >= begin], waits)


# ── Intervals ─────────────────────────────────────────────────────────────────────────────────────


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return sorted intervals without overlaps that cover the same times as `intervals`."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of intervals that do not overlap."""
    return sum(end - start for start, end in intervals)


def exclusive(intervals: Mapping[str, Iterable[Interval]]) -> dict[str, float]:
    """Return the time of each kind. A time with several kinds counts for the first of them."""
    times = {}
    covered: list[Interval] = []
    for kind, of_kind in intervals.items():
        before = length(covered)
        covered = union([*covered, *of_kind])
        times[kind] = length(covered) - before
    return times


def overlaps(interval: Interval, merged: Sequence[Interval]) -> bool:
    """Return True if `interval` overlaps one of the intervals in the result of `union`."""
    # The last interval that starts before the end of `interval` also has the latest end.
    place = bisect_left(merged, interval[1], key=lambda other: other[0])
    return place > 0 and merged[place - 1][1] > interval[0]


# ── Traces ────────────────────────────────────────────────────────────────────────────────────────


def kind_of(name: str) -> str:
    """Return the kind of a kernel or an operation."""
    for kind, pattern in PATTERNS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return "other"


def read_trace(path: Path) -> RankStep:
    """Return the content of a trace."""
    with gzip.open(path) as file:
        records = [record for record in json.load(file)["traceEvents"] if record["ph"] == "X"]
    if any(record.get("cat") in ON_GPU for record in records):
        events = [
            event_of(record, record["args"]["correlation"])
            for record in records
            if record.get("cat") in ON_GPU
        ]
        waits = host_waits(records)
    else:
        events = operations(records)
        waits = None
    # Kernels of a CUDA graph have one launch.
    return RankStep(sorted(events, key=lambda event: (event.order, event.start)), waits)


def event_of(record: Mapping[str, Any], order: float) -> Event:
    """Return the event of a record, whose times are in microseconds."""
    name = record["name"]
    return Event(name, kind_of(name), *interval_of(record), order)


def interval_of(record: Mapping[str, Any]) -> Interval:
    """Return the times of a record in milliseconds."""
    start = record["ts"] / 1e3
    return start, start + record["dur"] / 1e3


def host_waits(records: Sequence[Mapping[str, Any]]) -> list[Interval]:
    """Return the long calls of CUDA in threads that launch kernels."""
    calls = [record for record in records if record.get("cat") in CALLS]
    threads = {call["tid"] for call in calls if "Launch" in call["name"]}
    return union(
        interval_of(call) for call in calls if call["tid"] in threads and call["dur"] > LONG_CALL_US
    )


def operations(records: Sequence[Mapping[str, Any]]) -> list[Event]:
    """Return operations of a CPU. Operations that only call others are dropped.

    Operations of a known kind are not dropped. Some of them call a view or a copy first.
    """
    by_thread: dict[int, list[Event]] = defaultdict(list)
    for record in records:
        if record.get("cat") == "cpu_op" or record["name"].startswith("gloo:"):
            by_thread[record["tid"]].append(event_of(record, record["ts"]))
    events = []
    for of_thread in by_thread.values():
        of_thread.sort(key=lambda event: (event.start, -event.end))
        for event, following in zip(of_thread, [*of_thread[1:], None], strict=True):
            calls_others = following is not None and following.start < event.end
            only_calls = event.kind == "other" or event.name.startswith("autograd::")
            if not (calls_others and only_calls):
                events.append(event)
    return events


def read_step(folder: Path) -> list[RankStep]:
    """Return the traces of a step by rank. The step begins after the first collective.

    Raises InputError if a trace is missing or empty, or if the ranks have different collectives.
    """
    paths = {int(path.name.split(".")[0].split("_")[1]): path for path in folder.glob("rank_*")}
    if not paths or sorted(paths) != list(range(len(paths))):
        raise InputError(f"{folder}: has traces of the ranks {sorted(paths)}; measure again")
    ranks = [read_trace(paths[rank]) for rank in sorted(paths)]
    if len(ranks) > 1:
        ranks = [rank.after_first_collective() for rank in ranks]
    if not all(rank.events for rank in ranks):
        raise InputError(f"{folder}: a trace has no kernels and no operations; measure again")
    sequences = {tuple(_operation(event.name) for event in rank.collectives) for rank in ranks}
    if len(sequences) > 1:
        raise InputError(f"{folder}: the ranks have different collectives; measure again")
    return ranks


def _operation(name: str) -> str:
    """Return the operation of a collective: "ncclDevKernel_AllGather" or "gloo:all_gather"."""
    return "_".join(name.split("(")[0].split("_")[:2])


# ── The parts of a step ───────────────────────────────────────────────────────────────────────────


def parts_of(ranks: Sequence[RankStep], step_ms: float) -> list[dict[str, float]]:
    """Return the milliseconds of each part of the step, by rank. They add up to `step_ms`."""
    matched = zip(*(rank.collectives for rank in ranks), strict=True)
    shortest = [min(event.duration for event in events) for events in matched]
    parts = []
    for rank in ranks:
        intervals: dict[str, list[Interval]] = {part: [] for part in PARTS if part != "idle"}
        for event in rank.events:
            if event.kind != "communication":
                intervals[event.kind].append(event.interval)
        for event, transfer in zip(rank.collectives, shortest, strict=True):
            intervals["waiting"].append((event.start, event.end - transfer))
            intervals["communication"].append((event.end - transfer, event.end))
        times = exclusive(intervals)
        parts.append(times | {"idle": step_ms - sum(times.values())})
    return parts


def slower_gemms(ranks: Sequence[RankStep], one: RankStep) -> list[float] | None:
    """Return the milliseconds that GEMMs beside a collective take longer than on one GPU, by rank.

    one: the step on one GPU, which does the work of all ranks.

    The GEMMs are compared in their order. Return None if the numbers of GEMMs differ.
    """
    alone = [gemm.duration for gemm in one.gemms]
    slower = []
    for rank in ranks:
        gemms = rank.gemms
        if len(gemms) * len(ranks) != len(alone):
            return None
        beside = union(event.interval for event in rank.collectives)
        slower.append(
            sum(
                gemm.duration - statistics.fmean(alone[place :: len(gemms)])
                for place, gemm in enumerate(gemms)
                if overlaps(gemm.interval, beside)
            )
        )
    return slower


def explain(ranks: Sequence[RankStep], one: RankStep | None, step_ms: float) -> dict[str, Any]:
    """Return the parts of a traced step, as means over ranks and by rank, in milliseconds.

    ranks: the traces of the step, by rank.
    one: the trace of one GPU, which does the work of all ranks in a step. None if it is missing.
    step_ms: the time of the traced step.

    `host_ms` is the time in which the host does not wait for the GPU. If it is as long as the step,
    the GPU waits for the host. `largest` has the kernels of the first rank with the most time.
    """
    parts = parts_of(ranks, step_ms)
    by_rank = {part: [round(times[part], 3) for times in parts] for part in PARTS}
    slower = slower_gemms(ranks, one) if one is not None and len(ranks) > 1 else None
    host = [step_ms - length(rank.host_waits) for rank in ranks if rank.host_waits is not None]
    return {
        "step_ms": step_ms,
        "collectives": len(ranks[0].collectives),
        "parts_ms": {part: statistics.fmean(values) for part, values in by_rank.items()},
        "by_rank_ms": by_rank,
        "gemms_slowed_ms": statistics.fmean(slower) if slower else None,
        "host_ms": statistics.fmean(host) if host else None,
        "largest": largest(ranks[0].events),
    }


def largest(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the kernels with the most time: name, kind, number and milliseconds."""
    durations: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        durations[event.name[:100], event.kind].append(event.duration)
    rows = [
        {"name": name, "kind": kind, "count": len(values), "ms": round(sum(values), 3)}
        for (name, kind), values in durations.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])[:LARGEST]


def lost(
    step_ms: float, explanation: Mapping[str, Any], one_ms: float, one: Mapping[str, Any], gpus: int
) -> dict[str, float | None]:
    """Return the milliseconds of a step by which `gpus` GPUs are slower than `gpus` times one.

    step_ms: the usual time of a step, without tracing.
    explanation: the result of `explain`.
    one_ms, one: the same of one GPU, which does the work of all GPUs in one step.

    `other` has all kernels that have no cause of their own. `remainder` is the difference between
    the sum of all causes and `total`: the traced step was slower or faster than usual.
    `gemms_slowed` is None if it was not measured. Then `other` contains it.
    """
    more = {part: ms - one["parts_ms"][part] / gpus for part, ms in explanation["parts_ms"].items()}
    slowed = explanation["gemms_slowed_ms"]
    total = step_ms - one_ms / gpus
    causes = {
        "communication": more["communication"],
        "waiting": more["waiting"],
        "gemms_slowed": slowed,
        "quantize_and_cast": more["quantize"] + more["copy"],
        "host": more["idle"],
        "other": more["gemm"] - (slowed or 0) + more["attention"] + more["update"] + more["other"],
    }
    explained = sum(ms for ms in causes.values() if ms is not None)
    return {"total": total, **causes, "remainder": total - explained}
