"""The demo's corpus: what becomes a document, that no text stands twice, and that one library gives one file."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path

import pytest

from demo.corpus import split_module, standard_library, write_corpus

LONG = "A docstring that is long enough to be a document of its own, because it says a good deal about what follows."

MODULE = f'''"""Module. {LONG}"""
import os

if os.name:
    class Shape:
        """Class. {LONG}

        Indented further.
        """

        def area(self):
            """Short."""
            return 1

        async def draw(self):
            "Method. {LONG}"
            return "{LONG}"

def one_line(): "Shared line. {LONG}"
'''


def test_each_long_docstring_becomes_a_document_named_after_what_it_describes():
    names = [document.name for document in split_module("pkg/shapes.py", MODULE)]
    assert names == ["pkg/shapes.py", "pkg/shapes.py:", "pkg/shapes.py:Shape", "pkg/shapes.py:Shape.draw"]


def test_a_docstring_is_cut_out_of_its_module_and_loses_its_indentation():
    module, *docstrings = (document.text for document in split_module("shapes.py", MODULE))
    assert docstrings[1] == f"Class. {LONG}\n\nIndented further."
    assert not any(docstring in module for docstring in docstrings)
    assert "import os" in module and module.count("def ") == 3


def test_short_docstrings_and_those_that_share_a_line_with_code_stay_in_the_module():
    module = split_module("shapes.py", MODULE)[0].text
    assert '"""Short."""' in module
    assert f'def one_line(): "Shared line. {LONG}"' in module
    assert f'return "{LONG}"' in module, "a string that is no docstring is code"


@pytest.mark.parametrize("text", ["é" * 90, "a\x0cb" * 40, "\x0b" + "x" * 90], ids=["non-ASCII", "form feeds", "vertical tab"])
def test_lines_are_counted_as_python_counts_them(text: str):
    source = f'value = "é"  # \x0c a form feed ends no line\ndef f():\n    """{text}"""\n    return value\n'
    module, docstring = split_module("m.py", source)
    assert docstring.text == inspect.cleandoc(text)
    assert module.text == 'value = "é"  # \x0c a form feed ends no line\ndef f():\n    return value\n'


def test_a_module_of_nothing_but_a_docstring_leaves_no_empty_document():
    assert [document.text for document in split_module("m.py", f'"""{LONG}"""\n')] == [LONG]
    assert split_module("empty.py", "\n") == []


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("library")
    files = {
        "b.py": MODULE.encode(),
        "a/z.py": f'def f():\n    """{LONG}"""\n    return 1\n'.encode(),
        "a/y.py": f'def g():\n    """{LONG}"""\n    return 2\n'.encode(),  # the same docstring again
        "a/latin.py": '# coding: latin-1\nname = "Grüße"\n'.encode("latin-1"),
        "broken.py": b"def (:\n",
        "bytes.py": b'name = "\xff"\n',
        "test/left_out.py": b"x = 1\n",
        "pkg/tests/left_out.py": b"x = 1\n",
        "site-packages/left_out.py": b"x = 1\n",
    }
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_a_corpus_holds_each_text_once_in_the_order_of_the_sorted_paths(library: Path, tmp_path: Path):
    documents, size = write_corpus(tmp_path / "new" / "corpus.jsonl", library)
    written = [json.loads(line) for line in (tmp_path / "new" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    names = [document["name"] for document in written]
    assert names == ["a/latin.py", "a/y.py", "a/y.py:g", "a/z.py", "b.py", "b.py:", "b.py:Shape", "b.py:Shape.draw"]
    assert 'name = "Grüße"' in written[0]["text"]
    assert (documents, size) == (len(names), sum(len(document["text"].encode()) for document in written))


def test_this_machines_library_gives_thousands_of_documents(tmp_path: Path):
    documents, _ = write_corpus(tmp_path / "corpus.jsonl", standard_library())
    texts = [json.loads(line)["text"] for line in (tmp_path / "corpus.jsonl").read_text().splitlines()]
    assert len(texts) == len(set(texts)) == documents > 2000
    assert max(map(len, texts)) > 1000 * min(map(len, texts))
    assert inspect.cleandoc(textwrap.dedent.__doc__) in texts
