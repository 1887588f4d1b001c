"""The current precision of a model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
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
    """One precision of a run, with its engine and its decision for each linear layer."""

    active: ActivePrecision
    # The engine. None if the precision is not quantized.
    engine: GemmEngine | None
    # Map the name of each linear layer to its decision.
    decisions: Mapping[str, Decision]
    # The part of audit.json about this precision.
    audit: dict[str, Any]

    @property
    def name(self) -> str:
        """Return the name of the precision."""
        return self.active.precision.name


@dataclass(frozen=True, eq=False)
class ModelPrecision:
    """The current precision of a model, and the schedule that determines it.

    The current precision is stored as the engine in `PrecisionContext.engine`, because the linear
    layers read the engine there. Each precision of a run has a separate engine, so the engine
    identifies the precision. Only this class changes `PrecisionContext.engine`.
    """

    # Its engine must be the engine of one of the precisions.
    context: PrecisionContext
    # Map the name of each precision of the run to its `PrecisionInModel`.
    in_model: Mapping[str, PrecisionInModel]
    schedule: PrecisionSchedule

    @property
    def current(self) -> PrecisionInModel:
        """Return the current precision."""
        return next(
            entry for entry in self.in_model.values() if entry.engine is self.context.engine
        )

    def use(self, name: str) -> None:
        """Set the current precision to the precision called `name`."""
        self.context.engine = self.in_model[name].engine

    def using(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that uses the precision `name` until it is left."""
        return overridden(self.context, engine=self.in_model[name].engine)
