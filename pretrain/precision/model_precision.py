"""The current precision of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from foundation.overrides import overridden
from pretrain.precision.gemm import GemmEngine
from pretrain.precision.product import PrecisionContext
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.precision.scope import Decision
from pretrain.precision.settings import ActivePrecision


@dataclass(frozen=True)
class PrecisionInModel:
    """One precision of a run, with its engine and the decision for each layer."""

    active: ActivePrecision
    backend: GemmEngine | None  # None if nothing is quantized
    decisions: Mapping[str, Decision]
    audit: dict[str, Any]  # the part of audit.json about this precision

    @property
    def name(self) -> str:
        """Return the name of the precision."""
        return self.active.precision.name


class ModelPrecision:
    """The current precision of a model, and the schedule that decides it.

    The state is `PrecisionContext.backend`, because products read it. Each precision of a run has a
    backend of its own, so the backend determines the precision. Only this class changes it.
    """

    def __init__(
        self,
        context: PrecisionContext,
        in_model: Mapping[str, PrecisionInModel],
        schedule: PrecisionSchedule,
    ) -> None:
        """Take the precisions of a model by name. The context's backend must be one of theirs."""
        self.context = context
        self.in_model = in_model
        self.schedule = schedule

    @property
    def current(self) -> PrecisionInModel:
        """Return the current precision."""
        return next(
            entry for entry in self.in_model.values() if entry.backend is self.context.backend
        )

    def use(self, name: str) -> None:
        """Compute in the precision `name` from now on."""
        self.context.backend = self.in_model[name].backend

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Compute in the precision `name` inside the block."""
        with overridden(self.context, backend=self.in_model[name].backend):
            yield
