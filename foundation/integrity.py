"""Whether the files on disk are the ones that were written: every file has a recorded size and recorded hashes.

Reading terabytes at every start would take too long, so `check_files` remembers: it hashes large files when they are written or
first opened, and again when their size, mtime or ctime differ from those in a stamp beside them. Sizes are always compared; files
of up to 128 MiB together are always hashed, and so are those beside which no stamp can be written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import xxhash
from pydantic import AfterValidator, Field

from foundation.errors import InputError
from foundation.files import replace_file
from foundation.reading import load_json, open_regular, reason_of

STAMP = ".verified.json"
ALWAYS_HASHED_BYTES = 128 * 2**20
THREADS = 8  # hashing and writing release the interpreter lock; more threads than this only queue at the disk
_CHUNK_BYTES = 2**20

Digests = dict[str, dict[str, str]]  # file name -> algorithm -> hex digest


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if len(name) > 1000:
        raise ValueError(f"a name of {len(name):,} characters")
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise ValueError(f"{name!r} lies outside its folder")
    return name


InnerName = Annotated[str, AfterValidator(_inside)]  # a file in a manifest, relative to the manifest's folder
Size = Annotated[int, Field(ge=0, lt=2**63)]  # bytes, or a number of things


@dataclass(frozen=True)
class FileRecord:
    """What a file's writer recorded about it."""

    name: str  # relative to the folder that holds all recorded files
    size: int  # bytes
    hashes: dict[str, str] = field(default_factory=dict)  # algorithm -> hex digest; may be empty


def hash_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of what a manifest says, in hexadecimal digits; the order of its keys does not count."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def hash_files(folder: Path, names: list[str], algorithms: list[str]) -> Digests:
    """Does what `hash_file` does, for several files at a time."""
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as threads:
        return dict(zip(names, threads.map(lambda name: hash_file(folder / name, algorithms), names), strict=True))


def hash_file(path: Path, algorithms: Iterable[str]) -> dict[str, str]:
    """Hex digest by algorithm (any of hashlib's or xxhash's), read once in constant memory.

    Raises InputError for an unknown algorithm and for a file that cannot be read.
    """
    hashers = {algorithm: _new_hash(algorithm, path) for algorithm in algorithms}
    buffer = bytearray(_CHUNK_BYTES)
    try:
        with open_regular(path) as file:
            while count := file.readinto(buffer):
                for hasher in hashers.values():
                    hasher.update(memoryview(buffer)[:count])
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {reason_of(error)}") from None
    return {algorithm: hasher.hexdigest() for algorithm, hasher in hashers.items()}


def _new_hash(algorithm: str, path: Path) -> Any:
    if algorithm in xxhash.algorithms_available:
        return getattr(xxhash, algorithm)()
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake_"):
        return hashlib.new(algorithm, usedforsecurity=False)
    raise InputError(
        f"{path}: hashed with {algorithm!r}, which neither hashlib nor xxhash knows; write it again with sha1 or xxh64"
    )


def check_files(folder: Path, records: Iterable[FileRecord], remedy: str, *, trust_stamp: bool = True) -> None:
    """InputError that names the first file that is missing, of another size or damaged. Without `trust_stamp` all are hashed."""
    if problems := find_damage(folder, records, partial(digests, trust_stamp=trust_stamp)):
        raise InputError(f"{folder}/{problems[0]}; {remedy}")


def find_damage(folder: Path, records: Iterable[FileRecord], digests_of: Callable[..., Digests] = hash_files) -> list[str]:
    """Returns one line for each file that is not what was written; none where all are intact. Without recorded hashes only sizes
    count.

    Hashes are compared once all sizes are right; by default every byte is read. Raises InputError for an unreadable file.
    """
    records = list(records)
    if wrong := wrong_sizes(folder, records):
        return wrong
    hashed = [record for record in records if record.hashes]
    algorithms = sorted({algorithm for record in hashed for algorithm in record.hashes})
    found = digests_of(folder, [record.name for record in hashed], algorithms)
    return [
        f"{record.name}: damaged: its {algorithm} is {found[record.name][algorithm]}, {expected} was written"
        for record in hashed
        for algorithm, expected in record.hashes.items()
        if found[record.name][algorithm] != expected
    ]


def wrong_sizes(folder: Path, records: Iterable[FileRecord]) -> list[str]:
    """Returns one line for each file that is missing, truncated or too long, which can be told without reading."""
    wrong = []
    root = Path(os.path.realpath(folder))
    # The hub's cache keeps files in `blobs`, and links to them in `snapshots`.
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    for record in records:
        path = folder / record.name
        if not any(Path(os.path.realpath(path)).is_relative_to(home) for home in (root, *blobs)):
            wrong.append(f"{record.name}: a link that leads outside its folder; copy the file itself to its place")
        elif not path.is_file():
            wrong.append(f"{record.name}: missing, though its index lists it")
        elif (size := path.stat().st_size) != record.size:
            kind = "truncated" if size < record.size else "overlong"
            wrong.append(f"{record.name}: {kind}: {size} bytes, {record.size} were written")
    return wrong


def digests(folder: Path, names: list[str], algorithms: list[str], *, trust_stamp: bool = True) -> Digests:
    """The digests of files, from the stamp for those large ones that have not changed since it was written."""
    states = {name: _state(folder / name) for name in names}
    large = _are_large(states.values())
    stamp = _read_stamp(folder) if large else {}
    result = {}
    for name, entry in stamp.items():
        unchanged = trust_stamp and name in states and entry["state"] == states[name]
        if unchanged and set(algorithms) <= entry["digests"].keys():
            result[name] = entry["digests"]
    stale = [name for name in names if name not in result]
    result |= hash_files(folder, stale, algorithms)
    if large and stale:
        _write_stamp(folder, stamp | {name: {"state": states[name], "digests": result[name]} for name in stale})
    return result


def stamp_as_verified(folder: Path, records: Iterable[FileRecord]) -> None:
    """Note that these files, just written and hashed, are intact, so that whoever opens them first need not hash them again."""
    entries = {record.name: {"state": _state(folder / record.name), "digests": record.hashes} for record in records}
    if _are_large(entry["state"] for entry in entries.values()):
        _write_stamp(folder, entries)


def _state(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}


def _are_large(states: Iterable[dict[str, int]]) -> bool:
    return sum(state["size"] for state in states) > ALWAYS_HASHED_BYTES


def _read_stamp(folder: Path) -> dict[str, Any]:
    """The stamp; empty where it is absent or torn, which costs hashing and nothing else."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        stamp = load_json(folder / STAMP)
        return {name: {"state": entry["state"], "digests": dict(entry["digests"])} for name, entry in stamp.items()}
    return {}


def _write_stamp(folder: Path, stamp: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # a read-only folder is hashed at every open instead
        replace_file(folder / STAMP, json.dumps(stamp).encode())
