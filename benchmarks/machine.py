"""What result files have in common: how the file was made and on what, how it is written, and how the launcher is started."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.metrics.run_folder import describe_environment

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


def measured_on(environment: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The head of a result file. `environment`: where it is not to be asked for here, or says more."""
    return {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment or describe_environment({}),
        "processor": processor(),
    }


def write(path: Path, report: Mapping[str, Any]) -> None:
    """A result file, in a folder that is made where there is none: what was measured is not lost for it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
