"""`python -m pretrain report | matrix`: what is done with runs once there are some. `train_accelerate.py` trains them."""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "report": "curves and tables of run folders, and what one run gains over another",
    "matrix": "run every cell of a comparison, and report on it",
}


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names; returns its exit status, 2 where there is no such command."""
    if arguments and arguments[0] in COMMANDS:
        return importlib.import_module(f"pretrain.compare.{arguments[0]}").main(arguments[1:])
    lines = "\n".join(f"  {name:<8} {text}" for name, text in COMMANDS.items())
    usage = f"usage: python -m pretrain COMMAND ...\n\n{lines}\n\npython -m pretrain COMMAND --help says more"
    if arguments in (["-h"], ["--help"]):
        print(usage)
        return 0
    said = f"error: unknown command {arguments[0]!r}\n" if arguments else ""
    print(f"{said}{usage}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
