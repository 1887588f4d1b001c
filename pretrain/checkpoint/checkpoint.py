"""Checkpoints that are complete or absent, never half, and that any world size can load.

    checkpoints/
      step-00000100/                            complete
        model-00000-of-00002.safetensors        parameters under their Hugging Face names, by rank
        optimizer-00000-of-00002.safetensors
        state.json                              step, tokens and what defines the training
        manifest.json                           sizes, SHA-256 and tensor index; written last
      .partial-step-00000200/                   while it is written; once its manifest is there, only the name is missing
      step-00000150.replaced-1/                 given up by the run, kept for the user to look at or remove
      .removed-step-00000050/                   while it is deleted

Each file is flushed to the disk, the manifest comes last, and only then does the folder get its name. So a process may die at any
instruction, and the machine at any moment: a folder named step-* is whole. Disks still flip bits and people still copy folders
halfway, so every byte is hashed again before it is trusted.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed
from torch import Tensor

from foundation.errors import InputError
from foundation.files import fsync, write_file
from foundation.integrity import THREADS, FileRecord, find_damage, wrong_sizes
from foundation.reading import load_object
from foundation.units import memory
from pretrain.checkpoint.manifest import MANIFEST, Manifest, TensorEntry, read_manifest
from pretrain.checkpoint.shards import (
    PART_BYTES,
    block_of,
    lay_out,
    load_tensors,
    mismatches,
    rank_stem,
    write_tensors,
)
from pretrain.optimizer.adamw_update import local_part

STATE = "state.json"
_STEP = re.compile(r"step-\d{8,}")
_PARTIAL, _REMOVED = ".partial-", ".removed-"
_DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_log = logging.getLogger(__name__)

T = TypeVar("T")
Tensors = Mapping[str, Tensor]


class Checkpoints:
    """The checkpoints of one run.

    Where torch.distributed is initialised, every method is collective: all ranks call it, in the same order.
    """

    def __init__(self, folder: Path, keep: int, *, part_bytes: int = PART_BYTES) -> None:
        self.folder = folder
        self.keep = keep
        self.part_bytes = part_bytes
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.rank = torch.distributed.get_rank() if distributed else 0
        self.world_size = torch.distributed.get_world_size() if distributed else 1
        self.current: Path | None = None  # what the tensors in memory were last saved to or loaded from
        self.damaged: dict[Path, list[str]] = {}  # found by newest(): what is wrong with each
        self._verified: Path | None = None  # found intact by newest(): load() need not hash it again

    def save(self, step: int, model: Tensors, optimizer: Tensors, state: Mapping[str, Any]) -> Path:
        """Write checkpoint `step`, then prune; returns its path. A step just saved or loaded is not written again.

        `model` holds parameters and persistent buffers by Hugging Face name (a tied tensor once), `optimizer` whatever tensors
        the optimizer keeps, under names that a later run gives them again; both on any device, plain or DTensor. `state` is JSON.
        Raises InputError where the file system refuses (full, read-only, not shared by all ranks); what was saved before stays.
        """
        final = step_folder(self.folder, step)
        if self.current == final:
            return final
        partial = final.with_name(f"{_PARTIAL}{final.name}")
        groups = {"model": model, "optimizer": optimizer}
        mine = {kind: {name: block_of(tensor) for name, tensor in group.items()} for kind, group in groups.items()}
        offers = self._gather(mine)
        index = {kind: lay_out(kind, [offer[kind] for offer in offers], self.part_bytes) for kind in groups}
        state_json = json.dumps(dict(state), indent=1, allow_nan=False).encode()
        try:
            self._on_every_rank(lambda: self.rank == 0 and _make_empty(partial))
            written = self._on_every_rank(lambda: self._write_shards(partial, index, groups))
            files = [record for records in written for record in records]
            files.append(FileRecord(STATE, len(state_json), {"sha256": hashlib.sha256(state_json).hexdigest()}))
            manifest = Manifest(step, self.world_size, files, index["model"], index["optimizer"])
            self._on_every_rank(lambda: self.rank == 0 and _complete(partial, final, manifest, state_json))
        except OSError as refusal:
            if self.rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise InputError(self._describe(refusal, step, bytes_needed(model, optimizer))) from None
        self.current = final
        self.damaged.pop(final, None)  # set aside, where it was
        self.prune()
        return final

    def _write_shards(
        self, partial: Path, index: dict[str, dict[str, TensorEntry]], groups: dict[str, Tensors]
    ) -> list[FileRecord]:
        """Write this rank's files into `partial`, several at a time."""
        mine: dict[str, dict[str, Tensor]] = {}
        for kind, group in groups.items():
            for name, entry in index[kind].items():
                for piece in entry.pieces:
                    if piece.file.startswith(rank_stem(kind, self.rank, self.world_size)):
                        mine.setdefault(piece.file, {})[name] = local_part(group[name])
        with ThreadPoolExecutor(THREADS) as threads:
            return list(threads.map(lambda file: write_tensors(partial / file, mine[file]), mine))

    def _gather(self, item: T) -> list[T]:
        """What every rank passed, in the order of the ranks; small objects only."""
        gathered: list[Any] = [item] * self.world_size
        if self.world_size > 1:
            torch.distributed.all_gather_object(gathered, item)
        return gathered

    def _on_every_rank(self, work: Callable[[], T]) -> list[T]:
        """What `work` returned on each rank, once all are done. Where the file system refused any, all raise its OSError."""
        try:
            outcome: T | OSError = work()
        except OSError as error:
            outcome = OSError(error.errno, f"{error.strerror or error} (rank {self.rank})")
        outcomes = self._gather(outcome)
        if refusals := [each for each in outcomes if isinstance(each, OSError)]:
            raise refusals[0]
        return outcomes

    def _describe(self, refusal: OSError, step: int, needed: int) -> str:
        before = f"{self.current} is untouched" if self.current else "no earlier checkpoint was touched"
        full = "Free space there, or move the run folder to a larger disk"
        remedy = full if refusal.errno in _DISK_FULL else "Check that folder and its permissions"
        space = f"It takes {memory(needed / 2**30)}, {memory(_free_bytes(self.folder) / 2**30)} are free"
        return (
            f"{self.folder}: the checkpoint of step {step} could not be saved: {refusal.strerror}. {space}; {before}. {remedy}, "
            "then start the same command again to resume."
        )

    def prune(self) -> None:
        """Remove all but the `keep` newest checkpoints, and what dead writers left. Does nothing before this run's first save.

        Damaged checkpoints, and those newer than the one just saved, are neither removed nor counted.
        """
        if self.rank != 0 or self.current is None or self.current.parent != self.folder:
            return
        steps = [path for path in step_folders(self.folder) if step_of(path) <= step_of(self.current)]
        intact = [path for path in steps if path not in self.damaged and _looks_complete(path)]
        _remove(self.folder, intact[self.keep :])

    def set_aside_newer(self, step: int) -> list[Path]:
        """Rename every checkpoint after `step` to `<name>.replaced-<n>`, for a run that goes back and continues from `step`.

        Otherwise the next automatic resume would continue the abandoned training. Returns the new paths.
        """
        newer = [path for path in step_folders(self.folder) if step_of(path) > step] if self.rank == 0 else []
        return self._gather([_set_aside(path) for path in newer])[0]

    def newest(self, *, before: int | None = None, look_only: bool = False) -> Path | None:
        """The newest intact checkpoint, of a step earlier than `before` if that is given, every byte verified; None if there is
        none. With `look_only` nothing on the disk changes, not even the name of what a dead writer has completed.

        A damaged one is reported through `logging`, kept in `damaged` and left where it is; then the one before it is tried.
        """
        found = []
        if self.rank == 0:
            if not look_only:
                _finish_renames(self.folder)
            found = [path for path in step_folders(self.folder) if before is None or step_of(path) < before]
        for path in self._gather(found)[0]:
            problems = self._verify(path)
            if not problems:
                self._verified = path
                return path
            self.damaged[path] = problems
            if self.rank == 0:
                _log.warning("%s is DAMAGED and is not used; trying the one before it. %s", path, "; ".join(problems))
        return None

    def read_state(self, path: Path) -> dict[str, Any]:
        """The `state` of a checkpoint, verified but not loaded, to see what it belongs to. InputError if missing or damaged."""
        self._require_intact(path)
        return load_object(path / STATE, "resume from another checkpoint")

    def load(self, path: Path, model: Tensors, optimizer: Tensors) -> list[str]:
        """Copy the checkpoint at `path` into the given tensors, in place and whatever their sharding.

        Returns notes for the user, on dtypes that were converted. Raises InputError, before anything is copied, where a file is
        damaged or names, shapes or integer dtypes differ.
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
        if path != self._verified and (problems := self._verify(path)):
            remedy = "--resume takes a step-* folder of a run's `checkpoints`, or auto, which finds the newest intact one"
            raise InputError(f"{path}: cannot be used: {'; '.join(problems)}; {remedy}")
        self._verified = path

    def _verify(self, path: Path) -> list[str]:
        """What is wrong with the checkpoint at `path`; each rank hashes its share of the files."""
        try:
            files = sorted(read_manifest(path).files, key=lambda file: file.name)
            problems = find_damage(path, files[self.rank :: self.world_size])
        except InputError as error:
            problems = [str(error)]
        return list(dict.fromkeys(problem for rank in self._gather(problems) for problem in rank))


def step_folder(parent: Path, step: int) -> Path:
    return parent / f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint folder; ValueError for another name."""
    return int(folder.name.removeprefix("step-"))


