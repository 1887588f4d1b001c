"""The demo's corpus: what becomes a document, that no text stands twice, and that one library gives one file."""

from __future__ import annotations

import json
from pathlib import Path

from demo.corpus import split_module, write_corpus

LONG = "A docstring that is long enough to be a document of its own, because it says a good deal about what follows."
MODULE = f'''"""Module. {LONG}"""
import os

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


def test_each_long_docstring_is_cut_out_of_its_module_and_named_after_what_it_describes():
    module, *docstrings = split_module("shapes.py", MODULE)
    assert [each.name for each in docstrings] == ["shapes.py:", "shapes.py:Shape", "shapes.py:Shape.draw"]
    assert docstrings[1].text == f"Class. {LONG}\n\nIndented further."
    assert not any(each.text in module.text for each in docstrings) and module.text.count("def ") == 3
    for part in ('"""Short."""', f'def one_line(): "Shared line. {LONG}"', f'return "{LONG}"'):
        assert part in module.text, "a short docstring, one beside code, and a string that is no docstring"
    assert [document.text for document in split_module("m.py", f'"""{LONG}"""\n')] == [LONG], "no empty document"


def test_a_corpus_holds_each_text_once_in_the_order_of_the_sorted_paths(tmp_path: Path):
    files = {
        "a/z.py": f'def f():\n    """{LONG}"""\n    return 1\n'.encode(),
        "a/y.py": f'def g():\n    """{LONG}"""\n    return 2\n'.encode(),  # the same docstring again
        "a/latin.py": '# coding: latin-1\nname = "Grüße"\n'.encode("latin-1"),
        "broken.py": b"def (:\n",
        "bytes.py": b'name = "\xff"\n',
        "pkg/tests/left_out.py": b"x = 1\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    documents, size = write_corpus(tmp_path / "new" / "corpus.jsonl", tmp_path)
    written = [json.loads(line) for line in (tmp_path / "new" / "corpus.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [document["name"] for document in written] == ["a/latin.py", "a/y.py", "a/y.py:g", "a/z.py"]
    assert 'name = "Grüße"' in written[0]["text"]
    assert (documents, size) == (len(written), sum(len(document["text"].encode()) for document in written))
