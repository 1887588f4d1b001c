"""Call the kernels of the package fla-core, which keep documents apart on a GPU.

`pretrain.model.hybrids.mixing` describes the arguments. The functions import fla-core when they are
called, because it imports Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor


def convolution(
    cu_seqlens: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
) -> Tensor:
    """Return the causal convolution of each channel, [1, channels, T]."""
    from fla.modules.causal_conv1d import causal_conv1d

    convolved, _ = causal_conv1d(
        x.transpose(1, 2), weight, bias, activation=activation, cu_seqlens=cu_seqlens
    )
    return convolved.transpose(1, 2)


def gated_delta_rule(
    cu_seqlens: Tensor, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor
) -> Tensor:
    """Return the output of the gated delta rule, [1, T, heads, D]."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    output, _ = chunk_gated_delta_rule(
        query, key, value, g, beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens
    )
    return output


def scan(
    cu_seqlens: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor
) -> Tensor:
    """Return the output of Mamba-2's scan, FP32 [1, T, heads, D].

    The scan is a gated linear attention with queries C, keys B, values dt x and the decay exp(A dt)
    of each head. dt is the time step after its bias, softplus and limits.

    All inputs are converted to FP32, as in transformers' function in torch. On Hopper, fla-core's
    backward with tilelang also needs FP32 inputs.
    """
    from fla.ops.simple_gla import chunk_simple_gla

    x, dt, B, C = (tensor.float() for tensor in (x, dt, B, C))
    heads = x.shape[2]
    keys, queries = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (B, C))
    values = x * dt[..., None]
    decay = A.float() * dt
    output, _ = chunk_simple_gla(queries, keys, values, decay, scale=1.0, cu_seqlens=cu_seqlens)
    return output + D[:, None] * x


# ── Kernels that cannot run ──


@cache
def unavailable_because(names: tuple[str, ...]) -> str | None:
    """Return the reason why kernels cannot run on this GPU, or None if all of them can run.

    Each kernel runs forward and backward once, because fla-core finds unsupported combinations of
    GPU and packages only when a kernel runs. For example, on Hopper with Triton 3.4 to 3.7.0, its
    gated backward needs the package tilelang.

    names: names of transformers' functions. Functions that are not in `TRIALS` need no kernel.
    """
    for name in names:
        if name not in TRIALS:
            continue
        try:
            TRIALS[name]().float().sum().backward()
        except ImportError as error:
            return f"needs the package fla-core (pip install -r requirements-cuda.txt): {error}"
        except (RuntimeError, OSError, ValueError) as error:
            return f"needs kernels of fla-core that fail on this GPU: {str(error).splitlines()[0]}"
    return None


def _random(*shape: int) -> Tensor:
    """Return random BF16 values [1, *shape] on the GPU, with gradients."""
    return torch.rand(1, *shape, device="cuda", dtype=torch.bfloat16).requires_grad_()


def _two_documents() -> Tensor:
    """Return `cu_seqlens` of two documents in 128 tokens. The last entry is unused."""
    return torch.tensor([0, 40, 128, 128], dtype=torch.int32, device="cuda")


def _try_convolution() -> Tensor:
    weight = torch.ones(64, 4, device="cuda", dtype=torch.bfloat16)
    return convolution(_two_documents(), _random(64, 128), weight, None, "silu")


def _try_gated_delta_rule() -> Tensor:
    query, key, value = (_random(128, 2, 64) for _ in range(3))
    return gated_delta_rule(
        _two_documents(), query, key, value, -_random(128, 2).float(), _random(128, 2)
    )


def _try_scan() -> Tensor:
    decay = -torch.ones(2, device="cuda")
    keys, queries = (_random(128, 1, 64) for _ in range(2))
    return scan(_two_documents(), _random(128, 2, 64), _random(128, 2), decay, keys, queries, decay)


# Map the names of transformers' functions to functions that run their kernels on small inputs.
TRIALS: dict[str, Callable[[], Tensor]] = {
    "causal_conv1d_fn": _try_convolution,
    "torch_chunk_gated_delta_rule": _try_gated_delta_rule,
    "mamba2_chunk_scan": _try_scan,
}
