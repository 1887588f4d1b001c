"""What can happen to a file or to a value, drawn at random and done as the spec says."""

from __future__ import annotations

import os
import random
import shutil
import socket
from pathlib import Path
from typing import Any

Spec = dict[str, Any]

# What stands where a file is expected.
STAND_INS = ("fifo", "folder", "socket", "dead link", "/dev/zero", "/dev/null", "link to itself")
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 7, 2**31, 2**63, 10**30, -(2**63), 0.5, 1e38, 1e308, -0.0, "", "x", "../x", "/etc/passwd"),
    *([], [1, 2], [None], {}, {"a": 1}, {"name": 3}, "\x7f", "ü" * 300, [[[[[]]]]], "0" * 5000),
)


def draw_damage(rng: random.Random, *, stand_ins: bool = True) -> Spec:
    """A change of a file's bytes, or of what kind of file it is."""
    how = rng.choice(
        ["flip", "flip", "flip", "cut", "cut", "grow", "empty", "noise", "gone", *(["stand-in"] if stand_ins else [])]
    )
    return {"how": how, "at": rng.random(), "bit": rng.randrange(8), "as": rng.choice(STAND_INS), "seed": rng.randrange(2**31)}


def do_damage(path: Path, spec: Spec) -> None:
    data = bytearray(path.read_bytes())
    at = min(int(spec["at"] * len(data)), max(len(data) - 1, 0))
    match spec["how"]:
        case "flip" if data:
            data[at] ^= 1 << spec["bit"]
        case "cut":
            del data[at:]
        case "grow":
            data += random.Random(spec["seed"]).randbytes(1 + at % 64)
        case "empty":
            data.clear()
        case "noise":
            data[at : at + 16] = random.Random(spec["seed"]).randbytes(16)
        case "gone":
            path.unlink()
            return
        case "stand-in":
            stand_in(path, spec["as"])
            return
    path.write_bytes(data)


def stand_in(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "socket":
            bound = socket.socket(socket.AF_UNIX)
            # A socket's address may have 108 bytes: it is named from its own folder.
            here = os.open(".", os.O_RDONLY)
            try:
                os.chdir(path.parent)
                bound.bind(path.name)
            finally:
                os.fchdir(here)
                os.close(here)
        case "dead link":
            path.symlink_to(path.with_name("nowhere"))
        case "link to itself":
            path.symlink_to(path)
        case _:
            path.symlink_to(kind)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def draw_change(rng: random.Random) -> Spec:
    """A change of one value somewhere in a tree of JSON values: which one, and into what."""
    return {"steps": [rng.random() for _ in range(8)], "value": rng.choice(VALUES), "drop": rng.random() < 0.15}


def do_change(tree: Any, spec: Spec) -> Any:
    """`tree` with the change done; a path of random steps leads to the value."""
    holder, key, value = None, None, tree
    for step in spec["steps"]:
        if not isinstance(value, (dict, list)) or not value:
            break
        keys = list(value) if isinstance(value, dict) else range(len(value))
        holder, key = value, keys[int(step * len(keys))]
        value = holder[key]
        if step > 0.85:  # not always a leaf
            break
    if holder is None:
        return spec["value"]
    if spec["drop"]:
        del holder[key]
    else:
        holder[key] = spec["value"]
    return tree


def copied(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder / source.name, symlinks=True))
