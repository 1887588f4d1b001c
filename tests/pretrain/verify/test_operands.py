"""Reading Transformer Engine's tensors: our own codes and scales, laid out as its kernels do it, are read back as they were.

No GPU is needed to get a layout wrong. tests/gpu/test_doctor_gpu.py reads what the library really writes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from pretrain.precision.formats.definition import Along, Role
from pretrain.precision.quantizers.grid import Quantized
from pretrain.precision.registry import PRECISIONS
from pretrain.precision.settings import ActivePrecision, LowPrecisionSettings
from pretrain.verify import operands
from pretrain.verify.operands import FEATURES, ROWS, compare_operands, difference, read, values


class Float8TensorStorage(SimpleNamespace):
    pass


class Float8BlockwiseQTensorStorage(SimpleNamespace):
    pass


class MXFP8TensorStorage(SimpleNamespace):
    pass


class NVFP4TensorStorage(SimpleNamespace):
    pass


STORAGES = (Float8TensorStorage, Float8BlockwiseQTensorStorage, MXFP8TensorStorage, NVFP4TensorStorage)
DTYPES = SimpleNamespace(cast=lambda name: SimpleNamespace(name=name))
TE = SimpleNamespace(**{kind.__name__: kind for kind in STORAGES}, DType=DTYPES)
FP8 = {"E4M3": ("kFloat8E4M3", torch.float8_e4m3fn), "E5M2": ("kFloat8E5M2", torch.float8_e5m2)}


def padded(scales: Tensor, rows: int, columns: int) -> Tensor:
    """To multiples, with what is no scale."""
    height, width = (-(-size // multiple) * multiple for size, multiple in zip(scales.shape, (rows, columns), strict=True))
    out = torch.full((height, width), 77, dtype=scales.dtype)
    out[: scales.shape[0], : scales.shape[1]] = scales
    return out


def stored(precision: str, role: Role, seed: int = 1) -> tuple[Any, dict[Along, Quantized]]:
    """Our operands along both axes as one tensor of the library."""
    settings = LowPrecisionSettings().resolved(precision)
    settings = settings.model_copy(update={"disable_stochastic_rounding": True} if precision == "nvfp4" else {})
    x, definition = values(torch.device("cpu"), seed), PRECISIONS[precision]
    ours = {along: definition.quantizer(settings, role, along)(x, torch.tensor(37.0), None) for along in get_args(Along)}
    grid = ours["features"].grid
    rows, columns = ours["features"], ours["rows"]

    if precision == "nvfp4":

        def packed(codes: Tensor) -> Tensor:
            magnitudes = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
            nibbles = (torch.searchsorted(magnitudes, codes.abs().contiguous()) + 8 * codes.signbit()).to(torch.uint8)
            return nibbles[:, ::2] | nibbles[:, 1::2] << 4

        def scales_of(quantized: Quantized) -> Tensor:
            return padded(quantized.block_scale[:, ::16].to(torch.float8_e4m3fn).view(torch.uint8), 128, 4)

        return (
            NVFP4TensorStorage(
                _rowwise_data=packed(rows.codes),
                _rowwise_scale_inv=scales_of(rows),
                _amax_rowwise=(rows.tensor_scale.double() * 2688).float().reshape(1),
                _columnwise_data=packed(columns.codes),
                _columnwise_scale_inv=scales_of(columns),
                _amax_columnwise=(columns.tensor_scale.double() * 2688).float().reshape(1),
            ),
            ours,
        )
    name, dtype = FP8[grid.name]

    def coded(codes: Tensor) -> Tensor:
        return codes.to(dtype).view(torch.uint8).contiguous()

    if precision == "mxfp8":  # columns lie as rows do
        powers = {along: (each.block_scale[:, ::32].log2() + 127).to(torch.uint8) for along, each in ours.items()}
        return (
            MXFP8TensorStorage(
                _fp8_dtype=name,
                _rowwise_data=coded(rows.codes),
                _rowwise_scale_inv=padded(powers["features"], 128, 4),
                _columnwise_data=coded(columns.codes.t()),
                _columnwise_scale_inv=padded(powers["rows"].t().contiguous(), 4, 128),
            ),
            ours,
        )
    if precision == "block":
        square = role == "weight"
        scales = {
            along: padded((each.block_scale[::128, ::128] if square else each.block_scale[:, ::128].t()).contiguous(), 1, 4)
            for along, each in ours.items()
        }
        return (
            Float8BlockwiseQTensorStorage(
                _fp8_dtype=name,
                _is_2D_scaled=square,
                _rowwise_data=coded(rows.codes),
                _rowwise_scale_inv=scales["features"],
                _columnwise_data=coded(columns.codes),
                _columnwise_scale_inv=scales["rows"],
            ),
            ours,
        )
    return Float8TensorStorage(
        _fp8_dtype=name, _data=coded(rows.codes), _transpose=coded(columns.codes), _scale_inv=rows.tensor_scale
    ), ours


@pytest.mark.parametrize("role", get_args(Role))
@pytest.mark.parametrize("precision", ["delayed", "current", "block", "mxfp8", "nvfp4"])
def test_every_layout_is_read_as_it_was_written_and_one_wrong_code_is_counted(precision: str, role: Role) -> None:
    tensor, ours = stored(precision, role)
    for along in get_args(Along):
        codes, scales = read(TE, tensor, along)
        assert codes.shape == ((ROWS, FEATURES) if along == "features" else (FEATURES, ROWS))
        assert difference((codes, scales), ours[along]) is None
        wrong = codes.clone()
        wrong[3, 5] += 1
        assert difference((wrong, scales), ours[along]).startswith(f"1 codes of {codes.numel():,} differ, first at (3, 5): ")
        assert "scales" in difference((codes, scales * 2), ours[along])


def test_where_sums_come_in_another_order_a_few_codes_may_differ_and_not_many() -> None:
    tensor, ours = stored("nvfp4", "input")
    codes, scales = read(TE, tensor, "rows")
    scales = scales * (1 + 2**-22)
    for count, agrees in ((20, True), (20_000, False)):
        wrong = codes.clone()
        wrong.view(-1)[:count] += 1
        assert (difference((wrong, scales), ours["rows"], 0.01) is None) == agrees


def test_a_layout_that_is_not_there_is_not_compared() -> None:
    tensor, _ = stored("current", "input")
    tensor._transpose = None
    assert read(TE, tensor, "rows") is None


class Library:
    """In the place of a backend on Transformer Engine: right operands, whose scales it writes in another order for products; and
    of which `wrong` bytes of codes are then others."""

    def __init__(self, precision: str, wrong: int) -> None:
        self.te, self.asked = TE, []
        of_direction = {"scaling_fwd": ["input", "weight"], "scaling_bwd": ["grad_output"]}
        quantizers = {
            key: [LibrarysQuantizer(self, precision, role, wrong) for role in of_direction[key]] for key in of_direction
        }
        self.linear = SimpleNamespace(
            quantizers=quantizers, _enable_weight_preswizzle=lambda quantizer, weight: precision == "mxfp8"
        )

    def product(self, *_: Any, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(linear=self.linear)


class LibrarysQuantizer:
    def __init__(self, library: Library, precision: str, role: Role, wrong: int) -> None:
        self.library, self.precision, self.role, self.wrong = library, precision, role, wrong
        self.scale, self.optimize_for_gemm = torch.ones(()), False

    def set_usage(self, *, rowwise: bool, columnwise: bool) -> None:
        assert rowwise and columnwise

    def __call__(self, x: Tensor) -> Any:
        slot = 1 if self.role == "weight" else 0
        tensor, _ = stored(self.precision, self.role, seed=slot + len("scaling_fwd"))
        self.library.asked.append((self.role, self.optimize_for_gemm))
        if self.optimize_for_gemm:
            for name, part in list(vars(tensor).items()):
                if name.endswith("scale_inv") and part.dim():
                    setattr(tensor, name, part.flip(0))
            data = tensor._data if isinstance(tensor, Float8TensorStorage) else tensor._rowwise_data
            data.view(-1)[: self.wrong] += 1
        return tensor


@pytest.mark.parametrize("precision", ["delayed", "current", "block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("wrong", [0, 3])
def test_codes_are_compared_as_training_asks_for_them_too_whatever_order_scales_have_there(
    precision: str, wrong: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(precision, wrong)
    monkeypatch.setattr(operands, "TransformerEngineBackend", lambda active, device: library)
    active = ActivePrecision(precision, PRECISIONS[precision], "transformer_engine", LowPrecisionSettings().resolved(precision))
    found = dict(compare_operands(active, torch.device("cpu")))
    as_in_training = {role: True for role in get_args(Role)} | {"weight": precision == "mxfp8"}
    assert library.asked == [each for role in get_args(Role) for each in ((role, False), (role, as_in_training[role]))]
    along_features = {name: said for name, said in found.items() if name.endswith("along features")}
    for name, said in along_features.items():
        right = not wrong or not as_in_training[name.split()[0]]
        assert (said is None) == right, found
        assert right or (said.startswith("3 bytes of ") and said.endswith(" where scales are written as training asks for them"))
    assert len(found) == 6 and not {name: said for name, said in found.items() if said and name not in along_features}
