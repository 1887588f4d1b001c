"""Write the tables of the experiments in served_design.md.

    python -m benchmarks.evidence.served            # into docs/evidence.md and served_design.md
    python -m benchmarks.evidence.served FILE...    # print the tables of other files

Reads the files that `python -m benchmarks.evidence.served_cells` writes. A cell is the held-out
loss of one run, evaluated ("served") in one precision. Differences are paired by seed. A figure is
the mean over seeds with a 95 % interval by Student's t, in percent of the loss of BF16. Figures of
fewer than three seeds have no interval.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.evidence.t_interval import t_half_width
from benchmarks.evidence.tables import ANSWER, RESULTS
from benchmarks.machine import with_tables
from foundation.files import replace_file
from foundation.units import UNKNOWN, markdown
from pretrain.compare.differences import LossDifference

FILES = (RESULTS / "h100_served_14m.jsonl", RESULTS / "h100_served_options_14m.jsonl")
DESIGN = Path("benchmarks/evidence/served_design.md")
MARKER = "served"

# Map seeds to losses.
Losses = Mapping[int, float]
# Map (matrix, precision of the training, precision of the evaluation, kind of checkpoint) to the
# losses by seed.
Cells = Mapping[tuple[str, str, str, str], Losses]

TRAINED = {
    "bf16": "BF16",
    "delayed": "FP8, delayed scaling",
    "block": "FP8, blocks",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}
SERVED = {**TRAINED, "nvfp4_1d": "NVFP4 1-D"}
# Kinds of checkpoints: the last checkpoint, and the last checkpoint before the decay. MEAN is the
# prefix for a mean of several checkpoints whose newest checkpoint is one of these two.
LAST = "last"
BEFORE_DECAY = "before the decay"
MEAN = "mean of "
# Means of checkpoints: label, kind of the newest checkpoint in the mean, and kind of the baseline,
# which is a single checkpoint.
MEANS = (
    ("four before the decay, above the newest of them", BEFORE_DECAY, BEFORE_DECAY),
    ("four before the decay, above the last checkpoint", BEFORE_DECAY, LAST),
    ("last four, above the last checkpoint", LAST, LAST),
)
OPTIONS = ("served_options", "served_confirmation")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="files of cells, JSON lines")
    files = parser.parse_args().files
    if files:
        cells = read_cells(files)
        tables = [served_table(cells), gain_table(cells), merged_table(cells)]
        tables += [options_table(cells, matrix) for matrix in OPTIONS]
        print("\n\n".join(filter(None, tables)))
        return
    for page, text in pages().items():
        replace_file(page, text.encode())


def pages() -> dict[Path, str]:
    """Return the text of the pages that have tables of FILES."""
    cells = read_cells(FILES)
    details = [gain_table(cells), merged_table(cells)]
    details += [options_table(cells, matrix) for matrix in OPTIONS]
    return {
        ANSWER: with_tables(ANSWER, MARKER, served_table(cells)),
        DESIGN: with_tables(DESIGN, MARKER, *details),
    }


def read_cells(files: Iterable[Path]) -> Cells:
    """Return the losses of the cells in `files`."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return cells_of(line for line in lines if "loss" in line)


def cells_of(rows: Iterable[Mapping[str, Any]]) -> Cells:
    """Return the losses of the cells in `rows`, the lines of a result file."""
    cells: dict[tuple[str, str, str, str], dict[int, float]] = defaultdict(dict)
    for row in rows:
        merged = row["merged"]
        kind = LAST if not merged or merged[0] == row["steps"] else BEFORE_DECAY
        if len(merged) > 1:
            kind = MEAN + kind
        cells[row["matrix"], row["trained"], row["served"], kind][row["seed"]] = row["loss"]
    return cells


def figure(losses: Losses, compared: Losses, unit: Losses) -> str:
    """Return the mean of `losses` minus `compared`, in percent of the mean of `unit`, as text.

    Seeds that are missing in one of the three mappings are ignored.
    """
    common = {seed: loss for seed, loss in compared.items() if seed in unit}
    difference = LossDifference.of(losses, common)
    if difference is None:
        return UNKNOWN
    mean_loss = sum(unit[seed] for seed in difference.by_seed) / len(difference.by_seed)
    half = t_half_width(difference)
    text = f"{100 * difference.mean / mean_loss:+.2f}"
    seeds = "" if half is None else f" ± {100 * half / mean_loss:.2f}"
    return f"{text}{seeds} %".replace("-", "−")


