"""`python -m pretrain flops`: what a model costs to train, a token, by every definition in use, beside each other.

MODEL is a recipe, a folder or a name of a model. Nothing of its weights is read. docs/planning.md derives each definition.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from foundation.command import CommandParser, number
from foundation.errors import InputError
from foundation.tables import markdown
from foundation.units import TERA, count, operations, percent
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
    parser.add_argument("model", metavar="MODEL", help="a recipe (.yaml), or what `model.source` takes")
    parser.add_argument(
        "--length", type=number(1, whole=True), nargs="+", metavar="T", help="of a sequence, in tokens; default: the recipe's"
    )
    parser.add_argument("--tokens", type=number(1), metavar="N", help="also the FLOPs of so many tokens, 82e9 say")
    parser.add_argument("--tokens-per-second", type=number(1), metavar="N", help="also TFLOP/s, and MFU with --device")
    parser.add_argument("--device", metavar="NAME", help='as drivers name it ("NVIDIA H200"): its BF16 peak is 100 %%')
    options = parser.parse_intermixed_args(arguments)
    flops, lengths = flops_of(options.model)
    print(table(flops, options.length or lengths, options.tokens, options.tokens_per_second, options.device))
    return 0


def flops_of(name: str) -> tuple[ModelFlops, list[int]]:
    """The model's count, and the lengths to show; InputError where there is no such model or recipe, and where a vocabulary is to
    be that of a tokenizer that is not there."""
    recipe = load_recipe(Path(name)) if name.endswith((".yaml", ".yml")) else None
    settings = recipe.model if recipe else ModelSettings(source=name)
    if recipe:
        settings = with_tokens(settings, recipe.data, None)
    flops = ModelFlops.of(model.build_on_meta(model.load_config(settings)))
    return flops, [recipe.data.length] if recipe else list(LENGTHS)


def table(
    flops: ModelFlops,
    lengths: Sequence[int],
    tokens: float | None = None,
    tokens_per_second: float | None = None,
    device: str | None = None,
) -> str:
    """A line a definition, for each of `lengths` a column; InputError for a device whose peak is not known."""
    shape, known = flops.shape, peak(device, "bf16") if device else None
    if device and known is None:
        raise InputError(f"--device {device}: no BF16 peak of it is known; pretrain/metrics/peaks.py has those that are")
    without = flops.parameters - flops.embedding_parameters
    lines = [
        f"{count(flops.parameters)} parameters, {count(without)} without embeddings; {shape.layers} layers, hidden "
        f"{shape.hidden:,}, {shape.heads} heads of {shape.head_dim} ({shape.kv_heads} for keys and values), MLP "
        f"{shape.feed_forward:,}{' gated' if flops.gated else ''}, vocabulary {shape.vocabulary:,}"
    ]

    def section(title: str, cell: Callable[[float, float], str]) -> None:
        """Adds a table of each definition's FLOPs a token as `cell` writes them; it is given ours too."""
        rows = [
            (formula.key, *(cell(formula.per_token(flops, length), ours(flops, length)) for length in lengths))
            for formula in FORMULAS
        ]
        lines.extend(["", markdown((title, *(f"T = {length:,}" for length in lengths)), rows)])

    section("a token", lambda value, _: operations(value))
    section("as a share of ours", lambda value, own: percent(value / own))
    if tokens:
        section(f"{count(tokens)} tokens", lambda value, _: operations(value * tokens))
    if tokens_per_second:

        def reached(value: float, _: float) -> str:
            tflops = value * tokens_per_second / TERA
            return f"{tflops:,.4g} TFLOP/s" + (f", {percent(tflops / known)}" if known else "")

        section(f"at {count(tokens_per_second)} tokens/s", reached)
    ratios = ", ".join(f"{attention_to_ffn_ratio(flops, length):.2f}" for length in lengths)
    lines += ["", f"attention_to_ffn_ratio (llm_TII v3): {ratios}", ""]
    lines += [f"{formula.key:<26}{formula.says}" for formula in FORMULAS]
    return "\n".join([*lines, f"warning: {flops.left_out}"] if flops.uncounted else lines)
