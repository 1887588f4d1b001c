"""Peaks and memory are looked up by the name that the driver reports."""

from __future__ import annotations

import pytest

from pretrain.metrics.peaks import entry_of, peak


@pytest.mark.parametrize(
    ("name", "number_format", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "bf16", 438.9),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA H200", "fp8", 1979.0),
        ("NVIDIA B200", "fp4", 9000.0),
        ("NVIDIA A100-SXM4-80GB", "fp8", None),
        ("NVIDIA H200", "fp4", None),
        (None, "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
    ],
)
def test_a_name_has_its_dense_peak_and_similar_names_have_none(
    name: str | None, number_format: str, tflops: float | None
) -> None:
    assert peak(name, number_format) == tflops


MEMORY = {
    "h200": 139.8,
    "NVIDIA H100 80GB HBM3": 79.1,
    "NVIDIA H100 PCIe": 79.1,
    "NVIDIA A100-SXM4-40GB": 39.3,
    "NVIDIA A100-PCIE-40GB": 39.3,
    "NVIDIA A100-SXM4-80GB": 79.1,
    "NVIDIA A100 80GB PCIe": 79.1,
    "NVIDIA RTX A6000": 47.4,
    "NVIDIA GeForce RTX 4090": 23.5,
    "NVIDIA GH200 480GB": 94.5,
    "NVIDIA GH200 144G HBM3e": 142.4,
    "NVIDIA GB200": 184.3,
}


@pytest.mark.parametrize(("name", "gib"), MEMORY.items())
def test_a_name_has_the_memory_of_its_device(name: str, gib: float | None) -> None:
    assert entry_of(name).memory == gib
