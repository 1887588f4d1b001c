"""Every setting a training recipe can have, typed; unknown keys are errors.

The classes hold defaults and the rules that one section can check alone. What needs two sections, or the world size, is checked
in `pretrain.plan.checks`. Nothing here imports torch, so a mistyped key is reported at once.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from foundation.settings import Count, PathText, PositiveCount, Seed, Settings, Share
from packing.settings import DataSettings, split_revision
from pretrain.precision.settings import LowPrecisionSettings, PrecisionSetting, Weights

MOST_FP32 = 1e38  # the optimizer computes in FP32, where 3.4e38 is the last number before infinity
USUAL_CHUNK = 4096  # tokens of the loss at once
# YAML reads a bare `on` as true and a bare `off` as false.
Switch = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value),
]
Attention = Literal["auto", "varlen", "flash_attn", "documents", "sdpa"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class ModelSettings(Settings):
    # folder, hub name or name@revision; null: from scratch, by `config`
    source: PathText | None = None
    # of `source` take the architecture and the tokenizer, and draw the weights from `seed`
    from_scratch: bool = False
    # without source: from scratch, {model_type: qwen3, ...}; with: changes to its config. From
    # scratch, vocab_size and the ids of eos, bos and pad that are not set come from the tokenizer.
    config: dict[str, Any] | None = None
    # auto: on Hopper and Blackwell FlashAttention-4 where its package is; otherwise varlen on a GPU, documents on a CPU, sdpa
    # elsewhere. flash_attn: FlashAttention-4; version 2 is varlen, torch's own.
    attention: Attention = "auto"
    # Layers that keep no activations and are computed again in backward: no layer, every layer, or with a number n each n-th.
    gradient_checkpointing: Literal["none", "full"] | PositiveCount = "none"
    # auto: each layer on a GPU, nothing on a CPU
    compile: Literal["auto", "layer", "none"] = "auto"
    # layers of known architectures as a few large products; auto: where faster
    fused: Switch = "auto"

    @property
    def repository(self) -> str | None:
        """`source` without a revision: a folder or a name on the hub."""
        return self.source and split_revision(self.source)[0]

    @property
    def revision(self) -> str | None:
        """The branch, tag or commit that `source` names behind an @; None: the hub's main branch."""
        return self.source and split_revision(self.source)[1]

    @property
    def weights_source(self) -> str | None:
        """Where the weights come from, as `source` says it; None: they are drawn."""
        return None if self.from_scratch else self.source

    def recomputes(self, index: int) -> bool:
        """Returns whether backward computes decoder layer `index`, from 0, again instead of keeping its activations."""
        setting = self.gradient_checkpointing
        return setting == "full" if isinstance(setting, str) else index % setting == 0

    @model_validator(mode="after")
    def _has_an_origin(self) -> ModelSettings:
        if self.from_scratch and self.source is None:
            raise ValueError(
                "`from_scratch: true` takes the architecture of a `source`: set one, as `config` alone is from scratch anyway"
            )
        if self.source is None and "model_type" not in (self.config or {}):
            raise ValueError(
                "set `source` (hub name or folder), or `config` with a model_type: {model_type: qwen3}"
            )
        return self


class BatchSettings(Settings):
    # tokens of one optimizer step, over all devices
    tokens: Annotated[PositiveCount, Field(le=2**40)] = 131_072
    # The most packs that a device takes at once; auto: what fits is found by trying, auto:16: up to 16 of them.
    microbatch: (
        Literal["auto"]
        | PositiveCount
        | Annotated[str, Field(pattern="^auto:[1-9][0-9]{0,8}$", examples=["auto:16"])]
    ) = "auto"

    @property
    def microbatch_is_searched(self) -> bool:
        return isinstance(self.microbatch, str)

    @property
    def microbatch_cap(self) -> int | None:
        """Of `auto:16` 16; None where the search has none."""
        cap = str(self.microbatch).partition("auto:")[2]
        return int(cap) if cap else None


class OptimizerSettings(Settings):
    """AdamW, the only optimizer."""

    # the largest, which the schedule reaches after its warmup
    learning_rate: float = Field(3.0e-4, gt=0, le=MOST_FP32)
    betas: tuple[Share, Share] = (0.9, 0.95)  # AdamW's
    eps: float = Field(1.0e-8, gt=0, le=MOST_FP32)  # AdamW's
    # AdamW's, times the learning rate; of matrices and embeddings alone
    weight_decay: float = Field(0.1, ge=0, le=MOST_FP32)
    # null: fp32, but bf16 under `weights: bf16`, as in torch
    moments: Literal["fp32", "bf16"] | None = None
    # What microbatches add up in; null: fp32, but bf16 under `weights: bf16`. Over processes sums are in FP32 in any case.
    gradients: Literal["fp32", "bf16"] | None = None
    # the largest gradient norm; null: gradients are not clipped
    clip: float | None = Field(1.0, gt=0, le=MOST_FP32)


