"""The checkpoints of a run: complete or absent, never half, loaded by any number of processes, written while training goes on.
format.py shows how one lies on the disk.

Disks flip bits and people copy folders halfway, so every byte is hashed again before it is trusted.

What is saved is copied into host memory, and written by a thread. The thread takes part in no exchange of the training's process
group: those belong to the thread that trains, in their order. Each rank's thread writes its files and flushes them. Between two
steps the ranks tell each other what they have written (`settle`). When all have, the first rank's thread writes the state and,
last, the manifest, and gives the folder its name.
"""

from __future__ import annotations

import json
import logging
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

THREADS = 4  # hashing and writing release the interpreter lock; the cores are the training's
ALIGNMENT = 64  # bytes; a view in any dtype needs its width at most
GROUPS = Path("/sys/fs/cgroup")  # of Linux's control groups, version 2
PIECE = 2**24  # values whose bits are added up at once, as 64-bit copies
SHARE = 0.8  # of the memory that is free: the rest is for who else works on the machine
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
        """`keep`: how many of the newest are kept, beside the newest up to step `before`, where the rate begins to fall."""
        self.folder, self.keep, self.before = folder, keep, before
        self.rank, self.world_size = 0, 1
        if torch.distributed.is_initialized():
            self.rank, self.world_size = (
                torch.distributed.get_rank(),
                torch.distributed.get_world_size(),
            )
        self.damaged: set[Path] = set()  # seen by newest()
        # what the tensors in memory were last saved to, wholly, or loaded from
        self._complete: Path | None = None
        self.latest: Path | None = None  # the same, or what is being written
        # whose bytes were compared with their hashes: load() need not hash it again
        self._intact: Path | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._staging = Staging()
        self._pending: PendingSave | None = None

    # ── Saving ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

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
        """Write checkpoint `step`, then prune; returns its path. One just saved or loaded is not written again.

        `model` holds parameters and persistent buffers by Hugging Face name (a tied tensor once), `optimizer` whatever tensors
        the optimizer keeps, under names that a later run gives them again; both on any device, plain or DTensor. `state` is JSON.
        `spared`: the step of a checkpoint that is not pruned, however old it is. `behind`: return as soon as the tensors are
        copied, which may change while the copies are written; where the host's memory has no room for them, once this process's
        part is written. `say`: gets the line that tells the user, on the first rank when it is complete.

        Raises InputError where it cannot be written (disk full, read-only), of one `behind` at the next call; what was saved
        before stays.
        """
        began, final = time.perf_counter(), step_folder(self.folder, step)
        # for a slower save before this one, which counts as a part of the time that training stops
        self.wait()
        if final != self._complete:
            # what a writer left that died; nobody writes before the exchange below
            if self.rank == 0:
                shutil.rmtree(on_disk.partial_folder(final), ignore_errors=True)
            files, index = self._lay_out(model, optimizer)
            copies = self._staging.copy(files) if behind else None
            stopped = (
                f"; training stopped for {time.perf_counter() - began:.2g} s" if copies else ""
            )

            def complete(records: list[FileRecord]) -> None:
                if self.rank == 0:
                    on_disk.complete(
                        final, Manifest(step, self.world_size, records, **index), state_json
                    )
                    self._prune(final, spared)
                    say(f"saved {final} in {time.perf_counter() - began:.3g} s{stopped}")

            state_json = json.dumps(dict(state), indent=1, allow_nan=False).encode()
            written = self._thread.submit(
                write_part, on_disk.partial_folder(final), copies or files
            )
            self._pending, self.latest = PendingSave(final, written, complete), final
            if self.world_size == 1:
                self._pending.completed = self._thread.submit(lambda: complete(written.result()))
            if behind and copies is None:
                _log.warning(
                    "rank %d: host memory has no room for copies, so training stops while it writes",
                    self.rank,
                )
                self._pending.written.exception()
        elif self.rank == 0:
            self._prune(final, spared)  # it may be another one that is spared now
        if not behind:
            self.wait()
        return final

    def _lay_out(
        self, model: Tensors, optimizer: Tensors
    ) -> tuple[Files, dict[str, dict[str, TensorEntry]]]:
        """What this rank writes, by file, and where all ranks write all tensors."""
        groups = {"model": model, "optimizer": optimizer}
        blocks = {
            kind: {name: on_disk.block_of(tensor) for name, tensor in group.items()}
            for kind, group in groups.items()
        }
        offers = from_all_ranks(blocks)
        index = {
            kind: on_disk.lay_out(
                kind,
                [offer[kind] for offer in offers],
                checksums(group),
            )
            for kind, group in groups.items()
        }
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
        futures = (self._pending.written, self._pending.completed) if self._pending else ()
        return any(each is not None and each.done() and each.exception() for each in futures)

    def settle(self) -> None:
        """Begin to complete the save under way, if there is one, where all ranks have written their part. Between two steps."""
        pending = self._pending
        if pending is not None and pending.completed is None:
            written = pending.written.done() and not pending.written.exception()
            parts = from_all_ranks(pending.written.result() if written else None)
            if None not in parts:
                pending.completed = self._thread.submit(
                    pending.complete, [record for part in parts for record in part]
                )

    def wait(self) -> None:
        """Return when the save under way, if there is one, is complete. InputError on all ranks where it has failed on any."""
        if (pending := self._pending) is None:
            return
        reasons = self._failures(pending.written)
        self.settle()
        self._pending = None
        if reasons := reasons or self._failures(pending.completed):
            self.latest = self._complete
            if self.rank == 0:
                shutil.rmtree(on_disk.partial_folder(pending.final), ignore_errors=True)
            before = (
                f"{self._complete} is untouched"
                if self._complete
                else "no earlier checkpoint was touched"
            )
            raise InputError(
                f"{self.folder}: step {step_of(pending.final)} could not be saved: {reasons[0]}; {before}. There are "
                f"{memory(free_bytes(self.folder) / GIB)} free; make room, or set a `run_dir` on another disk, and start again"
            )
        self._complete = pending.final
        self.damaged.discard(pending.final)  # it is a new one now

    def _failures(self, future: Future[Any]) -> list[str]:
        """The reason of each rank whose `future` has failed, whatever with. Waits for all of them."""
        error = future.exception()
        named = type(error) is not InputError
        reason = error and f"{one_line(error, named=named)} (rank {self.rank})"
        return [reason for reason in from_all_ranks(reason) if reason]

    def close(self) -> None:
        """Return when no thread of this process writes any more. For a process that may end by an error: not collective."""
        self._thread.shutdown()

    # ── Which are kept, and which is the newest ───────────────────────────────────────────────────────────────────────────────

    def _prune(self, newest: Path, spared: int | None) -> None:
        """Remove all but the `keep` newest checkpoints, that of step `spared` and the newest up to step `before`, when `newest`
        is what was saved last; the first rank's. Damaged checkpoints are neither removed nor counted."""
        steps = [
            path
            for path in step_folders(self.folder)
            if step_of(path) <= step_of(newest) and path not in self.damaged
        ]
        early = next(
            (path for path in steps if self.before is not None and step_of(path) <= self.before),
            None,
        )
        on_disk.remove(
            self.folder,
            [path for path in steps[self.keep :] if path != early and step_of(path) != spared],
        )

    def abandon_newer(self, step: int) -> None:
        """Set every checkpoint after `step` aside, for a run that goes on from `step`: otherwise the next automatic resume would
        continue the abandoned training. They are deleted when the run has saved its next checkpoint."""
        self.wait()
        if self.rank == 0:
            for path in [path for path in step_folders(self.folder) if step_of(path) > step]:
                _log.warning(
                    "%s was renamed to %s: the run goes on from step %d",
                    path,
                    on_disk.set_aside(path).name,
                    step,
                )
        from_all_ranks(None)  # nobody looks before all have their names

    def newest(self, *, before: int | None = None) -> Path | None:
        """The newest intact checkpoint, of a step earlier than `before` if that is given, every byte verified; None if there is
        none. A damaged one is reported through `logging`, kept in `damaged` and left where it is; then the one before it is
        tried."""
        self.wait()
        steps = from_all_ranks(
            [step_of(path) for path in step_folders(self.folder)] if self.rank == 0 else []
        )[0]
        for step in [step for step in steps if before is None or step < before]:
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
        """Whether the checkpoint at `path` lies in this run's folder; not collective."""
        return path.resolve().parent == self.folder.resolve()

    # ── Loading ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def read_state(self, path: Path) -> dict[str, Any]:
        """The `state` of a checkpoint, verified but not loaded, to see what it belongs to. InputError if missing or damaged."""
        self._require_intact(path)
        return load_object(path / on_disk.STATE, "resume from another checkpoint")

    def load(
        self, path: Path, model: Tensors, optimizer: Tensors, *, left_out: Collection[str] = ()
    ) -> None:
        """Copy the checkpoint at `path` into the given tensors, in place and whatever their sharding. `left_out`: names of the
        optimizer's that it may hold beside them.

        Raises InputError, before anything is copied, where a file is damaged and where names, shapes or integer dtypes differ.

        A rank reads the bytes of its own part, by mapping the files. Before that, every byte is hashed once, by one of the ranks.
        """
        self._require_intact(path)
        manifest = read_manifest(path)
        of_optimizer = {
            name: entry for name, entry in manifest.optimizer.items() if name not in left_out
        }
        if problems := [
            *on_disk.mismatches(manifest.model, model),
            *on_disk.mismatches(of_optimizer, optimizer),
        ]:
            remedy = "Take the recipe that it was made by, or another checkpoint; to begin anew, set another `run_dir`"
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
        problems = list(
            dict.fromkeys(problem for rank in from_all_ranks(problems) for problem in rank)
        )
        self._intact = None if problems else path
        return problems


