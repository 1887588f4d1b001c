"""Copy data from object storage (s3://, gs://, hf://) to a cache on this machine."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.files import CACHE, hash_of, locked
from foundation.progress import say
from foundation.reading import one_line

# Folder of copied data. The copy of s3://bucket/name is COPIES/s3/bucket/name.
COPIES = CACHE / "storage"
# Number of objects that are copied at the same time. s3fs copies a large object in ten parts of
# 50 MB, which are in memory at the same time.
TRANSFERS = 4
# Keys in the description of an object. Each kind of storage has some of them, and their values
# change when the object is written again.
_VERSION = ("ETag", "etag", "blob_id", "created", "size")


def is_address(text: str) -> bool:
    """Return True if `text` is an address such as s3://bucket/name, and not a path."""
    return re.match(r"\w[\w+.-]*://", text) is not None


def path_for(address: str) -> Path:
    """Return the path of the copy of `address` in the cache.

    Raises InputError if a part of the name is empty or consists of dots.
    """
    scheme, _, name = address.partition("://")
    parts = name.strip("/").split("/")
    if {"", ".", ".."} & {*parts}:
        raise InputError(f"{address}: has an empty part, `.` or `..`; use another name")
    return Path(COPIES, scheme, *parts)


def address_of(path: Path) -> str:
    """Return the address whose copy is at `path`, or `path` if it is not in the folder COPIES."""
    if not path.is_relative_to(COPIES):
        return str(path)
    scheme, *parts = path.relative_to(COPIES).parts
    return f"{scheme}://{'/'.join(parts)}"


@contextmanager
def open_storage(address: str) -> Iterator[tuple[Any, str]]:
    """Context manager that yields the file system of `address` (fsspec) and the path in it.

    Re-raises all exceptions of the caller's `with` statement as InputError, because every file
    system has its own exceptions. A missing package is an ImportError.
    """
    import fsspec  # imported here, because the import takes 0.1 s

    try:
        storage, path = fsspec.url_to_fs(address)
        storage.invalidate_cache()  # fsspec remembers lists of objects
        yield storage, path
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{address}: {one_line(error, named=True)}; check the address, the credentials, the "
            "network and the installed packages"
        ) from None


def fetch(address: str) -> Path:
    """Copy the objects at `address` to the cache, and return the path of the copies.

    `address` names an object, a folder, or a pattern such as s3://bucket/*.jsonl. For a pattern,
    the result is a pattern. Only objects without an equal copy are copied. Copies of deleted
    objects are deleted. All processes may call this function: one of them copies, while the others
    wait for its lock.
    """
    local = path_for(address)
    scheme = local.relative_to(COPIES).parts[0]
    with (
        open_storage(address) as (storage, path),
        locked(COPIES / ".lock", lambda holder: say(f"waiting for {holder} to copy {address}")),
    ):
        listed = (storage.glob if glob.has_magic(path) else storage.find)(path, detail=True)
        objects = {
            path_for(f"{scheme}://{name}"): details
            for name, details in listed.items()
            if details["type"] == "file"
        }
        if not objects:
            raise FileNotFoundError("no such object or folder")
        copies = local if glob.has_magic(path) else Path(glob.escape(str(local)), "**")
        for copy in {*objects, *map(Path, glob.glob(str(copies), recursive=True))}:
            if copy.is_file() and _version(objects.get(copy, {})) != copy.stat().st_mtime:
                copy.unlink()
        missing = {copy: details for copy, details in objects.items() if not copy.exists()}
        if missing:
            say(f"{address}: copying {len(missing):,} of {len(objects):,} objects to {local}")
        _download(storage, missing)
    return local


def _version(details: Mapping[str, Any]) -> int:
    """Return a number that changes when an object is written again.

    The number becomes the modification time of a copy, in seconds. So a copy that is incomplete or
    outdated has another time, and the packs of a source recognise its copies on every machine.
    """
    return int(hash_of([str(details.get(key)) for key in _VERSION])[:7], 16)


def _download(storage: Any, objects: Mapping[Path, Mapping[str, Any]]) -> None:
    """Copy objects to the paths that `objects` maps to their descriptions."""

    def download(copy: Path) -> None:
        details = objects[copy]
        copy.parent.mkdir(parents=True, exist_ok=True)
        storage.get_file(details["name"], str(copy))
        storage.invalidate_cache()
        present = storage.info(details["name"])
        if (_version(present), copy.stat().st_size) != (_version(details), present["size"]):
            raise OSError(f"{details['name']} has changed while it was copied")
        os.utime(copy, (_version(details),) * 2)

    with ThreadPoolExecutor(TRANSFERS) as threads:
        list(threads.map(download, objects))
