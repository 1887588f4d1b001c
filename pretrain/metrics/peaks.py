"""Table of devices, with their dense peak throughput in TFLOP/s and their memory in GiB.

MFU is the achieved throughput divided by the dense peak. Data sheets print tensor core throughput
"with sparsity", which is twice the dense peak. The dense peaks assume the boost clock of the data
sheet. A card at its power limit does not reach this clock. A run on a device that is not in the
table reports TFLOP/s but no MFU. Cards with contradictory published figures (A10G) or without a
public data sheet (H20) are not in the table.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

PeakDtype = Literal["fp32", "bf16", "fp8", "fp4"]


@dataclass(frozen=True)
class Peak:
    """Dense peaks of one device in TFLOP/s, and its memory in GiB.

    `bf16`, `fp8` and `fp4` are peaks of the tensor cores with FP32 accumulation. `fp32` is the peak
    of the arithmetic units outside of the tensor cores. A peak is None if the table does not have
    it.
    """

    # Regular expression that matches the whole name of the device. The driver reports this name. It
    # is matched in lower case and without "NVIDIA", "GeForce" and "Tesla".
    pattern: str
    # Memory in GiB that CUDA reports. It is up to 8 % less than the GB of the data sheet. The value
    # of the H200 was measured, and the H200 NVL has the same value. The values of other devices
    # are the "total capacity" in torch's out-of-memory messages in public reports, rounded down.
    # On a workstation card, ECC reduces the memory by another 6 %.
    memory: float
    # None if the tensor cores do not support BF16.
    bf16: float | None
    fp8: float | None = None
    fp4: float | None = None
    fp32: float | None = None
    # CUDA compute capability (major, minor), which determines the precisions that the device
    # supports. None if the table does not have it.
    capability: tuple[int, int] | None = None


# Regular expression for memory size and memory type in the lower-case names of devices such as
# "h100 80gb hbm3" and "gh200 144g hbm3e".
NUMBERS = r"(?: \d+gb?)?(?: hbm\d\w*)?"

# The patterns match whole names. An "RTX 4090 D", the RTX 4090 of a laptop and a MIG slice of an
# A100 must not match, because their peaks differ from those of the full devices.
PEAKS = (
    # NVIDIA A100 data sheet (2188504): BF16 is 312 dense and 624 sparse, for SXM and PCIe.
    # An A100 without a memory size in its name is assumed to have 80 GB.
    Peak(r"a100(?: sxm4| pcie)? 40gb", memory=39.3, bf16=312.0, fp32=19.5),
    Peak(rf"a100(?: sxm4| pcie| pg509)*{NUMBERS}(?: pcie)?", memory=79.1, bf16=312.0, fp32=19.5),
    # NVIDIA H100 data sheet, sparse peaks in BF16 and FP8: SXM 1,979 and 3,958, PCIe 1,513 and
    # 3,026, NVL 1,671 and 3,341.
    Peak(r"h100 pcie", memory=79.1, bf16=756.5, fp8=1513.0, fp32=51.0),
    Peak(r"h100 nvl", memory=93.0, bf16=835.5, fp8=1670.5, fp32=60.0),
    Peak(
        rf"h100(?: sxm5?)?{NUMBERS}",
        memory=79.1,
        bf16=989.5,
        fp8=1979.0,
        fp32=67.0,
        capability=(9, 0),
    ),
    # NVIDIA H200 data sheet, sparse peaks in BF16 and FP8: SXM 1,979 and 3,958, NVL 1,671 and
    # 3,341. The GH200 has the peaks of the H200 SXM.
    Peak(r"h200 nvl", memory=139.8, bf16=835.5, fp8=1670.5, fp32=60.0),
    Peak(
        rf"h200(?: sxm5?)?{NUMBERS}",
        memory=139.8,
        bf16=989.5,
        fp8=1979.0,
        fp32=67.0,
        capability=(9, 0),
    ),
    # In the name "GH200 480GB", 480 GB is the memory of the CPU. The GPU has 96 GB.
    Peak(r"gh200 144gb?(?: hbm3e)?", memory=142.4, bf16=989.5, fp8=1979.0, fp32=67.0),
    Peak(rf"gh200{NUMBERS}", memory=94.5, bf16=989.5, fp8=1979.0, fp32=67.0),
    # NVIDIA HGX B200 and GB200 NVL72 data sheets, sparse peaks per GPU in PFLOP/s. B200 and GB200
    # have 4.5 and 5 in BF16, 9 and 10 in FP8, 18 and 20 in FP4.
    Peak(rf"b200{NUMBERS}", memory=178.4, bf16=2250.0, fp8=4500.0, fp4=9000.0, capability=(10, 0)),
    Peak(rf"gb200{NUMBERS}", memory=184.3, bf16=2500.0, fp8=5000.0, fp4=10000.0),
    # NVIDIA HGX B300 and GB300 NVL72 data sheets, sparse peaks per GPU in PFLOP/s. B300 and GB300
    # have 4.5 and 5 in BF16, 9 and 10 in FP8. The dense FP4 peak of a GB300 is 15. For a B300 the
    # data sheets disagree (13.1 or 13.5), so the table has no FP4 peak.
    Peak(rf"b300(?: sxm6)?(?: ac)?{NUMBERS}", memory=267.6, bf16=2250.0, fp8=4500.0),
    Peak(rf"gb300{NUMBERS}", memory=276.5, bf16=2500.0, fp8=5000.0, fp4=15000.0),
    # NVIDIA L40S data sheet: BF16 is 362.05 dense and 733 sparse, FP8 is 733 dense and 1,466
    # sparse.
    Peak("l40s", memory=44.3, bf16=362.05, fp8=733.0, fp32=91.6),
    # NVIDIA RTX A6000 data sheet: BF16 is 309.7 sparse. This agrees with 154.8 dense in the GA102
    # white paper. NVIDIA RTX 6000 Ada data sheet: FP8 is 1,457 sparse.
    Peak("rtx a6000", memory=47.4, bf16=154.8, fp32=38.7),
    Peak("rtx 6000 ada generation", memory=47.4, bf16=364.2, fp8=728.5, fp32=91.1),
    # NVIDIA RTX PRO 6000 Blackwell data sheets: FP4 is 4,000 sparse for the Server Edition and the
    # Workstation Edition, and 3,511 sparse for the Max-Q. FP32 is 120 for the Server Edition, 125
    # for the Workstation Edition, and 110 for the Max-Q. FP8 has half the throughput of FP4, and
    # BF16 has half the throughput of FP8. Unlike GeForce cards, these cards do not halve the
    # throughput for FP32 accumulation.
    Peak(
        "rtx pro 6000 blackwell server edition",
        memory=94.9,
        bf16=500.0,
        fp8=1000.0,
        fp4=2000.0,
        fp32=120.0,
    ),
    Peak(
        "rtx pro 6000 blackwell workstation edition",
        memory=94.9,
        bf16=500.0,
        fp8=1000.0,
        fp4=2000.0,
        fp32=125.0,
    ),
    Peak(
        "rtx pro 6000 blackwell max q workstation edition",
        memory=94.9,
        bf16=438.9,
        fp8=877.8,
        fp4=1755.5,
        fp32=110.0,
    ),
    # NVIDIA GA102, Ada and RTX Blackwell white papers: dense peaks with FP32 accumulation. They are
    # half of the peaks with FP16 accumulation.
    Peak("rtx 3090", memory=23.5, bf16=71.0, fp32=35.6),
    Peak("rtx 4090", memory=23.5, bf16=165.2, fp8=330.3, fp32=82.6),
    Peak("rtx 5090", memory=31.3, bf16=209.5, fp8=419.0, fp4=1676.0, fp32=104.8),
)


def peak(device_name: str | None, dtype: PeakDtype) -> float | None:
    """Return the dense peak of a device in TFLOP/s, or None if it is unknown.

    Args:
        device_name: Result of `torch.cuda.get_device_name`, such as "NVIDIA H100 80GB HBM3" or
            "NVIDIA A100-SXM4-80GB". None for a device without a name.
        dtype: Dtype of the products' operands.
    """
    entry = entry_of(device_name)
    return getattr(entry, dtype) if entry else None


def entry_of(device_name: str | None) -> Peak | None:
    """Return the table entry of a device, or None if it is unknown."""
    # "NVIDIA A100-SXM4-80GB" -> "a100 sxm4 80gb"
    words = re.split(r"[\s\-_]+", (device_name or "").strip().lower())
    name = " ".join(word for word in words if word not in {"nvidia", "geforce", "tesla"})
    return next((entry for entry in PEAKS if re.fullmatch(entry.pattern, name)), None)
