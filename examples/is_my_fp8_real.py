"""Find out if an FP8 training really multiplies FP8 numbers.

    PYTHONPATH=. python examples/is_my_fp8_real.py

A flag such as `mixed_precision: fp8` may have no effect: the hardware lacks FP8, no layer has been
converted, or a context was not entered. The training then goes on in BF16, without an error. This
script runs one forward and backward, and prints the operands of every matrix product, as the
kernels received them.

To examine your model, replace `models` below by a function that returns it, after all that your
training does to it, and a batch with labels.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from pretrain.api import audit, convert

warnings.filterwarnings("ignore", ".*so the precision is emulated")
device = "cuda" if torch.cuda.is_available() else "cpu"
ids = torch.randint(256, (2, 64), device=device)
batch: dict[str, Any] = {"input_ids": ids, "labels": ids}


def small_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, torch.bfloat16).train()


def with_pretrain() -> nn.Module:
    """With this project. Without a GPU that has FP8, the engine is called emulation."""
    model = small_model()
    convert(model, "current")
    return model


def with_torchao() -> nn.Module:
    """With torchao. With `emulate=True`, it multiplies FP32 tensors that have FP8 values."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = small_model()
    convert_to_float8_training(model.model, config=Float8LinearConfig(emulate=device == "cpu"))
    return model


def with_accelerate() -> nn.Module:
    """With Accelerate and `mixed_precision="fp8"`, as a training script sets it."""
    from accelerate import Accelerator
    from accelerate.utils import AORecipeKwargs
    from torchao.float8 import Float8LinearConfig

    recipe = AORecipeKwargs(config=Float8LinearConfig(emulate=device == "cpu"))
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    model = small_model()
    # Accelerate converts a model only if its optimizer is prepared, too.
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    return model


def models() -> Iterator[Callable[[], nn.Module]]:
    yield small_model
    yield with_pretrain
    if importlib.util.find_spec("torchao"):
        yield with_torchao
        yield with_accelerate


if __name__ == "__main__":
    for make in models():
        products = audit(make(), batch)
        # A product is FP8 if its kernel got FP8 numbers, which have a scale.
        real = [p for p in products if p.left[:2] in ("e4", "e5") and p.engine != "emulation"]
        emulated = [p for p in products if p.engine == "emulation" or "values" in p.left]
        print(f"\n{make.__name__}: {len(products)} products, {len(real)} in FP8, ", end="")
        print(f"{len(emulated)} only with values of FP8\n{products}")