class ScheduleSettings(Settings):
    # wsd: warmup, stable, then a decay
    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    warmup: Count = 0  # steps
    decay: Fraction = 0.2  # wsd: share of all steps that decays, at the end
    # wsd: curve of the decay, decay_type of transformers.get_wsd_schedule (whose default is cosine)
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    min_lr_ratio: Fraction = 0.0  # where the decay ends, as a share of `optimizer.learning_rate`


class TrainSettings(Settings):
    """The horizon: exactly one of `steps`, `tokens` and `epochs`."""

    steps: PositiveCount | None = None  # optimizer steps
    tokens: PositiveCount | None = None  # rounded up to whole steps
    # passes over the training packs, rounded up to whole steps
    epochs: float | None = Field(None, gt=0)
    # Another run's checkpoint, a step-* folder, with which a run that has none of its own begins: its weights, moments, step and
    # place in the text, under this recipe's precision and settings. Keys in braces are filled in, as in `run_dir`.
    begin_with: PathText | None = None

    @model_validator(mode="after")
    def _one_horizon(self) -> TrainSettings:
        if sum(value is not None for value in (self.steps, self.tokens, self.epochs)) != 1:
            raise ValueError("set exactly one of `steps`, `tokens` and `epochs`")
        return self


PenaltyKind = Literal["non_max_sum", "neg_entropy"]


class LossSettings(Settings):
    # chunked: a part of the logits at a time, gradients summed in FP32; cce: cut-cross-entropy's Triton
    # kernel, in BF16. Its release 25.1.1 has neither Kahan summation nor FP32 sums.
    kind: Literal["chunked", "cce"] = "chunked"
    # Tokens whose logits exist at once; auto: 4096; on a GPU more where the vocabulary is small.
    chunk: Literal["auto"] | PositiveCount = "auto"
    # Added to each token's cross-entropy, for sharper distributions: 1 - max p, or the entropy. Held-out loss is cross-entropy
    # alone.
    penalty: PenaltyKind | None = None
    # lambda, by which the penalty is multiplied
    penalty_weight: float | None = Field(None, ge=0, le=MOST_FP32)

    @property
    def tokens_at_once(self) -> int:
        """`chunk`, or the usual one where nothing has been chosen for `auto`."""
        return USUAL_CHUNK if self.chunk == "auto" else self.chunk

    @model_validator(mode="after")
    def _a_penalty_is_whole(self) -> LossSettings:
        if self.penalty is None and self.penalty_weight is not None:
            kinds = ", ".join(get_args(PenaltyKind))
            raise ValueError(
                f"`penalty_weight` is set and `penalty` is not; set it to one of {kinds}, or leave the weight out"
            )
        if self.penalty is not None and self.penalty_weight is None:
            raise ValueError(
                f"`penalty: {self.penalty}` needs `penalty_weight`; 0.01 is usual, and 0 only measures the penalty"
            )
        return self


class EvaluateSettings(Settings):
    # steps; null: at the end, and before the first step of a trained `model.source`
    every: PositiveCount | None = None
    # held-out packs to evaluate on, from the first; null: all of them
    packs: PositiveCount | None = None
    # prompts to continue at every evaluation, by 64 tokens at most, each with a seed of its own
    samples: tuple[str, ...] = ()


class CheckpointSettings(Settings):
    every: PositiveCount | None = 500  # steps; null: at the end and on a signal only
    # how many of the newest, beside the last one before wsd's decay; others are deleted
    keep: PositiveCount = 3
    # save at each evaluation with the lowest held-out loss so far, and keep that one, however old
    # it becomes
    best: bool = False
    at_end: bool = True  # false, for speed tests: no last checkpoint and no exported model


class LogSettings(Settings):
    every: PositiveCount = 1  # steps between console lines; metrics.jsonl takes every step
    # of accelerate's, by name: tensorboard, wandb, trackio, ...; jsonl is always written
    trackers: tuple[str, ...] = ("jsonl",)
    # the project that a hosted tracker files the run under; MLflow calls it experiment
    project: str = "pretrain"
    # steps between mean and deviation of each layer's gradient; null: never
    gradient_statistics: PositiveCount | None = None
    # steps between figures of quantization and of experts; null: never
    fp8_statistics: PositiveCount | None = 100
    # Steps between looks at what low precision costs: a microbatch once more in BF16, its loss and gradient beside; null: never.
    gap: PositiveCount | None = None

    @field_validator("trackers")
    @classmethod
    def _metrics_file_is_always_written(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(["jsonl", *names]))


