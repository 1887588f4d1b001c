"""Compute the tables of speeds in docs/developers/: trainers, several GPUs, the card, kernels."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import card
from benchmarks.step_traces import lost
from docs.charts import BUSY, PRECISIONS, SPEEDS, TRAINERS, read_speeds
from foundation.units import markdown

CARD = SPEEDS.parent / "cards/h200.json"
# Columns of the card that the page shows.
CARD_COLUMNS = ("precision", "tokens/s", "of the limit", "of step 50")
LINK = "../../benchmarks/results/speed"
KERNELS = SPEEDS.parent / "kernels/h200_kernels.json"
# Mean lengths of documents in the table of kernels.
DOCUMENTS = (180, 500, 1000, 4096)
# Rows of the table of kernels: the label of the row, and the kernels in each of its cells.
KERNEL_ROWS = {
    "norm": ("norm", "norm, backward"),
    "norm into delayed/current/block": (
        "norm into delayed",
        "norm into current",
        "norm into block",
    ),
    "rotation": ("rotation", "rotation, backward"),
    "rotation, backward into delayed": ("rotation, backward into delayed",),
    "activation": ("activation", "activation, backward"),
    "activation into delayed": ("activation into delayed", "activation, backward into delayed"),
    "activation into current": ("activation into current", "activation, backward into current"),
    "quantize in delayed/current/block": (
        "quantize in delayed",
        "quantize in current",
        "quantize in block",
    ),
    "loss, without/with gradient": ("loss", "loss and gradient"),
    "loss, gradient into delayed": ("loss and gradient into delayed",),
    "optimizer": ("optimizer",),
    "attention, 180/500/1000/4096 tokens": tuple(f"attention, {mean} tokens" for mean in DOCUMENTS),
    "its backward": tuple(f"attention, {mean} tokens, backward" for mean in DOCUMENTS),
}
# Labels of the trainers in the table, in the order of the picture.
TRAINER_LABELS = (
    "**this launcher**, FlashAttention-4",
    "**this launcher**, cuDNN attention",
    "[llmq](https://github.com/IST-DASLab/llmq) 0.3.1",
    "[torchtitan](https://github.com/pytorch/torchtitan) 0.2.2, compiled",
    "Megatron-Core 0.19.2",
    "Hugging Face Trainer, compiled, with Liger",
)
# Rows of the table of several GPUs: a label, the topology, the file, the run, and the run of one
# GPU, or "" if no comparable GPU ran alone.
MICRO = ", batch.microbatch=8"
LAUNCHERS = "`ddp.yaml`, two launchers"
SEVERAL = (
    ("4 H100s", "`ddp.yaml`", "h100_x4_scaling", "ddp", "one"),
    ("", "`zero.yaml`", "h100_x4_scaling", "zero", "one"),
    ("4 H200s ¹", "`ddp.yaml`", "h200_x4_scaling", f"ddp{MICRO}", f"one{MICRO}"),
    ("", LAUNCHERS, "h200_x4_scaling", f"launchers{MICRO}", f"one{MICRO}"),
    ("", "`zero.yaml`", "h200_x4_scaling", f"zero{MICRO}", f"one{MICRO}"),
    ("", "`fsdp2.yaml` ²", "h200_x4_scaling", f"fsdp2{MICRO}", f"one{MICRO}"),
    ("", "`hsdp.yaml`, 2 x 2", "h200_x4_scaling", f"hsdp{MICRO}", f"one{MICRO}"),
    ("4 H200s, Llama-3.1-8B", "`zero.yaml`", "h200_x4_scaling", "zero, llama", ""),
    ("", "`fsdp2.yaml`", "h200_x4_scaling", "fsdp2, llama", ""),
    ("4 H200s, Qwen2.5-14B", "`fsdp2.yaml`", "h200_x4_scaling", "fsdp2, qwen2_5_14b", ""),
    ("2 H200s ¹", "`ddp.yaml`", "h200_x2_topologies", f"ddp{MICRO}", f"one{MICRO}"),
    ("", "`zero.yaml`", "h200_x2_topologies", f"zero{MICRO}", f"one{MICRO}"),
    ("", "`fsdp2.yaml` ²", "h200_x2_topologies", f"fsdp2{MICRO}", f"one{MICRO}"),
    ("2 H200s", "`fsdp2.yaml`", "h200_x2_zero3", "fsdp2", "one"),
    ("2 H200s, GPT-2 124M", "`ddp.yaml`", "h200_x2_topologies", "ddp, gpt2", "one, gpt2"),
    ("2 H200s, Llama-3.1-8B", "`zero.yaml`", "h200_x2_scaling", "zero, llama", ""),
)


def trainers() -> str:
    """Return the table of trainers that ran as their own programs on one H200."""
    rows = []
    for label, (_, name, files) in zip(TRAINER_LABELS, TRAINERS, strict=True):
        cells = [label, "", "", ""]
        for column, (precision, file) in enumerate(zip(PRECISIONS, files, strict=False), start=1):
            speed = read_speeds(file)["rows"][f"{name} {precision}"]["tokens_per_second"]
            busy = " ¹" if file in BUSY else ""
            cells[column] = f"[{speed:,}]({LINK}/{file}.json){busy}"
        rows.append([*cells, read_speeds(files[0])["rows"][f"{name} BF16"]["differs"]])
    return markdown(["trainer", "BF16", "FP8", "with the head", "differs from ours"], rows)


def several_gpus() -> str:
    """Return the table of speeds of several GPUs."""
    rows = []
    for gpus, topology, file, name, alone in SEVERAL:
        runs = read_speeds(file)["runs"]
        speed = runs[name]["tokens_per_second"]
        share = f"{100 * speed / speed_alone(runs[alone], file):.1f} %" if alone else ""
        memory = f"{runs[name]['memory_gib']:.1f}"
        link = f"[{gpus}]({LINK}/{file}.json)" if gpus else ""
        rows.append([link, topology, f"{speed:,.0f}", share, memory])
    header = ["GPUs", "configuration", "tokens/s", "share", "GiB"]
    return markdown(header, rows, names=2)


def speed_alone(run: dict[str, Any], file: str) -> float:
    """Return the sum of the speeds of single GPUs, in tokens/s.

    If only one GPU was measured, return its speed times the number of GPUs in the name of the file.

    run: the run on one GPU, or on each of the GPUs alone.
    file: name of the result file, such as "h200_x4_scaling" for four GPUs.
    """
    gpus = int(file.partition("_x")[2][0])
    speeds = run.get("tokens_per_second_of_gpus", [run["tokens_per_second"]] * gpus)
    return float(sum(speeds))


def lost_time() -> str:
    """Return the table of milliseconds that a step of four GPUs loses by each cause.

    docs/developers/distributed.md has this table, and `step_traces.lost` defines the causes.
    """
    runs = read_speeds("h200_x4_scaling")["runs"]
    one = runs[f"one{MICRO}"]
    rows = []
    for topology in ("ddp", "zero", "fsdp2", "hsdp"):
        run = runs[topology + MICRO]
        causes = lost(run["step_ms"], run["explanation"], one["step_ms"], one["explanation"], 4)
        rest = (causes.pop("other") or 0) + (causes.pop("remainder") or 0)
        times = [run["step_ms"], *causes.values(), rest]
        rows.append([f"`{topology}.yaml`", *(f"{ms:,.1f}".replace("-", "−") for ms in times)])
    header = ["topology", "step", "lost", "communication", "waiting", "slower GEMMs"]
    return markdown([*header, "quantizing", "host", "rest"], rows)


def card_table() -> str:
    """Return the table of the card of an H200."""
    content = card.read(CARD)
    shown = [place for place, name in enumerate(card.HEADER) if name in CARD_COLUMNS]
    rows = [card.row(name, content) for name in content["ways"]]
    header = [*CARD_COLUMNS[:-1], "loss of step 50"]
    return markdown(header, [[row[place] for place in shown] for row in rows])


def kernels() -> str:
    """Return the table of the shares of the copy bandwidth that kernels reach, in percent."""
    content = json.loads(KERNELS.read_text(encoding="utf-8"))
    models: dict[str, dict[str, str]] = {}
    for row in content["kernels"]:
        models.setdefault(row["model"], {})[row["kernel"]] = f"{100 * row['share_of_copy']:.0f}"
    rows = [
        [label, *("/".join(shares.get(name, "–") for name in names) for shares in models.values())]
        for label, names in KERNEL_ROWS.items()
    ]
    return markdown(["kernel", *models], rows)
