"""Quantize the weights of a checkpoint as training does, in the layouts that servers read.

A served weight has the same codes and scales as in the forward products of training. The formats
of `pretrain.precision.formats` compute the codes and scales. This file only packs them into the
tensors of a layout, and describes the layout in the config.json of the export.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from foundation.errors import InputError
from foundation.reading import load_object
from foundation.units import plural
from pretrain.model.fused.layers import stack_of
from pretrain.model.huggingface import is_mixture, named_tensors
from pretrain.precision.delayed_state import of_operand
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.quantizers import Quantized
from pretrain.precision.quantizers.blocks import FP8_BLOCK, MX_BLOCK, NVFP4_BLOCK
from pretrain.precision.quantizers.tensor import (
    FP32_MANTISSA_BITS,
    absolute_maximum,
    decode_scale,
)
from pretrain.precision.settings import LowPrecisionSettings, configured

# The magnitudes of E2M1, in the order of their codes.
_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


# ── Layouts ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Layout:
    """A layout of quantized weights in a model folder, and its description in config.json."""

    # Return the tensors that store a quantized weight [out, in]. Each key is the last part of a
    # tensor's name.
    tensors: Callable[[Quantized], dict[str, Tensor]]
    # The value of `quantization_config` without the names of the linears that stay in BF16.
    config: dict[str, Any]
    # A text for users: how a server quantizes activations, compared with training.
    activations: str
    # The key of `config` with the names of the linears that stay in BF16.
    kept_key: str = "ignore"


def _fp8_tensor(weight: Quantized) -> dict[str, Tensor]:
    return {"weight": _fp8(weight.codes), "weight_scale": weight.tensor_scale.reshape(1)}


def _fp8_blocks(weight: Any) -> dict[str, Tensor]:
    return {"weight": _fp8(weight.codes), "weight_scale_inv": weight.scales.contiguous()}


def _mxfp8(weight: Any) -> dict[str, Tensor]:
    return {"weight": _fp8(weight.codes), "weight_scale": _e8m0(weight.scales)}


def _mxfp4(weight: Any) -> dict[str, Tensor]:
    return {"weight_packed": _packed_e2m1(weight.codes), "weight_scale": _e8m0(weight.scales)}


def _nvfp4(weight: Quantized) -> dict[str, Tensor]:
    # The layout has a scale for every 16 values of a row. Training has one scale for a square of
    # 16 x 16 values. This scale is repeated in each row of the square.
    scales = weight.block_scale[:, ::NVFP4_BLOCK]
    return {
        "weight_packed": _packed_e2m1(weight.codes),
        "weight_scale": scales.to(torch.float8_e4m3fn).contiguous(),
        "weight_global_scale": decode_scale(weight.tensor_scale).reshape(1),
    }


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
        _fp8_tensor,
        _compressed_tensors("float-quantized", _TENSOR, _TENSOR),
        "quantized with the scales in the checkpoint (`input_scale`)",
    ),
    "FP8": Layout(
        _fp8_tensor,
        _compressed_tensors("float-quantized", _TENSOR, _TENSOR | {"dynamic": True}),
        "quantized by the server, with one scale per tensor as in training, or with one per token",
    ),
    "FP8 blocks": Layout(
        _fp8_blocks,
        # Request powers of two as scales of activations, as in training.
        _FP8_BLOCKS | {"scale_fmt": "ue8m0"},
        "quantized by the server, with power-of-two scales as in training if it honours "
        "`scale_fmt: ue8m0`, else with FP32 scales",
        "modules_to_not_convert",
    ),
    "FP8 blocks with FP32 scales": Layout(
        _fp8_blocks,
        _FP8_BLOCKS,
        "quantized by the server, with FP32 scales as in training on Hopper",
        "modules_to_not_convert",
    ),
    "MXFP8": Layout(
        _mxfp8,
        _compressed_tensors(
            "mxfp8-quantized",
            _arguments(8, "group", **_MX),
            _arguments(8, "group", **_MX, dynamic=True),
        ),
        _MX_ACTIVATIONS,
    ),
    "MXFP4": Layout(
        _mxfp4,
        _compressed_tensors(
            "mxfp4-pack-quantized",
            _arguments(4, "group", **_MX),
            _arguments(4, "group", **_MX, dynamic=True),
        ),
        _MX_ACTIVATIONS,
    ),
    "NVFP4": Layout(
        _nvfp4,
        _compressed_tensors(
            "nvfp4-pack-quantized", _arguments(4, "tensor_group", group_size=NVFP4_BLOCK), None
        ),
        "in BF16, because the layout needs a fixed tensor scale of activations, and training "
        "computes a new one for each microbatch",
    ),
}


# ── The weights of a checkpoint ───────────────────────────────────────────────────────────────────


def served_weights(
    run_dir: Path,
    precision_name: str,
    settings: LowPrecisionSettings,
    hf: PreTrainedModel,
    read: Callable[[str], Tensor],
    histories: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, str]]:
    """Quantize the weights of a checkpoint as the forward of its next training step would.

    Returns three dicts:

    * All tensors of the model folder by name: codes and scales of the quantized linears, and all
      other parameters in BF16.
    * The value of `quantization_config` in config.json.
    * Facts about the export, by title, for the console and the model card.

    run_dir: the run folder. Its audit.json lists the linears that are quantized in training, and
        the linears whose weights are stacked for one product.
    precision_name: the precision of the checkpoint.
    settings: `fp8_config` of the run.
    hf: the model on the meta device, in BF16.
    read: maps the name of a parameter to its BF16 value. Training casts FP32 weights to BF16 before
        it quantizes them, so they are read in BF16 too.
    histories: the scales of delayed scaling in the checkpoint, as `GemmEngine.state` names them.

    Raises InputError if training multiplies in BF16 or FP32, or if no layout holds the weights.
    """
    precision = configured(precision_name, settings)
    if not isinstance(precision, QuantizedPrecision):
        raise InputError(
            "--precision trained: the products of this checkpoint are not quantized "
            f"({precision_name}); omit --precision"
        )
    stacks = _trained_stacks(run_dir, precision_name)
    linears = [name for name, module in hf.named_modules() if isinstance(module, nn.Linear)]
    _check_supported(precision, hf, linears, stacks)
    # Servers stack q, k and v, and gate and up. They reject a stack with weights in two formats.
    mixed = [
        name
        for name in stacks
        if any(member in linears and member not in stacks for member in stack_of(name)[1])
    ]
    stacks = {name: stack for name, stack in stacks.items() if name not in mixed}
    layout = LAYOUTS[precision.served_as]
    quantize = precision.quantizer("weight", "features")
    tensors: dict[str, Tensor] = {}
    values = 0
    for parameter in named_tensors(hf):
        name = parameter.removesuffix(".weight")
        if name not in stacks or name == parameter:
            tensors[parameter] = read(parameter)
            continue
        stack, members = stacks[name]
        scale = amax = None
        if precision.keeps_history:
            scale = of_operand(histories, stack, "weight", "scale")
            of_input = decode_scale(of_operand(histories, stack, "input", "scale"))
            tensors[f"{name}.input_scale"] = of_input.reshape(1)
        elif precision.tensor_scaled:
            amax = max(absolute_maximum(read(f"{member}.weight")) for member in members)
        weight = quantize(read(parameter), scale, amax)
        tensors |= {f"{name}.{key}": part for key, part in layout.tensors(weight).items()}
        values += weight.codes.numel()
    kind = layout.config.get("format", "blocks of 128 x 128")
    facts = {
        "quantized weights": f"{values:,} in {precision_name}; all others are in BF16",
        "layout": f"{layout.config['quant_method']} ({kind}), quantized as in the training forward",
        "activations": layout.activations,
    }
    if all(name == stack for name, (stack, _) in stacks.items()) and precision.tensor_scaled:
        facts["tensor scales"] = (
            "one for each linear, as in training; a server that uses one scale for q, k and v, or "
            "one for gate and up, computes different products"
        )
    if mixed:
        facts["kept in BF16"] = (
            f"{plural(len(mixed), 'linear')} that training quantizes, such as {mixed[0]}; servers "
            "stack q, k and v, or gate and up, and training keeps a part of this stack in BF16"
        )
    kept = [name for name in linears if name not in stacks]
    return tensors, layout.config | {layout.kept_key: kept}, facts


def _trained_stacks(run_dir: Path, precision_name: str) -> dict[str, tuple[str, Collection[str]]]:
    """Map each quantized linear to (name of its product, names of the linears in this product).

    A fused layer computes several linears in one product. Their stacked weights share one tensor
    scale.
    Raises InputError if audit.json has no record of the precision.
    """
    audit = load_object(run_dir / "audit.json", "start the run again to write it")
    audit = audit.get("precisions", {}).get(precision_name, audit)
    if audit["effective"] != precision_name:
        raise InputError(
            f"{run_dir / 'audit.json'}: the run was last started in {audit['effective']}, but the "
            f"checkpoint was saved earlier, in {precision_name}; choose a checkpoint that was "
            "saved after the run was last started"
        )
    return {
        entry["name"]: stack_of(entry["name"])
        if entry["module"].startswith("fused ")
        else (entry["name"], (entry["name"],))
        for entry in audit["products"]
        if entry["products"]
    }


def _check_supported(
    precision: QuantizedPrecision,
    hf: PreTrainedModel,
    linears: Collection[str],
    quantized: Collection[str],
) -> None:
    """Raise InputError if no layout can hold one of the quantized weights of `hf`."""
    stored = named_tensors(hf).keys()
    reasons = {
        f"no server reads weights in {precision.name}": precision.served_as not in LAYOUTS,
        "the layouts have no place for the experts of a mixture": is_mixture(hf),
        "a Conv1D stores its weight transposed": not {*quantized} <= {*linears},
        "the head is quantized, but it shares its weight with the embedding": any(
            f"{name}.weight" not in stored for name in quantized
        ),
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason:
        raise InputError(f"--precision trained: {reason}; omit --precision to export in BF16")
