"""docs/recipes.md, a table of the recipes made from the files and the comments at their heads: `make docs`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from foundation.units import UNKNOWN, count, markdown
from pretrain.settings.config import load_recipe

FOLDER = Path(__file__).parents[1] / "recipes"
WIDTH = 100
HEAD = """\
# Recipes

Trainings that run as they are. `make docs` writes this page from `recipes/`; the comment at the
head of each file says how it is prepared and started, and where its figures come from.

* A recipe can build on another: `base: other.yaml` at its top takes everything from that file, and
  what the recipe says itself overrides it, key by key. All keys: [settings.md](settings.md).
* `--plan` behind the launcher's command says what a recipe would do here, `python -m pretrain plan
  RECIPE` what it would take elsewhere ([planning.md](planning.md)).
* `source` is the title of the published document that a recipe's figures come from. What a comment
  calls wrong there was checked by arithmetic.
* Only `smoke` and `tinyshakespeare` have been trained to their end here: most data and models lie
  on the hub. Tests load each recipe, and train each kind in a tiny form.
* A name on the hub that is gated, as Llama's, asks for `hf auth login` and its licence.
"""
MORE = {
    "matrices": "Comparisons: `python -m pretrain matrix FILE`",
    "phases": "Searches in phases: `python -m pretrain phases FILE`",
    "sweeps": "Sweeps of W&B: `wandb sweep FILE`",
}


def head_of(path: Path) -> list[str]:
    """The lines of the comment at the top of a file, without their "# "."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:end]]


def summary(path: Path) -> str:
    """The first sentence of a file's comment."""
    return re.split(r"(?<=[.:])\s", " ".join(head_of(path)), maxsplit=1)[0].rstrip(":.")


def row(path: Path) -> list[str]:
    recipe = load_recipe(path)
    data, train = recipe.data, recipe.train
    sources = [
        line.removeprefix("Source: ").rstrip(".")
        for line in head_of(path)
        if line.startswith("Source: ")
    ]
    tokens = train.tokens or (train.steps or 0) * recipe.batch.tokens
    return [
        f"[`{path.stem}`](../recipes/{path.name})",
        recipe.model.source or recipe.model.config["model_type"],
        f"{train.epochs:g} epochs" if train.epochs else count(tokens),
        data.source
        or ", ".join(str(source.source) for source in data.sources or ())
        or str(data.packs),
        sources[0] if sources else UNKNOWN,
        summary(path),
    ]


def page() -> str:
    """The whole of docs/recipes.md."""
    header = ["recipe", "model", "tokens", "data", "source", "what it is"]
    parts = [HEAD, markdown(header, [row(path) for path in sorted(FOLDER.glob("*.yaml"))], names=6)]
    for folder, title in MORE.items():
        files = sorted((FOLDER / folder).glob("*.yaml"))
        listed = [
            bullet(f"[`{path.name}`](../recipes/{folder}/{path.name}): {summary(path)}.")
            for path in files
        ]
        parts += [f"## {title.partition(':')[0]}", title.partition(": ")[2], "\n".join(listed)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def bullet(text: str) -> str:
    return textwrap.fill(
        f"* {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    print(page(), end="")
