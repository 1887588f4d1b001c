"""The recipes that are here, and what each would take on H200s: `python -m pretrain recipes [FILE or FOLDER ...]`.

Nothing is downloaded, and no packs or tokenizers are needed. Shapes of models on the hub stand in PUBLISHED. Speeds are shares of
the device's peak that are assumed, not measured; `python -m pretrain plan RECIPE` says more of one recipe.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from foundation import units
from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.tables import UNKNOWN, markdown, on_screen, or_dash
from foundation.units import GIB
from pretrain.model.distributed import make_accelerator
from pretrain.plan.plan import ASSUMED_SHARES
from pretrain.plan.preflight import prepare_job
from pretrain.plan.targets import LEAST, Estimate, Target, estimates, span
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

FOLDER = Path(__file__).parents[2] / "recipes"
PRECISION = "bf16"  # in which a recipe that names none is reckoned
COUNTS = (1, 2, 4, 8)  # H200s of a machine; the fewest that hold the model are taken
NOWHERE = Path("packs-that-do-not-exist")  # a listing says the same whether packs are prepared or not

_LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "rope_theta": 500000.0, "rms_norm_eps": 1e-5}
_LLAMA |= {"max_position_embeddings": 131072, "bos_token_id": 128000, "eos_token_id": 128001}
_QWEN = {"vocab_size": 151936, "num_key_value_heads": 8, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "eos_token_id": 151643}

# What the config.json of models on the hub says of their shapes.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen3-1.7B-Base": _QWEN
    | {"model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    | {"num_attention_heads": 16, "head_dim": 128, "max_position_embeddings": 32768, "tie_word_embeddings": True},
    "Qwen/Qwen2.5-14B": _QWEN
    | {"model_type": "qwen2", "vocab_size": 152064, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48}
    | {"num_attention_heads": 40, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False},
    "meta-llama/Llama-3.2-1B": _LLAMA
    | {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
    | {"num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
    "meta-llama/Llama-3.2-3B": _LLAMA
    | {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28}
    | {"num_attention_heads": 24, "head_dim": 128, "tie_word_embeddings": True},
    "meta-llama/Llama-3.1-8B": _LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32, "head_dim": 128, "tie_word_embeddings": False},
}


@dataclass(frozen=True)
class ListedRecipe:
    """A recipe's file, what its comments say at its head, and what it would take; without an `estimate`, why there is none."""

    path: Path
    recipe: Recipe
    head: tuple[str, ...]  # lines of the comment at its top, without their "# "
    estimate: Estimate | None = None
    obstacle: str = ""

    @property
    def source(self) -> str:
        """Where its figures come from, as its head says it."""
        found = [line.removeprefix("Source: ").rstrip(".") for line in self.head if line.startswith("Source: ")]
        return found[0] if found else UNKNOWN

    @property
    def summary(self) -> str:
        """The first sentence of its head."""
        return re.split(r"(?<=[.:])\s", " ".join(self.head).strip(), maxsplit=1)[0].rstrip(":.")

    @property
    def data(self) -> str:
        """What it trains on."""
        data = self.recipe.data
        name = data.source or ", ".join(each.source or str(each.name) for each in data.sources or ())
        part = data.subset or (data.split if data.split != "train" else None)
        return (name or str(data.packs)) + (f" ({part})" if part else "")

    @property
    def model(self) -> str:
        """Its type, or its name on the hub, and its parameters."""
        name = self.recipe.model.source or self.recipe.model.config["model_type"]
        if self.estimate is None:
            return name
        return f"{name}, {units.count(self.estimate.plan.flops.parameters)}"

    @property
    def tokens(self) -> str:
        if (epochs := self.recipe.train.epochs) is not None:
            return f"{epochs:g} epoch{'' if epochs == 1 else 's'}"
        train, each = self.recipe.train, self.recipe.batch.tokens
        return units.count(train.steps * each if train.steps else -(-train.tokens // each) * each)

    @property
    def memory(self) -> str:
        """The memory of each device, with the microbatch that fits or that the recipe names, in packs."""
        if self.estimate is None:
            return UNKNOWN
        plan = self.estimate.plan
        return f"{units.memory(plan.memory.total(plan.packs_at_once) / GIB)} with {plan.packs_at_once}"

    @property
    def time(self) -> str:
        """The time of all steps; where it is stated in epochs, whose tokens are not known before there are packs, that of a
        billion tokens."""
        if self.estimate is None or self.estimate.plan.flops.parameters < LEAST:
            return UNKNOWN
        if self.recipe.train.epochs is not None:
            hours = [1e9 / speed / 3600 for speed in self.estimate.tokens_per_second]
            return f"{span(hours, _hours)} a billion tokens"
        return span(self.estimate.hours, _hours)

    @property
    def target(self) -> str:
        return or_dash(self.estimate, lambda estimate: str(estimate.target))


def _hours(hours: float) -> str:
    return units.duration(3600 * hours)


def head_of(path: Path) -> tuple[str, ...]:
    """The comment at the top of a YAML file, line by line without "#" and one space."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return tuple(lines)


def plannable(recipe: Recipe) -> Recipe:
    """`recipe` as it can be planned without a hub, packs and tokenizer: in BF16 where it names no precision, its model's shape in
    place of the model's name, and a step for a horizon where packs would have to be counted."""
    model, train = recipe.model, recipe.train
    if model.source in PUBLISHED:
        config = PUBLISHED[model.source] | (model.config or {})
        model = model.model_copy(update={"source": None, "from_scratch": False, "config": config})
    if train.epochs is not None:
        train = train.model_copy(update={"epochs": None, "tokens": 10**9})
    of_text = dict.fromkeys(("source", "sources", "validation", "tokenizer", "chat_template"))
    data = recipe.data.model_copy(update=of_text | {"packs": NOWHERE})
    evaluate = recipe.evaluate.model_copy(update={"samples": ()})
    parts = {"model": model, "train": train, "data": data, "evaluate": evaluate, "precision": recipe.precision or PRECISION}
    return recipe.model_copy(update=parts | {"run_dir": "runs/of-a-listing"})


def listed(path: Path, accelerator: Accelerator) -> ListedRecipe:
    """The recipe at `path` on the fewest H200s that hold it. InputError where the file is no recipe."""
    recipe, head = load_recipe(path), head_of(path)
    if (source := recipe.model.source) is not None and source not in PUBLISHED:
        here = path.relative_to(FOLDER.parent) if path.is_relative_to(FOLDER) else path  # as it is named in the checkout
        unread = f"`model.source: {source}` is not read for a listing; `python -m pretrain plan {here}` reads it"
        return ListedRecipe(path, recipe, head, obstacle=unread)
    try:
        job = prepare_job(plannable(recipe), accelerator, purpose="elsewhere")
    except InputError as error:
        return ListedRecipe(path, recipe, head, obstacle=str(error))
    for count in COUNTS:
        [estimate] = estimates(job, [Target("H200", count)], (), ASSUMED_SHARES)
        if estimate.obstacle:
            return ListedRecipe(path, recipe, head, obstacle=estimate.obstacle)
        plan = estimate.plan
        if plan.memory.total(plan.packs_at_once) <= plan.devices.memory:
            return ListedRecipe(path, recipe, head, estimate)
    return ListedRecipe(path, recipe, head, obstacle=f"does not fit into {COUNTS[-1]} x H200")


def catalogue(paths: Iterable[Path]) -> list[ListedRecipe]:
    accelerator = make_accelerator()
    return [listed(path, accelerator) for path in paths]


def files(asked: Sequence[Path]) -> list[Path]:
    """The recipes in what was asked for, files and folders; InputError where there is none."""
    found = []
    for path in asked:
        inside = sorted(path.glob("*.yaml")) if path.is_dir() else [path] if path.is_file() else []
        if not inside:
            raise InputError(f"{path}: no recipe is there; name a YAML file, or a folder with some")
        found += inside
    return found


def table(recipes: Sequence[ListedRecipe], made: Callable[..., str] = markdown) -> str:
    header = ("recipe", "model, parameters", "tokens", "data", "on", "memory of each, with packs at once", "time", "source")
    lines = [[r.recipe.name, r.model, r.tokens, r.data, r.target, r.memory, r.time, r.source] for r in recipes]
    return made(header, lines, names=len(header))


def notes(recipes: Sequence[ListedRecipe]) -> list[str]:
    """Returns what the table does not say of its figures, a sentence or two each."""
    slow, fast = sorted(ASSUMED_SHARES)
    small = units.count(LEAST)
    said = [
        f"time is that of training steps at {100 * slow:g} and {100 * fast:g} % of the peak, which is assumed, in "
        f"{PRECISION.upper()} where a recipe names no precision; of models below {small} parameters such a share says nothing",
        "memory is the plan's estimate, on the fewest H200s of a machine that hold the model",
    ]
    return said + [f"{each.recipe.name}: {each.obstacle}" for each in recipes if each.obstacle]


def main(arguments: list[str]) -> int:
    """Print the listing; returns 0. InputError for a file that is no recipe."""
    parser = CommandParser(
        "python -m pretrain recipes", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="RECIPE", help="files or folders; without: those of the checkout")
    asked = parser.parse_intermixed_args(arguments).paths
    if not asked and not FOLDER.is_dir():
        raise InputError(
            "RECIPE: none is given, and an installed copy has none: they lie in recipes/ of the checkout; name that "
            "folder, or a YAML file"
        )
    recipes = catalogue(files(asked or [FOLDER]))
    print(table(recipes, on_screen))
    print("\n".join(f"* {note}" for note in notes(recipes)))
    return 0
