"""Small models, assembled as a training run does, with one step of packs.

The tests of parity and the audit use them, on a CPU or on a GPU with Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from packing.arrow import Pack
from packing.batch import StepBatches, build_microbatch, sum_of_squares
from pretrain.model import huggingface as model
from pretrain.model import packed as packed_model
from pretrain.model.configuration import load_config
from pretrain.model.distributed import gathers_once_a_step, shard
from pretrain.model.gradients import RankSums, attach_main_gradients
from pretrain.model.huggingface import decoder_layers
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.model.sharding import Sharding
from pretrain.model.wrapping import choose_arithmetic, convert, fuse, wrap_layers
from pretrain.observe.audit import Entry, ProductAudit, audit_products
from pretrain.observe.observers import Observer, Step, StepWatch
from pretrain.observe.step_check import StepCheck
from pretrain.optimizer import adamw
from pretrain.optimizer.adamw import ExactAdamW, clear_gradients
from pretrain.optimizer.muon import build_muon
from pretrain.precision.product import PrecisionContext
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.precision.scope import Decision, decide
from pretrain.precision.selection import make_engines
from pretrain.precision.settings import PRECISIONS, ActivePrecision
from pretrain.run import evaluate
from pretrain.settings.recipe import LossSettings, ModelSettings, Recipe
from pretrain.verify.parity import Parity, check_parity
from tests.pretrain.conftest import active_in

CPU = torch.device("cpu")
RATE = 1e-3
CLIP = 1e-3  # low enough to clip the gradients
VOCABULARY, LENGTH, HIDDEN = 128, 128, 128
# An initializer range of 0.02 for 2,048 features, scaled to 128 features, so that attention is far
# from uniform.
LLAMA = {
    **{"hidden_size": HIDDEN, "intermediate_size": 256, "initializer_range": 0.08},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32},
    **{"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH},
}
TIED = {"tie_word_embeddings": True}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": LLAMA | TIED,
    "llama": LLAMA | {"tie_word_embeddings": False},
    "gpt2": {
        **{"n_embd": HIDDEN, "n_head": 4, "n_positions": LENGTH, "vocab_size": VOCABULARY},
        **{"initializer_range": 0.08, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
    },
    "gemma": LLAMA | TIED | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
WITHOUT_HEAD_DIM = {key: value for key, value in LLAMA.items() if key != "head_dim"}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": WITHOUT_HEAD_DIM
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.2},
    "qwen3_moe": WITHOUT_HEAD_DIM
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}
MIXTURES["afmoe"] = MIXTURES["qwen3_moe"] | {"num_dense_layers": 1}
UNUSUAL: dict[str, dict[str, Any]] = {
    "mistral": WITHOUT_HEAD_DIM | {"sliding_window": 3 * LENGTH // 8},
    "phimoe": MIXTURES["mixtral"] | {"router_jitter_noise": 0.01, "input_jitter_noise": 0.1},
    "hrm_text": {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    | {"H_cycles": 1, "L_cycles": 2},
}
LAYERS = {"gpt2": "n_layer"}


@dataclass
class SmallRun:
    """A model with its optimizer and its step 0.

    A fault may change any of them, or the code behind them, before the checks run.
    """

    packed: PackedLanguageModel
    model: PackedLanguageModel  # `packed`, prepared by Accelerate
    optimizer: ExactAdamW
    active: ActivePrecision
    decisions: dict[str, Decision]
    step: StepBatches
    packs: Sequence[Pack]
    accelerator: Accelerator
    recipe: Recipe  # hyperparameters of the updates

    @property
    def layers(self) -> list[torch.nn.Module]:
        return list(decoder_layers(self.packed.hf).values())

    @property
    def has_copies(self) -> bool:
        """Return whether the compute dtype differs from the dtype of the weights."""
        return self.packed.hf.dtype != self.packed.context.compute_dtype

    def audit(self) -> list[Entry]:
        """Audit the products of the first pack and return their entries."""
        batch, scale = build_microbatch(self.packs[:1], mask_boundaries=True), 1 / self.step.tokens

        def loss() -> Tensor:
            return self.packed(**inputs_of(batch, self.accelerator.device)) * scale

        entries = audit_products(self.packed, loss, self.decisions, self.optimizer)
        clear_gradients(self.optimizer, self.packed)
        return entries

    def confirm(self, entries: list[Entry]) -> None:
        """Compute the gradients of a run's first two steps with their products observed.

        Raises InputError if they differ from the audit's `entries`.
        """
        for number in (1, 2) if self.packed.context.engine is not None else ():
            watch = self.watch(number, [self.observer_of(entries)], is_new=True)
            with watch.passes(self.step, 0):
                packed_model.forward_backward(
                    self.packed, self.step, self.accelerator, watch.first_microbatch()
                )
            clear_gradients(self.optimizer, self.packed)

    def observer_of(self, entries: Sequence[Entry]) -> ProductAudit:
        """Return the observer that compares products with an audit's `entries`."""
        audits = {self.active.name: {"products": entries}}
        schedule = PrecisionSchedule([(None, self.active)], self.recipe.train.steps)
        return ProductAudit(self.packed, schedule, audits, write=lambda: None)

    def watch(self, number: int, observers: list[Observer], *, is_new: bool) -> StepWatch:
        """Return the watch over a statistics step."""
        is_quantized = self.active.precision.quantized
        step = Step(number, is_quantized, is_new=is_new, measures_operands=is_quantized)
        return StepWatch(step, [observer for observer in observers if observer.due(step)])

    def train(self, entries: Sequence[Entry] = ()) -> None:
        """Train two steps with statistics, as train_accelerate.py does.

        `entries` are the audit's entries. Without them, products are not observed.
        """
        self.optimizer.materialise()
        observers = [StepCheck(self.packed, self.optimizer, self.recipe, self.accelerator)]
        if entries:
            observers.insert(0, self.observer_of(entries))
        for updates in range(2):
            watch = self.watch(updates + 1, observers, is_new=False)
            adamw.set_learning_rate(self.optimizer, RATE)
            with watch.passes(self.step, 0):
                mean_loss = packed_model.forward_backward(
                    self.model, self.step, self.accelerator, watch.first_microbatch()
                )
            norm = adamw.gradient_norm(self.model.parameters())
            means = self.packed.mean_losses(self.accelerator, self.step.valid_tokens, mean_loss)
            losses = {name: mean.item() for name, mean in means.items()}
            with watch.update(RATE, updates, losses):
                self.optimizer.step(
                    clip_coefficient=adamw.clip_coefficient(norm, self.recipe.optimizer.clip)
                )
            clear_gradients(self.optimizer, self.packed)

    def parity(self) -> Parity:
        """Run the parity check."""
        return check_parity(
            self.model,
            self.optimizer,
            self.step,
            self.packs,
            self.active,
            self.accelerator,
            held_out_loss=lambda microbatches: evaluate.metrics_from_sums(
                evaluate.held_out_sums(self.model, microbatches, self.accelerator)
            )["held_out_loss"],
            mask_boundaries=True,
        )


