"""float8 as in torchtitan: torchao's tensorwise float8 in all linears except the head, compiled.

Each GEMM computes its scales from its tensors. Each layer is compiled, and so is the loss over all
logits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.speed.libraries.task import Task, Way, missing
from packing.arrow import IGNORE
from packing.batch import Microbatch
from pretrain.model.huggingface import decoder_layers


def obstacle(device: torch.device) -> str | None:
    return missing(device, "torchao", needs_gpu=True)


def build(task: Task) -> Way:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    hf = task.hugging_face_model()
    tensorwise = Float8LinearConfig.from_recipe_name("tensorwise")
    convert_to_float8_training(
        hf, config=tensorwise, module_filter_fn=lambda _, name: "lm_head" not in name
    )
    for layer in decoder_layers(hf).values():
        layer.compile(fullgraph=True)
    cross_entropy = torch.compile(sum_of_losses)

    def loss(batch: Microbatch, step_tokens: int) -> Tensor:
        inputs = task.inputs(batch)
        labels = inputs.pop("labels")
        with task.autocast():
            hidden = hf.base_model(**inputs, use_cache=False).last_hidden_state
            logits = hf.get_output_embeddings()(hidden)
        return cross_entropy(logits, labels) / step_tokens

    return Way(hf, task.adamw(hf.parameters()), loss)


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed loss, FP32. `logits` is [1, T, vocabulary], `labels` [1, T] int64."""
    return F.cross_entropy(logits[0].float(), labels[0], ignore_index=IGNORE, reduction="sum")
