"""Measure training on all GPUs of a host.

    python -m benchmarks.scaling --gpus 8 --out FILE
    python -m benchmarks.scaling --gpus 8 --parts large kill --out FILE
    python -m benchmarks.scaling --gpus 2 --tiny --out FILE

The parts are:

* `topologies` trains Qwen3-1.7B on one GPU, and on all GPUs with DDP, `zero.yaml`, `fsdp2.yaml` and
  `hsdp.yaml` (two replicas). The table has the speed, its share of the speed of one GPU times the
  number of GPUs, the memory, and the seconds from the launch to full speed. It also has the losses
  of the first steps side by side.
* `large` trains Llama-3.1-8B with `fsdp2.yaml` and `zero.yaml`. Each pack is one document of 8,192
  tokens.
* `launchers` trains as `ddp` in `topologies`, but with two launchers that have half of the GPUs
  each, like two machines.
* `kill` kills one rank of a deterministic run after its checkpoint, and measures how long the other
  processes need to end. Then the run is resumed on all GPUs, and a copy of it on half of them. The
  result has the differences of their losses from the losses of an uninterrupted run.

A step has 131,072 tokens per GPU, and 65,536 in `large`. The run on one GPU has the same number of
tokens per step as the others. All runs are in FP8 with delayed scaling and exact BF16 weights.
Except in `large`, the head is in FP8 too. The result file is written after every run. A run that
the file already has is not repeated, so a measurement can be divided into several calls. A run that
fails is recorded with its error. `--tiny` is a dry run with a small model on CPUs, with emulated
FP8.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks import throughput_packs
from benchmarks.machine import (
    LAUNCH,
    environment_from_elsewhere,
    finish,
    measured_on,
    run_to_its_end,
    start,
)
from benchmarks.starts import EARLY, timed_run
from foundation.command import run_command
from foundation.errors import InputError
from foundation.files import write_json
from foundation.units import markdown, percent
from pretrain.metrics.run_record import kind, read_metrics
from pretrain.settings.config import load_recipe

PARTS = ("topologies", "large", "launchers", "kill")
QWEN3 = Path("benchmarks/qwen3_1_7b_80gb.yaml")
LLAMA = Path("benchmarks/llama_3_1_8b.yaml")
TINY = Path("benchmarks/tiny.yaml")
# Tokens per GPU and step in all parts but `large`, and in `large`.
TOKENS = 131_072
TOKENS_LARGE = 65_536
# Steps of a run, and of a run in `kill`, which saves a checkpoint after its third step.
STEPS = 6
STEPS_KILL = 5
CHECKPOINT_EVERY = 3
# Number of losses in the table.
SHOWN_LOSSES = 3


class Scaling:
    """The measurement: its settings, its temporary folder, and its result."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.gpus: int = arguments.gpus
        self.tiny: bool = arguments.tiny
        self.timeout: float = arguments.timeout
        self.out: Path = arguments.out
        self.folder = folder
        self.result: dict[str, Any] = measured_on(environment_from_elsewhere())
        self.result |= {"gpus": self.gpus, "runs": {}}
        if self.out.exists():
            earlier = json.loads(self.out.read_text())
            commands = [*earlier.get("earlier_commands", []), earlier["command"]]
            self.result |= {"runs": earlier["runs"], "earlier_commands": commands}

    # ── Parts ───────────────────────────────────────────────────────────────────────────────────

    def topologies(self) -> None:
        """Train with each topology."""
        settings = self.settings(QWEN3, TOKENS, STEPS)
        one = "cpu" if self.tiny else "fp8_delayed"
        self.measure("one", self.launch(one, 1), settings)
        for topology in ("ddp", "zero", "fsdp2"):
            launch = self.launch(f"{topology}_fp8_delayed", self.gpus)
            self.measure(topology, launch, settings)
        replicas = ["--parallelism_config_dp_replicate_size", "2"]
        shards = ["--parallelism_config_dp_shard_size", str(self.gpus // 2)]
        launch = self.launch("hsdp_fp8_delayed", self.gpus, *replicas, *shards)
        self.measure("hsdp", launch, settings)

    def large(self) -> None:
        """Train the large model."""
        settings = self.settings(LLAMA, TOKENS_LARGE, STEPS, whole_documents=True)
        for topology in ("fsdp2", "zero"):
            launch = self.launch(f"{topology}_fp8_delayed", self.gpus)
            self.measure(f"large_{topology}", launch, settings)

    def launchers(self) -> None:
        """Train with two launchers, which share the run folder like two machines."""
        self.record("launchers", self._launchers)

    def _launchers(self) -> dict[str, Any]:
        run_dir = self.folder / "launchers"
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        settings = [*self.settings(QWEN3, TOKENS, STEPS), f"run_dir={run_dir}"]
        half = self.gpus // 2
        running = []
        for rank in range(2):
            options = ["--num_machines", "2", "--machine_rank", str(rank)]
            address = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
            launch = self.launch("machines_fp8_delayed", self.gpus, *options, *address)
            devices = ",".join(str(number) for number in range(rank * half, (rank + 1) * half))
            environment = {"CUDA_VISIBLE_DEVICES": devices}
            if self.tiny:
                environment = {"ACCELERATE_USE_CPU": "true"}
            log = self.folder / f"launcher_{rank}.log"
            running.append((start([*launch, *settings], log, environment), log))
        for process, log in running:
            finish(process, log)
        return figures_of(run_dir)

    def kill(self) -> None:
        """Kill a rank, and resume the run."""
        settings = [
            *self.settings(QWEN3, TOKENS, STEPS_KILL),
            "deterministic=true",
            f"checkpoint.every={CHECKPOINT_EVERY}",
        ]
        launch = self.launch("zero_fp8_delayed", self.gpus)
        self.measure("uninterrupted", launch, settings)
        self.record("kill", lambda: self._kill(launch, settings))

    def _kill(self, launch: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
        run_dir = self.folder / "killed"
        log = self.folder / "killed.log"
        launcher = start([*launch, *settings, f"run_dir={run_dir}"], log)
        checkpoint = run_dir / "checkpoints" / f"step-{CHECKPOINT_EVERY:08d}" / "state.json"
        until = time.monotonic() + self.timeout
        while not checkpoint.exists() and launcher.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        processes = psutil.Process(launcher.pid).children(recursive=True)
        ranks = [process for process in processes if "train_accelerate.py" in process.cmdline()]
        victim = random.Random(0).choice(ranks)
        killed_at = time.monotonic()
        victim.send_signal(signal.SIGKILL)
        psutil.wait_procs([*processes, psutil.Process(launcher.pid)], timeout=self.timeout)
        seconds_to_end = time.monotonic() - killed_at
        launcher.wait()
        half = self.folder / "killed_half"
        shutil.copytree(run_dir, half, ignore=shutil.ignore_patterns("checkpoints"))
        # Link the files of checkpoints: they are large, and a resumed run does not change them.
        checkpoints = run_dir / "checkpoints"
        shutil.copytree(checkpoints, half / "checkpoints", copy_function=os.link)
        on_half = self.launch("zero_fp8_delayed", self.gpus // 2)
        return {
            "seconds_until_all_processes_ended": seconds_to_end,
            "largest_relative_difference_of_a_loss": {
                "all": self._difference_after_resume(launch, settings, run_dir),
                "half": self._difference_after_resume(on_half, settings, half),
            },
        }

    def _difference_after_resume(
        self, launch: Sequence[str], settings: Sequence[str], run_dir: Path
    ) -> float:
        """Resume a run. Return its largest relative difference from the uninterrupted losses."""
        command = [*launch, *settings, f"run_dir={run_dir}"]
        status, output = run_to_its_end(command, self.timeout, {})
        if status != 0:
            raise InputError(f"the resumed run ended with status {status}:\n{output[-3000:]}")
        losses = figures_of(run_dir)["losses"]
        expected = self.result["runs"]["uninterrupted"]["losses"]
        return max(abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True))

    # ── Runs ────────────────────────────────────────────────────────────────────────────────────

    def launch(self, configuration: str, processes: int, *options: str) -> list[str]:
        """Return the beginning of a command that trains with `processes` processes."""
        file = f"accelerate_configs/{configuration}.yaml"
        precision = ["--mixed_precision", "no"] if self.tiny else []
        number = ["--num_processes", str(processes)]
        script = "train_accelerate.py"
        return [*LAUNCH, "--config_file", file, *number, *precision, *options, script]

    def settings(
        self, recipe: Path, tokens: int, steps: int, *, whole_documents: bool = False
    ) -> list[str]:
        """Return the recipe and the settings of a run. Write the packs if they are missing.

        `tokens` is the number of tokens per GPU and step.
        """
        settings = ["weights=bf16_exact", "log.every=1", "parity=false", f"train.steps={steps}"]
        if self.tiny:
            recipe = TINY
            settings += ["precision=delayed", "fp8_config.on_unsupported=emulate"]
            settings += ["batch.microbatch=2"]
        else:
            settings += [f"batch.tokens={tokens * self.gpus}"]
        if recipe == LLAMA:
            settings += ["model.gradient_checkpointing=none", "batch.microbatch=1"]
        else:
            settings += ["fp8_config.scope=linear+head"]
        loaded = load_recipe(recipe, settings)
        packs = throughput_packs.folder_of(loaded, steps, whole_documents=whole_documents)
        settings += throughput_packs.make(packs, loaded, steps, whole_documents=whole_documents)
        return [str(recipe), *settings]

    def measure(self, name: str, launch: Sequence[str], settings: Sequence[str]) -> None:
        """Train a run from scratch, and record its figures."""
        run_dir = self.folder / name
        command = [*launch, *settings, f"run_dir={run_dir}"]

        def trained() -> dict[str, Any]:
            times = timed_run(command, run_dir, {}, self.timeout)
            shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
            return figures_of(run_dir) | {"times": times}

        self.record(name, trained)

    def record(self, name: str, measured: Callable[[], dict[str, Any]]) -> None:
        """Call `measured` and add its result to the file, unless the file already has a result."""
        if "error" not in self.result["runs"].get(name, {"error": "not measured yet"}):
            return
        print(f"{name} ...", flush=True)
        try:
            self.result["runs"][name] = measured()
        except (InputError, SystemExit, psutil.Error) as error:
            self.result["runs"][name] = {"error": str(error)}
        write_json(self.out, self.result)
        print(json.dumps(self.result["runs"][name])[:400], flush=True)


def figures_of(run_dir: Path) -> dict[str, Any]:
    """Return the figures of a finished run. Speeds are medians without the first steps."""
    steps = [record for record in read_metrics(run_dir) if kind(record) == "step"]
    summary = json.loads((run_dir / "summary.json").read_text())
    timed = steps[EARLY:]
    return {
        "losses": [step["loss"] for step in steps],
        "gradient_norms": [step["gradient_norm"] for step in steps],
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in timed),
        "tflops_per_gpu": statistics.median(step["tflops"] for step in timed),
        "memory_gib": summary.get("memory_gib"),
    }


def table(result: dict[str, Any]) -> str:
    """Return the Markdown table of a result, and a line for each run that is not in the table."""
    runs: dict[str, Any] = result["runs"]
    one = runs.get("one", {}).get("tokens_per_second")
    rows = []
    lines = []
    for name, run in runs.items():
        if "losses" not in run:
            lines.append(f"{name}: {json.dumps(run)[:600]}")
            continue
        speed = run["tokens_per_second"]
        share = "–"
        if one and not name.startswith("large"):
            share = percent(speed / one / (1 if name == "one" else result["gpus"]))
        memory = f"{run['memory_gib']:.1f}" if run["memory_gib"] else "–"
        full_speed = f"{run['times']['full_speed']:.1f} s" if "times" in run else "–"
        losses = [f"{loss:.6f}" for loss in run["losses"][:SHOWN_LOSSES]]
        tflops = f"{run['tflops_per_gpu']:,.0f}"
        rows.append([name, f"{speed:,.0f}", share, tflops, memory, full_speed, *losses])
    header = ["run", "tokens/s", "share", "TFLOP/s a GPU", "GiB", "launch to full speed"]
    header += [f"loss {number}" for number in range(1, SHOWN_LOSSES + 1)]
    return "\n\n".join([markdown(header, rows, names=1), *lines])


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8, help="an even number; default: 8")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument("--timeout", type=float, default=200, help="maximum seconds of a run")
    parser.add_argument("--tiny", action="store_true", help="dry run with a small model on CPUs")
    parser.add_argument("--out", type=Path, required=True, help="result file to write or extend")
    arguments = parser.parse_args()
    if arguments.gpus % 2:
        parser.error(f"--gpus {arguments.gpus}: the parts divide the GPUs into halves")
    if arguments.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        scaling = Scaling(arguments, Path(folder))
        for part in arguments.parts:
            getattr(scaling, part)()
    print(table(scaling.result))


if __name__ == "__main__":
    sys.exit(run_command(main))