def build_run(
    accelerator: Accelerator,
    precision: str = "bf16",
    kind: str = "qwen3",
    *,
    layers: int = 2,
    fused: bool = False,
    recompute: bool = False,
    packs_a_microbatch: int = 1,
    weights: str = "fp32",
    clip: float | None = CLIP,
    seed: int = 1,
    loss: LossSettings | None = None,
    optimizer: str = "adamw",
    histories: Sequence[Tensor] = (),
    **fp8_config: Any,
) -> SmallRun:
    """Assemble a small run as training does.

    Quantization is emulated on a CPU and Transformer Engine's on a GPU. With delayed scaling, the
    histories have recorded the step twice. `histories` is the `copied_state` of an equal run, whose
    step need not be recorded again.
    """
    config = {"model_type": kind, LAYERS.get(kind, "num_hidden_layers"): layers}
    settings = ModelSettings(
        config=(ARCHITECTURES | MIXTURES | UNUSUAL)[kind] | config,
        gradient_checkpointing="full" if recompute else "none",
    )
    engine = "torch"
    if PRECISIONS[precision].quantized:
        engine = "emulation" if accelerator.device.type == "cpu" else "transformer_engine"
    active = active_in(precision, engine, **({"keep_bf16_layers": {"last": 0}} | fp8_config))
    packed, decisions = low_precision_model(
        settings, active, accelerator.device, weights=weights, fused=fused, seed=seed, loss=loss
    )
    recipe = Recipe(
        name="small",
        model={"source": "any"},
        data={"packs": "any"},
        train={"steps": 9},
        loss=loss or LossSettings(),
        weights=weights,
        optimizer={"name": optimizer, "clip": clip, "learning_rate": RATE, "gradients": "fp32"},
        log={"fp8_statistics": 1},
    )
    prepared = prepare(packed, accelerator)
    build = build_muon if optimizer == "muon" else adamw.build_optimizer
    built = build(packed, recipe.optimizer, exact=weights == "bf16_exact")
    packs = random_packs(4 * packs_a_microbatch, seed)
    step = step_of(packs, packs_a_microbatch, accelerator.process_index, accelerator.num_processes)
    run = SmallRun(packed, prepared, built, active, decisions, step, packs, accelerator, recipe)
    if histories:
        packed.context.go_back(histories)
    elif packed.context.state():
        rehearse(run)
    return run


