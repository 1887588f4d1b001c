"""Writes the MDS folders beside this file with the format's own library, and in expected.json what that library reads back.

reference: the reference's layout: three columns in a custom encoding registered as `uint32` (raw array bytes, no fixed size),
`attention_mask` with document lengths, positions that continue in cut documents; two shards, sha1 and xxh64.
zstd: `ndarray:uint16:32` and `ndarray:uint16`, positions that restart, zstd:7, sha1 and xxh64 of raw and compressed files.
encodings: every encoding that the reader takes, arrays of several dtypes and shapes, sha256.

Run with mosaicml-streaming 0.13.0, installed somewhere of its own (it pins old versions of NumPy and transformers). Tests need
only what it wrote.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from streaming import LocalDataset, MDSWriter
from streaming.base.compression import decompress
from streaming.base.format.mds import encodings

HERE = Path(__file__).parent
LENGTH = 32
EXPECTED: dict[str, list[dict]] = {}
BUILTIN_UINT32 = encodings._encodings["uint32"]


class RawUInt32(encodings.Encoding):
    """What the reference registers under the name of the built-in scalar: the array's own little-endian bytes."""

    def encode(self, obj: np.ndarray) -> bytes:
        return obj.tobytes()

    def decode(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint32)


def packed_documents(packs: int, seed: int, resets: bool = False) -> list[dict[str, np.ndarray]]:
    """Documents concatenated and cut at LENGTH; positions of a cut document continue, or restart with `resets`."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 2 * LENGTH, size=packs * LENGTH)
    positions = np.concatenate([np.arange(n) for n in lengths])[: packs * LENGTH].reshape(packs, LENGTH)
    samples = []
    for row in positions:
        starts = np.flatnonzero(np.concatenate([[True], row[1:] == 0]))
        documents = np.diff(np.concatenate([starts, [LENGTH]]))
        row = np.concatenate([np.arange(n) for n in documents]) if resets else row
        ids = rng.integers(0, 50_000, size=LENGTH)
        samples.append({"input_ids": ids, "position_ids": row, "attention_mask": documents})
    return samples


def write(name: str, columns: dict[str, str], samples: list[dict], **options: object) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    with MDSWriter(out=str(folder), columns=columns, **options) as writer:
        for sample in samples:
            writer.write({key: sample[key] for key in columns})
    remember(name)


def remember(name: str) -> None:
    """Store every sample as the library itself reads it."""
    folder = HERE / name
    for packed in folder.rglob("*.zstd"):  # LocalDataset reads raw files only
        packed.with_suffix("").write_bytes(decompress("zstd", packed.read_bytes()))
    samples = [{key: plain(value) for key, value in sample.items()} for sample in LocalDataset(str(folder))]
    for packed in folder.rglob("*.zstd"):
        packed.with_suffix("").unlink()
    EXPECTED[name] = samples


def plain(value: object) -> dict:
    if isinstance(value, np.ndarray | np.generic):
        return {"dtype": value.dtype.name, "shape": list(value.shape), "values": value.tolist()}
    return {"type": type(value).__name__, "values": list(value) if isinstance(value, bytes) else value}


def as_type(samples: list[dict], dtype: str) -> list[dict]:
    return [{key: value.astype(dtype) for key, value in sample.items()} for sample in samples]


def main() -> None:
    columns = ["input_ids", "position_ids", "attention_mask"]

    encodings._encodings["uint32"] = RawUInt32
    reference = as_type(packed_documents(12, seed=1), "uint32")
    write("reference", dict.fromkeys(columns, "uint32"), reference, hashes=["sha1", "xxh64"], size_limit=2000)
    encodings._encodings["uint32"] = BUILTIN_UINT32

    resets = as_type(packed_documents(10, seed=2, resets=True), "uint16")
    write(
        "zstd",
        {"input_ids": f"ndarray:uint16:{LENGTH}", "position_ids": "ndarray:uint16"},
        resets,
        compression="zstd:7",
        hashes=["sha1", "xxh64"],
        size_limit=1200,
    )

    rng = np.random.default_rng(5)
    every = {
        "an_int": "int", "a_str": "str", "a_json": "json", "some_bytes": "bytes",
        "any_array": "ndarray", "typed_array": "ndarray:float32", "shaped_array": "ndarray:int16:2,3",
        **{f"scalar_{t}": t for t in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
        **{f"scalar_{t}": t for t in ("float16", "float32", "float64")},
    }  # fmt: skip
    shapes = [(1,), (300,), (2, 3), (1, 70_000), (4, 1, 2)]
    dtypes = ["uint8", "int64", "float16", "uint8", "float64"]
    samples = [
        {
            "an_int": -(10**12) - i, "a_str": "naïve 漢字" * i,
            "a_json": {"i": i, "list": [None, 1.5]}, "some_bytes": bytes(range(i)),
            "any_array": rng.integers(0, 100, shapes[i]).astype(dtypes[i]),
            "typed_array": rng.standard_normal((i + 1, 2)).astype("float32"),
            "shaped_array": rng.integers(-99, 99, (2, 3)).astype("int16"),
            **{key: i + 7 for key in every if key.startswith("scalar_")},
        }
        for i in range(len(shapes))
    ]  # fmt: skip
    samples[3]["any_array"] = samples[3]["any_array"][:, :260]
    write("encodings", every, samples, hashes=["sha256"])
    (HERE / "expected.json").write_text(json.dumps(EXPECTED) + "\n")


if __name__ == "__main__":
    main()
