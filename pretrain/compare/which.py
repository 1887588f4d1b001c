"""Which precision to train a model in: `python -m pretrain which RECIPE.yaml [key=value ...] [--hours 4]`.

First every candidate trains a few steps. They show whether it runs, how fast, and in how much memory, and how long trainings can
be to fit into the hours. Then come rounds, a seed each. The baseline trains from the start. Each candidate goes on from its
checkpoint after a fifth of the steps, on the same packs in the same order. After each round the held-out losses are compared, in
BF16 as a model is served, by a margin that is fixed before the first. A candidate that is told is done, and its hours go to those
that are open. The answer is the gain at equal loss: how much faster, less the tokens that would
make up for the loss. A precision is recommended if the whole interval of its gain is above 1. After
Ctrl-C the same command goes on; with more --hours a question that is open is taken up again.

What it does not cover: longer trainings and larger models. Both may need more than this one.

Exit status: 0 an answer, 1 some candidate is open, 2 something given cannot be used, 128 and a signal's number where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.files import write_json
from foundation.reading import load_object
from foundation.signals import StopRequest
from foundation.units import count, duration, memory, plural
from packing.order import order_of
from packing.prepare import prepare
from packing.store import open_packs
from pretrain.compare.differences import CONFIDENCE, FEWEST_SEEDS, fewest_seeds
from pretrain.compare.fairness import in_words
from pretrain.compare.matrix_file import (
    CELL,
    Cell,
    Matrix,
    MatrixGroup,
    MatrixSettings,
    Values,
    as_overrides,
    make_matrix,
)
from pretrain.compare.matrix_run import DEVICES, run_all, say, stopped
from pretrain.compare.verdicts import MOST_SEEDS, NO_GAIN, USE, Protocol, Rounds, Verdict
from pretrain.metrics.run_folder import SUMMARY_FILE, RunFolder
from pretrain.metrics.run_record import FEWEST_STEPS
from pretrain.precision.settings import PRECISIONS
from pretrain.settings.config import begin_of, load_recipe, parse_overrides
from pretrain.settings.recipe import Recipe

GPU_IS_FREE = 2.0  # GiB in use, or less: the driver's own
TRIAL_STEPS = 12  # of a candidate's first, short training
TRUNK = 0.2  # of a training, which candidates share with the baseline
HEAD = "+head"  # behind a candidate's precision: its head too
ON_GPU, ON_CPU = Path("accelerate_configs/bf16.yaml"), Path("accelerate_configs/cpu.yaml")
# Over recipe and overrides in every training. A precision that the machine lacks is emulated, and all are evaluated in BF16.
COMMON: Values = {
    "fp8_config.on_unsupported": "emulate",
    "fp8_config.use_autocast_during_eval": False,
    "evaluate.samples": [],
    "checkpoint.at_end": False,
    "log.trackers": [],
    "log.gap": None,
    "health.on_gap": "warn",  # a candidate that goes on in BF16 would flatter its precision
    "train.begin_with": None,  # as --from says
}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status. Raises InputError for a mistake in what it was given."""
    options = parse_arguments(arguments)
    accelerate = options.config_file or (ON_GPU if has_gpu() else ON_CPU)
    recipe = load_recipe(options.recipe, options.overrides)
    options.begin_with = (begin := options.begin_with or begin_of(recipe)) and os.path.abspath(
        begin
    )
    check(options, recipe)
    folder = Path(options.run_dir or f"runs/which/{recipe.name}")
    question = Question(recipe, options.recipe, tuple(options.overrides), accelerate, folder)
    ends = time.monotonic() + options.hours * 3600
    with RunFolder(folder), StopRequest(passed_on=True) as stop:
        rounds = Rounds(
            kept_protocol(question, options) or new_protocol(question, options, stop, ends)
        )
        announce(rounds, options.hours)
        verdicts = rounds.verdicts()
        while matrix := next_round(question, rounds, verdicts, ends - time.monotonic()):
            train_round(rounds, matrix, stop)
            verdicts = rounds.verdicts()
            say(f"\n{write_answer(question, rounds, verdicts)}")
    say(f"\nWritten: {folder / 'verdict.json'}")
    return int(any(each.is_open for each in verdicts))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m pretrain which", description=__doc__)
    add = parser.add_argument
    add("recipe", type=Path, help="what you want to train")
    add(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="over the recipe's settings, where this command sets none",
    )
    add(
        "--hours",
        type=float,
        default=4.0,
        metavar="H",
        help="no round begins that would not end within these; default: 4",
    )
    add(
        "--margin",
        type=float,
        default=0.3,
        metavar="PERCENT",
        help="of the loss, within which a difference is none; 0.3",
    )
    listed = "the baseline first; +head behind one: its head too. Default: all that this machine computes, else emulated ones"
    add("--precisions", type=lambda text: text.split(","), metavar="A,B", help=listed)
    add(
        "--seeds",
        type=int,
        default=5,
        metavar="N",
        help=f"that the hours are planned for, {FEWEST_SEEDS} or more; default: 5",
    )
    add(
        "--steps",
        type=int,
        metavar="N",
        help="of each training; default: as many as the hours hold",
    )
    add(
        "--from",
        dest="begin_with",
        metavar="CHECKPOINT",
        help="a step-* folder with which all begin, the baseline too",
    )
    add(
        "--config_file",
        type=Path,
        metavar="FILE",
        help=f"of accelerate; default: {ON_GPU}, or {ON_CPU} without a GPU",
    )
    add("--run_dir", metavar="FOLDER", help="default: runs/which/NAME, by the recipe's name")
    return parser.parse_intermixed_args(arguments)


