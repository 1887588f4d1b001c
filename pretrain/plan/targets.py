"""What a plan would take on devices that are not here: speed from a share of their peak or from a user's own runs, hours, cost,
and the microbatch that fits by the estimate of memory.

A run's speed goes over to another device, model or number of devices as floating-point operations: what it reached on each of
its devices, times the ratio of the two peaks.

Several devices of one machine lose time to exchanges: bytes over a share of NVLink's bandwidth. S is the size of what is
exchanged over g GPUs. In NCCL's rings each GPU sends (g - 1) / g · S to gather, or to reduce and scatter, and twice that to add
up over all. The share is no measured speed of NVLink: it is fitted so that the time for the bytes equals all that four H200s lost
(docs/scaling.md), ranks that wait for the slowest and updates that are not divided included. Over several machines nothing was
measured, so nothing is planned. A run on several devices has all that in its speed already.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from foundation.errors import InputError
from foundation.tables import UNKNOWN
from foundation.units import GIB, TERA, plural
from pretrain.metrics.peaks import known_as, peak
from pretrain.metrics.run_record import WARM_UP_STEPS, RunRecord
from pretrain.model.attention.backends import MIN_MEASURED_HEAD_DIM
from pretrain.plan.memory import Devices, LayerMemory, layers_of
from pretrain.plan.plan import ASSUMED_SHARES, Plan
from pretrain.plan.preflight import Job, fits_gathered
from pretrain.plan.spare import KEPT_FREE, spend_spare_memory
from pretrain.precision.settings import PRECISIONS, ActivePrecision

LEAST = 50_000_000  # parameters, of a model whose speed a share of the peak can describe
USUAL = ("H100", "H200", "B200", "8xB200")
# GiB of one device, as CUDA reports them; the GB of data sheets (80, 141, 180) are 6 % fewer bytes. H200: as seen here. H100 SXM
# of 80 GB and B200: the "total capacity" in torch's messages, as others have reported it.
MEMORY = {"H100": 79.1, "H200": 139.8, "B200": 178.4}
IN_ONE_HEADS = range(MIN_MEASURED_HEAD_DIM, 129)  # head sizes for which attention is one node with the rotation there
NEWEST_CUDA = (99, 0)  # whoever has the device is taken to have a CUDA for it
CAPABILITY = {"H100": (9, 0), "H200": (9, 0), "B200": (10, 0)}  # of their architecture, which precisions ask for
# One direction, GB/s. H100, H200: 18 links of 25 GB/s (H200 data sheet: 900 GB/s both ways). B200: 18 links of 50 GB/s.
NVLINK = {"H100": 450.0, "H200": 450.0, "B200": 900.0}
OF_NVLINK_ONCE, OF_NVLINK_EACH = 0.45, 0.75  # weights gathered once a step, and for each use
SUM_BYTES = 4  # gradients are exchanged in FP32 under every topology


@dataclass(frozen=True)
class Target:
    """`count` devices of one machine, of the name that a driver or data sheet gives them."""

    name: str
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Target:
        """`H200` or `8xB200`; InputError for a device whose peak is not known."""
        count, name = re.fullmatch(r"\s*(?:(\d+)\s*[xX]\s*)?(.*?)\s*", text, re.DOTALL).groups()
        if peak(name, "bf16") is None or count == "0":
            raise InputError(
                f"--on {text}: no BF16 peak of {name!r} is known; give a device as its driver names it: H200, 8xB200, 'RTX 4090'"
            )
        return cls(name, int(count or 1))

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"

    def is_called(self, device: str) -> bool:
        """Returns whether a driver's name is that of such a device."""
        return device == self.name or known_as(device, [self.name]) is not None

    @property
    def memory(self) -> int | None:
        """Bytes of one; None where it is not in the table."""
        known = known_as(self.name, MEMORY)
        return None if known is None else int(MEMORY[known] * GIB)

    @property
    def capability(self) -> tuple[int, int] | None:
        return CAPABILITY.get(known_as(self.name, CAPABILITY))

    def plan(self, job: Job) -> Plan:
        """The plan of `job` as it would be here: on hardware, and in shards where the model as a whole does not fit."""
        active, phases = _on_hardware(job.active), [(until, _on_hardware(each)) for until, each in job.plan.phases]
        layers = {each.precision.name: self._layers(job, each) for each in (active, *(each for _, each in phases))}
        usable = None if self.memory is None else int((1 - KEPT_FREE) * self.memory)
        alone = Devices(name=self.name, memory=usable, capability=self.capability)
        here = replace(job.plan, devices=alone, active=active, layers=layers, phases=phases, tokens_per_second=None)
        whole = on_devices(here, self.count, sharded=False)
        fits = usable is None or whole.memory.total(1) <= usable
        return whole if fits else on_devices(here, self.count, sharded=True)

    def _layers(self, job: Job, active: ActivePrecision) -> list[LayerMemory]:
        """Returns what each layer takes of memory: on Hopper and Blackwell as with Transformer Engine and cuDNN's attention or
        FlashAttention-4, which keep the same; elsewhere as this machine's libraries have it."""
        recipe, settings, flops = job.recipe, job.recipe.model, job.plan.flops
        if self.capability is None or active.precision.compute_dtype != "bfloat16":
            return layers_of(job.shapes, flops, recipe, active, "cuda", "packed_varlen")
        if settings.fused == "auto":
            recipe = recipe.model_copy(update={"model": settings.model_copy(update={"fused": "on"})})
        in_one = settings.attention in ("auto", "cudnn", "flash_attn") and flops.shape.head_dim in IN_ONE_HEADS
        attention = "packed_fa4" if in_one else "packed_varlen"
        return layers_of(job.shapes, flops, recipe, active, "cuda", attention, self.capability)

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


