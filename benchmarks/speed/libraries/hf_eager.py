"""Plain Hugging Face, eager: transformers, an optimizer and a loop."""

from __future__ import annotations

import torch

from benchmarks.speed.libraries.task import Task, Way, hugging_face_loss


def obstacle(device: torch.device) -> str | None:
    return None


def build(task: Task) -> Way:
    hf = task.hugging_face_model()
    return Way(hf, task.adamw(hf.parameters()), hugging_face_loss(task, hf))
