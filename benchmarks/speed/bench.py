"""Measure ways to train: packs, limits, runs, and the result file."""

from __future__ import annotations

import dataclasses
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from benchmarks.machine import (
    LAUNCH,
    device_and_torch,
    environment_from_elsewhere,
    processor,
    run_to_its_end,
)
from benchmarks.speed import generated_packs
from benchmarks.speed.libraries.entries import BASELINE, Entry
from benchmarks.speed.libraries.judge import TOLERANCES, UNKNOWN, judge
from foundation.errors import InputError
from foundation.files import write_json
from foundation.reading import load_with_bases
from pretrain.metrics.run_record import kind, read_metrics
from pretrain.settings.config import load_recipe, resolved
from pretrain.settings.recipe import Recipe

# Number of characters of a failed way's output that are recorded.
LAST_OUTPUT = 4000


@dataclass(frozen=True)
class Settings:
    """Settings that all results of a file have in common."""

    model: str
    recipe: Path
    # Accelerate configuration of this project's ways.
    configuration: Path
    # Steps before the timed ones.
    warm_up: int
    # Number of timed steps.
    steps: int
    # Maximum seconds of one way. Results do not depend on it.
    timeout: float
    whole_documents: bool = False

    @property
    def all_steps(self) -> int:
        """Return the number of steps of a run."""
        return self.warm_up + self.steps

    @cached_property
    def loaded(self) -> Recipe:
        """Return the recipe. Raises InputError if it leaves open a setting that all ways share."""
        recipe = load_recipe(self.recipe)
        if recipe.batch.microbatch == "auto" or "vocab_size" not in (recipe.model.config or {}):
            raise InputError(
                f"{self.recipe}: the ways share a microbatch and a vocabulary; set "
                "`batch.microbatch` to a number of packs, and `model.config.vocab_size`"
            )
        return recipe

    @property
    def packs(self) -> Path:
        """Return the folder of the packs."""
        return generated_packs.folder_of(
            self.loaded, self.all_steps, whole_documents=self.whole_documents
        )

    @property
    def overrides(self) -> list[str]:
        """Return overrides of the recipe for every way: the packs and the number of steps."""
        return [*generated_packs.settings_for(self.packs), f"train.steps={self.all_steps}"]

    def record(self) -> dict[str, Any]:
        """Return the values that must be equal for results to be in one table."""
        fields = {
            key: str(value) for key, value in dataclasses.asdict(self).items() if key != "timeout"
        }
        text = self.recipe.read_text()
        if len(load_with_bases(self.recipe)) > 1:
            # The base may change, so record the resolved recipe.
            text = yaml.safe_dump(resolved(self.loaded), sort_keys=False)
        return fields | {"recipe_text": text, "packs": str(self.packs)}


