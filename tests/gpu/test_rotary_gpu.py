"""The rotation's kernels against its formulas in double precision, at small shapes and real ones.

The small ones run on a CPU too, under Triton's interpreter (TRITON_INTERPRET=1), which truncates where BF16 should be rounded.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pretrain.model.fused import rotary_kernel
from pretrain.model.fused.formulas import rotate, rotate_backward
from pretrain.model.fused.fp8_tile import TensorScaled
from pretrain.model.fused.heads import HeadNorms, Heads
from pretrain.precision.quantizers import E5M2, tensor
from tests.gpu.conftest import DEVICE, ROUNDED, cuda_only

FP32, BF16 = torch.float32, torch.bfloat16
RELATIVE = 1.01 * ROUNDED
SMALL = [Heads(4, 2, 64), Heads(3, 1, 128), Heads(6, 2, 32)]
# Qwen3-1.7B, Llama-3.1-8B, Qwen2-0.5B, and one with no power of two in its heads.
REAL = [
    (32_768, Heads(16, 8, 128)),
    (8_191, Heads(32, 8, 128)),
    (4_097, Heads(14, 2, 64)),
    (1_001, Heads(15, 5, 64)),
]


class Problem:
    """Rows, angles of packed documents, gradients in the strides that attention leaves them, and norms. `in_parts`: the gradients
    of keys and values are a part a query head."""

    def __init__(self, tokens: int, heads: Heads, normed: bool, *, in_parts: bool = False) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(BF16)

        self.heads, self.qkv = heads, normal(tokens, heads.width)
        frequencies = 10_000 ** (-torch.arange(heads.dim // 2, device=DEVICE) / (heads.dim // 2))
        angles = (torch.arange(tokens, device=DEVICE) % 1000)[:, None] * frequencies.repeat(2)
        # 0.9: a YaRN-like scaling
        self.cos, self.sin = ((0.9 * f(angles)).to(BF16) for f in (torch.cos, torch.sin))
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
        """The same numbers in FP64."""
        other = object.__new__(Problem)
        other.heads, other.qkv, other.cos, other.sin = (
            self.heads,
            self.qkv.double(),
            self.cos.double(),
            self.sin.double(),
        )
        other.gradients = [gradient.double() for gradient in self.gradients]
        norms = self.norms
        other.norms = norms and HeadNorms(norms.query.double(), norms.key.double(), norms.eps)
        return other


def kernel_backward(problem: Problem) -> tuple[Tensor, Tensor | None, Tensor | None]:
    qkv = problem.qkv if problem.norms else None
    return rotary_kernel.rotate_backward(
        *problem.gradients, qkv, problem.cos, problem.sin, problem.heads, problem.norms
    )


def kernel_forward(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    return rotary_kernel.rotate(problem.qkv, problem.cos, problem.sin, problem.heads, problem.norms)


def check(problem: Problem) -> None:
    """Both directions within the rounding of their dtype beside the formulas, by which FP64 goes; sums of norm gradients within
    FP32's, relative to their whole."""
    exact = problem.exact()
    forward = rotate(exact.qkv, exact.cos, exact.sin, exact.heads, exact.norms)
    for ours, theirs in zip(kernel_forward(problem), forward, strict=True):
        assert ours.is_contiguous() and ours.dtype == BF16
        torch.testing.assert_close(ours.double(), theirs, rtol=RELATIVE, atol=2e-6)
    arguments = (*exact.gradients, exact.qkv, exact.cos, exact.sin, exact.heads, exact.norms)
    dqkv, *norm_gradients = rotate_backward(*arguments)
    ours, *our_norm_gradients = kernel_backward(problem)
    assert ours.is_contiguous() and ours.dtype == BF16
    torch.testing.assert_close(ours.double(), dqkv, rtol=RELATIVE, atol=4e-6)
    for mine, theirs in zip(our_norm_gradients, norm_gradients, strict=True):
        if problem.norms is None:
            assert mine is theirs is None
        else:
            assert mine.dtype == FP32 and mine.shape == (problem.heads.dim,)
            assert (mine.double() - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize(
    ("tokens", "heads"),
    [*((37, heads) for heads in SMALL), *(pytest.param(*real, marks=cuda_only) for real in REAL)],
    ids=str,
)
@pytest.mark.parametrize("normed", [True, False])
def test_the_kernels_compute_what_the_formulas_do(tokens: int, heads: Heads, normed: bool) -> None:
    """The last tile of 37 tokens is not full."""
    check(Problem(tokens, heads, normed))


@pytest.mark.parametrize(
    ("heads", "normed"), [(Heads(4, 2, 64), True), (Heads(6, 3, 32), False)], ids=str
)
def test_parts_of_a_gradient_are_summed_before_anything_is_rounded(
    heads: Heads, normed: bool
) -> None:
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
def test_codes_are_those_of_the_gradient_in_bf16(
    tokens: int, heads: Heads, in_parts: bool, normed: bool
) -> None:
    """By rows and by columns, with its amax; one of the scales saturates. The norms' gradients have the same bits."""
    problem = Problem(tokens, heads, normed, in_parts=in_parts)
    expected, *expected_norms = kernel_backward(problem)
    for factor in (4096.0, 3e5):
        scale, amax, inverse = (
            torch.full((1,), value, device=DEVICE) for value in (factor, 0.0, 0.0)
        )
        both = (
            torch.empty(shape, dtype=torch.uint8, device=DEVICE)
            for shape in (expected.shape, expected.t().shape)
        )
        written = TensorScaled(torch.float8_e5m2, *both, inverse, scale, amax)
        qkv = problem.qkv if normed else None
        _, *norms = rotary_kernel.rotate_backward(
            *problem.gradients, qkv, problem.cos, problem.sin, heads, problem.norms, written
        )
        codes = tensor.quantize(expected, scale, E5M2).codes.to(torch.float8_e5m2).view(torch.uint8)
        assert torch.equal(written.rows, codes) and torch.equal(written.columns, codes.t())
        assert amax == expected.abs().max() and torch.equal(inverse, tensor.decode_scale(scale))
        assert all(
            ours is theirs or torch.equal(ours, theirs)
            for ours, theirs in zip(norms, expected_norms, strict=True)
        )


@cuda_only
@pytest.mark.parametrize("normed", [True, False])
def test_offsets_beyond_32_bits_are_right(normed: bool) -> None:
    heads = Heads(32, 8, 128)
    tokens = 2**31 // heads.width + 5
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB")
    problem, large = Problem(64, heads, normed), Problem(64, heads, normed)

    def behind_zeros(values: Tensor) -> Tensor:
        larger = torch.zeros(tokens, *values.shape[1:], device=DEVICE, dtype=BF16)
        larger[-64:] = values
        return larger

    large.qkv, large.cos, large.sin = map(behind_zeros, (problem.qkv, problem.cos, problem.sin))
    pairs = zip(kernel_forward(large), kernel_forward(problem), strict=True)
    assert all(torch.equal(ours[-64:], theirs) for ours, theirs in pairs)
    large.gradients = [*map(behind_zeros, problem.gradients)]
    assert torch.equal(kernel_backward(large)[0][-64:], kernel_backward(problem)[0])
