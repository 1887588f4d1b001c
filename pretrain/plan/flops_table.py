"""`python -m pretrain flops`: what a model costs to train, a token, by every definition in use, beside each other."""

from __future__ import annotations

import argparse
from pathlib import Path

from foundation.units import TERA, markdown, operations, percent
from pretrain.metrics.flops import FORMULAS, ModelFlops, attention_to_ffn_ratio, ours
from pretrain.metrics.peaks import peak
from pretrain.model import huggingface as model
from pretrain.plan.rendering import shape_lines
from pretrain.plan.targets import Target
from pretrain.plan.tokenizer import with_tokens
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import ModelSettings

LENGTHS = (2048, 4096)  # for a model without a recipe


def main(options: argparse.Namespace) -> int:
    speed, target = options.tokens_per_second, Target.parse(options.on)
    most = target.count * peak(target.name, "bf16") * TERA  # FLOPs a second
    lengths, settings = LENGTHS, ModelSettings(source=options.model)
    if options.model.endswith((".yaml", ".yml")):
        recipe = load_recipe(Path(options.model))
        settings, lengths = with_tokens(recipe.model, recipe.data, None), [recipe.data.length]
    flops = ModelFlops.of(model.build_on_meta(model.load_config(settings)))
    lengths, rows = options.length or lengths, []
    dense = (
        []
        if flops.expert_weights
        else [f"MLP {flops.shape.feed_forward:,}{' gated' if flops.gated else ''}"]
    )
    print("\n".join([*shape_lines(flops), *dense]), end="\n\n")
    for name, per_token in FORMULAS.items():
        counts = {length: per_token(flops, length) for length in lengths}
        cells = [
            f"{operations(value)} ({percent(value / ours(flops, length))})"
            for length, value in counts.items()
        ]
        if speed:
            cells = [
                f"{cell}: MFU {percent(n * speed / most)}"
                for cell, n in zip(cells, counts.values(), strict=True)
            ]
        rows.append((name, *cells))
    print(markdown(("a token", *(f"T = {length:,}" for length in lengths)), rows))
    ratios = ", ".join(f"{attention_to_ffn_ratio(flops, length):.2f}" for length in lengths)
    print(f"\nattention_to_ffn_ratio (llm_TII v3): {ratios}")
    if speed and ours(flops, min(lengths)) * speed > most:
        print(f"\nwarning: {speed:,.0f} tokens/s are more than {target} can compute")
    if flops.expert_weights:
        print(
            "\nwarning: llm_TII's and Megatron-LM's definitions are of dense models, and this is a mixture of experts"
        )
    if flops.uncounted:
        print(f"\nwarning: {flops.left_out}")
    return 0
