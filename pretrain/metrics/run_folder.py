"""The folder of a run: its files, its lock, and the description of its environment."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.files import PARTIAL, locked
from foundation.reading import load_yaml

# Marks the run as a cell of a matrix. Written by `pretrain.compare.matrix_run`.
MATRIX_FILE = "matrix.json"
METRICS_FILE = "metrics.jsonl"
# Written at the end of a run.
SUMMARY_FILE = "summary.json"
# Statistics of quantized operands. Written by `pretrain.observe.operand_statistics`.
STATISTICS_FILE = "fp8_statistics.jsonl"
# Names the run that each tracker continues. Written by `pretrain.metrics.trackers`.
TRACKERS_FILE = "trackers.json"
# Files that exist before a run has written its config.yaml.
_BEFORE_CONFIG = {MATRIX_FILE, STATISTICS_FILE}
# Keys in the config.yaml of every run.
_CONFIG_KEYS = {"name", "run_dir", "model", "data", "batch", "optimizer", "train", "weights"}
# Packages whose versions are recorded.
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
    # Benchmarks compare with these two.
    "torchao",
    "liger-kernel",
)


class RunFolder(ExitStack):
    """The folder of a run, created at `path` and locked for this process.

    It is a context manager that releases the lock, as `close` does. With several ranks only rank 0
    locks and writes the folder. With `owner=False`, on the other ranks, it only holds the paths.
    Raises InputError if the folder cannot be created or another process has locked it.
    """

    def __init__(self, path: Path, *, owner: bool = True) -> None:
        super().__init__()
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        # The observed precision of every matrix product.
        self.audit = path / "audit.json"
        self.metrics = path / METRICS_FILE
        self.summary = path / SUMMARY_FILE
        self.loss_plot = path / "loss.png"
        self.final = path / "final"
        if not owner:
            return
        is_new = not path.exists()
        self.enter_context(locked(path / ".lock", self._refuse))
        if is_new:
            self.callback(self._remove_if_empty)
        # Partial files of a killed run. No other process writes here while we hold the lock.
        for leftover in path.glob(f".*{PARTIAL}"):
            leftover.unlink()

    def _refuse(self, holder: str) -> None:
        """Raise InputError because `holder` has locked the folder."""
        raise InputError(
            f"{self.path}: the run folder is in use by {holder}; wait for it or stop it, or set "
            "another `run_dir`"
        )

    def _remove_if_empty(self) -> None:
        """Delete a new folder if the start was refused before anything was written."""
        if os.listdir(self.path) == [".lock"]:
            shutil.rmtree(self.path, ignore_errors=True)


def check_free(path: Path) -> None:
    """Raise InputError if a run could not use the folder now. Creates nothing and keeps no lock."""
    check_ours(path)
    if path.exists():
        RunFolder(path).close()


def check_ours(path: Path) -> None:
    """Raise InputError if `path` cannot be written or is not the folder of a run.

    The folder of a run is empty or holds the run's config.yaml. In a matrix it may also hold the
    mark of the matrix. Folders with other files are refused, so that nothing is overwritten.
    """
    absolute = path.absolute()
    existing = next(folder for folder in (absolute, *absolute.parents) if folder.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        raise InputError(
            f"{path}: cannot be used as the run folder: {existing} cannot be written to; set "
            "another `run_dir`"
        )
    names = {*os.listdir(path)} if path.exists() else set()
    foreign = sorted(name for name in names - _BEFORE_CONFIG if not name.startswith("."))
    config = path / "config.yaml"
    if foreign and not (config.is_file() and load_yaml(config).keys() >= _CONFIG_KEYS):
        raise InputError(
            f"{path}: holds {foreign[0]} and no config.yaml of a run; set another `run_dir`, or "
            f"move {foreign[0]} away"
        )


def describe_environment(accelerate: Mapping[str, Any]) -> dict[str, Any]:
    """Return versions, devices, commit and accelerate's settings: what results depend on."""
    import torch  # imported late, because a run folder in use must be refused at once

    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "packages": {package: version for package in PACKAGES if (version := version_of(package))},
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF")
        or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
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
    """Return the commit of the code at `root` and whether files differ from it.

    Return None if `root` is not the top folder of a git checkout.
    """

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    with suppress(OSError, subprocess.CalledProcessError):
        # An installed package may be somewhere below the checkout of another project.
        if (root / ".git").exists():
            return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    return None
