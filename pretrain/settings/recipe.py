"""Typed settings of a training recipe. Unknown keys are errors.

The classes define the defaults and the checks that concern a single section. The module
`pretrain.plan.checks` has the checks that concern several sections or the number of processes. This
file does not import torch, so that a mistake in a recipe is reported at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from foundation.reading import load_yaml
from foundation.settings import Count, LocalPath, PathText, PositiveCount, Seed, Settings, Share
from packing.settings import DataSettings, split_revision
from pretrain.precision.settings import (
    LowPrecisionSettings,
    PrecisionName,
    PrecisionSetting,
    Weights,
)

# Upper limit of the optimizer's settings. The optimizer computes in FP32, in which the largest
# finite number is 3.4e38.
MOST_FP32 = 1e38
# Size of a chunk in tokens with `loss.chunk: auto`, unless a larger size is chosen.
USUAL_LOSS_CHUNK = 4096
# The values of a switch. YAML reads `on` without quotation marks as true, and `off` as false, so
# these are accepted too.
Switch = Annotated[
    Literal["auto", "on", "off"],
    BeforeValidator(lambda value: ("off", "on")[value] if isinstance(value, bool) else value),
]
Attention = Literal["auto", "triton", "varlen", "flash_attn", "cudnn", "documents", "sdpa"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class ModelSettings(Settings):
    source: PathText | None = None
    """Model to start from.

    It is a model folder, a name on the Hugging Face hub, or name@revision.
    null: train a model with the architecture in `config` from scratch.
    """

    from_scratch: bool = False
    """Initialize the weights randomly from `seed`.

    Then only the architecture and the tokenizer of `source` are used.
    """

    config: dict[str, Any] | None = None
    """Configuration of the model as in transformers, {model_type: qwen3, ...}.

    With `source`, list only the keys that differ. If the model is trained from scratch, the
    tokenizer determines vocab_size, rounded up to a multiple of 128, and the ids of eos, bos and
    pad.
    null: use the configuration of `source` unchanged.
    """

    attention: Attention = "auto"
    """Attention kernel.

    triton: our kernel, on Hopper, for heads of 64 or 128 values.
    flash_attn: FlashAttention-4.
    cudnn: cuDNN in Transformer Engine, for heads of 64 or 128 values.
    varlen: FlashAttention-2 in torch.
    documents: call the kernel once for each document.
    sdpa: scaled_dot_product_attention with a mask.
    auto: on Hopper, B200 and B300, flash_attn if its package is installed, else cudnn; on other
    GPUs varlen. On Hopper, auto prefers triton if heads have 64 or 128 values and documents are
    short: at most 1,152 tokens in the mean over all tokens, or 2,048 without flash_attn, or 4,096
    without cudnn too. On a CPU, auto is documents, and on other devices sdpa.
    On a GPU, capped scores and attention sinks need flash_attn or sdpa.
    """

    gradient_checkpointing: Literal["none", "full"] | PositiveCount = "none"
    """Decoder layers whose activations are recomputed in the backward pass, which saves memory.

    none: no layer.
    full: every layer. A number n: every n-th layer, from the first one.
    """

    compile: Literal["auto", "layer", "none"] = "auto"
    """Use of torch.compile.

    layer: compile each decoder layer.
    none: compile nothing.
    auto: layer on a GPU, none on a CPU.
    """

    fused: Switch = "auto"
    """on: compute each decoder layer of a supported architecture with a few large fused GEMMs.

    off: compute each matrix product of the layer separately.
    auto: on if a GPU computes in BF16 or in a quantized precision that is not emulated, else off.
    """

    cuda_graphs: Switch = "auto"
    """on: launch all kernels of a microbatch together, which changes no result.

    This needs fused layers, and memory for the activations of a second microbatch.
    auto: on with the GPUs of one machine if these conditions hold and a tenth of the GPU's
    memory stays free. A microbatch that fills the memory is launched without graphs.
    """

    @property
    def repository(self) -> str | None:
        """Return `source` without its revision: a folder or a name on the Hugging Face hub."""
        return split_revision(self.source)[0] if self.source else None

    @property
    def revision(self) -> str | None:
        """Return the revision in `source`: a branch, a tag or a commit.

        Return None if `source` has no revision. Then the main branch is used.
        """
        return split_revision(self.source)[1] if self.source else None

    @property
    def weights_source(self) -> str | None:
        """Return `source` if the weights are loaded from it, or None if they are initialized."""
        return None if self.from_scratch else self.source

    def recomputes(self, index: int) -> bool:
        """Return True if the activations of a decoder layer are recomputed in the backward pass.

        `index` is the index of the layer, counted from 0.
        """
        setting = self.gradient_checkpointing
        if isinstance(setting, str):
            return setting == "full"
        return index % setting == 0

    @model_validator(mode="after")
    def _has_an_origin(self) -> ModelSettings:
        if self.source is None and "model_type" not in (self.config or {}):
            raise ValueError(
                "the architecture is not set; either set `source` to a model folder or a name on "
                "the Hugging Face hub, or set model_type in `config`: {model_type: qwen3}"
            )
        return self


class BatchSettings(Settings):
    tokens: Annotated[PositiveCount, Field(le=2**40)] = 131_072
    """Number of tokens in one optimizer step, on all devices together."""

    microbatch: Literal["auto"] | PositiveCount = "auto"
    """Maximum number of packs that a device processes at once.

    auto: find the number that fits into the memory.
    """


class MuonSettings(Settings):
    """Muon's settings. They need `optimizer.name: muon`."""

    learning_rate: float | None = Field(default=None, gt=0, le=MOST_FP32)
    """Peak learning rate of Muon's matrices. null: AdamW's."""

    momentum: Share = 0.95
    """Decay rate of the momentum."""

    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of a matrix's learning rate, as in torch.optim.Muon.

    match_rms_adamw: 0.2 sqrt(max(out, in)), for AdamW's learning rates.
    original: sqrt(max(1, out / in)), for 0.02.
    """


class OptimizerSettings(Settings):
    name: Literal["adamw", "muon"] = "adamw"
    """Algorithm of the update.

    adamw: AdamW.
    muon: Muon for the weight matrices of linears and experts in decoder layers, AdamW for the rest.
    """

    learning_rate: float = Field(default=3.0e-4, gt=0, le=MOST_FP32)
    """Peak learning rate. The schedule reaches it after the warmup."""

    muon: MuonSettings = MuonSettings()

    betas: Annotated[tuple[Share, ...], Field(min_length=2, max_length=2)] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""

    eps: float = Field(default=1.0e-8, gt=0, le=MOST_FP32)
    """Small number that AdamW adds to the denominator of the update."""

    weight_decay: float = Field(default=0.1, ge=0, le=MOST_FP32)
    """Decoupled weight decay, which is multiplied by the learning rate.

    It is applied to matrices and embeddings only.
    """

    moments: Literal["fp32", "bf16"] | None = None
    """Dtype of AdamW's moments and of Muon's momentum.

    null: bf16 if the recipe sets `weights: bf16`, as in torch, and fp32 otherwise.
    """

    offload: Literal["none", "moments", "state"] = "none"
    """Part of AdamW's state that is in pinned host memory.

    none: nothing.
    moments: both moments.
    state: both moments, and the 16 bits per weight of `weights: bf16_exact`. Each update copies
    this part to the GPU and back, which changes no result. No effect on a CPU.
    """

    gradients: Literal["fp32", "bf16"] | None = None
    """Dtype in which the gradients of the microbatches are accumulated.

    null: bf16 if the recipe sets `weights: bf16`, and fp32 otherwise. Gradients of several
    processes are always summed in FP32.
    """

    clip: float | None = Field(default=1.0, gt=0, le=MOST_FP32)
    """Maximum gradient norm.

    Gradients with a larger norm are scaled down to it.
    null: do not clip gradients.
    """

    @model_validator(mode="after")
    def _fits_its_name(self) -> OptimizerSettings:
        if self.name == "adamw" and self.muon != MuonSettings():
            raise ValueError("the keys in `muon` need Muon; set `name: muon`, or remove them")
        if self.name == "muon" and self.offload != "none":
            raise ValueError(
                f"`offload: {self.offload}` needs AdamW, because Muon updates a matrix as a whole; "
                "set `offload: none`, `moments: bf16` to save memory, or `name: adamw`"
            )
        return self

    @property
    def muon_lr_ratio(self) -> float:
        """Return the learning rate of Muon divided by the learning rate of AdamW."""
        return (self.muon.learning_rate or self.learning_rate) / self.learning_rate


class ScheduleSettings(Settings):
    kind: Literal["wsd", "cosine", "linear", "constant"] = "wsd"
    """Shape of the learning rate schedule after the warmup.

    wsd (warmup, stable, decay): constant, followed by a decay.
    cosine and linear: decay until the end.
    constant: no decay.
    """

    warmup: Count = 0
    """Number of warmup steps, in which the learning rate increases linearly."""

    decay: Fraction = 0.2
    """Length of the decay at the end of training, as a share of all steps.

    It applies only to `kind: wsd`.
    """

    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Curve of the decay.

    transformers.get_wsd_schedule calls it decay_type, with default cosine. It applies only to
    `kind: wsd`.
    """

    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of training, as a share of `optimizer.learning_rate`.

    It has no effect with `kind: constant`.
    """


class TrainSettings(Settings):
    """The length of the training. Set exactly one of `steps`, `tokens` and `epochs`."""

    steps: PositiveCount | None = None
    """Number of optimizer steps. null: `tokens` or `epochs` is set."""

    tokens: PositiveCount | None = None
    """Number of training tokens, rounded up to whole steps. null: `steps` or `epochs` is set."""

    epochs: float | None = Field(default=None, gt=0)
    """Number of passes over the training packs, rounded up to whole steps.

    null: `steps` or `tokens` is set.
    """

    begin_with: LocalPath | None = None
    """Checkpoint of another run from which this run branches, as the path of a step-* folder.

    The run starts with the checkpoint's weights, moments, step and position in the data, and
    continues with the settings of this recipe. It resumes from its own checkpoints. Keys in braces
    are replaced, as in `run_dir`.
    null: start at step 0.
    """

    @model_validator(mode="after")
    def _one_horizon(self) -> TrainSettings:
        if sum(value is not None for value in (self.steps, self.tokens, self.epochs)) != 1:
            raise ValueError("set exactly one of `steps`, `tokens` and `epochs`")
        return self


PenaltyKind = Literal["non_max_sum", "neg_entropy"]


class LossSettings(Settings):
    kind: Literal["chunked", "cce"] = "chunked"
    """Implementation of the cross-entropy loss.

    chunked: compute the logits of one chunk of tokens at a time, and sum their gradients in FP32.
    cce: use the Triton kernel of cut-cross-entropy, which computes in BF16. Its release 25.1.1
    supports neither Kahan summation nor FP32 sums.
    """

    chunk: Literal["auto"] | PositiveCount = "auto"
    """Number of tokens in a chunk.

    Only the logits of one chunk are in memory at the same time.
    auto: 4096, or more on a GPU if the vocabulary is small.
    """

    penalty: PenaltyKind | None = None
    """Penalty on each token's cross-entropy, which makes the predicted distribution p sharper.

    The held-out loss does not include it.
    non_max_sum: 1 - max p.
    neg_entropy: the entropy of p.
    null: no penalty.
    """

    penalty_weight: float | None = Field(default=None, ge=0, le=MOST_FP32)
    """Factor lambda that multiplies the penalty. null: no penalty."""

    @property
    def tokens_at_once(self) -> int:
        """Return the number of tokens in a chunk: USUAL_LOSS_CHUNK while `chunk` is `auto`."""
        return USUAL_LOSS_CHUNK if self.chunk == "auto" else self.chunk

    @model_validator(mode="after")
    def _penalty_has_a_weight(self) -> LossSettings:
        if (self.penalty is None) != (self.penalty_weight is None):
            raise ValueError(
                "`penalty` and `penalty_weight` need each other; set both, for example "
                "`penalty: non_max_sum` and `penalty_weight: 0.01`, or neither"
            )
        return self


class EvaluateSettings(Settings):
    every: PositiveCount | None = None
    """Number of steps between two evaluations.

    A run also evaluates at its end, and before its first step if it loads trained weights from
    `model.source`.
    null: evaluate only then.
    """

    packs: PositiveCount | None = None
    """Number of held-out packs that are evaluated, starting with the first pack.

    null: evaluate all held-out packs.
    """

    samples: tuple[str, ...] = ()
    """Prompts.

    The model continues each prompt at every evaluation, with at most 64 new tokens. The random seed
    of each prompt is different.
    """

    served: PrecisionName | None = None
    """Precision in which the model will be served.

    The run also evaluates its last checkpoint in this precision, with its default options, and logs
    the loss as `served_loss`. The LM head, and the layers in `fp8_config.keep_bf16` and
    `fp8_config.keep_bf16_layers`, are not quantized.
    null: skip this evaluation.
    """

    merge: PositiveCount = 1
    """Number of checkpoints whose mean weights are evaluated as `served_loss`.

    These are the checkpoints of the last step and of the last multiples of `checkpoint.every`.
    """


class CheckpointSettings(Settings):
    every: PositiveCount | None = 500
    """Number of steps between two checkpoints.

    null: save a checkpoint only at the end of training and when a signal stops the training.
    """

    keep: PositiveCount = 3
    """Number of newest checkpoints to keep.

    Older checkpoints are deleted, except the last checkpoint before the decay of a wsd schedule
    begins.
    """

    best: bool = False
    """Also save a checkpoint at each evaluation with the lowest held-out loss so far.

    This checkpoint is kept until the next one of this kind is saved.
    """

    at_end: bool = True
    """true: save a checkpoint and export the model after the last step.

    Set it to false for speed tests.
    """


class LogSettings(Settings):
    REMOVED: ClassVar = {"gap": None, "gradient_statistics": None}

    every: PositiveCount = 1
    """Number of steps between two console lines.

    The file metrics.jsonl has a line for every step.
    """

    trackers: tuple[str, ...] = ("jsonl",)
    """Names of Accelerate's trackers: tensorboard, wandb, trackio and others.

    jsonl is the file metrics.jsonl, which is always written.
    """

    project: str = "pretrain"
    """Name of the project in hosted trackers. In MLflow it is the name of the experiment."""

    fp8_statistics: PositiveCount | None = 100
    """Steps between two logs of statistics of the quantization and of the experts' load.

    null: never log them.
    """


class HealthSettings(Settings):
    REMOVED: ClassVar = {"gap_threshold": 0.25, "on_gap": "warn"}

    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    """Reaction to a loss or a gradient norm that is not finite.

    stop: stop the training before the update.
    skip: skip the update and continue with the next data, at most ten times in a row.
    rollback: go back to the last checkpoint and skip all data that was used after it, at most three
    times.
    """

    on_spike: Literal["ignore", "warn", "stop", "skip", "rollback"] = "warn"
    """Reaction to a loss spike.

    A spike is a loss that exceeds the median of the last 100 losses by six robust standard
    deviations and by 0.3 nats.
    ignore: do nothing.
    warn: print a warning.
    stop, skip and rollback: as for `on_nan`.
    """


class Recipe(Settings):
    """A training recipe: all settings of a training."""

    OTHER_NAMES: ClassVar = {
        name: key
        for key, names in load_yaml(Path(__file__).with_name("other_names.yaml")).items()
        for name in names.split()
    }
    UNKNOWN_KEY_HELP: ClassVar = "; docs/coming_from.md lists the names in other trainers"

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run. It is also part of the name of the run folder."""

    seed: Seed = 42
    """Random seed of the initial weights, the order of packs, dropout and stochastic rounding."""

    deterministic: bool = False
    """Make two runs of the same recipe equal bit for bit, also on a GPU.

    This also holds for a run that is stopped and resumed. Settings with which it is impossible are
    errors.
    """

    precision: PrecisionSetting | None = None
    """Precision of the matrix products.

    A list is a schedule with several phases.
    null: use the precision of the Accelerate configuration.
    """

    fp8_config: LowPrecisionSettings = LowPrecisionSettings()
    """Options of the precision.

    Each key that is set here overrides the same key in the `fp8_config` of the Accelerate
    configuration.
    """

    parity: bool = True
    """Compare the first step of a new run with plain transformers.

    The training stops if the loss or the gradients differ by more than the tolerance.
    """

    weights: Weights = "auto"
    """Dtype of the stored weights.

    bf16_exact: store each weight in BF16, together with the 16 bits that complete it to FP32, so
    that no update is lost to rounding.
    auto: bf16_exact on a GPU, fp32 on a CPU and with `precision: fp32`. A run that resumes keeps
    the value in the config.yaml of its folder.
    """

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

    run_dir: PathText = "runs/{name}-{precision}-{weights}"
    """Run folder.

    With s3://bucket/run, the run trains in runs/s3/bucket/run, and is stored in the bucket too.
    Keys in braces, such as {seed} and {optimizer.learning_rate}, are replaced by their values.
    """

    @property
    def gradients_kept_in(self) -> Literal["fp32", "bf16"]:
        """Return the dtype of gradients that are accumulated over microbatches.

        There is one exception: if FSDP2 gathers the weights once per step, gradients are
        accumulated over microbatches in FP32. Then only the sum of the gradients over all ranks is
        stored in the returned dtype.
        """
        return self.optimizer.gradients or ("bf16" if self.weights == "bf16" else "fp32")

    @property
    def moments_kept_in(self) -> Literal["fp32", "bf16"]:
        """Return the dtype of AdamW's two moments and of Muon's momentum."""
        return self.optimizer.moments or ("bf16" if self.weights == "bf16" else "fp32")
