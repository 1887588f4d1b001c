"""The AdamW kernel against torch's operations, bit for bit.

Runs on a GPU, and on a CPU under Triton's interpreter (TRITON_INTERPRET=1), which truncates where BF16 should be rounded and so
skips what the kernel stores as BF16 by rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pretrain.optimizer import adamw
from pretrain.optimizer.adamw import ExactAdamW, Hyperparameters, ParameterTensors
from pretrain.optimizer.adamw_kernel import update_by_kernel
from pretrain.optimizer.exact_weights import join, split
from tests.gpu.conftest import DEVICE, INTERPRETED

rounds_to_bf16 = pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter truncates to BF16")

FP32, BF16 = torch.float32, torch.bfloat16
# A value, an odd tail, exact blocks, a tensor of several blocks with a tail that is aligned and one that is not.
SHAPES = ((1,), (27, 45), (1024,), (2064,), (3, 411))
# Warm-up's first update at a learning rate of zero, and ordinary ones.
STEPS = [
    Hyperparameters(lr, 0.1, 0.9, 0.95, 1e-8, step)
    for step, lr in enumerate((0.0, 3e-3, 1e-5), start=1)
]


def reference(
    tensors: ParameterTensors, hyper: Hyperparameters, coefficient: float
) -> tuple[ParameterTensors, int]:
    """The update of torch's single-tensor AdamW on a CPU, with the square root that is nearest; and the lost updates."""
    o = ParameterTensors(*(None if t is None else t.cpu() for t in tensors))
    before = o.weight.float() if o.remainder is None else join(o.weight, o.remainder)
    gradient, exp_avg, exp_avg_sq = (
        o.gradient.float() * coefficient,
        o.exp_avg.float().clone(),
        o.exp_avg_sq.float().clone(),
    )
    master = before * hyper.decay
    exp_avg.lerp_(gradient, 1 - hyper.beta1)
    exp_avg_sq.mul_(hyper.beta2).addcmul_(gradient, gradient, value=1 - hyper.beta2)
    # torch.sqrt of FP32 may be off by one unit on a CPU. In double precision and rounded it never is.
    denominator = exp_avg_sq.double().sqrt().float() / hyper.bias_correction2_sqrt + hyper.eps
    master.addcdiv_(exp_avg, denominator, value=-hyper.step_size)
    weight, remainder = (master.to(o.weight.dtype), None) if o.remainder is None else split(master)
    after = weight.float() if o.remainder is None else master
    frozen = (
        (after == before) & ((exp_avg != 0) | (before != 0))
        if hyper.learning_rate
        else torch.zeros(())
    )
    moments = (exp_avg.to(o.exp_avg.dtype), exp_avg_sq.to(o.exp_avg.dtype))
    return ParameterTensors(weight, remainder, o.gradient, *moments), int(frozen.sum())


def draw(
    weight: torch.dtype, gradient: torch.dtype, moment: torch.dtype, exact: bool
) -> list[ParameterTensors]:
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for shape in SHAPES:
        master = torch.randn(shape, generator=generator)
        master.view(-1)[::7] = 0
        stored, remainder = split(master) if exact else (master.to(weight), None)
        first, second = torch.zeros(shape, dtype=moment), torch.zeros(shape, dtype=moment)
        tensors = (stored, remainder, gradients(shape, gradient, 0), first, second)
        drawn.append(ParameterTensors(*(None if t is None else t.to(DEVICE) for t in tensors)))
    return drawn


def gradients(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    gradient = torch.randn(
        shape, generator=torch.Generator().manual_seed(seed)
    ) * 10 ** torch.linspace(-12, 1, shape[-1])
    gradient[..., ::5] = 0
    return gradient.to(dtype).to(DEVICE)


@pytest.mark.parametrize(
    ("weight", "exact", "moment"),
    [
        (FP32, False, FP32),
        (BF16, True, FP32),
        pytest.param(BF16, False, BF16, marks=rounds_to_bf16),
        pytest.param(BF16, False, FP32, marks=rounds_to_bf16),
        pytest.param(BF16, True, BF16, marks=rounds_to_bf16),
        pytest.param(FP32, False, BF16, marks=rounds_to_bf16),
    ],
)
@pytest.mark.parametrize("gradient", [FP32, BF16])
def test_it_does_what_torchs_operations_do_bit_for_bit(
    weight: torch.dtype, exact: bool, moment: torch.dtype, gradient: torch.dtype
) -> None:
    operands = draw(weight, gradient, moment, exact)
    for hyper in STEPS:
        operands = [
            o._replace(gradient=gradients(tuple(o.weight.shape), gradient, hyper.step))
            for o in operands
        ]
        expected = [reference(o, hyper, 0.37) for o in operands]
        lost = update_by_kernel(
            [(each, hyper) for each in operands], torch.tensor(0.37, device=DEVICE)
        )
        for ours, (theirs, _) in zip(operands, expected, strict=True):
            assert all(
                a is b is None or torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)
            )
        assert lost == sum(frozen for _, frozen in expected)


@pytest.fixture(autouse=True)
def by_kernel_on_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "_update_all", update_by_kernel)


def test_special_masters_are_read_and_written_whole() -> None:
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
    assert parameter.isnan().all(), "a GPU's own NaN would have been stored as -0.0"
