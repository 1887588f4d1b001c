"""Watches what low precision loses, and says once when it becomes more than the recipe loses by nature, with what to change.

The judgement is made from the records of `pretrain.precision.statistics`, on the steps for which they are due. It only warns:
a run goes on with much underflow, only worse, and whether that is worth a restart is not for a threshold to say.

What is usual was measured with our quantizers: on a Gaussian, on Student's t with 3 degrees of freedom, on Gaussian rows whose
sizes spread by e**(2 n), as tokens' gradients do, and on all linears of a small Qwen3 trained on text to a loss of 2 nats a byte.
Shares of non-zero values that become zero; of the model's, the worst operand's:

    scales and format       Gaussian   t, 3   rows     model: input   weight   grad_output
    tensor, E4M3            8e-6       6e-4   7e-2            4e-3    3e-5     0.14 (median 1e-3)
    tensor, E5M2            0          0      5e-6            -       -        4e-4
    128 values, E4M3        5e-6       2e-5   6e-6            6e-4    3e-5     2e-2
    32 values, E4M3         5e-6       1e-5   5e-6            3e-4    3e-5     1e-3
    16 values, E2M1         0.07       0.12   0.08            0.34    -        0.45 (median 0.08)
    16 x 16 values, E2M1    0.10       0.31   0.74            -       0.13     -

So FP8 that is scaled well loses a fiftieth of a gradient at most, and 5 % says that its scales do not fit. The one exception,
gradients in E4M3 under one scale, is what HYBRID is for. E2M1 loses 45 % of a gradient and still trains, since rounding by chance
makes up for it on average; 60 % is beyond all that was seen, but for what the recipe avoids, squares of unequal rows.

Only delayed scales can be too large for a tensor, and one value in a thousand says that it has outgrown them. OCP's floor cuts
0.5 % (Gaussian) to 0.9 % of all values by design. NVFP4 cuts up to 0.7 %, in blocks so small that their scale itself is coarse;
these underflow as well, and are warned of as that.

State stays in the process. A resumed run says again what is still so: whoever resumed it may not have read the first warning, and
a warning changes neither curve nor weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from foundation.units import percent
from pretrain.precision.formats.definition import Condition
from pretrain.precision.settings import ActivePrecision

Record = Mapping[str, Any]

PASSED = 0.5  # a condition is over once its share is below this part of its limit; between the two it neither begins nor ends
NEVER_SCALED = 1.0  # the delayed scale of an operand that no step has quantized yet: what it loses now, the next step will not


class PrecisionHealth:
    """The running judgement of one run in a quantized precision; call `check` with each due step's records."""

    def __init__(self, active: ActivePrecision) -> None:
        self.conditions = active.precision.conditions(active.settings)
        self._keeps_history = active.precision.keeps_history
        self._standing: set[Condition] = set()
        self._dead: set[tuple[str, str]] = set()

    def check(self, step: int, records: Sequence[Record]) -> str | None:
        """What has begun at `step`, for the user to read; None if nothing has."""
        scaled = [record for record in records if not (self._keeps_history and record["scale"] == NEVER_SCALED)]
        said = [message for condition in self.conditions if (message := self._warning(condition, scaled))]
        said += self._newly_dead(records)
        return f"step {step}: {'; '.join(said)}" if said else None

    def _warning(self, condition: Condition, records: Sequence[Record]) -> str | None:
        concerned = [record for record in records if record["operand"] in condition.roles]
        worst = max(concerned, key=lambda record: record[condition.share], default=None)
        share = worst[condition.share] if worst else 0.0
        if share < condition.limit * PASSED:
            self._standing.discard(condition)
        if share <= condition.limit or condition in self._standing:
            return None
        self._standing.add(condition)
        above = sum(record[condition.share] > condition.limit for record in concerned)
        return (
            f"{percent(share)} of {worst['layer']}'s {worst['operand']} {condition.what} ({above} of {len(concerned)} such "
            f"operands are above {percent(condition.limit)}). {condition.remedy}"
        )

    def _newly_dead(self, records: Iterable[Record]) -> list[str]:
        """Operands without a value that is not zero, the first time they are so: no scale helps them, and their layer is idle."""
        dead = [(record["layer"], record["operand"]) for record in records if record["amax"] == 0]
        new = [operand for operand in dead if operand not in self._dead]
        self._dead = set(dead)
        if not new:
            return []
        layer, operand = new[0]
        others = f", and {len(new) - 1} more operands" if len(new) > 1 else ""
        return [
            f"{layer}'s {operand} is all zeros{others}. Its products are zero in any precision: see whether the weights it began "
            "with are whole and the layer is in use at all; a lower `optimizer.learning_rate` keeps layers from dying"
        ]