class Bench:
    """One run of the benchmark. Ways are measured one at a time.

    The file `out` always has the results so far. With `go_on`, it also keeps the results that it
    had before. With `brief`, ways share compiled kernels, this project's ways start without
    `accelerate launch`, and limits are not measured. Ways train on `gpu`, a value of
    CUDA_VISIBLE_DEVICES, or on the first visible GPU.
    """

    def __init__(
        self,
        settings: Settings,
        out: Path,
        command: str,
        *,
        go_on: bool = False,
        brief: bool = False,
        gpu: str | None = None,
    ) -> None:
        self.settings = settings
        self.out = out
        self.brief = brief
        self.environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        self.result: dict[str, Any] = {
            "command": command,
            "settings": settings.record(),
            "tolerances": TOLERANCES,
            "ways": {},
        }
        if go_on and out.exists():
            self._continue(json.loads(out.read_text()))

    def _continue(self, earlier: dict[str, Any]) -> None:
        """Keep `earlier` results. Raises InputError for other settings or another device."""
        changed = [
            key
            for key, value in self.result["settings"].items()
            if earlier["settings"].get(key) != value
        ]
        if changed:
            raise InputError(
                f"{self.out}: was measured with other settings ({', '.join(changed)}); name "
                "another --out"
            )
        if "environment" in earlier:
            old_device = device_and_torch(earlier["environment"])
            new_device = device_and_torch(environment_from_elsewhere())
            if old_device != new_device:
                raise InputError(
                    f"{self.out}: was measured on {old_device}, and this is {new_device}; name "
                    "another --out"
                )
        self.result |= {
            key: earlier[key] for key in ("environment", "limits", "packs") if key in earlier
        }
        # Failed ways are measured again. A timeout or a missing package may have been the cause.
        self.result["ways"] = {
            name: way for name, way in earlier["ways"].items() if way["status"] == "ok"
        }

    def run(self, entries: Sequence[Entry]) -> None:
        """Measure the limits and the entries that are not measured yet, the baseline first."""
        self._make_packs()
        if not self.brief and self.result.get("limits", {}).get("status") != "ok":
            self.result["limits"] = self.worker(
                ["benchmarks.speed.limits", "--recipe", str(self.settings.recipe)], {}
            )
            self.result["environment"] = environment_from_elsewhere() | {"processor": processor()}
        missing = [entry for entry in entries if entry.name not in self.result["ways"]]
        for entry in sorted(missing, key=lambda entry: entry.name != BASELINE):
            self._save(entry, self._measure(entry))

    def _make_packs(self) -> None:
        """Write the packs if they are missing, and add their description to the result."""
        settings = self.settings
        generated_packs.make(
            settings.packs,
            settings.loaded,
            settings.all_steps,
            whole_documents=settings.whole_documents,
        )
        manifest = json.loads((settings.packs / "packs.json").read_text())
        fingerprint = manifest["splits"]["train"]["fingerprint"]
        self.result["packs"] = (
            manifest["settings"] | manifest["statistics"] | {"fingerprint": fingerprint}
        )

    # ── A way ───────────────────────────────────────────────────────────────────────────────────

    def _measure(self, entry: Entry) -> dict[str, Any]:
        """Measure an entry in its own process.

        Unless `brief` is set, the entry has its own compile caches, because a warm cache would
        shorten its first step.
        """
        print(f"{entry.name} ...", flush=True)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
            caches = {
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                "TRITON_CACHE_DIR": f"{folder}/triton",
            }
            measure = self._measure_launcher if entry.ours else self._measure_trainer
            environment = self.environment | ({} if self.brief else caches)
            measured = measure(entry, environment, Path(folder) / "run")
        return measured | {"wall_seconds": time.perf_counter() - began}

    def _measure_launcher(
        self, entry: Entry, environment: Mapping[str, str], run_dir: Path
    ) -> dict[str, Any]:
        """Train with this project's launcher. The results are the records of the run."""
        settings = self.settings
        overrides = [*settings.overrides, *entry.overrides]
        if self.brief:
            launch = [sys.executable, "-m", "train_accelerate"]
            shown_launch = ["python", *launch[1:]]
        else:
            launch = [*LAUNCH, "--config_file", str(settings.configuration), "train_accelerate.py"]
            shown_launch = ["accelerate", *launch[3:]]
        arguments = [str(settings.recipe), *overrides]
        status, output = run_to_its_end(
            [*launch, *arguments, f"run_dir={run_dir}"], settings.timeout, environment
        )
        shown_command = [*shown_launch, *arguments, "run_dir=runs/throughput"]
        command = {"command": shlex.join(shown_command)}
        if status != 0 or not (run_dir / "summary.json").exists():
            return failure(status, output) | command
        summary = json.loads((run_dir / "summary.json").read_text())
        audit = json.loads((run_dir / "audit.json").read_text())
        steps = [record for record in read_metrics(run_dir) if kind(record) == "step"]
        figures = {
            "losses": "loss",
            "gradient_norms": "gradient_norm",
            "step_ms": "step_ms",
            "data_wait_ms": "data_wait_ms",
        }
        return {
            "status": "ok",
            **command,
            **{name: [step[key] for step in steps] for name, key in figures.items()},
            "memory_gib": summary["memory_gib"],
            "memory_retries": steps[-1].get("memory_retries", 0),
            "recompiles": summary["recompiles"],
            "microbatch": load_recipe(settings.recipe, overrides).batch.microbatch,
            "audit": {key: value for key, value in audit.items() if key != "products"},
        }

    def _measure_trainer(
        self, entry: Entry, environment: Mapping[str, str], run_dir: Path
    ) -> dict[str, Any]:
        """Train with another trainer. Halve the microbatch until the training fits in memory.

        The recipe's microbatch may be too large, because plain transformers keeps all logits.
        """
        settings = self.settings
        tried: list[int] = []
        microbatch = entry.packs or settings.loaded.batch.microbatch
        while True:
            options = ["--recipe", str(settings.recipe), "--weights", entry.weights]
            options += ["--microbatch", str(microbatch), "--steps", str(settings.all_steps)]
            worker = ["benchmarks.speed.libraries.worker", str(entry.module)]
            overrides = [*settings.overrides, *entry.overrides]
            measured = self.worker([*worker, *options, *overrides], environment)
            measured |= {"microbatch": microbatch, "microbatches_that_did_not_fit": [*tried]}
            if measured["status"] != "out of memory" or microbatch == 1:
                return measured
            tried.append(microbatch)
            microbatch //= 2

    def worker(self, command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
        """Run `python -m command`. Return the JSON object that it prints, or `failure`."""
        status, output = run_to_its_end(
            [sys.executable, "-m", *command], self.settings.timeout, environment
        )
        results = [line for line in output.splitlines() if line.startswith('{"status": ')]
        measured = json.loads(results[-1]) if status == 0 and results else failure(status, output)
        return measured | {"command": shlex.join(["python", "-m", *command])}

    # ── Result ────────────────────────────────────────────────────────────────────────────────

    def _save(self, entry: Entry, measured: dict[str, Any]) -> None:
        """Add a measured way to the result, write the file, and print the way."""
        described = dataclasses.asdict(entry) | {
            "ours": entry.ours,
            "floor": entry.floor,
            "date": time.strftime("%Y-%m-%d"),
        }
        self.result["ways"][entry.name] = described | measured
        finish(self.result, self.settings)
        write_json(self.out, self.result)
        print(line(self.result["ways"][entry.name]), flush=True)


def failure(status: int | str, output: str) -> dict[str, Any]:
    """Return the failure of a way: the end of its output, and a line of it as the reason.

    The line is the launcher's message if there is one, otherwise the last line with text.
    """
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    messages = [line for line in lines if line.startswith(("error: ", "halted: "))]
    kind = "timeout" if status == "timeout" else "failed"
    return {
        "status": kind,
        "reason": (messages[:1] or lines[-1:] or ["it printed nothing"])[0],
        "output": output[-LAST_OUTPUT:],
    }


def finish(result: dict[str, Any], settings: Settings) -> None:
    """Add speed, spread, share of the limit and verdict to all measured ways, in place."""
    ways = result["ways"]
    floors = result.get("limits", {}).get("floors", {})
    baseline = ways.get(BASELINE)
    if baseline is not None and baseline["status"] != "ok":
        baseline = None
    tokens = settings.loaded.batch.tokens
    for way in ways.values():
        if way["status"] != "ok":
            continue
        seconds = [ms / 1e3 for ms in way["step_ms"][settings.warm_up :]]
        way["tokens_per_second"] = spread([tokens / step for step in seconds])
        way["first_step_seconds"] = way["step_ms"][0] / 1e3
        way["data_wait_share"] = sum(way["data_wait_ms"][settings.warm_up :]) / 1e3 / sum(seconds)
        floor = floors.get(way["floor"])
        way["share_of_limit"] = floor / statistics.median(seconds) if floor else None
        entry = Entry(**{field.name: way[field.name] for field in dataclasses.fields(Entry)})
        way["verdict"], way["reasons"] = judge(entry, way, baseline)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, extremes and quartiles."""
    quartiles = [values[0]] * 3
    if len(values) > 1:
        quartiles = statistics.quantiles(values, n=4, method="inclusive")
    lower, median, upper = quartiles
    return {"median": median, "min": min(values), "q1": lower, "q3": upper, "max": max(values)}


def line(way: Mapping[str, Any]) -> str:
    """Return a console line for a way."""
    if way["status"] != "ok":
        return f"{way['name']}: {way['status']}: {way['reason']}"
    speed = way["tokens_per_second"]
    share = way["share_of_limit"]
    limit = "" if share is None else f", {100 * share:.1f} % of the limit"
    verdict = ""
    if way["verdict"] != UNKNOWN:
        verdict = ", " + "; ".join([way["verdict"], *way["reasons"]])
    return (
        f"{way['name']}: {speed['median']:,.0f} tokens/s "
        f"({speed['min']:,.0f} to {speed['max']:,.0f}){limit}, "
        f"{way['memory_gib']:.1f} GiB, first step {way['first_step_seconds']:.1f} s, "
        f"loss {way['losses'][0]:.4f} -> {way['losses'][-1]:.4f}{verdict}"
    )
