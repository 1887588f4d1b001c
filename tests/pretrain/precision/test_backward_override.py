"""`fp8_config.backward_override` quantizes the forward product only.

With `dequantized`, backward multiplies the values of the forward product. The NumPy reference
quantizers and the formula of Transformer Engine's kernel for NVFP4 compute the expected values.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foundation.overrides import overridden
from pretrain.precision.quantizers import blocks
from pretrain.verify.reference_quantizer import quantize_dequantize
from tests.pretrain.conftest import active_in, emulation_of, linear_of
from tests.pretrain.observe.test_operand_statistics import SmallModel
from tests.pretrain.precision.test_emulation import IN, OUT, close, operands, run

CASES: list[tuple[str, dict[str, Any]]] = [
    ("current", {}),
    ("current", {"fp8_format": "E4M3"}),
    ("block", {}),
    ("block", {"use_f32_scales": True}),
    ("mxfp8", {}),
    ("nvfp4", {}),
]


def reference(precision: str, options: dict[str, Any], role: str, x: Tensor) -> Tensor:
    """Return x after the NumPy reference quantizer for the forward product, in FP32."""
    quantized = active_in(precision, **options).quantized_precision
    return quantize_dequantize(
        x,
        quantized.scaling(role),
        quantized.grid(role).name,
        scale=None,
        uniform=None,
        transform=False,
    )


def trained(override: str | None, precision: str, options: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the output and the gradients of x and of the weight in emulation."""
    linear = linear_of(emulation_of(precision, backward_override=override, **options), IN, OUT)
    x, weight, _, grad = operands()
    return run(linear, x, weight, None, grad)


@pytest.mark.parametrize(("precision", "options"), CASES)
def test_high_precision_multiplies_the_unquantized_operands(
    precision: str, options: dict[str, Any]
) -> None:
    x, weight, _, grad = operands()
    y, grad_x, grad_weight = trained("high_precision", precision, options)
    assert torch.equal(y, trained(None, precision, options)[0])
    assert torch.equal(grad_x, grad @ weight) and torch.equal(grad_weight, grad.t() @ x)


@pytest.mark.parametrize(("precision", "options"), CASES)
def test_dequantized_multiplies_the_values_of_the_forward_product(
    precision: str, options: dict[str, Any]
) -> None:
    x, weight, _, grad = operands()
    y, grad_x, grad_weight = trained("dequantized", precision, options)
    x_out = reference(precision, options, "input", x)
    w_out = reference(precision, options, "weight", weight)
    assert torch.equal(y, trained(None, precision, options)[0])
    assert close(y, x_out, w_out)
    assert torch.equal(grad_x, grad @ w_out.bfloat16())
    assert torch.equal(grad_weight, grad.t() @ x_out.bfloat16())


def test_nvfp4_is_dequantized_as_by_the_kernel() -> None:
    """dequantize_fp4_kernel of Transformer Engine rounds after each product of the scales."""
    gemm = emulation_of("nvfp4", backward_override="dequantized").gemm("layer", 64, 64)
    for mantissa in range(128, 256):  # of the amax
        torch.manual_seed(mantissa)
        weight = torch.randn(64, 64).clamp(-4, 4).bfloat16()
        weight[0, 0] = amax = mantissa / 32
        quantized = blocks.quantize_nvfp4(weight, two_dimensional=True)
        scale = (quantized.block_scale * amax) * torch.tensor(1 / (6 * 448))
        dequantized = gemm.dequantize(gemm.quantize("weight", weight))
        assert torch.equal(dequantized, (quantized.codes * scale).bfloat16())


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
@pytest.mark.parametrize("precision", ["current", "nvfp4"])
def test_recomputing_a_layer_changes_no_bit_of_its_gradients(precision: str, override: str) -> None:
    gradients = []
    for recompute in (False, True):
        model = SmallModel(precision, backward_override=override)
        call = model.context.checkpoint if recompute else nn.Module.__call__
        for first in (True, False):
            with (
                overridden(model.context, first_microbatch=first),
                model.context.forward(training=True),
            ):
                y = call(model.layers, model.x)
            y.float().square().mean().backward()
        gradients.append([weight.grad for weight in model.layers.parameters()])
    assert all(map(torch.equal, *gradients))
