"""The trainers of `benchmarks.speed programs`: their commands, and the seconds of their steps.

A command runs in a folder of its own, with `task.json` in it. Its step times are lines of JSON with
`seconds`, or lines that the trainer logs, or records in our metrics.jsonl.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from benchmarks.speed.programs.task import QWEN3, Task, shape_of
from pretrain.metrics.run_record import kind, read_metrics

# A function of the task, the sequences of a microbatch, and the folder of the run.
Command = Callable[[Task, int, Path], list[str]]


@dataclass(frozen=True)
class Trainer:
    """A trainer in one precision.

    Attributes:
        program: The name of the trainer, and of the folder with its packages.
        precision: "BF16" or "FP8".
        command: Return the command of a run.
        module: A module that the trainer needs.
        differs: The differences from our runs, apart from the packages.
        models: The models that the trainer can train as they are. Empty if it can train all.
        pattern: A regular expression of the trainer's log with the group `seconds`, `ms` or
            `speed` (tokens/s) of a step, or None if the steps are lines of JSON.
        environment: Environment variables.
    """

    program: str
    precision: str
    command: Command
    module: str
    differs: str
    models: tuple[str, ...] = ()
    pattern: str | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.program} {self.precision}"

    def seconds(self, task: Task, output: str, folder: Path) -> list[float]:
        """Return the seconds of the steps of a run with this output."""
        if self.program == "ours":
            records = read_metrics(folder / "run")
            return [record["step_ms"] / 1000 for record in records if kind(record) == "step"]
        if self.pattern:
            plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
            unit = next(iter(re.compile(self.pattern).groupindex))
            figures = [float(m[unit].replace(",", "")) for m in re.finditer(self.pattern, plain)]
            in_seconds = {"seconds": 1.0, "ms": 1e-3}
            return [task.tokens / x if unit == "speed" else x * in_seconds[unit] for x in figures]
        lines = (line for line in output.splitlines() if line.startswith('{"seconds"'))
        return [json.loads(line)["seconds"] for line in lines]


def ours(precision: str, *more: str) -> Command:
    """Return the command of this project. `more` are settings beside the precision."""

    def command(task: Task, microbatch: int, folder: Path) -> list[str]:
        shape = shape_of(task.name)
        settings = [
            f"precision={precision}",
            "weights=bf16_exact",
            f"model.config={json.dumps(task.config)}",
            "data.source=null",
            "data.tokenizer=null",
            f"data.packs={folder / 'packs'}",
            f"batch.tokens={task.tokens}",
            f"batch.microbatch={microbatch}",
            f"train.steps={task.steps}",
            "log.every=1",
            "checkpoint.every=null",
            "checkpoint.at_end=false",
            f"run_dir={folder / 'run'}",
        ]
        return [
            sys.executable,
            "-m",
            "train_accelerate",
            shape.recipe,
            *settings,
            *shape.more,
            *more,
        ]

    return command


def hugging_face(precision: str) -> Command:
    """Return the command of Hugging Face's trainers."""

    def command(task: Task, microbatch: int, folder: Path) -> list[str]:
        module = "benchmarks.speed.programs.hugging_face"
        return [sys.executable, "-m", module, precision, str(folder / "task.json"), str(microbatch)]

    return command


def llmq(gemms: str) -> Command:
    """Return the command of llmq. The script runs alone, because llmq brings its own libraries."""

    def command(task: Task, microbatch: int, folder: Path) -> list[str]:
        script = Path(__file__).with_name("llmq_training.py")
        return [sys.executable, str(script), gemms, str(folder / "task.json"), str(microbatch)]

    return command


