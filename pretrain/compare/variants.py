"""What runs of one precision differ in: the keys of `fp8_config` that have to stand beside the precision's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pretrain.compare.tables import UNKNOWN
from pretrain.metrics.run_record import RunRecord
from pretrain.precision.registry import PRECISIONS
from pretrain.settings.config import flatten

# These say where a precision is computed, which the audit's `backend` answers; they are no variant of the arithmetic.
_WHERE = ("backend", "on_unsupported")
_KEPT = ("moments", "gradients")  # keys of `optimizer`, of any precision: the dtypes of what is kept beside the weights


class Variants:
    """The variants of low precision among `runs`.

    `keys`: of `fp8_config`, those in which two runs of the same precision differ. Recipes have options of their own, so what runs
    of different precisions differ in says nothing. `kept`: of what is kept beside the weights, that whose dtype differs between
    runs. `found`: the variants' names, in the order of the runs.
    """

    def __init__(self, runs: Sequence[RunRecord]) -> None:
        quantized = [run for run in runs if self.is_quantized(run)]
        values: dict[tuple[str, str], set[str]] = {}
        for run in quantized:
            for key, value in _options(run).items():
                values.setdefault((key, run.config["precision"]), set()).add(str(value))
        self.keys = list(dict.fromkeys(key for (key, _), found in values.items() if len(found) > 1))
        self.kept = [key for key in _KEPT if len({self.kept_in(run, key) for run in runs}) > 1]
        self.found = list(dict.fromkeys(self.name(run) for run in quantized))

    @staticmethod
    def is_quantized(run: RunRecord) -> bool:
        recipe = PRECISIONS.get(run.config.get("precision") or "")
        return recipe is not None and recipe.quantized

    def value(self, run: RunRecord, key: str) -> str:
        """The run's value of a key; a dash where its precision has no such key."""
        value = _options(run).get(key) if self.is_quantized(run) else None
        return UNKNOWN if value is None else str(value)

    @staticmethod
    def kept_in(run: RunRecord, key: str) -> str:
        """The dtype that the run's recipe names for its moments or gradients; a dash where it names none."""
        return str((run.config.get("optimizer") or {}).get(key) or UNKNOWN)

    def name(self, run: RunRecord) -> str:
        """`scope linear+head, margin 1`; empty where runs of a precision do not differ, and for what is not quantized."""
        return ", ".join(f"{key} {value}" for key in self.keys if (value := self.value(run, key)) != UNKNOWN)

    def values(self, run: RunRecord) -> str:
        """`linear+head, 1`: the name without its keys, for a picture."""
        return ", ".join(value for key in self.keys if (value := self.value(run, key)) != UNKNOWN)


def _options(run: RunRecord) -> dict[str, Any]:
    return {key: value for key, value in flatten(run.config.get("fp8_config") or {}).items() if key not in _WHERE}
