"""The launcher in several processes of one group, as `accelerate launch` starts them, without the seconds that starting takes.

accelerate itself says which variables each process gets; the processes are forked from one that has imported the launcher.
tests/golden, tests/launcher/test_matrix_run.py and tests/launcher/test_cluster.py start all of it as a user does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.moments import become_launcher, fork_context


def start_ranks(
    arguments: Sequence[str],
    options: Sequence[str],
    folder: Path,
    processes: int = 2,
    main: Callable[[], int | None] | None = None,
) -> tuple[int, str, str]:
    """Run the launcher with `arguments` in so many processes on the CPU, under the `options` of `accelerate launch`.

    Returns the worst exit status, and what all of them wrote to stdout and to stderr. `main`: what they run in place of the
    launcher.
    """
    import torch.distributed as dist  # not above: tests of packing do without

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        # no rank opens a store of its own: this process has it, as torchrun does
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    shared, logs = environment_under(options) | group, (folder / "ranks.out", folder / "ranks.err")
    for log in logs:
        log.write_text("")
    each = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    started = [
        fork_context.Process(target=become_launcher, args=(arguments, logs, environment, main))
        for environment in each
    ]
    try:
        for process in started:
            process.start()
        for process in started:
            process.join()
    finally:
        # after a Ctrl-C, of which a process that stands still learns nothing
        for process in started:
            process.kill()
    worst = max(process.exitcode or 0 for process in started) or min(
        process.exitcode or 0 for process in started
    )
    return worst, *(log.read_text() for log in logs)


def environment_under(options: Sequence[str]) -> dict[str, str]:
    """What `accelerate launch` with `options` adds to the environment of the processes that it starts."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    arguments = launch_command_parser().parse_args([*options, "train_accelerate.py"])
    arguments, *_ = _validate_launch_command(arguments)
    several = arguments.multi_gpu or arguments.use_fsdp or arguments.use_megatron_lm
    environment = (
        prepare_multi_gpu_env(arguments)
        if several
        else prepare_simple_launcher_cmd_env(arguments)[1]
    )
    return {key: value for key, value in environment.items() if os.environ.get(key) != value}


def in_ranks(function: Callable[..., Any], *arguments: object) -> list[Any]:
    """What `function(rank, *arguments)` returns in each of two processes that form a group."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with fork_context.Pool(2) as pool:
        return pool.starmap(
            _as_rank, [(function, rank, store.port, arguments) for rank in range(2)], chunksize=1
        )


def _as_rank(
    function: Callable[..., Any], rank: int, port: int, arguments: tuple[object, ...]
) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    result = function(rank, *arguments)
    dist.destroy_process_group()
    return result
