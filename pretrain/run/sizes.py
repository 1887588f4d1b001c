"""Memory and speed over microbatch sizes, measured on this machine, and what follows for sizes that were not tried.

A trial is a real step of two microbatches, and a real update, on a model as a run has it in memory. Memory and the seconds of a
microbatch are taken to be lines in packs. How far the lines are off is told in two ways: their largest distance from what was
measured, and how well the largest size is foreseen from the smaller ones, which is what an extrapolation does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
from accelerate import Accelerator

from foundation import units
from foundation.tables import UNKNOWN
from foundation.units import GIB, plural
from packing.arrow import Pack
from packing.batch import Microbatch, StepBatches
from pretrain.compare.appearance import colour_of
from pretrain.compare.figures import GREY, new_figure, save, style_panel
from pretrain.model.packed import forward_backward
from pretrain.optimizer.adamw import clear_gradients, clip_coefficient, gradient_norm
from pretrain.plan.data import Data
from pretrain.plan.preflight import Job
from pretrain.plan.remedies import is_out_of_memory
from pretrain.run.assembly import Assembly, assemble
from pretrain.run.microbatch import usable_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPEATS = 3  # timed steps of each size, after one that is not; fewer where they take longer than
STEPS_LONG = 10.0  # seconds together
TRIAL_LONG = 180.0  # seconds of all sizes together, after which no larger one is begun
MICROBATCHES = 2  # of a timed step: the second adds to the gradients of the first, as every later one does
BEYOND = 3  # doublings that are extrapolated
_PEAK, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Size:
    """What a microbatch of `packs` took, or would take."""

    packs: int
    memory: float | None  # bytes at the peak: allocated by torch on a GPU, of the whole process elsewhere; None: not measurable
    seconds: float  # of one microbatch's forward and backward
    update: float  # seconds of the optimizer's update
    measured: bool = True


@dataclass(frozen=True)
class Line:
    """`at_none + each * packs`, through what was measured."""

    at_none: float
    each: float
    off: float  # the largest distance of a measured value from it, as a share of the value
    foreseen: float | None  # by how much the largest size is missed by the line through the others; None: fewer than three sizes

    @classmethod
    def through(cls, packs: Sequence[int], values: Sequence[float]) -> Line:
        """Returns the line through two sizes or more, ascending: the least squares of the shares by which it is off."""

        def fit(count: int) -> tuple[float, float]:
            weights = 1 / np.array(values[:count])
            each, at_none = np.polyfit(packs[:count], values[:count], 1, w=weights)
            return float(at_none), float(each)

        at_none, each = fit(len(packs))
        off = max(abs(at_none + each * size - value) / value for size, value in zip(packs, values, strict=True))
        foreseen = None
        if len(packs) > 2:
            begins, slope = fit(len(packs) - 1)
            foreseen = abs(begins + slope * packs[-1] - values[-1]) / values[-1]
        return cls(at_none, each, off, foreseen)

    def at(self, packs: int) -> float:
        return self.at_none + self.each * packs

    def reliability(self) -> str:
        if self.foreseen is None:
            return "a line through two sizes, whose error cannot be told"
        foreseen = f"a line through the others misses the largest by {units.percent(self.foreseen)}"
        return f"a line that is at most {units.percent(self.off)} off; {foreseen}"


@dataclass(frozen=True)
class Sizes:
    """What was measured, ascending, and what follows."""

    measured: tuple[Size, ...]
    ended: str | None  # why no larger size was tried
    limit: int | None  # bytes that a microbatch may take; None: not known
    length: int  # tokens of a pack
    packs: int  # of a step on this device
    device: str
    precision: str

    @property
    def lines(self) -> tuple[Line | None, Line] | None:
        """Returns the lines of memory and of seconds; None with fewer than two sizes."""
        if len(self.measured) < 2:
            return None
        packs = [size.packs for size in self.measured]
        memory = [size.memory for size in self.measured]
        seconds = Line.through(packs, [size.seconds for size in self.measured])
        return (None if None in memory else Line.through(packs, memory)), seconds

    def extrapolated(self) -> Iterator[Size]:
        """Doublings of the largest size that was measured, by the lines, as far as they fit, up to all packs of a step. None
        where the seconds do not grow, as those of larger sizes would become negative."""
        if not self.lines or self.lines[1].each <= 0:
            return
        memory, seconds = self.lines
        last = self.measured[-1]
        for doubling in range(1, BEYOND + 1):
            packs = last.packs * 2**doubling
            needed = memory.at(packs) if memory else None
            if packs > self.packs or (self.limit and needed and needed > self.limit):
                return
            yield Size(packs, needed, seconds.at(packs), last.update, measured=False)

    def largest_that_fits(self) -> int | None:
        """Returns the packs that fit by the line of memory; None where memory was not measured, or does not grow."""
        memory = self.lines[0] if self.lines else None
        if memory is None or not self.limit or memory.each <= 0:
            return None
        return int((self.limit - memory.at_none) // memory.each)

    def speed(self, size: Size) -> float:
        """Tokens/s of a step on this device, which takes one microbatch at least."""
        packs = max(self.packs, size.packs)
        return packs * self.length / (-(-packs // size.packs) * size.seconds + size.update)


def stand_in(job: Job) -> Job:
    """`job` with packs of one document each, where its own are not prepared yet."""
    if job.data is not None:
        return job
    return replace(job, data=Data(UnpreparedPacks(job.recipe.data.length, job.model_config.vocab_size), None))


class UnpreparedPacks:
    """Packs as they are before there are any: each is one document, whose tokens count upwards through the vocabulary."""

    path, fingerprint, tokenizer = Path("unprepared"), "", None

    def __init__(self, length: int, vocabulary: int) -> None:
        self.length, self._vocabulary = length, vocabulary

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Pack:
        tokens = (np.arange(self.length) + index * self.length) % self._vocabulary
        return Pack(tokens.astype(np.uint32), self.lengths(index))

    def lengths(self, index: int) -> np.ndarray:
        return np.array([self.length], dtype=np.int32)

    def verify(self) -> None:
        """Does nothing: none of it is on a disk."""


def measure(job: Job, accelerator: Accelerator, sizes: Sequence[int], said: Callable[[str], None]) -> Sizes:
    """Try `sizes` (packs), ascending, until one does not fit; `said` hears of each. On a CPU, whose memory cannot be run out of
    without being killed, only those that the plan's estimate expects to fit into what is free now."""
    job, device = stand_in(job), accelerator.device
    on_gpu = device.type == "cuda"
    limit = usable_memory(device) if on_gpu else psutil.virtual_memory().available
    fits = {size for size in sizes if on_gpu or job.plan.memory.total(size) <= limit}
    ended = None if len(fits) == len(sizes) else f"{plural(min(set(sizes) - fits), 'pack')} would not fit by the estimate"
    of = {"length": job.recipe.data.length, "packs": job.plan.packs_per_rank}
    of |= {"device": job.plan.devices.name, "precision": job.active.precision.name}
    if not fits:
        return Sizes((), ended, limit, **of)
    found: list[Size] = []
    assembly = assemble(job, accelerator)
    began = time.perf_counter()
    for packs in sorted(fits):
        if found and (took := time.perf_counter() - began) > TRIAL_LONG:
            ended = f"the others took {units.duration(took)}; --sizes names those to try"
            break
        try:
            found.append(try_size(assembly, accelerator, job, packs))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            ended = f"{plural(packs, 'pack')} did not fit"
            clear_gradients(assembly.optimizer, assembly.model)
            break
        said(f"{plural(packs, 'pack')}: {units.duration(found[-1].seconds)} a microbatch")
    return Sizes(tuple(found), ended, limit, **of)


