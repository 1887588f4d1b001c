"""Typed settings of a training recipe. Unknown keys are errors.

The classes hold the defaults and the checks that concern one section. `pretrain.plan.checks` holds
the checks that concern several sections or the number of processes. This file does not import
torch, so that a mistyped key is reported at once.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from foundation.settings import Count, PathText, PositiveCount, Seed, Settings, Share
from packing.settings import DataSettings, split_revision
from pretrain.precision.settings import LowPrecisionSettings, PrecisionSetting, Weights

# Limit of the optimizer's numbers. It computes in FP32, whose largest finite number is 3.4e38.
MOST_FP32 = 1e38
# Default of `loss.chunk`, in tokens.
USUAL_CHUNK = 4096
# YAML reads a bare `on` as true and a bare `off` as false.
Switch = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value),
]
Attention = Literal["auto", "varlen", "flash_attn", "documents", "sdpa"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class ModelSettings(Settings):
    # Model to start from: a folder, a hub name or name@revision. null: train the architecture of
    # `config` from scratch.
    source: PathText | None = None
    # Take only the architecture and the tokenizer from `source`, and initialize the weights from
    # `seed`.
    from_scratch: bool = False
    # Configuration of the model, {model_type: qwen3, ...}. With `source`, only the changes to its
    # configuration. From scratch, the tokenizer provides vocab_size and the ids of eos, bos and pad
    # unless they are set.
    config: dict[str, Any] | None = None
    # Attention kernel. flash_attn: FlashAttention-4. varlen: torch's own FlashAttention-2.
    # documents: one call per document. sdpa: scaled_dot_product_attention with a mask.
    # auto: flash_attn on Hopper and Blackwell if its package is installed, else varlen on a GPU,
    # documents on a CPU, sdpa on other devices.
    attention: Attention = "auto"
    # Layers that recompute their activations in backward to save memory: none, full for every
    # layer, or a number n for every n-th layer.
    gradient_checkpointing: Literal["none", "full"] | PositiveCount = "none"
    # torch.compile. layer: compile each decoder layer. none: compile nothing. auto: layer on a
    # GPU, none on a CPU.
    compile: Literal["auto", "layer", "none"] = "auto"
    # Run the decoder layers of supported architectures as a few large fused GEMMs. auto: where
    # that is faster.
    fused: Switch = "auto"

    @property
    def repository(self) -> str | None:
        """Return `source` without its revision: a folder or a hub name."""
        return self.source and split_revision(self.source)[0]

    @property
    def revision(self) -> str | None:
        """Return the branch, tag or commit that `source` names, or None for the main branch."""
        return self.source and split_revision(self.source)[1]

    @property
    def weights_source(self) -> str | None:
        """Return `source` if it provides the weights, or None if they are initialized."""
        return None if self.from_scratch else self.source

    def recomputes(self, index: int) -> bool:
        """Return True if decoder layer `index`, from 0, recomputes its activations in backward."""
        setting = self.gradient_checkpointing
        if isinstance(setting, str):
            return setting == "full"
        return index % setting == 0

    @model_validator(mode="after")
    def _has_an_origin(self) -> ModelSettings:
        if self.from_scratch and self.source is None:
            raise ValueError(
                "`from_scratch: true` needs a `source` for the architecture; set `source`, or "
                "remove `from_scratch`, because `config` alone always trains from scratch"
            )
        if self.source is None and "model_type" not in (self.config or {}):
            raise ValueError(
                "set `source` to a hub name or folder, or `config` with a model_type: "
                "{model_type: qwen3}"
            )
        return self


class BatchSettings(Settings):
    # Tokens of one optimizer step, over all devices.
    tokens: Annotated[PositiveCount, Field(le=2**40)] = 131_072
    # Packs that a device processes at once, at most. auto: search the number that fits into
    # memory. auto:16: search up to 16.
    microbatch: (
        Literal["auto"]
        | PositiveCount
        | Annotated[str, Field(pattern="^auto:[1-9][0-9]{0,8}$", examples=["auto:16"])]
    ) = "auto"

    @property
    def microbatch_is_searched(self) -> bool:
        """Return True if the size of the microbatch is found by a search."""
        return isinstance(self.microbatch, str)

    @property
    def microbatch_cap(self) -> int | None:
        """Return 16 for `auto:16`, or None if the search has no limit."""
        cap = str(self.microbatch).partition("auto:")[2]
        return int(cap) if cap else None


class OptimizerSettings(Settings):
    """AdamW is the only optimizer."""

    # Peak learning rate, which the schedule reaches after its warmup.
    learning_rate: float = Field(default=3.0e-4, gt=0, le=MOST_FP32)
    # Decay rates of AdamW's first and second moment.
    betas: tuple[Share, Share] = (0.9, 0.95)
    # Term that AdamW adds to the denominator.
    eps: float = Field(default=1.0e-8, gt=0, le=MOST_FP32)
    # Decoupled weight decay, multiplied by the learning rate. Applies to matrices and embeddings
    # only.
    weight_decay: float = Field(default=0.1, ge=0, le=MOST_FP32)
    # Dtype of AdamW's moments. null: bf16 with `weights: bf16`, as in torch, else fp32.
    moments: Literal["fp32", "bf16"] | None = None
    # Dtype in which the gradients of the microbatches are accumulated. null: bf16 with
    # `weights: bf16`, else fp32. Sums over processes are always in FP32.
    gradients: Literal["fp32", "bf16"] | None = None
    # Gradient norm above which gradients are clipped. null: no clipping.
    clip: float | None = Field(default=1.0, gt=0, le=MOST_FP32)


class ScheduleSettings(Settings):
    # Shape of the learning rate schedule. wsd: warmup, stable, decay.
    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    warmup: Count = 0  # Warmup steps.
    # With wsd: share of all steps that decays, at the end.
    decay: Fraction = 0.2
    # With wsd: curve of the decay, the decay_type of transformers.get_wsd_schedule (whose default
    # is cosine).
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    # Final learning rate as a share of `optimizer.learning_rate`.
    min_lr_ratio: Fraction = 0.0


class TrainSettings(Settings):
    """The horizon of the training: set exactly one of `steps`, `tokens` and `epochs`."""

    steps: PositiveCount | None = None  # Optimizer steps.
    tokens: PositiveCount | None = None  # Tokens, rounded up to whole steps.
    # Passes over the training packs, rounded up to whole steps.
    epochs: float | None = Field(default=None, gt=0)
    # Checkpoint of another run, a step-* folder, to branch from. The run takes over its weights,
    # moments, step and position in the data, and trains on with this recipe's precision and
    # settings. Ignored once the run has a checkpoint of its own. Keys in braces are filled in, as
    # in `run_dir`.
    begin_with: PathText | None = None

    @model_validator(mode="after")
    def _one_horizon(self) -> TrainSettings:
        if sum(value is not None for value in (self.steps, self.tokens, self.epochs)) != 1:
            raise ValueError("set exactly one of `steps`, `tokens` and `epochs`")
        return self


PenaltyKind = Literal["non_max_sum", "neg_entropy"]


class LossSettings(Settings):
    # chunked: compute the logits of a chunk of tokens at a time, and sum gradients in FP32.
    # cce: the Triton kernel of cut-cross-entropy, in BF16. Its release 25.1.1 has neither Kahan
    # summation nor FP32 sums.
    kind: Literal["chunked", "cce"] = "chunked"
    # Tokens in a chunk, whose logits are in memory at once. auto: 4096, or more on a GPU if the
    # vocabulary is small.
    chunk: Literal["auto"] | PositiveCount = "auto"
    # Penalty that is added to each token's cross-entropy to sharpen the distribution.
    # non_max_sum: 1 - max p. neg_entropy: the entropy. The held-out loss never includes it.
    penalty: PenaltyKind | None = None
    # Factor lambda of the penalty.
    penalty_weight: float | None = Field(default=None, ge=0, le=MOST_FP32)

    @property
    def tokens_at_once(self) -> int:
        """Return `chunk`, or its default if `auto` is not resolved yet."""
        return USUAL_CHUNK if self.chunk == "auto" else self.chunk

    @model_validator(mode="after")
    def _a_penalty_is_whole(self) -> LossSettings:
        if self.penalty is None and self.penalty_weight is not None:
            kinds = ", ".join(get_args(PenaltyKind))
            raise ValueError(
                f"`penalty_weight` is set but `penalty` is not; set `penalty` to one of {kinds}, "
                "or remove `penalty_weight`"
            )
        if self.penalty is not None and self.penalty_weight is None:
            raise ValueError(
                f"`penalty: {self.penalty}` needs `penalty_weight`; 0.01 is usual, and 0 only "
                "measures the penalty"
            )
        return self


class EvaluateSettings(Settings):
    # Steps between evaluations. null: evaluate at the end, and before the first step if
    # `model.source` provides trained weights.
    every: PositiveCount | None = None
    # Number of held-out packs to evaluate on, from the first. null: all.
    packs: PositiveCount | None = None
    # Prompts that the model continues at every evaluation, with at most 64 new tokens each. Every
    # prompt has its own seed.
    samples: tuple[str, ...] = ()


class CheckpointSettings(Settings):
    # Steps between checkpoints. null: save only at the end and on a signal.
    every: PositiveCount | None = 500
    # Number of newest checkpoints to keep. Older ones are deleted, except the last one before the
    # decay of wsd.
    keep: PositiveCount = 3
    # Also save at each evaluation with the lowest held-out loss so far, and keep that checkpoint
    # until a better one is saved.
    best: bool = False
    # Save a checkpoint and export the model after the last step. Set to false for speed tests.
    at_end: bool = True


class LogSettings(Settings):
    # Steps between console lines. metrics.jsonl has every step.
    every: PositiveCount = 1
    # Trackers of accelerate by name: tensorboard, wandb, trackio, ... jsonl is always written.
    trackers: tuple[str, ...] = ("jsonl",)
    # Project name for hosted trackers. MLflow calls it experiment.
    project: str = "pretrain"
    # Steps between logging the mean and the standard deviation of each layer's gradient.
    # null: never.
    gradient_statistics: PositiveCount | None = None
    # Steps between statistics of quantization and of the experts' load. null: never.
    fp8_statistics: PositiveCount | None = 100
    # Steps between measurements of the gap to BF16: one microbatch is also computed in BF16, and
    # its loss and gradient are compared. null: never.
    gap: PositiveCount | None = None

    @field_validator("trackers")
    @classmethod
    def _metrics_file_is_always_written(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(["jsonl", *names]))


class HealthSettings(Settings):
    # Reaction to a loss or gradient norm that is not finite. stop: end the run before the update.
    # skip: skip the step and its data, at most ten times in a row. rollback: go back to the last
    # checkpoint and skip all data since, at most three times.
    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    # Reaction to a loss spike: a loss that exceeds the median of the last 100 losses by six robust
    # standard deviations and by 0.3 nats.
    on_spike: Literal["ignore", "warn", "stop", "skip", "rollback"] = "warn"
    # Reaction if `log.gap` finds that low precision changes a gradient more than before.
    # switch: continue in BF16.
    on_gap: Literal["warn", "stop", "switch"] = "warn"
    # Limit of `gap/moved`: how much further than usual a matrix's gradient may be from its BF16
    # gradient, as a share of the norm of the BF16 gradient.
    gap_threshold: float = Field(default=0.25, gt=0)


# Names of our keys in transformers, nanoGPT and other trainers, for hints in error messages.
_OTHER_NAMES = {
    "model.source": "model_name_or_path model_name init_from pretrained_model_name_or_path",
    "model.compile": "torch_compile",
    "data.source": "dataset dataset_name train_file data_path data_dir",
    "data.length": "block_size max_seq_length max_length seq_length seq_len context_length",
    "data.messages": "conversations prompt response completion",
    "data.held_out": "val_split validation_split validation_split_percentage eval_split",
    "batch.tokens": (
        "gradient_accumulation_steps total_batch_size global_batch_size train_batch_size"
    ),
    "batch.microbatch": (
        "per_device_train_batch_size micro_batch_size batch_size per_device_batch_size"
    ),
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
    """A training recipe: the model, the data, the length of the training and its records."""

    OTHER_NAMES: ClassVar = {
        name: key for key, names in _OTHER_NAMES.items() for name in names.split()
    }
    UNKNOWN_KEY_HELP: ClassVar = "docs/coming_from.md has other trainers' names"

    # Name of the run, which is also part of its folder's name.
    name: str
    # Seed of the weights, the order of packs, dropout and stochastic rounding.
    seed: Seed = 42
    # Make runs repeat bit for bit on a GPU too, also when they are stopped and resumed. Settings
    # that cannot repeat bit for bit are refused.
    deterministic: bool = False
    # Precision of the matrix products. A list is a schedule of phases. null: the precision of the
    # accelerate configuration.
    precision: PrecisionSetting | None = None
    # Overrides the `fp8_config` of the accelerate configuration, key by key.
    fp8_config: LowPrecisionSettings = LowPrecisionSettings()
    # Compare the first step of a new run with plain transformers, and stop if loss or gradients
    # differ by more than the tolerance.
    parity: bool = True
    # Dtype of the stored parameters. bf16_exact: BF16 with 16 remainder bits per parameter, which
    # together are FP32, so that no update is lost to rounding.
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
    # Run folder. Keys in braces are filled in: {seed}, {optimizer.learning_rate}.
    run_dir: PathText = "runs/{name}-{precision}-{weights}"

    @field_validator("name")
    @classmethod
    def _is_part_of_a_path(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"{name!r} cannot be part of the run folder's name; use only letters, digits "
                "and . _ -"
            )
        return name

    @property
    def gradients_kept_in(self) -> Literal["fp32", "bf16"]:
        """Return the dtype of the accumulated gradients, also after the sum over ranks.

        Under FSDP2 with one gather per step, microbatches are always accumulated in FP32. Only
        the sum over ranks is kept in this dtype.
        """
        return self.optimizer.gradients or ("bf16" if self.weights == "bf16" else "fp32")

    @property
    def moments_kept_in(self) -> Literal["fp32", "bf16"]:
        """Return the dtype of AdamW's two moments."""
        return self.optimizer.moments or ("bf16" if self.weights == "bf16" else "fp32")
