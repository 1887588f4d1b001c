"""Which precision works on this machine, on what, and how fast for one layer: `python -m pretrain doctor`.

    python -m pretrain doctor                                   a table in some minutes
    python -m pretrain doctor --recipe recipes/my_model.yaml    for the layers of that model
    python -m pretrain doctor --full --out doctor.md            all that can be proven here, in one file (docs/b200.md)

Libraries say that a device has a precision, and then its product fails: so one is tried.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from foundation.errors import InputError
from pretrain.compare.report import UNKNOWN, markdown
from pretrain.precision.registry import PRECISIONS
from pretrain.run.examination import examine_fully
from pretrain.run.trial import (
    FAILED,
    MARK,
    PASSED,
    TIMEOUT,
    Finding,
    Patient,
    collect,
    describe,
    examine,
    in_process,
    machine,
    plain,
)


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
        ms = f"{timed['ms']:.2f}" if timed else UNKNOWN
        rate = f"{timed['tokens_per_second']:,.0f}" if timed else UNKNOWN
        kernels = [finding for finding in self.findings if "errors" in finding]
        wrong = [finding["part"] for finding in kernels if "disagrees" in finding["said"] or "fails" in finding["said"]]
        agree = f"{len(kernels) - len(wrong)} of {len(kernels)} kernels" if kernels else UNKNOWN
        return self.name, self.on, ms, rate, agree, f"{near['gradient_error']:.1%}" if near else UNKNOWN, self.why


HEADER = ("precision", "computes on", "ms", "tokens/s", "agree", "off FP32", "why not on hardware")


def rows_of(patient: Patient, precisions: Sequence[str], found: Finding, arguments: Sequence[str]) -> Iterator[Row]:
    """A row a precision: on hardware where it works, else emulated, else the reason."""
    version = found["environment"]["packages"].get("transformer_engine")
    for name in precisions:
        quantized = PRECISIONS[name].quantized
        why = found["missing"].get(name) if quantized else None
        ways = ["emulation"] if why else ["transformer_engine", "emulation"] if quantized else ["torch"]
        row = Row(name, why=why or "")
        for way in ways:
            findings: list[Finding] = []
            collect(patient, name, way, arguments, full=False, found=findings.append)
            failed = [finding for finding in findings if finding["status"] == FAILED]
            on = {"transformer_engine": f"hardware (TE {version})", "torch": f"torch {torch.__version__}"}.get(way, way)
            if not failed:
                row = Row(name, on, row.why, tuple(findings))
                break
            reason = "; ".join(dict.fromkeys(f"{finding['part']}: {finding['said']}" for finding in failed))
            row = Row(name, "nothing", "; ".join(filter(None, (row.why, f"{way} fails: {reason}"))), tuple(findings))
        yield row


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m pretrain doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, help="whose layers are tried; default: Qwen3-1.7B's on a GPU, tiny ones on a CPU")
    parser.add_argument("--tokens", type=int, help="of a timed forward and backward")
    parser.add_argument("--precisions", type=lambda text: text.split(","), metavar="A,B", help="only these")
    parser.add_argument("--cpu", action="store_true", help="on the CPU, although there is a GPU")
    parser.add_argument("--full", action="store_true", help="operands bit for bit, parity, resuming, ten steps too; writes --out")
    parser.add_argument("--out", type=Path, default=Path("doctor.md"), help="the file of --full")
    parser.add_argument("--try", nargs=2, dest="only", metavar=("PRECISION", "BACKEND"), help=argparse.SUPPRESS)
    parser.add_argument("--machine", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    if unknown := [name for name in parsed.precisions or () if name not in PRECISIONS]:
        raise InputError(f"--precisions: no {', '.join(unknown)} among {', '.join(PRECISIONS)}")
    if parsed.tokens is not None and parsed.tokens < 1:
        raise InputError("--tokens: a number of at least 1 is wanted")
    return parsed


def main(arguments: list[str]) -> int:
    """Print the table; the status is 1 where something fails that should work."""
    parsed = parse(arguments)
    if parsed.machine:
        print(MARK + json.dumps(machine("cuda")), flush=True)
        return 0
    patient = Patient.of(parsed)
    if parsed.only:
        for finding in examine(patient, *parsed.only, full=parsed.full):
            print(MARK + json.dumps(plain(finding)), flush=True)
        return 0
    found: list[Finding] = []
    if patient.device.type == "cuda":  # this process must hold no memory there, and outlive what fails
        if ended := in_process(["--machine"], TIMEOUT, found.append):
            raise InputError(f"this machine cannot even be described: its process {ended}")
    else:
        found.append(machine("cpu"))
    precisions = parsed.precisions or list(PRECISIONS)
    passed_on = [*(["--recipe", str(parsed.recipe.resolve())] if parsed.recipe else []), *(["--cpu"] if parsed.cpu else [])]
    passed_on += ["--tokens", str(patient.tokens)]
    if parsed.full:
        return examine_fully(patient, precisions, found[0], passed_on, parsed.out)
    rows = []
    for row in rows_of(patient, precisions, found[0], passed_on):
        rows.append(row)
        print(f"{row.name}: {row.on}", file=sys.stderr, flush=True)
    print("\n".join(describe(patient, found[0])) + "\n")
    print(markdown(HEADER, [row.cells() for row in rows], names=2))
    for row in rows:
        for finding in row.findings:
            if "errors" in finding and not finding["said"].startswith("agrees"):
                print(f"{row.name}: {finding['part']} {finding['said']}")
    return int(any(row.on == "nothing" for row in rows))
