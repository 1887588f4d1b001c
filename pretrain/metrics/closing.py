"""The last screen of a run: what came out, where it lies, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pretrain.metrics.units import count, duration, memory, percent


def last_screen(name: str, folder: Path, figures: Mapping[str, Any], picture: Path) -> tuple[str, dict[str, str], dict[str, str]]:
    """Title, rows and commands for `Console.panel`, from a run's summary; `picture` is the loss plot."""
    rows = {"loss": f"{figures['loss_last_50']:.4f} (mean of the last 50 steps)"}
    if "held_out_loss" in figures:
        rows["held-out loss"] = f"{figures['held_out_loss']:.4f} (perplexity {figures['held_out_perplexity']:.4g})"
    speed = f"{count(figures['tokens_per_second'])} tokens/s"
    if "mfu_bf16_peak" in figures:
        speed += f", {percent(figures['mfu_bf16_peak'])} MFU"
    rows |= {
        "trained": f"{figures['steps']:,} steps, {count(figures['tokens'])} tokens in {duration(figures['hours'] * 3600)}",
        "speed": f"{speed} (median), {percent(figures['data_wait_share'])} of it waiting for data",
        "memory": memory(figures["memory_gib"]),
        "model": f"{folder / 'final'}  (AutoModelForCausalLM.from_pretrained loads it)",
        "curves": f"{picture}",
        "every step": f"{folder / 'metrics.jsonl'}",
        "settings": f"{folder / 'config.yaml'}",
    }
    return f"{name}: done", rows, {"compare it with other runs": f"python -m pretrain.report {folder} OTHER_RUN"}
