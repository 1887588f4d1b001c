"""Real text in documents about as long as the reference's: every function, class and docstring of Python's library on its own.

    python -m benchmarks.short_documents --out demo/work/short.jsonl

The reference trains on Malay Wikipedia, whose articles have 207 tokens in the mean. Whole modules are far longer, so attention is
a larger part of a step on them; tokens/s are comparable only between texts whose documents are of like length. `packing inspect`
shows both.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from demo.corpus import library_documents, standard_library

SHORTEST = 80  # characters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w", encoding="utf-8") as file:
        for document in library_documents(standard_library(), []):
            for text in pieces(document.text) if document.name.endswith(".py") else [document.text]:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")


def pieces(source: str) -> Iterator[str]:
    """The top-level definitions of a module, methods of classes on their own, and what stands between them."""
    try:
        body = ast.parse(source).body
    except SyntaxError:  # its docstrings were cut out of it, and some bodies were nothing else
        body = []
    starts = {1}
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            starts |= {node.lineno, node.end_lineno + 1}
            methods = node.body if isinstance(node, ast.ClassDef) else []
            starts |= {method.lineno for method in methods if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)}
    lines = source.splitlines(keepends=True)
    edges = [*sorted(start - 1 for start in starts if start <= len(lines)), len(lines)]
    for begin, end in itertools.pairwise(edges):
        text = "".join(lines[begin:end])
        if len(text) >= SHORTEST:
            yield text


if __name__ == "__main__":
    main()
