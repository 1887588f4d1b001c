"""Save and load the checkpoints of a run, in the background and over any number of processes.

A checkpoint is complete or absent, never partial. format.py describes its files. Disks flip bits
and copies of folders may be incomplete, so every byte is hashed again before it is used.

A save copies the tensors to host memory, and a thread writes the copies while training continues.
The thread must not use the process group: its collectives belong to the training thread and must
come in the same order on all ranks. The thread of each rank writes and flushes its own files.
Between two steps, ranks exchange the records of their files (`Checkpoints.settle`). When all ranks
have written, the first rank's thread writes the state and then the manifest, and renames the
folder.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import socket
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from foundation.errors import InputError
from foundation.files import PARTIAL, FileRecord, find_damage, free_bytes
from foundation.reading import load_object, one_line
from foundation.units import GIB, memory
from pretrain.checkpoint import format as on_disk
from pretrain.checkpoint.format import (
    Manifest,
    TensorEntry,
    read_manifest,
    step_folder,
    step_folders,
    step_of,
    write_tensors,
)
from pretrain.model.distributed import from_all_ranks
from pretrain.model.gradients import local_part

# Threads that write and hash. They release the interpreter lock, but training needs the cores too.
THREADS = 4
# Bytes. A copy starts at a multiple of this number, so that it can be viewed in any dtype.
ALIGNMENT = 64
GROUPS = Path("/sys/fs/cgroup")  # Linux control groups, version 2
# Values whose bits are summed at once, because the sum needs a copy in 64 bits.
PIECE = 2**24
# Share of the free memory that copies may use. The rest is for other processes on the machine.
SHARE = 0.8
_SEEN_WITHIN = 5.0  # seconds; a network disk may show a new file late
_log = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]
# For each file, the local parts of its tensors by name.
Files = Mapping[str, Tensors]


class Checkpoints:
    """The checkpoints of one run.

    If torch.distributed is initialized, all methods are collective unless their docstring says
    otherwise: all ranks call them in the same order. Threads write one save at a time, and every
    other method waits for it first.

    Args:
        folder: Folder of the checkpoints, on a disk that all processes share.
        keep: Number of newest checkpoints to keep.
        before: Step at which the decay of the learning rate begins. The newest checkpoint up to
            this step is kept too.

    Attributes:
        damaged: Damaged checkpoints that `newest` has seen.
    """

    def __init__(self, folder: Path, keep: int, *, before: int | None = None) -> None:
        self.folder = folder
        self.keep = keep
        self.before = before
        is_distributed = torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if is_distributed else 0
        self.world_size = torch.distributed.get_world_size() if is_distributed else 1
        self.damaged: set[Path] = set()
        # The checkpoint last saved or loaded, and complete.
        self._complete: Path | None = None
        # The checkpoint that was verified last. `load` need not hash it again.
        self._intact: Path | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._staging = Staging()
        self._pending: PendingSave | None = None

    @property
    def latest(self) -> Path | None:
        """Return the checkpoint last saved or loaded, which may still be in writing, or None."""
        return self._pending.final if self._pending else self._complete

    # ── Saving ──

    def save(
        self,
        step: int,
        model: Tensors,
        optimizer: Tensors,
        state: Mapping[str, Any],
        *,
        spared: int | None = None,
        behind: bool = False,
        say: Callable[[str], object] = print,
    ) -> Path:
        """Save checkpoint `step`, delete old checkpoints, and return the path of the new one.

        A checkpoint that was just saved or loaded is not written again.

        Args:
            step: Number of steps done.
            model: Parameters and persistent buffers by their Hugging Face names, a tied tensor
                once. Plain tensors or DTensors on any device.
            optimizer: Tensors of the optimizer, by names that a later run uses again.
            state: JSON object.
            spared: Step of a checkpoint that is not deleted, however old it is.
            behind: Return as soon as the tensors are copied, while a thread writes the copies. If
                the host has no memory for copies, return when this process's part is written.
            say: Called on the first rank with a message when the checkpoint is complete.

        Raises:
            InputError: The checkpoint cannot be written, because the disk is full or read-only.
                With `behind`, the next method call raises it. Earlier checkpoints are unchanged.
        """
        start = time.perf_counter()
        final = step_folder(self.folder, step)
        # Waiting for an earlier save counts as time in which training is stopped.
        self.wait()
        if final == self._complete:
            if self.rank == 0:
                self._prune(final, spared)  # another checkpoint may be spared now
            return final
        partial = on_disk.partial_folder(final)
        if self.rank == 0:
            # Remove what a killed process left. No rank writes before the exchange in `_lay_out`.
            shutil.rmtree(partial, ignore_errors=True)
        files, index = self._lay_out(model, optimizer)
        copies = self._staging.copy(files) if behind else None
        stopped = f"; training stopped for {time.perf_counter() - start:.2g} s" if copies else ""
        state_json = json.dumps(dict(state), indent=1, allow_nan=False).encode()

        def complete(records: list[FileRecord]) -> None:
            if self.rank == 0:
                manifest = Manifest(step, self.world_size, records, **index)
                on_disk.complete(final, manifest, state_json)
                self._prune(final, spared)
                say(f"saved {final} in {time.perf_counter() - start:.3g} s{stopped}")

        written = self._thread.submit(write_part, partial, copies or files)
        self._pending = PendingSave(final, written, complete)
        if self.world_size == 1:
            self._pending.completed = self._thread.submit(lambda: complete(written.result()))
        if behind and copies is None:
            _log.warning(
                "rank %d: host memory has no room for copies, so training stops while it writes",
                self.rank,
            )
            written.exception()  # waits until this process's part is written
        if not behind:
            self.wait()
        return final

    def _lay_out(
        self, model: Tensors, optimizer: Tensors
    ) -> tuple[Files, dict[str, dict[str, TensorEntry]]]:
        """Return the files that this rank writes, and the index of all tensors in all files."""
        groups = {"model": model, "optimizer": optimizer}
        offers = from_all_ranks(
            {
                kind: {name: on_disk.block_of(tensor) for name, tensor in group.items()}
                for kind, group in groups.items()
            }
        )
        index = {
            kind: on_disk.lay_out(kind, [offer[kind] for offer in offers], checksums(group))
            for kind, group in groups.items()
        }
        files: dict[str, dict[str, Tensor]] = {}
        for kind, group in groups.items():
            stem = on_disk.rank_stem(kind, self.rank, self.world_size)
            for name, entry in index[kind].items():
                for file in {piece.file for piece in entry.pieces if piece.file.startswith(stem)}:
                    files.setdefault(file, {})[name] = local_part(group[name])
        return files, index

    @property
    def failed(self) -> bool:
        """True if this process's part of the running save has failed. Not collective.

        `wait` raises the failure.
        """
        pending = self._pending
        futures = (pending.written, pending.completed) if pending else ()
        return any(future and future.done() and future.exception() for future in futures)

    def settle(self) -> None:
        """Complete the running save if all ranks have written their part.

        Call it between two steps. It does not wait for the disk.
        """
        pending = self._pending
        if pending is None or pending.completed is not None:
            return
        is_written = pending.written.done() and not pending.written.exception()
        parts = from_all_ranks(pending.written.result() if is_written else None)
        written_parts = [part for part in parts if part is not None]
        if len(written_parts) == self.world_size:
            records = [record for part in written_parts for record in part]
            pending.completed = self._thread.submit(pending.complete, records)

    def wait(self) -> None:
        """Wait until the running save is complete.

        Raises InputError on all ranks if it has failed on any rank.
        """
        pending = self._pending
        if pending is None:
            return
        reasons = self._failures(pending.written)
        self.settle()
        self._pending = None
        reasons = reasons or self._failures(pending.completed)
        if not reasons:
            self._complete = pending.final
            self.damaged.discard(pending.final)  # it has been written again
            return
        if self.rank == 0:
            shutil.rmtree(on_disk.partial_folder(pending.final), ignore_errors=True)
        earlier = f"{self._complete} is" if self._complete else "earlier checkpoints are"
        raise InputError(
            f"{self.folder}: step {step_of(pending.final)} could not be saved: {reasons[0]}; "
            f"{earlier} untouched. {memory(free_bytes(self.folder) / GIB)} are free; make room, or "
            "set a `run_dir` on another disk, and start again"
        )

    def _failures(self, future: Future[Any] | None) -> list[str]:
        """Wait for `future` on all ranks and return one line for each rank where it failed."""
        reason = None
        if error := future and future.exception():
            line = one_line(error, named=type(error) is not InputError)
            reason = f"{line} (rank {self.rank})"
        return [failure for failure in from_all_ranks(reason) if failure]

    def close(self) -> None:
        """Wait until no thread of this process writes. Not collective.

        For a process that may end with an error.
        """
        self._thread.shutdown()

    # ── Pruning, and the newest checkpoint ──

    def _prune(self, newest: Path, spared: int | None) -> None:
        """Delete old checkpoints after `newest` was saved. Runs on the first rank.

        The `keep` newest are kept, that of step `spared`, and the newest up to step `before`.
        Damaged checkpoints are neither deleted nor counted.
        """
        candidates = [
            path
            for path in step_folders(self.folder)
            if step_of(path) <= step_of(newest) and path not in self.damaged
        ]
        kept_steps = {spared}
        if self.before is not None:
            early = [step_of(path) for path in candidates if step_of(path) <= self.before]
            kept_steps.update(early[:1])
        old = [path for path in candidates[self.keep :] if step_of(path) not in kept_steps]
        on_disk.remove(self.folder, old)

    def abandon_newer(self, step: int) -> None:
        """Rename all checkpoints after `step`, for a run that goes back to `step`.

        Otherwise the next automatic resume would continue the abandoned training. The renamed
        checkpoints are deleted when the run has saved its next checkpoint.
        """
        self.wait()
        if self.rank == 0:
            for path in step_folders(self.folder):
                if step_of(path) > step:
                    _log.warning(
                        "%s was renamed to %s: the run goes on from step %d",
                        path,
                        on_disk.set_aside(path).name,
                        step,
                    )
        from_all_ranks(None)  # no rank looks for checkpoints before all are renamed

    def newest(self, *, before: int | None = None) -> Path | None:
        """Return the newest intact checkpoint, or None if there is none.

        Every byte is verified. A damaged checkpoint is logged, added to `damaged` and not changed;
        then the next older one is tried. With `before`, only checkpoints of earlier steps are
        considered.
        """
        self.wait()
        # A network disk may show other checkpoints to the other ranks.
        steps, *_ = from_all_ranks([step_of(path) for path in step_folders(self.folder)])
        for step in steps:
            if before is not None and step >= before:
                continue
            path = step_folder(self.folder, step)
            problems = self._verify(path)
            if not problems:
                return path
            self.damaged.add(path)
            if self.rank == 0:
                _log.warning(
                    "%s is DAMAGED and is not used; trying the one before it. %s",
                    path,
                    "; ".join(problems),
                )
        return None

    def owns(self, path: Path) -> bool:
        """Return whether the checkpoint at `path` is in this run's folder. Not collective."""
        return path.resolve().parent == self.folder.resolve()

    # ── Loading ──

    def read_state(self, path: Path) -> dict[str, Any]:
        """Verify a checkpoint and return its `state`, without loading tensors.

        Raises InputError if the checkpoint is missing or damaged.
        """
        self._require_intact(path)
        return load_object(path / on_disk.STATE, "resume from another checkpoint")

    def load(
        self, path: Path, model: Tensors, optimizer: Tensors, *, left_out: Collection[str] = ()
    ) -> None:
        """Copy the checkpoint at `path` into the given tensors, whatever their sharding.

        One of the ranks hashes each file. Then each rank maps the files and reads only the bytes of
        its own part.

        Args:
            path: Folder of the checkpoint.
            model: Tensors to fill, by name.
            optimizer: Tensors to fill, by name.
            left_out: Names of the optimizer's tensors in the checkpoint that are not loaded.

        Raises:
            InputError: A file is damaged, or names, shapes or integer dtypes differ. Nothing has
                been copied then.
        """
        self._require_intact(path)
        manifest = read_manifest(path)
        optimizer_index = {
            name: entry for name, entry in manifest.optimizer.items() if name not in left_out
        }
        problems = [
            *on_disk.mismatches(manifest.model, model),
            *on_disk.mismatches(optimizer_index, optimizer),
        ]
        if problems:
            raise InputError(
                f"{path}: does not fit this run: {'; '.join(problems[:5])}. Use the recipe that "
                "made it, or another checkpoint; to start from the beginning, set another `run_dir`"
            )
        on_disk.load_tensors(path, manifest.model, model)
        on_disk.load_tensors(path, optimizer_index, optimizer)
        self._complete = path

    def _require_intact(self, path: Path) -> None:
        """Raise InputError if a byte of the checkpoint at `path` has changed. Hash it only once."""
        self.wait()
        if path != self._intact and (problems := self._verify(path)):
            raise InputError(f"{path}: cannot be used: {'; '.join(problems)}")

    def _verify(self, path: Path) -> list[str]:
        """Return the problems of the checkpoint at `path`. Each rank hashes some of the files."""
        try:
            files = sorted(read_manifest(path).files, key=lambda file: file.name)
            problems = find_damage(path, files[self.rank :: self.world_size])
        except InputError as error:
            problems = [str(error)]
        all_problems = [problem for rank in from_all_ranks(problems) for problem in rank]
        self._intact = None if all_problems else path
        return list(dict.fromkeys(all_problems))


