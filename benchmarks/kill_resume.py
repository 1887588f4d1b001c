"""Kill a training at random moments, resume it, and compare it with an uninterrupted run.

    python -m benchmarks.kill_resume [--kills 20] [--seed 0] [--processes 4]

Runs the real launcher under `accelerate launch` on the CPU with two models: a Qwen3, and a GPT-2
with dropout, where the random numbers of every step matter. After each SIGKILL the same command is
started again. A kill ends the launcher and the training process together, like the loss of a
machine. The moment of a kill is drawn within one of four phases. A uniformly drawn moment would
nearly always be in the start-up, but files are half written in the short phases.

Two runs are equal if metrics.jsonl has every step exactly once, all values that are not a time or
memory are the same doubles, and the tensors of the last checkpoint and the exported model have the
same bytes.

With --address, the run folder is in object storage. The local copy is deleted after each kill, like
the disk of a machine that is taken away, and half of the kills are while files are stored:

    moto_server -p 5055 & export AWS_ENDPOINT_URL=http://127.0.0.1:5055
    python -m benchmarks.kill_resume --models qwen3 --address s3://bucket

With several processes, a randomly drawn rank is killed each time. torchrun must then end the other
ranks and itself within a minute. Its table of failures names the killed rank.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from benchmarks.machine import LAUNCH, ROOT, finish, measured_on, start
from foundation.files import find_damage, write_json
from foundation.storage import path_for
from packing import arrow
from packing.arrow import Pack
from pretrain.checkpoint.folders import step_folders
from pretrain.checkpoint.format import read_manifest
from pretrain.metrics.run_folder import describe_environment
from pretrain.metrics.run_record import read_metrics
from pretrain.run.stored_run import StoredRun

RESULTS = ROOT / "benchmarks" / "results" / "resume" / "kill_resume.json"
LENGTH = 64
VOCABULARY = 97
PACKS_PER_STEP = 16
STEPS = 240
# Minimum number of steps per kill, so that the run is not finished before its last kill.
STEPS_A_KILL = 12
# Seconds within which all processes must end after a rank was killed.
ENDS_WITHIN = 60.0

# Keys of a step that depend on the machine. All other values must be equal.
MACHINE_KEYS = {
    "step_ms",
    "data_wait_ms",
    "tokens_per_second",
    "samples_per_second",
    "tflops",
    "mfu_bf16_peak",
    "mfu_nanogpt",
    "recompiles",
    "memory_gib",
    "memory_allocated_gib",
    "memory_reserved_gib",
    "memory_retries",
}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": LENGTH,
        "tie_word_embeddings": True,
    },
    "gpt2_with_dropout": {
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": LENGTH,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        # Packed attention does not support dropout.
        "attn_pdrop": 0.0,
    },
}


# ── The training ──────────────────────────────────────────────────────────────────────────────────


def write_packs(folder: Path, training: int = 300) -> Path:
    """Write `training` training packs and 8 held-out packs, and return `folder`.

    Each document counts upwards from a random token, so that a model can learn something.
    """
    rng = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", training), ("held_out", 8)):
        packs = []
        for _ in range(count):
            cuts = np.sort(rng.choice(np.arange(1, LENGTH), 3, replace=False))
            lengths = np.diff([0, *cuts, LENGTH])
            tokens = np.concatenate(
                [(rng.integers(VOCABULARY) + np.arange(n)) % VOCABULARY for n in lengths]
            )
            packs.append(Pack(tokens.astype(np.uint32), lengths.astype(np.int32)))
        splits[split] = [packs]
    arrow.write_packs(folder, LENGTH, splits, settings={}, statistics={}, tokenizer=None)
    return folder


def write_recipe(
    folder: Path, name: str, packs: Path, steps: int = STEPS, processes: int = 1
) -> Path:
    """Write a recipe and return its path.

    Some steps have a checkpoint and an evaluation, and other steps have only one of them. An epoch
    ends within a step.
    """
    recipe = {
        "name": name,
        "model": {"config": MODELS[name]},
        "data": {"packs": str(packs), "length": LENGTH},
        "batch": {"tokens": PACKS_PER_STEP * LENGTH, "microbatch": 4 if processes == 1 else 2},
        "optimizer": {"learning_rate": 0.003},
        "schedule": {"kind": "cosine", "warmup": 5},
        "train": {"steps": steps},
        "evaluate": {"every": 6},
        "checkpoint": {"every": 4, "keep": 2},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def command_of(recipe: Path, run_dir: Path | str, processes: int) -> list[str]:
    """Return the command that trains `recipe`."""
    several = [
        "--config_file",
        "accelerate_configs/ddp.yaml",
        "--mixed_precision",
        "no",
        "--num_processes",
        str(processes),
    ]
    options = several if processes > 1 else ["--config_file", "accelerate_configs/cpu.yaml"]
    return [*LAUNCH, *options, "train_accelerate.py", str(recipe), f"run_dir={run_dir}"]


# ── Kills ───────────────────────────────────────────────────────────────────────────────────────


def kill_in(
    process: subprocess.Popen[bytes],
    phase: str,
    run_dir: Path,
    rng: random.Random,
    startup: float,
    rank: int | None,
) -> float | None:
    """Kill `process`, or one `rank` of it, at a random moment of `phase`.

    Returns the seconds from the kill of a rank until all processes had ended, or 0 if `process` was
    killed. Returns None if the processes ended before the kill. The moments of the phases are:

    * start-up: within `startup` seconds, the usual time until the first step.
    * steps: within 0.8 s after the first step, including evaluations and saves.
    * saving: within 15 ms after a change of the checkpoints.
    * exporting: within 15 ms after a change of the exported model.
    * storing: within 6 s after the run has begun to store its first folder.
    """
    if phase == "start-up":
        moment = time.monotonic() + rng.uniform(0, startup)
    else:
        marks = {
            "steps": "metrics.jsonl",
            "saving": "checkpoints",
            "exporting": ".final.*.writing",
            "storing": ".storing",
        }
        spans = {"steps": 0.8, "storing": 6.0}
        began = time.time()
        while not any(path.stat().st_mtime >= began for path in _existing(run_dir, marks[phase])):
            if process.poll() is not None:
                return None
            time.sleep(0.0005)
        moment = time.monotonic() + rng.uniform(0, spans.get(phase, 0.015))
    while time.monotonic() < moment:
        if process.poll() is not None:
            return None
        time.sleep(0.0005)
    if rank is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return 0.0
    return kill_rank(process, rank)


def kill_rank(process: subprocess.Popen[bytes], rank: int) -> float | None:
    """Kill one rank of the launcher `process` as soon as the rank exists.

    All other processes must end by themselves. Returns the same as `kill_in`.
    """
    while len(ranks := ranks_of(process)) <= rank:
        if process.poll() is not None:
            return None
        time.sleep(0.01)
    ranks[rank].kill()
    killed = time.monotonic()
    try:
        process.wait(ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        raise SystemExit(
            f"the launcher has not ended {ENDS_WITHIN:.0f} s after rank {rank} was killed"
        ) from None
    if left := psutil.wait_procs(ranks, 1.0)[1]:
        raise SystemExit(
            f"{len(left)} ranks still run after rank {rank} was killed and their launcher ended"
        )
    return time.monotonic() - killed


def ranks_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the ranks that the launcher `process` has started, in order."""
    ranks = {}
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children():
            with contextlib.suppress(psutil.Error):
                if "RANK" in (environment := child.environ()):
                    ranks[int(environment["RANK"])] = child
    return [ranks[rank] for rank in sorted(ranks)]


