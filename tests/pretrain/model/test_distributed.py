"""Accelerate set up: what it would do behind our back is refused, what is left of it does nothing to the numbers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import nn

from pretrain.model.distributed import accumulating, describe_topology, device_of, make_accelerator, prepare, unwrapped


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
    accelerator = make_accelerator()
    assert describe_topology(accelerator) == {"distributed_type": "NO", "processes": 1, "device": "cpu", "sharded": False}
    name, memory = device_of(accelerator)
    assert name == "CPU" and memory > 2**28
    assert accelerator.mixed_precision == "no"


def test_preparing_on_one_process_changes_neither_model_nor_optimizer() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = make_accelerator()
    prepared, same = prepare(accelerator, model, optimizer, torch.bfloat16)
    assert prepared is model and unwrapped(prepared) is model and same is optimizer
    assert model.weight.dtype == torch.float32
    with accumulating(accelerator, prepared):
        accelerator.backward(prepared(torch.ones(1, 4)).sum())
    assert (model.weight.grad == 1).all()


def test_ddp_copies_no_buffers_and_gives_no_warning(tmp_path: Path) -> None:
    """A real process group, of one process: what accelerate wraps under MULTI_GPU."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        accelerator = make_accelerator()
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepared, _ = prepare(accelerator, model, torch.optim.AdamW(model.parameters()), torch.float32)
        assert isinstance(prepared, nn.parallel.DistributedDataParallel)
        assert unwrapped(prepared) is model
        assert not prepared.will_sync_module_buffers()
    finally:
        torch.distributed.destroy_process_group()
