"""Command-line options of the commands of `python -m pretrain`.

The options are defined here because most commands import torch, which takes seconds. So --help and
messages about invalid options appear at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from inspect import cleandoc
from pathlib import Path
from typing import Any

from foundation.command import CommandParser, run_command
from foundation.settings import local_path
from pretrain.settings.config import PacksParser, SettingsParser, load_recipe

# Default of --margin in percent of the baseline's loss, for `which` and `report`.
MARGIN_PERCENT = 0.3
# Devices of the command `plan` if --on is not set.
USUAL = ("H100", "H200", "B200", "8xH100", "RTX 4090", "RTX 5090")
# Defaults of the command `sample`: at most 64 new tokens, temperature 0.8 and top-p 0.95.
TOKENS = 64
TEMPERATURE = 0.8
TOP_P = 0.95


def count(text: str, least: int = 1) -> int:
    """Parse a whole number of at least `least`. Raises ArgumentTypeError for any other text."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {least}")
    return int(text)


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


Option = tuple[tuple[str, ...], dict[str, Any]]


class Command:
    """A command of `python -m pretrain`.

    Args:
        parser: Class of the parser.
        function: The function that runs the command with the parsed options, as "module:name". Its
            module is imported after the options have been parsed.
        description: Text that --help prints. The list of commands has its first line.
        options: The arguments of the command line, see `option`.
        check: A function that raises InputError for a mistake in the parsed options, as
            "module:name". It is called before the module of `function` is imported. Its module
            does not import torch.
        modes: Further options. A command line has at most one of them.
    """

    def __init__(
        self,
        parser: type[CommandParser],
        function: str,
        description: str,
        *options: Option,
        check: str | None = None,
        modes: Sequence[Option] = (),
    ) -> None:
        self.parser = parser
        self.function = function
        self.description = cleandoc(description)
        self.options = options
        self.check = check
        self.modes = modes

    def read(self, arguments: Sequence[str], prog: str | None = None) -> argparse.Namespace:
        """Parse command-line arguments.

        `prog` is the name of the program in the help text. By default, it is the running script.
        Raises InputError if an argument is invalid. With --help, print the help and end the
        process.
        """
        parser = self.parser(prog, self.description)
        for names, settings in self.options:
            parser.add_argument(*names, **settings)
        if self.modes:
            modes = parser.add_mutually_exclusive_group()
            for names, settings in self.modes:
                modes.add_argument(*names, **settings)
        return parser.read(arguments)


def option(*names: str, **settings: Any) -> Option:
    """Return the arguments of argparse's `add_argument` for an option."""
    return names, settings


# The arguments of a command with a recipe.
RECIPE = (
    option("recipe", type=Path, help="the recipe, a YAML file; examples are in recipes/"),
    option(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings that override the recipe, for example batch.microbatch=8",
    ),
)
# The arguments of train_accelerate.py, without its modes.
TRAINING = (
    *RECIPE,
    option(
        "--resume",
        type=local_path,
        default="auto",
        metavar="CHECKPOINT",
        help="checkpoint from which the run resumes; default: the newest intact checkpoint in the "
        "run folder",
    ),
    option(
        "--accept-changes",
        action="store_true",
        help="resume from a checkpoint even if settings have changed since it was saved",
    ),
)
TRAINING_MODES = (
    option(
        "--plan",
        action="store_true",
        help="check every setting, print the planned steps, memory and settings, and exit",
    ),
    option(
        "--profile",
        action="store_true",
        help="profile one step, and write profile.md and a trace to the run folder",
    ),
)


TRAIN = Command(
    SettingsParser,
    "pretrain.launch.launcher:main",
    """Train a recipe on the devices of this machine, or resume its training.

        python -m pretrain train my.yaml
        python -m pretrain train my.yaml --config fp8_delayed weights=bf16_exact train.steps=100

    The command prints the `accelerate launch` command that it runs. Without --config, it uses
    accelerate_configs/cpu.yaml on a machine without a GPU, bf16.yaml on one GPU, and ddp.yaml on
    several GPUs. NVIDIA's driver counts the GPUs, and CUDA_VISIBLE_DEVICES limits them. To train on
    several machines, use `accelerate launch`.
    """,
    *TRAINING,
    option(
        "--config",
        "--config_file",
        metavar="FILE",
        help="Accelerate configuration: a path, or the name of a file in accelerate_configs/",
    ),
    option(
        "--processes",
        type=count,
        metavar="N",
        help="number of processes, one for each GPU; default: the number in the configuration, or "
        "one for each GPU",
    ),
    check="pretrain.run.command_checks:check_train",
    modes=TRAINING_MODES,
)