def _existing(run_dir: Path, pattern: str) -> list[Path]:
    """Return the paths that match `pattern`. Another process may delete them at any moment."""
    return [path for path in run_dir.glob(pattern) if path.exists()]


def left_behind(run_dir: Path) -> dict[str, Any]:
    """Describe the run folder after a kill.

    Raises SystemExit if a folder with a checkpoint's name is damaged.
    """
    checkpoints = run_dir / "checkpoints"
    for folder in step_folders(checkpoints):
        if problems := find_damage(folder, read_manifest(folder).files):
            raise SystemExit(f"{folder} is damaged after a kill: {'; '.join(problems)}")
    logged_steps = []
    if (run_dir / "metrics.jsonl").exists():
        logged_steps = [record["step"] for record in read_metrics(run_dir)]
    return {
        "last_step_logged": max(logged_steps, default=0),
        "checkpoints": [folder.name for folder in step_folders(checkpoints)],
        "partial_files": sorted(
            path.relative_to(run_dir).as_posix()
            for pattern in (
                ".*.partial",
                ".final.*",
                "checkpoints/.partial-*",
                "checkpoints/abandoned-*",
            )
            for path in run_dir.glob(pattern)
        ),
        "exported": (run_dir / "final").exists(),
    }


def phases(kills: int, rng: random.Random, *, is_stored: bool = False) -> list[str]:
    """Return the phase of each kill.

    The last kills are in the export: a tenth of all kills, but at least two. Before them, in random
    order, a quarter of all kills are in the start-up, a quarter while saving, and the rest during
    other steps. With `is_stored`, half of all kills are while files are stored, and the rest is in
    the start-up and in steps.
    """
    if is_stored:
        storing = ["storing"] * (kills // 2)
        drawn = storing + rng.choices(["start-up", "steps"], k=kills - len(storing))
        rng.shuffle(drawn)
        return drawn
    exporting = min(kills, max(2, kills // 10))
    earlier = ["start-up"] * (kills // 4) + ["saving"] * (kills // 4)
    earlier += ["steps"] * (kills - exporting - len(earlier))
    rng.shuffle(earlier)
    return earlier + ["exporting"] * exporting


# ── Comparison ────────────────────────────────────────────────────────────────────────────────────


def differences(one: Path, other: Path) -> list[str]:
    """Return a text for each difference between two finished runs.

    The metrics, the tensors of the last checkpoint, and the exported model are compared. The list
    is empty if they are equal.
    """
    lines = []
    curves = [[figures(record) for record in read_metrics(run_dir)] for run_dir in (one, other)]
    for run_dir, curve in zip((one, other), curves, strict=True):
        counts = Counter((record["step"], record.get("event")) for record in curve)
        lines += [
            f"{run_dir}: step {key} occurs {count} times"
            for key, count in counts.items()
            if count > 1
        ]
    if len(curves[0]) != len(curves[1]):
        lines.append(f"{one}: {len(curves[0])} lines of metrics, {other}: {len(curves[1])}")
    lines += [f"{a} differs from {b}" for a, b in zip(*curves, strict=False) if a != b]
    newest = [step_folders(run_dir / "checkpoints")[0] for run_dir in (one, other)]
    for a, b in ((newest[0], newest[1]), (one / "final", other / "final")):
        names = [sorted(path.name for path in folder.glob("*.safetensors")) for folder in (a, b)]
        if names[0] != names[1] or not names[0]:
            lines.append(f"{a} has the files {names[0]}, {b} has {names[1]}")
        lines += [
            f"{a / name} and {b / name} differ"
            for name in names[0]
            if name in names[1] and (a / name).read_bytes() != (b / name).read_bytes()
        ]
    return lines


def figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a record that do not depend on the machine."""
    return {key: value for key, value in record.items() if key not in MACHINE_KEYS}


# ── Test of a model ───────────────────────────────────────────────────────────────────────────────


def prove(
    name: str,
    folder: Path,
    packs: Path,
    kills: int,
    processes: int,
    rng: random.Random,
    environment: Mapping[str, str],
    address: str,
) -> dict[str, Any]:
    """Train a model without and with kills. Return the kills and how the two runs differ.

    Args:
        name: Name of the model, a key of MODELS.
        folder: Folder for the recipe, the logs and the runs.
        packs: Folder of the packs.
        kills: Number of kills.
        processes: Number of ranks. If there are several, one of them is killed each time.
        rng: Draws the phases, the moments and the ranks.
        environment: Environment variables of the launcher.
        address: Bucket for the killed run, or "" for a run on the disk.
    """
    steps = max(STEPS, STEPS_A_KILL * kills)
    recipe = write_recipe(folder, name, packs, steps, processes)
    uninterrupted = folder / f"{name}-uninterrupted"
    target: Path | str = folder / f"{name}-killed"
    killed = Path(target)
    if address:
        target = f"{address}/{folder.name}/{name}-killed"
        killed = path_for(target, ROOT / "runs")
    log = folder / f"{name}.log"
    began = time.time()
    finish(start(command_of(recipe, uninterrupted, processes), log, environment), log)
    # config.yaml is written just before the first step.
    startup = (uninterrupted / "config.yaml").stat().st_mtime - began

    records = []
    for phase in phases(kills, rng, is_stored=bool(address)):
        process = start(command_of(recipe, target, processes), log, environment)
        launched = time.monotonic()
        rank = rng.randrange(processes) if processes > 1 else None
        if (ended_after := kill_in(process, phase, killed, rng, startup, rank)) is None:
            raise SystemExit(
                f"{name}: the run ended (status {process.returncode}) before a kill while {phase}; "
                f"see {log}"
            )
        records.append(
            {
                "phase": phase,
                "after_seconds": round(time.monotonic() - launched, 3),
                **left_behind(killed),
            }
        )
        if address:
            stored = folder / f"{name}-stored-{len(records)}"
            StoredRun(str(target), stored).restore()
            records[-1]["stored_checkpoints"] = left_behind(stored)["checkpoints"]
            shutil.rmtree(killed, ignore_errors=True)
        if rank is not None:
            records[-1] |= {"rank": rank, "ended_after_seconds": round(ended_after, 2)}
        print(f"{name}: kill {len(records)} of {kills} in {phase}: {records[-1]}", flush=True)
    finish(start(command_of(recipe, target, processes), log, environment), log)

    differing = differences(uninterrupted, killed)
    if address:
        stored = folder / f"{name}-stored"
        StoredRun(str(target), stored).restore()
        differing += differences(uninterrupted, stored)
    print(f"{name}: {'equal, bit for bit' if not differing else differing[:5]}", flush=True)
    return {
        "model": MODELS[name],
        "steps": steps,
        "startup_seconds": round(startup, 2),
        "kills": records,
        "lines_of_metrics": len(read_metrics(killed)),
        "leftovers": left_behind(killed)["partial_files"],
        "equal": not differing,
        "differences": differing,
    }


def main() -> int:
    """Run the command, and return 1 if runs differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="number of kills of each model")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all"
    )
    parser.add_argument(
        "--processes", type=int, default=1, help="number of ranks; one of them is killed each time"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="OMP_NUM_THREADS, which changes the order of sums and must not change in a run",
    )
    parser.add_argument("--address", default="", help="bucket, such as s3://bucket")
    parser.add_argument("--out", type=Path, default=RESULTS, help="result file to write")
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    # The folder is kept for inspection.
    folder = Path(tempfile.mkdtemp(prefix="kill_resume-"))
    packs = write_packs(folder / "packs")
    environment = {"OMP_NUM_THREADS": str(arguments.threads), "ACCELERATE_USE_CPU": "true"}
    results = {
        name: prove(
            name=name,
            folder=folder,
            packs=packs,
            kills=arguments.kills,
            processes=arguments.processes,
            rng=rng,
            environment=environment,
            address=arguments.address,
        )
        for name in arguments.models
    }
    report = {
        **measured_on(describe_environment({"processes": arguments.processes})),
        "threads": arguments.threads,
        "verdict": {
            name: "equal, bit for bit" if result["equal"] else "DIFFERENT"
            for name, result in results.items()
        },
        "results": results,
    }
    write_json(arguments.out, report)
    return 0 if all(result["equal"] for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
