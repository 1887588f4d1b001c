"""Quantize the weights of a checkpoint as training does, in the layouts that servers read.

A served weight has the same codes and scales as in the forward products of training. The formats
of `pretrain.precision.formats` compute the codes and scales, and `pretrain.precision.layouts` packs
them into tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from foundation.errors import InputError
from foundation.reading import load_object
from foundation.units import plural
from pretrain.model.fused.layers import Stack, stack_of
from pretrain.model.huggingface import is_mixture, named_tensors
from pretrain.precision.delayed_state import state_of_operand
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.layouts import LAYOUTS, Layout
from pretrain.precision.quantizers import Quantized
from pretrain.precision.quantizers.tensor import absolute_maximum, decode_scale
from pretrain.precision.settings import LowPrecisionSettings, configured


def served_weights(
    run_dir: Path,
    precision_name: str,
    settings: LowPrecisionSettings,
    hf: PreTrainedModel,
    read: Callable[[str], Tensor],
    delayed_scales: Mapping[str, Tensor],
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
    delayed_scales: the scales of delayed scaling in the checkpoint, as `GemmEngine.state` names
        them. Empty in other precisions.

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
        if any(member in linears and member not in stacks for member in stack_of(name).members)
    ]
    stacks = {name: stack for name, stack in stacks.items() if name not in mixed}
    layout = LAYOUTS[precision.served_as]
    tensors: dict[str, Tensor] = {}
    quantized_values = 0
    for parameter in named_tensors(hf):
        name = parameter.removesuffix(".weight")
        if name not in stacks or not parameter.endswith(".weight"):
            tensors[parameter] = read(parameter)
            continue
        if precision.keeps_history:
            encoding_scale = state_of_operand(
                delayed_scales, stacks[name].product, "input", "scale"
            )
            tensors[f"{name}.input_scale"] = decode_scale(encoding_scale).reshape(1)
        weight = _quantize_as_trained(precision, name, stacks[name], read, delayed_scales)
        tensors |= {f"{name}.{key}": part for key, part in layout.tensors(weight).items()}
        quantized_values += weight.codes.numel()
    unquantized = [name for name in linears if name not in stacks]
    count = f"{quantized_values:,} in {precision_name}; all others are in BF16"
    facts = {"quantized weights": count} | _facts_about(layout, precision, stacks, mixed)
    return tensors, layout.config | {layout.kept_key: unquantized}, facts


def _facts_about(
    layout: Layout, precision: QuantizedPrecision, stacks: Mapping[str, Stack], mixed: list[str]
) -> dict[str, str]:
    """Return facts about the export, by title, for users of a server.

    stacks: map the name of each linear that is quantized in the export to its product in training.
    mixed: the names of linears that only training quantizes.
    """
    # Only the layout "FP8 blocks" has no `format` in its configuration.
    format_name = layout.config.get("format", "blocks of 128 x 128")
    method = layout.config["quant_method"]
    facts = {
        "layout": f"{method} ({format_name}), quantized as in the training forward",
        "activations": layout.activations,
    }
    differs_from_servers = any(stack != stack_of(name) for name, stack in stacks.items())
    if precision.tensor_scaled and differs_from_servers:
        facts["tensor scales"] = (
            "one for each linear, as in training; a server that uses one scale for q, k and v, or "
            "one for gate and up, computes different products"
        )
    if mixed:
        facts["kept in BF16"] = (
            f"{plural(len(mixed), 'linear')} that training quantizes, such as {mixed[0]}; servers "
            "stack q, k and v, or gate and up, and training keeps a part of this stack in BF16"
        )
    return facts


def _quantize_as_trained(
    precision: QuantizedPrecision,
    name: str,
    stack: Stack,
    read: Callable[[str], Tensor],
    delayed_scales: Mapping[str, Tensor],
) -> Quantized:
    """Return the weight of a linear as the forward of training quantizes it.

    name: the name of the linear.
    stack: the product that computes the linear.

    For the other arguments see `served_weights`.
    """
    scale = amax = None
    if precision.keeps_history:
        scale = state_of_operand(delayed_scales, stack.product, "weight", "scale")
    elif precision.tensor_scaled:
        amax = max(absolute_maximum(read(f"{member}.weight")) for member in stack.members)
    return precision.quantizer("weight", "features")(read(f"{name}.weight"), scale, amax)


def _trained_stacks(run_dir: Path, precision_name: str) -> dict[str, Stack]:
    """Map the name of each linear that the run quantizes to the product that computes it.

    The products are read from the record of the precision in audit.json. Raises InputError if there
    is no such record.
    """
    audit = load_object(run_dir / "audit.json", "start the run again to write it")
    # Without phases of precision, audit.json is the record of the only precision.
    audit = audit.get("precisions", {}).get(precision_name, audit)
    if audit["effective"] != precision_name:
        raise InputError(
            f"{run_dir / 'audit.json'}: the run was last started in {audit['effective']}, but the "
            f"checkpoint was saved earlier, in {precision_name}; choose a checkpoint that was "
            "saved after the run was last started"
        )
    return _stacks_in(audit)


def _stacks_in(audit: Mapping[str, Any]) -> dict[str, Stack]:
    """Map the name of each quantized linear to the product that computes it.

    A fused layer computes several linears in one product. Their stacked weights share one tensor
    scale.

    audit: the record of a precision in audit.json.
    """
    stacks = {}
    for entry in audit["products"]:
        name = entry["name"]
        if entry["products"]:
            is_fused = entry["module"].startswith("fused ")
            stacks[name] = stack_of(name) if is_fused else Stack(name, (name,))
    return stacks


def _check_supported(
    precision: QuantizedPrecision,
    hf: PreTrainedModel,
    linears: Collection[str],
    quantized: Collection[str],
) -> None:
    """Raise InputError if no layout can hold one of the quantized weights of `hf`."""
    stored = named_tensors(hf)
    if precision.served_as not in LAYOUTS:
        reason = f"no server reads weights in {precision.name}"
    elif is_mixture(hf):
        reason = "the layouts have no place for the experts of a mixture"
    elif not {*quantized} <= {*linears}:
        reason = "a Conv1D stores its weight transposed"
    elif not {f"{name}.weight" for name in quantized} <= {*stored}:
        reason = "the head is quantized, but it shares its weight with the embedding"
    elif _rearranged(hf, stored):
        reason = (
            f"transformers stacks or splits weights when it saves {hf.config.model_type}, and "
            "would not do the same to their scales"
        )
    else:
        return
    raise InputError(f"--precision trained: {reason}; omit --precision to export in BF16")


def _rearranged(hf: PreTrainedModel, tensors: Mapping[str, Tensor]) -> bool:
    """Return True if transformers stacks or splits `tensors` when it saves the model.

    Renamed tensors are the same objects. Their scales are renamed with them.
    """
    saved = revert_weight_conversion(hf, dict(tensors))
    return {*map(id, saved.values())} != {*map(id, tensors.values())}