def try_size(assembly: Assembly, accelerator: Accelerator, job: Job, packs: int) -> Size:
    """Times steps of two microbatches of so many packs, and their updates."""
    device, batch = accelerator.device, job.data.trial_batch(packs)
    torch.compiler.reset()  # each size is compiled for itself
    assembly.model.train()
    _reset_peak(device)
    _timed_step(assembly, accelerator, batch, job)  # which compiles, and allocates
    steps = [_timed_step(assembly, accelerator, batch, job)]
    while len(steps) < REPEATS and sum(map(sum, steps)) < STEPS_LONG:
        steps.append(_timed_step(assembly, accelerator, batch, job))
    seconds, update = (statistics.median(each) for each in zip(*steps, strict=True))
    return Size(packs, _peak(device), seconds / MICROBATCHES, update)


def _timed_step(assembly: Assembly, accelerator: Accelerator, batch: Microbatch, job: Job) -> tuple[float, float]:
    """Seconds of forward and backward of all microbatches, and of the update."""
    valid = max(batch.valid_tokens * MICROBATCHES, 1)
    batches = StepBatches([batch] * MICROBATCHES, valid, valid, 0, 0.0)
    began = _now(accelerator.device)
    forward_backward(assembly.model, batches, accelerator)
    between = _now(accelerator.device)
    clip = clip_coefficient(gradient_norm(assembly.model.parameters()), job.recipe.optimizer.clip)
    assembly.optimizer.step(clip_coefficient=clip)
    clear_gradients(assembly.optimizer, assembly.model)
    return between - began, _now(accelerator.device) - between


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        _RESET.write_text("5")  # Linux: the peak of the resident memory begins anew
    except OSError:
        return


