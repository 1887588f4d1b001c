"""Does the fast path train what plain transformers trains? Loss and gradients of one batch, beside an FP32 forward a document at
a time.

    python -m benchmarks.parity --out benchmarks/results/h200_parity.json

The fast path is the launcher's: packed, compiled, BF16 working copies, chunked loss. Plain transformers in BF16, on the same
separate documents, is measured against the same FP32 reference: what it loses to rounding is what the fast path may lose.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from packing.batch import Microbatch
from packing.store import open_packs
from pretrain import attention, model
from pretrain.config import load_recipe
from pretrain.data import Data
from pretrain.run_folder import describe_environment
from pretrain.settings import Recipe

Gradients = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--recipe", type=Path, default=Path("benchmarks/qwen3_1_7b.yaml"))
    parser.add_argument("--packs", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()

    recipe = load_recipe(arguments.recipe, arguments.overrides)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = Data(open_packs(recipe.data, "train"), None).trial_batch(arguments.packs)
    reference = plain(recipe, batch, device, torch.float32)
    report = {
        "command": shlex.join(["python", "-m", "benchmarks.parity", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "environment": describe_environment({}),
        "batch": {"tokens": batch.input_ids.numel(), "documents": batch.documents, "valid_tokens": batch.valid_tokens},
        "fp32_reference": {"loss": reference[0], "gradient_norm": norm(reference[1])},
        "fast_path": compare(fast(recipe, batch, device), reference),
        "plain_bf16": compare(plain(recipe, batch, device, torch.bfloat16), reference),
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({key: report[key] for key in ("batch", "fp32_reference", "fast_path", "plain_bf16")}, indent=1))


def fast(recipe: Recipe, batch: Microbatch, device: torch.device) -> tuple[float, Gradients]:
    """Mean loss and gradients (of the loss's sum) by the launcher's path, FP32 weights with BF16 working copies."""
    config = model.load_config(recipe.model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    backend = attention.choose(recipe.model.attention, device.type, head_dim, torch.bfloat16).name
    hf = model.build(recipe.model, config, weights=torch.float32, seed=recipe.seed, device=device, backend=backend)
    packed = model.PackedLanguageModel(hf, backend, recipe.loss).train()
    model.wrap_layers(hf, recipe.model, cast_to=torch.bfloat16, compile_layers=device.type == "cuda")
    loss = packed(**model.inputs_of(batch, device))
    loss.backward()
    return loss.item() / batch.valid_tokens, gradients_of(hf)


def plain(recipe: Recipe, batch: Microbatch, device: torch.device, dtype: torch.dtype) -> tuple[float, Gradients]:
    """The same by transformers' own eager forward, one document at a time, with weights and products in `dtype`."""
    config = model.load_config(recipe.model)
    torch.manual_seed(recipe.seed)
    with device:
        hf = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in hf.parameters():
        parameter.data = parameter.data.to(dtype)
    total = 0.0
    offsets = batch.cu_seqlens.unique().tolist()
    for begin, end in itertools.pairwise(offsets):
        labels = batch.labels[:, begin:end].to(device)
        if (labels != -100).any():
            logits = hf(input_ids=batch.input_ids[:, begin:end].to(device), use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[0].float(), labels[0], reduction="sum")
            loss.backward()
            total += loss.item()
    return total / batch.valid_tokens, gradients_of(hf)


def gradients_of(hf: PreTrainedModel) -> Gradients:
    return {name: parameter.grad.float().cpu() for name, parameter in hf.named_parameters()}


def norm(gradients: Gradients) -> float:
    return torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()


def compare(measured: tuple[float, Gradients], reference: tuple[float, Gradients]) -> dict[str, Any]:
    """Differences to the FP32 reference: of the mean loss, of the gradient norm, and the cosine of each tensor's gradient."""
    cosines = {
        name: torch.nn.functional.cosine_similarity(gradient.flatten(), reference[1][name].flatten(), dim=0, eps=1e-30).item()
        for name, gradient in measured[1].items()
    }
    worst = sorted(cosines, key=cosines.get)[:3]
    return {
        "loss": measured[0],
        "loss_difference": measured[0] - reference[0],
        "gradient_norm_ratio": norm(measured[1]) / norm(reference[1]),
        "median_cosine": sorted(cosines.values())[len(cosines) // 2],
        "worst_cosines": {name: cosines[name] for name in worst},
    }


if __name__ == "__main__":
    main()
