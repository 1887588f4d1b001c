"""Result files of `benchmarks.throughput` as the table of docs/results.md, between its markers, and as a picture."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.page import check_place, put_between, wrapped
from benchmarks.ways.judge import LOSES, RIGHT, UNKNOWN, WRONG
from foundation.errors import InputError
from foundation.tables import markdown, or_dash
from pretrain.compare.appearance import colour_of
from pretrain.compare.figures import GREY, new_figure, save, style_panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEGIN, END = "<!-- throughput -->", "<!-- /throughput -->"
FEWEST_PLACES = 3  # for bars in a panel
REFERENCES = ("reference", "reference_bf16")  # ways whose better one the others are multiples of
SAME_TRAINING = {RIGHT: "yes", WRONG: "no", LOSES: f"no: {LOSES}", UNKNOWN: UNKNOWN}  # in the table, by verdict
COMMAND = "python -m benchmarks.throughput --report"
Way = Mapping[str, Any]


def write(files: Sequence[Path], page: Path, picture: Path) -> None:
    """Replace what stands between the markers of `page`, and draw `picture`. InputError for a file that cannot be used."""
    results = [read(file) for file in files]
    check_place(page, BEGIN, END)
    draw(results, files, picture)
    image = f"![tokens a second by way]({Path(os.path.relpath(picture, page.parent)).as_posix()})"
    tables = [section(result, os.path.relpath(file, page.parent)) for result, file in zip(results, files, strict=True)]
    made = f"`{COMMAND} {' '.join(map(str, files))}` makes this table and the picture."
    put_between(page, BEGIN, END, [*tables, image, wrapped(made)])


def read(file: Path) -> dict[str, Any]:
    """A result file; InputError where there is none, or nothing in it ran."""
    try:
        result = json.loads(file.read_text())
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}; measure first, with --out {file}") from None
    except ValueError as error:
        raise InputError(f"{file}: is no JSON ({error}); measure again, with --out {file}") from None
    if not any(way["status"] == "ok" for way in result.get("ways", {}).values()):
        raise InputError(f"{file}: holds no way that has run; measure again, with --out {file}")
    return result


# ── The table ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def section(result: Mapping[str, Any], link: str) -> str:
    """Say where it was measured; then come the table of all ways, and what is to be said of some."""
    rows, notes = [], []
    multiple_of = reference_speed(result)
    for way in ordered(result):
        remarks = remarks_on(way)
        if remarks:
            remark = f"{len(notes) + 1}. {way['label']}, weights {way['weights']}: {'; '.join(remarks)}."
            notes.append(wrapped(remark, indent="   "))
        rows.append(row(way, multiple_of, f" [{len(notes)}]" if remarks else ""))
    header = ["way", "precision", "weights", "tokens/s", "least to most", "x reference", "of the limit", "peak GiB", "first step"]
    table = markdown([*header, "same training?"], rows, names=3)
    return "\n\n".join(filter(None, [introduction(result, link), table, "\n".join(notes)]))


def introduction(result: Mapping[str, Any], link: str) -> str:
    recipe = load_settings(result)
    packs, gpus = result["packs"], result["environment"]["gpus"]
    device, side_by_side = gpus[0] if gpus else result["environment"]["processor"], int(result["settings"]["gpus"])
    floors = {name: recipe["tokens"] / seconds for name, seconds in result["limits"].get("floors", {}).items()}
    torch_version, settings = result["environment"]["packages"]["torch"], result["settings"]
    documents = f"documents of {packs['sum_squared_lengths_per_token']:.0f} tokens on average by squared length (Σlen²/T)"
    documents = "each one document" if packs.get("whole_documents") else documents
    parts = [
        f"**{recipe['name']}** on one {device}, torch {torch_version}: {recipe['tokens']:,} tokens a step,",
        f"packs of {recipe['length']:,} tokens, {documents}; median of",
        f"{settings['steps']} steps after {settings['warm_up']} ([`{Path(link).name}`]({link})).",
    ]
    if floors:
        named = ", ".join(f"{name} {speed:,.0f}" for name, speed in floors.items())
        parts.append(
            f"The machine's limit, every matrix product at its own measured rate and nothing else, in tokens/s: {named}."
        )
    if note := result.get("note"):  # by hand
        parts.append(note)
    elif side_by_side > 1:
        parts.append(f"{side_by_side} GPUs of one host worked at a time, which lowers clocks, and figures, by 1 to 3 %.")
    return wrapped(" ".join(parts))


def load_settings(result: Mapping[str, Any]) -> dict[str, Any]:
    """Name, tokens a step and pack length of the recipe that the result was measured with."""
    recipe = yaml.safe_load(result["settings"]["recipe_text"])
    return {"name": recipe["name"], "tokens": recipe["batch"]["tokens"], "length": recipe["data"]["length"]}


def ordered(result: Mapping[str, Any]) -> list[Way]:
    """Fastest first; behind them what trains something else, and at the end what did not run."""
    standing = {RIGHT: 0, LOSES: 0, UNKNOWN: 0, WRONG: 1}

    def key(way: Way) -> tuple[int, float]:
        return (2, 0.0) if way["status"] != "ok" else (standing[way["verdict"]], -way["tokens_per_second"]["median"])

    return sorted(result["ways"].values(), key=key)


def reference_speed(result: Mapping[str, Any]) -> float | None:
    """Tokens/s of the reference's faster variant; None where none of them has run and trains rightly."""
    ways = [way for name, way in result["ways"].items() if name in REFERENCES and way["status"] == "ok"]
    return max((way["tokens_per_second"]["median"] for way in ways if way["verdict"] != WRONG), default=None)


