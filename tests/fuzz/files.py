"""Files that are read: sources of text, packs, checkpoints, run folders; damaged, or forged so that hashes fit."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import pickle
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zstandard

from foundation.errors import InputError
from packing.arrow import Pack, PackWriter
from packing.chunks import TextTemplate, read_chunk
from packing.inspection import describe, open_splits
from packing.settings import DataSettings
from packing.sources import open_source
from packing.store import open_packs
from packing.token_bin import TokenBin
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.state import TrainState, check_record
from pretrain.metrics.run_folder import RunFolder, check_ours
from pretrain.metrics.run_record import last_screen, read_run
from pretrain.metrics.trackers import cut_back
from tests.fuzz.damage import Spec, copied, do_change, do_damage, draw_change, draw_damage, files_of
from tests.fuzz.harness import AcceptedWrongly

LENGTH = 32
TEXTS = [f"document {number} " + "one two three " * (1 + number % 7) for number in range(40)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
CHECKED = (".gz", ".zst", ".parquet")  # what says by itself when a part of it is missing
ARROW, MDS = "packs", "reference"


class World:
    """Whole inputs of every kind, in a folder that only copies are made of."""

    def __init__(self, folder: Path, mds: Path) -> None:
        self.folder = folder
        self.sources = self._write_sources(folder / "sources")
        self.arrow = self._write_packs(folder / ARROW)
        self.mds = Path(shutil.copytree(mds, folder / MDS))
        self.bin = self._write_bin(folder / "bin")
        self.tensors = {"a.weight": torch.arange(24.0).reshape(4, 6), "b.weight": torch.arange(5.0).bfloat16()}
        self.state = {"moment/a.weight": torch.ones(4, 6)}
        self.checkpoint = self._write_checkpoint(folder / "checkpoints")
        self.run_folder = self._write_run(folder / "run")
        self.seen = {path: self.content(path) for path in (self.arrow, self.mds, self.bin)}

    # ── Whole ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @staticmethod
    def _write_sources(folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "a.jsonl").write_bytes(LINES)
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(LINES, mtime=0))
        (folder / "a.jsonl.zst").write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(LINES))
        (folder / "a.json").write_text(json.dumps([{"text": text} for text in TEXTS]))
        (folder / "a.txt").write_text(TEXTS[0])
        (folder / "a.txt.gz").write_bytes(gzip.compress(TEXTS[0].encode(), mtime=0))
        pq.write_table(pa.table({"text": TEXTS}), folder / "a.parquet", write_page_checksum=True, row_group_size=10)
        parts = folder / "parts"
        parts.mkdir()
        for number in range(4):
            part = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS[number::4]).encode()
            (parts / f"{number}.jsonl.gz").write_bytes(gzip.compress(part, mtime=0))
        return folder

    @staticmethod
    def _write_packs(folder: Path) -> Path:
        rng = np.random.default_rng(0)
        with PackWriter(folder, LENGTH) as writer:
            for split, count in (("train", 20), ("held_out", 4)):
                for _ in range(count):
                    lengths = np.array([5, 7, LENGTH - 12 - int(rng.integers(3))], np.int32)
                    writer.add(split, Pack(rng.integers(60, size=LENGTH).astype(np.uint32), lengths))
            names = ("documents", "tokens", "packs", "cut_documents", "held_out_documents", "held_out_packs", "skipped_lines")
            statistics = {name: 3 for name in (*names, "empty_documents", "source_bytes")} | {"fill": 0.5, "first_skipped": None}
            statistics |= {"lengths": {"median": 3.0, "longest": 9}}
            tokenizer = {"name": "x", "vocab_size": 60, "fingerprint": "ab" * 32}
            writer.finish(settings={"seed": 1}, statistics=statistics, tokenizer=tokenizer)
        return folder

    @staticmethod
    def _write_bin(folder: Path) -> Path:
        folder.mkdir()
        tokens = (np.arange(320) % 60).astype("<u2")
        tokens.tofile(folder / "train.bin")
        digest = hashlib.sha256(tokens.tobytes()).hexdigest()
        (folder / "train.bin.sha256").write_text(f"{digest}  train.bin\n")
        (folder / "meta.json").write_text(json.dumps({"dtype": "uint16", "vocab_size": 60}))
        meta = {"vocab_size": 60, "dtype": "uint16", "stoi": {chr(97 + i): i for i in range(26)}, "itos": list("abcdefgh" * 40)}
        (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
        return folder

    def _write_checkpoint(self, folder: Path) -> Path:
        health = {"losses": [2.0, 1.5], "in_spike": False, "skipped_steps": 0, "consecutive_skips": 0}
        record = TrainState(10, step=4, tokens=128).record({"weights": "fp32", "seed": 1})
        record |= {"health": health, "microbatch": 2, "world_size": 1}
        return Checkpoints(folder, keep=1).save(4, self.tensors, self.state, record)

    @staticmethod
    def _write_run(folder: Path) -> Path:
        with RunFolder(folder) as run:
            recipe = {"name": "x", "run_dir": str(folder), "model": {}, "data": {}, "batch": {"tokens": 64}, "optimizer": {}}
            run.write_yaml(run.config, recipe | {"train": {"steps": 6}, "weights": "fp32"})
            run.write_json(run.environment, {"python": "3.11", "data_fingerprint": "abc"})
            run.write_json(run.audit, {"effective": "bf16", "backend": "torch"})
            run.write_json(run.summary, {"steps": 6})
            figures = {"tokens": 64, "epoch": 0.1, "loss": 2.0, "step_ms": 5.0, "tokens_per_second": 9.0, "data_wait_ms": 0.1}
            steps = [{"step": n} | figures | {"memory_gib": 0.5, "recompiles": 0} for n in range(1, 7)]
            steps.append({"step": 6, "event": "evaluation", "held_out_loss": 2.0, "held_out_perplexity": 7.4})
            run.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
        return folder

    # ── Read ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

    @staticmethod
    def documents(path: Path, on_bad_line: str = "error") -> list[str]:
        """What `prepare` would tokenise of the source at `path`."""
        settings = DataSettings(
            packs="/nowhere/packs", source=str(path), tokenizer="x", on_bad_line=on_bad_line, processes=1, format="auto"
        )
        template = TextTemplate.parse(settings.text)
        chunks = open_source(settings).chunks()
        return [text for chunk in chunks for text in read_chunk(chunk, template, on_bad_line == "skip").documents]

    @staticmethod
    def content(path: Path) -> list[Any]:
        """Every pack at `path`, of any format, as plain values."""
        is_bin = path.is_dir() and any(path.glob("*.bin"))
        settings = DataSettings(packs=path, length=LENGTH, end_token=7 if is_bin else None)
        found: list[Any] = []
        for split in ("train", "held_out"):
            packs = open_packs(settings, split)
            for index in range(0 if packs is None else len(packs)):
                pack = packs[index]
                same = np.array_equal(packs.lengths(index), pack.lengths)
                found.append([split, pack.input_ids.tolist(), pack.lengths.tolist(), pack.first_position, same])
        return found

    def load_checkpoint(self, path: Path) -> dict[str, Any]:
        checkpoints = Checkpoints(path.parent, keep=1)
        record = checkpoints.read_state(path)
        check_record(record, path)
        TrainState.from_record(record, 10, path)
        model = {name: torch.zeros_like(tensor) for name, tensor in self.tensors.items()}
        state = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        checkpoints.load(path, model, state)
        return model | state

    # ── Kinds ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

    def draw_source(self, rng: random.Random) -> Spec:
        names = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.txt", "a.txt.gz", "a.parquet", "parts"]
        spec = draw_damage(rng) | {"name": rng.choice(names), "part": rng.randrange(4), "skip": rng.random() < 0.2}
        if spec["how"] == "grow" and rng.random() < 0.5:
            spec["how"] = "not UTF-8"
        return spec

    def run_source(self, spec: Spec, folder: Path) -> None:
        whole, path = self.sources / spec["name"], folder / spec["name"]
        if whole.is_dir():
            shutil.copytree(whole, path)
            target = path / f"{spec['part']}.jsonl.gz"
        else:
            target = Path(shutil.copy(whole, path))
        if spec["how"] == "not UTF-8":
            bad = pa.array([b"ok", b"\xff\xfe"]).cast(pa.binary()).view(pa.string()) if path.suffix == ".parquet" else None
            if bad is not None:
                pq.write_table(pa.table({"text": bad}), path)
            elif not path.is_dir():
                path.write_bytes(path.read_bytes() + b'{"text": "\xff"}\n')
        else:
            do_damage(target, spec)
        found = self.documents(path, "skip" if spec["skip"] else "error")
        expected = [TEXTS[0]] if whole.name.startswith("a.txt") else TEXTS
        if whole.is_dir() and spec["how"] == "stand-in" and spec["as"] == "folder":
            return  # an empty folder holds no text
        if sorted(found) == sorted(expected) or spec["skip"] or spec["how"] in ("gone", "not UTF-8"):
            return
        if path.suffix in CHECKED or path.is_dir():
            raise AcceptedWrongly(f"{len(found)} documents of {len(expected)}, or others than were written")
        if spec["how"] == "flip" and len(found) != len(expected):
            raise AcceptedWrongly(f"{len(found)} documents of {len(expected)}")

    def draw_packs(self, rng: random.Random) -> Spec:
        return draw_damage(rng) | {"file": rng.random()}

    def _run_packs(self, whole: Path, spec: Spec, folder: Path) -> None:
        path = copied(whole, folder)
        files = files_of(path)
        do_damage(files[int(spec["file"] * len(files))], spec)
        if whole == self.bin and spec["how"] in ("gone", "stand-in", "empty", "cut", "grow", "flip", "noise"):
            named = files[int(spec["file"] * len(files))].name
            self.content(path) if named != "train.bin.sha256" else self._read(path)
            return
        if self.content(path) != self.seen[whole]:
            raise AcceptedWrongly("other packs than were written")
        self._read(path)

    def _read(self, path: Path) -> None:
        """As `python -m packing inspect` does."""
        splits = open_splits(path, LENGTH if path.name == "bin" else None, None)
        list(describe(path, splits))

    def run_arrow(self, spec: Spec, folder: Path) -> None:
        self._run_packs(self.arrow, spec, folder)

    def run_mds(self, spec: Spec, folder: Path) -> None:
        self._run_packs(self.mds, spec, folder)

    def draw_bin(self, rng: random.Random) -> Spec:
        spec = draw_damage(rng)
        return spec | {"file": rng.choice(["meta.json", "meta.pkl", "meta.pkl", "train.bin", "train.bin.sha256"])}

    def run_bin(self, spec: Spec, folder: Path) -> None:
        path = copied(self.bin, folder)
        if spec["file"] == "meta.pkl":
            (path / "meta.json").unlink()
        do_damage(path / spec["file"], spec)
        found = self.content(path)
        if spec["file"] == "train.bin" and found != self.seen[self.bin]:
            raise AcceptedWrongly("other tokens than were written, though a hash lies beside them")
        TokenBin(path / "train.bin", LENGTH).verify()

    def draw_checkpoint(self, rng: random.Random) -> Spec:
        return draw_damage(rng) | {"file": rng.random()}

    def run_checkpoint(self, spec: Spec, folder: Path) -> None:
        path = copied(self.checkpoint, folder)
        files = files_of(path)
        do_damage(files[int(spec["file"] * len(files))], spec)
        loaded = self.load_checkpoint(path)
        if any(not torch.equal(loaded[name], tensor) for name, tensor in (self.tensors | self.state).items()):
            raise AcceptedWrongly("other tensors than were saved")

    def draw_forged(self, rng: random.Random) -> Spec:
        what = rng.choice(["packs.json", "manifest.json", "state.json", "safetensors", "index.json", "arrow", "meta.json"])
        return draw_change(rng) | {"what": what, "damage": draw_damage(rng, stand_ins=False)}

    def run_forged(self, spec: Spec, folder: Path) -> None:
        """One value, or some bytes, changed by somebody who makes the hashes fit."""
        match spec["what"]:
            case "packs.json":
                path = copied(self.arrow, folder)
                manifest = json.loads((path / "packs.json").read_text())
                manifest.pop("checksum")
                forge_packs(path, do_change(manifest, spec))
                self.content(path)
                self._read(path)
            case "arrow":
                path = copied(self.arrow, folder)
                shard = next((path / "train").glob("*.arrow"))
                do_damage(shard, spec["damage"])
                if not shard.exists():
                    raise InputError("gone")
                manifest = json.loads((path / "packs.json").read_text())
                manifest.pop("checksum")
                digest = hashlib.sha256(shard.read_bytes()).hexdigest()
                manifest["splits"]["train"]["files"][0] |= {"bytes": shard.stat().st_size, "sha256": digest}
                forge_packs(path, manifest)
                self.content(path)
                self._read(path)
            case "index.json":
                path = copied(self.mds, folder)
                index = json.loads((path / "index.json").read_text())
                (path / "index.json").write_text(json.dumps(do_change(index, spec)))
                self.content(path)
                self._read(path)
            case "meta.json":
                path = copied(self.bin, folder)
                meta = json.loads((path / "meta.json").read_text())
                (path / "meta.json").write_text(json.dumps(do_change(meta, spec)))
                self.content(path)
            case kind:
                path = copied(self.checkpoint, folder)
                forge_checkpoint(path, kind, spec)
                self.load_checkpoint(path)

    def draw_run(self, rng: random.Random) -> Spec:
        damage = draw_damage(rng) | {"file": rng.random()}
        return (
            {"damage": damage} if rng.random() < 0.5 else {"change": draw_change(rng), "file": rng.random(), "line": rng.random()}
        )

    def run_run(self, spec: Spec, folder: Path) -> None:
        """A report on a run folder, and a resume into it."""
        path = copied(self.run_folder, folder)
        files = files_of(path)
        if "damage" in spec:
            do_damage(files[int(spec["damage"]["file"] * len(files))], spec["damage"])
        else:
            file = files[int(spec["file"] * len(files))]
            if file.suffix == ".yaml":
                file.write_text(json.dumps(do_change({"name": "x", "batch": {"tokens": 3}}, spec["change"])))
            elif file.suffix == ".json":
                file.write_text(json.dumps(do_change(json.loads(file.read_text()), spec["change"])))
            else:
                lines = file.read_text().splitlines()
                at = int(spec["line"] * len(lines))
                lines[at] = json.dumps(do_change(json.loads(lines[at]), spec["change"]))
                file.write_text("\n".join(lines) + "\n")
        check_ours(path)
        try:
            cut_back(path / "metrics.jsonl", 4)
        except OSError as error:  # what starting the tracker turns into a message
            raise InputError(str(error)) from None
        run = read_run(path)
        last_screen(run, RunFolder(path, owner=False))


def forge_packs(path: Path, manifest: Any) -> None:
    checksum = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    content = manifest | {"checksum": checksum} if isinstance(manifest, dict) else manifest
    (path / "packs.json").write_text(json.dumps(content))


def forge_checkpoint(path: Path, what: str, spec: Spec) -> None:
    """Change state.json, the header of a tensor file, or the manifest, and hash everything again."""
    manifest = json.loads((path / "manifest.json").read_text())
    manifest.pop("sha256")
    if what == "state.json":
        state = json.loads((path / "state.json").read_text())
        (path / "state.json").write_text(json.dumps(do_change(state, spec)))
    elif what == "safetensors":
        file = next(path.glob("model-*.safetensors"))
        data = file.read_bytes()
        size = struct.unpack("<Q", data[:8])[0]
        if spec["damage"]["how"] in ("flip", "cut", "noise"):
            do_damage(file, spec["damage"] | {"at": spec["damage"]["at"] * (8 + size) / len(data)})
        else:
            header = json.dumps(do_change(json.loads(data[8 : 8 + size]), spec)).encode()
            file.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
    for name in os.listdir(path):
        if name in manifest["files"]:
            data = (path / name).read_bytes()
            manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    if what == "manifest.json":
        manifest = do_change(manifest, spec)
    if isinstance(manifest, dict):
        manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(manifest))
