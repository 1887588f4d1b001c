"""Layouts of quantized weights in the files of a model, as servers read them.

A layout has the names of a weight's tensors, the block that shares a scale, and the type of the
scales. Files are read and written by the same table, `LAYOUTS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pretrain.precision.quantizers import Quantized
from pretrain.precision.quantizers.blocks import FP8_BLOCK, MX_BLOCK, NVFP4_BLOCK
from pretrain.precision.quantizers.tensor import FP32_MANTISSA_BITS, decode_scale

# The magnitudes of E2M1, in the order of their codes.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The last part of the name of NVFP4's scale of a tensor. The file has its reciprocal.
GLOBAL_SCALE = "weight_global_scale"


@dataclass(frozen=True)
class Layout:
    """A layout of quantized weights in a model folder, and its description in config.json.

    The fields without a comment have the defaults of FP8 in compressed-tensors.
    """

    # The rows and columns of a weight [out, in] that share a scale. None: all of them.
    block: tuple[int | None, int | None]
    # The value of `quantization_config` without the names of the linears that stay in BF16.
    config: dict[str, Any]
    # A text for users: how a server quantizes activations, compared with training.
    activations: str
    # The key of `config` with the names of the linears that stay in BF16.
    kept_key: str = "ignore"
    # The last part of the name of the codes, and of the name of the scales. The latter are always
    # factors of the codes, also if their name ends in `inv`.
    codes: str = "weight"
    scales: str = "weight_scale"
    # FP32, or uint8 for the exponents of powers of two (E8M0), or E4M3. With E4M3, the scale of a
    # block is divided by the tensor GLOBAL_SCALE.
    scale_dtype: torch.dtype = torch.float32

    @property
    def is_packed(self) -> bool:
        """Return True if a byte has two E2M1 codes. Otherwise a byte has one E4M3 code."""
        return self.codes == "weight_packed"

    def tensors(self, weight: Quantized) -> dict[str, Tensor]:
        """Return the tensors that store a quantized weight [out, in].

        Each key is the last part of a tensor's name. NVFP4 has a scale for every 16 values of a
        row. In training, a square of 16 x 16 values has one scale, which each of its rows repeats.
        """
        rows, columns = self.block
        scales = weight.tensor_scale.reshape(1)
        if columns:
            scales = weight.block_scale[::rows, ::columns]
        is_e8m0 = self.scale_dtype == torch.uint8
        tensors = {
            self.codes: _packed_e2m1(weight.codes) if self.is_packed else _fp8(weight.codes),
            self.scales: _e8m0(scales) if is_e8m0 else scales.to(self.scale_dtype).contiguous(),
        }
        if self.scale_dtype == torch.float8_e4m3fn:
            tensors[GLOBAL_SCALE] = decode_scale(weight.tensor_scale).reshape(1)
        return tensors


def _fp8(codes: Tensor) -> Tensor:
    """Return E4M3 codes in torch's FP8 dtype. The cast is exact, because codes are E4M3 values."""
    return codes.to(torch.float8_e4m3fn).contiguous()


def _e8m0(scales: Tensor) -> Tensor:
    """Return the biased exponents of FP32 powers of two as uint8."""
    return (scales.contiguous().view(torch.int32) >> FP32_MANTISSA_BITS).to(torch.uint8)


def _packed_e2m1(codes: Tensor) -> Tensor:
    """Return E2M1 codes [out, in] as bytes [out, in / 2], the first code in the lower four bits."""
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, device=codes.device)
    bits = torch.searchsorted(magnitudes, codes.abs().contiguous()) | codes.signbit().long() << 3
    return (bits[:, ::2] | bits[:, 1::2] << 4).to(torch.uint8)


def _compressed_tensors(
    file_format: str, weights: dict[str, Any], activations: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the `quantization_config` of a layout of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": file_format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"output_activations": None}},
    }


def _arguments(bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    """Return the description of an operand in the format of compressed-tensors."""
    arguments = {"num_bits": bits, "type": "float", "strategy": strategy, "symmetric": True}
    return arguments | {"dynamic": False} | more


_MX = {"group_size": MX_BLOCK, "scale_dtype": "torch.uint8"}
_TENSOR = _arguments(8, "tensor")
_MX_ACTIVATIONS = (
    "quantized by the server; its power-of-two scales may be smaller than those of training, so "
    "values may saturate, unlike in training"
)
_FP8_BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
}
# Map each value of `QuantizedPrecision.served_as` to its layout.
LAYOUTS = {
    "static FP8": Layout(
        (None, None),
        _compressed_tensors("float-quantized", _TENSOR, _TENSOR),
        "quantized with the scales in the checkpoint (`input_scale`)",
    ),
    "FP8": Layout(
        (None, None),
        _compressed_tensors("float-quantized", _TENSOR, _TENSOR | {"dynamic": True}),
        "quantized by the server, with one scale per tensor as in training, or with one per token",
    ),
    "FP8 blocks": Layout(
        (FP8_BLOCK, FP8_BLOCK),
        # Request powers of two as scales of activations, as in training.
        _FP8_BLOCKS | {"scale_fmt": "ue8m0"},
        "quantized by the server, with power-of-two scales as in training if it honours "
        "`scale_fmt: ue8m0`, else with FP32 scales",
        "modules_to_not_convert",
        scales="weight_scale_inv",
    ),
    "FP8 blocks with FP32 scales": Layout(
        (FP8_BLOCK, FP8_BLOCK),
        _FP8_BLOCKS,
        "quantized by the server, with FP32 scales as in training on Hopper",
        "modules_to_not_convert",
        scales="weight_scale_inv",
    ),
    "MXFP8": Layout(
        (1, MX_BLOCK),
        _compressed_tensors(
            "mxfp8-quantized",
            _arguments(8, "group", **_MX),
            _arguments(8, "group", **_MX, dynamic=True),
        ),
        _MX_ACTIVATIONS,
        scale_dtype=torch.uint8,
    ),
    "MXFP4": Layout(
        (1, MX_BLOCK),
        _compressed_tensors(
            "mxfp4-pack-quantized",
            _arguments(4, "group", **_MX),
            _arguments(4, "group", **_MX, dynamic=True),
        ),
        _MX_ACTIVATIONS,
        codes="weight_packed",
        scale_dtype=torch.uint8,
    ),
    "NVFP4": Layout(
        (1, NVFP4_BLOCK),
        _compressed_tensors(
            "nvfp4-pack-quantized", _arguments(4, "tensor_group", group_size=NVFP4_BLOCK), None
        ),
        "in BF16, because the layout needs a fixed tensor scale of activations, and training "
        "computes a new one for each microbatch",
        codes="weight_packed",
        scale_dtype=torch.float8_e4m3fn,
    ),
}
