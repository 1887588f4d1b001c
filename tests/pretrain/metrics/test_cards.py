"""Peaks and memory are looked up by the name that the driver reports."""

from __future__ import annotations

import pytest

from pretrain.metrics.cards import CARDS, Card, bf16_peak, card_of


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_peaks_are_dense_and_those_of_a_generation(card: Card) -> None:
    """FP8 doubles BF16, and needs compute capability 8.9. A factor has an error."""
    assert card_of(card.name) is card
    assert (card.fp8 is not None) == (card.capability >= (8, 9))
    assert card.fp8 is None or card.fp8 / card.bf16 == pytest.approx(2, rel=0.02)
    assert (card.factor is None) == (card.error is None)
    assert 0.2 < card.bandwidth < 10 and 15 < card.fp32 < 130


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("rtx4090", "RTX 4090"),
        ("RTX-4090", "RTX 4090"),
        ("5090", "RTX 5090"),
        ("h100-sxm", "H100"),
        ("h100sxm5", "H100"),
        ("H100 80GB", "H100"),
        ("a100", "A100"),
        ("a100-40g", "A100 40GB"),
        ("A6000", "RTX A6000"),
        ("rtx6000ada", "RTX 6000 Ada"),
        ("pro6000", "RTX PRO 6000 Workstation"),
        ("RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        *dict.fromkeys(
            ("NVIDIA H100 64GB HBM2", "NVIDIA H100 96GB HBM3", "Quadro RTX 6000")
        ).items(),
        *dict.fromkeys(("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "4090 D", "4080", "pro", "")).items(),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_a_card_is_found_by_a_near_name(text: str, name: str | None) -> None:
    card = card_of(text)
    assert (card.name if card else None) == name
    assert bf16_peak(text) == (card.bf16 if card else None)


@pytest.mark.parametrize(
    ("name", "tflops", "gib"),
    [
        ("h200", 989.5, 139.8),
        ("NVIDIA H100 80GB HBM3", 989.5, 79.1),
        ("NVIDIA H100 PCIe", 756.5, 79.1),
        ("NVIDIA A100-SXM4-40GB", 312.0, 39.3),
        ("NVIDIA A100-PCIE-40GB", 312.0, 39.3),
        ("NVIDIA A100-SXM4-80GB", 312.0, 79.1),
        ("NVIDIA A100 80GB PCIe", 312.0, 79.1),
        ("NVIDIA RTX A6000", None, 47.4),
        ("NVIDIA GeForce RTX 4090", 165.2, 23.5),
        ("NVIDIA GH200 480GB", None, 94.5),
        ("NVIDIA GH200 144G HBM3e", None, 142.4),
        ("NVIDIA GB200", None, 184.3),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 438.9, None),
    ],
)
def test_a_name_has_the_peak_and_memory_of_its_device(
    name: str, tflops: float | None, gib: float | None
) -> None:
    card = card_of(name)
    assert tflops in (None, card.bf16) and gib in (None, card.memory)
