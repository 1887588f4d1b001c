"""docs/architecture.md speaks of this code: every file, class and function that it names is there, where it says.

What is read: text in single backticks. `pretrain/model/packed.py` is a file and `pretrain/model/` a folder, from the top of the
repository. Names in the parentheses that follow a file, as in `train_accelerate.py` (`train`, `train_step`), must be defined in
it. Elsewhere a class, or `Class.method`, must be defined somewhere, and any other name must at least occur in the code.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "architecture.md"
PRODUCT = ("foundation", "packing", "pretrain", "demo", "benchmarks")
PATH = re.compile(r"[\w./-]+(/|\.(py|md|yaml|toml|txt|json|jsonl))")
NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")


@cache
def defined_in(path: Path) -> set[str]:
    """Functions, classes, methods, attributes of classes and constants of the file, as a reader names them: `Class.method`."""
    names: set[str] = set()

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(prefix + node.name)
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names.update(
                    prefix + target.id for target in targets if isinstance(target, ast.Name)
                )

    add(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return names


@cache
def product_files() -> tuple[Path, ...]:
    return (
        *ROOT.glob("*.py"),
        *(path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py")),
    )


def exists_somewhere(name: str) -> bool:
    if any(part[:1].isupper() for part in name.split(".")):
        return any(name in defined_in(path) for path in product_files())
    return any(
        re.search(rf"\b{name.rpartition('.')[2]}\b", path.read_text(encoding="utf-8"))
        for path in product_files()
    )


def missing_from(text: str) -> list[str]:
    """What the page names and the code does not have, one line each."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    quoted = re.findall(r"`([^`\n]+)`", text)
    missing = [
        f"{path}: is not there"
        for path in quoted
        if PATH.fullmatch(path) and not (ROOT / path).exists()
    ]
    names = [
        name.removesuffix("()")
        for name in quoted
        if NAME.fullmatch(name) and not PATH.fullmatch(name)
    ]
    missing += [f"{name}: is nowhere in the code" for name in names if not exists_somewhere(name)]
    for path, several in re.findall(
        r"`([\w./-]+\.py)`\s*[(,]\s*(`[^`\n]+`(?:(?:,|,?\s+and)\s+`[^`\n]+`)*)", text
    ):
        named = {
            name for name in re.findall(r"`([^`]+?)(?:\(\))?`", several) if not PATH.fullmatch(name)
        }
        missing += [f"{name}: is not defined in {path}" for name in named - defined_in(ROOT / path)]
    return missing


def test_everything_that_the_page_names_is_there():
    assert missing_from(PAGE.read_text(encoding="utf-8")) == []
