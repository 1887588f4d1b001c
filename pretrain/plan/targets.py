"""What a plan would take on devices that are not here: speed from a share of their peak or from a user's own runs, hours, cost,
and the microbatch that fits by the estimate of memory.

A run's speed goes over to another device, model or number of devices as floating-point operations: what it reached on each of
its devices, times the ratio of the two peaks. Over several devices of a machine it is `pretrain.plan.exchange` that says what
exchanges cost; a run on several has that in its speed already.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from foundation.errors import InputError
from foundation.tables import UNKNOWN
from foundation.units import GIB, TERA, plural
from pretrain.metrics.peaks import known_as, peak
from pretrain.metrics.run_record import WARM_UP_STEPS, RunRecord
from pretrain.model.attention.backends import MIN_MEASURED_HEAD_DIM
from pretrain.plan.exchange import on_devices, step_seconds
from pretrain.plan.memory import Devices, LayerMemory, layers_of
from pretrain.plan.plan import ASSUMED_SHARES, Plan
from pretrain.plan.preflight import Job
from pretrain.plan.spare import KEPT_FREE
from pretrain.precision.settings import PRECISIONS, ActivePrecision

LEAST = 50_000_000  # parameters, of a model whose speed a share of the peak can describe
USUAL = ("H100", "H200", "B200", "8xB200")
# GiB of one device, as CUDA reports them; the GB of data sheets (80, 141, 180) are 6 % fewer bytes. H200: as seen here. H100 SXM
# of 80 GB and B200: the "total capacity" in torch's messages, as others have reported it.
MEMORY = {"H100": 79.1, "H200": 139.8, "B200": 178.4}
SOLD_WITH = {"H100": 80, "H200": 141, "B200": 180}  # those GB: a name that says others is of a device with another memory
IN_ONE_HEADS = range(MIN_MEASURED_HEAD_DIM, 129)  # head sizes for which attention is one node with the rotation there
NEWEST_CUDA = (99, 0)  # whoever has the device is taken to have a CUDA for it
CAPABILITY = {"H100": (9, 0), "H200": (9, 0), "B200": (10, 0)}  # of their architecture, which precisions ask for


@dataclass(frozen=True)
class Target:
    """`count` devices of one machine, of the name that a driver or data sheet gives them."""

    name: str
    count: int = 1
    seen: int | None = None  # bytes of one, where it is the device of who plans

    @classmethod
    def parse(cls, text: str) -> Target:
        """`H200` or `8xB200`; InputError for a device whose peak is not known."""
        count, name = re.fullmatch(r"\s*(?:(\d+)\s*[xX]\s*)?(.*?)\s*", text, re.DOTALL).groups()
        if peak(name, "bf16") is None:
            raise InputError(
                f"--on {text}: no BF16 peak of {name!r} is known; give a device as its driver names it: H200, 8xB200, 'RTX 4090'"
            )
        if count is not None and not 1 <= int(count) <= 1024:
            raise InputError(f"--on {text}: {count} devices are no machine; give 1 to 1024")
        return cls(name, int(count or 1))

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"

    def is_called(self, device: str) -> bool:
        """Returns whether a driver's name is that of such a device."""
        return known_as(device, [self.name]) is not None

    @property
    def memory(self) -> int | None:
        """Bytes of one; None where it is neither here nor in the table."""
        if self.seen is not None:
            return self.seen
        known, said = known_as(self.name, MEMORY), re.search(r"(\d+)g", self.name.lower())
        return None if known is None or (said and int(said[1]) != SOLD_WITH[known]) else int(MEMORY[known] * GIB)

    @property
    def capability(self) -> tuple[int, int] | None:
        return CAPABILITY.get(known_as(self.name, CAPABILITY))

    def plan(self, job: Job) -> Plan:
        """The plan of `job` as it would be here: on hardware, and in shards where the model as a whole does not fit."""
        plan, active = job.plan, _on_hardware(job.active)
        layers = self._layers(job, active)
        phases = [
            replace(phase, active=_on_hardware(phase.active), layers=self._layers(job, _on_hardware(phase.active)))
            for phase in plan.phases
        ]
        usable = None if self.memory is None else int((1 - KEPT_FREE) * self.memory)
        alone = Devices(name=self.name, memory=usable, capability=self.capability)
        here = replace(plan, devices=alone, active=active, layers=layers, phases=phases, tokens_per_second=None)
        whole = on_devices(here, self.count, sharded=False)
        fits = usable is None or whole.memory.total(1) <= usable
        return whole if fits else on_devices(here, self.count, sharded=True)

    def _layers(self, job: Job, active: ActivePrecision) -> list[LayerMemory]:
        """Returns what each layer takes of memory: on Hopper and Blackwell as with Transformer Engine and cuDNN's attention or
        FlashAttention-4, which keep the same; elsewhere as this machine's libraries have it."""
        recipe, settings = job.recipe, job.recipe.model
        if self.capability is None or active.precision.compute_dtype != "bfloat16":
            return layers_of(job.shapes, recipe, active, "cuda", "packed_varlen")
        if settings.fused == "auto":
            recipe = recipe.model_copy(update={"model": settings.model_copy(update={"fused": "on"})})
        in_one = settings.attention in ("auto", "cudnn", "flash_attn") and job.plan.flops.shape.head_dim in IN_ONE_HEADS
        return layers_of(job.shapes, recipe, active, "cuda", "packed_fa4" if in_one else "packed_varlen", self.capability)

    def obstacle(self, plan: Plan) -> str | None:
        """Returns why `plan` cannot run on it or has no speed; None where it can."""
        for active in plan.actives:
            precision = PRECISIONS[active.requested]
            if precision.quantized and self.capability and (need := precision.hardware.missing(self.capability, NEWEST_CUDA)):
                return f"{precision.name} needs {need}"
            if peak(self.name, precision.peak) is None:
                return f"no {precision.name} peak is known of it"
        if plan.packs_per_step < self.count:
            least = self.count * plan.recipe.data.length
            return f"a step of {plural(plan.packs_per_step, 'pack')} is too small for it: `batch.tokens: {least}` at least"
        return None


