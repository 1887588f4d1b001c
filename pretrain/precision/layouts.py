"""Layouts of quantized weights in the files of a model, as servers read them.

A layout has the names of a weight's tensors, the block that shares a scale, and the type of the
scales. Files are read and written by the same table, `LAYOUTS`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foundation.settings import flatten
from pretrain.precision.quantizers import E2M1, E4M3, Quantized
from pretrain.precision.quantizers.blocks import FP8_BLOCK, MX_BLOCK, NVFP4_BLOCK
from pretrain.precision.quantizers.tensor import decode_scale

# The values of E2M1 in the order of their codes: first the positive ones, then the negative ones.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_VALUES = (*_E2M1_MAGNITUDES, *(-magnitude for magnitude in _E2M1_MAGNITUDES))
# Names of scales that belong to activations, or to the cache of keys and values. Training computes
# its own scales of activations.
_SCALES_OF_ACTIVATIONS = re.compile(r"\.(input|output|activation|q|k|v|kv|prob)(_global)?_scale$")
# Keys of `quantization_config` that are accepted. `layout_of` reads them, or the weights do not
# depend on them: they describe activations, the KV cache, or the origin and the loading of the
# files, or repeat facts about the tensors, such as the names of the linears that stay in BF16. Some
# keys are accepted with these values only. The weights of other sparsity formats lack their zeros.
_ACCEPTED_KEYS = re.compile(
    r"""
    [^=]*=(None | \[\])
    | ( quant_method | format | weight_block_size | fmt | scale_fmt | activation_scheme
    | ignore | ignored_layers | modules_to_not_convert | modules_to_convert | kv_cache_scheme
    | version | provider | quantization_status | global_compression_ratio
    | dequantize | run_compressed | use_optimized_inference ) [.=].*
    | expert_dtype=fp8
    | sparsity_config\. ( format=dense
        | ( global_sparsity | sparsity_structure | targets | ignore
          | registry_requires_subclass )=.* )
    | config_groups\.[^.]+\. ( (targets | format | input_activations | output_activations) [.=].*
        | weights\.(group_size | block_structure | scale_dtype | zp_dtype | observer)=.*
        | weights\.observer_kwargs\..*
        | weights\.strategy=(tensor | channel | group | block | tensor_group)
        | weights\.( num_bits=[48] | type=float | symmetric=True | dynamic=False )
        | weights\.actorder=(False | weight | static) )
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Layout:
    """A layout of quantized weights in a model folder, and its description in config.json."""

    # The rows and columns of a weight [out, in] that share a scale. None: all of them.
    block: tuple[int | None, int | None]
    # The value of `quantization_config` without the names of the linears that stay in BF16.
    config: dict[str, Any]
    # A text for users: how a server quantizes activations, compared with training.
    activations: str
    # The key of `config` with the names of the linears that stay in BF16.
    kept_key: str = "ignore"
    # The last parts of the names of a weight's tensors: E4M3 codes, or pairs of E2M1 codes in
    # `weight_packed`, then their scales. Scales are factors of the codes, even if their name ends
    # in `inv`. A third tensor is the reciprocal of a further factor, the scale of the weight.
    parts: tuple[str, ...] = ("weight", "weight_scale")
    # The dtype of scales: FP32, E8M0 for powers of two, which files store as uint8, or E4M3.
    scale_dtype: torch.dtype = torch.float32

    @property
    def is_packed(self) -> bool:
        """Return True if the codes are E2M1, two in a byte. Otherwise they are E4M3."""
        return self.parts[0] == "weight_packed"

    def tensors(self, weight: Quantized) -> dict[str, Tensor]:
        """Return the tensors that store a quantized weight [out, in].

        Each key is the last part of a tensor's name. NVFP4 has a scale for every 16 values of a
        row. Training has one scale for a square of 16 x 16 values. This scale is repeated in each
        row of the square.
        """
        rows, columns = self.block
        scales = weight.tensor_scale.reshape(1)
        if columns:
            scales = weight.block_scale[::rows, ::columns]
        is_e8m0 = self.scale_dtype == torch.float8_e8m0fnu
        scales = scales.to(self.scale_dtype).contiguous()
        # The cast to FP8 is exact, because the codes are E4M3 values.
        fp8 = weight.codes.to(torch.float8_e4m3fn).contiguous()
        tensors = (
            _packed_e2m1(weight.codes) if self.is_packed else fp8,
            scales.view(torch.uint8) if is_e8m0 else scales,
            decode_scale(weight.tensor_scale).reshape(1),
        )
        # Only some layouts store the third tensor.
        return dict(zip(self.parts, tensors, strict=False))

    def read(self, linear: str, slices: Sequence[Any]) -> Quantized:
        """Return the weight that the tensors `parts` store. It is the inverse of `tensors`.

        The result has no tensor scale, because its block scales include it. The last block of a row
        or a column may be incomplete.

        linear: the name of the linear, for messages.
        slices: one tensor, or slice of safetensors, for each of `parts`.

        Raises ValueError for scales of another type or shape, and for values that no scale of a
        weight has.
        """
        codes, scales, *divisors = (stored[...] for stored in slices)
        codes = _unpacked_e2m1(codes) if self.is_packed else codes.float()
        grid = E2M1 if self.is_packed else E4M3
        block = [size or length for size, length in zip(self.block, codes.shape, strict=True)]
        blocks = [math.ceil(length / size) for size, length in zip(block, codes.shape, strict=True)]
        if self.scale_dtype == torch.float8_e8m0fnu:
            scales = scales.view(self.scale_dtype)
        factors = scales.float()
        for divisor in divisors:
            factors = factors / divisor.max()
        # Refuse larger factors, which are probably reciprocals of scales. With them, weights could
        # exceed 448, the largest FP8 code, but the weights of models are far smaller.
        largest = E4M3.maximum / grid.maximum
        self._check_scales(linear, scales, blocks, factors, largest)
        factors = factors.reshape(blocks)
        for axis, length in enumerate(codes.shape):
            factors = factors.repeat_interleave(block[axis], axis).narrow(axis, 0, length)
        return Quantized(codes, factors, torch.ones(()), grid)

    def _check_scales(
        self, linear: str, scales: Tensor, shape: list[int], factors: Tensor, largest: float
    ) -> None:
        """Raise ValueError for scales with another shape than `shape`, or with impossible values.

        Floating-point scales of another dtype than `scale_dtype` are accepted.

        scales: the tensor `parts[1]`.
        factors: the scales in FP32, divided by the divisors of the layout.
        largest: the largest possible factor.
        """
        # One scale of all values may have any number of dimensions.
        has_shape = list(scales.shape) == shape or scales.numel() == math.prod(shape) == 1
        # A comparison with NaN is False.
        are_possible = scales.is_floating_point() and ((factors >= 0) & (factors <= largest)).all()
        if not has_shape or not are_possible:
            raise ValueError(
                f"{linear}: {self.parts[1]} has the shape {list(scales.shape)}, the dtype "
                f"{scales.dtype} and factors up to {factors.max():.1e}; expected are the shape "
                f"{shape} and the dtype {self.scale_dtype} by `quantization_config`, and factors "
                f"from 0 to {largest:.0f}"
            )


