"""Run commands as a user types them, without the seconds that every command takes to import torch.

Shells, command lines, launchers, environments, signals and exit statuses are real. Before a command
imports anything, tests/forked_site replaces it by a process forked from the server of
tests/moments.py, which has imported everything. The forked process has the command's files, folder
and environment, and its own process group. The server that a command starts with multiprocessing is
replaced too. `tests/lab/test_doctor.py` runs commands
without this replacement.
"""

from __future__ import annotations

import os
from multiprocessing import forkserver
from pathlib import Path

SITE = Path(__file__).with_name("forked_site")


def forking(*folders: Path) -> dict[str, str]:
    """Return an environment that forks commands, without accelerate's variables.

    The `sitecustomize.py` of each of `folders` runs before the command.
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("ACCELERATE_")}
    return kept | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (SITE, *folders))),
        "FORKED_COMMANDS": forkserver._forkserver._forkserver_address,
    }
