"""Command-line options of the commands of `python -m pretrain`.

The options are defined here because most commands import torch, which takes seconds. So --help and
messages about invalid options appear at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path

from foundation.command import CommandParser, run_command
from foundation.settings import local_path
from pretrain.settings.config import PacksParser, SettingsParser, load_recipe

# Default of --margin in percent of the baseline's loss, for `which` and `report`.
MARGIN_PERCENT = 0.3
# Devices of the command `plan` if --on is not set.
USUAL_DEVICES = ("H100", "H200", "B200", "8xH100", "RTX 4090", "RTX 5090")
# Defaults of the command `sample`: at most 64 new tokens, temperature 0.8 and top-p 0.95.
TOKENS = 64
TEMPERATURE = 0.8
TOP_P = 0.95


def count(text: str, least: int = 1) -> int:
    """Parse a whole number of at least `least`. Raises ArgumentTypeError for any other text."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return int(text)


def separated(text: str) -> list[str]:
    """Parse names that commas separate."""
    return text.split(",")


def positive(text: str) -> float:
    """Parse a number above 0. Raises ArgumentTypeError for any other text."""
    # NaN is not above 0.
    with suppress(ValueError):
        if float(text) > 0:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text} is not a number above 0")


def priced(text: str) -> list[tuple[str, float]]:
    """Parse `DEVICE=DOLLARS,DEVICE=DOLLARS`. Raises ArgumentTypeError if a price is not above 0."""
    parts = [part.rpartition("=") for part in text.split(",")]
    return [(device, positive(dollars)) for device, _, dollars in parts]


@dataclass(frozen=True)
class Command:
    """A command of `python -m pretrain`."""

    # The parser of its command line.
    parser: CommandParser
    # First line of the help text, which the list of commands has.
    summary: str
    # The function that runs the command with the parsed options, as "module:name". Its module is
    # imported after the options have been parsed.
    function: str
    # A function that raises InputError for a mistake in the parsed options, as "module:name". It is
    # called before the module of `function` is imported. Its module does not import torch.
    check: str | None


# All commands by name. `_command` adds them.
COMMANDS: dict[str, Command] = {}


def _command(
    name: str,
    function: str,
    description: str,
    parser: type[CommandParser] = CommandParser,
    check: str | None = None,
) -> CommandParser:
    """Add the command `name` to COMMANDS, and return its parser, which has no options yet.

    The help text is `description`. `Command` documents the other arguments.
    """
    help_text = cleandoc(description)
    command_parser = parser(f"python -m pretrain {name}", help_text)
    summary = help_text.splitlines()[0]
    COMMANDS[name] = Command(command_parser, summary, function, check)
    return command_parser


def _add_recipe(parser: CommandParser) -> None:
    """Add the arguments of a command with a recipe."""
    parser.add_argument(
        "recipe", type=Path, help="the recipe, a YAML file; examples are in recipes/"
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings that override the recipe, for example batch.microbatch=8",
    )


