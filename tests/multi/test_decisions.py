"""Two processes that must not reach the weights with a step: they go back together, and stop together."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from pretrain.metrics.run_record import read_metrics
from tests.conftest import write_recipe
from tests.moments import LauncherProcess

pytestmark = pytest.mark.multi


def test_processes_go_back_together_and_stop_together(small_recipe: dict[str, Any], tmp_path: Path) -> None:
    """A rate that makes giants of the weights in the first step: from then on no data is good."""
    blown = {"optimizer": {"learning_rate": 1e36}, "schedule": {"kind": "constant"}, "evaluate": {}, "checkpoint": {"every": 1}}
    recipe = small_recipe | blown | {"health": {"on_nan": "rollback", "max_rollbacks": 2}}
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    arguments, logs = [str(write_recipe(recipe, tmp_path))], [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [LauncherProcess(arguments, log, **together, RANK=str(rank), LOCAL_RANK=str(rank)) for rank, log in enumerate(logs)]
    assert [rank.end() for rank in ranks] == [3, 3], [log.read_text() for log in logs]
    first, second = (log.read_text() for log in logs)
    halt = "halted: step 2: the gradient norm is nan, and the run has gone back 2 times already"
    assert first.count(halt) == 1 and second.count(f"rank 1: {halt}") == 1 and "Traceback" not in first + second
    lines = read_metrics(Path(recipe["run_dir"]))
    assert [line["rollbacks"] for line in lines if line.get("event") == "rollback"] == [2]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
