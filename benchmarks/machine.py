"""What benchmarks have in common: how a result file was made and on what, how it is written, and how the launcher is started."""

from __future__ import annotations

import json
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


def command(arguments: Sequence[str] | None = None) -> str:
    """`python -m MODULE ...`, as this process was started, or with these `arguments` in place of its own; options of the
    interpreter itself are left out."""
    module = sys.modules["__main__"].__spec__  # None where a file is run
    given = sys.argv[1:] if arguments is None else arguments
    return shlex.join(["python", *(["-m", module.name] if module else sys.argv[:1]), *given])


def device_and_torch(environment: Mapping[str, Any]) -> str:
    """What figures were computed by: "NVIDIA H200, torch 2.11.0"."""
    gpus, torch = environment.get("gpus"), (environment.get("packages") or {}).get("torch")
    return ", ".join(filter(None, [gpus[0] if gpus else "a CPU", f"torch {torch}" if torch else ""]))


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


def write(path: Path, report: Mapping[str, Any]) -> None:
    """A result file, in a folder that is made where there is none: what was measured is not lost for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


def run_to_its_end(command: list[str], timeout: float, environment: Mapping[str, str]) -> tuple[int | str, str]:
    """Exit status, or "timeout", of a command and all that it has written; after `timeout` seconds it is killed."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        output, _ = process.communicate(timeout=timeout)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        # Its training processes would outlive a killed launcher, and keep the device from the next variant.
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        return "timeout", process.communicate()[0]


def start(command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
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
        raise SystemExit(f"the launcher ended with status {process.returncode}; see {log}:\n{log.read_text()[-3000:]}")
