"""Compare the AdamW kernel with torch's operations, bit for bit.

The tests run on a GPU, and on a CPU under Triton's interpreter (TRITON_INTERPRET=1).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pretrain.optimizer import adamw
from pretrain.optimizer.adamw import ExactAdamW, Hyperparameters, ParameterTensors
from pretrain.optimizer.adamw_kernel import prepare_update
from pretrain.optimizer.exact_weights import join, split
from tests.gpu.conftest import DEVICE

FP32 = torch.float32
BF16 = torch.bfloat16
# A single value, an odd tail, exact blocks, and several blocks with an aligned and with an
# unaligned tail.
SHAPES = ((1,), (27, 45), (1024,), (2064,), (3, 411))
# The first update has learning rate zero, as in a warm-up.
STEPS = [
    Hyperparameters(lr, 0.1, 0.9, 0.95, 1e-8, step)
    for step, lr in enumerate((0.0, 3e-3, 1e-5), start=1)
]


def reference(
    tensors: ParameterTensors, hyper: Hyperparameters, coefficient: float
) -> tuple[ParameterTensors, int]:
    """Return the update of torch's single-tensor AdamW on a CPU and the number of frozen updates.

    An update is frozen if the weight keeps its value although it should change. The square root is
    rounded to nearest.
    """
    old = ParameterTensors(*(None if tensor is None else tensor.cpu() for tensor in tensors))
    before = old.weight.float() if old.remainder is None else join(old.weight, old.remainder)
    gradient = old.gradient.float() * coefficient
    exp_avg = old.exp_avg.float().clone()
    exp_avg_sq = old.exp_avg_sq.float().clone()
    master = before * hyper.decay
    exp_avg.lerp_(gradient, 1 - hyper.beta1)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(gradient, gradient, value=1 - hyper.beta2)
    # torch.sqrt in FP32 may be off by one ulp on a CPU. Computed in FP64 and rounded, it is exact.
    denominator = exp_avg_sq.double().sqrt().float() / hyper.bias_correction2_sqrt + hyper.eps
    master.addcdiv_(exp_avg, denominator, value=-hyper.step_size)
    if old.remainder is None:
        weight = master.to(old.weight.dtype)
        remainder = None
        after = weight.float()
    else:
        weight, remainder = split(master)
        after = master
    frozen = torch.zeros(())
    if hyper.learning_rate:
        frozen = (after == before) & ((exp_avg != 0) | (before != 0))
    moments = (exp_avg.to(old.exp_avg.dtype), exp_avg_sq.to(old.exp_avg.dtype))
    return ParameterTensors(weight, remainder, old.gradient, *moments), int(frozen.sum())


@pytest.mark.parametrize(
    ("weight", "exact"),
    [(FP32, False), (BF16, True), (BF16, False)],
)
def test_updates_without_moments_equal_those_on_a_cpu(weight: torch.dtype, exact: bool) -> None:
    """These are the updates of Muon."""
    hyper = Hyperparameters(3e-3, 0.1, beta1=0, beta2=0, eps=0, step=1, scale=5.0)
    operands = [
        tensors._replace(gradient=tensors.gradient.bfloat16(), exp_avg=None, exp_avg_sq=None)
        for tensors in draw(weight, FP32, FP32, exact)
    ]
    on_cpu = [
        ParameterTensors(
            *(tensor if tensor is None else tensor.cpu().clone() for tensor in tensors)
        )
        for tensors in operands
    ]
    expected = adamw._update_all([(tensors, hyper) for tensors in on_cpu], None)
    frozen = prepare_update([(tensors, hyper) for tensors in operands], None)()
    assert int(frozen) == int(expected)
    for tensors, expected_tensors in zip(operands, on_cpu, strict=True):
        assert torch.equal(tensors.weight.cpu(), expected_tensors.weight)
        if exact:
            assert torch.equal(tensors.remainder.cpu(), expected_tensors.remainder)


def draw(
    weight: torch.dtype, gradient: torch.dtype, moment: torch.dtype, exact: bool
) -> list[ParameterTensors]:
    """Return operands of each shape: random weights with zeros among them, and empty moments."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for shape in SHAPES:
        master = torch.randn(shape, generator=generator)
        master.view(-1)[::7] = 0
        stored, remainder = split(master) if exact else (master.to(weight), None)
        first = torch.zeros(shape, dtype=moment)
        second = torch.zeros(shape, dtype=moment)
        tensors = (stored, remainder, gradients(shape, gradient, 0), first, second)
        drawn.append(
            ParameterTensors(*(None if tensor is None else tensor.to(DEVICE) for tensor in tensors))
        )
    return drawn


def gradients(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Draw gradients from 1e-12 to 10, every fifth one zero."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(shape, generator=generator) * 10 ** torch.linspace(-12, 1, shape[-1])
    gradient[..., ::5] = 0
    return gradient.to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("weight", "exact", "moment"),
    [
        (FP32, False, FP32),
        (BF16, True, FP32),
        (BF16, False, BF16),
        (BF16, False, FP32),
        (BF16, True, BF16),
        (FP32, False, BF16),
    ],
)
@pytest.mark.parametrize("gradient", [FP32, BF16])
def test_the_kernel_computes_what_torchs_operations_compute(
    weight: torch.dtype, exact: bool, moment: torch.dtype, gradient: torch.dtype
) -> None:
    operands = draw(weight, gradient, moment, exact)
    for hyper in STEPS:
        operands = [
            tensors._replace(gradient=gradients(tuple(tensors.weight.shape), gradient, hyper.step))
            for tensors in operands
        ]
        expected = [reference(tensors, hyper, 0.37) for tensors in operands]
        updates = [(tensors, hyper) for tensors in operands]
        frozen = prepare_update(updates, torch.tensor(0.37, device=DEVICE))()
        for updated, (reference_tensors, _) in zip(operands, expected, strict=True):
            assert all(
                a is b is None or torch.equal(a.cpu(), b)
                for a, b in zip(updated, reference_tensors, strict=True)
            )
        assert frozen == sum(count for _, count in expected)


@pytest.fixture(autouse=True)
def kernel_updates_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ExactAdamW use the kernel on every device."""
    monkeypatch.setattr(adamw, "prepare_updates", prepare_update)


def test_special_master_weights_keep_all_their_bits() -> None:
    bits = torch.tensor(
        [0, 1, 0x8000, 0x7FFFFF, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F800000], dtype=torch.int32
    )
    master = torch.cat([bits, bits + torch.iinfo(torch.int32).min]).view(FP32)
    parameter = nn.Parameter(torch.zeros_like(master, dtype=BF16, device=DEVICE))
    optimizer = ExactAdamW([parameter], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    optimizer.set_master(parameter, master.to(DEVICE))
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(
        join(parameter.detach(), optimizer.state[parameter]["remainder"]).cpu(), master
    )
    parameter.grad.fill_(torch.nan)
    optimizer.step()
    assert parameter.isnan().all(), "the kernel stores the GPU's NaN as -0.0"
