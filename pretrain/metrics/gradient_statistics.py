"""Mean and standard deviation of each layer's gradient, over all of its values, wherever they lie."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import nn

from pretrain.model.gradients import gradient_of, local_part


@torch.no_grad()
def gradient_statistics(model: nn.Module, layers: Iterable[str], accelerator: Accelerator) -> dict[str, float]:
    """`grad_mean/<layer>` and `grad_std/<layer>` of the step's whole gradient, before clipping; collective.

    `layers`: the names of modules whose parameters count together; of any other parameter its own module is the layer. Values are
    added up in FP32, and the sums of parameters and shards in FP64. The deviation is that of all values, not of a sample.
    """
    trained = {name: each for name, each in model.named_parameters() if gradient_of(each) is not None}
    rows = []
    for parameter in trained.values():
        values = local_part(gradient_of(parameter))
        sums = (values.sum(dtype=torch.float32), torch.linalg.vector_norm(values, dtype=torch.float32).double().square())
        rows.append(torch.stack([*(each.double() for each in sums), sums[1].new_tensor(values.numel(), dtype=torch.float64)]))
    table = accelerator.reduce(torch.stack(rows), reduction="sum").tolist()
    prefixes = tuple(layers)
    totals: dict[str, list[float]] = {}
    for (name, parameter), (total, squares, counted) in zip(trained.items(), table, strict=True):
        layer = next((prefix for prefix in prefixes if name.startswith(f"{prefix}.")), name.rpartition(".")[0])
        once = parameter.numel() / counted  # ranks that hold the same values have counted them several times
        of_layer = totals.setdefault(layer, [0.0, 0.0, 0.0])
        for index, value in enumerate((total * once, squares * once, parameter.numel())):
            of_layer[index] += value
    figures = {}
    for layer, (total, squares, number) in totals.items():
        mean = total / number
        figures[f"grad_mean/{layer}"] = mean
        variance = squares / number - mean**2
        figures[f"grad_std/{layer}"] = math.sqrt(max(variance, 0.0)) if math.isfinite(variance) else math.nan
    return figures
