"""README.md of an exported model: what it is, what it was trained on, how well it predicts. From the records of its run alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData
from transformers import PreTrainedModel

from foundation.tables import cell
from foundation.units import count, duration, percent
from packing.settings import HUB_NAME
from pretrain.compare.fairness import changes_in_words
from pretrain.metrics.run_record import LOSS_KEY, RunRecord, averaged_steps

CARD, PICTURE = "README.md", "loss.png"


def model_card(run: RunRecord, hf: PreTrainedModel, *, tokenizer: bool) -> str:
    """Markdown with the front matter of the hub. `hf` gives the sizes, on any device; PICTURE stands beside it."""
    recipe, figures = run.config, run.summary
    source, data = recipe["model"].get("source"), recipe["data"]
    texts = [str(each["source"]) for each in (data, *(data.get("sources") or ())) if each.get("source")]
    trained_on = source and not recipe["model"].get("from_scratch")  # to the hub, a base model is one whose weights these were
    front = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation",
        model_name=recipe["name"],
        base_model=source if trained_on and _on_the_hub(source) else None,
        datasets=[text for text in texts if _on_the_hub(text)] or None,
    )
    parameters = count(sum(parameter.numel() for parameter in hf.parameters()))
    model = f"`{type(hf).__name__}` of {parameters} parameters in {str(hf.dtype).removeprefix('torch.')}"
    parts = [
        f"---\n{front.to_yaml()}\n---",
        f"# {recipe['name']}",
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


def _rows(run: RunRecord) -> dict[str, str]:
    """What the recipe, which stands below, does not say by itself."""
    data, figures, environment = run.config["data"], run.summary, run.environment
    shares = [f"{percent(each['weight'])} {each.get('source') or each['name']}" for each in data.get("sources") or ()]
    packages, (devices, device) = environment.get("packages") or {}, run.devices
    known = [f"{each} {packages[each]}" for each in ("torch", "transformers", "transformer-engine") if packages.get(each)]
    commit = str((environment.get("git") or {}).get("commit", ""))[:12]
    rows = {
        "started from": _origin(run.config),
        "data": ", ".join(shares) or data.get("source") or f"packs in {data['packs']}",
        "tokens": f"{figures['tokens']:,}, padding included; {figures['epoch']:.3g} epochs",
        "precision": f"{run.precision}{', emulated in software' if run.emulated else ''}; weights {run.config['weights']}",
        "changed on the way": changes_in_words(run),
        "computed on": f"{devices} x {device}, {duration(figures['hours'] * 3600)} inside of steps",
        "software": ", ".join([*known, *([f"this launcher at {commit}"] if commit else [])]),
    }
    if LOSS_KEY in figures:
        rows["loss"] = f"{figures[LOSS_KEY]:.4f}, mean of the last {averaged_steps(figures)} steps"
    if "held_out_loss" in figures:
        after = "" if run.evaluated_before is None else f", after {run.evaluated_before:,} of these steps"
        rows["held-out loss"] = f"{figures['held_out_loss']:.4f} nats a token{after}"
    return rows


def _origin(recipe: Mapping[str, Any]) -> str:
    model = recipe["model"]
    if begin_with := recipe["train"].get("begin_with"):
        return f"the checkpoint {begin_with} of another run, whose steps are counted here too"
    if model.get("source") and not model.get("from_scratch"):
        return f"the weights of {model['source']}"
    return f"random weights, seed {recipe['seed']}"


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
