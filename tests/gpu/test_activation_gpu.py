"""SwiGLU quantized in one kernel against Transformer Engine's kernels, and its results as operands of the library's products.

Run with -s to see how many codes differ: the exponentials' last bits do, and decide a rounding now and then.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
if torch.cuda.is_available():
    te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")
    import transformer_engine_torch as tex

    from pretrain.model.fused.activation_kernel import quantized_swiglu as swiglu
    from pretrain.model.fused.activation_kernel import quantized_swiglu_backward as swiglu_backward

TOKENS, WIDTH, OUT = 1024, 1536, 512
SCALES = {"activated": 3.1, "gradient": 40.0, "weight": 100.0}


def quantizer(recipe: str, role: str, *, rows: bool = True, columns: bool = True) -> Any:
    """As the recipe's quantizers are made, delayed scaling's with scales of which one saturates; E5M2 for gradients."""
    dtype = te.DType.kFloat8E5M2 if role == "gradient" else te.DType.kFloat8E4M3
    usage = {"rowwise": rows, "columnwise": columns}
    if recipe == "delayed":
        scale = torch.tensor([SCALES[role]], device="cuda")
        made = te.Float8Quantizer(scale, torch.zeros(1, device="cuda"), dtype, **usage)
    else:
        made = te.Float8CurrentScalingQuantizer(dtype, torch.device("cuda"), **usage)
    made.internal = True
    return made


@pytest.fixture(params=["delayed", "current"])
def recipe(request: pytest.FixtureRequest) -> str:
    if request.param == "delayed" and not te.is_fp8_available():
        pytest.skip("needs FP8")
    return request.param


def inputs(tokens: int = TOKENS, width: int = WIDTH, seed: int = 0) -> tuple[Tensor, Tensor]:
    """hidden [tokens, 2 width] and the gradient of the activated values [tokens, width], BF16, both with outliers."""
    generator = torch.Generator("cuda").manual_seed(seed)
    hidden = 3 * torch.randn(tokens, 2 * width, generator=generator, device="cuda")
    hidden[::7, ::5] *= 20
    hidden[128:256] = 0
    d_activated = torch.randn(tokens, width, generator=generator, device="cuda")
    return hidden.bfloat16(), (d_activated * torch.exp(torch.randn(tokens, 1, generator=generator, device="cuda"))).bfloat16()


def parts(tensor: Any) -> dict[str, Tensor | None]:
    """The buffers of a quantized tensor, by what they are to a product."""
    return {
        "rows": tensor._data,
        "rows_scale": tensor._scale_inv,
        "columns": tensor._transpose,
        "columns_scale": tensor._scale_inv,
    }


def agree(what: str, ours: Tensor | None, theirs: Tensor | None, share: float = 1e-4) -> None:
    """Codes: one apart at most, and at most `share` of them. Scales: a largest value may go to its other BF16 neighbour."""
    assert (ours is None) == (theirs is None), what
    if ours is None:
        return
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, what
    if ours.dtype == torch.uint8:
        ordered = [torch.where(codes < 128, codes.int(), 128 - codes.int()) for codes in (ours, theirs)]
        apart = (ordered[0] - ordered[1]).abs()
        differ, largest = int((apart > 0).sum()), int(apart.max())
        print(f"{what}: {differ} of {apart.numel()} codes differ")
        assert largest <= 1 and differ <= share * apart.numel(), f"{what}: {differ} of {apart.numel()}, by up to {largest}"
    else:
        differ = int((ours != theirs).sum())
        print(f"{what}: {differ} of {ours.numel()} scales differ")
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if ours.numel() == 1 else 2**-7, atol=0)
        assert ours.numel() == 1 or differ <= 1e-3 * ours.numel(), f"{what}: {differ} of {ours.numel()}"


def test_values_transposes_scales_and_amaxes_are_those_of_the_library(recipe: str) -> None:
    hidden, d_activated = inputs()
    ours, theirs = ({role: quantizer(recipe, role) for role in ("activated", "gradient")} for _ in range(2))
    activated, kept = swiglu(hidden, ours["activated"])
    if recipe == "delayed":  # which moves its scales between forward and backward
        ours["activated"].scale.fill_(1e3)
    d_hidden, again = swiglu_backward(d_activated, hidden, ours["gradient"], ours["activated"], kept)
    expected = parts(tex.swiglu(hidden, theirs["activated"]))
    expected_gradient = parts(tex.dswiglu(d_activated, hidden, theirs["gradient"]))
    share = 0.05 if recipe == "delayed" else 1e-4  # which the library quantizes from FP32, and we from BF16
    for direction in ("rows", "columns"):
        made = activated if direction == "rows" else again
        assert parts(made)["columns" if direction == "rows" else "rows"] is None
        for name in (direction, f"{direction}_scale"):
            agree(f"activated {name}", parts(made)[name], expected[name], share)
            agree(f"gradient {name}", parts(d_hidden)[name], expected_gradient[name], share)
    if recipe == "delayed":
        for role in ("activated", "gradient"):
            torch.testing.assert_close(ours[role].amax, theirs[role].amax, rtol=2**-8, atol=0)
            assert ours[role].amax > 0
    assert torch.equal(parts(again)["columns"], parts(activated)["rows"].t())
    assert torch.equal(again._scale_inv, activated._scale_inv)
    assert torch.equal(parts(d_hidden)["columns"], parts(d_hidden)["rows"].t())
