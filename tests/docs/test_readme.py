"""The README's block for your own text works. Links, files and commands of all pages exist."""

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
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/evidence/*.md")]
)
WIDTH = 100


@pytest.mark.long
def test_the_block_for_your_own_text_trains_and_generates(tmp_path: Path):
    """The block runs in a copy of the checkout, with a twentieth of its steps."""
    for name in ("foundation", "packing", "pretrain", "accelerate_configs"):
        # Includes Python's bytecode, because the block starts four processes.
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "train_accelerate.py", tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "my_text").mkdir()
    for number, document in enumerate(islice(library_documents(standard_library()), 400)):
        (tmp_path / "my_text" / f"{number}.txt").write_text(document.text, encoding="utf-8")
    (block,) = re.findall(r"<!-- own text: .*?-->\n```bash\n(.*?)```", README, re.DOTALL)
    for original, short in (
        ("train: {steps: 200}\n", "train: {steps: 10}\n"),
        ("warmup: 20,", "warmup: 2,"),
    ):
        assert block.count(original) == 1
        block = block.replace(original, short)
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
    assert json.loads((run / "summary.json").read_text())["held_out_loss"] < 8.0, (
        "a uniform guess over 4,000 tokens has 8.3"
    )
    assert re.search(r"sample after The$(\n +│.*)*\n +│ .*\S", done.stdout, re.MULTILINE), (
        "the text after the prompt"
    )
    config = json.loads((run / "final/config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"]) == (4096, 0), (
        "the tokenizer has 4,000 ids; id 0 is the end of a text"
    )


def test_readme_has_9_kilobytes_or_less():
    assert len(README.encode()) <= 9_000


def test_the_list_of_pages_names_every_page_once_in_task_order():
    text = (ROOT / "docs/README.md").read_text(encoding="utf-8").partition("## Terms")[0]
    listed = re.findall(r"\| \[\w+\.md\]\((\w+\.md)\)", text)
    assert sorted(listed) == sorted({path.name for path in ROOT.glob("docs/*.md")} - {"README.md"})
    assert listed[:4] == ["install.md", "first_run.md", "data.md", "training.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_and_headings_of_links_exist(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as GitHub computes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_and_commands_exist(page: Path):
    """Checks text in backticks and in commands that looks like a file of this repository."""
    text = page.read_text(encoding="utf-8")
    folders = "foundation|packing|pretrain|demo|benchmarks|tests|docs|recipes|accelerate_configs"
    names = set(
        re.findall(rf"(?<![\w/.-])(?:{folders})/[\w./*-]*\w/?(?:\.\w+)?(?![\w*<])", text)
    ) - {"docs/picture.png"}
    missing = [
        name
        for name in sorted(names)
        if not any(ROOT.glob(name.rstrip("/."))) and "work/" not in name
    ]
    assert missing == []
    assert (
        page.name == "CHANGELOG.md"
        or set(re.findall(r"python -m pretrain (\w+)", text)) <= COMMANDS.keys()
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_wraps_at_100(page: Path):
    text = re.sub(
        r"<!-- throughput -->.*?<!-- /throughput -->",
        "",
        page.read_text(encoding="utf-8"),
        flags=re.DOTALL,
    )
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert [
        line
        for line in text.splitlines()
        if len(line) > WIDTH and not line.lstrip().startswith(("|", "![", "[!["))
    ] == []
