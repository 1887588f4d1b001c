"""accelerate's own FP8 path, as documented: mixed_precision "fp8" and Transformer Engine's recipe.

`accelerator.prepare` replaces every linear by a te.Linear. This unties the head from the embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.speed.libraries.task import Task, Way, missing
from packing.batch import Microbatch


def obstacle(device: torch.device) -> str | None:
    return missing(device, "transformer_engine", needs_gpu=True)


def build(task: Task) -> Way:
    from accelerate import Accelerator
    from accelerate.utils import TERecipeKwargs

    recipe = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=1024, amax_compute_algo="max")
    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[recipe])
    hf = task.hugging_face_model()
    prepared, optimizer = accelerator.prepare(hf, task.adamw(hf.parameters()))

    def loss(batch: Microbatch, step_tokens: int) -> Tensor:
        inputs = task.inputs(batch)
        labels = inputs.pop("labels")
        # Autocast and FP8 are in the forward that `prepare` has wrapped.
        return prepared(
            **inputs,
            labels=labels,
            shift_labels=labels,
            num_items_in_batch=step_tokens,
            use_cache=False,
        ).loss

    return Way(prepared, optimizer, loss, backward=accelerator.backward)
