"""Which precision works on this machine, on what, and how fast for one layer: `python -m pretrain doctor`.

Libraries say that a device has a precision, and then its product fails. So the launcher trains a model of one layer in it for a
few steps, in a process of its own, which an error of CUDA's may end. Before its first step parity holds it beside plain
transformers.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from foundation.errors import InputError
from foundation.units import UNKNOWN, markdown, three_digits
from packing.arrow import Pack, PackWriter
from pretrain.metrics.run_folder import version_of
from pretrain.metrics.run_record import kind, read_metrics
from pretrain.precision.selection import missing_on
from pretrain.precision.settings import PRECISIONS

ROOT = Path(__file__).resolve().parents[2]
QWEN3_1_7B = {
    **{
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
    },
    **{
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 32768,
    },
    **{"rope_theta": 1e6, "tie_word_embeddings": True},
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
VOCABULARY = 512  # embedding and head are not what is tried
STEPS, TIMED = 8, 5  # of a trial, and of these the last
SECONDS = 300  # for one trial
HEADER = ("precision", "computes on", "ms a step", "tokens/s", "why not on hardware")


def main(options: argparse.Namespace) -> int:
    """Print the table; the status is 1 where a precision works neither on hardware nor emulated."""
    if unknown := [name for name in options.precisions or () if name not in PRECISIONS]:
        raise InputError(f"--precisions: no {', '.join(unknown)} among {', '.join(PRECISIONS)}")
    gpu = torch.cuda.is_available()
    missing, rows = missing_on("cuda" if gpu else "cpu"), []
    libraries = ", ".join(
        f"{name} {version_of(name)}" for name in ("torch", "transformer-engine") if version_of(name)
    )
    print(
        f"{torch.cuda.get_device_name() if gpu else 'CPU'}; {libraries}, CUDA {torch.version.cuda}"
    )
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        recipe = trial_recipe(Path(folder), gpu=gpu)
        for name in dict.fromkeys(options.precisions or PRECISIONS):
            lacks = missing(PRECISIONS[name]) if PRECISIONS[name].quantized else None
            rows.append(row_of(name, lacks, recipe, Path(folder), gpu=gpu))
            print(f"{name}: {rows[-1][1]}", file=sys.stderr, flush=True)
    print(markdown(HEADER, rows, names=2))
    return int(any(row[1] == "nothing" for row in rows))


def trial_recipe(folder: Path, *, gpu: bool) -> dict[str, Any]:
    """What all trials train: a model of one layer, Qwen3-1.7B's on a GPU and a small one on a CPU, on random documents."""
    length, config = (4096, QWEN3_1_7B) if gpu else (128, QWEN3_1_7B | SMALL)
    packs = max(2, 8192 // length) if gpu else 2
    draw = np.random.default_rng(0)
    with PackWriter(folder / "packs", length) as writer:
        for _ in range(4 * packs):
            lengths = np.diff([0, length // 3, length // 2, length]).astype(np.int32)
            writer.add(
                "train", Pack(draw.integers(VOCABULARY, size=length).astype(np.uint32), lengths)
            )
        writer.finish(settings={}, statistics={}, tokenizer=None)
    return {
        "name": "doctor",
        "model": {"config": config | {"num_hidden_layers": 1, "vocab_size": VOCABULARY}},
        "data": {"packs": str(folder / "packs"), "length": length},
        "batch": {"tokens": packs * length, "microbatch": packs},
        "optimizer": {"learning_rate": 1e-4},
        "train": {"steps": STEPS},
        "checkpoint": {"at_end": False},
        "parity": True,
    }


def row_of(
    name: str, lacks: str | None, recipe: Mapping[str, Any], folder: Path, *, gpu: bool
) -> tuple[str, ...]:
    """A precision on hardware, or emulated where the device `lacks` something."""
    settings: dict[str, Any] = {"precision": name, "run_dir": str(folder / name)}
    if PRECISIONS[name].quantized:
        settings["fp8_config"] = {"backend": "emulation" if lacks else "TE"}
    if lacks:  # what it would compile takes minutes, and its speed is of no interest
        settings["model"] = recipe["model"] | {"compile": "none"}
    try:
        ms, rate = try_training({**recipe, **settings}, folder)
    except InputError as error:
        return name, "nothing", UNKNOWN, UNKNOWN, "; ".join(filter(None, (lacks, str(error))))
    on = "emulation" if lacks else "transformer_engine" if PRECISIONS[name].quantized else "torch"
    speed = (UNKNOWN, UNKNOWN) if gpu and lacks else (three_digits(ms), f"{rate:,.0f}")
    return name, on, *speed, lacks or ""


def try_training(recipe: Mapping[str, Any], folder: Path) -> tuple[float, float]:
    """Milliseconds of a step and tokens/s: medians of the last steps. InputError where the training fails, or takes too long."""
    (folder / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe)))
    command = [sys.executable, str(ROOT / "train_accelerate.py"), str(folder / "recipe.yaml")]
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True)
    except subprocess.TimeoutExpired:
        raise InputError(f"took longer than {SECONDS} s") from None
    except subprocess.CalledProcessError as ended:
        lines = ended.stderr.strip().splitlines() or [f"status {ended.returncode}"]
        raise InputError(
            next((line for line in lines if line.startswith(("error: ", "halted: "))), lines[-1])
        ) from None
    steps = [each for each in read_metrics(Path(recipe["run_dir"])) if kind(each) == "step"][
        -TIMED:
    ]
    return tuple(
        statistics.median(step[key] for step in steps) for key in ("step_ms", "tokens_per_second")
    )
