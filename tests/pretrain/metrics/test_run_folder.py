"""The run folder's small files; its lock between processes is in tests/multi."""

from __future__ import annotations

import json
import socket

from pretrain.metrics.run_folder import describe_environment


def test_the_environment_names_versions_and_settings_but_not_the_host():
    import torch

    environment = describe_environment({"mixed_precision": "bf16"})
    # a build may add a suffix of its own: +cu130
    assert torch.__version__.startswith(environment["packages"]["torch"])
    assert environment["accelerate"] == {"mixed_precision": "bf16"}
    assert len(environment["gpus"]) == torch.cuda.device_count()
    assert environment["git"] is None or len(environment["git"]["commit"]) == 40
    assert socket.gethostname() not in json.dumps(environment)
