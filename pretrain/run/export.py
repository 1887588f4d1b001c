"""A trained model as a Hugging Face folder: `final/` of a run, and `python -m pretrain export` of any checkpoint.

No GPU, and no more memory than one file of weights. The model's configuration and its tokenizer are those that the run's
config.yaml leads to: the model's source or its config, and the packs or the tokenizer that the data names.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from foundation.command import CommandParser
from foundation.errors import InputError
from foundation.files import find_damage
from foundation.reading import load_object
from packing.store import open_packs
from pretrain.checkpoint.folders import STATE, Manifest, TensorEntry, read_manifest, step_folder, step_folders, step_of
from pretrain.checkpoint.shards import DTYPES, load_tensors
from pretrain.compare.figures import picture_of_losses
from pretrain.metrics.run_record import RunRecord, own_evaluations, read_metrics, read_run
from pretrain.model import huggingface as model
from pretrain.optimizer.exact_weights import convert_weight
from pretrain.plan.data import Data
from pretrain.plan.tokenizer import fingerprint_in_use, load_tokenizer
from pretrain.precision.settings import WEIGHT_DTYPES, Weights
from pretrain.run.card import CARD, PICTURE, model_card
from pretrain.run.running import BestEvaluation, Run
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

# ── The command ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


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
    options = parser.parse_intermixed_args(arguments)
    if options.out is None and not options.best:
        raise InputError("python -m pretrain export RUN_OR_CHECKPOINT OUT: name OUT, the folder to make")
    source = best_checkpoint(options.source) if options.best else options.source
    print(export_checkpoint(source, options.out or options.source / "best", options.dtype))
    return 0


def best_checkpoint(run_dir: Path) -> Path:
    """The run's checkpoint with the lowest held-out loss. InputError where there is none, or where it was not kept."""
    best = None
    for record in own_evaluations(read_metrics(run_dir)):
        best = BestEvaluation.after(record, best)
    if best is None:
        raise InputError(f"{run_dir}: has evaluated no step of its own, so none is the best; leave --best out")
    folder = step_folder(run_dir / "checkpoints", best.step)
    if not folder.is_dir():
        raise InputError(
            f"{run_dir}: step {best.step} has the lowest held-out loss and is gone; set `checkpoint.best: true` in the next run"
        )
    return folder


def export_checkpoint(source: Path, out: Path, dtype: Weights | None) -> str:
    """Write the model at `source`, a run folder or a checkpoint in one, to the new folder `out`; returns what was done.

    InputError, before anything is written, where `out` exists, and where the checkpoint is damaged.
    """
    if out.exists():
        raise InputError(f"{out}: exists, and is not written over; name a folder that does not exist")
    saved = SavedModel.open(source, dtype)
    tokenizer, why_not = tokenizer_of(saved.recipe, saved.run_dir)
    model.export(saved.hf, saved.read, tokenizer, out, _card_of(saved, tokenizer is not None))
    without = f"; without a tokenizer: {why_not}" if tokenizer is None else ""
    return f"{saved.folder} is exported to {out}: weights in {saved.to}{without}"


def _card_of(saved: SavedModel, tokenizer: bool) -> dict[str, bytes]:
    """The card of the model as it was at the checkpoint, and its picture; nothing where the run's records are gone."""
    try:
        step = step_of(saved.folder)
        run = read_run(saved.run_dir, [record for record in read_metrics(saved.run_dir) if record["step"] <= step])
    except (InputError, ValueError):  # a folder that was renamed has no step
        return {}
    return {CARD: model_card(run, saved.hf, tokenizer=tokenizer).encode(), PICTURE: picture_of_losses([run])}