def _add_training(parser: CommandParser) -> None:
    """Add the arguments of train_accelerate.py."""
    _add_recipe(parser)
    parser.add_argument(
        "--resume",
        type=local_path,
        default="auto",
        metavar="CHECKPOINT",
        help="checkpoint from which the run resumes; default: the newest intact checkpoint in the "
        "run folder",
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="resume from a checkpoint even if settings have changed since it was saved",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument(
        "--plan",
        action="store_true",
        help="check every setting, print the planned steps, memory and settings, and exit",
    )
    modes.add_argument(
        "--profile",
        action="store_true",
        help="profile one step, and write profile.md and a trace to the run folder",
    )


_train = _command(
    "train",
    "pretrain.launch.launcher:main",
    """Train a recipe on the devices of this machine, or resume its training.

        python -m pretrain train my.yaml
        python -m pretrain train my.yaml --config fp8_delayed train.steps=100

    The command prints the `accelerate launch` command that it runs. Without --config, it uses
    accelerate_configs/cpu.yaml on a machine without a GPU, bf16.yaml on one GPU, and ddp.yaml on
    several GPUs. NVIDIA's driver counts the GPUs, and CUDA_VISIBLE_DEVICES limits them. To train on
    several machines, use `accelerate launch`.
    """,
    parser=SettingsParser,
    check="pretrain.run.command_checks:check_train",
)
_add_training(_train)
_train.add_argument(
    "--config",
    metavar="FILE",
    help="Accelerate configuration: a path, or the name of a file in accelerate_configs/",
)
_train.add_argument(
    "--processes",
    type=count,
    metavar="N",
    help="number of processes, one for each GPU; default: the number in the file --config, or one "
    "for each GPU without --config",
)


_plan = _command(
    "plan",
    "lab.speed.plan_command:main",
    """Predict speed, time and memory of a training on other devices, precision by precision.

        python -m pretrain plan my.yaml train.tokens=20e9          on the usual devices
        python -m pretrain plan my.yaml --on 8xH200,rtx4090        on other devices
        python -m pretrain plan my.yaml precision=delayed          in delayed and BF16 alone

    If the recipe or the command line sets a precision, only this precision and BF16 are planned.
    To plan a training on this machine, use python -m pretrain train RECIPE --plan. Unlike the
    command `plan`, it needs the packs.
    """,
    parser=SettingsParser,
    check="pretrain.run.command_checks:check_plan",
)
_add_recipe(_plan)
_plan.add_argument(
    "--on",
    action="extend",
    type=separated,
    default=[],
    metavar="DEVICE",
    help="device, with a number if there are several: H200, 8xB200, rtx4090; a wrong name "
    f"prints all names; may be repeated; default: {', '.join(USUAL_DEVICES)}",
)
_plan.add_argument(
    "--config",
    choices=["ddp", "zero", "fsdp2"],
    help="Accelerate configuration for several devices; default: the first that fits",
)
_plan.add_argument(
    "--price",
    action="extend",
    type=priced,
    default=[],
    metavar="DEVICE=DOLLARS",
    help="dollars for an hour of one device, such as H100=2.5,B200=6; may be repeated",
)


_evaluate = _command(
    "evaluate",
    "pretrain.run.evaluate_command:main",
    """Compute the held-out loss of a checkpoint, or its loss on a text file.

        python -m pretrain evaluate RUN_OR_RECIPE [FILE] [--resume CHECKPOINT] [key=value ...]

    If the run has no checkpoint, evaluate the model that the run would start from. The command
    writes nothing into the run folder. It uses one GPU if there is one. To use several, start it by
    accelerate launch --config_file accelerate_configs/ddp.yaml -m pretrain evaluate ...
    """,
    parser=SettingsParser,
    check="pretrain.run.command_checks:check_evaluate",
)
_add_recipe(_evaluate)
_evaluate.add_argument(
    "--resume",
    type=local_path,
    default="auto",
    metavar="CHECKPOINT",
    help="checkpoint to evaluate; default: the newest intact checkpoint of the run",
)
_evaluate.add_argument(
    "--precisions",
    type=separated,
    metavar="A,B",
    help="evaluate in these precisions and in BF16; `all` selects all quantized precisions "
    "that support `data.length`; the precisions that the device does not support are emulated; "
    "default: the precisions of the recipe",
)


_gap = _command(
    "gap",
    "lab.gap:main",
    """Compare the loss and the gradients of a checkpoint in low precision with those in BF16.

        python -m pretrain gap runs/my --packs 16 --precisions delayed,nvfp4

    Both are computed from the same held-out packs. The command prints the distance of the gradients
    by layer, and writes nothing.
    """,
    check="pretrain.run.command_checks:check_gap",
)
_gap.add_argument(
    "source",
    type=Path,
    metavar="RUN_OR_CHECKPOINT",
    help="a checkpoint (a step-* folder), or a run folder, whose newest checkpoint is loaded",
)
_gap.add_argument(
    "--packs", type=count, default=8, metavar="N", help="number of held-out packs; default: 8"
)
_gap.add_argument(
    "--precisions",
    type=separated,
    metavar="A,B",
    help="precisions to compare with BF16; the precisions that the device does not support are "
    "emulated; default: those of the run",
)


_doctor = _command(
    "doctor",
    "lab.doctor:main",
    """Test which precisions work on this machine.

    A model of one layer is trained in each precision for a few steps. Before the first step, its
    loss and gradients are compared with plain transformers.
    """,
    check="pretrain.run.command_checks:check_precisions",
)
_doctor.add_argument(
    "--precisions",
    type=separated,
    metavar="A,B",
    help="precisions to test; default: all, but on a GPU those that it supports",
)


_export = _command(
    "export",
    "pretrain.run.export:main",
    """Export a checkpoint as a model folder for transformers, with a model card.

    The command needs no GPU. It needs as much memory as the weights. `hf upload OWNER/NAME FOLDER`
    uploads the folder to the Hugging Face hub.
    """,
    check="pretrain.run.command_checks:check_export",
)
_export.add_argument(
    "source",
    type=Path,
    metavar="RUN_OR_CHECKPOINT",
    help="a checkpoint (a step-* folder), or a run folder, whose newest checkpoint is exported",
)
_export.add_argument(
    "--out",
    type=Path,
    metavar="FOLDER",
    help="folder into which the model is exported; default: RUN/export",
)
_export.add_argument(
    "--best",
    action="store_true",
    help="export the run's checkpoint with the lowest held-out loss, not the newest checkpoint",
)
_export.add_argument(
    "--dtype",
    choices=["bf16", "fp32"],
    help="dtype of the exported weights; default: the dtype in which the run stores them. If "
    "the run has `weights: bf16_exact`, fp32 restores all 32 bits of each weight",
)
_export.add_argument(
    "--precision",
    choices=["trained"],
    help="trained: export quantized weights, with the codes and scales of the forward pass in "
    "training, in the layout that servers read (docs/serving.md)",
)
_export.add_argument(
    "--merge",
    type=count,
    metavar="N",
    help="export the mean of the weights in the last N checkpoints, computed in FP64",
)


_sample = _command(
    "sample",
    "pretrain.run.sampling:main",
    """Generate text with a trained model.

    FOLDER is the run folder of a finished run, or a model folder that transformers can load. To
    make a model folder from any checkpoint, use `python -m pretrain export`. The model is run on a
    GPU if there is one, in the dtype of the stored weights.
    """,
    check="pretrain.run.command_checks:check_sample",
)
_sample.add_argument("folder", type=Path, metavar="FOLDER", help="a run folder or a model folder")
_sample.add_argument(
    "prompts",
    nargs="+",
    metavar="PROMPT",
    help="text that the model continues; '' generates text without a prompt",
)
_sample.add_argument(
    "--tokens",
    type=count,
    default=TOKENS,
    help="maximum number of new tokens for each prompt; default: %(default)s",
)
_sample.add_argument(
    "--temperature",
    type=float,
    default=TEMPERATURE,
    help="sampling temperature; 0 always chooses the likeliest token; default: %(default)s",
)
_sample.add_argument(
    "--top-p",
    type=float,
    default=TOP_P,
    help="sample only from the likeliest tokens whose probabilities sum to this value; "
    "default: %(default)s",
)
_sample.add_argument(
    "--seed",
    type=int,
    default=42,
    help="random seed, from which the seed of each prompt is derived; default: 42",
)


_matrix = _command(
    "matrix",
    "lab.experiments.matrix:main",
    """Run all cells of an experiment and compare them.

    A cell is one training run of the experiment. Finished cells are not run again.
    """,
)
_matrix.add_argument(
    "matrix",
    type=Path,
    help="YAML file that describes the experiment; examples are in recipes/matrices/",
)
_matrix.add_argument(
    "overrides",
    nargs="*",
    default=[],
    metavar="key=value",
    help="settings that override the recipe in every cell",
)
_matrix.add_argument(
    "--at-once",
    type=count,
    metavar="N",
    help="maximum number of cells that run at the same time",
)
_matrix.add_argument(
    "--gpus",
    type=count,
    metavar="N",
    help="number of GPUs of this machine over which the cells are distributed",
)
_matrix.add_argument(
    "--dry-run", action="store_true", help="print the command that runs each cell, and exit"
)


_which = _command(
    "which",
    "lab.experiments.which:main",
    """Find the fastest precision at equal loss for your model and data.

    One precision is the baseline, and the other precisions are candidates. First, a few steps
    are trained in each precision. These trials show which precisions run on this machine, and
    how fast. From the speeds, the command computes how long each run can be so that all runs
    fit into --hours.

    Then the command trains rounds. Each round has one seed. The baseline trains from the start.
    Each candidate branches from the baseline's checkpoint after a fifth of the steps, and
    trains on the same packs in the same order as the baseline. After each round, the held-out
    losses are computed in BF16, or in the precision --served. The difference between a
    candidate's loss and the baseline's loss is compared with a margin that is fixed before the
    first round. A candidate with a final verdict is not trained any further. The remaining
    hours are used for candidates whose verdict is still open.

    The main result is the gain at equal loss. It is the candidate's speedup, divided by the
    number of training tokens that the candidate needs for the baseline's loss, relative to the
    baseline's number of tokens. The precision with the largest gain is recommended, if the
    confidence interval of its gain is above 1 and a cost above the margin is excluded. To
    continue after Ctrl-C, run the same command again. To train more rounds for open candidates,
    run it again with enough --hours for a round.

    The result is not valid for longer runs or larger models, which may need a more exact
    precision.

    Exit status: 0 if all verdicts are final, 1 if a candidate's verdict is open, 2 for invalid
    input, and 128 plus the number of the signal if a signal stopped the command.
    """,
    parser=SettingsParser,
)
_add_recipe(_which)
_which.add_argument(
    "--hours",
    type=positive,
    default=4.0,
    metavar="H",
    help="time limit of this start of the command, in hours; a round is only started if it is "
    "expected to end within this limit; default: 4",
)
_which.add_argument(
    "--margin",
    type=positive,
    default=MARGIN_PERCENT,
    metavar="PERCENT",
    help="largest loss difference that counts as equivalent, in percent of the baseline's "
    f"loss; default: {MARGIN_PERCENT}",
)
_which.add_argument(
    "--precisions",
    type=separated,
    metavar="A,B",
    help="precisions to compare, the baseline first; append +head to a precision to quantize "
    "the head too; default: BF16, all quantized precisions that this machine supports, and the "
    "first of these again with +head; on a machine that supports none, one emulated precision",
)
_which.add_argument(
    "--served",
    metavar="PRECISION",
    help="judge the candidates by the held-out loss of the trained model in this precision; "
    "default: in BF16",
)
_which.add_argument(
    "--candidates",
    type=Path,
    metavar="FILE",
    help="YAML file with the name and the settings of each candidate, the baseline first, "
    "instead of --precisions (docs/comparing.md)",
)
_which.add_argument(
    "--seeds",
    type=count,
    default=5,
    metavar="N",
    help="number of rounds for which the length of the runs is planned, at least 3; default: 5",
)
_which.add_argument(
    "--steps",
    type=count,
    metavar="N",
    help="steps of each run; default: computed from --hours",
)
_which.add_argument(
    "--gpus",
    type=count,
    metavar="N",
    help="number of GPUs of this machine over which the runs are distributed; "
    "default: one run at a time",
)
_which.add_argument(
    "--from",
    dest="begin_with",
    metavar="CHECKPOINT",
    help="checkpoint (a step-* folder) from which all runs branch, including the "
    "baseline's; default: the baseline trains from the start",
)
_which.add_argument(
    "--config",
    metavar="FILE",
    help="Accelerate configuration: a path, or the name of a file in accelerate_configs/; "
    "default: bf16 with a GPU, cpu without a GPU",
)
_which.add_argument(
    "--run_dir",
    type=Path,
    metavar="FOLDER",
    help="folder of the runs; default: runs/which/NAME with the recipe's name",
)


_report = _command(
    "report",
    "lab.compare.report:main",
    """Compare runs: tables, curves, and the difference in loss from a baseline.

    The first run is the baseline. The tables are printed, and --out also writes an HTML page.
    """,
)
_report.add_argument(
    "runs",
    nargs="+",
    type=Path,
    metavar="RUN",
    help="run folder; the first one is the baseline",
)
_report.add_argument(
    "--out", type=Path, metavar="PAGE.html", help="also write the report as an HTML page"
)
_report.add_argument(
    "--vary",
    action="append",
    default=[],
    metavar="KEY",
    help="key or section in which the runs may differ; may be repeated",
)
_report.add_argument(
    "--margin",
    type=positive,
    default=MARGIN_PERCENT,
    metavar="PERCENT",
    help="largest difference that counts as equivalent in a comparison over seeds, in percent "
    f"of the baseline's loss; default: {MARGIN_PERCENT}",
)


_tokenizer = _command(
    "tokenizer",
    "pretrain.run.pack_commands:tokenizer_command",
    """Train a byte-level BPE tokenizer on text.

    The end-of-text token of the tokenizer has the id 0 and ends each document.

        python -m pretrain tokenizer my_text --vocabulary 8192 --out my_tokenizer
    """,
    parser=PacksParser,
)
_tokenizer.add_argument("source", metavar="SOURCE", help="file, folder, pattern or dataset")
_tokenizer.add_argument(
    "settings",
    nargs="*",
    metavar="key=value",
    help="keys of the data section, such as data.text=body",
)
_tokenizer.add_argument(
    "--vocabulary",
    type=lambda text: count(text, least=257),
    required=True,
    metavar="N",
    help="number of tokens, including 256 bytes, the end-of-text token and the special tokens",
)
_tokenizer.add_argument("--out", type=Path, required=True, metavar="FOLDER")
_tokenizer.add_argument(
    "--special",
    action="append",
    default=[],
    metavar="TOKEN",
    help="special token to add, such as <|im_start|>; may be given several times",
)


_prepare = _command(
    "prepare",
    "pretrain.run.pack_commands:prepare_command",
    """Tokenize text and pack it.

    After an interruption, run the same command again to continue.

        python -m pretrain prepare recipes/smoke.yaml data.length=1024
        python -m pretrain prepare data.source=corpus.jsonl data.tokenizer=Qwen/Qwen3-0.6B \\
            data.packs=packs/corpus
    """,
    parser=PacksParser,
)
_prepare.add_argument(
    "recipe",
    nargs="*",
    help="RECIPE.yaml, whose data section is read, then key=value settings that override it",
)


_inspect = _command(
    "inspect",
    "pretrain.run.pack_commands:inspect_command",
    """Show the counts and lengths of packs.

    The packs may be of this project (Arrow), MDS shards or token .bin files.
    """,
    parser=PacksParser,
)
_inspect.add_argument("path", type=Path, help="folder or file of packs, or RECIPE.yaml")
_inspect.add_argument(
    "overrides",
    nargs="*",
    metavar="key=value",
    help="settings that override the data section of RECIPE.yaml",
)
_inspect.add_argument(
    "--verify", action="store_true", help="compare each file with its recorded hash"
)


def read(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command-line arguments of `command`, which is a key of COMMANDS."""
    return COMMANDS[command].parser.read(arguments)


def read_script(description: str | None) -> argparse.Namespace:
    """Parse the command line of train_accelerate.py.

    `description` is the text that --help prints. Raises InputError for an invalid argument.
    """
    parser = SettingsParser(description=description)
    _add_training(parser)
    return parser.read(sys.argv[1:])


def check_script(description: str | None) -> None:
    """Check the command line of train_accelerate.py and its recipe.

    If there is a mistake, print a message and end the process. `description` is the text that
    --help prints.
    """

    def check() -> None:
        options = read_script(description)
        load_recipe(options.recipe, options.overrides)

    if status := run_command(check):
        sys.exit(status)
