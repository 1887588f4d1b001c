"""The last screen of a run: what came out, where it lies, and what to do next."""

from __future__ import annotations

from foundation.units import count, duration, memory, percent
from pretrain.metrics.run_files import RunRecord
from pretrain.metrics.run_folder import RunFolder


def last_screen(run: RunRecord, folder: RunFolder) -> tuple[str, dict[str, str], dict[str, str]]:
    """Title, rows and commands for `Console.panel`. A figure that is not known (no evaluation, no known peak) has no row."""
    figures = run.summary
    rows = {"trained": f"{figures['steps']:,} steps, {count(figures['tokens'])} tokens in {duration(figures['hours'] * 3600)}"}
    if "loss_last_50" in figures:
        rows["loss"] = f"{figures['loss_last_50']:.4f} (mean of the last 50 steps)"
    if "held_out_loss" in figures:
        rows["held-out loss"] = f"{figures['held_out_loss']:.4f} (perplexity {figures['held_out_perplexity']:.4g})"
    mfu = f", {percent(figures['mfu_bf16_peak'])} MFU" if "mfu_bf16_peak" in figures else ""
    waiting = percent(figures["data_wait_share"])
    rows["speed"] = f"{count(figures['tokens_per_second'])} tokens/s{mfu} (median), {waiting} of the time waiting for data"
    rows["memory"] = memory(figures["memory_gib"])
    if folder.final.exists():
        rows["model"] = f"{folder.final} (AutoModelForCausalLM.from_pretrained loads it)"
    rows |= {"curves": str(folder.loss_plot), "every step": str(folder.metrics), "settings": str(folder.config)}
    return f"{run.name}: done", rows, {"compare it with other runs": f"python -m pretrain report {folder.path} OTHER_RUN"}
