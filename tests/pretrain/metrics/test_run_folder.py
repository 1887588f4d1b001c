"""The run folder's lock between real processes, and its small files."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
import yaml

from foundation.errors import InputError
from pretrain.metrics.run_folder import RunFolder, describe_environment

HOLD = """
import signal, sys
from pathlib import Path
from pretrain.metrics.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])):
    print("locked", flush=True)
    signal.pause()
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


def test_a_folder_in_use_by_another_process_is_refused_naming_process_host_and_folder(holder, tmp_path):
    for _ in range(2):  # a refused attempt must not disturb the owner's lock
        with pytest.raises(InputError) as error:
            RunFolder(tmp_path / "run")
        for part in (str(tmp_path / "run"), f"process {holder.pid}", socket.gethostname(), "run_dir"):
            assert part in str(error.value)


def test_json_and_yaml_are_replaced_whole_and_read_back_equal(tmp_path):
    content = {"name": "é", "seed": 42, "data": {"packs": "p", "held_out": 0.01}, "list": [1, None, True]}
    with RunFolder(tmp_path / "run") as run:
        run.write_json(run.summary, {"old": 1})
        run.write_json(run.summary, content)
        run.write_yaml(run.config, content)
        assert json.loads(run.summary.read_text()) == content
        assert yaml.safe_load(run.config.read_text()) == content
        assert list(yaml.safe_load(run.config.read_text())) == list(content)
        assert sorted(path.name for path in run.path.iterdir()) == [".lock", "config.yaml", "summary.json"]


def test_the_environment_names_versions_and_settings_but_not_the_host():
    import torch

    environment = describe_environment({"mixed_precision": "bf16"})
    assert torch.__version__.startswith(environment["packages"]["torch"])  # a build may add a suffix of its own: +cu130
    assert environment["accelerate"] == {"mixed_precision": "bf16"}
    assert len(environment["gpus"]) == torch.cuda.device_count()
    assert environment["git"] is None or len(environment["git"]["commit"]) == 40
    assert socket.gethostname() not in json.dumps(environment)