# ── One save on its way ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Staging:
    """A copy of one checkpoint's tensors at a time, in memory that is kept and used again: to get it takes eight times as long as
    to copy into it. For tensors of a GPU it is pinned."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, files: Files) -> dict[str, dict[str, Tensor]] | None:
        """The tensors as they are now, on the host; valid until the next copy. None where the host has no room for them."""
        needed = sum(
            _rounded(tensor.nbytes) for group in files.values() for tensor in group.values()
        )
        device = next(
            (
                tensor.device
                for group in files.values()
                for tensor in group.values()
                if tensor.is_cuda
            ),
            None,
        )
        if self._memory.numel() < needed:
            if needed * int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > SHARE * free_memory():
                return None
            # written to, so that the pages are there
            self._memory = torch.zeros(needed, dtype=torch.uint8)
            if device:
                _pin(self._memory)
        copies: dict[str, dict[str, Tensor]] = {file: {} for file in files}
        start = 0
        for file, group in files.items():
            for name, tensor in group.items():
                place = (
                    self._memory[start : start + tensor.nbytes]
                    .view(tensor.dtype)
                    .view(tensor.shape)
                )
                copies[file][name] = place.copy_(tensor.detach(), non_blocking=True)
                start += _rounded(tensor.nbytes)
        if device:
            torch.cuda.current_stream(device).synchronize()
        return copies


def free_memory() -> int:
    """Bytes that are free on this machine, or that a control group of this process leaves, where these are fewer. SLURM, Docker
    and Kubernetes limit a job so, and kill what takes more."""
    free = psutil.virtual_memory().available
    with suppress(OSError):  # no Linux
        group = GROUPS / Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].lstrip(
            "/"
        )
        # the groups around it hold it, too; a container sees the last as its own
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # without a limit
                statistics = dict(
                    line.split() for line in (folder / "memory.stat").read_text().splitlines()
                )
                # by the kernel, before it kills
                given_back = int(statistics["active_file"]) + int(statistics["inactive_file"])
                used = int((folder / "memory.current").read_text()) - given_back
                free = min(free, int((folder / "memory.max").read_text()) - used)
    return free


def _rounded(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def _pin(buffer: Tensor) -> None:
    """Registered and not taken from torch's allocator, which rounds 20 GiB up to 32."""
    cudart, address = torch.cuda.cudart(), buffer.data_ptr()
    if int(cudart.cudaHostRegister(address, buffer.numel(), 1)) != 0:
        _log.warning(
            "the copy of a checkpoint cannot be pinned in host memory; a save stops training for longer"
        )
    else:
        # CUDA may be gone by then
        weakref.finalize(buffer, cudart.cudaHostUnregister, address).atexit = False


