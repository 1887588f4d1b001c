"""What a comparison is remembered by: of each run its settings that differ, its losses by step, its summary; once, the machine.

    python -m benchmarks.collect_runs runs/comparison/*/ --out benchmarks/results/loss/h200_comparison.json

Run folders hold far more and are not kept. `python -m pretrain report` reads such a file as it reads run folders.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.machine import command, write
from pretrain.compare.comparison import other_machines
from pretrain.metrics.run_record import read_run
from pretrain.settings.config import flatten

# Where a run is kept, what it is called: different in each, and no part of what is compared.
_NAMES = ("run_dir", "name")
_FOUND = ("precision", "effective", "backend", "computed_by")  # by the audit, of each precision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    names = [path.name for path in arguments.runs]
    if twice := [name for name in names if names.count(name) > 1]:
        parser.error(f"two runs are called {twice[0]}, and a file has one of each name; rename the folder of one")
    if note := other_machines([read_run(path) for path in arguments.runs]):
        parser.error(
            f"{note} A file has one environment for all of its runs: collect those of each machine in a file of their own"
        )
    settings = {path: flatten(read_run(path).config) for path in arguments.runs}
    shared = {key: value for key, value in settings[arguments.runs[0]].items() if _same(key, settings) and key not in _NAMES}
    environment = json.loads((arguments.runs[0] / "environment.json").read_text())
    for own in ("past", "source_config"):  # which are of that run alone
        environment.pop(own, None)
    report = {
        "command": command(),
        "side_by_side": any(read_run(path).side_by_side for path in arguments.runs),
        "environment": environment,
        "settings": shared,
        "runs": {
            path.name: figures(path, {key: v for key, v in settings[path].items() if key not in shared})
            for path in arguments.runs
        },
    }
    write(arguments.out, report)
    print(f"{len(settings)} runs in {arguments.out}")


def _same(key: str, settings: dict[Path, dict[str, Any]]) -> bool:
    return len({json.dumps(each.get(key)) for each in settings.values()}) == 1


def figures(path: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """`settings`: those in which it differs from other runs."""
    audit, run = json.loads((path / "audit.json").read_text()), read_run(path)
    steps, schedule = run.steps, {}
    if "schedule" in audit:
        of_phases = {name: {key: found[key] for key in _FOUND if key in found} for name, found in audit["precisions"].items()}
        schedule = {"schedule": audit["schedule"], "phases": audit.get("phases"), "precisions": of_phases}
    return {
        "settings": {key: value for key, value in settings.items() if key not in _NAMES},
        "audit": {key: audit[key] for key in _FOUND} | schedule,
        **run.past.record(),
        "summary": run.summary | {"tokens_per_step": run.tokens_per_step, "data_fingerprint": run.data_fingerprint},
        "losses": [record["loss"] for record in steps],
        "gradient_norms": [record["gradient_norm"] for record in steps],
        "frozen_updates": [record["frozen_updates"] for record in steps],
    }


if __name__ == "__main__":
    main()
