"""How a run would scale over many GPUs: its compute, what GPUs send each other, and how much of that cannot hide.

A model of a few lines, not a simulation. Inside a machine it is fitted to what was measured on four H200s. Between machines
nobody knows what hides, so two efficiencies are given: with all hidden that can be, and with nothing hidden. Four H200s that
played two machines lay between the two under every topology (docs/scaling.md).

S is the size of what is exchanged, in bytes; there are M machines of g GPUs. A GPU sends, in NCCL's rings and trees,

    to gather or to reduce and scatter   (g - 1) / g · S inside its machine    (M - 1) / M · S / g between machines
    to add up over all (all-reduce)      twice both
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from foundation import units
from foundation.errors import InputError
from foundation.tables import screen_width
from foundation.units import GIB, plural
from pretrain.metrics.peaks import known_as
from pretrain.plan.plan import ASSUMED_SHARES, ASSUMED_SPEED, Plan
from pretrain.plan.preflight import fits_gathered
from pretrain.plan.rendering import WIDTH
from pretrain.plan.spare import spend_spare_memory
from pretrain.settings.launch_topology import Sharding

# Of what NVLink carries in one direction, the share at which exchanges would have to run, all in plain sight, to cost what a step
# loses; of those once a step, and for each use. Fitted to four H200s (docs/scaling.md). Much is hidden there; the rest is
# ranks that wait for the slowest, updates that are not divided, and compute that is slower while NCCL's kernels run.
OF_NVLINK_ONCE, OF_NVLINK_EACH = 0.45, 0.75
OF_NETWORK = 0.8  # of the line rate: assumed
FORWARD = 1 / 3  # of a microbatch's time
ENOUGH = 0.9  # efficiency, below which a run is said to have stopped scaling
SUM_BYTES = 4  # gradients are exchanged in FP32 under every topology


@dataclass(frozen=True)
class Links:
    """The links of one GPU, in one direction: NVLink in GB/s, and its share of the machine's network in Gbit/s."""

    nvlink: float
    network: float


# H100, H200: NVLink 4, 18 links of 25 GB/s (H200 data sheet: 900 GB/s both ways). B200: NVLink 5, 18 links of 50 GB/s (1.8 TB/s).
# DGX H100, H200 and B200 have a ConnectX-7 of 400 Gbit/s for each GPU. PCIe and NVL cards are left out.
LINKS = {"H100": Links(450.0, 400.0), "H200": Links(450.0, 400.0), "B200": Links(900.0, 400.0)}
ASSUMED = "H200"  # where the device is not in the table


@dataclass(frozen=True)
class Cluster:
    """`gpus` on `nodes` machines, equally many on each. `network`: Gbit/s a GPU; None: by `LINKS`. InputError where they do not
    divide."""

    gpus: int
    nodes: int = 1
    network: float | None = None

    def __post_init__(self) -> None:
        if self.gpus % self.nodes:
            raise InputError(f"--gpus {self.gpus} --nodes {self.nodes}: give a multiple of the nodes, equally many on each")

    @property
    def of_a_node(self) -> int:
        return self.gpus // self.nodes


@dataclass(frozen=True)
class Exchange:
    """What each GPU sends in a step for one purpose."""

    inside: float  # bytes, to GPUs of its machine
    between: float  # bytes, to other machines
    behind: float  # seconds of compute that it can hide behind

    @staticmethod
    def gathering(size: float, gpus: int, nodes: int, behind: float) -> Exchange:
        """Or reducing and scattering `size` bytes over `nodes` machines of `gpus` each."""
        return Exchange((gpus - 1) / gpus * size, (nodes - 1) / nodes * size / gpus, behind)

    @staticmethod
    def adding_up(size: float, gpus: int, nodes: int, behind: float) -> Exchange:
        half = Exchange.gathering(size, gpus, nodes, behind)
        return Exchange(2 * half.inside, 2 * half.between, behind)


