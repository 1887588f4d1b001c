"""Held-out loss and samples, through the very path that training takes, so that evaluation fits wherever training does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from packing.batch import Microbatch
from pretrain.model.packed import inputs_of
from pretrain.plan.data import encoded_prompt


@dataclass(frozen=True)
class HeldOut:
    """`loss`: mean cross-entropy in nats over all `tokens` valid held-out labels of all ranks."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # beyond, a float ends

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

    Runs uncompiled, with transformers' own attention: generation has a cache and one growing document, not packs. Training draws
    its own randomness anew in every step, so seeding here changes nothing there.
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
