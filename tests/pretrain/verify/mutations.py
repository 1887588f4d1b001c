"""Print the lists of docs/developers/faults.md: faults, and the checks that catch them.

    python -m tests.pretrain.verify.mutations --jobs 2

Every fault of `faults.py` is made in every precision that can have it, with and without fused
layers. A fault of the update is also made for every way of storing weights. The audit and parity
run first, then two training steps with the check of the update. Correct models of 4, 12 and 28
layers and of four architectures must pass. This takes half an hour on two cores. The exit status is
1 if a fault is not caught or a correct model is rejected.

`--results FILE` keeps each result, so that an interrupted command continues. `--write` also writes
the lists to docs/developers/faults.md.

With `--device cuda` the products are computed by Transformer Engine, and the faults of
`te_faults.py` are made too.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from foundation.errors import InputError
from pretrain.precision.selection import support_check_on
from pretrain.precision.settings import PRECISIONS
from tests.multi import test_broken_ranks as broken_ranks
from tests.pretrain.conftest import on_a
from tests.pretrain.verify import (
    patched_faults,  # noqa: F401
    sharding_faults,
)
from tests.pretrain.verify.faults import FAULTS, Fault, caught_by
from tests.pretrain.verify.small_runs import ARCHITECTURES, build_run

PAGE = Path(__file__).parents[3] / "docs/developers/faults.md"
DEPTHS = (4, 12, 28)
NOTHING = "**nothing**"
UNFUSED = {"gemma", "mistral", "qwen3_moe"}  # architectures without fused layers
MARKS = {
    device: (f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
    for device, name in (("cpu", "faults"), ("cuda", "faults on a GPU"))
}


def configurations(
    device: str, kinds: Sequence[str] = ("qwen3",)
) -> Iterator[tuple[str, str, bool]]:
    """Yield architecture, precision and whether layers are fused.

    Emulated precisions are never fused. On a GPU, FP32 is not fused.
    """
    for kind in kinds:
        for name, precision in PRECISIONS.items():
            yield kind, name, False
            if device == "cuda":
                fuses = precision.compute_dtype == "bfloat16"
            else:
                fuses = not precision.quantized
            if fuses and kind not in UNFUSED:
                yield kind, name, True


def faults_on(device: str) -> list[Fault]:
    """Return all faults. On a GPU this includes the faults of Transformer Engine."""
    if device == "cuda":
        importlib.import_module("tests.pretrain.verify.te_faults")
    return FAULTS


def precisions_on(device: str) -> list[str]:
    """Return the precisions that `device` can compute or, on a CPU, emulate."""
    unsupported_because = support_check_on(device)
    return [
        name
        for name, precision in PRECISIONS.items()
        if device == "cpu" or not (precision.quantized and unsupported_because(precision))
    ]


def named(checks: Sequence[str]) -> str:
    """Return the checks as the page names them. "both" is the audit and parity."""
    return " and ".join(checks).replace("audit and parity", "both")


def who_catches(fault: Fault, precision: str, device: str = "cpu") -> str | None:
    """Return the checks that catch a fault as the page names them, e.g. "both, parity (fused)".

    Returns None if no run in `precision` can have the fault.
    """
    catchers: list[str] = []
    with on_a(device) as accelerator:
        for _, name, fused in configurations(device, (fault.kind,)):
            for weights in fault.weights if name == precision else ():
                if weights != "fp32" and PRECISIONS[name].compute_dtype == "float32":
                    continue  # Only the weights would be rounded.
                run = build_run(accelerator, name, fused=fused, weights=weights, **fault.options)
                if fault.applies(run):
                    checks = named(caught_by(run, fault)) or NOTHING
                    if checks not in catchers:
                        catchers.append(f"{checks} (fused)" if fused else checks)
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


def found_by_ranks(topology: str, precision: str) -> dict[str, str]:
    """Return the checks that find the faults of two ranks in parity, by fault."""
    failures_of = broken_ranks.start(topology, precision)
    assert not any(failures_of.pop("nothing").values()), "parity rejects correct runs"
    return {
        what: "parity" if failures[precision] else NOTHING for what, failures in failures_of.items()
    }


def found_in_shards(precision: str) -> dict[str, str]:
    """Return the checks that find the faults of sharded runs, by fault."""
    ranks = broken_ranks.printed_by_ranks(sharding_faults.find_faults, "fsdp2", [precision])
    checks_of = ranks[0]
    assert not any(checks_of.pop("nothing").values()), "the checks reject correct sharded runs"
    return {what: named(checks[precision]) or NOTHING for what, checks in checks_of.items()}


# A call: the name of a function above, followed by its arguments.
Call = tuple[Any, ...]


def calls(device: str, precisions: Sequence[str]) -> list[Call]:
    """Return the calls whose results make up the page. The longest calls come first."""
    correct = [
        ("objections_to", layers, kind, precision, fused, device)
        for layers in reversed(DEPTHS)
        for kind, precision, fused in configurations(device, tuple(ARCHITECTURES))
        if precision in precisions
    ]
    faults = [
        ("who_catches", fault.what, name, device)
        for fault in faults_on(device)
        for name in precisions
    ]
    ranks: list[Call] = []
    if device == "cpu":
        ranks += [("found_in_shards", name) for name in precisions]
        ranks += [
            ("found_by_ranks", kind, name) for kind in ("ddp", "fsdp2") for name in precisions
        ]
    return ranks + correct + faults


def result_of(call: Call) -> Any:
    """Return the result of a call, as JSON represents it."""
    name, *arguments = call
    if name == "who_catches":
        what, precision, device = arguments
        fault = next(fault for fault in faults_on(device) if fault.what == what)
        return who_catches(fault, precision, device)
    return json.loads(json.dumps(globals()[name](*arguments)))


def page(results: Mapping[Call, Any], device: str, precisions: Sequence[str]) -> str:
    """Return the text of docs/developers/faults.md between its marks."""
    cells: dict[str, dict[str, str | None]] = {}
    for fault in faults_on(device):
        cells[fault.what] = {
            name: results["who_catches", fault.what, name, device] for name in precisions
        }
    for (function, *arguments), found in results.items():
        if function in {"found_by_ranks", "found_in_shards"}:
            for what, checks in found.items():
                # A fault counts as found if all topologies find it.
                row = cells.setdefault(what, dict.fromkeys(precisions))
                row[arguments[-1]] = NOTHING if row[arguments[-1]] == NOTHING else checks
    rows = [
        compact(what, [row[name] for name in precisions], precisions)
        for what, row in cells.items()
        if any(row.values())
    ]
    correct = {call: found for call, found in results.items() if call[0] == "objections_to"}
    depths = ", ".join(map(str, DEPTHS))
    passed = f"{sum(not found for found in correct.values())} of {len(correct)} pass"
    models = ", ".join(ARCHITECTURES)
    return f"{lists(rows)}\n\nWithout a fault, {depths} layers of {models}: {passed}"


def versions() -> dict[str, str]:
    """Return the commit, marked if files have changed, and the version of torch."""
    command = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty"]
    commit = subprocess.run(command, cwd=PAGE.parent, capture_output=True, text=True, check=True)
    return {"commit": commit.stdout.strip(), "torch": torch.__version__.partition("+")[0]}


def read_results(file: Path | None) -> dict[Call, Any]:
    """Return the results in a file that `--results` names, and start the file if it is new.

    Raises InputError if a result is of another commit or of another torch.
    """
    if file is None:
        return {}
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(versions()) + "\n", encoding="utf-8")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if isinstance(line, dict) and line != versions():
            raise InputError(f"{file}: has results of {line}, not of {versions()}; delete the file")
    return {tuple(call): found for call, found in (line for line in lines if type(line) is list)}


def write_page(text: str, device: str) -> None:
    """Write the lists, and the versions that had these faults, between the marks of the page."""
    begin, end = MARKS[device]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(begin)
    after = rest.partition(end)[2]
    command = "python -m tests.pretrain.verify.mutations"
    if device != "cpu":
        command += f" --device {device}"
    made = f"At commit {versions()['commit']} with torch {versions()['torch']}:"
    parts = [begin, f"{made}\n\n```bash\n{command}\n```", text, end]
    PAGE.write_text(before + "\n\n".join(parts) + after, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=MARKS, default="cpu")
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, help="default: all that the device has"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument(
        "--results", type=Path, help="file of results, one a line; calls in it are not repeated"
    )
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    device = arguments.device
    precisions = arguments.precisions or precisions_on(device)
    needed = calls(device, precisions)
    results = read_results(arguments.results)
    missing = [call for call in needed if call not in results]
    with ProcessPoolExecutor(
        arguments.jobs,
        mp_context=get_context("spawn"),
        initializer=torch.set_num_threads,
        initargs=(1,),
    ) as pool:
        running = {pool.submit(result_of, call): call for call in missing}
        for future in as_completed(running):
            call = running[future]
            results[call] = future.result()
            if arguments.results:
                with arguments.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps([call, results[call]]) + "\n")
    text = page({call: results[call] for call in needed}, device, precisions)
    print(text)
    if arguments.write:
        write_page(text, device)
    is_rejected = any(results[call] for call in needed if call[0] == "objections_to")
    return int(NOTHING in text or is_rejected)


if __name__ == "__main__":
    sys.exit(main())
