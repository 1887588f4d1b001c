"""One checkpoint on its way to the disk, in a thread of its own, while training goes on.

The thread takes part in no exchange of the training's process group: those belong to the thread that trains, in their order.
Each rank's thread writes its files, flushes them, and leaves a report beside them with names, sizes and hashes, or with the error
that kept it from writing. The first rank's thread waits for all reports, writes the state and, last, the manifest, and gives the
folder its name.

    .partial-step-00000200/
      model-00001-of-00002.safetensors
      .written-00001.json              of rank 1
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from foundation.files import write_file
from foundation.integrity import FileRecord, wrong_sizes
from pretrain.checkpoint.folders import give_name
from pretrain.checkpoint.manifest import MANIFEST, STATE, Manifest
from pretrain.checkpoint.shards import write_tensors
from pretrain.checkpoint.staging import Files

THREADS = 4  # hashing and writing release the interpreter lock; the cores are the training's
PATIENCE = 1800.0  # seconds that the first rank waits for the others once its own part is written
NICENESS = 5  # of the writing threads: what trains goes first


class PendingSave:
    """Writes `files`, this rank's part of the checkpoint `final`, into `partial`, which exists; the first rank completes it.

    `manifest` lacks the files, which it gets when all are written, and `state` is the JSON beside it. `afterwards` runs in the
    thread once the checkpoint has its name. `written` holds the rank's files when they are on the disk, `completed` the
    checkpoint's path, on the first rank; both raise whatever went wrong.
    """

    def __init__(
        self,
        partial: Path,
        final: Path,
        files: Files,
        manifest: Manifest,
        state: bytes,
        rank: int,
        afterwards: Callable[[], object],
    ) -> None:
        self.partial, self.final, self.rank = partial, final, rank
        self.patience = PATIENCE
        self._files, self._manifest, self._state, self._afterwards = files, manifest, state, afterwards
        self._given_up = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving", initializer=_be_nice)
        self.written: Future[list[FileRecord]] = self._thread.submit(self._write)
        self.completed: Future[Path] | None = self._thread.submit(self._complete) if rank == 0 else None
        self._thread.shutdown(wait=False)  # takes no more work, and ends with what it has

    @property
    def ended(self) -> bool:
        """Whether this process has nothing more to do for it."""
        return (self.completed or self.written).done()

    @property
    def failed(self) -> bool:
        """Whether this process knows that it has failed."""
        return any(each.done() and each.exception() for each in (self.written, self.completed) if each is not None)

    def give_up(self) -> None:
        """Let the first rank wait for nobody; return when no thread of this process writes any more."""
        self._given_up.set()
        self.join()

    def join(self) -> None:
        """Returns once no thread of this process writes any more."""
        for each in filter(None, (self.written, self.completed)):
            each.exception()

    def _write(self) -> list[FileRecord]:
        """Write this rank's files, several at a time, and tell the first rank."""
        try:
            with ThreadPoolExecutor(THREADS) as threads:  # whose threads are as nice as this one
                jobs = [threads.submit(write_tensors, self.partial / name, part) for name, part in self._files.items()]
                records = [job.result() for job in jobs]
            self._report({"files": [asdict(record) for record in records]})
            return records
        except BaseException as error:  # raised again; the first rank must not wait for this part
            for file in self._files:  # they are of no use any more, and the report may find no room otherwise
                (self.partial / file).unlink(missing_ok=True)
            with suppress(OSError):  # without a report the first rank learns it when the ranks next meet
                self._report({"error": f"{error} (rank {self.rank})", "errno": getattr(error, "errno", None)})
            raise
        finally:
            self._files = {}  # which may refer to the live tensors

    def _report(self, report: dict[str, object]) -> None:
        """Tell the first rank. As soon as the report has its name, that rank may give the folder another, so it comes last."""
        if self.rank == 0:
            return
        unnamed = self.partial / f".unnamed-{self.rank:05d}"
        write_file(unnamed, json.dumps(report).encode())
        os.replace(unnamed, _report_path(self.partial, self.rank))

    def _complete(self) -> Path:
        """The first rank's: wait for the others, write state and manifest, and name the folder."""
        others = range(1, self._manifest.world_size)
        state = FileRecord(STATE, len(self._state), {"sha256": hashlib.sha256(self._state).hexdigest()})
        records = [*self.written.result(), *self._reports(list(others)), state]
        write_file(self.partial / STATE, self._state)
        if wrong := wrong_sizes(self.partial, records):
            raise OSError(errno.EIO, f"{wrong[0]}: rank 0 does not see what another rank has written")
        for rank in others:
            _report_path(self.partial, rank).unlink()
        write_file(self.partial / MANIFEST, replace(self._manifest, files=records).to_json())
        give_name(self.partial, self.final)
        self._afterwards()
        return self.final

    def _reports(self, missing: list[int]) -> list[FileRecord]:
        """The files of the `missing` ranks, once all of them are on the disk."""
        files: list[FileRecord] = []
        began = time.monotonic()
        while missing:
            there = set(os.listdir(self.partial))  # asks a network disk's server, which a look for one name may not
            for rank in [rank for rank in missing if _report_path(self.partial, rank).name in there]:
                report = json.loads(_report_path(self.partial, rank).read_bytes())
                if "error" in report:
                    raise OSError(report["errno"] or errno.EIO, report["error"])
                files += [FileRecord(**file) for file in report["files"]]
                missing.remove(rank)
            if missing and (self._given_up.is_set() or time.monotonic() - began > self.patience):
                raise OSError(errno.ETIMEDOUT, f"the part of rank {', '.join(map(str, missing))} has not come")
            if missing:
                self._given_up.wait(min(0.5, 0.002 + (time.monotonic() - began) / 20))
        return files


def _be_nice() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _report_path(partial: Path, rank: int) -> Path:
    return partial / f".written-{rank:05d}.json"
