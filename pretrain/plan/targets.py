"""Plan a run for devices that this machine does not have, and check whether they can run it."""

from __future__ import annotations

import re
from dataclasses import replace

from transformers import PreTrainedModel

from foundation.errors import InputError
from foundation.units import GIB, plural
from pretrain.metrics.cards import card_of
from pretrain.model.attention import FA4_GENERATIONS, FA4_HEAD_DIMS, SHORT
from pretrain.plan.memory import Devices, LayerMemory, layers_of
from pretrain.plan.plan import KEPT_FREE, Plan, fits_gathered, spend_spare_memory
from pretrain.precision.formats.definition import HOPPER, QuantizedPrecision
from pretrain.precision.settings import ActivePrecision, configured


def devices_called(text: str) -> Devices:
    """Return the devices that a text such as `H200` or `8xB200` describes.

    The memory of a device is the part that a plan may use. Raise InputError if the device is not
    in the table of cards.
    """
    count, name = re.findall(r"(?s)^\s*(?:(\d+)\s*[xX]\s*)?(.*?)\s*$", text)[0]
    device = card_of(name)
    if device is None or count == "0":
        raise InputError(
            f"--on {text}: this device is not in the table; use the name that its "
            "driver reports, with the number of devices if there are several, such as H200, "
            "8xB200 or 'RTX 4090'"
        )
    usable = int((1 - KEPT_FREE) * int(device.memory * GIB))
    return Devices(int(count or 1), name=name, memory=usable, capability=device.capability)


def plan_on(devices: Devices, plan: Plan, shapes: PreTrainedModel) -> Plan:
    """Return a copy of `plan` for `devices`.

    Precisions that are emulated on this machine are computed by the hardware of the devices. The
    model is sharded if it does not fit into one device. Weights are then gathered once a step if
    they fit.

    devices: the result of `devices_called`.
    shapes: the model on the meta device.
    """
    phases = [
        (until, replace(active, engine="transformer_engine", reason=None))
        if active.engine == "emulation"
        else (until, active)
        for until, active in plan.schedule.phases
    ]
    schedule = replace(plan.schedule, phases=phases)
    plan = replace(plan, schedule=schedule, devices=devices)
    attention = _attention(plan)
    layers = {
        active.precision.name: _layers(plan, shapes, active, attention)
        for active in plan.precisions
    }
    unsharded = replace(plan, layers=layers, attention=attention)
    fitted = spend_spare_memory(unsharded)
    if devices.count == 1 or fitted.takes(1) <= devices.memory:
        return fitted
    sharded = replace(unsharded, devices=replace(devices, sharded=True))
    gathered = replace(sharded.devices, gathered=fits_gathered(sharded))
    return spend_spare_memory(replace(sharded, devices=gathered))


def _attention(plan: Plan) -> str:
    """Return the name of the packed attention that a run would use on the devices of `plan`.

    It is assumed that the devices have all packages of requirements-cuda.txt.
    """
    requested = plan.recipe.model.attention
    if requested not in ("auto", "flash_attn"):
        return f"packed_{requested}"
    generation, _ = plan.devices.capability or (0, 0)
    head_dim = plan.flops.shape.head_dim
    is_short = generation == HOPPER[0] and head_dim == 64 and plan.mean_squared <= SHORT
    if requested == "auto" and is_short:
        return "packed_triton"
    has_flash = generation in FA4_GENERATIONS and head_dim in FA4_HEAD_DIMS
    return "packed_fa4" if has_flash else "packed_varlen"


def _layers(
    plan: Plan, shapes: PreTrainedModel, active: ActivePrecision, attention: str
) -> list[LayerMemory]:
    """Return the memory of each decoder layer on the devices of `plan`.

    It is assumed that the devices have all packages of requirements-cuda.txt.
    """
    recipe = plan.recipe
    model = recipe.model
    if active.precision.compute_dtype == "bfloat16" and model.fused == "auto":
        recipe = recipe.model_copy(update={"model": model.model_copy(update={"fused": "on"})})
    capability = plan.devices.capability
    return layers_of(shapes, plan.flops, recipe, active, "cuda", attention, capability)


def obstacle(plan: Plan) -> str | None:
    """Return the reason why its devices cannot run `plan`, or None if they can."""
    devices = plan.devices
    for active in plan.precisions:
        precision = configured(active.requested, plan.recipe.fp8_config)
        if isinstance(precision, QuantizedPrecision) and devices.capability:
            missing = precision.hardware.missing(devices.capability)
            if missing:
                return f"{precision.name} needs {missing}"
    if plan.packs_per_step < devices.count:
        least = devices.count * plan.recipe.data.length
        return (
            f"a step of {plural(plan.packs_per_step, 'pack')} has fewer packs than there are "
            f"devices; set `batch.tokens` to at least {least}"
        )
    return None