def check(options: argparse.Namespace, recipe: Recipe) -> None:
    """InputError for what would end without an answer, before anything runs."""
    names = options.precisions or list(PRECISIONS)
    if any(name.removesuffix(HEAD) not in PRECISIONS for name in names) or not 2 <= len(
        names
    ) == len(set(names)):
        raise InputError(
            f"--precisions {','.join(names)}: name two or more, each once, of {', '.join(PRECISIONS)}"
        )
    if not (options.margin > 0 and options.hours > 0):
        raise InputError("command line: --margin and --hours have to be above 0")
    ours = {
        "precision",
        "seed",
        "run_dir",
        "train.steps",
        "train.tokens",
        "train.epochs",
        "train.begin_with",
    }
    if own := ours & dict(parse_overrides(options.overrides)).keys():
        raise InputError(
            f"command line: `{min(own)}` is this command's to set; leave it out, or see --help"
        )
    least = least_steps(step_of_checkpoint(options.begin_with))
    if (steps := options.steps or recipe.train.steps) and steps < least:
        raise InputError(
            f"{steps} steps a training, by --steps or else `train.steps`: {least} are the least; set more"
        )
    if options.steps and options.steps > (most := steps_in_an_epoch(recipe)):
        raise InputError(
            f"--steps {options.steps}: text is seen again after step {most}, which hides what a "
            f"precision costs in loss; set --steps {most} or fewer"
        )


def has_gpu() -> bool:
    import torch  # seconds, which a mistake on the command line should not cost

    return torch.cuda.is_available()


