"""What a comparison is remembered by: of each run its settings, environment, audit, summary, and its losses by step.

    python -m benchmarks.collect_runs runs/comparison/*/ --out benchmarks/results/loss/h200_comparison.json

Run folders hold far more and are not kept. `python -m pretrain report` reads such a file as it reads run folders.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import command
from foundation.files import save_file
from pretrain.metrics.run_record import RunRecord, read_run

STEPS = ("step", "tokens", "loss", "gradient_norm", "frozen_updates")  # keys that are kept of each step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = {path.name: read_run(path) for path in arguments.runs}
    if len(runs) < len(arguments.runs):
        parser.error("two runs are called alike, and a file has one of each name; rename the folder of one")
    head = {"command": command(), "environment": next(iter(runs.values())).environment}
    save_file(arguments.out, text_of(head, {name: files_of(run) for name, run in runs.items()}).encode())
    print(f"{len(runs)} runs in {arguments.out}")


def files_of(run: RunRecord) -> dict[str, Any]:
    """What `pretrain.compare.report` makes a run's record of."""
    return {
        "config": run.config,
        "environment": run.environment,
        "audit": without_products(run.audit),
        "summary": run.summary,
        "matrix": run.matrix,
        "steps": {key: [step.get(key) for step in run.steps] for key in STEPS},
        "events": [record for record in run.metrics if "event" in record],
    }


def without_products(audit: Mapping[str, Any]) -> dict[str, Any]:
    """`audit` without the list of all linears, which is long."""
    kept = {key: value for key, value in audit.items() if key != "products"}
    return kept | {"precisions": {name: without_products(own) for name, own in audit.get("precisions", {}).items()}}


def text_of(head: Mapping[str, Any], runs: Mapping[str, Any]) -> str:
    """JSON with a line for each run."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items())
    return json.dumps(head, indent=1).removesuffix("\n}") + f',\n "runs": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    main()
