"""What `make demo` says at its end: where everything is, how good it is, how long it took, and what to run next."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.command import shown
from demo.parts import PYTHON, RECIPE, Demo, train_command
from foundation.units import duration
from pretrain.checkpoint.folders import step_folders


def last_screen(demo: Demo, seconds: Mapping[str, float | None]) -> str:
    """The whole screen. `seconds` holds what each part took, None for one that an earlier `make demo` had done."""
    summary = json.loads((demo.run_dir / "summary.json").read_text())
    return "\n\n".join(
        [
            demo.sample.read_text(encoding="utf-8").strip(),
            _result(summary, demo.recipe.model.config["vocab_size"]),
            _section("Where everything is", _places(demo)),
            "Time: " + ", ".join(f"{title.lower()} {_took(taken)}" for title, taken in seconds.items()),
            _section("What to run next", _commands(demo)),
        ]
    )


def _result(summary: Mapping[str, Any], vocab_size: int) -> str:
    return (
        f"Held-out loss {summary['held_out_loss']:.3f} nats a token: perplexity {summary['held_out_perplexity']:.1f}, "
        f"where a uniform guess has {vocab_size:,}.\n"
        f"{summary['steps']:,} steps, {summary['tokens']:,} tokens, {summary['tokens_per_second']:,.0f} tokens/s."
    )


def _places(demo: Demo) -> dict[str, str]:
    return {
        "the report": f"{demo.report}  (a page: open it in a browser)",
        "loss curve": str(demo.run_dir / "loss.png"),
        "the model": f"{demo.model}  (a Hugging Face folder: AutoModelForCausalLM.from_pretrained loads it)",
        "every step": str(demo.run_dir / "metrics.jsonl"),
        "checkpoint": str(next(iter(step_folders(demo.run_dir / "checkpoints")), "none is kept")),
        "packs": f"{demo.packs}, with document lengths as {demo.packs / 'lengths.png'}",
    }


def _commands(demo: Demo) -> dict[str, str]:
    longer = ("name=longer", "train.steps=3000")
    return {
        "another text": shown([PYTHON, "-m", "pretrain", "sample", str(demo.model), "class "]),
        "read the packs": shown([PYTHON, "-m", "packing", "inspect", str(demo.packs)]),
        "report": shown([PYTHON, "-m", "pretrain", "report", str(demo.run_dir), "--out", str(demo.run_dir / "report.html")]),
        "train longer": shown(train_command("cpu", RECIPE, *longer)),
        "": "key=value changes any setting. Ctrl-C saves a checkpoint, and the same command goes on from it.",
        "on a GPU": shown(train_command("bf16", RECIPE, "name=smoke_gpu", "train.epochs=4")),
        "plan a real run": shown(train_command("bf16", Path("recipes/small_malaysian_lm.yaml"), "--plan")),
        "start over": "make clean demo",
    }


def _section(title: str, rows: Mapping[str, str]) -> str:
    return "\n".join([title, *(f"  {name:<16} {value}" for name, value in rows.items())])


def _took(seconds: float | None) -> str:
    return "done before" if seconds is None else duration(seconds)
