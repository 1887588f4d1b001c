"""Save the checkpoints of a run in the background, and load them with any number of processes.

A folder with the name of a checkpoint is always complete. format.py describes the files of a
checkpoint. Disks may flip bits and a copied folder may lack files, so all files of a checkpoint are
hashed and compared with the manifest before the checkpoint is used.

A save in the background first copies the tensors to host memory. Then a thread of each rank writes
the copies while training continues. The thread must not call collectives, because all ranks must
call collectives in the same order, and the training thread calls them too. The thread of a rank
writes and flushes the files of this rank only. Between two steps, the ranks exchange the records of
the files that they have written (`Checkpoints.settle`). When all ranks have written their files,
the thread of the first rank writes the state, then writes the manifest, and then gives the folder
its final name.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from foundation.errors import InputError, one_line
from foundation.files import PARTIAL, FileRecord, find_damage, free_bytes, remove_tree
from foundation.reading import load_object
from foundation.units import bytes_text
from pretrain.checkpoint import format as on_disk
from pretrain.checkpoint.folders import STATE, averaged, step_folder, step_folders, step_of
from pretrain.checkpoint.format import Manifest, TensorEntry, read_manifest, write_tensors
from pretrain.model.distributed import from_all_ranks, processes_on_host
from pretrain.model.gradients import local_part
from pretrain.optimizer.offload import pin

# Number of threads that write and hash files. More threads would take CPU cores from the training.
THREADS = 4
# Each copied tensor starts at a multiple of this number of bytes, so that it can be viewed in any
# dtype.
ALIGNMENT = 64
GROUPS = Path("/sys/fs/cgroup")  # folder of Linux control groups, version 2
# Number of values whose bits are summed at once. The limit saves memory, because the sum converts
# the values to 64 bits.
PIECE = 2**24
# Share of the free host memory that copies may use. The rest is for other processes on the machine.
SHARE = 0.8
# Number of times, in 5 seconds, that a process looks for a new file of another machine. A network
# disk may show it late.
_VISIBILITY_CHECKS = 100
_log = logging.getLogger(__name__)

Tensors = Mapping[str, Tensor]
# Map each file name to the tensors in the file, by tensor name. The tensors are local parts.
Files = Mapping[str, Tensors]


class Checkpoints:
    """The checkpoints of one run.

    All ranks must call the methods in the same order, except the methods whose docstring says "Any
    rank may call this method alone". Only one save is written at a time. The methods that save,
    load, rename or select checkpoints first wait until this save is complete.

    Args:
        folder: Folder of the checkpoints, on a disk that all processes share.
        keep: Number of newest checkpoints to keep.
        before_decay: Last step before the decay of the learning rate. The newest checkpoint that is
            not later than this step is also kept. With 0, no further checkpoint is kept.
        merge: Number of checkpoints whose weights are averaged at the end of the run: the newest
            one, and earlier ones of multiples of `every`. They are also kept. An interrupted run
            saves other checkpoints in between.
        every: Number of steps between two checkpoints.

    Attributes:
        damaged: Folders of the damaged checkpoints that `newest` has found.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        *,
        before_decay: int = 0,
        merge: int = 1,
        every: int = 1,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self.before_decay = before_decay
        self.merge = merge
        self.every = every
        is_distributed = torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if is_distributed else 0
        self.world_size = torch.distributed.get_world_size() if is_distributed else 1
        self.damaged: set[Path] = set()
        # The checkpoint that was last saved completely, or loaded.
        self._last_complete: Path | None = None
        # The checkpoint that was verified last, if it was intact. `load` does not hash it again.
        self._last_intact: Path | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._staging = Staging()
        self._pending: PendingSave | None = None

    @property
    def latest(self) -> Path | None:
        """Return the checkpoint that was saved or loaded last, or None.

        A save that is still running in the background is included. Any rank may call this method
        alone.
        """
        return self._pending.final if self._pending else self._last_complete

    # ── Saving ──

    def save(
        self,
        step: int,
        model: Tensors,
        optimizer: Tensors,
        state: Mapping[str, Any],
        *,
        spared: int | None = None,
        in_background: bool = False,
        announce: Callable[[str], object] = print,
    ) -> Path:
        """Save the checkpoint of step `step` and delete old checkpoints.

        Return the path of the checkpoint. If the checkpoint that was saved or loaded last is of the
        same step, it is not written again.

        Args:
            step: Number of steps done.
            model: Parameters and persistent buffers by their Hugging Face names. Tied tensors
                appear once. They are plain tensors or DTensors on any device.
            optimizer: Tensors of the optimizer, by names that do not change between runs.
            state: JSON object that is saved with the tensors.
            spared: Step of a checkpoint that is not deleted, even if it is old.
            in_background: True to return when the tensors are copied to host memory. A thread then
                writes the copies. If the host has too little memory for the copies, return when the
                files of this rank are written. False to return when the checkpoint is complete.
            announce: Function that is called on the first rank with a message when the checkpoint
                is complete.

        Raises:
            InputError: The checkpoint cannot be written, for example because the disk is full or
                read-only. Earlier checkpoints are unchanged. With `in_background`, the error is
                raised by the next method that waits for the save.
        """
        start = time.perf_counter()
        final = step_folder(self.folder, step)
        # The wait for an earlier save is part of the time for which training is stopped.
        self.wait()
        if final == self._last_complete:
            if self.rank == 0:
                # `spared` may have changed since the save, so other checkpoints may be deleted now.
                self._prune(final, spared)
            return final
        partial = on_disk.partial_folder(final)
        if self.rank == 0:
            # Remove the files of a process that was killed while it wrote this checkpoint. No rank
            # writes a file before the collective in `_lay_out`, so only old files are removed.
            with suppress(FileNotFoundError):
                remove_tree(partial)
        files, index = self._lay_out(model, optimizer)
        copies = self._staging.copy(files) if in_background else None
        state_json = json.dumps(dict(state), indent=1, allow_nan=False).encode()

        def finish(records: list[FileRecord]) -> None:
            if self.rank == 0:
                manifest = Manifest(step, self.world_size, records, **index)
                on_disk.complete(final, manifest, state_json)
                self._prune(final, spared)
                announce(f"saved {final} in {time.perf_counter() - start:.3g} s")

        written = self._thread.submit(write_part, partial, copies or files)
        self._pending = PendingSave(final, written, finish)
        if self.world_size == 1:
            # No other rank must finish its files, so the thread need not wait for `settle`.
            self._pending.finished = self._thread.submit(lambda: finish(written.result()))
        if in_background and copies is None:
            _log.warning(
                "rank %d: host memory has no room for copies, so training stops until the files of "
                "this rank are written",
                self.rank,
            )
            written.exception()  # waits until the files of this rank are written
        if not in_background:
            self.wait()
        return final

    def _lay_out(
        self, model: Tensors, optimizer: Tensors
    ) -> tuple[Files, dict[str, dict[str, TensorEntry]]]:
        """Assign all tensors to files.

        Return the files that this rank writes, and the indices of the model's and the optimizer's
        tensors. An index maps the name of each tensor to its pieces in the files of all ranks.
        """
        groups = {"model": model, "optimizer": optimizer}
        offers = from_all_ranks(
            {
                kind: {name: on_disk.block_of(tensor) for name, tensor in group.items()}
                for kind, group in groups.items()
            }
        )
        index = {
            kind: on_disk.lay_out(kind, group, [offer[kind] for offer in offers], checksums(group))
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
        """Return True if this rank's part of the running save has failed.

        `wait` raises the error. Any rank may call this method alone.
        """
        pending = self._pending
        futures = (pending.written, pending.finished) if pending else ()
        return any(future and future.done() and future.exception() for future in futures)

    def settle(self) -> None:
        """Let the thread finish the running save if all ranks have written their files.

        The ranks exchange the records of these files. Call this method between two steps. It does
        not wait for the disk.
        """
        pending = self._pending
        if pending is None or pending.finished is not None:
            return
        is_written = pending.written.done() and not pending.written.exception()
        records_by_rank = from_all_ranks(pending.written.result() if is_written else None)
        written = [records for records in records_by_rank if records is not None]
        if len(written) == self.world_size:
            all_records = list(itertools.chain(*written))
            pending.finished = self._thread.submit(pending.finish, all_records)

    def wait(self) -> None:
        """Wait until the running save is complete.

        Raises InputError on all ranks if the save has failed on any rank.
        """
        pending = self._pending
        if pending is None:
            return
        reasons = self._failures(pending.written)
        # All ranks have written their files now, or one of them has failed.
        self.settle()
        self._pending = None
        reasons = reasons or self._failures(pending.finished)
        if not reasons:
            self._last_complete = pending.final
            # If there was a damaged checkpoint of the same step, this save has replaced it.
            self.damaged.discard(pending.final)
            return
        if self.rank == 0:
            shutil.rmtree(on_disk.partial_folder(pending.final), ignore_errors=True)
        raise InputError(
            f"{pending.final}: could not be saved: {reasons[0]}; earlier checkpoints are "
            "untouched. Free disk space, or set a `run_dir` on another disk. Then start again"
        )

    def _failures(self, future: Future[Any] | None) -> list[str]:
        """Wait for `future` on all ranks. Return one line for each rank whose future has failed."""
        reason = None
        if error := future and future.exception():
            line = one_line(error, named=type(error) is not InputError)
            reason = f"{line} (rank {self.rank})"
        return [failure for failure in from_all_ranks(reason) if failure]

    def close(self) -> None:
        """Wait until no thread of this process writes.

        Any rank may call this method alone. Unlike `wait`, it can be called by a process that ends
        with an error.
        """
        self._thread.shutdown()

    # ── Pruning, and the newest checkpoint ──

    def _prune(self, newest: Path, spared: int | None) -> None:
        """Delete old checkpoints after `newest` was saved. Called on the first rank only.

        Keep the `keep` newest checkpoints, the checkpoint of step `spared`, the newest checkpoint
        that is not later than step `before_decay`, and the checkpoints that are averaged (`merge`).
        Damaged checkpoints and checkpoints of steps after `newest` are ignored: they are not
        deleted, and do not count as one of the newest checkpoints.
        """
        candidates = [
            path
            for path in step_folders(self.folder)
            if step_of(path) <= step_of(newest) and path not in self.damaged
        ]
        # `candidates` begins with the newest checkpoint.
        not_decayed = [path for path in candidates if step_of(path) <= self.before_decay]
        kept = {*not_decayed[:1], *averaged(candidates, self.merge, self.every)}
        on_disk.remove(
            self.folder,
            [
                path
                for path in candidates[self.keep :]
                if step_of(path) != spared and path not in kept
            ],
        )

    def set_aside_newer(self, step: int) -> None:
        """Set aside all checkpoints after step `step`. Call this if a run continues from `step`.

        Otherwise the next automatic resume would continue from a later checkpoint of the training
        that was given up. The next save deletes the checkpoints that are set aside.
        """
        self.wait()
        if self.rank == 0:
            for path in step_folders(self.folder):
                if step_of(path) > step:
                    renamed = on_disk.set_aside(path)
                    _log.warning(
                        "%s was renamed to %s, because the run continues from step %d",
                        path,
                        renamed.name,
                        step,
                    )
        from_all_ranks(None)  # the other ranks wait until all checkpoints are renamed

    def newest(self, *, before: int | None = None) -> Path | None:
        """Return the newest intact checkpoint, or None if there is none.

        All files of the newest checkpoint are hashed. If the checkpoint is damaged, a warning is
        logged, the checkpoint is added to `damaged`, and the next older checkpoint is tried. Files
        are not changed. With `before`, only checkpoints of steps before `before` are considered.
        """
        self.wait()
        # All ranks use the list of the first rank, because a network disk may show different
        # checkpoints to different machines.
        saved_steps = map(step_of, step_folders(self.folder))
        steps, *_ = from_all_ranks(
            [step for step in saved_steps if before is None or step < before]
        )
        for step in steps:
            path = step_folder(self.folder, step)
            problems = self._verify(path)
            if not problems:
                return path
            self.damaged.add(path)
            if self.rank == 0:
                _log.warning(
                    "%s cannot be used; trying the next older checkpoint. %s",
                    path,
                    "; ".join(problems),
                )
        return None

    def owns(self, path: Path) -> bool:
        """Return True if the checkpoint at `path` is in this run's folder.

        Any rank may call this method alone.
        """
        return path.resolve().parent == self.folder.resolve()

    # ── Loading ──

    def read_state(self, path: Path) -> dict[str, Any]:
        """Verify the checkpoint at `path` and return its state, the JSON object given to `save`.

        Tensors are not loaded. Raises InputError if the checkpoint is missing or damaged.
        """
        self._require_intact(path)
        return load_object(path / STATE, "resume from another checkpoint")

    def load(self, path: Path, tensors: Tensors, *, optional: tuple[str, ...] = ()) -> None:
        """Copy the checkpoint at `path` into the given tensors.

        The tensors may be sharded in another way than the tensors that were saved. Each file is
        hashed by one of the ranks. Then each rank maps the files into memory and reads only the
        bytes of its local parts.

        Args:
            path: Folder of the checkpoint.
            tensors: Tensors of the model and the optimizer that are filled, by name.
            optional: Prefixes of names. A tensor of the checkpoint whose name has one of these
                prefixes is not loaded if `tensors` lacks the name.

        Raises:
            InputError: A file is damaged, or the tensors have other names, shapes or integer dtypes
                than the checkpoint. No tensor has been changed.
        """
        self._require_intact(path)
        index = {
            name: entry
            for name, entry in read_manifest(path).tensors.items()
            if name in tensors or not name.startswith(optional)
        }
        if problems := on_disk.mismatches(index, tensors):
            raise InputError(
                f"{path}: the checkpoint does not fit this run: {'; '.join(problems[:5])}. Either "
                "use the model and the optimizer of this checkpoint, or choose another checkpoint, "
                "or start without one: set another `run_dir`, without `train.begin_with` and "
                "--resume"
            )
        on_disk.load_tensors(path, index, tensors)
        self._last_complete = path

    def _require_intact(self, path: Path) -> None:
        """Raise InputError if the checkpoint at `path` is missing or damaged.

        If it is the checkpoint that was verified last, it is not hashed again.
        """
        self.wait()
        if path != self._last_intact and (problems := self._verify(path)):
            raise InputError(f"{path}: the checkpoint cannot be used: {'; '.join(problems)}")

    def _verify(self, path: Path) -> list[str]:
        """Compare the files of the checkpoint at `path` with its manifest.

        Return one line for each problem. Remember the checkpoint as intact if there is none. Each
        rank hashes a different part of the files.
        """
        try:
            files = sorted(read_manifest(path).files, key=lambda file: file.name)
            problems = find_damage(path, files[self.rank :: self.world_size])
        except InputError as error:
            problems = [str(error)]
        all_problems = [problem for rank in from_all_ranks(problems) for problem in rank]
        self._last_intact = None if all_problems else path
        return list(dict.fromkeys(all_problems))


# ── A running save ──


class Staging:
    """Host memory for copies of a checkpoint's tensors.

    The memory is allocated once and used again by later saves, because an allocation takes eight
    times as long as a copy. If the tensors are on a GPU, the memory is pinned.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, files: Files) -> dict[str, dict[str, Tensor]] | None:
        """Copy the tensors to host memory, wait for the device, and return the copies.

        The next call overwrites the copies. Return None if the host has too little free memory.
        """
        tensors = [tensor for group in files.values() for tensor in group.values()]
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]
        device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        if not self._reserve(sum(sizes), pinned=device is not None):
            return None
        copies: dict[str, dict[str, Tensor]] = {file: {} for file in files}
        slots = iter(self._memory[: sum(sizes)].split(sizes))
        for file, group in files.items():
            for name, tensor in group.items():
                slot = next(slots)[: tensor.nbytes].view(tensor.dtype)
                copies[file][name] = slot.view(tensor.shape).copy_(
                    tensor.detach(), non_blocking=True
                )
        if device:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _reserve(self, needed: int, *, pinned: bool) -> bool:
        """Allocate `needed` bytes, unless an earlier call has allocated enough.

        Return False if the host has too little free memory.
        """
        if self._memory.numel() < needed:
            if needed * processes_on_host() > SHARE * free_memory():
                return False
            # `zeros` writes to all pages, so that the operating system allocates them.
            self._memory = torch.zeros(needed, dtype=torch.uint8)
            if pinned:
                # Without pinned memory, the copy takes longer.
                pin(self._memory)
        return True


def free_memory() -> int:
    """Return the number of bytes of memory that this process may still allocate.

    Without memory limits, this is the free memory of the machine. If the process belongs to Linux
    control groups with memory limits, the result is at most the free memory within each limit.
    SLURM, Docker and Kubernetes limit jobs by control groups. They kill a job that exceeds its
    limit.
    """
    free = psutil.virtual_memory().available
    with suppress(OSError):  # the machine does not run Linux
        name = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
        group = GROUPS / name.lstrip("/")
        # The limits of the parent groups apply too. In a container, the outermost folder is the
        # group of the container.
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # the group does not exist or has no limit
                lines = (folder / "memory.stat").read_text().splitlines()
                statistics = dict(line.split() for line in lines)
                # Memory that caches files counts as free, because the kernel drops cached files
                # before it kills a process.
                cached = int(statistics["active_file"]) + int(statistics["inactive_file"])
                used = int((folder / "memory.current").read_text()) - cached
                free = min(free, int((folder / "memory.max").read_text()) - used)
    return free


@dataclass
class PendingSave:
    """A checkpoint that a thread is writing."""

    # Folder of the checkpoint when it is complete.
    final: Path
    # Future with the records of this rank's files. It is done when the files are on the disk.
    written: Future[list[FileRecord]]
    # Function that completes the checkpoint. It is called with the file records of all ranks.
    finish: Callable[[list[FileRecord]], None]
    # Future of the call of `finish`, or None before the call. On the first rank it is done when the
    # checkpoint has its final name. On other ranks `finish` does nothing.
    finished: Future[None] | None = None


def write_part(partial: Path, files: Files) -> list[FileRecord]:
    """Write this rank's files to the folder `partial`, and return their records.

    Several threads write files at the same time.
    """
    partial.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="saving") as threads:
        return list(threads.map(lambda name: write_tensors(partial / name, files[name]), files))


# ── Checksums of tensors in memory ──


def checksums(tensors: Tensors) -> dict[str, int]:
    """Return the checksum of each tensor by name.

    All ranks must call this function. The checksum is the sum of `sum_of_bits` over the blocks of
    the tensor, modulo 2^64. It is the same for any number of shards along the first dimension. If
    several ranks hold the same block, the block is added once. But if its bits differ between the
    ranks, each version is added, so the checksum changes.
    """
    # For each rank, a dict that maps each tensor to the offset of the rank's block and the sum of
    # the block's bits. The offset is needed because two blocks may have the same sum.
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

    The bit pattern of each value is read as an integer and multiplied by the position of the value
    in the full tensor, counted from 1. The sum therefore changes if two values are swapped.
    Products and sums are modulo 2^64. The host waits for the device.
    """
    bits = local_part(tensor).reshape(-1).view(getattr(torch, f"int{8 * tensor.element_size()}"))
    first = 1
    if tensor.dim():
        first += on_disk.block_of(tensor).offset[0] * math.prod(tensor.shape[1:])
    total = 0
    in_host_memory = bits.is_pinned()  # with `optimizer.offload`
    for piece in bits.split(PIECE):
        if in_host_memory:
            piece = piece.cuda(non_blocking=True)
        positions = torch.arange(first, first + len(piece), device=piece.device)
        total += int((piece * positions).sum())
        first += len(piece)
    return total


# ── The disk ──


def bytes_needed(tensors: Tensors) -> int:
    """Return the number of bytes of a checkpoint with these tensors on the disk, over all ranks.

    The size of a DTensor is that of the full tensor. A replicated tensor is included once. Headers
    and manifest are estimated as 1 MiB.
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + 2**20


def check_space(folder: Path, needed: int) -> None:
    """Raise InputError if the disk of `folder` has less than `needed` bytes free.

    The folder may be missing.
    """
    free = free_bytes(folder)
    if free < needed:
        raise InputError(
            f"{folder}: checkpoints need {bytes_text(needed)}, and {bytes_text(free)} are "
            "free; either free disk space, or set another `run_dir`, or lower `checkpoint.keep`"
        )


def require_shared(folder: Path) -> None:
    """Raise InputError if `folder` is not on a disk that all processes share.

    All ranks must call this function. The first process creates a file in the folder, and all
    processes check that the file exists.
    """
    if not torch.distributed.is_initialized():
        return
    is_first = torch.distributed.get_rank() == 0
    token = folder / f".proof.0{PARTIAL}"
    if is_first:
        token.unlink(missing_ok=True)
        token.touch()
    from_all_ranks(None)  # all ranks wait until the first rank has created the token
    is_visible = False
    for _ in range(_VISIBILITY_CHECKS):
        # `listdir` is used because it refreshes the cache of a network disk.
        is_visible = folder.is_dir() and token.name in os.listdir(folder)
        if is_visible:
            break
        time.sleep(0.05)
    hosts_without_folder = from_all_ranks(None if is_visible else socket.gethostname())
    if is_first:
        token.unlink()
    for host in filter(None, hosts_without_folder):
        raise InputError(
            f"{folder}: the first machine has created this folder, but {host} cannot find it; "
            "choose a folder on a disk that all machines share"
        )
