"""The run folder's lock between real processes, and its small files."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
import yaml

from foundation.errors import InputError
from foundation.files import PARTIAL
from pretrain.metrics.run_folder import RunFolder, describe_environment, version_of

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


def test_a_killed_owner_leaves_no_lock_behind(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    with RunFolder(tmp_path / "run"):
        pass


def test_the_lock_is_given_back_on_close(tmp_path):
    for _ in range(2):
        with RunFolder(tmp_path / "run") as run:
            assert run.path.is_dir()


def test_the_other_ranks_know_the_paths_and_leave_the_lock_to_its_owner(tmp_path):
    with RunFolder(tmp_path / "run", owner=True) as main, RunFolder(tmp_path / "run", owner=False) as other:
        assert other.checkpoints == main.checkpoints
        with pytest.raises(InputError, match="in use"):
            RunFolder(tmp_path / "run")


def test_what_a_killed_writer_left_half_written_is_removed_by_the_next_run(tmp_path):
    (tmp_path / f".summary.json.123{PARTIAL}").write_text('{"loss": 1')
    (tmp_path / "summary.json").write_text("{}")
    with RunFolder(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "summary.json"]


def test_a_run_folder_that_cannot_be_made_is_one_message_with_its_path(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"file/run.*run_dir"):
        RunFolder(tmp_path / "file" / "run")


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


def test_a_write_that_fails_leaves_the_old_content(tmp_path):
    code = """
import resource, sys
from pathlib import Path
from foundation.errors import InputError
from pretrain.metrics.run_folder import RunFolder
run = RunFolder(Path(sys.argv[1]))
run.write_json(run.summary, {"loss": 1.5})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    run.write_json(run.summary, {"loss": "x" * 5000})
except InputError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=True)
    assert "summary.json: cannot be written: File too large" in result.stdout and "raise `ulimit -f`" in result.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == {"loss": 1.5}
    assert not list((tmp_path / "run").glob("*.partial")) and not list((tmp_path / "run").glob(".*.partial"))


def test_the_environment_names_versions_and_settings_but_not_the_host():
    import torch

    environment = describe_environment({"mixed_precision": "bf16"})
    assert torch.__version__.startswith(environment["packages"]["torch"])  # a build may add a suffix of its own: +cu130
    assert environment["accelerate"] == {"mixed_precision": "bf16"}
    assert len(environment["gpus"]) == torch.cuda.device_count()
    assert environment["git"] is None or len(environment["git"]["commit"]) == 40
    assert socket.gethostname() not in json.dumps(environment)


def test_the_environment_names_the_kernels_that_attend_where_they_are_installed(tmp_path, monkeypatch):
    installed = tmp_path / "flash_attn_4-4.0.0b1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b1\n")
    monkeypatch.syspath_prepend(tmp_path)
    version_of.cache_clear()
    assert describe_environment({})["packages"]["flash-attn-4"] == "4.0.0b1"
    version_of.cache_clear()
