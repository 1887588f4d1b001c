"""The kernels of the package fla-core, which keep documents apart on a GPU.

The functions have the arguments of `pretrain.model.hybrids.mixing`. They import fla-core when they
are called, because it imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def convolution(
    ends: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Return the causal convolution of each channel, [1, channels, T]."""
    from fla.modules.causal_conv1d import causal_conv1d

    convolved, _ = causal_conv1d(
        x.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=ends
    )
    return convolved.transpose(1, 2)


def gated_delta_rule(
    ends: Tensor, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
) -> Tensor:
    """Return the output of the gated delta rule, [1, T, heads, D]."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    output, _ = chunk_gated_delta_rule(
        query, key, value, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=ends
    )
    return output
