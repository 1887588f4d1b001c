"""`python -m pretrain export`: any checkpoint, of a run that goes on, stopped or has ended, as a Hugging Face folder.

No GPU, and no more memory than one file of weights. The model's configuration and its tokenizer are those that the run's
config.yaml leads to: the model's source or its config, and the packs or the tokenizer that the data names.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.reading import load_object
from foundation.settings import load_yaml
from packing.store import open_packs
from pretrain.checkpoint.folders import step_folder, step_folders, step_of
from pretrain.checkpoint.state import check_same_source
from pretrain.checkpoint.weights import SavedWeights
from pretrain.compare.figures import picture_of_losses
from pretrain.metrics.run_folder import RunFolder
from pretrain.metrics.run_record import RunRecord, own_evaluations, read_metrics, read_run
from pretrain.model import huggingface as model
from pretrain.model.distributed import largest_over_ranks
from pretrain.model.export import export as write_export
from pretrain.plan.data import Data
from pretrain.plan.tokenizer import check_same_tokenizer, load_tokenizer
from pretrain.precision.settings import WEIGHT_DTYPES, Weights
from pretrain.run.card import CARD, PICTURE, model_card, until
from pretrain.run.running import BestEvaluation, Run
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        prog="python -m pretrain export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="RUN_OR_CHECKPOINT", help="a run folder, of which the newest, or a step-*")
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", help="the folder to make; with --best by default RUN/best")
    parser.add_argument("--best", action="store_true", help="of a run, the checkpoint with the lowest held-out loss")
    parser.add_argument(
        "--dtype",
        choices=["bf16", "fp32"],
        help="of the weights; default: as the run stores them. fp32 of bf16_exact: each weight joined with its remainder",
    )
    asked = parser.parse_intermixed_args(arguments)
    if asked.out is None and not asked.best:
        raise InputError("python -m pretrain export RUN_OR_CHECKPOINT OUT: name OUT, the folder to make")
    source = best_checkpoint(asked.source) if asked.best else asked.source
    print(export_checkpoint(source, asked.out or asked.source / "best", asked.dtype))
    return 0


def best_checkpoint(run_dir: Path) -> Path:
    """The run's checkpoint with the lowest held-out loss. InputError where there is none, or where it was not kept."""
    evaluated = None
    for record in own_evaluations(read_metrics(run_dir)):
        evaluated = BestEvaluation.after(record, evaluated)
    if evaluated is None:
        raise InputError(f"{run_dir}: has evaluated no step of its own, so none is the best; leave --best out")
    folder = step_folder(run_dir / "checkpoints", evaluated.step)
    if not folder.is_dir():
        raise InputError(
            f"{run_dir}: step {evaluated.step} has the lowest held-out loss and is not kept; set `checkpoint.best: true` in the "
            "next run"
        )
    return folder


def export_checkpoint(source: Path, out: Path, dtype: Weights | None) -> str:
    """Write the model at `source`, a run folder or a checkpoint in one, to the new folder `out`; returns what was done.

    InputError, before anything is written, where `out` exists or lies among checkpoints, and where the checkpoint is damaged.
    """
    _require_new(out)
    saved = SavedModel.open(source, dtype)
    tokenizer, why_not = tokenizer_of(saved.recipe, saved.run_dir)
    write_export(saved.hf, saved.read, tokenizer, out, _card_of(saved, tokenizer is not None))
    without = f"; without a tokenizer: {why_not}" if tokenizer is None else ""
    return f"{saved.weights.folder} is exported to {out}: weights in {saved.to}{without}"