# ── A saved model ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SavedModel:
    """The model in the checkpoint at `folder`, read as mode `to` stores it: whole tensors, one at a time, whatever processes
    wrote them."""

    folder: Path
    manifest: Manifest
    hf: PreTrainedModel  # on any device, sharded or without memory for its weights
    to: Weights
    run_dir: Path
    recipe: Recipe

    @classmethod
    def open(cls, source: Path, dtype: Weights | None = None) -> SavedModel:
        """Opens a run folder's newest intact checkpoint, or the checkpoint at `source`. `dtype` None: as its weights are stored,
        exact ones as BF16. Raises InputError where it is damaged, or of another model than its run's config.yaml and the
        `model.source` that it names describe."""
        folder, manifest, run_dir = _intact(source, moments=dtype == "fp32")
        identity = load_object(folder / STATE, "name another checkpoint")["identity"]
        recipe = load_recipe(run_dir / "config.yaml")
        to: Weights = dtype or ("fp32" if identity["weights"] == "fp32" else "bf16")
        hf = _without_memory(recipe, getattr(torch, WEIGHT_DTYPES[to]))
        described = {name: tuple(tensor.shape) for name, tensor in model.named_tensors(hf).items()}
        held = {name: entry.shape for name, entry in manifest.model.items()}
        if strange := sorted(name for name in described.keys() | held.keys() if described.get(name) != held.get(name)):
            raise InputError(f"{folder}: {strange[0]} has another shape in it than in the model of {run_dir / 'config.yaml'}")
        return cls(folder, manifest, hf, to, run_dir, recipe)

    def read(self, name: str) -> Tensor:
        """The whole tensor `name` of `hf`, on the CPU: a parameter as mode `to` stores it, a buffer as it was saved."""
        tensor, remainder = self._whole(name, self.manifest.model[name]), None
        if name not in self._parameters or (tensor.dtype == torch.bfloat16 and self.to != "fp32"):
            return tensor
        exact = f"remainder/{name}"  # the other halves of exact BF16 weights
        if self.to == "fp32" and exact in self.manifest.optimizer:
            remainder = self._whole(exact, self.manifest.optimizer[exact])
        return convert_weight(tensor, remainder, self.to)[0]

    @cached_property
    def _parameters(self) -> set[str]:
        return {name for name, _ in self.hf.named_parameters()}

    def _whole(self, name: str, entry: TensorEntry) -> Tensor:
        tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        load_tensors(self.folder, {name: entry}, {name: tensor})
        return tensor


def _intact(source: Path, *, moments: bool) -> tuple[Path, Manifest, Path]:
    """The checkpoint that `source` names, and the folder of its run. Its bytes are compared with their hashes; those of moments,
    among which exact weights have their remainders, where `moments` are wanted."""
    if (source / "checkpoints").is_dir():
        folders, run_dir = step_folders(source / "checkpoints"), source
    else:
        folders, run_dir = [source], source.absolute().parent.parent
    if not (run_dir / "config.yaml").is_file():
        what = "a run folder that has saved a checkpoint, or a step-* folder in its `checkpoints`"
        raise InputError(f"{source}: there is no {run_dir / 'config.yaml'}, which says what model it is; name {what}")
    problems = [f"{source}: no checkpoint is there"]
    for folder in folders:
        try:
            manifest = read_manifest(folder)
            problems = find_damage(folder, [f for f in manifest.files if moments or not f.name.startswith("optimizer-")])
        except InputError as error:
            problems = [str(error)]
        if not problems:
            return folder, manifest, run_dir
        print(f"{folder} is not used: {problems[0]}")
    raise InputError(problems[0] if str(source) in problems[0] else f"{source}: {problems[0]}")


def _without_memory(recipe: Recipe, dtype: torch.dtype) -> PreTrainedModel:
    """The model of `recipe` without memory for its weights, as one that is stored in `dtype`."""
    hf = model.build_on_meta(model.load_config(recipe.model))
    model.round_weights(hf, dtype)
    if recipe.model.weights_source is not None and hf.can_generate():
        with suppress(OSError):  # it has none of its own
            hf.generation_config = GenerationConfig.from_pretrained(recipe.model.weights_source, revision=recipe.model.revision)
    return hf


def tokenizer_of(recipe: Recipe, run_dir: Path) -> tuple[PreTrainedTokenizerBase | None, str]:
    """The tokenizer that the run in `run_dir` was trained with; or None, and why."""
    try:
        environment: dict[str, Any] = load_object(run_dir / "environment.json", "start the run again to write it")
        data = Data(open_packs(recipe.data, "train"), None) if recipe.data.packs.exists() else None  # opened, never prepared
        tokenizer = load_tokenizer(recipe.data, recipe.model, data, needed=False)
        trained_with = environment.get("tokenizer_fingerprint")
        if tokenizer and trained_with not in (None, fingerprint_in_use(recipe.data, recipe.model, data)):
            place = recipe.data.tokenizer or recipe.model.repository or recipe.data.packs
            return None, f"{place} is not the tokenizer that it was trained with ({trained_with[:12]}); put that one back"
    except InputError as error:
        return None, str(error)
    return tokenizer, "" if tokenizer else f"none lies with {recipe.data.packs.absolute()}"


# ── A run's end ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def export_trained(run: Run, record: RunRecord | None) -> None:
    """Write `final/` of a run whose last step is saved, with the card that its `record` makes and its curves, drawn already.
    All ranks call it; only the main process has a record.

    From the checkpoint, so that no process holds the model whole.
    """
    if not run.accelerator.is_main_process:
        return
    hf, recipe, folder = run.assembly.hf, run.job.recipe, run.checkpoints.latest
    saved = SavedModel(folder, read_manifest(folder), hf, recipe.weights, run.folder.path, recipe)
    card = model_card(record, hf, tokenizer=run.job.tokenizer is not None).encode()
    beside = {CARD: card, PICTURE: run.folder.loss_plot.read_bytes()}
    model.export(hf, saved.read, run.job.tokenizer, run.folder.final, beside)
