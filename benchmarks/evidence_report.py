"""Result files of `benchmarks.evidence` as the tables of docs/evidence_results.md, between its markers, and as a picture.

    python -m benchmarks.evidence_report FILE...

docs/evidence_results.md ends its tables with the command that made them. The picture is shown in docs/evidence.md, the answer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.evidence_picture import draw
from benchmarks.evidence_read import (
    BASELINE,
    BRANCH_REPEAT,
    CONTROLS,
    LAST_STEPS,
    RATES,
    REPEAT,
    TESTED,
    VARIANTS,
    Measure,
    Scale,
    Speeds,
    divergence,
    final_loss,
    last_word_accuracy,
    loss_before_decay,
    loss_of_kind,
    read_scales,
    training_loss,
)
from benchmarks.evidence_results import device_and_torch
from benchmarks.page import check_place, put_between, wrapped
from foundation.errors import InputError
from foundation.tables import UNKNOWN, markdown, or_dash
from foundation.units import count, percent, plural
from pretrain.compare.comparison import signed, unsigned
from pretrain.compare.fairness import CONFIDENCE
from pretrain.compare.seed_groups import share, slope_note, tokens_note, verdict_of, verdicts_note, whole_percent
from pretrain.compare.seeds import FEWEST_SEEDS, MARGIN, SeedDifference

INTERVAL = f"± {whole_percent(CONFIDENCE)}"
AGAINST = ("against", "seeds", "minus", INTERVAL, "in %", "interval")
NO_SLOPE = (
    f"No tokens and no equal time: they take {BASELINE} from scratch, with 3 evaluations or more at a constant rate in the "
    "second half of the tokens before its decay."
)
BY_TEXT = (
    f"Training loss, in the precision that trains, mean of the last {LAST_STEPS} steps; and held-out loss after the decay by "
    "kind of text:"
)
BEGIN, END = "<!-- evidence: results -->", "<!-- /evidence -->"


def write(files: Sequence[Path], page: Path, picture: Path, throughput: Path) -> None:
    """Replace what stands between the markers of `page`, and draw `picture`. InputError for a file that cannot be used."""
    scales, speeds = read_scales(files), Speeds(throughput)
    check_place(page, BEGIN, END)
    draw(scales, speeds, picture)
    here = page.parent
    image = f"[the picture]({Path(os.path.relpath(picture, here)).as_posix()})"
    made = f"`python -m benchmarks.evidence_report {' '.join(map(str, files))}` makes these tables and {image}."
    sections = [part for scale in scales for part in section(scale, speeds, here)]
    put_between(page, BEGIN, END, [reading(speeds, here), *sections, wrapped(made)])


def section(scale: Scale, speeds: Speeds, here: Path) -> list[str]:
    """A scale's heading, tables and notes."""
    parts = [f"### {scale.content['scale']}", introduction(scale, here), cells_table(scale, speeds), notes(scale)]
    texts, rates = texts_table(scale), rates_table(scale)
    variants, controls = (against_table(scale, cells) for cells in (VARIANTS, CONTROLS))
    parts += [wrapped(BY_TEXT), texts] if texts else []
    parts += ["Learning rates:", rates] if rates else []
    parts += ["Variants, each held against what it changes one thing of:", variants] if variants else []
    parts += ["Controls, each held against what it differs from in one thing:", controls] if controls else []
    return parts


def introduction(scale: Scale, here: Path) -> str:
    content, files = scale.content, []
    for file in scale.files:
        link = f"[`{file.path.name}`]({Path(os.path.relpath(file.path, here)).as_posix()})"
        days = sorted({run["date"][:10] for run in file.content["runs"].values()})
        made = f"on {device_and_torch(file.content['environment'])}, {' to '.join(dict.fromkeys([days[0], days[-1]]))}"
        made += f" ({link}, by `{file.content['command']}`)"
        files.append(f"{plural(len(file.records), 'run')} {made}")
    sizes = f"{count(content['parameters'])} parameters, {count(content['tokens'])} tokens"
    return wrapped(f"{sizes}; {' and '.join(files)}.")


# ── Precisions ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def cells_table(scale: Scale, speeds: Speeds) -> str:
    """A row a precision: the baseline's figures, then each cell's differences to it."""
    header = [
        "cell",
        "seeds",
        "before decay",
        "after decay",
        INTERVAL,
        "in %",
        "verdict",
        "as trained",
        "tokens",
    ]
    header += ["KL", "last word", "speed", "at equal time"]
    rows = [baseline_row(scale)] + [cell_row(scale, cell, speeds) for cell in scale.precisions]
    return markdown(header, rows)