PLAN = Command(
    SettingsParser,
    "lab.speed.plan_command:main",
    """Predict speed, time and memory of a training on other devices, precision by precision.

        python -m pretrain plan my.yaml train.tokens=20e9          on the usual devices
        python -m pretrain plan my.yaml --on 8xH200,rtx4090        on other devices
        python -m pretrain plan my.yaml precision=delayed          in delayed and BF16 alone

    If the recipe or the command line sets a precision, only this precision and BF16 are planned.
    To plan a training on this machine, use python -m pretrain train RECIPE --plan. Unlike the
    command `plan`, it needs the packs.
    """,
    *RECIPE,
    option(
        "--on",
        action="extend",
        type=lambda text: text.split(","),
        default=[],
        metavar="DEVICE",
        help="device, with a number if there are several: H200, 8xB200, rtx4090; a wrong name "
        f"prints all names; may be repeated; default: {', '.join(USUAL)}",
    ),
    option(
        "--config",
        choices=["ddp", "zero", "fsdp2"],
        help="Accelerate configuration for several devices; default: the first that fits",
    ),
    option(
        "--price",
        action="extend",
        type=priced,
        default=[],
        metavar="DEVICE=DOLLARS",
        help="dollars for an hour of one device, such as H100=2.5,B200=6; may be repeated",
    ),
    check="pretrain.run.command_checks:check_plan",
)


EVALUATE = Command(
    SettingsParser,
    "pretrain.run.evaluate_command:main",
    """Compute the held-out loss of a checkpoint, or its loss on a text file.

        python -m pretrain evaluate RUN_OR_RECIPE [FILE] [--resume CHECKPOINT] [key=value ...]

    If the run has no checkpoint, evaluate the model that the run would start from. The command
    writes nothing into the run folder. To evaluate on GPUs, start the command with
    accelerate launch --config_file accelerate_configs/bf16.yaml -m pretrain evaluate ...
    """,
    *RECIPE,
    option(
        "--resume",
        type=local_path,
        default="auto",
        metavar="CHECKPOINT",
        help="checkpoint to evaluate; default: the newest intact checkpoint of the run",
    ),
    option(
        "--precisions",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="evaluate in these precisions and in BF16; `all` selects all quantized precisions "
        "that support `data.length`; the precisions that the device does not support are emulated; "
        "default: the precisions of the recipe",
    ),
    check="pretrain.run.command_checks:check_evaluate",
)


GAP = Command(
    CommandParser,
    "lab.gap:main",
    """Compare the loss and the gradients of a checkpoint in low precision with those in BF16.

        python -m pretrain gap runs/my --packs 16 --precisions delayed,nvfp4

    Both are computed from the same held-out packs. The command prints the distance of the gradients
    by layer, and writes nothing.
    """,
    option(
        "source",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a checkpoint (a step-* folder), or a run folder, whose newest checkpoint is loaded",
    ),
    option(
        "--packs", type=count, default=8, metavar="N", help="number of held-out packs; default: 8"
    ),
    option(
        "--precisions",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="precisions to compare with BF16; the precisions that the device does not support are "
        "emulated; default: those of the run",
    ),
    check="pretrain.run.command_checks:check_gap",
)


DOCTOR = Command(
    CommandParser,
    "lab.doctor:main",
    """Test which precisions work on this machine.

    A model of one layer is trained in each precision for a few steps. Before the first step, its
    loss and gradients are compared with plain transformers.
    """,
    option(
        "--precisions",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="precisions to test; default: all, but on a GPU those that it supports",
    ),
    check="pretrain.run.command_checks:check_precisions",
)


EXPORT = Command(
    CommandParser,
    "pretrain.run.export:main",
    """Export a checkpoint as a model folder for transformers, with a model card.

    The command needs no GPU. It needs as much memory as the weights. `hf upload OWNER/NAME FOLDER`
    uploads the folder to the Hugging Face hub.
    """,
    option(
        "source",
        type=Path,
        metavar="RUN_OR_CHECKPOINT",
        help="a checkpoint (a step-* folder), or a run folder, whose newest checkpoint is exported",
    ),
    option(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder into which the model is exported; default: RUN/export",
    ),
    option(
        "--best",
        action="store_true",
        help="export the run's checkpoint with the lowest held-out loss, not the newest checkpoint",
    ),
    option(
        "--dtype",
        choices=["bf16", "fp32"],
        help="dtype of the exported weights; default: the dtype in which the run stores them. If "
        "the run has `weights: bf16_exact`, fp32 restores all 32 bits of each weight",
    ),
    option(
        "--precision",
        choices=["trained"],
        help="trained: export quantized weights, with the codes and scales of the forward pass in "
        "training, in the layout that servers read (docs/serving.md)",
    ),
    option(
        "--merge",
        type=count,
        metavar="N",
        help="export the mean of the weights in the last N checkpoints, computed in FP64",
    ),
    check="pretrain.run.command_checks:check_export",
)


