"""The checkpoints of a run: complete or absent, never half, loaded by any number of processes, written while training goes on.
format.py shows how one lies on the disk.

Disks flip bits and people copy folders halfway, so every byte is hashed again before it is trusted.

What is saved is copied into host memory, and written by a thread. The thread takes part in no exchange of the training's process
group: those belong to the thread that trains, in their order. Each rank's thread writes its files, flushes them, and leaves a
report beside them with their names, sizes and hashes. The first rank's thread waits for all reports, writes the state and, last,
the manifest, and gives the folder its name.

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
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundation.errors import InputError
from foundation.files import PARTIAL, FileRecord, find_damage, free_bytes, write_file
from foundation.memory import free_memory
from foundation.reading import load_object, one_line
from foundation.units import GIB, memory
from pretrain.checkpoint import format as on_disk
from pretrain.checkpoint.format import Manifest, TensorEntry, read_manifest, step_folder, step_folders, step_of, write_tensors
from pretrain.model.distributed import from_all_ranks, in_a_group
from pretrain.model.gradients import local_part

THREADS = 4  # hashing and writing release the interpreter lock; the cores are the training's
NICENESS = 5  # of the writing threads: what trains goes first
POLL = 0.05  # seconds between two looks for the other ranks' reports
ALIGNMENT = 64  # bytes; a view in any dtype needs its width at most
SHARE = 0.8  # of the memory that is free: the rest is for who else works on the machine
_AFTER_AN_ERROR = 20.0  # seconds: how long a process that ends by an error waits for the other ranks' part of a save
_SEEN_WITHIN = 5.0  # seconds: a network disk may show a new file late
_log = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]
Files = Mapping[str, Tensors]  # by file: the tensors in it by name, this process's part of each


class Checkpoints:
    """The checkpoints of one run.

    Where torch.distributed is initialised, every method is collective but those that say otherwise: all ranks call it, in the
    same order. A save that was begun is written by threads, one save at a time; every other method waits for it first.
    """

    def __init__(self, folder: Path, keep: int, *, before: int | None = None) -> None:
        """`keep`: the newest so many are kept, and the newest up to step `before`, where the rate begins to fall."""
        self.folder, self.keep, self.before = folder, keep, before
        self.rank = torch.distributed.get_rank() if in_a_group() else 0
        self.world_size = torch.distributed.get_world_size() if in_a_group() else 1
        self.damaged: set[Path] = set()  # seen by newest()
        self._complete: Path | None = None  # what the tensors in memory were last saved to, wholly, or loaded from
        self.latest: Path | None = None  # the same, or what is being written
        self._intact: Path | None = None  # whose bytes were compared with their hashes: load() need not hash it again
        self._staging = Staging()
        self._pending: PendingSave | None = None
        self._news: list[str] = []

    # ── Saving ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, model: Tensors, optimizer: Tensors) -> None:
        """Begin to get the memory that the first save behind the training would otherwise wait for."""
        self._staging.reserve(self._lay_out(model, optimizer)[0])

    def save(
        self,
        step: int,
        model: Tensors,
        optimizer: Tensors,
        state: Mapping[str, Any],
        *,
        spared: int | None = None,
        behind: bool = False,
    ) -> Path:
        """Write checkpoint `step`, then prune; returns its path. One just saved or loaded is not written again.

        `model` holds parameters and persistent buffers by Hugging Face name (a tied tensor once), `optimizer` whatever tensors
        the optimizer keeps, under names that a later run gives them again; both on any device, plain or DTensor. `state` is JSON.
        `spared`: the step of a checkpoint that is not pruned, however old it is. `behind`: return as soon as the tensors are
        copied, which may change while the copies are written; where the host's memory has no room for them, once this process's
        part is written.

        Raises InputError where it cannot be written (disk full, read-only), of one `behind` at the next call; what was saved
        before stays.
        """
        began, final = time.perf_counter(), step_folder(self.folder, step)
        self.wait()  # for a slower save before this one, which counts as a part of the time that training stops
        if final != self._complete:
            if self.rank == 0:  # what a writer left that died; nobody writes before the exchange below
                shutil.rmtree(on_disk.partial_folder(final), ignore_errors=True)
            files, index = self._lay_out(model, optimizer)
            copies = self._staging.copy(files) if behind else None
            stopped = f"; training stopped for {time.perf_counter() - began:.2g} s" if copies else ""

            def afterwards() -> None:
                self._prune(final, spared)
                self._news.append(f"saved {final} in {time.perf_counter() - began:.3g} s{stopped}")

            manifest = Manifest(step, self.world_size, [], **index)
            state_json = json.dumps(dict(state), indent=1, allow_nan=False).encode()
            self._pending = PendingSave(final, copies or files, manifest, state_json, self.rank, afterwards)
            self.latest = final
            if behind and copies is None:
                _log.warning("rank %d: host memory has no room for copies, so training stops while it writes", self.rank)
                self._pending.written.exception()
        elif self.rank == 0:
            self._prune(final, spared)  # it may be another one that is spared now
        if not behind:
            self.wait()
        return final

    def _lay_out(self, model: Tensors, optimizer: Tensors) -> tuple[Files, dict[str, dict[str, TensorEntry]]]:
        """What this rank writes, by file, and where all ranks write all tensors."""
        groups = {"model": model, "optimizer": optimizer}
        blocks = {kind: {name: on_disk.block_of(tensor) for name, tensor in group.items()} for kind, group in groups.items()}
        offers = from_all_ranks(blocks)
        index = {kind: on_disk.lay_out(kind, [offer[kind] for offer in offers]) for kind in groups}
        files: dict[str, dict[str, Tensor]] = {}
        for kind, group in groups.items():
            mine = on_disk.rank_stem(kind, self.rank, self.world_size)
            for name, entry in index[kind].items():
                for file in {piece.file for piece in entry.pieces if piece.file.startswith(mine)}:
                    files.setdefault(file, {})[name] = local_part(group[name])
        return files, index

    @property
    def failed(self) -> bool:
        """Whether this process knows that the save under way has failed, which `wait` then says; not collective."""
        return self._pending is not None and self._pending.failed

    def news(self) -> list[str]:
        """What was saved since the last call, one line each; not collective, and only the first rank knows."""
        lines, self._news = self._news, []
        return lines

    def wait(self) -> None:
        """Return when the save under way, if there is one, is complete. InputError on all ranks where it has failed on any."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if reasons := self._failures(pending.written) or self._failures(pending.completed):
            pending.give_up()
            self.latest = self._complete
            if self.rank == 0:
                shutil.rmtree(pending.partial, ignore_errors=True)
            before = f"{self._complete} is untouched" if self._complete else "no earlier checkpoint was touched"
            raise InputError(
                f"{self.folder}: the checkpoint of step {step_of(pending.final)} could not be saved: {reasons[0]}; "
                f"{memory(free_bytes(self.folder) / GIB)} are free there; {before}. Free space, or set a `run_dir` on another "
                "disk, then start the same command again to resume"
            )
        self._complete = pending.final
        self.damaged.discard(pending.final)  # it is a new one now

    def _failures(self, future: Future[Any]) -> list[str]:
        """The reason of each rank whose `future` has failed, whatever with. Waits for all of them."""
        error = future.exception()
        return [reason for reason in from_all_ranks(error and f"{one_line(error, named=True)} (rank {self.rank})") if reason]

    def close(self) -> None:
        """Return when no thread of this process writes any more. For a process that may end by an error: not collective."""
        if self._pending is not None:
            self._pending.give_up(patience=_AFTER_AN_ERROR)

    # ── Which are kept, and which is the newest ───────────────────────────────────────────────────────────────────────────────

    def _prune(self, newest: Path, spared: int | None) -> None:
        """Remove all but the `keep` newest checkpoints, that of step `spared` and the newest up to step `before`, when `newest`
        is what was saved last; the first rank's. Damaged checkpoints are neither removed nor counted."""
        steps = [path for path in step_folders(self.folder) if step_of(path) <= step_of(newest) and path not in self.damaged]
        early = next((path for path in steps if self.before is not None and step_of(path) <= self.before), None)
        on_disk.remove(self.folder, [path for path in steps[self.keep :] if path != early and step_of(path) != spared])

    def abandon_newer(self, step: int) -> None:
        """Set every checkpoint after `step` aside, for a run that goes on from `step`: otherwise the next automatic resume would
        continue the abandoned training. They are deleted when the run has saved its next checkpoint."""
        self.wait()
        if self.rank == 0:
            for path in [path for path in step_folders(self.folder) if step_of(path) > step]:
                _log.warning("%s was renamed to %s: the run goes on from step %d", path, on_disk.set_aside(path).name, step)
        from_all_ranks(None)  # nobody looks before all have their names

    def newest(self, *, before: int | None = None) -> Path | None:
        """The newest intact checkpoint, of a step earlier than `before` if that is given, every byte verified; None if there is
        none. A damaged one is reported through `logging`, kept in `damaged` and left where it is; then the one before it is
        tried."""
        self.wait()
        steps = from_all_ranks([step_of(path) for path in step_folders(self.folder)] if self.rank == 0 else [])[0]
        for step in [step for step in steps if before is None or step < before]:
            path = step_folder(self.folder, step)
            problems = self._verify(path)
            if not problems:
                return path
            self.damaged.add(path)
            if self.rank == 0:
                _log.warning("%s is DAMAGED and is not used; trying the one before it. %s", path, "; ".join(problems))
        return None

    def owns(self, path: Path) -> bool:
        """Whether the checkpoint at `path` lies in this run's folder; not collective."""
        return path.resolve().parent == self.folder.resolve()

    # ── Loading ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def read_state(self, path: Path) -> dict[str, Any]:
        """The `state` of a checkpoint, verified but not loaded, to see what it belongs to. InputError if missing or damaged."""
        self._require_intact(path)
        return load_object(path / on_disk.STATE, "resume from another checkpoint")

    def load(self, path: Path, model: Tensors, optimizer: Tensors, *, left_out: Collection[str] = ()) -> None:
        """Copy the checkpoint at `path` into the given tensors, in place and whatever their sharding. `left_out`: names of the
        optimizer's that it may hold beside them.

        Raises InputError, before anything is copied, where a file is damaged and where names, shapes or integer dtypes differ.

        A rank reads the bytes of its own part, by mapping the files. Before that, every byte is hashed once, by one of the ranks.
        """
        self._require_intact(path)
        manifest = read_manifest(path)
        of_optimizer = {name: entry for name, entry in manifest.optimizer.items() if name not in left_out}
        if problems := [*on_disk.mismatches(manifest.model, model), *on_disk.mismatches(of_optimizer, optimizer)]:
            remedy = "Resume with the recipe it was made by, or set another `run_dir`"
            raise InputError(f"{path}: does not fit this run: {'; '.join(problems[:5])}. {remedy}")
        on_disk.load_tensors(path, manifest.model, model)
        on_disk.load_tensors(path, of_optimizer, optimizer)
        self._complete = self.latest = path

    def _require_intact(self, path: Path) -> None:
        """InputError unless every byte of the checkpoint at `path` is as it was written; hashes it once."""
        self.wait()
        if path != self._intact and (problems := self._verify(path)):
            raise InputError(f"{path}: cannot be used: {'; '.join(problems)}")

    def _verify(self, path: Path) -> list[str]:
        """What is wrong with the checkpoint at `path`; each rank hashes its share of the files."""
        try:
            files = sorted(read_manifest(path).files, key=lambda file: file.name)
            problems = find_damage(path, files[self.rank :: self.world_size])
        except InputError as error:
            problems = [str(error)]
        problems = list(dict.fromkeys(problem for rank in from_all_ranks(problems) for problem in rank))
        self._intact = None if problems else path
        return problems