@dataclass(frozen=True)
class MeasuredRun:
    """The speed of a finished or running training, as floating-point operations on each of its devices."""

    name: str
    device: str  # "CPU", or the driver's name of its GPUs
    devices: int
    precision: str
    tflops: float  # of each device
    steps: int  # behind the median

    @classmethod
    def of(cls, run: RunRecord) -> MeasuredRun:
        """InputError where its speed is not its own, is not the hardware's, or was not measured."""
        steady = run.steps[WARM_UP_STEPS:]
        known = [value for record in steady if (value := record.get("tflops"))]
        (devices, device), why = run.devices, None
        if run.side_by_side:
            why = "it shared its machine with other runs, so its speed is not its own"
        elif run.emulated:
            why = "its precision was emulated, so its speed is not the hardware's"
        elif "schedule" in run.audit and len(set(run.phases.values())) != 1:
            why = f"its precision was {run.audit['schedule']}, so its speed is that of several"
        elif not known:
            why = f"it has no measured tflops after its first {WARM_UP_STEPS} steps"
        if why:
            raise InputError(f"--run {run.path}: {why}; give another run, or leave it out")
        ran = [*run.phases.values(), run.audit.get("effective", run.config.get("precision"))]
        return cls(run.name, device, devices, ran[0], statistics.median(known), len(known))

    def tflops_on(self, target: Target) -> float | None:
        """Returns what it would reach on each of `target`'s devices at the same share of their peak; None where a peak is not
        known."""
        column = PRECISIONS[self.precision].peak
        if target.is_called(self.device):
            return self.tflops
        here, there = peak(self.device, column), peak(target.name, column)
        return self.tflops * there / here if here and there else None

    def described(self, target: Target) -> str:
        """Says by what a row of a table is reckoned."""
        column = PRECISIONS[self.precision].peak
        here, there = peak(self.device, column), peak(target.name, column)
        measured = f"run {self.name}: {self.devices} x {self.device}, measured over {plural(self.steps, 'step')}"
        if target.is_called(self.device):
            return measured
        return f"{measured}, x {there:g} / {here:g} TFLOP/s"


