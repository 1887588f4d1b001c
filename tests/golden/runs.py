"""Definitions of the golden runs and of the results that are compared.

The runs use public interfaces only: recipes, the launcher, `metrics.jsonl`, `audit.json`, `final/`
and the report. Only `tensors_of` depends on the format of weight files.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from foundation.overrides import overridden
from tests.conftest import Finished

MDS = Path(__file__).parents[1] / "data" / "mds" / "reference"
LENGTH = 128
STEPS = 6
WORDS = [f"w{number}" for number in range(90)]
CHATML = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
EXACT = ("precision=bf16", "weights=bf16_exact")
# For runs that do not test numerics. On a CPU, BF16 GEMMs take most of the time of a run.
IN_FP32 = ("precision=fp32",)
FUSED = ("model.fused=on",)
MUON = ("optimizer.name=muon", "optimizer.moments=bf16")


@dataclass(frozen=True)
class GoldenRun:
    """Changes of the base recipe for one training."""

    settings: tuple[str, ...]
    data: str = "text"
    # Accelerate configuration under which `processes` train. None: one process.
    launch: str | None = None
    processes: int = 2
    # Make the gradients of the fourth step non-finite, once.
    poisoned: bool = False


def low(precision: str, *more: str) -> GoldenRun:
    return GoldenRun((f"precision={precision}", "weights=bf16_exact", *more))


STATISTICS = "log.fp8_statistics=3"
CONFIG = {"model_type": "qwen3", "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256}
CONFIG |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
CONFIG |= {"num_hidden_layers": 2, "max_position_embeddings": LENGTH, "tie_word_embeddings": False}
MDS_CONFIG = {"vocab_size": 50048, "hidden_size": 32, "intermediate_size": 64}
MDS_CONFIG |= {"num_hidden_layers": 1}

RUNS = {
    "fp32": GoldenRun(("precision=fp32", "model.fused=off")),
    "fp32_fused_parity": GoldenRun(("precision=fp32", *FUSED, "parity=on")),
    "bf16_fp32_weights": GoldenRun(("precision=bf16", "weights=fp32", *FUSED)),
    "bf16_weights": GoldenRun(("precision=bf16", "weights=bf16", "model.fused=off")),
    "bf16_exact": GoldenRun((*EXACT, "model.fused=off", "optimizer.clip=0.2")),
    "bf16_exact_fused": GoldenRun((*EXACT, *FUSED)),
    "delayed": low("delayed", "fp8_config.amax_history_len=4", STATISTICS),
    "delayed_head": low("delayed", "fp8_config.scope=linear+head"),
    "delayed_checkpointing": low(
        "delayed", "fp8_config.amax_history_len=4", "model.gradient_checkpointing=full"
    ),
    "bf16_checkpointing_fused": GoldenRun((*EXACT, *FUSED, "model.gradient_checkpointing=full")),
    "current": low("current"),
    "block": low("block"),
    "mxfp8_head": low("mxfp8", "fp8_config.scope=linear+head"),
    "nvfp4": low("nvfp4", "fp8_config.keep_bf16_layers.last=0", STATISTICS),
    "mxfp4": low("mxfp4"),
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
    "zero_delayed": GoldenRun(low("delayed").settings, launch="zero"),
    "fsdp2": GoldenRun(IN_FP32, launch="fsdp2"),
    "hsdp": GoldenRun((*EXACT, *FUSED, "train.steps=4"), launch="hsdp", processes=4),
    "muon": GoldenRun((*EXACT, *MUON, "optimizer.clip=0.2")),
    "muon_hsdp": GoldenRun((*EXACT, *MUON, "train.steps=4"), launch="hsdp", processes=4),
}

# The runs of every commit. `make nightly` has the others.
OF_EVERY_COMMIT = {
    "fp32_fused_parity",
    "bf16_weights",
    "bf16_exact_fused",
    "delayed_checkpointing",
    "current",
    "mxfp8_head",
    "chat",
    "stream",
    "skip",
    "rollback",
    "zero_delayed",
    "muon",
}


def write_sources(folder: Path) -> None:
    """Write texts, chats and a tokenizer of words, with the same bytes every time."""
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
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))


def data_of(kind: str, folder: Path) -> dict[str, Any]:
    """Return the recipe's `data` section for a kind of data."""
    if kind == "mds":
        return {"packs": str(MDS), "length": 32}
    text = {"source": str(folder / "texts.jsonl")}
    chat = {"source": str(folder / "chats.jsonl"), "messages": ["p", "r"], "chat_template": CHATML}
    section = {
        "text": text,
        "small": text | {"held_out": 0.7},
        "stream": text | {"streaming": {"window": 4000, "disk_gb": 0.001}},
        "chat": chat | {"packing": "best_fit"},
        "mixture": {
            "sources": [text | {"weight": 0.7}, chat | {"weight": 0.3}],
            "packing": "truncate",
        },
    }[kind]
    tokenizer = {
        "tokenizer": str(folder / "tokenizer.json"),
        "packs": str(folder / f"packs-{kind}"),
        "length": LENGTH,
    }
    return {"held_out": 0.1} | tokenizer | section


