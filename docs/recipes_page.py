"""Write docs/recipes.md from the recipes and the comments at their top: `make docs`."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from docs.recipe_schema import MODELINE
from foundation.units import cell, count
from pretrain.settings.config import load_recipe

FOLDER = Path(__file__).parents[1] / "recipes"
WIDTH = 100
HEAD = """\
# Recipes

`make docs` writes this page from `recipes/`. The comment at the top of each file has the command
that starts the training, and the published document whose settings it uses. `base: other.yaml`
includes another recipe ([settings.md](settings.md)), and `--plan` estimates the memory
([planning.md](planning.md)).

Tests load each recipe, and train a tiny model of each architecture. Only `smoke` and
`tinyshakespeare` were trained to their end. Most others need datasets or models from the hub, and
gated models, such as Llama, need `hf auth login` and their licence.
"""
SUBFOLDERS = {
    "matrices": "Comparisons: `python -m pretrain matrix FILE`",
    "sweeps": "Sweeps of W&B: `wandb sweep FILE`",
}


def top_comment(path: Path) -> list[str]:
    """Return the lines of the comment at the top of a file, without the "# ".

    The line that names the schema of recipes is omitted.
    """
    lines = path.read_text(encoding="utf-8").removeprefix(f"{MODELINE}\n").splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:end]]


def summary(path: Path) -> str:
    """Return the first sentence of the comment at the top of a file."""
    sentences = re.split(r"(?<=[.:])\s", " ".join(top_comment(path)), maxsplit=1)
    return sentences[0].rstrip(":.")


def row(path: Path) -> list[str]:
    """Return the cells of a recipe in the table."""
    recipe = load_recipe(path)
    data = recipe.data
    train = recipe.train
    tokens = train.tokens or (train.steps or 0) * recipe.batch.tokens
    datasets = ", ".join(str(source.source) for source in data.sources or ())
    return [
        f"[`{path.stem}`](../recipes/{path.name})",
        recipe.model.source or recipe.model.config["model_type"],
        f"epochs: {train.epochs:g}" if train.epochs else count(tokens),
        data.source or datasets or str(data.packs),
        summary(path),
    ]


def page() -> str:
    """Return the text of docs/recipes.md."""
    header = ["recipe", "model", "tokens", "data", "summary"]
    first, *others = [
        f"| {' | '.join(map(cell, cells))} |"
        for cells in (header, *map(row, sorted(FOLDER.glob("*.yaml"))))
    ]
    parts = [HEAD, "\n".join([first, "|---" * len(header) + "|", *others])]
    for folder, title in SUBFOLDERS.items():
        items = [
            list_item(f"[`{path.name}`](../recipes/{folder}/{path.name}): {summary(path)}.")
            for path in sorted((FOLDER / folder).glob("*.yaml"))
        ]
        parts += [f"## {title.partition(':')[0]}", title.partition(": ")[2], "\n".join(items)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def list_item(text: str) -> str:
    """Return a Markdown list item, wrapped without breaking links."""
    return textwrap.fill(
        f"* {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
