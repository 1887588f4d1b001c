"""Checkpoints that are complete or absent, never half, and that any world size can load.

    checkpoints/                                  on a disk that all processes share
      step-00000100/                              complete
        model-00000-of-00002.safetensors          parameters under their Hugging Face names, by rank
        optimizer-00000-of-00002.safetensors
        state.json                                step, tokens and what defines the training
        manifest.json                             sizes, SHA-256 and tensor index; written last
      .partial-step-00000200/                     while it is written; once its manifest is there, only the name is missing
      abandoned-step-00000150/                    a run went back to before it; deleted when the run has saved its next one
      replaced-step-00000160/                     damaged; kept for the user to look at or remove
      .removed-step-00000050/                     while it is deleted

Each file is flushed to the disk, the manifest comes last, and only then does the folder get its name. So a process may die at any
instruction, and the machine at any moment: a folder named step-* is whole. Disks still flip bits and people still copy folders
halfway, so every byte is hashed again before it is trusted.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed
from torch import Tensor

from foundation.errors import InputError
from foundation.files import PARTIAL, PROOF, free_bytes
from foundation.integrity import find_damage
from foundation.reading import load_object
from foundation.units import GIB, duration, memory
from pretrain.checkpoint.folders import (
    ABANDONED_STEP,
    REPLACED_STEP,
    abandoned,
    finish_renames,
    looks_complete,
    make_empty,
    move_aside,
    partial_folder,
    remove,
    step_folder,
    step_folders,
    step_of,
)
from pretrain.checkpoint.manifest import STATE, Manifest, TensorEntry, read_manifest
from pretrain.checkpoint.saving import PendingSave
from pretrain.checkpoint.shards import PART_BYTES, ShardBlock, block_of, lay_out, load_tensors, mismatches, rank_stem
from pretrain.checkpoint.staging import Files, Staging, bytes_staged, gpu_of, room_for
from pretrain.model.distributed import from_all_ranks, in_a_group, local_part

_DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
_AFTER_AN_ERROR = 20.0  # seconds: how long a process that ends by an error waits for the other ranks' part of a save
_SEEN_WITHIN = 5.0  # seconds: a network disk may show a new file late
_log = logging.getLogger(__name__)

T = TypeVar("T")
Tensors = Mapping[str, Tensor]
Blocks = dict[str, dict[str, ShardBlock]]  # by kind: what a rank holds of each tensor


@dataclass(frozen=True)
class _Layout:
    """Which rank writes what, for as long as all ranks hold the same blocks."""

    mine: Blocks
    index: dict[str, dict[str, TensorEntry]]


class Checkpoints:
    """The checkpoints of one run.

    Where torch.distributed is initialised, every method is collective but those that say otherwise: all ranks call it, in the
    same order. A save that was begun is written by threads, one save at a time; every other method waits for it first.
    """

    def __init__(self, folder: Path, keep: int, *, before: int | None = None, part_bytes: int = PART_BYTES) -> None:
        """`keep`: the newest so many are kept, and the newest up to step `before`, where the rate begins to fall."""
        self.folder = folder
        self.keep = keep
        self.before = before
        self.part_bytes = part_bytes
        self.rank = torch.distributed.get_rank() if in_a_group() else 0
        self.world_size = torch.distributed.get_world_size() if in_a_group() else 1
        self.current: Path | None = None  # what the tensors in memory were last saved to or loaded from
        self.damaged: dict[Path, list[str]] = {}  # seen by newest(): what is wrong with each
        self._verified: Path | None = None  # intact when newest() looked: load() need not hash it again
        self._layout: _Layout | None = None
        self._staging = Staging()
        self._reserving: Future[None] | None = None
        self._pending: PendingSave | None = None
        self._news: list[str] = []

    # ── Saving ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, step: int, model: Tensors, optimizer: Tensors, state: Mapping[str, Any], *, spared: int | None = None) -> Path:
        """Write checkpoint `step`, then prune; returns its path. One just saved or loaded is not written again.

        `spared`: the step of a checkpoint that is not pruned, however old it is.

        `model` holds parameters and persistent buffers by Hugging Face name (a tied tensor once), `optimizer` whatever tensors
        the optimizer keeps, under names that a later run gives them again; both on any device, plain or DTensor. `state` is JSON.
        Raises InputError where it cannot be written (disk full, read-only, out of memory); what was saved before stays.
        """
        self._begin(step, model, optimizer, state, spared, copied=False)
        self.wait()
        self._prune(self.current, spared)  # once more, for a step that was there already and is now the one that is spared
        return self.current

    def begin(
        self, step: int, model: Tensors, optimizer: Tensors, state: Mapping[str, Any], *, spared: int | None = None
    ) -> None:
        """Saves as `save` does, but returns as soon as the tensors are copied: they may change while the copies are written.

        Raises InputError where the save before this one has failed. Where the host's memory has no room for the copies, this
        process returns once its part is written, and says so.
        """
        self._begin(step, model, optimizer, state, spared, copied=True)

    def prepare(self, model: Tensors, optimizer: Tensors) -> None:
        """Make ready what the first `begin` would otherwise wait for: who writes what, and the memory, taken in a thread."""
        files = self._my_files({"model": model, "optimizer": optimizer})
        if room_for(bytes_staged(files)):
            thread = ThreadPoolExecutor(1)
            self._reserving = thread.submit(self._staging.reserve, bytes_staged(files), gpu_of(files))
            thread.shutdown(wait=False)

    def _begin(
        self, step: int, model: Tensors, optimizer: Tensors, state: Mapping[str, Any], spared: int | None, *, copied: bool
    ) -> None:
        final = step_folder(self.folder, step)
        if final == self.latest:
            return
        entered = time.perf_counter()
        self.wait()
        began = time.perf_counter()
        partial, groups = partial_folder(final), {"model": model, "optimizer": optimizer}
        state_json = json.dumps(dict(state), indent=1, allow_nan=False).encode()
        self._needed = bytes_needed(model, optimizer)
        files = self._my_files(groups)
        try:
            self._on_every_rank(lambda: self.rank == 0 and make_empty(partial))
        except OSError as refusal:
            raise InputError(self._describe(refusal, step)) from None
        to_write, written_first = self._copy(files) if copied else (files, True)
        stopped = time.perf_counter() - entered  # the wait for a slower save before this one counts

        def afterwards() -> None:
            remove(self.folder, abandoned(self.folder))
            self._prune(final, spared)
            behind = "" if written_first else f"; training stopped for {duration(stopped)}"
            self._news.append(f"saved {final} in {duration(time.perf_counter() - began)}{behind}")

        manifest = Manifest(step, self.world_size, [], self._layout.index["model"], self._layout.index["optimizer"])
        self._pending = PendingSave(partial, final, to_write, manifest, state_json, self.rank, afterwards)
        if written_first:
            self._pending.written.exception()

    def _copy(self, files: Files) -> tuple[Files, bool]:
        """Copies of the tensors, and whether they must be written before the tensors may change, because there was no room."""
        if self._reserving is not None:
            self._reserving.result()
            self._reserving = None
        needed = bytes_staged(files)
        if not self._staging.holds(needed) and not (room_for(needed) and self._staging.reserve(needed, gpu_of(files))):
            if self.rank == 0:
                _log.warning(
                    "host memory has no room for copies of %s a process, so training stops while a checkpoint is written",
                    memory(needed / GIB),
                )
            return files, True
        return self._staging.copy(files), False

    def _my_files(self, groups: Mapping[str, Tensors]) -> dict[str, dict[str, Tensor]]:
        """What this rank writes, by file; as the ranks agree on it. Exchanged again only where a rank's blocks have changed."""
        mine = {kind: {name: block_of(tensor) for name, tensor in group.items()} for kind, group in groups.items()}
        if not all(from_all_ranks(self._layout is not None and self._layout.mine == mine)):
            offers = from_all_ranks(mine)
            index = {kind: lay_out(kind, [offer[kind] for offer in offers], self.part_bytes) for kind in groups}
            self._layout = _Layout(mine, index)
        files: dict[str, dict[str, Tensor]] = {}
        for kind, group in groups.items():
            for name, entry in self._layout.index[kind].items():
                for piece in entry.pieces:
                    if piece.file.startswith(rank_stem(kind, self.rank, self.world_size)):
                        files.setdefault(piece.file, {})[name] = local_part(group[name])
        return files

    @property
    def latest(self) -> Path | None:
        """The checkpoint that is being written, else `current`; not collective."""
        return self._pending.final if self._pending else self.current

    @property
    def failed(self) -> bool:
        """Whether this process knows that the save under way has failed, which `wait` then says; not collective."""
        return self._pending is not None and self._pending.failed

    def news(self) -> list[str]:
        """What was saved since the last call, one line each; not collective, and only the first rank knows."""
        news, self._news = self._news, []
        return news

    def wait(self) -> None:
        """Return when the save under way, if there is one, is complete. InputError on all ranks where it has failed on any."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            self._on_every_rank(lambda: _result(pending.written))
            self._on_every_rank(lambda: pending.completed and _result(pending.completed))
        except OSError as refusal:
            pending.give_up()
            if self.rank == 0:
                shutil.rmtree(pending.partial, ignore_errors=True)
            raise InputError(self._describe(refusal, step_of(pending.final))) from None
        self.current = pending.final
        self.damaged.pop(pending.final, None)  # it is a new one now

    def close(self) -> None:
        """Return when no thread of this process writes any more. For a process that may end by an error: not collective."""
        if self._pending is not None:
            self._pending.patience = _AFTER_AN_ERROR
            self._pending.join()

    def _on_every_rank(self, work: Callable[[], T]) -> list[T]:
        """What `work` returned on each rank, once all are done. Where it failed on any, all raise an OSError with the reason."""
        try:
            outcome: T | OSError = work()
        except OSError as error:
            outcome = OSError(error.errno, f"{error.strerror or error} (rank {self.rank})")
        outcomes = from_all_ranks(outcome)
        if refusals := [each for each in outcomes if isinstance(each, OSError)]:
            raise refusals[0]
        return outcomes

    def _describe(self, refusal: OSError, step: int) -> str:
        before = f"{self.current} is untouched" if self.current else "no earlier checkpoint was touched"
        space = f"it takes {memory(self._needed / GIB)}, {memory(free_bytes(self.folder) / GIB)} are free"
        remedy = "free space there, or set a `run_dir` on a larger disk" if refusal.errno in _DISK_FULL else "check that folder"
        return (
            f"{self.folder}: the checkpoint of step {step} could not be saved: {refusal.strerror}; {space}; {before}. {remedy}, "
            "then start the same command again to resume"
        )

    # ── Which are kept, and which is the newest ───────────────────────────────────────────────────────────────────────────────

    def _prune(self, newest: Path | None, spared: int | None) -> None:
        """Remove all but the `keep` newest checkpoints, that of step `spared` and the newest up to step `before`, when `newest`
        is what was saved last; not collective. Damaged checkpoints are neither removed nor counted."""
        if self.rank == 0 and newest is not None and newest.parent == self.folder:
            steps = [path for path in step_folders(self.folder) if step_of(path) <= step_of(newest)]
            intact = [path for path in steps if path not in self.damaged and looks_complete(path)]
            early = next((path for path in intact if self.before is not None and step_of(path) <= self.before), None)
            remove(self.folder, [path for path in intact[self.keep :] if path != early and step_of(path) != spared])

    def abandon_newer(self, step: int) -> None:
        """Rename every checkpoint after `step`, for a run that goes on from `step`: otherwise the next automatic resume would
        continue the abandoned training. They are deleted when the run has saved its next checkpoint; damaged ones are not."""
        self.wait()
        if self.rank == 0:
            for path in [path for path in step_folders(self.folder) if step_of(path) > step]:
                aside = move_aside(path, REPLACED_STEP if path in self.damaged else ABANDONED_STEP)
                _log.warning("%s was renamed to %s: the run goes on from step %d", path, aside.name, step)
        from_all_ranks(None)  # nobody looks before all have their names

    def newest(self, *, before: int | None = None, look_only: bool = False) -> Path | None:
        """The newest intact checkpoint, of a step earlier than `before` if that is given, every byte verified; None if there is
        none. With `look_only` nothing on the disk changes, not even the name of what a dead writer has completed.

        A damaged one is reported through `logging`, kept in `damaged` and left where it is; then the one before it is tried.
        """
        self.wait()
        if self.rank == 0 and not look_only:
            finish_renames(self.folder)
            remove(self.folder, [])  # now: the next save would wait for it, seconds where a large one was broken off
        steps = from_all_ranks([step_of(path) for path in step_folders(self.folder)] if self.rank == 0 else [])[0]
        for step in [step for step in steps if before is None or step < before]:
            path = step_folder(self.folder, step)
            problems = self._verify(path)
            if not problems:
                self._verified = path
                return path
            self.damaged[path] = problems
            if self.rank == 0:
                _log.warning("%s is DAMAGED and is not used; trying the one before it. %s", path, "; ".join(problems))
        return None

    def owns(self, path: Path) -> bool:
        """Whether the checkpoint at `path` lies in this run's folder; not collective."""
        return path.resolve().parent == self.folder.resolve()

    def read_state(self, path: Path) -> dict[str, Any]:
        """The `state` of a checkpoint, verified but not loaded, to see what it belongs to. InputError if missing or damaged."""
        self._require_intact(path)
        return load_object(path / STATE, "resume from another checkpoint")

    def load(self, path: Path, model: Tensors, optimizer: Tensors) -> list[str]:
        """Copy the checkpoint at `path` into the given tensors, in place and whatever their sharding.

        Returns notes for the user, on dtypes that were converted. Raises InputError, before anything is copied, where a file is
        damaged and where names, shapes or integer dtypes differ.

        A rank reads the bytes of its own part, by mapping the files. Before that, every byte is hashed once, by one of the ranks.
        """
        self._require_intact(path)
        manifest = read_manifest(path)
        parts = [("model", model, manifest.model), ("optimizer", optimizer, manifest.optimizer)]
        if differing := [f"{kind}: {problem}" for kind, tensors, index in parts for problem in mismatches(index, tensors)]:
            remedy = "Resume with the recipe it was made by, or set another `run_dir`"
            raise InputError(f"{path}: does not fit this run: {'; '.join(differing)}. {remedy}")
        notes = [f"{kind}: {note}" for kind, tensors, index in parts for note in load_tensors(path, index, tensors)]
        self.current = path
        return notes

    def _require_intact(self, path: Path) -> None:
        """InputError unless every byte of the checkpoint at `path` is as it was written; hashes it once."""
        self.wait()
        if path != self._verified and (problems := self._verify(path)):
            raise InputError(f"{path}: cannot be used: {'; '.join(problem.removeprefix(f'{path}: ') for problem in problems)}")
        self._verified = path

    def _verify(self, path: Path) -> list[str]:
        """What is wrong with the checkpoint at `path`; each rank hashes its share of the files."""
        try:
            files = sorted(read_manifest(path).files, key=lambda file: file.name)
            problems = find_damage(path, files[self.rank :: self.world_size])
        except InputError as error:
            problems = [str(error)]
        return list(dict.fromkeys(problem for rank in from_all_ranks(problems) for problem in rank))


def _result(future: Future[T]) -> T:
    """The result of a saving thread's work; OSError for whatever it raised, so that all ranks are told."""
    error = future.exception()
    if error is not None and not isinstance(error, OSError):
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
    return future.result()


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
    token = folder / f".{PROOF}.0{PARTIAL}"
    if torch.distributed.get_rank() == 0:
        token.touch()
    from_all_ranks(None)  # it is there
    end = time.monotonic() + _SEEN_WITHIN
    while not (seen := folder.is_dir() and token.name in os.listdir(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    blind = [host for host in from_all_ranks(None if seen else socket.gethostname()) if host]
    if torch.distributed.get_rank() == 0:
        token.unlink()
    if blind:
        raise InputError(f"{folder}: {blind[0]} does not see the folder of the first machine; put it on a disk that all share")
