"""Measure the rounding errors of the options of NVFP4 and MXFP8 on synthetic operands.

    python -m benchmarks.rounding_errors [--seeds 5] [--size 1024] [--out F]

An error is the norm of the difference between an operand before and after quantization, divided by
the norm of the operand. The operands are square matrices in BF16: Gaussian values, Student-t values
with 5 degrees of freedom, and Student-t values whose rows have very different magnitudes. A small
error does not prove a low loss in training. `python -m pretrain which` measures the loss.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributions import StudentT

from benchmarks.machine import ROOT, measured_on
from foundation.files import write_json
from pretrain.precision.formats.definition import Along, QuantizedPrecision, Role
from pretrain.precision.settings import LowPrecisionSettings, configured

RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "rounding_errors.json"
DEGREES = StudentT(5.0)
DISTRIBUTIONS: dict[str, Callable[[int], Tensor]] = {
    "gaussian": lambda size: torch.randn(size, size),
    "student-t": lambda size: DEGREES.sample((size, size)),
    "uneven rows": lambda size: DEGREES.sample((size, size)) * torch.exp2(2 * torch.randn(size, 1)),
}
# Map the name of each column of the table to the role of an operand and the axis of the sum.
OPERANDS: dict[str, tuple[Role, Along]] = {
    "weight": ("weight", "features"),
    "weight in dgrad": ("weight", "rows"),
    "input": ("input", "features"),
    "input in wgrad": ("input", "rows"),
    "gradient": ("grad_output", "features"),
    "gradient in wgrad": ("grad_output", "rows"),
}
NO_RHT: dict[str, Any] = {"disable_rht": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("nvfp4", {}),
    ("nvfp4", NO_RHT),
    ("nvfp4", {"disable_stochastic_rounding": True}),
    ("nvfp4", {"disable_2d_quantization": True}),
    ("nvfp4", {"nvfp4_4over6": "weights"}),
    ("nvfp4", {"nvfp4_4over6": "weights", "nvfp4_4over6_err_mode": "MSE"}),
    ("nvfp4", {"nvfp4_4over6": "weights", "nvfp4_4over6_e4m3_use_256": "none"}),
    ("nvfp4", {"nvfp4_4over6": "weights", "disable_2d_quantization": True}),
    ("nvfp4", {"nvfp4_4over6": "all", "disable_2d_quantization": True} | NO_RHT),
    ("nvfp4", {"row_scaled_activation": True} | NO_RHT),
    ("mxfp8", {}),
    ("mxfp8", {"enable_2d_quantization": True}),
]


def error_of(name: str, options: dict[str, Any], role: Role, along: Along, x: Tensor) -> float:
    """Return the relative rounding error of the operand x [rows, features]."""
    precision = configured(name, LowPrecisionSettings(**options))
    assert isinstance(precision, QuantizedPrecision)
    quantized = precision.quantizer(role, along)(x, None, None).dequantize()
    exact = x if along == "features" else x.t()
    transform = precision.transform(role) if along == "rows" else None
    exact = (exact if transform is None else transform(exact)).double()
    return ((quantized - exact).norm() / exact.norm()).item()


def measure(seeds: int, size: int) -> list[dict[str, Any]]:
    """Return a row of results for each distribution and case: the mean error of each operand."""
    rows = []
    for distribution, draw in DISTRIBUTIONS.items():
        matrices = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            matrices.append(draw(size).bfloat16())
        for name, options in CASES:
            errors = {
                operand: statistics.mean(error_of(name, options, *place, x) for x in matrices)
                for operand, place in OPERANDS.items()
            }
            rows.append(
                {"distribution": distribution, "precision": name, "options": options} | errors
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="matrices of each distribution")
    parser.add_argument("--size", type=int, default=1024, help="rows and columns of a matrix")
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file to write")
    arguments = parser.parse_args()
    rows = measure(arguments.seeds, arguments.size)
    print(f"{'relative error in percent':110}", *(f"{operand:>17}" for operand in OPERANDS))
    for row in rows:
        options = ", ".join(f"{key}={value}" for key, value in row["options"].items())
        label = f"{row['distribution']}: {row['precision']} {options}"
        print(f"{label:110}", *(f"{100 * row[operand]:17.2f}" for operand in OPERANDS))
    write_json(arguments.out, measured_on() | {"size": arguments.size, "rows": rows})


if __name__ == "__main__":
    main()
