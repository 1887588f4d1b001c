"""The recorded environment of a run. tests/multi tests the lock of the folder."""

from __future__ import annotations

import gc
import json
import os
import socket
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from foundation.errors import InputError
from pretrain.metrics.run_folder import RunFolder, check_ours, describe_environment
from pretrain.metrics.trackers import JsonlTracker


def test_the_environment_names_versions_and_settings_but_not_the_host():
    environment = describe_environment({"mixed_precision": "bf16"})
    # The version of the module may have a suffix such as +cu130.
    assert torch.__version__.startswith(environment["packages"]["torch"])
    assert environment["accelerate"] == {"mixed_precision": "bf16"}
    assert len(environment["gpus"]) == torch.cuda.device_count()
    assert environment["git"] is None or len(environment["git"]["commit"]) == 40
    assert socket.gethostname() not in json.dumps(environment)


def test_only_partial_files_of_this_package_are_deleted(tmp_path):
    mine = [".film.2024.mkv.partial", ".film.2024.partial", ".thesis.partial"]
    for name in (*mine, ".metrics.jsonl.4711.partial"):
        (tmp_path / name).touch()
    RunFolder(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == sorted([".lock", *mine])


def test_links_to_other_folders_and_files_are_refused(tmp_path: Path) -> None:
    for folder in ("checkpoints", "final"):
        (tmp_path / folder / "run").mkdir(parents=True)
        (tmp_path / folder / "run" / folder).symlink_to(tmp_path)
        with pytest.raises(InputError, match=f"run/{folder}: is a link"):
            check_ours(tmp_path / folder / "run")
    (tmp_path / "mine.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "mine.jsonl")
    with pytest.raises(InputError, match=r"metrics\.jsonl: cannot be read or written: .*links"):
        JsonlTracker(tmp_path / "metrics.jsonl", 0).start()


def test_a_run_that_is_not_restored_holds_no_lock(tmp_path: Path) -> None:
    stored = Mock(restore=Mock(side_effect=InputError("another training")))
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(InputError, match="another training"):
                RunFolder(tmp_path / "run", stored=stored)
    finally:
        gc.enable()
