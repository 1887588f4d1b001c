"""Command-line options of the commands that import torch.

The options are defined here because importing torch takes seconds. So --help and messages about
invalid options appear at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from inspect import getdoc
from pathlib import Path

from foundation.command import CommandParser
from pretrain.settings.config import LaunchParser, TrainingParser

# Devices of the command `plan` if --on is not set.
USUAL = ("H100", "H200", "B200", "8xB200")
# Defaults of the command `sample`: at most 64 new tokens, temperature 0.8 and top-p 0.95.
TOKENS = 64
TEMPERATURE = 0.8
TOP_P = 0.95


def read(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command-line arguments of `command`, which is a key of COMMANDS.

    Raises InputError if an argument is invalid. With --help, print the help and end the process.
    """
    parser_class, add_options = COMMANDS[command]
    parser = parser_class(f"python -m pretrain {command}", getdoc(add_options))
    add_options(parser.add_argument)
    return parser.read(arguments)


def count(text: str) -> int:
    """Parse a whole number of at least 1.

    Raises ValueError for any other text. argparse converts this error to the message `invalid count
    value`.
    """
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def train(add: Callable) -> None:
    """Train a recipe on the devices of this machine, or resume its training.

        python -m pretrain train my.yaml
        python -m pretrain train my.yaml --config fp8_delayed weights=bf16_exact train.steps=100

    The command prints the `accelerate launch` command that it runs. Without --config, it uses
    accelerate_configs/cpu.yaml on a machine without a GPU, bf16.yaml on one GPU, and ddp.yaml on
    several GPUs. NVIDIA's driver counts the GPUs, and CUDA_VISIBLE_DEVICES limits them. To train on
    several machines, use `accelerate launch`.
    """
    add(
        "--config",
        "--config_file",
        metavar="FILE",
        help="Accelerate configuration: a path, or the name of a file in accelerate_configs/",
    )
    add(
        "--processes",
        type=count,
        metavar="N",
        help="number of processes, one for each GPU; default: the number in the configuration, or "
        "one for each GPU",
    )
    add("--quiet", action="store_true", help="do not print the command")


def plan(add: Callable) -> None:
    """Estimate time and memory of a training on devices that this machine does not have.

        python -m pretrain plan my.yaml train.tokens=20e9        on H100, H200, B200 and 8 x B200
        python -m pretrain plan my.yaml --on 8xH200 --mfu 0.42   at an MFU that a run has reached

    To plan a training on this machine, use accelerate launch ... train_accelerate.py RECIPE --plan.
    Unlike the command `plan`, it needs the packs.
    """
    add(
        "--on",
        action="append",
        default=[],
        metavar="DEVICE",
        help="device, with a number if there are several: H200, 8xB200, 'RTX 4090'; may be "
        f"repeated; default: {', '.join(USUAL)}",
    )
    add(
        "--mfu",
        action="append",
        default=[],
        type=float,
        metavar="SHARE",
        help="assumed model FLOPs utilization, for example 0.4; repeat the option to get a range",
    )


def evaluate(add: Callable) -> None:
    """Compute the held-out loss of a checkpoint, or the checkpoint's loss on a text file.

        python -m pretrain evaluate RUN_OR_RECIPE [FILE] [--resume CHECKPOINT] [key=value ...]

    If the run has no checkpoint, evaluate the model that the run would start from. The command
    writes nothing into the run folder. To evaluate on GPUs, start the command with
    accelerate launch --config_file accelerate_configs/bf16.yaml -m pretrain evaluate ...
    """
    add(
        "--resume",
        default="auto",
        metavar="CHECKPOINT",
        help="checkpoint to evaluate; default: the newest intact checkpoint of the run",
    )
    add(
        "--precisions",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="evaluate in these precisions and in BF16, or in `all`; precisions that the device "
        "does not support are emulated; default: the precisions of the recipe",
    )


def doctor(add: Callable) -> None:
    """Test which precisions work on this machine, and print the engine and the speed of each one.

    A model of one layer is trained in each precision for a few steps. Before the first step, its
    loss and gradients are compared with plain transformers.

        python -m pretrain doctor --card b200.json      measure this GPU (about 15 minutes)
        python -m pretrain doctor --check b200.json     repeat the trainings of a card
    """
    add(
        "--precisions",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="precisions to test; default: all",
    )
    add(
        "--card",
        type=Path,
        nargs="?",
        const=Path("card.json"),
        metavar="FILE",
        help="write a card of this machine instead of the table: for each precision the speed "
        "beside the machine's limits, audit, parity, bits of the hardware's quantization, and the "
        "losses of 50 steps; default of FILE: %(const)s",
    )
    add(
        "--check",
        type=Path,
        metavar="CARD",
        help="train the 50 steps of a card again, and compare the losses",
    )


