"""The table of docs/precision.md that says which faults are caught, and by what:

    python -m tests.pretrain.verify.mutations --out docs/precision.md

Every fault of `faults.py` is made in every precision that it can be made in, with fused layers and without (fused layers of
quantized precisions need Transformer Engine, and so a GPU), and the audit and parity are asked. Unbroken models of 4, 12 and 28
layers and of four architectures must pass. Takes a quarter of an hour on one core; ends with status 1 if anything is not as it
should be.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

from accelerate import Accelerator
from torch.utils.checkpoint import CheckpointError

from foundation.errors import InputError
from pretrain.precision.registry import PRECISIONS
from tests.pretrain.verify.faults import FAULTS, Fault
from tests.pretrain.verify.small_runs import ARCHITECTURES, SmallRun, build_run, on_a_cpu

DEPTHS = (4, 12, 28)
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


def who_catches(accelerator: Accelerator, fault: Fault, precision: str) -> str | None:
    """For the table: "parity", "audit" or both, with fused layers and without; None where it cannot be made in the precision."""
    found = {}
    for _, name, fused in configurations():
        if name == precision:
            run = build_run(accelerator, name, fused=fused, recompute=fault.recompute)
            if fault.applies(run):
                found[fused] = " and ".join(caught_by(run, fault)) or "**nothing**"
    said = [found[False]] if False in found else []
    said += [f"{found[True]} (fused)"] if True in found and found[True] not in said else []
    return ", ".join(said) or None


def table(accelerator: Accelerator) -> tuple[str, bool]:
    """The rows in Markdown, and whether everything is as it should be."""
    lines = [f"| what is broken | {' | '.join(f'`{name}`' for name in PRECISIONS)} |", "| --- |" + " --- |" * len(PRECISIONS)]
    good = True
    for fault in FAULTS:
        said = [who_catches(accelerator, fault, name) for name in PRECISIONS]
        print(fault.what, said, flush=True)
        good = good and "**nothing**" not in " ".join(filter(None, said))
        lines.append(f"| {fault.what} | {' | '.join(each or '–' for each in said)} |")
    healthy, passed = 0, 0
    for layers in DEPTHS:
        for kind, precision, fused in configurations(tuple(ARCHITECTURES)):
            objected = caught_by(build_run(accelerator, precision, kind, layers=layers, fused=fused, recompute=layers > 4))
            print("nothing is broken", layers, kind, precision, fused, objected, flush=True)
            healthy, passed = healthy + 1, passed + (not objected)
    what = f"nothing: {', '.join(map(str, DEPTHS))} layers of {', '.join(ARCHITECTURES)}"
    lines.append(f"| {what} | {passed} of {healthy} models pass |" + " |" * (len(PRECISIONS) - 1))
    return "\n".join(lines), good and passed == healthy


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the page whose table is written anew; without, it is printed")
    arguments = parser.parse_args()
    with on_a_cpu() as accelerator:
        rows, good = table(accelerator)
    if arguments.out is None:
        print(rows)
    else:
        page = arguments.out.read_text(encoding="utf-8")
        before, after = page.split(BEGIN)[0], page.split(END)[1]
        arguments.out.write_text(f"{before}{BEGIN}\n\n{rows}\n\n{END}{after}", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
