"""Write the table of GPUs in docs/quick_start.md: `make docs`.

The table is made from the cards, the formats and the planner.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from transformers import PreTrainedModel

from benchmarks.machine import with_tables
from foundation.units import UNKNOWN, cell
from lab.speed.speed import Prediction, predict
from lab.speed.targets import devices_called, plan_on
from pretrain.metrics.cards import CARDS, Card
from pretrain.metrics.flops import ModelFlops
from pretrain.model.configuration import load_config
from pretrain.model.huggingface import build_on_meta
from pretrain.plan.plan import Training
from pretrain.precision.formats.definition import QuantizedPrecision
from pretrain.precision.schedule import PrecisionSchedule
from pretrain.precision.selection import select_precision
from pretrain.precision.settings import PRECISIONS, LowPrecisionSettings
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

PAGE = Path(__file__).parent / "quick_start.md"
RECIPE = Path("benchmarks/qwen3_1_7b_80gb.yaml")
# Cards in the order of the table. Other cards of the planner's table are not shown.
SHOWN = (
    *("A100", "L40S", "RTX 4090", "H100", "H200", "GH200", "B200", "B300", "RTX 5090"),
    "RTX PRO 6000 Server",
)
# Mean over tokens of the length of a document in the packs of docs/developers/results.md.
MEAN_SQUARED = 527.0
# Columns of the table: a heading, and the precision or the first of several.
FORMATS = {"`delayed`, `current`": "delayed", "`block`": "block", "`mxfp8`, `nvfp4`": "mxfp8"}
# The shape of Qwen3-0.6B differs from Qwen3-1.7B's in these sizes.
SMALL = {"hidden_size": 1024, "intermediate_size": 3072}


@cache
def model_of(**sizes: int) -> tuple[PreTrainedModel, ModelFlops]:
    """Return the model of RECIPE with other sizes, on the meta device, and its FLOPs."""
    settings = load_recipe(RECIPE).model
    config = (settings.config or {}) | sizes
    model = build_on_meta(load_config(settings.model_copy(update={"config": config})))
    return model, ModelFlops.of(model)


def prediction(card: Card, precision: str, **sizes: int) -> Prediction | None:
    """Return the prediction for the model of RECIPE on a card, or None if it does not fit.

    `sizes` replace sizes of the model (`model_of`).
    """
    settings = [f"precision={precision}", "weights=bf16_exact", "batch.microbatch=auto"]
    recipe: Recipe = load_recipe(RECIPE, settings)
    model, flops = model_of(**sizes)
    # `cells_of` checks whether the card runs the precision.
    active = select_precision(precision, LowPrecisionSettings(), lambda _: None)
    schedule = PrecisionSchedule([(None, active)], recipe.train.steps or 1)
    training = Training(recipe, schedule, flops, MEAN_SQUARED)
    plan = plan_on(devices_called(card.name), training, model)
    return predict(plan) if plan.needed_memory(1) <= plan.devices.memory else None


def cells_of(card: Card) -> list[str]:
    """Return the cells of a card in the table."""
    runs = {}
    for name in FORMATS.values():
        precision = PRECISIONS[name]
        assert isinstance(precision, QuantizedPrecision)
        runs[name] = precision.hardware.unmet_need(card.capability) is None
    major, minor = card.capability
    cells = [f"{card.name} ({major}.{minor})"]
    cells += ["yes" if is_run else "emulated" for is_run in runs.values()]
    for sizes in (SMALL, {}):
        low = prediction(card, "delayed", **sizes) if runs["delayed"] else None
        cells.append(f"{low.gain:.2f} ×" if low and low.gain else UNKNOWN)
    return cells


def table() -> str:
    """Return the table of GPUs."""
    header = ["GPU (capability)", *FORMATS, "gain at 0.6 B", "at 1.7 B"]
    cards = {card.name: card for card in CARDS}
    rows = [header, ["---"] * len(header), *(cells_of(cards[name]) for name in SHOWN)]
    return "\n".join(f"| {' | '.join(map(cell, row))} |" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE, "gpus", table()), encoding="utf-8")
