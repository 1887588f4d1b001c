"""Print the lists of docs/developers/faults.md: faults, and the checks that catch them.

    python -m tests.pretrain.verify.mutations --jobs 2

Every fault of `faults.py` is made in every precision that can have it, with and without fused
layers. A fault of the update is also made for every way of storing weights. The audit and parity
run first, then two training steps with the check of the update. Correct models of 4, 12 and 28
layers and of four architectures must pass. This takes half an hour on two idle cores. The exit
status is 1 if a fault is not caught or a correct model is rejected.

With `--device cuda` the products are computed by Transformer Engine, and the faults of
`te_faults.py` are made too.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context

import torch

from foundation.errors import InputError
from pretrain.metrics.health import TrainingHalted
from pretrain.precision.selection import missing_on
from pretrain.precision.settings import PRECISIONS
from tests.multi import test_broken_ranks as broken_ranks
from tests.pretrain.conftest import on_a
from tests.pretrain.verify import (
    document_faults,  # noqa: F401
    later_call_faults,  # noqa: F401
    mixture_faults,  # noqa: F401
    sharding_faults,
    update_faults,  # noqa: F401
)
from tests.pretrain.verify.faults import FAULTS, Fault
from tests.pretrain.verify.small_runs import ARCHITECTURES, SmallRun, build_run

DEPTHS = (4, 12, 28)
NOTHING = "**nothing**"
UNFUSED = {"gemma", "mistral", "qwen3_moe"}  # architectures without fused layers
MARKS = {
    device: (f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
    for device, name in (("cpu", "faults"), ("cuda", "faults on a GPU"))
}


def caught_by(run: SmallRun, fault: Fault | None = None) -> tuple[str, ...]:
    """Return which of "audit", "parity" and "update" reject the run, or ("torch",).

    If the audit and parity accept the run, it trains two steps, which the update check or the audit
    may reject. ("torch",) means that torch's activation checkpointing rejected the recomputation.
    """
    objecting, entries = [], []
    with fault.entered(run) if fault else nullcontext():
        try:
            entries = run.audit()
            run.confirm(entries)
        except InputError:
            objecting.append("audit")
        # A recomputation whose tensors differ from the first pass in number or shape.
        except (RuntimeError, IndexError):
            if not (fault and fault.recompute):
                raise
            return ("torch",)
        if run.parity().failures:
            objecting.append("parity")
        try:
            if not objecting:
                run.train(entries)
        except (InputError, TrainingHalted) as error:
            objecting.append("update" if isinstance(error, TrainingHalted) else "audit")
    return tuple(objecting)


def configurations(
    device: str, kinds: Sequence[str] = ("qwen3",)
) -> Iterator[tuple[str, str, bool]]:
    """Yield architecture, precision and whether layers are fused.

    Emulated precisions are never fused. On a GPU, FP32 is not fused.
    """
    for kind in kinds:
        for name, precision in PRECISIONS.items():
            yield kind, name, False
            fuses = (
                precision.compute_dtype == "bfloat16"
                if device == "cuda"
                else not precision.quantized
            )
            if fuses and kind not in UNFUSED:
                yield kind, name, True


def faults_on(device: str) -> list[Fault]:
    """Return all faults. On a GPU this includes the faults of Transformer Engine."""
    if device == "cuda":
        importlib.import_module("tests.pretrain.verify.te_faults")
    return FAULTS


def precisions_on(device: str) -> list[str]:
    """Return the precisions that `device` can compute or, on a CPU, emulate."""
    missing = missing_on(device)
    return [
        name
        for name, precision in PRECISIONS.items()
        if device == "cpu" or not (precision.quantized and missing(precision))
    ]


def named(checks: Sequence[str]) -> str:
    """Return the checks as the page names them. "both" is the audit and parity."""
    return " and ".join(checks).replace("audit and parity", "both")


def who_catches(fault: Fault, precision: str, device: str = "cpu") -> str | None:
    """Return the checks that catch a fault as the page names them, e.g. "both, parity (fused)".

    Returns None if no run in `precision` can have the fault.
    """
    catchers = []
    with on_a(device) as accelerator:
        for _, name, fused in configurations(device, (fault.kind,)):
            for weights in fault.weights if name == precision else ():
                if weights != "fp32" and PRECISIONS[name].compute_dtype == "float32":
                    continue  # Only the weights would be rounded.
                run = build_run(accelerator, name, fused=fused, weights=weights, **fault.options)
                if fault.applies(run):
                    checks = named(caught_by(run, fault)) or NOTHING
                    catchers += (
                        [f"{checks} (fused)" if fused else checks] if checks not in catchers else []
                    )
    return ", ".join(catchers) or None


Row = tuple[str, str, str]  # A fault, the precisions that can have it, and what found it.


def compact(what: str, cells: Sequence[str | None], precisions: Sequence[str]) -> Row:
    """Return the row of a fault.

    cells: for each of `precisions`, the checks that found the fault, or None if it is impossible.
        The most common cell comes first. The others follow, each with its precisions.
    """
    by_cell: dict[str, list[str]] = {}
    for name, cell in zip(precisions, cells, strict=True):
        if cell:
            by_cell.setdefault(cell, []).append(name)
    usual, *others = sorted(by_cell, key=lambda cell: -len(by_cell[cell]))
    found = [usual, *(f"{', '.join(by_cell[cell])}: {cell}" for cell in others)]
    possible = [name for name, cell in zip(precisions, cells, strict=True) if cell]
    where = "all" if len(possible) == len(precisions) else ", ".join(possible)
    low = ", ".join(name for name in precisions if PRECISIONS[name].quantized)
    return what, where.replace(low, "low") if low else where, "; ".join(found)


def lists(rows: Sequence[Row]) -> str:
    """Return a list of faults for each set of precisions and of checks."""
    groups: dict[tuple[str, str], list[str]] = {}
    for what, where, found in rows:
        groups.setdefault((where, found), []).append(f"* {what}")
    return "\n\n".join(
        "\n".join([f"**{where}**, {found}:", "", *items])
        for (where, found), items in groups.items()
    )


def read_lists(text: str, precisions: Sequence[str]) -> dict[tuple[str, str], str]:
    """Return the checks in the text of `lists`, by fault and precision."""
    low = [name for name in precisions if PRECISIONS[name].quantized]
    cells: dict[tuple[str, str], str] = {}
    for where, found, items in re.findall(r"\*\*(.+?)\*\*, (.+):\n\n((?:\* .+\n?)+)", text):
        usual, *others = found.split("; ")
        names = ", ".join(precisions) if where == "all" else where.replace("low", ", ".join(low))
        for what in re.findall(r"\* (.+)", items):
            cells |= {(what, name): usual for name in names.split(", ")}
            for other in others:
                exceptions, _, checks = other.partition(": ")
                cells |= {(what, name): checks for name in exceptions.split(", ")}
    return cells


def row_of(number: int, precisions: Sequence[str], device: str) -> Row | None:
    """Return the row of a fault, or None if it applies to no precision."""
    fault = faults_on(device)[number]
    cells = [who_catches(fault, name, device) for name in precisions]
    return compact(fault.what, cells, precisions) if any(cells) else None


def objections_to(
    layers: int, kind: str, precision: str, fused: bool, device: str = "cpu"
) -> tuple[str, ...]:
    """Return the checks that reject a correct run."""
    packs = 2 if layers == DEPTHS[0] else 1
    with on_a(device) as accelerator:
        run = build_run(
            accelerator,
            precision,
            kind,
            layers=layers,
            fused=fused,
            recompute=layers == DEPTHS[1],
            packs_a_microbatch=packs,
        )
        return caught_by(run)


def rows_of_ranks(precisions: Sequence[str]) -> list[Row]:
    """Return the rows of faults that need several processes."""
    rows = []
    of_topologies = [broken_ranks.start(topology, *precisions) for topology in ("ddp", "fsdp2")]
    for failures_of in of_topologies:
        assert not any(failures_of.pop("nothing").values()), "parity rejects correct runs"
    for what in of_topologies[0]:
        is_found = {
            name: all(failures_of[what][name] for failures_of in of_topologies)
            for name in precisions
        }
        cells = ["parity" if is_found[name] else NOTHING for name in precisions]
        rows.append(compact(what, cells, precisions))
    found, _ = broken_ranks.printed_by_ranks(sharding_faults.find_faults, "fsdp2", precisions)
    assert not any(found.pop("nothing").values()), "the checks reject correct sharded runs"
    for what, checks in found.items():
        cells = [
            (named(checks[name]) or NOTHING) if name in checks else None for name in precisions
        ]
        rows.append(compact(what, cells, precisions))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=MARKS, default="cpu")
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, help="default: all that the device has"
    )
    parser.add_argument(
        "--depths",
        nargs="+",
        type=int,
        choices=DEPTHS,
        default=DEPTHS,
        help="layers of the correct models",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    arguments = parser.parse_args()
    device = arguments.device
    precisions = arguments.precisions or precisions_on(device)
    healthy = [
        (layers, kind, precision, fused)
        for layers in arguments.depths
        for kind, precision, fused in configurations(device, tuple(ARCHITECTURES))
        if precision in precisions
    ]
    with ProcessPoolExecutor(
        arguments.jobs,
        mp_context=get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        of_faults = pool.map(
            partial(row_of, precisions=precisions, device=device), range(len(faults_on(device)))
        )
        objections = list(
            pool.map(partial(objections_to, device=device), *zip(*healthy, strict=True))
        )
        rows = list(filter(None, of_faults))
    rows += rows_of_ranks(precisions) if device == "cpu" else []
    depths = ", ".join(map(str, arguments.depths))
    passed = f"{objections.count(())} of {len(healthy)} pass"
    print(lists(rows))
    print(f"\nWithout a fault, {depths} layers of {', '.join(ARCHITECTURES)}: {passed}")
    return int(any(NOTHING in found for _, _, found in rows) or any(objections))


if __name__ == "__main__":
    sys.exit(main())
