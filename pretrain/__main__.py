"""`python -m pretrain COMMAND`: what is done with runs. `train_accelerate.py` trains them."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

from foundation.errors import InputError

# By name: the module whose `main(arguments)` runs the command and returns its exit status, and what it does.
COMMANDS = {
    "report": ("pretrain.compare.report", "curves and tables of run folders, and how one run differs from another"),
    "doctor": ("pretrain.run.doctor", "which precision works on this machine, on what, and how fast"),
    "export": ("pretrain.run.export", "any checkpoint as a Hugging Face folder, on a machine without a GPU"),
    "sample": ("pretrain.run.sampling", "how a run, a checkpoint or an exported model continues a text"),
    "matrix": ("pretrain.compare.matrix", "run every cell of a comparison, and report on it"),
}


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names; returns its exit status, 2 for a mistake in what was given, and 130 where
    Ctrl-C broke it off."""
    if arguments and arguments[0] in COMMANDS:
        try:
            status = importlib.import_module(COMMANDS[arguments[0]][0]).main(arguments[1:])
            sys.stdout.flush()
            return status
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("\nstopped by Ctrl-C", file=sys.stderr)
            return 130  # what a shell reports for a process that SIGINT ended
        except BrokenPipeError:  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor may the flush at exit complain
            return 141
    lines = "\n".join(f"  {name:<8} {what}" for name, (_, what) in COMMANDS.items())
    usage = f"usage: python -m pretrain COMMAND ...\n\n{lines}\n\npython -m pretrain COMMAND --help says more"
    if arguments in (["-h"], ["--help"]):
        print(usage)
        return 0
    if arguments:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1, cutoff=0.5)
        print(f"error: unknown command {arguments[0]!r}" + (f"; did you mean {near[0]!r}?" if near else ""), file=sys.stderr)
    print(usage, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
