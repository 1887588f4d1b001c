"""Write docs/gpus.md from the table of cards, the formats and the planner: `make docs`."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from transformers import PreTrainedModel

from foundation.units import UNKNOWN, cell, with_bar
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

RECIPE = Path("benchmarks/qwen3_1_7b_80gb.yaml")
# Cards in the order of the page. Other cards of the planner's table are not shown.
SHOWN = (
    *("A100", "L40S", "RTX 4090", "H100", "H200", "GH200", "B200", "B300", "RTX 5090"),
    "RTX PRO 6000 Server",
)
# Mean over tokens of the length of a document in the packs of docs/results.md.
MEAN_SQUARED = 527.0
# Columns of the page: a heading, and the precision or the first of several.
FORMATS = {"FP8 per tensor": "delayed", "`block`": "block", "`mxfp8`": "mxfp8", "`nvfp4`": "nvfp4"}
# The shape of Qwen3-0.6B differs from Qwen3-1.7B's in these sizes.
SMALL = {"hidden_size": 1024, "intermediate_size": 3072}
HEAD = """\
# Which precision on which GPU

`make docs` writes this table from the formats, the cards and the [planner](planning.md). Add the
options of a row to `python -m pretrain train my.yaml weights=bf16_exact`.

* *TE*: runs on Transformer Engine. *emulated*: refused, because the hardware or Transformer Engine
  lacks the format, unless `fp8_config.on_unsupported=emulate` is set. It shows the effect on the
  loss, slowly.
* Tokens/s are of training with short documents on one GPU. They are predicted from steps of the
  trainers and model sizes in the column *speed by steps of*; other sizes are extrapolated. The gain
  of FP8 with delayed scaling has an error of 5 % on H100s and H200s, and of 10 % on others, where
  our kernels never ran.
"""
TAIL = """\

* **Below 0.1 billion parameters**, stay with BF16 ([results](results.md)).
* **The head in FP8 too**, usually fastest: `fp8_config.scope=linear+head`.
* **A mixture of experts on Hopper**: `fp8_config.fp8_format=E4M3`. FP8 gains 1.0 to 1.2 times.
* **Several GPUs**: `--config ddp_fp8_delayed`. If the model does not fit:
  `fsdp2_fp8_delayed` ([scaling](scaling.md)).
* **Out of memory?** Set `optimizer.offload=moments`, then `model.gradient_checkpointing=full`.
* **FP8 needs [Transformer Engine](install.md#nvidia-gpus).** Run `python -m pretrain doctor` first.
  It tests every precision on your card.
* **Is FP8 as good as BF16 for your model?** [`which`](comparing.md#which-precision-for-my-model)
  measures it. [Our measurements](evidence.md) are for models of up to 0.6 billion parameters.

**Blackwell.** Nothing in this project has run on a B200 or another Blackwell GPU. MXFP8 and NVFP4
were emulated, after Transformer Engine's source code. In published steps of an 8 billion model,
MXFP8 had 0.94 to 0.99 of the speed of FP8, and NVFP4 1.15 to 1.20 times. If you have such a GPU,
please [make a card](../CONTRIBUTING.md#make-a-card-of-your-gpu), like [our
H200's](../benchmarks/results/cards/h200.json): a JSON file with measurements, in 15 minutes.
"""


@cache
def model_of(**sizes: int) -> tuple[PreTrainedModel, ModelFlops]:
    """Return the model of RECIPE with other sizes, on the meta device, and its FLOPs."""
    settings = load_recipe(RECIPE).model
    config = (settings.config or {}) | sizes
    model = build_on_meta(load_config(settings.model_copy(update={"config": config})))
    return model, ModelFlops.of(model)


def prediction(card: Card, precision: str, **sizes: int) -> Prediction | None:
    """Return the prediction for the model of RECIPE on a card, or None if it does not fit."""
    settings = [f"precision={precision}", "weights=bf16_exact", "batch.microbatch=auto"]
    recipe: Recipe = load_recipe(RECIPE, settings)
    model, flops = model_of(**sizes)
    # `cells_of` checks whether the card runs the precision.
    active = select_precision(precision, LowPrecisionSettings(), lambda _: None)
    schedule = PrecisionSchedule([(None, active)], recipe.train.steps or 1)
    training = Training(recipe, schedule, flops, MEAN_SQUARED)
    plan = plan_on(devices_called(card.name), training, model)
    return predict(plan) if plan.takes(1) <= plan.devices.memory else None


def cells_of(card: Card) -> list[str]:
    """Return the cells of a card in the table."""
    runs = {}
    for name in FORMATS.values():
        precision = PRECISIONS[name]
        assert isinstance(precision, QuantizedPrecision)
        runs[name] = precision.hardware.missing(card.capability) is None
    major, minor = card.capability
    cells = [f"{card.name} ({major}.{minor})"]
    cells += ["TE" if is_run else "emulated" for is_run in runs.values()]
    for sizes in (SMALL, {}):
        plain = prediction(card, "bf16", **sizes)
        low = prediction(card, "delayed", **sizes) if runs["delayed"] else None
        speed = "does not fit"
        if plain is not None:
            speed = with_bar(plain.tokens_per_second, plain.bar, ",.0f")
        cells.append(speed)
        cells.append(f"{low.gain:.2f} ×" if low and low.gain else UNKNOWN)
    # The options are those of the speeds in FP8.
    return [*cells, card.source, "`--config fp8_delayed`" if runs["delayed"] else "none"]


def page() -> str:
    """Return the text of docs/gpus.md."""
    models = [f"{name} {part}" for name in ("0.6 B", "1.7 B") for part in ("in BF16", "in FP8")]
    header = ["GPU (capability)", *FORMATS, *models, "speed by steps of", "options"]
    cards = {card.name: card for card in CARDS}
    rows = [header, ["---"] * len(header), *(cells_of(cards[name]) for name in SHOWN)]
    return HEAD + "\n" + "".join(f"| {' | '.join(map(cell, row))} |\n" for row in rows) + TAIL


if __name__ == "__main__":
    print(page(), end="")
