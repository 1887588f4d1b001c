"""Test the values of GEMMs with searched cuBLASLt algorithms, and when torch computes instead."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

# Deterministic GEMMs need this variable. It is read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.precision import cublaslt
from pretrain.precision.cublaslt import Products, add_product_, products_on
from pretrain.precision.product import Probe
from tests.gpu.assembled import assemble
from tests.gpu.conftest import relative_error, te_dtype
from tests.pretrain.model.fused.fused_models import inputs

BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
N = 1024
M = 768
K = 512
SHAPES = {"TN": ((M, K), (N, K)), "NN": ((K, M), (N, K)), "NT": ((K, M), (K, N))}
# Relative error, by norms, of BF16 outputs and of FP8's fast accumulators.
ROUNDING = 0.01


@pytest.fixture(autouse=True)
def forget_searched_algorithms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the searched algorithms. The GEMM makes torch load cuBLASLt."""
    monkeypatch.setattr(cublaslt, "CACHE", tmp_path)
    products_on.cache_clear()
    torch.ones(16, 16, device="cuda", dtype=BF16) @ torch.ones(16, 16, device="cuda", dtype=BF16)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=BF16, generator=generator)


@pytest.fixture
def hopper(te: ModuleType) -> ModuleType:
    """Transformer Engine on a Hopper GPU."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return te


def products_of_this_gpu() -> Products:
    products = products_on(torch.device("cuda", torch.cuda.current_device()))
    assert products is not None
    return products


# ── Values ──


def operands_of(kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return both operands and their FP32 product."""
    left, right = (draw(*shape, seed=seed) for seed, shape in enumerate(SHAPES[kind]))
    matrix = left.t() if kind[0] == "T" else left
    rows = right.t() if kind[1] == "T" else right
    return left, right, rows.float() @ matrix.float()


def fp8_operands_of(te: ModuleType, *dtypes: torch.dtype) -> tuple[Any, Any, Tensor]:
    """Return operands of Transformer Engine in these dtypes, and their FP32 product."""
    operands = []
    decoded = []
    for shape, dtype in zip(SHAPES["TN"], dtypes, strict=True):
        values = draw(*shape)
        scale_inv = values.abs().max().float().reshape(1) / torch.finfo(dtype).max
        codes = (values.float() / scale_inv).to(dtype)
        parts = {"data": codes.view(torch.uint8), "data_transpose": None}
        parts |= {"fp8_scale_inv": scale_inv, "fp8_dtype": te_dtype(te, dtype)}
        operands.append(te.Float8TensorStorage(**parts, fake_dtype=BF16))
        decoded.append(codes.float() * scale_inv)
    return *operands, decoded[1] @ decoded[0].t()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("kind", [*SHAPES, (E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)], ids=str)
def test_a_gemm_equals_the_fp32_gemm(
    kind: Any, adds: bool, biased: bool, request: pytest.FixtureRequest
) -> None:
    """FP8 operands are given by their two dtypes."""
    if kind in SHAPES:
        left, right, expected = operands_of(kind)
    else:
        left, right, expected = fp8_operands_of(request.getfixturevalue("hopper"), *kind)
    residual = 10 * draw(N, M, seed=2) if adds else None
    before = None if residual is None else residual.clone()
    bias = 10 * draw(M, seed=3) if biased else None
    for added in (residual, bias):
        expected = expected if added is None else expected + added.float()
    options = {"layout": kind} if kind in SHAPES else {}
    for fast in (False, True):
        if kind not in SHAPES:
            options["fast_accumulation"] = fast
        for _ in range(2):  # The first call searches an algorithm, the second uses it.
            y = cublaslt.multiply(left, right, bias=bias, residual=residual, **options)
            assert y is not None
            assert y.shape == (N, M)
            assert relative_error(y, expected) < ROUNDING
    assert before is None or torch.equal(residual, before)
    assert len(products_of_this_gpu().chosen) == (1 if kind in SHAPES else 2)


def test_a_transposed_view_is_multiplied_as_it_is_stored() -> None:
    """The weight of a Conv1D and its gradient sum are stored as [in, out]."""
    x, dy = draw(N, K), draw(N, M, seed=1)
    stored = draw(K, M, seed=2)
    y = cublaslt.multiply(stored.t(), x)
    assert relative_error(y, x.float() @ stored.float()) < ROUNDING
    dx = cublaslt.multiply(stored.t(), dy, layout="NN")
    assert relative_error(dx, dy.float() @ stored.float().t()) < ROUNDING
    total = torch.zeros(K, M, device="cuda")
    for _ in range(2):
        add_product_(total.t(), dy.t(), x)
    assert relative_error(total.double(), 2 * x.double().t() @ dy.double()) < 1e-5
    assert len(products_of_this_gpu().chosen) == 3


