"""Test that two ranks roll back together and stop together."""

from __future__ import annotations

import os
import socket
import time
import weakref
from typing import Any

import pytest

import train_accelerate
from foundation.errors import InputError
from packing.batch import BatchStream, StepBatches
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import read_metrics
from pretrain.run.assembly import Assembly
from tests.conftest import Trainer

pytestmark = pytest.mark.multi


def main_with_one_model() -> int | None:
    """Run the launcher. Assert that each model is freed before the next one is built."""
    models: list[weakref.ref] = []
    assemble = train_accelerate.assemble

    def assemble_alone(*arguments: Any) -> Assembly:
        assert all(model() is None for model in models)
        assembly = assemble(*arguments)
        models.append(weakref.ref(assembly.hf))
        return assembly

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_accelerate, "assemble", assemble_alone)
        return train_accelerate.main()


@pytest.mark.parametrize("topology", ["ddp", "fsdp2"])
def test_processes_go_back_and_stop_together(topology: str, train_here: Trainer) -> None:
    """The learning rate makes the weights huge in the first step, so every later step fails."""
    train_here.recipe |= {"checkpoint": {"every": 1}, "evaluate": {}}
    train_here.recipe["optimizer"] = {"learning_rate": 1e36, "weight_decay": 0}
    train_here.recipe["schedule"] = {"kind": "constant"}
    run = train_here("health.on_nan=rollback", topology=topology, main=main_with_one_model)
    assert run.status == 3, run.output
    halt = "halted: step 2: the gradient norm is nan, and the run has gone back 3 times already"
    assert run.err.count(halt) == 2
    assert "Traceback" not in run.output
    records = read_metrics(run.run_dir)
    assert [record["rollbacks"] for record in records if record.get("event") == "rollback"] == [3]
    assert [record["step"] for record in records if "loss" in record] == [1, 2]


def main_with_damaged_packs() -> int | None:
    """Run the launcher. On the second rank, packs of the second step are damaged and read slowly.

    No file is damaged so that only one rank fails: a rank without the pages of a file in its memory
    is killed.
    """
    if os.environ["RANK"] == "0":
        return train_accelerate.main()
    step = BatchStream.step

    def read(stream: BatchStream, place: int) -> StepBatches:
        if place == stream.packs_per_step:
            time.sleep(3)
            raise InputError("the packs are damaged")
        return step(stream, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchStream, "step", read)
        return train_accelerate.main()


def test_damaged_packs_of_one_process_stop_all_after_a_save(train_here: Trainer) -> None:
    run = train_here(topology="ddp", main=main_with_damaged_packs)
    assert run.status == 2, run.output
    assert run.err.count("error: the packs are damaged") == 1
    assert run.err.count("error: another process has no more packs; see its message") == 1
    assert (run.run_dir / "checkpoints/step-00000001/manifest.json").exists()


def test_a_run_folder_in_use_is_refused_by_every_process_in_the_same_words(
    train_here: Trainer,
) -> None:
    with RunFolder(train_here.run_dir):
        run = train_here(topology="ddp")
    assert run.status == 2, run.output
    assert "Traceback" not in run.output, run.output
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    error = f"error: {train_here.run_dir}: the folder is in use by {owner}"
    assert run.err.count(error) == 2, run.err
