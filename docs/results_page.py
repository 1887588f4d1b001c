"""Write the tables of docs/developers/results.md: other trainers, several GPUs, and the card."""

from __future__ import annotations

from typing import Any

from benchmarks import card
from docs.charts import BUSY, IDLE, SPEEDS, read_speeds
from foundation.units import markdown

CARD = SPEEDS.parent / "cards/h200.json"
LINK = "../../benchmarks/results/speed"
# Rows of the table of trainers: a label, the name in the files, the file of BF16 and that of FP8.
TRAINERS = (
    ("**this launcher**, FlashAttention-4", "ours", "h200_peers_fa4", "h200_peers_fa4"),
    ("**this launcher**, cuDNN attention", "ours", IDLE, IDLE),
    ("[llmq](https://github.com/IST-DASLab/llmq) 0.3.1", "llmq", IDLE, "h200_peers_fp8"),
    (
        "[torchtitan](https://github.com/pytorch/torchtitan) 0.2.2, compiled",
        "torchtitan",
        IDLE,
        IDLE,
    ),
    ("Megatron-Core 0.19.2", "Megatron-Core", "h200_peers_megatron", "h200_peers_megatron"),
    ("Hugging Face Trainer, compiled, with Liger", "Hugging Face", IDLE, IDLE),
)
# Rows of the table of several GPUs: a label, the file, the run, the run of one GPU, and the number
# of tokens in a step. A run without comparable GPUs alone has no share.
MICRO = ", batch.microbatch=8"
LAUNCHERS = "`ddp.yaml`, two launchers"
SEVERAL = (
    ("4 H100s", "`ddp.yaml`", "h100_x4_scaling", "ddp", "one", 524_288),
    ("", "`zero.yaml`", "h100_x4_scaling", "zero", "one", 524_288),
    ("4 H200s ¹", "`ddp.yaml`", "h200_x4_scaling", f"ddp{MICRO}", f"one{MICRO}", 524_288),
    ("", LAUNCHERS, "h200_x4_scaling", f"launchers{MICRO}", f"one{MICRO}", 524_288),
    ("", "`zero.yaml`", "h200_x4_scaling", f"zero{MICRO}", f"one{MICRO}", 524_288),
    ("", "`fsdp2.yaml` ²", "h200_x4_scaling", f"fsdp2{MICRO}", f"one{MICRO}", 524_288),
    ("", "`hsdp.yaml`, 2 x 2", "h200_x4_scaling", f"hsdp{MICRO}", f"one{MICRO}", 524_288),
    ("4 H200s, Llama-3.1-8B", "`zero.yaml`", "h200_x4_scaling", "zero, llama", "", 262_144),
    ("", "`fsdp2.yaml`", "h200_x4_scaling", "fsdp2, llama", "", 262_144),
    ("4 H200s, Qwen2.5-14B", "`fsdp2.yaml`", "h200_x4_scaling", "fsdp2, qwen2_5_14b", "", 131_072),
    ("2 H200s ¹", "`ddp.yaml`", "h200_x2_topologies", f"ddp{MICRO}", f"one{MICRO}", 262_144),
    ("", "`zero.yaml`", "h200_x2_topologies", f"zero{MICRO}", f"one{MICRO}", 262_144),
    ("", "`fsdp2.yaml` ²", "h200_x2_topologies", f"fsdp2{MICRO}", f"one{MICRO}", 262_144),
    ("2 H200s", "`fsdp2.yaml`", "h200_x2_zero3", "fsdp2", "one", 262_144),
    ("2 H200s, GPT-2 124M", "`ddp.yaml`", "h200_x2_topologies", "ddp, gpt2", "one, gpt2", 131_072),
    ("2 H200s, Llama-3.1-8B", "`zero.yaml`", "h200_x2_scaling", "zero, llama", "", 131_072),
)


def trainers() -> str:
    """Return the table of trainers that ran as their own programs on one H200."""
    rows = []
    for label, name, bf16, fp8 in TRAINERS:
        files = {"BF16": bf16, "FP8": fp8, "FP8 with the head": fp8}
        cells = []
        for precision, file in files.items():
            row = read_speeds(file)["rows"].get(f"{name} {precision}")
            speed = f"{row['tokens_per_second']:,}" if row else ""
            cells.append(f"{speed} (busy)" if speed and file in BUSY else speed)
        differs = read_speeds(bf16)["rows"][f"{name} BF16"]["differs"]
        links = ", ".join(f"[file]({LINK}/{file}.json)" for file in dict.fromkeys((bf16, fp8)))
        rows.append([label, *cells, differs, links])
    header = ["trainer", "BF16", "FP8", "with the head", "differs from ours", "measured"]
    return markdown(header, rows)


def several_gpus() -> str:
    """Return the table of speeds of several GPUs."""
    rows = []
    for gpus, topology, file, name, alone, tokens in SEVERAL:
        runs = read_speeds(file)["runs"]
        run = runs[name]
        share = "–"
        if alone:
            share = f"{100 * run['tokens_per_second'] / speed_alone(runs[alone], file):.1f} %"
        rows.append(
            [
                gpus,
                topology,
                f"{tokens:,}",
                f"{run['tokens_per_second']:,.0f}",
                share,
                f"{run['memory_gib']:.1f}",
                f"[file]({LINK}/{file}.json)",
            ]
        )
    header = ["GPUs", "configuration", "tokens per step", "tokens/s", "share", "GiB", "measured"]
    return markdown(header, rows, names=2)


def speed_alone(run: dict[str, Any], file: str) -> float:
    """Return the sum of the speeds of the GPUs alone, or a number of times the speed of one."""
    gpus = int(file.partition("_x")[2][0])
    speeds = run.get("tokens_per_second_of_gpus", [run["tokens_per_second"]] * gpus)
    return float(sum(speeds))


def card_table() -> str:
    """Return the table of the card of an H200."""
    content = card.read(CARD)
    return markdown(card.HEADER, [card.row(name, content) for name in content["ways"]], names=2)
