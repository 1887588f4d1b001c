"""Commands for runs and packs: `python -m pretrain COMMAND`."""

from __future__ import annotations

import pkgutil
import sys
from difflib import get_close_matches

from foundation.signals import end_on_ctrl_c, raising_on_ctrl_c

if __name__ == "__main__":
    end_on_ctrl_c()

from foundation.command import end_process, run_command
from pretrain import __version__
from pretrain.settings.commands import COMMANDS, read


def main(arguments: list[str]) -> int:
    """Run the command whose name is the first argument, and return its exit status.

    `foundation.command.run_command` documents the exit statuses. The status for an unknown command
    is 2.
    """
    if arguments and arguments[0] in COMMANDS:
        return run_command(lambda: _run(arguments))
    if arguments in (["-h"], ["--help"]):
        return run_command(lambda: print(usage()))
    if arguments == ["--version"]:
        return run_command(lambda: print(f"low-precision-pretraining {__version__}"))
    if arguments:
        similar = [
            f"; did you mean {name}?" for name in get_close_matches(arguments[0], COMMANDS, 1)
        ]
        print(f"error: unknown command {arguments[0]!r}{''.join(similar)}", file=sys.stderr)
    print(usage(), file=sys.stderr)
    return 2


def _run(arguments: list[str]) -> int | None:
    """Run the command `arguments[0]` with the remaining arguments, and return its exit status.

    The options are parsed and checked before the module of the command is imported, because most of
    the modules import torch. So --help and mistakes are answered at once.
    """
    name, *options = arguments
    parsed = read(name, options)
    command = COMMANDS[name]
    if command.check:
        pkgutil.resolve_name(command.check)(parsed)
    function = pkgutil.resolve_name(command.function)
    with raising_on_ctrl_c():
        return function(parsed)


def usage() -> str:
    """Return the help text of the program, with one line for each command."""
    lines = [f"  {name:<10} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: python -m pretrain COMMAND ...",
            "",
            *lines,
            "",
            "COMMAND --help lists the options of a command. --version prints the version.",
        ]
    )


def run_console() -> None:
    """Run the command line of this process, as `pretrain` and `python -m pretrain`."""
    end_process(main(sys.argv[1:]))


if __name__ == "__main__":
    run_console()
