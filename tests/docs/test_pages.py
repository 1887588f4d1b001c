"""Generated parts of pages are current, and pages name only what exists.

`make site` finds links of pages in docs/ that lead nowhere, and pages that the site does not list.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks import card as gpu_card
from benchmarks.planner_rows import read_rows
from demo.corpus import library_documents, standard_library
from docs import evidence_page, generate, settings_page
from docs.recipes_page import FOLDER, top_comment
from foundation.settings import flatten
from pretrain.__main__ import COMMANDS
from pretrain.metrics.flops import ModelFlops
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build_on_meta
from pretrain.settings.config import load_recipe, resolved
from pretrain.settings.recipe import Recipe
from tests.conftest import ROOT
from tests.forked_commands import forking

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
OF_CODE = [ROOT / "docs/developers" / name for name in ("architecture.md", "extending.md")]
RESULTS = ROOT / "benchmarks/results"
INDEX = RESULTS / "INDEX.md"
WIDTH = 100
# Most words of all pages for users, and of the pages in docs/developers and docs/studies.
LIMITS = {"users": 14_000, "developers": 9_000, "studies": 3_000}
# Pages where a reader looks up a line.
LOOKUPS = {"settings", "recipes", "coming_from", "models", "faults", "private_names"}
KEYS = {key for key, *_ in settings_page.rows(Recipe)}
# Billions of parameters, computed from the shapes in the source documents.
SIZES = {
    "gpt2_fineweb_edu": 0.124,
    "gpt2_slimpajama": 1.27,
    "llama2_slimpajama": 1.294,
    "llama3_1_5b_slimpajama": 1.545,
    "llama3_2_2b_slimpajama": 2.224,
    "qwen3_slimpajama": 1.830,
}


# ── Generated pages ───────────────────────────────────────────────────────────────────────────────


def test_nothing_generated_is_stale():
    stale = [
        path.relative_to(ROOT).as_posix()
        for path, text in generate.outputs()
        if path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "make docs"


def test_quantiles_of_the_intervals_of_the_evidence_are_those_of_student_s_t():
    # Tables of Student's t: 2 and 4 degrees of freedom at 95 and 99 %.
    for freedom, error, quantile in ((2, 0.05, 4.303), (2, 0.01, 9.925), (4, 0.01, 4.604)):
        assert evidence_page.t_quantile(freedom, error) == pytest.approx(quantile, rel=1e-3)


def test_every_key_of_a_recipe_has_a_line_with_a_meaning():
    page = settings_page.page()
    lines = re.findall(r"^\| `([\w.]+)`( = .+?)? \| (.*) \|$", page, re.MULTILINE)
    recipe = flatten(resolved(load_recipe(ROOT / "recipes/smoke.yaml")))
    keys = {key for key in recipe if not key.startswith("model.config.")} | {"model.config"}
    assert keys <= {line[0] for line in lines}
    meanings = {key: re.sub(r"^\*.*?\* ?", "", text) for key, _, text in lines}
    assert [key for key, meaning in meanings.items() if not meaning.strip()] == []
    assert "typing." not in page and "<class" not in page


# ── Names on pages ────────────────────────────────────────────────────────────────────────────────


@cache
def code() -> dict[str, str]:
    """Return the Python files of the product by their path."""
    folders = ("foundation", "packing", "pretrain", "lab", "demo", "benchmarks")
    files = [
        *ROOT.glob("*.py"),
        *(path for name in folders for path in (ROOT / name).rglob("*.py")),
    ]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in files}


@cache
def words() -> set[str]:
    """Return the words of the product's Python files."""
    return {word for content in code().values() for word in re.findall(r"\w+", content)}


def is_defined(name: str, text: str) -> bool:
    """Return whether a file defines a function, a class, a constant or `Class.method`."""
    # A search for a string takes a hundredth of the time of a search for a definition.
    return all(
        part in text
        and re.search(rf"^\s*(?:(?:async )?def |class )?{part}\b\s*[:=(]", text, re.MULTILINE)
        for part in name.split(".")
    )