# ── A running save ──


class Staging:
    """Host memory for a copy of the tensors of one checkpoint.

    The memory is allocated once, because allocating it takes eight times as long as copying into
    it. For tensors on a GPU it is pinned.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, files: Files) -> dict[str, dict[str, Tensor]] | None:
        """Copy the tensors to the host and wait for the device.

        The copies are valid until the next call. Return None if the host has no memory for them.
        """
        tensors = [tensor for group in files.values() for tensor in group.values()]
        needed = sum(_rounded(tensor.nbytes) for tensor in tensors)
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if self._memory.numel() < needed:
            local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            if needed * local_ranks > SHARE * free_memory():
                return None
            # `zeros` writes to the memory, so that its pages exist.
            self._memory = torch.zeros(needed, dtype=torch.uint8)
            if device:
                _pin(self._memory)
        copies: dict[str, dict[str, Tensor]] = {file: {} for file in files}
        start = 0
        for file, group in files.items():
            for name, tensor in group.items():
                slot = self._memory[start : start + tensor.nbytes].view(tensor.dtype)
                copies[file][name] = slot.view(tensor.shape).copy_(
                    tensor.detach(), non_blocking=True
                )
                start += _rounded(tensor.nbytes)
        if device:
            torch.cuda.current_stream(device).synchronize()
        return copies


def free_memory() -> int:
    """Return the bytes of memory that this process may still use.

    They are the free bytes of the machine or, if that is less, the bytes that the tightest control
    group of the process leaves. SLURM, Docker and Kubernetes limit jobs by control groups and kill
    a job that exceeds its limit.
    """
    free = psutil.virtual_memory().available
    with suppress(OSError):  # not Linux
        name = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
        group = GROUPS / name.lstrip("/")
        # The parents limit the group too. A container sees the outermost one as its own.
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # a group without a limit
                lines = (folder / "memory.stat").read_text().splitlines()
                statistics = dict(line.split() for line in lines)
                # Cached files, which the kernel drops before it kills a process.
                cached = int(statistics["active_file"]) + int(statistics["inactive_file"])
                used = int((folder / "memory.current").read_text()) - cached
                free = min(free, int((folder / "memory.max").read_text()) - used)
    return free


def _rounded(count: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def _pin(buffer: Tensor) -> None:
    """Pin `buffer` by registering it with CUDA.

    torch's allocator of pinned memory would round 20 GiB up to 32 GiB.
    """
    cudart = torch.cuda.cudart()
    address = buffer.data_ptr()
    if int(cudart.cudaHostRegister(address, buffer.numel(), 1)) != 0:
        _log.warning(
            "the copy of a checkpoint cannot be pinned in host memory; "
            "a save stops training for longer"
        )
        return
    finalizer = weakref.finalize(buffer, cudart.cudaHostUnregister, address)
    finalizer.atexit = False  # CUDA may be shut down by then


@dataclass
class PendingSave:
    """A save that is being written to the folder `final`."""

    final: Path
    # Records of this rank's files; done when they are on the disk.
    written: Future[list[FileRecord]]
    # Called with the records of all ranks, in the first rank's thread.
    complete: Callable[[list[FileRecord]], None]
    # Done when the checkpoint has its final name; on the other ranks, done at once.
    completed: Future[None] | None = None


def write_part(partial: Path, files: Files) -> list[FileRecord]:
    """Write this rank's files to the folder `partial`, several at a time, and return records."""
    partial.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="saving") as threads:
        return list(threads.map(lambda name: write_tensors(partial / name, files[name]), files))


