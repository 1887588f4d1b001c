"""Evaluate trained runs in several precisions, in one process, as soon as each run is finished.

    python -m benchmarks.evidence.served_cells runs/served --out cells.jsonl \\
        --served bf16,delayed,block,mxfp8,nvfp4 --merge 4

Each figure is the figure that `python -m pretrain evaluate RUN --precisions ...` prints. Only the
histories of delayed scaling may differ: here, they are always filled with eight packs of training
data, so that all runs are treated equally.

With `--merge N`, also evaluate means of N checkpoints, as `python -m pretrain export RUN --merge N`
exports them, in BF16 and in NVFP4. The means end with the last checkpoint, and with the last
checkpoint before the decay of the learning rate.

A line of the output has the name of the run's cell in the matrix, the seed, the precision of the
evaluation, and the held-out loss. `served: own` is the last evaluation of the run itself, in the
precision and with the options of the training. Several processes can share the work. Each process
takes the next finished run that no other process has taken. If there is no such run, the process
waits. It ends when `--runs` runs have been taken, or after the time `--until`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from foundation.errors import InputError
from foundation.overrides import overridden
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.format import step_folder, step_of
from pretrain.metrics.run_folder import MATRIX_FILE, describe_environment
from pretrain.metrics.run_record import LOSS_KEY, read_finished, read_run
from pretrain.model.distributed import as_launched
from pretrain.precision.settings import OPTIONS
from pretrain.run.assembly import Assembly, assemble
from pretrain.run.checkpointing import load_weights
from pretrain.run.evaluate import held_out_figures
from pretrain.run.evaluate_command import precision_overrides
from pretrain.run.export import checkpoints_to_merge, tensor_reader
from pretrain.run.job import Job, prepare_job
from pretrain.run.resume_point import find_checkpoint
from pretrain.settings.config import load_recipe
from pretrain.settings.launch import with_precision

RECIPE = "benchmarks/evidence/served_14m.yaml"
# Cells whose checkpoints are averaged, and the precisions in which the means are evaluated.
MERGED_CELLS = ("bf16", "nvfp4")
MERGED_SERVED = ("bf16", "nvfp4")
FAILURES = (InputError, OSError, RuntimeError, ValueError, KeyError)
PACKAGES = ("torch", "transformers", "transformer-engine")


@dataclass
class Server:
    """A model that evaluates checkpoints in several precisions."""

    # Names of the precisions of the evaluation.
    served: Sequence[str]
    job: Job
    accelerator: Accelerator
    assembly: Assembly

    @classmethod
    def of(cls, served: Sequence[str], overrides: Sequence[str]) -> Server:
        """Assemble the model, and evaluate its initial weights in the precisions `served` once.

        `overrides` are key=value arguments that override the recipe.
        """
        quantized = [name for name in served if name != "bf16"]
        changed = [
            "run_dir=runs/served_cells",
            *overrides,
            *(precision_overrides(quantized) or ["precision=bf16"]),
        ]
        recipe = with_precision(load_recipe(RECIPE, changed), dict(os.environ))
        accelerator, _ = as_launched(recipe)
        job = prepare_job(recipe, accelerator, changed)
        job = job.with_settings("batch", microbatch=job.plan.expected_microbatch)
        server = cls(served, job, accelerator, assemble(job, accelerator))
        # This compiles all layers, and shows early if a precision cannot be evaluated.
        for name, figures in server.figures(served):
            print(f"{name}: initial loss {figures['held_out_loss']:.6f}", flush=True)
        return server

    def load(self, checkpoints: Sequence[Path]) -> None:
        """Load the mean weights of `checkpoints`, which are folders of one run, the newest first.

        The weights of a single checkpoint are loaded unchanged.
        """
        newest = checkpoints[0]
        folder = Checkpoints(newest.parent, keep=1)
        source = find_checkpoint(folder, str(newest), None)
        assert source is not None
        load_weights(source, folder, self.job.recipe.weights, self.assembly)
        if len(checkpoints) > 1:
            read = tensor_reader(checkpoints, self.assembly.hf, self.job.recipe.weights)
            with torch.no_grad():
                for name, parameter in self.assembly.hf.named_parameters():
                    parameter.copy_(read(name))

    def figures(self, chosen: Iterable[str]) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield (name, held-out figures) of the loaded weights for each precision in `chosen`."""
        chosen = set(chosen)
        context = self.assembly.context
        measure = partial(held_out_figures, self.job, self.assembly.model, self.accelerator)
        for name in self.served:
            if name not in chosen:
                continue
            if name == "bf16":
                with overridden(context, evaluates_low=False):
                    yield name, measure()
                continue
            with (
                self.assembly.precision.using(name),
                context.preserving_state(),
                overridden(context, evaluates_low=True),
            ):
                # Drop the quantized weights of the checkpoint that was evaluated before.
                context.forget()
                if context.state():
                    self.assembly.start_precision(name, self.job, self.accelerator)
                yield name, measure()


