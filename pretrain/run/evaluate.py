"""Held-out loss and samples. The loss takes the same path as training, so evaluation fits wherever training does."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from foundation.attributes import holding
from foundation.progress import advance
from packing.arrow import Packs
from packing.batch import Microbatch, evaluation_batches
from packing.mixture import MixedPacks
from pretrain.checkpoint.folders import step_folder
from pretrain.checkpoint.state import step_seed
from pretrain.metrics.run_record import is_evaluation, own_evaluations, read_metrics, same_measure
from pretrain.model.distributed import gathered, largest_over_ranks
from pretrain.model.packed import PackedLanguageModel, inputs_of
from pretrain.plan.data import packs_evaluated
from pretrain.plan.preflight import Job
from pretrain.plan.tokenizer import encoded_prompt, positions_of
from pretrain.precision.settings import UNQUANTIZED
from pretrain.run.determinism import any_order
from pretrain.run.running import BestEvaluation, Run

TEMPERATURE, TOP_P = 0.8, 0.95  # of samples: drawn from the likeliest tokens that have this probability together
COLDEST = 1e-4  # a temperature below which FP32 scores divided by it could overflow, and the likeliest token is all there is


def evaluate(run: Run) -> None:
    """Held-out loss, where packs are held out, and samples, where prompts are set. Collective."""
    with run.waited.on("evaluation", "evaluating", "microbatches"):
        if run.job.data.held_out is not None:
            _evaluate_held_out(run)
        if run.job.recipe.evaluate.samples:
            _draw_samples(run)


def evaluate_once(run: Run) -> None:
    """Evaluates, unless the run has ended before, or the same evaluation of the present step is in metrics.jsonl already."""
    done = run.ended
    if run.accelerator.is_main_process and not done:
        lines = [line for line in read_metrics(run.folder.path) if is_evaluation(line) and line["step"] == run.state.step]
        done = any(same_measure(line, measure_of(run)) for line in lines)
    if not largest_over_ranks(run.accelerator, int(done)):
        evaluate(run)


def _evaluate_held_out(run: Run) -> None:
    began = time.perf_counter()
    figures = held_out_figures(run.job, run.assembly.model, run.accelerator)
    record = {"step": run.state.step, "event": "evaluation", **figures, **measure_of(run)}
    run.trackers.log(record)
    run.console.evaluation(record, time.perf_counter() - began)
    run.best = broadcast_object_list([BestEvaluation.after(record, run.best)])[0]  # the main process's


def measure_of(run: Run) -> dict[str, Any]:
    """What the line of an evaluation says that it is of; nothing where no packs are held out."""
    job = run.job
    if job.data.held_out is None:
        return {}
    as_trained = run.assembly.context.evaluates_low or not job.precision.quantized
    return {
        "held_out_fingerprint": job.data.held_out.fingerprint[:16],
        "held_out_packs": sum(most for _, most in evaluated_parts(job).values()),
        "held_out_precision": (job.precision if as_trained else UNQUANTIZED[job.precision.compute_dtype]).name,
    }


def _draw_samples(run: Run) -> None:
    settings, found = run.job.recipe.evaluate, []
    how = {"tokens": settings.sample_tokens, "temperature": TEMPERATURE, "top_p": TOP_P}
    with gathered(run.assembly.model):
        for number, prompt in enumerate(settings.samples):
            seed = seed_of_prompt(run.job.recipe.seed, number)
            text = sample(run.assembly.hf, run.job.tokenizer, prompt, seed=seed, **how)
            run.console.sample(prompt, text)
            found.append({"prompt": prompt, "seed": seed, "text": text})
    run.trackers.log({"step": run.state.step, "event": "samples", **how, "samples": found})


def held_out_figures(job: Job, model: PackedLanguageModel, accelerator: Accelerator) -> dict[str, float]:
    """`held_out_loss` of the held-out packs that the recipe evaluates on; of several sources, each by as large a part of its
    packs, also that of each as `held_out_loss/NAME`. Collective."""
    sums = {}
    for name, (packs, most) in evaluated_parts(job).items():
        with evaluation_batches(packs, limit=most, **job.batching(accelerator)) as batches:
            sums[name] = held_out_sums(model, batches, accelerator)
    by_source = {f"held_out_loss/{name}": figures_of(found)["held_out_loss"] for name, found in sums.items()}
    return figures_of(sum(sums.values())) | (by_source if len(sums) > 1 else {})


def evaluated_parts(job: Job) -> dict[str, tuple[Packs, int]]:
    """Returns for each source, by name, its held-out packs and how many of them are evaluated on."""
    held_out, limit = job.data.held_out, job.recipe.evaluate.packs
    parts = held_out.parts if isinstance(held_out, MixedPacks) else {"": held_out}
    return {name: (packs, packs_evaluated(len(packs), len(held_out), limit)) for name, packs in parts.items()}


def best_so_far(run: Run) -> BestEvaluation | None:
    """The best evaluation in metrics.jsonl whose checkpoint still exists, where evaluations to come are of the same. The file
    holds none after the present step. Collective."""
    best = None
    if run.accelerator.is_main_process and run.job.recipe.checkpoint.best:
        for record in own_evaluations(read_metrics(run.folder.path)):
            if step_folder(run.folder.checkpoints, record["step"]).exists():
                best = BestEvaluation.after(record, best)
    if best and not same_measure(best.measure, measure_of(run)):
        if not run.state.finished:
            told = "on other packs, or in another precision, than those to come"
            run.console.notice(f"the best evaluation so far, after step {best.step}, is {told}: the best begins anew")
        best = None
    return broadcast_object_list([best])[0]


def is_best(run: Run) -> bool:
    """Whether the present step has the best evaluation, and its checkpoint is to be kept for that."""
    return run.job.recipe.checkpoint.best and run.best is not None and run.best.step == run.state.step


@torch.no_grad()
def held_out_sums(model: PackedLanguageModel, batches: Iterable[Microbatch], accelerator: Accelerator) -> Tensor:
    """Evaluates on `batches`, this rank's share of held-out packs, of which every rank must pass equally many. Returns sums over
    all ranks, FP64: the cross-entropy in nats, the valid labels, and where the loss has a penalty also that."""
    head = model.hf.get_output_embeddings()
    head.take_parts()  # those of earlier forwards do not count
    total = torch.zeros(3 if head.settings.penalty else 2, dtype=torch.float64, device=accelerator.device)
    with ExitStack() as restored:
        restored.callback(model.train, model.training)
        model.eval()
        for batch in batches:
            total[0] += model(**inputs_of(batch, accelerator.device))
            total[1] += batch.valid_tokens
            advance(of="microbatches")
    if (parts := head.take_parts()) is not None:
        total[2] = parts[1]
    return accelerator.reduce(total, reduction="sum")


def figures_of(sums: Tensor) -> dict[str, float]:
    """`held_out_loss`, the mean in nats over the `held_out_tokens`, `held_out_perplexity`, and of a penalty `held_out_penalty`,
    which is no part of the two."""
    loss_sum, tokens, *penalty = sums.tolist()
    loss = loss_sum / max(tokens, 1)
    perplexity = math.exp(min(loss, 700.0))  # a larger one would overflow
    figures = {"held_out_loss": loss, "held_out_perplexity": perplexity, "held_out_tokens": int(tokens)}
    return figures | {"held_out_penalty": penalty[0] / max(tokens, 1)} if penalty else figures


def seed_of_prompt(seed: int, number: int) -> int:
    """Each prompt has its own, so that one text does not begin like the other; the same at every evaluation."""
    return step_seed(seed, number, 0)


@torch.no_grad()
def sample(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    tokens: int,
    seed: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
) -> str:
    """How the model continues `prompt`, by at most `tokens` tokens and as many as it has positions for.

    Drawn from the likeliest tokens that have probability `top_p` together, after all were raised to 1 / `temperature`; at a
    temperature of 0, or near it, always the likeliest one. Of how a published model wants to generate, only the tokens that end a
    text count. InputError where the prompt leaves no position free.

    Runs uncompiled, with transformers' own attention: generation has a cache and one growing document, not packs. Every training
    step seeds its own random numbers, so seeding here does not change them. On a GPU a sample need not repeat, whatever
    `deterministic` says: its sums of probabilities have no fixed order there.
    """
    encoded = encoded_prompt(tokenizer, prompt, hf.config).to(hf.device)
    positions = positions_of(hf.config)
    tokens = min(tokens, positions - encoded["input_ids"].shape[1]) if positions else tokens
    drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature > COLDEST else {}
    alone = GenerationConfig(
        max_new_tokens=tokens,
        eos_token_id=hf.generation_config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **drawn,
    )
    with ExitStack() as restored, torch.compiler.set_stance("force_eager"), any_order():
        restored.callback(hf.train, hf.training)
        restored.callback(hf.set_attn_implementation, hf.config._attn_implementation)
        hf.eval()
        hf.set_attn_implementation("sdpa")
        torch.manual_seed(seed)
        restored.enter_context(holding(hf, generation_config=alone))  # as an argument it would be completed by the model's own
        output = hf.generate(**encoded)
    return tokenizer.decode(output[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
