"""Measuring: packs made, limits taken, every way started, and a result file that is whole after each of them."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from benchmarks import throughput_packs
from benchmarks.evidence_results import device_and_torch
from benchmarks.machine import environment_from_elsewhere, processor, run_to_its_end
from benchmarks.training_speed import measure as measure_ours
from benchmarks.ways.entries import BASELINE, Entry
from benchmarks.ways.judge import TOLERANCES, judge
from foundation.ending import reason_in
from foundation.errors import InputError
from foundation.files import replace_file
from foundation.settings import load_with_bases
from pretrain.settings.config import load_recipe, resolved
from pretrain.settings.recipe import Recipe

SAID = 4000  # characters of a failed way's output that are kept


@dataclass(frozen=True)
class Settings:
    """What figures of one result file have in common. `timeout`: seconds for one way, which no figure depends on."""

    model: str
    recipe: Path
    configuration: Path  # accelerate's, for ours
    warm_up: int
    steps: int
    gpus: int
    timeout: float
    whole_documents: bool = False

    @property
    def all_steps(self) -> int:
        return self.warm_up + self.steps

    @cached_property
    def loaded(self) -> Recipe:
        """The recipe; InputError where it leaves open what every way must share."""
        recipe = load_recipe(self.recipe)
        if recipe.batch.microbatch == "auto" or "vocab_size" not in (recipe.model.config or {}):
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
        """Return what every way changes in the recipe: these packs replace its text, and it trains the steps to be measured."""
        return [*throughput_packs.settings_for(self.packs), f"train.steps={self.all_steps}"]

    def record(self) -> dict[str, Any]:
        """What must be equal for figures to stand in one table."""
        own = {key: str(value) for key, value in dataclasses.asdict(self).items() if key != "timeout"}
        text = self.recipe.read_text()
        if len(load_with_bases(self.recipe)) > 1:  # a base may change: all that comes of both
            text = yaml.safe_dump(resolved(self.loaded), sort_keys=False)
        return own | {"recipe_text": text, "packs": str(self.packs)}


class Bench:
    """One run of the benchmark. `out` holds at any time what is measured so far; with `go_on`, also what it held before."""

    def __init__(self, settings: Settings, out: Path, command: str, *, go_on: bool) -> None:
        self.settings = settings
        self.out = out
        self.result: dict[str, Any] = {"command": command, "settings": settings.record(), "tolerances": TOLERANCES, "ways": {}}
        self._saving = threading.Lock()
        if go_on and out.exists():
            self._take_up(json.loads(out.read_text()))

    def _take_up(self, before: dict[str, Any]) -> None:
        changed = [key for key, value in self.result["settings"].items() if before["settings"].get(key) != value]
        if changed:
            raise InputError(f"{self.out}: was measured with other settings ({', '.join(changed)}); name another --out")
        if "environment" in before:
            there, here = device_and_torch(before["environment"]), device_and_torch(environment_from_elsewhere())
            if there != here:
                raise InputError(f"{self.out}: was measured on {there}, and this is {here}; name another --out")
        self.result |= {key: before[key] for key in ("environment", "limits", "packs") if key in before}
        # What failed, for want of time or of a package, is tried again.
        self.result["ways"] = {name: way for name, way in before["ways"].items() if way["status"] == "ok"}

    def run(self, entries: Sequence[Entry]) -> None:
        """Measure the limits and every entry that is not measured yet, as many at a time as there are GPUs for."""
        self._make_packs()
        if self.result.get("limits", {}).get("status") != "ok":
            self.result["limits"] = self._worker(["benchmarks.limits", "--recipe", str(self.settings.recipe)], {})
            self.result["environment"] = environment_from_elsewhere() | {"processor": processor()}
        free: queue.Queue[int] = queue.Queue()
        for gpu in range(self.settings.gpus):
            free.put(gpu)

        def one(entry: Entry) -> None:
            gpu = free.get()
            try:
                self._save(entry, self._measure(entry, gpu))
            finally:
                free.put(gpu)

        missing = [entry for entry in entries if entry.name not in self.result["ways"]]
        missing.sort(key=lambda entry: entry.name != BASELINE)
        with ThreadPoolExecutor(self.settings.gpus) as pool:
            list(pool.map(one, missing))

    def _make_packs(self) -> None:
        settings = self.settings
        throughput_packs.make(settings.packs, settings.loaded, settings.all_steps, whole=settings.whole_documents)
        manifest = json.loads((settings.packs / "packs.json").read_text())
        fingerprint = manifest["splits"]["train"]["fingerprint"]
        self.result["packs"] = manifest["settings"] | manifest["statistics"] | {"fingerprint": fingerprint}

    # ── One way ───────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _measure(self, entry: Entry, gpu: int) -> dict[str, Any]:
        """One entry in a process of its own, with compile caches of its own: a warm one would shorten somebody's first step."""
        print(f"{entry.name} ...", flush=True)
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
            caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
            device = {"CUDA_VISIBLE_DEVICES": visible_device(gpu)} if self.settings.gpus > 1 else {}
            measured = (self._ours if entry.ours else self._other)(entry, caches | device, Path(folder))
        return measured | {"wall_seconds": time.perf_counter() - began}

    def _ours(self, entry: Entry, environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
        settings = self.settings
        run = measure_ours(
            [*settings.overrides, *entry.overrides],
            recipe=settings.recipe,
            config=settings.configuration,
            timeout=settings.timeout,
            folder=folder / "run",
            environment=environment,
        )
        run["command"] = run["command"].replace(str(folder / "run"), "runs/throughput")  # which is gone when the way has ended
        if run["status"] != 0 or "summary" not in run:
            said = run.get("output", "")
            kind = "timeout" if run["status"] == "timeout" else "failed"
            return {"status": kind, "reason": reason_in(said.splitlines()), "command": run["command"], "output": said[-SAID:]}
        audit = json.loads((folder / "run" / "audit.json").read_text())
        steps = run["steps"]
        return {
            "status": "ok",
            "command": run["command"],
            "losses": steps["loss"],
            "gradient_norms": steps["gradient_norm"],
            "step_ms": steps["step_ms"],
            "data_wait_ms": steps["data_wait_ms"],
            "memory_gib": run["summary"]["memory_gib"],
            "recompiles": run["summary"]["recompiles"],
            "microbatch": load_recipe(settings.recipe, [*settings.overrides, *entry.overrides]).batch.microbatch,
            "audit": {key: value for key, value in audit.items() if key != "products"},
        }

    def _other(self, entry: Entry, environment: Mapping[str, str], folder: Path) -> dict[str, Any]:
        """Train with the recipe's microbatch, or the largest half, quarter, ... that fits: plain transformers hold all logits."""
        settings, tried = self.settings, []
        microbatch = entry.packs or settings.loaded.batch.microbatch
        while True:
            options = ["--recipe", str(settings.recipe), "--weights", entry.weights]
            options += ["--microbatch", str(microbatch), "--steps", str(settings.all_steps)]
            measured = self._worker(["benchmarks.ways.worker", str(entry.module), *options, *settings.overrides], environment)
            measured |= {"microbatch": microbatch, "microbatches_that_did_not_fit": [*tried]}
            if measured["status"] != "out of memory" or microbatch == 1:
                return measured
            tried.append(microbatch)
            microbatch //= 2

    def _worker(self, command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
        """What `python -m command` prints as the last line that is JSON; where there is none, how it failed."""
        status, output = run_to_its_end([sys.executable, "-m", *command], self.settings.timeout, environment)
        said = {"command": shlex.join(["python", "-m", *command])}
        results = [line for line in output.splitlines() if line.startswith('{"status": ')]
        if status == 0 and results:
            return json.loads(results[-1]) | said
        kind = "timeout" if status == "timeout" else "failed"
        return {"status": kind, "reason": reason_in(output.splitlines()), "output": output[-SAID:]} | said

    # ── The result ────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _save(self, entry: Entry, measured: dict[str, Any]) -> None:
        described = dataclasses.asdict(entry) | {"ours": entry.ours, "floor": entry.floor, "date": time.strftime("%Y-%m-%d")}
        with self._saving:
            self.result["ways"][entry.name] = described | measured
            finish(self.result, self.settings)
            self.out.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.out, json.dumps(self.result, indent=1).encode() + b"\n")
            print(line(self.result["ways"][entry.name]), flush=True)


def visible_device(number: int) -> str:
    """The name of GPU `number` among those that this process may see; empty where it may see none."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(number) if names is None else [*names.split(","), *[""] * number][number]


def finish(result: dict[str, Any], settings: Settings) -> None:
    """Work out, of all that is measured so far, speed with its spread, share of the limit, and the verdict; in place."""
    ways, floors = result["ways"], result["limits"].get("floors", {})
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
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
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
