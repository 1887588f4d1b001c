"""The check of the update accepts two correct steps and names every fault of the update."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from pretrain.metrics.health import TrainingHalted
from pretrain.observe.update_check import one_of_each_shape
from pretrain.optimizer import muon
from pretrain.optimizer.muon import Hidden
from tests.pretrain.verify.faults import Fault
from tests.pretrain.verify.mutations import FAULTS
from tests.pretrain.verify.small_runs import CLIP, MIXTURES, SmallRun, build_run, step_of
from tests.pretrain.verify.update_faults import PENALIZED

STALE = "a weight's cached copy is stale in every second step"
# Expected messages by fault
LINES = {
    "the norm is not clipped": "exp_avg of",
    "the second moment is not corrected for bias": "weights of",
    "each update is applied twice": "the optimizer has counted",
    "one weight is never updated": "weights of 1 of .*down_proj",
    "the weights of norms decay": "weight_decay is",
    "an exact weight's low bits are dropped": "weights of",
    "the last microbatch of a step is dropped": "labels were trained on",
    "gradients are accumulated in BF16, not in FP32": "gradients are bfloat16",
    "FP32 gradient sums are rounded to BF16": "are added up in BF16",
    "FP32 gradient sums are rounded to BF16 before each microbatch": "are added up in BF16",
    "gradients are not cleared after a step": "gradients were not cleared",
    "a tenth of each gradient remains after a step": "gradients were not cleared",
    "a step is trained in evaluation mode": "modules are in evaluation mode",
    "moments are BF16, not FP32": "exp_avg are bfloat16",
    "the loss of earlier steps is added to the loss that is logged": "losses to be logged",
    "the loss that is logged includes the penalty twice": "losses to be logged",
    "the loss that is logged is the last microbatch's": "losses to be logged",
    "Muon's update is 8 % too large": "step 1: (?s:.)*weights of a matrix in .*down_proj.weight",
    "Muon's weight decay is omitted": "step 1: (?s:.)*weight decay of a matrix in .*down_proj",
    "Muon's weight decay is multiplied by the scale of the update": "weight decay of a matrix in",
    "the momentum of one matrix of Muon stays zero": "momentum of 1 of 7 parameters: .*k_proj",
    STALE: "products use weights from before the last update: ",
}
BY_NAME = {fault.what: fault for fault in FAULTS}


def build(accelerator: Accelerator, weights: str, **options: object) -> SmallRun:
    return build_run(
        accelerator, "fp32" if weights == "fp32" else "bf16", layers=1, weights=weights, **options
    )


@pytest.mark.parametrize(
    ("weights", "clip"), [("fp32", None), ("fp32", CLIP), ("bf16", CLIP), ("bf16_exact", CLIP)]
)
def test_a_correct_update_passes(
    accelerator: Accelerator, weights: str, clip: float | None
) -> None:
    build(accelerator, weights, clip=clip).train()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_a_correct_update_with_penalty_and_router_loss_passes(
    kind: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    balance = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
    monkeypatch.setitem(MIXTURES, "qwen3_moe", MIXTURES["qwen3_moe"] | balance)
    build_run(accelerator, "fp32", kind, loss=PENALIZED).train()


@pytest.mark.parametrize("labelled", [[0], [3], [1, 2, 3]])
def test_gradients_of_one_labelled_microbatch_may_be_bf16_values(
    labelled: list[int], accelerator: Accelerator
) -> None:
    run = build_run(accelerator, "bf16")
    packs = [
        replace(pack, trained=np.full(len(pack.input_ids), number in labelled))
        for number, pack in enumerate(run.packs)
    ]
    run.step = step_of(packs, packs_a_microbatch=1)
    run.train()


@pytest.mark.parametrize("chosen", [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1]])
def test_equal_microbatches_pass(chosen: list[int], accelerator: Accelerator) -> None:
    run = build_run(accelerator, "bf16")
    run.step = step_of([run.packs[number] for number in chosen], packs_a_microbatch=1)
    run.train()


def test_microbatches_of_the_same_packs_in_another_order_pass(accelerator: Accelerator) -> None:
    run = build_run(accelerator, "bf16")
    first, second = run.packs[2:]
    run.step = step_of([first, second, second, first], packs_a_microbatch=2)
    run.train()


@pytest.mark.parametrize("weights", ["fp32", "bf16", "bf16_exact"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt2", "qwen3_moe"])
def test_a_correct_update_by_muon_passes(kind: str, weights: str, accelerator: Accelerator) -> None:
    run = build_run(
        accelerator,
        "fp32" if weights == "fp32" else "bf16",
        kind,
        layers=1,
        weights=weights,
        optimizer="muon",
    )
    run.train()


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("the norm is not clipped", "momentum of 7 of 7 parameters"),
        ("each update is applied twice", "weights of a matrix in .*down_proj.weight"),
        ("an exact weight's low bits are dropped", "weights of a matrix in .*down_proj.weight"),
    ],
)
def test_a_fault_of_muons_update_is_named(what: str, line: str, accelerator: Accelerator) -> None:
    run = build(accelerator, "bf16_exact", optimizer="muon")
    with BY_NAME[what].entered(run), pytest.raises(TrainingHalted, match=line):
        run.train()


@pytest.mark.parametrize(
    ("key", "line"),
    [("momentum", "Muon's momentum is 0.5, not 0.95"), ("lr_ratio", "Muon's lr is 0.0005, not")],
)
def test_a_wrong_setting_of_muon_is_named(key: str, line: str, accelerator: Accelerator) -> None:
    run = build(accelerator, "fp32", optimizer="muon")
    run.optimizer.param_groups[-1][key] = 0.5
    with pytest.raises(TrainingHalted, match=line):
        run.train()


@pytest.mark.parametrize(
    ("sides", "name"), [((256, 128), "(gate|up)_proj"), ((128, 256), "down_proj")]
)
def test_a_wrong_scale_of_one_shape_is_named_in_the_first_step(
    sides: tuple[int, int], name: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale = muon.SCALES["match_rms_adamw"]
    wrong = {"match_rms_adamw": lambda *shape: scale(*shape) * (2 if shape == sides else 1)}
    monkeypatch.setattr(muon, "SCALES", wrong)
    with pytest.raises(TrainingHalted, match=rf"^step 1: (?s:.)*matrix in .*{name}\.weight"):
        build(accelerator, "fp32", optimizer="muon").train()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_another_order_of_roundings_in_muon_passes(
    kind: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = muon.orthogonalize
    monkeypatch.setattr(muon, "orthogonalize", lambda matrices: exact(1.05 * matrices))
    build_run(accelerator, "fp32", kind, layers=1, optimizer="muon").train()


def test_later_checks_compare_every_matrix() -> None:
    shapes = [(8, 8)] * 12 + [(24, 8)] * 12 + [(8, 32)] * 12
    hidden = [Hidden(nn.Parameter(torch.empty(shape, device="meta")), 1) for shape in shapes]
    checked = [one_of_each_shape(hidden, updates) for updates in range(0, 10_000, 100)]
    assert {len(items) for items in checked} == {3}
    assert len({item for items in checked for item in items}) == len(hidden)


def assert_refused(fault: Fault, run: SmallRun) -> None:
    assert fault.applies(run)
    with fault.entered(run), pytest.raises(TrainingHalted, match=LINES[fault.what]):
        run.train()


@pytest.mark.parametrize(
    ("number", "what"), list(enumerate(what for what in LINES if what != STALE))
)
def test_a_fault_of_the_update_is_named(accelerator: Accelerator, number: int, what: str) -> None:
    """Every fault is tried with one way of storing weights, so that together they cover all ways.

    `tests.pretrain.verify.mutations` tries every fault with all ways.
    """
    fault = BY_NAME[what]
    weights = fault.weights[number % len(fault.weights)]
    assert_refused(fault, build(accelerator, weights, **fault.options))


# Copies that are cast, quantized with a history, in blocks, and transformed.
@pytest.mark.parametrize("precision", ["bf16", "delayed", "mxfp8", "nvfp4"])
def test_a_stale_copy_of_a_weight_is_found(precision: str, accelerator: Accelerator) -> None:
    options = (
        {"fused": True}
        if precision == "bf16"
        else {"weights": "bf16_exact", "scope": "linear+head"}
    )
    build_run(accelerator, precision, layers=1, recompute=True, **options).train()
    assert_refused(BY_NAME[STALE], build_run(accelerator, precision, layers=1, **options))