def row(way: Way, multiple_of: float | None, note: str) -> list[str]:
    name = f"**{way['label']}**" if way["ours"] else way["label"]
    if way["status"] != "ok":
        return [name, way["precision"], way["weights"], *["–"] * 6, way["status"] + note]
    speed = way["tokens_per_second"]
    multiple = speed["median"] / multiple_of if multiple_of and way["verdict"] != WRONG else None
    return [
        name,
        way["precision"],
        way["weights"],
        f"{speed['median']:,.0f}",
        f"{speed['min']:,.0f} to {speed['max']:,.0f}",
        or_dash(multiple, "{:.2f}".format),
        or_dash(way["share_of_limit"], lambda share: f"{100 * share:.1f} %"),
        f"{way['memory_gib']:.1f}",
        f"{way['first_step_seconds']:.1f} s",
        SAME_TRAINING[way["verdict"]] + note,
    ]


def remarks_on(way: Way) -> list[str]:
    """What the table cannot say of a way: why it is wrong or did not run, and that it ran with smaller microbatches."""
    if way["status"] != "ok":
        return [way["reason"].rstrip(".")]
    remarks = [*way["reasons"]] if way["verdict"] != UNKNOWN else []
    if tried := way.get("microbatches_that_did_not_fit"):
        remarks.append(f"in microbatches of {way['microbatch']}: {' and '.join(map(str, tried))} packs do not fit")
    elif way.get("packs"):
        remarks.append(f"in microbatches of {way['microbatch']}, with which it began")
    return remarks


# ── The picture ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def draw(results: Sequence[Mapping[str, Any]], files: Sequence[Path], picture: Path) -> None:
    """Bars of tokens/s, a panel a result: ours in their precision's colour, others grey, wrong ones hatched, limits as lines."""
    ways = [[way for way in ordered(result) if way["status"] == "ok"] for result in results]
    heights = [0.32 * max(len(each), FEWEST_PLACES) + 1.1 for each in ways]
    figure = new_figure(10, sum(heights) + 0.4)
    panels = figure.subplots(len(results), 1, height_ratios=heights, squeeze=False)[:, 0]
    for panel, result, file, each in zip(panels, results, files, ways, strict=True):
        draw_bars(panel, each)
        draw_limits(panel, result)
        environment = result["environment"]
        device = environment["gpus"][0] if environment["gpus"] else environment["processor"]
        whole = ", whole documents" if result["packs"].get("whole_documents") else ""
        panel.set_title(f"{load_settings(result)['name']}{whole} ({file.name})\n", loc="left", weight="bold")
        said = f"tokens a second on one {device}; whiskers from the slowest to the fastest step"
        place = {"xytext": (0, 4), "xycoords": "axes fraction", "textcoords": "offset points"}
        panel.annotate(said, (0, 1), fontsize="small", color=GREY, **place)
    save(figure, picture)


def draw_bars(panel: Axes, ways: Sequence[Way]) -> None:
    style_panel(panel)
    panel.grid(visible=False, axis="y")
    panel.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    for place, way in enumerate(ways):
        speed, wrong = way["tokens_per_second"], way["verdict"] == WRONG
        colour = colour_of(way["precision"]) if way["ours"] else "#AAAAAA"
        look = {"color": "white", "edgecolor": colour, "hatch": "////"} if wrong else {"color": colour}
        whiskers = [[speed["median"] - speed["min"]], [speed["max"] - speed["median"]]]
        panel.barh(place, speed["median"], height=0.7, xerr=whiskers, error_kw={"ecolor": "black", "elinewidth": 0.8}, **look)
        mark = f"  {way['verdict']}" if way["verdict"] in (WRONG, LOSES) else ""
        label = panel.text(speed["max"], place, f"  {speed['median']:,.0f}{mark}", va="center", fontsize="small")
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.5})  # over the limits' lines
    names = [textwrap.fill(f"{way['label']}; {way['weights']} weights", 52) for way in ways]
    panel.set_yticks(range(len(ways)), names, fontsize="small")
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.margins(x=0.16)
    panel.set_ylim(max(len(ways), FEWEST_PLACES) - 0.4, -0.6)  # two bars are as thick as twenty


def draw_limits(panel: Axes, result: Mapping[str, Any]) -> None:
    """A line for each floor that some way is measured against, named at its foot."""
    used = {way["floor"] for way in result["ways"].values() if way["status"] == "ok"}
    for name, seconds in result["limits"].get("floors", {}).items():
        if name in used:
            speed = load_settings(result)["tokens"] / seconds
            panel.axvline(speed, color=GREY, linestyle="--", linewidth=1)
            panel.annotate(
                f"{name} limit",
                (speed, 0),
                xytext=(-4, 4),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="bottom",
                fontsize="x-small",
                color=GREY,
            )
