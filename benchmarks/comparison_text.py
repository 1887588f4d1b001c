"""Two kinds of real text that every machine with Python packages has: their code, and the English of their docstrings.

    python -m benchmarks.comparison_text --out demo/work/comparison

Writes `code.jsonl` (modules, their docstrings cut out), `prose.jsonl` (those docstrings) and a tokenizer of 16,384 words learnt
on a part of both. The comparison of precisions trains a model on the first until it models it, and continues it on the second.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sysconfig
from pathlib import Path

from demo.corpus import library_documents
from packing.vocabulary import save_tokenizer, train_tokenizer

VOCABULARY = 16_384
MOST_BYTES = {"code": 60_000_000, "prose": 30_000_000}
LONGEST = 200_000  # characters of a document; what is longer is tables that a program wrote
TAUGHT_ON = 4_000  # documents of each kind, evenly spread, from which the tokenizer learns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(sysconfig.get_path("purelib")), help="folder of the Python packages")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    texts: dict[str, list[str]] = {"code": [], "prose": []}
    sizes, seen = dict.fromkeys(texts, 0), set()
    for document in library_documents(arguments.root, []):
        kind = "code" if document.name.endswith(".py") else "prose"
        fits = len(document.text) <= LONGEST and sizes[kind] + len(document.text) <= MOST_BYTES[kind]
        if fits and document.text not in seen:  # packages copy from each other
            seen.add(document.text)
            texts[kind].append(document.text)
            sizes[kind] += len(document.text)

    for kind, documents in texts.items():
        with (arguments.out / f"{kind}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents)
        print(f"{kind}: {len(documents):,} documents, {sizes[kind] / 1e6:.1f} million characters")
    taught = itertools.chain.from_iterable(documents[:: max(1, len(documents) // TAUGHT_ON)] for documents in texts.values())
    save_tokenizer(train_tokenizer(taught, VOCABULARY), arguments.out / "tokenizer")


if __name__ == "__main__":
    main()
