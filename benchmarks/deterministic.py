"""Does a training repeat its bits on this machine, killed or not, and what does that cost?

    python -m benchmarks.deterministic --out benchmarks/results/h200_deterministic_delayed_head.json \
        --config accelerate_configs/fp8_delayed.yaml weights=bf16_exact fp8_config.scope=linear+head

The real launcher, four times: `free`, with `deterministic: false`; `alone`, with `deterministic: true`; `killed`, the same
training with SIGKILL after its first checkpoint, then started again; and `free_again`. Equal means: losses and gradient norms of
all steps are the same doubles, and the tensors of the last checkpoint have the same SHA-256. Up to the kill, `killed` is a second
run of the training of `alone`; from its checkpoint on, a resumed one. The cost is that of all that the setting changes, attention
included.

Of each run there is a file in --folder, and what it trained is deleted; a run that has one is not made again. So where a command
may take only so long, the same command goes on. Another one is refused in that folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Any

from benchmarks import throughput_packs
from benchmarks.machine import LAUNCH, ROOT, environment_from_elsewhere, finish, measured_on, start, write
from pretrain.checkpoint.folders import step_folder
from pretrain.checkpoint.manifest import read_manifest
from pretrain.metrics.run_record import is_step, read_metrics
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

FIGURES = ("loss", "gradient_norm", "learning_rate", "frozen_updates")  # of a step, that two runs must share
WARM_UP = 3  # steps that no speed is taken of
EQUAL = "equal, bit for bit"
SAVED = "checkpoint.at_end=true"  # the last step's tensors, which are compared


@dataclass(frozen=True)
class Training:
    """One training, and where its runs are kept. A checkpoint is saved after step `saved`, in the run that will be killed."""

    recipe: Path
    config: Path  # accelerate's
    overrides: Sequence[str]
    folder: Path
    steps: int
    saved: int
    timeout: float = 400.0

    def command(self, name: str, *more: str) -> list[str]:
        launch = [*LAUNCH, "--config_file", str(self.config)]
        settings = [*self.overrides, f"train.steps={self.steps}", f"run_dir={self.run_dir(name)}", *more]
        return [*launch, str(ROOT / "train_accelerate.py"), str(self.recipe), *settings]

    def run_dir(self, name: str) -> Path:
        return self.folder / name

    # ── Runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def free(self, name: str) -> dict[str, Any]:
        """A run whose sums may come in any order, for its speed."""
        return self._kept(name, "deterministic=false", "checkpoint.every=null", "checkpoint.at_end=false")

    def alone(self) -> dict[str, Any]:
        return self._kept("alone", "deterministic=true", "checkpoint.every=null", SAVED)

    def killed(self) -> dict[str, Any]:
        settings = ("deterministic=true", f"checkpoint.every={self.saved}", "checkpoint.keep=1", SAVED)
        return self._kept("killed", *settings, kill=True)

    def _kept(self, name: str, *settings: str, kill: bool = False) -> dict[str, Any]:
        """What is kept of this run, which is made where nothing is. SystemExit where another command has made it."""
        path, command = self.folder / f"{name}.json", self.command(name, *settings)
        found: dict[str, Any] = {"command": shlex.join(["accelerate", *command[3:]])}
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["command"] != found["command"]:
                other = f"{path} was made by another command; name another --folder or --out"
                raise SystemExit(f"{other}\nthere: {kept['command']}\nhere:  {found['command']}")
            return kept
        shutil.rmtree(self.run_dir(name), ignore_errors=True)
        self.folder.mkdir(parents=True, exist_ok=True)  # for its log
        print(f"{name} ...", flush=True)
        if kill:
            found["before_the_kill"] = figures(self._until_killed(name, command))
        self._to_its_end(name, command)
        found |= self._found(name)
        shutil.rmtree(self.run_dir(name))
        write(path, found)
        return found

    def _until_killed(self, name: str, command: Sequence[str]) -> list[dict[str, Any]]:
        """The steps that it had done."""
        run_dir, process = self.run_dir(name), start(command, self._log(name))
        began = time.monotonic()
        while not (step_folder(run_dir / "checkpoints", self.saved).exists() and steps_of(run_dir)[-1]["step"] > self.saved):
            if process.poll() is not None or time.monotonic() - began > self.timeout:
                _end(process)
                raise SystemExit(f"step {self.saved} was not saved before the run ended; see {self._log(name)}")
            time.sleep(0.005)
        _end(process)
        first = steps_of(run_dir)
        if first[-1]["step"] == self.steps:
            raise SystemExit(f"the run had done all {self.steps} steps before it could be killed; take more --steps")
        return first

    def _to_its_end(self, name: str, command: Sequence[str]) -> None:
        process = start(command, self._log(name))
        try:
            process.wait(self.timeout)
        except TimeoutExpired:
            _end(process)
        finish(process, self._log(name))

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _found(self, name: str) -> dict[str, Any]:
        run_dir, steps = self.run_dir(name), steps_of(self.run_dir(name))
        audit = json.loads((run_dir / "audit.json").read_text())
        last = step_folder(run_dir / "checkpoints", self.steps)
        speeds = [step["tokens_per_second"] for step in steps[WARM_UP:]]
        return {
            "figures": figures(steps),
            "tensors": digests(last) if last.exists() else None,
            "tokens_per_second": {"median": statistics.median(speeds), "min": min(speeds), "max": max(speeds)},
            "memory_gib": max(step.get("memory_gib") or 0.0 for step in steps),
            "audit": {key: audit[key] for key in ("deterministic", "attention", "fused", "compiled", "loss", "computed_by")},
        }


def _end(process: Any) -> None:
    """Launcher and training process together, as a machine that goes away would."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(run_dir) if is_step(record)]


