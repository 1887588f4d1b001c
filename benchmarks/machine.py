"""What benchmarks have in common: how a result file was made and on what, how it is written, and how the launcher is started."""

from __future__ import annotations

import multiprocessing
import os
import platform
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
# `python -m accelerate...` finds the launcher of this very interpreter, whatever is on the PATH.
LAUNCH = (sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--quiet")


def processor() -> str:
    """The processor's model; on Linux, `platform.processor()` names its architecture only."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def command() -> str:
    """`python -m MODULE ...`, as this process was started; options of the interpreter itself are left out."""
    module = sys.modules["__main__"].__spec__  # None where a file is run
    return shlex.join(["python", *(["-m", module.name] if module else sys.argv[:1]), *sys.argv[1:]])


def device_and_torch(environment: Mapping[str, Any]) -> str:
    """What figures were computed by: "NVIDIA H200, torch 2.11.0"."""
    gpus, torch = environment.get("gpus"), (environment.get("packages") or {}).get("torch")
    return ", ".join(
        filter(None, [gpus[0] if gpus else "a CPU", f"torch {torch}" if torch else ""])
    )


def measured_on(environment: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The head of a result file. `environment`: where it is not to be asked for here, or says more."""
    return {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment or describe_environment({}),
        "processor": processor(),
    }


def environment_from_elsewhere() -> dict[str, Any]:
    """Versions and devices, asked for in a process that ends: this one must hold no memory on a GPU that a way has to fit on."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(describe_environment, {}).result()


def with_tables(page: Path, marker: str, *tables: str) -> str:
    """The text of `page` with `tables` between <!-- marker --> and <!-- /marker -->; InputError where it has no such place."""
    text, begin, end = page.read_text(), f"<!-- {marker} -->", f"<!-- /{marker} -->"
    if text.count(begin) != 1 or text.count(end) != 1:
        raise InputError(
            f"{page}: has no place for the table; put {begin} and {end}, each on a line, where it shall stand"
        )
    return text.partition(begin)[0] + "\n\n".join([begin, *tables, end]) + text.partition(end)[2]


def run_to_its_end(
    command: list[str], timeout: float, environment: Mapping[str, str]
) -> tuple[int | str, str]:
    """Exit status, or "timeout", of a command and all that it has written; after `timeout` seconds it is killed."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        # Its training processes would outlive a killed launcher, and keep the device from the next variant.
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        return "timeout", process.communicate()[0]


def start(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """`command` in a process group of its own, so that launcher and training process can be killed in one go."""
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
    """Wait for a launcher that `start` has started. SystemExit with the end of its `log` where it fails."""
    if process.wait() != 0:
        raise SystemExit(
            f"the launcher ended with status {process.returncode}; see {log}:\n{log.read_text()[-3000:]}"
        )