def _packed_e2m1(codes: Tensor) -> Tensor:
    """Return E2M1 codes [out, in] as bytes [out, in / 2], the first code in the lower four bits.

    The four bits of a code are its sign and the index of its magnitude.
    """
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, device=codes.device)
    index = torch.searchsorted(magnitudes, codes.abs().contiguous())
    bits = index | (codes.signbit().long() << 3)
    return (bits[:, ::2] | (bits[:, 1::2] << 4)).to(torch.uint8)


def _unpacked_e2m1(packed: Tensor) -> Tensor:
    """Return the E2M1 codes [out, in] of bytes [out, in / 2]. It is the inverse of packing."""
    bits = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
    return torch.tensor(_E2M1_VALUES)[bits.long()]


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
    return {**arguments, "dynamic": False, **more}


_TENSOR = _arguments(8, "tensor")
_MX = {"group_size": MX_BLOCK, "scale_dtype": "torch.uint8"}
_MXFP8 = _arguments(8, "group", **_MX)
_MXFP4 = _arguments(4, "group", **_MX)
# The scales of activations are computed by the server, and not stored.
_DYNAMIC = {"dynamic": True}
_MX_ACTIVATIONS = (
    "quantized by the server; its power-of-two scales may be smaller than those of training, so "
    "values may saturate, unlike in training"
)
# Map each value of `QuantizedPrecision.served_as` to its layout.
LAYOUTS = {
    "static FP8": Layout(
        (None, None),
        _compressed_tensors("float-quantized", _TENSOR, _TENSOR),
        "quantized with the scales in the checkpoint (`input_scale`)",
    ),
    "FP8": Layout(
        (None, None),
        _compressed_tensors("float-quantized", _TENSOR, _TENSOR | _DYNAMIC),
        "quantized by the server, with one scale per tensor as in training, or with one per token",
    ),
    "FP8 blocks": Layout(
        (FP8_BLOCK, FP8_BLOCK),
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            # Request powers of two as scales of activations, as in training.
            "scale_fmt": "ue8m0",
        },
        "quantized by the server, with power-of-two scales as in training if it honours "
        "`scale_fmt: ue8m0`, else with FP32 scales",
        "modules_to_not_convert",
        parts=("weight", "weight_scale_inv"),
    ),
    "MXFP8": Layout(
        (1, MX_BLOCK),
        _compressed_tensors("mxfp8-quantized", _MXFP8, _MXFP8 | _DYNAMIC),
        _MX_ACTIVATIONS,
        scale_dtype=torch.float8_e8m0fnu,
    ),
    "MXFP4": Layout(
        (1, MX_BLOCK),
        _compressed_tensors("mxfp4-pack-quantized", _MXFP4, _MXFP4 | _DYNAMIC),
        _MX_ACTIVATIONS,
        parts=("weight_packed", "weight_scale"),
        scale_dtype=torch.float8_e8m0fnu,
    ),
    "NVFP4": Layout(
        (1, NVFP4_BLOCK),
        _compressed_tensors(
            "nvfp4-pack-quantized", _arguments(4, "tensor_group", group_size=NVFP4_BLOCK), None
        ),
        "in BF16, because the layout needs a fixed tensor scale of activations, and training "
        "computes a new one for each microbatch",
        parts=("weight_packed", "weight_scale", "weight_global_scale"),
        scale_dtype=torch.float8_e4m3fn,
    ),
}


