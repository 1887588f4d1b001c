"""The sum with the residual and RMSNorm in one kernel, against torch's sum and Transformer Engine's norm and transpose.

The two sum a row's squares in another order, so rstd may be off in its last bits. Where it is not, all bits are the same. Run
with -s to see for how many rows that holds.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.test_activation_gpu import agree, by_columns, exact, parts, quantizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
if torch.cuda.is_available():
    te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.cpp_extensions import general_gemm
    from transformer_engine.pytorch.quantized_tensor import prepare_for_saving, restore_from_saved

    from pretrain.model.fused.norm import rms_norm

EPS = 1e-6
RECIPES = ["delayed", "current", "current_power_of_two", "block", "block_fp32_scale"]
LAST_BITS = 3 * 2**-23


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> str:
    available = te.is_fp8_block_scaling_available if request.param.startswith("block") else te.is_fp8_available
    if not available():
        pytest.skip("not on this GPU")
    return request.param


def inputs(tokens: int, width: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x and what is added to it [tokens, width], with large columns as a model has them, and the norm's weight; BF16."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x, residual = torch.randn(2, tokens, width, generator=generator, device="cuda")
    x[:, ::97] *= 30
    residual[::5] *= 100
    weight = 1 + torch.randn(width, generator=generator, device="cuda") / 4
    return x.bfloat16(), residual.bfloat16(), weight.bfloat16()


def todays(x: Tensor, residual: Tensor | None, weight: Tensor, quantizer: Any) -> tuple[Tensor, Any, Tensor]:
    """The sum, its norm and rstd by three kernels, or two."""
    total = x if residual is None else x + residual
    normed, _, rstd = tex.rmsnorm_fwd(total, weight, EPS, None, quantizer, tex.DType.kBFloat16, 0, False)
    return total, normed, rstd


def rows_alike(ours: Tensor, theirs: Tensor) -> Tensor:
    """Which rows have the same rstd; all have nearly the same."""
    torch.testing.assert_close(ours, theirs, rtol=LAST_BITS, atol=0)
    same = ours == theirs
    print(f"rstd: {int(same.sum())} of {len(same)} rows have the same bits")
    assert same.float().mean() > 0.1
    return same


@pytest.mark.parametrize("width", [896, 2048, 4096])
@pytest.mark.parametrize("add", [True, False])
def test_all_bits_are_the_librarys_where_rstd_is(recipe: str, add: bool, width: int) -> None:
    x, residual, weight = inputs(1024, width)
    residual = residual if add else None
    mine, its = quantizer(recipe, "activated"), quantizer(recipe, "activated")
    total, expected, expected_rstd = todays(x.clone(), residual, weight, its)
    normed, rstd = rms_norm(x, residual, weight, EPS, mine)
    assert torch.equal(x, total)
    same = rows_alike(rstd, expected_rstd)
    ours, theirs = parts(normed), parts(expected)
    assert torch.equal(ours["rows"][same], theirs["rows"][same])
    if recipe.startswith("block"):
        assert torch.equal(ours["rows_scale"][:, same], theirs["rows_scale"][:, same])
    else:
        assert torch.equal(ours["columns"][:, same], theirs["columns"][:, same])
        assert torch.equal(ours["rows_scale"], theirs["rows_scale"])
    for name in ours:  # 128 rows share a scale along columns, so one of them may decide it
        agree(name, ours[name], theirs[name])
    if recipe == "delayed":
        torch.testing.assert_close(mine.amax, its.amax, rtol=LAST_BITS, atol=0)
        assert mine.amax > 0


@pytest.mark.parametrize("width", [576, 1536, 2048, 5120, 8192])
def test_real_sizes_have_the_bits_of_the_formula(width: int) -> None:
    """Hidden sizes of models, and tokens enough for every multiprocessor: a program's sums are read again by other threads."""
    x, residual, weight = inputs(8192, width, seed=1)
    total, mine = x + residual, quantizer("delayed", "activated")
    normed, rstd = rms_norm(x, residual, weight, EPS, mine)
    assert torch.equal(x, total)
    values = weight.float() * (rstd[:, None] * total.float())
    codes = (values * mine.scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(mine.amax, values.abs().max().reshape(1))
    assert torch.equal(parts(normed)["rows"], codes) and torch.equal(parts(normed)["columns"], codes.t())
    torch.testing.assert_close(rstd.double(), torch.rsqrt(total.double().square().mean(1) + EPS), rtol=LAST_BITS, atol=0)


@pytest.mark.parametrize("width", [2048, 160])
def test_bf16_is_the_librarys_too(width: int) -> None:
    x, residual, weight = inputs(1024, width)
    total, expected, expected_rstd = todays(x.clone(), residual, weight, None)
    normed, rstd = rms_norm(x, residual, weight, EPS, None)
    assert torch.equal(x, total) and normed.dtype == torch.bfloat16
    same = rows_alike(rstd, expected_rstd)
    assert torch.equal(normed[same], expected[same])


def test_what_is_no_whole_tile_goes_to_the_library(recipe: str) -> None:
    x, residual, weight = inputs(64, 192 if recipe.startswith("block") else 160)
    total, expected, expected_rstd = todays(x.clone(), residual, weight, quantizer(recipe, "activated"))
    normed, rstd = rms_norm(x, residual, weight, EPS, quantizer(recipe, "activated"))
    assert torch.equal(x, total) and torch.equal(rstd, expected_rstd)
    for name, part in parts(expected).items():
        assert torch.equal(parts(normed)[name], part)


def test_without_a_backward_there_are_no_columns(recipe: str) -> None:
    x, residual, weight = inputs(256, 512)
    both, _ = rms_norm(x.clone(), residual, weight, EPS, quantizer(recipe, "activated"))
    rows, _ = rms_norm(x, residual, weight, EPS, quantizer(recipe, "activated", columns=False))
    assert parts(rows)["columns"] is None and parts(both)["columns"] is not None
    assert torch.equal(parts(rows)["rows"], parts(both)["rows"])


def test_results_are_operands_of_the_librarys_products(recipe: str) -> None:
    x, residual, weight = inputs(1024, 512)
    generator = torch.Generator("cuda").manual_seed(2)
    normed, _ = rms_norm(x, residual, weight, EPS, quantizer(recipe, "activated"))
    matrix = quantizer(recipe, "weight")(torch.randn(256, 512, generator=generator, device="cuda").bfloat16() / 50)
    dy = quantizer(recipe, "gradient")(torch.randn(1024, 256, generator=generator, device="cuda").bfloat16())

    def error(product: Tensor, expected: Tensor) -> float:
        return ((product.double() - expected).norm() / expected.norm()).item()

    options = {"out_dtype": torch.float32, "use_split_accumulator": True}
    y = general_gemm(matrix, normed, layout="TN", **options)[0]
    assert error(y, exact(normed) @ exact(matrix).t()) < 5e-3
    expected = by_columns(dy).t() @ by_columns(normed)
    normed.update_usage(rowwise_usage=False)  # as it is kept for backward
    saved, objects = prepare_for_saving(normed)
    (normed,) = restore_from_saved(objects, saved)
    assert error(general_gemm(normed, dy, layout="NT", **options)[0], expected) < 5e-3


def test_a_step_of_the_real_size_repeats_to_the_bit(recipe: str) -> None:
    x, residual, weight = inputs(32_768, 2048)
    runs = []
    for _ in range(2):
        total = x.clone()
        normed, rstd = rms_norm(total, residual, weight, EPS, quantizer(recipe, "activated"))
        runs.append([total, rstd, *(part for part in parts(normed).values() if part is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
