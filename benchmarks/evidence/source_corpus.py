"""Write a dataset of code and prose from the source packages of Debian.

    apt-get source --download-only $(python -m benchmarks.evidence.source_corpus --packages)
    python -m benchmarks.evidence.source_corpus ARCHIVES work/sources

`apt-get source` needs a `deb-src` line for bookworm, but no root rights. Archives are read without
unpacking them to the disk. A document is a file of source code or documentation. Of documents that
differ only in white space, one is written. Each package contributes about --limit characters at
most, so that no package dominates. The hash of a folder's name decides if its files are held out.
The output is corpus.jsonl, held_out.jsonl, sample.jsonl (a part of the corpus, to train the
tokenizer) and corpus.json. The last file has the archives with their hashes, and the bytes of each
language. All packages are in Debian's section main, so their licences are free. Each archive has
its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

PACKAGES = """
    blender coreutils emacs erlang gcc-12 ghc git glibc godot golang-1.19 installation-guide
    linux llvm-toolchain-14 manpages maxima nodejs ocaml octave openjdk-17 perl php8.2
    postgresql-15 python-django python3.11 qemu r-base racket rails ruby3.1 rustc sqlite3
    sympy texinfo vim wordnet
"""

SUFFIXES = {
    "C": ".c .h",
    "C++": ".cc .cpp .cxx .hpp",
    "Erlang": ".erl .hrl",
    "Fortran": ".f .f90",
    "Go": ".go",
    "Haskell": ".hs .lhs",
    "Java": ".java",
    "JavaScript": ".js .mjs .ts",
    "Lisp": ".el .lisp .rkt .scm .ss",
    "OCaml": ".ml .mli",
    "Octave": ".m",
    "PHP": ".php",
    "Perl": ".pl .pm .t",
    "Python": ".py",
    "R": ".r .rd",
    "Ruby": ".rb",
    "Rust": ".rs",
    "SQL": ".sql",
    "Shell": ".sh",
    "prose": ".1 .2 .3 .4 .5 .6 .7 .8 .adoc .dbk .html .info .md .page .pod .rst .sgml .tex .texi "
    ".txt .xml",
}
LANGUAGES = {suffix: name for name, listed in SUFFIXES.items() for suffix in listed.split()}

# Sizes in bytes. Shorter files are mostly empty, and longer files are mostly generated.
SHORTEST_FILE = 400
LONGEST_FILE = 300_000
# Files with longer lines on average, or with more digits, are data or minified code.
LONGEST_MEAN_LINE = 160
LARGEST_SHARE_OF_DIGITS = 0.2
# Of 256 folders, this number is held out on average.
HELD_OUT = 1
# Size of sample.jsonl in bytes of text.
SAMPLE = 100_000_000


@dataclass(frozen=True)
class Document:
    """A file of a package. `folder` is a hash of its folder, and `content` of its text."""

    folder: bytes
    content: bytes
    language: str
    text: str

    @property
    def held_out(self) -> bool:
        """Return True if the document is not trained on."""
        return self.folder[0] < HELD_OUT


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archives", type=Path, nargs="?", help="folder with *.orig.tar.*")
    parser.add_argument("out", type=Path, nargs="?", help="folder to write")
    parser.add_argument("--packages", action="store_true", help="print the packages and exit")
    parser.add_argument("--limit", type=float, default=60e6, help="characters of a package")
    options = parser.parse_args()
    if options.packages or options.out is None:
        print(*PACKAGES.split())
        return
    write(find_archives(options.archives), options.out, int(options.limit))


def find_archives(folder: Path) -> list[Path]:
    """Return the main archive of each package. Exit with a message if one is missing."""
    archives = []
    for package in PACKAGES.split():
        found = sorted(folder.glob(f"{package}_*.tar.*"))
        main_archives = [path for path in found if path.name.split(".tar.")[0].endswith("orig")]
        native = [path for path in found if ".debian.tar" not in path.name]
        chosen = main_archives or native
        if not chosen:
            raise SystemExit(f"{folder}: has no archive of {package}; run apt-get source")
        archives.append(chosen[0])
    return archives


def write(archives: list[Path], out: Path, limit: int) -> None:
    """Write the dataset, and print its size."""
    out.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    sizes: Counter[str] = Counter()
    packages = {}
    files = {name: (out / f"{name}.jsonl").open("w") for name in ("corpus", "held_out", "sample")}
    with ProcessPoolExecutor() as pool:
        for archive, documents in zip(
            archives, pool.map(partial(choose, limit=limit), archives), strict=True
        ):
            package: Counter[str] = Counter()
            for document in documents:
                if document.content in seen:
                    continue
                seen.add(document.content)
                size = len(document.text.encode())
                line = json.dumps({"text": document.text, "language": document.language}) + "\n"
                part = "held_out" if document.held_out else "corpus"
                files[part].write(line)
                package[document.language] += size
                sizes[part] += size
                # The first byte of the hash is below 26 for a tenth of all documents. The choice
                # depends only on their content.
                if part == "corpus" and document.content[0] < 26 and sizes["sample"] < SAMPLE:
                    files["sample"].write(line)
                    sizes["sample"] += size
            digest = hashlib.sha256(archive.read_bytes()).hexdigest()
            packages[archive.name] = {"sha256": digest, "bytes": package}
    for file in files.values():
        file.close()
    languages: Counter[str] = Counter()
    for described in packages.values():
        languages.update(described["bytes"])
    summary = {"bytes": sizes, "documents": len(seen), "languages": languages, "archives": packages}
    (out / "corpus.json").write_text(json.dumps(summary, indent=1))
    print(f"{len(seen):,} documents: {dict(sizes)}")
    print(dict(languages.most_common()))


def choose(archive: Path, limit: int) -> list[Document]:
    """Return documents of an archive, sorted by the hashes of their folders' names.

    The documents have about `limit` characters together, or fewer if the archive has fewer. So the
    folders that are chosen are random, but the same in each run.
    """
    chosen = []
    size = 0
    for document in sorted(read(archive), key=lambda document: document.folder):
        if size < limit:
            chosen.append(document)
            size += len(document.text)
    return chosen


def read(archive: Path) -> Iterator[Document]:
    """Yield the documents of an archive: UTF-8 files of known languages that are not generated."""
    with tarfile.open(archive) as files:
        for file in files:
            path = PurePosixPath(file.name)
            language = LANGUAGES.get(path.suffix.lower())
            is_of_size = SHORTEST_FILE <= file.size <= LONGEST_FILE
            if not (language and is_of_size and file.isfile()):
                continue
            content = files.extractfile(file)
            assert content is not None
            try:
                text = content.read().decode()
            except UnicodeDecodeError:
                continue
            if is_generated(text):
                continue
            folder = hashlib.sha256("/".join(path.parts[1:-1]).encode()).digest()
            content_hash = hashlib.sha256("".join(text.split()).encode()).digest()
            yield Document(folder, content_hash, language, text)


def is_generated(text: str) -> bool:
    """Return True for data and minified code."""
    mean_line = len(text) / (text.count("\n") + 1)
    digits = sum(map(str.isdigit, text)) / len(text)
    return mean_line > LONGEST_MEAN_LINE or digits > LARGEST_SHARE_OF_DIGITS


if __name__ == "__main__":
    main()