def step_folders(parent: Path) -> list[Path]:
    """All folders in `parent` that are named like a checkpoint, newest first."""
    folders = [path for path in parent.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _complete(partial: Path, final: Path, manifest: Manifest, state_json: bytes) -> None:
    """Add the state and, last, the manifest to the tensor files in `partial`; then give the folder its name."""
    write_file(partial / STATE, state_json)
    if wrong := wrong_sizes(partial, manifest.files):
        raise OSError(f"{wrong[0]}: rank 0 does not find what another rank wrote; all machines must share this file system")
    write_file(partial / MANIFEST, manifest.to_json())
    fsync(partial)
    if final.exists():
        _set_aside(final)
    os.rename(partial, final)
    fsync(final.parent)


def _finish_renames(parent: Path) -> None:
    """Name the partial folders that have their manifest: their writers died just before doing so."""
    for partial in parent.glob(f"{_PARTIAL}step-*"):
        final = parent / partial.name.removeprefix(_PARTIAL)
        if not final.exists() and _looks_complete(partial):
            os.rename(partial, final)
            fsync(parent)


def _looks_complete(folder: Path) -> bool:
    """Whether all files are there with their sizes. Hashing them is left to loading."""
    try:
        return not wrong_sizes(folder, read_manifest(folder).files)
    except InputError:
        return False


def _set_aside(folder: Path) -> Path:
    """Free the name `step-*` without losing the data."""
    number = 1
    while (aside := folder.with_name(f"{folder.name}.replaced-{number}")).exists():
        number += 1
    os.rename(folder, aside)
    _log.warning("%s was set aside as %s; remove it when you do not need it", folder, aside.name)
    return aside


def _remove(parent: Path, folders: list[Path]) -> None:
    """Delete `folders` and what dead writers and deleters left in `parent`. A failure is logged: it costs only space."""
    try:
        for folder in folders:
            # Renamed first, so that an interrupted deletion leaves nothing that looks like a checkpoint.
            os.rename(folder, folder.with_name(f"{_REMOVED}{folder.name}"))
        for prefix in (_REMOVED, _PARTIAL):
            for leftover in parent.glob(f"{prefix}step-*"):
                shutil.rmtree(leftover)
    except OSError as error:
        _log.warning("%s: an old checkpoint could not be removed: %s", parent, error)


def bytes_needed(model: Tensors, optimizer: Tensors) -> int:
    """Bytes that one checkpoint of these tensors takes on disk, over all ranks; headers and manifest are rounded up to 1 MiB.

    A DTensor counts whole, a replicated one once.
    """
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.values(), *optimizer.values())) + 2**20


def check_space(folder: Path, needed: int) -> None:
    """InputError if the disk of `folder` (which need not exist yet) has less than `needed` bytes free: a start-up check."""
    free = _free_bytes(folder)
    if free < needed:
        raise InputError(
            f"{folder}: checkpoints need {memory(needed / 2**30)} there and {memory(free / 2**30)} are free; "
            "free space, lower `checkpoint.keep`, or point `run_dir` to a larger disk"
        )


def _free_bytes(folder: Path) -> int:
    """Bytes free on the disk of `folder`, or of its nearest parent that exists."""
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free
