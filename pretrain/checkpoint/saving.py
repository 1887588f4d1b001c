"""One checkpoint on its way to the disk while training goes on: copied into host memory, then written by a thread.

The thread takes part in no exchange of the training's process group: those belong to the thread that trains, in their order.
Each rank's thread writes its files, flushes them, and leaves a report beside them with their names, sizes and hashes. The first
rank's thread waits for all reports, writes the state and, last, the manifest, and gives the folder its name.

    .partial-step-00000200/
      model-00001-of-00002-part-000.safetensors
      .written-00001.json              of rank 1
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from foundation.files import FileRecord, write_file
from foundation.memory import free_memory
from pretrain.checkpoint.folders import MANIFEST, STATE, Manifest, give_name, partial_folder
from pretrain.checkpoint.shards import write_tensors

THREADS = 4  # hashing and writing release the interpreter lock; the cores are the training's
NICENESS = 5  # of the writing threads: what trains goes first
POLL = 0.05  # seconds between two looks for the other ranks' reports
ALIGNMENT = 64  # bytes; a view in any dtype needs its width at most
SHARE = 0.8  # of the memory that is free: the rest is for who else works on the machine
Files = Mapping[str, Mapping[str, Tensor]]  # by file: the tensors in it by name, this process's part of each
_log = logging.getLogger(__name__)


# ── The copy ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Staging:
    """A copy of one checkpoint's tensors at a time, in memory that is kept and used again: to get it takes eight times as long as
    to copy into it. For tensors of a GPU it is pinned."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._thread = ThreadPoolExecutor(1)

    def reserve(self, files: Files) -> Future[bool]:
        """Begin to get the memory for a copy of `files`, in a thread. The result is whether the machine has room for it."""
        needed = sum(_rounded(tensor.nbytes) for group in files.values() for tensor in group.values())
        return self._thread.submit(self._reserve, needed, _gpu_of(files))

    def _reserve(self, needed: int, device: torch.device | None) -> bool:
        if self._memory.numel() >= needed:
            return True
        self._memory = torch.empty(0, dtype=torch.uint8)  # gives back what there was
        if needed * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > SHARE * free_memory():
            return False
        # Threads start on device 0: pinning there would open a context on another rank's device.
        with torch.cuda.device(device) if device else nullcontext():
            self._memory = torch.zeros(needed, dtype=torch.uint8)  # written to, so that the pages are there
            if device:
                _pin(self._memory)
        return True

    def copy(self, files: Files) -> dict[str, dict[str, Tensor]] | None:
        """The tensors as they are now, on the host; valid until the next copy. None where the host has no room for them."""
        if not self.reserve(files).result():
            return None
        copies: dict[str, dict[str, Tensor]] = {file: {} for file in files}
        start = 0
        for file, group in files.items():
            for name, tensor in group.items():
                place = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                copies[file][name] = place.copy_(tensor.detach(), non_blocking=True)
                start += _rounded(tensor.nbytes)
        if device := _gpu_of(files):
            torch.cuda.current_stream(device).synchronize()
        return copies


def _gpu_of(files: Files) -> torch.device | None:
    """The device that these tensors lie on; None for a CPU's."""
    return next((tensor.device for group in files.values() for tensor in group.values() if tensor.is_cuda), None)


def _rounded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _pin(buffer: Tensor) -> None:
    """Registered and not taken from torch's allocator, which rounds 20 GiB up to 32."""
    cudart, address = torch.cuda.cudart(), buffer.data_ptr()
    if int(cudart.cudaHostRegister(address, buffer.numel(), 1)) != 0:
        _log.warning("the copy of a checkpoint cannot be pinned in host memory; a save stops training for longer")
    else:
        weakref.finalize(buffer, cudart.cudaHostUnregister, address).atexit = False  # CUDA may be gone by then


# ── The writing ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


class PendingSave:
    """Writes `files`, this rank's part of the checkpoint `final`; the first rank completes it.

    `manifest` lacks the files, which it gets when all are written, and `state` is the JSON beside it. `afterwards` runs in the
    thread once the checkpoint has its name. `written` holds the rank's files when they are on the disk; `completed` is done when
    the checkpoint has its name, on the other ranks at once. Both raise whatever went wrong.
    """

    def __init__(
        self, final: Path, files: Files, manifest: Manifest, state: bytes, rank: int, afterwards: Callable[[], object]
    ) -> None:
        self.final, self.partial, self.rank = final, partial_folder(final), rank
        self._given_up = threading.Event()
        thread = ThreadPoolExecutor(1, thread_name_prefix="saving", initializer=_be_nice)
        self.written: Future[list[FileRecord]] = thread.submit(self._write, files)
        complete = (self._complete, manifest, state, afterwards) if rank == 0 else (self.written.result,)
        self.completed: Future[object] = thread.submit(*complete)
        thread.shutdown(wait=False)  # takes no more work, and ends with what it has

    @property
    def failed(self) -> bool:
        """Whether this process knows that it has failed."""
        return any(each.done() and each.exception() for each in (self.written, self.completed))

    def give_up(self, patience: float = 0.0) -> None:
        """Let the first rank wait for the others for `patience` seconds at most; return when no thread writes any more."""
        wait([self.written])
        wait([self.completed], patience)
        self._given_up.set()
        wait([self.completed])

    def _write(self, files: Files) -> list[FileRecord]:
        """Write this rank's files, several at a time, and tell the first rank."""
        self.partial.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(THREADS, thread_name_prefix="saving") as threads:  # as nice as this thread
            records = list(threads.map(lambda name: write_tensors(self.partial / name, files[name]), files))
        if self.rank:
            unnamed = self.partial / f".unnamed{_report_of(self.rank)}"
            write_file(unnamed, json.dumps([asdict(record) for record in records]).encode())
            os.replace(unnamed, self.partial / _report_of(self.rank))  # last: now the first rank may give the folder its name
        return records

    def _complete(self, manifest: Manifest, state: bytes, afterwards: Callable[[], object]) -> None:
        """The first rank's: wait for the others, write state and manifest, and name the folder."""
        files = [*self.written.result(), *self._reports(manifest.world_size)]
        files.append(FileRecord(STATE, len(state), {"sha256": hashlib.sha256(state).hexdigest()}))
        write_file(self.partial / STATE, state)
        write_file(self.partial / MANIFEST, replace(manifest, files=files).to_json())
        give_name(self.partial, self.final)
        afterwards()

    def _reports(self, world_size: int) -> list[FileRecord]:
        """The files of the other ranks, once all of them are on the disk."""
        files: list[FileRecord] = []
        missing = {_report_of(rank) for rank in range(1, world_size)}
        while missing:
            # Lists the folder: that asks a network disk's server, which a look for one name may not.
            for report in sorted(missing.intersection(os.listdir(self.partial))):
                files += [FileRecord(**record) for record in json.loads((self.partial / report).read_bytes())]
                (self.partial / report).unlink()
                missing.remove(report)
            if missing and self._given_up.wait(POLL):
                raise OSError(errno.ETIMEDOUT, f"{min(missing)}: that rank's part has not come")
        return files


def _be_nice() -> None:
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _report_of(rank: int) -> str:
    return f".written-{rank:05d}.json"
