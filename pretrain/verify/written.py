"""The cases of kernels that write what a product reads, in BF16 or in codes: a part of pretrain.verify.kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pretrain.metrics.flops import Shape
from pretrain.model.attention.heads import HeadNorms
from pretrain.model.fused import rotary
from pretrain.precision import transformer_engine
from pretrain.verify.codes import CODES, in_blocks, in_tensors
from pretrain.verify.one_layer import Situation

ROWS = 128  # of activations: one block
# Relative errors that rounding explains, of a tensor's norm. Wrong kernels are off by a tenth and more.
ROUNDING = {torch.float32: 1e-3, torch.bfloat16: 2**-6, torch.float16: 2**-6}
ROUNDING_TO_CODES = {"E4M3": 0.05, "E5M2": 0.1}

Compared = Iterator[tuple[str, Tensor, Tensor, float]]  # name, by the kernel, by its plain form, relative error allowed


def norms_by_kernel(run: Situation) -> bool:
    if not (_writes_by_kernel(run) and run.parts.mlp_norm.kind == "rms"):
        return False
    from pretrain.model.fused import norm_kernel as kernel

    precision, states = run.active.precision, torch.empty(ROWS, Shape.of(run.hf).hidden, dtype=run.dtype, device="meta")
    to = (kernel.BlockScaled if precision.block_scaled else kernel.TensorScaled) if precision.quantized else None
    return kernel.divides(states, to)


def norm(run: Situation) -> Compared:
    """The sum with the residual, and its RMSNorm as the run's precision has it written; its gradient where a kernel of ours has
    that too."""
    from pretrain.model.fused import norm_kernel as kernel

    precision, eps, width = run.active.precision, 1e-6, Shape.of(run.hf).hidden
    x, residual, weight = run.draw(ROWS, width), run.draw(ROWS, width, seed=1), 1 + run.draw(width, seed=2) / 4
    total = x + residual
    rstd = torch.rsqrt(total.double().square().mean(-1) + eps)
    plain = total.double() * rstd[:, None] * weight.double()
    if not precision.quantized:
        normed, found = kernel.rms_norm(x, residual, weight, eps)
        yield "norm", normed, plain, ROUNDING[run.dtype]
    else:
        grid = precision.grid(run.active.settings, "input")
        written, read = (in_blocks if precision.block_scaled else in_tensors)(CODES[grid.name], ROWS, width, run.device)
        if precision.keeps_history:
            written = replace(written, scale=torch.full((1,), 32.0, device=run.device))
        write = kernel.rms_norm_blocks if precision.block_scaled else kernel.rms_norm_scaled
        found = write(x, residual, weight, eps, written)
        for name, mine in zip(("norm", "norm along tokens"), read(), strict=True):
            yield name, mine, plain, ROUNDING_TO_CODES[grid.name]
    yield "sum", x, total, ROUNDING[run.dtype]
    yield "rstd", found, rstd, ROUNDING[torch.float32]
    if _without_library(run):
        dy, beside = run.draw(ROWS, width, seed=3), run.draw(ROWS, width, seed=4)
        ours = kernel.rms_norm_backward(dy, total, found, weight, beside)
        leaves = [each.double().requires_grad_() for each in (total, weight)]
        exact = leaves[0] * torch.rsqrt(leaves[0].square().mean(-1, keepdim=True) + eps) * leaves[1]
        dx, of_weight = torch.autograd.grad(exact, leaves, dy.double())
        for name, mine, theirs in zip(("gradient", "weight's gradient"), ours, (dx + beside, of_weight), strict=True):
            yield name, mine, theirs, ROUNDING[run.dtype]


def activates_by_kernel(run: Situation) -> bool:
    return _writes_by_kernel(run) and run.parts.activation == "swiglu"


def _writes_by_kernel(run: Situation) -> bool:
    """Whether fused layers have our kernels write what their products read."""
    written = run.active.precision.activates_again if run.active.precision.quantized else run.dtype == torch.bfloat16
    return run.computes_by_kernels and run.parts is not None and written


def _without_library(run: Situation) -> bool:
    """Whether fused layers take from our kernels what elsewhere is Transformer Engine's."""
    return run.computes_by_kernels and not run.active.precision.quantized and transformer_engine.missing() is not None


