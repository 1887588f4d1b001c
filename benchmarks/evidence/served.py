"""Print the tables of the experiments in served_design.md, as Markdown.

    python -m benchmarks.evidence.served benchmarks/results/loss/h100_served_14m.jsonl

Reads the cells that `python -m benchmarks.evidence.served_cells` has written. Differences are
paired by seed. A figure is the mean over seeds with a 95 % interval by Student's t, in percent of
the loss of BF16. Figures of fewer than three seeds have no interval.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from foundation.units import UNKNOWN, markdown
from pretrain.compare.differences import SeedDifference

# Map seeds to losses.
Losses = Mapping[int, float]
# Map (matrix, trained, served, kind of checkpoint) to the losses of the seeds.
Cells = Mapping[tuple[str, str, str, str], Losses]

TRAINED = {
    "bf16": "BF16",
    "delayed": "FP8, delayed scaling",
    "block": "FP8, blocks",
    "mxfp8": "MXFP8",
    "nvfp4": "NVFP4",
}
SERVED = {**TRAINED, "nvfp4_1d": "NVFP4 1-D"}
# Kinds of checkpoints: the last one, the last one before the decay, and means that end with them.
LAST = "last"
BEFORE_DECAY = "before the decay"
MEAN = "mean of "
OPTIONS = ("served_options", "served_confirmation")


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="files of cells, JSON lines")
    lines = [line for file in parser.parse_args().files for line in file.read_text().splitlines()]
    cells = read_cells(map(json.loads, lines))
    tables = [served_table(cells), gain_table(cells), merged_table(cells)]
    tables += [options_table(cells, matrix) for matrix in OPTIONS]
    print("\n\n".join(filter(None, tables)))


def read_cells(rows: Iterable[Mapping[str, Any]]) -> Cells:
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
    """Return the difference `losses` - `compared` in percent of the mean loss `unit`.

    Seeds that are missing in one of the three are ignored.
    """
    common = {seed: loss for seed, loss in compared.items() if seed in unit}
    difference = SeedDifference.of(losses, common)
    if difference is None:
        return UNKNOWN
    mean_loss = sum(unit[seed] for seed in difference.by_seed) / len(difference.by_seed)
    half = difference.half_width()
    text = f"{100 * difference.mean / mean_loss:+.2f}"
    seeds = "" if half is None else f" ± {100 * half / mean_loss:.2f}"
    return f"{text}{seeds} %".replace("-", "−")


def served_table(cells: Cells) -> str:
    """Return the loss of each training in each precision, above BF16 trained and served."""
    bf16 = cells.get(("served", "bf16", "bf16", LAST), {})
    rows = [
        [title, count_of(losses)]
        + [figure(cells.get(("served", name, served, LAST), {}), bf16, bf16) for served in SERVED]
        for name, title in TRAINED.items()
        if (losses := cells.get(("served", name, "bf16", LAST)))
    ]
    heads = ["trained in", "seeds", *(f"served in {title}" for title in SERVED.values())]
    return table(heads, rows)


def gain_table(cells: Cells) -> str:
    """Return the loss of each training in its own precision, above BF16 quantized afterwards."""
    bf16 = cells.get(("served", "bf16", "bf16", LAST), {})
    rows = []
    for trained, served in [(name, name) for name in TRAINED] + [("nvfp4", "nvfp4_1d")]:
        losses = cells.get(("served", trained, served, LAST), {})
        afterwards = cells.get(("served", "bf16", served, LAST), {})
        if trained != "bf16" and losses:
            label = f"{TRAINED[trained]}, served in {SERVED[served]}"
            rows.append([label, count_of(losses), figure(losses, afterwards, bf16)])
    return table(["trained in", "seeds", "above BF16, served in the same precision"], rows)


def merged_table(cells: Cells) -> str:
    """Return the loss of means of checkpoints above the newest of these checkpoints.

    The last row of each kind is the effect on the NVFP4 run minus the effect on the BF16 run.
    """
    bf16 = cells.get(("served", "bf16", "bf16", LAST), {})
    rows = []
    for kind in (LAST, BEFORE_DECAY):
        effects = defaultdict(list)
        for trained in ("bf16", "nvfp4"):
            texts = []
            for served in ("bf16", "nvfp4"):
                mean = cells.get(("served", trained, served, MEAN + kind), {})
                newest = cells.get(("served", trained, served, kind), {})
                texts.append(figure(mean, newest, bf16))
                effect = {seed: mean[seed] - newest[seed] for seed in mean.keys() & newest.keys()}
                effects[served].append(effect)
            if any(text != UNKNOWN for text in texts):
                rows.append([kind, TRAINED[trained], *texts])
        differences = [figure(after, before, bf16) for before, after in effects.values()]
        if any(text != UNKNOWN for text in differences):
            rows.append([kind, "NVFP4 minus BF16", *differences])
    return table(["checkpoints", "trained in", "served in BF16", "served in NVFP4"], rows)


def options_table(cells: Cells, matrix: str) -> str:
    """Return the loss of each option above BF16, and above the default of its precision."""
    bf16 = cells.get((matrix, "bf16", "bf16", LAST), {})
    names = {trained for found, trained, *_ in cells if found == matrix and trained != "bf16"}
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
