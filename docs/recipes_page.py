"""docs/recipes.md, made from the recipes and the comments at their heads: `make docs`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from pretrain.run.catalogue import FOLDER, ListedRecipe, catalogue, files, head_of, notes, table

WIDTH = 100
HEAD = """\
# Recipes

Trainings that run as they are. `make docs` writes this page from `recipes/` and the comments there,
and a test compares the two; `python -m pretrain recipes` prints the table, of your own files too.

* A recipe can build on another: `base: other.yaml` at its top takes everything from that file, and
  what the recipe says itself overrides it, key by key. All keys: [settings.md](settings.md).
* `--plan` behind a command says what it would do here, `python -m pretrain plan RECIPE` what it
  would take elsewhere ([planning.md](planning.md)).
* In the table `24.7 GiB with 32` is the memory of each GPU with 32 packs at once, and `source` is
  the title of the document that a recipe's figures come from. These documents were published with
  code; what a comment calls wrong there was checked by arithmetic.
* Only `smoke`, `tinyshakespeare`, `comparison`, `comparison_base` and those of the evidence have
  been trained to their end here: most data and models lie on the hub. Tests plan each recipe, and
  train each kind in a tiny form.
* A name on the hub that is gated, as Llama's, asks for `hf auth login` and its licence.
"""
MORE = {
    "matrices": "Comparisons: `python -m pretrain matrix FILE` ([sweeps.md](sweeps.md))",
    "phases": "Searches in phases: `python -m pretrain phases FILE` ([planning.md](planning.md))",
    "sweeps": "Sweeps of W&B: `wandb sweep FILE` ([sweeps.md](sweeps.md))",
}


def page() -> str:
    """The whole of docs/recipes.md."""
    recipes = catalogue(files([FOLDER]))
    parts = [HEAD, table(recipes), "\n".join(map(_bullet, notes(recipes)))]
    for each in recipes:
        told = [line for line in each.head if not line.startswith("Source: ")]
        file = f"[`recipes/{each.path.name}`](../recipes/{each.path.name}),\nfrom: {each.source}."
        parts += [f"## {each.recipe.name}", file, *paragraphs(told)]
    for folder, title in MORE.items():
        parts += ["## " + title.partition(":")[0], title.partition(": ")[2], "\n".join(_lines_of(FOLDER / folder))]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _lines_of(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.yaml")):
        listed = ListedRecipe(path, None, head_of(path))
        yield _bullet(f"[`{path.name}`](../recipes/{folder.name}/{path.name}): {listed.summary}")


def _bullet(text: str) -> str:
    return textwrap.fill(f"* {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def paragraphs(head: Sequence[str]) -> Iterator[str]:
    """A comment as Markdown: indented lines are commands, lines with a star bullets, which go on in lines indented by two."""
    block: list[str] = []
    kind = ""
    for line in [*head, ""]:
        is_more = kind == "bullets" and line.startswith("  ")
        now = "bullets" if line.startswith("* ") or is_more else "commands" if line.startswith("  ") else "text" if line else ""
        if now != kind and block:
            yield _paragraph(kind, block)
            block = []
        if is_more:
            block[-1] += " " + line.strip()
        elif now:
            block.append(line)
        kind = now


def _paragraph(kind: str, lines: Sequence[str]) -> str:
    if kind == "commands":
        return "\n".join(["```", *(line.removeprefix("  ") for line in lines), "```"])
    if kind == "bullets":
        return "\n".join(_bullet(line.removeprefix("* ")) for line in lines)
    return textwrap.fill(" ".join(lines), WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    print(page(), end="")
