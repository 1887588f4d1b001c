"""Measure training on all GPUs of a host, and explain the lost time.

    python -m benchmarks.scaling --gpus 8 --out FILE
    python -m benchmarks.scaling --gpus 2 --parts topologies --topologies one fsdp2 --out FILE
    python -m benchmarks.scaling --gpus 2 --parts topologies --model gpt2 --out FILE
    python -m benchmarks.scaling --gpus 2 --parts topologies --model llama --out FILE \\
        optimizer.offload=state optimizer.moments=bf16
    python -m benchmarks.scaling --gpus 2 --tiny --out FILE

The parts are:

* `topologies` trains on each GPU alone (`one`), and on all GPUs together with DDP, `zero.yaml`,
  `fsdp2.yaml` and `hsdp.yaml` (two replicas). The GPUs of `one` train at the same time, because
  their speeds differ by up to 3 %. The first table has the speed, its share of the sum of the
  speeds of the GPUs alone, the memory, and the seconds from the launch to full speed. It also has
  the losses of the first steps side by side.
* `launchers` trains as `ddp` in `topologies`, but with two launchers that have half of the GPUs
  each, like two machines.
* `kill` kills one rank of a deterministic run after its checkpoint, and measures how long the other
  processes need to end. Then the run is resumed on all GPUs, and a copy of it on half of them. The
  result has the differences of their losses from the losses of an uninterrupted run.

The models are Qwen3-1.7B, GPT-2 124M, Llama-3.1-8B with packs that are one document of 8,192
tokens, and Qwen2.5-14B. By default, Llama-3.1-8B trains with `zero.yaml` and `fsdp2.yaml`, and
Qwen2.5-14B with `fsdp2.yaml`. A step has 131,072 tokens per GPU with Qwen3, 65,536 with GPT-2 and
Llama, and 32,768 with Qwen2.5. A run on one GPU has the same number of tokens per step as the
others. All runs are in FP8 with delayed scaling and exact BF16 weights. Except in Llama, the head
is in FP8 too. Arguments of the form `key=value` are settings of all runs.

In `topologies`, the last step of each run is traced on all ranks, and not timed. The second table
explains the time that a step loses against one GPU: exposed communication, waiting for the slowest
rank in collectives, GEMMs that are slower beside a collective than on one GPU, quantizing and
casting, and the host, for which the GPU waits. `benchmarks.step_traces` defines these times.
`other` is the difference of all other kernels, such as the update of the weights. `remainder` is
not explained: the traced step was slower or faster than the timed steps. `host busy` is the time of
the host in a step without its waits for the GPU. The traces stay in a folder beside the result
file. With `--explain`, the command trains nothing, and explains them again. With `--no-traces`, it
explains nothing.

The result file is written after every run. A run that the file already has is not repeated, so a
measurement can be divided into several calls. Only the runs of one call are on the same host. A run
that fails is recorded with its error. `--tiny` is a dry run with a small model on CPUs, with
emulated FP8.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from benchmarks import step_traces
from benchmarks.machine import (
    LAUNCH,
    environment_from_elsewhere,
    finish,
    measured_on,
    run_to_its_end,
    start,
)
from benchmarks.speed import generated_packs
from benchmarks.speed.shapes import SHAPES, Shape
from benchmarks.starts import EARLY, timed_run
from benchmarks.step_traces import TRACED
from foundation.command import run_command
from foundation.errors import InputError
from foundation.files import write_json
from foundation.units import UNKNOWN, markdown, percent
from pretrain.metrics.run_record import kind, read_metrics
from pretrain.settings.config import load_recipe

PARTS = ("topologies", "launchers", "kill")
TOPOLOGIES = ("one", "ddp", "zero", "fsdp2", "hsdp")
TINY = Path("benchmarks/tiny.yaml")
SCRIPT = "train_accelerate.py"
TRACING = ("-m", "benchmarks.traced_training", "--profile")
# Steps of a run in `kill`, which saves a checkpoint after its third step.
STEPS_KILL = 5
CHECKPOINT_EVERY = 3
# Number of losses in the table.
SHOWN_LOSSES = 3
# GPUs of a topology with two replicas of several shards.
HSDP_GPUS = 4


@dataclass(frozen=True)
class Model:
    """A model to train."""

    recipe: str
    # Tokens per GPU and step.
    tokens: int
    settings: tuple[str, ...] = ()
    # Shape that replaces the recipe's model and microbatch.
    shape: Shape | None = None
    topologies: tuple[str, ...] = TOPOLOGIES
    # Most CUDA graphs are captured in the first eight steps.
    steps: int = 16
    whole_documents: bool = False


HEAD = "fp8_config.scope=linear+head"
QWEN3 = "benchmarks/qwen3_1_7b_80gb.yaml"
MODELS = {
    "qwen3": Model(QWEN3, 131_072, (HEAD,)),
    # After 28 steps, the last step, which is traced, still captured a CUDA graph.
    "gpt2": Model(QWEN3, 65_536, (HEAD,), SHAPES["GPT-2 124M"], steps=60),
    "llama": Model(
        "benchmarks/llama_3_1_8b.yaml",
        65_536,
        ("model.gradient_checkpointing=none", "batch.microbatch=1"),
        topologies=("zero", "fsdp2"),
        whole_documents=True,
    ),
    "qwen2_5_14b": Model("benchmarks/qwen2_5_14b.yaml", 32_768, (HEAD,), topologies=("fsdp2",)),
}


class Scaling:
    """The measurement: its settings, its temporary folder, and its result."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.gpus: int = arguments.gpus
        self.tiny: bool = arguments.tiny
        self.model = MODELS[arguments.model]
        self.steps: int = arguments.steps or self.model.steps
        self.traced: bool = arguments.traces
        self.changes: list[str] = arguments.settings
        # The end of the names of runs: everything that differs from the default.
        changed = [arguments.model] if arguments.model != "qwen3" else []
        self.group = "".join(f", {text}" for text in (*changed, *self.changes))
        self.chosen = arguments.topologies or self.model.topologies
        self.timeout: float = arguments.timeout
        self.out: Path = arguments.out
        self.folder = folder
        self.traces = self.out.with_name(f"{self.out.stem}_traces")
        self.result: dict[str, Any] = measured_on(environment_from_elsewhere())
        self.result |= {"gpus": self.gpus, "runs": {}}
        if self.out.exists():
            earlier = json.loads(self.out.read_text())
            commands = [*earlier.get("earlier_commands", []), earlier["command"]]
            self.result |= {"runs": earlier["runs"], "earlier_commands": commands}
            if arguments.explain:
                # The traces may be from another machine.
                self.result = earlier

    # ── Parts ───────────────────────────────────────────────────────────────────────────────────

    def topologies(self) -> None:
        """Train with each topology."""
        settings = self.settings(self.steps)
        # Begin with `one`: its trace explains the others.
        for topology in [name for name in TOPOLOGIES if name in self.chosen]:
            if topology == "hsdp" and self.gpus < HSDP_GPUS:
                print(f"hsdp: skipped, because {self.gpus} replicas of one GPU are DDP")
                continue
            launch = self.launch_topology(topology)
            alone = self.gpus if topology == "one" else 1
            self.measure(topology, launch, settings, traced=self.traced, alone=alone)
            self.explain(topology)

    def launch_topology(self, topology: str) -> list[str]:
        """Return the beginning of the command that trains with a topology."""
        script = TRACING if self.traced else (SCRIPT,)
        if topology == "one":
            return self.launch("cpu" if self.tiny else "fp8_delayed", 1, script=script)
        options = []
        if topology == "hsdp":
            options = ["--parallelism_config_dp_replicate_size", "2"]
            options += ["--parallelism_config_dp_shard_size", str(self.gpus // 2)]
        return self.launch(f"{topology}_fp8_delayed", self.gpus, *options, script=script)

    def launchers(self) -> None:
        """Train with two launchers, which share the run folder like two machines."""
        self.record("launchers", self._launchers)

    def _launchers(self) -> dict[str, Any]:
        """Train with two launchers, and return the figures of the run."""
        run_dir = self.folder / "launchers"
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        settings = [*self.settings(self.steps), f"run_dir={run_dir}"]
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
        return figures_of(run_dir, traced=False)

    def kill(self) -> None:
        """Kill a rank, and resume the run."""
        settings = [
            *self.settings(STEPS_KILL),
            "deterministic=true",
            f"checkpoint.every={CHECKPOINT_EVERY}",
        ]
        launch = self.launch("zero_fp8_delayed", self.gpus)
        self.measure("uninterrupted", launch, settings)
        if "losses" not in self.result["runs"][self.name_of("uninterrupted")]:
            return
        self.record("kill", lambda: self._kill(launch, settings))

    def _kill(self, launch: Sequence[str], settings: Sequence[str]) -> dict[str, Any]:
        """Kill a rank after the checkpoint, resume the run twice, and return the figures.

        `launch` is the beginning of the command, and `settings` its end.
        """
        run_dir = self.folder / "killed"
        log = self.folder / "killed.log"
        launcher = start([*launch, *settings, f"run_dir={run_dir}"], log)
        checkpoint = run_dir / "checkpoints" / f"step-{CHECKPOINT_EVERY:08d}" / "state.json"
        until = time.monotonic() + self.timeout
        while not checkpoint.exists() and launcher.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        processes = psutil.Process(launcher.pid).children(recursive=True)
        ranks = [process for process in processes if SCRIPT in process.cmdline()]
        if not ranks:
            raise InputError(f"the run ended before it could be killed:\n{log.read_text()[-3000:]}")
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
        losses = figures_of(run_dir, traced=False)["losses"]
        expected = self.result["runs"][self.name_of("uninterrupted")]["losses"]
        return max(abs(loss / other - 1) for loss, other in zip(losses, expected, strict=True))

    # ── Runs ────────────────────────────────────────────────────────────────────────────────────

    def launch(
        self, configuration: str, processes: int, *options: str, script: Sequence[str] = (SCRIPT,)
    ) -> list[str]:
        """Return the beginning of a command that trains with `processes` processes."""
        file = f"accelerate_configs/{configuration}.yaml"
        precision = ["--mixed_precision", "no"] if self.tiny else []
        number = ["--num_processes", str(processes)]
        return [*LAUNCH, "--config_file", file, *number, *precision, *options, *script]

    def settings(self, steps: int) -> list[str]:
        """Return the recipe and the settings of a run. Write the packs if they are missing."""
        settings = ["weights=bf16_exact", "log.every=1", "parity=false", f"train.steps={steps}"]
        if self.tiny:
            recipe = TINY
            settings += [HEAD, "precision=delayed", "fp8_config.on_unsupported=emulate"]
            settings += ["batch.microbatch=2"]
        else:
            recipe = Path(self.model.recipe)
            tokens = self.model.tokens * self.gpus
            settings += [*self.model.settings, f"batch.tokens={tokens}"]
            if self.model.shape:
                settings += self.model.shape.settings(tokens)
        settings += self.changes
        whole_documents = self.model.whole_documents
        loaded = load_recipe(recipe, settings)
        packs = generated_packs.folder_of(loaded, steps, whole_documents=whole_documents)
        settings += generated_packs.make(packs, loaded, steps, whole_documents=whole_documents)
        return [str(recipe), *settings]

    def name_of(self, run: str) -> str:
        """Return the name of a run in the result file, such as "ddp" or "ddp, gpt2"."""
        return f"{run}{self.group}"

    def traces_of(self, run: str) -> Path:
        """Return the folder for the traces of a run."""
        return self.traces / re.sub(r"[^\w.=]+", "_", self.name_of(run))

    def measure(
        self,
        run: str,
        launch: Sequence[str],
        settings: Sequence[str],
        *,
        traced: bool = False,
        alone: int = 1,
    ) -> None:
        """Train a run from scratch, and record its figures. Keep its traces if it is `traced`.

        `alone` is the number of GPUs that train the run at the same time, each by itself. The
        figures are those of the first GPU, with the speeds of all of them.
        """
        folders = [self.folder / f"{run}_{gpu}" for gpu in range(alone)]

        def train_on(gpu: int) -> dict[str, Any]:
            environment = {"CUDA_VISIBLE_DEVICES": str(gpu)} if alone > 1 else {}
            command = [*launch, *settings, f"run_dir={folders[gpu]}"]
            times = timed_run(command, folders[gpu], environment, self.timeout)
            shutil.rmtree(folders[gpu] / "checkpoints", ignore_errors=True)
            return figures_of(folders[gpu], traced=traced) | {"times": times}

        def trained() -> dict[str, Any]:
            with ThreadPoolExecutor(alone) as pool:
                first, *others = pool.map(train_on, range(alone))
            if traced:
                shutil.rmtree(self.traces_of(run), ignore_errors=True)
                shutil.move(folders[0] / "traces", self.traces_of(run))
            if alone > 1:
                speeds = [figures["tokens_per_second"] for figures in (first, *others)]
                first["tokens_per_second_of_gpus"] = speeds
            return first

        self.record(run, trained)

    def record(self, run: str, measured: Callable[[], dict[str, Any]]) -> None:
        """Call `measured` and add its result, or its error, to the file.

        Do nothing if the file already has a result of this run. A run with an error is repeated.
        """
        name = self.name_of(run)
        earlier = self.result["runs"].get(name)
        if earlier and "error" not in earlier:
            return
        print(f"{name} ...", flush=True)
        try:
            self.result["runs"][name] = measured()
        except (InputError, SystemExit, psutil.Error) as error:
            self.result["runs"][name] = {"error": str(error)}
        write_json(self.out, self.result)
        print(json.dumps(self.result["runs"][name])[:400], flush=True)

    # ── Explanation ─────────────────────────────────────────────────────────────────────────────

    def explain(self, topology: str) -> None:
        """Add the parts of the traced step to a run. Do nothing if there are no traces."""
        run = self.result["runs"].get(self.name_of(topology), {})
        if not self.traces_of(topology).exists() or "traced_step_ms" not in run:
            return
        try:
            ranks = step_traces.read_step(self.traces_of(topology))
            one = None if topology == "one" else self.one
            run["explanation"] = step_traces.explain(ranks, one, run["traced_step_ms"])
        except InputError as error:
            run["explanation"] = {"error": str(error)}
        write_json(self.out, self.result)

    @cached_property
    def one(self) -> step_traces.RankStep | None:
        """The traced step on one GPU, or None without a trace."""
        folder = self.traces_of("one")
        return step_traces.read_step(folder)[0] if folder.exists() else None


def figures_of(run_dir: Path, *, traced: bool) -> dict[str, Any]:
    """Return the figures of a finished run. Speeds are medians without the first steps.

    If the run was `traced`, its last steps are not timed.
    """
    steps = [record for record in read_metrics(run_dir) if kind(record) == "step"]
    summary = json.loads((run_dir / "summary.json").read_text())
    timed = steps[EARLY:]
    figures = {}
    if traced:
        timed = steps[EARLY:-TRACED]
        figures["traced_step_ms"] = steps[-1]["step_ms"]
    return figures | {
        "losses": [step["loss"] for step in steps],
        "gradient_norms": [step["gradient_norm"] for step in steps],
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in timed),
        "step_ms": statistics.median(step["step_ms"] for step in timed),
        "tflops_per_gpu": statistics.median(step["tflops"] for step in timed),
        "memory_gib": summary.get("memory_gib"),
    }


def one_gpu(result: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the run on one GPU with the model and the settings of the run `name`, or {}."""
    _, comma, group = name.partition(", ")
    run = result["runs"].get(f"one{comma}{group}", {})
    return {} if "error" in run else run


def share_of(result: Mapping[str, Any], name: str) -> str:
    """Return the share of a run in the sum of the speeds of its GPUs alone."""
    one = one_gpu(result, name)
    if not one:
        return UNKNOWN
    run = result["runs"][name]
    speeds = one.get("tokens_per_second_of_gpus", [one["tokens_per_second"]])
    # The run on one GPU has the speed of the first GPU.
    if run is one:
        speeds = speeds[:1]
    return percent(run["tokens_per_second"] / sum(speeds))


def table(result: Mapping[str, Any]) -> str:
    """Return the Markdown table of a result, and a line for each run that is not in the table."""
    rows = []
    lines = []
    for name, run in result["runs"].items():
        if "losses" not in run:
            lines.append(f"{name}: {json.dumps(run)[:600]}")
            continue
        memory = f"{run['memory_gib']:.1f}" if run["memory_gib"] else UNKNOWN
        full_speed = f"{run['times']['full_speed']:.1f} s" if "times" in run else UNKNOWN
        losses = [f"{loss:.6f}" for loss in run["losses"][:SHOWN_LOSSES]]
        figures = [f"{run['tokens_per_second']:,.0f}", share_of(result, name)]
        figures += [f"{run['tflops_per_gpu']:,.0f}", memory, full_speed]
        rows.append([name, *figures, *losses])
    header = ["run", "tokens/s", "share", "TFLOP/s a GPU", "GiB", "launch to full speed"]
    header += [f"loss {number}" for number in range(1, SHOWN_LOSSES + 1)]
    return "\n\n".join([markdown(header, rows, names=1), *lines])


def table_of_lost_time(result: Mapping[str, Any]) -> str:
    """Return the Markdown table that explains the lost time of each traced run, by its causes."""
    rows = []
    lines = []
    causes: dict[str, float | None] = {}
    for name, run in result["runs"].items():
        one = one_gpu(result, name)
        explanation = run.get("explanation", {})
        if "error" in explanation:
            lines.append(f"{name}: {explanation['error']}")
        elif "parts_ms" in one.get("explanation", {}) and "parts_ms" in explanation:
            gpus = 1 if run is one else result["gpus"]
            causes = step_traces.lost(
                run["step_ms"], explanation, one["step_ms"], one["explanation"], gpus
            )
            times = [run["step_ms"], *causes.values(), explanation["host_ms"]]
            texts = [UNKNOWN if ms is None else f"{ms:,.1f}" for ms in times]
            rows.append([name, f"{run['tokens_per_second']:,.0f}", share_of(result, name), *texts])
    if not rows:
        return "\n\n".join(["No run has been explained: trace it, and also `one`.", *lines])
    titles = [cause.replace("_", " ") for cause in causes]
    header = ["run", "tokens/s", "share", "step", f"lost {titles[0]}", *titles[1:], "host busy"]
    title = "Milliseconds of a step, and those lost against one GPU, by cause:"
    return "\n\n".join([title, markdown(header, rows, names=1), *lines])


def main() -> None:
    """Run the command."""
    arguments = parse_arguments()
    if arguments.tiny:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        scaling = Scaling(arguments, Path(folder))
        if arguments.explain:
            for topology in TOPOLOGIES:
                scaling.explain(topology)
        else:
            for part in arguments.parts:
                getattr(scaling, part)()
    print(table(scaling.result))
    print()
    print(table_of_lost_time(scaling.result))


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8, help="an even number; default: 8")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    parser.add_argument(
        "--topologies", nargs="+", choices=TOPOLOGIES, help="default: all that suit the model"
    )
    parser.add_argument("--model", choices=MODELS, default="qwen3", help="default: %(default)s")
    parser.add_argument("--steps", type=int, help="steps of a run; default: 16, with gpt2 60")
    parser.add_argument("--timeout", type=float, default=420, help="maximum seconds of a run")
    parser.add_argument(
        "--traces",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="trace the last step of `topologies`, and explain the lost time",
    )
    parser.add_argument(
        "--explain", action="store_true", help="only explain the traces of earlier calls again"
    )
    parser.add_argument("--tiny", action="store_true", help="dry run with a small model on CPUs")
    parser.add_argument("--out", type=Path, required=True, help="result file to write or extend")
    arguments, arguments.settings = parser.parse_known_args()
    foreign = [text for text in arguments.settings if "=" not in text or text.startswith("-")]
    if foreign:
        parser.error(f"unknown arguments: {' '.join(foreign)}")
    if arguments.gpus % 2:
        parser.error(f"--gpus {arguments.gpus}: the parts divide the GPUs into halves")
    if arguments.steps is not None and arguments.steps <= EARLY + TRACED:
        parser.error(
            f"--steps: needs {EARLY + TRACED + 1} or more, because the first {EARLY} and the last "
            f"{TRACED} are not timed"
        )
    return arguments


if __name__ == "__main__":
    sys.exit(run_command(main))
