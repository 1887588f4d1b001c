"""A trained model as a Hugging Face folder with its card: `final/` of a run, and `python -m pretrain export` of any checkpoint.

The model's configuration and its tokenizer are those that the run's
config.yaml leads to: the model's source or its config, and the packs or the tokenizer that the data names.
"""

from __future__ import annotations

import argparse
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.errors import HTTPError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from foundation.errors import InputError
from foundation.reading import load_object, refusing
from foundation.units import cell, count, percent
from packing.settings import HUB_NAME
from packing.store import open_packs
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.format import (
    DTYPES,
    Manifest,
    TensorEntry,
    load_tensors,
    newest_in,
    read_manifest,
    step_folder,
    step_of,
)
from pretrain.compare.figures import picture_of_run
from pretrain.metrics.run_record import (
    END_KEY,
    LOSS_KEY,
    RunRecord,
    own_evaluations,
    read_metrics,
    read_run,
)
from pretrain.model import huggingface as model
from pretrain.optimizer.exact_weights import master_of
from pretrain.plan.tokenizer import fingerprint_in_use, load_tokenizer
from pretrain.precision.settings import WEIGHT_DTYPES, Weights
from pretrain.run.data import Data
from pretrain.run.run import Run, best_evaluation
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

CARD, PICTURE = "README.md", "loss.png"
_REFUSALS = (HTTPError, OSError, RuntimeError, ValueError)  # of the hub, or that it is not reached

# ── The command ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def main(options: argparse.Namespace) -> int:
    source = best_checkpoint(options.source) if options.best else options.source
    _, run_dir = _named(source)
    out = options.out or run_dir / "export"
    if out.exists():
        raise InputError(
            f"{out}: exists, and is not written over; name a folder that does not exist"
        )
    if options.push is not None:
        make_repository(options.push)  # before gigabytes are hashed and written in vain
    saved = SavedModel.open(source, options.dtype)
    tokenizer, why_not = tokenizer_of(saved.recipe, saved.run_dir)
    beside = {}
    # the run's records are gone, or the folder was renamed and has no step
    with suppress(InputError, ValueError):
        run = read_run(saved.run_dir, step_of(saved.folder))
        beside = {
            CARD: model_card(run, saved.hf, tokenizer=tokenizer is not None),
            PICTURE: picture_of_run(run),
        }
    model.export(saved.hf, saved.read, tokenizer, out, beside)
    without = f"; without a tokenizer: {why_not}" if tokenizer is None else ""
    print(f"{saved.folder} is exported to {out}: weights in {saved.to}{without}")
    if options.push is not None:
        whole = f"{out} is whole; push it by `hf upload {options.push} {out}`"
        with refusing(_REFUSALS, f"--push: {HfApi().endpoint} does not take it", whole):
            # an earlier push may have had other shards, which transformers would load
            old = "model*.safetensors*"
            message = f"{saved.recipe.name}, {saved.folder.name}"
            done = HfApi().upload_folder(
                repo_id=options.push, folder_path=out, commit_message=message, delete_patterns=old
            )
        print(f"pushed: {done.commit_url}")
    return 0


def make_repository(name: str) -> None:
    """Make the private model repository `name` on the hub, unless it is there. InputError where the hub does not let us."""
    if "/" not in name or not HUB_NAME.fullmatch(name):
        raise InputError(f"--push {name}: name the repository as OWNER/NAME")
    if get_token() is None:
        raise InputError(
            "--push: no token of the hub is known here; type `hf auth login`, or set HF_TOKEN"
        )
    with refusing(
        _REFUSALS,
        f"--push: {HfApi().endpoint} does not take it",
        "nothing is exported; mend that, or drop --push",
    ):
        HfApi().create_repo(name, private=True, exist_ok=True)


def best_checkpoint(run_dir: Path) -> Path:
    """The run's checkpoint with the lowest held-out loss. InputError where there is none, or where it was not kept."""
    best = best_evaluation(own_evaluations(read_metrics(run_dir)))
    if not best or not (folder := step_folder(run_dir / "checkpoints", best["step"])).is_dir():
        raise InputError(
            f"{run_dir}: it has no checkpoint of its best evaluation; set `checkpoint.best` for the next run"
        )
    return folder


