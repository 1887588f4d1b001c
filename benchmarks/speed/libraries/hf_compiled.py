"""Plain Hugging Face with torch.compile around the complete model, including the loss."""

from __future__ import annotations

import shutil

import torch

from benchmarks.speed.libraries.task import Task, Way, hugging_face_loss


def obstacle(device: torch.device) -> str | None:
    if device.type == "cpu" and shutil.which("g++") is None:
        return "needs a C++ compiler to compile for a CPU, and there is no g++"
    return None


def build(task: Task) -> Way:
    hf = task.hugging_face_model()
    return Way(hf, task.adamw(hf.parameters()), hugging_face_loss(task, torch.compile(hf)))
