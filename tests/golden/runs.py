"""The golden runs: what each trains, and which of its results are kept.

Everything here is public: recipes, the launcher, `metrics.jsonl`, `audit.json`, `final/` and the report. Only `tensors_of` knows
how files of weights look.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file

MDS = Path(__file__).parents[1] / "data" / "mds" / "reference"
LENGTH = 128
STEPS = 6
WORDS = [f"w{number}" for number in range(90)]
CHATML = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
EXACT = ("precision=bf16", "weights=bf16_exact")
# where it is not numbers that a run is about: products in BF16 take a CPU most of a run
IN_FP32 = ("precision=fp32",)
FUSED = ("model.fused=on",)


@dataclass(frozen=True)
class GoldenRun:
    """One training: what differs from the base recipe, and what happens to it on its way.

    `processes` run under the accelerate configuration `launch`. `poisoned`: the gradients of its fourth step are not finite,
    once.
    """

    settings: tuple[str, ...]
    data: str = "text"
    launch: str | None = None
    processes: int = 2
    poisoned: bool = False


def low(precision: str, *more: str) -> GoldenRun:
    return GoldenRun((f"precision={precision}", "weights=bf16_exact", *more))


STATISTICS = "log.fp8_statistics=3"
METER = "log.gap=3"  # of the gap to BF16; what is expected was written without one


RUNS = {
    "fp32": GoldenRun(("precision=fp32", "model.fused=off")),
    "fp32_fused_parity": GoldenRun(("precision=fp32", *FUSED, "parity=on")),
    "bf16_fp32_weights": GoldenRun(("precision=bf16", "weights=fp32", *FUSED)),
    "bf16_weights": GoldenRun(("precision=bf16", "weights=bf16", "model.fused=off")),
    "bf16_exact": GoldenRun((*EXACT, "model.fused=off", "optimizer.clip=0.2")),
    "bf16_exact_fused": GoldenRun((*EXACT, *FUSED)),
    "delayed": low("delayed", "fp8_config.amax_history_len=4", STATISTICS),
    "delayed_head": low("delayed", "fp8_config.scope=linear+head", METER),
    "delayed_checkpointing": low(
        "delayed", "fp8_config.amax_history_len=4", "model.gradient_checkpointing=full", METER
    ),
    "bf16_checkpointing_fused": GoldenRun((*EXACT, *FUSED, "model.gradient_checkpointing=full")),
    "current": low("current"),
    "block": low("block"),
    "mxfp8_head": low("mxfp8", "fp8_config.scope=linear+head"),
    "nvfp4": low("nvfp4", "fp8_config.keep_bf16_layers.last=0", STATISTICS),
    "mxfp4": low("mxfp4", METER),
    "penalty": GoldenRun((*IN_FP32, "loss.penalty=neg_entropy", "loss.penalty_weight=0.5")),
    "chat": GoldenRun(IN_FP32, data="chat"),
    "mixture": GoldenRun(IN_FP32, data="mixture"),
    "stream": GoldenRun(IN_FP32, data="stream"),
    "mds": GoldenRun(IN_FP32, data="mds"),
    "epochs": GoldenRun(
        (*IN_FP32, "train.steps=16", "batch.tokens=1024", "evaluate.every=8"), data="small"
    ),
    "schedule_of_precisions": GoldenRun(
        (
            "precision=[{until: 2, use: bf16}, {until: 4, use: current}, {use: bf16}]",
            "weights=bf16_exact",
        )
    ),
    "skip": GoldenRun((*low("delayed").settings, "health.on_nan=skip"), poisoned=True),
    "rollback": GoldenRun((*IN_FP32, "health.on_nan=rollback"), poisoned=True),
    "ddp": GoldenRun((*EXACT,), launch="ddp"),
    "zero_delayed": GoldenRun(low("delayed", METER).settings, launch="zero"),
    "fsdp2": GoldenRun(IN_FP32, launch="fsdp2"),
    "hsdp": GoldenRun((*EXACT, *FUSED, "train.steps=4"), launch="hsdp", processes=4),
}


def write_sources(folder: Path) -> None:
    """Texts, chats and a tokenizer of whole words: the same bytes each time."""
    texts = [
        " ".join(WORDS[(first + n * (1 + first % 3)) % 90] for n in range(20 + first % 70))
        for first in range(300)
    ]
    chats = [
        {"p": WORDS[n % 90], "r": " ".join(WORDS[(n + k) % 90] for k in range(3 + n % 40))}
        for n in range(300)
    ]
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {
        word: number for number, word in enumerate([*special, "user", "assistant", "[UNK]", *WORDS])
    }
    added = [
        {"id": number, "content": word, "special": True} for number, word in enumerate(special)
    ]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [each | flags for each in added],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def data_of(kind: str, folder: Path) -> dict[str, Any]:
    """The recipe's `data` section."""
    if kind == "mds":
        return {"packs": str(MDS), "length": 32}
    text = {"source": str(folder / "texts.jsonl")}
    chat = {"source": str(folder / "chats.jsonl"), "messages": ["p", "r"], "chat_template": CHATML}
    what = {
        "text": text,
        "small": text | {"held_out": 0.7},
        "stream": text | {"streaming": {"window": 4000, "disk_gb": 0.001}},
        "chat": chat | {"packing": "best_fit"},
        "mixture": {"sources": [text | {"weight": 0.7}, chat | {"weight": 0.3}]},
    }[kind]
    tokenizer = {
        "tokenizer": str(folder / "tokenizer.json"),
        "packs": str(folder / f"packs-{kind}"),
        "length": LENGTH,
    }
    return {"held_out": 0.1} | tokenizer | what


