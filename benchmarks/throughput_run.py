"""Measuring: packs made, limits taken, every way started, and a result file that is whole after each of them."""

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

from benchmarks import throughput_packs
from benchmarks.machine import (
    LAUNCH,
    device_and_torch,
    environment_from_elsewhere,
    processor,
    run_to_its_end,
)
from benchmarks.ways.entries import BASELINE, Entry
from benchmarks.ways.judge import TOLERANCES, judge
from foundation.errors import InputError
from foundation.files import write_json
from foundation.reading import load_with_bases
from pretrain.metrics.run_record import kind, read_metrics
from pretrain.settings.config import load_recipe, resolved
from pretrain.settings.recipe import Recipe

LAST_OUTPUT = 4000  # characters of a failed way's output that stay in the result


@dataclass(frozen=True)
class Settings:
    """What figures of one result file have in common. `timeout`: seconds for one way, which no figure depends on."""

    model: str
    recipe: Path
    configuration: Path  # accelerate's, for ours
    warm_up: int
    steps: int
    timeout: float
    whole_documents: bool = False

    @property
    def all_steps(self) -> int:
        return self.warm_up + self.steps

    @cached_property
    def loaded(self) -> Recipe:
        """The recipe; InputError where it leaves open what every way must share."""
        recipe = load_recipe(self.recipe)
        if recipe.batch.microbatch_is_searched or "vocab_size" not in (recipe.model.config or {}):
            raise InputError(
                f"{self.recipe}: the ways share a microbatch and a vocabulary; set `batch.microbatch` to a number of packs and "
                "`model.config.vocab_size`"
            )
        return recipe

    @property
    def packs(self) -> Path:
        return throughput_packs.folder_of(self.loaded, self.all_steps, whole=self.whole_documents)

    @property
    def overrides(self) -> list[str]:
        """What every way changes in the recipe: these packs replace its text, and it trains the steps to be measured."""
        return [*throughput_packs.settings_for(self.packs), f"train.steps={self.all_steps}"]

    def record(self) -> dict[str, Any]:
        """What must be equal for figures to stand in one table."""
        own = {
            key: str(value) for key, value in dataclasses.asdict(self).items() if key != "timeout"
        }
        text = self.recipe.read_text()
        if len(load_with_bases(self.recipe)) > 1:  # a base may change: all that comes of both
            text = yaml.safe_dump(resolved(self.loaded), sort_keys=False)
        return own | {"recipe_text": text, "packs": str(self.packs)}


