"""`--profile`: where the time of one step goes, as a trace and as a table by part of the model.

Time is assigned to parts by the names of kernels (on a GPU) or operators (on a CPU), and by whether the loss or the optimizer
started them: a kernel by the call that launched it, which has the same correlation id. The rest is gaps. Recording takes time
itself: by as much as the step is longer than the one before it, gaps are recording's own.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from foundation.errors import InputError
from foundation.files import save_file
from foundation.tables import markdown
from foundation.units import TERA, percent
from pretrain.checkpoint.state import TrainState
from pretrain.metrics.flops import LowPrecisionProducts, ModelFlops
from pretrain.metrics.run_folder import PROFILE_FILE
from pretrain.model.loss.head import LOSS_SCOPE

PROFILED = 5  # the step of this process that is recorded: by then everything is compiled and caches are warm
COPIED = 2**28  # bytes: what is copied to measure how fast a GPU copies
TRACE_FILE = "profile.json.gz"
_OPTIMIZER_SCOPE = "Optimizer.step"  # torch's own name for it

# In this order: names of attention kernels sometimes contain "gemm", those of products never "attention".
_KINDS = (
    ("attention", re.compile(r"flash|fmha|attention|sdpa|cudnn::fusion", re.I)),
    ("communication", re.compile(r"nccl|gloo|c10d::", re.I)),
    ("products", re.compile(r"gemm|nvjet|cutlass|cublas|xmma|aten::(mm|addmm_?|bmm|baddbmm|_scaled_mm)$", re.I)),
    ("quantization", re.compile(r"quantiz|cast_transpose|amax|fp8|mxfp8|nvfp4|hadamard", re.I)),
    ("copies", re.compile(r"memcpy|memset|aten::copy_$", re.I)),
)
# Our own Triton kernels, by the names that they have in their modules, and those that they stand in for.
_OURS = (
    ("optimizer", re.compile(r"^_adamw")),
    ("loss", re.compile(r"^_softmax")),
    ("activations", re.compile(r"^_swiglu|gated_act|gelu", re.I)),
    ("rotation", re.compile(r"^_?rotate_")),
    ("norms", re.compile(r"rms_?norm|layer_?norm|ln_(fwd|bwd)", re.I)),
)
_REST = "everything else"
# Categories of events in a chrome trace: calls that launch, and what runs on the GPU.
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Work:
    """What the profiled step computed, to compare its parts with the device's limits. Peaks: dense TFLOP/s of one device."""

    flops: ModelFlops | None
    tokens: int  # of this device
    sum_squared_lengths: float
    peak_tflops: float | None
    low_precision: LowPrecisionProducts | None
    update_bytes: int  # that this device's optimizer reads and writes