def baseline_row(scale: Scale) -> list[str]:
    """Losses themselves; its own divergence is the unit of the others'."""
    finals = scale.every(BASELINE, final_loss)
    before, after, trained = (
        or_dash(scale.mean(BASELINE, measure), "{:.4f}".format) for measure in (loss_before_decay, final_loss, scale.trained_loss)
    )
    spread = f"sd {unsigned(statistics.stdev(finals))}" if finals[1:] else UNKNOWN
    said = without_mean(scale, BASELINE) if scale.broken_off(BASELINE) else "baseline"
    between, word = "1.00" if scale.between else UNKNOWN, or_dash(scale.mean(BASELINE, last_word_accuracy), percent)
    seeds = str(len(scale.values(BASELINE, final_loss)))
    return [BASELINE, seeds, before, after, spread, UNKNOWN, said, trained, UNKNOWN, between, word, "1.00 ×", UNKNOWN]


def cell_row(scale: Scale, cell: str, speeds: Speeds) -> list[str]:
    difference, speedup, slope = scale.difference(cell), speeds.over_baseline(scale, cell), scale.slope
    before, trained = (mean_of(scale, cell, measure, difference) for measure in (loss_before_decay, scale.trained_loss))
    return [
        cell,
        seeds_of(scale, cell, difference),
        before,
        *interval(difference),
        verdict(scale, cell, difference),
        trained,
        share(slope.tokens(difference.mean)) if slope and difference else UNKNOWN,
        divergence_ratio(scale, cell),
        or_dash(scale.mean(cell, last_word_accuracy), percent),
        or_dash(speedup, "{:.2f} ×".format),
        signed(slope.at_equal_time(difference.mean, speedup)) if slope and difference and speedup else UNKNOWN,
    ]


def verdict(scale: Scale, cell: str, difference: SeedDifference | None) -> str:
    """Say whether a tested cell is equivalent; other cells are estimates."""
    if difference is not None and scale.unlike(cell):
        return "other settings"
    if difference is None or len(difference.by_seed) < FEWEST_SEEDS or cell in TESTED:
        return without_mean(scale, cell) if difference is None else verdict_of(difference, MARGIN)
    return "estimate"


def seeds_of(scale: Scale, cell: str, difference: SeedDifference | None) -> str:
    """Say how many seeds a row is over; or how many there are, where it has no figures."""
    return str(len(difference.by_seed) if difference else scale.number_of_runs(cell))


def without_mean(scale: Scale, cell: str) -> str:
    """Why a cell has no difference."""
    broken = scale.broken_off(cell)
    return f"broke off: {plural(len(broken), 'run')} of {scale.number_of_runs(cell)}" if broken else "no seed in common"


def interval(difference: SeedDifference | None) -> list[str]:
    """Mean, half of its interval over seeds, and the mean as a share of the baseline's loss."""
    if difference is None:
        return [UNKNOWN] * 3
    return [signed(difference.mean), or_dash(difference.half_width(), unsigned), share(difference.mean / difference.baseline)]


def mean_of(scale: Scale, cell: str, measure: Measure, row: SeedDifference | None) -> str:
    """The mean difference of another figure; with its number of seeds, where these are others than the row's."""
    difference = scale.difference(cell, measure)
    if difference is None:
        return UNKNOWN
    others = row is None or difference.by_seed.keys() != row.by_seed.keys()
    return signed(difference.mean) + (f" ({plural(len(difference.by_seed), 'seed')})" if others else "")


def divergence_ratio(scale: Scale, cell: str) -> str:
    """KL from the baseline of its seed, over that between baselines of two seeds."""
    own = scale.mean(cell, divergence)
    return UNKNOWN if own is None or not any(scale.between) else f"{own / statistics.fmean(scale.between):.2f}"


def texts_table(scale: Scale) -> str:
    """Differences of the training loss with their verdicts, and after the decay by kind of held-out text where there are several;
    empty where there is no cell."""
    kinds = {kind: loss_of_kind(kind) for kind in scale.kinds if scale.kinds[1:]}
    header = ["cell", "training", INTERVAL, "in %", "verdict", *(title for kind in kinds for title in (kind, INTERVAL, "in %"))]
    rows = []
    for cell in scale.precisions:
        trained = scale.difference(cell, training_loss)
        texts = [text for measure in kinds.values() for text in interval(scale.difference(cell, measure))]
        rows.append([cell, *interval(trained), verdict(scale, cell, trained), *texts])
    return markdown(header, rows) if rows else ""