SAMPLE = Command(
    CommandParser,
    "pretrain.run.sampling:main",
    """Generate text with a trained model.

    FOLDER is the run folder of a finished run, or a model folder that transformers can load. To
    make a model folder from any checkpoint, use `python -m pretrain export`. The model is run on a
    GPU if there is one, in the dtype of the stored weights.
    """,
    option("folder", type=Path, metavar="FOLDER", help="a run folder or a model folder"),
    option(
        "prompts",
        nargs="+",
        metavar="PROMPT",
        help="text that the model continues; '' generates text without a prompt",
    ),
    option(
        "--tokens",
        "--max-new-tokens",
        "--max_new_tokens",
        type=count,
        default=TOKENS,
        help="maximum number of new tokens for each prompt; default: %(default)s",
    ),
    option(
        "--temperature",
        type=float,
        default=TEMPERATURE,
        help="sampling temperature; 0 always chooses the likeliest token; default: %(default)s",
    ),
    option(
        "--top-p",
        "--top_p",
        type=float,
        default=TOP_P,
        help="sample only from the likeliest tokens whose probabilities sum to this value; "
        "default: %(default)s",
    ),
    option(
        "--seed",
        type=int,
        default=42,
        help="random seed, from which the seed of each prompt is derived; default: 42",
    ),
    check="pretrain.run.command_checks:check_sample",
)


MATRIX = Command(
    CommandParser,
    "lab.experiments.matrix:main",
    """Run all cells of an experiment and compare them.

    A cell is one training run of the experiment. Finished cells are not run again.
    """,
    option(
        "matrix",
        type=Path,
        help="YAML file that describes the experiment; examples are in recipes/matrices/",
    ),
    option(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="settings that override the recipe in every cell",
    ),
    option(
        "--only",
        action="append",
        default=[],
        metavar="key=value",
        help="run only the cells in which this setting has this value; may be repeated",
    ),
    option(
        "--cell",
        type=int,
        metavar="N",
        help="run only cell number N of the selected cells, counted from 0; for job arrays",
    ),
    option(
        "--at-once",
        type=count,
        metavar="N",
        help="maximum number of cells that run at the same time",
    ),
    option(
        "--gpus",
        type=count,
        metavar="N",
        help="number of GPUs of this machine over which the cells are distributed",
    ),
    option("--processes", type=count, metavar="N", help="number of processes that train each cell"),
    option(
        "--dry-run", action="store_true", help="print the command that runs each cell, and exit"
    ),
)


