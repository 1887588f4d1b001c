"""Report statistics of the model in metrics.jsonl: gradients by layer, and the load of experts."""

from __future__ import annotations

from accelerate import Accelerator
from transformers import PreTrainedModel

from pretrain.metrics.recorder import gradient_statistics
from pretrain.model.huggingface import decoder_layers
from pretrain.model.routing import Routing
from pretrain.observe.observers import Observer, Step, is_due


class GradientStatistics(Observer):
    """Report mean and deviation of the gradients of each layer (`log.gradient_statistics`)."""

    def __init__(self, hf: PreTrainedModel, every: int, accelerator: Accelerator) -> None:
        self._hf = hf
        self._every = every
        self._accelerator = accelerator

    def due(self, step: Step) -> bool:
        """Return True in every n-th step."""
        return is_due(step.number, self._every)

    def metrics(self, step: Step) -> dict[str, float]:
        """Return the statistics of the gradients before clipping. Collective."""
        return gradient_statistics(self._hf, decoder_layers(self._hf), self._accelerator)


class ExpertLoads(Observer):
    """Report the load of each expert of a mixture (`log.fp8_statistics`)."""

    def __init__(self, routing: Routing, every: int) -> None:
        self._routing = routing
        self._every = every

    def due(self, step: Step) -> bool:
        """Return True in every n-th step."""
        return is_due(step.number, self._every)

    def metrics(self, step: Step) -> dict[str, list[list[float]]]:
        """Return the loads by layer, relative to a balanced layer."""
        loads = self._routing.loads
        return {} if loads is None else {"expert_loads": loads.double().round(decimals=3).tolist()}
