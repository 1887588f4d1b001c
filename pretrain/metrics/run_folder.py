"""The folder of one run: its files, its lock, and what its environment was."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from foundation.errors import InputError
from foundation.files import PARTIAL, FileLock, replace_file

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "pyarrow")
OPTIONAL_PACKAGES = ("transformer-engine", "flash-attn", "cut-cross-entropy", "triton")


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
        self.audit = path / "audit.json"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.loss_plot = path / "loss.png"
        self.final = path / "final"
        self._lock: FileLock | None = None
        if not owner:
            return
        try:
            self._lock = self.enter_context(FileLock(path / ".lock", self._refuse))
            for leftover in path.glob(f".*{PARTIAL}"):  # of a killed run: no other process is writing here now
                leftover.unlink()
        except OSError as error:
            raise InputError(f"{path}: cannot be used as the run folder: {error.strerror}; set another `run_dir`") from None

    @property
    def in_place(self) -> bool:
        """Whether it is still there and ours; a rank that is not its owner takes it for granted."""
        return self._lock is None or self._lock.in_place

    def moved_to(self) -> Path | None:
        """Where it is now, if somebody renamed it and the system says so."""
        lock = self._lock.moved_to() if self._lock else None
        return lock.parent if lock else None

    def _refuse(self, holder: str) -> None:
        raise InputError(f"{self.path}: the run folder is in use by {holder}; wait for it or stop it, or set another `run_dir`")

    def write_json(self, path: Path, content: Mapping[str, Any]) -> None:
        """Replace the file at `path` by `content`, at no moment half; InputError where the disk refuses."""
        self._replace(path, json.dumps(content, indent=2).encode() + b"\n")

    def write_yaml(self, path: Path, content: Mapping[str, Any]) -> None:
        """As `write_json`, in YAML with the keys in their order; `content` is plain JSON-like values."""
        self._replace(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120).encode())

    def _replace(self, path: Path, data: bytes) -> None:
        try:
            replace_file(path, data)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}; what it held before is untouched") from None


def check_free(path: Path) -> None:
    """InputError as RunFolder(path) would raise it now; creates nothing and keeps no lock."""
    if path.exists():
        RunFolder(path).close()


def describe_environment(accelerate: Mapping[str, Any]) -> dict[str, Any]:
    """What a run's figures depend on beside its settings: versions, device, driver, commit and accelerate's settings."""
    import torch  # slow to import, and a run folder in use must be refused at once

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    versions = {package: _version(package) for package in PACKAGES}
    versions |= {package: version for package in OPTIONAL_PACKAGES if (version := _version(package))}
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_cores": os.cpu_count(),
        "packages": versions,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "driver": _driver() if gpus else None,
        "git": _git(Path(__file__).resolve().parents[2]),
        "accelerate": dict(accelerate),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The NVIDIA driver's version as its kernel module states it; None where the module is not visible."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else None


def _git(root: Path) -> dict[str, Any] | None:
    """Commit of the code at `root` and whether files differ from it; None if `root` is not the top of a git checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return None  # installed somewhere below another project's checkout
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.CalledProcessError):
        return None