def activation(run: Situation) -> Compared:
    """SwiGLU as the run's precision has it written: in BF16, or in codes with a scale a tensor or a block."""
    from pretrain.model.fused import activation_kernel as kernel

    rows, width, precision = ROWS, 256, run.active.precision
    hidden, d_activated = 2 * run.draw(rows, 2 * width), run.draw(rows, width, seed=1)
    gate, up = (part.double().requires_grad_() for part in hidden.chunk(2, dim=-1))
    activated = F.silu(gate) * up
    d_hidden = torch.cat(torch.autograd.grad(activated, (gate, up), d_activated.double()), dim=-1)
    if not precision.quantized:
        if _without_library(run):
            yield "activated", kernel.forward_bf16(hidden), activated, ROUNDING[run.dtype]
        ours = kernel.backward_bf16(d_activated, hidden)
        for name, mine, theirs in zip(("gradient", "activated again"), ours, (d_hidden, activated), strict=True):
            yield name, mine, theirs, ROUNDING[run.dtype]
        return
    grids = {role: precision.grid(run.active.settings, role) for role in ("input", "grad_output")}
    codes = {role: CODES[grid.name] for role, grid in grids.items()}
    make = in_blocks if precision.block_scaled else in_tensors
    forward, read_forward = make(codes["input"], rows, width, run.device)
    backward, read_backward = make(codes["grad_output"], rows, 2 * width, run.device)
    again, read_again = make(codes["input"], rows, width, run.device)
    if precision.block_scaled:
        kernel.forward_blocks(hidden, forward)
        kernel.backward_blocks(d_activated, hidden, backward, again)
    else:
        kernel.forward(hidden, forward)
        again = replace(again, scale=forward.used, amax=None, used=None)
        kernel.backward(d_activated, hidden, backward, again)
    for name, (by_rows, by_columns), theirs, role in (
        ("activated", read_forward(), activated, "input"),
        ("gradient", read_backward(), d_hidden, "grad_output"),
        ("activated again", read_again(), activated, "input"),
    ):
        yield name, by_rows if name != "activated again" else by_columns, theirs, ROUNDING_TO_CODES[grids[role].name]
        if name == "gradient":
            yield "gradient along tokens", by_columns, theirs, ROUNDING_TO_CODES[grids[role].name]


def rotates_into_codes(run: Situation) -> bool:
    """Whether the rotation's backward writes the format of its product: not where that has biases, which sum the gradient."""
    written, parts = run.active.precision.quantized and run.active.precision.activates_again, run.parts
    plain = all(getattr(linear, "bias", None) is None for linear in parts.qkv.values())
    return written and plain and (run.heads.dim == 128 or not run.active.precision.block_scaled)


def rotation_in_codes(
    run: Situation,
    gradients: list[Tensor],
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    norms: HeadNorms | None,
    exact_norms: HeadNorms | None,
) -> Compared:
    """Compares the rotation's backward where it writes codes, on whole tiles of tokens."""
    from pretrain.model.fused import rotary_kernel

    rows, precision = 128, run.active.precision
    *gradients, qkv, cos, sin = (each[:rows] for each in (*gradients, qkv, cos, sin))
    grid = precision.grid(run.active.settings, "grad_output")
    make = in_blocks if precision.block_scaled else in_tensors
    written, read = make(CODES[grid.name], rows, run.heads.width, run.device)
    if precision.keeps_history:
        written = replace(written, scale=torch.full((1,), 16.0, device=run.device))
    ours = rotary_kernel.rotate_backward_in_codes(*gradients, qkv if norms else None, cos, sin, run.heads, norms, written)
    exact = (each.double() for each in (*gradients, qkv, cos, sin))
    plain, *of_norms = rotary.rotate_backward_by_formula(*exact, run.heads, exact_norms)
    for name, mine in zip(("codes", "codes along tokens"), read(), strict=True):
        yield name, mine, plain, ROUNDING_TO_CODES[grid.name]
    for name, mine, theirs in zip(
        ("query norm's gradient with codes", "key norm's gradient with codes"), ours, of_norms, strict=True
    ):
        if theirs is not None:
            yield name, mine, theirs, ROUNDING[run.dtype]
