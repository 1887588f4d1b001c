"""Export a trained model as a Hugging Face folder with its card.

A run writes `final/` at its end. `python -m pretrain export` exports any checkpoint. The run's
config.yaml leads to the model's configuration (the model's source, or its config) and to the
tokenizer (of the packs, or the one that the data names).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import torch
import yaml
from huggingface_hub import HfApi, ModelCardData, get_token
from huggingface_hub.errors import HTTPError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from foundation.errors import InputError
from foundation.reading import load_object, refusing
from foundation.units import cell, count, percent
from packing.arrow import Packs
from packing.settings import HUB_NAME
from packing.store import open_packs
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.format import (
    DTYPES,
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

CARD = "README.md"
PICTURE = "loss.png"
_REFUSALS = (HTTPError, OSError, RuntimeError, ValueError)  # of the hub, or of the network

# ── The command ───────────────────────────────────────────────────────────────────────────────────


def main(options: argparse.Namespace) -> int:
    """Export a checkpoint, push it if `--push` is given, and return 0. Raises InputError."""
    source = best_checkpoint(options.source) if options.best else options.source
    checkpoint, run_dir = checkpoint_of(source)
    out = options.out or run_dir / "export"
    if out.exists():
        raise InputError(f"{out}: already exists; name a folder that does not exist")
    if options.push is not None:
        make_repository(options.push)  # before gigabytes are hashed and written in vain
    saved_as = Checkpoints(checkpoint.parent, keep=1).read_state(checkpoint)["identity"]["weights"]
    stored_as: Weights = options.dtype or ("fp32" if saved_as == "fp32" else "bf16")
    recipe = load_recipe(run_dir / "config.yaml")
    hf = empty_model(recipe, stored_as)
    tokenizer, why_not = tokenizer_of(recipe, run_dir)
    beside = {}
    # The run's records may be missing, and a renamed folder has no step.
    with suppress(InputError, ValueError):
        run = read_run(run_dir, step_of(checkpoint))
        beside[CARD] = model_card(run, hf, has_tokenizer=tokenizer is not None)
        beside[PICTURE] = picture_of_run(run)
    model.export(hf, tensor_reader(checkpoint, hf, stored_as), tokenizer, out, beside)
    remark = f"; without a tokenizer: {why_not}" if tokenizer is None else ""
    print(f"{checkpoint} is exported to {out}: weights in {stored_as}{remark}")
    if options.push is not None:
        push(out, options.push, f"{recipe.name}, {checkpoint.name}")
    return 0


def make_repository(name: str) -> None:
    """Create the private model repository `name` on the hub if it does not exist.

    Raises InputError if the hub refuses it.
    """
    if "/" not in name or not HUB_NAME.fullmatch(name):
        raise InputError(f"--push {name}: name the repository as OWNER/NAME")
    if get_token() is None:
        raise InputError(
            "--push: this machine has no token of the hub; type `hf auth login`, or set HF_TOKEN"
        )
    with _refusing_push("nothing is exported; fix that, or omit --push"):
        HfApi().create_repo(name, private=True, exist_ok=True)


def push(folder: Path, repository: str, message: str) -> None:
    """Upload an exported folder to the hub. Raises InputError if the hub refuses it."""
    with _refusing_push(f"the export is complete; push it by `hf upload {repository} {folder}`"):
        # An earlier push may have had other shards, which transformers would load.
        commit = HfApi().upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=message,
            delete_patterns="model*.safetensors*",
        )
    print(f"pushed: {commit.commit_url}")


def _refusing_push(remedy: str) -> Any:
    """Re-raise refusals of the hub and network errors as InputError with `remedy`."""
    return refusing(_REFUSALS, f"--push: {HfApi().endpoint} does not take it", remedy)


def best_checkpoint(run_dir: Path) -> Path:
    """Return the run's checkpoint with the lowest held-out loss.

    Raises InputError if the run has none, or if that checkpoint was not kept.
    """
    best = best_evaluation(own_evaluations(read_metrics(run_dir)))
    folder = step_folder(run_dir / "checkpoints", best["step"]) if best else None
    if folder is None or not folder.is_dir():
        raise InputError(
            f"{run_dir}: has no checkpoint of its best evaluation; set `checkpoint.best` for the "
            "next run"
        )
    return folder


def checkpoint_of(source: Path) -> tuple[Path, Path]:
    """Return the checkpoint that `source` names, and the folder of its run.

    source: a run folder, whose newest intact checkpoint is taken, or a checkpoint.
    """
    is_run = (source / "checkpoints").is_dir()
    run_dir = source if is_run else source.absolute().parent.parent
    checkpoint = newest_in(source) if is_run else source
    if checkpoint == run_dir or not (run_dir / "config.yaml").is_file():
        raise InputError(
            f"{source}: name a run folder that has saved a checkpoint, or a step-* folder in its "
            "`checkpoints`"
        )
    return checkpoint, run_dir


# ── A saved model ─────────────────────────────────────────────────────────────────────────────────


def empty_model(recipe: Recipe, stored_as: Weights) -> PreTrainedModel:
    """Return the recipe's model on the meta device, in the dtype of mode `stored_as`."""
    hf = model.build_on_meta(model.load_config(recipe.model))
    model.round_weights(hf, getattr(torch, WEIGHT_DTYPES[stored_as]))
    if recipe.model.weights_source is not None and hf.can_generate():
        with suppress(OSError):  # the source has no generation config
            hf.generation_config = GenerationConfig.from_pretrained(
                str(recipe.model.repository), revision=recipe.model.revision or "main"
            )
    return hf


