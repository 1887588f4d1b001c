"""`python -m pretrain flops`: what a model costs to train, a token, by every definition in use, beside each other.

MODEL is a recipe, a folder or a name of a model. Nothing of its weights is read. docs/planning.md derives each definition.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from foundation.command import CommandParser, number
from foundation.errors import InputError
from foundation.units import TERA, count, markdown, operations, percent
from pretrain.metrics.flops import FORMULAS, ModelFlops, attention_to_ffn_ratio, ours
from pretrain.metrics.peaks import peak
from pretrain.model import huggingface as model
from pretrain.plan.tokenizer import with_tokens
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import ModelSettings

LENGTHS = (2048, 4096)  # for a model without a recipe


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="python -m pretrain flops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a recipe (.yaml), or what `model.source` takes")
    add("--length", type=number(1, whole=True), nargs="+", metavar="T", help="of a sequence, in tokens; default: the recipe's")
    add("--tokens-per-second", type=number(1), metavar="N", help="also TFLOP/s, and MFU with --device")
    add("--device", metavar="NAME", help='as drivers name it ("NVIDIA H200"): its BF16 peak is 100 %%')
    options = parser.parse_intermixed_args(arguments)
    name, lengths = options.model, LENGTHS
    settings = ModelSettings(source=name)
    if name.endswith((".yaml", ".yml")):
        recipe = load_recipe(Path(name))
        settings, lengths = with_tokens(recipe.model, recipe.data, None), [recipe.data.length]
    flops = ModelFlops.of(model.build_on_meta(model.load_config(settings)))
    print(table(flops, options.length or lengths, options.tokens_per_second, options.device))
    return 0


def table(flops: ModelFlops, lengths: Sequence[int], tokens_per_second: float | None = None, device: str | None = None) -> str:
    """A line a definition, for each of `lengths` a column: FLOPs a token and the share of ours, and with `tokens_per_second` what
    that reaches. InputError for a device whose peak is not known."""
    shape, known = flops.shape, peak(device, "bf16") if device else None
    if device and known is None:
        raise InputError(f"--device {device}: no BF16 peak of it is known; pretrain/metrics/peaks.py has those that are")

    def cell(value: float, own: float) -> str:
        text = f"{operations(value)} ({percent(value / own)})"
        if tokens_per_second:
            tflops = value * tokens_per_second / TERA
            text += f": {tflops:,.4g} TFLOP/s" + (f", {percent(tflops / known)}" if known else "")
        return text

    rows = [
        (formula.key, *(cell(formula.per_token(flops, length), ours(flops, length)) for length in lengths), formula.says)
        for formula in FORMULAS
    ]
    without = flops.parameters - flops.embedding_parameters
    ratios = ", ".join(f"{attention_to_ffn_ratio(flops, length):.2f}" for length in lengths)
    lines = [
        f"{count(flops.parameters)} parameters, {count(without)} without embeddings; {shape.layers} layers, hidden "
        f"{shape.hidden:,}, {shape.heads} heads of {shape.head_dim} ({shape.kv_heads} for keys and values), MLP "
        f"{shape.feed_forward:,}{' gated' if flops.gated else ''}, vocabulary {shape.vocabulary:,}",
        markdown(("a token", *(f"T = {length:,}" for length in lengths), "definition"), rows),
        f"attention_to_ffn_ratio (llm_TII v3): {ratios}",
    ]
    return "\n\n".join([*lines, f"warning: {flops.left_out}"] if flops.uncounted else lines)
