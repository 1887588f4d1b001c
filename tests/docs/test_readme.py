"""The commands of the quick start for your own text work. Files and commands that pages name exist.

`make site` finds links of pages in docs/ that lead nowhere, and pages that the site does not list.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from demo.corpus import library_documents, standard_library
from pretrain.__main__ import COMMANDS
from tests.forked_commands import forking

ROOT = Path(__file__).parents[2]
QUICK_START = (ROOT / "docs/quick_start.md").read_text(encoding="utf-8")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
OUTSIDE_OF_DOCS = [
    *(page for page in PAGES if not page.is_relative_to(ROOT / "docs")),
    ROOT / "benchmarks/results/INDEX.md",
]
WIDTH = 100
# Most words of all pages for users, and of the pages in docs/developers and docs/studies.
LIMITS = {"users": 14_000, "developers": 9_000, "studies": 3_000}
# Pages where a reader looks up a line.
LOOKUPS = {"settings", "recipes", "coming_from", "models", "faults", "private_names"}


def name_of(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


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
    (recipe,) = re.findall(r"```yaml\n(.*?)```", QUICK_START, re.DOTALL)
    (block,) = re.findall(r"```bash\n(.*?)```", QUICK_START, re.DOTALL)
    for original, short in (
        ("train: {steps: 200}\n", "train: {steps: 10}\n"),
        ("warmup: 20,", "warmup: 2,"),
    ):
        assert recipe.count(original) == 1
        recipe = recipe.replace(original, short)
    (tmp_path / "my.yaml").write_text(recipe, encoding="utf-8")
    done = subprocess.run(
        ["bash", "-e", "-c", block],
        cwd=tmp_path,
        env=forking(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (run,) = (tmp_path / "runs").iterdir()
    # A uniform guess over 4,000 tokens has 8.3.
    assert json.loads((run / "summary.json").read_text())["held_out_loss"] < 8.0
    assert re.search(r"sample after The$(\n +│.*)*\n +│ .*\S", done.stdout, re.MULTILINE)
    config = json.loads((run / "final/config.json").read_text())
    # The tokenizer has 4,000 ids, and id 0 is the end of a text.
    assert (config["vocab_size"], config["eos_token_id"]) == (4096, 0)


def test_pages_stay_short():
    """If a text becomes longer, another one becomes shorter. Lower a limit if pages shrink."""
    words = dict.fromkeys(LIMITS, 0)
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        readers = page.parent.name if page.parent.name in LIMITS else "users"
        if page.stem not in LOOKUPS:
            words[readers] += len(page.read_text(encoding="utf-8").split())
    assert all(words[readers] <= limit for readers, limit in LIMITS.items()), words


def test_links_of_pages_outside_of_docs_lead_somewhere():
    for page in OUTSIDE_OF_DOCS:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not target.startswith("http"):
                is_found = file.exists() and (not anchor or anchor in anchors(file))
                assert is_found, f"{name_of(page)}: {target}"


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub computes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_named_files_and_commands_exist():
    """Checks text in backticks and in commands that looks like a file of this repository."""
    folders = "foundation|packing|pretrain|demo|benchmarks|tests|docs|recipes|accelerate_configs"
    file = re.compile(rf"(?<![\w/.-])(?:{folders})/[\w./*-]*\w/?(?:\.\w+)?(?![\w*<])")
    # The changelog names files and commands that are removed since.
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):
        text = page.read_text(encoding="utf-8")
        names = {*file.findall(text)} - {"docs/picture.png"}
        names = {name for name in names if "work/" not in name}
        missing = [name for name in names if not any(ROOT.glob(name.rstrip("/.")))]
        unknown = {*re.findall(r"python -m pretrain (\w+)", text)} - COMMANDS.keys()
        assert (missing, unknown) == ([], set()), name_of(page)


def test_prose_wraps_at_100():
    long = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        long += [
            f"{name_of(page)}: {line}"
            for line in text.splitlines()
            if len(line) > WIDTH and not line.lstrip().startswith(("|", "![", "[!["))
        ]
    assert long == []
