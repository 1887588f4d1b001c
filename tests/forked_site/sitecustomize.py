"""Run first in every Python with this folder in PYTHONPATH: replace commands that import torch.

The server behind the socket $FORKED_COMMANDS forks a process that runs the command. This process
passes signals to it and ends with its exit status. See tests/forked_commands.py.
"""

import json
import os
import signal
import socket
import sys

SCRIPTS = os.environ.get("FORKED_SCRIPTS", "accelerate train_accelerate.py").split()
MODULES = ("accelerate.commands.launch", "pretrain", "packing")


def is_served(arguments: list[str]) -> bool:
    """Return True if the server runs the command with these arguments of Python."""
    match [argument for argument in arguments if argument != "-u"]:
        case ["-m", module, *_]:
            return module in MODULES or module.startswith("benchmarks.")
        case [script, *_]:
            return os.path.basename(script) in SCRIPTS
    return False


def run_on_server() -> None:
    """Run this command on the server and end as it ended."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.connect("\0" + os.environ["FORKED_COMMANDS"])
    signals = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}
    ignored = [number for number in signals if signal.getsignal(number) is signal.SIG_IGN]
    for number in signals.difference(ignored):
        signal.signal(number, lambda number, _: server.send(bytes([number])))
    command = {
        "arguments": sys.orig_argv[1:],
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "ignored": ignored,
    }
    socket.send_fds(server, [json.dumps(command).encode()], [0, 1, 2])
    status = int(server.recv(16) or 1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if is_served(sys.orig_argv[1:]):
    run_on_server()
