"""Write a dataset of the Python sources that are installed on this machine.

    python -m benchmarks.evidence.python_corpus work/served

Reads the Python files of site-packages and of the standard library. Files with equal content are
read once. Whole packages are held out, so the held-out data has no file of a package that the model
is trained on. Writes corpus.jsonl, held_out.jsonl, sample.jsonl (a part of the corpus, to train the
tokenizer) and corpus.json, which lists the packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

# Sizes in bytes. Files that are shorter are mostly empty, and files that are longer are mostly
# generated, so these files are skipped.
SHORTEST_FILE = 400
LONGEST_FILE = 300_000
# Sizes in bytes of a held-out package, and of all held-out packages together.
SMALLEST_HELD_OUT = 50_000
LARGEST_HELD_OUT = 600_000
HELD_OUT = 5_000_000
# Size of sample.jsonl in characters of text.
SAMPLE = 15_000_000


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--limit", type=float, default=600e6, help="size of the dataset in bytes")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    packages = list_packages()
    sizes = {name: sum(size for _, size in files) for name, files in packages.items()}
    held_out = choose_held_out(sizes)
    seen: set[bytes] = set()
    kept = []
    # Read held-out packages first. Training files with the same content are then dropped.
    ordered = sorted(packages, key=lambda name: (name not in held_out, name_hash(name)))
    total = 0
    for name in ordered:
        if total < options.limit:
            kept.append(name)
            total += sizes[name]
    written: dict[str, int] = defaultdict(int)
    names = ("corpus", "held_out", "sample")
    files = {name: (options.out / f"{name}.jsonl").open("w") for name in names}
    with ProcessPoolExecutor() as pool:
        jobs = ([path for path, _ in packages[name]] for name in kept)
        for name, texts in zip(kept, pool.map(read_package, jobs), strict=True):
            for digest, line, size in texts:
                if digest in seen:
                    continue
                seen.add(digest)
                part = "held_out" if name in held_out else "corpus"
                parts = [part]
                # Add a random quarter of the files to the sample until it is large enough. The
                # first byte of the hash is a random number that depends only on the content.
                if part == "corpus" and digest[0] < 64 and written["sample"] < SAMPLE:
                    parts.append("sample")
                for chosen in parts:
                    files[chosen].write(line)
                    written[chosen] += size
    for file in files.values():
        file.close()
    facts = {"characters": written, "files": len(seen), "held_out": sorted(held_out)}
    facts |= {"packages": {name: sizes[name] for name in kept}}
    (options.out / "corpus.json").write_text(json.dumps(facts))
    print(f"{len(seen):,} files: {dict(written)}")


def list_packages() -> dict[str, list[tuple[Path, int]]]:
    """Map the name of each package or module to its Python files and their sizes."""
    packages = defaultdict(list)
    site = Path(sysconfig.get_path("purelib"))
    library = Path(sysconfig.get_path("stdlib"))
    for root in (site, library):
        for path in sorted(root.rglob("*.py")):
            if root == library and "site-packages" in path.parts:
                continue
            size = path.stat().st_size
            if SHORTEST_FILE <= size <= LONGEST_FILE:
                packages[path.relative_to(root).parts[0]].append((path, size))
    return packages


def choose_held_out(sizes: Mapping[str, int]) -> set[str]:
    """Choose the held-out packages in the order of the hashes of their names."""
    chosen = set()
    total = 0
    for name in sorted(sizes, key=name_hash):
        is_of_size = SMALLEST_HELD_OUT <= sizes[name] <= LARGEST_HELD_OUT
        if is_of_size and total < HELD_OUT:
            chosen.add(name)
            total += sizes[name]
    return chosen


def name_hash(name: str) -> str:
    """Return a hash of a package's name, for an order that is random but the same everywhere."""
    return hashlib.sha256(name.encode()).hexdigest()


def read_package(paths: Iterable[Path]) -> list[tuple[bytes, str, int]]:
    """Return the hash, the JSON line and the number of characters of each readable file."""
    texts = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        texts.append((digest, json.dumps({"text": text}) + "\n", len(text)))
    return texts


if __name__ == "__main__":
    main()