# ── Its trainings ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Question:
    """What is asked, and the trainings that it takes, each a cell of a matrix in `folder`."""

    recipe: Recipe  # of the file and the overrides
    recipe_file: Path
    overrides: tuple[str, ...]
    accelerate: Path
    folder: Path

    def trial(self, names: Sequence[str]) -> Matrix:
        """The first, short training of every candidate that the recipe allows."""
        short: Values = {"train.steps": TRIAL_STEPS, "schedule.warmup": 0, "checkpoint.every": None}
        # whether any text is held out
        short |= {"evaluate.every": TRIAL_STEPS, "evaluate.packs": 1}
        cells = dict[str, Values]()
        for name in names:
            tried = cells | {name: self.values_of(name)}
            try:
                matrix, cells = self._matrix("trial", short, tried), tried
            except InputError as error:
                if not cells:  # the baseline: a mistake of the recipe's own
                    raise
                say(f"left out: {error}")  # as it takes no packs of this length, say
        return matrix

    def round(self, protocol: Protocol, seed: int, candidates: Sequence[str]) -> Matrix:
        """One seed of the baseline and of these candidates."""
        # {seed} is filled in by each cell, so that a report takes the seeds of a cell for one
        # training
        base = protocol.base
        own_trunk = (
            f"{self.folder}/rounds/{base}-seed={{seed}}/checkpoints/step-{protocol.trunk:08d}"
        )
        begin: Values = {"train.begin_with": protocol.begin_with or own_trunk}
        cells = {
            base: self.values_of(base)
            | (begin if protocol.begin_with else {"checkpoint.every": protocol.trunk})
        }
        cells |= {name: self.values_of(name) | begin for name in candidates}
        warmup = min(self.recipe.schedule.warmup, max(1, protocol.trunk // 2))
        common: Values = {
            "train.steps": protocol.steps,
            "schedule.warmup": warmup,
            "evaluate.every": protocol.steps,
        }
        if protocol.begin_with:  # the rate falls over as large a share of what is trained here
            common["schedule.decay"] = self.recipe.schedule.decay * (
                1 - protocol.trunk / protocol.steps
            )
        # All are kept, those of stops too: the trunk's must not make room. The trial has been held to plain transformers.
        common |= {
            "checkpoint.every": None,
            "checkpoint.keep": protocol.steps,
            "log.fp8_statistics": None,
            "parity": False,
        }
        return self._matrix("rounds", common, cells, seed=[seed])

    def values_of(self, name: str) -> Values:
        """What a candidate sets: delayed, or delayed+head; and none of the recipe's options that its precision does not take."""
        precision = PRECISIONS[name.removesuffix(HEAD)]
        scope = "linear+head" if name.endswith(HEAD) else "linear"
        of_others = self.recipe.fp8_config.contradictions(precision)
        return {"precision": precision.name, "fp8_config.scope": scope} | {
            f"fp8_config.{key}": None for key in of_others
        }

    def _matrix(
        self, name: str, common: Values, cells: Mapping[str, Values], **axes: list[int]
    ) -> Matrix:
        # over overrides
        ours = MatrixGroup(
            axes=axes, cells={name: COMMON | common | values for name, values in cells.items()}
        )
        place = f"{self.folder}/{name}/{{cell}}"
        settings = MatrixSettings(
            name=name,
            recipe=self.recipe_file,
            accelerate=self.accelerate,
            run_dir=place,
            groups=[ours],
        )
        return make_matrix(str(self.recipe_file), settings, self.overrides)


def train(matrix: Matrix, stop: StopRequest, *, may_fail: bool) -> dict[str, Cell]:
    """Train what has not ended, one after another; returns the cells by candidate. Ends the command where it was stopped.
    InputError, before the next one starts, where the baseline fails or halts, or a candidate fails that may not: its halt is an
    answer."""
    for cell in (each for each in matrix.cells if not has_ended(matrix, each)):
        check_speeds(matrix)
        (outcome,) = run_all(matrix, [cell], stop)
        if stop.requested:
            sys.exit(stopped(stop))
        if not outcome.is_finished and (
            cell is matrix.baseline or not (may_fail or outcome.status == "halted")
        ):
            raise InputError(
                f"{cell.log}: this training has {outcome.status}, without which nothing is told; "
                "see its last lines. The same command goes on; with other settings ask anew in "
                "another --run_dir. If the checkpoint that it begins with is missing, remove all "
                f"folders of its seed in {cell.run_dir.parent}: the command trains that seed again"
            )
    return {cell.values[CELL]: cell for cell in matrix.cells}


def has_ended(matrix: Matrix, cell: Cell) -> bool:
    """Whether nothing more is to be trained of it: a candidate that has halted is told."""
    run = cell.record()
    return cell.is_finished() or (
        cell is not matrix.baseline and run is not None and "halted" in run.summary
    )


def check_speeds(matrix: Matrix) -> None:
    """InputError where others use the GPU, by nvidia-smi: to ask CUDA would take some of it."""
    if matrix.on_cpu:
        return
    seen = os.environ.get(DEVICES)
    command = [
        "nvidia-smi",
        "--query-gpu=memory.used",
        "--format=csv,noheader,nounits",
        *(["-i", seen] if seen else []),
    ]
    # it is not there, or does not say
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = max(float(line) / 1024 for line in answer.split()[: matrix.processes])
        if used > GPU_IS_FREE:
            raise InputError(
                f"the GPU has {memory(used)} in use by others, so speeds would not be its own; free it"
            )


def seconds_of(cell: Cell) -> float:
    """How long its training took: from its mark, when it was last started, to its summary, the last that it writes; or, where it
    was started before that, at least its steps."""
    last_start = (cell.run_dir / SUMMARY_FILE).stat().st_mtime - cell.mark.stat().st_mtime
    return max(last_start, 3600 * cell.record().summary["hours"])


# ── What is fixed before the first round ──────────────────────────────────────────────────────────────────────────────────────


def kept_protocol(question: Question, options: argparse.Namespace) -> Protocol | None:
    """The protocol of a question that was begun; None for a new one. InputError where this one is another: a margin that moves
    after a look decides nothing."""
    file = question.folder / "which.json"
    if not file.exists():
        return None
    protocol = Protocol(**load_object(file, "ask anew in another --run_dir"))
    asked = replace(
        protocol,
        begin_with=options.begin_with,
        margin=options.margin / 100,
        seeds=options.seeds,
        precisions=options.precisions or protocol.precisions,
        steps=options.steps or protocol.steps,
    )
    differ = {
        key: (value, then)
        for key, value in asdict(asked).items()
        if value != (then := getattr(protocol, key))
    }
    if differ := differ | question.trial([protocol.base]).baseline.differences:
        raise InputError(
            f"{file}: was begun otherwise (now, and then): {in_words(differ)}; ask anew in another --run_dir"
        )
    return protocol


def new_protocol(
    question: Question, options: argparse.Namespace, stop: StopRequest, ends: float
) -> Protocol:
    """Try every candidate, fix how long trainings are, and keep it. InputError where nothing is to compare."""
    recipe, names = (
        question.recipe,
        options.precisions or default_candidates(question.recipe.weights),
    )
    if options.seeds < (least := fewest_seeds((1 - CONFIDENCE) / (len(names) - 1))):
        raise InputError(
            f"--seeds {options.seeds}: {len(names)} precisions cannot be told apart with fewer "
            f"than {least} seeds; set --seeds {least} or more"
        )
    matrix = question.trial(names)
    for cell in matrix.cells:
        if cell.differences:  # as the recipe was mended, nothing is fixed yet
            shutil.rmtree(cell.run_dir)
    say(
        f"{plural(TRIAL_STEPS, 'step')} of each first, about a minute each: {', '.join(c.values[CELL] for c in matrix.cells)}"
    )
    cells = train(matrix, stop, may_fail=True)
    runs = {name: cell.record() for name, cell in cells.items() if cell.is_finished()}
    ran = {
        str([(p["name"], p["effective"]) for p in run.audit["products"]]): name
        for name, run in reversed(runs.items())
    }
    # +head is no candidate where the head stays in BF16
    runs = {name: run for name, run in runs.items() if name in ran.values()}
    if len(runs) < 2:
        raise InputError(
            f"{names[0]} and another precision have to run, each its own way; see {question.folder}/trial"
        )
    seconds = {
        name: recipe.batch.tokens / run.summary["tokens_per_second"] for name, run in runs.items()
    }
    # Beside its steps, without what compiles once for all.
    start = max(
        0.0,
        statistics.median_low(
            seconds_of(cells[name]) - TRIAL_STEPS * each for name, each in seconds.items()
        ),
    )
    steps = steps_that_fit(
        options,
        recipe,
        seconds=seconds,
        start=start,
        seconds_left=ends - time.monotonic(),
        in_an_epoch=steps_in_an_epoch(recipe),
    )
    protocol = Protocol(
        options.begin_with, options.margin / 100, names, seconds, start, options.seeds, *steps
    )
    write_json(question.folder / "which.json", asdict(protocol))
    return protocol


def default_candidates(weights: str) -> list[str]:
    """BF16 and what the GPU computes, the first of that with its head too. Where it computes none, and on a CPU, one beside BF16
    that is emulated; on a CPU `weights` in FP32 have FP32 for their baseline."""
    quantized = [name for name, each in PRECISIONS.items() if each.quantized]
    if not has_gpu():
        return ["fp32" if weights == "fp32" else "bf16", quantized[0]]
    # what it holds of the GPU, it gives back when it ends
    with ProcessPoolExecutor(1, get_context("spawn")) as child:
        here = child.submit(computed_here, quantized).result()
    return ["bf16", *(here or quantized[:1]), *(f"{name}{HEAD}" for name in here[:1])]


def computed_here(quantized: Sequence[str]) -> list[str]:
    from pretrain.precision.selection import missing_on  # imports torch

    missing = missing_on("cuda")
    return [name for name in quantized if missing(PRECISIONS[name]) is None]


def steps_that_fit(
    options: argparse.Namespace,
    recipe: Recipe,
    seconds: dict[str, float],
    start: float,
    seconds_left: float,
    in_an_epoch: float,
) -> tuple[int, int]:
    """The last step of a training, and of its trunk: what the hours hold, each text seen once. InputError for too few."""
    base, *others = seconds.values()
    done = step_of_checkpoint(options.begin_with)
    whole = base + (1 - TRUNK) * sum(others) if done is None else base + sum(others)
    in_hours = (done or 0) + int((seconds_left / options.seeds - len(seconds) * start) / whole)
    in_recipe = recipe.train.steps or (
        recipe.train.tokens and math.ceil(recipe.train.tokens / recipe.batch.tokens)
    )
    steps = options.steps or min(in_hours, in_an_epoch, in_recipe or in_an_epoch)
    if steps < (least := least_steps(done)):
        hours = options.hours + options.seeds * (least - in_hours) * whole / 3600
        # as two digits may be 5 % fewer
        short, remedy = f"--hours {options.hours:g} hold", f"take {1.05 * hours:.2g} hours"
        if steps != in_hours:
            short, remedy = (
                "the recipe or its text has",
                "set more `train.steps` in the recipe, or take more text",
            )
        raise InputError(
            f"{short} {max(steps, 0)} steps a training; {least} are the least: {remedy}"
        )
    return steps, math.ceil(TRUNK * steps) if done is None else done


def steps_in_an_epoch(recipe: Recipe) -> float:
    """Return the number of steps that see each pack once at most; infinity for a stream.

    The packs are prepared if they are missing. Raises InputError if they cannot be used.
    """
    if recipe.data.stream:
        return math.inf
    if recipe.data.prepares:
        prepare(recipe.data, progress=True)
    packs = open_packs(recipe.data, "train")
    open_packs(recipe.data, "held_out")  # raises InputError if they cannot be used
    mixture = order_of(packs, 1, recipe.seed).mixture
    sources = zip(mixture.counts, mixture.share_of_packs, strict=True)
    # The first source is used up after this number of packs.
    used_up = min(number / share for number, share in sources)
    return int(used_up * recipe.data.length / recipe.batch.tokens)


def least_steps(done: int | None) -> int:
    """Of a training, with those that are `done` before all begin: so that its last losses are of the candidate alone."""
    return math.ceil(FEWEST_STEPS / (1 - TRUNK)) if done is None else done + FEWEST_STEPS


def step_of_checkpoint(path: str | None) -> int | None:
    """After which step the checkpoint was saved that all begin with; None where they begin with none."""
    return (
        load_object(Path(path, "state.json"), "--from takes a step-* folder")["progress"]["step"]
        if path
        else None
    )


# ── Round by round ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def announce(rounds: Rounds, hours: float) -> None:
    protocol, each = rounds.protocol, rounds.seconds(rounds.protocol.candidates)
    if missing := [name for name in protocol.precisions if name not in protocol.seconds]:
        say(
            f"\nLeft out, as they failed or computed as another: {', '.join(missing)}; ask of them anew in another --run_dir."
        )
    base, others = protocol.base, ", ".join(protocol.candidates)
    trunk = f"of {protocol.begin_with}" if protocol.begin_with else f"in {base}"
    say(
        f"\nBaseline {base}, candidates {others}; a margin of {100 * protocol.margin:g} % of the loss, which stays.\n"
        f"A round is a seed: {protocol.steps:,} steps each, the first {protocol.trunk:,} {trunk}; about {duration(each)}.\n"
        f"{protocol.seeds} rounds are planned, about {duration(protocol.seeds * each)}; {hours:g} hours are given."
    )


def next_round(
    question: Question, rounds: Rounds, verdicts: Sequence[Verdict], seconds_left: float
) -> Matrix | None:
    """The next seed of the baseline and of all that are open. None where nothing is, or where it would not end in time: but the
    first one, and what is trained already, take as long as they take."""
    still = [each.name for each in verdicts if each.is_open]
    if not still or len(rounds.runs) >= MOST_SEEDS:
        return None
    matrix = question.round(rounds.protocol, question.recipe.seed + len(rounds.runs), still)
    in_time = rounds.seconds(still) <= seconds_left or not rounds.runs
    return matrix if in_time or all(has_ended(matrix, cell) for cell in matrix.cells) else None


def train_round(rounds: Rounds, matrix: Matrix, stop: StopRequest) -> None:
    """Train it, and add it to the rounds."""
    _, *candidates = (cell.values[CELL] for cell in matrix.cells)
    say(f"\nround {len(rounds.runs) + 1}, about {duration(rounds.seconds(candidates))}")
    cells = train(matrix, stop, may_fail=False)
    rounds.runs.append({name: cell.record() for name, cell in cells.items()})
    rounds.took |= {name: seconds_of(cell) for name, cell in cells.items() if cell.is_finished()}
    for cell in matrix.cells:  # whose checkpoints nothing begins with any more
        shutil.rmtree(cell.run_dir / "checkpoints", ignore_errors=True)


def write_answer(question: Question, rounds: Rounds, verdicts: Sequence[Verdict]) -> str:
    """Write verdict.json and return the text to print."""
    protocol, told = rounds.protocol, answer(question, rounds.protocol, verdicts)
    write_json(
        question.folder / "verdict.json",
        {
            "answer": told,
            "protocol": asdict(protocol),
            "candidates": {
                each.name: asdict(each) | {"gain_at_equal_loss": each.gain} for each in verdicts
            },
        },
    )
    limits = (
        f"This holds for this model after {count(protocol.steps * question.recipe.batch.tokens)} tokens, with a margin of "
        f"± {100 * protocol.margin:g} % of the baseline's loss; intervals hold at {100 * (1 - protocol.error):.3g} %, whenever "
        "one looks, if differences over seeds are normal. In simulations of skewed differences, "
        "95 % intervals missed the mean in 12 % of exponential and 21 % of lognormal series. No "
        "interval allows for a rare bad seed that no round has shown. Longer trainings and larger "
        "models may need more."
    )
    return f"{rounds.table(verdicts)}\n\n{told}\n\n{limits}"


def answer(question: Question, protocol: Protocol, verdicts: Sequence[Verdict]) -> str:
    """A line for each candidate, and what to train in, with the command."""
    lines = [f"{each.name}: {each.word}, {each.advice}." for each in verdicts]
    if best := next((each for each in verdicts if each.advice == USE), None):
        gain = "{:.2f} times ({:.2f} to {:.2f})".format(best.gain, *best.gain_interval)
        lines.append(f"Train in {best.name}: {gain} {protocol.base}'s speed at equal loss.")
        values = question.values_of(best.name) | (
            {"train.begin_with": begin} if (begin := protocol.begin_with) else {}
        )
        launch = [
            "accelerate",
            "launch",
            "--config_file",
            question.accelerate,
            "train_accelerate.py",
            question.recipe_file,
        ]
        lines.append(
            f"  {shlex.join(map(str, [*launch, *question.overrides, *as_overrides(values)]))}"
        )
    elif all(each.advice == NO_GAIN for each in verdicts):
        lines.append(f"Stay with {protocol.base}.")
    return "\n".join(lines)
