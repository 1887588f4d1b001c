"""Results that others have published, from a CSV file, beside a comparison: their own speed and loss, and one definition of MFU.

The file's columns are COLUMNS: `mfu_reported` is a share of one, or empty; from `flops_per_token` and `peak_tflops` every row's
MFU is computed again. Lines that begin with # say where it is from.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.reading import read_regular, reason_of
from foundation.units import TERA
from pretrain.compare.appearance import MARKERS, colour_of
from pretrain.precision.registry import WEIGHT_DTYPES

COLUMNS = ("name", "precision", "weights", "scope", "tokens_per_second", "loss", "mfu_reported", "flops_per_token", "peak_tflops")
FIGURES = COLUMNS[4:]


@dataclass(frozen=True)
class Published:
    origin: str  # the file's comment
    rows: list[dict[str, Any]]

    @property
    def colours(self) -> dict[str, str]:
        """The colour of each precision, in the rows' order; the legend in page.html reads it."""
        return {row["precision"]: colour_of(row["precision"]) for row in self.rows}

    def data(self) -> list[dict[str, Any]]:
        """Returns what the page's script draws of the rows."""
        weights = [*WEIGHT_DTYPES]
        return [
            {
                "name": f"{row['name']}: {row['precision']}, {row['weights']} weights, {row['scope']}",
                "colour": colour_of(row["precision"]),
                "symbol": MARKERS[weights.index(row["weights"]) if row["weights"] in weights else 0][0],
                "speed": row["tokens_per_second"],
                "loss": row["loss"],
            }
            for row in self.rows
        ]


def mfu(row: Mapping[str, Any]) -> float:
    """A share of one, by the operations and the peak that the file gives for the row."""
    return row["tokens_per_second"] * row["flops_per_token"] / (row["peak_tflops"] * TERA)


def read_published(path: Path) -> Published:
    """InputError naming the file, and the line, that cannot be used."""
    try:
        text = str(read_regular(path), "utf-8-sig")  # some spreadsheets begin a file with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {reason_of(error)}; --published names a CSV file") from None
    lines = text.splitlines()
    origin = " ".join(line.lstrip("# ") for line in lines if line.startswith("#"))
    reader = csv.DictReader(line for line in lines if line.strip() and not line.startswith("#"))
    if lacking := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
        raise InputError(f"{path}: has no column `{lacking[0]}`; it needs {', '.join(COLUMNS)}")
    rows: list[dict[str, Any]] = []
    for number, row in enumerate(reader, start=1):
        for key in FIGURES:
            try:
                row[key] = None if key == "mfu_reported" and not row[key] else float(row[key])
            except (TypeError, ValueError):
                raise InputError(f"{path}, row {number}: `{key}` is no number: {row[key]!r}") from None
            if row[key] is not None and not 0 < row[key] < math.inf:
                raise InputError(f"{path}, row {number}: `{key}` is {row[key]:g}; a number above 0 is wanted")
        row["mfu"] = mfu(row)
        rows.append(row)
    if not rows:
        raise InputError(f"{path}: holds no row")
    return Published(origin, rows)
