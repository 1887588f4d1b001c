"""Copy data from object storage (s3://, gs://, hf://) to a cache on this machine.

All other code reads and writes local files. `pretrain.run.stored_run` stores the folder of a run.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foundation.errors import InputError, one_line
from foundation.files import CACHE, hash_of, locked
from foundation.progress import say
from foundation.units import plural

# Folder of copied data. The copy of s3://bucket/name is COPIES/s3/bucket/name.
COPIES = CACHE / "storage"
# Number of objects that are copied at the same time. s3fs copies a large object in ten parts of
# 50 MB, which are in memory at the same time.
TRANSFERS = 4
# Keys in the description of an object. Each kind of storage has some of them, and their values
# change when the object is written again.
_VERSION = ("ETag", "etag", "blob_id", "created", "size")
# Parts of an address that may be a secret: a user before `@` (a revision in hf://), and a query.
_SECRET = re.compile(r"(?!hf:)[^/]*//.*@|[^/]*//[^/]*@|.*#|.*\?.*=")
# The beginning of an address. file:///name is a path: `foundation.settings.at_home` removes
# `file://`.
_SCHEME = re.compile(r"(?!file:)\w[\w+.-]*://")


def is_address(text: str) -> bool:
    """Return True if `text` is an address such as s3://bucket/name, and not a path.

    Raises InputError, without the address, if the address may contain a secret.
    """
    refuse_secret(text)
    return _SCHEME.match(text) is not None


def refuse_secret(text: str) -> None:
    """Raise InputError, without the address, if `text` is an address that may contain a secret."""
    scheme = _SCHEME.match(text)
    if scheme and _SECRET.match(text):
        raise InputError(
            f"an address {scheme[0]}... has `@`, `#` or a query, which may contain a secret, so it "
            "is neither used nor printed; remove this part of the address, and pass credentials in "
            "the environment (docs/several_gpus.md)"
        )


def path_for(address: str, parent: Path | None = None) -> Path:
    """Return the path for `address` in the folder `parent`.

    The path for s3://bucket/name is `parent`/s3/bucket/name. Without `parent`, return the path of
    its copy in the cache. Raises InputError if a part of the name is empty or consists of dots.
    """
    scheme, _, name = address.partition("://")
    parts = name.strip("/").split("/")
    if {"", ".", ".."} & {*parts}:
        raise InputError(f"{address}: has an empty part, `.` or `..`; use another name")
    return Path(parent or COPIES, scheme, *parts)


def address_of(path: Path) -> str:
    """Return the address whose copy is at `path`, or `path` if it is not in the folder COPIES."""
    if not path.is_relative_to(COPIES):
        return str(path)
    scheme, *parts = path.relative_to(COPIES).parts
    return f"{scheme}://{'/'.join(parts)}"


@contextmanager
def open_storage(address: str) -> Iterator[tuple[Any, str]]:
    """Context manager that yields the file system of `address` (fsspec) and the path in it.

    Each file system has its own exceptions. So all exceptions of the `with` statement, also the
    ImportError of a missing package, are raised again as InputError.
    """
    import fsspec  # imported here, because the import takes 0.1 s

    try:
        storage, path = fsspec.url_to_fs(address)
        # The methods `get` and `put` of s3fs and gcsfs read this attribute.
        storage.batch_size = TRANSFERS
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
        is_pattern = glob.has_magic(path)
        listed = list_objects(storage, storage.glob if is_pattern else storage.find, path)
        if not listed:
            raise FileNotFoundError("no such object or folder")
        objects = {path_for(f"{scheme}://{name}"): listed[name] for name in listed}
        copies = local if is_pattern else Path(glob.escape(str(local)), "**")
        # Delete copies of deleted and changed objects, and incomplete copies. The modification time
        # of a copy is the version of its object.
        for copy in map(Path, glob.glob(str(copies), recursive=True)):
            if copy.is_file() and _version(objects.get(copy, {})) != copy.stat().st_mtime:
                copy.unlink()
        download(storage, {copy: objects[copy] for copy in objects if not copy.exists()})
    return local


def list_objects(storage: Any, find: Callable[..., Any], path: str) -> dict[str, Mapping[str, Any]]:
    """Return the descriptions of objects by name.

    `find` is `storage.find` for the objects below the folder `path`, or `storage.glob` for the
    objects that the pattern `path` matches.
    """
    storage.invalidate_cache()  # fsspec remembers lists of objects
    # A console creates an empty object with a slash at its end for a folder.
    return {
        name: details
        for name, details in find(path, detail=True).items()
        if details["type"] == "file" and not name.endswith("/")
    }


def _version(details: Mapping[str, Any]) -> int:
    """Return a number that changes when an object is written again.

    The number becomes the modification time of a copy, in seconds. So a copy that is incomplete or
    outdated has another time, and the packs of a source recognise its copies on every machine.
    """
    return int(hash_of([str(details.get(key)) for key in _VERSION])[:7], 16)


def download(storage: Any, objects: Mapping[Path, Mapping[str, Any]]) -> None:
    """Copy objects to the paths that `objects` maps to their descriptions."""
    names = [details["name"] for details in objects.values()]
    say(f"copying {plural(len(names), 'object')} from object storage", bool(names))
    storage.get(names, [str(copy) for copy in objects])
    # Copies are recognised by the modification time (see `fetch`).
    for copy, details in objects.items():
        version = _version(details)
        os.utime(copy, (version, version))
