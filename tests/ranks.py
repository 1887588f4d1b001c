"""The launcher in several processes of one group, as `accelerate launch` starts them, without the seconds that starting takes.

accelerate itself says which variables each process gets; the processes are forked from one that has imported the launcher.
`start_agent` runs `accelerate launch` of one process in a forked one. tests/golden, tests/launcher/test_matrix_run.py and
tests/launcher/test_cluster.py start all of it as a user does.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.moments import fork_context

ROOT = Path(__file__).resolve().parents[1]
WORLD_SIZE = 2


def start_ranks(
    arguments: Sequence[str],
    options: Sequence[str],
    folder: Path,
    processes: int = WORLD_SIZE,
    *,
    machines: Sequence[Path] | None = None,
    before: Callable[[int], None] | None = None,
    main: Callable[[], int | None] | None = None,
    **variables: str,
) -> tuple[int, str, str]:
    """Run the launcher with `arguments` in so many processes on the CPU, under the `options` of `accelerate launch`.

    Returns the worst exit status, and what all of them wrote to stdout and to stderr. `variables` are of their environment. With
    `machines` each process is the only one of a machine, and starts in the folder named there. `before`: what each does first, a
    function of a module that is given the rank. `main`: what they run in place of the launcher.
    """
    import torch.distributed as dist  # not above: tests of packing do without

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {
        "WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # no rank opens a store of its own: this process has it, as torchrun does
    }
    shared = environment_under(options) | group | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} | variables
    logs = folder / "ranks.out", folder / "ranks.err"
    for log in logs:
        log.write_text("")
    started = []
    for rank in range(processes):
        local = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"} if machines else {"LOCAL_RANK": str(rank)}
        environment = shared | {"RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)} | local
        what = (list(arguments), environment, logs, machines[rank] if machines else None, before, main)
        started.append(fork_context.Process(target=_launch, args=what, daemon=True))
        started[-1].start()
    try:
        for process in started:
            process.join()
    finally:
        for process in started:  # after a Ctrl-C, of which a process that stands still learns nothing
            process.kill()
    worst = max(process.exitcode or 0 for process in started) or min(process.exitcode or 0 for process in started)
    return worst, *(log.read_text() for log in logs)


def start_agent(agent: Callable[..., None], arguments: Sequence[str], folder: Path, **variables: str) -> tuple[int, str, str]:
    """Run `agent`, such as `accelerate_launch_alone`, with these `arguments`; returns what `start_ranks` does."""
    logs = folder / "agent.out", folder / "agent.err"
    for log in logs:
        log.write_text("")
    process = fork_context.Process(target=_run_agent, args=(agent, list(arguments), variables, logs))
    process.start()
    process.join()
    return process.exitcode, *(log.read_text() for log in logs)


def accelerate_launch_alone(arguments: list[str]) -> None:
    """`accelerate launch` of one process, which is this one: of its status accelerate tells as much, 0 or 1."""
    from accelerate.commands import launch

    def train_here(parsed: argparse.Namespace) -> None:
        import train_accelerate

        command, variables = launch.prepare_simple_launcher_cmd_env(parsed)
        os.environ.update(variables)
        sys.argv = command[1:]
        if train_accelerate.main():
            sys.exit(1)

    os.chdir(ROOT)
    launch.simple_launcher = train_here
    launch.launch_command(launch.launch_command_parser().parse_args(arguments))


class ForkedLaunch:
    """What is needed of a `Popen` of `accelerate launch` of one process, which runs in a forked one: importing accelerate and the
    launcher anew is nine tenths of a run of twelve steps."""

    def __init__(
        self, command: list[str], *, start_new_session: bool, env: dict[str, str], stdout: Any, stderr: int, cwd: Path = ROOT
    ) -> None:
        _, module, name, *arguments = command
        assert (module, name) == ("-m", "accelerate.commands.launch") or arguments.pop(0) == "launch"
        assert start_new_session and stderr == subprocess.STDOUT and cwd == ROOT
        self._process = fork_context.Process(target=_launch_alone, args=(arguments, env, stdout.name), daemon=True)
        self._process.start()
        self.pid: int = self._process.pid
        while self._process.is_alive() and os.getpgid(self.pid) != self.pid:  # as Popen, which returns with the session begun
            time.sleep(0.01)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode


def _launch_alone(arguments: list[str], environment: dict[str, str], log: str) -> None:
    os.setsid()
    os.environ.clear()
    _begin(environment, (Path(log),) * 2)
    accelerate_launch_alone(arguments)


def environment_under(options: Sequence[str]) -> dict[str, str]:
    """What `accelerate launch` with `options` adds to the environment of the processes that it starts."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    arguments = launch_command_parser().parse_args([*options, "train_accelerate.py"])
    arguments, *_ = _validate_launch_command(arguments)
    return {key: value for key, value in prepare_multi_gpu_env(arguments).items() if os.environ.get(key) != value}


def _launch(
    arguments: list[str],
    environment: dict[str, str],
    logs: Sequence[Path],
    machine: Path | None,
    before: Callable[[int], None] | None,
    main: Callable[[], int | None] | None,
) -> None:
    _begin(environment, logs)
    import train_accelerate
    from pretrain.run import recording
    from tests.blank_picture import plot_losses

    recording.plot_losses = plot_losses
    if machine is not None:
        os.chdir(machine)
    sys.argv = ["train_accelerate.py", *arguments]
    if before:
        before(int(environment["RANK"]))
    sys.exit((main or train_accelerate.main)())


def _run_agent(
    agent: Callable[[list[str]], None], arguments: list[str], environment: dict[str, str], logs: Sequence[Path]
) -> None:
    _begin(environment | {"OMP_NUM_THREADS": "1"}, logs)
    import torch.distributed.run

    torch.distributed.run.run_script_path = _script
    agent(arguments)


def _script(path: str, *arguments: str) -> None:
    """torchrun's own, but for a script that ends by sys.exit(0): torchrun waits for ever for what it would return."""
    sys.argv = [path, *arguments]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


def _begin(environment: dict[str, str], logs: Sequence[Path]) -> None:
    for stream, log in zip((1, 2), logs, strict=True):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), stream)
    import torch

    for key in [key for key in os.environ if key.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[key]
    os.environ.update(environment)
    torch.set_num_threads(1)
