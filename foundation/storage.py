"""Read data from object storage (s3://, gs://, hf://), and store the folder of a run in it.

Data is copied to a cache on this machine, and a run trains in a folder on this machine. So all
other code reads and writes local files. The objects of a run have the names of its files:

    s3://bucket/run/
      .writer                         name of the process that stores the run
      config.yaml, metrics.jsonl, ...
      checkpoints/step-00000100/...   complete if it has a manifest.json
      final/...                       complete if summary.json exists

Objects cannot be renamed, so each folder has a marker: manifest.json or summary.json. It is written
after all other files of the folder, and deleted before one of them is replaced or deleted.
"""

from __future__ import annotations

import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from foundation.errors import InputError, one_line
from foundation.files import CACHE, hash_of, locked, new_folder
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
# Object with the name of the process that stores a run.
_WRITER = ".writer"
# Marker of the folder `final`.
_SUMMARY = "summary.json"
# Names of the files that a run stores. Other objects are neither copied nor deleted.
_OURS = re.compile(
    r"checkpoints/step-\d{8,}/(manifest|state|(model|optimizer)-[\w-]+)\.(json|safetensors)"
    r"|(final/)?[^./][^/]*"
)


def is_address(text: str) -> bool:
    """Return True if `text` is an address such as s3://bucket/name, and not a path.

    file:///name is a path: `foundation.settings.at_home` removes `file://`.
    """
    return re.match(r"(?!file:)\w[\w+.-]*://", text) is not None