def low_precision_model(
    settings: ModelSettings,
    active: ActivePrecision,
    device: torch.device,
    *,
    weights: str,
    fused: bool,
    seed: int,
    loss: LossSettings | None,
) -> tuple[PackedLanguageModel, dict[str, Decision]]:
    """Return a model with its linears in `active`, and the decision about each linear."""
    stored_in = torch.float32 if weights == "fp32" else torch.bfloat16
    options = {"seed": seed, "device": device, "backend": "packed_sdpa"}
    hf = model.build(settings, load_config(settings), weights=stored_in, **options)
    compute = getattr(torch, active.precision.compute_dtype)
    context = PrecisionContext(compute, make_engines([active], device), active)
    packed = PackedLanguageModel(hf, "packed_sdpa", loss or LossSettings(chunk=256), context)
    blocks = decoder_layers(hf)
    decisions = {}
    if active.precision.quantized:
        decisions = decide(hf, list(blocks.values()), active)
    if fused:
        arithmetic = choose_arithmetic(active, device.type, context, keeps_rotated=False)
        packed.fused = fuse(blocks, {active.name: decisions}, arithmetic)
    convert(hf, decisions, context, packed.fused)
    wrap_layers(
        packed, settings, cast_to=compute if compute != stored_in else None, compile_layers=False
    )
    return packed.train(), decisions


def prepare(packed: PackedLanguageModel, accelerator: Accelerator) -> PackedLanguageModel:
    """Shard `packed` under FSDP2, and allocate its gradient sums."""
    once_a_step = gathers_once_a_step(accelerator)
    if accelerator.is_fsdp2:
        shard(accelerator, packed, packed.context.compute_dtype, once_a_step=once_a_step)
    # Sharding has replaced the parameters.
    stacks = packed.fused.stacks
    if accelerator.is_fsdp2:
        packed.sharding = Sharding(packed, torch.float32, stacks, once_a_step=once_a_step)
    else:
        attach_main_gradients(packed, torch.float32, stacks)
        packed.rank_sums = RankSums(packed.parameters()) if accelerator.num_processes > 1 else None
    return packed


def rehearse(run: SmallRun) -> None:
    """Run two forward and backward passes to fill the amax histories of delayed scaling."""
    for _ in range(2):
        packed_model.forward_backward(run.model, run.step, run.accelerator)
        clear_gradients(run.optimizer, run.model)


def random_packs(count: int, seed: int = 0) -> list[Pack]:
    """Return packs of four documents of random tokens. The first pack ends with padding."""
    draw = np.random.default_rng(seed)
    packs = []
    for number in range(count):
        cuts = np.sort(draw.choice(np.arange(12, LENGTH - 12), 3, replace=False))
        lengths = np.diff([0, *cuts, LENGTH - (9 if number == 0 else 0)])
        tokens = draw.integers(VOCABULARY, size=LENGTH)
        packs.append(Pack(tokens.astype(np.uint32), lengths.astype(np.int32)))
    return packs


def step_of(
    packs: Sequence[Pack], packs_a_microbatch: int, rank: int = 0, ranks: int = 1
) -> StepBatches:
    """Return one process's part of a step."""
    groups = [
        packs[at : at + packs_a_microbatch] for at in range(0, len(packs), packs_a_microbatch)
    ]
    microbatches = [build_microbatch(group, mask_boundaries=True) for group in groups]
    squares = sum(sum_of_squares(pack.lengths) for pack in packs)
    valid_tokens = sum(batch.valid_tokens for batch in microbatches)
    tokens = sum(len(pack.input_ids) for pack in packs)
    return StepBatches(microbatches[rank::ranks], tokens, valid_tokens, squares)