class Bench:
    """One run of the benchmark, one way at a time. `out` holds at any time what is measured so far; with `go_on`, also what it
    held before. With `brief`, ways share compiled kernels, ours begin without `accelerate launch`, and no limits are measured."""

    def __init__(
        self,
        settings: Settings,
        out: Path,
        command: str,
        *,
        go_on: bool = False,
        brief: bool = False,
    ) -> None:
        self.settings = settings
        self.out = out
        self.brief = brief
        self.result: dict[str, Any] = {
            "command": command,
            "settings": settings.record(),
            "tolerances": TOLERANCES,
            "ways": {},
        }
        if go_on and out.exists():
            self._continue(json.loads(out.read_text()))

    def _continue(self, before: dict[str, Any]) -> None:
        changed = [
            key
            for key, value in self.result["settings"].items()
            if before["settings"].get(key) != value
        ]
        if changed:
            raise InputError(
                f"{self.out}: was measured with other settings ({', '.join(changed)}); name another --out"
            )
        if "environment" in before:
            there, here = (
                device_and_torch(before["environment"]),
                device_and_torch(environment_from_elsewhere()),
            )
            if there != here:
                raise InputError(
                    f"{self.out}: was measured on {there}, and this is {here}; name another --out"
                )
        self.result |= {
            key: before[key] for key in ("environment", "limits", "packs") if key in before
        }
        # What failed, for want of time or of a package, is tried again.
        self.result["ways"] = {
            name: way for name, way in before["ways"].items() if way["status"] == "ok"
        }

    def run(self, entries: Sequence[Entry]) -> None:
        """Measure the limits and every entry that is not measured yet, the baseline first."""
        self._make_packs()
        if not self.brief and self.result.get("limits", {}).get("status") != "ok":
            self.result["limits"] = self._worker(
                ["benchmarks.limits", "--recipe", str(self.settings.recipe)], {}
            )
            self.result["environment"] = environment_from_elsewhere() | {"processor": processor()}
        missing = [entry for entry in entries if entry.name not in self.result["ways"]]
        for entry in sorted(missing, key=lambda entry: entry.name != BASELINE):
            self._save(entry, self._measure(entry))

    def _make_packs(self) -> None:
        settings = self.settings
        throughput_packs.make(
            settings.packs, settings.loaded, settings.all_steps, whole=settings.whole_documents
        )
        manifest = json.loads((settings.packs / "packs.json").read_text())
        fingerprint = manifest["splits"]["train"]["fingerprint"]
        self.result["packs"] = (
            manifest["settings"] | manifest["statistics"] | {"fingerprint": fingerprint}
        )

    # ── One way ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _measure(self, entry: Entry) -> dict[str, Any]:
        """One entry in a process of its own. Unless it is to be brief, it has compile caches of its own too: a warm one would
        shorten somebody's first step."""
        print(f"{entry.name} ...", flush=True)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
            caches = {
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                "TRITON_CACHE_DIR": f"{folder}/triton",
            }
            measure = self._ours if entry.ours else self._other
            measured = measure(entry, {} if self.brief else caches, Path(folder) / "run")
        return measured | {"wall_seconds": time.perf_counter() - began}

    def _ours(self, entry: Entry, environment: Mapping[str, str], run_dir: Path) -> dict[str, Any]:
        """A real `accelerate launch`; the figures are those of the run's own records."""
        settings = self.settings
        overrides = [*settings.overrides, *entry.overrides]
        launch = [*LAUNCH, "--config_file", str(settings.configuration), "train_accelerate.py"]
        said = ["accelerate", *launch[3:]]
        if self.brief:
            launch, said = (
                [sys.executable, "-m", "train_accelerate"],
                ["python", "-m", "train_accelerate"],
            )
        own = [str(settings.recipe), *overrides]
        status, output = run_to_its_end(
            [*launch, *own, f"run_dir={run_dir}"], settings.timeout, environment
        )
        command = {"command": shlex.join([*said, *own, "run_dir=runs/throughput"])}
        if status != 0 or not (run_dir / "summary.json").exists():
            return failure(status, output) | command
        summary, audit = (
            json.loads((run_dir / name).read_text()) for name in ("summary.json", "audit.json")
        )
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
            "recompiles": summary["recompiles"],
            "microbatch": load_recipe(settings.recipe, overrides).batch.microbatch,
            "audit": {key: value for key, value in audit.items() if key != "products"},
        }

    def _other(self, entry: Entry, environment: Mapping[str, str], run_dir: Path) -> dict[str, Any]:
        """Train with the recipe's microbatch, or the largest half, quarter, ... that fits: plain transformers hold all logits."""
        settings, tried = self.settings, []
        microbatch = entry.packs or settings.loaded.batch.microbatch
        while True:
            options = ["--recipe", str(settings.recipe), "--weights", entry.weights]
            options += ["--microbatch", str(microbatch), "--steps", str(settings.all_steps)]
            measured = self._worker(
                ["benchmarks.ways.worker", str(entry.module), *options, *settings.overrides],
                environment,
            )
            measured |= {"microbatch": microbatch, "microbatches_that_did_not_fit": [*tried]}
            if measured["status"] != "out of memory" or microbatch == 1:
                return measured
            tried.append(microbatch)
            microbatch //= 2

    def _worker(self, command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
        """What `python -m command` prints as the last line that is JSON; where there is none, how it failed."""
        status, output = run_to_its_end(
            [sys.executable, "-m", *command], self.settings.timeout, environment
        )
        results = [line for line in output.splitlines() if line.startswith('{"status": ')]
        measured = json.loads(results[-1]) if status == 0 and results else failure(status, output)
        return measured | {"command": shlex.join(["python", "-m", *command])}

    # ── The result ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _save(self, entry: Entry, measured: dict[str, Any]) -> None:
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
    """How a way failed: its last line that says something, and the end of its output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    kind = "timeout" if status == "timeout" else "failed"
    return {
        "status": kind,
        "reason": lines[-1] if lines else "it printed nothing",
        "output": output[-LAST_OUTPUT:],
    }


def finish(result: dict[str, Any], settings: Settings) -> None:
    """Work out, of all that is measured so far, speed with its spread, share of the limit, and the verdict; in place."""
    ways, floors = result["ways"], result.get("limits", {}).get("floors", {})
    baseline = ways.get(BASELINE)
    if baseline is not None and baseline["status"] != "ok":
        baseline = None
    tokens = settings.loaded.batch.tokens
    for way in ways.values():
        if way["status"] != "ok":
            continue
        seconds = [ms / 1e3 for ms in way["step_ms"][settings.warm_up :]]
        way["tokens_per_second"] = spread([tokens / each for each in seconds])
        way["first_step_seconds"] = way["step_ms"][0] / 1e3
        way["data_wait_share"] = sum(way["data_wait_ms"][settings.warm_up :]) / 1e3 / sum(seconds)
        floor = floors.get(way["floor"])
        way["share_of_limit"] = floor / statistics.median(seconds) if floor else None
        entry = Entry(**{field.name: way[field.name] for field in dataclasses.fields(Entry)})
        way["verdict"], way["reasons"] = judge(entry, way, baseline)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, extremes and quartiles."""
    lower, median, upper = (
        statistics.quantiles(values, n=4, method="inclusive")
        if len(values) > 1
        else [values[0]] * 3
    )
    return {"median": median, "min": min(values), "q1": lower, "q3": upper, "max": max(values)}


def line(way: Mapping[str, Any]) -> str:
    """One way in a line, for the screen."""
    if way["status"] != "ok":
        return f"{way['name']}: {way['status']}: {way['reason']}"
    speed, share = way["tokens_per_second"], way["share_of_limit"]
    limit = "" if share is None else f", {100 * share:.1f} % of the limit"
    verdict = way["verdict"] + "".join(f"; {reason}" for reason in way["reasons"])
    return (
        f"{way['name']}: {speed['median']:,.0f} tokens/s ({speed['min']:,.0f} to {speed['max']:,.0f}){limit}, "
        f"{way['memory_gib']:.1f} GiB, first step {way['first_step_seconds']:.1f} s, "
        f"loss {way['losses'][0]:.4f} -> {way['losses'][-1]:.4f}, {verdict}"
    )
