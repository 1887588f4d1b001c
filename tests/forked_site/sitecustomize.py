"""Run first in every Python with this folder in PYTHONPATH: replace commands that import torch.

The server at $FORKED_COMMANDS forks a process that runs the command. This process passes signals to
it and ends with its exit status. See tests/forked_commands.py.
"""

import os
import sys

SCRIPTS = os.environ.get("FORKED_SCRIPTS", "accelerate train_accelerate.py").split()
MODULES = (
    "accelerate.commands.accelerate_cli",
    "accelerate.commands.launch",
    "train_accelerate",
    "pretrain",
)


def is_forked(arguments: list[str]) -> bool:
    """Return True if the server runs the command with these arguments of Python."""
    match arguments:
        case ["-m", module, *_]:
            return module in MODULES or module.startswith("benchmarks.")
        case ["-c", code, *_]:
            return code.startswith("from multiprocessing.forkserver import main")
        case [script, *_]:
            return os.path.basename(script) in SCRIPTS
    return False


command = [argument for argument in sys.orig_argv[1:] if argument not in ("-u", "-B")]
if is_forked(command):
    import forked_process

    forked_process.run_on_server(command)
