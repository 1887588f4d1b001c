"""How a model continues a text: the samples of a run's evaluations, and `python -m pretrain sample`."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from foundation.errors import InputError
from foundation.overrides import overridden
from pretrain.checkpoint.state import step_seed
from pretrain.metrics.console import Console
from pretrain.model.huggingface import load_config
from pretrain.model.sharding import gathered
from pretrain.plan.tokenizer import encoded_prompt, positions_of, tokenizer_in
from pretrain.run.run import Run
from pretrain.settings.commands import TEMPERATURE, TOKENS, TOP_P
from pretrain.settings.recipe import ModelSettings

# a temperature below which FP32 scores divided by it could overflow, and the likeliest token is all
# there is
COLDEST = 1e-4


def draw_samples(run: Run) -> None:
    """Continue the recipe's prompts, and record the texts. Collective."""
    settings, samples = run.job.recipe.evaluate, []
    how = {"tokens": TOKENS, "temperature": TEMPERATURE, "top_p": TOP_P}
    with gathered(run.assembly.model):
        for number, prompt in enumerate(settings.samples):
            # its own, or one text would begin like the other
            seed = step_seed(run.job.recipe.seed, number, 0)
            text = sample(run.assembly.hf, run.job.tokenizer, prompt, seed=seed, **how)
            run.console.sample(prompt, text)
            samples.append({"prompt": prompt, "seed": seed, "text": text})
    run.trackers.log({"step": run.state.step, "event": "samples", **how, "samples": samples})


@torch.no_grad()
def sample(
    hf: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    tokens: int,
    temperature: float,
    top_p: float,
    *,
    seed: int,
) -> str:
    """How the model continues `prompt`, by at most `tokens` tokens and as many as it has positions for.

    Drawn from the likeliest tokens that have probability `top_p` together, after all were raised to 1 / `temperature`; at a
    temperature of 0, or near it, always the likeliest one. Of how a published model wants to generate, only the tokens that end a
    text count. InputError where the prompt leaves no position free.

    Runs uncompiled, with transformers' own attention: generation has a cache and one growing document, not packs. Every training
    step seeds its own random numbers, so seeding here does not change them. On a GPU a sample need not repeat, whatever
    `deterministic` says: its sums of probabilities have no fixed order there (`cumsum`).
    """
    encoded = encoded_prompt(tokenizer, prompt, hf.config).to(hf.device)
    positions = positions_of(hf.config)
    tokens = min(tokens, positions - encoded["input_ids"].shape[1]) if positions else tokens
    drawn = (
        {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        if temperature > COLDEST
        else {}
    )
    alone = GenerationConfig(
        max_new_tokens=tokens,
        eos_token_id=hf.generation_config.eos_token_id,
        pad_token_id=tokenizer.pad_token_id
        if tokenizer.pad_token_id is not None
        else tokenizer.eos_token_id,
        **drawn,
    )
    with ExitStack() as restored, torch.compiler.set_stance("force_eager"):
        restored.callback(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
        )
        restored.callback(hf.train, hf.training)
        restored.callback(hf.set_attn_implementation, hf.config._attn_implementation)
        torch.use_deterministic_algorithms(False)
        hf.eval()
        hf.set_attn_implementation("sdpa" if hf._supports_sdpa else "eager")
        torch.manual_seed(seed)
        # as an argument it would be completed by the model's own
        restored.enter_context(overridden(hf, generation_config=alone))
        output = hf.generate(**encoded)
    return tokenizer.decode(output[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)


def main(options: argparse.Namespace) -> int:
    if not (prompts := [*options.prompts, *options.prompt]):
        raise InputError(
            "command line: no prompt is given; write a text behind the folder, or '' to begin one"
        )
    if not (options.temperature >= 0 and 0 < options.top_p <= 1):
        given = f"--temperature {options.temperature:g} --top-p {options.top_p:g}"
        raise InputError(
            f"command line: {given}: give a temperature of 0 or more, and a probability above 0 and up to 1"
        )
    hf, tokenizer = load(options.folder)
    hf.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    console, how = (
        Console(0),
        {"tokens": options.tokens, "temperature": options.temperature, "top_p": options.top_p},
    )
    for index, prompt in enumerate(prompts):
        console.sample(
            prompt, sample(hf, tokenizer, prompt, seed=step_seed(options.seed, index, 0), **how)
        )
    return 0


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and the tokenizer at `folder`, or in its `final/`. InputError where there is none."""
    transformers_logging.disable_progress_bar()
    folder = folder / "final" if (folder / "final").is_dir() else folder
    if not (folder / "config.json").is_file() or not (folder / "tokenizer_config.json").is_file():
        # Without a tokenizer's files transformers would make one that knows no word.
        raise InputError(
            f"{folder}: is no folder of a model with its tokenizer; `python -m pretrain export RUN_OR_CHECKPOINT OUT` makes one"
            if folder.is_dir()
            else f"{folder}: there is no such folder; name a run's, as runs/my-fp32-fp32, or a model's"
        )
    load_config(ModelSettings(source=str(folder)))  # refuses a model that brings code of its own
    # eager: the attention that a foreign config.json names may be a kernel of the hub.
    hf = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype="auto",
        attn_implementation="eager",
        trust_remote_code=False,
    )
    return hf, tokenizer_in(str(folder))
