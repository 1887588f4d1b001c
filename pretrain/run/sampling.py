"""Generate text with a model, in evaluations of a run and for `python -m pretrain sample`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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

from foundation.errors import as_input_error
from foundation.overrides import overridden
from pretrain.checkpoint.state import step_seed
from pretrain.metrics.console import Console
from pretrain.model.configuration import load_config
from pretrain.model.hybrids.sizes import layers_without_attention
from pretrain.model.scores import changed_scores
from pretrain.model.sharding import gathered
from pretrain.run.command_checks import model_folder
from pretrain.run.run import Run
from pretrain.run.tokenizer import encoded_prompt, positions_of, tokenizer_in
from pretrain.settings.commands import TEMPERATURE, TOKENS, TOP_P
from pretrain.settings.recipe import ModelSettings


def draw_samples(run: Run) -> None:
    """Generate a text for each prompt of the recipe. Print the texts and log them.

    All ranks must call this function.
    """
    samples = []
    # The tokenizer is not None, because the recipe has prompts.
    tokenizer: Any = run.job.tokenizer
    settings = {"tokens": TOKENS, "temperature": TEMPERATURE, "top_p": TOP_P}
    with gathered(run.assembly.model):
        for number, prompt in enumerate(run.job.recipe.evaluate.samples):
            seed = seed_of_prompt(run.job.recipe.seed, number)
            text = sample(run.assembly.hf, tokenizer, prompt, TOKENS, TEMPERATURE, TOP_P, seed=seed)
            run.console.sample(prompt, text)
            samples.append({"prompt": prompt, "seed": seed, "text": text})
    run.trackers.log({"step": run.state.step, "event": "samples", **settings, "samples": samples})


def seed_of_prompt(seed: int, number: int) -> int:
    """Return the seed of prompt `number`, from the seed of the run or of the command.

    Each prompt has a seed of its own. With one seed, similar prompts would get similar texts.
    """
    return step_seed(seed, step=number, rank=0)


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
    """Return the text that the model generates after `prompt`, without the prompt.

    tokens: the largest number of new tokens. Fewer tokens are generated if the model generates a
        token that ends the text, or if the model has no more positions.
    temperature: the temperature of sampling. At 0, the most likely token is always chosen.
    top_p: the sum of probabilities for nucleus sampling. Each token is sampled from the smallest
        set of most likely tokens whose probabilities sum to at least this value.
    seed: the seed of the random numbers.

    The model's generation config is ignored, except for the tokens that end a text. Raises
    InputError if the prompt fills all positions of the model.

    Every training step sets its own random seed, so `seed` does not change the training. On a GPU a
    sample may differ from run to run even under `deterministic`, because torch's `cumsum` of the
    probabilities has no fixed order of additions there.
    """
    encoded = encoded_prompt(tokenizer, prompt, hf.config).to(hf.device)
    length = encoded["input_ids"].shape[1]
    positions = positions_of(hf.config) or length + tokens
    sampling: dict[str, Any] = {}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    pad = tokenizer.pad_token_id
    generation = GenerationConfig(
        max_new_tokens=min(tokens, positions - length),
        # transformers has no cache for models without attention, such as the default Bamba.
        use_cache=layers_without_attention(hf) < hf.config.get_text_config().num_hidden_layers,
        eos_token_id=hf.generation_config.eos_token_id,
        pad_token_id=tokenizer.eos_token_id if pad is None else pad,
        **sampling,
    )
    # Replace the model's generation config. A config that is passed as an argument would be
    # completed with values of the model's config.
    with _generating(hf), overridden(hf, generation_config=generation):
        torch.manual_seed(seed)
        output = cast(Any, hf).generate(**encoded)
    return str(tokenizer.decode(output[0, length:], skip_special_tokens=True))


@contextmanager
def _generating(hf: PreTrainedModel) -> Iterator[None]:
    """Context manager that lets the model generate text, and then restores its state.

    The model runs without torch.compile and with the attention of transformers, because packed
    attention supports neither a cache nor a growing document.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    with ExitStack() as restored, torch.compiler.set_stance("force_eager"):
        restored.callback(torch.use_deterministic_algorithms, deterministic)
        restored.callback(hf.train, hf.training)
        restored.callback(hf.set_attn_implementation, hf.config._attn_implementation)
        torch.use_deterministic_algorithms(False)
        hf.eval()
        # torch's own attention would ignore caps and sinks.
        has_sdpa = hf._supports_sdpa and not changed_scores(hf)
        hf.set_attn_implementation("sdpa" if has_sdpa else "eager")
        yield


def main(options: argparse.Namespace) -> int:
    """Generate and print a text for each prompt of the command line, and return 0.

    Raises InputError if the model cannot be loaded.
    """
    hf, tokenizer = load(options.folder)
    console = Console(0)
    for number, prompt in enumerate(options.prompts):
        console.sample(
            prompt,
            sample(
                hf,
                tokenizer,
                prompt,
                options.tokens,
                options.temperature,
                options.top_p,
                seed=seed_of_prompt(options.seed, number),
            ),
        )
    return 0


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and the tokenizer in `folder`, ready to generate.

    folder: the folder of a Hugging Face model, or of a run, whose model is in `final/`.

    Raises InputError if there is no model or no tokenizer.
    """
    transformers_logging.disable_progress_bar()
    folder = model_folder(folder)
    # `load_config` refuses a model whose folder contains its own Python code.
    load_config(ModelSettings(source=str(folder)))
    # Set the attention here, because config.json may choose a kernel that is downloaded from the
    # hub.
    with as_input_error((ImportError,), f"{folder}: a package for its weights is missing"):
        hf: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation="eager", trust_remote_code=False
        )
    hf.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    return hf, tokenizer_in(str(folder))
