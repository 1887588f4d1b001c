"""The figures of the docs are those of the result files."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from benchmarks.evidence.served import pages
from benchmarks.evidence.size import PREDICTED, predictions, size_table
from benchmarks.evidence.t_interval import t_half_width
from benchmarks.evidence.tables import (
    ANSWER,
    PAGE,
    SCALES,
    Endpoint,
    Scale,
    answer_table,
    holm,
    page,
    served_loss,
)
from benchmarks.machine import with_tables
from benchmarks.readers import table
from pretrain.compare.differences import EQUIVALENT, MOST_ESTIMATED_SEEDS, LossDifference
from pretrain.compare.verdicts import USE, Verdict
from pretrain.compare.which_answer import interval_within
from pretrain.compare.which_plan import WhichPlan
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
    commit = (git["commit"] or "not recorded")[: 8 if git["commit"] else None]
    assert FILES[name][3] == commit + (" (dirty)" if git.get("dirty") else "")


def test_the_tables_of_the_evidence_are_those_of_its_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    scales = {name: Scale.read(name) for name in SCALES}
    remedy = "python -m benchmarks.evidence.tables"
    assert PAGE.read_text(encoding="utf-8") == page(scales), remedy
    text = ANSWER.read_text(encoding="utf-8")
    assert text == with_tables(ANSWER, "evidence", answer_table(scales)), remedy
    assert text == with_tables(ANSWER, "size", size_table()), "python -m benchmarks.evidence.size"


def test_tables_and_figures_of_trained_and_served_are_those_of_the_file(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(ROOT)
    tables = pages()
    for file, text in tables.items():
        assert file.read_text(encoding="utf-8") == text, "python -m benchmarks.evidence.served"
    evidence, design = tables.values()
    section = evidence.partition("### Trained and served")[2].partition("\n### ")[0]
    prose = section.partition("<!-- served -->")[0] + section.partition("<!-- /served -->")[2]
    for text in (prose, (ROOT / "docs/serving.md").read_text(encoding="utf-8")):
        figures = re.findall(r"\d\.\d\d ± \d\.\d\d %", " ".join(text.split()))
        assert figures and [figure for figure in figures if figure not in design] == []


def test_the_table_of_serving_is_that_of_its_file() -> None:
    rows = json.loads((RESULTS / "cpu/readers.json").read_text(encoding="utf-8"))["rows"]
    page = ROOT / "docs/serving.md"
    text = page.read_text(encoding="utf-8")
    assert text == with_tables(page, "readers", table(rows)), "python -m benchmarks.readers"


def test_predictions_of_both_fits_are_those_of_a_known_line() -> None:
    sizes = np.array([1e7, 3e7, 1e8, 1e9])
    noise = np.array([1.0, -1.0, -1.0, 1.0]) * 0.01
    growing = predictions(sizes, 0.1 * np.log(sizes), grows=True)
    for size, (cost, half) in zip(PREDICTED, growing, strict=True):
        assert cost == pytest.approx(0.1 * np.log(size)) and half < 1e-9
    # The interval of a mean: t of 3 degrees of freedom times the standard error.
    for cost, half in predictions(sizes, 0.2 + noise, grows=False):
        assert cost == pytest.approx(0.2)
        assert half == pytest.approx(3.182 * noise.std(ddof=1) / 2, rel=1e-3)


def test_the_figures_of_the_recommendations_are_those_of_the_tables():
    text = ANSWER.read_text(encoding="utf-8")
    section = text.partition("## What to use when")[2].partition("\n## ")[0]
    tables = text.partition("<!-- /evidence -->")[0] + (ROOT / "docs/experts.md").read_text("utf-8")
    losses = re.findall(r"[+−]\d\.\d\d ± \d\.\d\d %", section)
    assert len(losses) >= 8 and [loss for loss in losses if loss not in tables] == []
    results = (ROOT / "docs/results.md").read_text("utf-8")
    speeds = re.findall(r"\d+,\d{3}", section)
    assert len(speeds) >= 5 and [speed for speed in speeds if speed not in results] == []


def test_readmes_losses_are_those_of_the_evidence(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    names = ("14m", "35m", "35m_once", "111m", "14m_lr2")
    served = Endpoint.of({name: Scale.read(name) for name in names}, served_loss)
    rows = readmes_answers()
    for row, scale, cell in (
        (5, "111m", "delayed_branch"),
        (7, "14m", "mxfp8_branch"),
        (8, "14m", "nvfp4_kept_branch"),
    ):
        difference = served.differences[scale, cell]
        percent = 100 / difference.baseline
        middle = percent * difference.mean
        half = percent * t_half_width(difference)
        loss = f"about {middle:.1f} % higher ({middle - half:.1f} to {middle + half:.1f} %)"
        loss = loss.replace("-0.0", "0").replace("-", "−")
        assert rows[row][3].startswith(loss), (rows[row], loss)
    assert rows[6][3] == "FP8: no measurable difference"
    assert served.verdict("14m", "delayed_branch") == EQUIVALENT


def test_holms_correction_counts_the_smallest_most_often():
    p_values = {("14m", "a"): 0.01, ("14m", "b"): 0.04, ("14m", "c"): 0.03, ("14m", "d"): 0.6}
    assert list(holm(p_values).items()) == [
        (("14m", "a"), 0.04),
        (("14m", "c"), 0.09),
        (("14m", "b"), 0.09),
        (("14m", "d"), 0.6),
    ]


def test_readmes_speeds_are_those_of_the_result_files(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    rows = readmes_answers()
    for gpu in ("h100", "h200"):
        file = RESULTS / f"speed/{gpu}_throughput.json"
        delayed, head = gains_of_fp8(json.loads(file.read_text(encoding="utf-8")))
        assert rows[1][2] == f"{delayed:.1f} times"
        assert float(rows[2][2].split()[0]) == pytest.approx(head, abs=0.07)
    file = RESULTS / "speed/h100_qwen2_5.json"
    shapes = json.loads(file.read_text(encoding="utf-8"))["shapes"]
    delayed, head = gains_of_fp8(shapes["Qwen2.5-7B"])
    assert rows[0][2] == f"{head:.1f} times"
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"one of 7.6 billion {delayed:.1f} times as fast" in readme
    assert f"{gains_of_fp8(shapes['Qwen2.5-0.5B'])[0]:.1f} times as fast. The loss" in readme
    evidence = " ".join((ROOT / "docs/evidence.md").read_text(encoding="utf-8").split())
    gains = [gains_of_fp8(shapes[f"Qwen2.5-{size}B"]) for size in ("0.5", "1.5", "3", "7")]
    *smaller, largest = (f"{delayed:.2f}x" for delayed, _ in gains)
    assert f"gain {', '.join(smaller)} and {largest} on an H100" in evidence
    *smaller, largest = (f"{head:.2f}x" for _, head in gains)
    assert f"{', '.join(smaller)} and {largest} with the head in FP8" in evidence
    lines = (RESULTS / "loss/h200_evidence_111m.jsonl").read_text(encoding="utf-8").splitlines()
    speeds = defaultdict(list)
    for run in map(json.loads, lines):
        speeds[run.get("cell")].append(run.get("tokens_per_second"))
    faster = statistics.median(speeds["delayed_branch"]) / statistics.median(speeds["bf16"])
    assert rows[5][2] == f"{faster:.1f} times"
    answers = json.loads((RESULTS / "loss/which.json").read_text(encoding="utf-8"))
    assert rows[6][1:3] == ["BF16", "FP8: 1.0 times"]
    assert "delayed: equivalent, not worth it" in answers["dense_delayed"]["answer"]


def test_readmes_speeds_of_four_gpus_are_those_of_the_result_files():
    runs = json.loads((RESULTS / "speed/h100_x4_scaling.json").read_text(encoding="utf-8"))["runs"]
    shares = {name: run["tokens_per_second"] / 4 for name, run in runs.items() if name != "one"}
    percent = {
        name: 100 * speed / runs["one"]["tokens_per_second"] for name, speed in shares.items()
    }
    file = RESULTS / "speed/h200_x4_one_gpu.json"
    (one,) = json.loads(file.read_text(encoding="utf-8"))["results"]
    ddp = json.loads((RESULTS / "speed/h200_x4_ddp.json").read_text(encoding="utf-8"))
    # A time limit ended this run. Its output has the speeds of steps 1 to 5, in thousands.
    (output,) = (result["output"] for result in ddp["results"])
    speed = 1000 * statistics.median(map(float, re.findall(r"([\d.]+)k tok/s", output)[2:]))
    reached = [percent["ddp"], percent["zero"]]
    reached.append(100 * speed / 4 / one["summary"]["tokens_per_second"])
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    ranges = f"{min(reached):.0f} to {max(reached):.0f} % (`ddp`, `zero`)"
    assert f"reached {ranges} and {percent['fsdp2']:.0f} % (`fsdp2`)" in readme


def test_speeds_of_microbatches_are_those_of_the_result_file():
    content = json.loads((RESULTS / "speed/h100_microbatches.json").read_text(encoding="utf-8"))
    eight, auto = (result["summary"] for result in content["results"])
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    speeds = f"{eight['tokens_per_second']:,.0f} tokens/s, and {auto['tokens_per_second']:,.0f}"
    assert f"| {speeds} with `auto`; {auto['memory_gib']:.1f} GiB |" in page


def test_figures_of_gpt2_are_those_of_its_rounds():
    content = json.loads((RESULTS / "loss/h100_which_gpt2.json").read_text(encoding="utf-8"))
    rounds = {
        (run["precision"], run["seed"]): run for run in content["runs"] if run["part"] == "rounds"
    }
    page = (ROOT / "docs/which.md").read_text(encoding="utf-8")
    plan = WhichPlan(**content["verdict"]["protocol"])
    for name, label, seeds, quantile in (
        # The last value is the 97.5 % quantile of Student's t distribution.
        ("delayed", "FP8 delayed", 4, 3.182),
        ("delayed+head", "FP8 delayed, head in FP8", 6, 2.571),
        ("block", "FP8 block", 6, 2.571),
    ):
        pairs = [(rounds[name, seed], rounds["bf16", seed]) for seed in range(1, seeds + 1)]
        assert (name, seeds + 1) not in rounds
        speedups = [run["tokens_per_second"] / base["tokens_per_second"] for run, base in pairs]
        differences = content["differences"][name]
        assert differences["speedup_by_seed"] == pytest.approx(speedups, abs=1e-4)
        cells = [label, str(seeds), f"{statistics.mean(speedups):.2f} ×"]
        verdict = verdict_of(content, name)
        for key, entry, difference in (
            ("held_out_loss", "served_in_bf16", verdict.held_out),
            ("loss_at_end", "as_trained", verdict.trained),
        ):
            values = [run[key] - base[key] for run, base in pairs]
            assert list(difference.by_seed.values()) == pytest.approx(values)
            percents = [100 * (run[key] / base[key] - 1) for run, base in pairs]
            paired_half = quantile * statistics.stdev(percents) / math.sqrt(seeds)
            assert differences[entry]["half_width_95"] == pytest.approx(paired_half, abs=1e-3)
            scale = 100 / statistics.mean(base[key] for _, base in pairs)
            half = scale * difference.half_width(plan.error)
            cells.append(f"+{scale * difference.mean:.3f} ± {half:.3f} %")
            if key == "held_out_loss":
                assert paired_half < statistics.mean(percents), "which.md: it excludes zero"
                cells.append(f"± {differences[entry]['half_width_95']:.3f} %")
        assert f"| {' | '.join(cells)} |" in page
    for name, speedup in (("delayed", "1.15"), ("delayed+head", "1.25")):
        speedups = content["differences"][name]["speedup_by_seed"][1:4]
        assert f"{statistics.mean(speedups):.2f}" == speedup
    graphs = [rounds["bf16", seed]["cuda_graphs"].partition(":")[0] for seed in range(1, 7)]
    assert graphs == ["off", "on", "on", "on", "off", "off"]


def verdict_of(content: dict[str, Any], name: str) -> Verdict:
    """Return the verdict of a candidate in a result file that has a copy of verdict.json."""
    fields = dict(content["verdict"]["candidates"][name])
    del fields["gain_at_equal_loss"]
    fields["held_out"] = fields.pop("served")
    for key in ("held_out", "trained"):
        by_seed = {int(seed): value for seed, value in fields[key]["by_seed"].items()}
        fields[key] = LossDifference(by_seed, fields[key]["baseline"])
    return Verdict(**fields)


def test_the_recommendation_of_fp8_for_gpt2_is_that_of_which():
    content = json.loads((RESULTS / "loss/h100_which_gpt2.json").read_text(encoding="utf-8"))
    plan = WhichPlan(**content["verdict"]["protocol"])
    delayed = verdict_of(content, "delayed")
    word = delayed.held_out.verdict(plan.margin, plan.error)
    assert (word, delayed.advice) == (EQUIVALENT, USE)
    interval = interval_within(plan, delayed)
    answer = content["verdict"]["answer"].replace(EQUIVALENT, EQUIVALENT + interval)
    page = (ROOT / "docs/which.md").read_text(encoding="utf-8")
    for name, advice in (("delayed+head", "more than 200"), ("block", "25")):
        held_out = verdict_of(content, name).held_out
        seeds = held_out.seeds_for_verdict(plan.margin, plan.error)
        assert str(seeds or f"more than {MOST_ESTIMATED_SEEDS}") == advice
        line = f"{name}: cannot tell, {advice} seeds would be enough with a probability of 80 %, "
        answer = re.sub(f"(?m)^{re.escape(name)}: .*", f"{line}but at most 20 are trained.", answer)
    assert answer.rpartition("\n")[0] in page
    paired = content["differences"]["delayed"]["served_in_bf16"]
    ends = [paired["mean"] - paired["half_width_95"], paired["mean"] + paired["half_width_95"]]
    cost = f"{ends[0]:.2f} to {ends[1]:.2f} %"
    margin = f"below the margin of {100 * plan.margin:g} %"
    assert readmes_answers()[4][2:] == ["1.2 times", f"{cost} higher, {margin}"]
    for name in ("docs/which.md", "docs/evidence.md", "recipes/gpt2_fineweb_edu.yaml"):
        assert cost in (ROOT / name).read_text(encoding="utf-8"), name
    low, high = delayed.gain_interval
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert f"{delayed.gain:.2f} times ({low:.2f} to {high:.2f}) BF16's speed" in readme


def test_qwen3_0_6b_has_the_speed_and_loss_of_three_rounds():
    file = RESULTS / "loss/h100_which_qwen3_0_6b.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    rounds = {
        (run["precision"], run["seed"]): run for run in content["runs"] if run["part"] == "rounds"
    }
    page = (ROOT / "docs/which.md").read_text(encoding="utf-8")
    for name, label in (("delayed", "FP8 delayed"), ("delayed+head", "FP8 delayed, head in FP8")):
        pairs = [(rounds["bf16", seed], rounds[name, seed]) for seed in content["seeds"]]
        speedup = statistics.mean(
            run["tokens_per_second"] / base["tokens_per_second"] for base, run in pairs
        )
        cells = [label, f"{speedup:.2f} ×"]
        for key in ("held_out_loss", "loss_at_end"):
            costs = [100 * (run[key] / base[key] - 1) for base, run in pairs]
            cells.append(", ".join(f"+{cost:.2f} %" for cost in costs))
        assert f"| {' | '.join(cells)} |" in page
        served = [run["held_out_loss"] / base["held_out_loss"] - 1 for base, run in pairs]
        # t of 2 degrees of freedom times the standard error.
        half_width = 4.303 * statistics.stdev(served) / math.sqrt(3)
        assert f"{100 * statistics.mean(served):.2f} ± {100 * half_width:.2f} %" in page
        if name == "delayed":
            evidence = (ROOT / "docs/evidence.md").read_text(encoding="utf-8")
            assert f"{100 * statistics.mean(served):.2f} ± {100 * half_width:.2f} %" in evidence
            *first, last = cells[2].replace("+", "").split(" %, ")
            loss = f"{', '.join(first)} and {last} higher with three seeds"
            assert readmes_answers()[3][2:] == [f"{speedup:.1f} times", loss]


def gains_of_fp8(result: dict[str, Any]) -> list[float]:
    """Return the speed of FP8, and of FP8 with the head in FP8, divided by BF16's speed."""
    bf16, delayed, head = (
        result["ways"][way]["tokens_per_second"]["median"]
        for way in ("bf16_exact", "delayed_exact", "delayed_exact_head")
    )
    return [delayed / bf16, head / bf16]


def readmes_answers() -> list[list[str]]:
    """Return the cells of the README's table of precisions, row by row."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.partition("## Which precision")[2].partition("\n\n|")[2].partition("\n\n")[0]
    _, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()
    ]
    return rows
