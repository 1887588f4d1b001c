"""The update beside torch's: two healthy steps pass in every way to store weights, and each fault of `faults.py` is named."""

from __future__ import annotations

import pytest
from accelerate import Accelerator

from pretrain.metrics.health import TrainingHalted
from tests.pretrain.verify.faults import Fault
from tests.pretrain.verify.mutations import FAULTS
from tests.pretrain.verify.small_runs import CLIP, SmallRun, build_run

STALE = "a weight's copy is stale in every second step"
# What the message says of each.
LINES = {
    "the norm is not clipped": "exp_avg of",
    "moments are not corrected for their bias": "weights of",
    "each update is made twice": "updates are counted",
    "one weight is never updated": "weights of 1 of .*down_proj",
    "norms decay": "weight_decay is",
    "an exact weight's low bits are dropped": "weights of",
    "the last microbatch of a step is dropped": "labels were trained on",
    "gradients add up in BF16, not in FP32": "gradients are bfloat16",
    "FP32 sums of gradients are rounded to BF16": "gradients add up in BF16",
    "FP32 sums are rounded to BF16 before each microbatch": "gradients add up in BF16",
    "gradients are not cleared after a step": "gradients were not cleared",
    "a tenth of each gradient stays after a step": "gradients were not cleared",
    "a step is trained in evaluation mode": "modules are in evaluation mode",
    "moments are BF16, not FP32": "exp_avg are bfloat16",
    STALE: "products use weights from before the last update: ",
}
BY_NAME = {fault.what: fault for fault in FAULTS}


def built(accelerator: Accelerator, weights: str, **options: object) -> SmallRun:
    return build_run(
        accelerator, "fp32" if weights == "fp32" else "bf16", layers=1, weights=weights, **options
    )


@pytest.mark.parametrize(
    ("weights", "clip"), [("fp32", None), ("fp32", CLIP), ("bf16", CLIP), ("bf16_exact", CLIP)]
)
def test_a_healthy_update_is_the_one_that_torch_makes(
    accelerator: Accelerator, weights: str, clip: float | None
) -> None:
    built(accelerator, weights, clip=clip).train()


def refused(fault: Fault, run: SmallRun) -> None:
    assert fault.applies(run)
    with fault.entered(run), pytest.raises(TrainingHalted, match=LINES[fault.what]):
        run.train()


@pytest.mark.parametrize(
    ("number", "what"), list(enumerate(what for what in LINES if what != STALE))
)
def test_a_fault_in_the_update_is_named(accelerator: Accelerator, number: int, what: str) -> None:
    """Each in one way to store weights, and all ways among them; `tests.pretrain.verify.mutations` makes each in all."""
    weights = BY_NAME[what].weights
    refused(BY_NAME[what], built(accelerator, weights[number % len(weights)]))


# cast; with a history, in blocks, transformed
@pytest.mark.parametrize("precision", ["bf16", "delayed", "mxfp8", "nvfp4"])
def test_a_weights_copy_of_an_earlier_step_is_found_and_a_new_one_passes(
    precision: str, accelerator: Accelerator
) -> None:
    options = (
        {"fused": True}
        if precision == "bf16"
        else {"weights": "bf16_exact", "scope": "linear+head"}
    )
    build_run(accelerator, precision, layers=1, recompute=True, **options).train()
    refused(BY_NAME[STALE], build_run(accelerator, precision, layers=1, **options))