# ── The live tensors ──


def checksums(tensors: Tensors) -> dict[str, int]:
    """Return the sum of each tensor's bit patterns, times their positions, modulo 2^64. Collective.

    The sum is the same for every number of shards of the first dimension. Replicas count once,
    unless their bits differ.
    """
    # The offset identifies a block of a tensor.
    ranks = from_all_ranks(
        {
            name: (on_disk.block_of(tensor).offset, sum_of_bits(tensor))
            for name, tensor in tensors.items()
        }
    )
    sums = {}
    for name in tensors:
        distinct_blocks = {blocks[name] for blocks in ranks}
        sums[name] = sum(bits for _, bits in distinct_blocks) % 2**64
    return sums


def sum_of_bits(tensor: Tensor) -> int:
    """Return the weighted sum of the bit patterns in this process's part of a tensor.

    A bit pattern, read as an integer, is multiplied by its position in the full tensor, counted
    from 1. So values that are in each other's place change the sum. Products and sums are modulo
    2^64. The host waits for the device.
    """
    bits = local_part(tensor).reshape(-1).view(getattr(torch, f"int{8 * tensor.element_size()}"))
    first = 1
    if tensor.dim():
        first += on_disk.block_of(tensor).offset[0] * math.prod(tensor.shape[1:])
    total = 0
    for piece in bits.split(PIECE):
        positions = torch.arange(first, first + len(piece), device=piece.device)
        total += int((piece * positions).sum())
        first += len(piece)
    return total


