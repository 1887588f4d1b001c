"""Write packs for speed measurements from a seed, without corpus and tokenizer.

    python -m benchmarks.speed.generated_packs --recipe benchmarks/qwen3_1_7b.yaml --packs 352 \\
        --out packs/zipf

The packs are the same on every machine. Documents have log-normal lengths like those of an
encyclopaedia: median 110 tokens, mean 200, a long tail, cut at the end of a pack. So 32,768 tokens
have some 165 to 190 documents, and Σlen²/T is about 500. Attention's share of a step depends on
this value, so speeds are comparable only between packs of similar documents. With `--whole`, each
pack is one document, as in most published measurements. Tokens follow Zipf's law. As in text, a few
tokens are frequent, which affects the embedding's gradient and the loss, and a model can learn
something within a dozen steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from packing.arrow import Pack, write_packs
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

# Distribution of a document's length in tokens.
LOG_MEAN = 4.7
LOG_DEVIATION = 1.1
SHORTEST = 8
# Number of unused ids at the end of the vocabulary. In real vocabularies, these are special tokens,
# and ids that only round up the size of the vocabulary.
SPARED = 1936
SEED = 1


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe", type=Path, required=True, help="recipe with the pack length and the vocabulary"
    )
    parser.add_argument("--packs", type=int, required=True, help="number of packs")
    parser.add_argument("--whole", action="store_true", help="make each pack one document")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    write(
        arguments.out,
        recipe.data.length,
        recipe.model.config["vocab_size"],
        arguments.packs,
        whole_documents=arguments.whole,
    )


def folder_of(recipe: Recipe, steps: int, *, whole_documents: bool = False) -> Path:
    """Return the folder of packs for `steps` steps of `recipe`.

    The name of the folder contains everything that determines its content.
    """
    kind = "whole" if whole_documents else "zipf"
    vocabulary = recipe.model.config["vocab_size"]
    return Path("packs") / f"{kind}_{recipe.data.length}_{vocabulary}_{_count(recipe, steps)}"


def make(folder: Path, recipe: Recipe, steps: int, *, whole_documents: bool = False) -> list[str]:
    """Write packs for `steps` steps of `recipe` to `folder` unless the folder exists.

    Returns the settings with which a recipe reads these packs.
    """
    if not folder.exists():
        write(
            folder,
            recipe.data.length,
            recipe.model.config["vocab_size"],
            _count(recipe, steps),
            whole_documents=whole_documents,
        )
    return settings_for(folder)


def settings_for(folder: Path) -> list[str]:
    """Return settings that replace a recipe's data by the packs in `folder`."""
    return ["data.source=null", "data.tokenizer=null", f"data.packs={folder}"]


def _count(recipe: Recipe, steps: int) -> int:
    """Return the number of packs in `steps` steps."""
    return steps * recipe.batch.tokens // recipe.data.length


def write(
    folder: Path, length: int, vocabulary: int, count: int, *, whole_documents: bool = False
) -> None:
    """Write `count` packs of `length` tokens to `folder`.

    With `whole_documents`, each pack is one document. Raises OSError if the folder has files.
    """
    draw = np.random.default_rng(SEED)
    frequencies, identity = zipf(vocabulary, draw)
    totals = {"documents": 0, "squared": 0}
    packs = []
    for _ in range(count):
        if whole_documents:
            lengths = np.array([length], dtype=np.int32)
        else:
            lengths = document_lengths(length, draw)
        ranks = np.searchsorted(frequencies, draw.random(length), side="right")
        packs.append(Pack(identity[ranks], lengths))
        totals["documents"] += len(lengths)
        totals["squared"] += int(np.square(lengths, dtype=np.int64).sum())
    tokens = count * length
    statistics = {
        "documents": totals["documents"],
        "sum_squared_lengths_per_token": totals["squared"] / tokens,
    }
    if whole_documents:
        settings = {"whole_documents": True}
    else:
        settings = {"log_mean": LOG_MEAN, "log_deviation": LOG_DEVIATION, "shortest": SHORTEST}
    settings |= {"seed": SEED, "packs": count, "vocabulary": vocabulary}
    write_packs(
        folder, length, {"train": [packs]}, settings=settings, statistics=statistics, tokenizer=None
    )


def zipf(vocabulary: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the cumulative probabilities by rank, and the id of each rank.

    Probabilities are proportional to 1 / (rank + 2.7) (Mandelbrot's form). The frequent ids are
    drawn at random. Otherwise the frequent rows of the embedding would be adjacent in memory.
    """
    used = max(vocabulary - SPARED, vocabulary // 2)
    weights = 1 / (np.arange(used) + 2.7)
    cumulative = np.cumsum(weights) / weights.sum()
    cumulative[-1] = 1.0
    return cumulative, draw.permutation(used).astype(np.uint32)


def document_lengths(
    length: int, draw: np.random.Generator, log_mean: float = LOG_MEAN
) -> np.ndarray:
    """Return lengths [documents] int32 that fill a pack of `length` tokens. The last one is cut."""
    lengths: list[int] = []
    left = length
    while left:
        drawn = max(SHORTEST, int(draw.lognormal(log_mean, LOG_DEVIATION)))
        lengths.append(min(left, drawn))
        left -= lengths[-1]
    return np.array(lengths, dtype=np.int32)


if __name__ == "__main__":
    main()
