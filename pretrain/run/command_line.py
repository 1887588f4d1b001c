"""What a user types, how a launch is set up, and the one message of a launch that ends early, however many processes it has."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.reading import one_line
from pretrain.metrics.health import TrainingHalted
from pretrain.model.distributed import RANKS_WAIT, complete_topology, explaining_accelerate
from pretrain.plan.memory import TAKES_LESS, is_out_of_memory
from pretrain.settings.launch import with_topology
from pretrain.settings.recipe import Recipe

# ── What is typed ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class LaunchParser(CommandParser):
    """Reads a recipe and what is set over it, as key=value or --key=value, which W&B's agents write."""

    remedy = "a setting is key=value or --key=value, and --help lists the options"

    def __init__(self, description: str | None, prog: str | None = None) -> None:
        super().__init__(prog, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.add_argument("recipe", type=Path, help="what is trained: a YAML file, see recipes/")
        self.add_argument(
            "overrides", nargs="*", metavar="key=value", help="over the recipe's settings: weights=bf16 train.steps=9"
        )

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        options = [option for action in self._actions for option in action.option_strings]

        def is_setting(text: str) -> bool:
            name, equals, _ = text.partition("=")
            return bool(equals) and name.startswith("--") and not any(option.startswith(name) for option in options)

        # Intermixed, so that key=value may follow an option.
        return self.parse_intermixed_args([text[2:] if is_setting(text) else text for text in arguments])


def parse_arguments(description: str | None) -> argparse.Namespace:
    """`description`: what the launcher is, for --help. Raises InputError for an option that there is not."""
    parser = LaunchParser(description)
    parser.add_argument("--resume", default="auto", metavar="CHECKPOINT", help="default auto: the run's newest intact one")
    parser.add_argument("--accept-changes", action="store_true", help="continue a checkpoint although the recipe has changed")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--plan", action="store_true", help="say what would happen, check every setting, and stop")
    one.add_argument("--profile", action="store_true", help="record a step: profile.md and a trace in the run folder")
    return parser.read(sys.argv[1:])


# ── How a launch is set up ────────────────────────────────────────────────────────────────────────────────────────────────────


def as_launched(recipe: Recipe) -> tuple[Accelerator, tuple[str, ...]]:
    """The Accelerator and the notices of a command that trains nothing."""
    if recipe.deterministic:
        compute_in_a_fixed_order()
    launch = with_topology(os.environ, has_gpu=torch.accelerator.is_available())
    with explaining_accelerate():
        accelerator = Accelerator(mixed_precision="no", kwargs_handlers=[RANKS_WAIT])
    complete_topology(accelerator, launch.replicas, gathers_as_fits=launch.gathers_as_fits)
    return accelerator, launch.notices


def compute_in_a_fixed_order() -> None:
    """`deterministic: true`: on a GPU too, the same bits from every run of one recipe, stopped and resumed or not. Called before
    anything is on a GPU, as cuBLAS reads the environment then.

    Attention takes a kernel with a fixed order (`attention.choose`), torch its deterministic algorithms, cuBLAS one workspace,
    NCCL no sums in switches; tables' gradients, searched products and compiled reductions ask torch whether that is so. What a
    step draws is seeded by its number, and a checkpoint holds the rest.

    torch ends a run that computes what has no deterministic form, and one with another workspace than :4096:8 and :16:8.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as large as what torch takes by itself on Hopper
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # it costs a pass over all new memory, and here all is written


# ── How it ends ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def explaining_errors() -> Iterator[None]:
    """InputError with the settings that take less where a device, or the host, runs out of memory inside."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"out of memory: {one_line(error)}. What takes less: {TAKES_LESS}; `--plan` says how much. Checkpoints "
            "are untouched: the same command with one of these goes on from the last; where it changes `weights` or `optimizer`, "
            "with --accept-changes too"
        ) from None


def exit_status(launch: Callable[[], int]) -> int:
    """What `launch` returns; 2 for a mistake of the user's and 3 for a training that cannot go on, each said in one message, once
    a machine: torchrun prints in its table what the other processes record of their error.

    The first process of all writes the status to the file that PRETRAIN_STATUS_FILE names, if it names one: `accelerate launch`
    ends with 1 whatever a process of its ended with, and who started it may have to know.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        status = launch()
    except (InputError, PermissionError, TrainingHalted) as error:
        kind, status = ("halted", 3) if isinstance(error, TrainingHalted) else ("error", 2)
        get_error_handler().record_exception(error)
        if "TORCHELASTIC_ERROR_FILE" not in os.environ or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{kind}: {error}", file=sys.stderr)
    path = os.environ.get("PRETRAIN_STATUS_FILE")
    if path and os.environ.get("RANK", "0") == "0":
        Path(path).write_text(f"{status}\n", encoding="utf-8")
    return status
