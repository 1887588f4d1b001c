"""Test the scripts of cluster/ with stand-ins for SLURM, which run all nodes on this machine.

The scripts start real commands. Only the training processes and the launchers of later nodes are
forked (tests/forked_commands.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, write_recipe
from tests.forked_commands import forking
from tests.golden.runs import steps_saved
from tests.launcher.test_matrix_run import Matrix
from tests.moments import WAIT_IN_SAVING

# Starts its command once per node in a separate process group, and signals whole groups, as
# slurmstepd may.
SRUN = """#!/usr/bin/env bash
set -m
while [[ "$1" == --* ]]; do shift; done
for node in $(seq 0 $((SLURM_NNODES - 1))); do
    ((node == 0)) || export FORKED_SCRIPTS="accelerate train_accelerate.py"
    SLURM_NODEID=$node "$@" & tasks+=($!)
done
trap 'for task in "${tasks[@]}"; do kill -USR1 -- "-$task"; done' USR1
worst=0
for task in "${tasks[@]}"; do
    code=0; wait "$task" || code=$?
    while kill -0 "$task" 2>/dev/null; do code=0; wait "$task" || code=$?; done
    ((code > worst)) && worst=$code
done
exit "$worst"
"""
SCONTROL = """#!/usr/bin/env bash
if [[ "$1 $2" == "show hostnames" ]]; then
    echo "$3" | tr , '\\n'
else
    echo "$@" >>"$SCONTROL_LOG"
fi
"""


class Job:
    """Run a script as `sbatch --nodes` does, with `variables` in its environment.

    `process` is the job, `log` its output, and `scontrol` the file with its calls of scontrol.
    """

    def __init__(
        self, folder: Path, script: str, *arguments: str, nodes: int = 1, **variables: str
    ) -> None:
        self.log = folder / "job.log"
        self.scontrol = folder / "scontrol.log"
        shims = folder / "shims"
        shims.mkdir(exist_ok=True)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (shims / name).write_text(text)
            (shims / name).chmod(0o755)
        (folder / "sitecustomize.py").write_text(WAIT_IN_SAVING)
        kept = {
            key: value
            for key, value in forking(folder).items()
            if not key.startswith(("SLURM_", "MASTER_"))
        }
        search = [str(shims), str(Path(sys.executable).parent), kept["PATH"]]
        environment = kept | {
            "FORKED_SCRIPTS": "train_accelerate.py",
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_NNODES": str(nodes),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NODELIST": ",".join(["127.0.0.1"] * nodes),
            "PATH": os.pathsep.join(search),
            "SCONTROL_LOG": str(self.scontrol),
            "VIRTUAL_ENV": sys.prefix,
            "ACCELERATE_USE_CPU": "true",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", str(ROOT / "cluster" / script), *arguments],
                env=environment | variables,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, condition: Any) -> None:
        while not condition():
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)


@pytest.mark.nightly
def test_a_job_of_two_nodes_saves_when_told_that_time_is_up_and_is_queued(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    recipe = write_recipe(small_recipe | {"evaluate": {}, "precision": "fp32"}, tmp_path)
    first = Job(
        tmp_path,
        "train.sbatch",
        "batch.microbatch=1",
        nodes=2,
        CONFIG="accelerate_configs/ddp.yaml",
        RECIPE=str(recipe),
        PROCESSES_PER_NODE="1",
        LAUNCH_OPTIONS="--main_training_function main",
    )
    first.wait_for(lambda: list(tmp_path.glob("waits-*")))
    os.kill(first.process.pid, 10)
    first.wait_for(lambda: "SIGUSR1: finishing this step" in first.log.read_text())
    (tmp_path / "go_on").touch()
    assert first.process.wait() == 0, first.log.read_text()
    assert first.scontrol.read_text() == f"requeue {os.getpid()}\n"
    assert "2 x CPU" in first.log.read_text()
    older, *_, newest = steps_saved(Path(small_recipe["run_dir"]))
    # Training continues while step 4 is written, so the signal comes in one of the next steps.
    assert 4 <= older < newest < 12


@pytest.mark.long
def test_a_job_of_an_array_trains_one_cell_of_a_matrix(
    small_recipe: dict[str, Any], tmp_path: Path
) -> None:
    matrix = Matrix(small_recipe | {"checkpoint": {"at_end": False}}, tmp_path, "fp32", "bf16")
    variables = {"MATRIX": str(matrix.path), "SLURM_ARRAY_JOB_ID": "7"}
    job = Job(tmp_path, "matrix.sbatch", "train.steps=3", SLURM_ARRAY_TASK_ID="1", **variables)
    assert job.process.wait() == 0, job.log.read_text()
    first, second = matrix.cells
    assert (second / "summary.json").exists() and not first.exists()
    job = Job(tmp_path, "matrix.sbatch", SLURM_ARRAY_TASK_ID="2", **variables)
    assert job.process.wait() != 0 and "no cell with this number" in job.log.read_text()


def test_an_image_is_built_without_history_runs_and_keys() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {".git", ".venv", "**/.env", "packs", "runs", "wandb"} <= {*ignored}


def test_a_job_of_a_sweep_is_an_agent_of_the_sweep_that_is_named(tmp_path: Path) -> None:
    (tmp_path / "shims").mkdir()
    (agent := tmp_path / "shims" / "wandb").write_text('#!/usr/bin/env bash\necho "wandb $*"\n')
    agent.chmod(0o755)
    job = Job(tmp_path, "sweep.sbatch", "--count", "4", SWEEP_ID="team/pretrain/abc123")
    assert job.process.wait() == 0
    assert job.log.read_text() == "wandb agent team/pretrain/abc123 --count 4\n"
    assert Job(tmp_path, "sweep.sbatch").process.wait() != 0
    assert "SWEEP_ID: is not set" in job.log.read_text()