def missing_from(text: str) -> list[str]:
    """Return one line for each name in single backticks that the code does not have.

    A name with a slash or an ending is a file or folder. Names in parentheses after a file, as in
    `train_accelerate.py` (`train`, `train_step`), must be defined in that file. Any other class or
    `Class.method` must be defined somewhere, and any other name must occur in the code.
    """
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    path = re.compile(r"[\w./-]+(/|\.(py|md|yaml|toml|txt|json|jsonl))")
    quoted = {name.removesuffix("()") for name in re.findall(r"`([^`\n]+)`", text)}
    paths = {name for name in quoted if path.fullmatch(name)}
    names = {
        name for name in quoted - paths if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", name)
    }
    missing = [name for name in paths if not (ROOT / name).exists()]
    for name in names:
        if re.search(r"\b[A-Z]", name):
            found = any(is_defined(name, content) for content in code().values())
        else:
            found = name.rpartition(".")[2] in words()
        if not found:
            missing.append(name)
    in_files = r"`([\w./-]+\.py)`\s*[(,]\s*(`[^`\n]+`(?:(?:,|,?\s+and)\s+`[^`\n]+`)*)"
    for file, listed in re.findall(in_files, text):
        in_file = {*re.findall(r"`([^`]+?)(?:\(\))?`", listed)} - paths
        missing += [f"{file}: {name}" for name in in_file if not is_defined(name, code()[file])]
    return missing


@pytest.mark.parametrize("page", OF_CODE, ids=lambda page: page.stem)
def test_every_name_on_a_page_about_the_code_exists(page: Path):
    assert missing_from(TEXTS[page]) == []


def test_every_name_in_the_pictures_exists():
    for picture in (ROOT / "docs/pictures").glob("*.svg"):
        lines = re.findall(r"monospace[^>]*>([^<]+)<", picture.read_text(encoding="utf-8"))
        text = " ".join(f"`{name}`" for line in lines for name in line.split(", "))
        assert missing_from(text) == [], picture.name


def test_named_files_and_commands_exist():
    """Checks text in backticks and in commands that looks like a file of this repository."""
    folders = "foundation|packing|pretrain|demo|benchmarks|tests|docs|recipes|accelerate_configs"
    file = re.compile(rf"(?<![\w/.-])(?:{folders})/[\w./*-]*\w/?(?:\.\w+)?(?![\w*<])")
    for page, text in TEXTS.items():
        # The changelog names files and commands that are removed since.
        if page.name != "CHANGELOG.md":
            names = {name for name in file.findall(text) if "work/" not in name}
            names -= {"docs/picture.png"}
            missing = [name for name in names if not any(ROOT.glob(name.rstrip("/.")))]
            unknown = {*re.findall(r"python -m pretrain (\w+)", text)} - COMMANDS.keys()
            assert (missing, unknown) == ([], set()), page


def test_keys_that_coming_from_names_exist():
    page = TEXTS[ROOT / "docs/coming_from.md"]
    rows = [line.rstrip(" |") for line in page.splitlines() if line.startswith("| ")]
    ours = " ".join(row.split(" | ")[-1] for row in rows if " | " in row)
    sections = "|".join(Recipe.model_fields)
    named = set(re.findall(rf"`((?:{sections})\.[\w.]+)(?=[`:=])", ours))
    assert len(named) > 40 and named <= KEYS | {"fp8_config.keep_bf16_layers"}


def test_each_other_name_of_a_key_has_an_existing_key_or_a_sentence():
    keys = KEYS | {"data.validation.source"} | Recipe.model_fields.keys()
    for name, meant in Recipe.OTHER_NAMES.items():
        assert name == name.lower()
        assert meant in keys or " " in meant, name


def test_links_of_pages_outside_of_docs_lead_somewhere():
    outside = [page for page in PAGES if not page.is_relative_to(ROOT / "docs")]
    for page in [*outside, INDEX]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not target.startswith("http"):
                is_found = file.exists() and (not anchor or anchor in anchors(file))
                assert is_found, f"{page}: {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub computes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


# ── Length ────────────────────────────────────────────────────────────────────────────────────────


def test_pages_stay_short():
    """If a text becomes longer, another one becomes shorter. Lower a limit if pages shrink."""
    words = dict.fromkeys(LIMITS, 0)
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        readers = page.parent.name if page.parent.name in LIMITS else "users"
        if page.stem not in LOOKUPS:
            words[readers] += len(TEXTS[page].split())
    assert all(words[readers] <= limit for readers, limit in LIMITS.items()), words


def test_prose_wraps_at_100():
    long = []
    for page, text in TEXTS.items():
        for line in re.sub(r"```.*?```", "", text, flags=re.DOTALL).splitlines():
            if len(line) > WIDTH and not line.lstrip().startswith(("|", "![", "[![")):
                long.append(f"{page}: {line}")
    assert long == []


# ── Recipes and results ───────────────────────────────────────────────────────────────────────────


