"""The layers that docs/precision.md says to keep in BF16 for NVFP4: those at the ends, and about the share that NVIDIA keeps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pretrain.model import huggingface as model
from pretrain.model.huggingface import decoder_layers
from pretrain.precision.scope import decide
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.settings.recipe import ModelSettings

PAGE = Path(__file__).parents[3] / "docs" / "precision.md"
ROWS = re.findall(r"^\| (\d+) \| `\{first: (\d+), last: (\d+)\}` \| (\d+) % \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
SIZES = {"model_type": "qwen3", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.mark.parametrize(("layers", "first", "last", "percent"), [tuple(map(int, row)) for row in ROWS])
def test_the_documented_layers_stay_in_bf16_and_are_a_sixth_of_the_linears(
    layers: int, first: int, last: int, percent: int
) -> None:
    settings = LowPrecisionSettings(keep_bf16_layers={"first": first, "last": last}).resolved("nvfp4")
    active = ActivePrecision("nvfp4", PRECISIONS["nvfp4"], "emulation", settings)
    config = model.load_config(ModelSettings(config=SIZES | HEADS | {"num_hidden_layers": layers}))
    hf = model.build_on_meta(config)
    decisions = decide(hf, list(decoder_layers(hf).values()), active)
    decisions.pop("lm_head")
    kept = {name for name, decision in decisions.items() if decision.requested == "bf16"}
    ends = {*range(first), *range(layers - last, layers)}
    assert {int(name.split(".")[2]) for name in kept} == ends and len(kept) == 7 * len(ends)
    assert {decisions[name].reason for name in kept} == {"keep_bf16_layers"}
    assert round(100 * len(kept) / len(decisions)) == percent and 12 <= percent <= 20


def test_the_page_has_the_depths_of_the_models_that_are_shipped() -> None:
    assert {"28", "32", "62"} <= {layers for layers, *_ in ROWS}