# ── A saved model ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class SavedModel:
    """The model in the checkpoint at `folder`, stored as `to` says: whole tensors, one at a time, whatever processes wrote it."""

    folder: Path
    manifest: Manifest
    hf: PreTrainedModel  # on any device, sharded or without memory for its weights
    to: Weights
    run_dir: Path
    recipe: Recipe

    @classmethod
    def open(cls, source: Path, dtype: Weights | None = None) -> SavedModel:
        """Opens a run folder's newest intact checkpoint, or the checkpoint at `source`. `dtype` None: as its weights are stored,
        exact ones as BF16. Raises InputError where it is damaged."""
        folder, run_dir = _named(source)
        weights = Checkpoints(folder.parent, keep=1).read_state(folder)["identity"]["weights"]
        to: Weights = dtype or ("fp32" if weights == "fp32" else "bf16")
        recipe = load_recipe(run_dir / "config.yaml")
        hf = model.build_on_meta(model.load_config(recipe.model))
        model.round_weights(hf, getattr(torch, WEIGHT_DTYPES[to]))
        if recipe.model.weights_source is not None and hf.can_generate():
            with suppress(OSError):  # it has none of its own
                generation = GenerationConfig.from_pretrained(
                    recipe.model.repository, revision=recipe.model.revision
                )
                hf.generation_config = generation
        return cls(folder, read_manifest(folder), hf, to, run_dir, recipe)

    def read(self, name: str) -> Tensor:
        """The whole tensor `name` of `hf`, on the CPU: a parameter as mode `to` stores it, a buffer as it was saved."""
        tensor, dtype = (
            self._whole(name, self.manifest.model[name]),
            getattr(torch, WEIGHT_DTYPES[self.to]),
        )
        if name not in self._parameters or tensor.dtype == dtype:
            return tensor
        # the other half of an exact BF16 weight
        rest = self.manifest.optimizer.get(f"remainder/{name}")
        return master_of(tensor, rest and self._whole(f"remainder/{name}", rest)).to(dtype)

    @cached_property
    def _parameters(self) -> set[str]:
        return {name for name, _ in self.hf.named_parameters()}

    def _whole(self, name: str, entry: TensorEntry) -> Tensor:
        # Zeros: what pieces of a forged manifest leave out must not be this process's memory.
        tensor = torch.zeros(entry.shape, dtype=DTYPES[entry.dtype])
        load_tensors(self.folder, {name: entry}, {name: tensor})
        return tensor


def _named(source: Path) -> tuple[Path, Path]:
    """The checkpoint that `source` names, and the folder of its run."""
    run_dir, folder = source.absolute().parent.parent, source
    if (source / "checkpoints").is_dir():
        run_dir, folder = source, newest_in(source)
    if folder == run_dir or not (run_dir / "config.yaml").is_file():
        raise InputError(
            f"{source}: name a run folder that has saved a checkpoint, or a step-* folder in its `checkpoints`"
        )
    return folder, run_dir


def tokenizer_of(recipe: Recipe, run_dir: Path) -> tuple[PreTrainedTokenizerBase | None, str]:
    """The tokenizer that the run in `run_dir` was trained with; or None, and why."""
    try:
        environment: dict[str, Any] = load_object(
            run_dir / "environment.json", "start the run again to write it"
        )
        # opened, never prepared
        data = Data(open_packs(recipe.data, "train"), None) if recipe.data.packs.exists() else None
        tokenizer = load_tokenizer(recipe.data, recipe.model, data, needed=False)
        if tokenizer and environment.get("tokenizer_fingerprint") != fingerprint_in_use(
            recipe.data, recipe.model, data
        ):
            return (
                None,
                f"that of {recipe.data.packs} is not the one that it was trained with; put that one back",
            )
    except InputError as error:
        return None, str(error)
    return tokenizer, "" if tokenizer else "none lies with the packs"


