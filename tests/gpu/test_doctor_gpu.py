"""What the GPU at hand has: precisions, Transformer Engine's operands bit for bit as ours, and the doctor's table.

Transformer Engine's tensors are read as its kernels wrote them: which byte is which value's, and where its scale stands.
docs/verification.md says which operand is quantized along which axis. Training has scales written in the order in which
Blackwell's products read them (`optimize_for_gemm`), by other templates of the same kernels. That order is not read here: scales
are compared in the plain one, and codes, which lie alike, in both.
"""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from pretrain import __main__ as commands
from pretrain.precision.delayed_state import PLACES
from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.observed import fp8_format
from pretrain.precision.settings import PRECISIONS, ActivePrecision, LowPrecisionSettings
from pretrain.precision.transformer_engine import (
    TE_DIRECTIONS,
    TransformerEngine,
    unavailable_because,
)
from tests.gpu.conftest import needs

DEVICE = torch.device("cuda", 0)
AVAILABLE = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "block": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}
ROWS, FEATURES = 512, 768
# E2M1's eight magnitudes by their three bits; the fourth is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# of the codes may differ after a Hadamard transform, whose sums come in another order
TRANSFORMED = 0.01
# the library's, of what a product sums along
NAMES: dict[Along, str] = {"features": "rowwise", "rows": "columnwise"}
NVFP4_SCALES = 6.0 * 448.0  # what a tensor's largest value is divided by, to be its scale


@pytest.mark.parametrize("name", AVAILABLE)
def test_a_recipe_runs_where_transformer_engine_says_that_it_does(name: str) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    available = getattr(te, AVAILABLE[name])()
    assert (
        PRECISIONS[name].hardware.missing(torch.cuda.get_device_capability()) is None
    ) == available


@pytest.mark.parametrize("name", AVAILABLE)
def test_the_librarys_operands_are_read_and_are_ours_bit_for_bit(name: str) -> None:
    """Each operand of a product along each axis that is summed over, rounded to nearest, as chance cannot be compared."""
    precision = PRECISIONS[needs(name)]
    nearest = (
        {"disable_stochastic_rounding": True}
        if "disable_stochastic_rounding" in precision.options
        else {}
    )
    settings = LowPrecisionSettings(**nearest).resolved(name)
    engine = TransformerEngine(
        ActivePrecision(name, precision, "transformer_engine", settings), DEVICE
    )
    linear, compared = engine.gemm("operands", FEATURES, FEATURES).linear, 0
    for role, along in product(get_args(Role), get_args(Along)):
        direction, slot = PLACES[role]
        direction = TE_DIRECTIONS[direction]
        quantizer = linear.quantizers[direction][slot]
        quantizer.set_usage(rowwise=True, columnwise=True)
        x, scale = values(seed=slot + len(direction)), None
        if precision.keeps_history:
            quantizer.scale.fill_(37.0)
            scale = torch.tensor(37.0, device=DEVICE)
        theirs = quantizer(x)
        # As pretrain.precision.transformer_engine and the library's own linears ask for it.
        quantizer.optimize_for_gemm = role != "weight" or linear._enable_weight_preswizzle(
            quantizer, x
        )
        in_training = data_of(engine.te, quantizer(x), along)
        quantizer.optimize_for_gemm = False
        plain = data_of(engine.te, theirs, along)
        if plain is None:  # Blackwell's products read one layout both ways
            continue
        compared += 1
        transformed = along == "rows" and precision.transform(settings, role) is not None
        share = TRANSFORMED if transformed else 0.0
        codes, scales = read(engine.te, theirs, along)
        ours = precision.quantizer(settings, role, along)(x, scale, None)
        our_scales = (ours.block_scale * ours.tensor_scale).expand(codes.shape)
        # A tensor's scale may be an FP32 rounding off where values are transformed. Scales of zeros alone are any.
        off = (
            (scales - our_scales).abs() > 1e-3 * our_scales if transformed else scales != our_scales
        )
        wrong = (codes != ours.codes) | (off & (codes != 0))
        assert wrong.sum() <= share * wrong.numel(), (
            f"{role} along {along}: {wrong.sum()} differ, at {wrong.nonzero()[:3]}"
        )
        # A code that rounds the other way is a byte at most.
        others = in_training.view(torch.uint8) != plain.view(torch.uint8)
        assert others.sum() <= share * others.numel(), (
            f"{role} along {along}: {others.sum()} bytes are others in training"
        )
    assert compared >= 3


def values(seed: int) -> Tensor:
    """[ROWS, FEATURES] BF16, of sizes that differ from block to block, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, FEATURES, generator=generator)
    sizes = torch.exp2(
        torch.randint(-6, 7, (ROWS // 16, FEATURES // 16), generator=generator).float()
    )
    x *= sizes.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.05, 0).bfloat16().to(DEVICE)


def data_of(te: Any, tensor: Any, along: Along) -> Tensor | None:
    """The bytes of its codes, as they lie; None: there is no layout of its own for this axis."""
    if isinstance(tensor, te.Float8TensorStorage):
        return tensor._data if along == "features" else tensor._transpose
    return getattr(tensor, f"_{NAMES[along]}_data")


def read(te: Any, tensor: Any, along: Along) -> tuple[Tensor, Tensor]:
    """Codes and the scales that decode them, FP32, both with the sum's axis last, [rows, features] or [features, rows]."""
    data, name = data_of(te, tensor, along), NAMES[along]
    if isinstance(tensor, te.NVFP4TensorStorage):
        scales = getattr(tensor, f"_{name}_scale_inv").view(torch.float8_e4m3fn).float()
        nibbles = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)
        magnitudes = torch.tensor(E2M1, device=DEVICE)[(nibbles & 7).long()]
        codes = torch.where(nibbles >= 8, -magnitudes, magnitudes)
        whole = getattr(tensor, f"_amax_{name}").double().reshape(()) / NVFP4_SCALES
        return codes, spread(scales, codes, 16) * whole.float()
    codes = data.view(fp8_format(te, tensor._fp8_dtype)[0]).float()
    if isinstance(tensor, te.Float8TensorStorage):
        return codes, tensor._scale_inv.reshape(1, 1).expand(data.shape)
    scales = getattr(tensor, f"_{name}_scale_inv")
    # columns as they lie, each scale for 32 values below each other
    if isinstance(tensor, te.MXFP8TensorStorage):
        powers = torch.exp2(scales.float() - 127)
        codes, powers = (codes, powers) if along == "features" else (codes.t(), powers.t())
        return codes, spread(powers, codes, 32)
    if tensor._is_2D_scaled:  # in blocks of 128
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return codes, wide[: codes.shape[0], : codes.shape[1]]
    return codes, spread(scales.t(), codes, 128)  # scales of rows stand column by column


def spread(scales: Tensor, codes: Tensor, block: int) -> Tensor:
    """A scale for each code; what the library pads with is left out."""
    return scales[: codes.shape[0]].repeat_interleave(block, dim=1)[:, : codes.shape[1]]


def test_the_doctor_makes_its_table_on_this_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    precisions = [
        "bf16",
        "mxfp4",
        *(name for name in ("current", "mxfp8") if not unavailable_because(PRECISIONS[name])),
    ]
    assert commands.main(["doctor", "--precisions", ",".join(precisions)]) == 0
    table = capsys.readouterr().out
    assert all(f"| {name} " in table for name in precisions) and "Traceback" not in table
    assert "| emulation " in table, "mxfp4 is tried, not timed"
