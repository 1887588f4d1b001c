"""Write a corpus that every machine with Python has: the standard library's code and docstrings.

Each module is a document. Each docstring of 80 or more characters is a document too, and is removed
from its module. So no text occurs twice, a held-out docstring is not part of a training document,
and the held-out loss is meaningful. Lengths range from two lines of a docstring to hundreds of
thousands of characters, as in real corpora.
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

# Skipped folders. Tests and idlelib are not the library proper, `encodings` contains tables of
# characters, and `pydoc_data` contains prose in escaped strings.
SKIPPED = {
    "test",
    "tests",
    "idlelib",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
# Minimum number of characters of a docstring that becomes a document. A shorter one stays in its
# module, like a comment.
SHORTEST_DOCSTRING = 80

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Document(NamedTuple):
    """A document of the corpus."""

    # "asyncio/queues.py", or "asyncio/queues.py:Queue.get" for a docstring.
    name: str
    text: str


def standard_library() -> Path:
    """Return the folder of Python's standard library. Raises InputError if it has no sources."""
    root = Path(sysconfig.get_path("stdlib"))
    if not (root / "ast.py").is_file():
        raise InputError(
            f"{root}: has no Python sources, which the demo needs; install a Python that includes "
            "the sources of its library"
        )
    return root


def write_corpus(path: Path, root: Path) -> tuple[int, int]:
    """Write the documents below `root` to `path`. Return their number and their size in bytes.

    The file has one JSON object {"text", "name"} per line and is written atomically. Modules are
    sorted by path and precede their docstrings, so the same Python always writes the same bytes.
    """
    # Inherited methods often repeat a docstring. Only the first of equal texts is kept.
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
    """Yield every document below `root`. Modules that cannot be decoded or parsed are skipped."""
    paths = (
        path for path in root.rglob("*.py") if SKIPPED.isdisjoint(path.relative_to(root).parts)
    )
    for path in sorted(paths, key=lambda path: path.relative_to(root).as_posix()):
        try:
            # `tokenize.open` honours the coding line of a module.
            with tokenize.open(path) as file:
                module = split_module(path.relative_to(root).as_posix(), file.read())
        except (SyntaxError, UnicodeDecodeError):
            continue
        yield from module


def split_module(name: str, source: str) -> list[Document]:
    """Return the module without its docstrings, then the docstrings in order.

    A docstring shorter than `SHORTEST_DOCSTRING`, or on a line with code, stays in the module.
    Raises SyntaxError if the source cannot be parsed.
    """
    # Split only at line feeds, as `ast` does. splitlines() would also split at form feeds.
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
    """Yield the qualified name and the statement of each docstring of `node` and below `node`.

    `name` is the qualified name of `node`.
    """
    if isinstance(node, Documented) and ast.get_docstring(node, clean=False) is not None:
        yield name, node.body[0]
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}" if name else child.name)
        # Search all other statements too, because definitions may be inside `if` and `try`.
        elif isinstance(child, ast.stmt | ast.excepthandler):
            yield from _docstrings(child, name)


def _has_lines_to_itself(statement: ast.stmt, lines: list[str]) -> bool:
    """Return True if there are only blanks before and after `statement` on its lines."""
    # Cut the lines as UTF-8 bytes, because `ast` counts columns in bytes.
    before = lines[statement.lineno - 1].encode()[: statement.col_offset]
    after = lines[statement.end_lineno - 1].encode()[statement.end_col_offset :]
    return not before.strip() and not after.strip()
