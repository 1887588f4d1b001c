"""`python -m pretrain flops`: what a model costs to train, a token, by every definition in use, beside each other.

MODEL is a recipe, a folder or a name of a model. Nothing of its weights is read. docs/planning.md derives each definition.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from foundation.command import CommandParser, number
from foundation.errors import InputError
from foundation.units import TERA, count, operations, percent
from pretrain.metrics.flop_formulas import FORMULAS, attention_to_ffn_ratio
from pretrain.metrics.flops import ModelFlops
from pretrain.metrics.peaks import peak
from pretrain.model import huggingface as model
from pretrain.plan.tokenizer import known_tokenizer, with_tokens_of
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
    asked = parser.parse_intermixed_args(arguments)
    flops, length = flops_of(asked.model)
    print(table(flops, asked.length or length, asked.tokens, asked.tokens_per_second, asked.device))
    return 0


def flops_of(name: str) -> tuple[ModelFlops, list[int]]:
    """The model's count, and the lengths to show; InputError where there is no such model or recipe, and where a vocabulary is to
    be that of a tokenizer that is not there."""
    of_recipe = name.endswith((".yaml", ".yml"))
    recipe = load_recipe(Path(name)) if of_recipe else None
    settings = recipe.model if recipe else ModelSettings(source=name)
    if recipe and settings.source is None and "vocab_size" not in settings.config and recipe.data.tokenizer:
        settings, _ = with_tokens_of(known_tokenizer(recipe.data, None), settings)
    hf = model.build_on_meta(model.load_config(settings))
    return ModelFlops.of(hf), [recipe.data.length] if recipe else list(LENGTHS)


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
    columns = [f"T = {length:,}" for length in lengths]
    rows = {formula.key: [formula.per_token(flops, length) for length in lengths] for formula in FORMULAS}
    without = flops.parameters - flops.embedding_parameters
    lines = [
        f"{count(flops.parameters)} parameters, {count(without)} without embeddings; {shape.layers} layers, hidden "
        f"{shape.hidden:,}, {shape.heads} heads of {shape.head_dim} ({shape.kv_heads} for keys and values), MLP "
        f"{shape.feed_forward:,}{' gated' if flops.gated else ''}, vocabulary {shape.vocabulary:,}",
        *_section("a token", columns, {key: [operations(value) for value in values] for key, values in rows.items()}),
        *_section("as a share of ours", columns, _shares(rows)),
    ]
    if tokens:
        whole = {key: [operations(value * tokens) for value in values] for key, values in rows.items()}
        lines += _section(f"{count(tokens)} tokens", columns, whole)
    if tokens_per_second:
        reached = {key: [value * tokens_per_second / TERA for value in values] for key, values in rows.items()}
        shown = {
            key: [f"{each:,.4g} TFLOP/s" + (f", {_share(each / known)}" if known else "") for each in values]
            for key, values in reached.items()
        }
        of = f", of the {known:,g} TFLOP/s of {device} in BF16" if known else ""
        lines += _section(f"at {count(tokens_per_second)} tokens/s{of}", columns, shown)
    ratios = [f"{attention_to_ffn_ratio(flops, length):.2f}" for length in lengths]
    lines += ["", f"attention_to_ffn_ratio (llm_TII v3): {', '.join(ratios)}"]
    lines += ["", *(f"{formula.key:<26}{formula.says}" for formula in FORMULAS)]
    if flops.uncounted:
        lines.append(f"warning: {flops.left_out}")
    return "\n".join(lines)


def _share(share: float) -> str:
    """Returns a share of a peak in per cent, with two digits where one decimal would show 0.0 %."""
    return percent(share) if share >= 0.001 else f"{100 * share:.2g} %"


def _shares(rows: dict[str, list[float]]) -> dict[str, list[str]]:
    return {key: [percent(value / own) for value, own in zip(rows[key], rows["ours"], strict=True)] for key in rows}


def _section(title: str, columns: Sequence[str], rows: dict[str, list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(columns, *rows.values(), strict=True)]
    lines = [(title, columns), *((f"  {key}", values) for key, values in rows.items())]
    first = max(len(label) for label, _ in lines[1:]) + 2
    aligned = ["".join(f"{value:>{width + 3}}" for value, width in zip(values, widths, strict=True)) for _, values in lines]
    head = [f"{title:<{first}}{aligned[0]}"] if len(title) < first else [title, f"{'':<{first}}{aligned[0]}"]
    return ["", *head, *(f"{label:<{first}}{text}" for (label, _), text in zip(lines[1:], aligned[1:], strict=True))]