def _on_hardware(active: ActivePrecision) -> ActivePrecision:
    return replace(active, backend="transformer_engine", reason=None) if active.backend == "emulation" else active


def on_devices(plan: Plan, count: int, *, sharded: bool) -> Plan:
    """The plan on `count` devices of one machine, each with a copy or with shards of the model."""
    devices = replace(plan.devices, count=count, sharded=sharded and count > 1, replicas=1, gathered=False)
    plan = replace(plan, devices=devices)
    gathered = devices.sharded and fits_gathered(plan)
    return spend_spare_memory(replace(plan, devices=replace(devices, gathered=gathered)))


def bytes_sent(plan: Plan, microbatches: int) -> float:
    """What each GPU sends in a step."""
    values, once = plan.flops.parameters, (plan.devices.count - 1) / plan.devices.count
    weights = plan.active.precision.number_bytes * values
    if not plan.devices.sharded:
        return 2 * once * SUM_BYTES * values
    if plan.devices.gathered:
        return once * (SUM_BYTES * values + weights)
    return once * microbatches * (SUM_BYTES * values + 2 * weights)


def step_seconds(plan: Plan, tokens_per_second: float) -> float:
    """Seconds of a step on all of the plan's devices, of which one alone makes `tokens_per_second`: the compute of the device
    with most packs, empty places included, and what exchanges cost."""
    microbatches = -(-plan.packs_per_rank // plan.packs_at_once)
    compute = microbatches * plan.packs_at_once * plan.recipe.data.length / tokens_per_second
    share = OF_NVLINK_EACH if plan.devices.sharded and not plan.devices.gathered else OF_NVLINK_ONCE
    nvlink = NVLINK[known_as(plan.devices.name, NVLINK) or "H200"]
    return compute + bytes_sent(plan, microbatches) / (share * nvlink * 1e9)


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
        known, why = [value for record in run.steps[WARM_UP_STEPS:] if (value := record.get("tflops"))], None
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
        (devices, device), ran = run.devices, [*run.phases.values(), run.audit.get("effective")]
        return cls(run.name, device, devices, ran[0], statistics.median(known), len(known))

    def tflops_on(self, target: Target) -> float | None:
        """Returns what it would reach on each of `target`'s devices at the same share of their peak; None where a peak is not
        known."""
        here, there = self._peaks(target)
        return self.tflops if target.is_called(self.device) else self.tflops * there / here if here and there else None

    def _peaks(self, target: Target) -> tuple[float | None, float | None]:
        column = PRECISIONS[self.precision].peak
        return peak(self.device, column), peak(target.name, column)

    def described(self, target: Target) -> str:
        """Says by what a row of a table is reckoned."""
        measured = f"run {self.name}: {self.devices} x {self.device}, measured over {plural(self.steps, 'step')}"
        here, there = self._peaks(target)
        return measured if target.is_called(self.device) else f"{measured}, x {there:g} / {here:g} TFLOP/s"


@dataclass(frozen=True)
class Estimate:
    """One target at one speed, or at a slow and a fast one. The last of each tuple is the fastest."""

    target: Target
    plan: Plan
    by: str  # where the speed is from
    tokens_per_second: tuple[float, ...] = ()  # over all devices; empty: `obstacle`, or of a model whose speed nobody can guess
    obstacle: str | None = None

    @classmethod
    def at(cls, target: Target, plan: Plan, by: str, tflops: Sequence[float], *, with_exchanges: bool = False) -> Estimate:
        """The estimate at so many TFLOP/s of one device alone; `with_exchanges`: they were measured on several devices, and hold
        what these exchange."""
        alone = [each * TERA / plan.flops_per_token for each in tflops]
        if target.count == 1 or with_exchanges:
            return cls(target, plan, by, tuple(speed * target.count for speed in alone))
        return cls(target, plan, by, tuple(plan.tokens_per_step / step_seconds(plan, speed) for speed in alone))

    @property
    def hours(self) -> tuple[float, ...]:
        return tuple(self.plan.total_tokens / speed / 3600 for speed in self.tokens_per_second)

    def cost(self, prices: Mapping[str, float]) -> tuple[float, ...]:
        """Returns what all hours on all devices cost; none where no price is given. `prices`: of one device for an hour, by name,
        "" for any."""
        price = prices.get(known_as(self.target.name, prices) or "")
        return () if price is None else tuple(hours * price * self.target.count for hours in self.hours)

    def steps_in(self, hours: float) -> tuple[int, ...]:
        return tuple(int(speed * hours * 3600 / self.plan.tokens_per_step) for speed in self.tokens_per_second)


def estimates(
    job: Job, targets: Sequence[Target], runs: Sequence[MeasuredRun], shares: Sequence[float] = ()
) -> Iterator[Estimate]:
    """Yields the estimates for each target: first at the stated `shares` of its peak, or at assumed ones where none is stated,
    then by each run that can tell; last, those for devices that a run was on and that are no target."""
    own_runs = [run for run in runs if run.precision == job.plan.requested]
    for target in targets:
        here = target.plan(job)
        if obstacle := target.obstacle(here):
            yield Estimate(target, here, "", obstacle=obstacle)
            continue
        used = sorted(shares or ASSUMED_SHARES)
        listed = " to ".join(f"{100 * each:g}" for each in used)
        column = f"peaks of {here.computes}" if here.phases else f"{here.active.precision.peak} peak"
        by = f"{listed} % of the {column}, {'stated' if shares else 'assumed'}"
        guessed = not shares and here.flops.parameters < LEAST  # launches decide its speed
        one = here.peak_tflops / here.devices.count
        yield Estimate.at(target, here, by, [] if guessed else [each * one for each in used])
        for run in own_runs:
            if reached := run.tflops_on(target):
                yield Estimate.at(target, here, run.described(target), [reached], with_exchanges=run.devices > 1)
    for run in own_runs:
        own = Target(run.device, run.devices)
        if not any(target.count == own.count and target.is_called(own.name) for target in targets):
            yield Estimate.at(own, own.plan(job), run.described(own), [run.tflops], with_exchanges=True)


def left_out(job: Job, runs: Sequence[MeasuredRun], targets: Sequence[Target]) -> Iterator[str]:
    """Says which runs say nothing of which targets, and why."""
    for run in runs:
        if run.precision != job.plan.requested:
            yield f"run {run.name} computed in {run.precision}, this plan in {job.plan.requested}: its speed is left out"
        elif unknown := ", ".join(str(target) for target in targets if run.tflops_on(target) is None):
            yield f"run {run.name} was on {run.device}, of which no {run.precision} peak is known: it says nothing of {unknown}"


def span(values: Sequence[float], form: Callable[[float], str]) -> str:
    """Writes one figure, or the first to the last; a dash for none."""
    return " to ".join(dict.fromkeys(form(value) for value in values)) or UNKNOWN
