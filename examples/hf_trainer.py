"""Train with the Trainer of transformers in FP8, with exact BF16 weights, and audit it.

    PYTHONPATH=. python examples/hf_trainer.py

It takes seconds on a CPU, where FP8 is emulated.
"""

from __future__ import annotations

import tempfile
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from pretrain.api import audit, convert, exact_adamw

warnings.filterwarnings("ignore", ".*so the precision is emulated")  # as expected on a CPU
torch.manual_seed(0)

# Data: numbers that count up. Any dataset with `input_ids` and `labels` will do.
texts = (torch.randint(64, (256, 1)) + torch.arange(32)) % 64
dataset = [{"input_ids": text, "labels": text} for text in texts]

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1,
)  # fmt: skip
device = "cuda" if torch.cuda.is_available() else "cpu"
model = LlamaForCausalLM(config).to(device, torch.bfloat16).train()

# Convert before the Trainer wraps the model. Delayed scaling chooses scales from past batches, so
# it needs a batch to begin with. Every other precision needs none.
first_batch = {"input_ids": texts[:8].to(device), "labels": texts[:8].to(device)}
conversion = convert(model, "delayed", calibrate_on=first_batch)
optimizer = exact_adamw(model, lr=1e-2, weight_decay=0.1)


class SaveScales(TrainerCallback):
    """Save the amax histories and scales of delayed scaling beside each checkpoint."""

    def on_save(self, args: TrainingArguments, state: object, control: object, **_: object) -> None:
        torch.save(conversion.state_dict(), f"{args.output_dir}/scales.pt")


# No `bf16=True` is needed: the weights and the activations are BF16 already.
arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    max_steps=10,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    activation_checkpointing=True,  # works: layers are recomputed with the scales of their forward
    eval_strategy="steps",
    eval_steps=5,
    save_steps=10,
    logging_steps=5,
    report_to="none",
    use_cpu=device == "cpu",
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=dataset[:240],
    eval_dataset=dataset[240:],  # evaluated in BF16, as a server would compute
    optimizers=(optimizer, None),
    callbacks=[SaveScales()],
)
trainer.train()

# The proof: each product of the trained model, with the operands that its kernel received.
products = audit(model, first_batch)
print(products)
linears = [product for product in products if "proj" in product.name]
assert linears
assert all(product.left[:2] in ("e4", "e5") for product in linears), "this was not FP8"

# Resume: weights and optimizer by the Trainer, scales by the conversion.
conversion.load_state_dict(torch.load(f"{arguments.output_dir}/scales.pt"))
