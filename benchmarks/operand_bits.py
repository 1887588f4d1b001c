"""Compare the operands that Transformer Engine quantizes on this GPU with our quantizers.

    python -m benchmarks.operand_bits mxfp8

Every operand is compared along each axis over which a GEMM sums. Operands are rounded to nearest,
because stochastically rounded operands cannot be compared. Transformer Engine's tensors are read in
the layout of its kernels: the byte of each value and the place of its scale.
docs/developers/extending.md lists the axis of each operand. In training, other templates of the
same kernels write scales in the order of Blackwell's GEMMs (`optimize_for_gemm`). Scales are
compared only in the plain order. Codes have the same layout in both orders, and are compared in
both.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor

from pretrain.precision.delayed_state import PLACES
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.observed import fp8_format
from pretrain.precision.quantizers import Quantized
from pretrain.precision.settings import (
    PRECISIONS,
    ActivePrecision,
    LowPrecisionSettings,
    configured,
)
from pretrain.precision.transformer_engine import TE_DIRECTIONS, TransformerEngine

DEVICE = torch.device("cuda", 0)
ROWS = 512
FEATURES = 768
# E2M1's eight magnitudes by their three bits. The fourth bit is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Share of codes that may differ after a Hadamard transform. The library computes the sums of the
# transform in another order than our quantizer.
TRANSFORMED = 0.01
# The library's names of the axis along which a GEMM sums.
NAMES: dict[Along, str] = {"features": "rowwise", "rows": "columnwise"}
# A tensor's scale is its largest value divided by this constant.
NVFP4_SCALES = 6.0 * 448.0


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("precision", help="precision that this GPU supports")
    operands = compare(parser.parse_args().precision)
    print(json.dumps({"status": "ok", "equal": all(map(equal, operands)), "operands": operands}))


def compare(name: str) -> list[dict[str, Any]]:
    """Return the results of `compare_operand` for every operand along every axis."""
    nearest = {}
    if "disable_stochastic_rounding" in PRECISIONS[name].options:
        nearest = {"disable_stochastic_rounding": True}
    precision = configured(name, LowPrecisionSettings(**nearest))
    active = ActivePrecision(name, precision, "transformer_engine")
    engine = TransformerEngine(active, DEVICE)
    linear = engine.gemm("operands", FEATURES, FEATURES).linear
    operands = product(get_args(Role), get_args(Along))
    compared = [compare_operand(engine.te, linear, active, *operand) for operand in operands]
    return [operand for operand in compared if operand]


def equal(operand: dict[str, Any]) -> bool:
    """Return True if the differing values and bytes are at most `allowed_share` of all."""
    return (
        operand["values_differ"] <= operand["allowed_share"] * operand["values"]
        and operand["bytes_differ"] <= operand["allowed_share"] * operand["bytes"]
    )


def compare_operand(
    te: Any, linear: Any, active: ActivePrecision, role: Role, along: Along
) -> dict[str, Any] | None:
    """Compare an operand with our quantizer. Return None if the operand has no codes for this axis.

    `values_differ` is the number of values whose code or scale differs from ours. `bytes_differ` is
    the number of bytes of codes that differ between the two orders of scales.

    te: the module of the library.
    linear: a linear of the library, which has the quantizers.
    role: the operand.
    along: the axis along which its GEMM sums.
    """
    direction, slot = PLACES[role]
    direction = TE_DIRECTIONS[direction]
    quantizer = linear.quantizers[direction][slot]
    quantizer.set_usage(rowwise=True, columnwise=True)
    x = values(seed=slot + len(direction))
    scale = None
    # Delayed scaling takes its scale from the history. Any scale is good for this comparison.
    if active.precision.keeps_history:
        quantizer.scale.fill_(37.0)
        scale = torch.tensor(37.0, device=DEVICE)
    library_tensor = quantizer(x)
    # pretrain.precision.transformer_engine and the library's linears have the same condition.
    preswizzled = role != "weight" or linear._enable_weight_preswizzle(quantizer, x)
    quantizer.optimize_for_gemm = preswizzled
    training_data = data_of(te, quantizer(x), along)
    quantizer.optimize_for_gemm = False
    plain_data = data_of(te, library_tensor, along)
    # Blackwell's GEMMs read one layout along both axes.
    if plain_data is None:
        return None
    transform = active.precision.transform(role)
    # Operands are transformed only before they are quantized along their rows.
    transformed = along == "rows" and transform is not None
    share = TRANSFORMED if transformed else 0.0
    quantized = active.precision.quantizer(role, along)(x, scale, None)
    wrong = differing(*read(te, library_tensor, along), quantized, transformed)
    # A code that rounds the other way changes one byte at most.
    changed = training_data.view(torch.uint8) != plain_data.view(torch.uint8)
    return {
        "operand": f"{role} along {along}",
        "values": wrong.numel(),
        "values_differ": int(wrong.sum()),
        "first_values_that_differ": wrong.nonzero()[:3].tolist(),
        "bytes": changed.numel(),
        "bytes_differ": int(changed.sum()),
        "allowed_share": share,
    }


def differing(codes: Tensor, scales: Tensor, ours: Quantized, transformed: bool) -> Tensor:
    """Return a mask of the values whose code or scale differs from our quantizer's.

    `codes` and `scales` are the results of `read`. `transformed` is True after a Hadamard
    transform.
    """
    our_scales = (ours.block_scale * ours.tensor_scale).expand(codes.shape)
    if transformed:
        # The library sums the transform in another order, so a tensor's scale may differ by an
        # FP32 rounding.
        scales_differ = (scales - our_scales).abs() > 1e-3 * our_scales
    else:
        scales_differ = scales != our_scales
    # The scale of a block of zeros may be any number.
    return (codes != ours.codes) | (scales_differ & (codes != 0))


def values(seed: int) -> Tensor:
    """Draw BF16 values [ROWS, FEATURES]. Some are zero, and blocks have different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    sizes = torch.exp2(
        torch.randint(-6, 7, (ROWS // 16, FEATURES // 16), generator=generator).float()
    )
    x *= sizes.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.05, 0).bfloat16().to(DEVICE)


def data_of(te: Any, tensor: Any, along: Along) -> Tensor | None:
    """Return the bytes of a tensor's codes, or None if the tensor has no codes for this axis."""
    if isinstance(tensor, te.Float8TensorStorage):
        return tensor._data if along == "features" else tensor._transpose
    return getattr(tensor, f"_{NAMES[along]}_data")


def read(te: Any, tensor: Any, along: Along) -> tuple[Tensor, Tensor]:
    """Return codes and the scales that decode them, in FP32, with the summed axis last.

    The shape of both is [rows, features], or [features, rows] if `along` is rows.
    """
    data = data_of(te, tensor, along)
    name = NAMES[along]
    if isinstance(tensor, te.NVFP4TensorStorage):
        scales = getattr(tensor, f"_{name}_scale_inv").view(torch.float8_e4m3fn).float()
        nibbles = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
        magnitudes = torch.tensor(E2M1, device=DEVICE)[(nibbles & 7).long()]
        codes = torch.where(nibbles >= 8, -magnitudes, magnitudes)
        tensor_scale = getattr(tensor, f"_amax_{name}").double().reshape(()) / NVFP4_SCALES
        return codes, spread(scales, codes, 16) * tensor_scale.float()
    codes = data.view(fp8_format(te, tensor._fp8_dtype)[0]).float()
    if isinstance(tensor, te.Float8TensorStorage):
        return codes, tensor._scale_inv.reshape(1, 1).expand(data.shape)
    scales = getattr(tensor, f"_{name}_scale_inv")
    # MXFP8 stores columns untransposed. A scale belongs to 32 values of a column.
    if isinstance(tensor, te.MXFP8TensorStorage):
        powers = torch.exp2(scales.float() - 127)
        if along == "rows":
            codes = codes.t()
            powers = powers.t()
        return codes, spread(powers, codes, 32)
    # Each scale belongs to a block of 128 x 128 codes.
    if tensor._is_2D_scaled:
        spread_scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes, spread_scales[: codes.shape[0], : codes.shape[1]]
    # The scales of rows are stored column by column.
    return codes, spread(scales.t(), codes, 128)


def spread(scales: Tensor, codes: Tensor, block: int) -> Tensor:
    """Repeat the scales of blocks for each code, without the library's padding."""
    return scales[: codes.shape[0]].repeat_interleave(block, dim=1)[:, : codes.shape[1]]


if __name__ == "__main__":
    main()
