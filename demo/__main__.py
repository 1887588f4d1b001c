"""`make demo`: make what is not there yet, then say where everything is. Ctrl-C at any moment; the next call goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from demo.command import CommandFailed
from demo.last_screen import last_screen
from demo.parts import RECIPE, Demo, Part
from foundation.errors import InputError
from pretrain.settings.config import load_recipe


def main() -> int:
    try:
        demo = Demo(load_recipe(RECIPE))
        seconds = make_all(demo.parts())
        print(f"\n{last_screen(demo, seconds)}")
    except InputError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except CommandFailed as failure:
        print(f"\ndemo: {failure}; its message stands above. `make demo` goes on from here.", file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        print("\nStopped. What is done stays done: `make demo` goes on from here.", file=sys.stderr)
        return 130
    return 0


def make_all(parts: Sequence[Part]) -> dict[str, float | None]:
    """Make each part whose product is not there. Returns the seconds each took, None for one that was there."""
    seconds: dict[str, float | None] = {}
    for number, part in enumerate(parts, start=1):
        there = part.done()
        print(f"[{number}/{len(parts)}] {part.title}: {part.product}{' (there already)' if there else ''}", flush=True)
        started = time.monotonic()
        if not there:
            part.make()
            if not part.done():
                raise InputError(f"{part.product} is not complete although its command ended well; run `make clean demo`")
        seconds[part.title] = None if there else time.monotonic() - started
    return seconds


if __name__ == "__main__":
    sys.exit(main())
