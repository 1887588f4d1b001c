"""The folder of one run: its files, its lock, and what its environment was."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from foundation.files import PARTIAL, locked
from foundation.reading import load_yaml

# in the folder of a run that is part of a matrix; `pretrain.compare.matrix` writes it
MATRIX_FILE = "matrix.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"  # written at a run's end
# of quantized operands; `pretrain.observe.operand_statistics` writes it
STATISTICS_FILE = "fp8_statistics.jsonl"
# which run each tracker goes on with; `pretrain.metrics.trackers` writes it
TRACKERS_FILE = "trackers.json"
# what may be there of a run that was killed before it wrote its config.yaml
_BEFORE_CONFIG = {MATRIX_FILE, STATISTICS_FILE}
# keys of a run's config.yaml
_OF_EVERY_RECIPE = {"name", "run_dir", "model", "data", "batch", "optimizer", "train", "weights"}
PACKAGES = (
    *(
        "torch",
        "transformers",
        "accelerate",
        "datasets",
        "tokenizers",
        "safetensors",
        "numpy",
        "pyarrow",
    ),
    *("transformer-engine", "flash-attn-4", "cut-cross-entropy", "triton"),
    *("torchao", "liger-kernel"),  # what benchmarks compare with
)


class RunFolder(ExitStack):
    """Creates the folder at `path` and locks it for this process; a context manager that releases the lock, as `close` does.

    With several ranks, rank 0 alone locks and writes it; to the others, `owner=False`, it is a set of paths. InputError where the
    folder cannot be made or another process holds it.
    """

    def __init__(self, path: Path, *, owner: bool = True) -> None:
        super().__init__()
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.config = path / "config.yaml"
        self.environment = path / "environment.json"
        self.audit = path / "audit.json"  # what runs in which precision, as it was found
        self.metrics = path / METRICS_FILE
        self.summary = path / SUMMARY_FILE
        self.loss_plot = path / "loss.png"
        self.final = path / "final"
        if not owner:
            return
        made = not path.exists()
        self.enter_context(locked(path / ".lock", self._refuse))
        if made:
            self.callback(self._remove_if_empty)
        # of a killed run: no other process is writing here now
        for leftover in path.glob(f".*{PARTIAL}"):
            leftover.unlink()

    def _refuse(self, holder: str) -> None:
        raise InputError(
            f"{self.path}: the run folder is in use by {holder}; wait for it or stop it, or set another `run_dir`"
        )

    def _remove_if_empty(self) -> None:
        """A start that was refused leaves no folder of a run that never was."""
        if os.listdir(self.path) == [".lock"]:
            shutil.rmtree(self.path, ignore_errors=True)


def check_free(path: Path) -> None:
    """InputError as RunFolder(path) would raise it now, and for somebody else's folder; creates nothing and keeps no lock."""
    check_ours(path)
    if path.exists():
        RunFolder(path).close()


def check_ours(path: Path) -> None:
    """InputError where `path` cannot be written, or is a folder that no run has made: nothing of somebody else's is written over.

    A run's is empty, or holds the run's config.yaml. The mark of a matrix is there before the run.
    """
    there = next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        raise InputError(
            f"{path}: cannot be used as the run folder: {there} cannot be written to; set another `run_dir`"
        )
    listed = os.listdir(path) if path.exists() else []
    strange = sorted(
        name for name in listed if not name.startswith(".") and name not in _BEFORE_CONFIG
    )
    config = path / "config.yaml"
    if strange and not (config.is_file() and load_yaml(config).keys() >= _OF_EVERY_RECIPE):
        raise InputError(
            f"{path}: holds {strange[0]} and no config.yaml of a run; set another `run_dir`, or move that away"
        )


def describe_environment(accelerate: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's figures depend on beside its settings: versions, device, commit and accelerate's settings."""
    import torch  # slow to import, and a run folder in use must be refused at once

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
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(root: Path) -> dict[str, Any] | None:
    """Commit of the code at `root` and whether files differ from it; None if `root` is not the top of a git checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    # installed, it may lie somewhere below another project's checkout
    if not (root / ".git").exists():
        return None
    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None
