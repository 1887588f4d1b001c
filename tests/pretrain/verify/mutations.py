"""The table of docs/precision.md that says which faults are caught, and by what:

    python -m tests.pretrain.verify.mutations --out docs/precision.md

Every fault of `faults.py` is made in every precision that it can be made in, with fused layers and without (fused layers of
quantized precisions need Transformer Engine, and so a GPU), and the audit and parity are asked. Unbroken models of 4, 12 and 28
layers and of four architectures must pass. Takes half an hour on two idle cores; ends with status 1 if anything is not as it
should be.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
from torch.utils.checkpoint import CheckpointError

from foundation.errors import InputError
from pretrain.precision.registry import PRECISIONS
from tests.multi import broken_ranks
from tests.pretrain.verify.faults import FAULTS, Fault
from tests.pretrain.verify.small_runs import ARCHITECTURES, SmallRun, build_run, on_a_cpu

DEPTHS = (4, 12, 28)
NOTHING = "**nothing**"
UNFUSED = {"gemma"}  # of which no layer has a fused form
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


def caught_by(run: SmallRun, fault: Fault | None = None) -> tuple[str, ...]:
    """Of "audit" and "parity", who objects to the run, with the fault if there is one."""
    found = []
    with fault.entered(run) if fault else nullcontext():
        try:
            run.confirm(run.audit())
        except InputError:
            found.append("audit")
        except CheckpointError:  # what is recomputed has other shapes
            return ("torch",)
        if run.parity().failures:
            found.append("parity")
    return tuple(found)


def configurations(kinds: Sequence[str] = ("qwen3",)) -> Iterator[tuple[str, str, bool]]:
    """Kind, precision, and whether layers are fused."""
    for kind in kinds:
        for name, precision in PRECISIONS.items():
            yield kind, name, False
            if not precision.quantized and kind not in UNFUSED:
                yield kind, name, True


def who_catches(fault: Fault, precision: str) -> str | None:
    """For the table: "parity", "audit" or both, with fused layers and without; None where it cannot be made in the precision."""
    found = {}
    with on_a_cpu() as accelerator:
        for _, name, fused in configurations():
            if name == precision:
                run = build_run(accelerator, name, fused=fused, recompute=fault.recompute)
                if fault.applies(run):
                    found[fused] = " and ".join(caught_by(run, fault)) or NOTHING
    said = [found[False]] if False in found else []
    said += [f"{found[True]} (fused)"] if True in found and found[True] not in said else []
    return ", ".join(said) or None


def row_of(number: int, precisions: Sequence[str]) -> str:
    """The row of a fault."""
    said = [who_catches(FAULTS[number], name) for name in precisions]
    return f"| {FAULTS[number].what} | {' | '.join(each or '–' for each in said)} |"


def objections_to(layers: int, kind: str, precision: str, fused: bool) -> tuple[str, ...]:
    """To a run in which nothing is broken."""
    packs = 2 if layers == DEPTHS[0] else 1
    with on_a_cpu() as accelerator:
        run = build_run(
            accelerator, precision, kind, layers=layers, fused=fused, recompute=layers == DEPTHS[1], packs_a_microbatch=packs
        )
        return caught_by(run)


def rows_of_ranks(precisions: Sequence[str]) -> list[str]:
    """Of the faults that need several processes, under DDP and FSDP2, in every precision."""
    rows = []
    for topology in ("ddp", "fsdp2"):
        for what, found in broken_ranks.start(topology, *precisions).items():
            if what == "nothing":
                objected = [name for name, failures in found.items() if failures]
                assert not objected, f"{topology}: parity objects to unbroken runs in {objected}"
                continue
            rows.append(f"| {what} ({topology}) | {' | '.join('parity' if found[name] else NOTHING for name in precisions)} |")
    return rows


def table(jobs: int, precisions: Sequence[str], depths: Sequence[int]) -> tuple[str, bool]:
    """The rows in Markdown, and whether everything is as it should be."""
    unbroken = [each for each in configurations(tuple(ARCHITECTURES)) if each[1] in precisions]
    healthy = [(layers, *each) for layers in depths for each in unbroken]
    lines = [f"| what is broken | {' | '.join(f'`{name}`' for name in precisions)} |", "| --- |" + " --- |" * len(precisions)]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        rows, objections = (
            pool.map(partial(row_of, precisions=precisions), range(len(FAULTS))),
            pool.map(objections_to, *zip(*healthy, strict=True)),
        )
        for row in rows:
            print(row, flush=True)
            lines.append(row)
        passed = 0
        for configuration, objected in zip(healthy, objections, strict=True):
            print("nothing is broken", *configuration, objected or "passes", flush=True)
            passed += not objected
    lines += rows_of_ranks(precisions)
    what = f"nothing: {', '.join(map(str, depths))} layers of {', '.join(ARCHITECTURES)}"
    lines.append(f"| {what} | {passed} of {len(healthy)} pass |" + " |" * (len(precisions) - 1))
    text = "\n".join(lines)
    return text, NOTHING not in text and passed == len(healthy)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the page whose table is written anew; without, it is printed")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--depths", nargs="+", type=int, choices=DEPTHS, default=DEPTHS, help="of the unbroken models")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    arguments = parser.parse_args()
    rows, good = table(arguments.jobs, arguments.precisions, arguments.depths)
    if arguments.out is None:
        print(rows)
    else:
        page = arguments.out.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        command = shlex.join(["python", "-m", "tests.pretrain.verify.mutations", *sys.argv[1:]])
        text = f"{before}{BEGIN}\n```bash\n{command}\n```\n\n{rows}\n\n{END}{after}"
        arguments.out.write_text(text, encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