def reading(speeds: Speeds, here: Path) -> str:
    """What the columns are."""
    link = f"[`{speeds.path.name}`]({Path(os.path.relpath(speeds.path, here)).as_posix()})"
    return listed(
        "Losses are held-out, of the weights in BF16 by plain transformers, nats a token; as trained: in the precision that "
        f"trained them. Each is a mean over seeds of the cell's minus {BASELINE}'s of the same seed; ± is its "
        f"{whole_percent(CONFIDENCE)} interval over seeds by Student's t, after the decay; sd: of {BASELINE}'s runs.",
        f"{verdicts_note(BASELINE, MARGIN)} Tested are {', '.join(TESTED)}; all others are estimates.",
        tokens_note(BASELINE, speeds=True),
        f"KL: from {BASELINE} of the same seed, over that between {BASELINE} runs of two seeds.",
        f"Speed: of {speeds.model} on an {speeds.device} over its BF16 on {'the same' if speeds.on_one_gpu else 'another'} "
        f"({link}); none of what that emulates.",
    )


def notes(scale: Scale) -> str:
    """What is to be said of a scale's own figures."""
    said = []
    if scale.files[1:]:
        said.append(
            f"A run is held against the {BASELINE} of its seed in its own file. Where a seed was trained in several, it counts "
            f"once, by the mean of these differences. {BASELINE} of a later file, beside that of the first, counts as {REPEAT}."
        )
    for repeat, how in ((REPEAT, "trained once more"), (BRANCH_REPEAT, "gone on once more from their checkpoint")):
        if (floor := scale.floor(repeat)) is not None:
            pairs = plural(len(scale.apart(repeat)), "pair")
            said.append(f"Runs of {BASELINE} that were {how} end {unsigned(floor)} nats apart (root mean square of {pairs}).")
    said.append(slope_note(scale.slope, BASELINE) if scale.slope else NO_SLOPE)
    if scale.between:
        mean, pairs = statistics.fmean(scale.between), plural(len(scale.between), "pair")
        said.append(f"KL between seeds of {BASELINE}: {mean:.4f} nats a token, the mean of {pairs}.")
    for cell in scale.cells:
        if unlike := scale.unlike(cell):
            said.append(f"{cell} differs from {BASELINE} in more than it is about, so no cost is told: {unlike}.")
    for key, what in (("commit", "of the code at"), ("machine", "of")):
        if len(found := scale.of_runs(key)) > 1:
            each = ", ".join(f"{value} ({plural(number, 'run')})" for value, number in found.items())
            said.append(f"The runs are {what} {each}.")
    return listed(*said)


def listed(*said: str) -> str:
    return "\n".join(wrapped(f"* {each}", indent="  ") for each in said)


# ── Rates and controls ────────────────────────────────────────────────────────────────────────────────────────────────────────


def rates_table(scale: Scale) -> str:
    """The baseline's rate and others; empty where no cell has another."""
    cells = present(scale, RATES)
    rows = [[BASELINE, rate_of(scale, BASELINE), *[UNKNOWN] * len(AGAINST)]]
    rows += [[cell, rate_of(scale, cell), *against(scale, cell, other)] for cell, other in cells.items()]
    return markdown(["cell", "rate", *AGAINST], rows) if cells else ""


def against_table(scale: Scale, cells: Mapping[str, str]) -> str:
    """Cells, each held against another by name; empty where the scale has none of them."""
    cells = present(scale, cells)
    rows = [
        [
            cell,
            *against(scale, cell, other),
            divergence_ratio(scale, cell),
            *interval(scale.difference(cell, training_loss, other))[:2],
        ]
        for cell, other in cells.items()
    ]
    return markdown(["cell", *AGAINST, "KL", "training", INTERVAL], rows) if cells else ""


def against(scale: Scale, cell: str, other: str) -> list[str]:
    """A cell's final loss minus another's: the columns of AGAINST."""
    difference = scale.difference(cell, against=other)
    said = without_mean(scale, cell) if difference is None else where_it_lies(difference)
    return [other, seeds_of(scale, cell, difference), *interval(difference), said]


def where_it_lies(difference: SeedDifference) -> str:
    """Whether the interval over seeds holds zero: what a control is read by."""
    half = difference.half_width()
    if half is None:
        return verdict_of(difference, MARGIN)
    return "holds 0" if abs(difference.mean) <= half else "above 0" if difference.mean > 0 else "below 0"


def present(scale: Scale, cells: Mapping[str, str]) -> dict[str, str]:
    return {cell: other for cell, other in cells.items() if {cell, other} <= set(scale.cells)}


def rate_of(scale: Scale, cell: str) -> str:
    return f"{scale.record(cell).config['optimizer']['learning_rate']:g}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of `benchmarks.evidence --out`, one or more a scale")
    parser.add_argument(
        "--page", type=Path, default=Path("docs/evidence_results.md"), help="what stands between its markers is replaced"
    )
    parser.add_argument("--picture", type=Path, default=Path("docs/evidence.png"))
    parser.add_argument(
        "--throughput",
        type=Path,
        default=Path("benchmarks/results/h200_throughput.json"),
        help="whose speeds are taken, by settings",
    )
    options = parser.parse_args(arguments)
    try:
        write(options.files, options.page, options.picture, options.throughput)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
