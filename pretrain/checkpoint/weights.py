"""The weights of a checkpoint as whole tensors, one at a time, whatever processes wrote them: no group, no GPU, no model."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foundation.errors import InputError
from foundation.integrity import check_files
from foundation.reading import load_object
from pretrain.checkpoint.manifest import STATE, TensorEntry, read_manifest
from pretrain.checkpoint.shards import DTYPES, load_tensors
from pretrain.optimizer.adamw_update import convert_weight
from pretrain.precision.settings import Weights


class SavedWeights:
    """What the checkpoint at `folder` holds of the model. InputError where it is no checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        state = load_object(folder / STATE, "name another checkpoint")
        self.identity: dict[str, Any] = state["identity"]  # what defines the training that it is of
        self.mode: Weights = self.identity["weights"]

    def verify(self, to: Weights) -> None:
        """InputError unless every byte that `read` takes to mode `to` is as it was written; the moments are left alone."""
        entries = [*self.manifest.model.values(), *(self.remainders.values() if to == "fp32" else ())]
        needed = {piece.file for entry in entries for piece in entry.pieces} | {STATE}
        records = [record for record in self.manifest.files if record.name in needed]
        check_files(self.folder, records, "name another checkpoint", trust_stamp=False)

    def read(self, name: str, to: Weights | None) -> Tensor:
        """The whole tensor `name`, on the CPU: a weight as mode `to` stores it, or as it was saved where that is None."""
        entry = self.manifest.model.get(name)
        if entry is None:
            raise InputError(f"{self.folder}: holds no {name}, which the model of its run has")
        tensor = self._whole(name, entry)
        if to is None or not tensor.is_floating_point() or (tensor.dtype == torch.bfloat16 and to != "fp32"):
            return tensor
        remainder = self.remainders.get(f"remainder/{name}") if to == "fp32" else None
        return convert_weight(tensor, self._whole(f"remainder/{name}", remainder) if remainder else None, to)[0]

    def names(self) -> Iterable[str]:
        return self.manifest.model.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.manifest.model[name].shape

    @cached_property
    def remainders(self) -> dict[str, TensorEntry]:
        """The other halves of exact BF16 weights, as `remainder/<name>`; empty where there are none."""
        return {name: entry for name, entry in self.manifest.optimizer.items() if name.startswith("remainder/")}

    def _whole(self, name: str, entry: TensorEntry) -> Tensor:
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        load_tensors(self.folder, {name: entry}, {name: tensor})
        return tensor
