"""What the demo consists of: six parts, each with the product that says it is done.

The parts that matter are the real commands, run as a user would type them; only the corpus and the check are the demo's own.
Every path comes from the recipe, so the same commands work without the demo.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo.command import run, script
from packing.prepare import usable_cores
from pretrain.settings.config import run_dir_of
from pretrain.settings.recipe import Recipe

RECIPE = Path("recipes/smoke.yaml")
MATRIX = Path("recipes/matrices/demo.yaml")
PYTHON = script("python")


@dataclass(frozen=True)
class Part:
    title: str
    product: str  # what it leaves behind, for the reader
    done: Callable[[], bool]
    make: Callable[[], None]


@dataclass(frozen=True)
class Demo:
    """The demo's parts and where their products lie. A product appears whole or not at all, so being there means being done."""

    recipe: Recipe

    @property
    def corpus(self) -> Path:
        return Path(self.recipe.data.source)

    @property
    def tokenizer(self) -> Path:
        return Path(self.recipe.data.tokenizer)

    @property
    def packs(self) -> Path:
        return self.recipe.data.packs

    @property
    def run_dir(self) -> Path:
        return run_dir_of(self.recipe)

    @property
    def model(self) -> Path:
        return self.run_dir / "final"

    @property
    def sample(self) -> Path:
        """What the exported model wrote, for the last screen."""
        return self.run_dir / "sample.txt"

    @property
    def report(self) -> Path:
        """The page of the comparison, which `matrix` writes beside its runs."""
        return Path("runs/demo/demo.html")

    def parts(self) -> list[Part]:
        library = f"the standard library of Python {platform.python_version()}"
        return [
            Part("Text", f"{library} as {self.corpus}", self.corpus.is_file, self.gather_text),
            Part("Tokenizer", str(self.tokenizer), self.tokenizer.is_dir, self.learn_tokenizer),
            Part("Packs", str(self.packs), (self.packs / "packs.json").is_file, self.prepare_packs),
            Part("Training", str(self.run_dir), self.is_trained, self.train),
            Part("Check", f"{self.model}, loaded by transformers alone", self.is_checked, self.check),
            Part("Comparison", f"{self.report}: FP32, and FP8 and FP4 emulated", self.is_compared, self.compare),
        ]

    def gather_text(self) -> None:
        from demo.corpus import standard_library, write_corpus

        summary = write_corpus(self.corpus, standard_library())
        print(f"{summary.documents:,} documents, {summary.text_bytes / 1e6:.1f} MB")
        if summary.unreadable:
            print(f"left out, not readable as Python: {', '.join(summary.unreadable)}")

    def learn_tokenizer(self) -> None:
        # Small on purpose: at a hidden size of 256, 4,096 tokens cost a million parameters, which three minutes cannot teach.
        vocabulary = str(self.recipe.model.config["vocab_size"])
        run([PYTHON, "-m", "packing", "tokenizer", str(self.corpus), "--vocabulary", vocabulary, "--out", str(self.tokenizer)])

    def prepare_packs(self) -> None:
        run([PYTHON, "-m", "packing", "prepare", str(RECIPE)])

    def train(self) -> None:
        run(train_command("cpu", RECIPE), {"OMP_NUM_THREADS": threads()})

    def is_trained(self) -> bool:
        """Returns whether the run has reached its last step; a run that was stopped before may also have a summary."""
        summary = self.run_dir / "summary.json"
        return self.model.is_dir() and summary.is_file() and json.loads(summary.read_text())["steps"] >= self.recipe.train.steps

    def is_checked(self) -> bool:
        return self.sample.is_file() and self.sample.stat().st_mtime >= (self.run_dir / "summary.json").stat().st_mtime

    def check(self) -> None:
        settings = self.recipe.evaluate
        command = [
            PYTHON,
            "-m",
            "pretrain",
            "sample",
            str(self.model),
            *settings.samples,
            "--tokens",
            str(settings.sample_tokens),
        ]
        self.sample.write_text(run(command, shows=False), encoding="utf-8")

    def is_compared(self) -> bool:
        return self.report.is_file() and self.report.stat().st_mtime >= (self.run_dir / "summary.json").stat().st_mtime

    def compare(self) -> None:
        run([PYTHON, "-m", "pretrain", "matrix", str(MATRIX)], {"OMP_NUM_THREADS": threads()})


def train_command(configuration: str, recipe: Path, *arguments: str) -> list[str]:
    """The command that trains `recipe` as accelerate_configs/<configuration>.yaml says; `arguments` are overrides or flags."""
    config_file = f"accelerate_configs/{configuration}.yaml"
    return [script("accelerate"), "launch", "--config_file", config_file, "train_accelerate.py", str(recipe), *arguments]


def threads() -> str:
    """OMP_NUM_THREADS for accelerate: as set, else one a core that this process may use.

    accelerate's own default is the number of physical cores, which many virtual machines cannot tell.
    """
    return os.environ.get("OMP_NUM_THREADS", str(usable_cores()))
