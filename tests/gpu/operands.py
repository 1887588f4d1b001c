"""The operands that Transformer Engine makes on this device, code by code and scale by scale beside those of our quantizers.

Its tensors are read as its kernels wrote them: which byte is which value's, and where its scale stands. docs/verification.md says
which operand is quantized along which axis.

Training has scales written in the order in which Blackwell's products read them (`optimize_for_gemm`), by other templates of the
same kernels. That order is not read here: scales are compared in the plain one, and codes, which lie alike, in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from pretrain.precision.delayed_state import PLACES
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.quantizers import Quantized
from pretrain.precision.searched import fp8_dtype
from pretrain.precision.settings import ActivePrecision
from pretrain.precision.transformer_engine import TE_DIRECTIONS, TransformerEngineBackend

ROWS, FEATURES = 512, 768
# E2M1's eight magnitudes by their three bits; the fourth is the sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TRANSFORMED = 0.01  # of the codes may differ after a Hadamard transform, whose sums come in another order
_NAMES: dict[Along, str] = {"features": "rowwise", "rows": "columnwise"}  # the library's, of what a product sums along
_NVFP4_SCALES = 6.0 * 448.0  # what a tensor's largest value is divided by, to be its scale


def compare_operands(active: ActivePrecision, device: torch.device) -> Iterator[tuple[str, str | None]]:
    """Yields, for each operand of a product and each axis that is summed over, its name and how the library's differs from ours
    (None: in no bit). They are rounded to nearest, as chance cannot be compared."""
    if "disable_stochastic_rounding" in active.precision.options:
        active = replace(active, settings=active.settings.model_copy(update={"disable_stochastic_rounding": True}))
    precision, settings = active.precision, active.settings
    backend = TransformerEngineBackend(active, device)
    linear = backend.product("operands", FEATURES, FEATURES, bias=False).linear
    for role in get_args(Role):
        direction, slot = PLACES[role]
        direction = TE_DIRECTIONS[direction]
        quantizer = linear.quantizers[direction][slot]
        quantizer.set_usage(rowwise=True, columnwise=True)
        x = values(device, seed=slot + len(direction))
        scale = None
        if precision.keeps_history:
            quantizer.scale.fill_(37.0)
            scale = torch.tensor(37.0, device=device)
        theirs = quantizer(x)
        # As pretrain.precision.transformer_engine and the library's own linears ask for it.
        quantizer.optimize_for_gemm = role != "weight" or linear._enable_weight_preswizzle(quantizer, x)
        in_training = quantizer(x)
        quantizer.optimize_for_gemm = False
        for along in get_args(Along):
            parts = read(backend.te, theirs, along)
            if parts is None:  # Blackwell's products read one layout both ways
                continue
            ours = precision.quantizer(settings, role, along)(x, scale, None)
            transformed = along == "rows" and precision.transform(settings, role) is not None
            name = f"{role} along {along}" + (f", transformed ({TRANSFORMED:.0%} may differ)" if transformed else "")
            share = TRANSFORMED if transformed else 0.0
            codes = (_data(backend.te, each, along) for each in (theirs, in_training))
            yield name, difference(parts, ours, share) or difference_in_training(*codes, share)


def values(device: torch.device, seed: int) -> Tensor:
    """[ROWS, FEATURES] BF16, of sizes that differ from block to block, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    x *= (
        torch.exp2(torch.randint(-6, 7, (ROWS // 16, FEATURES // 16), generator=generator).float())
        .repeat_interleave(16, 0)
        .repeat_interleave(16, 1)
    )
    return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.05, 0).bfloat16().to(device)


def read(te: Any, tensor: Any, along: Along) -> tuple[Tensor, Tensor] | None:
    """Codes and the scales that decode them, FP32, both with the sum's axis last, [rows, features] or [features, rows]; None:
    there is no layout of its own for this axis."""
    data = _data(te, tensor, along)
    if data is None:
        return None
    if isinstance(tensor, te.Float8TensorStorage):
        return _fp8(te, tensor, data), tensor._scale_inv.reshape(1, 1).expand(data.shape)
    rows, name = along == "features", _NAMES[along]
    scales = getattr(tensor, f"_{name}_scale_inv")
    if isinstance(tensor, te.MXFP8TensorStorage):  # columns as they lie, each scale for 32 values below each other
        codes, powers = _fp8(te, tensor, data), torch.exp2(scales.float() - 127)
        codes, powers = (codes, powers) if rows else (codes.t(), powers.t())
        return codes, _spread(powers, codes, 32)
    if isinstance(tensor, te.NVFP4TensorStorage):
        low, high = data & 15, data >> 4
        codes = _fp4(torch.stack([low, high], dim=-1).flatten(-2))
        whole = getattr(tensor, f"_amax_{name}").double().reshape(()) / _NVFP4_SCALES
        return codes, _spread(scales.view(torch.float8_e4m3fn).float(), codes, 16) * whole.float()
    codes = _fp8(te, tensor, data)  # in blocks of 128: scales of rows stand column by column
    if tensor._is_2D_scaled:
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes, wide[: codes.shape[0], : codes.shape[1]]
    return codes, _spread(scales.t(), codes, 128)


def _data(te: Any, tensor: Any, along: Along) -> Tensor | None:
    """Returns the bytes of its codes, as they lie."""
    if isinstance(tensor, te.Float8TensorStorage):
        return tensor._data if along == "features" else tensor._transpose
    return getattr(tensor, f"_{_NAMES[along]}_data")


def _spread(scales: Tensor, codes: Tensor, block: int) -> Tensor:
    """A scale for each code; what the library pads with is left out."""
    return scales[: codes.shape[0]].repeat_interleave(block, dim=1)[:, : codes.shape[1]]


def _fp8(te: Any, tensor: Any, data: Tensor) -> Tensor:
    return data.view(fp8_dtype(te, tensor._fp8_dtype)).float()


def _fp4(nibbles: Tensor) -> Tensor:
    magnitudes = torch.tensor(_E2M1, device=nibbles.device)[(nibbles & 7).long()]
    return torch.where(nibbles >= 8, -magnitudes, magnitudes)


def difference(theirs: tuple[Tensor, Tensor], ours: Quantized, share: float = 0.0) -> str | None:
    """How many codes and scales differ; None if none does, or up to this `share` of all, where a tensor's scale may then be an
    FP32 rounding off too. Scales of zeros alone are any."""
    codes, scales = theirs
    if codes.shape != ours.codes.shape:
        return f"the library's operand is {list(codes.shape)}, ours {list(ours.codes.shape)}"
    our_scales = (ours.block_scale * ours.tensor_scale).expand(codes.shape)
    off = (scales - our_scales).abs() > 1e-3 * our_scales if share else scales != our_scales
    wrong = (codes != ours.codes) | (off & (codes != 0))
    if wrong.sum() <= share * wrong.numel():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    first = f"{codes[at]:g} x {scales[at]:g}, ours {ours.codes[at]:g} x {our_scales[at]:g}"
    return f"{int(wrong.sum()):,} of {codes.numel():,} codes or scales differ, first at {at}: {first}"


def difference_in_training(plain: Tensor, ordered: Tensor | None, share: float = 0.0) -> str | None:
    """How many bytes of codes are others where scales are written as products read them; None if none is, or up to this `share`.
    A code that rounds the other way is a byte at most."""
    if ordered is None or ordered.shape != plain.shape:
        return "codes have another shape where scales are written as training asks for them"
    count = int((ordered.view(torch.uint8) != plain.view(torch.uint8)).sum())
    if count <= share * plain.numel():
        return None
    return f"{count:,} bytes of {plain.numel():,} are others where scales are written as training asks for them"
