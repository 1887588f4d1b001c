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
from dataclasses import dataclass

from foundation.errors import InputError

# Classes of a card: the half-width of the error of predicted speeds, as a fraction.
MEASURED = 0.07  # steps of this trainer were measured on the card
PUBLISHED = 0.15  # steps of another trainer were published
GUESSED = 0.25  # the factor is that of similar cards, or of slower trainers


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
    error: float | None = None
    # The steps to which `factor` is fitted: their trainer and models, or another card.
    source: str = "no steps"

    @property
    def pcie(self) -> int:
        """Return the GB/s to the host in one direction. Cards since Hopper have PCIe 5."""
        return 32 if self.capability < (9, 0) else 64


# Regular expression for memory size and memory type in the lower-case names of devices such as
# "h100 80gb hbm3" and "gh200 144g hbm3e".
NUMBERS = r"(?: \d+gb?)?(?: hbm\d\w*)?"

# The patterns match whole names. An "RTX 4090 D", the RTX 4090 of a laptop and a MIG slice of an
# A100 must not match, because their peaks differ from those of the full devices.
CARDS = (
    # NVIDIA A100 data sheet (2188504): BF16 is 312 dense and 624 sparse, for SXM and PCIe. The
    # bandwidth is 1.555 TB/s with 40 GB, 2.039 with 80 GB, and 1.935 with 80 GB and PCIe.
    # An A100 without a memory size in its name is assumed to have 80 GB.
    Card(
        pattern=r"a100(?: sxm4| pcie)? 40gb?",
        name="A100 40GB",
        capability=(8, 0),
        memory=39.3,
        bandwidth=1.555,
        bf16=312.0,
        fp32=19.5,
        nvlink=300,
        factor=1.01,
        error=GUESSED,
        source="llm-foundry, 0.1 to 13 B in BF16",
    ),
    Card(
        pattern=rf"a100(?: sxm4| pcie| pg509)*{NUMBERS}(?: pcie)?",
        name="A100",
        capability=(8, 0),
        memory=79.1,
        bandwidth=2.039,
        bf16=312.0,
        fp32=19.5,
        nvlink=300,
        factor=1.01,
        error=GUESSED,
        source="llm-foundry, 0.1 to 13 B in BF16",
    ),
    # NVIDIA H100 data sheet, sparse peaks in BF16 and FP8: SXM 1,979 and 3,958, PCIe 1,513 and
    # 3,026, NVL 1,671 and 3,341. The power limits are 700, 350 and 400 W. An H100 SXM needs 700 W
    # for 0.70 of its peak, so the factors of the other two are those of its TFLOP/s per watt.
    Card(
        pattern=r"h100 pcie",
        name="H100 PCIe",
        capability=(9, 0),
        memory=79.1,
        bandwidth=2.0,
        bf16=756.5,
        fp8=1513.0,
        fp32=51.0,
        factor=0.65,
        error=GUESSED,
        source="H100, by its watts",
    ),
    Card(
        pattern=r"h100 nvl",
        name="H100 NVL",
        capability=(9, 0),
        memory=93.0,
        bandwidth=3.9,
        bf16=835.5,
        fp8=1670.5,
        fp32=60.0,
        factor=0.68,
        error=GUESSED,
        source="H100, by its watts",
    ),
    Card(
        pattern=r"h100(?: ?sxm5?)?(?: 80gb?)?(?: hbm3)?",
        name="H100",
        capability=(9, 0),
        memory=79.1,
        bandwidth=3.35,
        bf16=989.5,
        fp8=1979.0,
        fp32=67.0,
        nvlink=450,
        factor=1.0,
        error=MEASURED,
        source="this launcher, 0.1 to 14 B",
    ),
    # NVIDIA H200 data sheet, sparse peaks in BF16 and FP8: SXM 1,979 and 3,958, NVL 1,671 and
    # 3,341. The power limits are 700 and 600 W. The factor of the NVL is that of the TFLOP/s per
    # watt of an H200 SXM.
    Card(
        pattern=r"h200 nvl",
        name="H200 NVL",
        capability=(9, 0),
        memory=139.8,
        bandwidth=4.8,
        bf16=835.5,
        fp8=1670.5,
        fp32=60.0,
        factor=1.02,
        error=GUESSED,
        source="H200, by its watts",
    ),
    Card(
        pattern=rf"h200(?: ?sxm5?)?{NUMBERS}",
        name="H200",
        capability=(9, 0),
        memory=139.8,
        bandwidth=4.8,
        bf16=989.5,
        fp8=1979.0,
        fp32=67.0,
        nvlink=450,
        factor=1.0,
        error=MEASURED,
        source="this launcher, 0.1 to 14 B",
    ),
    # NVIDIA GH200 data sheet: the peaks of the H200 SXM, 4 TB/s with 96 GB of HBM3 and 4.9 TB/s
    # with 144 GB of HBM3e. Its power limit, 450 to 1,000 W, is shared with the CPU and differs
    # between machines. No step was measured on it, so its factor is not known. In the name "GH200
    # 480GB", 480 GB is the memory of the CPU. The GPU has 96 GB.
    Card(
        pattern=r"gh200 144gb?(?: hbm3e)?",
        name="GH200 144GB",
        capability=(9, 0),
        memory=142.4,
        bandwidth=4.9,
        bf16=989.5,
        fp8=1979.0,
        fp32=67.0,
        nvlink=450,
    ),
    Card(
        pattern=rf"gh200{NUMBERS}",
        name="GH200",
        capability=(9, 0),
        memory=94.5,
        bandwidth=4.0,
        bf16=989.5,
        fp8=1979.0,
        fp32=67.0,
        nvlink=450,
    ),
    # NVIDIA HGX B200 and GB200 NVL72 data sheets, sparse peaks per GPU in PFLOP/s. B200 and GB200
    # have 4.5 and 5 in BF16, 9 and 10 in FP8.
    Card(
        pattern=rf"b200{NUMBERS}",
        name="B200",
        capability=(10, 0),
        memory=178.4,
        bandwidth=8.0,
        bf16=2250.0,
        fp8=4500.0,
        fp32=75.0,
        nvlink=900,
        factor=0.89,
        error=PUBLISHED,
        source="NeMo, 8 B in BF16 and FP8",
    ),
    Card(
        pattern=rf"gb200{NUMBERS}",
        name="GB200",
        capability=(10, 0),
        memory=184.3,
        bandwidth=8.0,
        bf16=2500.0,
        fp8=5000.0,
        fp32=80.0,
        nvlink=900,
        factor=0.85,
        error=PUBLISHED,
        source="Megatron Bridge, 8 B in BF16 and FP8",
    ),
    # NVIDIA HGX B300 and GB300 NVL72 data sheets, sparse peaks per GPU in PFLOP/s. B300 and GB300
    # have 4.5 and 5 in BF16, 9 and 10 in FP8.
    Card(
        pattern=rf"b300(?: sxm6)?(?: ac)?{NUMBERS}",
        name="B300",
        capability=(10, 3),
        memory=267.6,
        bandwidth=8.0,
        bf16=2250.0,
        fp8=4500.0,
        fp32=75.0,
        nvlink=900,
        factor=0.88,
        error=GUESSED,
        source="MLPerf, 8 B in FP8, BF16 extrapolated",
    ),
    Card(
        pattern=rf"gb300{NUMBERS}",
        name="GB300",
        capability=(10, 3),
        memory=276.5,
        bandwidth=8.0,
        bf16=2500.0,
        fp8=5000.0,
        fp32=80.0,
        nvlink=900,
        factor=1.09,
        error=PUBLISHED,
        source="Megatron Bridge, 8 B in FP8, BF16 extrapolated",
    ),
    # NVIDIA L40S data sheet: BF16 is 362.05 dense and 733 sparse, FP8 is 733 dense and 1,466
    # sparse.
    Card(
        pattern=r"l40s",
        name="L40S",
        capability=(8, 9),
        memory=44.3,
        bandwidth=0.864,
        bf16=362.05,
        fp8=733.0,
        fp32=91.6,
        factor=0.76,
        error=PUBLISHED,
        source="llmq, 0.5 to 3 B",
    ),
    # NVIDIA RTX A6000 data sheet: BF16 is 309.7 sparse. This agrees with 154.8 dense in the GA102
    # white paper. NVIDIA RTX 6000 Ada data sheet: FP8 is 1,457 sparse. Its factor is that of the
    # TFLOP/s per watt of an L40S (350 W), with 300 W.
    Card(
        pattern=r"a6000",
        name="RTX A6000",
        capability=(8, 6),
        memory=47.4,
        bandwidth=0.768,
        bf16=154.8,
        fp32=38.7,
    ),
    Card(
        pattern=r"6000 ?ada(?: generation)?",
        name="RTX 6000 Ada",
        capability=(8, 9),
        memory=47.4,
        bandwidth=0.96,
        bf16=364.2,
        fp8=728.5,
        fp32=91.1,
        factor=0.64,
        error=GUESSED,
        source="L40S, by its watts",
    ),
    # NVIDIA RTX PRO 6000 Blackwell data sheets: FP4 is 4,000 sparse for the Server Edition and the
    # Workstation Edition, and 3,511 sparse for the Max-Q. FP32 is 120 for the Server Edition, 125
    # for the Workstation Edition, and 110 for the Max-Q. FP8 has half the throughput of FP4, and
    # BF16 has half the throughput of FP8. Unlike GeForce cards, these cards do not halve the
    # throughput for FP32 accumulation. The power limits are 600, 600 and 300 W. The factor of the
    # Max-Q is that of the TFLOP/s per watt of the other two. A card without an edition in its name
    # is assumed to be a Workstation Edition.
    Card(
        pattern=r"pro 6000 (?:blackwell )?server(?: edition)?",
        name="RTX PRO 6000 Server",
        capability=(12, 0),
        memory=94.9,
        bandwidth=1.597,
        bf16=500.0,
        fp8=1000.0,
        fp32=120.0,
        factor=1.09,
        error=PUBLISHED,
        source="llmq, 0.5 to 14 B",
    ),
    Card(
        pattern=r"pro 6000(?: blackwell)?(?: workstation)?(?: edition)?",
        name="RTX PRO 6000 Workstation",
        capability=(12, 0),
        memory=94.9,
        bandwidth=1.792,
        bf16=500.0,
        fp8=1000.0,
        fp32=125.0,
        factor=1.09,
        error=PUBLISHED,
        source="llmq, 0.5 to 14 B",
    ),
    Card(
        pattern=r"pro 6000 (?:blackwell )?max q(?: workstation edition)?",
        name="RTX PRO 6000 Max-Q",
        capability=(12, 0),
        memory=94.9,
        bandwidth=1.792,
        bf16=438.9,
        fp8=877.8,
        fp32=110.0,
        factor=0.62,
        error=GUESSED,
        source="RTX PRO 6000 Server, by its watts",
    ),
    # NVIDIA GA102, Ada and RTX Blackwell white papers: dense peaks with FP32 accumulation. They are
    # half of the peaks with FP16 accumulation. The factor of the RTX 3090 is the geometric mean of
    # the other two.
    Card(
        pattern=r"3090",
        name="RTX 3090",
        capability=(8, 6),
        memory=23.5,
        bandwidth=0.936,
        bf16=71.0,
        fp32=35.6,
        factor=1.37,
        error=GUESSED,
        source="RTX 4090 and 5090",
    ),
    Card(
        pattern=r"4090",
        name="RTX 4090",
        capability=(8, 9),
        memory=23.5,
        bandwidth=1.008,
        bf16=165.2,
        fp8=330.3,
        fp32=82.6,
        factor=1.3,
        error=PUBLISHED,
        source="llmq, 0.5 to 14 B",
    ),
    Card(
        pattern=r"5090",
        name="RTX 5090",
        capability=(12, 0),
        memory=31.3,
        bandwidth=1.792,
        bf16=209.5,
        fp8=419.0,
        fp32=104.8,
        factor=1.44,
        error=PUBLISHED,
        source="llmq, 0.5 to 3 B",
    ),
)


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
    # "0xH200" is not in the table.
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
