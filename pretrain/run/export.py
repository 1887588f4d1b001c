"""Export a trained model as a Hugging Face folder with its model card.

A run exports its last step to `final/`. `python -m pretrain export` exports any checkpoint. The
configuration of the model is built from the run's config.yaml (`model.source` or `model.config`).
The exported tokenizer is the tokenizer of the packs, or the tokenizer that `data` in config.yaml
sets.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from pathlib import Path

import torch
import yaml
from huggingface_hub import ModelCardData
from jinja2 import Template
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from foundation.errors import InputError
from foundation.reading import load_object
from foundation.units import cell, count, plural
from packing.settings import HUB_NAME
from packing.store import open_packs
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.folders import averaged, step_folder, step_folders, step_of
from pretrain.checkpoint.format import (
    DTYPES,
    Manifest,
    TensorEntry,
    load_tensors,
    read_manifest,
)
from pretrain.metrics.run_record import LOSS_KEY, RunRecord, read_run
from pretrain.model import huggingface
from pretrain.model.configuration import load_config
from pretrain.model.exported import write_model
from pretrain.optimizer.exact_weights import master_of
from pretrain.precision.delayed_state import PREFIX
from pretrain.precision.settings import WEIGHT_DTYPES, Weights
from pretrain.run.command_checks import checkpoint_of
from pretrain.run.data import Data
from pretrain.run.run import Run
from pretrain.run.served import served_weights
from pretrain.run.tokenizer import fingerprint_in_use, load_tokenizer, stop_after_answers
from pretrain.settings.config import load_recipe
from pretrain.settings.recipe import Recipe

CARD = "README.md"

# ── The command ───────────────────────────────────────────────────────────────────────────────────


def main(options: argparse.Namespace) -> int:
    """Export a checkpoint, and return 0.

    Raises InputError if the export is not possible.
    """
    checkpoint, run_dir = checkpoint_of(options.source, best=options.best)
    out = options.out or run_dir / "export"
    state = Checkpoints(checkpoint.parent, keep=1).read_state(checkpoint)
    recipe = load_recipe(run_dir / "config.yaml")
    keeps_fp32 = state["identity"]["weights"] == "fp32" and not options.precision
    stored_as: Weights = options.dtype or ("fp32" if keeps_fp32 else "bf16")
    hf = empty_model(recipe, stored_as)
    facts: dict[str, str] = {}
    checkpoints = [checkpoint]
    if options.merge:
        checkpoints = checkpoints_to_merge(checkpoint, options.merge, recipe)
        steps = ", ".join(f"{step_of(folder):,}" for folder in checkpoints)
        facts["merged"] = (
            f"mean weights of the checkpoints of steps {steps}; the losses are those of the run"
        )
    read = tensor_reader(checkpoints, hf, stored_as)
    tensors = all_tensors(hf, read)
    if options.precision:
        served, hf.config.quantization_config, facts_about_precision = served_weights(
            run_dir, state["precision"], recipe.fp8_config, hf, read, forward_scales(checkpoint)
        )
        tensors = served.items()
        facts |= facts_about_precision
    remark = write_export(out, run_dir, checkpoint, recipe, hf, tensors, facts)
    precision = state["precision"] if options.precision else stored_as
    print(f"{checkpoint} is exported to {out}: weights in {precision}{remark}")
    for title, fact in facts.items():
        print(f"  {title}: {fact}")
    return 0


def write_export(
    out: Path,
    run_dir: Path,
    checkpoint: Path,
    recipe: Recipe,
    hf: PreTrainedModel,
    tensors: Iterable[tuple[str, Tensor]],
    facts: Mapping[str, str],
) -> str:
    """Write a model folder with its tokenizer and its card. Return a remark for the user.

    The remark is empty if the folder has a tokenizer. Otherwise the remark has the reason why there
    is no tokenizer.

    facts: additional rows for the card's table. Keys are titles of rows, values are their texts.
    """
    tokenizer, why_not = tokenizer_of(recipe, run_dir)
    stop_after_answers(hf, tokenizer, recipe.data)
    further_files = {}
    # Omit the card if the run's records are missing, or if the checkpoint's folder was renamed and
    # so has no step in its name.
    with suppress(InputError, ValueError):
        run = read_run(run_dir, step_of(checkpoint))
        further_files[CARD] = model_card(run, hf, has_tokenizer=tokenizer is not None, facts=facts)
    write_model(hf, tensors, tokenizer, out, further_files)
    return f"; without a tokenizer: {why_not}" if tokenizer is None else ""


# ── A saved model ─────────────────────────────────────────────────────────────────────────────────


def empty_model(recipe: Recipe, stored_as: Weights) -> PreTrainedModel:
    """Return the recipe's model on the meta device, without values.

    stored_as: the setting `weights` that determines the dtype of the parameters.
    """
    hf = huggingface.build_on_meta(load_config(recipe.model))
    # Set the dtype of the parameters. They have no values to round.
    huggingface.round_weights(hf, getattr(torch, WEIGHT_DTYPES[stored_as]))
    if recipe.model.weights_source is not None:
        huggingface.load_generation_config(hf, recipe.model)
    return hf


def tensor_reader(
    checkpoints: Sequence[Path], hf: PreTrainedModel, stored_as: Weights
) -> Callable[[str], Tensor]:
    """Return a function that maps the name of a tensor to the tensor, read from checkpoints.

    checkpoints: one checkpoint, or several checkpoints whose mean weights are returned. The mean of
        the FP32 weights is computed in FP64 and rounded. Buffers are read from the first of them.
    hf: the model, on any device. Only the names of its parameters are used.
    stored_as: the setting `weights` that determines the dtype of the returned parameters. Buffers
        keep their saved dtype.

    The returned tensors are on the CPU, and complete even if the checkpoint has shards.
    """
    manifests = [read_manifest(checkpoint) for checkpoint in checkpoints]
    dtype = getattr(torch, WEIGHT_DTYPES[stored_as])
    parameters = {name for name, _ in hf.named_parameters()}

    def master(checkpoint: Path, manifest: Manifest, name: str) -> Tensor:
        # The remainder has the lower 16 bits of an exact BF16 weight.
        key = f"remainder/{name}"
        entry = manifest.optimizer.get(key)
        remainder = load_tensor(checkpoint, key, entry) if entry else None
        return master_of(load_tensor(checkpoint, name, manifest.model[name]), remainder)

    def read(name: str) -> Tensor:
        entry = manifests[0].model[name]
        is_buffer = name not in parameters
        is_in_dtype = DTYPES[entry.dtype] == dtype
        if is_buffer or (is_in_dtype and len(checkpoints) == 1):
            return load_tensor(checkpoints[0], name, entry)
        masters = (
            master(checkpoint, manifest, name).double()
            for checkpoint, manifest in zip(checkpoints, manifests, strict=True)
        )
        mean = reduce(torch.add, masters) / len(checkpoints)
        return mean.float().to(dtype)

    return read


def checkpoints_to_merge(checkpoint: Path, number: int, recipe: Recipe) -> list[Path]:
    """Return `checkpoint` and the earlier checkpoints whose weights are averaged with it.

    There are `number` checkpoints, the newest first. See `averaged`.

    Raises InputError if the run has fewer checkpoints, or if one of them is damaged.
    """
    # The path may be a link, or `.` in the folder of a checkpoint.
    checkpoint = checkpoint.resolve()
    folders = step_folders(checkpoint.parent)
    candidates = folders[folders.index(checkpoint) :] if checkpoint in folders else []
    merged = averaged(candidates, number, recipe.checkpoint.every or 1)
    if len(merged) < number:
        raise InputError(
            f"{checkpoint.parent}: {plural(len(merged), 'checkpoint')} can be merged instead of "
            f"{number}, because all but the last must be of multiples of `checkpoint.every`; "
            "either merge fewer, or train with a larger `checkpoint.keep`"
        )
    # `read_state` raises InputError for a damaged checkpoint.
    for folder in merged:
        Checkpoints(folder.parent, keep=1).read_state(folder)
    return merged


def load_tensor(checkpoint: Path, name: str, entry: TensorEntry) -> Tensor:
    """Return the full tensor `name` of a checkpoint, on the CPU."""
    # Start from zeros. If a manifest omits pieces of a tensor, uninitialized memory of this process
    # must not get into the export.
    tensor = torch.zeros(entry.shape, dtype=DTYPES[entry.dtype])
    load_tensors(checkpoint, {name: entry}, {name: tensor})
    return tensor


def all_tensors(hf: PreTrainedModel, read: Callable[[str], Tensor]) -> Iterable[tuple[str, Tensor]]:
    """Yield the name and the value of each tensor of the model. `read` returns the values."""
    return ((name, read(name)) for name in huggingface.named_tensors(hf))


def forward_scales(checkpoint: Path) -> dict[str, Tensor]:
    """Return the scales of inputs and weights under delayed scaling, by names in the checkpoint.

    The dict is empty if the run does not use delayed scaling.
    """
    return {
        name: load_tensor(checkpoint, name, entry)
        for name, entry in read_manifest(checkpoint).optimizer.items()
        if name.startswith(PREFIX) and name.endswith("/forward/scale")
    }


def tokenizer_of(recipe: Recipe, run_dir: Path) -> tuple[PreTrainedTokenizerBase | None, str]:
    """Return the tokenizer that the run in `run_dir` was trained with.

    If the tokenizer is missing or has changed, return None and the reason. Otherwise, the reason is
    empty.
    """
    try:
        environment = load_object(run_dir / "environment.json", "start the run again to write it")
        data = None
        # Open only existing packs. An export does not prepare packs.
        if recipe.data.packs.exists():
            data = Data(open_packs(recipe.data, "train"), held_out=None)
        tokenizer = load_tokenizer(recipe.data, recipe.model, data)
        fingerprint = fingerprint_in_use(recipe.data, recipe.model, data)
    except InputError as error:
        return None, str(error)
    if tokenizer is None:
        return None, "neither `data.tokenizer` nor the packs have a tokenizer.json"
    if environment.get("tokenizer_fingerprint") != fingerprint:
        return None, (
            f"the tokenizer of {recipe.data.packs} has changed since the training; restore it"
        )
    return tokenizer, ""


# ── The end of a run ──────────────────────────────────────────────────────────────────────────────


def export_trained(run: Run, record: RunRecord) -> None:
    """Export the last step of a run to `final/`. A checkpoint of this step must exist.

    record: the record of the run, for the model card.
    """
    hf = run.assembly.hf
    checkpoint = step_folder(run.folder.checkpoints, run.state.step)
    has_tokenizer = run.job.tokenizer is not None
    card = model_card(record, hf, has_tokenizer=has_tokenizer, facts={})
    write_model(
        hf,
        all_tensors(hf, tensor_reader([checkpoint], hf, run.job.recipe.weights)),
        run.job.tokenizer,
        run.folder.final,
        {CARD: card},
    )


# ── The card ──────────────────────────────────────────────────────────────────────────────────────

_CARD = Template(
    """\
