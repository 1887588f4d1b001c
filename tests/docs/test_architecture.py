"""Pages about the code name only files, classes and functions that exist.

The test reads text in single backticks. `pretrain/model/packed.py` is a file and `pretrain/model/`
a folder, relative to the repository. Names in parentheses after a file, as in `train_accelerate.py`
(`train`, `train_step`), must be defined in that file. Any other class or `Class.method` must be
defined somewhere, and any other name must occur in the code.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

PAGES = ("architecture.md", "extending.md")
PRODUCT = ("foundation", "packing", "pretrain", "lab", "demo", "benchmarks")
PATH = re.compile(r"[\w./-]+(/|\.(py|md|yaml|toml|txt|json|jsonl))")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")


@cache
def defined_in(path: Path) -> set[str]:
    """Return the functions, classes, methods and constants of a file. Methods as `Class.method`."""
    names: set[str] = set()

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}.")
            targets = [*getattr(node, "targets", []), getattr(node, "target", None)]
            names.update(prefix + name.id for name in targets if isinstance(name, ast.Name))

    add(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return names


@cache
def product_files() -> tuple[Path, ...]:
    """Return all Python files of the product."""
    return (
        *ROOT.glob("*.py"),
        *(path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")),
    )


def exists_somewhere(name: str) -> bool:
    """Return whether the code defines a class or method, or contains another name."""
    if any(part[:1].isupper() for part in name.split(".")):
        return any(name in defined_in(path) for path in product_files())
    word = re.compile(rf"\b{name.rpartition('.')[2]}\b")
    return any(word.search(path.read_text(encoding="utf-8")) for path in product_files())


def missing_from(text: str) -> list[str]:
    """Return one line for each name that the page has and the code does not have."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"`([^`\n]+)`", text)
    paths = {path for path in quoted if PATH.fullmatch(path)}
    names = {name.removesuffix("()") for name in {*quoted} - paths if NAME.fullmatch(name)}
    missing = [f"{path}: does not exist" for path in paths if not (ROOT / path).exists()]
    missing += [f"{name}: does not occur" for name in names if not exists_somewhere(name)]
    in_files = r"`([\w./-]+\.py)`\s*[(,]\s*(`[^`\n]+`(?:(?:,|,?\s+and)\s+`[^`\n]+`)*)"
    for path, listed in re.findall(in_files, text):
        listed_names = {*re.findall(r"`([^`]+?)(?:\(\))?`", listed)}
        in_file = {name for name in listed_names if not PATH.fullmatch(name)}
        missing += [f"{name}: not defined in {path}" for name in in_file - defined_in(ROOT / path)]
    return missing


@pytest.mark.parametrize("page", PAGES)
def test_every_name_on_the_page_exists(page: str):
    assert missing_from((ROOT / "docs/developers" / page).read_text(encoding="utf-8")) == []


def test_every_name_in_the_pictures_exists():
    for picture in (ROOT / "docs/pictures").glob("*.svg"):
        code = re.findall(r"monospace[^>]*>([^<]+)<", picture.read_text(encoding="utf-8"))
        text = " ".join(f"`{name}`" for line in code for name in line.split(", "))
        assert missing_from(text) == [], picture.name
