"""Run `train_accelerate.py` on one host that NCCL treats as two hosts.

    accelerate launch --config_file accelerate_configs/zero.yaml --num_processes 4 \\
        benchmarks/two_hosts.py RECIPE key=value ...

Each half of the GPUs is one host. The halves communicate through TCP sockets of the loopback
device, as over a network. Within a half, NVLink is used. `nccl-tests` measures the speed of that
network.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

# Several sockets and threads per connection. Otherwise a single TCP stream is the limit, see NCCL's
# documentation of these variables.
SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_NTHREADS": "4",
    "NCCL_NSOCKS_PERTHREAD": "4",
}


def play_two_hosts() -> None:
    """Set the variables that tell NCCL the host of this rank. Call it before NCCL starts."""
    rank = int(os.environ["LOCAL_RANK"])
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ |= {**SOCKETS, "NCCL_IB_DISABLE": "1", "NCCL_HOSTID": f"half-{2 * rank // ranks}"}


if __name__ == "__main__":
    play_two_hosts()
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_path("train_accelerate.py", run_name="__main__")
