"""Table of GPUs, with their dense peaks, their memory and the speed that steps reached on them.

MFU is the achieved throughput divided by the dense BF16 peak. Data sheets print tensor core
throughput "with sparsity", which is twice the dense peak. GeForce cards have half of the throughput
with FP32 accumulation. The dense peaks assume the boost clock of the data sheet. A card at its
power limit does not reach this clock. A run on a device that is not in the table reports TFLOP/s
but no MFU. Cards with contradictory published figures (A10G, GB10) or without a public data sheet
(H20) are not in the table.

`lab.speed.speed` predicts the speed of a training from this table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from foundation.errors import InputError
from foundation.reading import load_yaml

# `Card.error` of the cards on which steps of this trainer were measured.
MEASURED = 0.07


@dataclass(frozen=True, kw_only=True)
class Card:
    """Data sheet of one GPU, and the speed of steps relative to an H100 and an H200.

    `bf16` and `fp8` are dense peaks of the tensor cores in TFLOP/s, with FP32 accumulation. `fp32`
    is the peak of the arithmetic units outside of the tensor cores, in TFLOP/s.
    """

    # Regular expression that matches the whole name of the device. The driver reports this name. It
    # is matched in lower case and without "NVIDIA", "GeForce", "RTX" and "Tesla".
    pattern: str
    # Short name, which `pattern` matches too.
    name: str
    # CUDA compute capability (major, minor), which determines the precisions that the device
    # supports.
    capability: tuple[int, int]
    # Memory in GiB that CUDA reports. It is up to 8 % less than the GB of the data sheet. The value
    # of the H200 was measured, and the H200 NVL has the same value. The values of other devices
    # are the "total capacity" in torch's out-of-memory messages in public reports, rounded down.
    # On a workstation card, ECC reduces the memory by another 6 %.
    memory: float
    # Memory bandwidth in TB/s.
    bandwidth: float
    bf16: float
    # None if the tensor cores do not support FP8.
    fp8: float | None = None
    fp32: float
    # GB/s in one direction between GPUs. It is 0 unless NVLink connects all GPUs of a host. Bridges
    # between PCIe cards connect only two or four.
    nvlink: int = 0
    # Sustained share of the BF16 peak, divided by the share that an H100 and an H200 sustain
    # (benchmarks/planner_fit.py). It is larger than 1 if the clock is above the boost clock of the
    # data sheet, and smaller if the power limit is lower. None if no card of its class was
    # measured.
    factor: float | None = None
    # Half-width of the error of a predicted speed, as a fraction. None if `factor` is None.
    # MEASURED, or 0.15 if steps of another trainer were published, or 0.25 if the factor is that of
    # similar cards, or of slower trainers.
    error: float | None = None
    # The steps to which `factor` is fitted: their trainer and models, or another card.
    source: str = "no steps"

    @property
    def pcie(self) -> int:
        """Return the GB/s to the host in one direction. Cards since Hopper have PCIe 5."""
        return 32 if self.capability < (9, 0) else 64


def _read_cards(path: Path) -> Iterator[Card]:
    """Yield the cards in a YAML file."""
    for name, row in load_yaml(path).items():
        capability = tuple(row.pop("capability"))
        yield Card(name=name, capability=capability, **row)


CARDS = tuple(_read_cards(Path(__file__).with_suffix(".yaml")))


def card_of(device_name: str | None) -> Card | None:
    """Return the table entry of a device, or None if the table does not have it.

    device_name: result of `torch.cuda.get_device_name`, such as "NVIDIA H100 80GB HBM3" or
        "NVIDIA A100-SXM4-80GB", or a short name, such as "H100", "rtx4090" or "pro6000". None for a
        device without a name.
    """
    # "NVIDIA A100-SXM4-80GB" -> "a100 sxm4 80gb", "rtx4090" -> "4090"
    words = re.split(r"[\s\-_]+|(?<=rtx)|(?<=pro)", (device_name or "").strip().lower())
    name = " ".join(word for word in words if word not in {"", "nvidia", "geforce", "rtx", "tesla"})
    return next((card for card in CARDS if re.fullmatch(card.pattern, name)), None)


def cards_in(text: str) -> tuple[int, Card]:
    """Return the number of devices in a text such as `H200`, `8xB200` or `rtx4090`, and their card.

    Raise InputError if the device is not in the table of cards.
    """
    # A number that begins with 0 is read as a part of the name. No card has such a name.
    number, name = re.findall(r"(?s)^\s*(?:([1-9]\d*)\s*[xX]\s*)?(.*?)\s*$", text)[0]
    return int(number or 1), card_called(name, f"--on {text.strip()}")


def card_called(name: str, option: str) -> Card:
    """Return the card with a name that `card_of` accepts.

    Raise InputError with the names of all cards if there is none. Its message begins with `option`.
    """
    if card := card_of(name):
        return card
    # No similar name is suggested, because similar names are of other cards: H20 and H200.
    names = ", ".join(card.name for card in CARDS)
    raise InputError(f"{option}: this device is not in the table; the table has {names}")


def bf16_peak(device_name: str | None) -> float | None:
    """Return the dense BF16 peak of a device in TFLOP/s, or None if it is unknown."""
    card = card_of(device_name)
    return card.bf16 if card else None
