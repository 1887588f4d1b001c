"""The launcher on a CPU: its speed on the demo's model beside plain Hugging Face, and how soon it is at work.

    python -m benchmarks.cpu_speed --out benchmarks/results/cpu_speed.json

Plain Hugging Face is what one would write oneself: the same model, the same packs as rows of a batch, transformers' own loss and
attention, torch's AdamW, as many packs in a step and at once. It runs twice. Given positions that begin anew in each document,
transformers masks what lies across their boundaries: that is the same training, as `parity` proves of each run. Given none,
documents see their neighbours, which is less work and another training. All run in processes of their own, in turns, so that
whatever else the machine does meets them alike. It takes the packs that `make demo` makes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import measured_on, write

RECIPE = Path("recipes/smoke.yaml")
PLAIN = ("masked", "unmasked")  # plain Hugging Face: each document sees itself alone, or all that stand before it in its row
STEPS, WARM_UP = 40, 5
OVERRIDES = [f"train.steps={STEPS}", "schedule.warmup=2", "evaluate.every=null", "evaluate.samples=[]", "checkpoint.at_end=false"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plain", choices=PLAIN, help="be that plain run: print figures and end")
    parser.add_argument("--began", type=float, metavar="TIME", help="when the plain run was started, in seconds since 1970")
    arguments = parser.parse_args()
    if arguments.plain:
        print(json.dumps(plain(arguments.began, masked=arguments.plain == "masked")))
        return
    rounds = [measure() for _ in range(arguments.rounds)]
    median = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    report = {
        **measured_on(),
        "threads": os.environ.get("OMP_NUM_THREADS", "torch's default"),
        "median": median | {f"over_{name}": median["launcher"] / median[name] for name in PLAIN},
        "rounds": rounds,
    }
    write(arguments.out, report)
    print(json.dumps(report["median"], indent=1))


def measure() -> dict[str, float]:
    """One round: tokens/s of each, and the seconds until its first step is done."""
    beside = {}
    for name in PLAIN:
        command = [sys.executable, "-m", "benchmarks.cpu_speed", "--plain", name, "--out", os.devnull]
        printed = subprocess.run([*command, "--began", str(time.time())], check=True, capture_output=True, text=True).stdout
        beside |= {name + key: value for key, value in json.loads(printed).items()}
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        command = [sys.executable, "train_accelerate.py", str(RECIPE), *OVERRIDES, f"run_dir={metrics.parent}"]
        began = time.perf_counter()
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while run.poll() is None and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.02)
        first_step = time.perf_counter() - began
        if run.wait():
            raise SystemExit(f"{shlex.join(command)} ended with {run.returncode}")
        steps = [record for record in map(json.loads, metrics.read_text().splitlines()) if "loss" in record]
    return {
        **beside,
        "launcher": statistics.median(step["tokens_per_second"] for step in steps[WARM_UP:]),
        "launcher_first_step_seconds": first_step,
    }


def plain(began: float, *, masked: bool) -> dict[str, float]:
    """tokens/s, and the seconds from `began` to the end of the first step. It imports what a script of one's own would.

    `masked`: each document sees itself alone, and does not have to guess the next one's first token."""
    import torch
    import yaml
    from datasets import load_from_disk
    from transformers import AutoConfig, AutoModelForCausalLM

    recipe = yaml.safe_load(RECIPE.read_text())
    data, batch, optimizer = recipe["data"], recipe["batch"], recipe["optimizer"]
    packs = load_from_disk(data["packs"])["train"].with_format("numpy")
    torch.manual_seed(recipe["seed"])
    config = AutoConfig.for_model(**recipe["model"]["config"])
    hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    adamw = torch.optim.AdamW(hf.parameters(), lr=optimizer["learning_rate"])
    per_step, at_once = batch["tokens"] // data["length"], batch["microbatch"]
    seconds, first_step = [], 0.0
    for step in range(STEPS):
        step_began = time.perf_counter()
        for first in range(step * per_step, (step + 1) * per_step, at_once):
            chosen = [packs[index % len(packs)] for index in range(first, first + at_once)]
            ids = torch.from_numpy(np.stack([pack["input_ids"].astype(np.int64) for pack in chosen]))
            positions, labels = None, ids
            if masked:
                positions = torch.from_numpy(np.stack([positions_of(pack["lengths"], data["length"]) for pack in chosen]))
                labels = ids.where(positions > 0, -100)
            output = hf(input_ids=ids, position_ids=positions, labels=labels, use_cache=False)
            loss = output.loss * (at_once / per_step)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(hf.parameters(), optimizer["clip"])
        adamw.step()
        adamw.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - step_began)
        first_step = first_step or time.time() - began
    return {"": batch["tokens"] / statistics.median(seconds[WARM_UP:]), "_first_step_seconds": first_step}


def positions_of(lengths: np.ndarray, length: int) -> np.ndarray:
    """[length]: from 0 in each document; what pads a pack is a document, too. Not the launcher's, which a script of one's own
    does not have."""
    sizes = np.append(lengths, length - lengths.sum())
    return np.arange(length) - np.repeat(np.cumsum(sizes) - sizes, sizes)


if __name__ == "__main__":
    main()
