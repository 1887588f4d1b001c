"""Store the folder of a run in object storage (s3://, gs://), and restore it.

A run trains in a folder on this machine. The objects of a run have the names of its files:

    s3://bucket/run/
      .writer                         name of the process that stores the run
      config.yaml, metrics.jsonl, ...
      checkpoints/step-00000100/...   complete if it has a manifest.json
      final/...                       complete if summary.json exists

Objects cannot be renamed, so each folder has a marker: manifest.json or summary.json. It is written
after all other files of the folder, and deleted before one of them is replaced or deleted.

The run folder has a copy of `.writer`. If the two differ, the run was stored from another folder,
and the stored run is the one that is continued.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.files import new_folder, process_name, without_links
from foundation.progress import say
from foundation.storage import download, is_address, list_objects, open_storage
from pretrain.checkpoint.folders import MANIFEST, step_folder, step_folders
from pretrain.metrics.run_folder import SUMMARY_FILE, RunFolder, check_ours

# Object with the name of the process that stores a run, and its copy in the run folder.
_WRITER = ".writer"
# Names of the files that a run stores. Other objects are neither copied nor deleted.
_OURS = re.compile(
    r"checkpoints/step-\d{8,}/(manifest|state|(model|optimizer)-[\w-]+)\.(json|safetensors)"
    r"|(final/)?[^./][^/]*"
)


class StoredRun:
    """The copy of a run folder in object storage. Only the first rank of a run has this object.

    A marker is the file manifest.json of a checkpoint, or the file summary.json, which is written
    after the folder `final`. If a marker exists, its folder is complete.

    The arguments `storage` and `root` of the methods are results of `open_storage(address)`: the
    file system, and the path of the copy in it.

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
        self._name = f"{process_name()}, {secrets.token_hex(4)}"
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="storing")
        with open_storage(address) as (storage, root):
            self._objects(storage, root)  # raises InputError if these are not a run's objects

    def restore(self) -> None:
        """Copy the stored run to the run folder, unless the folder continues the stored run.

        The folder continues the stored run if it has stored it last, and has its newest checkpoint
        or a newer one. Another run folder is renamed, so that nothing is lost. A folder of objects
        without its marker is not copied. Nothing is copied if no folder has its marker.
        """
        with open_storage(self.address) as (storage, root):
            objects = self._objects(storage, root)
            complete = {name: objects[name] for name in objects if _marker_of(name) in objects}
            newest = _newest(complete)
            if not newest and SUMMARY_FILE not in complete:
                return
            writer = storage.cat_file(f"{root}/{_WRITER}").decode()
            local = self.folder / _WRITER
            is_from_here = local.is_file() and local.read_text(encoding="utf-8") == writer
            if is_from_here and newest <= _newest(self._markers()):
                return
            with new_folder(self.folder) as folder:
                download(storage, {folder / name: complete[name] for name in complete})
                (folder / _WRITER).write_text(writer, encoding="utf-8")
                if self.folder.exists():
                    earlier = self.folder.rename(f"{self.folder}-{secrets.token_hex(4)}")
                    say(f"the earlier {self.folder} has been renamed to {earlier}")

    def claim(self) -> None:
        """Make this process the one that stores the run. Earlier processes then stop storing it."""
        with open_storage(self.address) as (storage, root):
            storage.pipe_file(f"{root}/{_WRITER}", self._name.encode())
            path = self.folder / _WRITER
            with open(path, "w", encoding="utf-8", opener=without_links) as file:
                file.write(self._name)

    def go_back(self, step: int) -> None:
        """Delete the markers of stored checkpoints after `step`, so that they are not restored.

        Does nothing if the run folder has no such checkpoint. Raises InputError if a marker cannot
        be deleted.
        """
        manifest = str(step_folder(Path("checkpoints"), step) / MANIFEST)
        if _newest(self._markers()) > manifest:
            # The thread may be storing a checkpoint.
            self._thread.submit(self._delete_after, manifest).result()

    def _delete_after(self, manifest: str) -> None:
        """Delete the stored manifests of all checkpoints after the checkpoint of `manifest`."""
        with open_storage(self.address) as (storage, root):
            for name in self._objects_to_change(storage, root):
                if name.endswith(f"/{MANIFEST}") and name > manifest:
                    storage.rm_file(f"{root}/{name}")

    def store(self) -> None:
        """Store changed files in the background, and delete checkpoints that the run deleted."""
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

        Return True if a folder was stored. If all folders were stored before, call
        `_delete_checkpoints` and return False. Raises InputError if another process stores the run.
        """
        objects = self._objects_to_change(storage, root)
        # metrics.jsonl has the steps before the checkpoint, so it is stored first.
        for path in self.folder.glob("[!.]*"):
            if path.is_file() and path.name != SUMMARY_FILE:
                storage.pipe_file(f"{root}/{path.name}", path.read_bytes())
        markers = self._markers()
        try:
            for marker in markers:
                address = f"{root}/{marker}"
                content = (self.folder / marker).read_bytes()
                if marker not in objects or storage.cat_file(address) != content:
                    if marker in objects:
                        storage.rm_file(address)
                    self._store_folder(storage, root, marker)
                    return True
        except FileNotFoundError:
            if self._markers() == markers:
                raise
            # The run has deleted a checkpoint meanwhile, so begin again.
            return True
        self._delete_checkpoints(storage, root, objects, kept=markers)
        return False

    def _delete_checkpoints(
        self, storage: Any, root: str, objects: Iterable[str], kept: list[str]
    ) -> None:
        """Delete the objects of checkpoints that the run has deleted.

        `kept` has the markers in the run folder. Without a checkpoint in it, delete nothing.
        """
        if not _newest(kept):
            return
        # False sorts before True, so each marker is deleted before the files of its folder.
        for name in sorted(objects, key=lambda name: name != _marker_of(name)):
            if name.startswith("checkpoints/") and _marker_of(name) not in kept:
                storage.rm_file(f"{root}/{name}")

    def _store_folder(self, storage: Any, root: str, marker: str) -> None:
        """Store all files of the folder with the marker `marker`, and then the marker.

        Raises FileNotFoundError if the run deletes the folder before its files are linked.
        """
        # The marker of `final` is summary.json, which is beside this folder.
        folder = os.path.dirname(marker) or "final"
        links = self.folder / ".storing"
        shutil.rmtree(links, ignore_errors=True)
        # The run may rename and delete the folder meanwhile. Links keep the content of its files.
        links.mkdir()
        for path in filter(Path.is_file, self.folder.glob(f"{folder}/*")):
            os.link(path, links / path.name)
        content = (self.folder / marker).read_bytes()
        # The marker must be the last object, because a folder with a marker is complete.
        (links / MANIFEST).unlink(missing_ok=True)
        files = list(links.iterdir())
        storage.put(list(map(str, files)), [f"{root}/{folder}/{file.name}" for file in files])
        storage.pipe_file(f"{root}/{marker}", content)
        shutil.rmtree(links)

    def _objects_to_change(self, storage: Any, root: str) -> dict[str, Mapping[str, Any]]:
        """Return the result of `_objects`. Raise InputError if another process stores the run."""
        # A later call of `claim` makes another process the writer.
        writer = storage.cat_file(f"{root}/{_WRITER}").decode()
        if writer != self._name:
            raise InputError(
                f"{self.address}: another run stores its files there now ({writer}); stop one of "
                "the runs, or set another `run_dir`"
            )
        return self._objects(storage, root)

    def _objects(self, storage: Any, root: str) -> dict[str, Mapping[str, Any]]:
        """Return the descriptions of the run's objects by name.

        Raises InputError if the address has objects, but no stored run.
        """
        listed = list_objects(storage, storage.find, root)
        objects = {path.removeprefix(root).lstrip("/"): listed[path] for path in listed}
        if objects and _WRITER not in objects:
            raise InputError(
                f"{self.address}: has {min(objects)}, but no stored run; set another `run_dir`"
            )
        return {name: objects[name] for name in objects if _OURS.fullmatch(name)}

    def _markers(self) -> list[str]:
        """Return the markers in the run folder: newest checkpoints first, that of `final` last."""
        checkpoints = step_folders(self.folder / "checkpoints")
        names = [f"checkpoints/{checkpoint.name}/{MANIFEST}" for checkpoint in checkpoints]
        return [name for name in [*names, SUMMARY_FILE] if (self.folder / name).exists()]


def _newest(names: Iterable[str]) -> str:
    """Return the name of the newest manifest, or "" if there is none."""
    return max((name for name in names if name.endswith(f"/{MANIFEST}")), default="")


def _marker_of(name: str) -> str:
    """Return the marker of the folder with the file `name`, or `name` outside of folders."""
    if name.startswith("final/"):
        return SUMMARY_FILE
    folder = os.path.dirname(name)
    return f"{folder}/{MANIFEST}" if folder else name


def open_run_folder(path: Path, address: str, *, owner: bool) -> RunFolder:
    """Return the locked run folder `path`, restored from `address` if the run is stored there.

    owner: see `RunFolder`, whose errors this function raises.
    """
    stored = StoredRun(address, path) if owner and is_address(address) else None
    return RunFolder(path, owner=owner, stored=stored)


def check_free(path: Path, address: str) -> None:
    """Raise InputError if a run that starts now could not use the folder `path`.

    A missing folder is not created. The lock of an existing folder is released again. If `address`
    is an address in object storage, also raise InputError if it cannot be read, or if it has
    objects that belong to no run.
    """
    check_ours(path)
    if is_address(address):
        StoredRun(address, path)  # lists the objects
    if path.exists():
        RunFolder(path).close()  # locks the folder
