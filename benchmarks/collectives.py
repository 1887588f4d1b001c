"""How fast GPUs exchange what training exchanges: gathers in BF16 and sums in FP32, over all ranks and over ranks of both halves.

    torchrun --standalone --nproc-per-node 4 -m benchmarks.collectives --out benchmarks/results/FILE.json
    torchrun --standalone --nproc-per-node 4 -m benchmarks.collectives --two-hosts --out benchmarks/results/FILE.json

`--two-hosts`: with the network of `benchmarks.two_hosts` between the halves. GB/s are of what each rank sends in one direction
by the count of `pretrain.plan.scaling`, so they are what `--plan --network-gbps` takes, times eight.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.machine import measured_on, write
from benchmarks.two_hosts import play_two_hosts
from pretrain.plan.scaling import Exchange

SIZES = (64 * 2**20, 1024 * 2**20)  # bytes: a piece of gradients under DDP, and what a step of a large layer exchanges
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--two-hosts", action="store_true", help="halves of the ranks are connected by sockets")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.two_hosts:
        play_two_hosts()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    found = measure_all(machines=2 if arguments.two_hosts else 1)
    if dist.get_rank() == 0:
        report = {
            **measured_on(),
            "ranks": dist.get_world_size(),
            "results": found,
        }
        write(arguments.out, report)
        for each in found:
            print(json.dumps(each))
    dist.destroy_process_group()


def measure_all(machines: int) -> list[dict[str, float | str]]:
    """Each collective at each size, over all ranks, and over those of like place in both halves (the replicas of HSDP)."""
    ranks, found = dist.get_world_size(), []
    halves = [dist.new_group([place, place + ranks // 2]) for place in range(ranks // 2)]
    across = halves[dist.get_rank() % (ranks // 2)]
    for size in SIZES:
        for name, group, gpus in [("all ranks", None, ranks // machines), ("replicas", across, 1)]:
            members = dist.get_world_size(group)
            whole = torch.zeros(size // 4, device="cuda")
            part = torch.zeros(size // 4 // members, device="cuda")
            nodes = machines if group is None else 2
            once = Exchange.gathering(size, gpus, nodes, 0.0)
            twice = Exchange.adding_up(size, gpus, nodes, 0.0)
            calls: dict[str, tuple[Callable[[], object], Exchange]] = {
                "all-gather": (lambda w=whole, p=part, g=group: dist.all_gather_into_tensor(w, p, group=g), once),
                "reduce-scatter": (lambda w=whole, p=part, g=group: dist.reduce_scatter_tensor(p, w, group=g), once),
                "all-reduce": (lambda w=whole, g=group: dist.all_reduce(w, group=g), twice),
            }
            for collective, (call, sent) in calls.items():
                seconds = time_call(call, whole)
                rates = {
                    "inside_gb_per_second": sent.inside / seconds / 1e9,
                    "between_gb_per_second": sent.between / seconds / 1e9,
                }
                found.append({"collective": collective, "over": name, "mib": size / 2**20, "ms": 1e3 * seconds, **rates})
    return found


def time_call(call: Callable[[], object], whole: Tensor) -> float:
    """Seconds of one call: the median over REPEATS, on the slowest rank."""
    taken = []
    for _ in range(REPEATS + 1):  # the first makes connections
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    median = torch.tensor(statistics.median(taken[1:]), device=whole.device)
    dist.all_reduce(median, dist.ReduceOp.MAX)
    return float(median)


if __name__ == "__main__":
    main()
