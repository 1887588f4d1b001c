"""Plan a run for devices that this machine does not have, and check whether they can run it."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedModel

from foundation.units import GIB, plural
from pretrain.metrics.cards import cards_in
from pretrain.model.attention_backends import Case, refusal_of
from pretrain.plan.memory import Devices
from pretrain.plan.plan import KEPT_FREE, Plan, Training, plan_for
from pretrain.precision.formats.definition import QuantizedPrecision


def devices_called(text: str) -> Devices:
    """Return the devices that a text such as `H200`, `8xB200` or `rtx4090` describes.

    The memory of a device is the part that a plan may use. Raise InputError if the device is not
    in the table of cards.
    """
    count, card = cards_in(text)
    usable = int((1 - KEPT_FREE) * int(card.memory * GIB))
    return Devices(count, name=card.name, memory=usable, capability=card.capability)


def plan_on(
    devices: Devices, training: Training, shapes: PreTrainedModel, topology: str | None = None
) -> Plan:
    """Return the plan of a training on `devices`.

    devices: the result of `devices_called`.
    shapes: the model on the meta device.
    topology: "ddp", "zero" or "fsdp2", which a single device ignores. By default, the first of them
        that fits into the memory of several devices.
    """
    unsharded = plan_for(training, shapes, devices, elsewhere=True)
    needed = unsharded.needed_memory(unsharded.expected_microbatch)
    is_default = topology is None and needed <= devices.memory
    if devices.count == 1 or topology == "ddp" or is_default:
        return unsharded
    # Except with "zero", `plan_for` chooses between "zero" and "fsdp2" by the memory.
    sharded = replace(devices, sharded=True, gathered_once=topology == "zero")
    return plan_for(training, shapes, sharded, elsewhere=True)


def obstacle(plan: Plan) -> str | None:
    """Return the reason why its devices cannot run `plan`, or None if they can."""
    devices = plan.devices
    flops = plan.flops
    head_dim = flops.shape.head_dim
    capability = devices.capability
    case = Case("cuda", head_dim, plan.compute_dtype, capability, flops.changed_scores)
    refusal = refusal_of(plan.recipe.model.attention, case)
    if refusal:
        return refusal
    for active in plan.precisions:
        if isinstance(active.precision, QuantizedPrecision):
            need = active.precision.hardware.unmet_need(devices.capability)
            if need:
                # The GPUs in parentheses make the reason too long for a line of the table.
                return f"needs {need.partition(' (')[0]}"
    if plan.packs_per_step < devices.count:
        least = devices.count * plan.recipe.data.length
        return (
            f"a step of {plural(plan.packs_per_step, 'pack')} has fewer packs than there are "
            f"devices; set `batch.tokens` to at least {least}"
        )
    return None