# ── One save on its way ───────────────────────────────────────────────────────────────────────────────────────────────────────


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


class PendingSave:
    """Writes `files`, this rank's part of the checkpoint `final`; the first rank completes it.

    `manifest` lacks the files, which it gets when all are written, and `state` is the JSON beside it. `afterwards` runs in the
    thread once the checkpoint has its name. `written` holds the rank's files when they are on the disk; `completed` is done when
    the checkpoint has its name, on the other ranks at once. Both raise whatever went wrong.
    """

    def __init__(
        self, final: Path, files: Files, manifest: Manifest, state: bytes, rank: int, afterwards: Callable[[], object]
    ) -> None:
        self.final, self.partial, self.rank = final, on_disk.partial_folder(final), rank
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
        files.append(FileRecord(on_disk.STATE, len(state), {"sha256": hashlib.sha256(state).hexdigest()}))
        write_file(self.partial / on_disk.STATE, state)
        write_file(self.partial / on_disk.MANIFEST, replace(manifest, files=files).to_json())
        on_disk.give_name(self.partial, self.final)
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


# ── The disk ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bytes_needed(model: Tensors, optimizer: Tensors) -> int:
    """Bytes that one checkpoint of these tensors takes on disk, over all ranks; headers and manifest are rounded up to 1 MiB.

    A DTensor counts whole, a replicated one once.
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.values(), *optimizer.values())) + 2**20


def check_space(folder: Path, needed: int) -> None:
    """InputError if the disk of `folder` (which need not exist yet) has less than `needed` bytes free: a start-up check."""
    free = free_bytes(folder)
    if free < needed:
        raise InputError(
            f"{folder}: checkpoints need {memory(needed / GIB)} there and {memory(free / GIB)} are free; "
            "free space, lower `checkpoint.keep`, or point `run_dir` to a larger disk"
        )


def require_shared(folder: Path) -> None:
    """InputError unless all processes see `folder`, which the first has made, as one folder. Collective."""
    if not in_a_group():
        return
    token, end = folder / f".proof.0{PARTIAL}", time.monotonic() + _SEEN_WITHIN
    if torch.distributed.get_rank() == 0:
        token.touch()
    from_all_ranks(None)  # it is there
    while not (seen := folder.is_dir() and token.name in os.listdir(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    blind = [host for host in from_all_ranks(None if seen else socket.gethostname()) if host]
    if torch.distributed.get_rank() == 0:
        token.unlink()
    if blind:
        raise InputError(f"{folder}: {blind[0]} does not see the folder of the first machine; put it on a disk that all share")
