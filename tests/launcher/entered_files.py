"""A small training in FP32 on a CPU, watched: `python -m tests.launcher.entered_files FOLDER` prints which files of the project a
step, a save and the whole run enter, as JSON. In a process of its own, as what an earlier run has cached is not entered again."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import yaml

import train_accelerate
from pretrain.run import keeping
from tests.conftest import PACK_LENGTH, VOCABULARY, write_packs

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(f"{ROOT}/{part}" for part in ("foundation/", "packing/", "pretrain/", "train_accelerate.py"))
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}


def watched_run(folder: Path) -> dict[str, list[str]]:
    """Files that the run enters, and of these the ones that a step does, from batch to metrics, in the thread that trains, and a
    save, in what writes behind the training too."""
    entered: dict[str, set[str]] = {"step": set(), "save": set(), "run": set(), "looked at": set()}
    within: list[str] = []

    def look(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and frame.f_code.co_name != "<module>" and file.startswith(PRODUCT):
            entered["run"].add(file)
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

    watched(train_accelerate, "train_step", "step", from_call=2)  # the updates of the first two are held to torch's
    watched(keeping, "save", "save")
    write_packs(folder / "packs", PACK_LENGTH)
    config = {"model_type": "qwen3", "vocab_size": VOCABULARY, "head_dim": 16, "max_position_embeddings": PACK_LENGTH} | SIZES
    recipe = {
        "name": "watched",
        "run_dir": str(folder / "run"),
        "model": {"config": config},
        "data": {"packs": str(folder / "packs"), "length": PACK_LENGTH},
        "batch": {"tokens": 8 * PACK_LENGTH, "microbatch": 4},
        "optimizer": {"learning_rate": 0.01},
        "train": {"steps": 6},
        "checkpoint": {"every": 2},
        "precision": "fp32",
        "parity": False,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    os.environ["ACCELERATE_USE_CPU"] = "true"
    sys.argv = ["train_accelerate.py", str(folder / "recipe.yaml")]
    threading.setprofile(look)
    sys.setprofile(look)
    try:
        assert train_accelerate.main() == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {act: sorted(file.removeprefix(f"{ROOT}/") for file in files) for act, files in entered.items()}


if __name__ == "__main__":
    print(json.dumps(watched_run(Path(sys.argv[1]))))
