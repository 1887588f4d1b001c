"""Train as `accelerate launch` does, and translate the end of the training into an exit status.

`main` is the command `python -m pretrain train`, which chooses an Accelerate configuration. This
module imports torch and accelerate's launcher only when a training starts, after the command line,
the recipe and the configuration have been checked. A training in one process runs in this process,
so that torch and accelerate are imported only once.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from foundation.errors import InputError, as_input_error
from foundation.gpus import visible_gpus
from foundation.overrides import overridden
from foundation.reading import load_yaml
from foundation.signals import handling
from pretrain.launch import script
from pretrain.launch.environment import UNSUPPORTED_TYPES, is_true
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

_ROOT = Path(__file__).resolve().parents[2]
# Folder of the configurations, in the checkout or beside the installed packages.
CONFIGURATIONS = _ROOT / "accelerate_configs"
# Script that trains, in the folder of the checkout or of the installed packages.
SCRIPT = _ROOT / "train_accelerate.py"
# Beginnings of log lines that are not printed: accelerate's list of default values, and the lines
# that torchrun logs before its error.
_OMITTED = ("The following values were not passed", "failed (", "Sending process")
# Errors that accelerate raises for a mistake in its configuration.
_REFUSED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    AssertionError,
    RuntimeError,
)


# ── The command ───────────────────────────────────────────────────────────────────────────────────


def main(options: argparse.Namespace) -> int:
    """Train as the command line requests, and return the exit status of the training.

    Raises InputError for a mistake in the recipe or in the Accelerate configuration.
    """
    recipe = load_recipe(options.recipe, options.overrides)
    configuration, processes = choose_configuration(recipe, options.config, options.processes)
    launch = Launch(configuration, tuple(training_arguments(options)), processes)
    # Flush, so that the command comes before the output of the processes in a log file.
    print(launch.text, flush=True)
    content = load_yaml(configuration)
    machines = content.get("num_machines")
    if machines not in (None, 0, 1):
        address = f"{content.get('main_process_ip')}:{content.get('main_process_port')}"
        machine = content.get("machine_rank", 0)
        print(f"machine {machine} waits for all {machines} machines at {address}", flush=True)
    return run(launch)


def choose_configuration(
    recipe: Recipe, config: str | None, processes: int | None
) -> tuple[Path, int | None]:
    """Choose the configuration for this machine, and the number of processes.

    Each process needs at least one pack in every step. So if a step has fewer packs than there are
    GPUs, only some of the GPUs are used.

    config: configuration that the user has set, or None.
    processes: number that the user has set, or None.

    Returns the path of the configuration, and the number of processes. If the number is None, the
    configuration sets it.
    """
    if config:
        return find_configuration(config), processes
    gpus = count_gpus()
    packs = recipe.batch.tokens // recipe.data.length
    number = processes or min(gpus, packs)
    name = "bf16" if gpus else "cpu"
    if number > 1:
        name = "ddp"
    return CONFIGURATIONS / f"{name}.yaml", number if number > 1 else None


def count_gpus() -> int:
    """Return the number of GPUs that processes of this environment can use.

    The result is 0 if torch was built for CPUs, or if ACCELERATE_USE_CPU is set.
    """
    if is_true(os.environ, "ACCELERATE_USE_CPU") or "+cpu" in version("torch"):
        return 0
    return len(visible_gpus())


def training_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments of train_accelerate.py for the options of `train`."""
    arguments = [
        f"--{name.replace('_', '-')}"
        for name in ("accept_changes", "plan", "profile")
        if getattr(options, name)
    ]
    if options.resume != "auto":
        arguments += ["--resume", options.resume]
    return [str(options.recipe), *options.overrides, *arguments]


# ── The configuration ─────────────────────────────────────────────────────────────────────────────


def find_configuration(name: str) -> Path:
    """Return the path of an Accelerate configuration, which is readable YAML.

    `name` is a path, or the name of a file in accelerate_configs/, with or without `.yaml`. Raises
    InputError if there is no such file, or if `load_configuration` refuses it.
    """
    shipped = CONFIGURATIONS / f"{name.removesuffix('.yaml')}.yaml"
    path = next(filter(Path.is_file, (Path(name).expanduser(), shipped)), None)
    if path is None:
        raise InputError(
            f"{name}: there is no such Accelerate configuration; name a path, or one of these: "
            + ", ".join(sorted(file.stem for file in CONFIGURATIONS.glob("*.yaml")))
        )
    load_configuration(path)
    return path


def load_configuration(path: Path) -> dict[str, Any]:
    """Return the content of an Accelerate configuration.

    Raises InputError if DeepSpeed or Megatron-LM would train, or if its machines would not find
    each other.
    """
    settings = load_yaml(path)
    if settings.get("distributed_type") in UNSUPPORTED_TYPES:
        raise InputError(
            f"{path}: `distributed_type: {settings['distributed_type']}` is not supported; to "
            "shard the model, choose the configuration zero or fsdp2 in accelerate_configs/"
        )
    if settings.get("num_machines") not in (None, 0, 1) and settings.get("main_process_port") == 0:
        raise InputError(
            f"{path}: `main_process_port: 0` is another free port on each machine, so the machines "
            "would not find each other; set the same port in the file of every machine"
        )
    return settings


