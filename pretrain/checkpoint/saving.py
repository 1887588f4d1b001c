"""One checkpoint on its way to the disk, in a thread of its own, while training goes on.

The thread takes part in no exchange of the training's process group: those belong to the thread that trains, in their order.
Each rank's thread writes its files and flushes them. Then it leaves a report beside them, with names, sizes and hashes, and the
thread of the rank that leads this disk waits for the reports of all who write there. It adds the state and, last, the manifest,
and gives the folder its name.

    .partial-step-00000200/
      model-00001-of-00002.safetensors
      .written-00001.json              of rank 1: its files are on the disk; or why they are not
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from foundation.files import PARTIAL, fsync, write_file
from foundation.integrity import FileRecord, wrong_sizes
from foundation.reading import read_regular
from pretrain.checkpoint.disks import Disks, name_ranks
from pretrain.checkpoint.folders import give_name
from pretrain.checkpoint.manifest import Manifest, manifest_name
from pretrain.checkpoint.shards import write_tensors
from pretrain.checkpoint.staging import Files

STATE = "state.json"
THREADS = 4  # hashing and writing release the interpreter lock; the cores are the training's
PATIENCE = 1800.0  # seconds that the leader waits for other ranks once its own part is written: all have about as much to write
NICENESS = 5  # of the writing threads: what trains goes first


@dataclass(frozen=True)
class _Report:
    """What a rank's thread leaves for the leader's: its files, or the error that kept it from writing them."""

    files: list[FileRecord]
    errno: int = 0
    strerror: str = ""


_REPORT = TypeAdapter(_Report)


class PendingSave:
    """Writes `files`, this rank's part of the checkpoint `final`, into `partial`, which exists; the leader completes it there.

    `manifest` lacks the files, which it gets when all are written, and `state` is the JSON beside it. `afterwards` runs in the
    thread once the checkpoint has its name. `needed`: bytes, for messages. `written` holds the rank's files when they are on the
    disk, `completed` the checkpoint's path, on ranks that lead; both raise OSError.
    """

    def __init__(
        self,
        partial: Path,
        final: Path,
        files: Files,
        manifest: Manifest,
        state: bytes,
        disks: Disks,
        afterwards: Callable[[], object],
        needed: int,
    ) -> None:
        self.partial, self.final, self.needed = partial, final, needed
        self.total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())  # bytes of this rank
        self._blocks: list[int] = []  # bytes of each that is written; appended to by several threads
        self.patience = PATIENCE
        self._files, self._manifest, self._state, self._disks, self._afterwards = files, manifest, state, disks, afterwards
        self._given_up = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving", initializer=_be_nice)
        self.written: Future[list[FileRecord]] = self._thread.submit(self._write)
        self.completed: Future[Path] | None = self._thread.submit(self._complete) if disks.leads else None
        self._thread.shutdown(wait=False)  # takes no more work, and ends with what it has

    @property
    def done(self) -> int:
        """Bytes of this rank that are written."""
        return min(sum(self._blocks), self.total)

    @property
    def ended(self) -> bool:
        """Whether this process has nothing more to do for it."""
        return (self.completed or self.written).done()

    @property
    def failed(self) -> bool:
        """Whether this process knows that it has failed."""
        return any(each.done() and each.exception() for each in (self.written, self.completed) if each is not None)

    def give_up(self) -> None:
        """Let the leader wait for nobody; return when no thread of this process writes any more."""
        self._given_up.set()
        self.join()

    def join(self) -> None:
        """Returns once no thread of this process writes any more."""
        for each in filter(None, (self.written, self.completed)):
            each.exception()

    def _write(self) -> list[FileRecord]:
        """Write this rank's files, several at a time, and say so to the leader."""
        try:
            with ThreadPoolExecutor(THREADS) as threads:  # whose threads are as nice as this one
                told = self._blocks.append
                jobs = [threads.submit(write_tensors, self.partial / name, part, told) for name, part in self._files.items()]
                records = [job.result() for job in jobs]
            self._report(_Report(records))
            return records
        except OSError as error:
            for file in self._files:  # of no use any more, and the word of it may find no room otherwise
                (self.partial / file).unlink(missing_ok=True)
            with suppress(OSError):  # without it the leader learns it when the ranks next meet
                self._report(_Report([], error.errno or errno.EIO, error.strerror or str(error)))
            raise
        finally:
            self._files = {}  # which may refer to the live tensors

    def _report(self, report: _Report) -> None:
        """Tell the leader. As soon as the report has its name, the leader may give the folder another, so that comes last."""
        if self._disks.leads:
            return
        path = _report_path(self.partial, self._disks.rank)
        unnamed = path.with_name(f"{path.name}{PARTIAL}")
        write_file(unnamed, json.dumps(asdict(report)).encode())
        fsync(self.partial)
        os.replace(unnamed, path)

    def _complete(self) -> Path:
        """The leader's: wait for the other ranks of this disk, write state and manifest, and name the folder."""
        records = self.written.result()
        others = [rank for rank in self._disks.members if rank != self._disks.rank]
        state = FileRecord(STATE, len(self._state), {"sha256": hashlib.sha256(self._state).hexdigest()})
        records = [*records, *self._reports(others), state]
        write_file(self.partial / STATE, self._state)
        if wrong := wrong_sizes(self.partial, records):
            raise OSError(errno.EIO, f"{wrong[0]}: {name_ranks([self._disks.rank])} does not find what another rank has written")
        for rank in others:
            _report_path(self.partial, rank).unlink()
        write_file(self.partial / manifest_name(self._disks.rank), replace(self._manifest, files=records).to_json())
        give_name(self.partial, self.final)
        self._afterwards()
        return self.final

    def _reports(self, others: list[int]) -> list[FileRecord]:
        """The files of the other ranks, once all of them are on the disk."""
        missing, files, began = list(others), [], time.monotonic()
        while missing:
            there = set(os.listdir(self.partial))  # asks a network disk's server, which a look for one name may not
            for rank in [rank for rank in missing if _report_path(self.partial, rank).name in there]:
                report = _read_report(_report_path(self.partial, rank))
                if report.errno:
                    raise OSError(report.errno, report.strerror)
                files += report.files
                missing.remove(rank)
            late = missing and time.monotonic() - began > self.patience
            if late or (missing and self._given_up.is_set()):
                waited = f" after {time.monotonic() - began:.0f} s" if late else ""
                raise OSError(errno.ETIMEDOUT, f"the part of {name_ranks(missing)} has not come{waited}")
            if missing:
                self._given_up.wait(min(0.5, 0.002 + (time.monotonic() - began) / 20))
        for file in files:
            os.close(os.open(self.partial / file.name, os.O_RDONLY))  # a network disk then knows its size as it is now
        return files


def _be_nice() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _report_path(partial: Path, rank: int) -> Path:
    return partial / f".written-{rank:05d}.json"


def _read_report(path: Path) -> _Report:
    try:
        return _REPORT.validate_json(read_regular(path))
    except ValidationError:
        raise OSError(errno.EIO, f"{path.name} is not what a rank writes") from None
