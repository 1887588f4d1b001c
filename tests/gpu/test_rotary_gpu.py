"""Compare the kernels of rotary embeddings with their formulas in FP64.

Tests with small shapes also run on a CPU, under Triton's interpreter (TRITON_INTERPRET=1), which
truncates to BF16 instead of rounding.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pretrain.model.fused import rotary_kernel
from pretrain.model.fused.formulas import HeadNorms, Heads, rotate, rotate_backward
from pretrain.model.fused.fp8_tile import TensorScaled
from pretrain.precision.quantizers import E5M2, tensor
from tests.gpu.conftest import DEVICE, ROUNDED, cuda_only

FP32 = torch.float32
BF16 = torch.bfloat16
RELATIVE = 1.01 * ROUNDED
SMALL = [Heads(4, 2, 64), Heads(3, 1, 128), Heads(6, 2, 32)]
# Tokens and heads of Qwen3-1.7B, Llama-3.1-8B, Qwen2-0.5B, and of a model whose number of heads is
# not a power of two.
REAL = [
    (32_768, Heads(16, 8, 128)),
    (8_191, Heads(32, 8, 128)),
    (4_097, Heads(14, 2, 64)),
    (1_001, Heads(15, 5, 64)),
]


class Problem:
    """Inputs of the rotation: rows, angles of packed documents, gradients and norms.

    Gradients have the strides of attention's gradients. With `in_parts`, the gradients of keys and
    values have one part per query head.
    """

    def __init__(
        self,
        tokens: int,
        heads: Heads,
        normed: bool,
        *,
        in_parts: bool = False,
        rotated: bool = True,
    ) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(BF16)

        self.heads = heads
        self.qkv = normal(tokens, heads.width)
        frequencies = 10_000 ** (-torch.arange(heads.dim // 2, device=DEVICE) / (heads.dim // 2))
        angles = (torch.arange(tokens, device=DEVICE) % 1000)[:, None] * frequencies.repeat(2)
        # The factor 0.9 scales cos and sin as YaRN does.
        self.cos, self.sin = (
            (0.9 * function(angles)).to(BF16) for function in (torch.cos, torch.sin)
        )
        if not rotated:
            self.cos = self.sin = None
        self.gradients = [
            normal(count, tokens, heads.dim).transpose(0, 1)
            for count in (heads.query, heads.kv, heads.kv)
        ]
        if in_parts:
            self.gradients[1:] = (
                normal(tokens, heads.kv, heads.query // heads.kv, heads.dim) for _ in range(2)
            )
        weight = [1 + normal(heads.dim) / 4 for _ in range(2)]
        self.norms = HeadNorms(*weight, 1e-6) if normed else None

    def exact(self) -> Problem:
        """Return a copy in FP64."""
        exact = object.__new__(Problem)
        exact.heads = self.heads
        exact.qkv = self.qkv.double()
        exact.cos = None if self.cos is None else self.cos.double()
        exact.sin = None if self.sin is None else self.sin.double()
        exact.gradients = [gradient.double() for gradient in self.gradients]
        norms = self.norms
        exact.norms = norms and HeadNorms(norms.query.double(), norms.key.double(), norms.eps)
        return exact


def kernel_backward(problem: Problem, *, summed: bool = False) -> tuple[Tensor | None, ...]:
    qkv = problem.qkv if problem.norms else None
    inputs = (qkv, problem.cos, problem.sin, problem.heads, problem.norms)
    return rotary_kernel.rotate_backward(*problem.gradients, *inputs, summed=summed)


def kernel_forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return rotary_kernel.rotate(problem.qkv, problem.cos, problem.sin, problem.heads, problem.norms)


def check(problem: Problem) -> None:
    """Compare both directions with the formulas in FP64, within the rounding of BF16.

    Gradients of norm weights are sums in FP32 and agree within 1e-5 of their norm.
    """
    exact = problem.exact()
    if problem.cos is not None:
        forward = rotate(exact.qkv, exact.cos, exact.sin, exact.heads, exact.norms)
        for actual, expected in zip(kernel_forward(problem), forward, strict=True):
            assert actual.is_contiguous()
            assert actual.dtype == BF16
            torch.testing.assert_close(actual.double(), expected, rtol=RELATIVE, atol=2e-6)
    arguments = (*exact.gradients, exact.qkv, exact.cos, exact.sin, exact.heads, exact.norms)
    expected_dqkv, *expected_norm_gradients, _ = rotate_backward(*arguments)
    dqkv, *norm_gradients, total = kernel_backward(problem)
    assert total is None
    *results, total = kernel_backward(problem, summed=True)
    torch.testing.assert_close(total.double(), expected_dqkv.sum(0), rtol=1e-4, atol=1e-3)
    assert torch.equal(results[0], dqkv)
    assert dqkv.is_contiguous()
    assert dqkv.dtype == BF16
    torch.testing.assert_close(dqkv.double(), expected_dqkv, rtol=RELATIVE, atol=4e-6)
    for gradient, expected in zip(norm_gradients, expected_norm_gradients, strict=True):
        if problem.norms is None:
            assert gradient is expected is None
        else:
            assert gradient.dtype == FP32
            assert gradient.shape == (problem.heads.dim,)
            assert (gradient.double() - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize(
    ("tokens", "heads"),
    [*((37, heads) for heads in SMALL), *(pytest.param(*real, marks=cuda_only) for real in REAL)],
    ids=str,
)
@pytest.mark.parametrize("normed", [True, False])
def test_the_kernels_compute_what_the_formulas_do(tokens: int, heads: Heads, normed: bool) -> None:
    """With 37 tokens, the last tile is not full."""
    check(Problem(tokens, heads, normed))


@pytest.mark.parametrize("tokens", [32, 333])
def test_gradients_without_rotation_are_copied_and_summed(tokens: int) -> None:
    check(Problem(tokens, Heads(3, 3, 64), normed=False, rotated=False))


@pytest.mark.parametrize(
    ("heads", "normed"), [(Heads(4, 2, 64), True), (Heads(6, 3, 32), False)], ids=str
)
def test_parts_of_a_gradient_are_summed_before_rounding(heads: Heads, normed: bool) -> None:
    check(Problem(37, heads, normed, in_parts=True))


@pytest.mark.usefixtures("conversions_that_round")
@pytest.mark.parametrize(
    ("tokens", "heads", "in_parts"),
    [
        (64, Heads(4, 2, 64), False),
        (32, Heads(6, 2, 32), True),
        pytest.param(*REAL[0], True, marks=cuda_only),
    ],
    ids=str,
)
@pytest.mark.parametrize("normed", [True, False])
def test_fp8_codes_are_those_of_the_bf16_gradient(
    tokens: int, heads: Heads, in_parts: bool, normed: bool
) -> None:
    """Covers both layouts, the amax and a scale that saturates.

    The gradients of norm weights and the sum of the gradient keep their bits.
    """
    problem = Problem(tokens, heads, normed, in_parts=in_parts)
    expected, *expected_sums = kernel_backward(problem, summed=True)
    for factor in (4096.0, 3e5):
        scale, amax, inverse = (
            torch.full((1,), value, device=DEVICE) for value in (factor, 0.0, 0.0)
        )
        rows, columns = (
            torch.empty(shape, dtype=torch.uint8, device=DEVICE)
            for shape in (expected.shape, expected.t().shape)
        )
        written = TensorScaled(torch.float8_e5m2, rows, columns, inverse, scale, amax)
        qkv = problem.qkv if normed else None
        inputs = (qkv, problem.cos, problem.sin, heads, problem.norms, written)
        _, *sums = rotary_kernel.rotate_backward(*problem.gradients, *inputs, summed=True)
        codes = tensor.quantize(expected, scale, E5M2).codes.to(torch.float8_e5m2).view(torch.uint8)
        assert torch.equal(written.rows, codes)
        assert torch.equal(written.columns, codes.t())
        assert amax == expected.abs().max()
        assert torch.equal(inverse, tensor.decode_scale(scale))
        assert all(
            total is expected_total or torch.equal(total, expected_total)
            for total, expected_total in zip(sums, expected_sums, strict=True)
        )


@cuda_only
@pytest.mark.parametrize("normed", [True, False])
def test_offsets_beyond_32_bits_are_right(normed: bool) -> None:
    heads = Heads(32, 8, 128)
    tokens = 2**31 // heads.width + 5
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    problem = Problem(64, heads, normed)
    large = Problem(64, heads, normed)

    def behind_zeros(values: Tensor) -> Tensor:
        larger = torch.zeros(tokens, *values.shape[1:], device=DEVICE, dtype=BF16)
        larger[-64:] = values
        return larger

    large.qkv, large.cos, large.sin = map(behind_zeros, (problem.qkv, problem.cos, problem.sin))
    pairs = zip(kernel_forward(large), kernel_forward(problem), strict=True)
    assert all(torch.equal(rows[-64:], expected) for rows, expected in pairs)
    large.gradients = [*map(behind_zeros, problem.gradients)]
    assert torch.equal(kernel_backward(large)[0][-64:], kernel_backward(problem)[0])
