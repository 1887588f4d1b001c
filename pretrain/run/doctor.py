"""`python -m pretrain doctor`: print which precisions work on this machine, and their speed.

Before that, the rates of a GPU are measured, printed and stored (`pretrain.metrics.card_rates`).

A library may report that a device supports a precision although the products of this precision fail
on the device. So the doctor trains a model of one layer for a few steps in each precision (a
trial). Each trial runs in a separate process, because a CUDA error may end the process. Before the
first step of a trial, the parity check compares the model with plain transformers.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from foundation.errors import InputError
from foundation.gpus import link_between_gpus
from foundation.signals import StopRequest
from foundation.units import TERA, UNKNOWN, markdown, percent, three_digits
from packing.arrow import Pack, write_packs
from pretrain.launch.launcher import Launch, find_configuration
from pretrain.launch.processes import start_training
from pretrain.metrics.card_rates import CardRates, rates_file, write_rates
from pretrain.metrics.cards import card_of
from pretrain.metrics.rate_measurement import measure_rates
from pretrain.metrics.run_folder import version_of
from pretrain.metrics.run_record import kind, read_metrics
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
STEPS = 8
# The number of steps at the end of a trial that are timed.
TIMED = 5
# The time limit of a trial, in seconds.
SECONDS = 300
HEADER = ("precision", "computes on", "ms a step", "tokens/s")


def main(options: argparse.Namespace) -> int:
    """Print a table of precisions. Return 1 if the trial of any precision fails, else 0.

    If the hardware does not support a precision, its trial emulates the precision. Raises
    InputError for an unknown name in --precisions.
    """
    unknown = [name for name in options.precisions or () if name not in PRECISIONS]
    if unknown:
        raise InputError(
            f"--precisions: {', '.join(unknown)}: unknown; choose from {', '.join(PRECISIONS)}"
        )
    gpu = torch.cuda.is_available()
    missing = missing_on("cuda" if gpu else "cpu")
    versions = {name: version_of(name) for name in ("torch", "transformer-engine")}
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    print(
        f"{torch.cuda.get_device_name() if gpu else 'CPU'}; {libraries}, CUDA {torch.version.cuda}"
    )
    if gpu:
        report_rates()
    rows = []
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        recipe = trial_recipe(Path(folder), gpu=gpu)
        for name in dict.fromkeys(options.precisions or PRECISIONS):
            precision = PRECISIONS[name]
            lacks = missing(precision) if isinstance(precision, QuantizedPrecision) else None
            rows.append(row_of(name, lacks, recipe, Path(folder), gpu=gpu))
            print(f"{name}: {rows[-1][1]}", file=sys.stderr, flush=True)
    print(markdown(HEADER, [row[:-1] for row in rows], names=2))
    for name, *_, reason in rows:
        if reason:
            print(f"{name}: {reason}")
    return int(any(row[1] == "nothing" for row in rows))


def report_rates() -> None:
    """Measure, print and store the rates of this machine's GPUs. Print the error if this fails."""
    try:
        rates = measure_rates()
        print(rates_table(rates), end="\n\n")
        if rates.nccl:
            print(f"Link between the GPUs: {link_between_gpus() or 'not known'}.")
        write_rates(rates)
        print(f"Stored in {rates_file(rates.device)} for predictions of plan, which and train.")
    except (InputError, ProcessRaisedException, ProcessExitedException) as error:
        # The last line of a ProcessRaisedException is the error of the process.
        print(f"No card rates are stored: {str(error).strip().splitlines()[-1]}")


def rates_table(rates: CardRates) -> str:
    """Return a table of the rates of a GPU, with their shares of the rates in the data sheet."""

    def share(rate: float, peak: str) -> str:
        best = getattr(card_of(rates.device), peak, None)
        return f"{percent(rate / TERA / best)} of {peak}" if best else UNKNOWN

    peaks = {name: "fp8" if PRECISIONS[name].quantized else "bf16" for name in rates.gemm}
    rows = [
        *(
            (f"{name} GEMMs", f"{rate / TERA:,.0f} TFLOP/s", share(rate, peaks[name]))
            for name, rate in rates.gemm.items()
        ),
        ("memory", f"{rates.bandwidth / 1e9:,.0f} GB/s", share(rates.bandwidth, "bandwidth")),
        ("kernel launches", f"{1 / rates.launch:,.0f} a second", UNKNOWN),
        *(
            (f"{message} bytes", f"{rate / 1e9:,.0f} GB/s", UNKNOWN)
            for message, rate in rates.nccl.items()
        ),
    ]
    return markdown((rates.device, "rate", "of the data sheet"), rows)


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
    """Run the trial of a precision, and return its row in the table and the reason below it.

    name: the name of the precision.
    lacks: the reason why the hardware does not support the precision, or None. If there is a
        reason, the trial emulates the precision.
    recipe: the recipe that all trials share.
    folder: the temporary folder of the trials.
    gpu: True if the trial runs on a GPU.
    """
    settings: dict[str, Any] = {"precision": name, "run_dir": str(folder / name)}
    engine = "torch"
    if PRECISIONS[name].quantized:
        engine = "emulation" if lacks else "transformer_engine"
        settings["fp8_config"] = {"backend": "emulation" if lacks else "TE"}
    if lacks:
        # Do not compile: it would take minutes, and the speed of emulation does not matter.
        settings["model"] = recipe["model"] | {"compile": "none"}
    try:
        milliseconds, rate = try_training({**recipe, **settings}, folder, gpu=gpu)
    except InputError as error:
        return name, "nothing", UNKNOWN, UNKNOWN, "; ".join(filter(None, (lacks, str(error))))
    if gpu and lacks:
        return name, engine, UNKNOWN, UNKNOWN, lacks
    return name, engine, three_digits(milliseconds), f"{rate:,.0f}", lacks or ""


def try_training(recipe: Mapping[str, Any], folder: Path, *, gpu: bool) -> tuple[float, float]:
    """Train `recipe` in a new process. Return the milliseconds of a step and the tokens/s.

    Both are medians of the last TIMED steps. Raises InputError if the training fails or takes
    longer than SECONDS.
    """
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(dict(recipe)))
    log = Path(f"{recipe['run_dir']}.log")
    launch = Launch(find_configuration("bf16" if gpu else "cpu"), (str(file),))
    training = start_training(launch, os.environ, log, StopRequest())
    try:
        has_ended = training.wait(SECONDS)
    finally:
        # End a trial that is too long, and after Ctrl-C, which does not reach the process group of
        # the trial. A trial that has ended receives no signal.
        training.signal(signal.SIGKILL)
        training.wait()
    if not has_ended:
        raise InputError(f"the trial took longer than {SECONDS} s")
    if training.status:
        lines = [*filter(None, log.read_text(errors="replace").split("\n"))]
        errors = [line for line in lines if line.startswith(("error: ", "halted: "))]
        raise InputError((errors or lines[-1:] or [f"status {training.status}"])[0])
    timed = [line for line in read_metrics(Path(recipe["run_dir"])) if kind(line) == "step"][
        -TIMED:
    ]
    return (
        statistics.median(step["step_ms"] for step in timed),
        statistics.median(step["tokens_per_second"] for step in timed),
    )
