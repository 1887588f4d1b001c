"""A way that trains something else: its labels are shifted once more, so every token is to guess the one after the next."""

from __future__ import annotations

import torch

from benchmarks.ways.hf_eager import obstacle
from benchmarks.ways.task import Task, Way, hugging_face_loss
from packing.batch import Microbatch

__all__ = ["build", "obstacle"]


def build(task: Task) -> Way:
    hf = task.hugging_face_model()
    right = hugging_face_loss(task, hf)

    def loss(batch: Microbatch, step_tokens: int) -> torch.Tensor:
        wrong = batch.labels.roll(-1)
        return right(Microbatch(**{**vars(batch), "labels": wrong}), step_tokens)

    return Way(hf, task.adamw(hf.parameters()), loss)
