"""What a run will be, worked out and checked before anything costs time or memory: shapes and counts, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from foundation.errors import InputError
from pretrain.metrics.flops import Shape
from pretrain.metrics.run_record import read_metrics, summary
from pretrain.metrics.trackers import resolve
from pretrain.model import attention
from pretrain.model import huggingface as model
from pretrain.model.conversion import check_shapes
from pretrain.model.distributed import device_of
from pretrain.model.fused.heads import Heads
from pretrain.plan.checks import check_fit, check_model, check_settings
from pretrain.plan.data import Data, check_data, check_samples, check_tokenizer, load_tokenizer, open_data
from pretrain.plan.layer_memory import layers_of
from pretrain.plan.plan import Plan
from pretrain.precision.backends import missing_on
from pretrain.precision.registry import WEIGHT_DTYPES, Precision
from pretrain.precision.selection import ActivePrecision, select_precision
from pretrain.settings import config
from pretrain.settings.recipe import Recipe


@dataclass(frozen=True)
class Job:
    """A recipe that has been found good, and what it stands for on this machine."""

    recipe: Recipe
    active: ActivePrecision
    run_dir: Path
    model_config: PretrainedConfig
    data: Data
    tokenizer: PreTrainedTokenizerBase | None
    backend: attention.Choice
    plan: Plan

    @property
    def precision(self) -> Precision:
        """The effective one: what the device really gets, whatever was asked for."""
        return self.active.precision

    @property
    def compute_dtype(self) -> torch.dtype:
        return getattr(torch, self.precision.compute_dtype)

    @property
    def weight_dtype(self) -> torch.dtype:
        return getattr(torch, WEIGHT_DTYPES[self.recipe.weights])

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be continued: in the precision that it really trains in."""
        effective = {"precision": self.precision.name, "fp8_config": self.active.settings}
        return config.identity_of(self.recipe.model_copy(update=effective), self.data.train.fingerprint)


def prepare_job(
    recipe: Recipe, accelerator: Accelerator, tokens_per_second: float | None = None, *, may_prepare: bool = True
) -> Job:
    """Check everything that can be checked, in the order of what it costs; packs that are missing are prepared if they may be.

    `recipe` names its precision. `tokens_per_second`: the speed at which the plan reckons; without one, what the run folder has
    measured so far. Raises InputError.
    """
    run_dir = config.run_dir_of(recipe)
    resolve(recipe.log.trackers, run_dir=run_dir, project=recipe.log.project)
    active = select_precision(recipe.precision, recipe.fp8_config, missing_on(accelerator.device.type))
    check_settings(recipe, active.precision.name, accelerator.num_processes)
    model_config = model.load_config(recipe.model)
    shapes = model.build_on_meta(model_config, recipe.model.trust_remote_code)
    model.check_architecture(shapes, recipe.data.length, recipe.loss, accelerator.device.type)
    shape, compute_dtype = Shape.of(shapes), getattr(torch, active.precision.compute_dtype)
    check_fit(active, recipe, shape.layers)
    check_shapes(shapes, active)
    heads = Heads(shape.heads, shape.kv_heads, shape.head_dim)
    backend = attention.choose(recipe.model.attention, accelerator.device.type, heads, compute_dtype, recipe.data.length)
    check_model(recipe, shapes, None)  # before packs of this length are prepared; again, with their vocabulary, in the plan
    check_tokenizer(recipe.data, recipe.model, model_config.vocab_size)
    tokenizer = load_tokenizer(recipe.data, recipe.model, needed=bool(recipe.evaluate.samples))
    check_samples(recipe.evaluate.samples, tokenizer)
    data = open_data(recipe.data, is_main_process=accelerator.is_main_process, may_prepare=may_prepare)
    check_data(data, recipe.model, model_config.vocab_size)
    device_name, device_memory = device_of(accelerator)
    plan = Plan.make(
        recipe,
        model=shapes,
        precision=active.precision.name,
        emulated=active.backend == "emulation",
        packs=len(data.train),
        mean_squared=data.mean_squared,
        held_out_packs=data.held_out_packs,
        packs_vocabulary=data.vocabulary,
        world_size=accelerator.num_processes,
        sharded=accelerator.is_fsdp2,
        layers=layers_of(shapes, recipe, active, accelerator.device.type, backend.name),
        device_name=device_name,
        device_memory=device_memory,
        tokens_per_second=tokens_per_second or measured_speed(run_dir),
    )
    return Job(recipe, active, run_dir, model_config, data, tokenizer, backend, plan)


def measured_speed(run_dir: Path) -> float | None:
    """Median tokens/s over all devices of the steps that the run has done so far; None before it has done any."""
    try:
        return summary(read_metrics(run_dir)).get("tokens_per_second")
    except InputError:  # no file yet, or a damaged one, which resuming mends: no reason to refuse that
        return None