@pytest.mark.parametrize("biased", [False, True])
def test_a_cached_algorithm_is_used_without_trials(
    biased: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = draw(M, K), draw(N, K, seed=1)
    multiply = partial(cublaslt.multiply, left, right, bias=draw(M, seed=2) if biased else None)
    searched_y = multiply()
    (cached,) = filter(Path.is_file, tmp_path.rglob("*"))
    assert len(cached.read_bytes()) == 64
    products_on.cache_clear()
    monkeypatch.setattr(cublaslt, "same_as_first", None)
    assert torch.equal(multiply(), searched_y)
    # A file that was not written completely is ignored.
    monkeypatch.undo()
    monkeypatch.setattr(cublaslt, "CACHE", tmp_path)
    cached.write_bytes(b"")
    products_on.cache_clear()
    assert torch.equal(multiply(), searched_y)
    assert len(cached.read_bytes()) == 64


@pytest.mark.parametrize("adds", [False, True])
def test_a_block_scaled_gemm_equals_transformer_engines(hopper: ModuleType, adds: bool) -> None:
    """Two tensors in squares of 128 x 128 are not multiplied: `multiply` returns None."""
    weight, x = (
        hopper.Float8BlockQuantizer(
            te_dtype(hopper, E4M3), rowwise=True, columnwise=True, block_scaling_dim=dimensions
        )(draw(*shape) * torch.exp2(torch.arange(K, device="cuda") // 128).bfloat16())
        for dimensions, shape in ((2, (M, K)), (1, (N, K)))
    )
    residual = 10 * draw(N, M, seed=2) if adds else None
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    options = {"layout": "TN", "use_split_accumulator": True}
    expected = general_gemm(weight, x, out_dtype=BF16, **options)[0].float()
    if residual is not None:
        expected = expected + residual
    for _ in range(2):  # The first call searches an algorithm, the second uses it.
        y = cublaslt.multiply(weight, x, residual=residual)
        assert y is not None
        assert relative_error(y, expected) < ROUNDING
    assert cublaslt.multiply(weight, weight) is None


def test_scales_may_change_between_calls(hopper: ModuleType) -> None:
    left, right, expected = fp8_operands_of(hopper, E4M3, E4M3)
    for factor in (1.0, 4.0, 0.5):
        left._scale_inv = left._scale_inv * factor  # another tensor
        expected = expected * factor
        assert relative_error(cublaslt.multiply(left, right), expected) < ROUNDING
        right._scale_inv.mul_(2)  # another value in the same tensor
        expected = expected * 2
        assert relative_error(cublaslt.multiply(left, right), expected) < ROUNDING
    assert len(products_of_this_gpu().chosen) == 1


def test_weight_gradients_accumulate_in_fp32_during_a_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The search adds nothing to the sum.

    Covers two microbatches, the first with a search, and overwriting a sum with and without a
    searched algorithm.
    """
    x, dy = (draw(*shape, seed=seed) for seed, shape in enumerate(SHAPES["NT"]))
    total = torch.zeros(N, M, device="cuda")
    expected = dy.double().t() @ x.double()
    for count in (1, 2):
        assert cublaslt.multiply(x, dy, layout="NT", total=total) is total
        assert relative_error(total.double(), count * expected) < 1e-5
    assert len(products_of_this_gpu().chosen) == 1
    for by_torch in (False, True):
        if by_torch:
            monkeypatch.setattr(cublaslt, "multiply", lambda *_, **__: None)
        products_on.cache_clear()
        total = torch.full((N, M), torch.nan, device="cuda")
        add_product_(total, dy.t(), x, overwrite=True)
        assert relative_error(total.double(), expected) < 1e-5
        add_product_(total, dy.t(), x)
        # Rounding the gradients to BF16 would give an error of 2e-3.
        assert relative_error(total.double(), 2 * expected) < 1e-5


@pytest.mark.parametrize("best", [1, 2, 3])
def test_every_searched_algorithm_has_the_same_bits(
    best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = draw(8192, 2048)
    weight = draw(4096, 2048, seed=1)
    residual = draw(8192, 4096, seed=2)
    results = []
    for number in (0, best):
        monkeypatch.setattr(cublaslt, "fastest", lambda times, n=number: min(n, len(times) - 1))
        products_on.cache_clear()
        results.append([cublaslt.multiply(weight, x, residual=r) for r in (None, residual)])
    assert all(map(torch.equal, *results))


# ── Deterministic runs ──


@pytest.mark.usefixtures("deterministic")
def test_deterministic_runs_do_not_search() -> None:
    x = draw(N, K)
    weight = draw(M, K, seed=1)
    assert cublaslt.multiply(weight, x) is None
    assert torch.equal(cublaslt.linear(x, weight), F.linear(x, weight))
    assert products_on.cache_info().currsize == 0


# ── Fused layers ──


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("precision", ["current", "block"])
def test_gemms_add_residuals_unless_results_are_observed(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = assemble("llama", precision, fused=True)
    # For each GEMM, whether it added a residual.
    residuals: list[bool] = []
    multiply = cublaslt.multiply

    def counted(*operands: Any, residual: Tensor | None = None, **options: Any) -> Tensor | None:
        y = multiply(*operands, residual=residual, **options)
        residuals.append(residual is not None and y is not None)
        return y

    monkeypatch.setattr(cublaslt, "multiply", counted)
    batch = inputs(packs=4, seed=0, device="cuda", length=256)
    loss = packed(**batch)
    assert sum(residuals) == 2 * len(packed.fused.layers)
    observed: set[str] = set()

    class Results(Probe):
        observes_results = True

        def result(self, name: str, *_: Any) -> None:
            observed.add(name)

    packed.context.probes = (Results(),)
    residuals.clear()
    assert packed(**batch).item() == pytest.approx(loss.item(), rel=2e-3)
    assert not any(residuals)
    assert len(observed) == len(packed.fused.products)
