"""Sustained rates of a GPU, measured and stored by `python -m pretrain doctor`.

The cache folder has one JSON file for each entry in the table of cards. For example, an "NVIDIA
H100 80GB HBM3" reads the rates of the entry "H100". A GPU that is not in the table has a file of
its own.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from foundation.files import CACHE, write_json
from pretrain.metrics.cards import card_of


@dataclass(frozen=True)
class CardRates:
    """The rates that a machine with one or several GPUs of one kind sustains."""

    # Name of the GPU, as the driver reports it.
    device: str
    # FLOP/s of long GEMMs at the power limit, by precision: bf16, and each quantized precision that
    # the GPU computes. Quantization is not included.
    gemm: dict[str, float]
    # Bytes/s of a copy within the GPU's memory, counted as bytes read plus bytes written.
    bandwidth: float
    # Seconds of the host for the launch of one kernel.
    launch: float
    # Bus bandwidth between the GPUs in bytes/s, as nccl-tests defines it, by operation and size of
    # the complete message in bytes, such as "all_gather 100000000". Empty with one GPU.
    nccl: dict[str, float]


def read_rates(device: str) -> CardRates | None:
    """Return the stored rates of a GPU. Return None if no rates are stored or the file is damaged.

    device: name of the GPU, as the driver reports it, or the short name of its card.
    """
    with suppress(OSError, ValueError, TypeError):
        return CardRates(**json.loads(rates_file(device).read_bytes()))
    return None


def write_rates(rates: CardRates) -> None:
    """Store the rates of a GPU in place of earlier ones. Raise InputError if this fails."""
    write_json(rates_file(rates.device), asdict(rates))


def rates_file(device: str) -> Path:
    """Return the path of the file with the rates of a GPU."""
    card = card_of(device)
    name = re.sub(r"\W+", "-", card.name if card else device)
    return CACHE / "card_rates" / f"{name}.json"
