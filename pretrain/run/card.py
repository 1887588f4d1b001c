"""README.md of an exported model: what it is, what it was trained on, how well it predicts. From the records of its run alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from foundation.tables import cell
from foundation.units import count, duration, percent
from packing.settings import HUB_NAME
from pretrain.compare.fairness import changes_in_words
from pretrain.metrics.run_record import LOSS_KEY, RunRecord, averaged_steps, summary
from pretrain.precision.schedule import label, label_of_course

CARD, PICTURE = "README.md", "loss.png"


def until(run: RunRecord, step: int) -> RunRecord:
    """The record as it was after `step`."""
    metrics = [record for record in run.metrics if record["step"] <= step]
    kept = {key: run.summary[key] for key in ("seed", "tokens_per_step", "data_fingerprint") if key in run.summary}
    return replace(run, metrics=metrics, summary=kept | summary(metrics))


def model_card(run: RunRecord, hf: PreTrainedModel, *, tokenizer: bool) -> str:
    """Markdown with the front matter of the hub. `hf` gives the sizes, on any device; PICTURE stands beside it."""
    recipe, figures = run.config, run.summary
    source, name = recipe["model"].get("source"), recipe["name"]
    trained_on = source and not recipe["model"].get("from_scratch")  # to the hub, a base model is one whose weights these were
    front = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        model_name=name,
        base_model=source if trained_on and _on_the_hub(source) else None,
        datasets=[each for each in _sources(recipe["data"]) if _on_the_hub(each)] or None,
    )
    parameters = count(sum(parameter.numel() for parameter in hf.parameters()))
    model = f"`{type(hf).__name__}` of {parameters} parameters in {str(hf.dtype).removeprefix('torch.')}"
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {name}",
        f"A {model}, trained on {count(figures['tokens'])} tokens in {figures['steps']:,} steps.",
        _loading(tokenizer),
        "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {cell(text)} |" for key, text in _rows(run).items() if text)]),
        f"![Loss by step: training and, where packs were held out, held-out loss]({PICTURE})",
        "Every setting of the run:",
        "```yaml\n" + yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=120) + "```",
    ]
    return "\n\n".join(parts) + "\n"


def _on_the_hub(name: str) -> bool:
    return bool(HUB_NAME.fullmatch(name)) and not Path(name).exists()


def _precision(run: RunRecord) -> str:
    """What ran, and what the products computed in, of several precisions in each."""
    names = run.precision
    if 0 < len(run.phases) < len(run.audit.get("phases") or {}):  # the checkpoint is from before its run's end
        names = f"{label(run.config.get('precision'))} (ran {label_of_course(run.phases)})"
    audits = run.audited or {"": run.audit}
    computes = [f"{each.get('computes', '')}{f' ({name})' if len(audits) > 1 else ''}" for name, each in audits.items()]
    return f"{names}: {', '.join(computes)}" + ("; emulated in software" if run.emulated else "")


def _sources(data: Mapping[str, Any]) -> list[str]:
    listed = [each.get("source") for each in data.get("sources") or ()]
    return [str(each) for each in (data.get("source"), *listed) if each]


def _data(data: Mapping[str, Any]) -> str:
    """What was trained on; of several sources each with its share of the tokens, which packs that exist have by their name."""
    shares = [f"{percent(each['weight'])} {each.get('source') or each['name']}" for each in data.get("sources") or ()]
    return ", ".join(shares) or data.get("source") or f"packs in {data['packs']}"


def _origin(recipe: Mapping[str, Any]) -> str:
    model = recipe["model"]
    if begin_with := recipe["train"].get("begin_with"):
        return f"the checkpoint {begin_with} of another run, whose steps are counted here too"
    if model.get("source") and not model.get("from_scratch"):
        return f"the weights of {model['source']}"
    shape = f", in the shape of {model['source']}" if model.get("source") else ""
    return f"random weights, seed {recipe['seed']}{shape}"


def _rows(run: RunRecord) -> dict[str, str]:
    recipe, figures = run.config, run.summary
    data, optimizer, schedule, loss = recipe["data"], recipe["optimizer"], recipe["schedule"], recipe.get("loss") or {}
    packages, (devices, device) = run.environment.get("packages") or {}, run.devices
    versions = {each: packages.get(each) for each in ("torch", "transformers", "transformer-engine")}
    rows = {
        "started from": _origin(recipe),
        "data": _data(data),
        "data fingerprint": (run.data_fingerprint or "")[:16],
        "tokens": f"{figures['tokens']:,}, padding included; {figures['epoch']:.3g} epochs; "
        f"{recipe['batch']['tokens']:,} a step in packs of {data['length']:,}",
        "precision": f"{_precision(run)}; weights {recipe['weights']}",
        "optimizer": f"AdamW, rate {optimizer['learning_rate']:g}, {schedule['kind']} with {schedule['warmup']:,} steps of warmup"
        f", weight decay {optimizer['weight_decay']:g}",
        "changed on the way": changes_in_words(run),
        "computed on": f"{devices} x {device}, {duration(figures['hours'] * 3600)} inside of steps",
        "software": ", ".join(f"{each} {version}" for each, version in versions.items() if version),
        "launcher's commit": str((run.environment.get("git") or {}).get("commit", ""))[:12],
    }
    if LOSS_KEY in figures:
        rows["loss"] = f"{figures[LOSS_KEY]:.4f}, mean of the last {averaged_steps(figures)} steps"
    if "held_out_loss" in figures:
        after = "" if run.evaluated_before is None else f", after {run.evaluated_before:,} of these steps"
        perplexity = f"perplexity {figures['held_out_perplexity']:.4g}"
        rows["held-out loss"] = f"{figures['held_out_loss']:.4f} nats a token, {perplexity}{after}"
    if loss.get("penalty"):
        rows["penalty"] = f"{loss['penalty_weight']:g} x {loss['penalty']}, added to the loss"
    return rows


def _loading(tokenizer: bool) -> str:
    lines = ["from transformers import AutoModelForCausalLM" + (", AutoTokenizer" if tokenizer else ""), ""]
    lines += ['folder = "."  # where this file lies', 'model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")']
    if tokenizer:
        lines += [
            "tokenizer = AutoTokenizer.from_pretrained(folder)",
            'prompt = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)',
            "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=60, do_sample=True)[0]))",
        ]
    return "```python\n" + "\n".join(lines) + "\n```"
