"""Products by searched algorithms, and unsupported products, which fall back to torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pretrain.precision import cublaslt
from pretrain.precision.cublaslt import (
    ALIGNMENT,
    CublasLtError,
    Factor,
    Problem,
    problem_of,
    same_as_first,
)

BF16 = torch.bfloat16
FP32 = torch.float32
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


def aligned(*shape: int, dtype: torch.dtype = BF16, offset: int = 0) -> Tensor:
    """Return a tensor that starts `offset` elements after a multiple of ALIGNMENT bytes."""
    size = torch.Size(shape).numel()
    storage = torch.zeros(size + 2 * ALIGNMENT, dtype=dtype)
    begin = -storage.data_ptr() % ALIGNMENT // dtype.itemsize + offset
    return storage[begin : begin + size].view(shape)


def factor(*shape: int, dtype: torch.dtype = BF16) -> Factor:
    if dtype == BF16:
        return Factor(aligned(*shape), BF16, None)
    return Factor(aligned(*shape, dtype=torch.uint8), dtype, torch.ones(1))


@given(
    sizes=st.tuples(*[st.integers(1, 6).map(lambda n: 8 * n)] * 3),
    transposed=st.tuples(st.booleans(), st.booleans()),
)
def test_products_with_sizes_of_multiples_of_16_are_supported(
    sizes: tuple[int, int, int], transposed: tuple[bool, bool]
):
    m, n, k = sizes
    a = factor(*((m, k) if transposed[0] else (k, m)))
    b = factor(*((k, n) if transposed[1] else (n, k)))
    expected = Problem(m, n, k, (BF16, BF16, BF16), transposed, False, False)
    problem = problem_of(a, b, transposed, None, None, fast_accumulation=True)
    assert problem == (expected if all(size % 16 == 0 for size in sizes) else None)


@given(
    types=st.tuples(*[st.sampled_from([E4M3, E5M2])] * 2),
    fast=st.booleans(),
    adds=st.booleans(),
    biased=st.booleans(),
)
def test_codes_are_supported_along_the_summed_dimension(
    types: tuple[torch.dtype, torch.dtype], fast: bool, adds: bool, biased: bool
):
    a = factor(64, 16, dtype=types[0])._replace(bias=aligned(64) if biased else None)
    b = factor(32, 16, dtype=types[1])
    residual = aligned(32, 64) if adds else None
    expected = Problem(64, 32, 16, (*types, BF16), (True, False), fast, adds, biased=biased)
    assert problem_of(a, b, (True, False), residual, None, fast_accumulation=fast) == expected
    for transposed in ((False, False), (False, True), (True, True)):
        assert problem_of(a, b, transposed, residual, None, fast_accumulation=fast) is None


@pytest.mark.parametrize(
    ("left", "right", "residual"),
    [
        (factor(64, 16), factor(32, 48), None),  # different inner sizes
        (factor(64, 16), factor(32, 16, dtype=E4M3), None),
        # The heuristic assumes a larger alignment.
        (factor(64, 16), Factor(aligned(32, 16, offset=8), BF16, None), None),
        (factor(64, 16), Factor(aligned(16, 32).t(), BF16, None), None),
        (factor(64, 16), factor(32, 16), aligned(32, 64, offset=8)),
    ],
)
def test_operands_that_cublaslt_does_not_take_fall_back(
    left: Factor, right: Factor, residual: Tensor | None
):
    assert problem_of(left, right, (True, False), residual, None, fast_accumulation=False) is None


def test_a_sum_that_a_product_is_added_to_is_contiguous():
    """In a weight gradient, both factors are laid out along the tokens."""
    x = factor(16, 64)
    dy = factor(16, 32)
    problem = problem_of(
        x, dy, (False, True), None, aligned(32, 64, dtype=FP32), fast_accumulation=False
    )
    assert problem == Problem(64, 32, 16, (BF16, BF16, FP32), (False, True), False, False)
    for total in (aligned(64, 32, dtype=FP32).t(), aligned(32, 64, dtype=FP32, offset=4)):
        assert problem_of(x, dy, (False, True), None, total, fast_accumulation=False) is None


def test_cpu_tensors_are_multiplied_by_torch():
    x = aligned(32, 16).normal_()
    weight = aligned(64, 16).normal_()
    residual = aligned(32, 64).normal_()
    before = residual.clone()
    assert cublaslt.multiply(weight, x) is None
    assert torch.equal(cublaslt.linear(x, weight), F.linear(x, weight))
    assert torch.equal(cublaslt.linear(x, weight, None, residual), F.linear(x, weight) + before)
    assert torch.equal(residual, before)
    for dtype in (BF16, FP32):
        total = before.to(dtype, copy=True)
        cublaslt.add_product_(total, x, weight.t())
        expected = before.float() + x.float() @ weight.float().t()
        torch.testing.assert_close(total.float(), expected, rtol=2**-7, atol=2**-5)
        cublaslt.add_product_(total, x, weight.t(), overwrite=True)
        torch.testing.assert_close(total.float(), expected - before, rtol=2**-7, atol=2**-5)


def writing(d: Tensor, *results: Tensor | None) -> list[Callable[[], int]]:
    """Return algorithms that write these results into `d`.

    An algorithm with None does not run.
    """
    return [
        lambda result=result: 1 if result is None else int(d.copy_(result).numel() == 0)
        for result in results
    ]


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("adds", [False, True])
def test_only_algorithms_with_the_bits_of_the_first_are_compared(dtype: torch.dtype, adds: bool):
    y = torch.randn(32, 16).to(dtype)
    other = y.clone()
    other[3, 5] = torch.nextafter(y[3, 5], torch.tensor(torch.inf, dtype=dtype))
    d = torch.empty_like(y)
    added = torch.randn(32, 16).to(dtype) if adds else None
    assert same_as_first(writing(d, None, y, other, None, y.clone()), d, added) == ([1, 4], True)
    with pytest.raises(CublasLtError):
        same_as_first(writing(d, None, None), d, added)


def test_a_user_without_a_home_folder_has_a_cache_file(monkeypatch: pytest.MonkeyPatch):
    """A container may run as a user that its list of users does not contain."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    problem = Problem(16, 16, 16, (BF16, BF16, BF16), (True, False), False, False)
    assert cublaslt.cache_file((1,), problem) != cublaslt.cache_file((2,), problem)


@pytest.mark.parametrize("empty", [0.0, -0.0, 1.5])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_products_that_are_zero_or_not_finite_do_not_decide(dtype: torch.dtype, empty: float):
    """Any algorithm would leave zeros, the previous sum, or NaN."""
    added = torch.full((32, 16), empty, dtype=dtype)
    d = torch.empty(32, 16, dtype=dtype)
    nothing = torch.zeros_like(added)
    product = torch.randn(32, 16).to(dtype)
    assert not same_as_first(writing(d, nothing, nothing), d, None)[1]
    assert not same_as_first(writing(d, added + nothing), d, added)[1]
    assert same_as_first(writing(d, added + product), d, added)[1]
    for number in (torch.nan, torch.inf, -torch.inf):
        broken = (added + product).index_fill(0, torch.tensor([7]), number)
        assert same_as_first(writing(d, broken, broken), d, added) == ([0, 1], False)