# ── Files of a quantized model ────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class StoredWeight:
    """A quantized weight that is read or computed when it is used.

    `weight[...]` dequantizes it, as `[...]` reads a slice of safetensors.
    """

    # Function that returns the codes and scales.
    read: Callable[[], Quantized]

    def __getitem__(self, index: Any) -> Tensor:
        return self.read().dequantize()[index]


def stored_weights(
    tensors: Iterable[tuple[str, Any]], quantization: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a dict from the name of each parameter to its `StoredWeight`, or to its slice.

    Return an empty dict if `quantization` is None, because transformers can then read the files.
    The files must then have no FP8 codes.

    tensors: the names and slices of all tensors in the files of a model.
    quantization: `quantization_config` in config.json, or None.

    Raises ValueError if tensors of a weight are missing or repeated, for FP8 codes without scales,
    and for unknown layouts. Raises LookupError or TypeError if keys of `quantization` are missing.
    """
    slices: dict[str, Any] = {}
    for name, stored in tensors:
        if name in slices and quantization:
            raise ValueError(f"{name} is in two files")
        slices[name] = stored
    # The tensors of quantized weights are removed from `slices`. The rest is not quantized.
    weights = _take_quantized(slices, layout_of(quantization)) if quantization else {}
    for name, stored in slices.items():
        if stored.get_dtype().startswith("F8"):
            raise ValueError(f"{name} in {stored.get_dtype()} has no scales")
        if name in weights:
            raise ValueError(f"{name} is stored both quantized and in {stored.get_dtype()}")
    if not quantization:
        return {}
    unquantized = {name: slices[name] for name in slices if not _SCALES_OF_ACTIVATIONS.search(name)}
    return weights | unquantized


def layout_of(quantization: Mapping[str, Any]) -> Layout:
    """Return the layout that a `quantization_config` describes. For errors see `stored_weights`."""
    layouts = {
        (layout.config["quant_method"], layout.config.get("format")): layout
        for layout in LAYOUTS.values()
    }
    # Earlier versions of compressed-tensors wrote FP8 under this name.
    layouts["compressed-tensors", "naive-quantized"] = LAYOUTS["FP8"]
    key = (quantization["quant_method"], quantization.get("format"))
    if key not in layouts:
        raise ValueError(f"`quant_method: {key[0]}` with `format: {key[1]}` is not supported")
    for name, value in flatten(quantization).items():
        if not _ACCEPTED_KEYS.fullmatch(f"{name}={value}"):
            raise ValueError(
                f"`quantization_config.{name}: {value!r:.80}` is not supported, and may change the "
                "weights"
            )
    block: Any = quantization.get("weight_block_size")
    if key[0] == "compressed-tensors":
        groups = quantization["config_groups"].values()
        blocks = {_block_of(group["weights"]) for group in groups if group.get("weights")}
        if len(blocks) != 1:
            raise ValueError(
                f"`config_groups` must have one `strategy` and block of weights, but has {blocks}"
            )
        (block,) = blocks
    return replace(layouts[key], block=tuple(block or (None, None)))


def _block_of(weights: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the rows and columns that share a scale, see `Layout.block`.

    weights: the key `weights` of a group in `config_groups` of compressed-tensors.
    """
    if weights["strategy"] == "tensor":
        return (None, None)
    if weights["strategy"] == "channel":
        return (1, None)
    return tuple(weights.get("block_structure") or (1, weights.get("group_size")))


def _take_quantized(slices: dict[str, Any], layout: Layout) -> dict[str, StoredWeight]:
    """Remove the tensors of quantized weights from `slices`. Return these weights by name.

    Raises ValueError if tensors of a weight are missing, or if no weight is quantized.
    """
    # With `quant_method: fp8`, files have either of two names.
    if layout.parts[1] == "weight_scale_inv" and any(
        name.endswith("weight_scale") for name in slices
    ):
        layout = replace(layout, parts=("weight", "weight_scale"))
    suffix = f".{layout.parts[0]}"
    linears = [
        name.removesuffix(suffix)
        for name, stored in slices.items()
        if name.endswith(suffix) and stored.get_dtype() in ("F8_E4M3", "U8")
    ]
    if not linears:
        raise ValueError(f"no {layout.parts[0]} has the codes of `quantization_config`")
    weights = {}
    for linear in linears:
        names = [f"{linear}.{part}" for part in layout.parts]
        if missing := [name for name in names if name not in slices]:
            raise ValueError(f"{missing[0]} is missing, which belongs to codes")
        parts = [slices.pop(name) for name in names]
        weights[f"{linear}.weight"] = StoredWeight(partial(layout.read, linear, parts))
    return weights
