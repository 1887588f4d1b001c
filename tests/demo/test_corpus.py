"""The demo's corpus: what becomes a document, that no text stands twice, and that one library gives one file."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path

import pytest

from demo.corpus import split_module, standard_library, write_corpus
from foundation.errors import InputError

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
    summary = write_corpus(tmp_path / "new" / "corpus.jsonl", library)
    documents = [json.loads(line) for line in (tmp_path / "new" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    names = [document["name"] for document in documents]
    assert names == ["a/latin.py", "a/y.py", "a/y.py:g", "a/z.py", "b.py", "b.py:", "b.py:Shape", "b.py:Shape.draw"]
    assert 'name = "Grüße"' in documents[0]["text"]
    assert summary.documents == len(names)
    assert summary.text_bytes == sum(len(document["text"].encode()) for document in documents)
    assert summary.unreadable == ("broken.py", "bytes.py")


def test_a_corpus_stops_before_the_document_that_would_exceed_its_size(library: Path, tmp_path: Path):
    whole = write_corpus(tmp_path / "whole.jsonl", library)
    capped = write_corpus(tmp_path / "capped.jsonl", library, most_bytes=whole.text_bytes - 1)
    assert capped.documents == whole.documents - 1
    assert capped.text_bytes < whole.text_bytes


def test_this_machines_library_gives_thousands_of_documents_and_the_same_file_twice(tmp_path: Path):
    root = standard_library()
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    summary = write_corpus(first, root)
    again = write_corpus(second, root, most_bytes=summary.text_bytes // 8)  # less of it, as the whole takes ten seconds
    assert again.documents > 500 and first.read_bytes().startswith(second.read_bytes())
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".jsonl"] == [], "no half-written file stays"
    texts = [json.loads(line)["text"] for line in first.read_text().splitlines()]
    assert len(texts) == len(set(texts)) == summary.documents > 2000
    assert max(map(len, texts)) > 1000 * min(map(len, texts))
    assert inspect.cleandoc(textwrap.dedent.__doc__) in texts


def test_a_python_without_library_sources_is_an_input_error_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(InputError, match="ships its library"):
        standard_library()
