"""Distances of gradients, and their tolerances.

A fixed tolerance does not fit all models, because the relative error of a gradient grows if its
summands cancel. Therefore the tolerance of a tensor is derived from the measured errors of BF16
in this tensor and in the same tensors of other layers.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from statistics import mean, median
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from pretrain.model.gradients import full_tensor
from pretrain.observe.product_check import Compared, worst_first

# The allowed error in FP32, as a share of the measured error of BF16. FP32 rounds 2^16 times more
# finely than BF16. The share is larger than 2^-16, because the run and plain transformers may add
# the same numbers in different orders.
FP32_OF_BF16 = 2.0**-8
# Allowed relative difference on a GPU between a gradient of one pass over several microbatches, and
# the sum of gradients from one pass per microbatch. If two equal passes differ by a larger share,
# NOISE_LEEWAY times their difference is allowed.
SUMS_APART = 0.4
NOISE_LEEWAY = 3.0
# Map the dtype of the gradients to the allowed difference on a CPU.
SUMS_ROUNDED = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7}
# A gradient of the reference is treated as zero if its norm is below this share of the norm of all
# gradients. The values of such a gradient are rounding noise. An example is the gradient of a key's
# bias without rotary embeddings. The measured gradient of the same tensor must be that small too.
NEGLIGIBLE = 1e-6
# Name of the entry for all tensors together.
TOTAL = "all of them together"
# Factor between BF16's error and the tolerance. The median error of correct tensors equals BF16's
# error.
LEEWAY = 2.0
# The tolerance of a tensor of n values is multiplied by 1 + FEW_VALUES / n, because BF16's error in
# a scalar may by chance be far smaller than usual.
FEW_VALUES = 9.0


class Distance(NamedTuple):
    """Distance between the measured gradient of a tensor and the reference's gradient."""

    # Norm of the reference's gradient.
    reference: float
    # Norm of the measured gradient minus the reference's gradient.
    difference: float
    # Upper bound of the number of values whose errors are independent.
    values: int


def distances(
    measured: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> dict[str, Distance]:
    """Map the name of each gradient to its distance, and TOTAL to the distance of all together.

    A gradient that is present in only one of `measured` and `reference` is treated as zero in the
    other one. An example is the gradient of an LM head that is tied in only one of the models. If
    gradients are sharded, all ranks must call this function.
    """
    zero = torch.zeros(())
    result = {}
    for name in dict.fromkeys([*reference, *measured]):
        expected = full_tensor(reference.get(name, zero)).float()
        difference = full_tensor(measured.get(name, zero)).float() - expected
        # The inputs of all tokens have a common component. The errors in a gate with one row are
        # nearly proportional to it, so such a gate is treated like a scalar.
        is_gate = difference.dim() > 1 and len(difference) == 1
        values = 1 if is_gate else difference.numel()
        result[name] = Distance(_norm(expected), _norm(difference), values)
    norms, differences, values_of_all = zip(*result.values(), strict=True)
    result[TOTAL] = Distance(math.hypot(*norms), math.hypot(*differences), sum(values_of_all))
    return result


def _norm(tensor: Tensor) -> float:
    """Return the norm of a tensor, summed in FP64. Waits for the device."""
    return vector_norm(tensor, dtype=torch.float64).item()


def judge(
    measured: Mapping[str, Distance], noise: Mapping[str, Distance], resolution: float
) -> list[Compared]:
    """Compare the gradient error of each tensor, and of all tensors together, with its tolerance.

    The tolerance of a tensor is derived from the largest of three errors of BF16: the error in this
    tensor, the root mean square of the errors in the same tensors of all layers, and the median of
    the errors in all tensors. The error in this tensor alone is not sufficient, because this error
    may accidentally be small in a tensor of few values or in a gradient whose summands cancel.

    Args:
        measured: Distances of the gradients of the model.
        noise: Distances between the gradients of plain transformers in BF16 and in FP32.
        resolution: The allowed error as a multiple of BF16's error.

    Returns:
        The comparisons, the worst one first.
    """
    negligible = NEGLIGIBLE * noise[TOTAL].reference
    # Relative errors of BF16.
    errors = {
        name: entry.difference / entry.reference
        for name, entry in noise.items()
        if entry.reference > negligible
    }
    median_error = median([error for name, error in errors.items() if name != TOTAL] or [0.0])
    squares: dict[str, list[float]] = defaultdict(list)
    for name, error in errors.items():
        squares[_kind(name)].append(error**2)
    judged = []
    for name, entry in measured.items():
        error_of_layers = math.sqrt(mean(squares[_kind(name)] or [0.0]))
        # The largest of the three errors, as an absolute error.
        allowed = max(median_error, error_of_layers) * entry.reference
        if name in noise:
            allowed = max(allowed, noise[name].difference)
        # The first factor is much larger than 1 only for a scalar.
        allowed *= (1 + FEW_VALUES / entry.values) * LEEWAY * resolution
        norm = max(entry.reference, negligible) or 1.0  # not 0 if all gradients are 0
        excess = entry.difference / (allowed + negligible) if entry.difference else 0.0
        judged.append(Compared.of(name, entry.difference / norm, excess))
    return worst_first(judged)


def _kind(name: str) -> str:
    """Return the name of a parameter without the index of its layer."""
    return re.sub(r"\.\d+\.", ".", name)


def resolution_of(*dtypes: torch.dtype) -> float:
    """Return the allowed error of a gradient as a multiple of BF16's error.

    Args:
        dtypes: Dtypes of the computation and of the gradients, because gradients may be summed in
            BF16 although the model computes in FP32.
    """
    return FP32_OF_BF16 if {*dtypes} == {torch.float32} else 1.0


def judge_sums(
    together: Mapping[str, Tensor], summed: Mapping[str, Tensor], repeated: Mapping[str, Tensor]
) -> list[Compared]:
    """Compare the gradients of a step with the sums of the gradients of its microbatches.

    On a CPU, both are equal bit for bit if they are added up in FP32. On a GPU, an attention kernel
    adds in a different order in each pass. Quantization amplifies these differences to the size of
    the quantization error, so the tolerance is at least SUMS_APART, and only matrices are compared.
    Return the comparisons, the worst one first. All ranks must call this function.

    Args:
        together: Gradients of one pass over the microbatches.
        summed: Sums of the gradients of one pass for each microbatch.
        repeated: Gradients of a second pass over the microbatches. Its distance from the first
            pass is the effect of the order of additions.
    """
    noise = distances(repeated, together)
    errors = distances(together, summed)
    compared = []
    for name, gradient in together.items():
        if gradient.is_cuda and gradient.dim() < 2:
            continue
        norm = errors[name].reference or 1.0
        error = errors[name].difference / norm
        fixed = SUMS_APART if gradient.is_cuda else SUMS_ROUNDED[gradient.dtype]
        allowed = max(fixed, NOISE_LEEWAY * noise[name].difference / norm)
        compared.append(Compared.of(name, error, error / allowed))
    return worst_first(compared)
