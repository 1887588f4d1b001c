"""Which precision to train a model in: `python -m pretrain which RECIPE.yaml [key=value ...] [--hours 4]`.

First a few steps of every candidate: what runs, how fast, in how much memory. From that follows how long trainings can be to fit
into the hours. Then round by round, a seed each: the baseline from the start, and every candidate as a branch of it from a fifth
on, on the same packs in the same order. After each round the held-out losses, in BF16 as a model is served, are held against a
margin that is fixed before the first. The intervals hold whenever one looks, so a candidate that is equivalent or worse is done,
and its hours go to those that are open. The answer is the gain at equal loss: how much faster, less the tokens that would make up
for the loss. After Ctrl-C the same command goes on; with more --hours a question that is open is taken up again.

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
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from html import escape
from multiprocessing import get_context
from operator import truediv
from pathlib import Path

import numpy as np
import psutil

from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.files import replace_file, write_json
from foundation.reading import load_object
from foundation.signals import StopRequest
from foundation.units import UNKNOWN, count, duration, markdown, memory, or_dash, plural
from pretrain.compare.comparison import COLOURS, own_speed
from pretrain.compare.differences import BETTER, CANNOT_TELL, CONFIDENCE, EQUIVALENT, FEWEST_SEEDS, SeedDifference
from pretrain.compare.fairness import in_words
from pretrain.compare.figures import moving_mean, window_of
from pretrain.compare.matrix_file import Cell, Matrix, MatrixGroup, MatrixSettings, Values, as_overrides, make_matrix
from pretrain.compare.matrix_run import DEVICES, run_all, say, stopped
from pretrain.metrics.run_folder import SUMMARY_FILE, RunFolder
from pretrain.metrics.run_record import FEWEST_STEPS, RunRecord, at_the_end
from pretrain.precision.settings import PRECISIONS, is_quantized
from pretrain.settings.config import begin_of, load_recipe, parse_overrides
from pretrain.settings.recipe import Recipe

GPU_IS_FREE = 2.0  # GiB in use, or less: the driver's own
CPU_IS_FREE = 25.0  # percent in use, or less
TRIAL_STEPS = 12  # of a candidate's first, short training
TRUNK = 0.2  # of a training, which candidates share with the baseline
MOST_SEEDS = 20
MOST_FOLD = math.log(1000)  # of the tokens, for equal loss: beyond, a loss that hardly falls tells nothing of them
USE = "use this"
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


@dataclass(frozen=True)
class Protocol:
    """What is fixed before the first round, and kept in which.json. `seconds` are of a step, as it was tried."""

    begin_with: str | None
    margin: float  # of the baseline's loss
    precisions: list[str]  # that were to be tried, the baseline first
    seconds: dict[str, float]  # of those that ran
    start: float  # seconds that a training takes beside its steps
    seeds: int  # rounds that are planned
    steps: int  # of a training
    trunk: int  # of these, that candidates share with the baseline

    @property
    def candidates(self) -> list[str]:
        """What ran when it was tried, the baseline first."""
        return list(self.seconds)

    @property
    def error(self) -> float:
        """Of one candidate's interval, so that all of them hold together (Bonferroni)."""
        return (1 - CONFIDENCE) / (len(self.candidates) - 1)

    def training_seconds(self, name: str) -> float:
        """How long a training should take."""
        shared = self.trunk if self.begin_with or name != self.candidates[0] else 0
        return self.start + self.seconds[name] * (self.steps - shared)


@dataclass
class Verdict:
    """What is known of a candidate. None is what is not known."""

    name: str
    served: SeedDifference | None = None  # held-out loss in BF16 above the baseline's
    trained: SeedDifference | None = None  # loss of the last steps, in the candidate's own precision
    tokens_per_second: float | None = None  # None where it is emulated, as are the next two
    speedup: float | None = None
    memory_gib: float | None = None
    tokens: float | None = None  # how many times the tokens make up for its loss, by the baseline's own slope
    word: str = CANNOT_TELL
    more_seconds: float | None = None  # after which it should be told, if mean and spread stay as they are
    advice: str = ""

    @property
    def gain(self) -> float | None:
        """Speed at equal loss, in multiples of the baseline's."""
        return self.speedup / self.tokens if self.speedup and self.tokens else None

    @property
    def is_open(self) -> bool:
        return self.word == CANNOT_TELL