def tensor_reader(
    checkpoint: Path, hf: PreTrainedModel, stored_as: Weights
) -> Callable[[str], Tensor]:
    """Return a function that reads a tensor of a checkpoint by name, complete, on the CPU.

    A parameter has the dtype of mode `stored_as`, a buffer the one it was saved in. `hf` may be on
    any device.
    """
    manifest = read_manifest(checkpoint)
    dtype = getattr(torch, WEIGHT_DTYPES[stored_as])
    parameters = {name for name, _ in hf.named_parameters()}

    def load(name: str, entry: TensorEntry) -> Tensor:
        # Zeros: a forged manifest may omit pieces, which must not show this process's memory.
        tensor = torch.zeros(entry.shape, dtype=DTYPES[entry.dtype])
        load_tensors(checkpoint, {name: entry}, {name: tensor})
        return tensor

    def read(name: str) -> Tensor:
        tensor = load(name, manifest.model[name])
        if name not in parameters or tensor.dtype == dtype:
            return tensor
        key = f"remainder/{name}"  # the lower half of an exact BF16 weight
        remainder = load(key, manifest.optimizer[key]) if key in manifest.optimizer else None
        return master_of(tensor, remainder).to(dtype)

    return read


def tokenizer_of(recipe: Recipe, run_dir: Path) -> tuple[PreTrainedTokenizerBase | None, str]:
    """Return the tokenizer that the run in `run_dir` was trained with, or None and the reason."""
    try:
        environment = load_object(run_dir / "environment.json", "start the run again to write it")
        data = None
        if recipe.data.packs.exists():  # packs are never prepared here
            data = Data(cast(Packs, open_packs(recipe.data, "train")), None)
        tokenizer = load_tokenizer(recipe.data, recipe.model, data, needed=False)
        fingerprint = fingerprint_in_use(recipe.data, recipe.model, data)
    except InputError as error:
        return None, str(error)
    if tokenizer is not None and environment.get("tokenizer_fingerprint") != fingerprint:
        return None, f"the tokenizer of {recipe.data.packs} has changed since; restore it"
    return tokenizer, "" if tokenizer else "the packs have none"


# ── The end of a run ──────────────────────────────────────────────────────────────────────────────