---
{{ front }}
---

# {{ name }}

A `{{ architecture }}` of {{ parameters }} parameters in {{ dtype }}, trained on {{ tokens }} \
tokens in {{ steps }} steps. In this folder:

```python
from transformers import AutoModelForCausalLM{% if has_tokenizer %}, AutoTokenizer{% endif %}

model = AutoModelForCausalLM.from_pretrained(".", dtype="auto")
{%- if has_tokenizer %}
tokenizer = AutoTokenizer.from_pretrained(".")
prompt = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=60, do_sample=True)[0]))
{%- endif %}
```

| | |
| --- | --- |
{% for title, text in rows.items() -%}
| {{ title }} | {{ text }} |
{% endfor %}
Every setting of the run:

```yaml
{{ settings }}```
""",
    keep_trailing_newline=True,
)


def model_card(
    run: RunRecord, hf: PreTrainedModel, *, has_tokenizer: bool, facts: Mapping[str, str]
) -> bytes:
    """Return the model card of an exported model: its size, data, settings and losses.

    The card is Markdown with the front matter of the hub, encoded as UTF-8.

    run: the record of the run. It has all facts on the card except the size of the model.
    hf: the model, on any device.
    has_tokenizer: True if the folder contains a tokenizer. The card's example then uses it.
    facts: additional rows for the card's table. Keys are titles of rows, values are their texts.
    """
    recipe = run.config
    source = recipe["model"].get("source")
    data = recipe["data"]
    datasets = [part.get("source") for part in (data, *(data.get("sources") or ()))]
    # The hub defines the base model as the model whose weights the training started with.
    has_base = source and not recipe["model"].get("from_scratch") and _is_on_hub(source)
    front = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        model_name=recipe["name"],
        base_model=source if has_base else None,
        datasets=[name for name in datasets if name and _is_on_hub(str(name))] or None,
    )
    card = _CARD.render(
        front=front.to_yaml(),
        name=recipe["name"],
        architecture=type(hf).__name__,
        parameters=count(hf.num_parameters()),
        dtype=str(hf.dtype).removeprefix("torch."),
        tokens=count(run.summary["tokens"]),
        steps=f"{run.summary['steps']:,}",
        has_tokenizer=has_tokenizer,
        rows={title: cell(text) for title, text in (_rows(run) | dict(facts)).items()},
        settings=yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120),
    )
    return card.encode()


def _is_on_hub(name: str) -> bool:
    """Return whether `name` has the form of a name on the hub and is not a local path."""
    return bool(HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _rows(run: RunRecord) -> dict[str, str]:
    """Map titles of rows in the card's table to facts that the settings below do not have."""
    summary = run.summary
    emulated = ", emulated in software" if run.emulated else ""
    rows = {"precision": f"{run.precision}{emulated}"}
    rows |= {f"`{key}`": values for key, values in run.changed_settings.items()}
    if LOSS_KEY in summary:
        rows["loss"] = f"{summary[LOSS_KEY]:.4f}, mean of {run.averaged_steps}"
    if "held_out_loss" in summary:
        rows["held-out loss"] = f"{summary['held_out_loss']:.4f} nats a token{run.when_evaluated}"
    return rows
