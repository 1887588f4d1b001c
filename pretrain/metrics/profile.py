"""`--profile`: where the time of one step goes, as a trace and as a table by part of the model.

Time is assigned to parts by the names of kernels (on a GPU) or operators (on a CPU), and by whether the loss or the optimizer
started them. The rest is gaps. Recording takes time itself, so the table is for shares and `metrics.jsonl` for speeds.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from foundation.errors import InputError
from foundation.units import TERA, percent
from pretrain.checkpoint.state import TrainState
from pretrain.metrics.flops import LowPrecisionProducts, ModelFlops
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
# Our own Triton kernels, by the names that they have in their modules.
_OURS = (
    ("optimizer", re.compile(r"^_adamw")),
    ("loss", re.compile(r"^_softmax")),
    ("activations", re.compile(r"^_swiglu|gated_act|gelu", re.I)),
    ("rotation", re.compile(r"^_rotate")),
    ("norms", re.compile(r"rmsnorm|layer_?norm|ln_(fwd|bwd)", re.I)),
)
_REST = "everything else"


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

    @classmethod
    def of(cls, folder: Path, accelerator: Accelerator, state: TrainState) -> StepProfile | None:
        """For a run about to begin; None except on the main process. InputError where the run ends before that step."""
        profile = cls(folder, accelerator.device, state.step)
        if profile.step > state.steps:
            raise InputError(
                f"`--profile` records step {profile.step}, by when everything is compiled, and the run ends with step "
                f"{state.steps}; train longer (`train`), or leave it out"
            )
        return profile if accelerator.is_main_process else None

    @contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Put this around every `step`; it does nothing but for the one to record."""
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
        self._seconds = by_part(recorded.events(), on_gpu=self._device.type == "cuda")

    def table(self, work: Work, data_wait_ms: float) -> str:
        """The table of the recorded step, in Markdown; also writes it to the folder."""
        text = render(self._seconds, self._wall, data_wait_ms / 1e3, reached(self._seconds, work, copy_bandwidth(self._device)))
        (self._folder / PROFILE_FILE).write_text(text + "\n", encoding="utf-8")
        return text


def by_part(events: list[FunctionEvent], *, on_gpu: bool) -> dict[str, float]:
    """Seconds by part of the model: of kernels on a GPU, elsewhere of operators without what they call."""
    seconds: Counter[str] = Counter()
    operators = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    if not on_gpu:
        for event in operators:
            if event.name.startswith(("aten::", "c10d::", "gloo")):
                seconds[part_of(event.name, _scopes(event))] += event.self_cpu_time_total / 1e6
        return dict(seconds)
    names = {event.name for event in operators}  # a scope appears on the GPU too, as one long kernel
    totals: Counter[str] = Counter()
    for event in events:
        if event.device_type != torch.autograd.DeviceType.CPU and event.name not in names:
            totals[event.name] += event.time_range.elapsed_us() / 1e6
    # Operators know from which scope a kernel was launched, but list some kernels twice and some, like Triton's, not at all. So
    # they only decide how the time of all kernels of one name is divided over the parts.
    launched: dict[str, Counter[str]] = {}
    for event in operators:
        for kernel in event.kernels:
            launched.setdefault(kernel.name, Counter())[part_of(kernel.name, _scopes(event))] += kernel.duration
    for name, total in totals.items():
        shares = launched.get(name) or Counter({part_of(name, set()): 1.0})
        for part, weight in shares.items():
            seconds[part] += total * weight / sum(shares.values())
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
        for part, (flops, peak) in done.items():
            if seconds.get(part):
                tflops = flops / seconds[part] / TERA
                rates[part] = f"{tflops:.4g} TFLOP/s" + (f", {percent(tflops / peak)} of the peak" if peak else "")
    if seconds.get("optimizer"):
        rate = work.update_bytes / seconds["optimizer"]
        share = f", {percent(rate / copied_per_second)} of a copy's" if copied_per_second else ""
        rates["optimizer"] = f"{rate / 1e9:.4g} GB/s{share}"
    return rates


def copy_bandwidth(device: torch.device, size: int = 2**28) -> float | None:
    """Bytes a second, read and written, of a copy on the GPU, measured now; None on a CPU, where caches distort it."""
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


def render(seconds: Mapping[str, float], wall: float, data_wait: float, rates: Mapping[str, str]) -> str:
    """A Markdown table, the largest part first, gaps last."""
    gaps = max(wall - sum(seconds.values()) - data_wait, 0.0)
    parts = {**dict(sorted(seconds.items(), key=lambda item: -item[1])), "waiting for data": data_wait, "gaps": gaps}
    lines = ["| part of a step | ms | share | reaches |", "| --- | ---: | ---: | --- |"]
    lines += [
        f"| {part} | {spent * 1e3:.1f} | {percent(spent / wall)} | {rates.get(part, '')} |" for part, spent in parts.items()
    ]
    return "\n".join([*lines, f"| **the step** | {wall * 1e3:.1f} | | |"])
