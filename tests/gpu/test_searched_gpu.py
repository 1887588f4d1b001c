"""Products by searched algorithms on a GPU: their values, and when others compute."""

from __future__ import annotations

import os
from typing import Any

# what deterministic products need, read when CUDA starts
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.precision import searched
from pretrain.precision.searched import Products, add_product_, products_on
from tests.gpu.conftest import relative_error
from tests.gpu.test_fused_gpu import assemble, larger
from tests.pretrain.model.fused.fused_models import inputs

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
N, M, K = 1024, 768, 512
SHAPES = {"TN": ((M, K), (N, K)), "NN": ((K, M), (N, K)), "NT": ((K, M), (K, N))}
ROUNDING = 0.01  # of the norm: BF16 outputs, and FP8's fast accumulators


@pytest.fixture(autouse=True)
def nothing_searched() -> None:
    products_on.cache_clear()
    # torch loads cublasLt
    torch.ones(16, 16, device="cuda", dtype=BF16) @ torch.ones(16, 16, device="cuda", dtype=BF16)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, device="cuda", dtype=BF16, generator=generator)


def in_codes(values: Tensor, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Transformer Engine's tensor of these values, and what its codes stand for in FP32."""
    te = pytest.importorskip("transformer_engine.pytorch")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 products of Hopper")
    scale_inv = values.abs().amax().float().reshape(1) / torch.finfo(dtype).max
    codes = (values.float() / scale_inv).to(dtype)
    name = te.DType.kFloat8E4M3 if dtype == E4M3 else te.DType.kFloat8E5M2
    parts = {"data": codes.view(torch.uint8), "data_transpose": None, "fp8_scale_inv": scale_inv}
    return te.Float8TensorStorage(
        **parts, fp8_dtype=name, fake_dtype=BF16
    ), codes.float() * scale_inv


def only() -> Products:
    """Those of this GPU."""
    made = products_on(torch.device("cuda", torch.cuda.current_device()))
    assert made is not None
    return made


# ── Values ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("layout", SHAPES)
def test_in_bf16_it_is_the_product_in_fp32(layout: str, adds: bool):
    left, right = (draw(*shape, seed=seed) for seed, shape in enumerate(SHAPES[layout]))
    residual = draw(N, M, seed=2) if adds else None
    before = None if residual is None else residual.clone()
    matrix = left.t() if layout[0] == "T" else left
    expected = (right.t() if layout[1] == "T" else right).float() @ matrix.float() + (
        residual.float() if adds else 0
    )
    for _ in range(2):  # searched, and then known
        y = searched.multiply(left, right, layout=layout, residual=residual)
        assert y is not None and y.shape == (N, M) and relative_error(y, expected) < ROUNDING
    assert before is None or torch.equal(residual, before)
    assert len(only().chosen) == 1


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("types", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
def test_in_fp8_it_is_the_product_of_the_decoded_operands(
    types: tuple[torch.dtype, torch.dtype], fast: bool, adds: bool
):
    (left, a), (right, b) = (
        in_codes(draw(*shape), dtype) for shape, dtype in zip(SHAPES["TN"], types, strict=True)
    )
    residual = 10 * draw(N, M, seed=2) if adds else None
    expected = b @ a.t() + (residual.float() if adds else 0)
    y = searched.multiply(left, right, fast_accumulation=fast, residual=residual)
    assert y is not None and relative_error(y, expected) < ROUNDING
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    theirs = general_gemm(left, right, out_dtype=BF16, layout="TN", use_split_accumulator=not fast)[
        0
    ]
    theirs = theirs if residual is None else theirs + residual
    assert relative_error(y, theirs.float()) < ROUNDING


@pytest.mark.parametrize("adds", [False, True])
def test_in_blocks_it_is_transformer_engines_product_and_where_there_is_none_it_is_left(adds: bool):
    te = pytest.importorskip("transformer_engine.pytorch")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 products of Hopper")
    weight, x = (
        te.Float8BlockQuantizer(
            te.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dimensions
        )(draw(*shape) * torch.exp2(torch.arange(K, device="cuda") // 128).bfloat16())
        for dimensions, shape in ((2, (M, K)), (1, (N, K)))
    )
    residual = 10 * draw(N, M, seed=2) if adds else None
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    theirs = general_gemm(weight, x, out_dtype=BF16, layout="TN", use_split_accumulator=True)[
        0
    ].float()
    for _ in range(2):  # searched, and then known
        y = searched.multiply(weight, x, residual=residual)
        assert (
            y is not None
            and relative_error(y, theirs if residual is None else theirs + residual) < ROUNDING
        )
    assert searched.multiply(weight, weight) is None  # two tensors in squares of 128 x 128


def test_scales_that_change_between_calls_are_honoured():
    (left, a), (right, b) = (in_codes(draw(*shape), E4M3) for shape in SHAPES["TN"])
    expected = b @ a.t()
    for factor in (1.0, 4.0, 0.5):
        left._scale_inv = left._scale_inv * factor  # another place
        expected = expected * factor
        assert relative_error(searched.multiply(left, right), expected) < ROUNDING
        right._scale_inv.mul_(2)  # another number in the same place
        expected = expected * 2
        assert relative_error(searched.multiply(left, right), expected) < ROUNDING
    assert len(only().chosen) == 1


def test_a_gradient_of_weights_adds_up_in_fp32_and_the_search_adds_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    """Two microbatches, the first of which is searched; and over whatever was there, searched in place or by torch."""
    (x, dy), total = (
        (draw(*shape, seed=seed) for seed, shape in enumerate(SHAPES["NT"])),
        torch.zeros(N, M, device="cuda"),
    )
    expected = dy.double().t() @ x.double()
    for count in (1, 2):
        assert searched.multiply(x, dy, layout="NT", total=total) is total
        assert relative_error(total.double(), count * expected) < 1e-5
    assert len(only().chosen) == 1
    for by_torch in (False, True):
        if by_torch:
            monkeypatch.setattr(searched, "multiply", lambda *_, **__: None)
        products_on.cache_clear()
        total = torch.full((N, M), torch.nan, device="cuda")
        add_product_(total, dy.t(), x, overwrite=True)
        assert relative_error(total.double(), expected) < 1e-5
        add_product_(total, dy.t(), x)
        # rounded to BF16 on the way it would be 2e-3
        assert relative_error(total.double(), 2 * expected) < 1e-5


@pytest.mark.parametrize("best", [1, 2, 3])
def test_whichever_algorithm_is_the_fastest_the_bits_are_those_of_the_first(
    best: int, monkeypatch: pytest.MonkeyPatch
):
    x, weight, residual = draw(8192, 2048), draw(4096, 2048, seed=1), draw(8192, 4096, seed=2)
    found = []
    for number in (0, best):
        monkeypatch.setattr(
            searched, "fastest", lambda times, number=number: min(number, len(times) - 1)
        )
        products_on.cache_clear()
        found.append(
            [searched.multiply(weight, x), searched.multiply(weight, x, residual=residual)]
        )
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


# ── When others compute ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("deterministic")
def test_where_bits_are_to_repeat_nothing_is_searched():
    x, weight = draw(N, K), draw(M, K, seed=1)
    assert searched.multiply(weight, x) is None
    assert torch.equal(searched.linear(x, weight), F.linear(x, weight))
    assert products_on.cache_info().currsize == 0


# ── In fused layers ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("precision", ["current", "block"])
def test_residuals_are_added_by_the_products_unless_results_are_watched(
    precision: str, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("transformer_engine.pytorch")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("FP8 products of Hopper")
    packed = assemble(larger("llama"), precision, fused=True)
    residuals: list[bool] = []
    direct = searched.multiply

    def counted(*operands: Any, residual: Tensor | None = None, **options: Any) -> Tensor | None:
        y = direct(*operands, residual=residual, **options)
        residuals.append(residual is not None and y is not None)
        return y

    monkeypatch.setattr(searched, "multiply", counted)
    batch = inputs(packs=4, seed=0, device="cuda", length=256)
    loss = packed(**batch)
    assert sum(residuals) == 2 * len(packed.fused.layers)
    seen: set[str] = set()
    packed.context.result_observers.append(lambda name, gemm, result, bias: seen.add(name))
    residuals.clear()
    assert packed(**batch).item() == pytest.approx(loss.item(), rel=2e-3)
    assert not any(residuals) and len(seen) == len(packed.fused.products)
