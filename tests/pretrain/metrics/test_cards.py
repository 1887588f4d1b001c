"""Cards are looked up by the name that the driver reports, and by names near it."""

from __future__ import annotations

import pytest

from pretrain.metrics.cards import CARDS, Card, bf16_peak, card_of

NAMES = {
    "H200": ("h200",),
    "H100": ("NVIDIA H100 80GB HBM3", "h100-sxm", "h100sxm5"),
    "H100 PCIe": ("NVIDIA H100 PCIe",),
    "A100": ("NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-80GB"),
    "A100 40GB": ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "a100-40g"),
    "RTX A6000": ("NVIDIA RTX A6000", "A6000"),
    "RTX 6000 Ada": ("rtx6000ada",),
    "RTX 4090": ("NVIDIA GeForce RTX 4090", "rtx4090", "RTX-4090"),
    "RTX 5090": ("5090",),
    "GH200": ("NVIDIA GH200 480GB",),
    "GH200 144GB": ("NVIDIA GH200 144G HBM3e",),
    "RTX PRO 6000 Max-Q": ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
    "RTX PRO 6000 Server": ("RTX PRO 6000 Blackwell Server Edition",),
    "RTX PRO 6000 Workstation": ("pro6000",),
}
UNKNOWN = ["NVIDIA H100 64GB HBM2", "NVIDIA H100 96GB HBM3", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"]
UNKNOWN += ["NVIDIA GeForce RTX 4090 Laptop GPU", "Quadro RTX 6000", "4090 D", "4080", "pro", ""]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_peaks_are_dense_and_those_of_a_generation(card: Card) -> None:
    """FP8 doubles BF16, and needs compute capability 8.9. A factor has an error."""
    assert card_of(card.name) is card
    assert (card.fp8 is not None) == (card.capability >= (8, 9))
    assert card.fp8 is None or card.fp8 / card.bf16 == pytest.approx(2, rel=0.02)
    assert (card.factor is None) == (card.error is None)
    assert 0.2 < card.bandwidth < 10 and 15 < card.fp32 < 130


def test_a_card_is_found_by_a_near_name() -> None:
    for name, texts in NAMES.items():
        assert [card_of(text).name for text in texts] == [name] * len(texts)
    assert not any(map(card_of, UNKNOWN))
    assert bf16_peak("h100") == 989.5 and bf16_peak("4080") is None
