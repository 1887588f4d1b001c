"""Inject faults into Transformer Engine's GEMMs: parity or the audit reports every one of them."""

from __future__ import annotations

import pytest
from accelerate import Accelerator

from tests.pretrain.verify.mutations import UNFUSED, caught_by, faults_on, objections_to
from tests.pretrain.verify.small_runs import ARCHITECTURES, build_run

pytest.importorskip("transformer_engine")

HOPPER = ("bf16", "delayed", "current", "block")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("precision", HOPPER)
def test_every_fault_is_caught(precision: str, fused: bool, accelerator: Accelerator) -> None:
    missed = []
    count = 0
    for fault in faults_on("cuda"):
        if fused and fault.kind in UNFUSED:
            continue
        for weights in fault.weights:
            run = build_run(accelerator, precision, fused=fused, weights=weights, **fault.options)
            if fault.applies(run):
                count += 1
                if not caught_by(run, fault):
                    missed.append((fault.what, weights))
    assert missed == []
    assert count >= (40 if precision == "bf16" else 50)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("precision", HOPPER)
def test_a_correct_run_passes(precision: str, kind: str) -> None:
    for fused in (False,) if kind in UNFUSED else (False, True):
        assert objections_to(4, kind, precision, fused, "cuda") == ()
