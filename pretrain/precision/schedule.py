"""`precision` as a schedule: `[{until: 0.8, use: nvfp4}, {use: bf16}]`, one precision after the other in one run.

`until` is a share of the run's steps, or the number of the last step of its phase. When a run switches follows from the settings
and the horizon alone, so a checkpoint holds nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Tag

from foundation.errors import InputError
from foundation.settings import Settings
from pretrain.precision.settings import PRECISIONS, PrecisionName


def _share_or_step(number: float) -> float | int:
    if 0 < number < 1:
        return number
    if number < 2 or number != number // 1:
        raise ValueError(f"{number:g} is neither a share of the steps, above 0 and below 1, nor the number of a step, 2 or more")
    return int(number)


class PrecisionPhase(Settings):
    """A part of a run in one precision."""

    # A share of all steps, or the number of a step, with which the phase ends; the last one goes on to the end.
    until: Annotated[float, AfterValidator(_share_or_step)] | None = None
    use: PrecisionName  # what its products compute in


def _in_order(phases: tuple[PrecisionPhase, ...]) -> tuple[PrecisionPhase, ...]:
    if len(phases) < 2:
        raise ValueError("a schedule has two phases or more; of one precision write the name")
    *before, last = phases
    if last.until is not None or any(phase.until is None for phase in before):
        raise ValueError("every phase but the last ends with an `until`, and the last one goes on to the end: leave its out")
    if len({PRECISIONS[phase.use].compute_dtype for phase in phases}) > 1:
        raise ValueError(
            f"{' and '.join(phase.use for phase in phases)} cannot be phases of one run: activations and copies of weights keep "
            "one dtype, and theirs differ; train a second run from the first one's `final/`"
        )
    return phases


PrecisionSchedule = Annotated[tuple[PrecisionPhase, ...], AfterValidator(_in_order)]
# A precision's name, or a schedule. Told apart by their form, so that a mistake in one is not explained as if it were the other.
PrecisionSetting = Annotated[
    Annotated[PrecisionName, Tag("Name")] | Annotated[PrecisionSchedule, Tag("Schedule")],
    Discriminator(lambda value: "Schedule" if isinstance(value, list | tuple) else "Name"),
]


def phases_of(setting: Any) -> list[tuple[float | int | None, str]]:
    """(`until`, precision) of each phase of a `precision`, from a recipe or as a run's config.yaml has it: one phase for a name,
    none for None or what is no schedule."""
    if isinstance(setting, str):
        return [(None, setting)]
    listed = setting if isinstance(setting, list | tuple) else ()
    phases = [each.model_dump() if isinstance(each, PrecisionPhase) else each for each in listed]
    return [(each.get("until"), str(each["use"])) for each in phases if isinstance(each, Mapping) and "use" in each]


def label(setting: Any, *, in_a_path: bool = False) -> str | None:
    """What a `precision` is called: its name, or "nvfp4 to 80 %, then bf16", in a folder's name "nvfp4-to-0.8-then-bf16"; None
    where none is named."""
    phases = phases_of(setting)
    if not phases:
        return None
    *before, (_, last) = phases
    if in_a_path:
        return "-then-".join([*(f"{name}-to-{until}" for until, name in before), last])
    ends = (f"{100 * until:g} %" if isinstance(until, float) else f"step {until}" for until, _ in before)
    return ", then ".join([*(f"{name} to {end}" for (_, name), end in zip(before, ends, strict=True)), last])


def in_phases(precisions: Mapping[int, str]) -> dict[int, str]:
    """Precisions by the first step of each phase, from precisions by step in order: of equal neighbours only the first."""
    before = [None, *precisions.values()]
    return {step: name for (step, name), last in zip(precisions.items(), before, strict=False) if name != last}


def label_of_course(course: Mapping[int, str]) -> str:
    """`label` of what steps ran in, by first step: "nvfp4 to step 10, then bf16"."""
    ends = [first - 1 for first in course][1:]
    return label([{"until": end, "use": name} for end, name in zip([*ends, None], course.values(), strict=True)])


def is_quantized(setting: Any) -> bool:
    """Whether any phase computes in low precision; names that no precision has do not."""
    return any(name in PRECISIONS and PRECISIONS[name].quantized for _, name in phases_of(setting))


def last_steps(untils: Sequence[float | int | None], steps: int) -> list[int]:
    """The last step of each phase in a run of `steps`; shares are rounded to whole steps, as the learning rate's decay is.
    InputError where a phase would have no step."""
    ends = [steps if until is None else round(until * steps) if isinstance(until, float) else until for until in untils]
    for number, (before, end) in enumerate(pairwise([0, *ends]), 1):
        if not before < end or (number < len(ends) and end >= steps):
            raise InputError(
                f"`precision`: of {steps:,} steps, phase {number} of {len(ends)} would end with step {end:,} and the one before "
                f"it with step {before:,}; every phase needs a step: change `until`, or train longer (`train`)"
            )
    return ends
