"""`make demo`: make what is not there yet, then say where everything is. Ctrl-C at any moment; the next call goes on.

Its parts are the real commands, run as a user would type them; only the corpus is the demo's own. Every path comes from the
recipe, so the same commands work without the demo.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo.corpus import standard_library, write_corpus
from foundation.errors import InputError
from foundation.units import duration
from packing.pack_maker import usable_cores
from pretrain.settings.config import load_recipe, run_dir_of
from pretrain.settings.recipe import Recipe

RECIPE = "recipes/smoke.yaml"
MATRIX = "recipes/matrices/demo.yaml"
REPORT = Path("runs/demo/demo.html")


@dataclass(frozen=True)
class Part:
    """One thing that the demo makes. `product`: what is there once it is made."""

    title: str
    product: Path
    make: Callable[[], object]


def main() -> int:
    try:
        recipe = load_recipe(RECIPE)
        parts = parts_of(recipe)
        times = []
        for number, part in enumerate(parts, start=1):
            there = part.product.exists()
            print(
                f"[{number}/{len(parts)}] {part.title}: {part.product}{' (there already)' if there else ''}",
                flush=True,
            )
            started = time.monotonic()
            if not there:
                part.make()
            title = part.title[0].lower() + part.title[1:]
            times.append(
                f"{title} {'done before' if there else duration(time.monotonic() - started)}"
            )
        samples = recipe.evaluate
        run(
            python(
                "pretrain", "sample", run_dir_of(recipe) / "final", *samples.samples, "--tokens", 48
            )
        )
        print(last_screen(recipe, ", ".join(times)))
    except InputError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as failure:
        ended = f"`{failure.cmd}` ended with exit code {failure.returncode}"
        print(
            f"\ndemo: {ended}; its message stands above. `make demo` goes on from here.",
            file=sys.stderr,
        )
        return failure.returncode
    except KeyboardInterrupt:
        print("\nStopped. What is done stays done: `make demo` goes on from here.", file=sys.stderr)
        return 130
    return 0


def parts_of(recipe: Recipe) -> list[Part]:
    data, run_dir = recipe.data, run_dir_of(recipe)
    corpus, tokenizer = Path(data.source), Path(data.tokenizer)
    # Small on purpose: at a hidden size of 256, 4,096 tokens cost a million parameters, which three minutes cannot teach.
    learn = python(
        "packing",
        "tokenizer",
        corpus,
        "--vocabulary",
        recipe.model.config["vocab_size"],
        "--out",
        tokenizer,
    )
    return [
        Part("Text", corpus, lambda: gather_text(corpus)),
        Part("Tokenizer", tokenizer / "tokenizer_config.json", lambda: run(learn)),
        Part("Packs", data.packs / "packs.json", lambda: run(python("packing", "prepare", RECIPE))),
        Part("Training", run_dir / "final", lambda: run(train_command("cpu", RECIPE))),
        Part(
            "Comparison of FP32, and FP8 and FP4 emulated",
            REPORT,
            lambda: run(python("pretrain", "matrix", MATRIX)),
        ),
    ]


def gather_text(corpus: Path) -> None:
    documents, size = write_corpus(corpus, standard_library())
    print(
        f"the standard library of Python {platform.python_version()}: {documents:,} documents, {size / 1e6:.1f} MB"
    )


def python(package: str, *arguments: object) -> list[str]:
    return [script("python"), "-m", package, *map(str, arguments)]


def train_command(configuration: str, recipe: str, *arguments: str) -> list[str]:
    """The command that trains `recipe` as accelerate_configs/<configuration>.yaml says; `arguments` are overrides or flags."""
    config_file = f"accelerate_configs/{configuration}.yaml"
    return [
        script("accelerate"),
        "launch",
        "--config_file",
        config_file,
        "train_accelerate.py",
        recipe,
        *arguments,
    ]


def script(name: str) -> str:
    """The command `name` that is installed beside this Python, relative to the current folder where it lies below it."""
    path = Path(sys.executable).parent / name
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def run(command: list[str]) -> None:
    """Print and run `command`, with a thread a core. CalledProcessError for an exit code other than 0.

    Ctrl-C reaches every process of a terminal at once: the command then saves what it has, and KeyboardInterrupt follows its end.
    """
    print(f"$ {shlex.join(command)}", flush=True)
    interrupts: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        # accelerate's own default is the number of physical cores, which many virtual machines cannot tell.
        code = subprocess.Popen(
            command, env={"OMP_NUM_THREADS": str(usable_cores())} | os.environ
        ).wait()
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupts:
        raise KeyboardInterrupt
    if code:  # -9 is how Popen says "killed"
        raise subprocess.CalledProcessError(code if code > 0 else 128 - code, shlex.join(command))


def last_screen(recipe: Recipe, times: str) -> str:
    """Where everything is, how good it is, how long it took, and what to run next."""
    run_dir = run_dir_of(recipe)
    summary = json.loads((run_dir / "summary.json").read_text())
    guess = f"where a uniform guess has {recipe.model.config['vocab_size']:,}"
    return f"""
Held-out loss {summary["held_out_loss"]:.3f} nats a token: perplexity {summary["held_out_perplexity"]:.1f}, {guess}.
{summary["steps"]:,} steps, {summary["tokens"]:,} tokens, {summary["tokens_per_second"]:,.0f} tokens/s.

Where everything is
  the report       {REPORT}  (a page: open it in a browser)
  the model        {run_dir / "final"}  (a Hugging Face folder: AutoModelForCausalLM.from_pretrained loads it)
  every step       {run_dir / "metrics.jsonl"}
  checkpoints      {run_dir / "checkpoints"}
  packs            {recipe.data.packs}

Time: {times}

What to run next
  another text     {shlex.join(python("pretrain", "sample", run_dir / "final", "class "))}
  read the packs   {shlex.join(python("packing", "inspect", recipe.data.packs))}
  report           {shlex.join(python("pretrain", "report", run_dir, "--out", run_dir / "report.html"))}
  train longer     {shlex.join(train_command("cpu", RECIPE, "name=longer", "train.steps=3000"))}
                   key=value changes any setting. Ctrl-C saves a checkpoint, and the same command goes on from it.
  on a GPU         {shlex.join(train_command("bf16", RECIPE, "name=smoke_gpu", "train.epochs=4"))}
  plan a real run  {shlex.join(train_command("bf16", "recipes/small_malaysian_lm.yaml", "--plan"))}
  start over       make clean demo"""


if __name__ == "__main__":
    sys.exit(main())