def path_for(address: str, parent: Path | None = None) -> Path:
    """Return the path for `address` in the folder `parent`: for s3://bucket/name s3/bucket/name.

    Without `parent`, return the path of its copy in the cache. Raises InputError if a part of the
    name is empty or consists of dots.
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
        listed = _found(storage, storage.glob if glob.has_magic(path) else storage.find, path)
        if not listed:
            raise FileNotFoundError("no such object or folder")
        objects = {path_for(f"{scheme}://{name}"): listed[name] for name in listed}
        copies = local if glob.has_magic(path) else Path(glob.escape(str(local)), "**")
        for copy in map(Path, glob.glob(str(copies), recursive=True)):
            if copy.is_file() and _version(objects.get(copy, {})) != copy.stat().st_mtime:
                copy.unlink()
        _download(storage, {copy: objects[copy] for copy in objects if not copy.exists()})
    return local


def _found(storage: Any, find: Callable[..., Any], path: str) -> dict[str, Mapping[str, Any]]:
    """Return the descriptions of objects by name. `find` is a method of `storage`."""
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


def _download(storage: Any, objects: Mapping[Path, Mapping[str, Any]]) -> None:
    """Copy objects to the paths that `objects` maps to their descriptions."""
    names = [details["name"] for details in objects.values()]
    say(f"copying {plural(len(names), 'object')} from object storage", bool(names))
    storage.get(names, [str(copy) for copy in objects])
    for copy, details in objects.items():
        os.utime(copy, (_version(details),) * 2)


class StoredRun:
    """The copy of a run folder in object storage. Only the first rank of a run has this object.

    Args:
        address: Address of the copy, such as s3://bucket/run.
        folder: The run folder on this machine.

    Raises:
        InputError: The address cannot be read, or has objects but no run.
    """

    def __init__(self, address: str, folder: Path) -> None:
        self.address = address
        self.folder = folder
        # Name of this process, different from the name of any other process.
        self._name = f"process {os.getpid()} on {os.uname().nodename}, {secrets.token_hex(4)}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storing")
        with open_storage(address) as (storage, root):
            self._objects(storage, root)

    def restore(self) -> None:
        """Copy the stored run to the run folder if its newest checkpoint is newer.

        An older run folder is renamed, so that nothing is lost. A folder without its marker is not
        copied.
        """
        with open_storage(self.address) as (storage, root):
            objects = self._objects(storage, root)
            complete = {name: objects[name] for name in objects if _marker_of(name) in objects}
            is_run = (self.folder / "config.yaml").exists()
            if not complete or (is_run and _newest(complete) <= _newest(self._markers())):
                return
            with new_folder(self.folder) as folder:
                _download(storage, {folder / name: complete[name] for name in complete})
                if self.folder.exists():
                    earlier = self.folder.rename(f"{self.folder}-{secrets.token_hex(4)}")
                    say(f"the earlier {self.folder} has been renamed to {earlier}")

    def claim(self) -> None:
        """Make this process the one that stores the run. Earlier processes then stop storing it."""
        with open_storage(self.address) as (storage, root):
            storage.pipe_file(f"{root}/{_WRITER}", self._name.encode())

    def store(self) -> None:
        """Store new and changed files in the background."""
        self._thread.submit(self._store)

    def close(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait until all files are stored. The arguments describe the exception that ends a run.

        Raises InputError if files could not be stored, unless there is such an exception.
        """
        say(f"{self.address}: storing the last files")
        self._thread.shutdown(cancel_futures=True)
        problem = self._store()
        if problem and error is None:
            raise InputError(problem)

    def _store(self) -> str:
        """Store all files that are not stored yet. Print and return the reason of a failure."""
        try:
            with open_storage(self.address) as (storage, root):
                while self._store_newest(storage, root):
                    pass
        except InputError as error:
            problem = (
                f"{error}. Not all files are stored. They are complete in {self.folder}; the next "
                "save or start stores them"
            )
            say(f"WARNING  {problem}")
            return problem
        return ""

    def _store_newest(self, storage: Any, root: str) -> bool:
        """Store the files outside of folders, and the newest folder that is not stored.

        Return True if a folder was stored. If all folders were stored before, delete the objects of
        checkpoints that the run has deleted. Raises InputError if another process stores the run.
        """
        objects = self._objects(storage, root)
        # A later call of `claim` makes another process the writer.
        writer = storage.cat_file(f"{root}/{_WRITER}").decode()
        if writer != self._name:
            raise InputError(
                f"{self.address}: another run stores its files there now ({writer}); stop one of "
                "the runs, or set another `run_dir`"
            )
        # metrics.jsonl has the steps before the checkpoint, so it is stored first.
        for path in self.folder.glob("[!.]*"):
            if path.is_file() and path.name != _SUMMARY:
                storage.pipe_file(f"{root}/{path.name}", path.read_bytes())
        markers = self._markers()
        for marker in markers:
            content = (self.folder / marker).read_bytes()
            if marker not in objects or storage.cat_file(f"{root}/{marker}") != content:
                self._store_folder(storage, root, marker)
                return True
        kept = [marker for marker in markers if marker != _SUMMARY]
        # False sorts before True, so each marker is deleted before the files of its folder.
        for name in sorted(objects, key=lambda name: name != _marker_of(name)):
            if kept and name.startswith("checkpoints/") and _marker_of(name) not in kept:
                storage.rm_file(f"{root}/{name}")
        return False

    def _store_folder(self, storage: Any, root: str, marker: str) -> None:
        """Store all files of the folder with the marker `marker`."""
        folder = os.path.dirname(marker) or "final"
        links = self.folder / ".storing"
        shutil.rmtree(links, ignore_errors=True)
        # The run may rename and delete the folder meanwhile. Links keep the content of its files.
        links.mkdir()
        for path in filter(Path.is_file, self.folder.glob(f"{folder}/*")):
            os.link(path, links / path.name)
        content = (self.folder / marker).read_bytes()
        if storage.exists(f"{root}/{marker}"):
            storage.rm_file(f"{root}/{marker}")
        names = [path.name for path in links.iterdir() if f"{folder}/{path.name}" != marker]
        storage.put(
            [str(links / name) for name in names], [f"{root}/{folder}/{name}" for name in names]
        )
        storage.pipe_file(f"{root}/{marker}", content)
        shutil.rmtree(links)

    def _objects(self, storage: Any, root: str) -> dict[str, Mapping[str, Any]]:
        """Return the descriptions of the run's objects by name.

        Raises InputError if the address has objects, but no stored run.
        """
        listed = _found(storage, storage.find, root)
        objects = {path.removeprefix(root).lstrip("/"): listed[path] for path in listed}
        if objects and _WRITER not in objects:
            raise InputError(
                f"{self.address}: has {min(objects)}, but no stored run; set another `run_dir`"
            )
        return {name: objects[name] for name in objects if _OURS.fullmatch(name)}

    def _markers(self) -> list[str]:
        """Return the markers in the run folder: newest checkpoints first, `final` last."""
        paths = self.folder.glob("checkpoints/step-*/manifest.json")
        names = sorted((str(path.relative_to(self.folder)) for path in paths), reverse=True)
        markers = list(filter(_OURS.fullmatch, names))
        if (self.folder / _SUMMARY).exists():
            markers.append(_SUMMARY)
        return markers


def _newest(names: Iterable[str]) -> str:
    """Return the name of the newest manifest, or "" if there is none."""
    return max((name for name in names if name.endswith("/manifest.json")), default="")


def _marker_of(name: str) -> str:
    """Return the marker of the folder with the file `name`, or `name` outside of folders."""
    if name.startswith("final/"):
        return _SUMMARY
    folder = os.path.dirname(name)
    return f"{folder}/manifest.json" if folder else name
