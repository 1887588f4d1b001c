"""The figures of the docs are those of the result files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import card as gpu_card
from benchmarks.machine import with_tables
from benchmarks.planner_rows import read_rows
from benchmarks.readers import table
from benchmarks.step_traces import lost
from lab.speed.speed import step_seconds
from pretrain.metrics.cards import card_of
from tests.conftest import ROOT

RESULTS = ROOT / "benchmarks/results"
INDEX = (RESULTS / "INDEX.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in INDEX.splitlines()
    if line.startswith("| [")
]
FILES = {re.search(r"\((.*)\)", row[0])[1]: row for row in ROWS}


def test_the_index_names_every_file_once_and_a_page_that_links_to_it():
    files = {
        path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()
    } - {"INDEX.md"}
    assert FILES.keys() == files and len(ROWS) == len(files)
    for name, (_, content, page_link, _) in FILES.items():
        page_path = RESULTS / re.search(r"\((.*)\)", page_link)[1]
        text = page_path.read_text(encoding="utf-8")
        is_linked = name in text or (name.endswith(".jsonl") and "results/INDEX.md" in text)
        assert content and is_linked, name


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".json")])
def test_the_index_has_the_commit_of_a_file(name: str):
    content = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    git = (content.get("environment") or {}).get("git") or {"commit": content.get("commit")}
    if git["commit"] is None:
        # Each topology of an equality file has an environment of its own.
        git = content["ddp"]["environment"]["git"]
    assert FILES[name][3] == git["commit"][:8] + (" (dirty)" if git.get("dirty") else "")


def numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)):
        yield value


@pytest.mark.parametrize("page", ["results", "developers/speed"])
def test_the_speeds_of_a_row_are_in_the_files_that_it_links_to(page: str):
    text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if row.startswith("|") and ".json)" in row]
    sizes = {"1,024", "2,048", "4,096", "8,192", "32,768", "131,072", "262,144", "524,288"}
    published = {f"{row.speed:,.0f}" for row in read_rows("published")}
    compared = 0
    for row in rows:
        files = re.findall(r"results/(\S+\.json)\)", row)
        contents = [json.loads((RESULTS / name).read_text("utf-8")) for name in files]
        recorded = published | {f"{number:,.0f}" for number in numbers(contents)}
        speeds = set(re.findall(r"\d+(?:,\d{3})+", row)) - sizes
        assert speeds <= recorded, row
        compared += len(speeds)
    assert compared >= 3


def test_the_table_of_serving_is_that_of_its_file() -> None:
    rows = json.loads((RESULTS / "cpu/readers.json").read_text(encoding="utf-8"))["rows"]
    page = ROOT / "docs/serving.md"
    text = page.read_text(encoding="utf-8")
    assert text == with_tables(page, "readers", table(rows)), "python -m benchmarks.readers"


def test_gains_of_the_readme_are_those_of_the_result_files():
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for gpu in ("h100", "h200"):
        gain, _ = gains_of_fp8(read_speeds(f"{gpu}_throughput"))
        assert f"a model of 1.7 billion {gain:.1f} times" in text
    _, gain = gains_of_fp8(read_speeds("h100_qwen2_5")["shapes"]["Qwen2.5-7B"])
    assert f"7.6 billion train {gain:.1f} times as fast" in text


def test_speeds_of_other_trainers_are_those_of_the_result_files():
    speeds = {
        name: f"{row['tokens_per_second']:,}"
        for file in (
            "h200_peers_30_november",
            "h200_peers_fp8",
            "h200_peers_megatron",
            "h200_peers_fa4",
        )
        for name, row in read_speeds(file)["rows"].items()
        if "tokens_per_second" in row
    }
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.sub(r" \([12, ]+\)", "", text.partition("## Speed")[2].partition("## ")[0])
    ours = (speeds[name] for name in ("ours BF16", "ours FP8", "ours FP8 with the head"))
    assert f"| this launcher, with FlashAttention-4 | {' | '.join(ours)} |" in table
    for label, name in (
        ("torchtitan", "torchtitan"),
        ("Hugging Face, compiled", "Hugging Face"),
        ("llmq", "llmq"),
        ("Megatron-Core", "Megatron-Core"),
    ):
        cells = [speeds[f"{name} {precision}"] for precision in ("BF16", "FP8")]
        assert f"| {label} | {' | '.join(cells)} |" in table


def test_the_time_of_muons_steps_is_that_of_its_result_file():
    ways = read_speeds("h200_muon_steps")["ways"]
    muon, adamw = (ways[name] for name in ("bf16_exact_muon", "bf16_exact"))
    seconds = [131_072 / way["tokens_per_second"]["median"] for way in (muon, adamw)]
    page = " ".join((ROOT / "docs/muon.md").read_text(encoding="utf-8").split())
    assert f"takes {seconds[0]:.2f} s, and with AdamW {seconds[1]:.2f} s" in page
    longer = f"takes {100 * (seconds[0] / seconds[1] - 1):.1f} % longer"
    assert f"{longer}, and needs {adamw['memory_gib'] - muon['memory_gib']:.1f} GiB less" in page
    in_fp8 = read_speeds("h200_muon_steps_fp8")
    warm_up = int(in_fp8["settings"]["warm_up"])
    muon, adamw = (
        min(in_fp8["ways"][name]["step_ms"][warm_up:]) / 1000
        for name in ("delayed_exact_head_muon", "delayed_exact_head")
    )
    assert f"takes {muon:.2f} s, and with AdamW {adamw:.2f} s" in page


def test_losses_after_a_killed_rank_are_those_of_the_result_file():
    result = json.loads((RESULTS / "resume/h200_x2_kill.json").read_text(encoding="utf-8"))
    kill = result["runs"]["kill"]
    page = " ".join((ROOT / "docs/clusters.md").read_text(encoding="utf-8").split())
    assert f"within {math.ceil(kill['seconds_until_all_processes_ended'])} seconds" in page
    difference = kill["largest_relative_difference_of_a_loss"]
    assert difference["all"] == 0 and "on both GPUs bit for bit" in page
    assert f"on one GPU within {100 * difference['half']:.3f} %" in page


def read_speeds(name: str) -> Any:
    """Return the content of a result file in speed/."""
    return json.loads((RESULTS / f"speed/{name}.json").read_text(encoding="utf-8"))


def shares_of(name: str, gpus: int) -> dict[str, float]:
    """Return the share of each run in the speeds of its GPUs alone, in percent."""
    runs = read_speeds(name)["runs"]
    shares = {}
    for key, run in runs.items():
        _, comma, model = key.partition(", ")
        one = runs.get(f"one{comma}{model}", {})
        if "tokens_per_second" in run and one and run is not one:
            alone = one.get("tokens_per_second_of_gpus", [one["tokens_per_second"]] * gpus)
            shares[key] = 100 * run["tokens_per_second"] / sum(alone)
    return shares


def test_speeds_of_several_gpus_are_those_of_the_result_files():
    percent = shares_of("h100_x4_scaling", 4)
    on_two, on_four = shares_of_h200s(2), shares_of_h200s(4)
    assert sorted(on_two) == ["ddp", "fsdp2", "zero"]
    assert sorted(on_four) == ["ddp", "fsdp2", "hsdp", "launchers", "zero"]
    in_each = shares_of("h200_x2_zero3", 2)["fsdp2"]
    reached = [shares[name] for shares in (percent, on_two, on_four) for name in ("ddp", "zero")]
    share = f"{min(reached):.0f} to {max(reached):.0f} %"
    page = " ".join((ROOT / "docs/scaling.md").read_text(encoding="utf-8").split())
    assert f"reach {share} of the speed of GPUs alone" in page
    (sharded,) = {f"{on_four[name]:.0f} %" for name in ("fsdp2", "hsdp")}
    assert f"`fsdp2` and `hsdp` reach {sharded} on four H200s" in page
    assert f"`fsdp2` reaches {on_two['fsdp2']:.0f} %, and {in_each:.0f} % if" in page
    table = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert all(
        f"{value:.1f} %" in table
        for value in [*reached, *on_two.values(), *on_four.values(), in_each]
    )
    llama = read_speeds("h200_x4_scaling")["runs"]["zero, llama"]
    assert f"{llama['tokens_per_second'] / 4:,.0f} tokens/s per GPU" in table


ON_H200S = {2: "h200_x2_topologies", 4: "h200_x4_scaling"}


def shares_of_h200s(gpus: int) -> dict[str, float]:
    """Return the share of Qwen3-1.7B on H200s in the speeds of the GPUs alone, in percent."""
    return {
        run.partition(",")[0]: share
        for run, share in shares_of(ON_H200S[gpus], gpus).items()
        if run.endswith("batch.microbatch=8")
    }


def test_shares_of_unequal_gpus_and_of_gpt2_are_those_of_their_files():
    table = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    (row,) = (line for line in table.splitlines() if "GPT-2 124M | `ddp.yaml`" in line)
    assert f"| {shares_of('h200_x2_topologies', 2)['ddp, gpt2']:.1f} % |" in row
    slower = {}
    for gpus, name in ON_H200S.items():
        alone = read_speeds(name)["runs"]["one, batch.microbatch=8"]["tokens_per_second_of_gpus"]
        slower[gpus] = f"{100 * (1 - min(alone) / alone[0]):.1f} %"
    sentence = f"of four was {slower[4]} slower than the first, and that of two {slower[2]}."
    assert sentence in " ".join(table.split())


def test_errors_of_the_planner_by_length_are_those_of_its_rows():
    card = card_of("H200")
    ranges = []
    for length in (4_096, 32_768, 131_072):
        rows = [
            row
            for row in read_rows("fit", "special")
            if (row.values["card"], row.work.mean_squared) == ("H200", length)
        ]
        predicted = [row.work.tokens / sum(step_seconds(card, row.work).values()) for row in rows]
        errors = [
            100 * abs(speed / row.speed - 1) for speed, row in zip(predicted, rows, strict=True)
        ]
        ranges.append(f"{min(errors):.1f} to {max(errors):.1f} %")
    text = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    short, long, longest = ranges
    assert f"{short} for documents of 4,096 tokens, {long} for 32,768 and {longest} for" in text


def test_the_lost_time_of_four_gpus_is_that_of_its_file():
    page = (ROOT / "docs/developers/distributed.md").read_text(encoding="utf-8")
    runs = read_speeds("h200_x4_scaling")["runs"]
    one = runs["one, batch.microbatch=8"]
    for name in ("ddp", "zero", "fsdp2", "hsdp"):
        run = runs[f"{name}, batch.microbatch=8"]
        causes = lost(run["step_ms"], run["explanation"], one["step_ms"], one["explanation"], 4)
        rest = causes.pop("other") + causes.pop("remainder")
        cells = [f"{ms:,.1f}".replace("-", "−") for ms in (run["step_ms"], *causes.values(), rest)]
        assert f"| `{name}.yaml` | {' | '.join(cells)} |" in page


def test_the_table_of_a_card_is_that_of_its_file():
    made = gpu_card.read(RESULTS / "cards/h200.json")
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(gpu_card.HEADER)} |" in page
    for name in made["ways"]:
        assert gpu_card.failures(name, made) == []
        assert f"| {' | '.join(gpu_card.row(name, made))} |" in page


@pytest.mark.parametrize("path", [*RESULTS.glob("cards/*.json")], ids=lambda path: path.stem)
def test_a_published_card_is_complete_and_unchanged(path: Path):
    assert {"ways", "losses", "bits", "left_out", "code"} <= gpu_card.read(path).keys()


def gains_of_fp8(result: dict[str, Any]) -> list[float]:
    """Return the speed of FP8, and of FP8 with the head in FP8, divided by BF16's speed."""
    bf16, delayed, head = (
        result["ways"][way]["tokens_per_second"]["median"]
        for way in ("bf16_exact", "delayed_exact", "delayed_exact_head")
    )
    return [delayed / bf16, head / bf16]
