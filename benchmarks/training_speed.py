"""How fast the launcher trains on this machine: each variant a real `accelerate launch` in a process of its own.

    python -m benchmarks.training_speed --out benchmarks/results/h200_bf16.json --variant weights=fp32 --variant weights=bf16

The recipe's packs are prepared on first use from the demo's corpus and tokenizer, which `make demo` makes before it trains. The
figures are the run's own summary, so they count whole steps, data included, and leave out the first two.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.machine import LAUNCH, measured_on, run_to_its_end, write
from pretrain.metrics.run_record import is_step, read_metrics

RECIPE = Path("benchmarks/qwen3_1_7b.yaml")
CONFIG = Path("accelerate_configs/bf16.yaml")
SCRIPT = "train_accelerate.py"


def main() -> None:
    arguments = parse_arguments()
    report = {
        **measured_on(),
        "recipe": arguments.recipe.read_text(),
        "results": [],
    }
    launch = {key: getattr(arguments, key) for key in ("recipe", "config", "timeout", "processes", "script")}
    for variant in arguments.variant:
        report["results"].append(measure(variant.split(), **launch))
        write(arguments.out, report)  # whole after each: the next may be interrupted
        print(line(report["results"][-1]), flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", action="append", required=True, metavar="'key=value ...'", help="overrides of one variant")
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--processes", type=int, help="in place of the configuration's")
    parser.add_argument("--script", default=SCRIPT, help="benchmarks/two_hosts.py: see there")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one variant")
    return parser.parse_args()


def measure(
    overrides: list[str],
    *,
    recipe: Path,
    config: Path,
    timeout: float,
    processes: int | None = None,
    script: str = SCRIPT,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Train one variant; its summary, step times and exit status.

    `config`: accelerate's. `timeout`: seconds. `processes`: in place of the configuration's. `folder`: for the run, emptied
    first; else one below runs/speed. `environment`: added to this process's own.
    """
    folder = folder or Path("runs") / "speed" / "-".join(overrides).replace("/", "_")
    shutil.rmtree(folder, ignore_errors=True)
    command = [
        *LAUNCH,
        "--config_file",
        str(config),
        *(("--num_processes", str(processes)) if processes else ()),
        script,
        str(recipe),
        *overrides,
        f"run_dir={folder}",
    ]
    began = time.perf_counter()
    status, output = run_to_its_end(command, timeout, environment or {})
    result: dict[str, Any] = {
        "variant": overrides,
        "command": shlex.join(["accelerate", *command[3:]]),
        "status": status,
        "wall_seconds": time.perf_counter() - began,
    }
    if (folder / "summary.json").exists():
        steps = [record for record in read_metrics(folder) if is_step(record)]
        result["summary"] = json.loads((folder / "summary.json").read_text())
        result["steps"] = {key: [step[key] for step in steps] for key in ("step_ms", "loss", "gradient_norm", "data_wait_ms")}
    else:
        result["output"] = output[-8000:]
    return result


def line(result: dict[str, Any]) -> str:
    name = " ".join(result["variant"])
    if "summary" not in result:
        return f"{name}: failed ({result['status']})\n{result['output']}"
    s = result["summary"]
    mfu = f", {s['mfu_bf16_peak']:.1%} MFU" if "mfu_bf16_peak" in s else ""
    return (
        f"{name}: {s['tokens_per_second']:,.0f} tokens/s{mfu}, {s['memory_gib']:.1f} GiB, "
        f"first step {s['first_step_seconds']:.1f} s, recompiles {s['recompiles']}, data wait {s['data_wait_share']:.3%}, "
        f"loss {result['steps']['loss'][0]:.4f} -> {s['loss']:.4f}, wall {result['wall_seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