# ── A run's end ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def export_trained(run: Run, record: RunRecord) -> None:
    """Write `final/` of a run whose last step is saved, with the card that its `record` makes and its curves, drawn already. The
    weights are the checkpoint's."""
    hf, recipe, folder = run.assembly.hf, run.job.recipe, run.checkpoints.latest
    saved = SavedModel(folder, read_manifest(folder), hf, recipe.weights, run.folder.path, recipe)
    card = model_card(record, hf, tokenizer=run.job.tokenizer is not None)
    beside = {CARD: card, PICTURE: run.folder.loss_plot.read_bytes()}
    model.export(hf, saved.read, run.job.tokenizer, run.folder.final, beside)


# ── The card ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def model_card(run: RunRecord, hf: PreTrainedModel, *, tokenizer: bool) -> bytes:
    """README.md of the exported model: what it is, what it was trained on, how well it predicts. Markdown with the front matter
    of the hub, from the records of its run alone. `hf` gives the sizes, on any device; PICTURE stands beside it."""
    recipe, figures = run.config, run.summary
    source, data = recipe["model"].get("source"), recipe["data"]
    texts = [
        str(each["source"]) for each in (data, *(data.get("sources") or ())) if each.get("source")
    ]
    # to the hub, a base model is one whose weights these were
    trained_on = source and not recipe["model"].get("from_scratch")
    front = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        model_name=recipe["name"],
        base_model=source if trained_on and _on_the_hub(source) else None,
        datasets=[text for text in texts if _on_the_hub(text)] or None,
    )
    parameters = count(sum(parameter.numel() for parameter in hf.parameters()))
    loading = f'model = AutoModelForCausalLM.from_pretrained(".", dtype="auto"){_CONTINUING if tokenizer else ""}'
    imported = "AutoModelForCausalLM, AutoTokenizer" if tokenizer else "AutoModelForCausalLM"
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {recipe['name']}",
        f"A `{type(hf).__name__}` of {parameters} parameters in {str(hf.dtype).removeprefix('torch.')}, trained on "
        f"{count(figures['tokens'])} tokens in {figures['steps']:,} steps. In this folder:",
        f"```python\nfrom transformers import {imported}\n\n{loading}\n```",
        "\n".join(
            [
                "| | |",
                "| --- | --- |",
                *(f"| {key} | {cell(text)} |" for key, text in _rows(run).items()),
            ]
        ),
        f"![Loss by step: training and, where packs were held out, held-out loss]({PICTURE})",
        "Every setting of the run:",
        "```yaml\n"
        + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120)
        + "```",
    ]
    return ("\n\n".join(parts) + "\n").encode()


_CONTINUING = """
tokenizer = AutoTokenizer.from_pretrained(".")
prompt = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=60, do_sample=True)[0]))"""


def _on_the_hub(name: str) -> bool:
    return bool(HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _rows(run: RunRecord) -> dict[str, str]:
    """What the recipe, which stands below, does not say by itself."""
    data, figures = run.config["data"], run.summary
    shares = [
        f"{percent(each['weight'])} {each.get('source') or each['name']}"
        for each in data.get("sources") or ()
    ]
    rows = {
        "data": ", ".join(shares) or data.get("source") or f"packs in {data['packs']}",
        "tokens": f"{figures['tokens']:,}, padding included; {figures['epoch']:.3g} epochs",
        "precision": f"{run.precision}{', emulated in software' if run.emulated else ''}; weights {run.config['weights']}",
    }
    if begin := run.config["train"]["begin_with"]:
        rows["begins with"] = (
            f"the first {run.steps[0]['step'] - 1:,} of these steps, by another run: {begin}"
        )
    rows |= {f"`{key}`": values for key, values in run.changed_settings.items()}
    if LOSS_KEY in figures:
        rows["loss"] = f"{figures[LOSS_KEY]:.4f}, mean of the last {figures[END_KEY]} steps"
    if "held_out_loss" in figures:
        rows["held-out loss"] = f"{figures['held_out_loss']:.4f} nats a token{run.when_evaluated}"
    return rows
