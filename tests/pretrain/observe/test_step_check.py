"""The check of the update accepts two correct steps and names every fault of the update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import nn

from pretrain.metrics.health import TrainingHalted
from pretrain.observe.update_check import VALUES, one_of_each_shape, some_values
from pretrain.optimizer import muon
from pretrain.optimizer.muon import MatrixWeight
from tests.pretrain.verify.faults import PENALIZED, Fault
from tests.pretrain.verify.mutations import FAULTS
from tests.pretrain.verify.small_runs import CLIP, LENGTH, MIXTURES, SmallRun, build_run, step_of

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
}
STALE = "products use weights from before the last update: "
BY_NAME = {fault.what: fault for fault in FAULTS}


@pytest.fixture
def build(accelerator: Accelerator) -> Callable[..., SmallRun]:
    """Return a function that builds a run of one layer, in BF16 if its weights are BF16."""

    def build(weights: str = "fp32", kind: str = "qwen3", **options: Any) -> SmallRun:
        precision = "fp32" if weights == "fp32" else "bf16"
        return build_run(accelerator, precision, kind, layers=1, weights=weights, **options)

    return build


@pytest.mark.parametrize(
    ("weights", "kind", "options"),
    [
        ("fp32", "qwen3", {"clip": None}),
        ("fp32", "qwen3", {"clip": CLIP}),
        ("bf16", "qwen3", {"clip": CLIP}),
        ("bf16_exact", "qwen3", {"clip": CLIP}),
        ("fp32", "qwen3", {"loss": PENALIZED}),
        ("fp32", "qwen3_moe", {"loss": PENALIZED}),
        ("fp32", "qwen3", {"optimizer": "muon"}),
        ("bf16_exact", "gpt2", {"optimizer": "muon"}),
        ("bf16", "qwen3_moe", {"optimizer": "muon"}),
        pytest.param("bf16_exact", "qwen3_moe", {"optimizer": "muon"}, marks=pytest.mark.nightly),
    ],
)
def test_a_correct_update_passes(weights, kind, options, build, monkeypatch):
    if "loss" in options:
        balance = {"router_aux_loss_coef": 0.5, "output_router_logits": True}
        monkeypatch.setitem(MIXTURES, "qwen3_moe", MIXTURES["qwen3_moe"] | balance)
    build(weights, kind, **options).train()


@pytest.mark.parametrize(
    ("packs", "labelled", "packs_a_microbatch"),
    [
        ([0, 1, 2, 3], [0], 1),
        ([0, 1, 2, 3], [3], 1),
        ([0, 1, 2, 3], [1, 2, 3], 1),
        ([0, 0, 0, 0], [0, 1, 2, 3], 1),
        ([0, 0, 1, 1], [0, 1, 2, 3], 1),
        ([0, 1, 0, 1], [0, 1, 2, 3], 1),
        # The same packs in another order
        ([2, 3, 3, 2], [0, 1, 2, 3], 2),
    ],
)
def test_gradients_that_are_bf16_values_pass_if_microbatches_are_equal(
    packs: list[int], labelled: list[int], packs_a_microbatch: int, build: Callable
) -> None:
    """A microbatch without labels has no gradients, so it does not count."""
    run = build("bf16")
    chosen = [
        replace(run.packs[pack], trained=np.full(LENGTH, number in labelled))
        for number, pack in enumerate(packs)
    ]
    run.step = step_of(chosen, packs_a_microbatch)
    run.train()


@pytest.mark.parametrize(
    ("what", "line"),
    [
        ("the norm is not clipped", "momentum of 7 of 7 parameters"),
        ("each update is applied twice", "weights of a matrix in .*down_proj.weight"),
        ("an exact weight's low bits are dropped", "weights of a matrix in .*down_proj.weight"),
    ],
)
def test_a_fault_of_muons_update_is_named(what: str, line: str, build: Callable) -> None:
    run = build("bf16_exact", optimizer="muon")
    with BY_NAME[what].entered(run), pytest.raises(TrainingHalted, match=line):
        run.train()


@pytest.mark.parametrize(
    ("key", "line"),
    [("momentum", "Muon's momentum is 0.5, not 0.95"), ("lr_ratio", "Muon's lr is 0.0005, not")],
)
def test_a_wrong_setting_of_muon_is_named(key: str, line: str, build: Callable) -> None:
    run = build(optimizer="muon")
    run.optimizer.param_groups[-1][key] = 0.5
    with pytest.raises(TrainingHalted, match=line):
        run.train()


@pytest.mark.parametrize(
    ("sides", "name"), [((256, 128), "(gate|up)_proj"), ((128, 256), "down_proj")]
)
def test_a_wrong_scale_of_one_shape_is_named_in_the_first_step(sides, name, build, monkeypatch):
    scale = muon.SCALES["match_rms_adamw"]
    wrong = {"match_rms_adamw": lambda *shape: scale(*shape) * (2 if shape == sides else 1)}
    monkeypatch.setattr(muon, "SCALES", wrong)
    with pytest.raises(TrainingHalted, match=rf"^step 1: (?s:.)*matrix in .*{name}\.weight"):
        build(optimizer="muon").train()


def test_another_order_of_roundings_in_muon_passes(build, monkeypatch):
    exact = muon.orthogonalize
    monkeypatch.setattr(muon, "orthogonalize", lambda matrices: exact(1.05 * matrices))
    build(kind="qwen3_moe", optimizer="muon").train()


def test_later_checks_compare_every_value_and_every_matrix() -> None:
    values = torch.arange(3 * VALUES)
    assert torch.cat([some_values(values, updates) for updates in range(3)]).unique().equal(values)
    shapes = [(8, 8)] * 12 + [(24, 8)] * 12 + [(8, 32)] * 12
    hidden = [MatrixWeight(nn.Parameter(torch.empty(shape, device="meta")), -1) for shape in shapes]
    checked = [one_of_each_shape(hidden, updates) for updates in range(0, 10_000, 100)]
    assert {len(items) for items in checked} == {3}
    assert len({item for items in checked for item in items}) == len(hidden)


def assert_refused(fault: Fault, run: SmallRun) -> None:
    assert fault.applies(run)
    with fault.entered(run), pytest.raises(TrainingHalted, match=LINES.get(fault.what, STALE)):
        run.train()


@pytest.mark.parametrize(("number", "what"), list(enumerate(LINES)))
def test_a_fault_of_the_update_is_named(number: int, what: str, build: Callable) -> None:
    """Every fault is tried with one way of storing weights. Together they cover all ways."""
    fault = BY_NAME[what]
    assert_refused(fault, build(fault.weights[number % len(fault.weights)], **fault.options))


# Copies that are cast, quantized with a history, in blocks, and transformed.
@pytest.mark.parametrize("precision", ["bf16", "delayed", "mxfp8", "nvfp4"])
def test_a_stale_copy_of_a_weight_is_found(precision: str, accelerator: Accelerator) -> None:
    options = {"weights": "bf16_exact", "scope": "linear+head"}
    if precision == "bf16":
        options = {"fused": True}
    build_run(accelerator, precision, layers=1, recompute=True, **options).train()
    run = build_run(accelerator, precision, layers=1, **options)
    assert_refused(BY_NAME["a weight's cached copy is stale in every second step"], run)