@dataclass(frozen=True)
class Scaled:
    """One plan on one cluster, at one speed. Seconds are of a step."""

    plan: Plan  # its devices are the cluster's
    cluster: Cluster
    links: Links
    speed: float  # tokens/s of one GPU that is alone
    replicated: bool = False  # shards of a machine each, however many machines there are (HSDP)

    @property
    def compute(self) -> float:
        """The seconds that the GPU with most packs computes. Places that they leave empty are computed, too."""
        return self.microbatches * self.plan.packs_at_once * self.plan.recipe.data.length / self.speed

    @property
    def microbatches(self) -> int:
        return -(-self.plan.packs_per_rank // self.plan.packs_at_once)

    def exchanges(self) -> list[Exchange]:
        """Returns what hides behind backward, then what does behind forward, then the sums of replicas."""
        devices, gpus, nodes = self.plan.devices, self.cluster.of_a_node, self.cluster.nodes
        values, once = self.plan.flops.parameters, not devices.sharded or devices.gathered
        # Once a step, gradients hide behind the backward of the last microbatch and gathered weights behind the forward of the
        # first. For each use, weights are gathered for both, in each microbatch.
        share, times = (1 / self.microbatches, 1) if once else (1, self.microbatches)
        forward, backward = FORWARD * share * self.compute, (1 - FORWARD) * share * self.compute
        sums = SUM_BYTES * values
        if not devices.sharded:
            return [Exchange.adding_up(sums, gpus, nodes, backward)]
        weights = self.plan.active.precision.number_bytes * values
        over = nodes // devices.replicas  # machines that the shards of a replica are on
        behind_backward = times * (sums + (0 if once else weights))
        found = [Exchange.gathering(behind_backward, gpus, over, backward)]
        found.append(Exchange.gathering(times * weights, gpus, over, forward))
        if devices.replicas > 1:
            last = (1 - FORWARD) / self.microbatches * self.compute
            found.append(Exchange.adding_up(sums / gpus, 1, nodes, last))  # each GPU's shard, with its like
        return found

    @property
    def of_nvlink(self) -> float:
        """The share of NVLink's bandwidth that counts as reached."""
        return OF_NVLINK_EACH if self.plan.devices.sharded and not self.plan.devices.gathered else OF_NVLINK_ONCE

    @property
    def inside(self) -> float:
        """Seconds that exchanges inside a machine cost."""
        return sum(each.inside for each in self.exchanges()) / (self.of_nvlink * self.links.nvlink * 1e9)

    def between(self, *, hidden: bool) -> float:
        """Seconds that exchanges between machines take; `hidden`: less what they can hide behind."""
        rate = OF_NETWORK * self.links.network / 8 * 1e9
        return sum(max(0.0, each.between / rate - each.behind * hidden) for each in self.exchanges())

    def step(self, *, hidden: bool) -> float:
        return self.compute + self.inside + self.between(hidden=hidden)

    def efficiency(self, *, hidden: bool) -> float:
        """Returns the speed as a share of as many times one GPU's."""
        return self.plan.tokens_per_step / (self.cluster.gpus * self.speed) / self.step(hidden=hidden)

    def on(self, gpus: int, nodes: int) -> Scaled:
        devices = replace(self.plan.devices, count=gpus, replicas=nodes if self.replicated else 1)
        return replace(self, cluster=replace(self.cluster, gpus=gpus, nodes=nodes), plan=replace(self.plan, devices=devices))

    def scales_to(self, *, hidden: bool) -> int:
        """The most GPUs, up to a machine or of whole machines, that are at least `ENOUGH` efficient at this batch."""
        node, most = self.cluster.of_a_node, self.plan.packs_per_step  # more GPUs have no pack each
        within = [(gpus, 1) for gpus in _counts(min(node - 1, most))]
        sizes = [*within, *((nodes * node, nodes) for nodes in _counts(most // node))]
        return max((gpus for gpus, nodes in sizes if self.on(gpus, nodes).efficiency(hidden=hidden) >= ENOUGH), default=1)


def cluster_asked(arguments: argparse.Namespace) -> Cluster | None:
    """Returns what `--gpus`, `--nodes` and `--network-gbps` ask for; InputError where one of them has nothing to go with."""
    asked = {name: value for name in ("gpus", "nodes", "network_gbps") if (value := getattr(arguments, name)) is not None}
    if not asked:
        return None
    if not arguments.plan or "gpus" not in asked:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise InputError(f"{names}: say how a run would scale, with --plan --gpus N; add what is missing, or leave {names} out")
    return Cluster(arguments.gpus, arguments.nodes or 1, arguments.network_gbps)


def on_cluster(plan: Plan, cluster: Cluster, sharding: Sharding, *, replicated: bool) -> Plan:
    """The plan when its devices are the cluster's; `replicated` (HSDP): a replica a machine."""
    replicas = cluster.nodes if replicated and sharding != "none" else 1
    sharded = sharding != "none" and cluster.gpus > replicas
    shards = {"count": cluster.gpus, "sharded": sharded, "replicas": replicas if sharded else 1, "gathered": False}
    memory = None if plan.devices.name == "CPU" else plan.devices.memory  # a host's says nothing of a GPU's
    devices = replace(plan.devices, memory=memory, **shards)
    plan = replace(plan, devices=devices)
    gathered = sharded and (sharding == "once" or (sharding == "auto" and fits_gathered(plan)))
    return spend_spare_memory(replace(plan, devices=replace(devices, gathered=gathered)))


def links_of(device: str | None, network: float | None) -> tuple[Links, str | None]:
    """Returns the links of the device that torch calls so, and the table's name for it; None for the name where it is not in the
    table."""
    known = known_as(device, LINKS)
    links = LINKS[known or ASSUMED]
    return replace(links, network=network or links.network), known


def speeds_of(plan: Plan) -> list[float]:
    """Tokens/s of one GPU: the stated or measured one, or two assumed ones, the faster first; none where no peak is known."""
    if plan.tokens_per_second:
        return [plan.tokens_per_second / plan.devices.count]
    peak = (plan.peak_tflops or 0) / plan.devices.count * units.TERA
    return [share * peak / plan.flops_per_token for share in ASSUMED_SHARES] if peak else []


def render_scaling(plan: Plan, cluster: Cluster, sharding: Sharding, *, replicated: bool) -> str:
    """Returns what `--plan --gpus` prints. `plan`: of this launch, which asked for `sharding`. InputError where no speed is
    known."""
    if not (speeds := speeds_of(plan)):
        raise InputError("--gpus: no speed is measured or assumed for this device; give one GPU's with --tokens-per-second")
    links, known = links_of(plan.devices.name, cluster.network)
    planned = on_cluster(plan, cluster, sharding, replicated=replicated)
    cases = [Scaled(planned, cluster, links, speed, planned.devices.sharded and replicated) for speed in speeds]
    lines = [*_lines(cases), *_assumptions(cases[0], plan, links, known)]
    rest, width = " " * 11, screen_width(WIDTH)
    return "\n".join(textwrap.fill(text, width, initial_indent=f"{name:<9}", subsequent_indent=rest) for name, text in lines)


def _lines(cases: list[Scaled]) -> Iterator[tuple[str, str]]:
    one, devices, cluster = cases[0], cases[0].plan.devices, cases[0].cluster
    topology = {True: "zero", False: "fsdp2"}[devices.gathered] if devices.sharded else "ddp"
    if devices.replicas > 1:
        topology = f"hsdp, a replica a machine, {topology} inside it"
    speed = " to ".join(f"{each.speed:,.0f}" for each in cases)
    yield "scaling", f"{plural(cluster.gpus, 'GPU')} on {plural(cluster.nodes, 'machine')}, {topology}; one GPU {speed} tokens/s"
    packs = f"a GPU has {one.microbatches} x {plural(one.plan.packs_at_once, 'pack')}"
    yield "", f"a step: compute {_range(units.duration(each.compute) for each in cases)} ({packs})"
    inside, between = (sum(getattr(each, name) for each in one.exchanges()) for name in ("inside", "between"))
    yield "", f"sent by a GPU inside its machine: {inside / 1e9:,.2f} GB, which cost {units.duration(one.inside)}"
    if cluster.nodes > 1:
        left = [each.between(hidden=True) for each in cases]
        much = f"of which {_range(map(units.duration, left))} cannot hide" if any(left) else "all of which can hide"
        took = f"{units.duration(one.between(hidden=False))}, {much}"
        yield "", f"sent by a GPU to other machines: {between / 1e9:,.2f} GB, {took}"
    yield "", f"efficiency: {_both(cases, lambda each, hidden: units.percent(each.efficiency(hidden=hidden)))}"
    tokens = f"{one.plan.tokens_per_step:,} tokens a step"
    ends = _both(cases, lambda each, hidden: f"{plural(each.scales_to(hidden=hidden), 'GPU')}")
    yield "", f"{100 * ENOUGH:.0f} % or more at {tokens}: up to {ends}"
    if devices.memory:
        needed, limit = (units.memory(size / GIB) for size in (one.plan.memory.total(one.plan.packs_at_once), devices.memory))
        yield "", f"memory: about {needed} of {limit} a GPU"


def _both(cases: list[Scaled], figure: Callable[[Scaled, bool], str]) -> str:
    hidden, open_ = (_range(figure(each, way) for each in cases) for way in (True, False))
    return hidden if hidden == open_ else f"{hidden} with all hidden that can be, {open_} with nothing hidden"


def _range(texts: Iterable[str]) -> str:
    return " to ".join(dict.fromkeys(texts))


def _assumptions(one: Scaled, plan: Plan, links: Links, known: str | None) -> Iterator[tuple[str, str]]:
    device = f"{known}'s" if known else f"{ASSUMED}'s, as {plan.devices.name or 'this device'} is not in the table"
    if not plan.tokens_per_second:
        yield "assumed", f"speed: {ASSUMED_SPEED} of the {plan.computes} peak; --tokens-per-second N states one GPU's"
    elif plan.devices.count > 1:
        yield "assumed", f"speed: that of {plan.devices.count} GPUs divided by their number, what they exchanged included"
    else:
        yield "assumed", "speed: that of the one device of this launch, the same with fewer packs in a step"
    rate = f"{100 * one.of_nvlink:.0f} % of NVLink's {links.nvlink:g} GB/s ({device})"
    yield "", f"inside a machine: {rate}, fitted to four H200s; it holds all that they lost"
    if one.cluster.nodes > 1:
        rate = f"{100 * OF_NETWORK:.0f} % of {links.network:g} Gbit/s a GPU"
        yield "", f"between machines: {rate}, assumed; --network-gbps G states it"
        yield "", f"can hide: {_hides(one)}; backward is two thirds of compute"
    yield "", "not counted: latencies, machines that lag or fail, evaluation, checkpoints"


def _hides(one: Scaled) -> str:
    if one.plan.devices.sharded and not one.plan.devices.gathered:
        each = "every gather and reduction behind the layers' compute"
        return f"{each}, replicas' sums behind the last microbatch's backward" if one.plan.devices.replicas > 1 else each
    gathered = ", weights behind the first one's forward" if one.plan.devices.sharded else ""
    return f"gradients behind the last microbatch's backward{gathered}"


def _counts(most: int) -> Iterator[int]:
    """1 to `most`, each up to two thousand, and then in steps of a thousandth."""
    count = 1
    while count <= most:
        yield count
        count += max(1, count // 1000)
