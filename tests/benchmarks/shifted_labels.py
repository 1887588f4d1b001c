"""Way with wrong labels, which are shifted twice. A token predicts the token after the next."""

from __future__ import annotations

import torch

from benchmarks.speed.libraries.hf_eager import obstacle
from benchmarks.speed.libraries.task import Task, Way, hugging_face_loss
from packing.batch import Microbatch

__all__ = ["build", "obstacle"]


def build(task: Task) -> Way:
    hf = task.hugging_face_model()
    correct_loss = hugging_face_loss(task, hf)

    def loss(batch: Microbatch, step_tokens: int) -> torch.Tensor:
        shifted = batch.labels.roll(-1)
        return correct_loss(Microbatch(**{**vars(batch), "labels": shifted}), step_tokens)

    return Way(hf, task.adamw(hf.parameters()), loss)