def figures(steps: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return the number and FIGURES of each step."""
    return [[step["step"], *(step[key] for key in FIGURES)] for step in steps]


def digests(checkpoint: Path) -> dict[str, str]:
    """SHA-256 of each file of tensors."""
    files = read_manifest(checkpoint).files
    return {file.name: file.hashes["sha256"] for file in files if file.name.endswith(".safetensors")}


# ── The verdict ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def differing(one: Sequence[Any], other: Sequence[Any]) -> str | None:
    """The first step in which two runs' figures differ, None where there is none; of as many steps as both have."""
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            return f"step {mine[0]}: {mine[1:]} and {theirs[1:]}"
    return None


def verdict(alone: Mapping[str, Any], killed: Mapping[str, Any]) -> dict[str, str]:
    """Judge two runs of one training, and a resumed one: EQUAL, or what differs first."""
    second = differing(alone["figures"], killed["before_the_kill"])
    resumed = differing(alone["figures"], killed["figures"])
    if not resumed and len(alone["figures"]) != len(killed["figures"]):
        resumed = f"{len(alone['figures'])} steps and {len(killed['figures'])}"
    if not resumed and (not alone["tensors"] or alone["tensors"] != killed["tensors"]):
        names = [name for name, digest in (alone["tensors"] or {}).items() if (killed["tensors"] or {}).get(name) != digest]
        resumed = f"the last checkpoint's {', '.join(names) or 'tensors are not there'}"
    said = {"two runs": second, "killed and resumed": resumed}
    return {what: EQUAL if found is None else f"DIFFERENT: {found}" for what, found in said.items()}


def cost(alone: Mapping[str, Any], free: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of a step's speed that the setting costs, of the mean of the free runs before and after it."""
    speeds = [run["tokens_per_second"]["median"] for run in free]
    return 1 - alone["tokens_per_second"]["median"] / statistics.fmean(speeds)


def drawn_packs(recipe: Recipe, steps: int) -> list[str]:
    """Settings that replace packs which are not there by packs of drawn tokens, made on first use; none where they are there."""
    if Path(recipe.data.packs).exists():
        return []
    return throughput_packs.make(ROOT / throughput_packs.folder_of(recipe, steps), recipe, steps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="over the recipe's settings, in all runs")
    parser.add_argument("--recipe", type=Path, default=ROOT / "benchmarks" / "qwen3_1_7b.yaml")
    parser.add_argument("--config", type=Path, default=ROOT / "accelerate_configs" / "fp8_delayed.yaml", help="accelerate's")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--save-after", type=int, default=6, metavar="STEP", help="the checkpoint that is resumed from")
    parser.add_argument("--without-speed", action="store_true", help="only whether bits repeat")
    parser.add_argument("--folder", type=Path, help="of the runs; default: beside --out, without its suffix")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    folder = arguments.folder or ROOT / "runs" / "deterministic" / arguments.out.stem
    overrides = [*arguments.overrides, *drawn_packs(load_recipe(arguments.recipe, arguments.overrides), arguments.steps)]
    training = Training(arguments.recipe, arguments.config, overrides, folder, arguments.steps, arguments.save_after)

    runs: dict[str, Any] = {}
    if not arguments.without_speed:
        runs["free"] = training.free("free")
    runs |= {"alone": training.alone(), "killed": training.killed()}
    report = {
        **measured_on(environment_from_elsewhere()),
        "recipe": arguments.recipe.read_text(),
        "verdict": verdict(runs["alone"], runs["killed"]),
    }
    if not arguments.without_speed:
        runs["free_again"] = training.free("free_again")
        report["cost"] = cost(runs["alone"], [runs["free"], runs["free_again"]])
    report["runs"] = runs
    write(arguments.out, report)
    print(json.dumps({key: report[key] for key in ("verdict", "cost") if key in report}, indent=1))
    return 0 if set(report["verdict"].values()) == {EQUAL} else 1


if __name__ == "__main__":
    sys.exit(main())
