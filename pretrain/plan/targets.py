"""A plan as it would be on devices that are not here: what of it fits their memory, and why it could not run on them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from foundation.errors import InputError
from foundation.units import GIB, plural
from pretrain.metrics.peaks import entry_of, peak
from pretrain.model.attention import FA4_HEAD_DIMS
from pretrain.plan.memory import Devices, LayerMemory, layers_of
from pretrain.plan.plan import KEPT_FREE, Plan, spend_spare_memory
from pretrain.precision.settings import ActivePrecision, precision_called


@dataclass(frozen=True)
class Target:
    """`count` devices of one machine, of the name that a driver or data sheet gives them."""

    name: str
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Target:
        """`H200` or `8xB200`; InputError for a device whose peak is not known."""
        count, name = re.fullmatch(r"\s*(?:(\d+)\s*[xX]\s*)?(.*?)\s*", text, re.DOTALL).groups()
        if peak(name, "bf16") is None or count == "0":
            raise InputError(
                f"--on {text}: {name!r} has no known BF16 peak; name it as drivers do: H200, 8xB200, 'RTX 4090'"
            )
        return cls(name, int(count or 1))

    def __str__(self) -> str:
        return f"{self.count} x {self.name}"

    @property
    def memory(self) -> int:
        """Bytes of memory of one device."""
        return int(entry_of(self.name).memory * GIB)

    @property
    def capability(self) -> tuple[int, int] | None:
        return entry_of(self.name).capability

    def plan(self, plan: Plan, shapes: PreTrainedModel) -> Plan:
        """Return `plan` as it would be on this target: on hardware, and in shards if the model does not fit one device.

        shapes: the model on the meta device.
        """
        active, phases = (
            _on_hardware(plan.active),
            [(until, _on_hardware(each)) for until, each in plan.phases],
        )
        layers = {
            each.precision.name: self._layers(plan, shapes, each)
            for each in map(_on_hardware, plan.actives)
        }
        usable = int((1 - KEPT_FREE) * self.memory)
        devices = Devices(self.count, name=self.name, memory=usable, capability=self.capability)
        whole = replace(plan, devices=devices, active=active, layers=layers, phases=phases)
        fitted = spend_spare_memory(whole)
        if self.count == 1 or fitted.takes(1) <= usable:
            return fitted
        return spend_spare_memory(replace(whole, devices=replace(devices, sharded=True)))

    def _layers(
        self, plan: Plan, shapes: PreTrainedModel, active: ActivePrecision
    ) -> list[LayerMemory]:
        """Returns what each layer takes of memory: on Hopper and Blackwell as with Transformer Engine and
        FlashAttention-4; elsewhere as this machine's libraries have it."""
        recipe, settings, flops = plan.recipe, plan.recipe.model, plan.flops
        known = self.capability is not None and active.precision.compute_dtype == "bfloat16"
        if known and settings.fused == "auto":
            recipe = recipe.model_copy(
                update={"model": settings.model_copy(update={"fused": "on"})}
            )
        in_one = (
            known
            and settings.attention in ("auto", "flash_attn")
            and flops.shape.head_dim in FA4_HEAD_DIMS
        )
        attention = "packed_fa4" if in_one else "packed_varlen"
        return layers_of(shapes, flops, recipe, active, "cuda", attention, self.capability)

    def obstacle(self, plan: Plan) -> str | None:
        """Returns why `plan` cannot run on it or has no speed; None where it can."""
        for active in plan.actives:
            precision = precision_called(active.requested)
            if (
                precision.quantized
                and self.capability
                and (need := precision.hardware.missing(self.capability))
            ):
                return f"{precision.name} needs {need}"
            if peak(self.name, precision.peak) is None:
                return f"no {precision.name} peak is known of it"
        if plan.packs_per_step < self.count:
            least = self.count * plan.recipe.data.length
            return f"a step of {plural(plan.packs_per_step, 'pack')} is too small for it: `batch.tokens: {least}` at least"
        return None


def _on_hardware(active: ActivePrecision) -> ActivePrecision:
    return (
        replace(active, backend="transformer_engine", reason=None)
        if active.backend == "emulation"
        else active
    )