@dataclass
class PendingSave:
    """A save on its way to the folder `final`."""

    final: Path
    written: Future[list[FileRecord]]  # this rank's files, when they are on the disk
    # with the files of all ranks, in the first rank's thread
    complete: Callable[[list[FileRecord]], None]
    # done when the checkpoint has its name, on the other ranks at once
    completed: Future[None] | None = None


def write_part(partial: Path, files: Files) -> list[FileRecord]:
    """Write this rank's files, several at a time, to the folder `partial`; returns what was written."""
    partial.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="saving") as threads:
        return list(threads.map(lambda name: write_tensors(partial / name, files[name]), files))


# ── The live tensors ──────────────────────────────────────────────────────────────────────────────


def checksums(tensors: Tensors) -> dict[str, int]:
    """Return the sum of each tensor's bit patterns modulo 2^64. Collective.

    The sum is the same for every sharding. Replicas count once, unless their bits differ.
    """
    ranks = from_all_ranks(
        {
            name: (on_disk.block_of(tensor).offset, sum_of_bits(tensor))  # which identify a block
            for name, tensor in tensors.items()
        }
    )
    return {
        name: sum(bits for _, bits in {blocks[name] for blocks in ranks}) % 2**64
        for name in tensors  # a set has each block once
    }


def sum_of_bits(tensor: Tensor) -> int:
    """Return the sum of the bit patterns, as integers, in this process's part of a tensor.

    The host waits for the device.
    """
    bits = local_part(tensor).reshape(-1).view(getattr(torch, f"int{8 * tensor.element_size()}"))
    return sum(int(piece.sum(dtype=torch.int64)) for piece in bits.split(PIECE))


