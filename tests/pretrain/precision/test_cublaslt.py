"""What cublasLt is told of a product, by the numbers of its header. That it then computes the product is in tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pretrain.precision.cublaslt import CublasLt, ScaleEach

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16
# cublasLt.h of CUDA 13.0: CUBLASLT_MATMUL_DESC_ and CUBLASLT_MATMUL_MATRIX_SCALE_.
NAMES = {
    3: "TRANSA",
    4: "TRANSB",
    17: "A_SCALE_POINTER",
    18: "B_SCALE_POINTER",
    25: "FAST_ACCUM",
    31: "A_SCALE_MODE",
    32: "B_SCALE_MODE",
}
VEC128_32F, BLK128X128_32F = 4, 5


class Told(CublasLt):
    """Notes what the library would be told: without a GPU it is not loaded."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}

    def require(self, name: str, *arguments: Any) -> None:
        if name == "cublasLtMatmulDescSetAttribute":
            _, attribute, value, _ = arguments
            self.values[NAMES[attribute]] = value._obj.value


@pytest.mark.parametrize(
    ("scales", "modes"),
    [
        ((ScaleEach.TENSOR, ScaleEach.TENSOR), {}),
        ((ScaleEach.SQUARE, ScaleEach.VECTOR), {"A_SCALE_MODE": BLK128X128_32F, "B_SCALE_MODE": VEC128_32F}),
        ((ScaleEach.VECTOR, ScaleEach.SQUARE), {"A_SCALE_MODE": VEC128_32F, "B_SCALE_MODE": BLK128X128_32F}),
        ((ScaleEach.VECTOR, ScaleEach.VECTOR), {"A_SCALE_MODE": VEC128_32F, "B_SCALE_MODE": VEC128_32F}),
    ],
)
def test_the_library_is_told_what_has_a_scale_of_its_own(scales: tuple[ScaleEach, ScaleEach], modes: dict[str, int]):
    library = Told()
    matmul = library.matmul((64, 32, 128), (E4M3, E4M3, BF16), (True, False), scales=scales)
    assert library.values == {"TRANSA": 1, "TRANSB": 0} | modes
    of_a, of_b = torch.ones(1), torch.ones(1)
    matmul.set_scales(of_a, of_b)
    assert library.values == {"TRANSA": 1, "TRANSB": 0} | modes | places(of_a, of_b)
    matmul.set_scales(of_b, of_a)
    assert library.values == {"TRANSA": 1, "TRANSB": 0} | modes | places(of_b, of_a)


def places(of_a: Tensor, of_b: Tensor) -> dict[str, int]:
    return {"A_SCALE_POINTER": of_a.data_ptr(), "B_SCALE_POINTER": of_b.data_ptr()}
