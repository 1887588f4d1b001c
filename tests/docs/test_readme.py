"""README: its block for one's own text works, its figures are those of the files, its links lead somewhere."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

from benchmarks.evidence_read import TESTED, Scale, Speeds, final_loss, training_loss
from benchmarks.evidence_report import section
from demo.corpus import library_documents, standard_library
from pretrain.compare.student import t_quantile

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
WIDTH = 100


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout with an environment and a folder of texts: what the block asks for."""
    for name in ("foundation", "packing", "pretrain", "accelerate_configs"):
        shutil.copytree(ROOT / name, tmp_path / name)  # with what Python has compiled: four processes begin with it
    shutil.copy(ROOT / "train_accelerate.py", tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    texts = [document.text for document in islice(library_documents(standard_library(), []), 400)]
    (tmp_path / "my_text").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "my_text" / f"{number}.txt").write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.long
def test_the_block_for_your_own_text_trains_and_generates(checkout: Path):
    """As it stands, but for the number of steps, of which a fifth learns enough."""
    (block,) = re.findall(r"<!-- own text: .*?-->\n```bash\n(.*?)```", README, re.DOTALL)
    assert block.count("train: {steps: 200}\n") == 1
    block = block.replace("train: {steps: 200}\n", "train: {steps: 40}\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(["bash", "-e", "-c", block], cwd=checkout, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (run,) = (checkout / "runs").iterdir()
    assert json.loads((run / "summary.json").read_text())["held_out_loss"] < 7.0, "8.3 is a uniform guess over 4,000 tokens"
    assert re.search(r"sample after The $(\n +│.*)*\n +│ .*\S", done.stdout, re.MULTILINE), "the continuation, behind its prompt"
    config = json.loads((run / "final/config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (4096, 0), "the tokenizer's 4,000 ids, and its end of text"


def test_readme_has_12_kilobytes_or_less_and_the_answer_of_the_evidence_18():
    assert len(README.encode()) <= 12_000
    assert len((ROOT / "docs/evidence.md").read_bytes()) <= 18 * 1024


def test_readme_has_the_speeds_of_the_result_files():
    (files, table) = re.search(r"\*\*Speed\.\*\*(.*?)\n(\|.*?)\n\n", README, re.DOTALL).groups()
    _, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    for file, *column in zip(re.findall(r"results/\w+\.json", files), *[row[2:] for row in rows], strict=True):
        ways = json.loads((ROOT / "benchmarks" / file).read_text())["ways"]
        speeds = {f"{way['tokens_per_second']['median']:,.0f}" for way in ways.values() if way["status"] == "ok"}
        shown = [speed for cell in column for speed in re.findall(r"\d+,\d{3}", cell)]
        assert len(shown) >= 4 and set(shown) <= speeds


def test_the_speeds_of_an_h100_are_those_of_its_file():
    ways = json.loads((ROOT / "benchmarks/results/h100_throughput.json").read_text())["ways"]
    by_way = {name: f"{way['tokens_per_second']['median']:,.0f}" for name, way in ways.items()}
    said = f"makes {by_way['delayed_exact_head']} by the first, and {by_way['bf16_exact']} in BF16"
    assert said in README
    rows = (ROOT / "docs/performance.md").read_text().partition("## On an H100")[2].partition("## ")[0]
    for name, way in ways.items():
        share, peak = f"{100 * way['share_of_limit']:.1f} %", f"{way['memory_gib']:.1f}"
        over = way["tokens_per_second"]["median"] / ways["hf_eager"]["tokens_per_second"]["median"]
        assert f"| {by_way[name]} | {over:.3g} | {share} | {peak} |" in rows


def test_the_losses_of_the_comparison_are_those_of_the_result_file():
    runs = json.loads((ROOT / "benchmarks/results/h200_comparison.json").read_text())["runs"]
    losses = {name: run["losses"] for name, run in runs.items()}
    (table,) = re.findall(r"## Loss\n.*?\n(\|.*?)\n\n", (ROOT / "docs/results.md").read_text(), re.DOTALL)
    header, _, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()]
    for weights, *cells in rows:
        for precision, cell in zip(header[1:], cells, strict=True):
            if cell == "baseline":
                continue
            steps = zip(losses[f"{precision.split()[0]}-{weights}"], losses["bf16-fp32"], strict=True)
            difference = statistics.mean([ours - baseline for ours, baseline in steps][-16:])
            assert float(cell.split(" ")[0]) == float(f"{difference:.4f}"), f"{precision}, {weights}"


def test_the_losses_of_fused_layers_are_those_of_the_result_files():
    """Blocks and all others have a file each, with a baseline of its own."""
    files = [ROOT / f"benchmarks/results/h200_fused_losses{name}.json" for name in ("", "_block")]
    every, blocks = (list(json.loads(file.read_text())["runs"].values()) for file in files)
    (table,) = re.findall(r"### Fused layers\n.*?\n(\|.*?)\n\n", (ROOT / "docs/results.md").read_text(), re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert len(rows) == len(every)
    for way, *shown in rows:
        precision = next(each for each in ("delayed", "current", "block", "mxfp8", "nvfp4", "bf16") if each in way.lower())
        scope = "linear+head" if "head" in way else "linear"
        runs = blocks if precision == "block" else every
        baseline = next(run for run in runs if run["settings"]["model.fused"] == "off")
        (run,) = (
            run
            for run in runs
            if run is not baseline
            and (run["settings"]["precision"], run["settings"].get("fp8_config.scope", "linear")) == (precision, scope)
        )
        gaps = [ours - theirs for ours, theirs in zip(run["losses"], baseline["losses"], strict=True)]
        held_out = run["summary"]["held_out_loss"] - baseline["summary"]["held_out_loss"]
        found = [statistics.mean(gaps), statistics.mean(gaps[-40:]), held_out]
        assert [cell.split(" ")[0] for cell in shown] == [f"{each:+.4f}" for each in found], way


FILES_OF = {
    "14m": [
        "14m",
        "14m_controls",
        "14m_delayed",
        "14m_head",
        "14m_head_2",
        "14m_emulated",
        "14m_emulated_2",
        "14m_unfinished",
        "14m_unfinished_2",
        "14m_fp4",
        "14m_kept",
        "14m_emulated_3",
        "14m_nvfp4",
        "14m_fp8_kept",
    ],
    "14m_lr2": ["14m_lr2"],
    "35m": ["35m"],
    "35m_once": ["35m_once", "35m_once_2", "35m_once_3", "35m_once_begun", "35m_once_4", "35m_once_5", "35m_once_6"],
    "111m": ["111m"],
    "111m_five_times": ["111m_five_times"],
    "continued": ["continued"],
}


@cache
def scale_of(size: str) -> Scale:
    return Scale.read(*(ROOT / result_file(name) for name in FILES_OF[size]))


def result_file(name: str) -> str:
    return f"benchmarks/results/h200_evidence_{name}.json"


@pytest.mark.parametrize(
    ("size", "cell", "row", "begins"),
    [
        ("14m", "delayed", "`fp8_delayed.yaml` | `weights=bf16_exact` |", "FP8, delayed scaling |"),
        ("14m", "delayed_head", "linear+head`", "FP8, delayed scaling and the head"),
        ("14m", "delayed_kept", None, "FP8, delayed scaling, its last layer in BF16, 3 seeds"),
        ("14m", "current", "`fp8_current.yaml`", "FP8, current scaling"),
        ("14m", "block", None, "FP8, blocks"),
        ("14m", "mxfp8", "`mxfp8.yaml`", "MXFP8, emulated"),
        ("14m", "nvfp4", None, "NVFP4 in every linear"),
        ("14m", "nvfp4_kept", None, "NVFP4, its last layer in BF16"),
        ("14m", "nvfp4_then_bf16", None, "NVFP4, the decay in BF16"),
        ("14m", "mxfp4", None, "MXFP4"),
        ("14m", "bf16_weights", None, "BF16 weights"),
        ("35m", "delayed", "`fp8_delayed.yaml` | `weights=bf16_exact` |", "35 million: FP8, delayed scaling"),
        ("35m", "delayed_head", "linear+head`", "35 million: with the head in FP8"),
        ("35m_once", "delayed", None, "35 million, all text new: FP8, delayed scaling, 4 seeds"),
        ("111m", "delayed", None, "112 million: FP8, delayed scaling, 3 seeds"),
    ],
)
def test_what_a_precision_costs_is_what_the_experiment_found(size: str, cell: str, row: str | None, begins: str):
    """The README's table of hardware, and the answer in docs/evidence.md, from the experiment's files."""
    scale = scale_of(size)
    speeds = Speeds(ROOT / "benchmarks/results/h200_throughput.json")
    readme = README.partition("## Which precision")[2].partition("## ")[0]
    answer = (ROOT / "docs/evidence.md").read_text().partition("## The answer")[2].partition("## ")[0]
    found, trained = scale.difference(f"{cell}_branch"), scale.difference(f"{cell}_branch", scale.trained_loss)
    training = scale.difference(f"{cell}_branch", training_loss)
    mean, half = 100 * found.mean / found.baseline, 100 * found.half_width() / found.baseline
    (line,) = [line for line in answer.splitlines() if line.startswith(f"| {begins}")]
    figures = [float(each.replace("\u2212", "-")) for each in re.findall(r"[+\u2212]\d+\.\d+", line)]
    expected = [mean, mean - half, mean + half, *(100 * each.mean / each.baseline for each in (trained, training))]
    assert figures == pytest.approx(expected, abs=0.0051), line
    if f"{cell}_branch" not in TESTED:
        return
    assert f"| {found.verdict()} |" in line
    if speed := speeds.over_baseline(scale, f"{cell}_branch"):
        assert f"{speed:.2f} \u00d7" in line
    column = -2 if size == "35m" else -3
    lines = [line for line in readme.splitlines() if row and row in line and line.startswith("|")]
    assert len(lines) == bool(row)
    for line in lines:
        assert f"{mean:+.2f} %, {found.verdict()}".replace("-", "\u2212") in line.split("|")[column]


def test_what_the_largest_size_tells_is_said_with_its_seeds_and_verdicts():
    scale, answer = scale_of("111m"), " ".join((ROOT / "docs/evidence.md").read_text().split())
    found, training = scale.difference("delayed_branch"), scale.difference("delayed_branch", training_loss)
    share, interval, trained, narrow = (
        f"{100 * value / each.baseline:.2f}" for each in (found, training) for value in (each.mean, each.half_width())
    )
    assert len(found.by_seed) == 3
    of_three = f"ends {share} % above BF16 (three seeds, {found.verdict()}), in training loss {trained} %, {training.verdict()}."
    assert of_three in " ".join(README.split())
    ends = {name: run["endpoints"]["final"]["held_out_loss"] for name, run in scale.content["runs"].items()}
    each = [f"{100 * (ends[f'delayed_branch-seed{seed}'] / ends[f'bf16-seed{seed}'] - 1):.2f}" for seed in found.by_seed]
    assert f"ends {trained} ± {narrow} % above BF16" in answer
    assert f"end {each[0]}, {each[1]} and {each[2]} % above, {share} ± {interval} % in the mean" in answer


@pytest.mark.parametrize("size", FILES_OF)
def test_the_tables_of_a_scale_are_those_of_its_files(size: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    page, speeds = Path("docs/evidence_results.md"), Speeds(Path("benchmarks/results/h200_throughput.json"))
    text = page.read_text()
    assert "\n\n".join(section(scale_of(size), speeds, page.parent)) in text
    files = re.search(r"`python -m benchmarks\.evidence_report (.*?)` makes these tables", text, re.DOTALL)[1].split()
    assert [file for file in files if file in map(result_file, FILES_OF[size])] == [*map(result_file, FILES_OF[size])]
    assert len(files) == len(set(files)) == sum(map(len, FILES_OF.values()))


def test_the_faults_that_are_counted_are_those_of_the_tables():
    counted, page = ((ROOT / f"docs/{name}.md").read_text() for name in ("precision", "faults"))
    found = []
    for table in re.findall(r"<!-- faults[^>]*begin -->(.*?)<!-- faults", page, re.DOTALL):
        _, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|"))
        *faults, (_, healthy, *_) = rows
        found.append((len(faults), sum(cell != "–" for _, *cells in faults for cell in cells), int(healthy.split(" of ")[0])))
    (faults, cases, healthy), (on_gpu, cases_on_gpu, healthy_on_gpu) = found
    said = (
        f"it makes {faults} faults in up to eight precisions, {cases} cases; on an H200 {on_gpu} in five, {cases_on_gpu} cases.",
        f"{healthy} and {healthy_on_gpu} small runs in which nothing is broken pass.",
    )
    assert all(each in " ".join(counted.split()) for each in said)


def table_after(heading: str) -> list[list[str]]:
    """The cells of the first table behind a heading of docs/evidence.md, without its own two lines, with ASCII signs."""
    text = (ROOT / "docs/evidence.md").read_text().replace("\u2212", "-").partition(f"\n{heading}\n")[2]
    lines = re.search(r"(?m)(^\|.*\n)+", text)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def hundreds_of(size: str) -> list[list[float]]:
    """Delayed scaling's training loss above BF16's, a row a seed: the branch's first 100 steps, the last before the decay, the
    last."""
    begin, decay = (532, 2128) if size.startswith("35m") else (428, 1712)
    parts = (slice(100), slice(decay - begin - 100, decay - begin), slice(-100, None))
    rows = []
    for file in scale_of(size).files:
        runs = file.content["runs"]
        for run in (run for run in runs.values() if run["cell"] == "delayed_branch"):
            whole = runs[f"bf16-seed{run['seed']}"]["losses"]
            gaps = [ours - theirs for ours, theirs in zip(run["losses"], whole[begin:], strict=True)]
            rows.append([statistics.mean(gaps[part]) for part in parts])
    return rows


def test_what_twice_the_rate_costs_is_what_the_files_say():
    for row, *cells in table_after("### Twice the rate"):
        cell, measure = row.split(", ")
        for size, said in zip(("14m", "14m_lr2"), cells, strict=True):
            found = scale_of(size).difference(
                f"{cell.split()[0].lower()}_branch", training_loss if measure == "training loss" else final_loss
            )
            assert said == f"{found.mean:.4f} ± {found.half_width():.4f}", (row, size)
    once, twice = (scale_of(size).values("bf16", final_loss) for size in ("14m", "14m_lr2"))
    higher = sorted(f"{twice[seed] - once[seed]:.3f}" for seed in twice)
    assert f"three seeds end {higher[0]} to {higher[-1]} higher" in (ROOT / "docs/evidence.md").read_text()


def test_what_text_that_is_seen_again_does_is_what_the_files_say():
    rows = {name: cells for name, *cells in table_after("### Text that is seen again")}
    for column, size in enumerate(("35m", "35m_once", "111m_five_times", "111m")):
        scale, by_seed = scale_of(size), hundreds_of(size)
        assert len(by_seed) == int(rows["seeds"][column])
        hundreds = [statistics.mean(each) for each in zip(*by_seed, strict=True)]
        served, training = (scale.difference("delayed_branch", measure) for measure in (final_loss, training_loss))
        *shown, share, at_the_end = (float(cells[column].split(" ")[0]) for cells in list(rows.values())[2:])
        assert [*shown, at_the_end] == pytest.approx([*hundreds, served.mean], abs=5.1e-5)
        assert share == pytest.approx(100 * training.mean / training.baseline, abs=0.0051)


def test_what_one_seed_tells_of_the_other_precisions_is_what_the_files_say():
    scale = scale_of("35m_once")
    cells = ["bf16", "delayed", "delayed_head", "current", "block", "mxfp8", "nvfp4"]
    for cell, (_, foreseen, *shown) in zip(cells, table_after("### The other precisions at 35 million"), strict=True):
        training, served = (scale.difference(f"{cell}_branch", measure).by_seed[4] for measure in (training_loss, final_loss))
        assert [float(each) for each in shown] == pytest.approx([training, served], abs=5.1e-5), cell
        low, high = map(float, foreseen.removesuffix(" if its share holds").replace("below", "-inf to").split(" to "))
        assert low <= training <= high


def test_what_few_seeds_tell_by_the_spread_of_others_is_as_the_page_says():
    text = " ".join((ROOT / "docs/evidence.md").read_text().split())
    (_, before, end), (_, before_once, end_once) = (zip(*hundreds_of(size), strict=True) for size in ("35m", "35m_once"))
    for ours, theirs, said in ((before, before_once, "is seen ({})"), (end, end_once, "The end is {} nearer to BF16 (pooled t")):
        freedom = len(ours) + len(theirs) - 2
        spread = math.sqrt(sum((len(each) - 1) * statistics.variance(each) for each in (ours, theirs)) / freedom)
        half = t_quantile(freedom, 0.95) * spread * math.sqrt(1 / len(ours) + 1 / len(theirs))
        assert said.format(f"{statistics.mean(ours) - statistics.mean(theirs):.4f} ± {half:.4f}") in text


def test_what_continued_training_shows_is_what_its_file_says():
    runs = scale_of("continued").content["runs"]
    cells = ["bf16_again", "fp32_weights", "delayed", "bf16_weights", "delayed_bf16_weights"]
    between = statistics.mean(each["kl"] for each in scale_of("continued").content["between_baseline_seeds"])
    for cell, (name, *shown) in zip(cells, table_after("### Continued training"), strict=True):
        pairs = [(run, runs[f"bf16-seed{run['seed']}"]) for run in runs.values() if run["cell"] == cell]
        ends = [tuple(each["endpoints"]["final"] for each in pair) for pair in pairs]
        training = [statistics.mean(run["losses"][-100:]) - statistics.mean(of["losses"][-100:]) for run, of in pairs]
        kinds = [[run[f"held_out_loss/{kind}"] - of[f"held_out_loss/{kind}"] for run, of in ends] for kind in ("code", "prose")]
        assert f"{len(pairs)} seeds" in name
        expected = [*(statistics.mean(each) for each in (training, *kinds))]
        assert [float(each) for each in shown[:3]] == pytest.approx(expected, abs=5.1e-5), name
        assert float(shown[3]) == pytest.approx(statistics.mean(run["kl_to_baseline"] for run, _ in ends) / between, abs=0.0051)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings_that_exist(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path):
    """In backticks, or in commands: what looks like a file or folder of this repository."""
    text = page.read_text(encoding="utf-8")
    folders = "foundation|packing|pretrain|demo|benchmarks|tests|docs|recipes|accelerate_configs"
    names = set(re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./*-]*\w/?(?:\.\w+)?(?![\w*<])", text)) - {"docs/picture.png"}
    missing = [name for name in sorted(names) if not any(ROOT.glob(name.rstrip("/."))) and "work/" not in name]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_wraps_at_100(page: Path):
    text = re.sub(r"<!-- throughput -->.*?<!-- /throughput -->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > WIDTH and not line.lstrip().startswith(("|", "![", "[!["))] == []
