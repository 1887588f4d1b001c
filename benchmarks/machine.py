"""Functions for all benchmarks: describe the machine in result files, and run the launcher."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from foundation.errors import InputError
from pretrain.metrics.run_folder import describe_environment

ROOT = Path(__file__).resolve().parent.parent
# `python -m accelerate...` uses the launcher of this interpreter, whatever is on the PATH.
LAUNCH = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--quiet")


def processor() -> str:
    """Return the processor's model. On Linux, `platform.processor()` only has the architecture."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def command() -> str:
    """Return the command of this process: `python -m MODULE ...`, without interpreter options."""
    # `__spec__` is None if Python runs a file.
    spec = sys.modules["__main__"].__spec__
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else sys.argv[:1]
    return shlex.join(["python", *program, *sys.argv[1:]])


def device_and_torch(environment: Mapping[str, Any]) -> str:
    """Return the device and the torch version: "NVIDIA H200, torch 2.11.0"."""
    gpus = environment.get("gpus")
    device = gpus[0] if gpus else "a CPU"
    torch = (environment.get("packages") or {}).get("torch")
    return f"{device}, torch {torch}" if torch else device


def measured_on(environment: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the first keys of a result file. `environment` is by default that of this process."""
    return {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment or describe_environment({}),
        "processor": processor(),
    }


def environment_from_elsewhere() -> dict[str, Any]:
    """Return versions and devices from a child process.

    This process must not hold memory of the GPU, because the measured trainer needs it. If GPUs are
    hidden, this process describes itself.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return describe_environment({})
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(describe_environment, {}).result()


def with_tables(page: Path, marker: str, *tables: str) -> str:
    """Return the text of `page` with `tables` between <!-- marker --> and <!-- /marker -->.

    The padding of the tables' cells is removed. Raises InputError if the page does not have both
    markers.
    """
    text = page.read_text()
    begin = f"<!-- {marker} -->"
    end = f"<!-- /{marker} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise InputError(
            f"{page}: has no place for the table; add the lines {begin} and {end} to mark it"
        )
    parts = "\n\n".join([begin, *map(without_padding, tables), end])
    return text.partition(begin)[0] + parts + text.partition(end)[2]


def without_padding(text: str) -> str:
    """Return `text` without the padding of the cells in its Markdown tables."""
    lines = [
        re.sub("-{4,}", "---", re.sub(" {2,}", " ", line)) if line.startswith("|") else line
        for line in text.split("\n")
    ]
    return "\n".join(lines)


def run_to_its_end(
    command: list[str], timeout: float, environment: Mapping[str, str]
) -> tuple[int | str, str]:
    """Run a command, and return its exit status and its output.

    After `timeout` seconds the command is killed, and its status is "timeout".
    """
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        kill(process.pid)
        return "timeout", process.communicate()[0]


def kill(launcher: int) -> None:
    """Kill a launcher and its training processes, by the id of the launcher.

    The training processes would survive a killed launcher and occupy the device.
    """
    process = psutil.Process(launcher)
    for running in [*process.children(recursive=True), process]:
        running.kill()


def start(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start `command` in its own process group, so that all its processes can be killed at once."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )


def finish(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a launcher from `start`. Raises SystemExit with the end of its `log` if it fails."""
    if process.wait() != 0:
        raise SystemExit(
            f"the launcher ended with status {process.returncode}; see {log}:\n"
            f"{log.read_text()[-3000:]}"
        )
