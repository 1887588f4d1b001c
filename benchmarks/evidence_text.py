"""Real text for comparing precisions: what public Python packages are written in, and what is written about them.

    python -m benchmarks.evidence_text --out work/evidence

    python -m benchmarks.evidence_text --packages benchmarks/evidence_packages.txt benchmarks/evidence_packages_more.txt \\
        --most 60 --out work/evidence_more

fetch the packages of one list or of two, 114 and 350 million tokens, from the index that pip asks, and write

* `code.jsonl` and `prose.jsonl` to train on, `held_out_code.jsonl` and `held_out_prose.jsonl` of packages that are in neither of
  them. Code is source files of many languages, Python without its docstrings; prose is documentation, and those docstrings, a
  document a module. A line is {"text", "source": "package/path"}.
* `tokenizer`: a BPE of 8,192 words, learnt on a part of what is trained on.
* `manifest.json`: what was taken, what each filter left out, and the SHA-256 of every file.

The same lists give the same files, bit for bit, under one version of Python and of `tokenizers`. No code of a package is run.
Archives that are there are not fetched again.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import html
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain, islice, repeat
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urljoin, urlsplit

import requests
import xxhash
from tokenizers import Tokenizer

from demo.corpus import split_module
from foundation.errors import InputError
from foundation.files import replace_file
from foundation.integrity import hash_file
from foundation.progress import say
from packing.vocabulary import save_tokenizer, train_tokenizer

PACKAGES = Path(__file__).with_name("evidence_packages.txt")
VOCABULARY = 8192
TAUGHT_ON = 24_000_000  # characters of each kind, evenly spread, from which the tokenizer learns

CODE = re.compile(
    r"(?i).+\.(py|pyi|pyx|pxd|pxi|c|h|cc|cpp|cxx|hh|hpp|cu|cuh|cl|rs|go|java|kt|scala|cs|swift|js|mjs|jsx|ts|tsx|vue|css|scss|sql|sh|"
    r"bash|ps1|bat|rb|pl|php|lua|r|jl|f|f90|el|vim|tcl|proto|cmake|mako|j2|jinja|jinja2|yml|yaml|toml|feature)"
)
PROSE = re.compile(r"(?i).+\.(rst|md|markdown|mdx|adoc)")
SOMETIMES_PROSE = re.compile(r"(?i).+\.(txt|inc|rest)")  # in a folder of documentation, or where the name is README, say
IDLE = re.compile(r"(?i)^(licen[cs]e|copying|notice|authors|contributors|thanks|requirements|cmakelists|package-lock|pnpm-lock)")
MADE = re.compile(
    r"(?i)auto[- ]?generated|automatically generated|generated (by|from|with|using)|do not (edit|modify)|@generated"
)

SHORTEST = 200  # characters of a document
LONGEST = 200_000  # what is longer is tables that a program wrote
LONGEST_LINE = {"code": 1_000, "prose": 5_000}  # minified code, data
LEAST_LETTERS = {"code": 0.5, "prose": 0.7}  # a to z, of what is not blank; prose in other languages has fewer, too
MOST_OF_A_PACKAGE = {"code": 8, "prose": 12}  # million characters, so that no package is the whole text
TELLING = 20  # bytes from which on a line is not one that anybody would write
MOST_SHARED = 0.5  # of the bytes in such lines, those of lines that an earlier document has

LETTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
BLANKS = b" \t\n\r\f\v"


@dataclass(frozen=True)
class Package:
    name: str
    version: str
    sha256: str  # of the source archive
    held_out: bool

    @property
    def normalised(self) -> str:
        """The name as an index has it: one of its spellings."""
        return re.sub(r"[-_.]+", "-", self.name).lower()


def read_packages(*paths: Path) -> list[Package]:
    """The packages of lists whose lines are `train NAME==VERSION SHA256` or `held_out NAME==VERSION SHA256`, in their order."""
    packages: dict[str, Package] = {}
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not (line := line.partition("#")[0].strip()):
                continue
            if not (match := re.fullmatch(r"(train|held_out)\s+([\w.-]+)==([\w.!+-]+)\s+([0-9a-f]{64})", line)):
                raise InputError(f"{path}, line {number}: not `train NAME==VERSION SHA256` or `held_out NAME==VERSION SHA256`")
            package = Package(match[2], match[3], match[4], held_out=match[1] == "held_out")
            if package.normalised in packages:
                raise InputError(f"{path}, line {number}: {package.normalised} stands there twice; name it once")
            packages[package.normalised] = package
    return list(packages.values())


# Fetching


def fetch(packages: Sequence[Package], folder: Path) -> list[Path]:
    """The source archives of `packages` in `folder`, in their order; those that are not there come from pip's index.

    `pip download` would build each package to learn its dependencies, which runs its code. So the index is asked here, by the
    pages that every index has (https://packaging.python.org/en/latest/specifications/simple-repository-api): on that of a
    package, the link of a file ends in its SHA-256. InputError where an archive cannot be had.
    """
    found = {hash_file(path, ["sha256"])["sha256"]: path for path in sorted(folder.glob("*.tar.gz"))}
    missing = [package for package in packages if package.sha256 not in found]
    pip = pip_settings() if missing else {}
    index, certificates = pip.get("index-url", "https://pypi.org/simple").rstrip("/"), pip.get("cert")
    for package in missing:
        remedy = f"put its source archive into {folder} yourself, or name another index in PIP_INDEX_URL"
        page = answer_of(f"{index}/{package.normalised}/", certificates, remedy)
        link = re.search(rf"""href=["']([^"'#]+)#sha256={package.sha256}["']""", page.text)
        if link is None:
            wanted = f"{package.name}=={package.version}"
            raise InputError(
                without_password(f"{page.url}: lists no file of SHA-256 {package.sha256}, which {wanted} has; {remedy}")
            )
        url = urljoin(page.url, html.unescape(link[1]))
        name, content = PurePosixPath(unquote(urlsplit(url).path)).name, answer_of(url, certificates, remedy).content
        if (sha256 := hashlib.sha256(content).hexdigest()) != package.sha256:
            raise InputError(without_password(f"{url}: has SHA-256 {sha256}, and the list says {package.sha256}; {remedy}"))
        found[sha256] = folder / name
        replace_file(found[sha256], content)
        say(f"fetched {name}, {len(content) / 1e6:.1f} MB")
    return [found[package.sha256] for package in packages]


def pip_settings() -> dict[str, str]:
    """What pip is told by its files and, before them, by the environment, for all of its commands: `index-url`, `cert`, ..."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False).stdout
    by_place: dict[str, dict[str, str]] = {"global": {}, ":env:": {}}
    for place, name, value in re.findall(r"(?m)^(global|:env:)\.([\w-]+)=('.*'|\".*\")$", told):
        by_place[place][name] = ast.literal_eval(value)
    return by_place["global"] | by_place[":env:"]


def answer_of(url: str, certificates: str | None, remedy: str) -> requests.Response:
    """`certificates`: a file of those that are believed; None for the usual ones. InputError where there is no answer."""
    headers = {"Accept": "text/html, */*;q=0.1", "Accept-Encoding": "identity"}  # no archive is unpacked on its way
    try:
        answer = requests.get(url, headers=headers, verify=certificates or True, timeout=60)
        answer.raise_for_status()
    except OSError as error:
        raise InputError(without_password(f"{url}: {error}; {remedy}")) from None
    return answer


def without_password(text: str) -> str:
    """`text` without the names and passwords of its URLs: that of an index may have them."""
    return re.sub(r"//[^/@\s]+@", "//", text)


# Reading


def files_of(archive: Path) -> Iterator[tuple[str, bytes]]:
    """Path, without the folder that an sdist puts around all, and content of each file in `archive` that may be text."""
    with tarfile.open(archive, "r|*") as opened:
        for member in opened:
            path = member.name.partition("/")[2]
            if member.isfile() and kind_of(path):
                yield path, opened.extractfile(member).read()


def kind_of(name: str) -> str | None:
    """Whether the file called `name` is "code" or "prose", by its name; None for neither."""
    path = PurePosixPath(name)
    if IDLE.match(path.name) or ".min." in path.name or ".bundle." in path.name:
        return None
    if SOMETIMES_PROSE.fullmatch(path.name):
        in_documentation = any(part.lower().startswith("doc") for part in path.parts[:-1])
        return "prose" if in_documentation or (path.stem.isupper() and len(path.stem) > 3) else None
    return "code" if CODE.fullmatch(path.name) else "prose" if PROSE.fullmatch(path.name) else None


def documents_of(name: str, content: bytes) -> Iterator[tuple[str, str]]:
    """Kind and text of what the file called `name` holds: of a Python module its code, and all of its docstrings as one.

    Raises ValueError and SyntaxError for what is no text, or no Python that this one understands.
    """
    text = content.decode("utf-8-sig").replace("\r\n", "\n")
    if "\0" in text:
        raise ValueError("no text")
    if not name.endswith((".py", ".pyi")):
        yield kind_of(name), text
    elif len(text) <= 10 * LONGEST:  # a parser takes its time, and much memory, for tables
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the packages' strings
            parts = split_module(name, text)
        docstrings = [part.text for part in parts if ":" in part.name]
        yield "code", "".join(part.text for part in parts if ":" not in part.name)
        yield "prose", "\n\n".join(docstrings)
    else:
        yield "code", text


def unfit(kind: str, text: str) -> str | None:
    """Why no model should learn from a document; None where one may."""
    if len(text) < SHORTEST:
        return "short"
    if len(text) > LONGEST:
        return "long"
    if MADE.search(text, 0, 1_500):
        return "generated"
    if max(map(len, text.split("\n"))) > LONGEST_LINE[kind]:
        return "long lines"
    solid = text.encode().translate(None, BLANKS)
    if len(solid) - len(solid.translate(None, LETTERS)) < LEAST_LETTERS[kind] * len(solid):
        return "few letters"
    return None


def read_archive(package: str, archive: Path, out: Path, most: Mapping[str, float]) -> dict[str, Counter[str]]:
    """Write the documents of `archive` that are fit to learn from to `out`, a JSON object {"kind", "text", "source"} a line.

    They stand in the order of their paths. Returns for each kind how many UTF-8 bytes there were ("read") and each filter left
    out. Where a package has more than `most`, in million characters of each kind, which files are taken follows from a hash of
    their paths.
    """
    bytes_of = {kind: Counter() for kind in LONGEST_LINE}
    fit: dict[str, list[tuple[str, str]]] = {kind: [] for kind in LONGEST_LINE}
    for path, content in files_of(archive):
        try:
            documents = list(documents_of(path, content))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            bytes_of[kind_of(path)].update({"read": len(content), "unreadable": len(content)})
            continue
        for kind, text in documents:
            size = len(text.encode())
            bytes_of[kind]["read"] += size
            if why := unfit(kind, text):
                bytes_of[kind][why] += size
            else:
                fit[kind].append((path, text))
    with out.open("w", encoding="utf-8") as file:
        for kind, documents in fit.items():
            left, taken = int(most[kind] * 1e6), []
            for path, text in sorted(documents, key=lambda each: xxhash.xxh3_64_digest(each[0].encode())):
                if (left := left - len(text)) >= 0:
                    taken.append((path, text))
                else:
                    bytes_of[kind]["over a package's share"] += len(text.encode())
            for path, text in sorted(taken):
                record = {"kind": kind, "text": text, "source": f"{package}/{path}"}
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
    return bytes_of


# Choosing


class Seen:
    """What earlier documents hold, so that none is taken twice: neither whole, nor for the most part, nor put together from them.

    Lines are compared, by 64-bit hashes: packages share files with small changes, headers, and what one template has made.
    """

    def __init__(self) -> None:
        self._texts: set[bytes] = set()
        self._lines: set[int] = set()

    def repeated(self, text: str) -> str | None:
        """Why `text` is left out; None for a new one, which is remembered."""
        whole = xxhash.xxh3_128_digest(text.encode())
        if whole in self._texts:
            return "duplicates"
        lines = (line.strip() for line in text.encode().split(b"\n"))
        telling = {xxhash.xxh3_64_intdigest(line): len(line) for line in lines if len(line) >= TELLING}
        shared = sum(size for line, size in telling.items() if line in self._lines)
        if shared > MOST_SHARED * sum(telling.values()):
            return "near-duplicates"
        self._texts.add(whole)
        self._lines.update(telling)
        return None


def write_text(
    packages: Sequence[Package], archives: Sequence[Path], out: Path, processes: int, most: Mapping[str, float]
) -> dict[str, Counter[str]]:
    """Write the four files of text; returns for each kind how many UTF-8 bytes were read and each filter left out."""
    bytes_of = {kind: Counter() for kind in LONGEST_LINE}
    made = out / "documents.unfinished"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    paths = [made / f"{package.name}.jsonl" for package in packages]
    with ProcessPoolExecutor(processes) as pool:
        names = [package.name for package in packages]
        for package, found in zip(packages, pool.map(read_archive, names, archives, paths, repeat(most)), strict=True):
            for kind, counts in found.items():
                bytes_of[kind].update(counts)
            say(f"read {package.name} {package.version}")
    seen = Seen()
    with ExitStack() as stack:
        files = {
            name: stack.enter_context((out / f"{name}.jsonl.unfinished").open("w", encoding="utf-8"))
            for name in (f"{held}{kind}" for held in ("", "held_out_") for kind in LONGEST_LINE)
        }
        # What is held out comes last, so that it is what goes where both have it.
        for package, path in sorted(zip(packages, paths, strict=True), key=lambda each: each[0].held_out):
            for record in records_of(path):
                kind = record.pop("kind")
                size = len(record["text"].encode())
                if why := seen.repeated(record["text"]):
                    bytes_of[kind][why] += size
                    continue
                bytes_of[kind]["held out" if package.held_out else "trained on"] += size
                name = f"held_out_{kind}" if package.held_out else kind
                files[name].write(json.dumps(record, ensure_ascii=False) + "\n")
    for name in files:
        (out / f"{name}.jsonl.unfinished").replace(out / f"{name}.jsonl")
    shutil.rmtree(made)
    return bytes_of


def records_of(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


# Tokens


def learn_tokenizer(out: Path, folder: Path) -> Tokenizer:
    """Learn the tokenizer on documents of both kinds that stand equally far apart, and save it in `folder`."""
    strides = {kind: 1 + (out / f"{kind}.jsonl").stat().st_size // TAUGHT_ON for kind in LONGEST_LINE}
    taught = chain.from_iterable(islice(records_of(out / f"{kind}.jsonl"), 0, None, stride) for kind, stride in strides.items())
    tokenizer = train_tokenizer((record["text"] for record in taught), VOCABULARY)
    shutil.rmtree(folder, ignore_errors=True)
    save_tokenizer(tokenizer, folder)
    return tokenizer


def describe(path: Path, tokenizer: Tokenizer) -> dict[str, int | str]:
    """Documents, characters and tokens of a file of text, and its size and SHA-256. Each document has an end token."""
    records, counts = records_of(path), Counter(documents=0, characters=0, tokens=0)
    while texts := [record["text"] for record in islice(records, 500)]:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        counts.update(documents=len(texts), characters=sum(map(len, texts)), tokens=sum(len(each) + 1 for each in encoded))
    return dict(counts) | {"bytes": path.stat().st_size, "sha256": hash_file(path, ["sha256"])["sha256"]}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", type=Path, nargs="+", default=[PACKAGES], help="lists of packages (default: the shorter)")
    parser.add_argument("--most", type=float, metavar="N", help="million characters of code, and as many of prose, of a package")
    parser.add_argument("--processes", type=int, default=2, help="that read archives (default: %(default)s)")
    arguments = parser.parse_args(given)
    most = MOST_OF_A_PACKAGE if arguments.most is None else dict.fromkeys(MOST_OF_A_PACKAGE, arguments.most)
    make(read_packages(*arguments.packages), arguments.out, arguments.processes, most)


def make(packages: Sequence[Package], out: Path, processes: int, most: Mapping[str, float] = MOST_OF_A_PACKAGE) -> None:
    """Write everything that the module's docstring names into `out`."""
    (out / "archives").mkdir(parents=True, exist_ok=True)
    archives = fetch(packages, out / "archives")
    bytes_of = write_text(packages, archives, out, processes, most)
    tokenizer = learn_tokenizer(out, out / "tokenizer")
    names = [f"{held}{kind}.jsonl" for held in ("", "held_out_") for kind in bytes_of]
    files = {name: describe(out / name, tokenizer) for name in names}
    files |= {f"tokenizer/{path.name}": hash_file(path, ["sha256"]) for path in sorted((out / "tokenizer").iterdir())}
    manifest = {
        "python": platform.python_version(),
        "tokenizers": version("tokenizers"),
        "files": files,
        "bytes": {kind: dict(sorted(counts.items())) for kind, counts in bytes_of.items()},
        "packages": {each.name: {"version": each.version, "sha256": each.sha256, "held_out": each.held_out} for each in packages},
    }
    replace_file(out / "manifest.json", (json.dumps(manifest, indent=1) + "\n").encode())
    for name in names:
        numbers = files[name]
        say("{:<22} {documents:>8,} documents {characters:>12,} characters {tokens:>12,} tokens".format(name, **numbers))
    for kind, counts in bytes_of.items():
        say(f"{kind}, MB: " + ", ".join(f"{what} {size / 1e6:.1f}" for what, size in counts.most_common()))


if __name__ == "__main__":
    main()