def torchtitan(*more: str) -> Command:
    """Return the command of torchtitan 0.2.2 with its own Qwen3-1.7B."""

    def command(task: Task, microbatch: int, folder: Path) -> list[str]:
        options = {
            "experimental.custom_import": "benchmarks.speed.programs.torchtitan_data",
            "model.name": "qwen3_benchmark",
            "model.flavor": "1.7B",
            "training.seq_len": task.length,
            "training.local_batch_size": microbatch,
            "training.global_batch_size": task.sequences,
            "training.steps": task.steps,
            "activation_checkpoint.mode": "none",
            "optimizer.lr": 2e-5,
            "lr_scheduler.warmup_steps": 2,
            "metrics.log_freq": 1,
            "job.dump_folder": folder / "run",
        }
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return [sys.executable, "-m", "torchtitan.train", "--compile.enable", *flags, *more]

    return command


def megatron(*more: str) -> Command:
    """Return the command of Megatron-Core with Transformer Engine, which chooses the attention.

    Its wheel has no training script: `measure.sh` fetches that of the same version.
    """

    def command(task: Task, microbatch: int, folder: Path) -> list[str]:
        config = task.config
        options = {
            "num-layers": config["num_hidden_layers"],
            "hidden-size": config["hidden_size"],
            "ffn-hidden-size": config["intermediate_size"],
            "num-attention-heads": config["num_attention_heads"],
            "num-query-groups": config["num_key_value_heads"],
            "kv-channels": config["head_dim"],
            "normalization": "RMSNorm",
            "norm-epsilon": 1e-6,
            "position-embedding-type": "rope",
            "rotary-base": 1_000_000,
            "seq-length": task.length,
            "max-position-embeddings": task.length,
            "attention-dropout": 0,
            "hidden-dropout": 0,
            "tokenizer-type": "NullTokenizer",
            "vocab-size": config["vocab_size"] - 1,
            "micro-batch-size": microbatch,
            "global-batch-size": task.sequences,
            "train-iters": task.steps,
            "lr": 2e-5,
            "lr-decay-style": "constant",
            "weight-decay": 0.01,
            "clip-grad": 1.0,
            "transformer-impl": "transformer_engine",
            "attention-backend": "auto",
            "cross-entropy-fusion-impl": "native",
            "split": "1000,0,0",
            "eval-iters": 0,
            "eval-interval": 100_000,
            "log-interval": 1,
        }
        switches = [
            "--bf16",
            "--mock-data",
            "--swiglu",
            "--qk-layernorm",
            "--group-query-attention",
            "--disable-bias-linear",
            "--use-distributed-optimizer",
            "--cross-entropy-loss-fusion",
            "--no-create-attention-mask-in-dataloader",
            "--no-gradient-accumulation-fusion",
        ]
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return [sys.executable, "-m", "pretrain_gpt", *flags, *switches, *more]

    return command


def nemo(*, fp8: bool) -> Command:
    """Return the command of NeMo Automodel's own benchmark recipe."""

    def command(task: Task, microbatch: int, folder: Path) -> list[str]:
        model = folder / "model"
        model.mkdir(exist_ok=True)
        published = {"architectures": ["Qwen3ForCausalLM"], "torch_dtype": "bfloat16"}
        (model / "config.json").write_text(json.dumps(task.config | published))
        parts = "nemo_automodel.components"
        recipe = {
            "recipe": "BenchmarkingRecipeForNextTokenPrediction",
            "seed": 1234,
            "benchmark": {
                "warmup_steps": 3,
                "peak_tflops": 989,
                "num_nodes": 1,
                "nsys_start": -1,
                "nsys_end": -1,
                "nsys_ranks": [],
            },
            "step_scheduler": {
                "global_batch_size": task.sequences,
                "local_batch_size": microbatch,
                "ckpt_every_steps": 1000,
                "val_every_steps": 1000,
                "num_epochs": 1,
                "max_steps": task.steps,
            },
            # On one GPU, its FSDP2 neither casts weights to BF16 nor compiles.
            "distributed": {"strategy": "ddp"},
            "dist_env": {"backend": "nccl", "timeout_minutes": 5},
            "model": {
                "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
                "config": {
                    "_target_": "transformers.AutoConfig.from_pretrained",
                    "pretrained_model_name_or_path": str(model),
                },
                "torch_dtype": "bfloat16",
                "backend": {
                    "_target_": f"{parts}.models.common.BackendConfig",
                    "attn": "sdpa",
                    "linear": "torch",
                    "rms_norm": "torch",
                },
            },
            "checkpoint": {"enabled": False},
            "compile": {"enabled": True, "dynamic": False},
            "fp8": {"enabled": fp8, "recipe_name": "tensorwise", "filter_fqns": ["lm_head"]},
            "loss_fn": {"_target_": f"{parts}.loss.masked_ce.MaskedCrossEntropy"},
            "dataset": {
                "_target_": f"{parts}.datasets.llm.mock_iterable_dataset.MockIterableDataset",
                "seq_len": task.length,
                "num_samples": 100_000,
            },
            "dataloader": {"_target_": "torch.utils.data.DataLoader", "batch_size": None},
            "optimizer": {
                "_target_": "torch.optim.AdamW",
                "betas": [0.9, 0.999],
                "lr": 2e-5,
                "weight_decay": 0.01,
                "fused": True,
            },
        }
        file = folder / "recipe.yaml"
        file.write_text(yaml.safe_dump(recipe))
        module = "nemo_automodel.recipes.llm.benchmark"
        return [sys.executable, "-m", module, "--config", str(file)]

    return command


