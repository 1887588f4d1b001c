"""`python -m pretrain doctor`: print which precisions work on this machine.

A library may report that a device supports a precision although the products of this precision fail
on the device. So the doctor trains a model of one layer for a few steps in each precision. Each
precision is a cell of a matrix, so it has a process of its own, which a CUDA error may end. Before
the first step, the parity check compares the model with plain transformers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from foundation.signals import StopRequest
from lab.experiments.matrix_file import Matrix, MatrixSettings, make_matrix
from lab.experiments.matrix_run import report_stop, run_all, say
from packing.arrow import Pack, write_packs
from pretrain.launch.launcher import find_configuration
from pretrain.metrics.run_folder import version_of
from pretrain.model.hybrids import kernels
from pretrain.precision.selection import support_check_on
from pretrain.precision.settings import PRECISIONS, QUANTIZED
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
    say(machine())
    gpu = torch.cuda.is_available()
    unsupported_because = support_check_on("cuda" if gpu else "cpu")
    reasons = {name: unsupported_because(precision) for name, precision in QUANTIZED.items()}
    listed = list(dict.fromkeys(options.precisions or PRECISIONS))
    tried = listed
    if gpu and not options.precisions:
        tried = [name for name in listed if not reasons.get(name)]
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        matrix = matrix_in(Path(folder), tried, accelerate="bf16" if gpu else "cpu")
        # `run_all` passes signals on to the trainings.
        with StopRequest(passed_on=True) as stop:
            outcomes = run_all(matrix, matrix.cells, stop)
    if stop.requested:
        return report_stop(stop.requested)
    say("")
    failed = [outcome.cell.name for outcome in outcomes if not outcome.is_finished]
    for name in listed:
        result = engine_of(name, reasons.get(name))
        if name in failed:
            result = "failed"
        elif name not in tried:
            result += "; not tried"
        say(f"{name}: {result}")
    if gpu:
        reason = kernels.unavailable_because(tuple(kernels.TRIALS))
        say(f"layers with a state (hybrid models): {reason or 'fla-core'}")
    return int(bool(failed))


def machine() -> str:
    """Return the name of the device and the versions of its libraries."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    packages = ("torch", "transformer-engine")
    libraries = [f"{name} {version}" for name in packages if (version := version_of(name))]
    return f"{device}; {', '.join(libraries)}, CUDA {torch.version.cuda}"


def matrix_in(folder: Path, names: Sequence[str], *, accelerate: str) -> Matrix:
    """Write packs of random documents to `folder`, and return a matrix with a cell per precision.

    Args:
        folder: The folder of the packs and the runs.
        names: Names of the precisions.
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
        cells={name: {"precision": name} for name in names},
        run_dir=f"{folder}/{{cell}}",
    )
    return make_matrix("doctor", settings)


def engine_of(name: str, reason: str | None) -> str:
    """Return the engine of the GEMMs in a precision, with the reason for an emulation.

    reason: the reason why the hardware does not support the precision, or None.
    """
    if reason:
        return f"emulation; it {reason}"
    return "transformer_engine" if name in QUANTIZED else "torch"