def servers_of(served: Sequence[str], overrides: Sequence[str]) -> list[Server]:
    """Return servers that evaluate in all precisions of `served`.

    One server has all precisions, so that the same layers compute all of them. If one precision
    fails, each precision gets a separate server, and precisions that fail are omitted.
    """
    try:
        return [Server.of(served, overrides)]
    except FAILURES:
        traceback.print_exc()
    servers = []
    for name in served:
        try:
            servers.append(Server.of([name], overrides))
        except FAILURES:
            traceback.print_exc()
    return servers


@dataclass
class Evaluation:
    """The servers of this process, and the file of its results."""

    servers: Sequence[Server]
    served: Sequence[str]
    merge: int
    out: Path

    def evaluate(self, run_dir: Path) -> None:
        """Evaluate the finished run in `run_dir`, and write a line for each cell."""
        run = read_run(run_dir)
        mark = json.loads((run_dir / MATRIX_FILE).read_text())
        seed = run.config["seed"]
        name = run_dir.name.removesuffix(f"-seed={seed}")
        facts: dict[str, Any] = {"matrix": mark["matrix"], "trained": name, "seed": seed}
        options = {key: value for key, value in run.config["fp8_config"].items() if key in OPTIONS}
        facts["options"] = {key: value for key, value in options.items() if value is not None}
        facts |= {"steps": run.summary["steps"], "tokens": run.summary["tokens"]} | versions()
        losses = [round(step["loss"], 5) for step in run.steps]
        append(self.out.with_name("losses.jsonl"), facts | {"losses": losses})
        own = {"loss": run.summary["held_out_loss"], "training_loss": run.summary[LOSS_KEY]}
        append(self.out, facts | {"served": "own", "merged": [], **own})
        checkpoints = run_dir / "checkpoints"
        last = [step_folder(checkpoints, run.summary["steps"])]
        self.write_losses(facts, last, self.served)
        if self.merge and facts["trained"] in MERGED_CELLS:
            before_decay = step_folder(checkpoints, round(0.8 * run.summary["steps"]))
            self.write_losses(facts, checkpoints_to_merge(last[0], self.merge), MERGED_SERVED)
            self.write_losses(facts, [before_decay], MERGED_SERVED)
            self.write_losses(facts, checkpoints_to_merge(before_decay, self.merge), MERGED_SERVED)

    def write_losses(
        self, facts: dict[str, Any], checkpoints: Sequence[Path], served: Sequence[str]
    ) -> None:
        """Evaluate the mean of `checkpoints` in each precision of `served`, and write the cells."""
        steps = [step_of(folder) for folder in checkpoints]
        for server in self.servers:
            server.load(checkpoints)
            for name, figures in server.figures(served):
                cell = {"served": name, "merged": steps, "loss": figures["held_out_loss"]}
                cell["held_out_tokens"] = figures["held_out_tokens"]
                append(self.out, facts | cell)


def append(path: Path, line: dict[str, Any]) -> None:
    """Append a line to a file. Lines of several processes are not mixed."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(line) + "\n").encode())


@cache
def versions() -> dict[str, Any]:
    """Return the commit, the versions of packages and the GPU, for each cell."""
    environment = describe_environment({})
    packages = environment["packages"]
    return {
        "commit": (environment["git"] or {}).get("commit"),
        "gpu": (environment["gpus"] or ["CPU"])[0],
        "packages": {name: packages[name] for name in PACKAGES if name in packages},
    }


def take(folder: Path, taken: Path) -> Path | None:
    """Return a finished run of `folder` that no process has taken yet, or None."""
    for run_dir in sorted(path.parent for path in folder.glob("*/summary.json")):
        mark = taken / run_dir.name
        if mark.exists() or read_finished(run_dir) is None:
            continue
        try:
            mark.touch(exist_ok=False)
        except FileExistsError:
            continue
        return run_dir
    return None


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of the runs of a matrix")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the recipe")
    parser.add_argument("--out", type=Path, required=True, help="file to which cells are appended")
    parser.add_argument("--served", required=True, help="precisions of the evaluation")
    parser.add_argument("--merge", type=int, default=0, help="number of checkpoints in a mean")
    parser.add_argument("--runs", type=int, default=0, help="number of runs of the matrix")
    parser.add_argument("--until", type=float, default=0, help="time to end, in seconds since 1970")
    options = parser.parse_intermixed_args()
    served = options.served.split(",")
    servers = servers_of(served, options.overrides)
    evaluation = Evaluation(servers, served, options.merge, options.out)
    taken = options.folder / ".evaluated"
    taken.mkdir(parents=True, exist_ok=True)
    print("ready", flush=True)
    while True:
        run_dir = take(options.folder, taken)
        if run_dir is not None:
            started = time.monotonic()
            try:
                evaluation.evaluate(run_dir)
            except FAILURES:
                traceback.print_exc()
            print(f"{run_dir.name}: {time.monotonic() - started:.1f} s", flush=True)
        elif len(list(taken.iterdir())) >= options.runs or time.time() > options.until:
            break
        else:
            time.sleep(0.5)


if __name__ == "__main__":
    main()
