"""`--profile`: where the time of one step goes, as a trace and as a table by part of the model.

Time is assigned to parts by the names of kernels (on a GPU) or operators (on a CPU), and by whether the loss or the optimizer
started them: a kernel by the call that launched it, which has the same correlation id. The rest is gaps, in which recording
itself has its part.
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
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from foundation.errors import InputError
from foundation.files import save_file
from foundation.tables import markdown
from foundation.units import percent
from pretrain.checkpoint.state import TrainState
from pretrain.metrics.run_folder import PROFILE_FILE
from pretrain.model.loss.head import LOSS_SCOPE

PROFILED = 5  # the step of this process that is recorded: by then everything is compiled and caches are warm
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


class StepProfile:
    """Records one step of this process into `folder`; only the main process does."""

    def __init__(self, folder: Path, device: torch.device, steps_done: int) -> None:
        self.step = steps_done + PROFILED
        self._folder = folder
        self._device = device
        self._seconds: dict[str, float] = {}
        self._wall = 0.0

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
        """Put this around every `step`, which ends when the device has; it does nothing but for the one to record."""
        if step != self.step:
            yield
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

    def table(self, data_wait_ms: float) -> str:
        """The table of the recorded step, in Markdown; also writes it to the folder."""
        text = render(self._seconds, self._wall, data_wait_ms / 1e3)
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


def render(seconds: Mapping[str, float], wall: float, data_wait: float) -> str:
    """A Markdown table, the largest part first, gaps last; all times are of one step, in seconds."""
    parts = {**dict(sorted(seconds.items(), key=lambda item: -item[1])), "waiting for data": data_wait}
    parts["gaps"] = max(wall - sum(parts.values()), 0.0)
    rows = [(part, f"{spent * 1e3:.1f}", percent(spent / wall)) for part, spent in parts.items()]
    return markdown(("part of a step", "ms", "share"), [*rows, ("**the step**", f"{wall * 1e3:.1f}", "")])
