"""Checkpoints that somebody has changed and hashed again: refused with the key, before anything is copied."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from foundation.errors import InputError
from pretrain.checkpoint.checkpoint import Checkpoints
from pretrain.checkpoint.state import check_record
from tests.fuzz.files import forge_checkpoint

MODEL = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
RECORD = {
    "progress": {"steps": 9, "step": 4, "tokens": 8, "valid_tokens": 8, "skipped_steps": 0},
    "identity": {"weights": "fp32"},
    "health": {"losses": [1.0], "in_spike": False, "skipped_steps": 0, "consecutive_skips": 0},
    "microbatch": 2,
    "world_size": 1,
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Checkpoints(tmp_path / "checkpoints", keep=1).save(4, MODEL, {"m": torch.zeros(3)}, RECORD)


def load(path: Path, tensors: dict[str, torch.Tensor] | None = None) -> None:
    wanted = {name: torch.full_like(tensor, 7) for name, tensor in MODEL.items()} if tensors is None else tensors
    Checkpoints(path.parent, keep=1).load(path, wanted, {"m": torch.zeros(3)})


def piece(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["model"]["a"]["pieces"][0]


CHANGES = {
    "a file outside": (lambda m: m["files"].update({"../x": {"bytes": 1, "sha256": ""}}), "'../x' lies outside its folder"),
    "a piece outside": (lambda m: piece(m).update(file="../x"), "'../x' lies outside its folder"),
    "a piece in a file that is not hashed": (lambda m: piece(m).update(file="x"), "a lies in x, which it does not list"),
    "an offset that is text": (lambda m: piece(m).update(offset=["x", 0]), r"`model.a.pieces.0.offset.0`: "),
    "a negative offset": (lambda m: piece(m).update(offset=[-1, 0]), r"`model.a.pieces.0.offset.0`: "),
    "a dimension more": (lambda m: piece(m).update(offset=[0, 0, 0]), "differ in their number of dimensions"),
    "a piece that is too large": (lambda m: piece(m).update(shape=[3, 3]), "a piece of a lies outside it"),
    "no step": (lambda m: m.pop("step"), "`step`: Field required"),
    "no format": (lambda m: m.pop("format"), "written in another checkpoint format"),
    "sizes that are text": (lambda m: next(iter(m["files"].values())).update(bytes="many"), "bytes`: "),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_forged_manifest_is_refused_with_what_is_wrong(name: str, saved: Path):
    change, says = CHANGES[name]
    manifest = json.loads((saved / "manifest.json").read_text())
    change(manifest)
    (saved / "manifest.json").write_text(json.dumps(manifest))
    forge_checkpoint(saved, "nothing", {}) if name != "sizes that are text" else rehash(saved)
    tensors = {name: torch.full_like(tensor, 7) for name, tensor in MODEL.items()}
    with pytest.raises(InputError, match=says):
        load(saved, tensors)
    assert all((tensor == 7).all() for tensor in tensors.values())


def rehash(path: Path) -> None:
    content = json.loads((path / "manifest.json").read_text())
    content.pop("sha256")
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(content | {"sha256": digest}))


@pytest.mark.parametrize("change", [{"dtype": "I32"}, {"shape": [3, 2]}, {"dtype": "X"}, {"data_offsets": [0, 2**40]}, None])
def test_a_tensor_file_that_is_not_what_its_manifest_says_is_refused(change: dict | None, saved: Path):
    file = next(saved.glob("model-*"))
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    header["a"] = header["a"] | change if change else 3
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])
    forge_checkpoint(saved, "nothing", {})
    with pytest.raises(InputError, match=r"step-00000004: a cannot be loaded: .*resume from another checkpoint"):
        load(saved)


def test_pieces_that_do_not_cover_a_tensor_are_refused(saved: Path):
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["model"]["a"]["pieces"] = []
    (saved / "manifest.json").write_text(json.dumps(manifest))
    forge_checkpoint(saved, "nothing", {})
    with pytest.raises(InputError, match=r"cannot be used: a is not whole in it"):
        load(saved)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"progress": {"step": "4"}}, "`progress."),
        ({"progress": RECORD["progress"] | {"step": 4.0}}, "`progress.step`"),
        ({"progress": RECORD["progress"] | {"left_out": 2**62}}, "`progress.left_out`"),
        ({"progress": RECORD["progress"] | {"skipped_steps": 5}}, "`progress`: 5 of 4 steps cannot have been skipped"),
        ({"identity": {"weights": "fp4"}}, "`identity.weights`"),
        ({"identity": {"weights": "fp32", "optimizer.learning_rate": "0.1"}}, "`identity.optimizer.learning_rate`"),
        ({"health": RECORD["health"] | {"losses": [float("nan")]}}, "`health.losses.0`"),
        ({"health": None}, "`health`"),
        ({"microbatch": 0}, "`microbatch`"),
        ({"world_size": []}, "`world_size`"),
    ],
)
def test_a_record_of_wrong_types_is_refused_with_the_key(change: dict, says: str, saved: Path):
    check_record(RECORD, saved)
    with pytest.raises(InputError, match=rf"step-00000004: its state.json is not a training state of this version: {says}"):
        check_record(RECORD | change, saved)


def test_a_checkpoint_whose_files_are_links_to_others_is_refused(saved: Path, tmp_path: Path):
    file = next(saved.glob("model-*"))
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="a link that leads outside its folder"):
        load(saved)
