"""The peak of the named device, and of no other."""

from __future__ import annotations

import pytest

from pretrain.metrics.peaks import entry_of, peak


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_names_that_drivers_report_find_their_dense_bf16_peak(name: str, bf16: float) -> None:
    assert peak(name, "bf16") == bf16


@pytest.mark.parametrize(
    "name",
    [
        "",
        None,
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_unknown_devices_and_relatives_of_known_ones_have_no_peak(name: str | None) -> None:
    assert peak(name, "bf16") is None


def test_a_format_that_the_hardware_lacks_has_no_peak() -> None:
    assert peak("NVIDIA A100-SXM4-80GB", "fp8") is None
    assert peak("NVIDIA H200", "fp4") is None
    assert peak("NVIDIA H200", "fp8") == 1979.0
    assert peak("NVIDIA B200", "fp4") == 9000.0


@pytest.mark.parametrize(("name", "gib"), {"h200": 139.8, "NVIDIA H100 80GB HBM3": 79.1, "NVIDIA H100 PCIe": None}.items())
def test_the_memory_of_a_device_is_known_by_the_name_that_its_driver_reports(name: str, gib: float | None) -> None:
    assert entry_of(name).memory == gib
