"""Parity that has passed is remembered, outside of runs: the same code on the same device need not be held to it again.

A result is a file in the user's cache folder, named after the hash of all that decides what is computed. What cannot be read is
as if it were not there; what cannot be written is not kept. Failures are never kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from foundation.files import cache_folder, replace_file
from pretrain.metrics.run_folder import version_of

VERSION = 2
_ROOT = Path(__file__).resolve().parents[2]
_CODE = ("foundation", "packing", "pretrain")
_LIBRARIES = (
    *(
        "torch",
        "transformers",
        "accelerate",
        "triton",
        "transformer_engine",
        "flash_attn",
        "flash-attn-4",
        "nvidia-cutlass-dsl",
        "cut-cross-entropy",
        "kernels",
    ),
    *(f"nvidia-{name}{cuda}" for name in ("cudnn", "cublas") for cuda in ("-cu12", "-cu13", "")),
)
# What of the environment these libraries choose their kernels by. Where they keep files is another matter, and TORCHELASTIC_ (the
# launcher's) is new in every run.
_VARIABLES = re.compile(
    r"(NVTE|NVIDIA|CUDA|CUBLAS|CUBLASLT|CUDNN|TORCH|TORCHINDUCTOR|PYTORCH|TRITON|ATEN|MKL|ONEDNN|DNNL|NCCL)_\w+"
)
_OF_PLACES = re.compile(r"\w+_(VISIBLE_DEVICES|DIRS?|CACHE|HOME|PATH|FILE)")
_DRIVER = Path("/proc/driver/nvidia/version")


def folder() -> Path:
    return cache_folder("parity")


@cache
def code_hash() -> str:
    """Returns the hash of every Python file that a run may go through."""
    digest = hashlib.sha256()
    for path in sorted([*_ROOT.glob("*.py"), *(path for room in _CODE for path in (_ROOT / room).rglob("*.py"))]):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Returns the versions of those libraries that compute and are installed."""
    return {name: version for name in _LIBRARIES if (version := version_of(name))}


def surroundings() -> dict[str, Any]:
    """What else kernels are chosen by: variables of the environment, the driver and the processor."""
    variables = {key: value for key, value in os.environ.items() if _VARIABLES.fullmatch(key) and not _OF_PLACES.fullmatch(key)}
    driver = None
    with suppress(OSError, UnicodeDecodeError):
        driver = _DRIVER.read_text(encoding="utf-8")
    return {"variables": variables, "driver": driver, "processor": torch.backends.cpu.get_cpu_capability()}


@dataclass(frozen=True)
class KeptResult:
    """A place for the result of `subject`: device, model, precision and all else that decides what is computed, as JSON."""

    subject: Mapping[str, Any]

    @property
    def of(self) -> str:
        """All that decides what is computed, as JSON."""
        whole = {"version": VERSION, "code": code_hash(), "libraries": versions(), "surroundings": surroundings(), **self.subject}
        return json.dumps(whole, sort_keys=True, default=str)

    @property
    def path(self) -> Path:
        return folder() / f"{hashlib.sha256(self.of.encode()).hexdigest()}.json"

    def read(self) -> dict[str, Any] | None:
        """The record of a parity that has passed, with `kept_in` and `date`; None where there is none that can be read."""
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            record, date = found["parity"], found["date"]
            whole = json.dumps(found["of"], sort_keys=True) == json.dumps(json.loads(self.of), sort_keys=True)  # no other's
            if not whole or record["failures"] != [] or not record["plain"]["tensors_compared"] > 0:
                return None
            return {**record, "source": f"kept from {date}", "kept_in": str(self.path)}
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, record: Mapping[str, Any]) -> None:
        """Keep the record of a parity that has passed; elsewhere nothing happens."""
        content = {"date": time.strftime("%Y-%m-%d"), "parity": record, "of": json.loads(self.of)}
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps(content, indent=1, default=str).encode())
