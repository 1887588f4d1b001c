"""Measure a training from its launch to full speed, and from its last line to the end.

    python -m benchmarks.starts --out FILE
    python -m benchmarks.starts --starts 0 --microbatches 4 8 16 64 --out FILE
    python -m benchmarks.starts --tiny --starts 1 --microbatches 2 4 --out FILE

The command `python -m pretrain train RECIPE` is started several times: once with empty caches of
compiled kernels, and then `--starts` times with the caches of the first start. The result is the
median of the later starts. `--accelerate` starts `accelerate launch ... train_accelerate.py RECIPE`
instead, and adds its times under separate names. All times are in seconds since the launch: until
the end of the first step, until full speed, until the last line of output, and until all processes
have ended. A run has full speed after its last slow step, or after the first step if no step is
slow. A step is slow if it takes over 10 % longer than the median of all steps after the first two.
The last two steps of a run never count as slow.

The first two steps of a run are checked. `--microbatches` measures the cost of these checks: the
time of each of the two steps minus the time of a usual step, for each number of microbatches in a
step of a process. Compilation in the first step is a part of this cost.

Packages are compiled to bytecode first, because Python would otherwise compile them in each start
if it cannot write their folder. Results are added to those in --out. `--tiny` is a dry run with a
small model on the CPU. Further arguments are settings, such as `weights=bf16_exact`.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import (
    LAUNCH,
    ROOT,
    device_and_torch,
    environment_from_elsewhere,
    kill,
    measured_on,
)
from benchmarks.speed import generated_packs
from foundation.command import run_command
from foundation.errors import InputError
from foundation.files import write_json
from pretrain.metrics.run_record import kind, read_metrics
from pretrain.settings.config import load_recipe

RECIPE = Path("benchmarks/qwen3_1_7b_80gb.yaml")
CONFIGURATION = Path("accelerate_configs/fp8_delayed.yaml")
SETTINGS = ("weights=bf16_exact", "fp8_config.scope=linear+head")
# The dry run emulates FP8 with a small model.
TINY = Path("benchmarks/tiny.yaml")
TINY_CONFIGURATION = Path("accelerate_configs/cpu.yaml")
TINY_SETTINGS = (
    "precision=delayed",
    "fp8_config.on_unsupported=emulate",
    "fp8_config.scope=linear+head",
)
# Number of first steps, which are checked and excluded from the median.
EARLY = 2
# A step is slow if it takes longer than this factor times the median.
SLOW = 1.1
# Environment variables with the folders of compiled kernels.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "CUDA_CACHE_PATH")
STEP_LINE = re.compile(r"step +(\d+)/")
# Times of a start. The result has the median of each of these times.
TIMES = ("first_step", "full_speed", "last_line", "end", "after_last_line")
# Number of characters of a failed training's output in the error message.
LAST_OUTPUT = 3000


def main() -> None:
    """Run the command."""
    arguments = parse_arguments()
    if arguments.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        arguments.recipe = TINY
        arguments.config = TINY_CONFIGURATION
    else:
        compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0)
    arguments.settings = [*(TINY_SETTINGS if arguments.tiny else SETTINGS), *arguments.settings]
    result = {
        **measured_on(environment_from_elsewhere()),
        "recipe": str(arguments.recipe),
        "configuration": str(arguments.config),
        "settings": arguments.settings,
        # A value above the number of cores means that other processes were running.
        "load_average": os.getloadavg()[0],
    }
    if arguments.out.exists():
        earlier = json.loads(arguments.out.read_text())
        result["earlier_commands"] = [*earlier.get("earlier_commands", []), earlier["command"]]
        result = {**earlier, **result}
    with tempfile.TemporaryDirectory(prefix="starts-") as folder:
        measure(arguments, Path(folder), result)
    print(table(result))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, default=RECIPE, help="default: %(default)s")
    parser.add_argument(
        "--config", type=Path, default=CONFIGURATION, help="accelerate configuration"
    )
    parser.add_argument(
        "--accelerate", action="store_true", help="start `accelerate launch` instead of `train`"
    )
    parser.add_argument("--tiny", action="store_true", help="dry run with a small model on the CPU")
    parser.add_argument(
        "--starts", type=int, default=3, help="starts after the first one; 0 measures no start"
    )
    parser.add_argument("--steps", type=int, default=10, help="steps of a run")
    parser.add_argument(
        "--microbatches",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="measure the cost of the checks with each of these numbers of microbatches in a step",
    )
    parser.add_argument("--timeout", type=float, default=400, help="maximum seconds of one run")
    parser.add_argument("--out", type=Path, required=True, help="result file to write or extend")
    arguments, settings = parser.parse_known_args()
    foreign = [text for text in settings if "=" not in text]
    if foreign:
        parser.error(f"unknown arguments: {' '.join(foreign)}")
    if arguments.steps < 2 * EARLY + 1:
        parser.error(
            f"--steps: needs {2 * EARLY + 1} or more, because the first {EARLY} steps are checked, "
            f"and the last {EARLY} never count as slow"
        )
    arguments.settings = settings
    return arguments


def measure(arguments: argparse.Namespace, folder: Path, result: dict[str, Any]) -> None:
    """Measure all runs, and write the result file after each of them."""
    starts: list[dict[str, Any]] = []
    name = "accelerate_" if arguments.accelerate else ""
    for _ in range(arguments.starts + 1 if arguments.starts else 0):
        starts.append(run(arguments, folder, arguments.settings))
        result[f"{name}first_start"], *later = starts
        if later:
            result[f"{name}later_starts"] = later
            result[f"{name}later_start"] = {
                key: statistics.median(start[key] for start in later) for key in TIMES
            }
        write_json(arguments.out, result)
    recipe = load_recipe(arguments.recipe)
    processes = yaml.safe_load(arguments.config.read_text()).get("num_processes", 1)
    for count in arguments.microbatches:
        tokens = count * processes * recipe.batch.microbatch * recipe.data.length
        settings = [*arguments.settings, f"batch.tokens={tokens}"]
        measured = run(arguments, folder, settings)
        usual = measured["usual_step"]
        by_count = result.setdefault("checks_by_microbatches", {})
        by_count[str(count)] = {
            "usual_step": usual,
            "steps": measured["steps"],
            "beyond_usual": [seconds - usual for seconds in measured["steps"][:EARLY]],
        }
        write_json(arguments.out, result)


def run(arguments: argparse.Namespace, folder: Path, settings: Sequence[str]) -> dict[str, Any]:
    """Start a training, and return its times in seconds since the launch.

    Raises InputError with the end of the output if the training fails.
    """
    recipe = load_recipe(arguments.recipe, settings)
    packs = folder / f"packs_{recipe.batch.tokens}"
    run_dir = folder / f"run_{time.monotonic_ns()}"
    settings = [
        *settings,
        *generated_packs.make(packs, recipe, arguments.steps),
        f"train.steps={arguments.steps}",
        "log.every=1",
        f"run_dir={run_dir}",
    ]
    command = [sys.executable, "-m", "pretrain", "train", "--config", str(arguments.config)]
    if arguments.accelerate:
        command = [*LAUNCH, "--config_file", str(arguments.config), "train_accelerate.py"]
    command += [str(arguments.recipe), *settings]
    environment = {name: str(folder / "caches" / name) for name in CACHES}
    return timed_run(command, run_dir, environment, arguments.timeout)


def timed_run(
    command: Sequence[str], run_dir: Path, environment: dict[str, str], timeout: float
) -> dict[str, Any]:
    """Run a training, and return its times in seconds since the launch.

    Raises InputError with the end of the output if the training fails.

    Args:
        command: The command of the training. It must print every step (`log.every=1`).
        run_dir: The run folder of the training.
        environment: Environment variables for the training.
        timeout: Seconds after which the training is killed.
    """
    lines = timed_lines(command, environment, timeout)
    status, end = lines.pop()
    if status != "0":
        output = "".join(line for line, _ in lines)
        raise InputError(f"the training ended with status {status}:\n{output[-LAST_OUTPUT:]}")
    step_ends = [seconds for line, seconds in lines if STEP_LINE.match(line)]
    steps = [record["step_ms"] / 1e3 for record in read_metrics(run_dir) if kind(record) == "step"]
    usual = statistics.median(steps[EARLY:])
    slow = [number for number, seconds in enumerate(steps[:-EARLY]) if seconds > SLOW * usual]
    last_line = lines[-1][1]
    return {
        "first_step": step_ends[0],
        "full_speed": step_ends[max(slow, default=0)],
        "last_line": last_line,
        "end": end,
        "after_last_line": end - last_line,
        "usual_step": usual,
        "steps": steps,
    }


def timed_lines(
    command: Sequence[str], environment: dict[str, str], timeout: float
) -> list[tuple[str, float]]:
    """Run `command`, and return its lines of output with their seconds since the start.

    The last entry has the exit status instead of a line. After `timeout` seconds the command is
    killed.
    """
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )
    timer = threading.Timer(timeout, kill, [process.pid])
    timer.start()
    assert process.stdout is not None
    lines = [(line, time.monotonic() - began) for line in process.stdout]
    status = process.wait()
    timer.cancel()
    return [
        *((line, at) for line, at in lines if line.strip()),
        (str(status), time.monotonic() - began),
    ]


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    lines = [device_and_torch(result["environment"])]
    for name in ("first_start", "later_start", "accelerate_first_start", "accelerate_later_start"):
        title = name.replace("_", " ")
        lines += [
            f"{title:23} {key.replace('_', ' '):16} {seconds:8.1f} s"
            for key, seconds in result.get(name, {}).items()
            if key in TIMES
        ]
    for count, measured in result.get("checks_by_microbatches", {}).items():
        beyond = " and ".join(f"{seconds:+.2f}" for seconds in measured["beyond_usual"])
        usual = f"{measured['usual_step']:.2f} s"
        lines.append(f"{count:>4} microbatches: a step takes {usual}, the first two {beyond} s")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run_command(main))