def recipe_of(run: GoldenRun, folder: Path, run_dir: Path) -> dict[str, Any]:
    tokens = 4 * 32 if run.data == "mds" else 4 * LENGTH
    return {
        "name": "golden",
        "model": {"config": CONFIG | (MDS_CONFIG if run.data == "mds" else {})},
        "data": data_of(run.data, folder),
        "batch": {"tokens": tokens, "microbatch": 1 if run.launch else 2},
        "optimizer": {"learning_rate": 0.003},
        "schedule": {"kind": "cosine", "warmup": 2},
        "train": {"steps": STEPS},
        "evaluate": {} if run.data == "mds" else {"every": 3},
        "checkpoint": {"every": 2},
        "fp8_config": {"on_unsupported": "emulate"},
        "parity": "off",
        "run_dir": str(run_dir),
    }


def steps_logged(run_dir: Path) -> int:
    """Return the number of steps in metrics.jsonl."""
    metrics = run_dir / "metrics.jsonl"
    if not metrics.exists():
        return 0
    return sum("loss" in json.loads(line) for line in metrics.read_text().splitlines())


def steps_saved(run_dir: Path) -> list[int]:
    return sorted(
        int(folder.name.removeprefix("step-"))
        for folder in (run_dir / "checkpoints").glob("step-*")
    )


def losses_changed(
    change: Callable[[torch.Tensor], torch.Tensor],
) -> AbstractContextManager[object]:
    """Apply `change` to the loss before every backward pass."""
    real = Accelerator.backward

    def backward(accelerator: Accelerator, loss: torch.Tensor, **options: Any) -> None:
        real(accelerator, change(loss), **options)

    return overridden(Accelerator, backward=backward)


def poisoned_once(run_dir: Path, steps_before: int) -> AbstractContextManager[object]:
    """Multiply the loss by infinity in all microbatches of the step after `steps_before` steps.

    The step is poisoned once. A repetition of the step after a rollback is not.
    """
    state = {"done": False, "now": False}

    def poison(loss: torch.Tensor) -> torch.Tensor:
        is_the_step = steps_logged(run_dir) == steps_before
        state["done"] |= state["now"] and not is_the_step
        state["now"] = is_the_step
        return loss * math.inf if is_the_step and not state["done"] else loss

    return losses_changed(poison)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors, by name, of an exported model or of a checkpoint of one process."""
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def digest(tensors: dict[str, torch.Tensor], named: bool) -> str:
    """Return a SHA-256 over dtypes, shapes and bytes of all tensors, and over names if `named`.

    Names in checkpoints depend on the file format. expected.json must not depend on them.
    """
    hashes = []
    for name, tensor in tensors.items():
        content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header = f"{name if named else ''} {tensor.dtype} {list(tensor.shape)}".encode()
        hashes.append(hashlib.sha256(header + content).hexdigest())
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()


def tensor_files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.glob("*.safetensors"))}


# Endings of figures that depend on the machine.
OF_THE_MACHINE = ("_ms", "per_second", "tflops", "memory_gib", "recompiles")


def outcome(run_dir: Path, step: int) -> list[Any]:
    """Return the figures of a run that do not depend on the machine, and its files of weights.

    The weights are those after `step` and those in `final/`.
    """
    figures = [
        {key: value for key, value in json.loads(line).items() if not key.endswith(OF_THE_MACHINE)}
        for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    folders = (run_dir / "checkpoints" / f"step-{step:08d}", run_dir / "final")
    return [figures, *map(tensor_files, folders)]


def results_of(run: GoldenRun, finished: Finished) -> dict[str, Any]:
    """Return figures by step, hashes of the weights, and the linears of each precision."""
    steps = finished.steps()
    evaluations = [record for record in finished.records() if "held_out_loss" in record]
    effective: dict[str, list[str]] = {}
    for product in finished.audit()["products"]:
        effective.setdefault(product["effective"], []).append(product["name"])
    figures = {
        "loss": [step["loss"] for step in steps],
        "gradient_norm": [
            math.inf if step["gradient_norm"] is None else step["gradient_norm"] for step in steps
        ],
        "held_out_loss": [evaluation["held_out_loss"] for evaluation in evaluations],
    }
    last = max((finished.run_dir / "checkpoints").glob("step-*"))
    hashes = {"final": digest(tensors_of(finished.run_dir / "final"), named=True)}
    if run.launch is None:
        hashes["checkpoint"] = digest(tensors_of(last), named=False)
    return {
        "figures": figures,
        "hashes": hashes,
        "effective": {key: sorted(names) for key, names in sorted(effective.items())},
    }


def machine() -> dict[str, str]:
    """Return the CPU and the torch version, on which the bits of a run depend."""
    keys = ("model name", "cpu family", "model", "stepping")
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.exists() else []
    cpu = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "cpu": " ".join(cpu.get(key, "?") for key in keys),
        "machine": platform.machine(),
        "torch": torch.__version__,
    }
