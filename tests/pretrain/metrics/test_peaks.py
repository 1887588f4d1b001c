"""The peak of the named device, and of no other."""

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
def test_names_that_drivers_report_find_their_dense_peak_and_relatives_none(
    name: str | None, number_format: str, tflops: float | None
) -> None:
    assert peak(name, number_format) == tflops


MEMORY = {"h200": 139.8, "NVIDIA H100 80GB HBM3": 79.1, "NVIDIA H100 PCIe": 79.1}
MEMORY |= {
    "NVIDIA A100-SXM4-40GB": 39.3,
    "NVIDIA A100-PCIE-40GB": 39.3,
    "NVIDIA A100-SXM4-80GB": 79.1,
}
MEMORY |= {"NVIDIA A100 80GB PCIe": 79.1, "NVIDIA RTX A6000": 47.4, "NVIDIA GeForce RTX 4090": 23.5}
MEMORY |= {"NVIDIA GH200 480GB": 94.5, "NVIDIA GH200 144G HBM3e": 142.4, "NVIDIA GB200": 184.3}


@pytest.mark.parametrize(("name", "gib"), MEMORY.items())
def test_the_memory_of_a_device_is_known_by_the_name_that_its_driver_reports(
    name: str, gib: float | None
) -> None:
    assert entry_of(name).memory == gib