class HealthSettings(Settings):
    # A loss or gradient norm that is not finite: stop the run; skip: leave the step out as if its data had never come, ten in a
    # row at most; rollback: go back to the last checkpoint, and past all data since, three times at most.
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    # A loss above the median of the last 100 by six of their robust standard deviations, and by 0.3 nats at least.
    on_spike: Literal["ignore", "warn", "stop", "skip", "rollback"] = "warn"
    # Where a look of `log.gap` finds that low precision does more to a gradient than it did; switch: go on in BF16.
    on_gap: Literal["warn", "stop", "switch"] = "warn"
    # How far a matrix's gradient may move from its usual place, away from the one in BF16, as a share of that one's norm.
    gap_threshold: float = Field(0.25, gt=0)


# What transformers, nanoGPT and others call our keys.
_OTHER_NAMES = {
    "model.source": "model_name_or_path model_name init_from pretrained_model_name_or_path",
    "model.compile": "torch_compile",
    "data.source": "dataset dataset_name train_file data_path data_dir",
    "data.length": "block_size max_seq_length max_length seq_length seq_len context_length",
    "data.messages": "conversations prompt response completion",
    "data.held_out": "val_split validation_split validation_split_percentage eval_split",
    "batch.tokens": "gradient_accumulation_steps total_batch_size global_batch_size train_batch_size",
    "batch.microbatch": "per_device_train_batch_size micro_batch_size batch_size per_device_batch_size",
    "optimizer.learning_rate": "lr max_lr peak_lr",
    "optimizer.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "optimizer.eps": "adam_epsilon epsilon",
    "optimizer.clip": "max_grad_norm grad_clip gradient_clipping clip_grad_norm",
    "schedule.kind": "lr_scheduler_type lr_scheduler scheduler",
    "schedule.warmup": "warmup_steps warmup_iters num_warmup_steps",
    "schedule.min_lr_ratio": "min_lr",
    "train.steps": "max_steps max_iters num_steps total_steps num_train_steps",
    "train.epochs": "num_train_epochs num_epochs",
    "loss.penalty_weight": "lambda",
    "evaluate.every": "eval_steps eval_interval",
    "checkpoint.every": "save_steps save_interval",
    "checkpoint.keep": "save_total_limit",
    "log.every": "logging_steps log_interval",
    "log.trackers": "report_to wandb tensorboard",
    "log.project": "wandb_project",
    "precision": "bf16 fp16 fp8 mixed_precision dtype torch_dtype",
    "run_dir": "output_dir out_dir",
}


class Recipe(Settings):
    """A whole training recipe: what is trained, on what, how long, and what is recorded."""

    OTHER_NAMES: ClassVar = {
        name: key for key, names in _OTHER_NAMES.items() for name in names.split()
    }
    UNKNOWN_KEY_HELP: ClassVar = "docs/coming_from.md has other trainers' names"

    name: str  # of the run; also a part of its folder's name
    seed: Seed = 42  # of the weights, the order of packs, dropout and stochastic rounding
    # Two runs have the same bits on a GPU too, stopped and resumed or not. Settings that cannot repeat bits are refused.
    deterministic: bool = False
    # what products compute in; a list: one after the other; null: as accelerate's file
    precision: PrecisionSetting | None = None
    # over the accelerate configuration's, key by key
    fp8_config: LowPrecisionSettings = LowPrecisionSettings()
    # Before a fresh run's first step, compare it with plain transformers and stop if it is not the same training.
    parity: bool = True
    # What parameters are stored in. bf16_exact: BF16, and 16 more bits for each that make it FP32, so that no update is lost.
    weights: Weights = "fp32"
    model: ModelSettings
    data: DataSettings
    batch: BatchSettings = BatchSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    train: TrainSettings
    loss: LossSettings = LossSettings()
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    log: LogSettings = LogSettings()
    health: HealthSettings = HealthSettings()
    # any key in braces is filled in: {seed}, {optimizer.learning_rate}
    run_dir: PathText = "runs/{name}-{precision}-{weights}"

    @field_validator("name")
    @classmethod
    def _is_part_of_a_path(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"{name!r} is a part of the run folder's name; take letters, digits and . _ - alone"
            )
        return name

    @property
    def gradients_kept_in(self) -> Literal["fp32", "bf16"]:
        """The dtype in which the gradients of a step's microbatches add up on each process, and stay when ranks have been summed.
        Where shards are gathered once a step, microbatches add up in FP32 in any case, and the sum over ranks is kept in this."""
        return self.optimizer.gradients or ("bf16" if self.weights == "bf16" else "fp32")

    @property
    def moments_kept_in(self) -> Literal["fp32", "bf16"]:
        """The dtype in which AdamW keeps its two moments."""
        return self.optimizer.moments or ("bf16" if self.weights == "bf16" else "fp32")
