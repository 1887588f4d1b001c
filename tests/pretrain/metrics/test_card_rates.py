"""The rates of a GPU are stored, and read unless the file is damaged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pretrain.metrics import card_rates
from pretrain.metrics.card_rates import (
    CardRates,
    rates_file,
    read_rates,
    write_rates,
)

H100 = "NVIDIA H100 80GB HBM3"
RATES = CardRates(
    device=H100,
    gemm={"bf16": 6.9e14, "delayed": 1.3e15},
    bandwidth=2.9e12,
    launch=4.2e-6,
    nccl={"all_gather 100000000": 3.5e11},
)


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_rates, "CACHE", tmp_path)


def test_stored_rates_are_read_again() -> None:
    assert read_rates(H100) is None
    write_rates(replace(RATES, bandwidth=1.0))
    write_rates(RATES)
    assert read_rates(H100) == RATES
    assert read_rates("NVIDIA H200") is None


def test_a_card_has_the_rates_of_its_devices() -> None:
    """The newest measurement counts."""
    write_rates(RATES)
    assert read_rates("H100") == read_rates("h100-sxm") == RATES
    assert read_rates("H100 PCIe") is None and read_rates("NVIDIA GeForce RTX 4090 D") is None
    newer = replace(RATES, device="NVIDIA H100 SXM5")
    write_rates(newer)
    assert read_rates(H100) == newer


def test_names_of_devices_are_safe_names_of_files() -> None:
    odd = replace(RATES, device="../RTX 6000/Ada (48 GB)")
    write_rates(odd)
    assert read_rates(odd.device) == odd
    assert rates_file(odd.device).parent == rates_file(H100).parent


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b'{"device": "NVIDIA H100 80GB HBM3"}',
        b"cos\nsystem\n(S'true'\ntR.",
    ],
)
def test_a_damaged_file_counts_as_missing(content: bytes) -> None:
    write_rates(RATES)
    rates_file(H100).write_bytes(content)
    assert read_rates(H100) is None