class StepProfile:
    """Records one step of this process into `folder`; only the main process does."""

    def __init__(self, folder: Path, device: torch.device, steps_done: int) -> None:
        self.step = steps_done + PROFILED
        self._folder = folder
        self._device = device
        self._seconds: dict[str, float] = {}
        self._wall = 0.0
        self._before = float("inf")  # seconds of the step before it, which nobody records

    @classmethod
    def of(cls, folder: Path, accelerator: Accelerator, state: TrainState) -> StepProfile | None:
        """Returns the profile of a run about to begin; None except on the main process. InputError where the run ends before that
        step."""
        profile = cls(folder, accelerator.device, state.step)
        if profile.step > state.steps:
            raise InputError(
                f"`--profile` records step {profile.step}, by when everything is compiled, and the run ends with step "
                f"{state.steps}; train longer (`train`), or leave it out"
            )
        return profile if accelerator.is_main_process else None

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Put this around every `step`, which ends when the device has; it does nothing but for the one to record and the one
        before."""
        if step != self.step:
            began = time.perf_counter()
            yield
            if step == self.step - 1:
                self._before = time.perf_counter() - began
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._device.type == "cuda" else [])]
        with profile(activities=activities) as recorded:
            began = time.perf_counter()
            yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._wall = time.perf_counter() - began
        recorded.export_chrome_trace(str(self._folder / TRACE_FILE))
        if self._device.type == "cuda":
            with gzip.open(self._folder / TRACE_FILE, "rt", encoding="utf-8") as file:
                self._seconds = by_launch(json.load(file)["traceEvents"])
        else:
            self._seconds = by_operator(recorded.events())

    def table(self, work: Work, data_wait_ms: float) -> str:
        """The table of the recorded step, in Markdown; also writes it to the folder."""
        rates = reached(self._seconds, work, copy_bandwidth(self._device))
        text = render(self._seconds, self._wall, self._before, data_wait_ms / 1e3, rates)
        save_file(self._folder / PROFILE_FILE, f"{text}\n".encode(), "what it held before is untouched")
        return text


def by_operator(events: list[FunctionEvent]) -> dict[str, float]:
    """Seconds by part of the model, on a CPU: of operators without what they call."""
    seconds: Counter[str] = Counter()
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CPU and event.name.startswith(("aten::", "c10d::", "gloo")):
            seconds[part_of(event.name, _scopes(event))] += event.self_cpu_time_total / 1e6
    return dict(seconds)


def by_launch(trace: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds by part of the model, on a GPU: of kernels, by where in the program each was launched. `trace`: events of a chrome
    trace, in which a kernel and the call that launched it have one correlation id, and scopes are intervals of a thread."""
    scopes: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)  # by thread: begin, end, name
    launches: dict[int, tuple[Any, float]] = {}  # by correlation id: thread and time
    kernels = []
    for event in trace:
        category, correlation = event.get("cat"), event.get("args", {}).get("correlation")
        if category == "user_annotation":
            scopes[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif category in _LAUNCHES and correlation is not None:
            launches[correlation] = (event["tid"], event["ts"])
        elif category in _ON_GPU:
            kernels.append((event["name"], correlation, event["dur"]))
    for intervals in scopes.values():
        intervals.sort()
    seconds: Counter[str] = Counter()
    for name, correlation, microseconds in kernels:
        thread, moment = launches.get(correlation, (None, 0.0))
        # Of intervals that begin before it, any that has not ended: a step has some dozens, one for each microbatch's loss.
        begun = scopes[thread][: bisect_right(scopes[thread], moment, key=lambda each: each[0])]
        seconds[part_of(name, {scope for _, end, scope in begun if moment <= end})] += microseconds / 1e6
    return dict(seconds)


def part_of(name: str, scopes: set[str]) -> str:
    """The part of the model that a kernel or operator of this name belongs to if it was started within `scopes`."""
    if own := next((part for part, pattern in _OURS if pattern.search(name)), None):
        return own
    kind = next((kind for kind, pattern in _KINDS if pattern.search(name)), _REST)
    if any(scope.startswith(_OPTIMIZER_SCOPE) for scope in scopes):
        return "optimizer"
    if LOSS_SCOPE in scopes:
        return "products of the head" if kind == "products" else "loss"
    return "products of the layers" if kind == "products" else kind


def _scopes(event: FunctionEvent) -> set[str]:
    names = set()
    while event is not None:
        names.add(event.name)
        event = event.cpu_parent
    return names


def reached(seconds: Mapping[str, float], work: Work, copied_per_second: float | None) -> dict[str, str]:
    """The rate that each part of known work reached, and its share of the device's limit."""
    rates = {}
    if work.flops is not None:
        parts = work.flops.by_part(work.tokens, work.sum_squared_lengths)
        low, peak = work.low_precision, work.peak_tflops
        done = {
            "products of the layers": (parts["attention projections"] + parts["mlp"], low.peak_tflops if low else peak),
            "products of the head": (parts["head"], low.peak_tflops if low and low.head else peak),
            "attention": (parts["attention products"], peak),
        }
        for part, (flops, limit) in done.items():
            if seconds.get(part):
                tflops = flops / seconds[part] / TERA
                rates[part] = f"{tflops:.4g} TFLOP/s" + (f", {percent(tflops / limit)} of the peak" if limit else "")
    if seconds.get("optimizer"):
        rate = work.update_bytes / seconds["optimizer"]
        share = f", {percent(rate / copied_per_second)} of a copy's" if copied_per_second else ""
        rates["optimizer"] = f"{rate / 1e9:.4g} GB/s{share}"
    return rates


def copy_bandwidth(device: torch.device, size: int = COPIED) -> float | None:
    """Bytes a second, read and written, of a copy of `size` bytes on the GPU, measured now; None on a CPU, where caches distort
    it."""
    if device.type != "cuda":
        return None
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target, begin, end = torch.empty_like(source), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the second time counts: the first one pays for the memory
        begin.record()
        for _ in range(10):
            target.copy_(source)
        end.record()
    torch.cuda.synchronize(device)
    return 10 * 2 * size / (begin.elapsed_time(end) / 1e3)


def render(seconds: Mapping[str, float], wall: float, unrecorded: float, data_wait: float, rates: Mapping[str, str]) -> str:
    """A Markdown table, the largest part first, gaps last. `unrecorded`: seconds of a step like it that nobody recorded."""
    gaps = max(wall - sum(seconds.values()) - data_wait, 0.0)
    of_recording = min(gaps, max(wall - unrecorded, 0.0))
    parts = {**dict(sorted(seconds.items(), key=lambda item: -item[1])), "waiting for data": data_wait}
    parts |= {"gaps": gaps - of_recording, "gaps, by recording": of_recording}
    rows = [(part, f"{spent * 1e3:.1f}", percent(spent / wall), rates.get(part, "")) for part, spent in parts.items()]
    return markdown(("part of a step", "ms", "share", "reaches"), [*rows, ("**the step**", f"{wall * 1e3:.1f}", "", "")])