def recipe_of(run: GoldenRun, folder: Path, run_dir: Path) -> dict[str, Any]:
    config = {
        "model_type": "qwen3",
        "vocab_size": 128,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
    }
    config |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": LENGTH,
    }
    if run.data == "mds":
        config |= {
            "vocab_size": 50048,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
        }
    return {
        "name": "golden",
        "model": {"config": config | {"tie_word_embeddings": False}},
        "data": data_of(run.data, folder),
        "batch": {
            "tokens": 4 * LENGTH if run.data != "mds" else 4 * 32,
            "microbatch": 1 if run.launch else 2,
        },
        "optimizer": {"learning_rate": 0.003},
        "schedule": {"kind": "cosine", "warmup": 2},
        "train": {"steps": STEPS},
        "evaluate": {"every": 3} if run.data != "mds" else {},
        "checkpoint": {"every": 2},
        "fp8_config": {"on_unsupported": "emulate"},
        "parity": "off",
        "run_dir": str(run_dir),
    }


def train(run: GoldenRun, folder: Path, run_dir: Path, alone: Callable, as_ranks: Callable) -> Any:
    """Run `run` with one of the two starters of tests/conftest.py; returns its result."""
    recipe = recipe_of(run, folder, run_dir)
    if run.launch:
        launch = ["--config_file", f"accelerate_configs/{run.launch}.yaml"]
        return as_ranks(
            recipe, run_dir.parent, *run.settings, launch=launch, processes=run.processes
        )
    with poisoned_once(run_dir, steps_before=3) if run.poisoned else nullcontext():
        return alone(recipe, run_dir.parent, *run.settings)


def steps_logged(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    return (
        sum("loss" in json.loads(line) for line in metrics.read_text().splitlines())
        if metrics.exists()
        else 0
    )


def steps_saved(run_dir: Path) -> list[int]:
    return sorted(
        int(folder.name.removeprefix("step-"))
        for folder in (run_dir / "checkpoints").glob("step-*")
    )


@contextmanager
def losses_changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Every backward pass is that of the `change`d loss."""
    backward = Accelerator.backward
    Accelerator.backward = lambda accelerator, loss, **options: backward(
        accelerator, change(loss), **options
    )
    try:
        yield
    finally:
        Accelerator.backward = backward


def poisoned_once(run_dir: Path, steps_before: int) -> AbstractContextManager[None]:
    """Multiply the loss by infinity in every backward pass of the step that follows so many, the first time that it comes."""
    state = {"done": False, "now": False}

    def poison(loss: torch.Tensor) -> torch.Tensor:
        there = steps_logged(run_dir) == steps_before
        state["done"] |= state["now"] and not there
        state["now"] = there
        return loss * math.inf if there and not state["done"] else loss

    return losses_changed(poison)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint of one process, or of an exported model, by name."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def digest(tensors: dict[str, torch.Tensor], named: bool) -> str:
    """SHA-256 over dtypes, shapes and bytes of all tensors; over their names too where these do not depend on a file format."""
    each = []
    for name, tensor in tensors.items():
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        about = f"{name if named else ''} {tensor.dtype} {list(tensor.shape)}".encode()
        each.append(hashlib.sha256(about + content).hexdigest())
    return hashlib.sha256("".join(sorted(each)).encode()).hexdigest()


def saved(run_dir: Path, step: int) -> str:
    """The digest of the checkpoint after `step`."""
    return digest(tensors_of(run_dir / "checkpoints" / f"step-{step:08d}"), named=True)


def results_of(run: GoldenRun, run_dir: Path) -> dict[str, Any]:
    """What is kept of a finished run: figures by step, hashes of its weights, and the precision of each linear."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps, evaluations = (
        [each for each in records if key in each] for key in ("loss", "held_out_loss")
    )
    audit = json.loads((run_dir / "audit.json").read_text())
    effective: dict[str, list[str]] = {}
    for product in audit["products"]:
        effective.setdefault(product["effective"], []).append(product["name"])
    figures = {
        "loss": [step["loss"] for step in steps],
        "gradient_norm": [
            math.inf if step["gradient_norm"] is None else step["gradient_norm"] for step in steps
        ],
        "held_out_loss": [evaluation["held_out_loss"] for evaluation in evaluations],
    }
    last = max((run_dir / "checkpoints").glob("step-*"))
    hashes = {"final": digest(tensors_of(run_dir / "final"), named=True)}
    if run.launch is None:
        hashes["checkpoint"] = digest(tensors_of(last), named=False)
    return {
        "figures": figures,
        "hashes": hashes,
        "effective": {key: sorted(names) for key, names in sorted(effective.items())},
    }


def machine() -> dict[str, str]:
    """What the bits of a run depend on, beside its code."""
    wanted = ("model name", "cpu family", "model", "stepping")
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.exists() else []
    cpu = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "cpu": " ".join(cpu.get(key, "?") for key in wanted),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
