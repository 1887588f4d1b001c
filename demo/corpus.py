"""Real text that every machine with Python has: the standard library's sources and docstrings.

Each module is a document and each docstring of some size is one of its own, cut out of its module: no text stands twice, so a
held-out docstring is not also inside a training document and the held-out loss means what it says. The lengths run from two
lines of docstring to hundreds of thousands of characters, which is what packing has to cope with in earnest.
"""

from __future__ import annotations

import ast
import inspect
import json
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from foundation.errors import InputError
from foundation.files import replace_file

# Tests and idlelib are not the library proper; `encodings` is tables of characters and `pydoc_data` prose inside escaped strings.
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
# characters; anything shorter stays where it is, a comment more than a text
SHORTEST_DOCSTRING = 80

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Document(NamedTuple):
    name: str  # "asyncio/queues.py", or "asyncio/queues.py:Queue.get" for a docstring
    text: str


def standard_library() -> Path:
    """The folder of this Python's standard library; InputError where it has no sources."""
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "ast.py").is_file():
        raise InputError(
            f"{root}: no Python sources here, which the demo reads; install a Python that ships its library"
        )
    return root


def write_corpus(path: Path, root: Path) -> tuple[int, int]:
    """Write the documents of `root` to `path`, one JSON object {"text", "name"} a line; the file appears whole or not at all.
    Returns how many they are, and their bytes.

    The order is that of the sorted paths, a module before its docstrings, so one Python gives one file, byte for byte.
    """
    # Inherited methods often repeat their docstring word for word: of equal texts the first stays.
    names = {}
    for document in library_documents(root):
        names.setdefault(document.text, document.name)
    lines = [
        json.dumps({"text": text, "name": name}, ensure_ascii=False) + "\n"
        for text, name in names.items()
    ]
    replace_file(path, "".join(lines).encode())
    return len(names), sum(len(text.encode()) for text in names)


def library_documents(root: Path) -> Iterator[Document]:
    """Every document under `root`, but for modules that this Python cannot decode or parse."""
    paths = (
        path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts)
    )
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        try:
            with tokenize.open(path) as file:  # honours the module's coding line
                module = split_module(path.relative_to(root).as_posix(), file.read())
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield from module


def split_module(name: str, source: str) -> list[Document]:
    """The module without its docstrings, then each docstring, in order of appearance.

    A docstring shorter than `SHORTEST_DOCSTRING`, or one that shares a line with code, stays in the module. Raises SyntaxError.
    """
    # not splitlines(), which also splits at form feeds, where `ast` does not
    lines: list[str | None] = source.split("\n")
    docstrings: list[Document] = []
    for qualified_name, statement in _docstrings(ast.parse(source), ""):
        text = inspect.cleandoc(statement.value.value)
        if len(text) < SHORTEST_DOCSTRING or not _has_lines_to_itself(statement, lines):
            continue
        docstrings.append(Document(f"{name}:{qualified_name}", text))
        for number in range(statement.lineno - 1, statement.end_lineno):
            lines[number] = None
    module = "\n".join(line for line in lines if line is not None).strip("\n")
    return [Document(name, module + "\n"), *docstrings] if module.strip() else docstrings


def _docstrings(node: ast.AST, name: str) -> Iterator[tuple[str, ast.Expr]]:
    """The qualified name and the statement of each docstring in `node` and in what is defined inside it."""
    if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
        yield name, node.body[0]
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}" if name else child.name)
        # definitions also stand inside `if` and `try`
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _docstrings(child, name)


def _has_lines_to_itself(statement: ast.stmt, lines: list[str]) -> bool:
    """Returns whether nothing but blanks stands before and after `statement`; `ast` counts columns in UTF-8 bytes."""
    before = lines[statement.lineno - 1].encode()[: statement.col_offset]
    after = lines[statement.end_lineno - 1].encode()[statement.end_col_offset :]
    return not before.strip() and not after.strip()