def export(add: Callable) -> None:
    """Export a checkpoint as a model folder for transformers, with a model card.

    The command needs no GPU. It needs as much memory as the weights.
    """
    add(
        "source",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a checkpoint (a step-* folder), or a run folder, whose newest checkpoint is exported",
    )
    add(
        "folder",
        type=Path,
        nargs="?",
        metavar="OUT",
        help="folder into which the model is exported; default: RUN/export",
    )
    add("--out", type=Path, metavar="OUT", help="the folder, as an option instead of an argument")
    add(
        "--best",
        action="store_true",
        help="export the run's checkpoint with the lowest held-out loss, not the newest checkpoint",
    )
    add(
        "--dtype",
        choices=["bf16", "fp32"],
        help="dtype of the exported weights; default: the dtype in which the run stores them. If "
        "the run has `weights: bf16_exact`, fp32 restores all 32 bits of each weight",
    )
    add(
        "--precision",
        choices=["trained"],
        help="trained: export the codes and scales that the forward products of training multiply, "
        "in the layout that servers read (docs/serving.md)",
    )
    add(
        "--merge",
        type=count,
        metavar="N",
        help="export the mean weights of the last N checkpoints, summed in FP64",
    )
    add(
        "--push",
        metavar="OWNER/NAME",
        help="also upload the model to this repository on the Hugging Face hub; a missing "
        "repository is created as private",
    )


def sample(add: Callable) -> None:
    """Generate text with a trained model.

    FOLDER is the run folder of a finished run, or a model folder that transformers can load. To
    make a model folder from any checkpoint, use `python -m pretrain export`. The model is run on a
    GPU if there is one, in the dtype of the stored weights.
    """
    add("folder", type=Path, metavar="FOLDER", help="a run folder or a model folder")
    add(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="text that the model continues; '' generates a text from its beginning",
    )
    add(
        "--prompt",
        action="append",
        default=[],
        help="text that the model continues, as an option instead of an argument; may be repeated",
    )
    add(
        "--tokens",
        "--max-new-tokens",
        "--max_new_tokens",
        type=count,
        default=TOKENS,
        help="maximum number of new tokens for each prompt; default: %(default)s",
    )
    add(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        help="sampling temperature; 0 always chooses the likeliest token; default: %(default)s",
    )
    add(
        "--top-p",
        "--top_p",
        type=float,
        default=TOP_P,
        help="sample only from the likeliest tokens whose probabilities sum to this value; "
        "default: %(default)s",
    )
    add(
        "--seed",
        type=int,
        default=42,
        help="random seed, from which the seed of each prompt is derived; default: 42",
    )


def flops(add: Callable) -> None:
    """List the FLOPs per token of a model in training, by each common definition of MFU.

    MODEL is a recipe, a model folder or a name on the Hugging Face hub. The weights of the model
    are not read. docs/planning.md derives each definition.
    """
    add(
        "model",
        metavar="MODEL",
        help="a recipe (.yaml), a model folder, or a name on the Hugging Face hub",
    )
    add(
        "--length",
        type=count,
        nargs="+",
        metavar="T",
        help="sequence lengths in tokens; default: `data.length` of the recipe",
    )
    add(
        "--tokens-per-second",
        type=float,
        metavar="N",
        help="speed of all devices together, from which the MFU is computed",
    )
    add(
        "--on",
        metavar="DEVICE",
        default="H200",
        help="device whose dense BF16 peak is an MFU of 100 %%, for example 8xB200; default: H200",
    )


# Map the name of each command to the class of its parser and to a function. The function adds the
# options of the command, and its docstring is the description that --help prints.
COMMANDS: dict[str, tuple[type[CommandParser], Callable]] = {
    "train": (TrainingParser, train),
    "plan": (LaunchParser, plan),
    "evaluate": (LaunchParser, evaluate),
    "doctor": (CommandParser, doctor),
    "export": (CommandParser, export),
    "sample": (CommandParser, sample),
    "flops": (CommandParser, flops),
}
