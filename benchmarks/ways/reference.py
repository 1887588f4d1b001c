"""The reference's way: every linear but the head becomes a te.Linear, and Liger's kernels do SwiGLU, RMSNorm and the loss.

FP8 with delayed scaling, E4M3 in both directions, a history that starts empty, nothing compiled.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.ways.task import Task, Way, missing
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
            # Liger asks the configuration for `return_dict`, which transformers 5 no longer keeps there.
            options = {"num_items_in_batch": step_tokens, "use_cache": False, "return_dict": True}
            output = hf(**inputs, labels=labels, shift_labels=labels, **options)
        return output.loss

    return Way(hf, task.adamw(hf.parameters()), loss)


def convert_linears(module: nn.Module) -> None:
    """Put a te.Linear of the same weights in the place of every linear below `module`, except the head."""
    import transformer_engine.pytorch as te

    for name, child in module.named_children():
        if name == "lm_head":
            continue
        if not isinstance(child, nn.Linear):
            convert_linears(child)
            continue
        weight, bias = child.weight, child.bias
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
