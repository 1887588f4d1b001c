"""`train_accelerate.py` on one host that plays two: NCCL takes each half of its GPUs for a machine of its own.

    accelerate launch --config_file accelerate_configs/zero.yaml --num_processes 4 benchmarks/two_hosts.py RECIPE key=value ...

Between the halves everything goes through TCP sockets of the loopback device, as over a network; within a half it is NVLink as
before. `nccl-tests` measures how fast that network is.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

# Several sockets and threads a connection, without which one TCP stream is the limit (NCCL's documentation of these variables).
SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
}


def play_two_hosts() -> None:
    """Tell NCCL, before it begins in this rank, which half is its host."""
    rank, ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ |= {**SOCKETS, "NCCL_IB_DISABLE": "1", "NCCL_HOSTID": f"half-{2 * rank // ranks}"}


if __name__ == "__main__":
    play_two_hosts()
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_path("train_accelerate.py", run_name="__main__")
