"""Packs to measure speed on, made from a seed: no corpus, no tokenizer, the same on every machine.

    python -m benchmarks.throughput_packs --recipe benchmarks/qwen3_1_7b.yaml --packs 352 --out packs/zipf

Documents have log-normal lengths like those of an encyclopaedia: median 110 tokens, mean 200, a long tail, cut at a pack's end,
so that 32,768 tokens hold some 165 to 190 of them and Σlen²/T is about 500. Attention's share of a step depends on just that, and
so figures are comparable only between packs of like documents. `--whole` makes each pack one document, which is what others
publish figures of. Tokens follow Zipf's law: as in text, a few are frequent, which the embedding's gradient and the loss both
notice, and a model has something to learn in a dozen steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from packing.arrow import Pack, PackWriter
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

LOG_MEAN, LOG_DEVIATION, SHORTEST = 4.7, 1.1, 8  # of a document's length in tokens
# ids at the vocabulary's end that do not occur: special tokens, and rows that only round up its
# size
SPARED = 1936
SEED = 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--recipe", type=Path, required=True, help="whose pack length and vocabulary are meant"
    )
    parser.add_argument("--packs", type=int, required=True)
    parser.add_argument("--whole", action="store_true", help="each pack one document")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    write(
        arguments.out,
        recipe.data.length,
        recipe.model.config["vocab_size"],
        arguments.packs,
        whole=arguments.whole,
    )


def folder_of(recipe: Recipe, steps: int, *, whole: bool = False) -> Path:
    """Return where packs for `steps` steps of `recipe` lie; named after all that decides what is in them."""
    kind = "whole" if whole else "zipf"
    return (
        Path("packs")
        / f"{kind}_{recipe.data.length}_{recipe.model.config['vocab_size']}_{_count(recipe, steps)}"
    )


def make(folder: Path, recipe: Recipe, steps: int, *, whole: bool = False) -> list[str]:
    """Write packs for `steps` steps of `recipe` in `folder` if nothing is there. Returns the settings that put them to use."""
    if not folder.exists():
        write(
            folder,
            recipe.data.length,
            recipe.model.config["vocab_size"],
            _count(recipe, steps),
            whole=whole,
        )
    return settings_for(folder)


def settings_for(folder: Path) -> list[str]:
    """Return settings that put the packs in `folder` in place of a recipe's prepared text."""
    return ["data.source=null", "data.tokenizer=null", f"data.packs={folder}"]


def _count(recipe: Recipe, steps: int) -> int:
    return steps * recipe.batch.tokens // recipe.data.length


def write(folder: Path, length: int, vocabulary: int, count: int, *, whole: bool = False) -> None:
    """Write `count` packs of `length` tokens at `folder`, each one document if `whole`.

    Raises InputError where something stands there already."""
    draw = np.random.default_rng(SEED)
    frequencies, identity = zipf(vocabulary, draw)
    totals = {"documents": 0, "squared": 0}
    with PackWriter(folder, length) as writer:
        for _ in range(count):
            lengths = (
                np.array([length], dtype=np.int32) if whole else document_lengths(length, draw)
            )
            ranks = np.searchsorted(frequencies, draw.random(length), side="right")
            writer.add("train", Pack(identity[ranks], lengths))
            totals["documents"] += len(lengths)
            totals["squared"] += int(np.square(lengths, dtype=np.int64).sum())
        tokens = count * length
        statistics = {
            "documents": totals["documents"],
            "sum_squared_lengths_per_token": totals["squared"] / tokens,
        }
        of_lengths = {"log_mean": LOG_MEAN, "log_deviation": LOG_DEVIATION, "shortest": SHORTEST}
        settings = ({"whole_documents": True} if whole else of_lengths) | {
            "seed": SEED,
            "packs": count,
            "vocabulary": vocabulary,
        }
        writer.finish(settings=settings, statistics=statistics, tokenizer=None)


def zipf(vocabulary: int, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Cumulative probabilities by rank, each proportional to 1 / (rank + 2.7) (Mandelbrot's form), and the id of each rank.

    Which ids are frequent is drawn: in their order, the frequent rows of the embedding would lie side by side in memory.
    """
    used = max(vocabulary - SPARED, vocabulary // 2)
    weights = 1 / (np.arange(used) + 2.7)
    cumulative = np.cumsum(weights) / weights.sum()
    cumulative[-1] = 1.0
    return cumulative, draw.permutation(used).astype(np.uint32)


def document_lengths(length: int, draw: np.random.Generator) -> np.ndarray:
    """[documents] int32 that fill a pack of `length` tokens; the last is cut where the pack ends."""
    lengths: list[int] = []
    left = length
    while left:
        drawn = max(SHORTEST, int(draw.lognormal(LOG_MEAN, LOG_DEVIATION)))
        lengths.append(min(left, drawn))
        left -= lengths[-1]
    return np.array(lengths, dtype=np.int32)


if __name__ == "__main__":
    main()
