"""Two processes that must not reach the weights with a step, or not begin: they go back together, and stop together."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import read_metrics
from tests.conftest import write_recipe
from tests.moments import LauncherProcess

pytestmark = pytest.mark.multi


def start(recipe: dict[str, Any], folder: Path) -> tuple[list[int], str, str]:
    """Exit statuses of two ranks, and what each has said."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a rank that had it would end last
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    together |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    path, logs = str(write_recipe(recipe, folder)), [folder / f"{rank}.log" for rank in range(2)]
    ranks = [LauncherProcess([path], log, **together, RANK=log.stem, LOCAL_RANK=log.stem) for log in logs]
    return [rank.end() for rank in ranks], *(log.read_text() for log in logs)


def test_processes_go_back_together_and_stop_together(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    """A rate that makes giants of the weights in the first step: from then on no data is good."""
    blown = {"optimizer": {"learning_rate": 1e36, "weight_decay": 0}, "schedule": {"kind": "constant"}}
    going_back = {"health": {"on_nan": "rollback"}, "checkpoint": {"every": 1}, "evaluate": {}}
    recipe = small_recipe | blown | going_back
    statuses, first, second = start(recipe, tmp_path)
    assert statuses == [3, 3], first + second
    halt = "halted: step 2: the gradient norm is nan, and the run has gone back 3 times already"
    assert first.count(halt) == 1 and second.count(halt) == 1 and "Traceback" not in first + second
    lines = read_metrics(Path(recipe["run_dir"]))
    assert [line["rollbacks"] for line in lines if line.get("event") == "rollback"] == [3]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]


def test_a_run_folder_in_use_is_refused_by_every_process_in_the_same_words(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    with RunFolder(Path(small_recipe["run_dir"])):
        statuses, first, second = start(small_recipe, tmp_path)
    assert statuses == [2, 2] and "Traceback" not in first + second, first + second
    error = f"error: {small_recipe['run_dir']}: the run folder is in use by process {os.getpid()} on {socket.gethostname()}"
    assert first.count(error) == 1 and second.count(error) == 1