@dataclass(frozen=True)
class Estimate:
    """One target at one speed, or at a slow and a fast one. The last of each tuple is the fastest."""

    target: Target
    plan: Plan
    by: str  # where the speed is from
    tflops: tuple[float, ...] = ()  # of one device alone; empty: `obstacle`
    with_exchanges: bool = False  # the speed was measured on several devices, and holds what they exchange
    obstacle: str | None = None

    @property
    def is_guess(self) -> bool:
        """Whether a share of the peak is assumed that says nothing of a model so small: launches decide its speed."""
        return self.by.endswith("assumed") and self.plan.flops.parameters < LEAST

    @cached_property
    def tokens_per_second(self) -> tuple[float, ...]:
        return tuple(self._tokens_per_second(each) for each in self.tflops)

    def _tokens_per_second(self, tflops: float) -> float:
        """Returns tokens/s over all devices; on several, with what exchanges inside the machine cost. On two or more, some may
        lack packs."""
        alone = tflops * TERA / self.plan.flops_per_token
        if self.target.count == 1 or self.with_exchanges:
            return alone * self.target.count
        return self.plan.tokens_per_step / step_seconds(self.plan, alone)

    @property
    def hours(self) -> tuple[float, ...]:
        return tuple(self.plan.total_tokens / speed / 3600 for speed in self.tokens_per_second)

    def cost(self, prices: Mapping[str, float]) -> tuple[float, ...]:
        """Returns what all hours on all devices cost; none where no price is given. `prices`: of one device for an hour, by name,
        "" for any."""
        name = known_as(self.target.name, sorted(prices, key=len, reverse=True))  # H100 80GB before H100
        price = prices.get(name or "")
        return () if price is None else tuple(hours * price * self.target.count for hours in self.hours)

    def steps_in(self, hours: float) -> tuple[int, ...]:
        return tuple(int(speed * hours * 3600 / self.plan.tokens_per_step) for speed in self.tokens_per_second)


def estimates(
    job: Job, targets: Sequence[Target], runs: Sequence[MeasuredRun], shares: Sequence[float] = ()
) -> Iterator[Estimate]:
    """Yields the estimates for each target: first at the stated `shares` of its peak, or at assumed ones where none is stated,
    then by each run that can tell; last, those for devices that a run was on and that are no target."""
    wanted, stated = job.plan.requested, sorted(shares or ASSUMED_SHARES)
    for target in targets:
        here = target.plan(job)
        if obstacle := target.obstacle(here):
            yield Estimate(target, here, "", obstacle=obstacle)
            continue
        said = " to ".join(f"{100 * each:g}" for each in stated)
        one = here.peak_tflops / here.devices.count
        column = f"peaks of {here.computes}" if here.phases else f"{here.active.precision.peak} peak"
        yield Estimate(
            target,
            here,
            f"{said} % of the {column}, {'stated' if shares else 'assumed'}",
            tuple(each * one for each in stated),
        )
        for run in runs:
            if run.precision == wanted and (reached := run.tflops_on(target)):
                yield Estimate(target, here, run.described(target), (reached,), run.devices > 1 and target.count > 1)
    mine = job.plan.devices
    for run in runs:
        same = run.device == mine.name != "CPU"  # all CPUs have one name, whatever memory they have
        own = Target(run.device, run.devices, mine.memory if same else None)
        planned = any(target.count == own.count and target.is_called(own.name) for target in targets)
        if not planned and run.precision == wanted:
            here = own.plan(job)
            if own.name == "CPU":  # one of another machine has another memory
                here = replace(job.plan, devices=replace(job.plan.devices, count=own.count, name=own.name, memory=None))
            yield Estimate(own, here, run.described(own), (run.tflops,), with_exchanges=True)


def _on_hardware(active: ActivePrecision) -> ActivePrecision:
    return replace(active, backend="transformer_engine", reason=None) if active.backend == "emulation" else active


def left_out(job: Job, runs: Sequence[MeasuredRun], targets: Sequence[Target]) -> Iterator[str]:
    """Says which runs say nothing of which targets, and why."""
    wanted, able = job.plan.requested, [target for target in targets if target.obstacle(job.plan) is None]
    for run in runs:
        if run.precision != wanted:
            yield f"run {run.name} computed in {run.precision}, this plan in {wanted}: its speed is left out"
        elif unknown := ", ".join(str(target) for target in able if run.tflops_on(target) is None):
            yield f"run {run.name} was on {run.device}, of which no {wanted} peak is known: it says nothing of {unknown}"


def span(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Writes one figure, or the first to the last; a dash for none."""
    return " to ".join(dict.fromkeys(form(value) for value in values)) or UNKNOWN
