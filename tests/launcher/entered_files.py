"""List the files of the project that a step and a save of a small training enter.

It trains in FP32 on a CPU, in a process of its own: cached results of an earlier run would not be
entered again.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import train_accelerate
from pretrain.run import saving

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(
    f"{ROOT}/{part}" for part in ("foundation/", "packing/", "pretrain/", "train_accelerate.py")
)


def watched_run(recipe: Path) -> dict[str, list[str]]:
    """Return the files that a step enters, from batch to metrics, and those that a save enters.

    Files of a step are those of the training thread. Those of a save include background threads.
    """
    entered: dict[str, set[str]] = {"step": set(), "save": set(), "looked at": set()}
    within: list[str] = []

    def look(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and frame.f_code.co_name != "<module>" and file.startswith(PRODUCT):
            if threading.current_thread().name.startswith("saving"):
                entered["save"].add(file)
            elif within and threading.current_thread() is threading.main_thread():
                entered[within[-1]].add(file)

    def watched(owner: ModuleType, name: str, act: str, from_call: int = 0) -> None:
        function, calls = getattr(owner, name), itertools.count()

        def watching(*arguments: Any, **options: Any) -> Any:
            within.append(act if next(calls) >= from_call else "looked at")
            try:
                return function(*arguments, **options)
            finally:
                within.pop()

        setattr(owner, name, watching)

    # the updates of the first two are held to torch's
    watched(train_accelerate, "train_step", "step", from_call=2)
    watched(saving, "save", "save")
    os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.argv = ["train_accelerate.py", str(recipe)]
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        assert train_accelerate.main() == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {
        act: sorted(file.removeprefix(f"{ROOT}/") for file in files)
        for act, files in entered.items()
    }