# ── The disk ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def bytes_needed(model: Tensors, optimizer: Tensors) -> int:
    """Bytes that one checkpoint of these tensors takes on disk, over all ranks; headers and manifest are rounded up to 1 MiB.

    A DTensor counts whole, a replicated one once.
    """
    return (
        sum(
            tensor.numel() * tensor.element_size()
            for tensor in (*model.values(), *optimizer.values())
        )
        + 2**20
    )


def check_space(folder: Path, needed: int) -> None:
    """InputError if the disk of `folder` (which need not exist yet) has less than `needed` bytes free: a start-up check."""
    free = free_bytes(folder)
    if free < needed:
        sizes = f"checkpoints need {memory(needed / GIB)}, and {memory(free / GIB)} are free"
        raise InputError(f"{folder}: {sizes}; make room, or lower `checkpoint.keep`")


def require_shared(folder: Path) -> None:
    """InputError unless all processes see `folder`, which the first has made, as one folder. Collective."""
    if not torch.distributed.is_initialized():
        return
    token, end = folder / f".proof.0{PARTIAL}", time.monotonic() + _SEEN_WITHIN
    if torch.distributed.get_rank() == 0:
        token.touch()
    from_all_ranks(None)  # it is there
    while (
        not (seen := folder.is_dir() and token.name in os.listdir(folder))
        and time.monotonic() < end
    ):
        time.sleep(0.05)
    blind = [host for host in from_all_ranks(None if seen else socket.gethostname()) if host]
    if torch.distributed.get_rank() == 0:
        token.unlink()
    if blind:
        raise InputError(
            f"{folder}: {blind[0]} does not see the folder of the first machine; put it on a disk that all share"
        )
