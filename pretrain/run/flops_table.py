"""`python -m pretrain flops`: print the training FLOPs of a model by several definitions."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from foundation.units import markdown, operations, percent
from pretrain.metrics.flops import FORMULAS, ModelFlops, attention_to_ffn_ratio, ours
from pretrain.model.huggingface import build_on_meta, load_config
from pretrain.plan.rendering import shape_lines
from pretrain.run.tokenizer import with_tokens
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import ModelSettings

# Map each formula to its meaning in one line. docs/planning.md derives the formulas.
MEANINGS = {
    "ours": "all matrix products, with causal attention (the MFU of runs uses this)",
    "palm": "6N + 12LHQT, N: parameters without embeddings and a tied head",
    "nanogpt": "6N + 12LHQT, N: all parameters except learned positions",
    "combined_formula": "llm_TII, for dense models: layers, norms, head and rotary embedding",
    "component_summation_v2025": "llm_TII, for dense models: layers, norms and head",
    "megatron": "Megatron-LM, for dense models: all matrix products",
}
# Sequence lengths in tokens if the command line has neither a recipe nor --length.
LENGTHS = (2048, 4096)


def main(options: argparse.Namespace) -> int:
    """Print a table of the model's FLOPs per token by each definition, and return 0."""
    lengths: Sequence[int] = LENGTHS
    settings = ModelSettings(source=options.model)
    if options.model.endswith((".yaml", ".yml")):
        recipe = load_recipe(Path(options.model))
        settings = with_tokens(recipe.model, recipe.data, None)
        lengths = [recipe.data.length]
    lengths = options.length or lengths
    flops = ModelFlops.of(build_on_meta(load_config(settings)))

    print("\n".join(shape_lines(flops)), end="\n\n")
    rows = [
        [_cell(per_token(flops, length), ours(flops, length)) for length in lengths]
        for per_token in FORMULAS.values()
    ]
    print(
        markdown(
            ("FLOPs per token, by formula", *(f"T = {length:,}" for length in lengths)),
            [(name, *cells) for name, cells in zip(FORMULAS, rows, strict=True)],
        )
    )
    ratios = [f"{attention_to_ffn_ratio(flops, length):.2f}" for length in lengths]
    print(
        "\nIn parentheses: the ratio to `ours`. The other definitions count attention that is\n"
        "not causal, which has twice the FLOPs. T: tokens of a sequence, L: layers, H: heads,\n"
        "Q: size of a head. docs/planning.md derives each definition.\n"
    )
    print("\n".join(f"{name:<26} {meaning}" for name, meaning in MEANINGS.items()))
    print(f"{'attention / MLP':<26} {', '.join(ratios)} (attention_to_ffn_ratio of llm_TII)")
    if flops.uncounted:
        print(f"\nwarning: {flops.left_out}")
    return 0


def _cell(count: float, reference: float) -> str:
    """Return a cell of the table: `count`, and in parentheses its ratio to `reference`.

    count: FLOPs per token by one definition.
    reference: FLOPs per token by the definition of this project.
    """
    return f"{operations(count)} ({percent(count / reference)})"
