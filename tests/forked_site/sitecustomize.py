"""What each Python runs first that has this folder in PYTHONPATH. A command that would import torch runs in a process forked from
one that has, behind the socket $FORKED_COMMANDS; this one passes signals on, and ends as it did. See tests/forked_commands.py."""

import json
import os
import signal
import socket
import sys

SCRIPTS = os.environ.get("FORKED_SCRIPTS", "accelerate train_accelerate.py").split()
MODULES = ("accelerate.commands.launch", "pretrain", "packing")


def is_served(arguments: list[str]) -> bool:
    match [each for each in arguments if each != "-u"]:
        case ["-m", module, *_]:
            return module in MODULES or module.startswith("benchmarks.")
        case [script, *_]:
            return os.path.basename(script) in SCRIPTS
    return False


def run_elsewhere() -> None:
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
    run_elsewhere()