# The variables that torchrun sets for a single process, and a better allocator.
ALONE = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29611",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
}
TITAN = {
    "module": "torchtitan",
    "differs": "FP32 weights and moments, head in BF16",
    "models": (QWEN3,),
    "pattern": r"tps: *(?P<speed>[\d,]+)",
    "environment": ALONE,
}
MEGATRON = {
    "module": "pretrain_gpt",
    # The fused accumulation of weight gradients needs apex.
    "differs": "FP32 weights beside BF16 weights, head in BF16, gradients accumulated separately",
    "models": (QWEN3,),
    "pattern": r"elapsed time per iteration \(ms\): (?P<ms>[\d.]+)",
    "environment": {**ALONE, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
}
NEMO = {
    "module": "nemo_automodel",
    "differs": "weights and moments in BF16 without stochastic rounding, head in BF16, no clipping",
    "models": (QWEN3,),
    "pattern": r"Max iter time: (?P<seconds>[\d.]+)",
    "environment": ALONE,
}
HUGGING_FACE = {"differs": "FP32 weights and moments, head in BF16"}
LLMQ = {
    "module": "pyllmq",
    "differs": "weights, moments and gradients in BF16; no norms of queries and keys",
}
FLOAT8 = ("--model.converters", "quantize.linear.float8", "--quantize.linear.float8.filter_fqns")
DELAYED = ["--fp8-format", "hybrid", "--fp8-recipe", "delayed", "--fp8-amax-compute-algo", "max"]
TRAINERS = (
    Trainer("ours", "BF16", ours("bf16"), "torch", ""),
    Trainer("ours", "FP8", ours("delayed"), "torch", ""),
    Trainer(
        "ours", "FP8 with the head", ours("delayed", "fp8_config.scope=linear+head"), "torch", ""
    ),
    Trainer(
        "ours", "BF16 without FlashAttention-4", ours("bf16", "model.attention=cudnn"), "torch", ""
    ),
    Trainer("Hugging Face", "BF16", hugging_face("bf16"), "transformers", **HUGGING_FACE),
    Trainer("Hugging Face", "FP8", hugging_face("fp8"), "torchao", **HUGGING_FACE),
    Trainer("torchtitan", "BF16", torchtitan(), **TITAN),
    Trainer("torchtitan", "FP8", torchtitan(*FLOAT8, "output"), **TITAN),
    Trainer("llmq", "BF16", llmq("bf16"), **LLMQ),
    Trainer("llmq", "FP8", llmq("e4m3"), **LLMQ),
    Trainer("Megatron-Core", "BF16", megatron(), **MEGATRON),
    Trainer("Megatron-Core", "FP8", megatron(*DELAYED), **MEGATRON),
    Trainer("NeMo Automodel", "BF16", nemo(fp8=False), **NEMO),
    Trainer("NeMo Automodel", "FP8", nemo(fp8=True), **NEMO),
)
