"""Held-out loss and samples. The loss takes the same path as training, so evaluation fits wherever training does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from packing.batch import Microbatch, evaluation_batches
from pretrain.metrics.run_record import is_evaluation, read_metrics
from pretrain.model.distributed import gathered
from pretrain.model.huggingface import inputs_of
from pretrain.plan.tokenizer import encoded_prompt
from pretrain.run.assembly import Run


@dataclass(frozen=True)
class HeldOut:
    """`loss`: mean cross-entropy in nats over all `tokens` valid held-out labels of all ranks."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # a larger one would overflow

    def record(self, step: int) -> dict[str, Any]:
        """Its line of `metrics.jsonl`."""
        return {
            "step": step,
            "event": "evaluation",
            "held_out_loss": self.loss,
            "held_out_perplexity": self.perplexity,
            "held_out_tokens": self.tokens,
        }


@dataclass(frozen=True)
class Sample:
    prompt: str
    continuation: str


def evaluate(run: Run) -> None:
    """Held-out loss, where packs are held out, and samples, where prompts are set."""
    settings, began = run.job.recipe.evaluate, time.perf_counter()
    if run.job.data.held_out is not None:
        with evaluation_batches(run.job.data.held_out, limit=settings.packs, **run.job.batching(run.accelerator)) as batches:
            record = held_out_loss(run.assembly.model, batches, run.accelerator).record(run.state.step)
        run.trackers.log(record)
        run.console.evaluation(record, time.perf_counter() - began)
    with gathered(run.assembly.model):
        for text in sample(run.assembly.hf, run.job.tokenizer, settings.samples, settings.sample_tokens, run.job.recipe.seed):
            run.console.sample(text.prompt, text.continuation)


def was_evaluated(run: Run) -> bool:
    """Whether the present step's held-out loss stands in metrics.jsonl already; what the main process says counts."""
    if not run.accelerator.is_main_process:
        return False
    return any(is_evaluation(record) and record["step"] == run.state.step for record in read_metrics(run.folder.path))


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Iterable[Microbatch], accelerator: Accelerator) -> HeldOut:
    """The loss over `batches`, this rank's share of the held-out packs; every rank must pass equally many."""
    total = torch.zeros(2, dtype=torch.float32 if accelerator.device.type == "mps" else torch.float64, device=accelerator.device)
    with _evaluating(model):
        for batch in batches:
            total[0] += model(**inputs_of(batch, accelerator.device))
            total[1] += batch.valid_tokens
    loss_sum, tokens = accelerator.reduce(total, reduction="sum").tolist()
    return HeldOut(loss=loss_sum / max(tokens, 1), tokens=int(tokens))


@torch.no_grad()
def sample(
    hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompts: Iterable[str], tokens: int, seed: int
) -> Iterator[Sample]:
    """Continue each prompt by at most `tokens` tokens at temperature 0.8; yields samples.

    Runs uncompiled, with transformers' own attention: generation has a cache and one growing document, not packs. Every training
    step seeds its own random numbers, so seeding here does not change them.
    """
    for prompt in prompts:
        encoded = encoded_prompt(tokenizer, prompt).to(hf.device)
        with _evaluating(hf), _plain_attention(hf), torch.compiler.set_stance("force_eager"):
            torch.manual_seed(seed)
            output = hf.generate(
                **encoded,
                max_new_tokens=tokens,
                do_sample=True,
                temperature=0.8,
                top_k=50,
                pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            )
        yield Sample(prompt, tokenizer.decode(output[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True))


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _plain_attention(hf: PreTrainedModel) -> Iterator[None]:
    packed = hf.config._attn_implementation
    hf.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        hf.set_attn_implementation(packed)
