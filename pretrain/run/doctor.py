"""Which precision works on this machine, on what, and how fast for one layer: `python -m pretrain doctor`.

    python -m pretrain doctor                                   a table in about a minute
    python -m pretrain doctor --recipe recipes/my_model.yaml    for the layers of that model
    python -m pretrain doctor --full --out doctor.md            all that can be proven here, in one file (docs/b200.md)

Libraries say that a device has a precision, and then its product fails: so one is tried.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foundation.command import CommandParser, number
from foundation.errors import InputError
from foundation.files import check_replaceable
from foundation.tables import UNKNOWN, on_screen
from foundation.units import three_digits
from pretrain.precision.registry import PRECISIONS
from pretrain.run.examination import DoctorReport, examine_fully
from pretrain.run.processes import MARK, Finding, Process, WorkerPool, told, wait_for_turn
from pretrain.run.trial import FAILED, PASSED, TIMEOUT, DoctorSetup, Machine, check, describe, examine, machine, measure, plain


@dataclass
class Row:
    """A precision in the table."""

    name: str
    on: str = "nothing"
    why: str = ""  # not on hardware, or not at all
    findings: tuple[Finding, ...] = ()

    def cells(self) -> tuple[str, ...]:
        by_part = {finding["part"]: finding for finding in self.findings if finding["status"] == PASSED}
        timed, near = by_part.get("speed of a layer"), by_part.get("against FP32")
        ms = three_digits(timed["ms"]) if timed else UNKNOWN
        rate = f"{timed['tokens_per_second']:,.0f}" if timed else UNKNOWN
        kernels = [finding["agrees"] for finding in self.findings if "agrees" in finding]
        agree = f"{sum(kernels)} of {len(kernels)} kernels" if kernels else UNKNOWN
        return self.name, self.on, ms, rate, agree, f"{near['gradient_error']:.1%}" if near else UNKNOWN, self.why


HEADER = ("precision", "computes on", "ms", "tokens/s", "agree", "off FP32", "why not on hardware")


def row_of(setup: DoctorSetup, pool: WorkerPool, name: str, process: Process | None, known: Machine) -> Row:
    """Returns the row of a precision: what it does on hardware where it works there, else emulated, else why it does not."""
    version = known["environment"]["packages"].get("transformer-engine")
    quantized = PRECISIONS[name].quantized
    why = known["missing"].get(name)
    row = Row(name, why=why or "")
    for way in ["emulation"] if why else ["transformer_engine", "emulation"] if quantized else ["torch"]:
        findings: list[Finding] = []
        check(setup, name, way, process, full=False, found=findings.append)
        if not any(finding["status"] == FAILED for finding in findings):
            measure(pool, process, findings.append)
        failed = [finding for finding in findings if finding["status"] == FAILED]
        on = {"transformer_engine": f"hardware (TE {version})", "torch": f"torch {torch.__version__}"}.get(way, way)
        if not failed:
            return Row(name, on, row.why, tuple(findings))
        reason = "; ".join(dict.fromkeys(f"{finding['part']}: {finding['said']}" for finding in failed))
        row = Row(name, "nothing", "; ".join(filter(None, (row.why, f"{way} fails: {reason}"))), tuple(findings))
        if process and way == "transformer_engine":
            process.end()
            process = pool.start()
    return row


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("python -m pretrain doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, help="whose layers are tried; default: Qwen3-1.7B's on a GPU, tiny ones on a CPU")
    timed = "of a timed forward and backward, at least: in whole packs, two or more"
    parser.add_argument("--tokens", type=number(1, whole=True), help=timed)
    parser.add_argument("--precisions", type=lambda text: text.split(","), metavar="A,B", help="only these")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, although there is a GPU")
    parser.add_argument("--full", action="store_true", help="operands bit for bit, parity, resuming, ten steps too; writes --out")
    parser.add_argument("--out", type=Path, help="the file of --full; default doctor.md")
    parser.add_argument("--try", nargs=2, dest="only", metavar=("PRECISION", "BACKEND"), help=argparse.SUPPRESS)
    parser.add_argument("--train", nargs="+", metavar="ARGUMENT", help=argparse.SUPPRESS)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_intermixed_args(arguments)
    if unknown := [name for name in parsed.precisions or () if name not in PRECISIONS]:
        raise InputError(f"--precisions: no {', '.join(unknown)} among {', '.join(PRECISIONS)}")
    if parsed.out and not parsed.full:
        raise InputError(f"--out {parsed.out}: is the file of --full; add that, or leave it out")
    parsed.out = parsed.out or Path("doctor.md")
    if parsed.full and not parsed.only:
        check_replaceable(parsed.out)
    return parsed


def main(arguments: list[str]) -> int:
    """Print the table; the status is 1 where something fails that should work."""
    parsed = parse(arguments)
    if parsed.wait:
        return as_told()
    began = time.monotonic()
    setup = DoctorSetup.of(parsed)
    precisions = list(dict.fromkeys(parsed.precisions or PRECISIONS))
    with WorkerPool(gpu=setup.device.type == "cuda") as pool:
        processes: dict[str, Process | None] = dict.fromkeys(precisions)
        if pool.gpu:  # this process must hold no memory there, and outlive what fails
            describer, said = pool.start(), []
            processes = {name: pool.start() for name in precisions}
            if ended := describer.tell(["--machine"], TIMEOUT, said.append):
                raise InputError(f"this machine cannot even be described: its process {ended}")
            known: Machine = said[0]
        else:
            known = machine("cpu")
        if parsed.full:
            return examine_fully(DoctorReport.of(setup, known, parsed.out, began), setup, pool, processes)
        rows: dict[str, Row] = {}

        def look(name: str) -> None:
            rows[name] = row = row_of(setup, pool, name, processes[name], known)
            print(f"{time.monotonic() - began:4.0f} s  {name}: {row.on}", file=sys.stderr, flush=True)

        pool.each(look, precisions)
    print("\n".join(describe(setup, known)) + "\n")
    print(on_screen(HEADER, [rows[name].cells() for name in precisions], names=2))
    for name in precisions:
        for finding in rows[name].findings:
            if not finding.get("agrees", True):
                print(f"{name}: the kernel `{finding['part']}` {finding['said']}")
    return int(any(row.on == "nothing" for row in rows.values()))


def as_told() -> int:
    """Do what the doctor that has started this process tells it: describe the machine, try a precision, or train."""
    if (order := told()) is None:
        return 0
    arguments, train = order
    parsed = parse(arguments)
    if parsed.train:
        sys.argv = ["train_accelerate.py", *parsed.train]
        return train()
    found = (
        [machine("cuda")]
        if parsed.machine
        else examine(DoctorSetup.of(parsed), *parsed.only, full=parsed.full, wait=wait_for_turn)
    )
    for finding in found:
        print(MARK + json.dumps(plain(finding)), flush=True)
    return 0
