"""`python -m pretrain doctor`: print which precisions work on this machine.

A library may report that a device supports a precision although the products of this precision fail
on the device. So the doctor trains a model of one layer for a few steps in each precision (a
trial). Each trial runs in a separate process, because a CUDA error may end the process. Before the
first step of a trial, the parity check compares the model with plain transformers.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from foundation.progress import say
from packing.arrow import Pack, write_packs
from pretrain.launch.launcher import Launch, find_configuration
from pretrain.launch.processes import Training, start_training
from pretrain.metrics.run_folder import version_of
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.selection import missing_on
from pretrain.precision.settings import PRECISIONS

QWEN3_1_7B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
# The vocabulary is small, because trials do not test the embedding and the LM head.
VOCABULARY = 512
# The number of steps in a trial.
STEPS = 4
# The time limit of a trial, in seconds.
SECONDS = 300


def main(options: argparse.Namespace) -> int:
    """Print the engine of each precision. Return 1 if the trial of any precision fails, else 0.

    If the hardware does not support a precision, its trial emulates the precision. A GPU tries
    these precisions only if they are in --precisions.
    """
    gpu = torch.cuda.is_available()
    missing = missing_on("cuda" if gpu else "cpu")
    versions = {name: version_of(name) for name in ("torch", "transformer-engine")}
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    print(
        f"{torch.cuda.get_device_name() if gpu else 'CPU'}; {libraries}, CUDA {torch.version.cuda}",
        flush=True,
    )
    # Map each precision to the reason why the hardware does not support it, or to None.
    reasons = {
        name: missing(precision) if isinstance(precision, QuantizedPrecision) else None
        for name, precision in PRECISIONS.items()
    }
    names = list(dict.fromkeys(options.precisions or PRECISIONS))
    tried = [name for name in names if options.precisions or not (gpu and reasons[name])]
    # On a GPU, trials mostly compile kernels, so all of them run at the same time.
    groups = [tried] if gpu else [[name] for name in tried]
    has_failed = False
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        recipe = trial_recipe(Path(folder), gpu=gpu)
        for group in groups:
            say(f"training {STEPS} steps in {', '.join(group)}")
            recipes = {
                name: {
                    **recipe,
                    "precision": name,
                    "fp8_config": {"backend": "emulation" if reasons[name] else "TE"},
                }
                for name in group
            }
            for name, error in run_trials(recipes, Path(folder), gpu=gpu):
                has_failed |= error is not None
                print(f"{name}: {error or engine_of(name, reasons[name])}", flush=True)
    for name in names:
        if name not in tried:
            print(f"{name}: {engine_of(name, reasons[name])}; not tried")
    return int(has_failed)


def trial_recipe(folder: Path, *, gpu: bool) -> dict[str, Any]:
    """Write packs of random documents to `folder`. Return the recipe that all trials share.

    gpu: True if the trials run on a GPU. Then the model has one layer of Qwen3-1.7B. On a CPU it
        has one small layer.
    """
    length = 4096 if gpu else 128
    config = QWEN3_1_7B if gpu else QWEN3_1_7B | SMALL
    # The number of packs in a step.
    packs = 2
    generator = np.random.default_rng(0)
    lengths = np.diff([0, length // 3, length // 2, length]).astype(np.int32)
    rows = generator.integers(VOCABULARY, size=(4 * packs, length)).astype(np.uint32)
    write_packs(
        folder / "packs",
        length,
        {"train": [[Pack(row, lengths) for row in rows]]},
        settings={},
        statistics={},
        tokenizer=None,
    )
    return {
        "name": "doctor",
        "model": {
            "config": config | {"num_hidden_layers": 1, "vocab_size": VOCABULARY},
            # torch.compile would take most of the time of a trial.
            "compile": "none",
        },
        "data": {"packs": str(folder / "packs"), "length": length},
        "batch": {"tokens": packs * length, "microbatch": packs},
        "optimizer": {"learning_rate": 1e-4},
        "train": {"steps": STEPS},
        "checkpoint": {"at_end": False},
        "parity": True,
    }


def engine_of(name: str, reason: str | None) -> str:
    """Return the engine of the GEMMs in a precision, with the reason for an emulation.

    reason: the reason why the hardware does not support the precision, or None.
    """
    if reason:
        return f"emulation; it {reason}"
    return "transformer_engine" if PRECISIONS[name].quantized else "torch"


def run_trials(
    recipes: Mapping[str, Mapping[str, Any]], folder: Path, *, gpu: bool
) -> Iterator[tuple[str, str | None]]:
    """Train all recipes at the same time. Yield the name of each, and its error or None.

    recipes: the recipes by name.
    folder: the temporary folder of the trials.
    gpu: True if the trials run on a GPU.
    """
    trainings = {}
    # A GEMM algorithm that was chosen beside other trials may be slow, so it must not be cached for
    # later runs.
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    try:
        for name, recipe in recipes.items():
            file = folder / f"{name}.yaml"
            file.write_text(yaml.safe_dump({**recipe, "run_dir": str(folder / name)}))
            launch = Launch(find_configuration("bf16" if gpu else "cpu"), (str(file),))
            log = folder / f"{name}.log"
            trainings[name] = start_training(launch, environment, log), log
        for name, (training, log) in trainings.items():
            yield name, error_of(training, log)
    finally:
        # End trials that are too long, and all trials after Ctrl-C, which does not reach their
        # process groups. A trial that has ended receives no signal.
        for training, _ in trainings.values():
            training.signal(signal.SIGKILL)
            training.wait()


def error_of(training: Training, log: Path) -> str | None:
    """Wait until a trial ends, and return its error in one line, or None."""
    if not training.wait(SECONDS):
        return f"failed: the trial took longer than {SECONDS} s"
    if training.status:
        lines = [*filter(None, log.read_text(errors="replace").split("\n"))]
        errors = [line for line in lines if line.startswith(("error: ", "halted: "))]
        return f"failed: {(errors or lines[-1:] or [f'status {training.status}'])[0]}"
    return None