def test_the_comment_of_each_recipe_names_its_source():
    for path in FOLDER.glob("*.yaml"):
        assert any(line.startswith("Source: ") for line in top_comment(path)), path


@pytest.mark.parametrize("name", SIZES)
def test_a_model_from_scratch_has_the_size_of_its_document(name: str):
    flops = ModelFlops.of(build_on_meta(load_config(load_recipe(FOLDER / f"{name}.yaml").model)))
    assert flops.parameters / 1e9 == pytest.approx(SIZES[name], rel=0.005)
    assert flops.shape.vocabulary % 128 == 0, "an FP8 head needs this"


def test_the_index_names_every_result_file_once_with_its_commit():
    text = INDEX.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| [")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    by_file = {re.search(r"\((.*)\)", row[0])[1]: row for row in rows}
    files = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*") if path.is_file()}
    assert by_file.keys() == files - {"INDEX.md"} and len(rows) == len(by_file)
    for name, (_, description, commit) in by_file.items():
        assert description, name
        if name.endswith(".json"):
            content = json.loads((RESULTS / name).read_text(encoding="utf-8"))
            git = (content.get("environment") or {}).get("git") or {"commit": content.get("commit")}
            if git["commit"] is None:
                # Each topology of an equality file has an environment of its own.
                git = content["ddp"]["environment"]["git"]
            assert commit == git["commit"][:8] + (" (dirty)" if git.get("dirty") else ""), name


def numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)):
        yield value


def test_numbers_in_a_row_are_in_the_files_that_it_links_to():
    # Thousands that are lengths of documents or tokens of a step.
    lengths = {f"{2**power:,}" for power in (10, 11, 12, 13, 15, 17, 18, 19)}
    published = {f"{row.speed:,.0f}" for row in read_rows("published")}
    compared = 0
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for row in TEXTS[page].splitlines():
            files = re.findall(r"results/(\w+/\w+\.json)\)", row) if row.startswith("|") else []
            contents = [json.loads((RESULTS / name).read_text("utf-8")) for name in files]
            recorded = published | {f"{number:,.0f}" for number in numbers(contents)} | lengths
            stated = set(re.findall(r"\d+(?:,\d{3})+", row)) if files else set()
            assert stated <= recorded, f"{page.name}: {row}"
            compared += len(stated - lengths)
    assert compared > 60


def test_published_cards_are_complete_and_unchanged():
    for path in RESULTS.glob("cards/*.json"):
        content = gpu_card.read(path)
        assert {"ways", "losses", "bits", "left_out", "code"} <= content.keys()
        for name in content["ways"]:
            assert gpu_card.failures(name, content) == []


# ── The commands of the quick start ───────────────────────────────────────────────────────────────


@pytest.mark.nightly
def test_the_commands_for_your_own_text_train_and_generate(tmp_path: Path):
    """The commands run in a copy of the checkout, with a twentieth of its steps."""
    for name in ("foundation", "packing", "pretrain", "accelerate_configs"):
        # Includes Python's bytecode, because the commands start four processes.
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "train_accelerate.py", tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "my_text").mkdir()
    for number, document in enumerate(islice(library_documents(standard_library()), 400)):
        (tmp_path / "my_text" / f"{number}.txt").write_text(document.text, encoding="utf-8")
    quick_start = TEXTS[ROOT / "docs/quick_start.md"]
    (recipe,) = re.findall(r"```yaml\n(.*?)```", quick_start, re.DOTALL)
    (block,) = re.findall(r"```bash\n(.*?)```", quick_start, re.DOTALL)
    for original, short in (("{steps: 200}\n", "{steps: 10}\n"), ("warmup: 20,", "warmup: 2,")):
        assert recipe.count(original) == 1
        recipe = recipe.replace(original, short)
    (tmp_path / "my.yaml").write_text(recipe, encoding="utf-8")
    command = ["bash", "-e", "-c", block]
    done = subprocess.run(command, cwd=tmp_path, env=forking(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (run,) = (tmp_path / "runs").iterdir()
    # A uniform guess over 4,000 tokens has 8.3.
    assert json.loads((run / "summary.json").read_text())["held_out_loss"] < 8.0
    assert re.search(r"sample after The$(\n +│.*)*\n +│ .*\S", done.stdout, re.MULTILINE)
    config = json.loads((run / "final/config.json").read_text())
    # The tokenizer has 4,000 ids, and id 0 is the end of a text.
    assert (config["vocab_size"], config["eos_token_id"]) == (4096, 0)
