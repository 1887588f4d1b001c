"""Whether the files on disk are the ones that were written: sizes at every open, hashes whenever they could have changed.

A damaged shard must stop a run before its first step, and hashing terabytes at every start would cost more than it saves. So
sizes are always compared; files up to 128 MiB together are always hashed (a fraction of a second); larger ones are hashed when
they are written or else first opened, and again whenever size, mtime or ctime differ from what a stamp beside them remembers.
Copying, downloading and overwriting all change those, and they are where bits get lost. Where no stamp can be written, every
open hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from foundation.errors import InputError

STAMP = ".verified.json"
ALWAYS_HASHED_BYTES = 128 * 2**20
_CHUNK_BYTES = 2**20
_XXHASHES = {"xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"}


@dataclass(frozen=True)
class FileRecord:
    """What a file's writer recorded about it."""

    name: str  # relative to the folder of the packs
    size: int  # bytes
    hashes: dict[str, str] = field(default_factory=dict)  # algorithm -> hex digest; may be empty


def check_sizes(folder: Path, records: Iterable[FileRecord], remedy: str) -> None:
    """InputError that names the first missing or truncated file."""
    for record in records:
        path = folder / record.name
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise InputError(f"{path}: missing, though its index lists it; {remedy}") from None
        if size != record.size:
            kind = "truncated" if size < record.size else "overlong"
            raise InputError(f"{path}: {kind}: {size} bytes, {record.size} were written; {remedy}")


def check_hashes(folder: Path, records: Iterable[FileRecord], remedy: str, *, trust_stamp: bool = True) -> None:
    """InputError that names the first file whose content is not what was written. Files without recorded hashes pass."""
    records = [record for record in records if record.hashes]
    algorithms = sorted({algorithm for record in records for algorithm in record.hashes})
    found = digests(folder, [record.name for record in records], algorithms, trust_stamp=trust_stamp)
    for record in records:
        for algorithm, expected in record.hashes.items():
            if found[record.name][algorithm] != expected:
                raise InputError(
                    f"{folder / record.name}: damaged: its {algorithm} is {found[record.name][algorithm]}, "
                    f"{expected} was written; {remedy}"
                )


def digests(folder: Path, names: list[str], algorithms: list[str], *, trust_stamp: bool = True) -> dict[str, dict[str, str]]:
    """Hex digests by file and algorithm, from the stamp for those large files that are as they were when it was written."""
    states = {name: _state(folder / name) for name in names}
    large = _are_large(states.values())
    stamp = _read_stamp(folder) if large else {}
    result = {}
    for name, entry in stamp.items():
        unchanged = trust_stamp and name in states and entry["state"] == states[name]
        if unchanged and set(algorithms) <= entry["digests"].keys():
            result[name] = entry["digests"]
    stale = [name for name in names if name not in result]
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        result |= dict(zip(stale, pool.map(lambda name: hash_file(folder / name, algorithms), stale), strict=True))
    if large and stale:
        _write_stamp(folder, stamp | {name: {"state": states[name], "digests": result[name]} for name in stale})
    return result


def stamp_as_verified(folder: Path, records: Iterable[FileRecord]) -> None:
    """Spare the first to open what was just written and hashed from hashing it again. Little data is hashed at every open."""
    entries = {record.name: {"state": _state(folder / record.name), "digests": record.hashes} for record in records}
    if _are_large(entry["state"] for entry in entries.values()):
        _write_stamp(folder, entries)


def hash_file(path: Path, algorithms: Iterable[str]) -> dict[str, str]:
    """Hex digest by algorithm (any of hashlib's or xxhash's), read once in constant memory; InputError for an unknown one."""
    hashers = {algorithm: new_hash(algorithm, path) for algorithm in algorithms}
    buffer = bytearray(_CHUNK_BYTES)
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            for hasher in hashers.values():
                hasher.update(memoryview(buffer)[:count])
    return {algorithm: hasher.hexdigest() for algorithm, hasher in hashers.items()}


def new_hash(algorithm: str, path: Path) -> Any:
    """A fresh hash object; `path` is named if the algorithm is unknown."""
    if algorithm in _XXHASHES:
        return getattr(xxhash, algorithm)()
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake_"):
        return hashlib.new(algorithm, usedforsecurity=False)
    raise InputError(
        f"{path}: hashed with {algorithm!r}, which neither hashlib nor xxhash knows; write it again with sha1 or xxh64"
    )


def _state(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}


def _are_large(states: Iterable[dict[str, int]]) -> bool:
    return sum(state["size"] for state in states) > ALWAYS_HASHED_BYTES


def _read_stamp(folder: Path) -> dict[str, Any]:
    """The stamp, or nothing where it is absent or torn: all it can do is save work."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
        return {name: {"state": entry["state"], "digests": dict(entry["digests"])} for name, entry in stamp.items()}
    return {}


def _write_stamp(folder: Path, stamp: dict[str, Any]) -> None:
    temporary = folder / f"{STAMP}.{os.getpid()}"
    with contextlib.suppress(OSError):  # a read-only folder is verified at every open instead
        temporary.write_text(json.dumps(stamp), encoding="utf-8")
        temporary.replace(folder / STAMP)