def export_trained(run: Run, record: RunRecord) -> None:
    """Write `final/` of a run whose last step is saved.

    record: of the run, for the card. The loss curves are drawn already.
    """
    hf = run.assembly.hf
    checkpoint = step_folder(run.folder.checkpoints, run.state.step)
    beside = {
        CARD: model_card(record, hf, has_tokenizer=run.job.tokenizer is not None),
        PICTURE: run.folder.loss_plot.read_bytes(),
    }
    model.export(
        hf,
        tensor_reader(checkpoint, hf, run.job.recipe.weights),
        run.job.tokenizer,
        run.folder.final,
        beside,
    )


# ── The card ──────────────────────────────────────────────────────────────────────────────────────

_CONTINUE = """
tokenizer = AutoTokenizer.from_pretrained(".")
prompt = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=60, do_sample=True)[0]))"""


def model_card(run: RunRecord, hf: PreTrainedModel, *, has_tokenizer: bool) -> bytes:
    """Return README.md of an exported model: its size, data, settings and losses.

    It is Markdown with the front matter of the hub, from the records of the run alone. `hf` gives
    the sizes, on any device. PICTURE lies beside the card.
    """
    recipe = run.config
    source = recipe["model"].get("source")
    data = recipe["data"]
    datasets = [part.get("source") for part in (data, *(data.get("sources") or ()))]
    # To the hub, a base model is one whose weights the training began with.
    has_base = source and not recipe["model"].get("from_scratch") and _is_on_hub(source)
    front = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        model_name=recipe["name"],
        base_model=source if has_base else None,
        datasets=[name for name in datasets if name and _is_on_hub(str(name))] or None,
    )
    parameters = count(sum(parameter.numel() for parameter in hf.parameters()))
    table = [f"| {key} | {cell(text)} |" for key, text in _rows(run).items()]
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {recipe['name']}",
        f"A `{type(hf).__name__}` of {parameters} parameters in "
        f"{str(hf.dtype).removeprefix('torch.')}, trained on {count(run.summary['tokens'])} tokens "
        f"in {run.summary['steps']:,} steps. In this folder:",
        "```python\nfrom transformers import AutoModelForCausalLM"
        f"{', AutoTokenizer' if has_tokenizer else ''}\n\n"
        'model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")'
        f"{_CONTINUE if has_tokenizer else ''}\n```",
        "\n".join(["| | |", "| --- | --- |", *table]),
        f"![Loss by step: training and, where packs were held out, held-out loss]({PICTURE})",
        "Every setting of the run:",
        "```yaml\n"
        + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120)
        + "```",
    ]
    return ("\n\n".join(parts) + "\n").encode()


def _is_on_hub(name: str) -> bool:
    """Return whether `name` can only be a name of the hub."""
    return bool(HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _rows(run: RunRecord) -> dict[str, str]:
    """Return the rows of the card's table. The complete recipe stands below it."""
    data = run.config["data"]
    figures = run.summary
    shares = [
        f"{percent(part['weight'])} {part.get('source') or part['name']}"
        for part in data.get("sources") or ()
    ]
    emulated = ", emulated in software" if run.emulated else ""
    rows = {
        "data": ", ".join(shares) or data.get("source") or f"packs in {data['packs']}",
        "tokens": f"{figures['tokens']:,}, padding included; {figures['epoch']:.3g} epochs",
        "precision": f"{run.precision}{emulated}; weights {run.config['weights']}",
    }
    trunk = run.config["train"]["begin_with"]
    if trunk:
        first_steps = f"the first {run.steps[0]['step'] - 1:,} of these steps"
        rows["begins with"] = f"{first_steps}, by another run: {trunk}"
    rows |= {f"`{key}`": values for key, values in run.changed_settings.items()}
    if LOSS_KEY in figures:
        rows["loss"] = f"{figures[LOSS_KEY]:.4f}, mean of the last {figures[END_KEY]} steps"
    if "held_out_loss" in figures:
        rows["held-out loss"] = f"{figures['held_out_loss']:.4f} nats a token{run.when_evaluated}"
    return rows