# ── The disk ──


def bytes_needed(model: Tensors, optimizer: Tensors) -> int:
    """Return the bytes of one checkpoint on the disk, over all ranks.

    A DTensor counts with its global shape, and a replicated tensor once. Headers and manifest are
    counted as 1 MiB.
    """
    tensors = (*model.values(), *optimizer.values())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors) + 2**20


def check_space(folder: Path, needed: int) -> None:
    """Raise InputError if the disk of `folder` has less than `needed` bytes free.

    The folder need not exist yet.
    """
    free = free_bytes(folder)
    if free < needed:
        raise InputError(
            f"{folder}: checkpoints need {memory(needed / GIB)}, and {memory(free / GIB)} are "
            "free; make room, or lower `checkpoint.keep`"
        )


def require_shared(folder: Path) -> None:
    """Raise InputError if a process does not see the `folder` that the first has made.

    Collective.
    """
    if not torch.distributed.is_initialized():
        return
    is_first = torch.distributed.get_rank() == 0
    token = folder / f".proof.0{PARTIAL}"
    deadline = time.monotonic() + _SEEN_WITHIN
    if is_first:
        token.touch()
    from_all_ranks(None)  # the token exists now
    # Listing the folder refreshes the cache of a network disk.
    while not (is_visible := folder.is_dir() and token.name in os.listdir(folder)):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    blind_hosts = from_all_ranks(None if is_visible else socket.gethostname())
    if is_first:
        token.unlink()
    for host in filter(None, blind_hosts):
        raise InputError(
            f"{folder}: {host} does not see the folder of the first machine; "
            "put it on a disk that all machines share"
        )
