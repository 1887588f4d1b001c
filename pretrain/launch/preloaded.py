"""Imports of the server process from which trainings are forked.

multiprocessing imports this module when it starts the server, see `pretrain.launch.processes`. Each
forked training then has the state of a process that has just imported its modules.
"""

from __future__ import annotations

import importlib
import os
from contextlib import suppress

from pretrain.launch import script
from pretrain.launch.launcher import SCRIPT

# Leave the terminal's process group: Ctrl-C would end the server during its imports.
os.setpgid(0, 0)
# The server prints nothing. Each training writes to its own log.
for _descriptor in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), _descriptor)
# Let torch look for GPUs through NVML instead of CUDA. CUDA does not work in a fork of a process
# that has used CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
script.before_imports()
# If an import fails here, each training repeats it, and writes the error to its log.
with suppress(Exception):
    importlib.import_module("accelerate.commands.launch")
    # The script belongs to a package above this one, so it is imported by its name.
    importlib.import_module(SCRIPT.stem)
    script.hash_triton()
    # This imports Transformer Engine if there is a GPU.
    from pretrain.precision import transformer_engine

    transformer_engine.unmet_need()
script.after_imports()