def _require_new(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise InputError(f"{out}: exists, and is not written over; name a folder that does not exist")
    if any(out.parent.glob("step-*/manifest*.json")):
        raise InputError(f"{out}: {out.parent} is for a run's checkpoints, and an export is none; name a folder elsewhere")


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint of a run, and the model that it is of, without memory for its weights, as one that is stored in mode `to`."""

    weights: SavedWeights
    run_dir: Path
    recipe: Recipe
    hf: PreTrainedModel
    to: Weights

    @classmethod
    def open(cls, source: Path, dtype: Weights | None = None) -> SavedModel:
        """Opens a run folder's newest intact checkpoint, or the checkpoint at `source`. `dtype` None: as its weights are stored,
        exact ones as BF16. Raises InputError where it is damaged, or of another model than its run's config.yaml and the
        `model.source` that it names describe."""
        weights, run_dir = _intact(source, dtype)
        recipe = load_recipe(run_dir / "config.yaml")
        check_same_source(weights.identity, model.source_config(recipe.model), weights.folder, recipe.model.source)
        to: Weights = dtype or ("fp32" if weights.mode == "fp32" else "bf16")
        hf = _shapes(recipe, getattr(torch, WEIGHT_DTYPES[to]))
        described, file = model.named_tensors(hf), run_dir / "config.yaml"
        if strange := sorted(described.keys() ^ set(weights.names())):
            raise InputError(f"{weights.folder}: {strange[0]} is in it or in the model of {file}, not in both")
        for name, tensor in described.items():
            if (shape := weights.shape(name)) != tuple(tensor.shape):
                raise InputError(
                    f"{weights.folder}: {name} has the shape {list(shape)}, and {list(tensor.shape)} in the model of {file}; put "
                    "the model's settings there back as they were"
                )
        return cls(weights, run_dir, recipe, hf, to)

    @cached_property
    def read(self) -> Callable[[str], Tensor]:
        """Reads a tensor of `hf` by name."""
        return _reader(self.weights, self.hf, self.to)


def _intact(source: Path, dtype: Weights | None) -> tuple[SavedWeights, Path]:
    """The checkpoint that `source` names, its bytes compared with their hashes, and the folder of its run."""
    if (source / "checkpoints").is_dir():
        folders, run_dir = step_folders(source / "checkpoints"), source
    else:
        is_one = source.is_dir() and (source.name.startswith("step-") or any(source.glob("manifest*.json")))
        folders, run_dir = [source] if is_one else [], source.absolute().parent.parent
    if not folders:
        what = "a run folder that has saved one, or a step-* folder in its `checkpoints`"
        raise InputError(f"{source}: no checkpoint is there; name {what}")
    if not (run_dir / "config.yaml").is_file():
        raise InputError(f"{source}: its model is not known: there is no {run_dir / 'config.yaml'}; leave it in its run folder")
    problems = []
    for folder in folders:
        try:
            weights = SavedWeights(folder)
            weights.verify(dtype or "bf16")
        except InputError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            print(f"{problem}. It is not used; the one before it is")
        return weights, run_dir
    raise InputError(problems[0])


def _shapes(recipe: Recipe, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `recipe` without memory for its weights, as one that is stored in `dtype`."""
    config = model.load_config(recipe.model)
    hf = model.build_on_meta(config)
    model.round_weights(hf, dtype)
    if recipe.model.weights_source is not None and hf.can_generate():
        with suppress(OSError):  # it has none of its own
            hf.generation_config = GenerationConfig.from_pretrained(recipe.model.weights_source, revision=recipe.model.revision)
    return hf


def tokenizer_of(recipe: Recipe, run_dir: Path) -> tuple[PreTrainedTokenizerBase | None, str]:
    """The tokenizer that the run in `run_dir` was trained with; or None, and why."""
    environment = RunFolder(run_dir, owner=False).environment
    try:
        known = load_object(environment, "start the run again to write it").get("tokenizer_fingerprint")
        data = Data(open_packs(recipe.data, "train"), None) if recipe.data.packs.exists() else None  # opened, never prepared
        tokenizer = load_tokenizer(recipe.data, recipe.model, data, needed=False)
        if tokenizer is not None:
            check_same_tokenizer(recipe.data, recipe.model, data, known)
    except InputError as error:
        return None, str(error)
    return tokenizer, "" if tokenizer else f"none lies with {recipe.data.packs.absolute()}"


def _card_of(saved: SavedModel, tokenizer: bool) -> dict[str, bytes]:
    """The card of the model as it was at the checkpoint, and its picture; nothing where the run's records are gone."""
    try:
        run = until(read_run(saved.run_dir), step_of(saved.weights.folder))
    except (InputError, ValueError):  # a folder that was renamed has no step
        return {}
    if not run.steps:
        return {}
    return {CARD: model_card(run, saved.hf, tokenizer=tokenizer).encode(), PICTURE: picture_of_losses([run])}


def export_trained(run: Run, record: RunRecord | None) -> None:
    """Write `final/` of a run whose last step is saved, with the card that its `record` makes and its curves, drawn already.
    All ranks call it; only the main process has a record.

    From the checkpoint, so that no process holds the model whole.
    """
    hf = run.assembly.hf
    if not run.accelerator.is_main_process:
        return
    read = _reader(SavedWeights(run.checkpoints.current), hf, run.job.recipe.weights)
    tokenizer, final = run.job.tokenizer, run.folder.final
    card = model_card(record, hf, tokenizer=tokenizer is not None).encode()
    beside = {CARD: card, PICTURE: run.folder.loss_plot.read_bytes()}
    write_export(hf, read, tokenizer, final, beside)


def is_exported(run: Run) -> bool:
    """Whether `final/` is of this very end of the run already, by an earlier start that reached it: it stays as it is then,
    whatever this start would store weights as. Collective."""
    there = False
    if run.accelerator.is_main_process and run.ended and any(run.folder.final.glob("*.safetensors")):
        there = bool(load_yaml(run.folder.config).get("checkpoint", {}).get("at_end"))
    return bool(largest_over_ranks(run.accelerator, int(there)))


def _reader(weights: SavedWeights, hf: PreTrainedModel, to: Weights) -> Callable[[str], Tensor]:
    """Reads a tensor of `hf` by name: a parameter as mode `to` stores it, a buffer as it is."""
    parameters = dict(hf.named_parameters()).keys()
    return lambda name: weights.read(name, to if name in parameters else None)
