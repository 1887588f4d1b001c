"""Generate text with a model: in evaluations of a run, and by `python -m pretrain sample`."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

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

# Below this temperature the likeliest token is taken: dividing FP32 scores by it could overflow.
COLDEST = 1e-4


def draw_samples(run: Run) -> None:
    """Continue the recipe's prompts, and record the texts. Collective."""
    samples = []
    tokenizer: Any = run.job.tokenizer  # a recipe with prompts has one
    how = {"tokens": TOKENS, "temperature": TEMPERATURE, "top_p": TOP_P}
    with gathered(run.assembly.model):
        for number, prompt in enumerate(run.job.recipe.evaluate.samples):
            # Each prompt has a seed of its own. Otherwise texts would begin alike.
            seed = step_seed(run.job.recipe.seed, number, 0)
            text = sample(run.assembly.hf, tokenizer, prompt, TOKENS, TEMPERATURE, TOP_P, seed=seed)
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
    """Return the continuation of `prompt`, without the prompt.

    tokens: the largest number of new tokens. The model's positions may allow fewer.
    temperature: near 0, the likeliest token is always taken.
    top_p: sample from the likeliest tokens whose probabilities sum to this.

    Of the model's generation config only the tokens that end a text count. Raises InputError if the
    prompt leaves no position free.

    The model runs uncompiled, with transformers' own attention: generation has a cache and one
    growing document, not packs. Every training step seeds its own random numbers, so seeding here
    does not change the training. On a GPU a sample may differ from run to run even under
    `deterministic`: its sums of probabilities (`cumsum`) have no fixed order there.
    """
    encoded = encoded_prompt(tokenizer, prompt, hf.config).to(hf.device)
    length = encoded["input_ids"].shape[1]
    positions = positions_of(hf.config) or length + tokens
    drawn: dict[str, Any] = {}
    if temperature > COLDEST:
        drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    pad = tokenizer.pad_token_id
    generation = GenerationConfig(
        max_new_tokens=min(tokens, positions - length),
        eos_token_id=hf.generation_config.eos_token_id,
        pad_token_id=tokenizer.eos_token_id if pad is None else pad,
        **drawn,
    )
    deterministic = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as restored, torch.compiler.set_stance("force_eager"):
        restored.callback(torch.use_deterministic_algorithms, deterministic)
        restored.callback(hf.train, hf.training)
        restored.callback(hf.set_attn_implementation, hf.config._attn_implementation)
        torch.use_deterministic_algorithms(False)
        hf.eval()
        hf.set_attn_implementation("sdpa" if hf._supports_sdpa else "eager")
        torch.manual_seed(seed)
        # As an argument, the model's own generation config would complete it.
        restored.enter_context(overridden(hf, generation_config=generation))
        output = cast(Any, hf).generate(**encoded)
    return str(tokenizer.decode(output[0, length:], skip_special_tokens=True))


def main(options: argparse.Namespace) -> int:
    """Print a continuation of each prompt, and return 0. Raises InputError."""
    prompts = [*options.prompts, *options.prompt]
    if not prompts:
        raise InputError(
            "command line: no prompt is given; write a text behind the folder, or '' to begin one"
        )
    if not (options.temperature >= 0 and 0 < options.top_p <= 1):
        raise InputError(
            f"command line: --temperature {options.temperature:g} --top-p {options.top_p:g}: give "
            "a temperature of 0 or more, and a probability above 0 and up to 1"
        )
    hf, tokenizer = load(options.folder)
    console = Console(0)
    for number, prompt in enumerate(prompts):
        console.sample(
            prompt,
            sample(
                hf,
                tokenizer,
                prompt,
                options.tokens,
                options.temperature,
                options.top_p,
                seed=step_seed(options.seed, number, 0),
            ),
        )
    return 0


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer at `folder`, or in its `final/`, ready to generate.

    Raises InputError if it has none.
    """
    transformers_logging.disable_progress_bar()
    if not folder.is_dir():
        raise InputError(
            f"{folder}: does not exist; name the folder of a run, as runs/my-fp32-fp32, or of a "
            "model"
        )
    if (folder / "final").is_dir():
        folder = folder / "final"
    if not (folder / "config.json").is_file() or not (folder / "tokenizer_config.json").is_file():
        # Without a tokenizer's files transformers would make one that knows no word.
        raise InputError(
            f"{folder}: is not the folder of a model with its tokenizer; `python -m pretrain "
            "export RUN_OR_CHECKPOINT OUT` makes one"
        )
    load_config(ModelSettings(source=str(folder)))  # refuses a model that brings code of its own
    # eager: the attention that a foreign config.json names may be a kernel of the hub.
    hf: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", attn_implementation="eager", trust_remote_code=False
    )
    hf.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return hf, tokenizer_in(str(folder))
