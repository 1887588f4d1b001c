"""The folder of a run: its files, its lock, and the description of its environment."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from foundation.errors import InputError
from foundation.files import PARTIAL, locked, nearest_existing
from foundation.reading import load_yaml
from pretrain.settings.config import CONFIG_FILE

# This file exists if the run belongs to a matrix of runs. `lab.experiments.matrix_run` writes it.
MATRIX_FILE = "matrix.json"
METRICS_FILE = "metrics.jsonl"
# A run writes this file last, after it has reached its last step.
SUMMARY_FILE = "summary.json"
# Statistics of quantized operands. `pretrain.observe.operand_statistics` writes this file.
STATISTICS_FILE = "fp8_statistics.jsonl"
# Identifier of the run in trackers, so that they continue the run after a resume.
# `pretrain.metrics.trackers` writes this file.
TRACKERS_FILE = "trackers.json"
# Files that may exist before a run has written its config.yaml.
_BEFORE_CONFIG = {MATRIX_FILE, STATISTICS_FILE}
# Name of a file that `replace_file` has not renamed: the final name with the number of the process.
_LEFTOVER = re.compile(rf"\.\w+\.\w+\.\d+{PARTIAL}")
# Keys that the config.yaml of every run has.
_CONFIG_KEYS = {"name", "run_dir", "model", "data", "batch", "optimizer", "train", "weights"}
# Packages whose versions are recorded in environment.json.
PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyarrow",
    "transformer-engine",
    "flash-attn-4",
    "cut-cross-entropy",
    "triton",
    # The benchmarks compare this project with the following two packages.
    "torchao",
    "liger-kernel",
)


class StoredCopy(Protocol):
    """The copy of a run folder in object storage (`pretrain.run.stored_run.StoredRun`)."""

    def restore(self) -> None: ...
    def claim(self) -> None: ...
    def store(self) -> None: ...
    def go_back(self, step: int) -> None: ...
    def close(self, kind: object, error: BaseException | None, trace: object) -> None: ...


class RunFolder(ExitStack):
    """The paths of a run's files, and the lock of the run folder.

    The constructor creates the folder `path` and locks it for this process. `close` and the end of
    a `with` statement release the lock. With `owner=False`, the folder is neither created nor
    locked, and the object only has the paths. With several ranks, only rank 0 is the owner.

    `stored` is the copy of the run in object storage, or None for other runs and ranks. The
    constructor restores the run from it if necessary. `remedy` ends the message about a folder in
    use.

    Raises InputError if the folder cannot be created, or if another process has locked it.
    """

    def __init__(
        self,
        path: Path,
        *,
        owner: bool = True,
        stored: StoredCopy | None = None,
        remedy: str = "set another `run_dir`",
    ) -> None:
        super().__init__()
        self.path = path
        self.remedy = remedy
        self.stored = stored
        self.checkpoints = path / "checkpoints"
        self.config = path / CONFIG_FILE
        self.environment = path / "environment.json"
        # The precision in which the run has computed each matrix product.
        self.audit = path / "audit.json"
        self.metrics = path / METRICS_FILE
        self.summary = path / SUMMARY_FILE
        self.final = path / "final"
        if not owner:
            return
        # If a lock or `restore` fails, the locks taken so far are released at once.
        with ExitStack() as locks:
            if stored is not None:
                # The folder itself is replaced if the run is restored, so lock a file beside it.
                locks.enter_context(locked(path.with_name(f".{path.name}.lock"), self._refuse))
                stored.restore()
            is_new = not path.exists()
            locks.enter_context(locked(path / ".lock", self._refuse))
            self.enter_context(locks.pop_all())
        if is_new:
            self.callback(self._remove_if_empty)
        # Delete partial files of a killed run. No other process writes to the folder, because this
        # process holds the lock.
        for leftover in path.iterdir():
            if _LEFTOVER.fullmatch(leftover.name):
                leftover.unlink()

    def claim(self) -> None:
        """Start to store the run, if it is stored. `close` waits until all files are stored.

        Raises InputError if the address in object storage cannot be written.
        """
        if self.stored is not None:
            self.stored.claim()
            self.push(self.stored.close)

    def _refuse(self, holder: str) -> None:
        """Raise InputError because `holder` has locked the folder."""
        raise InputError(
            f"{self.path}: the folder is in use by {holder}; either wait until that process has "
            f"ended, or stop it, or {self.remedy}"
        )

    def _remove_if_empty(self) -> None:
        """Delete the folder if it contains nothing but the lock file.

        This is the case if the run was refused before it wrote a file.
        """
        if os.listdir(self.path) == [".lock"]:
            shutil.rmtree(self.path, ignore_errors=True)


def check_ours(path: Path) -> None:
    """Raise InputError if `path` is not writable or contains files that belong to no run.

    A missing folder and an empty folder are accepted. A folder with other files is accepted only if
    it has the config.yaml of a run, so that no foreign file is overwritten. Hidden files and files
    that may exist before config.yaml are ignored.
    """
    existing = nearest_existing(path)
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise InputError(
            f"{path}: cannot be used as the run folder, because {existing} is not a writable "
            "folder; set another `run_dir`"
        )
    for folder in (path / "checkpoints", path / "final"):
        if folder.is_symlink():
            raise InputError(
                f"{folder}: is a link, and a run writes and deletes only in its own folder; move "
                "the folder that it leads to here, or set another `run_dir`"
            )
    names = {*os.listdir(path)} if path.exists() else set()
    foreign = sorted(name for name in names - _BEFORE_CONFIG if not name.startswith("."))
    config = path / CONFIG_FILE
    if foreign and not (config.is_file() and load_yaml(config).keys() >= _CONFIG_KEYS):
        example = foreign[0]
        raise InputError(
            f"{path}: the folder contains {example}, but no config.yaml of a run; either set "
            f"another `run_dir`, or move {example} out of the folder"
        )


def describe_environment(accelerate: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of environment.json: versions, devices, commit and launch settings.

    `accelerate` contains the settings of Accelerate, which are recorded unchanged.
    """
    # Imported here, because reports import this file and need no torch.
    import torch

    versions = {package: version for package in PACKAGES if (version := version_of(package))}
    system = f"{platform.system()} {platform.machine()}"
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "system": system,
        "cpu_cores": os.cpu_count(),
        "packages": versions,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "git": _git(Path(__file__).resolve().parents[2]),
        "accelerate": dict(accelerate),
    }


@cache
def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path) -> dict[str, Any] | None:
    """Return the commit of the code at `root`. `dirty` is True if files differ from this commit.

    Return None if `root` is not the top folder of a git checkout or git is not available.
    """
    output_of = partial(subprocess.check_output, cwd=root, stderr=subprocess.DEVNULL, text=True)
    with suppress(OSError, subprocess.CalledProcessError):
        # `root` itself must be a checkout. If this package is installed inside the checkout of
        # another project, git would return the commit of that project.
        if (root / ".git").exists():
            commit = output_of(["git", "rev-parse", "HEAD"]).strip()
            changes = output_of(["git", "status", "--porcelain"])
            return {"commit": commit, "dirty": bool(changes)}
    return None
