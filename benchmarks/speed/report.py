"""Read result files, and show those of `benchmarks.speed ways` as Markdown tables."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.speed.libraries.judge import LOSES, RIGHT, UNKNOWN, WRONG
from foundation.errors import InputError
from foundation.units import markdown, or_dash

PAGE_WIDTH = 100
# Texts in the table by verdict.
SAME_TRAINING = {RIGHT: "yes", WRONG: "no", LOSES: f"no: {LOSES}", UNKNOWN: UNKNOWN}
Way = Mapping[str, Any]


def wrapped(text: str, indent: str = "") -> str:
    """Return `text` in lines of a page. Lines after the first start with `indent`."""
    return textwrap.fill(
        text, PAGE_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def read(file: Path) -> dict[str, Any]:
    """Read a result file. Raises InputError if it is missing or has no results."""
    try:
        result = json.loads(file.read_text())
    except OSError as error:
        raise InputError(
            f"{file}: cannot be read: {error.strerror}; measure first, with --out {file}"
        ) from None
    except ValueError as error:
        raise InputError(
            f"{file}: is not JSON ({error}); measure again, with --out {file}"
        ) from None
    ways = result.get("ways", {})
    if not (any(way["status"] == "ok" for way in ways.values()) or {"rows", "shapes"} & {*result}):
        raise InputError(f"{file}: no way in it has run; measure again, with --out {file}")
    return result


# ── Table ─────────────────────────────────────────────────────────────────────────────────────


def section(result: Mapping[str, Any], link: str) -> str:
    """Return the introduction, the table of all ways, and the notes about some of them.

    `link` is the path of the result file.
    """
    rows = []
    notes = []
    for way in ordered(result):
        remarks = remarks_on(way)
        if remarks:
            remark = (
                f"{len(notes) + 1}. {way['label']}, weights {way['weights']}: {'; '.join(remarks)}."
            )
            notes.append(wrapped(remark, indent="   "))
        rows.append(row(way, f" [{len(notes)}]" if remarks else ""))
    header = [
        "way",
        "precision",
        "weights",
        "tokens/s",
        "of the limit",
        "peak GiB",
        "first step",
    ]
    table = markdown([*header, "same training?"], rows, names=3)
    return "\n\n".join(filter(None, [introduction(result, link), table, "\n".join(notes)]))


def introduction(result: Mapping[str, Any], link: str) -> str:
    """Return a paragraph about the model, the machine, the packs and the limit."""
    settings = result["settings"]
    recipe = yaml.safe_load(settings["recipe_text"])
    tokens = recipe["batch"]["tokens"]
    packs = result["packs"]
    environment = result["environment"]
    gpus = environment["gpus"]
    device = gpus[0] if gpus else environment["processor"]
    floors = {
        name: tokens / seconds for name, seconds in result["limits"].get("floors", {}).items()
    }
    torch_version = environment["packages"]["torch"]
    documents = "one document per pack"
    if not packs.get("whole_documents"):
        length = packs["sum_squared_lengths_per_token"]
        documents = f"documents with a Σlen²/T of {length:.0f} tokens"
    parts = [
        f"**{recipe['name']}** on one {device}, torch {torch_version}: {tokens:,} tokens per step,",
        f"packs of {recipe['data']['length']:,} tokens, {documents}; median of",
        f"{settings['steps']} steps after {settings['warm_up']} warm-up steps",
        f"([`{Path(link).name}`]({link})).",
    ]
    if floors:
        named = ", ".join(f"{name} {speed:,.0f}" for name, speed in floors.items())
        parts.append(
            "Limits of this machine in tokens/s, for a step that has only GEMMs, at their measured "
            f"speeds: {named}."
        )
    # Show a note that was added to the result file by hand.
    if note := result.get("note"):
        parts.append(note)
    return wrapped(" ".join(parts))


def ordered(result: Mapping[str, Any]) -> list[Way]:
    """Return the ways in the order of the table.

    Ways are sorted from the fastest to the slowest. Ways that train something else follow in the
    same order, and ways that did not run come last.
    """

    def key(way: Way) -> tuple[int, float]:
        if way["status"] != "ok":
            return (2, 0.0)
        return (1 if way["verdict"] == WRONG else 0, -way["tokens_per_second"]["median"])

    return sorted(result["ways"].values(), key=key)


def row(way: Way, note: str) -> list[str]:
    """Return the table's row of a way."""
    name = f"**{way['label']}**" if way["ours"] else way["label"]
    if way["status"] != "ok":
        return [name, way["precision"], way["weights"], *["–"] * 4, way["status"] + note]
    speed = way["tokens_per_second"]
    return [
        name,
        way["precision"],
        way["weights"],
        f"{speed['median']:,.0f}",
        or_dash(way["share_of_limit"], lambda share: f"{100 * share:.1f} %"),
        f"{way['memory_gib']:.1f}",
        f"{way['first_step_seconds']:.1f} s",
        SAME_TRAINING[way["verdict"]] + note,
    ]


def remarks_on(way: Way) -> list[str]:
    """Return notes about a way: why it is wrong or did not run, and its smaller microbatches."""
    if way["status"] != "ok":
        return [way["reason"].rstrip(".")]
    remarks = [*way["reasons"]] if way["verdict"] != UNKNOWN else []
    if tried := way.get("microbatches_that_did_not_fit"):
        remarks.append(
            f"microbatches have {way['microbatch']} packs, because "
            f"{' and '.join(map(str, tried))} do not fit"
        )
    elif way.get("packs"):
        remarks.append(f"microbatches have {way['microbatch']} packs")
    return remarks