@dataclass
class Question:
    """The question as far as it is answered: trainings lie in `folder`, and the protocol once it is fixed."""

    recipe_file: Path
    overrides: tuple[str, ...]
    accelerate: Path
    folder: Path
    names: list[str]
    protocol: Protocol | None = None
    rounds: list[dict[str, RunRecord]] = field(default_factory=list)  # a seed each, by candidate
    took: dict[str, float] = field(default_factory=dict)  # seconds of each one's last training

    @cached_property
    def recipe(self) -> Recipe:
        return load_recipe(self.recipe_file, self.overrides)

    def matrix(self, name: str, run_dir: str, common: Values, cells: Mapping[str, Values], **axes: list[int]) -> Matrix:
        ours = MatrixGroup(axes=axes, cells={name: COMMON | common | values for name, values in cells.items()})  # over overrides
        settings = MatrixSettings(name=name, recipe=self.recipe_file, accelerate=self.accelerate, run_dir=run_dir, groups=[ours])
        return make_matrix(str(self.recipe_file), settings, self.overrides)

    def values_of(self, name: str) -> Values:
        """What a candidate sets: delayed, or delayed+head; and none of the recipe's options that its precision does not take."""
        precision = PRECISIONS[name.removesuffix(HEAD)]
        of_others = self.recipe.fp8_config.contradictions(precision)
        scope: Values = {"fp8_config.scope": "linear+head" if name.endswith(HEAD) else "linear"}
        return {"precision": precision.name} | scope | {f"fp8_config.{key}": None for key in of_others}

    def trial(self) -> Matrix:
        """The first, short training of every candidate."""
        short: Values = {"train.steps": TRIAL_STEPS, "schedule.warmup": 0, "checkpoint.every": None}
        short |= {"evaluate.every": TRIAL_STEPS, "evaluate.packs": 1}  # whether any text is held out
        cells, place = dict[str, Values](), f"{self.folder}/trial/{{cell}}"
        for name in self.names:
            tried = cells | {name: self.values_of(name)}
            try:
                matrix = self.matrix("trial", place, short, tried)
            except InputError as error:
                if not cells:  # the baseline: a mistake of the recipe's own
                    raise
                say(f"left out: {error}")  # as it takes no packs of this length, say
            else:
                cells = tried
        return matrix

    def round(self, seed: int, candidates: Sequence[str]) -> Matrix:
        """One seed of the baseline and of these candidates."""
        protocol, place = self.protocol, f"{self.folder}/rounds/{{cell}}"
        base = protocol.candidates[0]
        trunk = protocol.begin_with or f"{place}/checkpoints/step-{protocol.trunk:08d}".format(cell=f"{base}-seed={seed}")
        first: Values = {"train.begin_with": trunk} if protocol.begin_with else {"checkpoint.every": protocol.trunk}
        cells = {base: self.values_of(base) | first}
        cells |= {name: self.values_of(name) | {"train.begin_with": trunk} for name in candidates}
        warmup = min(self.recipe.schedule.warmup, max(1, protocol.trunk // 2))
        common: Values = {"train.steps": protocol.steps, "schedule.warmup": warmup, "evaluate.every": protocol.steps}
        if protocol.begin_with:  # the rate falls over as large a share of what is trained here
            common["schedule.decay"] = self.recipe.schedule.decay * (1 - protocol.trunk / protocol.steps)
        # All are kept, those of stops too: the trunk's must not make room.
        common |= {"checkpoint.every": None, "checkpoint.keep": protocol.steps, "log.fp8_statistics": None}
        common["parity"] = False  # the trial has been held to plain transformers
        return self.matrix("round", place, common, cells, seed=[seed])

    # ── What the rounds have told ─────────────────────────────────────────────────────────────────────────────────────────────

    def verdicts(self) -> list[Verdict]:
        """Of every candidate but the baseline, with advice: the one that gains most at equal loss is to be used."""
        verdicts = [self.verdict(name) for name in self.protocol.candidates[1:]]
        paying = [each for each in verdicts if each.word in (BETTER, EQUIVALENT) and (each.gain or 0) > 1]
        best = max(paying, key=lambda each: each.gain, default=None)
        for each in verdicts:
            if each.is_open:
                about = "about" if each.served and len(each.served.by_seed) >= FEWEST_SEEDS else "at least"
                hours = each.more_seconds and f"{about} {duration(each.more_seconds)} more of --hours should tell"
                each.advice = hours or f"nor would {MOST_SEEDS} seeds, if they spread alike"
            elif each.served and each.gain is None:
                flat = f"its gain is not known, as {self.protocol.candidates[0]}'s loss does not clearly fall"
                each.advice = flat if each.speedup else "its speed is not known, as it is emulated"
            elif each in paying:
                each.advice = USE if each is best else f"pays less than {best.name}"
            else:
                each.advice = f"pays only over {each.tokens:.2f} times the tokens" if (each.gain or 0) > 1 else "not worth it"
        return verdicts

    def verdict(self, name: str) -> Verdict:
        base, protocol = self.protocol.candidates[0], self.protocol
        pairs = [(each[base], each[name]) for each in self.rounds if name in each]
        verdict = Verdict(name)
        if not pairs:
            return verdict
        if broken := [run for _, run in pairs if run.broke_off]:
            verdict.word = f"broke off: {broken[0].broke_off}"
            return verdict
        verdict.served = above(pairs, held_out_loss)
        verdict.trained = above(pairs, self.loss_at_end)
        ours, theirs = ([own_speed(run) for run in runs] for runs in zip(*pairs, strict=True))
        if all(ours) and all(theirs):
            verdict.tokens_per_second = statistics.median(theirs)
            verdict.speedup = statistics.median(map(truediv, theirs, ours))
            verdict.memory_gib = pairs[0][1].summary.get("memory_gib")
        slope = SeedDifference({place: loss_slope(run) for place, (run, _) in enumerate(pairs)}, 0.0)
        if (half := slope.half_width()) is not None and slope.mean + half < 0:
            fold = math.exp(min(max(0.0, verdict.served.mean) / -slope.mean, MOST_FOLD))
            before = protocol.trunk if protocol.begin_with else 0  # these tokens are trained, and only others can be more
            verdict.tokens = (fold * protocol.steps - before) / (protocol.steps - before)
        verdict.word = verdict.served.anytime_verdict(protocol.margin, protocol.error)
        if verdict.is_open:
            verdict.more_seconds = self.seconds_to_tell(verdict)
        return verdict

    def loss_at_end(self, run: RunRecord) -> float:
        """Mean of the last training losses, of steps that all have: a summary's are of more where the trunk is its own."""
        return float(np.nanmean(at_the_end(run.curve("loss")[1][self.protocol.trunk - self.protocol.steps :])))

    def seconds_to_tell(self, verdict: Verdict) -> float | None:
        """For the seeds that are missing to a verdict, if mean and spread stay; None where MOST_SEEDS would not tell."""
        values = list(verdict.served.by_seed.values())
        for seeds in range(len(values) + 1, MOST_SEEDS + 1):
            repeated = {place: values[place % len(values)] for place in range(seeds)}
            told = SeedDifference(repeated, verdict.served.baseline).anytime_verdict(self.protocol.margin, self.protocol.error)
            if told != CANNOT_TELL:
                return (seeds - len(values)) * self.round_seconds([verdict.name])
        return None

    def round_seconds(self, candidates: Sequence[str]) -> float:
        """How long one seed of the baseline and of these should take."""
        names = [self.protocol.candidates[0], *candidates]
        return sum(self.took.get(name) or self.protocol.training_seconds(name) for name in names)

    def answer(self, verdicts: Sequence[Verdict]) -> str:
        base, lines = self.protocol.candidates[0], [f"{each.name}: {each.word}, {each.advice}." for each in verdicts]
        if best := next((each for each in verdicts if each.advice == USE), None):
            lines.append(f"Train in {best.name}: {best.gain:.2f} times {base}'s speed at equal loss.")
            values = self.values_of(best.name) | ({"train.begin_with": begin} if (begin := self.protocol.begin_with) else {})
            launch = ["accelerate", "launch", "--config_file", self.accelerate, "train_accelerate.py", self.recipe_file]
            launch += [*self.overrides, *as_overrides(values)]
            lines.append(f"  {shlex.join(map(str, launch))}")
        elif all(not each.is_open and (each.gain <= 1 if each.gain else not each.served) for each in verdicts):
            lines.append(f"Stay with {base}.")
        return "\n".join(lines)

    def table(self, verdicts: Sequence[Verdict]) -> str:
        base, runs = self.protocol.candidates[0], [each[self.protocol.candidates[0]] for each in self.rounds]
        served = "served in BF16" if base != "fp32" else "held out"  # FP32 is evaluated in FP32
        header = ["precision", "seeds", served, "as trained", "tokens/s", "speed", "tokens for equal loss"]
        header += ["gain at equal loss", "memory", "verdict"]

        def percent(difference: SeedDifference | None) -> str:
            """ "+0.071 ± 0.150 %" of the baseline's loss."""
            if difference is None:
                return UNKNOWN
            half, share = difference.anytime_half_width(self.protocol.error), 100 / difference.baseline
            return f"{share * difference.mean:+.3f}{'' if half is None else f' ± {share * half:.3f}'} %"

        losses = (statistics.fmean(map(loss, runs)) for loss in (held_out_loss, self.loss_at_end))
        speed, peak = or_dash(own_speed(runs[0]), "{:,.0f}".format), or_dash(runs[0].summary.get("memory_gib"), memory)
        rows = [[base, str(len(runs)), *map("{:.4f}".format, losses), speed, "1", "1", "1", peak, "baseline"]]
        for each in verdicts:
            times = [or_dash(value, "{:.2f} ×".format) for value in (each.speedup, each.tokens, each.gain)]
            row = [each.name, str(len(each.served.by_seed) if each.served else 0), percent(each.served), percent(each.trained)]
            row += [or_dash(each.tokens_per_second, "{:,.0f}".format), *times, or_dash(each.memory_gib, memory)]
            rows.append([*row, each.word])
        return markdown(header, rows)

    def write(self, verdicts: Sequence[Verdict]) -> str:
        """Write verdict.json and which.html; returns what to print."""
        answer = self.answer(verdicts)
        content = {"answer": answer, "protocol": asdict(self.protocol), "candidates": {}}
        for each in verdicts:
            content["candidates"][each.name] = asdict(each) | {"gain_at_equal_loss": each.gain}
        write_json(self.folder / "verdict.json", content)
        text = f"{self.table(verdicts)}\n\n{answer}\n\n{self.limits()}"
        title = "<!doctype html><meta charset=utf-8><title>Which precision</title><h1>Which precision</h1>"
        replace_file(self.folder / "which.html", f"{title}<pre>{escape(text)}</pre>{self.picture()}".encode())
        return text

    def limits(self) -> str:
        """What the answer does not cover."""
        tokens = self.protocol.steps * self.recipe.batch.tokens
        return (
            f"This holds for this model after {count(tokens)} tokens, with a margin of ± {100 * self.protocol.margin:g} % of the "
            f"baseline's loss; intervals hold at {100 * (1 - self.protocol.error):.3g} %, whenever one looks. Longer trainings "
            "and larger models may need more."
        )

    def picture(self) -> str:
        """Loss against wall-clock in the first round, or against tokens where some are emulated: HTML that needs no network."""
        from plotly.graph_objects import Figure  # only the page needs it

        figure, base = Figure(), self.protocol.candidates[0]
        first = self.rounds[0]
        timed = all(own_speed(run) for run in first.values())
        for place, (name, run) in enumerate(first.items()):
            steps, losses = run.curve("loss")
            hours = np.cumsum(run.curve("step_ms")[1]) / 3.6e6 if timed else steps * run.tokens_per_step
            if timed and name != base and not self.protocol.begin_with:  # a branch begins where the baseline's trunk ends
                hours = hours + np.sum(first[base].curve("step_ms")[1][: self.protocol.trunk]) / 3.6e6
            line = {"color": COLOURS[place % len(COLOURS)]}
            figure.add_scatter(x=hours, y=moving_mean(losses, window_of(len(steps))), name=escape(name), line=line)
        figure.update_layout(template="plotly_white", xaxis_title="hours of training" if timed else "tokens", yaxis_title="loss")
        return figure.to_html(full_html=False)


def above(pairs: Sequence[tuple[RunRecord, RunRecord]], loss: Callable[[RunRecord], float]) -> SeedDifference:
    base, run = ({each.config["seed"]: loss(each) for each in runs} for runs in zip(*pairs, strict=True))
    return SeedDifference.of(run, base)


def held_out_loss(run: RunRecord) -> float:
    return run.summary["held_out_loss"]


def loss_slope(run: RunRecord) -> float:
    """How a run's training loss falls, in nats for each unit of ln(tokens), over its middle half: below 0, where it falls."""
    steps, losses = run.curve("loss")
    middle = slice(len(steps) // 4, 3 * len(steps) // 4)
    return float(np.polyfit(np.log(steps[middle]), losses[middle], 1)[0])


# ── The command ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns its exit status. Raises InputError for a mistake in what it was given."""
    options = parse_arguments(arguments)
    accelerate = options.config_file or (ON_GPU if has_gpu() else ON_CPU)
    recipe = load_recipe(options.recipe, options.overrides)
    options.begin_with = (begin := options.begin_with or begin_of(recipe)) and os.path.abspath(begin)
    names = options.precisions or default_candidates("fp32" if recipe.weights == "fp32" else "bf16")
    question = Question(
        options.recipe, tuple(options.overrides), accelerate, Path(options.run_dir or f"runs/which/{recipe.name}"), names
    )
    check(question, options)
    ends = time.monotonic() + options.hours * 3600
    with RunFolder(question.folder), StopRequest(passed_on=True) as stop:
        question.protocol = kept_protocol(question, options) or new_protocol(question, options, stop, ends)
        if question.protocol is None:
            return stopped(stop)
        announce(question, options.hours)
        verdicts = question.verdicts()
        while matrix := next_round(question, verdicts, recipe.seed + len(question.rounds), ends - time.monotonic()):
            if not run_round(question, matrix, stop):
                return stopped(stop)
            verdicts = question.verdicts()
            say(f"\n{question.write(verdicts)}")
    say(f"\nWritten: {question.folder / 'verdict.json'}, {question.folder / 'which.html'}")
    return int(any(each.is_open for each in verdicts))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(prog="python -m pretrain which", description=__doc__)
    add = parser.add_argument
    add("recipe", type=Path, help="what you want to train")
    add("overrides", nargs="*", metavar="key=value", help="over the recipe's settings, where this command sets none")
    add("--hours", type=float, default=4.0, metavar="H", help="no round begins that would not end within these; default: 4")
    add("--margin", type=float, default=0.3, metavar="PERCENT", help="of the loss, within which a difference is none; 0.3")
    listed = "the baseline first; +head behind one: its head too. Default: all that this machine computes, else emulated ones"
    add("--precisions", type=lambda text: text.split(","), metavar="A,B", help=listed)
    add("--seeds", type=int, default=5, metavar="N", help=f"that the hours are planned for, {FEWEST_SEEDS} or more; default: 5")
    add("--steps", type=int, metavar="N", help="of each training; default: as many as the hours hold")
    add("--from", dest="begin_with", metavar="CHECKPOINT", help="a step-* folder with which all begin, the baseline too")
    add("--config_file", type=Path, metavar="FILE", help=f"of accelerate; default: {ON_GPU}, or {ON_CPU} without a GPU")
    add("--run_dir", metavar="FOLDER", help="default: runs/which/NAME, by the recipe's name")
    return parser.parse_intermixed_args(arguments)


def has_gpu() -> bool:
    import torch  # seconds, which a mistake on the command line should not cost

    return torch.cuda.is_available()


def default_candidates(on_cpu: str) -> list[str]:
    """BF16 and what the GPU computes, the first of that with its head too, or one that is emulated; on a CPU beside `on_cpu`."""
    quantized = [name for name, each in PRECISIONS.items() if each.quantized]
    if not has_gpu():
        return [on_cpu, quantized[0]]
    with ProcessPoolExecutor(1, get_context("spawn")) as child:  # what it holds of the GPU, it gives back when it ends
        here = child.submit(computed_here, quantized).result()
    return ["bf16", *(here or quantized[:1]), *(f"{name}{HEAD}" for name in here[:1])]


def computed_here(quantized: Sequence[str]) -> list[str]:
    from pretrain.precision.selection import missing_on  # imports torch

    missing = missing_on("cuda")
    return [name for name in quantized if missing(PRECISIONS[name]) is None]


def check(question: Question, options: argparse.Namespace) -> None:
    """InputError for what would end without an answer, before anything runs."""
    names = question.names
    if any(name.removesuffix(HEAD) not in PRECISIONS for name in names) or not 2 <= len(names) == len(set(names)):
        raise InputError(f"--precisions {','.join(names)}: name two or more, each once, of {', '.join(PRECISIONS)}")
    if options.seeds < FEWEST_SEEDS or not (options.margin > 0 and options.hours > 0):
        raise InputError(f"command line: an interval takes --seeds {FEWEST_SEEDS} or more, and --margin and --hours above 0")
    ours = {"precision", "seed", "run_dir", "train.steps", "train.tokens", "train.epochs", "train.begin_with"}
    if own := ours & dict(parse_overrides(question.overrides)).keys():
        raise InputError(f"command line: `{min(own)}` is this command's to set; leave it out, or see --help")
    least = least_steps(step_of_checkpoint(options.begin_with))
    if (steps := options.steps or question.recipe.train.steps) and steps < least:
        raise InputError(f"{steps} steps a training, by --steps or else `train.steps`: {least} are the least; set more")


def train(matrix: Matrix, stop: StopRequest, *, may_fail: bool) -> bool:
    """Train what has not ended, one after another; False where it was stopped. InputError, before the next one starts, where the
    baseline fails or halts, or a candidate fails that may not: its halt is an answer."""
    for cell in (each for each in matrix.cells if not has_ended(matrix, each)):
        check_speeds(matrix)
        (outcome,) = run_all(matrix, [cell], stop)
        if stop.requested:
            return False
        if not outcome.is_finished and (cell is matrix.baseline or not (may_fail or outcome.status == "halted")):
            why = f"{cell.log}: this training has {outcome.status}, without which nothing is told; see its last lines"
            raise InputError(f"{why}. The same command goes on; with other settings ask anew in another --run_dir")
    return True


def has_ended(matrix: Matrix, cell: Cell) -> bool:
    """Whether nothing more is to be trained of it: a candidate that has halted is told."""
    run = cell.record()
    return cell.is_finished() or (cell is not matrix.baseline and run is not None and "halted" in run.summary)


def check_speeds(matrix: Matrix) -> None:
    """InputError where others use the GPU, by nvidia-smi: to ask CUDA would take some of it; or the CPU, of which speeds are told
    where two are not emulated."""
    if matrix.on_cpu:
        plain = [cell for cell in matrix.cells if not is_quantized(cell.recipe.precision)]
        if len(plain) > 1 and (used := psutil.cpu_percent(1.0)) > CPU_IS_FREE:
            raise InputError(f"others use {used:.0f} % of the CPU, so speeds would not be its own; end what runs beside")
        return
    seen = os.environ.get(DEVICES)
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", *(["-i", seen] if seen else [])]
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):  # it is not there, or does not say
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = max(float(line) / 1024 for line in answer.split()[: matrix.processes])
        if used > GPU_IS_FREE:
            raise InputError(f"the GPU has {memory(used)} in use by others, so speeds would not be its own; free it")


def kept_protocol(question: Question, options: argparse.Namespace) -> Protocol | None:
    """The protocol of a question that was begun; None for a new one. InputError where this one is another: a margin that moves
    after a look decides nothing."""
    file = question.folder / "which.json"
    if not file.exists():
        return None
    protocol = Protocol(**load_object(file, "ask anew in another --run_dir"))
    asked = {
        "begin_with": options.begin_with,
        "margin": options.margin / 100,
        "seeds": options.seeds,
        "precisions": options.precisions or protocol.precisions,
        "steps": options.steps or protocol.steps,
    }
    question.names = protocol.candidates
    differ = {key: (value, then) for key, value in asked.items() if value != (then := getattr(protocol, key))}
    if differ := differ | question.trial().baseline.differences:
        raise InputError(f"{file}: was begun otherwise (now, and then): {in_words(differ)}; ask anew in another --run_dir")
    return protocol


def new_protocol(question: Question, options: argparse.Namespace, stop: StopRequest, ends: float) -> Protocol | None:
    """Try every candidate, and fix how long trainings are; None where it was stopped. InputError where the baseline fails."""
    matrix, recipe = question.trial(), question.recipe
    for cell in matrix.cells:
        if cell.differences:  # as the recipe was mended, nothing is fixed yet
            shutil.rmtree(cell.run_dir)
    say(f"{plural(TRIAL_STEPS, 'step')} of each first, about a minute each: {', '.join(c.values['cell'] for c in matrix.cells)}")
    if not train(matrix, stop, may_fail=True):
        return None
    runs = {cell.values["cell"]: cell.record() for cell in matrix.cells if cell.is_finished()}
    ran = {str([(p["name"], p["effective"]) for p in run.audit["products"]]): name for name, run in reversed(runs.items())}
    runs = {name: run for name, run in runs.items() if name in ran.values()}  # +head is no candidate where the head stays in BF16
    if len(runs) < 2:
        raise InputError(f"{question.names[0]} and another precision have to run, each its own way; see {question.folder}/trial")
    if "held_out_loss" not in runs[question.names[0]].summary:
        raise InputError(
            f"{question.recipe_file}: no text is held out, by which precisions are judged; set `data.held_out: 0.02`"
        )
    seconds = {name: recipe.batch.tokens / run.summary["tokens_per_second"] for name, run in runs.items()}
    started = [seconds_of(cell) - TRIAL_STEPS * seconds[name] for cell in matrix.cells if (name := cell.values["cell"]) in runs]
    start = max(0.0, statistics.median_low(started))  # without what compiles once for all
    steps = steps_that_fit(options, recipe, runs[question.names[0]], seconds, start, ends - time.monotonic())
    protocol = Protocol(options.begin_with, options.margin / 100, question.names, seconds, start, options.seeds, *steps)
    write_json(question.folder / "which.json", asdict(protocol))
    return protocol


def steps_that_fit(
    options: argparse.Namespace, recipe: Recipe, record: RunRecord, seconds: dict[str, float], start: float, seconds_left: float
) -> tuple[int, int]:
    """The last step of a training, and of its trunk: what the hours hold, each text seen once. InputError for too few."""
    base, *others = seconds.values()
    done = step_of_checkpoint(options.begin_with)
    whole = base + (1 - TRUNK) * sum(others) if done is None else base + sum(others)
    in_hours = (done or 0) + int((seconds_left / options.seeds - len(seconds) * start) / whole)
    epochs = max(value for key, value in record.steps[-1].items() if key.startswith("epoch"))  # of several sources each has one
    in_an_epoch = int(record.summary["steps"] / epochs) if epochs else math.inf  # a stream has not come to its end
    in_recipe = recipe.train.steps or (recipe.train.tokens and math.ceil(recipe.train.tokens / recipe.batch.tokens))
    steps = options.steps or min(in_hours, in_an_epoch, in_recipe or in_an_epoch)
    if steps > in_an_epoch:
        raise InputError(f"--steps {steps}: text is seen again from step {in_an_epoch} on, which hides costs; take fewer steps")
    if steps < (least := least_steps(done)):
        hours = options.hours + options.seeds * (least - in_hours) * whole / 3600
        short, remedy = f"--hours {options.hours:g} hold", f"take {1.05 * hours:.2g} hours"  # as two digits may be 5 % fewer
        if steps != in_hours:
            short, remedy = "the recipe or its text has", "set more `train.steps` in the recipe, or take more text"
        raise InputError(f"{short} {max(steps, 0)} steps a training; {least} are the least: {remedy}")
    return steps, math.ceil(TRUNK * steps) if done is None else done


def least_steps(done: int | None) -> int:
    """Of a training, with those that are `done` before all begin: so that its last losses are of the candidate alone."""
    return math.ceil(FEWEST_STEPS / (1 - TRUNK)) if done is None else done + FEWEST_STEPS


def step_of_checkpoint(path: str | None) -> int | None:
    """After which step the checkpoint was saved that all begin with; None where they begin with none."""
    return load_object(Path(path, "state.json"), "--from takes a step-* folder")["progress"]["step"] if path else None


def seconds_of(cell: Cell) -> float:
    """How long its training took: from its mark, when it was last started, to its summary, the last that it writes; or, where it
    was started before that, at least its steps."""
    last_start = (cell.run_dir / SUMMARY_FILE).stat().st_mtime - cell.mark.stat().st_mtime
    return max(last_start, 3600 * cell.record().summary["hours"])


def announce(question: Question, hours: float) -> None:
    protocol = question.protocol
    base, *others = protocol.candidates
    each = question.round_seconds(others)
    if missing := [name for name in protocol.precisions if name not in protocol.seconds]:
        say(f"\nLeft out, as they failed or computed as another: {', '.join(missing)}; ask of them anew in another --run_dir.")
    say(
        f"\nBaseline {base}, candidates {', '.join(others)}; a margin of {100 * protocol.margin:g} % of the loss, which stays.\n"
        f"A round is a seed: {protocol.steps:,} steps each, the first {protocol.trunk:,} in {base}; about {duration(each)}.\n"
        f"{protocol.seeds} rounds are planned, about {duration(protocol.seeds * each)}; {hours:g} hours are given."
    )


def next_round(question: Question, verdicts: Sequence[Verdict], seed: int, seconds_left: float) -> Matrix | None:
    """The next seed of the baseline and of all that are open. None where nothing is, or where it would not end in time: but the
    first one, and what is trained already, take as long as they take."""
    still = [each.name for each in verdicts if each.is_open]
    if not still or len(question.rounds) >= MOST_SEEDS:
        return None
    matrix = question.round(seed, still)
    in_time = question.round_seconds(still) <= seconds_left or not question.rounds
    return matrix if in_time or all(has_ended(matrix, cell) for cell in matrix.cells) else None


def run_round(question: Question, matrix: Matrix, stop: StopRequest) -> bool:
    """Train it; False where it was stopped."""
    about = duration(question.round_seconds([cell.values["cell"] for cell in matrix.cells[1:]]))
    say(f"\nround {len(question.rounds) + 1}, about {about}")
    if not train(matrix, stop, may_fail=False):
        return False
    question.rounds.append({cell.values["cell"]: cell.record() for cell in matrix.cells})
    question.took |= {cell.values["cell"]: seconds_of(cell) for cell in matrix.cells if cell.is_finished()}
    for cell in matrix.cells:  # whose checkpoints nothing begins with any more
        shutil.rmtree(cell.run_dir / "checkpoints", ignore_errors=True)
    return True