def _peak(device: torch.device) -> float | None:
    """Bytes at the peak since it was reset; None where the system does not tell."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        lines = _PEAK.read_text().splitlines()
    except OSError:
        return None
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def described(sizes: Sizes) -> tuple[tuple[str, ...], list[list[str]], list[str]]:
    """Header and rows of the table, and what stands below it."""
    rows = []
    for size in (*sizes.measured, *sizes.extrapolated()):
        memory = UNKNOWN if size.memory is None else units.memory(size.memory / GIB)
        figures = [f"{size.packs * sizes.length:,}", memory, f"{1e3 * size.seconds:,.4g}", f"{sizes.speed(size):,.0f}"]
        rows.append([str(size.packs), *figures, "measured" if size.measured else "extrapolated"])
    return ("packs", "tokens", "memory", "ms a microbatch", "tokens/s", ""), rows, list(_notes(sizes))


def _notes(sizes: Sizes) -> Iterator[str]:
    held = "this process held" if sizes.device == "CPU" else "torch allocated"
    update = units.duration(sizes.measured[-1].update)
    steps = f"whole steps of {plural(sizes.packs, 'pack')} or more"
    yield f"memory: the most that {held}; tokens/s: of {steps}, with an update of {update}"
    if sizes.lines:
        shown = ("memory", lambda amount: units.memory(amount / GIB)), ("time", units.duration)
        for (what, said), line in zip(shown, sizes.lines, strict=True):
            if line and line.each > 0:
                begins = "" if line.at_none <= 0 else f"{said(line.at_none)} + "
                yield f"{what} is {begins}{said(line.each)} a pack: {line.reliability()}"
            elif line:
                yield f"{what} does not grow with the packs, as far as was measured"
    if most := sizes.largest_that_fits():
        of_a_step = f"; a step has {sizes.packs}" if most > sizes.packs else ""
        yield f"by that line, the {units.memory(sizes.limit / GIB)} that may be used here hold {plural(most, 'pack')}{of_a_step}"
    if sizes.ended:
        yield f"no larger size was tried: {sizes.ended}"


def draw(sizes: Sizes, path: Path, name: str) -> None:
    """Memory and speed over packs as the PNG at `path`: measured points, and lines beyond them dashed."""
    figure, colour = new_figure(9, 3.6), colour_of(sizes.precision)
    left, right = figure.subplots(1, 2)
    beyond = [sizes.measured[-1], *sizes.extrapolated()]

    def panel(axes: Axes, title: str, value: Callable[[Size], float | None]) -> None:
        style_panel(axes)
        axes.set_title(title, loc="left", fontsize="medium")
        points = [(size.packs, value(size)) for size in sizes.measured if value(size) is not None]
        if points and len(beyond) > 1:
            ahead = [(size.packs, value(size)) for size in beyond]
            axes.plot(*zip(*ahead, strict=True), "o--", color=colour, mfc="white", label="extrapolated")
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label="measured")
        axes.set_xscale("log", base=2)
        ticks = [size.packs for size in (*sizes.measured, *beyond[1:])]
        axes.set_xticks(ticks, [str(each) for each in ticks])
        axes.minorticks_off()
        axes.set_xlabel(f"packs of {sizes.length:,} tokens a microbatch")
        axes.margins(x=0.06, y=0.1)

    panel(left, "memory at the peak, GiB", lambda size: size.memory and size.memory / GIB)
    panel(right, "tokens/s", sizes.speed)
    if left.lines and sizes.limit and sizes.limit / GIB < 3 * left.get_ylim()[1]:
        left.axhline(sizes.limit / GIB, color=GREY, linestyle=":", label=f"{units.memory(sizes.limit / GIB)} may be used")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    (left if left.lines else right).legend(frameon=False, fontsize="small")
    figure.suptitle(f"{name}, {sizes.precision}, on {sizes.device}", x=0.01, ha="left", weight="bold")
    save(figure, path)