WHICH = Command(
    SettingsParser,
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
    baseline's number of tokens. A precision is recommended if the confidence interval of its
    gain is above 1. To continue after Ctrl-C, run the same command again. To train more rounds
    for open candidates, run it again with enough --hours for a round.

    The result is not valid for longer runs or larger models, which may need a more exact
    precision.

    Exit status: 0 if all verdicts are final, 1 if a candidate's verdict is open, 2 for invalid
    input, and 128 plus the number of the signal if a signal stopped the command.
    """,
    *RECIPE,
    option(
        "--hours",
        type=positive,
        default=4.0,
        metavar="H",
        help="time limit of this start of the command, in hours; a round is only started if it is "
        "expected to end within this limit; default: 4",
    ),
    option(
        "--margin",
        type=positive,
        default=MARGIN_PERCENT,
        metavar="PERCENT",
        help="largest loss difference that counts as equivalent, in percent of the baseline's "
        f"loss; default: {MARGIN_PERCENT}",
    ),
    option(
        "--precisions",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="precisions to compare, the baseline first; append +head to a precision to quantize "
        "the head too; default: BF16 and all quantized precisions that this machine supports; on "
        "a machine that supports none, one emulated precision",
    ),
    option(
        "--served",
        metavar="PRECISION",
        help="judge the candidates by the held-out loss of the trained model in this precision; "
        "default: in BF16",
    ),
    option(
        "--candidates",
        type=Path,
        metavar="FILE",
        help="YAML file with the name and the settings of each candidate, the baseline first, "
        "instead of --precisions (docs/which.md)",
    ),
    option(
        "--seeds",
        type=count,
        default=5,
        metavar="N",
        help="number of rounds for which the length of the runs is planned, at least 3; default: 5",
    ),
    option(
        "--steps",
        type=count,
        metavar="N",
        help="steps of each run; default: computed from --hours",
    ),
    option(
        "--gpus",
        type=count,
        metavar="N",
        help="number of GPUs of this machine over which the runs are distributed; "
        "default: one run at a time",
    ),
    option(
        "--from",
        dest="begin_with",
        metavar="CHECKPOINT",
        help="checkpoint (a step-* folder) from which all runs branch, including the "
        "baseline's; default: the baseline trains from the start",
    ),
    option(
        "--config",
        "--config_file",
        metavar="FILE",
        help="Accelerate configuration: a path, or the name of a file in accelerate_configs/; "
        "default: bf16 with a GPU, cpu without a GPU",
    ),
    option(
        "--run_dir",
        type=Path,
        metavar="FOLDER",
        help="folder of the runs; default: runs/which/NAME with the recipe's name",
    ),
)


REPORT = Command(
    CommandParser,
    "lab.compare.report:main",
    """Compare runs: tables, curves, and the difference in loss from a baseline.

    The first run is the baseline. The tables are printed, and --out also writes an HTML page.
    """,
    option(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="run folder; the first one is the baseline",
    ),
    option("--out", type=Path, metavar="PAGE.html", help="also write the report as an HTML page"),
    option(
        "--vary",
        action="append",
        default=[],
        metavar="KEY",
        help="key or section in which the runs may differ; may be repeated",
    ),
    option(
        "--margin",
        type=positive,
        default=MARGIN_PERCENT,
        metavar="PERCENT",
        help="largest difference that counts as equivalent in a comparison over seeds, in percent "
        f"of the baseline's loss; default: {MARGIN_PERCENT}",
    ),
)


TOKENIZER = Command(
    PacksParser,
    "pretrain.run.pack_commands:tokenizer_command",
    """Train a byte-level BPE tokenizer on text.

    The end-of-text token of the tokenizer has the id 0 and ends each document.

        python -m pretrain tokenizer my_text --vocabulary 8192 --out my_tokenizer
    """,
    option("source", metavar="SOURCE", help="file, folder, pattern or dataset"),
    option(
        "settings",
        nargs="*",
        metavar="key=value",
        help="keys of the data section, such as data.text=body",
    ),
    option(
        "--vocabulary",
        type=lambda text: count(text, least=257),
        required=True,
        metavar="N",
        help="number of tokens, including 256 bytes, the end-of-text token and the special tokens",
    ),
    option("--out", type=Path, required=True, metavar="FOLDER"),
    option(
        "--special",
        action="append",
        default=[],
        metavar="TOKEN",
        help="special token to add, such as <|im_start|>; may be given several times",
    ),
)


PREPARE = Command(
    PacksParser,
    "pretrain.run.pack_commands:prepare_command",
    """Tokenize text and pack it.

    After an interruption, run the same command again to continue.

        python -m pretrain prepare recipes/smoke.yaml data.length=1024
        python -m pretrain prepare data.source=corpus.jsonl data.tokenizer=Qwen/Qwen3-0.6B \\
            data.packs=packs/corpus
    """,
    option(
        "recipe",
        nargs="*",
        help="RECIPE.yaml, whose data section is read, then key=value settings that override it",
    ),
)


FOLLOW = Command(
    PacksParser,
    "pretrain.run.pack_commands:follow_command",
    """Tokenize and pack a stream while a run trains on it (data.streaming).

    A run starts a packer itself. This command packs in another process, or on another machine.
    """,
    option("recipe", nargs="*", help="recipe and settings, as for prepare"),
    option(
        "--parent",
        type=int,
        metavar="PROCESS",
        help="exit when the process with this id exits; set by a run that starts the packer",
    ),
)


INSPECT = Command(
    PacksParser,
    "pretrain.run.pack_commands:inspect_command",
    """Show the counts, lengths and text of packs.

    The packs may be of this project (Arrow), MDS shards or token .bin files.
    """,
    option("path", type=Path, help="folder or file of packs, or RECIPE.yaml"),
    option(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings that override the data section of RECIPE.yaml",
    ),
    option("--index", type=int, help="also print the text of this training pack of each source"),
    option(
        "--tokenizer",
        help="tokenizer.json, folder or hub name (default: the tokenizer stored with the packs)",
    ),
    option("--verify", action="store_true", help="compare each file with its recorded hash"),
)


# Map the name of each command to its parser, function, description and options.
COMMANDS = {
    "train": TRAIN,
    "plan": PLAN,
    "evaluate": EVALUATE,
    "report": REPORT,
    "gap": GAP,
    "doctor": DOCTOR,
    "export": EXPORT,
    "sample": SAMPLE,
    "matrix": MATRIX,
    "which": WHICH,
    "tokenizer": TOKENIZER,
    "prepare": PREPARE,
    "follow": FOLLOW,
    "inspect": INSPECT,
}


def read(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command-line arguments of `command`, which is a key of COMMANDS."""
    return COMMANDS[command].read(arguments, f"python -m pretrain {command}")


def read_script(description: str | None) -> argparse.Namespace:
    """Parse the command line of train_accelerate.py.

    `description` is the text that --help prints. Raises InputError for an invalid argument.
    """
    script = Command(
        SettingsParser,
        "train_accelerate:main",
        description or "",
        *TRAINING,
        modes=TRAINING_MODES,
    )
    return script.read(sys.argv[1:])


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