@dataclass(frozen=True)
class Launch:
    """A training as `accelerate launch` starts it."""

    # The Accelerate configuration.
    configuration: Path
    # Arguments of the script: the recipe, settings that override it as key=value, and options.
    script_arguments: tuple[str, ...]
    # Number of processes. None if the configuration sets the number.
    processes: int | None = None

    @property
    def arguments(self) -> list[str]:
        """Return the arguments of `accelerate launch`."""
        options = ["--config_file", os.path.relpath(self.configuration)]
        if self.processes is not None:
            options += ["--num_processes", str(self.processes)]
        if load_yaml(self.configuration).get("mixed_precision") is False:
            # YAML reads `no` without quotation marks as false, which accelerate does not accept.
            options += ["--mixed_precision", "no"]
        return [*options, os.path.relpath(SCRIPT), *self.script_arguments]

    @property
    def text(self) -> str:
        """Return the command for a user."""
        return shlex.join(["accelerate", "launch", *self.arguments])

    @property
    def command(self) -> list[str]:
        """Return the complete command, as a program starts it.

        `--quiet` suppresses the traceback that accelerate prints after the training's own error
        message.
        """
        return [sys.executable, "-m", "accelerate.commands.launch", "--quiet", *self.arguments]


# ── The training ──────────────────────────────────────────────────────────────────────────────────


def run(launch: Launch) -> int:
    """Train as `accelerate launch` does, and return the exit status of the training.

    A training in one process ends this process with its exit status.

    Unlike this function, `accelerate launch` ends with a traceback, and with status 1 for every
    failure. If torchrun's record of a failure has no traceback, only the message in the record is
    printed. Raises InputError if accelerate does not accept the configuration.
    """
    script.before_imports()
    from accelerate.commands import launch as accelerate_launch
    from accelerate.utils import launch as launch_environment
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    script.after_imports()
    for name in ("accelerate.commands.launch", "torch.distributed.elastic.multiprocessing.api"):
        logging.getLogger(name).addFilter(lambda line: not str(line.msg).startswith(_OMITTED))
    # If accelerate wants to start a single process, its options are stored here. The training then
    # runs in this process.
    single: list[argparse.Namespace] = []
    try:
        with (
            handling(_forward_signal),
            # A missing FP8 library is reported later, with the precision, and not for --plan.
            overridden(launch_environment, is_fp8_available=lambda: True),
            overridden(accelerate_launch, simple_launcher=single.append),
            as_input_error(
                _REFUSED,
                f"{launch.configuration}: accelerate does not accept this configuration",
                "correct the file, or choose another --config, such as bf16 or cpu",
            ),
        ):
            parser = accelerate_launch.launch_command_parser()
            # With several processes, this call returns when they have ended, and `single` is empty.
            accelerate_launch.launch_command(parser.parse_args(launch.arguments))
            started = [
                accelerate_launch.prepare_simple_launcher_cmd_env(options) for options in single
            ]
    except subprocess.CalledProcessError as error:
        return reported_status(error.returncode)
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as error:
        return _report(error)
    # Train outside of the contexts above, which would report an error of the training as an error
    # of the configuration.
    for command, environment in started:
        _train_here(command, environment)
    return 0


def _train_here(command: Sequence[str], environment: dict[str, str]) -> None:
    """Run a training in this process, and end this process with its exit status.

    command: interpreter, script and arguments. Words before the interpreter, such as mpirun and its
        options, are ignored, because the training refuses a configuration with mpirun.
    environment: environment variables of the training.
    """
    import torch

    # Set the number of threads explicitly, because torch has already read OMP_NUM_THREADS. Only a
    # number that the user has set stays in the environment, see `pretrain.run.job.use_one_thread`.
    torch.set_num_threads(int(environment.pop("OMP_NUM_THREADS")))
    os.environ.update(environment)
    sys.argv = list(command[command.index(sys.executable) + 1 :])
    runpy.run_path(sys.argv[0], run_name="__main__")


def _forward_signal(number: int, frame: FrameType | None) -> None:
    """Send a signal to the training processes, which save a checkpoint and exit.

    A training process may also receive Ctrl-C from the terminal. It then treats the two signals as
    one signal.
    """
    children = psutil.Process().children()
    for child in children:
        child.send_signal(number)
    # Before the training processes are started, the signal ends this process.
    if not children:
        raise SystemExit(128 + number)


def exit_status(returncode: int) -> int:
    """Return the exit status that a shell reports for a `returncode` of subprocess.

    `returncode` is the negative number of a signal if the signal has ended the process.
    """
    return returncode if returncode >= 0 else 128 - returncode


def reported_status(returncode: int, process: str = "the training") -> int:
    """Return `exit_status`, and print a message if a signal has ended `process`."""
    if returncode < 0:
        print(
            f"{process} was ended by {signal.Signals(-returncode).name}; the same command "
            "continues from the newest checkpoint, if there is one",
            file=sys.stderr,
        )
    return exit_status(returncode)


def _report(error: Any) -> int:
    """Print the first failure of several processes, and return its exit status.

    error: torch's ChildFailedError.
    """
    for rank, item in error.failures.items():
        # If SIGINT or SIGKILL has ended a rank, report this rank, because the errors of the other
        # ranks follow from the signal. Other signals are not reported here, because libraries use
        # them to end a process after an error of another rank.
        if item.exitcode in (-signal.SIGINT, -signal.SIGKILL):
            return reported_status(item.exitcode, f"rank {rank}")
    _, failure = error.get_first_failure()
    record = failure.error_file_data["message"]
    # Print only the message of a record that `foundation.command.report_error` has written. Only
    # these records have the key `errorCode`.
    if "errorCode" in record:
        print(record["message"], file=sys.stderr)
        return record["errorCode"]
    # Print torchrun's table, which has the ranks and their tracebacks. If a signal has stopped the
    # run, the user needs no table.
    if failure.exitcode < 128:
        print(error, file=sys.stderr)
    return reported_status(failure.exitcode)