def served_table(cells: Cells) -> str:
    """Return the table with a row for each training precision and a column for each evaluation.

    Each figure is the difference from the BF16 training that is evaluated in BF16.
    """
    bf16 = cells.get(("served", "bf16", "bf16", LAST), {})
    rows = [
        [title, count_of(losses)]
        + [figure(cells.get(("served", name, served, LAST), {}), bf16, bf16) for served in SERVED]
        for name, title in TRAINED.items()
        if (losses := cells.get(("served", name, "bf16", LAST)))
    ]
    if bf16:
        rows[0][2] = "baseline"
    heads = ["trained in ↓ served in →", "seeds", *SERVED.values()]
    return table(heads, rows)


def gain_table(cells: Cells) -> str:
    """Return the table for models that are trained and evaluated in the same precision.

    The first figure is the loss minus the loss of the BF16 model, evaluated in the same precision.
    The second figure is the loss minus the loss of the same model, evaluated in BF16.
    """
    bf16 = cells.get(("served", "bf16", "bf16", LAST), {})
    rows = []
    for trained, served in [(name, name) for name in TRAINED] + [("nvfp4", "nvfp4_1d")]:
        losses = cells.get(("served", trained, served, LAST), {})
        afterwards = cells.get(("served", "bf16", served, LAST), {})
        unquantized = cells.get(("served", trained, "bf16", LAST), {})
        if trained != "bf16" and losses:
            label = f"{TRAINED[trained]}, served in {SERVED[served]}"
            figures = [figure(losses, other, bf16) for other in (afterwards, unquantized)]
            rows.append([label, count_of(losses), *figures])
    heads = ["trained in", "seeds", "above BF16, served in the same precision"]
    return table([*heads, "above the same model, served in BF16"], rows)


def merged_table(cells: Cells) -> str:
    """Return the table with the loss of means of checkpoints minus the loss of single checkpoints.

    Each difference is the effect of averaging. The last row of each kind is the effect on the NVFP4
    run minus the effect on the BF16 run.
    """
    bf16 = cells.get(("served", "bf16", "bf16", LAST), {})
    rows = []
    for label, kind, compared in MEANS:
        effects = defaultdict(list)
        for trained in ("bf16", "nvfp4"):
            texts = []
            for served in ("bf16", "nvfp4"):
                mean = cells.get(("served", trained, served, MEAN + kind), {})
                single = cells.get(("served", trained, served, compared), {})
                texts.append(figure(mean, single, bf16))
                effect = {seed: mean[seed] - single[seed] for seed in mean.keys() & single.keys()}
                effects[served].append(effect)
            if any(text != UNKNOWN for text in texts):
                rows.append([label, TRAINED[trained], *texts])
        differences = [figure(on_nvfp4, on_bf16, bf16) for on_bf16, on_nvfp4 in effects.values()]
        if any(text != UNKNOWN for text in differences):
            rows.append([label, "NVFP4 minus BF16", *differences])
    heads = ["mean of checkpoints", "trained in", "served in BF16", "served in NVFP4"]
    return table(heads, rows)


def options_table(cells: Cells, matrix: str) -> str:
    """Return the table with the loss of each option minus BF16's and minus the default's loss.

    The default has the same precision as the option. `matrix` is the name of the matrix.
    """
    bf16 = cells.get((matrix, "bf16", "bf16", LAST), {})
    names = {trained for name, trained, *_ in cells if name == matrix and trained != "bf16"}
    rows = []
    for name in sorted(names):
        served = cells.get((matrix, name, "bf16", LAST), {})
        own = cells.get((matrix, name, "own", LAST), {})
        default = "nvfp4" if name == "chosen" else name.partition("_")[0]
        compared = [UNKNOWN, UNKNOWN]
        if name != default:
            compared = [
                figure(losses, cells.get((matrix, default, where, LAST), {}), bf16)
                for losses, where in ((served, "bf16"), (own, "own"))
            ]
        above = [figure(losses, bf16, bf16) for losses in (served, own)]
        rows.append([f"`{name}`", count_of(served), *above, *compared])
    heads = ["option", "seeds", "served in BF16", "as trained"]
    return table([*heads, "above the default, in BF16", "above the default, as trained"], rows)


def count_of(losses: Losses) -> str:
    """Return the number of seeds as text."""
    return str(len(losses))


def table(heads: Sequence[str], rows: list[list[str]]) -> str:
    """Return a Markdown table, or an empty text if there are no rows."""
    return markdown(list(heads), rows) if rows else ""


if __name__ == "__main__":
    main()
