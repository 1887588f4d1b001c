"""Prints the tables of docs/faults.md, which faults are caught and by what:

    python -m tests.pretrain.verify.mutations --jobs 2

Every fault of `faults.py` is made in every precision that it can be made in, with fused layers and without, one of the update in
every way to store weights. The audit and parity are asked, then the check of the update. Unbroken models of 4, 12 and 28 layers
and of four architectures must pass. Takes half an hour on two idle cores; ends with status 1 if anything is not as it should be.

With `--device cuda` precisions are the GPU's own, by Transformer Engine, and the faults of `te_faults.py` are made too.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context

import torch

from foundation.errors import InputError
from pretrain.metrics.health import TrainingHalted
from pretrain.precision.settings import PRECISIONS
from pretrain.precision.transformer_engine import unavailable_because
from tests.multi import test_broken_ranks as broken_ranks
from tests.pretrain.conftest import on_a
from tests.pretrain.verify import mixture_faults, update_faults  # noqa: F401
from tests.pretrain.verify.faults import FAULTS, Fault
from tests.pretrain.verify.small_runs import ARCHITECTURES, SmallRun, build_run

DEPTHS = (4, 12, 28)
NOTHING = "**nothing**"
UNFUSED = {"gemma", "mistral", "qwen3_moe"}  # of which no layer is fused
MARKS = {
    device: (f"<!-- {name}: begin -->", f"<!-- {name}: end -->")
    for device, name in (("cpu", "faults"), ("cuda", "faults on a GPU"))
}


def caught_by(run: SmallRun, fault: Fault | None = None) -> tuple[str, ...]:
    """Of "audit" and "parity", who objects to the run, with the fault if there is one; what they pass is trained for two steps,
    to which the "update" check may object, or the audit."""
    objecting, entries = [], []
    with fault.entered(run) if fault else nullcontext():
        try:
            entries = run.audit()
            run.confirm(entries)
        except InputError:
            objecting.append("audit")
        # what is recomputed has other shapes, or keeps other tensors
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
    """Kind, precision, and whether layers are fused. What is emulated is not, and Transformer Engine fuses in BF16 alone."""
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
    """All of them, those of Transformer Engine where it is."""
    if device == "cuda":
        importlib.import_module("tests.pretrain.verify.te_faults")
    return FAULTS


def precisions_on(device: str) -> list[str]:
    """Those whose products `device` has, or a CPU emulates."""
    return [
        name
        for name, each in PRECISIONS.items()
        if device == "cpu" or not (each.quantized and unavailable_because(each))
    ]


def who_catches(fault: Fault, precision: str, device: str = "cpu") -> str | None:
    """For the table: "parity", "audit" or both, with fused layers and without; None where it cannot be made in the precision."""
    catchers = []
    with on_a(device) as accelerator:
        for _, name, fused in configurations(device, (fault.kind,)):
            for weights in fault.weights if name == precision else ():
                if weights != "fp32" and PRECISIONS[name].compute_dtype == "float32":
                    continue  # which would round nothing but the weights
                run = build_run(accelerator, name, fused=fused, weights=weights, **fault.options)
                if fault.applies(run):
                    who = " and ".join(caught_by(run, fault)) or NOTHING
                    catchers += [f"{who} (fused)" if fused else who] if who not in catchers else []
    return ", ".join(catchers) or None


def row_of(number: int, precisions: Sequence[str], device: str) -> str | None:
    """The row of a fault; None where it can be made in no precision."""
    fault = faults_on(device)[number]
    cells = [who_catches(fault, name, device) for name in precisions]
    return f"| {fault.what} | {' | '.join(each or '–' for each in cells)} |" if any(cells) else None


def objections_to(
    layers: int, kind: str, precision: str, fused: bool, device: str = "cpu"
) -> tuple[str, ...]:
    """To a run in which nothing is broken."""
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


def rows_of_ranks(precisions: Sequence[str]) -> list[str]:
    """Of the faults that need several processes, under DDP and FSDP2, in every precision."""
    rows = []
    for topology in ("ddp", "fsdp2"):
        failures = broken_ranks.start(topology, *precisions)
        assert not any(failures.pop("nothing").values()), (
            f"{topology}: parity objects to unbroken runs"
        )
        for what, by_precision in failures.items():
            cells = ["parity" if by_precision[name] else NOTHING for name in precisions]
            rows.append(f"| {what} ({topology}) | {' | '.join(cells)} |")
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=MARKS, default="cpu")
    parser.add_argument(
        "--precisions", nargs="+", choices=PRECISIONS, help="all that the device has, if not said"
    )
    parser.add_argument(
        "--depths",
        nargs="+",
        type=int,
        choices=DEPTHS,
        default=DEPTHS,
        help="of the unbroken models",
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    arguments = parser.parse_args()
    device, precisions = arguments.device, arguments.precisions or precisions_on(arguments.device)
    healthy = [
        (n, *each)
        for n in arguments.depths
        for each in configurations(device, tuple(ARCHITECTURES))
        if each[1] in precisions
    ]
    rows = [
        f"| what is broken | {' | '.join(f'`{name}`' for name in precisions)} |",
        "| --- |" + " --- |" * len(precisions),
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
        rows += filter(None, of_faults)
    rows += rows_of_ranks(precisions) if device == "cpu" else []
    what = f"nothing: {', '.join(map(str, arguments.depths))} layers of {', '.join(ARCHITECTURES)}"
    rows.append(
        f"| {what} | {objections.count(())} of {len(healthy)} pass |" + " |" * (len(precisions) - 1)
    )
    print("\n".join(rows))
    return int(any(NOTHING in row for row in rows) or any(objections))


if __name__ == "__main__":
    sys.exit(main())
