"""Accelerate set up: what it would do behind our back is refused, what is left of it does nothing to the numbers."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from pretrain.model.distributed import complete_topology, describe_topology, device_of
from pretrain.model.sharding import placed_as_planned


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    """accelerate keeps its state in the process, part of it in the environment."""
    before = dict(os.environ)
    os.environ["ACCELERATE_USE_CPU"] = "true"
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(before)


def test_one_process_on_a_cpu() -> None:
    complete_topology(accelerator := Accelerator())
    assert describe_topology(accelerator) == {"distributed_type": "NO", "processes": 1, "device": "cpu", "sharded": False}
    name, memory = device_of(accelerator)
    assert name == "CPU" and memory > 2**28
    assert accelerator.mixed_precision == "no"


def test_preparing_on_one_process_changes_neither_model_nor_optimizer() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    complete_topology(accelerator := Accelerator())
    with placed_as_planned(accelerator, model, optimizer, torch.bfloat16):
        prepared, wrapped = accelerator.prepare(model, optimizer)
    assert prepared is model and wrapped.optimizer is optimizer and optimizer.param_groups[0]["params"][0] is model.weight
    assert model.weight.dtype == torch.float32
    accelerator.backward(prepared(torch.ones(1, 4)).sum())
    assert (model.weight.grad == 1).all()
