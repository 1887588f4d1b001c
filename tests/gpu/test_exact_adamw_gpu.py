"""Compare the AdamW kernel with the update on a CPU, bit for bit.

The tests run on a GPU, and on a CPU under Triton's interpreter (TRITON_INTERPRET=1). The update on
a CPU has the bits of torch's AdamW (tests/pretrain/optimizer/test_exact_adamw.py).
"""

from __future__ import annotations

import itertools
import math

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
BY_MUON = Hyperparameters(3e-3, 0.1, beta1=0, beta2=0, eps=0, step=1, scale=5.0)
# Weights, and whether they have remainders.
WEIGHTS = [(FP32, False), (BF16, True), (BF16, False)]


def draw(
    weight: torch.dtype, exact: bool, gradient: torch.dtype, moment: torch.dtype | None
) -> list[ParameterTensors]:
    """Return operands of each shape: random weights with zeros among them, and empty moments."""
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for shape in SHAPES:
        master = torch.randn(shape, generator=generator)
        master.view(-1)[::7] = 0
        stored = split(master) if exact else (master.to(weight), None)
        moments = (torch.zeros(shape, dtype=moment) if moment else None for _ in range(2))
        drawn.append(ParameterTensors(*stored, gradients(shape, gradient, 0), *moments))
    return drawn


def gradients(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Draw gradients from 1e-12 to 10, every fifth one zero."""
    generator = torch.Generator().manual_seed(seed)
    gradient = torch.randn(shape, generator=generator) * 10 ** torch.linspace(-12, 1, shape[-1])
    gradient[..., ::5] = 0
    return gradient.to(dtype)


@pytest.mark.parametrize(
    ("weights", "gradient", "moment"),
    [
        *itertools.product(WEIGHTS, (FP32, BF16), (FP32, BF16)),
        *((weights, BF16, None) for weights in WEIGHTS),
    ],
)
def test_updates_equal_those_on_a_cpu(
    weights: tuple[torch.dtype, bool],
    gradient: torch.dtype,
    moment: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without moments, these are the updates of Muon."""
    # torch.sqrt in FP32 may be off by one ulp on a CPU. Computed in FP64 and rounded, it is exact.
    monkeypatch.setattr(Tensor, "sqrt", lambda x: torch.sqrt(x.double()).float())
    on_cpu = draw(*weights, gradient, moment)
    operands = [on_device(tensors) for tensors in on_cpu]
    coefficient = torch.tensor(0.37) if moment else None
    for hyper in STEPS if moment else [BY_MUON]:
        for tensors, copies in zip(on_cpu, operands, strict=True):
            tensors.gradient.copy_(gradients(tensors.weight.shape, gradient, hyper.step))
            copies.gradient.copy_(tensors.gradient)
        expected = adamw._update_all([(tensors, hyper) for tensors in on_cpu], coefficient)
        updates = [(tensors, hyper) for tensors in operands]
        lost = prepare_update(updates, None if moment is None else coefficient.to(DEVICE))()
        assert int(lost) == int(expected)
        for pair in itertools.chain(*map(zip, operands, on_cpu)):
            assert pair[0] is pair[1] is None or torch.equal(pair[0].cpu(), pair[1])


@pytest.mark.parametrize(("gradient", "moment"), [*itertools.product((FP32, BF16), (FP32, BF16))])
def test_momenta_and_directions_of_muon_equal_torchs(
    gradient: torch.dtype, moment: torch.dtype
) -> None:
    """The direction is in the place of a BF16 weight, and its memory may hold any values."""
    hyper = Hyperparameters(0.0, 0.0, beta1=0.95, beta2=0.95)
    for shape in SHAPES:
        momentum = gradients(shape, moment, 1)
        drawn = gradients(shape, gradient, 0)
        direction = torch.full(shape, math.nan, dtype=BF16)
        operands = on_device(ParameterTensors(direction, None, drawn, momentum, None))
        prepare_update([(operands, hyper)], torch.tensor(0.37, device=DEVICE))()
        clipped = 0.37 * drawn.float()
        expected = momentum.float().lerp(clipped, 0.05)
        assert torch.equal(operands[3].cpu(), expected.to(moment))
        assert torch.equal(operands.weight.cpu(), clipped.lerp(expected, 0.95).bfloat16())


def on_device(tensors: ParameterTensors) -> ParameterTensors:
    copies = (None if tensor is None else tensor.clone().to(DEVICE) for tensor in tensors)
    return ParameterTensors(*copies)


def test_prepared_updates_keep_copies_of_strided_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adamw, "prepare_updates", prepare_update)
    parameter = nn.Parameter(torch.zeros(512, 384, device=DEVICE))
    parameter.grad = torch.ones(384, 512, device=DEVICE).t()
    update = ExactAdamW([parameter], lr=1e-3).prepare()
    # These tensors would get the memory of the copy.
    zeros = [torch.zeros_like(parameter) for _ in range(4)]
    update()
    assert parameter.all()
    assert not any(map(Tensor.any, zeros))


def test_special_master_weights_keep_all_their_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    # Use the kernel on every device.
    monkeypatch.setattr(adamw, "prepare_updates", prepare_update)
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
