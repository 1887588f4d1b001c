"""Plan a run for devices that this machine does not have, and check whether they can run it."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import cast

from transformers import PreTrainedModel

from foundation.errors import InputError
from foundation.units import GIB, plural
from pretrain.metrics.peaks import Peak, entry_of, peak
from pretrain.model.attention import FA4_HEAD_DIMS, TRITON_HEAD_DIMS
from pretrain.plan.memory import Devices, LayerMemory, layers_of
from pretrain.plan.plan import KEPT_FREE, Plan, fits_gathered, spend_spare_memory
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.settings import ActivePrecision, configured


@dataclass(frozen=True)
class Target:
    """`count` devices of the same kind in one machine.

    `name` is the name of the device in its driver or in its data sheet.
    """

    name: str
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Target:
        """Return the target that a text such as `H200` or `8xB200` describes.

        Raise InputError if the peak of the device is not known.
        """
        count, name = re.findall(r"(?s)^\s*(?:(\d+)\s*[xX]\s*)?(.*?)\s*$", text)[0]
        if peak(name, "bf16") is None or count == "0":
            raise InputError(
                f"--on {text}: this is no device with a known BF16 peak; use the name that its "
                "driver reports, with the number of devices if there are several, such as H200, "
                "8xB200 or 'RTX 4090'"
            )
        return cls(name, int(count or 1))

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"

    @property
    def device(self) -> Peak:
        """Return the peaks and the memory of one device.

        Both are always known, because `parse` accepts only devices with a known peak.
        """
        return cast(Peak, entry_of(self.name))

    @property
    def memory(self) -> int:
        """Return the memory of one device in bytes."""
        return int(self.device.memory * GIB)

    def plan(self, plan: Plan, shapes: PreTrainedModel) -> Plan:
        """Return a copy of `plan` for this target.

        Precisions that are emulated on this machine are computed by the hardware of the target. The
        model is sharded if it does not fit into one device. Weights are then gathered once a step
        if they fit.

        shapes: the model on the meta device.
        """
        schedule = replace(
            plan.schedule,
            phases=[(until, _on_hardware(active)) for until, active in plan.schedule.phases],
        )
        usable = int((1 - KEPT_FREE) * self.memory)
        devices = Devices(
            self.count, name=self.name, memory=usable, capability=self.device.capability
        )
        plan = replace(plan, schedule=schedule, devices=devices)
        layers = {
            active.precision.name: self._layers(plan, shapes, active) for active in plan.precisions
        }
        unsharded = replace(plan, layers=layers)
        fitted = spend_spare_memory(unsharded)
        if self.count == 1 or fitted.takes(1) <= usable:
            return fitted
        sharded = replace(unsharded, devices=replace(devices, sharded=True))
        gathered = replace(sharded.devices, gathered=fits_gathered(sharded))
        return spend_spare_memory(replace(sharded, devices=gathered))

    def _layers(
        self, plan: Plan, shapes: PreTrainedModel, active: ActivePrecision
    ) -> list[LayerMemory]:
        """Return the memory of each decoder layer on this target.

        It is assumed that Hopper and Blackwell GPUs have Transformer Engine and FlashAttention-4,
        and that other devices have the same libraries as this machine.
        """
        recipe = plan.recipe
        model = recipe.model
        capability = self.device.capability
        has_libraries = capability is not None and active.precision.compute_dtype == "bfloat16"
        if has_libraries and model.fused == "auto" and not active.precision.plain_backward:
            recipe = recipe.model_copy(update={"model": model.model_copy(update={"fused": "on"})})
        # FlashAttention-4 and our Triton kernels need the same memory.
        head_dims = {"auto": FA4_HEAD_DIMS, "flash_attn": FA4_HEAD_DIMS, "triton": TRITON_HEAD_DIMS}
        is_supported = plan.flops.shape.head_dim in head_dims.get(model.attention, ())
        attention = "packed_fa4" if has_libraries and is_supported else "packed_varlen"
        return layers_of(shapes, plan.flops, recipe, active, "cuda", attention, capability)

    def obstacle(self, plan: Plan) -> str | None:
        """Return the reason why this target cannot run `plan`, or why the speed is not known.

        Return None if the target can run `plan` and the speed is known.
        """
        for active in plan.precisions:
            precision = configured(active.requested, plan.recipe.fp8_config)
            if isinstance(precision, QuantizedPrecision) and self.device.capability:
                missing = precision.hardware.missing(self.device.capability)
                if missing:
                    return f"{precision.name} needs {missing}"
            if peak(self.name, precision.peak) is None:
                return f"the {precision.name} peak of this device is not known"
        if plan.packs_per_step < self.count:
            least = self.count * plan.recipe.data.length
            return (
                f"a step of {plural(plan.packs_per_step, 'pack')} has fewer packs than there are "
                f"devices; set `batch.tokens` to at least {least}"
            )
        return None


def _on_hardware(active: ActivePrecision) -> ActivePrecision:
    """Replace emulation by Transformer Engine.

    Return a copy of `active` with this engine. If `active` is not emulated, return it unchanged.
    """
    if active.backend != "emulation":
        return active
    return replace(active, backend="transformer_engine", reason=None)
