"""Train a small model in FP8, in a plain loop with parts of the launcher.

    PYTHONPATH=. python examples/minimal.py

It takes seconds on a CPU, where FP8 is emulated. On a Hopper or Blackwell GPU with Transformer
Engine, set `device = "cuda"`. Nothing else changes.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from transformers import Qwen3Config, Qwen3ForCausalLM

from pretrain.api import audit, convert, exact_adamw, open_packs, parity

device, steps, accumulation = "cpu", 20, 2
warnings.filterwarnings("ignore", ".*so the precision is emulated")  # as expected on a CPU
torch.manual_seed(0)

# Data: a file of tokens. `open_packs` also opens the packs of the launcher and other formats. The
# text counts up from random numbers, which a model can learn in a few steps.
tokens = (np.random.default_rng(0).integers(64, size=(256, 1)) + np.arange(64)) % 64
file = Path(tempfile.mkdtemp()) / "tokens.npy"
np.save(file, tokens.astype(np.uint16).flatten())
packs = open_packs(file, length=64)

# A step takes `accumulation` microbatches of four packs. To resume at a step, set `start`: the pack
# at a place depends on nothing but the place.
per_step = accumulation * 4
places = packs.places(start=0, stop=steps * per_step)
loader = iter(DataLoader(packs, 4, sampler=places, collate_fn=packs.collate))

# Model: any causal language model of transformers, with BF16 weights.
config = Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
    num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
)  # fmt: skip
model = Qwen3ForCausalLM(config).to(device, torch.bfloat16).train()


def on_device(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.to(device) if torch.is_tensor(value) else value for key, value in batch.items()
    }


# Before training: are loss and gradients those of plain transformers?
batch = on_device(packs.collate([packs[0], packs[1]]))
print(parity(model, batch).summary())

# One line makes the linear layers FP8. Then look at what really ran, not at what was asked for.
conversion = convert(model, "current")
print(conversion)
print(audit(model, batch))

# BF16 weights would lose most updates of 1e-4 of their size. This optimizer keeps 16 more bits.
optimizer = exact_adamw(model, lr=1e-2, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)

for step in range(steps):
    loss = 0.0
    for _ in range(accumulation):
        microbatch_loss = model(**on_device(next(loader))).loss / accumulation
        microbatch_loss.backward()
        loss += microbatch_loss.item()
    # Clip to a norm of 1. `clip_grad_norm_` would compute the norm of BF16 gradients in BF16, with
    # an error of up to 0.4 %, and round the clipped gradients to BF16 again.
    norm = torch.nn.utils.get_total_norm([p.grad.float() for p in model.parameters()])
    optimizer.step(clip_coefficient=(1.0 / norm).clamp(max=1.0))
    schedule.step()
    optimizer.zero_grad()
    if step % 5 == 0 or step == steps - 1:
        print(f"step {step:2}  loss {loss:.3f}")

# The model is still the model of transformers, with its names. Any tool can load it.
model.save_pretrained(file.with_name("model"))
Qwen3ForCausalLM.from_pretrained(file.with_name("model"))
