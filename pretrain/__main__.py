"""`python -m pretrain report | matrix | settings`: what is done with runs once there are some, and every key of a recipe.

`train_accelerate.py` trains them.
"""

from __future__ import annotations

import importlib
import sys

# Each command with the module that has its `main`, imported only when it is called, and what it does.
COMMANDS = {
    "report": ("pretrain.compare.report", "curves and tables of run folders, and what one run gains over another"),
    "matrix": ("pretrain.compare.matrix", "run every cell of a comparison, and report on it"),
    "settings": ("pretrain.settings.page", "every key that a recipe can have, as docs/settings.md"),
}


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names; returns its exit status, 2 where there is no such command."""
    if arguments and arguments[0] in COMMANDS:
        return importlib.import_module(COMMANDS[arguments[0]][0]).main(arguments[1:])
    lines = "\n".join(f"  {name:<8} {text}" for name, (_, text) in COMMANDS.items())
    usage = f"usage: python -m pretrain COMMAND ...\n\n{lines}\n\npython -m pretrain COMMAND --help says more"
    if arguments in (["-h"], ["--help"]):
        print(usage)
        return 0
    said = f"error: unknown command {arguments[0]!r}\n" if arguments else ""
    print(f"{said}{usage}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
