"""The way of the reference: te.Linear, except for the head, and Liger's SwiGLU, RMSNorm and loss.

FP8 with delayed scaling, E4M3 in both directions, empty histories at the start, not compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.speed.libraries.task import Task, Way, missing
from packing.batch import Microbatch


def obstacle(device: torch.device) -> str | None:
    return missing(device, "transformer_engine", "liger_kernel", needs_gpu=True)


def build(task: Task) -> Way:
    import transformer_engine.pytorch as te
    from liger_kernel.transformers import _apply_liger_kernel_to_instance
    from transformer_engine.common.recipe import DelayedScaling, Format

    hf = task.hugging_face_model()
    _apply_liger_kernel_to_instance(
        model=hf, rope=False, swiglu=True, rms_norm=True, fused_linear_cross_entropy=True
    )
    convert_linears(hf)
    recipe = DelayedScaling(margin=0, fp8_format=Format.E4M3)

    def loss(batch: Microbatch, step_tokens: int) -> Tensor:
        inputs = task.inputs(batch)
        labels = inputs.pop("labels")
        with task.autocast(), te.autocast(enabled=True, recipe=recipe):
            # Liger reads `return_dict` from the configuration. transformers 5 has removed it there.
            options = {"num_items_in_batch": step_tokens, "use_cache": False, "return_dict": True}
            output = hf(**inputs, labels=labels, shift_labels=labels, **options)
        return output.loss

    return Way(hf, task.adamw(hf.parameters()), loss)


def convert_linears(module: nn.Module) -> None:
    """Replace every linear below `module`, except the head, by a te.Linear with its weights."""
    import transformer_engine.pytorch as te

    for name, child in module.named_children():
        if name == "lm_head":
            continue
        if not isinstance(child, nn.Linear):
            convert_linears(child)
            continue
        weight = child.weight
        bias = child.bias
        linear = te.Linear(
            child.in_features,
            child.out_features,
            bias=bias is not None,
            params_dtype=weight.dtype,
            device=weight.device,
        )
        with torch.no_grad():
            linear.weight.copy_(weight)
            if bias is not None:
                linear.bias.copy_(bias)
        setattr(module, name, linear)
