"""Check the command line, files and folders of a command before its module is imported.

Most commands import torch, which takes seconds. This module does not, so a mistake is reported at
once. `pretrain.settings.commands` names the check of each command. A check receives the parsed
options, and raises InputError for a mistake.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from foundation.errors import InputError
from foundation.reading import load_object
from packing.store import all_sources, find_splits
from pretrain.checkpoint.folders import MANIFEST, newest_in, step_folder
from pretrain.metrics.cards import card_called, cards_in
from pretrain.metrics.run_record import best_evaluation, evaluations_of_training, read_metrics
from pretrain.precision.settings import PRECISIONS, QUANTIZED, phases_of
from pretrain.settings.commands import USUAL_DEVICES
from pretrain.settings.config import load_recipe

# ── train, plan and doctor ────────────────────────────────────────────────────────────────────────


def check_train(options: argparse.Namespace) -> None:
    """Check the recipe, the checkpoint of --resume, and packs that are not made from a source."""
    recipe = load_recipe(options.recipe, options.overrides)
    check_checkpoint(options.resume)
    for source in all_sources(recipe.data):
        if source.source is None:
            # Raise InputError if there are no packs.
            find_splits(source.packs, source.length)


def check_checkpoint(requested: str) -> None:
    """Raise InputError if `requested` is neither "auto", a checkpoint, nor a run with one."""
    if requested != "auto":
        load_object(
            newest_in(Path(requested)) / MANIFEST,
            "this is no complete checkpoint; choose a step-* folder in the `checkpoints` of a run",
        )


def check_plan(options: argparse.Namespace) -> None:
    """Check the recipe and the names of the devices."""
    planned = {card.name for _, card in map(cards_in, options.on or USUAL_DEVICES)}
    for name, _ in options.price:
        card = card_called(name, f"--price {name}").name
        if card not in planned:
            raise InputError(f"--price: no plan on {card} is requested; add --on {card!r}")
    load_recipe(options.recipe, options.overrides)


def check_precisions(options: argparse.Namespace, *further: str) -> None:
    """Raise InputError if --precisions has a name that is neither a precision nor in `further`."""
    names = {*PRECISIONS, *further}
    if unknown := [name for name in options.precisions or () if name not in names]:
        raise InputError(
            f"--precisions: {', '.join(unknown)}: unknown; choose from {', '.join(PRECISIONS)}"
        )


# ── evaluate ──────────────────────────────────────────────────────────────────────────────────────


def check_evaluate(options: argparse.Namespace) -> None:
    """Check the recipe, the checkpoint of --resume, and the precisions."""
    path, overrides, _ = arguments_of_evaluate(options)
    load_recipe(path, overrides)
    check_precisions(options, "all")
    check_checkpoint(options.resume)


def arguments_of_evaluate(options: argparse.Namespace) -> tuple[Path, list[str], list[str]]:
    """Return the path of the recipe, its overrides, and the dataset of the command line, if any.

    Raises InputError if the recipe is a folder of no run, or if options contradict each other.
    """
    is_run = options.recipe.is_dir()
    path = options.recipe / "config.yaml" if is_run else options.recipe
    if is_run and not path.is_file():
        raise InputError(
            f"{options.recipe}: this folder is not a run folder, because it has no config.yaml; "
            "choose either a run folder, such as runs/NAME, or a recipe; --resume chooses a "
            "checkpoint of the run"
        )
    # Folders of a partitioned dataset have names such as date=2026-12-01.
    datasets = [
        argument for argument in options.overrides if "=" not in argument or Path(argument).exists()
    ]
    if len(datasets) > 1:
        raise InputError(
            f"command line: {' '.join(datasets)}: evaluate one file or folder of files at a time"
        )
    overrides = [f"run_dir={options.recipe}"] if is_run else []
    overrides += [argument for argument in options.overrides if argument not in datasets]
    return path, overrides, datasets


# ── gap ───────────────────────────────────────────────────────────────────────────────────────────


def check_gap(options: argparse.Namespace) -> None:
    """Check the checkpoint and the precisions. Set `options.precisions` if it is not set."""
    check_precisions(options)
    _, run_dir = checkpoint_of(options.source)  # raises if there is no checkpoint
    phases = phases_of(load_recipe(run_dir / "config.yaml").precision)
    names = options.precisions or [name for _, name in phases]
    options.precisions = [name for name in names if name in QUANTIZED]
    if not options.precisions:
        raise InputError(
            f"{run_dir}: the run has no low precision; set --precisions, for example to delayed"
        )


# ── export ────────────────────────────────────────────────────────────────────────────────────────


def check_export(options: argparse.Namespace) -> None:
    """Check the checkpoint, the recipe of its run, and that the folder of the export is new."""
    if options.precision and options.dtype:
        raise InputError(
            "--dtype: with --precision trained, weights that are not quantized are BF16; omit "
            "--dtype"
        )
    _, run_dir = checkpoint_of(options.source, best=options.best)
    out = options.out or run_dir / "export"
    if out.exists():
        raise InputError(f"{out}: this path already exists; choose a folder that does not exist")
    load_recipe(run_dir / "config.yaml")


def _best_checkpoint(run_dir: Path) -> Path:
    """Return the run's checkpoint with the lowest held-out loss.

    Raises InputError if the run has no evaluation, or if the checkpoint of its best evaluation was
    deleted or never saved.
    """
    best = best_evaluation(evaluations_of_training(read_metrics(run_dir)))
    folder = step_folder(run_dir / "checkpoints", best["step"]) if best else None
    if folder is None or not folder.is_dir():
        raise InputError(
            f"{run_dir}: the run has no checkpoint of its best evaluation; either omit --best, or "
            "train with `checkpoint.best: true`"
        )
    return folder


def checkpoint_of(source: Path, *, best: bool = False) -> tuple[Path, Path]:
    """Return the path of a checkpoint, and the path of its run folder.

    source: a checkpoint, or a run folder.
    best: True for the run's checkpoint with the lowest held-out loss instead of the newest.

    Raises InputError if `source` is neither a run folder with a checkpoint nor a checkpoint.
    """
    source = _best_checkpoint(source) if best else source
    is_run = (source / "checkpoints").is_dir()
    run_dir = source if is_run else source.absolute().parent.parent
    # For a run folder without a checkpoint, `newest_in` returns the run folder.
    checkpoint = newest_in(source)
    if checkpoint == run_dir or not (run_dir / "config.yaml").is_file():
        raise InputError(
            f"{source}: this is neither a run folder with a checkpoint nor a checkpoint; choose a "
            "run folder, or a step-* folder in the folder `checkpoints` of a run"
        )
    return checkpoint, run_dir


# ── sample ────────────────────────────────────────────────────────────────────────────────────────


def check_sample(options: argparse.Namespace) -> None:
    """Check the options of sampling and the folder of the model."""
    if not (options.temperature >= 0 and 0 < options.top_p <= 1):
        raise InputError(
            "command line: set --temperature to 0 or more, and --top-p to a number above 0 and not "
            "above 1"
        )
    model_folder(options.folder)


def model_folder(folder: Path) -> Path:
    """Return the folder of the model that `sample` loads: `final` of a run folder, or `folder`.

    Raises InputError if the folder has no model or no tokenizer.
    """
    if (folder / "final").is_dir():
        folder = folder / "final"
    if not (folder / "config.json").is_file():
        raise InputError(
            f"{folder}: this is not a folder with a model; choose a finished run, or create such a "
            "folder with `python -m pretrain export RUN_OR_CHECKPOINT`"
        )
    # If the files of the tokenizer are missing, transformers creates an empty tokenizer.
    if not (folder / "tokenizer_config.json").is_file():
        raise InputError(
            f"{folder}: the model has no tokenizer, because its packs name none; save the "
            "tokenizer of its token ids into this folder, by `save_pretrained` of transformers' "
            "tokenizer, or prepare packs from text with `data.tokenizer`"
        )
    return folder
