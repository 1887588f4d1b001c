"""Held-out loss and samples. The loss takes the same path as training, so evaluation fits wherever training does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foundation.progress import advance
from packing.batch import Microbatch, evaluation_batches
from pretrain.metrics.run_record import is_evaluation, read_metrics
from pretrain.model.distributed import gathered
from pretrain.model.packed import inputs_of
from pretrain.plan.tokenizer import encoded_prompt
from pretrain.run.assembly import Run


def evaluate(run: Run) -> None:
    """Held-out loss, where packs are held out, and samples, where prompts are set."""
    settings, began = run.job.recipe.evaluate, time.perf_counter()
    if run.job.data.held_out is not None:
        with evaluation_batches(run.job.data.held_out, limit=settings.packs, **run.job.batching(run.accelerator)) as batches:
            figures = held_out_loss(run.assembly.model, batches, run.accelerator)
        record = {"step": run.state.step, "event": "evaluation", **figures}
        run.trackers.log(record)
        run.console.evaluation(record, time.perf_counter() - began)
    with gathered(run.assembly.model):
        for prompt in settings.samples:
            text = sample(run.assembly.hf, run.job.tokenizer, prompt, settings.sample_tokens, run.job.recipe.seed)
            run.console.sample(prompt, text)


def evaluation_turns(run: Run) -> int | None:
    """Microbatches of an evaluation on each rank; None where no packs are held out."""
    if run.job.data.held_out is None:
        return None
    packs = min(run.job.recipe.evaluate.packs or len(run.job.data.held_out), len(run.job.data.held_out))
    return -(-packs // (run.job.plan.microbatch * run.accelerator.num_processes))


def was_evaluated(run: Run) -> bool:
    """Whether the present step's held-out loss stands in metrics.jsonl already; what the main process says counts."""
    if not run.accelerator.is_main_process:
        return False
    return any(is_evaluation(record) and record["step"] == run.state.step for record in read_metrics(run.folder.path))


@torch.no_grad()
def held_out_loss(model: nn.Module, batches: Iterable[Microbatch], accelerator: Accelerator) -> dict[str, float]:
    """Over `batches`, this rank's share of the held-out packs, of which every rank must pass equally many: `held_out_loss`, the
    mean in nats over the `held_out_tokens` valid labels of all ranks, and `held_out_perplexity`.
    """
    total = torch.zeros(2, dtype=torch.float32 if accelerator.device.type == "mps" else torch.float64, device=accelerator.device)
    with ExitStack() as restored:
        restored.callback(model.train, model.training)
        model.eval()
        for batch in batches:
            total[0] += model(**inputs_of(batch, accelerator.device))
            total[1] += batch.valid_tokens
            advance(of="microbatches")
    loss_sum, tokens = accelerator.reduce(total, reduction="sum").tolist()
    loss = loss_sum / max(tokens, 1)
    perplexity = math.exp(min(loss, 700.0))  # a larger one would overflow
    return {"held_out_loss": loss, "held_out_perplexity": perplexity, "held_out_tokens": int(tokens)}


@torch.no_grad()
def sample(hf: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, tokens: int, seed: int) -> str:
    """How the model continues `prompt`, by at most `tokens` tokens at temperature 0.8.

    Runs uncompiled, with transformers' own attention: generation has a cache and one growing document, not packs. Every training
    step seeds its own random numbers, so seeding here does not change them.
    """
    encoded = encoded_prompt(tokenizer, prompt).to(hf.device)
    with ExitStack() as restored, torch.compiler.set_stance("force_eager"):
        restored.callback(hf.train, hf.training)
        restored.callback(hf.set_attn_implementation, hf.config._attn_implementation)
        hf.eval()
        hf.set_attn_implementation("sdpa")
        torch.manual_seed(seed)
        output = hf.generate(
            **encoded,
            max_new_tokens=tokens,
            do_sample=True,
            temperature=0.8,
            top_k=50,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        )
    return tokenizer.decode(output[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
