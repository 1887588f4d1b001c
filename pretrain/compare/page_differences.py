"""What the page says of how runs were computed and what they differ in: their audits, settings, environment and code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pretrain.compare.appearance import as_text
from pretrain.compare.comparison import RunComparison, Standing
from pretrain.precision import schedule
from pretrain.settings.config import flatten

NAMES = ("name", "run_dir")  # different in every run, and no part of what is compared
# What audit.json has of each precision of a run, and beside that of the last one again.
OF_A_PRECISION = {"reason", "backend", "computes", "computed_by", "loss", "products", "parity", "confirmed_in_step"}
MANY = 3  # runs, beyond which those that agree are "all others"


@dataclass(frozen=True)
class AuditShown:
    label: str
    asked: str | None
    ran: str | None
    by: str
    rows: dict[str, str]


@dataclass(frozen=True)
class KeyDifference:
    key: str
    holders: dict[str, str]  # each value, and the runs that have it


def audits(comparison: RunComparison) -> list[AuditShown]:
    """Returns what every run computed in, as its audit observed it: of one whose precision changes on the way, phase by phase."""
    return [shown for each in comparison.standings if each.run.audit for shown in _audits(each)]


def _audits(each: Standing) -> list[AuditShown]:
    run, label, audit, found = each.run, each.look.label, each.run.audit, each.run.audited
    if not found:
        setting = run.config.get("precision")
        asked = schedule.label(setting) if isinstance(setting, list) else audit.get("precision")  # all phases fell back to one
        return [_audit(label, audit, asked)]
    around = {key: value for key, value in audit.items() if key not in OF_A_PRECISION}
    known = {audit.get("effective"): {key: audit[key] for key in OF_A_PRECISION & audit.keys()}}  # old files keep less by phase
    ends = [*(first - 1 for first in [*run.phases][1:]), run.summary["steps"]]
    spans = [
        (name, first, last, f"{label}, {_steps(first, last)}")
        for (first, name), last in zip(run.phases.items(), ends, strict=False)
    ]
    shown = []
    for name, first, last, where in spans or [(name, 1, ends[0], label) for name in found]:  # older runs say no first steps
        kept = known.get(name, {}) | found.get(name, {}) or {"reason": "what was found in these steps is not kept"}
        own = {"precision": name, "effective": name} | kept
        if not first <= (own.get("confirmed_in_step") or 0) <= last:
            own = own | {"confirmed_in_step": None}  # it was in another phase of this precision
        shown.append(_audit(where, around | own, own["precision"]))
    return shown


def _steps(first: int, last: int) -> str:
    return f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"


def _audit(label: str, audit: Mapping[str, Any], asked: str | None) -> AuditShown:
    linears: dict[str, list[str]] = {}
    for what, number in _products(audit.get("products") or []):
        linears.setdefault(f"{number} linears", []).append(what)
    rows = {
        "why": audit.get("reason"),
        "computes": audit.get("computes"),
        **{number: "; and as many: ".join(kinds) for number, kinds in linears.items()},
        "weights": audit.get("weights"),
        "gradients": audit.get("gradients"),
        "attention": _named(audit.get("attention"), "kind", "reason"),
        "loss": _named(audit.get("loss"), "kind", "softmax"),
        "fused": audit.get("fused"),
        "compiled": audit.get("compiled"),
        "deterministic": audit.get("deterministic"),
        "kernels": "; ".join(map(_kernel, audit.get("kernels") or [])),
        "parity": _parity(audit.get("parity")),
        "confirmed in step": audit.get("confirmed_in_step"),
    }
    return AuditShown(
        label,
        asked,
        audit.get("effective"),
        str(audit.get("computed_by", audit.get("backend", "what is not known"))),
        {name: str(value) for name, value in rows.items() if value not in (None, "")},
    )


def _named(value: Any, *keys: str) -> str | None:
    """The words and figures of an object under `keys`; `value` itself where it is no object."""
    if not isinstance(value, Mapping):
        return value
    return "; ".join(str(value[key]) for key in keys if isinstance(value.get(key), (str, int, float))) or None


def _kernel(tried: Any) -> str:
    """Returns what came of a kernel that was tried before the training; `tried` itself where it says that in a way of its own."""
    told = isinstance(tried, Mapping) and {"kernel", "said"} <= tried.keys()
    return f"{tried['kernel']}: {tried['said']}" if told else str(tried)


def _parity(found: Any) -> str | None:
    """Returns whether the run agreed with plain transformers, and when that was seen; or why it was not looked at."""
    if not isinstance(found, Mapping):
        return None
    if "left_out" in found:
        return f"left out: {found['left_out']}"
    if not isinstance(failures := found.get("failures"), list):
        return None
    result = "; ".join(map(str, failures)) or "passed"
    return f"{result}, {found['source']}" if "source" in found else result  # older runs say none


def _products(products: list[Mapping[str, Any]]) -> list[tuple[str, int]]:
    """Returns what the linears compute, and how many of them do."""
    said: Counter[str] = Counter()
    for product in products:
        formats = "; ".join(f"{name} {operands}" for name, operands in (product.get("products") or {}).items())
        why = f" ({product['reason']})" if product.get("reason") else ""
        said[f"{product.get('effective')}{why}" + (f": {formats}" if formats else "")] += 1
    return said.most_common()


def differences(comparison: RunComparison) -> dict[str, list[KeyDifference] | None]:
    """Returns by kind the keys in which not all runs agree; None where runs in a result file have one environment kept for
    all."""
    runs = {each.look.label: each.run for each in comparison.standings}
    settings = {label: flatten(run.config) for label, run in runs.items()}
    environments = {label: flatten(run.environment) for label, run in runs.items()}
    kept_once = len({id(run.environment) for run in runs.values()}) < len(runs)
    return {
        "Settings": _differing(settings, lambda key: key not in NAMES and not key.startswith("log.")),
        "Environment": None if kept_once else _differing(environments, lambda key: not key.startswith("git")),
        "Code": None if kept_once else _differing(environments, lambda key: key.startswith("git")),
    }


def _differing(values: Mapping[str, Mapping[str, Any]], concerns: Any) -> list[KeyDifference]:
    found = []
    for key in filter(concerns, dict.fromkeys(key for each in values.values() for key in each)):
        holders: dict[str, list[str]] = {}
        for label, each in values.items():
            holders.setdefault(as_text(each.get(key)), []).append(label)
        if len(holders) > 1:
            most = max(holders, key=lambda value: len(holders[value]))
            shown = {
                value: "all others" if value == most and len(labels) > MANY else ", ".join(labels)
                for value, labels in sorted(holders.items(), key=lambda item: item[0] == most)
            }
            found.append(KeyDifference(key, shown))
    return found
