"""The recorded environment of a run. tests/multi tests the lock of the folder."""

from __future__ import annotations

import json
import os
import socket

from pretrain.metrics.run_folder import RunFolder, describe_environment


def test_the_environment_names_versions_and_settings_but_not_the_host():
    import torch

    environment = describe_environment({"mixed_precision": "bf16"})
    # The version of the module may have a suffix such as +cu130.
    assert torch.__version__.startswith(environment["packages"]["torch"])
    assert environment["accelerate"] == {"mixed_precision": "bf16"}
    assert len(environment["gpus"]) == torch.cuda.device_count()
    assert environment["git"] is None or len(environment["git"]["commit"]) == 40
    assert socket.gethostname() not in json.dumps(environment)


def test_only_partial_files_of_this_package_are_deleted(tmp_path):
    for name in (".thesis.partial", ".metrics.jsonl.4711.partial"):
        (tmp_path / name).touch()
    RunFolder(tmp_path).close()
    assert sorted(os.listdir(tmp_path)) == [".lock", ".thesis.partial"]
