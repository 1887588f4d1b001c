"""`python -m pretrain doctor`: print which precisions work on this machine.

A library may report that a device supports a precision although the products of this precision fail
on the device. So the doctor trains a model of one layer for a few steps in each precision. Each
precision is a cell of a matrix, so it has a process of its own, which a CUDA error may end. Before
the first step, the parity check compares the model with plain transformers.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from foundation.signals import StopRequest
from lab.experiments.matrix_file import Matrix, MatrixSettings, make_matrix
from lab.experiments.matrix_run import report_stop, run_all, say
from packing.arrow import Pack, write_packs
from pretrain.launch.launcher import find_configuration
from pretrain.metrics.run_folder import version_of
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.selection import missing_on
from pretrain.precision.settings import PRECISIONS
from pretrain.settings.config import load_recipe

# The recipe of all precisions.
RECIPE = Path(__file__).with_suffix(".yaml")
# Number of packs, which are more than one step needs.
PACKS = 8


def main(options: argparse.Namespace) -> int:
    """Print the engine of each precision. Return 1 if any precision fails, else 0.

    If the hardware does not support a precision, it is emulated. A GPU trains such precisions only
    if they are in --precisions.
    """
    gpu = torch.cuda.is_available()
    versions = {name: version_of(name) for name in ("torch", "transformer-engine")}
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    device = torch.cuda.get_device_name() if gpu else "CPU"
    say(f"{device}; {libraries}, CUDA {torch.version.cuda}")
    missing = missing_on("cuda" if gpu else "cpu")
    # Map each precision to the reason why the hardware does not support it, or to None.
    reasons = {
        name: missing(precision) if isinstance(precision, QuantizedPrecision) else None
        for name, precision in PRECISIONS.items()
    }
    names = options.precisions or [name for name in PRECISIONS if not (gpu and reasons[name])]
    engines = {name: "emulation" if reasons[name] else "TE" for name in dict.fromkeys(names)}
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        matrix = matrix_in(Path(folder), engines, "bf16" if gpu else "cpu")
        with StopRequest(passed_on=True) as stop:
            outcomes = run_all(matrix, matrix.cells, stop)
    if stop.requested:
        return report_stop(stop.requested)
    say("")
    results = {outcome.cell.name: "failed" for outcome in outcomes if not outcome.is_finished}
    for name, reason in reasons.items():
        if name in engines or not options.precisions:
            engine = engine_of(name, reason) + ("" if name in engines else "; not tried")
            say(f"{name}: {results.get(name, engine)}")
    return int(bool(results))


def matrix_in(folder: Path, engines: dict[str, str], accelerate: str) -> Matrix:
    """Write packs of random documents to `folder`, and return a matrix with a cell per precision.

    Args:
        folder: The folder of the packs and the runs.
        engines: Map each precision to its engine, a value of `fp8_config.backend`.
        accelerate: Name of the Accelerate configuration.
    """
    recipe = load_recipe(RECIPE)
    length = recipe.data.length
    vocabulary = (recipe.model.config or {})["vocab_size"]
    rows = np.random.default_rng(0).integers(vocabulary, size=(PACKS, length)).astype(np.uint32)
    lengths = np.diff([0, length // 3, length // 2, length]).astype(np.int32)
    packs = [[Pack(row, lengths) for row in rows]]
    write_packs(
        folder / "packs", length, {"train": packs}, settings={}, statistics={}, tokenizer=None
    )
    settings = MatrixSettings(
        name="doctor",
        recipe=RECIPE,
        accelerate=find_configuration(accelerate),
        overrides={"data.packs": str(folder / "packs")},
        cells={
            name: {"precision": name, "fp8_config.backend": engine}
            for name, engine in engines.items()
        },
        run_dir=f"{folder}/{{cell}}",
    )
    return make_matrix("doctor", settings)


def engine_of(name: str, reason: str | None) -> str:
    """Return the engine of the GEMMs in a precision, with the reason for an emulation.

    reason: the reason why the hardware does not support the precision, or None.
    """
    if reason:
        return f"emulation; it {reason}"
    return "transformer_engine" if PRECISIONS[name].quantized else "torch"
