"""Start the launcher in several ranks, like `accelerate launch`, without the seconds of a start.

accelerate computes the environment of the ranks. They are forked from a process that has imported
the launcher. tests/golden, tests/launcher/test_matrix_run.py and tests/launcher/test_cluster.py
start ranks as a user does.
"""

from __future__ import annotations

import json
import os
import tempfile
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
    """Run the launcher, or `main`, in several ranks on the CPU.

    Args:
        arguments: Arguments of the launcher.
        options: Options of `accelerate launch`.
        folder: Folder for the output of the ranks.
        processes: Number of ranks.
        main: Function that the ranks call instead of the launcher.

    Returns:
        The worst exit status, stdout and stderr of all ranks.
    """
    import torch.distributed as dist  # Imported late, because tests of packing do not need it.

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        # Ranks connect to the store of this process, as under torchrun, and open none themselves.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    shared = environment_under(options) | group
    logs = (folder / "ranks.out", folder / "ranks.err")
    for log in logs:
        log.write_text("")
    ranks = []
    for rank in range(processes):
        environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        ranks.append(
            fork_context.Process(target=become_launcher, args=(arguments, logs, environment, main))
        )
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    finally:
        # After a Ctrl-C, a rank that hangs would keep running.
        for process in ranks:
            process.kill()
    statuses = [process.exitcode or 0 for process in ranks]
    # A negative status is a signal.
    worst = max(statuses) or min(statuses)
    return worst, *(log.read_text() for log in logs)


def printed_by_ranks(
    main: Callable[[], None], topology: str, arguments: Sequence[str]
) -> list[dict[str, Any]]:
    """Run `main` in two ranks, and return what they print by `print_found`."""
    launch = ["--config_file", f"accelerate_configs/{topology}.yaml", "--mixed_precision", "no"]
    with tempfile.TemporaryDirectory() as folder:
        status, out, err = start_ranks(arguments, launch, Path(folder), main=main)
    assert status == 0, out + err
    printed = [line for line in out.splitlines() if line.startswith("FOUND ")]
    return [json.loads(line.removeprefix("FOUND ")) for line in printed]


def print_found(accelerator: Any, found: Any) -> None:
    # One write: both ranks write at the same time.
    os.write(1, f"FOUND {json.dumps(found)}\n".encode())
    accelerator.end_training()


def environment_under(options: Sequence[str]) -> dict[str, str]:
    """Return the variables that `accelerate launch` with `options` adds to the environment."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

    arguments = launch_command_parser().parse_args([*options, "train_accelerate.py"])
    arguments, *_ = _validate_launch_command(arguments)
    if arguments.multi_gpu or arguments.use_fsdp or arguments.use_megatron_lm:
        environment = prepare_multi_gpu_env(arguments)
    else:
        _, environment = prepare_simple_launcher_cmd_env(arguments)
    return {key: value for key, value in environment.items() if os.environ.get(key) != value}


def in_ranks(function: Callable[..., Any], *arguments: object) -> list[Any]:
    """Return the results of `function(rank, *arguments)` in two ranks of one group."""
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
